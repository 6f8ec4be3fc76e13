"""Our mirror of a provider's meter: levels, logs, foreign use, the adaptive factor. Pure.

A rolling dimension has a leaky bucket (`level`, drained at `rate`) and, on windows, a sliding log
(`sums`). A calendar dimension has a level that only grows and returns to zero with the next period.

    rate = max(0, L - foreign) * pace * factor / W         micro-units per micro

A pace above 1 only tops up. On a window the log decides and the bucket smooths; what a large call
left open is refilled faster than the window moves, once the log is nearly full (`BRINK_PPM`). Below
that the pace is `CALM_PPM`: a window filled faster than it moves is full before its first charges
leave, then nobody, tier 1 included, is granted for seconds, and that hole comes back with every
window (docs/adr/0013).

Floats appear in `rate`, in the drained fraction, in the log's ceiling under a cut factor and in
the span of a cost, each in one fixed order of operations, because the Lua twin must agree bit for
bit. All else is integer. The fraction that a drain leaves over is carried: a pool that is looked at
every 100 us would otherwise lose up to a unit each time and refill slower than the provider.
"""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

from gateway.admission.periods import period
from gateway.admission.slots import SlotLog
from gateway.admission.values import LANES
from gateway.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.admission.values import PoolSpec
    from gateway.units import Micros

FULL = 1_000_000
"""The factor, in parts per million, of a pool without quota refusals."""

LEAST_FACTOR = 500_000
CUT_PPM = 980_000
RECOVERY_PPM = 1_000
"""Multiplicative decrease per quota refusal (at most once a second), additive rise per second."""

LONGEST_BLOCK: Micros = 300 * MICRO
"""One bad Retry-After must not freeze a day."""

BRINK_PPM = 900_000
"""Share of its room from which a log counts as nearly full: then a pace above 1 holds."""

LEAST_SPAN: Micros = 100
"""The span of any call where no rolling dimension gives it one: a pool of permits alone. Weights
are 1 to 100 and divide it; were it 1, a tenant's weight would count for nothing there."""

CALM_PPM = 970_000
"""The pace below that, where it is set above 1: with what stands in the bucket, the window is full
just when its first charges leave."""

EASE: Micros = MICRO
EASE_STEP: Micros = 100_000
"""After the provider's word to wait is over, one grant per step for so long: what fits our mirror
is no proof that the provider agrees, and a queue let loose at once is refused at once."""

FOREIGN_HALF_LIFE: Micros = 30 * MICRO
FOREIGN_STEPS = 16
FOREIGN_DECAY = 0.957603280698574
"""Foreign use decays in 16 steps per half-life, each times 2^(-1/16): a literal, not `pow`, whose
last bit differs between C libraries."""

FOREIGN_FLOOR = 1_000
"""Foreign use below one part in so many of L is forgotten."""

REFRESH: Micros = MICRO
"""While a pool is cut or shared its room grows by itself: look again at least this often."""

BLOCKED, CONCURRENCY = -1, -2
"""`Meter.reason` where no dimension decides: the provider's word to wait, permits in flight."""


class Bound(NamedTuple):
    """What one dimension may hold for one lane now.

    Attributes:
        depth: Of its bucket.
        room: Of its log; negative if others fill it.
        ceiling: A cost above it can never fit.
    """

    depth: int
    room: int
    ceiling: int


