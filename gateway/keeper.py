"""Keep-alive bytes while a call waits: silence first, then the dialect's own.

Nothing is armed but one coarse timer, and no task exists until a wait has lasted `keepalive_after`:
ten thousand waiting calls are ten thousand heap entries. Between the timer and the answer there is
at most one short task, which `stop` awaits, so that the two never write at once.
Source: `protocols.md` §3; `performance.md` §8.4.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from gateway.snapshot import Tier
from gateway.wire import keepalive, mcp, sse

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gateway.call import Call
    from gateway.clock import Clock, Timer
    from gateway.relay import Outlet
    from gateway.units import Micros
    from gateway.wire.mcp import Posted

    Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]

UNKNOWN = Tier(name="unknown", number=2)
"""The tier assumed until the caller is identified: its defaults are the documented ones."""


def keeper_of(call: Call, outlet: Outlet, *, clock: Clock, spawn: Spawn) -> Keeper | None:
    """What keeps this call alive while it waits; None where its client can be sent nothing.

    Of MCP only calls that make a server work: all else is answered at once, and the head of an
    answer to `initialize` names the session, so it must not be committed before there is one.
    """
    if call.fields is not None:
        stream = call.fields.stream
        return Keeper(call, outlet, clock=clock, spawn=spawn) if stream else None
    posted: Posted | None = call.rpc
    if posted is None or posted.batch or posted.first.method not in mcp.GOVERNED:
        return None
    if not posted.first.is_request or not mcp.takes_stream(call.headers):
        return None
    token = mcp.progress_token(posted.first)
    return Keeper(call, outlet, clock=clock, spawn=spawn, token=_text(token))


def _text(token: int | str | None) -> bytes:
    """The progress token as JSON text; b"" for none, and for one that cannot be written."""
    if token is None:
        return b""
    if isinstance(token, int):
        return b"%d" % token
    try:
        return orjson.dumps(token)
    except TypeError:  # a lone surrogate
        return b""


class Keeper:
    """Keeps one waiting stream alive. `stop` before anything else is written."""

    __slots__ = (
        "_call",
        "_clock",
        "_form",
        "_outlet",
        "_sent",
        "_shot",
        "_spawn",
        "_stopped",
        "_timer",
        "_token",
    )

    def __init__(
        self, call: Call, outlet: Outlet, *, clock: Clock, spawn: Spawn, token: bytes = b""
    ) -> None:
        """Begin to wait. `token` is that of an MCP request for progress, as JSON text."""
        self._call = call
        self._outlet = outlet
        self._clock = clock
        self._spawn = spawn
        self._sent = 0
        self._shot: asyncio.Task[None] | None = None
        self._token = token
        self._form = keepalive.form(call.dialect, stream=True, client=call.client, token=token)
        self._stopped = self._form is keepalive.Form.SILENCE
        one, two, three = call.snapshot.tiers
        first = min(one.keepalive_after, two.keepalive_after, three.keepalive_after)
        self._timer: Timer = clock.after(first, self._due)

    def _due(self) -> None:
        if self._stopped:
            return
        tier = self._call.tier or UNKNOWN
        left: Micros = self._call.received + tier.keepalive_after - self._clock.now()
        if self._sent == 0 and left > 0:
            self._timer = self._clock.after(left, self._due)
            return
        self._shot = self._spawn(self._beat(tier))

    async def _beat(self, tier: Tier) -> None:
        """One keep-alive, and the timer of the next. Must not raise: it runs in the app's group."""
        try:
            await self._outlet.keep_alive(self._next(), self._call.extra_headers)
        except OSError:
            return  # the client left; the watcher ends the call
        self._shot = None
        if not self._stopped:
            self._timer = self._clock.after(tier.keepalive_every, self._due)

    def _next(self) -> bytes:
        """The next bytes; a Responses stream is opened first."""
        self._sent += 1
        if self._form is keepalive.Form.PROGRESS:
            return keepalive.progress(self._token, self._sent)
        if self._form is not keepalive.Form.OPENING or self._outlet.opening is not None:
            return keepalive.beat(self._form, self._outlet.opening)
        opening = self._outlet.opening = keepalive.ResponsesOpening(f"resp_{self._call.id}")
        name, body = opening.created(model=self._outlet.model, at=self._call.received)
        return sse.frame(orjson.dumps(body), name)

    async def stop(self) -> None:
        """Nothing more is sent, and nothing is being sent."""
        self._stopped = True
        self._timer.cancel()
        if self._shot is not None:
            await asyncio.wait({self._shot})

    def cancel(self) -> None:
        """The same without waiting: the client is gone, or the call is over."""
        self._stopped = True
        self._timer.cancel()
        if self._shot is not None:
            self._shot.cancel()
