"""A pool while its shared store is away: our own share of it, kept by our own core. Pure.

Nobody can know what the other processes send meanwhile, so each takes what it lately had of the
demand, and nine tenths of that. What was spent so is told to the store when it is back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.admission.core import Caller, PoolCore
from gateway.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.admission.values import Dimension, PoolSpec
    from gateway.units import Micros

KEPT_PPM = 900_000
"""Share of our share that is used: clocks and guesses differ."""

UNTOLD_PPM = 50_000
"""Share of a process that the store never told one: a fleet of twenty fits."""

ALONE = "alone"
"""Name of the only gateway of such a core."""


def part(spec: PoolSpec, share_ppm: int, used: Sequence[int]) -> PoolSpec:
    """The rules of a pool that holds that share of it; of a budget, a share of what is left.

    One request fits always: the share of a small limit would otherwise be none at all.

    Args:
        spec: The whole pool.
        share_ppm: Our share of the demand, 0 to 1,000,000.
        used: What was last known to be used, per dimension; short or empty counts as nothing.
    """
    ppm = share_ppm * KEPT_PPM // MICRO

    def of(units: int) -> int:
        return units * ppm // MICRO

    def lanes(dim: Dimension, all_of: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        least = min(dim.limit, MICRO) if dim.name == "requests" and any(all_of) else 0
        zero, one, two, three = (max(least, of(units)) for units in all_of)
        return zero, one, two, three

    def smaller(i: int, dim: Dimension) -> Dimension:
        spent = used[i] if dim.calendar and i < len(used) else 0
        least = min(dim.limit, MICRO) if dim.name == "requests" else 1
        return replace(
            dim,
            limit=max(least, of(max(0, dim.limit - spent))),
            depth=lanes(dim, dim.depth),
            cap=lanes(dim, dim.cap),
        )

    return replace(
        spec,
        dimensions=tuple(smaller(i, dim) for i, dim in enumerate(spec.dimensions)),
        concurrency=max(1, of(spec.concurrency)) if spec.concurrency else 0,
    )


def fits_whole(spec: PoolSpec, lane: int, cost: Sequence[int]) -> bool:
    """Whether a call that is too large for our share is not too large for the pool."""
    return all(
        units <= (dim.cap[lane] or dim.limit)
        for units, dim in zip(cost, spec.dimensions, strict=True)
    )


class Stopgap:
    """Our own core of a shared pool, from the first moment of an outage to its end.

    Attributes:
        spent: What was granted here, corrected by its settlements, per dimension.
    """

    __slots__ = ("core", "spent")

    def __init__(self, spec: PoolSpec, now: Micros, share_ppm: int, used: Sequence[int]) -> None:
        """Started cold: what we sent before the outage still counts at the provider."""
        self.core = PoolCore(part(spec, share_ppm, used), now, cold=spec.queue)
        self.spent = [0] * len(spec.dimensions)

    @property
    def caller(self) -> Caller:
        """Acknowledges everything: no reply of a function call is ever lost."""
        seat = self.core.seats.by_name.get(ALONE)
        return Caller(ALONE, mail_ack=seat.mail_seq if seat is not None else 0)

    def granted(self, cost: Sequence[int]) -> None:
        """The provider will count so much."""
        self.correct((0,) * len(cost), cost)

    def correct(self, cost: Sequence[int], actual: Sequence[int]) -> None:
        """What was counted as `cost` is `actual`."""
        for i, units in enumerate(actual):
            self.spent[i] = max(0, self.spent[i] + units - cost[i])
