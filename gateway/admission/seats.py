"""The gateways that share a pool: who is alive, what is in their mail, what they ask for. Pure.

Mail is kept until acknowledged, because the reply that carried it may have been lost: a grant that
vanished with a reply would hold its permit and its tokens while its caller waits for ever. A silent
gateway loses its seat, and the grants it never fetched are given back in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admission.values import Admit
from gateway.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.admission.values import Caller, Verdict
    from gateway.units import Micros

DEMAND_HALF_LIFE: Micros = 30 * MICRO

MOST_DEMAND: Micros = 1 << 42
"""Demand counted at most, about 50 days of pool time: a thousand times of it is still an exact
double, which the shared twin needs."""


class Seat:
    """What the pool knows of one gateway.

    Attributes:
        seen: When it ticked last.
        demand: Spans it asked for, halved every half-life, as of `demand_at`.
        mail: Events with their numbers, oldest first, until acknowledged.
        mail_seq: Number of the newest.
    """

    __slots__ = ("demand", "demand_at", "mail", "mail_seq", "seen")

    def __init__(self, now: Micros) -> None:
        self.seen = now
        self.demand: Micros = 0
        self.demand_at = now
        self.mail: list[tuple[int, Verdict]] = []
        self.mail_seq = 0


def faded(demand: Micros, since: Micros, now: Micros) -> Micros:
    """Demand of then as it counts now.

    All demand halves at the same instants, so that one sum serves for a thousand seats: nobody
    walks through all of them in a tick.
    """
    return demand >> min(64, now // DEMAND_HALF_LIFE - since // DEMAND_HALF_LIFE)


class Seats:
    """All gateways of one pool.

    Attributes:
        by_name: Gateway name to seat.
        trust_until: Until then nobody counts as silent: after a stall of the store, when nobody
            could tick, silence proves nothing.
        due: When `sweep` has something to do.
        demand, demand_at: Of all seats together, and as of when.
    """

    __slots__ = ("_dead", "by_name", "demand", "demand_at", "due", "trust_until")

    def __init__(self, dead: Micros, now: Micros) -> None:
        self.by_name: dict[str, Seat] = {}
        self._dead = dead
        self.trust_until = now + dead
        self.due = now + dead // 2
        self.demand: Micros = 0
        self.demand_at = now

    def __len__(self) -> int:
        """Gateways that have a seat."""
        return len(self.by_name)

    def sit(self, caller: Caller, now: Micros) -> tuple[Seat, bool]:
        """The caller's seat, seen now, without the mail it acknowledged; and whether it is new."""
        seat = self.by_name.get(caller.gateway)
        fresh = seat is None
        if seat is None:
            seat = self.by_name[caller.gateway] = Seat(now)
        seat.seen = now
        if seat.mail:
            seat.mail = [letter for letter in seat.mail if letter[0] > caller.mail_ack]
        return seat, fresh

    def post(self, gateway: str, event: Verdict) -> bool:
        """The event lies in the gateway's mail; False if it has no seat."""
        seat = self.by_name.get(gateway)
        if seat is None:
            return False
        seat.mail_seq += 1
        seat.mail.append((seat.mail_seq, event))
        return True

    def stalled(self, now: Micros) -> None:
        """Nobody could tick for a while: nobody is silent for the next `dead`."""
        self.trust_until = now + self._dead

    def silent(self, gateway: str, now: Micros) -> bool:
        """True if that gateway must be thought dead."""
        if now < self.trust_until:
            return False
        seat = self.by_name.get(gateway)
        return seat is None or now - seat.seen > self._dead

    def sweep(self, now: Micros, give_back: Callable[[str], None]) -> None:
        """Every half `dead`: silent gateways lose their seat, unfetched grants are given back."""
        if now < self.due:
            return
        self.due = now + self._dead // 2
        # One gateway alone is the caller, or everybody: then nobody is left to be fair to.
        if len(self.by_name) < 2:
            return
        for name in sorted(name for name in self.by_name if self.silent(name, now)):
            seat = self.by_name.pop(name)
            left = faded(self.demand, self.demand_at, now)
            self.demand = max(0, left - faded(seat.demand, seat.demand_at, now))
            self.demand_at = now
            for _, event in seat.mail:
                if isinstance(event, Admit):
                    give_back(event.rid)

    def asked(self, mine: Seat, span: Micros, now: Micros) -> int:
        """That seat asked for so much more; its share of all demand, parts per million."""
        mine.demand = min(faded(mine.demand, mine.demand_at, now) + span, MOST_DEMAND)
        self.demand = min(faded(self.demand, self.demand_at, now) + span, MOST_DEMAND)
        mine.demand_at = self.demand_at = now
        part = min(mine.demand, self.demand)
        return part * 1_000_000 // self.demand if self.demand else 0

    def shift(self, by: Micros) -> None:
        """The clock stepped."""
        for seat in self.by_name.values():
            seat.seen += by
            seat.demand_at += by
        self.demand_at += by
        self.trust_until += by
        self.due += by
