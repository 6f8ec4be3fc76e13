"""What the gate of the tool plane asks, wired together, and its upkeep in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.tools.approvals import Consent, wall
from gateway.tools.definitions import Definitions, fetching
from gateway.tools.effects import Ledger
from gateway.tools.reconcile import Reconciling, asking
from gateway.tools.repeats import Repeats
from gateway.tools.schemas import Contracts
from gateway.units import MICRO
from scheduler.api import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.clock import Clock
    from gateway.snapshot import Snapshot
    from gateway.tools.effects import Spawn
    from gateway.tools.exchange import Exchanges
    from gateway.units import Micros
    from scheduler.api import Approvals, Effect, Effects

SWEEP: Micros = 30 * MICRO
BATCH = 500
"""Rows of one kind swept in one transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """What the gate asks."""

    definitions: Definitions
    contracts: Contracts
    ledger: Ledger
    repeats: Repeats
    consent: Consent
    clock: Clock


def guards(
    exchanges: Exchanges,
    *,
    effects: Effects,
    approvals: Approvals,
    clock: Clock,
    spawn: Spawn,
    token: Callable[[int], bytes],
) -> Guards:
    """All of them.

    Args:
        exchanges: For lists of tools.
        effects: The store's record.
        approvals: The store's consent.
        clock: Everybody's.
        spawn: Starts a task with an owner.
        token: Makes random bytes that nobody can guess.
    """
    definitions = Definitions(fetching(exchanges), clock)
    contracts = Contracts(definitions)
    ledger = Ledger(effects, clock, spawn)
    ledger.reconciling = Reconciling(asking(exchanges), contracts.screened, effects, clock)
    return Guards(
        definitions=definitions,
        contracts=contracts,
        ledger=ledger,
        repeats=Repeats(),
        consent=Consent(approvals, clock, token),
        clock=clock,
    )


class Upkeep:
    """Effects that nobody settles become doubts, questions that nobody answers expire.

    Args:
        effects, approvals: The store's parts.
        own: Whether this process is the one that tidies.
        clock: Its time.
        snapshot: The policy in force.

    Attributes:
        on_doubt: Called with every effect that has come in doubt.
        on_fault: Called with a sentence when the store fails.
    """

    def __init__(
        self,
        *,
        effects: Effects,
        approvals: Approvals,
        own: Callable[[], bool],
        clock: Clock,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._effects = effects
        self._approvals = approvals
        self._own = own
        self._clock = clock
        self._snapshot = snapshot
        self._began = wall(clock)
        self._recovered = False
        self._faulty = False
        self.on_doubt: Callable[[Effect], None] | None = None
        self.on_fault: Callable[[str], None] | None = None

    async def run(self) -> None:
        """Tidy until cancelled."""
        while True:
            await self.turn()
            await self._clock.sleep(SWEEP / MICRO)

    async def turn(self) -> None:
        """One round; a store that fails is said once, and asked again."""
        try:
            await self._turn()
            self._faulty = False
        except SchedulerError as error:
            if not self._faulty and self.on_fault is not None:
                self.on_fault(str(error))
            self._faulty = True

    async def _turn(self) -> None:
        if not self._own():
            return
        if not self._recovered:
            # What was reserved before we began belongs to a process that is gone: it held the
            # ownership, or its call would be on record as ours.
            self._tell(await self._effects.abandoned(before=self._began))
            self._recovered = True
        now = wall(self._clock)
        self._tell(await self._effects.overdue(now=now, limit=BATCH))
        await self._effects.prune(now=now, limit=BATCH)
        await self._approvals.expire(now=now, limit=BATCH)
        keep = self._snapshot().approvals.keep
        await self._approvals.prune(before=now - keep, limit=BATCH)

    def _tell(self, doubted: list[Effect]) -> None:
        for effect in doubted:
            if self.on_doubt is not None:
                self.on_doubt(effect)
