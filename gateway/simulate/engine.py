"""Virtual time on a heap: callbacks at instants, equal instants in the order they were set.

No event loop, no thread, no clock: `now` moves to the next event and nothing else moves it, so a
run is a pure function of its scenario and seed. Time is integer micros; the sequence number breaks
ties, without which equal instants would run in the heap's order, not in theirs.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.units import Micros

TOLD_EVERY = 4096
"""Events between two looks at how far a run is."""


class Engine:
    """Events yet to come.

    Attributes:
        now: The instant of the event that runs.
        events: How many have run.
    """

    __slots__ = ("_heap", "_seq", "events", "now")

    def __init__(self, now: Micros = 0) -> None:
        self._heap: list[tuple[Micros, int, Callable[[Any], None], Any]] = []
        self._seq = 0
        self.now = now
        self.events = 0

    def __len__(self) -> int:
        """Events yet to come."""
        return len(self._heap)

    def at(self, when: Micros, callback: Callable[[Any], None], argument: Any = None) -> None:  # noqa: ANN401 - an event's argument is its callback's business
        """Call back at that instant, or at once after what is due now if it has passed."""
        self._seq += 1
        heappush(self._heap, (when, self._seq, callback, argument))

    def after(self, delay: Micros, callback: Callable[[Any], None], argument: Any = None) -> None:  # noqa: ANN401
        """Call back so much later."""
        self._seq += 1
        heappush(self._heap, (self.now + delay, self._seq, callback, argument))

    def run(self, until: Micros, told: Callable[[Micros], None] | None = None) -> None:
        """Every event up to that instant has run.

        Args:
            until: Later events stay.
            told: Called now and then with the present instant.
        """
        heap, pop, now = self._heap, heappop, self.now
        while heap and heap[0][0] <= until:
            for count in range(TOLD_EVERY):  # noqa: B007 - told how many after the loop
                when, _, callback, argument = pop(heap)
                if when > now:
                    self.now = now = when
                callback(argument)
                if not heap or heap[0][0] > until:
                    break
            self.events += count + 1
            if told is not None:
                told(now)
