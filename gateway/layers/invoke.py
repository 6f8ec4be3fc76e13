"""Innermost service of a tool call: ask its server, hold the deadlines, judge the answer.

The counterpart of `dispatch`. What an answer means is decided by its HTTP status alone: a JSON-RPC
error inside a 200 is the tool's own word to its caller, and says nothing of the server's health.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.call import Call, Kind, Reply
    from gateway.clock import Clock
    from gateway.tools.exchange import Exchanges


class Invoke:
    """The service.

    Attributes:
        on_status: Called with server, status and kind of every answer, for metrics.
    """

    __slots__ = ("_clock", "_exchanges", "on_status")

    def __init__(
        self,
        exchanges: Exchanges,
        clock: Clock,
        *,
        on_status: Callable[[str, int, Kind | None], None] | None = None,
    ) -> None:
        self._exchanges = exchanges
        self._clock = clock
        self.on_status = on_status

    async def __call__(self, call: Call) -> Reply:
        """The reply, judged: `kind` says what a bad one means."""
        tool = call.tool
        assert tool is not None  # noqa: S101 - target ran
        started = self._clock.now()
        try:
            reply = await self._exchanges.ask(call, tool)
        finally:
            call.upstream_us += self._clock.now() - started
        call.first_byte = self._clock.now()
        call.answer = reply
        if self.on_status is not None:
            self.on_status(tool.server.name, reply.status, reply.kind)
        return reply
