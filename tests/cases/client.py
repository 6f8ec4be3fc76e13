"""The client's side of one call, on a raw socket: exact bytes out, and how the answer really ended.

An HTTP library would merge headers, decode bodies and hide whether a stream was finished or broken.
`Answer` is a sans-IO parser of the response; `call` moves the bytes and keeps the times.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.cases import sse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Headers = list[tuple[str, str]]

MAX_HEAD = 1 << 20
LINGER_RST = struct.pack("ii", 1, 0)


def first(headers: Headers, name: str) -> str | None:
    """The first value of that header, or None."""
    return next((value for key, value in headers if key == name), None)


def parse_head(head: bytes) -> tuple[str, Headers]:
    """Start line and header pairs, names in lower case, order and repeats kept."""
    lines = head.decode("latin-1").split("\r\n")
    headers = []
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers.append((name.strip().lower(), value.strip()))
    return lines[0], headers


class Body:
    """Decodes a message body by its framing; never guesses.

    Attributes:
        data: What has been decoded.
        complete: Length reached or last chunk seen; close-delimited bodies complete at a clean FIN.
        malformed: Why the framing cannot be read, or "".
        rest: Bytes after the end.
    """

    def __init__(self, headers: Headers, *, bodiless: bool, response: bool) -> None:
        self.data = bytearray()
        self.malformed = ""
        self.rest = b""
        self._raw = bytearray()
        self._left: int | None = None
        self._chunked = False
        self.until_close = False
        self.complete = False
        coding = (first(headers, "transfer-encoding") or "").lower()
        length = first(headers, "content-length")
        if bodiless:
            self.complete = True
        elif "chunked" in coding:
            self._chunked = True
        elif length is not None and length.isdigit():
            self._left = int(length)
            self.complete = self._left == 0
        elif response:
            self.until_close = True
        else:
            self.complete = True

    def feed(self, data: bytes) -> None:
        """Decode what can be decoded."""
        if self.complete or self.malformed:
            self.rest += data
        elif self.until_close:
            self.data += data
        elif self._chunked:
            self._raw += data
            self._chunks()
        else:
            assert self._left is not None
            self.data += data[: self._left]
            self.rest += data[self._left :]
            self._left -= min(self._left, len(data))
            self.complete = self._left == 0

    def eof(self) -> None:
        """The sender closed its side properly."""
        if self.until_close:
            self.complete = True

    def _chunks(self) -> None:
        at = 0
        raw = self._raw
        while not self.complete:
            if self._left is None:
                end = raw.find(b"\r\n", at)
                if end < 0:
                    break
                try:
                    self._left = int(bytes(raw[at:end]).split(b";")[0].strip(), 16)
                except ValueError:
                    self.malformed = f"no chunk size: {bytes(raw[at:end])[:40]!r}"
                    break
                at = end + 2
            if self._left == 0:  # trailers until an empty line
                end = raw.find(b"\r\n", at)
                if end < 0:
                    break
                self.complete = end == at
                at = end + 2
                continue
            if len(raw) < at + self._left + 2:
                break
            self.data += raw[at : at + self._left]
            at += self._left
            if raw[at : at + 2] != b"\r\n":
                self.malformed = "a chunk is longer than its size says"
                break
            at += 2
            self._left = None
        del raw[:at]
        if self.complete or self.malformed:
            self.rest, self._raw = bytes(raw), bytearray()


class Answer:
    """A response as it arrives; 1xx answers are noted and passed over."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._head = bytearray()
        self.status: int | None = None
        self.headers: Headers = []
        self.informational: list[int] = []
        self.body: Body | None = None
        self.malformed = ""

    def feed(self, data: bytes) -> None:
        """Take bytes from the connection."""
        if self.body is not None:
            self.body.feed(data)
            return
        self._head += data
        while self.body is None and not self.malformed:
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD:
                    self.malformed = "the head never ends"
                return
            head, rest = bytes(self._head[:end]), bytes(self._head[end + 4 :])
            self._take(head, rest)

    def _take(self, head: bytes, rest: bytes) -> None:
        line, headers = parse_head(head)
        words = line.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            self.malformed = f"no status line: {line[:60]!r}"
            return
        status = int(words[1])
        if 100 <= status < 200:
            self.informational.append(status)
            self._head[:] = rest
            return
        self.status, self.headers = status, headers
        bodiless = self._method == "HEAD" or status in (204, 304)
        self.body = Body(headers, bodiless=bodiless, response=True)
        self.body.feed(rest)

    @property
    def complete(self) -> bool:
        """The framing says that this is all."""
        return self.body is not None and self.body.complete


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One call as the client saw it.

    Attributes:
        status: None where no answer came.
        complete: The framing of the answer was finished.
        broken: Why not, in words; "" while complete.
        gave_up: The client's own limit passed.
        left_at: When the client left on purpose (`abort`), loop time.
        sent_at, head_at, body_at, done_at: Loop times; None for what never happened.
        attempts: How often the SDK tried.
        code, output: Of a hook.
    """

    sent_body: bytes = b""
    status: int | None = None
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    complete: bool = False
    broken: str = ""
    gave_up: bool = False
    left_at: float | None = None
    sent_at: float = 0.0
    head_at: float | None = None
    body_at: float | None = None
    done_at: float = 0.0
    attempts: int = 1
    code: int | None = None
    output: str = ""

    @property
    def seconds(self) -> float:
        """From sending to the end."""
        return self.done_at - self.sent_at

    @property
    def is_sse(self) -> bool:
        """The answer is labelled as an event stream, in plain."""
        kind = first(self.headers, "content-type") or ""
        return kind.lower().startswith("text/event-stream") and (
            (first(self.headers, "content-encoding") or "identity") == "identity"
        )

    @property
    def events(self) -> list[sse.Event]:
        """The events of a stream, parsed by the book."""
        return sse.parse(self.body) if self.is_sse else []

    @property
    def ends(self) -> set[str]:
        """How it ended, in the words of FORM.md §4; more than one may be true."""
        if self.status is None:
            return {"no_response"}
        ends = set()
        if any(sse.is_error(event) for event in self.events):
            ends.add("error_event")
        if not self.complete:
            ends.add("aborted")
        return ends or {"clean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """When the client leaves, and how."""

    after: float | None = None
    events: int | None = None
    text: bytes | None = None
    rst: bool = False

    def due(self, body: bytearray) -> bool:
        """True once what the client waits for has been read."""
        if self.text is not None and self.text in body:
            return True
        return self.events is not None and len(sse.parse(bytes(body))) >= self.events


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is sent: the bytes before the body, the body, and how to read the answer."""

    method: str
    head: bytes
    body: bytes = b""
    wire_body: bytes = b""
    await_continue: bool = False


