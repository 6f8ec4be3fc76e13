"""Counters and histograms as the data path writes them: plain numbers, told to Prometheus later.

A counter of the library takes a lock and checks itself twice, 1 to 2 us for each of the dozen
steps of a call. These are written by the loop alone; whoever makes a page calls `tell`, which hands
on what came since. `tell` may run in another thread: it reads each number once and changes only
what it has told, so nothing is lost or told twice.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import Counter, Histogram


class Tally:
    """A counter.

    Attributes:
        total: So many so far; only ever added to.
    """

    __slots__ = ("_counter", "_told", "total")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.total = 0
        self._told = 0

    def inc(self, amount: int = 1) -> None:
        """So many more."""
        self.total += amount

    def tell(self) -> None:
        """The counter stands where this one does."""
        total = self.total
        if total != self._told:
            self._counter.inc(total - self._told)
            self._told = total


class Spread:
    """A histogram."""

    __slots__ = ("_bounds", "_counts", "_histogram", "_sum", "_told", "_told_sum")

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        """`bounds` are the histogram's own, ascending, without infinity."""
        self._histogram = histogram
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._told = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._told_sum = 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def tell(self) -> None:
        """The histogram stands where this one does."""
        # It has no method to take many values at once.
        histogram, total = self._histogram, self._sum
        for at, count in enumerate(list(self._counts)):
            if count != self._told[at]:
                histogram._buckets[at].inc(count - self._told[at])  # noqa: SLF001
                self._told[at] = count
        if total != self._told_sum:
            histogram._sum.inc(total - self._told_sum)  # noqa: SLF001
            self._told_sum = total