class Meter:
    """Level and log of every dimension of one pool at `now`.

    Attributes:
        now: The instant of everything below.
        level: Per dimension, what stands in the bucket, or was spent in the period.
        sums: Per dimension, the sum of its log; 0 where it has none.
        foreign: Per dimension, estimated use by others.
        factor: Parts per million, 500,000 to `FULL`.
        blocked_until: The provider asked us to wait until then.
        reason: After a `fit` above zero: index of the dimension that decides, or `BLOCKED`.
    """

    __slots__ = (
        "_bounds", "_brinks", "_calm", "_checks", "_cut_at", "_ease_from", "_eased", "_ends",
        "_factor_at", "_foreign_at", "_fractions", "_least", "_lent", "_log_of", "_pace",
        "_period_end", "_rates", "_rolling", "_scales", "_starts", "_whole_log", "blocked_until",
        "dims", "factor", "foreign", "level", "logs", "now", "reason", "sums",
    )  # fmt: skip

    def __init__(self, spec: PoolSpec, now: Micros) -> None:
        size = len(spec.dimensions)
        self.now = now
        self.level = [0] * size
        self.sums = [0] * size
        self.foreign = [0] * size
        self.factor = FULL
        self.blocked_until = 0
        self._ease_from = 0
        self._eased = 0
        self.reason = BLOCKED
        self._foreign_at = [now] * size
        self._fractions = [0.0] * size
        self._lent = False
        self._factor_at = now
        self._cut_at = now - MICRO
        self.respec(spec)
        windows: dict[Micros, list[int]] = {}
        for i, dim in enumerate(spec.dimensions):
            if dim.cap[0] and not dim.calendar:
                windows.setdefault(dim.window, []).append(i)
        self.logs = tuple(
            SlotLog(window=w, spread=spec.spread, dims=tuple(held), size=size, now=now)
            for w, held in windows.items()
        )
        held_by = {i: log for log in self.logs for i in log.dims}
        self._log_of = tuple(held_by.get(i) for i in range(size))
        # Nearly every pool: one window, all dimensions in its log.
        self._whole_log = self.logs[0] if len(self.logs) == 1 and len(held_by) == size else None

    def respec(self, spec: PoolSpec) -> None:
        """Other limits, depths, caps or pace for the same dimensions; what stands stays."""
        dims = self.dims = spec.dimensions
        self._pace = spec.pace_ppm
        self._rolling = tuple(i for i, dim in enumerate(dims) if not dim.calendar)
        # A day's budget says nothing about how long a call keeps the pool busy: not in the span.
        self._scales = tuple(
            0.0 if dim.calendar else dim.window / max(1, dim.limit) for dim in dims
        )
        self._least = 1 if self._rolling else LEAST_SPAN
        self._reckon()
        self._open_periods()

    def respread(self, spread: Micros) -> None:
        """Log entries outlive their window by so much from now on."""
        for log in self.logs:
            log.keep = self.dims[log.dims[0]].window + spread
            log.due = 0

    def _reckon(self) -> None:
        """Rates and rooms follow foreign use and factor."""
        factor = self.factor / 1e6
        self._rates, self._calm = (
            [
                max(0, dim.limit - foreign) * (pace / 1e6) * factor / dim.window
                for dim, foreign in zip(self.dims, self.foreign, strict=True)
            ]
            for pace in (self._pace, self._pace if self._pace <= FULL else CALM_PPM)
        )
        self._bounds = tuple(
            tuple(self._bound(i, lane) for i in range(len(self.dims))) for lane in range(LANES)
        )
        # With the scales, as plain tuples: a named one is taken apart at ten times the cost.
        self._checks = tuple(
            tuple((*bound, self._scales[i]) for i, bound in enumerate(lane))
            for lane in self._bounds
        )
        self._brinks = [
            self._bounds[1][i].room * BRINK_PPM // 1_000_000 if dim.cap[1] else 0
            for i, dim in enumerate(self.dims)
        ]

    def _bound(self, i: int, lane: int) -> Bound:
        """What a dimension may hold for that lane."""
        dim = self.dims[i]
        depth = dim.limit if dim.calendar else dim.depth[lane]
        return Bound(depth, self.room(i, lane), dim.cap[lane] or dim.limit)

    def _rate(self, i: int) -> float:
        """Micro-units per micro that drain from the level now."""
        return self._rates[i] if self.sums[i] >= self._brinks[i] else self._calm[i]

    def _open_periods(self) -> None:
        """Calendar dimensions know where their present period begins and ends."""
        bounds = [
            period(dim.calendar, dim.calendar_offset, self.now) if dim.calendar else (0, 0)
            for dim in self.dims
        ]
        self._starts = [start for start, _ in bounds]
        self._ends = [end for _, end in bounds]
        self._period_end = min((end for end in self._ends if end), default=0)

    # --- time

    def advance(self, now: Micros) -> None:
        """The meter stands at `now`, which is not before its own; equal changes nothing."""
        elapsed = now - self.now
        if elapsed <= 0:
            return
        self.now = now
        if self.factor < FULL:
            self._recover()
        level = self.level
        for i in self._rolling:
            standing = level[i]
            if standing:
                rates = self._rates if self.sums[i] >= self._brinks[i] else self._calm
                drained = rates[i] * elapsed + self._fractions[i]
                if standing > drained:
                    whole = floor(drained)
                    level[i] = standing - whole
                    self._fractions[i] = drained - whole
                else:
                    level[i] = 0
                    self._fractions[i] = 0.0
        if self._lent:
            self._decay()
        if self._period_end and now >= self._period_end:
            self._turn_over()
        for log in self.logs:
            if now >= log.due:
                log.forget(now, self.sums)

    def _recover(self) -> None:
        """The factor rises for every whole second without a quota refusal."""
        seconds = (self.now - self._factor_at) // MICRO
        if seconds > 0:
            self.factor = min(FULL, self.factor + seconds * RECOVERY_PPM)
            self._factor_at += seconds * MICRO
            self._reckon()

    def _decay(self) -> None:
        """Foreign use fades by half per half-life, at most half a window."""
        faded = False
        for i, dim in enumerate(self.dims):
            share = self.foreign[i]
            if not share:
                continue
            step = max(1, min(FOREIGN_HALF_LIFE, dim.window // 2) // FOREIGN_STEPS)
            steps = (self.now - self._foreign_at[i]) // step
            if not steps:
                continue
            faded = True
            self._foreign_at[i] += steps * step
            while steps and share:
                share = floor(share * FOREIGN_DECAY)
                steps -= 1
                if share * FOREIGN_FLOOR < dim.limit:
                    share = 0
            self.foreign[i] = share
        if faded:
            self._lent = any(self.foreign)
            self._reckon()

    def _turn_over(self) -> None:
        """A new day or month: its dimensions begin at zero."""
        for i, end in enumerate(self._ends):
            if end and self.now >= end:
                self.level[i] = 0
        self._open_periods()

    # --- charges

    def charge(self, cost: Sequence[int], *, most: bool = False) -> None:
        """The cost stands in every level and in the current log slot.

        Args:
            cost: Micro-units per dimension.
            most: Shadow mode: a bucket holds one window's worth at most, since nobody was held back
                and the debt of a surge would otherwise outlive it.
        """
        if self._ease_from:
            self._eased += 1
        level = self.level
        log = self._whole_log
        if log is not None:
            cell, sums = log.cell(self.now), self.sums
            for i, units in enumerate(cost):
                level[i] += units
                cell[i] += units
                sums[i] += units
        else:
            for i, units in enumerate(cost):
                level[i] += units
            for log in self.logs:
                log.charge(self.now, cost, self.sums)
        if most:
            for i in self._rolling:
                level[i] = min(level[i], self.dims[i].limit)

    def correct(
        self, cost: Sequence[int], actual: Sequence[int], at: Micros, *, lost: bool = False
    ) -> None:
        """What was charged as `cost` at `at` is now charged as `actual`.

        More goes into the current slot. Less comes out of the slot of the grant, only if that is
        still held, and out of a calendar level only if the grant lies in the present period.

        Args:
            cost: As charged.
            actual: As it should have been.
            at: When `cost` was charged.
            lost: That charge was made before a cold start: levels and logs no longer hold it, so
                nothing is given back but to calendars, which a cold start leaves alone.
        """
        if self._whole_log is not None and not lost:
            self._correct_all(self._whole_log, cost, actual, at)
            return
        level = self.level
        for i, charged in enumerate(cost):
            delta = actual[i] - charged
            if delta == 0:
                continue
            log = self._log_of[i]
            if delta > 0:
                level[i] += delta
                if log is not None:
                    log.add(self.now, i, delta, self.sums)
            elif at >= self._starts[i] and not (lost and i in self._rolling):
                level[i] = max(0, level[i] + delta)
                if log is not None:
                    log.refund(at, i, -delta, self.sums)

    def _correct_all(
        self, log: SlotLog, cost: Sequence[int], actual: Sequence[int], at: Micros
    ) -> None:
        """`correct`, where one log holds every dimension: nearly every pool."""
        level, sums, cell = self.level, self.sums, log.slots.get(at // log.width)
        for i, charged in enumerate(cost):
            delta = actual[i] - charged
            if delta < 0:
                left = level[i] + delta
                level[i] = left if left > 0 else 0  # noqa: FURB136 - the hot path
                if cell is not None:
                    if cell[i] + delta < 0:
                        delta = -cell[i]
                    cell[i] += delta
                    sums[i] += delta
            elif delta:
                level[i] += delta
                log.add(self.now, i, delta, sums)

    # --- questions

    def span(self, cost: Sequence[int]) -> Micros:
        """The dominant share of a cost in micros of pool time, at least 1 (`LEAST_SPAN`).

        A span floored to 0 on a huge limit would make the backlog lie and waiters hang.
        """
        largest = 0.0
        for i, scale in enumerate(self._scales):
            share = cost[i] * scale
            if share > largest:  # noqa: PLR1730 - a call of max() doubles the cost of this loop
                largest = share
        return floor(largest) or self._least

    def dominant(self, cost: Sequence[int]) -> int:
        """Index of the dimension with the largest share of its limit; `BLOCKED` without any."""
        shares = [(cost[i] * self._scales[i], -i) for i in self._rolling if cost[i]]
        return -max(shares)[1] if shares else BLOCKED

    def never(self, lane: int, cost: Sequence[int]) -> tuple[int, int] | None:
        """The first dimension in which the cost can never fit, with its ceiling; else None.

        The static ceiling of the lane itself: cut factor and foreign use make a call wait, not
        fail; and tier 1's ceiling would let a tier 3 call wait for an empty log that never comes.
        """
        for i, bound in enumerate(self._bounds[lane]):
            if cost[i] > bound.ceiling:
                return i, bound.ceiling
        return None

    def take(self, lane: int, cost: Sequence[int]) -> Micros:
        """The span of a cost that fits now and is charged; 0, and nothing is, where it does not.

        The same as `never`, `fit`, `span` and `charge`, and a property test holds it to that. It
        exists because nearly every call of an unsaturated pool takes this way.
        """
        now = self.now
        if self.blocked_until > now or (self._ease_from and self._easing()):
            return 0
        level, sums = self.level, self.sums
        largest = 0.0
        for i, (depth, room, ceiling, scale) in enumerate(self._checks[lane]):
            units, standing, held = cost[i], level[i], sums[i]
            if (
                units > ceiling
                or units < 0
                or (standing and standing + units > depth)
                or (held and held + units > room)
            ):
                return 0
            if units * scale > largest:  # noqa: PLR1730 - the hot path
                largest = units * scale
        if self._ease_from or self._whole_log is None:
            self.charge(cost)
        else:
            log = self._whole_log
            cell = log.slots.get(now // log.width) or log.cell(now)
            for i, units in enumerate(cost):
                level[i] += units
                cell[i] += units
                sums[i] += units
        return floor(largest) or self._least

    def fit(self, lane: int, cost: Sequence[int]) -> Micros:
        """0 if the cost fits now, else micros until it may; `reason` then says what decides.

        An empty bucket may go into debt, and an empty log holds one call of any permitted size;
        so a large call waits until the level is *zero*: were "small" enough, a big head would
        starve behind small ones or two big ones would stack.

        Weakness: the wait is a lower bound where factor or foreign use change meanwhile, an upper
        one where a settlement gives something back; both come with a tick of their own.
        """
        if self.blocked_until <= self.now and not (self._ease_from and self._easing()):
            for units, level, held, (depth, room, _) in zip(
                cost, self.level, self.sums, self._bounds[lane], strict=True
            ):
                if (level and level + units > depth) or (held and held + units > room):
                    break
            else:
                return 0
        return self._wait_for(lane, cost)

    def _wait_for(self, lane: int, cost: Sequence[int]) -> Micros:
        """The longest wait of all dimensions, and the provider's word; sets `reason`."""
        wait = max(0, self.blocked_until - self.now, self._easing())
        self.reason = BLOCKED
        for i, units in enumerate(cost):
            if units:
                mine = self._fit_one(i, lane, units)
                if mine > wait:
                    wait = mine
                    self.reason = i
        return wait

    def _easing(self) -> Micros:
        """Micros until the next grant of those that feel their way after a refusal."""
        since = self.now - self._ease_from
        if not self._ease_from or since < 0:
            return 0
        if since >= EASE:
            self._ease_from = 0
            return 0
        return max(0, self._eased * EASE_STEP - since)

    def _fit_one(self, i: int, lane: int, units: int) -> Micros:
        """The wait of one dimension."""
        level = self.level[i]
        if self._ends[i]:
            return self._ends[i] - self.now if level + units > self.dims[i].limit else 0
        wait = 0
        if level:
            over = level + units - self._bounds[lane][i].depth
            if over > 0:
                rate = self._rate(i)
                wait = ceil(min(over, level) / rate) if rate > 0 else REFRESH
        log = self._log_of[i]
        held = self.sums[i]
        if log is not None and held:
            over = held + units - self._bounds[lane][i].room
            if over > 0:
                wait = max(wait, log.until(self.now, i, over))
        return wait

    def room(self, i: int, lane: int) -> int:
        """What the log of a dimension may hold for that lane now; negative if others fill it."""
        cap = self.dims[i].cap[lane]
        if self.factor < FULL:
            cap = floor(cap * (self.factor / 1e6))
        return cap - self.foreign[i]

    def hard_wait(self, cost: Sequence[int]) -> Micros:
        """Micros that no settlement can shorten: the provider's word, the end of a spent period."""
        wait = max(0, self.blocked_until - self.now)
        if self._period_end:
            for i, end in enumerate(self._ends):
                if end and cost[i] and self.level[i] + cost[i] > self.dims[i].limit:
                    wait = max(wait, end - self.now)
        return wait

    @property
    def growing(self) -> bool:
        """True while factor or foreign use keep room away that comes back by itself."""
        return self._lent or self.factor < FULL

    def read(self) -> tuple[int, ...]:
        """Our meter: the log's sum where there is a log, else the level."""
        if self._whole_log is not None:
            return tuple(self.sums)
        if not self.logs:
            return tuple(self.level)
        return tuple(
            level if log is None else held
            for level, held, log in zip(self.level, self.sums, self._log_of, strict=True)
        )

    def resets_in(self, i: int) -> Micros:
        """Micros until nothing of what is now counted counts any more."""
        if self._ends[i]:
            return self._ends[i] - self.now
        level, rate, log = self.level[i], self._rate(i), self._log_of[i]
        wait = ceil(level / rate) if level and rate > 0 else 0
        if log is not None and self.sums[i]:
            wait = max(wait, log.until(self.now, i, self.sums[i]))
        return wait

    @property
    def blank(self) -> bool:
        """True if a new meter would decide the same."""
        return not (
            any(self.level)
            or any(self.sums)
            or self.growing
            or self.blocked_until > self.now
            or self._easing()
        )

    # --- what the provider says

    def signal(self, foreign: Sequence[int]) -> None:
        """Others use at least this much; the larger of old and new holds."""
        for i, share in enumerate(foreign):
            if share > self.foreign[i] and i in self._rolling:
                self.foreign[i] = share
                self._foreign_at[i] = self.now
                self._lent = True
        self._reckon()

    def refused(self, retry_after: Micros, *, quota: bool) -> None:
        """The provider refused: wait as told, and for a quota use less from now on."""
        until = self.now + min(max(0, retry_after), LONGEST_BLOCK)
        self.blocked_until = max(self.blocked_until, until)
        self._ease_from, self._eased = self.blocked_until, 0
        if quota and self.now - self._cut_at >= MICRO:
            self.factor = max(LEAST_FACTOR, self.factor * CUT_PPM // 1_000_000)
            self._cut_at = self._factor_at = self.now
            self._reckon()

    # --- generations

    def fill(self, dims: Sequence[int] | None = None) -> None:
        """The cold start: what we cannot know counts as spent, evenly over the window.

        Args:
            dims: Indices of the rolling dimensions to fill; None for all.
        """
        for i in self._rolling if dims is None else dims:
            self.level[i] = max(self.level[i], self._bounds[1][i].depth)
            self._fractions[i] = 0.0
            log = self._log_of[i]
            if log is not None:
                log.fill(self.now, i, self.dims[i].cap[1], self.sums)

    def carry(self, old: Meter, pairs: Sequence[tuple[int, int]]) -> None:
        """Take over what stood in the paired dimensions of another meter of the same instant.

        Args:
            old: The meter of the generation before.
            pairs: (index here, index there) of dimensions that meter the same.
        """
        self.factor, self._factor_at, self._cut_at = old.factor, old._factor_at, old._cut_at
        self.blocked_until = old.blocked_until
        self._ease_from, self._eased = old._ease_from, old._eased
        for i, j in pairs:
            self.level[i] = old.level[j]
            self.foreign[i], self._foreign_at[i] = old.foreign[j], old._foreign_at[j]
            self._fractions[i] = old._fractions[j]
            mine, theirs = self._log_of[i], old._log_of[j]
            if mine is not None and theirs is not None:
                mine.adopt(theirs, i, j, self.sums)
        self._lent = any(self.foreign)
        self._reckon()

    def shift(self, by: Micros) -> None:
        """The clock stepped: every instant moves with it. Logs are refilled by the caller."""
        self.now += by
        self._factor_at += by
        self._cut_at += by
        self.blocked_until = max(0, self.blocked_until + by)
        self._ease_from = max(0, self._ease_from + by) if self._ease_from else 0
        self._foreign_at = [at + by for at in self._foreign_at]
        self.sums = [0] * len(self.dims)
        for log in self.logs:
            log.clear(self.now)
        self._open_periods()
