"""One HTTP exchange: read a body within bounds, write an answer at its pace, break it on demand.

ASGI has no word for breaking a connection. `server.py` therefore offers the extension
`tidegate.connection`, which ends it with FIN (`close`) or RST (`reset`) at the transport. Served by
anything else (httpx in process), a break raises `ConnectionBroken` out of the application instead,
which every ASGI client reports as an error of the exchange.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from itertools import islice
from typing import Any, NoReturn, Protocol, TypeAlias

import zstandard

from gateway.clock import Clock
from gateway.emulator.ask import Rejected
from gateway.emulator.chat import Frame
from gateway.emulator.config import Fault
from gateway.emulator.meters import HeaderPairs
from gateway.units import MICRO

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

EXTENSION = "tidegate.connection"

GLANCE = 0.25
"""Seconds between two looks whether the client is still there."""

TICK = 0.004
"""Seconds: tokens due closer together than this leave in one write."""

SETTLE = 0.02
"""Seconds between the last byte and a break, so that the peer can read what came before."""


class Connection(Protocol):
    """The transport below an exchange."""

    @property
    def gone(self) -> bool:
        """The client has left."""
        ...

    def pending(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        ...

    def close(self) -> None:
        """FIN, however unfinished the answer is."""
        ...

    def reset(self) -> None:
        """RST."""
        ...


class ConnectionBroken(Exception):
    """A fault broke the connection, and nobody below could."""


class Ended(Exception):
    """The exchange is over before its answer was.

    Attributes:
        how: "abandoned" or "faulted".
    """

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Exchange:
    """A request and the answer to it.

    Attributes:
        method, path: Of the request.
        fault: What shall go wrong; set once it is known.
        written: Body bytes sent.
        began: Whether the head was sent.
    """

    __slots__ = (
        "_clock", "_connection", "_headers", "_receive", "_send", "began", "fault", "method",
        "path", "query", "written",
    )  # fmt: skip

    def __init__(self, scope: Message, receive: Receive, send: Send, clock: Clock) -> None:
        self._receive = receive
        self._send = send
        self._clock = clock
        self._headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self._connection: Connection | None = (scope.get("extensions") or {}).get(EXTENSION)
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.fault: Fault | None = None
        self.written = 0
        self.began = False

    # --- reading --------------------------------------------------------------------------------

    def header(self, name: bytes) -> str | None:
        """The first value of that header; the name in lower case."""
        for key, value in self._headers:
            if key == name:
                return value.decode("latin-1")
        return None

    async def read(self, most: int) -> bytes:
        """The whole body, its content coding undone.

        Raises:
            Rejected: It is larger than `most`, or its coding cannot be read.
            Ended: The client left.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Ended("abandoned")
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
            if not message.get("more_body", False):
                break
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        coding = (self.header(b"content-encoding") or "identity").lower()
        return raw if coding == "identity" else _decoded(raw, coding, most)

    # --- waiting --------------------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        """The client has left."""
        return self._connection is not None and self._connection.gone

    async def wait(self, seconds: float) -> None:
        """Time has passed, and the client is still there.

        Raises:
            Ended: It is not.
        """
        while seconds > 0:
            step = min(seconds, GLANCE)
            await self._clock.sleep(step)
            seconds -= step
            if self.gone:
                raise Ended("abandoned")

    async def silence(self, seconds: float) -> None:
        """Nothing happens for so long; for 0 until the client leaves.

        Raises:
            Ended: The client left.
        """
        if seconds > 0:
            await self.wait(seconds)
            return
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise Ended("abandoned")

    async def snap(self, *, reset: bool) -> NoReturn:
        """The connection is broken.

        Raises:
            Ended: Always, once it is.
            ConnectionBroken: Where nobody below can break it.
        """
        connection = self._connection
        if connection is None:
            raise ConnectionBroken("reset" if reset else "cut")
        if self.began:
            while connection.pending() and not connection.gone:
                await self._clock.sleep(0.001)
            await self._clock.sleep(SETTLE)
        if reset:
            connection.reset()
        else:
            connection.close()
        # Return only when the server has noticed, or it would answer for us.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise Ended("faulted")

    # --- writing --------------------------------------------------------------------------------

    async def head(self, status: int, headers: HeaderPairs) -> None:
        """The head is out, after whatever a fault does before it."""
        fault = self.fault
        if fault is not None:
            await self._before_head(fault)
        self.began = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _before_head(self, fault: Fault) -> None:
        nowhere = fault.after_bytes is None and fault.after_events is None
        if fault.action == "slow_first_byte":
            await self.wait(fault.seconds)
        elif fault.action == "stall" and nowhere:
            await self.silence(fault.seconds)
        elif fault.action in ("cut", "reset") and nowhere:
            await self.snap(reset=fault.action == "reset")

    async def body(self, data: bytes, *, more: bool) -> None:
        """The bytes are out, as far as a fault lets them.

        Raises:
            Ended: The client left, or a fault struck.
        """
        # Asked before the write: after the last one the server itself may close.
        if self.gone:
            raise Ended("abandoned")
        if self.fault is None:
            await self._put(data, more=more)
        else:
            await self._broken_body(self.fault, data, more=more)

    async def _put(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.written += len(data)

    async def _broken_body(self, fault: Fault, data: bytes, *, more: bool) -> None:
        at = fault.after_bytes
        if at is not None and fault.action in ("cut", "reset", "stall"):
            room = at - self.written
            if 0 <= room <= len(data):
                first, data = data[:room], data[room:]
                if first:
                    await self._put(first, more=True)
                await self.strike(fault)
                self.fault = None
        size = fault.size if fault.action == "fragment" else max(1, len(data))
        for start in range(0, max(1, len(data)), size):
            left = more or start + size < len(data)
            await self._put(data[start : start + size], more=left)
            if fault.action == "fragment":
                await self._clock.sleep(0)  # a write of its own

    async def strike(self, fault: Fault) -> None:
        """The fault happens here: a stall passes, cut and reset do not."""
        if fault.action == "stall":
            await self.silence(fault.seconds)
        else:
            await self.snap(reset=fault.action == "reset")

    # --- pacing ---------------------------------------------------------------------------------

    async def stream(
        self,
        frames: Iterable[Frame],
        *,
        rate: float,
        per_write: int,
        produced: Callable[[int], None],
        ends: bool = True,
    ) -> None:
        """All frames are out, each when its tokens are due.

        Args:
            frames: Events with the tokens they carry.
            rate: Tokens per second; 0 is at once.
            per_write: Events in one write at most, where nothing has to be waited for.
            produced: Told the tokens of each write, before it.
            ends: Whether the body ends with them.

        Raises:
            Ended: The client left, or a fault struck.
        """
        if rate:
            await self._paced(frames, rate, per_write, produced)
        else:
            pending = iter(frames)
            while batch := list(islice(pending, per_write)):
                produced(sum([carried for _, carried in batch]))
                await self.body(b"".join([raw for raw, _ in batch]), more=True)
        if ends and self.fault is None:
            # Whoever leaves after the terminal event has had the whole answer: no look whether.
            await self._put(b"", more=False)
        elif ends:
            await self.body(b"", more=False)

    async def _paced(
        self,
        frames: Iterable[Frame],
        rate: float,
        per_write: int,
        produced: Callable[[int], None],
    ) -> None:
        clock = self._clock
        held: list[bytes] = []
        tokens = told = 0
        start = clock.now()
        for raw, carried in frames:
            due = start + (told + tokens + carried) / rate * MICRO
            if due - clock.now() > TICK * MICRO:
                if held:
                    produced(tokens)
                    told += tokens
                    await self.body(b"".join(held), more=True)
                    held, tokens = [], 0
                await self.wait((due - clock.now()) / MICRO)
            held.append(raw)
            tokens += carried
            if len(held) >= per_write:
                produced(tokens)
                told += tokens
                await self.body(b"".join(held), more=True)
                held, tokens = [], 0
        produced(tokens)
        await self.body(b"".join(held), more=True)


def _too_large(most: int) -> Rejected:
    return Rejected(
        f"Request body exceeds the maximum of {most} bytes.",
        status=413, kind="request_too_large", code="request_too_large",
    )  # fmt: skip


def _decoded(raw: bytes, coding: str, most: int) -> bytes:
    """The body without its coding; a bomb is refused before it goes off."""
    try:
        if coding in ("gzip", "deflate"):
            engine = zlib.decompressobj(wbits=47)
            plain = engine.decompress(raw, most + 1)
            complete = engine.eof
        elif coding == "zstd":
            reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(raw)
            plain = reader.read(most + 1)
            complete = True
        else:
            raise Rejected(
                f"Unsupported content encoding: {coding[:40]!r}.", status=415,
                code="unsupported_content_encoding",
            )  # fmt: skip
    except (zlib.error, zstandard.ZstdError) as error:
        raise Rejected(f"The request body is not valid {coding}.") from error
    if len(plain) > most:
        raise _too_large(most)
    if not complete:
        raise Rejected(f"The request body is not valid {coding}: it ends too early.")
    return plain
