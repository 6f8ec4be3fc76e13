"""What an agent called lately, known to all gateways of a fleet.

The rules of repetition on the tool plane count calls within a window, of an agent whose calls may
come by way of any gateway. In a fleet the last calls and results of each agent also stand in a list
in the shared store; after each of its own, a gateway folds the whole list anew, so that order,
results and changes in between count as if one process had seen all. A call whose tally has not
heard for a second waits for that (`gathering.py`). While the store is away every process judges by
what it has heard.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from gateway.admission.fleet import Listing
from gateway.gathering import FRESH, Gathering, Pending
from gateway.resilience.repeats import Event, Print
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.clock import Clock
    from gateway.resilience.loops import LoopRules
    from gateway.resilience.repeats import Tally

KEPT = 64
"""Events of one agent in the list: calls and their results."""

_EVENT = struct.Struct("<BQQQQ")
_CHANGES, _RESULT = 1, 2


class Link(Protocol):
    """The shared store, as far as lists need it."""

    async def extend(self, listings: Sequence[Listing]) -> list[list[bytes]]:
        """The lists after each was extended. Raises one of `faults` where that cannot be known."""
        ...


class _Noted(Pending):
    """What is to be told of one agent."""

    __slots__ = ("anew", "events", "rules", "tally", "turn")

    def __init__(self, tally: Tally, rules: LoopRules) -> None:
        super().__init__()
        self.tally = tally
        self.turn = tally.turn
        self.rules = rules
        self.anew = False
        self.events: list[Event] = []


class ToolCalls(Gathering[_Noted]):
    """The lists of a fleet."""

    def __init__(
        self, link: Link, clock: Clock, *, prefix: str, faults: tuple[type[Exception], ...],
        away: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Nothing is sent before `run`; for the rest see `Gathering`."""
        super().__init__(clock, faults=faults, away=away)
        self._link = link
        self._prefix = f"{prefix}called:"

    def note(self, tally: Tally, event: Event, rules: LoopRules) -> None:
        """That happened here; its instant is one of the clock."""
        noted = self._of(tally, rules)
        if noted is not None:
            noted.events.append(event)

    def clear(self, tally: Tally, rules: LoopRules) -> None:
        """The agent begins anew, in the whole fleet. Call it after the tally's own `clear`."""
        noted = self._of(tally, rules)
        if noted is not None:
            noted.anew = True

    async def refresh(self, tally: Tally, rules: LoopRules, now: Micros) -> None:
        """It has heard of the fleet within `FRESH`, or the store does not answer."""
        if now - tally.heard_at > FRESH:
            noted = self._of(tally, rules)
            if noted is not None:
                await self.heard([noted])

    def _of(self, tally: Tally, rules: LoopRules) -> _Noted | None:
        noted = self.waiting(tally.name)
        if noted is not None and noted.tally is tally and noted.turn == tally.turn:
            return noted
        noted = _Noted(tally, rules)
        return noted if tally.name and self.put(tally.name, noted) else None

    async def exchange(self, taken: list[_Noted]) -> None:
        """Extend the lists, and fold what they hold."""
        skew = round(self.clock.wall() * MICRO) - self.clock.now()
        listings = [
            Listing(
                key=f"{self._prefix}{one.tally.name:016x}", anew=one.anew,
                items=[packed(event, skew) for event in one.events], most=KEPT,
                ttl_s=one.rules.window // MICRO + 5,
            )
            for one in taken
        ]  # fmt: skip
        lists = await self._link.extend(listings)
        now = self.clock.now()
        for one, items in zip(taken, lists, strict=True):
            if one.turn != one.tally.turn:
                continue  # it began anew meanwhile
            later = self.waiting(one.tally.name)
            events = [event for item in items if (event := unpacked(item, skew)) is not None]
            events += later.events if later is not None else []
            one.tally.retold(events, one.rules, now)


def packed(event: Event, skew: Micros) -> bytes:
    """The event for the store, its instant by the wall clock."""
    flags = _CHANGES * event.print.changes + (_RESULT if event.result is not None else 0)
    made = event.print
    return _EVENT.pack(flags, made.exact, made.masked, event.result or 0, event.at + skew)


def unpacked(item: bytes, skew: Micros) -> Event | None:
    """The event, its instant by our clock; None for what another release wrote."""
    if len(item) != _EVENT.size:
        return None
    flags, exact, masked, result, at = _EVENT.unpack(item)
    made = Print(exact=exact, masked=masked, changes=bool(flags & _CHANGES))
    return Event(at - skew, made, result if flags & _RESULT else None)
