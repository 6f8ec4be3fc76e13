"""The upstream of the load tests: an asyncio protocol over httptools, cheap enough to share a core.

It answers every POST by what the front of its body asks for, `{"user":"origin …","stream":true,…`:
the words stand in a field that every proxy passes on as it is.

    no word               a JSON answer of about 900 bytes, with usage
    "stream":true         server-sent events of about 270 bytes with varied text, then usage
    delay=S               that long before the head
    events=N              number of events (default 32)
    gap=S                 seconds between events (default 0: one write per event, one per loop turn)
    lockstep id=ID        the next event is sent when POST /ack/ID says that the last was seen

GET /stats tells how many requests and connections there were, and how many are open.
Reads no clock but the loop's; keeps nothing of a request after its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from typing import Any

import httptools
import uvloop

WORDS = (
    "harbour", "lantern", "quiet", "seven", "rivers", "carry", "copper", "leaves", "under",
    "bridges", "while", "patient", "engines", "count", "every", "token", "before",
    "morning", "returns", "slowly",
)  # fmt: skip


def text(number: int, words: int) -> str:
    """Varied words: equal chunks would trip guards against repetition in some peers."""
    return " ".join(WORDS[(number * 7 + at * (3 + number % 5)) % len(WORDS)] for at in range(words))


def chat_answer() -> bytes:
    """A Chat Completions answer; about 900 bytes."""
    return json.dumps(
        {
            "id": "chatcmpl-0000000000000000000000000000",
            "object": "chat.completion",
            "created": 1_790_000_000,
            "model": "bench-1",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text(3, 75)},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 60,
                "completion_tokens": 75,
                "total_tokens": 135,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "system_fingerprint": "fp_0000000000",
        },
        separators=(",", ":"),
    ).encode()


def event(number: int) -> bytes:
    """One event of a stream; about 270 bytes."""
    value = {
        "id": "chatcmpl-0000000000000000000000000000",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": "bench-1",
        "system_fingerprint": "fp_0000000000",
        "choices": [
            {"index": 0, "delta": {"content": text(number, 6) + " "}, "finish_reason": None}
        ],
    }
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def ending(events: int) -> bytes:
    """The last events: finish, usage, [DONE]."""
    base = {
        "id": "chatcmpl-0000000000000000000000000000",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": "bench-1",
    }
    stop = {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"prompt_tokens": 60, "completion_tokens": events * 6, "total_tokens": 60 + events * 6}
    parts = [stop, {**base, "choices": [], "usage": usage}]
    lines = [b"data: " + json.dumps(one, separators=(",", ":")).encode() + b"\n\n" for one in parts]
    return b"".join(lines) + b"data: [DONE]\n\n"


EVENTS = [event(number) for number in range(64)]
JSON = chat_answer()
JSON_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(JSON)
)
JSON_ANSWER = JSON_HEAD + JSON
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """The bytes as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKS = [chunk(data) for data in EVENTS]


FRONT = 256
"""Bytes of a body that are looked at."""


def asked(front: bytes) -> dict[bytes, bytes]:
    """The words of `"user":"origin …"`."""
    text = front.partition(b'"user":"origin ')[2].partition(b'"')[0]
    return {name: value for name, _, value in (word.partition(b"=") for word in text.split())}


class Origin:
    """Counts, and the acknowledgements that lockstep streams wait for."""

    def __init__(self) -> None:
        self.requests = 0
        self.connections = 0
        self.open = 0
        self.acks: dict[str, asyncio.Event] = {}

    def stats(self) -> bytes:
        """The counts as JSON."""
        return json.dumps(
            {"requests": self.requests, "connections": self.connections, "open": self.open}
        ).encode()


class Link(asyncio.Protocol):
    """One connection: small answers are written at once, streams by a task."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._transport: Any = None
        self._parser: Any = None
        self._target = b""
        self._front = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._origin.connections += 1
        self._origin.open += 1

    def connection_lost(self, _: Exception | None) -> None:
        self._origin.open -= 1
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    # --- httptools ---

    def on_message_begin(self) -> None:
        self._front = b""

    def on_url(self, url: bytes) -> None:
        self._target = url

    def on_body(self, body: bytes) -> None:
        if len(self._front) < FRONT:
            self._front += body[:FRONT]

    def on_message_complete(self) -> None:
        origin = self._origin
        if self._target.startswith(b"/stats"):
            self._plain(origin.stats())
            return
        if self._target.startswith(b"/ack/"):
            waiting = origin.acks.get(self._target[5:].decode())
            if waiting is not None:
                waiting.set()
            self._plain(b"{}")
            return
        origin.requests += 1
        words = asked(self._front) if b"origin " in self._front else {}
        delay = float(words.get(b"delay", b"0"))
        if b'"stream":true' in self._front:
            self._task = asyncio.get_running_loop().create_task(self._events(words, delay))
        elif delay:
            asyncio.get_running_loop().call_later(delay, self._transport.write, JSON_ANSWER)
        else:
            self._transport.write(JSON_ANSWER)

    def _plain(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    async def _events(self, words: dict[bytes, bytes], delay: float) -> None:
        count = int(words.get(b"events", b"32"))
        gap = float(words.get(b"gap", b"0"))
        name = words.get(b"id", b"").decode()
        lockstep = b"lockstep" in words
        write = self._transport.write
        if delay:
            await asyncio.sleep(delay)
        write(SSE_HEAD)
        for number in range(count):
            if lockstep:
                self._origin.acks[name] = asyncio.Event()
            write(CHUNKS[number % len(CHUNKS)])
            if lockstep:
                await self._origin.acks[name].wait()
            else:
                await asyncio.sleep(gap)
        self._origin.acks.pop(name, None)
        write(chunk(ending(count)) + b"0\r\n\r\n")


async def serve(port: int) -> None:
    """Listen until cancelled; prints `ready PORT`."""
    origin = Origin()
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    server = await loop.create_server(lambda: Link(origin), sock=sock, backlog=4096)
    print("ready", sock.getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(serve(options.port))


if __name__ == "__main__":
    main()
