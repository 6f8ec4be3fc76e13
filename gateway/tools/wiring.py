"""The parts of the tool plane, made once and wired to each other. Nothing here decides anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.tools.exchange import Exchanges
from gateway.tools.federation import Federation
from gateway.tools.plane import Plane
from gateway.tools.sessions import Sessions
from gateway.tools.streams import Streams

if TYPE_CHECKING:
    from gateway.clock import Clock
    from gateway.tools.exchange import Spawn
    from gateway.tools.remote import Sender
    from gateway.units import Rng

SWEEP = 60.0
"""Seconds between looks for idle sessions."""


class Tools:
    """Everything that a tool call passes through below the layers.

    Args:
        sender: How messages reach servers.
        clock: For deadlines and idle sessions.
        key: Signs session ids.
        rng: Tells sessions apart.
    """

    def __init__(self, sender: Sender, clock: Clock, *, key: bytes, rng: Rng) -> None:
        self._clock = clock
        self.exchanges = Exchanges(sender, clock)
        self.lines = self.exchanges.lines
        self.sessions = Sessions(key, now=clock.now, wall=clock.wall)
        self.members = Federation(self.lines, clock)
        self.streams = Streams(self.lines, sender, clock)
        self.plane = Plane(self.exchanges, self.sessions, self.members, self.streams, rng)

    def owned_by(self, spawn: Spawn) -> None:
        """Tasks have an owner from now on."""
        self.exchanges.spawn = spawn

    async def run(self) -> None:
        """Idle sessions are closed, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP)
            await self.plane.sweep()

    async def close(self) -> None:
        """Sessions at servers are ended."""
        await self.lines.close()
