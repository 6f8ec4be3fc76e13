"""PoolStore: what the layers may ask of admission. Embedded (`local.py`) and shared (`fleet.py`).

The embedded store ships and is the default; the shared one holds the same promises across
processes. All methods but `acquire`'s wait are synchronous: a settlement goes into the store's
outbox at once, so that no cancellation can come between the end of a body and its settlement.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from gateway.admission.core import Outcome
from gateway.units import valueclass

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Sequence

    from gateway.admission.core import Ask, Dimension, PoolSpec, Verdict
    from gateway.units import Micros

__all__ = ["DimensionView", "LaneView", "Outcome", "PoolStore", "PoolView"]


@valueclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    """One lane of a pool, for status."""

    waiting: int
    backlog: Micros


@valueclass(frozen=True, slots=True, kw_only=True)
class DimensionView:
    """One dimension of a pool, for status; amounts in micro-units.

    Attributes:
        name: Unit; two dimensions of one pool may share it and differ in `window`.
        limit: Per window.
        level: What stands in the bucket, or was spent of a calendar budget.
        used: Sum of the sliding log; equals `level` where there is none.
        foreign: Estimated use by others.
        window: Micros; nominal for calendar dimensions.
        calendar: "", "day" or "month".
        resets_in: Micros until everything now counted is forgotten.
    """

    name: str
    limit: int
    level: int
    used: int
    foreign: int
    because: str = ""
    window: Micros = 0
    calendar: str = ""
    resets_in: Micros = 0


@valueclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A consistent look at one pool, for status and metrics.

    Attributes:
        factor_ppm: The adaptive multiplier, 500,000 to 1,000,000.
        blocked_for: Micros until the provider's last word to wait is over.
        eta: Predicted wait of a new call per lane.
    """

    name: str
    now: Micros
    in_flight: int
    concurrency: int
    factor_ppm: int
    blocked_for: Micros
    lanes: tuple[LaneView, ...]
    dimensions: tuple[DimensionView, ...]
    eta: tuple[Micros, ...] = field(default=(0, 0, 0, 0))
    would_have_waited: int = 0


class PoolStore(Protocol):
    """Admission as the layers see it. Every method is safe to repeat by rid."""

    def acquire(self, spec: PoolSpec, ask: Ask) -> Verdict | Future[Verdict]:
        """A verdict at once where the pool can say so, else a future of it.

        A future that is cancelled withdraws the ask: the waiter is gone, or the grant given back in
        full, before control returns to the loop. A pool unknown so far starts here; a spec of a
        higher revision replaces the pool's rules in place, levels and waiters survive.
        """
        ...

    def settle(
        self,
        pool: str,
        rid: str,
        *,
        outcome: Outcome,
        actual: tuple[int, ...] | None,
        retry_after: Micros = 0,
    ) -> None:
        """The attempt is over: its permit is free and the meter holds `actual` (None: as reserved).

        Unknown or repeated rids change nothing.
        """
        ...

    def cancel(self, pool: str, rid: str) -> None:
        """The ask is withdrawn; if granted and never sent, everything is given back."""
        ...

    def renew(self, pool: str, rid: str) -> None:
        """The lease of a grant in flight starts anew."""
        ...

    def signal(self, pool: str, foreign: tuple[int, ...]) -> None:
        """Others use at least this much of the quota, micro-units per dimension."""
        ...

    def view(self, pool: str) -> PoolView | None:
        """A look at one pool, or None if it has never been used."""
        ...

    def standing(self, pool: str) -> Sequence[tuple[Dimension, int]]:
        """Each dimension of a pool with what of it is used; nothing for a pool never used.

        As of a tenth of a second ago at most, or of the last exchange with a shared store.
        """
        ...

    def pools(self) -> tuple[str, ...]:
        """Names of all pools alive."""
        ...

    async def close(self) -> None:
        """Waiters get a soft `Shed`; timers are gone."""
        ...
