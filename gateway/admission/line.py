"""Who is next: four lanes, start-time fair queueing between tenants, kept places. Pure.

Between lanes priority is strict. Inside a lane the waiter with the smallest *tag* is first; equal
tags stand in order of arrival. A tag is where its tenant's turn begins on the lane's axis of
virtual time V: max(finish of the tenant's last call, V); the finish then moves by span / weight, so
tenants share pool time by weight, and a tenant's own calls keep their order. V follows the tags
granted.

A lane without waiters has nothing to be fair about: the next arrival finds V at the clock, and a
finish at or before V equals absence. So the map of tenants empties once a pool is quiet, and tags
stay near the clock, which keeps old tags ahead of newcomers when the state is lost.

Source: Goyal, Vin, Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from gateway.admission.values import LANES
from gateway.units import MICRO, MINUTE

if TYPE_CHECKING:
    from gateway.admission.values import Ask, Dimension
    from gateway.units import Micros


MAX_PLACES = 10_000
"""Places kept at most; beyond it the one that expires first is given up."""

PLACE_KEPT: Micros = 120 * MICRO
"""A place outlives the advised return by so much."""

SWEEP = 100
"""Places and leases ended per look at most, so that no tick is long."""

FEWEST_TENANTS = 64
"""The tenants of a lane are swept when their number has doubled, not below this."""

COUNTED_EXACTLY = 1_000
"""Up to so many waiters, what stands ahead of a place in the middle is added up; beyond, the whole
lane counts as ahead, which is too much, never too little."""

BEFORE = 1 << 52
"""Above every sequence number."""

LANE_ZERO_TENTHS = 3
"""Lane 0 may carry three tenths of the pool, over a minute; the excess enters lane 1."""


class Waiter(NamedTuple):
    """One call in line. The first two fields are its order; `seq` is unique."""

    tag: int
    seq: int
    ask: Ask
    lane: int
    span: Micros
    deadline: Micros
    gateway: str
    shape: tuple[Dimension, ...]


class Place(NamedTuple):
    """A kept place: whoever returns with its key stands where it stood."""

    tag: int
    seq: int
    lane: int
    tenant: str
    step: int
    expires: Micros


_NOBODY: tuple[dict[str, _Queued], ...] = ()
"""Most pools of a large fleet never queue: they share this."""


class _Queued:
    """One tenant's waiters in one lane: how many, and the latest tag among them.

    When the last of them leaves early its tag stays the latest until all have left: a newcomer then
    stands where that one stood, never worse.
    """

    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last = 0


class Line:
    """The waiters of one pool, and what their tenants have used.

    Attributes:
        v: Virtual time per lane.
        backlog: Spans waiting per lane.
        count: Waiters per lane.
        waiting: Request id to waiter.
        places: Place key to place.
    """

    __slots__ = (
        "_finish", "_heaps", "_place_ends", "_queued", "_seq", "_sweep_at", "_top", "_zero",
        "_zero_at", "backlog", "count", "places", "v", "waiting",
    )  # fmt: skip

    def __init__(self, now: Micros) -> None:
        self.v = [now] * LANES
        self.backlog = [0] * LANES
        self.count = [0] * LANES
        self.waiting: dict[str, Waiter] = {}
        self.places: dict[str, Place] = {}
        self._place_ends: list[tuple[Micros, str]] = []
        # Made when first used: most pools of a large fleet never queue.
        self._heaps: list[list[Waiter] | None] = [None] * LANES
        self._finish: list[dict[str, int] | None] = [None] * LANES
        self._queued: tuple[dict[str, _Queued], ...] = _NOBODY
        self._top = [0] * LANES
        self._sweep_at = [FEWEST_TENANTS] * LANES
        self._seq = 0
        self._zero = 0
        self._zero_at = now

    # --- tags

    def start(self, lane: int, tenant: str, now: Micros) -> int:
        """The tag a call of that tenant would get now. Counts nothing.

        Never before the tenant's own waiters: a refund moves its finish back, but what it asked
        first stays first.
        """
        tag = self.v[lane]
        if tag < now and not self.count[lane]:
            tag = self.v[lane] = now
        finishes = self._finish[lane]
        if finishes is not None:
            if self._top[lane] > tag:
                tag = max(tag, finishes.get(tenant, 0))
            else:
                self._finish[lane] = None
                self._sweep_at[lane] = FEWEST_TENANTS
        waiting = self._queued[lane].get(tenant) if self.count[lane] else None
        return tag if waiting is None else max(tag, waiting.last)

    def serve(self, lane: int, tenant: str, change: int, now: Micros) -> int:
        """The tag of a call granted at once while its lane is empty: booked and reached.

        What `start`, `rebook` and `reach` do there, in one step; `change` is above zero.
        """
        virtual, finishes = self.v[lane], self._finish[lane]
        if virtual < now:  # noqa: PLR1730 - the hot path
            virtual = now
        tag = virtual
        if finishes is None or self._top[lane] <= virtual:
            finishes = self._finish[lane] = {}
            self._sweep_at[lane] = FEWEST_TENANTS
        else:
            finish = finishes.get(tenant, 0)
            if finish > tag:  # noqa: PLR1730 - the hot path
                tag = finish
        self.v[lane] = tag
        finish = finishes[tenant] = tag + change
        if finish > self._top[lane]:  # noqa: PLR1730 - the hot path
            self._top[lane] = finish
        if len(finishes) > self._sweep_at[lane]:
            self._sweep(lane, virtual)
        return tag

    def rebook(self, lane: int, tenant: str, change: int) -> None:
        """The tenant uses so much more (or less) of the pool's time than was counted.

        Applied to a new call it is the rule of start-time fair queueing: its tag is the tenant's
        finish (or V), its finish the tag plus span / weight.
        """
        virtual, finishes = self.v[lane], self._finish[lane]
        if finishes is None:
            if change <= 0:
                return
            finishes = self._finish[lane] = {}
        finish = finishes.get(tenant, 0)
        finish = (finish if finish > virtual else virtual) + change  # noqa: FURB136 - the hot path
        if finish <= virtual:
            finishes.pop(tenant, None)
            return
        finishes[tenant] = finish
        if finish > self._top[lane]:  # noqa: PLR1730 - the hot path
            self._top[lane] = finish
        if len(finishes) > self._sweep_at[lane]:
            self._sweep(lane, virtual)

    def _sweep(self, lane: int, virtual: int) -> None:
        """Tenants whose past no longer counts are forgotten."""
        finishes = self._finish[lane] or {}
        alive = {name: at for name, at in finishes.items() if at > virtual}
        self._finish[lane] = alive
        self._sweep_at[lane] = max(FEWEST_TENANTS, 2 * len(alive))

    def reach(self, lane: int, tag: int) -> None:
        """A call with that tag was granted: virtual time is at least there."""
        self.v[lane] = max(self.v[lane], tag)

    def rest(self, now: Micros) -> None:
        """Lanes that nobody waits in forget the tenants whose past no longer counts."""
        for lane, finishes in enumerate(self._finish):
            if finishes is not None and not self.count[lane] and self._top[lane] <= now:
                self._finish[lane] = None
                self._sweep_at[lane] = FEWEST_TENANTS
                self.v[lane] = max(self.v[lane], now)

    def tenants(self, lane: int) -> int:
        """Tenants held in that lane's map, some past ones included until they are swept."""
        finishes = self._finish[lane]
        return 0 if finishes is None else len(finishes)

    def zero_carries(self, span: Micros, now: Micros) -> bool:
        """True, and counted, if lane 0 may carry a call of that span; else it belongs to lane 1.

        A counter in tenths of micros that decays by three per micro and holds 30 % of a minute.
        """
        held = max(0, self._zero - LANE_ZERO_TENTHS * (now - self._zero_at))
        self._zero_at = now
        fits = held + 10 * span <= LANE_ZERO_TENTHS * MINUTE
        self._zero = held + 10 * span if fits else held
        return fits

    def zero_refunds(self, span: Micros) -> None:
        """A call counted in lane 0 left without using it."""
        self._zero = max(0, self._zero - 10 * span)

    # --- waiting

    def number(self, *, before: bool = False) -> int:
        """The next sequence number: order of arrival among equal tags.

        Args:
            before: For a call that stood at its tag once already: whoever had an equal tag and was
                ahead of it is gone, so it stands before all that have that tag now.
        """
        self._seq += 1
        return self._seq - BEFORE if before else self._seq

    def join(self, waiter: Waiter) -> None:
        """The call waits at its tag."""
        lane = waiter.lane
        self.waiting[waiter.ask.rid] = waiter
        self.backlog[lane] += waiter.span
        self.count[lane] += 1
        if self._queued is _NOBODY:
            self._queued = tuple({} for _ in range(LANES))
        queued = self._queued[lane].setdefault(waiter.ask.tenant, _Queued())
        queued.count += 1
        queued.last = max(queued.last, waiter.tag)
        heap = self._heaps[lane]
        if heap is None:
            heap = self._heaps[lane] = []
        heappush(heap, waiter)

    def leave(self, waiter: Waiter) -> None:
        """The waiter is gone; the order of the others stays."""
        del self.waiting[waiter.ask.rid]
        lane = waiter.lane
        self.backlog[lane] -= waiter.span
        self.count[lane] -= 1
        queued = self._queued[lane][waiter.ask.tenant]
        queued.count -= 1
        if not queued.count:
            del self._queued[lane][waiter.ask.tenant]
        heap = self._heaps[lane]
        if heap is not None and len(heap) > 64 and len(heap) > 3 * self.count[lane]:
            # Cancelled waiters lie in the heap until they come to its top; not more than two each.
            heap[:] = [held for held in heap if self._present(held) is not None]
            heapify(heap)

    def give_back(self, waiter: Waiter) -> None:
        """The waiter leaves and its span no longer counts against its tenant."""
        self.leave(waiter)
        if waiter.lane == 0:
            self.zero_refunds(waiter.span)
        self.rebook(waiter.lane, waiter.ask.tenant, -step(waiter.span, waiter.ask.weight))

    def _present(self, held: Waiter) -> Waiter | None:
        """The living waiter behind a heap entry."""
        waiter = self.waiting.get(held.ask.rid)
        return waiter if waiter is not None and waiter.seq == held.seq else None

    def head(self, lane: int) -> Waiter | None:
        """The first of a lane."""
        heap = self._heaps[lane]
        if heap is None:
            return None
        while heap:
            waiter = self._present(heap[0])
            if waiter is not None:
                return waiter
            heappop(heap)
        self._heaps[lane] = None
        return None

    def ahead(self, lane: int) -> Micros:
        """Spans waiting in that lane and the more urgent ones."""
        backlog = self.backlog
        ahead = backlog[0]
        for i in range(1, lane + 1):
            ahead += backlog[i]
        return ahead

    def ahead_of(self, lane: int, tag: int, seq: int) -> Micros:
        """Spans waiting before that place in line."""
        if len(self.waiting) > COUNTED_EXACTLY:
            return self.ahead(lane)
        same = (w.span for w in self.waiting.values() if w.lane == lane and w[:2] < (tag, seq))
        return sum(self.backlog[:lane]) + sum(same)

    # --- kept places

    def keep(self, key: str, place: Place) -> None:
        """The place is kept until it expires or is used."""
        if key not in self.places and len(self.places) >= MAX_PLACES:
            self.expire_places(now=0, at_least=1)
        self.places[key] = place
        heappush(self._place_ends, (place.expires, key))
        if len(self._place_ends) > 64 and len(self._place_ends) > 3 * len(self.places):
            self._place_ends = [(held.expires, name) for name, held in self.places.items()]
            heapify(self._place_ends)

    def take_place(self, key: str, lane: int) -> Place | None:
        """The kept place, used up; None if there is none, or it stands in a lower lane."""
        place = self.places.get(key)
        if place is None or lane < place.lane:
            return None
        del self.places[key]
        return place

    def _first_place(self) -> Micros | None:
        """When the place that ends first expires; None where no place is kept."""
        ends = self._place_ends
        while ends:
            expires, key = ends[0]
            place = self.places.get(key)
            if place is not None and place.expires == expires:
                return expires
            heappop(ends)  # taken up, or kept anew
        return None

    def expire_places(self, now: Micros, *, at_least: int = 0) -> None:
        """Places past their time are gone, their spans given back; `SWEEP` of them at most."""
        for done in range(SWEEP):
            expires = self._first_place()
            if expires is None or (expires > now and done >= at_least):
                return
            _, key = heappop(self._place_ends)
            place = self.places.pop(key)
            self.rebook(place.lane, place.tenant, -place.step)

    def next_expiry(self, now: Micros) -> Micros:
        """When to look for expired places again; none kept now expires before."""
        expires = self._first_place()
        return now + PLACE_KEPT if expires is None else expires

    # --- state

    def shift(self, by: Micros) -> None:
        """The clock stepped: tags, finishes, deadlines and expiries move with it, order stays."""
        self.v = [at + by for at in self.v]
        self._top = [at + by for at in self._top]
        for queued in (held for lane in self._queued for held in lane.values()):
            queued.last += by
        self._zero_at += by
        for lane, finishes in enumerate(self._finish):
            if finishes is not None:
                self._finish[lane] = {name: at + by for name, at in finishes.items()}
        for lane, heap in enumerate(self._heaps):
            if heap is not None:
                alive = [w for w in map(self._present, heap) if w is not None]
                moved = [w._replace(tag=w.tag + by, deadline=w.deadline + by) for w in alive]
                heapify(moved)
                self._heaps[lane] = moved
                self.waiting.update((waiter.ask.rid, waiter) for waiter in moved)
        self.places = {
            key: place._replace(tag=place.tag + by, expires=place.expires + by)
            for key, place in self.places.items()
        }
        self._place_ends = [(place.expires, key) for key, place in self.places.items()]
        heapify(self._place_ends)

    @property
    def blank(self) -> bool:
        """True if a new line would decide the same."""
        return not (self.waiting or self.places)


def step(span: Micros, weight: int) -> int:
    """How far a call of that span moves the finish of a tenant of that weight; at least 1."""
    return span // weight or 1
