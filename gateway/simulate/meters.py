"""What a provider meters, as a provider would: pure, shared by the emulator and the simulator.

The other side of `admission/`: that package *mirrors* a provider's quota, this file *is* one,
written from the published behavior of providers (`admission.md` §2) and sharing no code with the
mirror, so that an error cannot agree with itself. Nothing here reads a clock: every call takes
`now`, which must never step back. Time is `Micros`, amounts are whole tokens or requests, all
arithmetic is integer.

Shapes of one dimension:

- `Bucket`: continuous; the level drains at limit / window, a charge fits while level + amount ≤
depth.
- `Fixed`: windows aligned to a phase the client cannot see.
- `Sliding`: no window of that length, wherever it begins, holds more than the limit.
- `Calendar`: a day that begins at a stated offset from UTC.

`sub_minute` turns a limit per minute into 10 s of tokens and 1 s of requests. `Ramp` bounds growth
from one minute to the next quarter of an hour, `Capacity` is a provider's own load, nobody's quota.

`Provider` puts them together: all dimensions or none, a refusal that names one of them, and the
three ways of accounting. A refused request may itself count against the request limit: clients that
return exactly when told then never recover on a sliding window, which is what some real providers
do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gateway.admission.profiles import Accounting, Profile
from gateway.units import MICRO, MINUTE, Micros, Tokens, valueclass

DAY: Micros = 86_400 * MICRO
SLOTS = 60_000
"""A sliding log holds at most this many slots: one per millisecond of a minute."""

RAMP_MINUTES = 15
"""Length of the history that a ramp limit looks back on, in minutes."""


class Meter(Protocol):
    """One dimension of a quota.

    Attributes:
        limit: What the provider publishes, per `window`.
        window: The span the limit speaks of.
        peak: The most that ever stood on the meter.
    """

    limit: Tokens
    window: Micros
    peak: Tokens

    def used(self, now: Micros) -> Tokens:
        """What stands on the meter; above the limit after a charge that could not be refused."""
        ...

    def room(self, now: Micros) -> Tokens:
        """The largest amount that fits now; negative after an overshoot."""
        ...

    def charge(self, now: Micros, amount: Tokens) -> None:
        """The amount stands on the meter, whether or not it fits."""
        ...

    def give_back(self, now: Micros, amount: Tokens, charged: Micros) -> None:
        """The amount no longer stands where it was charged; what has left already stays gone."""
        ...

    def retry_in(self, now: Micros, amount: Tokens) -> Micros | None:
        """The least wait after which the amount fits if nobody else comes; None if it never can."""
        ...

    def full_in(self, now: Micros) -> Micros:
        """Time until the whole limit is free again: what reset headers tell."""
        ...


class Bucket:
    """A continuous token bucket, kept as a level that drains.

    The level is kept in tokens times window microseconds, so that draining needs no division and
    drops no fraction however often it is asked.
    """

    __slots__ = ("_depth", "_level", "_seen", "limit", "peak", "window")

    def __init__(
        self, limit: Tokens, *, window: Micros = MINUTE, depth: Tokens | None = None
    ) -> None:
        if limit < 1 or window < 1 or (depth is not None and depth < 1):
            raise ValueError("limit, window and depth of a bucket must be at least 1")
        self.limit = limit
        self.window = window
        self.peak: Tokens = 0
        self._depth = (limit if depth is None else depth) * window
        self._level = 0
        self._seen: Micros = 0

    def _drain(self, now: Micros) -> None:
        if now > self._seen:
            level = self._level - self.limit * (now - self._seen)
            self._level = level if level > 0 else 0  # noqa: FURB136 - the hot path
            self._seen = now

    def used(self, now: Micros) -> Tokens:
        """The level, rounded up."""
        self._drain(now)
        return -(-self._level // self.window)

    def room(self, now: Micros) -> Tokens:
        """Depth less level, rounded down."""
        self._drain(now)
        return (self._depth - self._level) // self.window

    def charge(self, now: Micros, amount: Tokens) -> None:
        """Raises the level."""
        self._drain(now)
        self._level += amount * self.window
        used = -(-self._level // self.window)
        if used > self.peak:  # noqa: PLR1730 - the hot path
            self.peak = used

    def give_back(self, now: Micros, amount: Tokens, charged: Micros) -> None:
        """Lowers the level, never below zero; a bucket does not remember when a charge came."""
        del charged
        self._drain(now)
        self._level = max(0, self._level - amount * self.window)

    def retry_in(self, now: Micros, amount: Tokens) -> Micros | None:
        """Excess over rate, rounded up."""
        self._drain(now)
        if amount * self.window > self._depth:
            return None
        excess = self._level + amount * self.window - self._depth
        return max(0, -(-excess // self.limit))

    def full_in(self, now: Micros) -> Micros:
        """Level over rate."""
        self._drain(now)
        return -(-self._level // self.limit)


class Fixed:
    """Windows that begin at `phase`, `phase + window`, …; the count starts anew with each."""

    __slots__ = ("_index", "_phase", "_used", "limit", "peak", "window")

    def __init__(self, limit: Tokens, *, window: Micros = MINUTE, phase: Micros = 0) -> None:
        if limit < 1 or window < 1:
            raise ValueError("limit and window must be at least 1")
        self.limit = limit
        self.window = window
        self.peak: Tokens = 0
        self._phase = phase % window
        self._index = -2  # before the first window that an instant ≥ 0 can fall into
        self._used: Tokens = 0

    def _turn(self, now: Micros) -> None:
        index = (now - self._phase) // self.window
        if index > self._index:
            self._index = index
            self._used = 0

    def used(self, now: Micros) -> Tokens:
        """Charged since the window began."""
        self._turn(now)
        return self._used

    def room(self, now: Micros) -> Tokens:
        """Limit less used."""
        self._turn(now)
        return self.limit - self._used

    def charge(self, now: Micros, amount: Tokens) -> None:
        """Counts in the present window."""
        self._turn(now)
        self._used += amount
        self.peak = max(self.peak, self._used)

    def give_back(self, now: Micros, amount: Tokens, charged: Micros) -> None:
        """Lowers the count if the charge fell in the present window."""
        self._turn(now)
        if (charged - self._phase) // self.window == self._index:
            self._used = max(0, self._used - amount)

    def retry_in(self, now: Micros, amount: Tokens) -> Micros | None:
        """Until the next window begins."""
        self._turn(now)
        if amount > self.limit:
            return None
        return 0 if self._used + amount <= self.limit else self._next(now)

    def full_in(self, now: Micros) -> Micros:
        """Until the next window begins; 0 if nothing was charged."""
        self._turn(now)
        return self._next(now) if self._used > 0 else 0

    def _next(self, now: Micros) -> Micros:
        return (self._index + 1) * self.window + self._phase - now


class Calendar(Fixed):
    """A fixed day that begins `offset` east of UTC (Pacific winter time: 8 h west)."""

    __slots__ = ()

    def __init__(self, limit: Tokens, *, offset: Micros = 0) -> None:
        super().__init__(limit, window=DAY, phase=-offset)


class Sliding:
    """An exact sliding log: an amount stands for one window after its arrival.

    Amounts of one slot (1/60,000 of the window: 1 ms of a minute) leave together, at the slot's
    end: at most one slot late, never early. So memory is bounded whatever arrives.
    """

    __slots__ = ("_by_slot", "_grain", "_log", "_used", "limit", "peak", "window")

    def __init__(self, limit: Tokens, *, window: Micros = MINUTE) -> None:
        if limit < 1 or window < 1:
            raise ValueError("limit and window must be at least 1")
        self.limit = limit
        self.window = window
        self.peak: Tokens = 0
        self._grain = max(1, window // SLOTS)
        self._log: deque[int] = deque()
        self._by_slot: dict[int, Tokens] = {}
        self._used: Tokens = 0

    def _leaves(self, slot: int) -> Micros:
        # The last microsecond of the slot, plus the window: the first instant at which it is gone.
        return (slot + 1) * self._grain - 1 + self.window

    def _drop(self, now: Micros) -> None:
        log = self._log
        while log and self._leaves(log[0]) <= now:
            self._used -= self._by_slot.pop(log.popleft())

    def used(self, now: Micros) -> Tokens:
        """The sum of the log."""
        self._drop(now)
        return self._used

    def room(self, now: Micros) -> Tokens:
        """Limit less sum."""
        self._drop(now)
        return self.limit - self._used

    def charge(self, now: Micros, amount: Tokens) -> None:
        """Enters the log."""
        self._drop(now)
        slot = now // self._grain
        if slot in self._by_slot:
            self._by_slot[slot] += amount
        else:
            self._by_slot[slot] = amount
            self._log.append(slot)
        self._used += amount
        self.peak = max(self.peak, self._used)

    def give_back(self, now: Micros, amount: Tokens, charged: Micros) -> None:
        """Leaves the slot of its charge, if that is still in the log."""
        self._drop(now)
        slot = charged // self._grain
        standing = self._by_slot.get(slot)
        if standing is not None:
            returned = min(standing, amount)
            self._by_slot[slot] = standing - returned
            self._used -= returned

    def retry_in(self, now: Micros, amount: Tokens) -> Micros | None:
        """Until enough of the oldest has left."""
        self._drop(now)
        if amount > self.limit:
            return None
        excess = self._used + amount - self.limit
        if excess <= 0:
            return 0
        for slot in self._log:
            excess -= self._by_slot[slot]
            if excess <= 0:
                return self._leaves(slot) - now
        raise AssertionError("the log sums to `used`")  # pragma: no cover

    def full_in(self, now: Micros) -> Micros:
        """Until the newest entry has left."""
        self._drop(now)
        return self._leaves(self._log[-1]) - now if self._log else 0


def sub_minute(
    limit: Tokens, *, window: Micros = 10 * MICRO, shape: type[Sliding] | type[Fixed] = Sliding
) -> Meter:
    """A limit per minute enforced over a shorter window, in proportion, at least 1.

    Azure evaluates requests over 1 or 10 s, OpenAI says that limits "may be enforced over shorter
    periods", and 60 requests per minute may mean one per second at Anthropic.
    """
    return shape(max(1, limit * window // MINUTE), window=window)


class Ramp:
    """Growth is bounded by the mean minute of the last quarter of an hour, times `growth_pct`.

    Nothing is refused below `floor` tokens per minute. Minutes are fixed cells of the meter's own
    time.
    Source: OpenAI (above 1 M input TPM grow at most 50 % per 15 minutes), Anthropic's acceleration
    limits. Weakness: the true rules are unpublished; this is the strictest reading of the sentence.
    """

    __slots__ = ("_cells", "_index", "floor", "growth_pct", "limit", "peak", "window")

    def __init__(self, *, floor: Tokens = 1_000_000, growth_pct: int = 150) -> None:
        if floor < 1 or growth_pct < 100:
            raise ValueError("floor must be at least 1 and growth_pct at least 100")
        self.floor = floor
        self.growth_pct = growth_pct
        self.limit = floor
        self.window: Micros = MINUTE
        self.peak: Tokens = 0
        self._index = -1
        self._cells: deque[Tokens] = deque([0] * (RAMP_MINUTES + 1), maxlen=RAMP_MINUTES + 1)

    def _turn(self, now: Micros) -> None:
        index = now // MINUTE
        for _ in range(min(index - self._index, RAMP_MINUTES + 1)):
            self._cells.append(0)
        self._index = max(self._index, index)
        past = sum(self._cells) - self._cells[-1]
        self.limit = max(self.floor, past * self.growth_pct // (100 * RAMP_MINUTES))

    def used(self, now: Micros) -> Tokens:
        """Charged in the present minute."""
        self._turn(now)
        return self._cells[-1]

    def room(self, now: Micros) -> Tokens:
        """What the present minute may still take."""
        self._turn(now)
        return self.limit - self._cells[-1]

    def charge(self, now: Micros, amount: Tokens) -> None:
        """Counts in the present minute."""
        self._turn(now)
        self._cells[-1] += amount
        self.peak = max(self.peak, self._cells[-1])

    def give_back(self, now: Micros, amount: Tokens, charged: Micros) -> None:
        """Leaves the minute of its charge."""
        self._turn(now)
        age = self._index - charged // MINUTE
        if 0 <= age <= RAMP_MINUTES:
            self._cells[-1 - age] = max(0, self._cells[-1 - age] - amount)

    def retry_in(self, now: Micros, amount: Tokens) -> Micros | None:
        """The next minute; it may refuse again."""
        return 0 if self.room(now) >= amount else MINUTE - now % MINUTE

    def full_in(self, now: Micros) -> Micros:
        """Until the minute ends."""
        return MINUTE - now % MINUTE if self.used(now) > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dip:
    """From `start` to `end` the provider can hold only `limit` calls at once."""

    start: Micros
    end: Micros
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the provider can hold at once, whoever asks: `limit` calls, less while it dips.

    Its refusals are no quota: a client that shrinks its quota for them starves itself (§2.3).
    """

    limit: int
    dips: tuple[Dip, ...] = ()

    def at(self, now: Micros) -> int:
        """The calls it can hold at that instant."""
        return min(
            (dip.limit for dip in self.dips if dip.start <= now < dip.end), default=self.limit
        )

    def retry_in(self, now: Micros) -> Micros:
        """A guess, as real providers make one: the end of the dip, at most 30 s, at least 1 s."""
        ends = [dip.end - now for dip in self.dips if dip.start <= now < dip.end]
        return max(MICRO, min(30 * MICRO, max(ends, default=MICRO)))