def build(
    request: Mapping[str, Any], headers: Headers, body: bytes, *, target: str, authority: str
) -> Request:
    """The request as bytes; `host` and `content-length` are added unless given."""
    method = request["method"]
    names = {name.lower() for name, _ in headers}
    lines = list(headers)
    if "host" not in names:
        lines.insert(0, ("host", authority))
    chunked = request.get("framing") == "chunked"
    if chunked and "transfer-encoding" not in names:
        lines.append(("transfer-encoding", "chunked"))
    elif not chunked and "content-length" not in names and (body or method in ("POST", "PUT")):
        lines.append(("content-length", str(len(body))))
    head = f"{method} {target} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in lines) + "\r\n"
    wire = body
    if chunked:
        pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
        wire = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return Request(
        method=method,
        head=head.encode("latin-1"),
        body=body,
        wire_body=wire,
        await_continue="expect" in names,
    )


def hang_up(transport: asyncio.Transport, *, rst: bool) -> None:
    """Leave: FIN by closing, or RST by closing with a linger time of zero."""
    if rst:
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RST)
        transport.abort()
    else:
        transport.close()


class _Connection(asyncio.Protocol):
    """Feeds an `Answer` and wakes whoever waits for the next byte."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.transport: asyncio.Transport | None = None
        self.changed = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self.eof = False
        self.lost: Exception | None = None
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.answer.feed(data)
        self.changed.set()

    def eof_received(self) -> bool:
        self.eof = True
        if self.answer.body is not None:
            self.answer.body.eof()
        self.changed.set()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost, self.gone = exc, True
        self.writable.set()
        self.changed.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    async def send(self, data: bytes) -> None:
        """Write all of it, at the pace of the other side."""
        for at in range(0, len(data), 1 << 18):
            await self.writable.wait()
            if self.gone or self.transport is None or self.transport.is_closing():
                return
            self.transport.write(data[at : at + (1 << 18)])


async def call(
    address: tuple[str, int],
    request: Request,
    *,
    limit: float,
    abort: Abort | None = None,
    linger: float = 0.0,
    mark: Callable[[str], None] = lambda _: None,
) -> Exchange:
    """Make one call; returns however it ends.

    Args:
        address: Where the gateway listens.
        request: What to send.
        limit: Seconds until the client gives up.
        abort: When to leave early.
        linger: Seconds to keep reading after the end of the answer.
        mark: Told "sent", "head", "body" as they happen.
    """
    answer = Answer(request.method)
    done = Exchange(sent_body=request.body)
    done.sent_at = done.done_at = time.monotonic()
    loop = asyncio.get_running_loop()
    try:
        _, link = await asyncio.wait_for(
            loop.create_connection(lambda: _Connection(answer), *address), limit
        )
    except (OSError, TimeoutError) as error:
        done.broken = f"no connection: {error}"
        done.done_at = time.monotonic()
        return done
    assert link.transport is not None
    sender = asyncio.create_task(_send(link, request))
    mark("sent")
    try:
        await _receive(link, done, limit=limit, abort=abort, mark=mark)
        if linger and answer.complete:
            await asyncio.sleep(linger)
    finally:
        sender.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sender
        hang_up(link.transport, rst=abort is not None and abort.rst and done.left_at is not None)
    _conclude(link, done)
    return done


async def _send(link: _Connection, request: Request) -> None:
    await link.send(request.head)
    if request.await_continue:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while (
                    not link.answer.informational and link.answer.status is None and not link.gone
                ):
                    link.changed.clear()
                    await link.changed.wait()
        if link.answer.status is not None:
            return
    await link.send(request.wire_body)


async def _receive(
    link: _Connection,
    done: Exchange,
    *,
    limit: float,
    abort: Abort | None,
    mark: Callable[[str], None],
) -> None:
    answer = link.answer
    leave = done.sent_at + abort.after if abort and abort.after is not None else float("inf")
    while True:
        moment = time.monotonic()
        if answer.status is not None and done.head_at is None:
            done.head_at = moment
            mark("head")
        if answer.body is not None and answer.body.data and done.body_at is None:
            done.body_at = moment
            mark("body")
        done.done_at = moment
        if answer.complete or answer.malformed or link.eof or link.gone:
            return
        if answer.body is not None and answer.body.malformed:
            return
        if moment >= leave or (abort and answer.body and abort.due(answer.body.data)):
            done.left_at = moment
            return
        end = min(leave, done.sent_at + limit)
        if moment >= done.sent_at + limit:
            done.gave_up = True
            return
        link.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(end - moment):
                await link.changed.wait()


def _conclude(link: _Connection, done: Exchange) -> None:
    answer = link.answer
    done.status, done.headers = answer.status, answer.headers
    done.complete = answer.complete
    if answer.body is not None:
        done.body = bytes(answer.body.data)
    if done.complete:
        return
    if done.gave_up:
        done.broken = "the client gave up waiting"
    elif done.left_at is not None:
        done.broken = "the client left"
    else:
        malformed = answer.malformed or (answer.body.malformed if answer.body else "")
        done.broken = malformed or (f"reset: {link.lost}" if link.lost else "closed before the end")
