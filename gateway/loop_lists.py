"""What agents did lately, known to all gateways of a fleet.

Some rules of repetition need to know what came after what: which tools an agent called and what
they returned, which two agents answer each other. Their calls may come by way of any gateway. So in
a fleet the last events of each also stand in a list in the shared store; after each of its own, a
gateway folds the whole list anew, so that order, results and changes in between count as if one
process had seen all. A call whose state has not heard for a second waits for that (`gathering.py`).
While the store is away every process judges by what it has heard.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gateway.admission.fleet import Listing
from gateway.gathering import FRESH, GATHER, Gathering, Pending
from gateway.resilience.alternation import Step
from gateway.resilience.repeats import Event, Print
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Iterable, Sequence

    from gateway.clock import Clock
    from gateway.resilience.loops import LoopRules

LATE: Micros = 3 * GATHER
"""An event may reach the store so much after another that happened later."""

_EVENT = struct.Struct("<BQQQQ")
_STEP = struct.Struct("<QQQ")
_CHANGES, _RESULT = 1, 2

E = TypeVar("E", Event, Step)
E_contra = TypeVar("E_contra", Event, Step, contravariant=True)


class Folded(Protocol[E_contra]):
    """A state that is folded of events.

    Attributes:
        kind: What its lists are called in the store.
        name: What the gateways of a fleet call it; 0 where nobody shares it.
        turn: Rises whenever it begins anew.
        heard_at: Instant at which it last heard of the fleet.
    """

    kind: str
    name: int
    turn: int
    heard_at: Micros

    def kept(self, rules: LoopRules) -> int:
        """How many events are kept."""
        ...

    def lasts(self, rules: LoopRules) -> Micros:
        """How long they are kept."""
        ...

    def retold(self, events: Iterable[E_contra], rules: LoopRules, now: Micros) -> None:
        """All that happened, here and elsewhere, was this; known at `now`."""
        ...


class Link(Protocol):
    """The shared store, as far as lists need it."""

    async def extend(self, listings: Sequence[Listing]) -> list[list[bytes]]:
        """The lists after each was extended. Raises one of `faults` where that cannot be known."""
        ...


class _Noted(Pending):
    """What is to be told of one state."""

    __slots__ = ("anew", "events", "folded", "rules", "turn")

    def __init__(self, folded: Folded[Any], rules: LoopRules) -> None:
        super().__init__()
        self.folded = folded
        self.turn = folded.turn
        self.rules = rules
        self.anew = False
        self.events: list[Any] = []


class LoopLists(Gathering[_Noted]):
    """The lists of a fleet."""

    def __init__(
        self, link: Link, clock: Clock, *, prefix: str, faults: tuple[type[Exception], ...],
        away: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Nothing is sent before `run`; for the rest see `Gathering`."""
        super().__init__(clock, faults=faults, away=away)
        self._link = link
        self._prefix = prefix

    def note(self, folded: Folded[E], event: E, rules: LoopRules) -> None:
        """That happened here; its instant is one of the clock."""
        noted = self._of(folded, rules)
        if noted is not None:
            noted.events.append(event)

    def clear(self, folded: Folded[E], rules: LoopRules) -> None:
        """It begins anew, in the whole fleet. Call it after the state's own `clear`."""
        noted = self._of(folded, rules)
        if noted is not None:
            noted.anew = True

    def ask(self, folded: Folded[E], rules: LoopRules, now: Micros) -> list[Future[None]]:
        """What to wait for until it has heard of the fleet; nothing where it has lately."""
        if now - folded.heard_at <= FRESH:
            return []
        noted = self._of(folded, rules)
        return [] if noted is None else [self.hurried(noted)]

    def _of(self, folded: Folded[Any], rules: LoopRules) -> _Noted | None:
        noted = self.waiting(folded.name)
        if noted is not None and noted.folded is folded and noted.turn == folded.turn:
            return noted
        noted = _Noted(folded, rules)
        return noted if folded.name and self.put(folded.name, noted) else None

    async def exchange(self, taken: list[_Noted]) -> None:
        """Extend the lists, and fold what they hold."""
        skew = round(self.clock.wall() * MICRO) - self.clock.now()
        listings = [
            Listing(
                key=f"{self._prefix}{one.folded.kind}:{one.folded.name:016x}", anew=one.anew,
                items=[packed(event, skew) for event in one.events],
                most=one.folded.kept(one.rules),
                ttl_s=one.folded.lasts(one.rules) // MICRO + 5,
            )
            for one in taken
        ]  # fmt: skip
        lists = await self._link.extend(listings)
        now = self.clock.now()
        for one, items in zip(taken, lists, strict=True):
            if one.turn != one.folded.turn:
                continue  # it began anew meanwhile
            later = self.waiting(one.folded.name)
            events = [event for item in items if (event := unpacked(item, skew)) is not None]
            if later is not None and later.folded is one.folded:
                events += later.events
            one.folded.retold(in_order(events), one.rules, now)


def in_order(events: list[E]) -> list[E]:
    """The events as they happened.

    They stand as they were told, which each gateway does up to `LATE` after; their instants are
    those of gateways' clocks, which may differ. So only what lies closer together is sorted, and
    clocks that differ by more do no harm beyond that.
    """
    found: list[E] = []
    for event in events:
        at = len(found)
        while at and 0 < found[at - 1].at - event.at <= LATE:
            at -= 1
        found.insert(at, event)
    return found


def packed(event: Event | Step, skew: Micros) -> bytes:
    """The event for the store, its instant by the wall clock."""
    if isinstance(event, Step):
        return _STEP.pack(event.who, event.what, event.at + skew)
    flags = _CHANGES * event.print.changes + (_RESULT if event.result is not None else 0)
    made = event.print
    return _EVENT.pack(flags, made.exact, made.masked, event.result or 0, event.at + skew)


def unpacked(item: bytes, skew: Micros) -> Event | Step | None:
    """The event, its instant by our clock; None for what another release wrote."""
    if len(item) == _STEP.size:
        who, what, at = _STEP.unpack(item)
        return Step(at - skew, who, what)
    if len(item) != _EVENT.size:
        return None
    flags, exact, masked, result, at = _EVENT.unpack(item)
    made = Print(exact=exact, masked=masked, changes=bool(flags & _CHANGES))
    return Event(at - skew, made, result if flags & _RESULT else None)
