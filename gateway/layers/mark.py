"""Innermost layer of held calls: what is about to be sent is on disk before it is sent.

It stands in the place nearest to the transport, where every attempt of every rung passes. A kill
between this mark and the answer leaves the call *in doubt*; so does an attempt that broke after it
had been sent, and then no further attempt of this call may start, whichever layer asks for it.
Source: `execution.md` §6, §15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.call import Call, HeldCall, Reply, Service
from gateway.errors import StoreConflict, UpstreamFault

if TYPE_CHECKING:
    from collections.abc import Awaitable


def mark(inner: Service) -> Service:
    """The service, each attempt marked; only for calls that were held."""

    async def serve(call: Call) -> Reply:
        if not isinstance(call, HeldCall):
            raise TypeError("only held calls are marked")
        if call.doubtful:
            raise StoreConflict("An attempt of this call may have been served already.")
        assert call.deployment is not None  # noqa: S101 - estimate ran
        await call.sending(call.deployment.id)
        call.doubtful = True
        call.sent = False
        return await _tried(inner(call), call)

    return serve


async def _tried(attempt: Awaitable[Reply], call: HeldCall) -> Reply:
    """Whatever else ends the attempt, a cancellation too, leaves the doubt."""
    try:
        reply = await attempt
    except UpstreamFault:
        call.doubtful = call.sent
        raise
    call.doubtful = reply.kind is None  # an answer that refuses has served nothing
    return reply
