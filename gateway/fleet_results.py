"""Failures of a deployment, counted over all gateways of a fleet.

Each breaker decides by what its own process sees, and by what the others saw. A trickle that four
gateways share, or an outage that each of many meets twice, opens it as if one had seen it all.
Nothing is told while all goes well: the first failure begins to tell its scope's results, good ones
too, once a second, until it has been well for a whole slow window. While the store is away every
process decides by itself; what could not be told is not told later.

Time is cut into cells of `CELL` by the wall clock, so that gateways agree on them; who tells its
own results hears of the others' in this cell and in the one before.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gateway.admission.fleet import Addition
from gateway.gathering import end_if_cancelled
from gateway.resilience.breaker import Results
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.clock import Clock
    from gateway.resilience.breaker import Breaker

logger = logging.getLogger("tidegate.fleet")

CELL: Micros = 2_500_000
GATHER: Micros = 100_000
"""Failures within that time are told together."""

PERIOD: Micros = MICRO
"""How often a scope that has failed tells what went well."""

AWAY_S = 1.0
NONE = Results(0, 0)
MOST_SCOPES = 1_000
"""Scopes that are told; failures of more of them stay here."""


class Link(Protocol):
    """The shared store, as far as results need it."""

    async def add(self, additions: Sequence[Addition]) -> list[tuple[int, ...]]:
        """The sums after each addition. Raises one of `faults` where that cannot be known."""
        ...


@dataclass(slots=True)
class _Scope:
    """What is told of one scope.

    Attributes:
        breaker: Its breaker, here.
        until: Instant until which it is told.
        goods: How many good results have been told, by the breaker's own count.
        bad: Failures that wait to be told.
        ours: What was told of the last two cells.
    """

    breaker: Breaker
    until: Micros
    goods: int
    bad: int = 0
    ours: dict[int, Results] = field(default_factory=dict)


class FleetResults:
    """Tells our results and hears those of the others."""

    def __init__(
        self, link: Link, clock: Clock, *, prefix: str, faults: tuple[type[Exception], ...],
        away: Callable[[], bool], judge: Callable[[str, Breaker], None],
    ) -> None:  # fmt: skip
        """Nothing is sent before `run`.

        Args:
            link: The shared store.
            clock: Cells by its wall, rests by its timers.
            prefix: Of the fleet's keys.
            faults: What a store that does not answer looks like.
            away: Whether the store is known to be away: then nothing is told.
            judge: Called with scope and breaker once others have failed as well.
        """
        self._link = link
        self._clock = clock
        self._prefix = f"{prefix}results:"
        self._faults = faults
        self._away = away
        self._judge = judge
        self._scopes: dict[str, _Scope] = {}
        self._due = asyncio.Event()

    def __len__(self) -> int:
        """Scopes that are told."""
        return len(self._scopes)

    def failed(self, scope: str, breaker: Breaker, window: Micros) -> None:
        """One of our attempts failed; `window` is the rules' slow one."""
        now = self._clock.now()
        one = self._scopes.get(scope)
        if one is None or one.breaker is not breaker:
            if len(self._scopes) >= MOST_SCOPES:
                return
            # What went well just before counts too, or the first failure would be one of one.
            one = _Scope(breaker, 0, breaker.goods - breaker.lately(now).good)
            self._scopes[scope] = one
        one.until = now + window
        one.bad += 1
        self._due.set()

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        while True:
            if self._scopes:
                timer = self._clock.after(PERIOD, self._due.set)
                await self._due.wait()
                timer.cancel()
            await self._due.wait()
            await self._clock.sleep(GATHER / MICRO)
            self._due.clear()
            now = self._clock.now()
            for scope in [name for name, one in self._scopes.items() if one.until <= now]:
                del self._scopes[scope]
            if self._away():
                self._drop()
            else:
                told = await self._told(now)
                end_if_cancelled()
                if not told:
                    self._drop()
                    await self._clock.sleep(AWAY_S)

    def _drop(self) -> None:
        """What waits is not told any more."""
        for one in self._scopes.values():
            one.bad, one.goods = 0, one.breaker.goods

    async def _told(self, now: Micros) -> bool:
        """Whether the store answered."""
        cell = round(self._clock.wall() * MICRO) // CELL
        fresh: list[tuple[str, _Scope, Results]] = []
        for scope, one in self._scopes.items():
            results = Results(one.breaker.goods - one.goods, one.bad)
            if any(results):
                one.goods, one.bad = one.breaker.goods, 0
                fresh.append((scope, one, results))
        if not fresh:
            return True
        additions = [
            Addition(
                key=f"{self._prefix}{scope}:{at}", anew=False, amounts=tuple(amounts),
                ttl_s=max(1, (one.until - now) // MICRO) + 60,
            )
            for scope, one, results in fresh
            for at, amounts in ((cell - 1, NONE), (cell, results))
        ]  # fmt: skip
        try:
            sums = iter(await self._link.add(additions))
        except self._faults as error:
            logger.warning("results_not_told", extra={"error": type(error).__name__})
            return False
        now = self._clock.now()
        for scope, one, results in fresh:
            said = one.ours.get(cell, NONE)
            said = Results(said.good + results.good, said.bad + results.bad)
            one.ours = {cell - 1: one.ours.get(cell - 1, NONE), cell: said}
            failures = 0
            for at, ours in one.ours.items():
                good, bad = next(sums)
                others = Results(max(0, good - ours.good), max(0, bad - ours.bad))
                one.breaker.heard(now, at, others)
                failures += others.bad
            if failures:
                self._judge(scope, one.breaker)
        return True
