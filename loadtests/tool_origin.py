"""The tool server of the load tests: Streamable HTTP of both eras, as cheap as can be.

It echoes. `/stats` says how many requests came and which sessions of the older era are open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import httptools
import uvloop

TEXT = "x" * 200


class Books:
    """What the server has seen."""

    requests = 0
    begun = 0
    sessions: set[str]
    streams = 0

    def __init__(self) -> None:
        self.sessions = set()


class Connection(asyncio.Protocol):
    """One connection: requests in, answers out, in order."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self._transport: Any = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._streaming = False
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._body: list[bytes] = []
        self._session = ""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        if self._streaming:
            self.books.streams -= 1

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"mcp-session-id":
            self._session = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method()
        body = b"".join(self._body)
        url, session = self._url, self._session
        self._reset()
        if url == b"/stats":
            stats = {"requests": self.books.requests, "sessions": len(self.books.sessions),
                     "streams": self.books.streams, "begun": self.books.begun}  # fmt: skip
            self._say(200, json.dumps(stats).encode())
            return
        self.books.requests += 1
        if method == b"GET":
            self._streaming = True
            self.books.streams += 1
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
        elif method == b"DELETE":
            self.books.sessions.discard(session)
            self._say(200, b"")
        else:
            self._message(json.loads(body), session)

    def _message(self, message: dict[str, Any], session: str) -> None:
        ident, method = message.get("id"), message.get("method")
        if ident is None:
            self._say(202, b"")
        elif method == "initialize":
            self.books.begun += 1
            name = f"s{self.books.begun}"
            self.books.sessions.add(name)
            result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
                      "serverInfo": {"name": "load", "version": "1"}}  # fmt: skip
            self._result(ident, result, session=name)
        elif session and session not in self.books.sessions:
            self._say(404, b"")
        elif method == "server/discover":
            result = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}},
                      "resultType": "complete", "ttlMs": 0, "cacheScope": "public"}  # fmt: skip
            self._result(ident, result)
        else:
            content = [{"type": "text", "text": TEXT}]
            self._result(ident, {"content": content, "resultType": "complete"})

    def _result(self, ident: Any, result: dict[str, Any], *, session: str = "") -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": ident, "result": result}).encode()
        self._say(200, body, f"mcp-session-id: {session}\r\n" if session else "")

    def _say(self, status: int, body: bytes, more: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}"
        self._transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)


async def serve(port: int) -> None:
    """Serve until the process ends."""
    books = Books()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(books), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))
