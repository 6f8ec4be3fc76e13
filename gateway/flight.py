"""One call under way, as the edge sees it; and who may end it, in which order.

Whoever ends a call records why before anything is cancelled, so that a deadline, a stop of the
process and a client hanging up are never mistaken for each other. The synchronous half of closing
runs at once: a permit is back before the call's own task has noticed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.call import Call, End, Reply
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from gateway.bodies import Upload
    from gateway.clock import Clock, Timer
    from gateway.framing import Head
    from gateway.keeper import Keeper
    from gateway.relay import Outlet, Receive

# To ask an enumeration for a member costs ten times what a name does.
_FAILED = End.FAILED

GRACE: Micros = 60 * MICRO
"""How long the work of a tool call runs on when its client of the session era has left."""


class Flight:
    """One call under way, as the edge sees it.

    Attributes:
        unread: Bytes of the request may still be on their way.
        entered: The pipeline was asked, and so hears of the refusal itself.
        ended: How the reply ended by itself.
        why: Why it was ended by us; None while it was not.
        grace: Ends a call that runs on without its client.
        over: Nothing may end it any more.
    """

    __slots__ = (
        "call", "clock", "ended", "entered", "grace", "head", "held", "keeper", "outlet", "over",
        "receive", "reply", "task", "unread", "upload", "watcher", "why",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        head: Head,
        outlet: Outlet,
        receive: Receive,
        clock: Clock | None = None,
    ) -> None:
        self.call = call
        self.head = head
        self.outlet = outlet
        self.receive = receive
        link = outlet.link
        self.task = asyncio.current_task() if link is None else link.task
        self.clock = clock
        self.grace: Timer | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.keeper: Keeper | None = None
        self.upload: Upload | None = None
        self.reply: Reply | None = None
        self.held = 0
        self.unread = head.has_body
        self.entered = False
        self.ended = _FAILED
        self.why: End | None = None
        self.over = False

    @property
    def waiting(self) -> bool:
        """Whether nothing of it went upstream yet."""
        return self.reply is None and not self.call.sent

    def end(self, why: End) -> None:
        """The reason is recorded, what can be given back at once is, and then the call ends."""
        if self.over or self.why is not None:
            return
        self.why = why
        if self.reply is not None:
            self.reply.finish(why)
        if self.task is not None:
            self.task.cancel()

    def client_left(self) -> None:
        """The call ends, unless its upstream is to be heard out.

        For the sake of the books, or because in MCP's session era leaving cancels nothing.
        """
        deployment, tool = self.call.deployment, self.call.tool
        drains = deployment is not None and deployment.provider.on_disconnect == "drain"
        outlives = tool is not None and tool.outlives
        if self.waiting or not (drains or outlives):
            self.end(End.CLIENT_GONE)
            return
        self.outlet.deaf = True
        if outlives and self.clock is not None:
            self.grace = self.clock.after(GRACE, lambda: self.end(End.CLIENT_GONE))

    def client_stalled(self) -> None:
        """The client takes nothing of what is being sent: it counts as gone."""
        self.drop(End.CLIENT_GONE)

    def drop(self, why: End) -> None:
        """The call ends now, even if it is being ended already and its last words block."""
        if self.why is None:
            self.end(why)
        elif self.task is not None and not self.over:
            self.task.cancel()
        self.outlet.abort(hard=True)