class Shape(StrEnum):
    """How the limits per minute are enforced."""

    BUCKET = "bucket"
    FIXED = "fixed"
    SLIDING = "sliding"
    SUB_MINUTE = "sub_minute"


class Kind(StrEnum):
    """What sort of refusal it is: the first column of `admission.md` §2.3."""

    QUOTA = "quota"
    RAMP = "ramp"
    CAPACITY = "capacity"
    PERIOD = "period"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one scope of a provider may use. None is unlimited.

    Attributes:
        shape: Of the limits per minute.
        requests, tokens, input, output: Limits per minute. `tokens` holds input and output
            together.
        requests_per_day, tokens_per_day: Calendar limits.
        concurrency: Calls in flight.
        capacity: The provider's own load.
        ramp: Growth limit on input tokens: (floor, growth in percent).
        depth: BUCKET: seconds of the rate that may be used at once.
        phase: FIXED: where windows begin; unknown to clients.
        day_offset: Where days begin, east of UTC.
        accounting: When what is charged.
    """

    shape: Shape = Shape.SLIDING
    requests: int | None = None
    tokens: Tokens | None = None
    input: Tokens | None = None
    output: Tokens | None = None
    requests_per_day: int | None = None
    tokens_per_day: Tokens | None = None
    concurrency: int | None = None
    capacity: Capacity | None = None
    ramp: tuple[Tokens, int] | None = None
    depth: int = 60
    phase: Micros = 0
    day_offset: Micros = 0
    accounting: Accounting = field(default_factory=Accounting)

    def __post_init__(self) -> None:
        """Limits must be positive."""
        for name in (
            "requests", "tokens", "input", "output", "requests_per_day", "tokens_per_day",
            "concurrency",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or absent for unlimited; got {value}")
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1 second; got {self.depth}")


@valueclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a call asks for, in whole tokens.

    Attributes:
        input: Fresh input.
        cache_read, cache_write: Input read from and written to the prompt cache.
        cap: Output cap times n; None where the call names none.
    """

    input: Tokens
    cache_read: Tokens = 0
    cache_write: Tokens = 0
    cap: Tokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a call was not admitted.

    Attributes:
        kind: Which sort.
        dimension: `requests`, `tokens`, `input`, `output`, `requests_per_day`, `tokens_per_day`,
            `ramp`, `concurrency` or `capacity`.
        limit, used, asked: The figures of that dimension, `limit` as published per its window.
        retry_in: The least wait that helps; None if the call can never fit.
    """

    kind: Kind
    dimension: str
    limit: Tokens
    used: Tokens
    asked: Tokens
    retry_in: Micros | None


class Ticket:
    """An admitted call, until `Provider.finish`.

    Attributes:
        at: When it was admitted.
        reserved: Charged at arrival per dimension.
        input, output: Input tokens counted and output tokens charged so far.
        open: False once finished.
    """

    __slots__ = ("at", "input", "open", "output", "reserved")

    def __init__(
        self, at: Micros, counted: Tokens, output: Tokens, reserved: dict[str, int]
    ) -> None:
        self.at = at
        self.input = counted
        self.output = output
        self.reserved = reserved
        self.open = True


@dataclass(frozen=True, slots=True)
class Standing:
    """One dimension as headers show it: limit, remaining (never below zero) and time until full."""

    limit: Tokens
    remaining: Tokens
    full_in: Micros


_OUTPUT_SHARE = ("tokens", "tokens_per_day", "output")
_KINDS = {"requests_per_day": Kind.PERIOD, "tokens_per_day": Kind.PERIOD, "ramp": Kind.RAMP}


def _longer(wait: Micros | None, other: Micros | None) -> bool:
    """Whether that wait is longer; None is for ever."""
    return other is not None and (wait is None or wait > other)


class Provider:
    """All meters of one scope: admits whole vectors or nothing, and keeps their accounts."""

    __slots__ = ("_account", "_meters", "_produced", "in_flight", "peak_in_flight", "quota")

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.in_flight = 0
        self.peak_in_flight = 0
        self._account = quota.accounting
        self._meters = _meters(quota)
        weight = quota.accounting.output_weight
        self._produced = [
            (self._meters[name], 1 if name == "output" else weight)
            for name in _OUTPUT_SHARE
            if name in self._meters
        ]

    # --- deciding -------------------------------------------------------------------------------

    def arrive(self, now: Micros, demand: Demand) -> Ticket | Refusal:
        """Admit and charge, or refuse and (by profile) count the refused request."""
        asked = self._asked(demand)
        refusal = self._refusal(now, asked)
        if refusal is not None:
            if self._account.refused_counts and refusal.kind is not Kind.CAPACITY:
                meter = self._meters.get("requests")
                if meter is not None:
                    meter.charge(now, 1)
            return refusal
        reserved = {}
        for name, meter in self._meters.items():
            amount = asked[name]
            # Under `realtime` the question for output is only whether any is left.
            if name == "output" and self._account.profile is Profile.REALTIME:
                amount = 0
            meter.charge(now, amount)
            reserved[name] = amount
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        ahead = self._ahead(demand)
        return Ticket(now, self._counted(demand), ahead, reserved)

    def _refusal(self, now: Micros, asked: dict[str, int]) -> Refusal | None:
        quota = self.quota
        capacity = quota.capacity
        if capacity is not None and self.in_flight >= capacity.at(now):
            return Refusal(
                kind=Kind.CAPACITY, dimension="capacity", limit=capacity.at(now),
                used=self.in_flight, asked=1, retry_in=capacity.retry_in(now),
            )  # fmt: skip
        if quota.concurrency is not None and self.in_flight >= quota.concurrency:
            return Refusal(
                kind=Kind.QUOTA, dimension="concurrency", limit=quota.concurrency,
                used=self.in_flight, asked=1, retry_in=MICRO,
            )  # fmt: skip
        worst: Refusal | None = None
        for name, meter in self._meters.items():
            amount = asked[name]
            if meter.room(now) >= amount:
                continue
            wait = meter.retry_in(now, amount)
            if worst is None or _longer(wait, worst.retry_in):
                worst = Refusal(
                    kind=_KINDS.get(name, Kind.QUOTA), dimension=name,
                    limit=self._published(name, meter), used=meter.used(now), asked=amount,
                    retry_in=wait,
                )  # fmt: skip
        return worst

    def _published(self, name: str, meter: Meter) -> Tokens:
        published: int | None = getattr(self.quota, name, None) if name != "ramp" else None
        return meter.limit if published is None else published

    # --- accounting -----------------------------------------------------------------------------

    def _counted(self, demand: Demand) -> Tokens:
        """Input tokens that count against limits."""
        if self._account.profile is Profile.NONE:
            return 0
        read = demand.cache_read if self._account.cached_input_counts else 0
        return demand.input + demand.cache_write + read

    def _ahead(self, demand: Demand) -> Tokens:
        """Output tokens charged at arrival."""
        if self._account.profile not in (Profile.UPFRONT_MAX, Profile.RESERVE_SETTLE):
            return 0
        return demand.cap if demand.cap is not None else (self._account.missing_cap or 0)

    def _asked(self, demand: Demand) -> dict[str, int]:
        account = self._account
        counted = self._counted(demand)
        ahead = self._ahead(demand)
        both = counted + ahead * account.output_weight
        # A realtime meter charges output as it is produced, yet admits nobody once none is left.
        least = 1 if account.profile is Profile.REALTIME else ahead
        return {
            "requests": 1, "requests_per_day": 1, "tokens": both, "tokens_per_day": both,
            "input": counted, "output": least, "ramp": counted,
        }  # fmt: skip

    def withdraw(self, now: Micros, ticket: Ticket) -> None:
        """Another scope refused the call: its tokens stand nowhere, its request does."""
        if not ticket.open:
            return
        ticket.open = False
        self.in_flight -= 1
        for name, amount in ticket.reserved.items():
            if not name.startswith("requests"):
                self._meters[name].give_back(now, amount, ticket.at)

    def produce(self, now: Micros, ticket: Ticket, output: Tokens) -> None:
        """`output` more tokens were produced. Charged here only under `realtime`."""
        if ticket.open and output > 0 and self._account.profile is Profile.REALTIME:
            self._charge_output(now, output)
            ticket.output += output

    def _charge_output(self, now: Micros, output: Tokens) -> None:
        for meter, weight in self._produced:
            meter.charge(now, output * weight)

    def finish(self, now: Micros, ticket: Ticket, output: Tokens) -> None:
        """The call is over with so many output tokens; it holds nothing any more. Idempotent.

        `reserve_settle` gives the unused reservation back into the windows it was charged in.
        """
        if not ticket.open:
            return
        ticket.open = False
        self.in_flight -= 1
        if self._account.profile is not Profile.RESERVE_SETTLE:
            return
        unused = ticket.output - output
        if unused > 0:
            weight = self._account.output_weight
            for name in _OUTPUT_SHARE:
                meter = self._meters.get(name)
                if meter is not None:
                    amount = unused if name == "output" else unused * weight
                    meter.give_back(now, amount, ticket.at)
        elif unused < 0:
            self._charge_output(now, -unused)
        ticket.output = output

    # --- looking --------------------------------------------------------------------------------

    def standing(self, now: Micros, dimension: str) -> Standing | None:
        """That dimension as headers show it; None if it is not limited."""
        meter = self._meters.get(dimension)
        if meter is None:
            return None
        return Standing(
            self._published(dimension, meter), max(0, meter.room(now)), meter.full_in(now)
        )

    def peaks(self) -> dict[str, dict[str, int]]:
        """Per dimension its enforced limit, its window and the most that ever stood on it."""
        return {
            name: {"limit": meter.limit, "window_us": meter.window, "peak": meter.peak}
            for name, meter in self._meters.items()
        }

    def charged_tokens(self, ticket: Ticket) -> Tokens:
        """What token limits were charged for this call so far: input + weighted output."""
        return ticket.input + ticket.output * self._account.output_weight


def _per_minute(quota: Quota, limit: Tokens, *, requests: bool) -> Meter:
    match quota.shape:
        case Shape.BUCKET:
            return Bucket(limit, depth=max(1, limit * quota.depth // 60))
        case Shape.FIXED:
            return Fixed(limit, phase=quota.phase)
        case Shape.SLIDING:
            return Sliding(limit)
        case Shape.SUB_MINUTE:
            return sub_minute(limit, window=MICRO if requests else 10 * MICRO)


def _meters(quota: Quota) -> dict[str, Meter]:
    meters: dict[str, Meter] = {}
    for name in ("requests", "tokens", "input", "output"):
        limit: int | None = getattr(quota, name)
        if limit is not None:
            meters[name] = _per_minute(quota, limit, requests=name == "requests")
    for name in ("requests_per_day", "tokens_per_day"):
        limit = getattr(quota, name)
        if limit is not None:
            meters[name] = Calendar(limit, offset=quota.day_offset)
    if quota.ramp is not None:
        floor, growth = quota.ramp
        meters["ramp"] = Ramp(floor=floor, growth_pct=growth)
    return meters
