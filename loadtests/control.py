"""The control: a frozen pass-through that every measurement runs beside the gateway.

uvicorn, one pure ASGI callable and aiohttp, without identity, limits, counting or log. It imports
nothing of ours and stays as it is when the product's transport changes: a ratio to it means the
same next year. Change it never; if it must be changed, its reference figures in measure.py change
too.

    python -m loadtests.control --port 0 --upstream http://127.0.0.1:9000
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from typing import Any

import aiohttp
import uvicorn
from yarl import URL

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
     b"transfer-encoding", b"upgrade", b"host", b"content-length")
)  # fmt: skip


class Control:
    """Relays every request to one upstream, byte for byte."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.rstrip("/")
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in HOP_BY_HOP
        ]
        target = scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        assert self.session is not None
        async with self.session.request(
            scope["method"], URL(self.upstream + target, encoded=True), data=body, headers=headers
        ) as answer:
            await send(
                {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": [
                        (name.lower(), value)
                        for name, value in answer.raw_headers
                        if name.lower() not in HOP_BY_HOP or name.lower() == b"content-length"
                    ],
                }
            )
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                    read_bufsize=32768,
                )
                await send({"type": "lifespan.startup.complete"})
            else:
                assert self.session is not None
                await self.session.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


def main() -> None:
    """Serve until told to stop; prints `ready PORT` once it listens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--upstream", required=True)
    options = parser.parse_args()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", options.port))
    print("ready", sock.getsockname()[1], flush=True)
    config = uvicorn.Config(
        Control(options.upstream), loop="uvloop", http="httptools", ws="none", lifespan="on",
        access_log=False, log_level="warning", timeout_keep_alive=75, backlog=4096,
    )  # fmt: skip
    asyncio.Runner(loop_factory=__import__("uvloop").new_event_loop).run(
        uvicorn.Server(config).serve(sockets=[sock])
    )


if __name__ == "__main__":
    main()
