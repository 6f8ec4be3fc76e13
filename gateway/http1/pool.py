"""The channels of one upstream: newest first, each step O(1), none kept for too long.

The newest idle channel serves next, so that a quiet hour closes all but those in use; what was
idle for longer than the bound is never used and closed by one coarse timer. How many are in use is
admission's say, and no bound of this file.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from gateway.http1.channel import Channel
from gateway.http1.dial import Addresses, Origin, Trust, connect
from gateway.upstream import TransportFault

if TYPE_CHECKING:
    from gateway.clock import Clock, Timer
    from gateway.units import Micros
    from gateway.upstream import Outgoing, Probe


class Pool:
    """Every channel to one origin.

    Attributes:
        origin: Where they lead.
        in_use: Exchanges under way, those still dialing included.
    """

    __slots__ = (
        "_addresses", "_channels", "_clock", "_idle", "_idle_for", "_make", "_probe", "_retired",
        "_shut", "_sweeper", "_trust", "in_use", "origin",
    )  # fmt: skip

    def __init__(
        self,
        origin: Origin,
        *,
        clock: Clock,
        idle_for: Micros,
        trust: Trust,
        probe: Probe,
        buffer: memoryview,
    ) -> None:
        self.origin = origin
        self.in_use = 0
        self._clock = clock
        self._idle_for = idle_for
        self._trust = trust
        self._probe = probe
        loop = asyncio.get_running_loop()
        self._addresses = Addresses(origin, clock)
        self._channels: set[Channel] = set()
        self._idle: deque[Channel] = deque()  # the longest idle first
        self._sweeper: Timer | None = None
        self._retired = self._shut = False
        forget = self._channels.discard
        self._make = lambda: Channel(loop, buffer, forget)

    def idle(self) -> Channel | None:
        """A channel that has served and is alive as far as the kernel knows; it is in use now."""
        idle = self._idle
        if not idle:
            return None
        oldest = self._clock.now() - self._idle_for
        while idle:
            channel = idle.pop()
            if channel.idle_since > oldest and not channel.ended(self._probe):
                self.in_use += 1
                return channel
            channel.drop()
        return None

    async def dial(self, out: Outgoing) -> Channel:
        """A new channel; it is in use now.

        Raises:
            TransportFault: There is none; nothing was sent.
        """
        self.in_use += 1
        try:
            channel = await connect(
                self.origin, self._addresses, self._make,
                trust=self._trust, clock=self._clock, limit=out.connect,
            )  # fmt: skip
        except BaseException:
            self._less()
            raise
        if self._shut:
            channel.drop()
            self._less()
            raise TransportFault("connect", sent="nothing", detail="the transport is closed")
        self._channels.add(channel)
        return channel

    def release(self, channel: Channel, *, reuse: bool) -> None:
        """The channel is idle if it may serve again, else closed."""
        if reuse and not self._retired and channel.end():
            channel.idle_since = self._clock.now()
            self._idle.append(channel)
            if self._sweeper is None:
                self._sweeper = self._clock.after(self._idle_for, self._sweep)
        else:
            channel.drop()
        self._less()

    def _less(self) -> None:
        self.in_use -= 1
        if self._retired and not self.in_use:
            self.shut()

    def _sweep(self) -> None:
        """What was idle for too long is closed; the timer looks again when the next one is due."""
        self._sweeper = None
        now, idle = self._clock.now(), self._idle
        while idle and (idle[0].closing or now - idle[0].idle_since >= self._idle_for):
            idle.popleft().drop()
        if idle:
            due = idle[0].idle_since + self._idle_for - now
            self._sweeper = self._clock.after(due, self._sweep)

    def retire(self) -> None:
        """No new exchange comes; everything closes with the last."""
        self._retired = True
        if not self.in_use:
            self.shut()

    def shut(self) -> None:
        """Every channel is closed now; exchanges under way break."""
        self._shut = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self._idle.clear()
        for channel in list(self._channels):
            channel.drop()
