"""The sliding log of one window: what was charged when, in cells of a fixed width.

A log slot is dropped only when all of it is older than the window plus the spread, so the sum over
the log is never less than the true sum over the window: quantization errs towards safety. A refund
goes into the slot of its grant; in a newer slot it would outlive its charge and over-admit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.units import Micros

FINEST: Micros = 20_000
"""No slot is narrower than this, whatever the window."""

CELLS = 600
"""Slots per window at most; with the spread a few more are held."""


class SlotLog:
    """Charges of the dimensions that share one window; `sums` belongs to the meter.

    Attributes:
        width: Micros per slot.
        keep: Window plus spread: how long a slot counts after its end.
        dims: Indices of the dimensions that this log holds.
        slots: Slot number to charges; every vector has the length of the whole pool.
        oldest: No slot below this number is held.
        due: Before this instant `forget` has nothing to do.
    """

    __slots__ = ("dims", "due", "keep", "oldest", "size", "slots", "width")

    def __init__(
        self, *, window: Micros, spread: Micros, dims: tuple[int, ...], size: int, now: Micros
    ) -> None:
        self.width = max(FINEST, window // CELLS)
        self.keep = window + spread
        self.dims = dims
        self.size = size
        self.slots: dict[int, list[int]] = {}
        self.oldest = (now - self.keep) // self.width
        self.due = 0

    def forget(self, now: Micros, sums: list[int]) -> None:
        """Slots that no longer touch the window are gone from log and sums."""
        edge = (now - self.keep) // self.width
        self.due = (edge + 1) * self.width + self.keep
        oldest = self.oldest
        if edge <= oldest:
            return
        self.oldest = edge
        slots = self.slots
        if not slots:
            return
        # Long idle: looking at what is held is cheaper than counting through the gap.
        gone = (
            range(oldest, edge) if edge - oldest <= len(slots) else [s for s in slots if s < edge]
        )
        for number in gone:
            cell = slots.pop(number, None)
            if cell is not None:
                for i in self.dims:
                    sums[i] -= cell[i]

    def cell(self, now: Micros) -> list[int]:
        """The current slot, to be added to."""
        number = now // self.width
        cell = self.slots.get(number)
        if cell is None:
            cell = self.slots[number] = [0] * self.size
        return cell

    def charge(self, now: Micros, cost: Sequence[int], sums: list[int]) -> None:
        """The cost of this log's dimensions stands in the current slot."""
        cell = self.cell(now)
        for i in self.dims:
            units = cost[i]
            cell[i] += units
            sums[i] += units

    def add(self, now: Micros, i: int, units: int, sums: list[int]) -> None:
        """More units of one dimension stand in the current slot."""
        self.cell(now)[i] += units
        sums[i] += units

    def refund(self, at: Micros, i: int, units: int, sums: list[int]) -> None:
        """Units are taken out of the slot charged at that instant, if it is still held."""
        cell = self.slots.get(at // self.width)
        if cell is not None:
            back = min(units, cell[i])
            cell[i] -= back
            sums[i] -= back

    def until(self, now: Micros, i: int, over: int) -> Micros:
        """Micros until `over` units of a dimension have left the log; at least 1.

        Exact as long as nothing is refunded. When more is asked than the log holds, the answer is
        the moment when it is empty: then anything fits.
        """
        last = now // self.width
        for number, cell in self.slots.items():
            if cell[i]:
                last = number
                over -= cell[i]
                if over <= 0:
                    break
        # The first multiple of the width at which `forget` sees the slot behind the edge.
        return max(1, (last + 1) * self.width + self.keep - now)

    def fill(self, now: Micros, i: int, total: int, sums: list[int]) -> None:
        """The dimension's log holds `total`, spread evenly over the window: the cold start."""
        for cell in self.slots.values():
            sums[i] -= cell[i]
            cell[i] = 0
        newest = now // self.width
        cells = max(1, newest - self.oldest)
        each, rest = divmod(total, cells)
        for number in range(newest - cells + 1, newest + 1):
            cell = self.slots.get(number) or [0] * self.size
            cell[i] = each + (rest if number == newest else 0)
            self.slots[number] = cell
        self.slots = dict(sorted(self.slots.items()))
        sums[i] += total

    def adopt(self, old: SlotLog, i: int, j: int, sums: list[int]) -> None:
        """Dimension `i` of this log holds what dimension `j` of a log of the same width held."""
        for number, cell in old.slots.items():
            if cell[j] and number >= self.oldest:
                mine = self.slots.setdefault(number, [0] * self.size)
                mine[i] += cell[j]
                sums[i] += cell[j]
        self.slots = dict(sorted(self.slots.items()))

    def clear(self, now: Micros) -> None:
        """Nothing is held; the caller sets the sums."""
        self.slots = {}
        self.oldest = (now - self.keep) // self.width
        self.due = 0
