"""An upstream's answer, read as far as it must be judged; the rest is passed on untouched.

The commit point is the first upstream event that is not an error (`protocols.md` §2.1): an error
event first may still become a fallback. What was read to judge is kept and sent before the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Generator
from typing import TYPE_CHECKING

import orjson

from gateway.errors import UpstreamMalformed, UpstreamTimeout, UpstreamUnreachable
from gateway.inflating import Inflating
from gateway.wire.sse import Events

if TYPE_CHECKING:
    from gateway.clock import Clock, Timer
    from gateway.errors import UpstreamFault
    from gateway.units import Micros
    from gateway.upstream import Incoming, Take, TransportFault
    from gateway.wire.sse import Event

MAX_ERROR_BODY = 1 << 20
"""Bytes of a refusal's body that are read to classify it; the rest is relayed unread."""
MAX_OPENING = 1 << 20
"""Bytes awaited for the first event; beyond it the stream is passed on as it is."""


class Ready:
    """An awaitable that already has its value: no hop through the loop."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, bytes]:
        """The value, at once: a generator that yields nothing."""
        yield from ()
        return self._value


class Relayed:
    """The source of a reply: what was read already, then the rest, under two deadlines.

    `idle` counts while a chunk is waited for, so that a client which takes its time is never
    blamed on the upstream; `until` is an instant. When one passes, the upstream connection is
    aborted and the pending read raises TransportFault "stalled" or "total": the call's own task is
    never cancelled for it. A chunk stores a time stamp and re-arms nothing.

    Attributes:
        timed: `touched` wants to see the chunks: a body that was here at once cannot be late.
    """

    __slots__ = (
        "_clock", "_first", "_idle", "_incoming", "_last", "_passing", "_rest", "_timer", "_until",
        "timed",
    )  # fmt: skip

    def __init__(
        self,
        incoming: Incoming,
        first: deque[bytes],
        rest: AsyncIterator[bytes],
        clock: Clock,
        idle: Micros,
        until: Micros,
    ) -> None:
        self._incoming = incoming
        self._first = first
        self._rest = rest
        self._clock = clock
        self._idle = idle
        self._until = until
        self._last: Micros = 0
        self._passing = False
        self._timer: Timer | None = None
        self.timed = not incoming.whole
        if self.timed:
            self._last = clock.now()
            self._timer = clock.after(min(idle, until - self._last), self._check)

    def touched(self, _chunk: bytes) -> None:
        """A tap: a chunk has come; the next is waited for at once, or when it is asked for."""
        self._last = self._clock.now() if self._passing else 0

    def _check(self) -> None:
        now = self._clock.now()
        quiet = now - self._last if self._last else 0
        if now >= self._until or quiet >= self._idle:
            self._incoming.abort("total" if now >= self._until else "stalled")
            return
        self._timer = self._clock.after(min(self._idle - quiet, self._until - now), self._check)

    def at_once(self) -> bytes | None:
        """The rest of the body if every byte of it is here, else None."""
        rest = self._incoming.at_once() if self._incoming.whole else None
        if rest is None or not self._first:
            return rest
        first = b"".join(self._first)
        self._first.clear()
        return first + rest

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, once."""
        return self

    def __aiter__(self) -> Relayed:
        """Itself."""
        return self

    def __anext__(self) -> Awaitable[bytes]:
        """The next chunk, without an asynchronous hop of our own."""
        if self._first:
            return Ready(self._first.popleft())
        if self._timer is not None:
            self._last = self._clock.now()
        return self._rest.__anext__()

    async def pass_to(self, take: Take) -> bool:
        """The body was given to `take`, unless it had enough; deadlines as above."""
        while self._first:
            if not take(self._first.popleft()):
                return False
        if self._timer is not None:
            self._passing = True
            self._last = self._clock.now()
        try:
            return await self._incoming.pass_to(take)
        finally:
            self._passing = False
            self._last = 0

    def close(self, *, reuse: bool) -> Awaitable[None]:
        """The deadline is gone; once awaited, the connection is back in its pool, or closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self._incoming.close(reuse=reuse)


async def read_error(first: deque[bytes], rest: AsyncIterator[bytes]) -> bytes:
    """The refusal's body as far as it is read; the bytes stay in `first` for the client."""
    size = 0
    async for chunk in rest:
        first.append(chunk)
        size += len(chunk)
        if size > MAX_ERROR_BODY:
            break
    return b"".join(first)


def decoded(body: bytes) -> object:
    """An error body as `wire.upstream_refusals.said` reads it: JSON, else the text."""
    try:
        parsed: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:1_000].decode("utf-8", "replace")
    return parsed


async def read_opening(
    first: deque[bytes], rest: AsyncIterator[bytes], coding: str = ""
) -> object | None:
    """Read up to the first event: its body if it is an error, else None.

    A compressed stream is unpacked on the way; one that cannot be read is passed on at once.

    Raises:
        UpstreamMalformed: It ended without any event: nothing was said, another may still answer.
    """
    events = Events()
    inflating = Inflating(coding) if coding else None
    size = 0
    if inflating is not None and not inflating.readable:
        return None
    async for chunk in rest:
        first.append(chunk)
        plain = chunk
        if inflating is not None:
            plain = inflating.feed(chunk)
            if not inflating.readable:
                return None
        for event in events.feed(plain):
            return opening_error(event)
        size += len(plain)
        if size > MAX_OPENING:
            return None
    if events.at_boundary:  # else an event without its blank line is on its way to the client
        raise UpstreamMalformed(
            "The upstream ended its stream before its first event.", code="empty_stream"
        )
    return None


def opening_error(event: Event) -> object | None:
    """The error body of a stream's first event, None if it is an ordinary one."""
    data = event.data
    if b"error" not in data and event.name != b"error":
        return None
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict):
        return None
    response: object = parsed.get("response")
    if parsed.get("type") == "response.failed" and isinstance(response, dict):
        return response
    if parsed.get("type") == "error":
        return parsed
    bare = parsed.get("error") and "choices" not in parsed and "type" not in parsed
    return parsed if bare else None


def fault_of(error: TransportFault, provider: str) -> UpstreamFault:
    """The transport's fault in our tree; what was sent decides whether it may be repeated."""
    if error.kind == "malformed":
        return UpstreamMalformed(f"{provider} did not answer in HTTP.")
    if error.kind in ("connect_timeout", "pool_timeout"):
        return UpstreamTimeout(f"{provider} did not accept a connection in time.", code=error.kind)
    if error.sent == "nothing":
        text = f"{provider} cannot be reached ({error.kind})."
        return UpstreamUnreachable(text, code="connect_failed")
    text = f"{provider} broke the connection before it answered ({error.kind})."
    return UpstreamUnreachable(text, code=f"upstream_{error.kind}")
