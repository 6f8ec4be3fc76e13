"""A call that no rung can serve now, but which may be served later, is kept and answered 202.

Outside estimate and the caller's own limits: a kept call has cost nothing, and passes all of them
when it is executed. It acts on an open breaker without a rung left, and on a refusal by which one
opened or stays open (the caller that was its probe shall not fare worse than those behind it). It
acts only for callers that asked (`Prefer: respond-async`) or whose tier says so; `tidegate-hold:
never` opts out. The 202 is sent after the call is on disk, never before.

A stream that waits is kept alive from `keepalive_after` on, by a head that says 200. After that no
202 can be said, so such a call is refused as if nobody had asked.
Source: `admission.md` §14, `execution.md` §15, RFC 7240 §4.1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import orjson

from gateway.call import Bytes, Call, Dialect, End, Kind, Reply, Service, VerdictNote
from gateway.errors import BreakerOpen, UpstreamFault
from gateway.units import MICRO, Micros, Mode
from gateway.wire import prefer
from gateway.wire.ratelimit_headers import whole_seconds

if TYPE_CHECKING:
    from gateway.clock import Clock
    from scheduler.api import Held

Keep: TypeAlias = Callable[[Call, BreakerOpen], "Awaitable[Held]"]
"""The call is on disk. Raises the refusal, with why it could not be kept."""

KEPT = frozenset({
    Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.EMBEDDINGS, Dialect.MESSAGES,
})  # fmt: skip
"""Dialects whose calls may be held: those whose requests we read whole."""

REFUSED = frozenset({Kind.FAULT, Kind.CAPACITY})
"""Answers of a sick provider, which has certainly served nothing."""

MARGIN: Micros = MICRO
"""Time before a stream is opened in which a hold must be on disk."""

PATH = "/v1/holds/"


class Holding:
    """The layer.

    Args:
        keep: Writes a call down.
        clock: Its time.
        broken: Whether the breaker of the rung that a call tried last is not closed.
    """

    __slots__ = ("_broken", "_clock", "_keep")

    def __init__(self, keep: Keep, clock: Clock, broken: Callable[[Call], bool]) -> None:
        self._keep = keep
        self._clock = clock
        self._broken = broken

    def wants(self, call: Call) -> bool:
        """Whether this call is to be held rather than to wait for a breaker."""
        rules = call.snapshot.holds
        if rules.mode is Mode.OFF or call.dialect not in KEPT or call.fields is None:
            return False
        wish = call.header(b"tidegate-hold")
        if wish is not None and wish.strip().lower() == b"never":
            return False
        tier = call.tier
        if not (tier is not None and tier.hold) and not prefer.respond_async(call.headers):
            return False
        if not call.fields.stream or tier is None:
            return True
        return self._clock.now() + MARGIN < call.received + tier.keepalive_after

    def __call__(self, inner: Service) -> Service:
        """The service whose callers may be answered later."""

        async def serve(call: Call) -> Reply:
            try:
                reply = await inner(call)
            except UpstreamFault as error:
                if not self._unserved(call, error) or not self.wants(call):
                    raise
                return await self._held(call, as_open(error))
            if reply.kind not in REFUSED or not self._broken(call) or not self.wants(call):
                return reply
            await reply.close(End.FAILED)
            text = f"The provider refused with {reply.status} {reply.code}".rstrip()
            sick = BreakerOpen(f"{text}.", because="breakers", retry_after=reply.retry_after)
            return await self._held(call, sick)

        return serve

    def _unserved(self, call: Call, error: UpstreamFault) -> bool:
        """Whether no provider has seen this call, and its breaker says why."""
        if isinstance(error, BreakerOpen):
            return True
        return not call.sent and self._broken(call)

    async def _held(self, call: Call, error: BreakerOpen) -> Reply:
        return self._accepted(call, await self._keep(call, error), error)

    def _accepted(self, call: Call, held: Held, error: BreakerOpen) -> Reply:
        now = self._clock.now()
        call.notes.append(VerdictNote("hold", "held", error.because, now, held.id))
        call.deployment = None  # nothing has served it, and no header shall say so
        location = f"{PATH}{held.id}".encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"location", location),
            (b"retry-after", b"%d" % whole_seconds(error.retry_after or MICRO)),
            (b"cache-control", b"no-store"),
        ]
        if prefer.respond_async(call.headers):
            headers.append((b"preference-applied", b"respond-async"))
        body = orjson.dumps({
            "id": held.id,
            "object": "tidegate.hold",
            "state": held.state.value,
            "model": held.model,
            "created_at": held.received // MICRO,
            "expires_at": held.deadline // MICRO,
            "location": location.decode(),
            "reason": held.reason,
        })  # fmt: skip
        headers.append((b"content-length", b"%d" % len(body)))
        return Reply(status=202, headers=headers, source=Bytes(body))


def as_open(error: UpstreamFault) -> BreakerOpen:
    """The fault as the reason why a call is held."""
    if isinstance(error, BreakerOpen):
        return error
    return BreakerOpen(error.message, because="breakers", retry_after=error.retry_after)
