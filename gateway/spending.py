"""Budgets survive the process: what calendars have used is written down, and read at the start.

Every two seconds, and once more after the last call, whatever has changed is written in one
transaction; a new pool asks here what its period had used before. A process that is killed forgets
two seconds of charges at most. Provider amounts per day are kept the same way.

Weakness: two gateways that share a state folder each write what they know; of one budget the later
word counts. A fleet keeps its budgets in the shared store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.units import MICRO
from scheduler.api import SchedulerError, Spent

if TYPE_CHECKING:
    from gateway.admission.core import PoolSpec
    from gateway.admission.local import LocalStore
    from gateway.clock import Clock
    from gateway.telemetry.logs import Log
    from gateway.units import Micros
    from scheduler.api import Usage

EVERY_S = 2.0
KEPT: Micros = 40 * 86_400 * MICRO
"""How long a period that is over stays in the table, for whoever wants to look it up."""


class Spending:
    """Writes down what pools have used. One per process."""

    def __init__(self, store: LocalStore, usage: Usage, clock: Clock, log: Log) -> None:
        self._store = store
        self._usage = usage
        self._clock = clock
        self._log = log
        self._past: dict[tuple[str, str, str, Micros], Spent] = {}
        self._failing = False

    async def load(self) -> None:
        """What was used before is known; pools made from now on begin with it.

        Raises:
            SchedulerError: It cannot be read, and a budget must not begin anew for that.
        """
        rows = await self._usage.standing(now=self._clock.now())
        self._remember(rows, self._clock.now())
        self._store.past = self._recalled

    def _remember(self, rows: list[Spent], now: Micros) -> None:
        """New pools begin with these; what is over is forgotten when a period begins."""
        known = len(self._past)
        for row in rows:
            self._past[row.pool, row.unit, row.calendar, row.start] = row
        if len(self._past) > known:
            self._past = {key: row for key, row in self._past.items() if row.until > now}

    def _recalled(
        self, spec: PoolSpec, periods: list[tuple[int, Micros, Micros, int]]
    ) -> dict[int, int]:
        found = {}
        for i, start, _, _ in periods:
            dimension = spec.dimensions[i]
            row = self._past.get((spec.name, dimension.name, dimension.calendar, start))
            if row is not None:
                found[i] = row.used
        return found

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._clock.sleep(EVERY_S)
            await self.write()

    async def write(self) -> None:
        """What has changed is on disk; a store that fails is said once, and asked again."""
        rows = [
            Spent(
                pool=spec.name, unit=spec.dimensions[i].name, calendar=spec.dimensions[i].calendar,
                start=start, until=end, used=used,
            )
            for spec, periods in self._store.spent()
            for i, start, end, used in periods
        ]  # fmt: skip
        if not rows:
            return
        now = self._clock.now()
        self._remember(rows, now)
        try:
            await self._usage.record(rows, before=now - KEPT)
        except SchedulerError as fault:
            if not self._failing:
                self._log.error("usage_store", error=str(fault))
            self._failing = True
            self._store.tell_again()
        else:
            self._failing = False
