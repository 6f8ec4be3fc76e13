"""The parts of the tool plane, made once and wired to each other. Nothing here decides anything."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from gateway.errors import UpstreamFault
from gateway.tools.changes import Changes
from gateway.tools.exchange import Exchanges
from gateway.tools.federation import Federation
from gateway.tools.lists import Lists
from gateway.tools.plane import Plane
from gateway.tools.sessions import Sessions
from gateway.tools.stdio import Pipes, Senders
from gateway.tools.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.tools.changes import Spawn
    from gateway.tools.remote import Remote
    from gateway.units import Rng

SWEEP = 60.0
"""Seconds between looks for idle sessions."""


class Tools:
    """Everything that a tool call passes through below the layers.

    Args:
        remote: How messages reach servers that have a URL.
        clock: For deadlines and idle sessions.
        key: Signs session ids.
        rng: Tells sessions apart; jitter between starts of a command.
        environment: Of this process; commands get little of it.
    """

    def __init__(
        self, remote: Remote, clock: Clock, *, key: bytes, rng: Rng, environment: Mapping[str, str]
    ) -> None:
        self._clock = clock
        self.pipes = Pipes(clock, rng, environment)
        sender = Senders(remote, self.pipes)
        self.exchanges = Exchanges(sender, clock)
        self.lines = self.exchanges.lines
        self.sessions = Sessions(key, now=clock.now, wall=clock.wall)
        lists = Lists(clock.now)
        self.members = Federation(self.lines, lists, clock)
        self.changes = Changes(self.lines, sender, clock, rng)
        self.changes.on_changed = lists.forget
        self.exchanges.on_notice = self.pipes.on_notice = self.changes.noticed
        self.streams = Streams(self.lines, sender, self.changes, clock)
        self.plane = Plane(self.exchanges, self.sessions, self.members, self.streams, lists, rng)

    def owned_by(self, spawn: Spawn) -> None:
        """Tasks have an owner from now on."""
        self.exchanges.spawn = self.pipes.spawn = self.changes.spawn = spawn

    async def run(self) -> None:
        """Idle sessions are closed, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP)
            await self.plane.sweep()

    async def start(self, servers: Mapping[str, Server]) -> None:
        """Commands run before anybody calls: who lists first shall not wait for them, or miss them.

        One that cannot be started is asked again when somebody calls it.
        """
        async with asyncio.TaskGroup() as group:
            for server in servers.values():
                if server.command:
                    group.create_task(self._meet(server))

    async def _meet(self, server: Server) -> None:
        with contextlib.suppress(UpstreamFault):
            await self.lines.era(self.lines.of(server))

    def counts(self) -> dict[str, int]:
        """What is held now, for metrics."""
        return {
            "client": len(self.sessions),
            "stream": self.streams.open,
            "command": len(self.pipes.running()),
            "listening": self.changes.listening,
        }

    async def keep(self, servers: Mapping[str, Server]) -> None:
        """What a new policy names no more is ended: sessions and commands."""
        await self.lines.keep(servers)
        await self.pipes.keep(servers)
        await self.start(servers)

    async def close(self) -> None:
        """Sessions at servers are ended, and so are commands."""
        await self.changes.close()
        await self.lines.close()
        await self.pipes.close()
