"""Calls kept until a breaker closes: their states, in which order and how fast they go on. Pure.

A held call is executed at most once. What makes it so is the difference between *claimed* (in
somebody's hands, nothing sent) and *sending* (the request may have reached a provider), which is
written durably before the first byte goes out:

    open ──claim──▶ claimed ──send──▶ sending ──complete──▶ done
     ▲ │              │ │                │ ├──doubt, recover──▶ in_doubt
     │ ├─expire──▶ expired │ ◀─────────────┘ └──refuse──▶ refused
     │ └─cancel──▶ cancelled (also from claimed and sending)
     └──give_back── claimed, sending (only where the provider definitely did not serve it)
     └──recover──── claimed (its holder died before it sent anything)

A holder that dies while *sending* leaves the call in doubt; it is reported and never sent again.
Every step carries the epoch of its claim, so that whoever lost a call cannot act on it.
Source: `execution.md` §15, §6 (class `model`), §7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from scheduler.errors import IllegalTransition
from scheduler.units import MICRO, Micros

FIRST_PAUSE: Micros = MICRO
LONGEST_PAUSE: Micros = 60 * MICRO


class State(StrEnum):
    """States of a held call."""

    OPEN = "open"
    CLAIMED = "claimed"
    SENDING = "sending"
    DONE = "done"
    REFUSED = "refused"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    IN_DOUBT = "in_doubt"


class Event(StrEnum):
    """What may happen to a held call."""

    CLAIM = "claim"
    SEND = "send"
    GIVE_BACK = "give_back"
    COMPLETE = "complete"
    REFUSE = "refuse"
    DOUBT = "doubt"
    EXPIRE = "expire"
    CANCEL = "cancel"
    RECOVER = "recover"


TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType({
    (State.OPEN, Event.CLAIM): State.CLAIMED,
    (State.OPEN, Event.EXPIRE): State.EXPIRED,
    (State.OPEN, Event.CANCEL): State.CANCELLED,
    (State.CLAIMED, Event.SEND): State.SENDING,
    (State.CLAIMED, Event.GIVE_BACK): State.OPEN,
    (State.CLAIMED, Event.REFUSE): State.REFUSED,
    (State.CLAIMED, Event.CANCEL): State.CANCELLED,
    (State.CLAIMED, Event.RECOVER): State.OPEN,
    (State.SENDING, Event.SEND): State.SENDING,
    (State.SENDING, Event.GIVE_BACK): State.OPEN,
    (State.SENDING, Event.COMPLETE): State.DONE,
    (State.SENDING, Event.REFUSE): State.REFUSED,
    (State.SENDING, Event.DOUBT): State.IN_DOUBT,
    (State.SENDING, Event.CANCEL): State.CANCELLED,
    (State.SENDING, Event.RECOVER): State.IN_DOUBT,
})  # fmt: skip
"""The only legal pairs. There is no way out of a final state, and none from *sending* to *claimed*.
"""

FINAL = frozenset(
    (State.DONE, State.REFUSED, State.EXPIRED, State.CANCELLED, State.IN_DOUBT)
)  # fmt: skip
LIVE = frozenset(State) - FINAL


def move(state: State, event: Event) -> State:
    """The state after that event.

    Raises:
        IllegalTransition: The pair is not in the table.
    """
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise IllegalTransition(f"a call that is {state.value} cannot {event.value}")
    return after


def sources(event: Event, to: State | None = None) -> tuple[State, ...]:
    """The states in which that event is legal, in the table's order.

    Args:
        event: Which.
        to: Only those from which it leads there.
    """
    return tuple(
        before
        for (before, what), after in TRANSITIONS.items()
        if what is event and to in (None, after)
    )


def pause(tries: int) -> Micros:
    """How long a call that a provider refused stays back: doubling, from 1 s to a minute.

    Args:
        tries: How often it was refused, from 1.
    """
    return min(LONGEST_PAUSE, FIRST_PAUSE << min(16, max(0, tries - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what is kept.

    Attributes:
        max_calls: Rows, final ones included until retention forgets them.
        max_bytes: Bytes of their requests and replies.
        max_per_owner: Live holds of one owner.
    """

    max_calls: int = 10_000
    max_bytes: int = 1 << 30
    max_per_owner: int = 1_000


class Ramp:
    """How many held calls of one scope may go on now: 1, 2, 4 … at once, and so many a second.

    A recovering provider sees one call first. The width doubles when as many were served as it is
    wide, and falls back to one when a call comes back: a hold must not become a herd.

    Attributes:
        width: Calls that may be under way.
        running: Calls under way.
    """

    __slots__ = ("_good", "_looked", "_tokens", "running", "width")

    def __init__(self, now: Micros) -> None:
        self.width = 1
        self.running = 0
        self._good = 0
        self._tokens: Micros = MICRO
        self._looked = now

    def __repr__(self) -> str:
        """Width and use: the test interface."""
        return f"<Ramp {self.running}/{self.width} good {self._good}>"

    def room(self, *, now: Micros, rate: int, widest: int) -> int:
        """How many more may start at this instant.

        Args:
            now: The instant; one before the last counts as the last.
            rate: Starts per second at most, at least 1.
            widest: Bound on the width, at least 1.
        """
        self.width = min(self.width, widest)
        elapsed = max(0, now - self._looked)
        self._looked = max(now, self._looked)
        # One second's worth at most, so that an idle minute is no burst of a minute.
        self._tokens = min(rate * MICRO, self._tokens + elapsed * rate)
        return max(0, min(self.width - self.running, self._tokens // MICRO))

    def started(self, count: int = 1) -> None:
        """So many are under way in addition."""
        self.running += count
        self._tokens = max(0, self._tokens - count * MICRO)

    def served(self, *, widest: int) -> None:
        """One came to its end with an answer."""
        self.running -= 1
        self._good += 1
        if self._good >= self.width:
            self.width = min(widest, self.width * 2)
            self._good = 0

    def refused(self) -> None:
        """One came back: begin anew with one."""
        self.running -= 1
        self.width = 1
        self._good = 0

    def ended(self) -> None:
        """One ended without a word on the provider's health."""
        self.running -= 1
