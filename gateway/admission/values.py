"""What goes into a pool and what comes out of it (`admission.md` §4). Values, no behavior.

The core re-exports all of them: other rooms import from `gateway.admission.core`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from gateway.units import MINUTE, Micros, Mode, RuleId, Tokens, maker, valueclass

LANES = 4
"""Lane 0 carries T0 task calls; lanes 1 to 3 are the QoS tiers."""


class Outcome(StrEnum):
    """How an attempt ended, as far as the meter cares."""

    SERVED = "served"
    QUOTA = "quota"
    RAMP = "ramp"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One limit of a pool. All amounts are micro-units per window.

    Attributes:
        name: `requests`, `tokens`, `input`, `output` or `money`.
        limit: L, micro-units per window.
        window: W in micros; for calendar dimensions the nominal period (a day, a month of 31 days).
        depth: B, bucket depth per lane 0..3, micro-units.
        cap: C, cap of the sliding log per lane 0..3, micro-units; all 0 means no log.
        calendar: "" for a rolling meter, else "day" or "month": the period starts at midnight of
            `calendar_offset`, the level never drains inside it and returns to 0 with the next one.
        calendar_offset: Micros east of UTC.
        because: The rule this limit came from.
    """

    name: str
    limit: Tokens
    window: Micros = MINUTE
    depth: tuple[int, int, int, int]
    cap: tuple[int, int, int, int] = (0, 0, 0, 0)
    calendar: str = ""
    calendar_offset: Micros = 0
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The compiled rules of one pool; equal specs mean the same pool rules.

    Attributes:
        name: Unique name, e.g. "pool:openai-gpt4o", "agent:researcher".
        dimensions: In a fixed order; cost vectors follow it.
        concurrency: Calls in flight at most; 0 is unlimited.
        spread: J, how long log entries outlive W, against arrival jitter.
        pace_ppm: Multiplier of the refill rate, parts per million.
        lease: How long a grant lives without renewal.
        dead: A gateway silent for so long loses its waiters and unfetched grants.
        max_grants: K, grants per tick.
        max_waiting: Waiters at most.
        queue: False: what does not fit now is refused at once (budgets, limits with max_wait 0).
        mode: enforce, shadow (grant all, count would-waits), off.
        because: Policy path of the pool.
        concurrency_because: Policy path of the concurrency limit.
        revision: Policy revision that compiled it.
        plain: Its dimensions are requests, then tokens, and no others: nearly every pool. The
            short ways of `profiles` rest on it; False is never wrong.
    """

    name: str
    dimensions: tuple[Dimension, ...] = ()
    concurrency: int = 0
    spread: Micros = 300_000
    pace_ppm: int = 1_000_000
    lease: Micros = 120_000_000
    dead: Micros = 5_000_000
    max_grants: int = 256
    max_waiting: int = 20_000
    queue: bool = True
    mode: Mode = Mode.ENFORCE
    because: RuleId = ""
    concurrency_because: RuleId = ""
    revision: int = 0
    plain: bool = False


@valueclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A call that wants to be admitted to one pool.

    Attributes:
        rid: Request id + attempt number; unique for ever.
        lane: 0..3.
        tenant: Who shares fairly (tenant or agent, by policy).
        weight: 1..100.
        deadline_in: Micros the call may still wait in this pool.
        cost: Micro-units per dimension, in the order of the spec.
        tag: The tag of an earlier place (requeue, ticket), or None.
        place_key: Key of a kept place, or None.
        ticket: `tag` came from a ticket that the caller sent: it holds only while the place of
            `place_key` is kept, so that a ticket works once. A tag of ours is trusted.
    """

    rid: str
    lane: int
    tenant: str
    weight: int
    deadline_in: Micros
    cost: tuple[int, ...]
    tag: int | None = None
    place_key: str | None = None
    ticket: bool = False

    def __lt__(self, other: Ask) -> bool:
        """Any order will do, but there must be one.

        A kept place is taken up again while its former holder still lies in the line's heap, and a
        comparison that cannot be made would stop the whole pool.
        """
        return self.rid < other.rid


make_ask = maker(Ask)


class Admit(NamedTuple):
    """Granted: send it now.

    Attributes:
        rid: Of the ask.
        meter: Our meter at the grant per dimension (log sum on windows, level on buckets).
        tag: The tag it held, for a requeue.
        waited: Micros between ask and grant, by the pool's clock.
    """

    rid: str
    meter: tuple[int, ...]
    tag: int
    waited: Micros = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """Refused: it cannot be served before its deadline, or the queue is full. `eta` is the wait."""

    rid: str
    eta: Micros
    tag: int
    because: RuleId
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Never:
    """Refused: it can never fit. Names dimension, cost and ceiling in micro-units."""

    rid: str
    dimension: str
    cost: int
    ceiling: int
    because: RuleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """Its deadline passed while it waited; `eta` is what would still have been ahead."""

    rid: str
    because: RuleId
    eta: Micros = 0
    tag: int = 0


Verdict: TypeAlias = Admit | Shed | Never | Late


class Settle(NamedTuple):
    """An attempt is over.

    Attributes:
        actual: Micro-units per dimension, in the order of the spec it was asked under. None: as
            reserved; after a quota or ramp refusal: requests kept, the rest given back.
        retry_after: What the provider asked for; counts for quota and ramp refusals only.
    """

    rid: str
    outcome: Outcome
    actual: tuple[int, ...] | None = None
    retry_after: Micros = 0


class Adopt(NamedTuple):
    """A grant that is in flight: its lease starts anew. Unknown, it is taken up without queueing.

    Attributes:
        cost: As reserved; None only renews: an unknown request id then changes nothing.
        charge: Whether levels and logs shall hold the cost, because they lost it.
    """

    rid: str
    cost: tuple[int, ...] | None = None
    charge: bool = False
    lane: int = 1
    tenant: str = ""
    weight: int = 1


class Caller(NamedTuple):
    """Which process ticks, and what it has seen."""

    gateway: str
    seen_epoch: int = 0
    seen_version: int = 0
    mail_ack: int = 0


@dataclass(slots=True)
class Reply:
    """What a tick tells its caller.

    Attributes:
        now: The pool's clock.
        epoch: Changes when the state was lost: send waiters and grants again.
        version: Grows by one per tick; a smaller one than seen means that writes were lost.
        events: Verdicts of this batch, then all mail that is not acknowledged yet.
        mail_seq: Acknowledge this in the next tick.
        wake: Tick again at this instant of the pool's clock; 0: not before there is news.
        owner: The gateway whose waiter is first.
        blocked_by: The rule that holds the first waiter back.
        nudged: Other gateways that have mail.
        rejoin: The pool did not know this gateway: send waiters again.
        demand_share_ppm: This gateway's share of what was lately asked for.
    """

    now: Micros
    epoch: int
    events: list[Verdict]
    version: int = 0
    mail_seq: int = 0
    wake: Micros = 0
    owner: str = ""
    blocked_by: RuleId = ""
    nudged: list[str] = field(default_factory=list)
    rejoin: bool = False
    demand_share_ppm: int = 1_000_000


def same_meters(one: tuple[Dimension, ...], other: tuple[Dimension, ...]) -> bool:
    """True if vectors of one mean the same in the other; limits may differ."""
    return one is other or [meter_of(dim) for dim in one] == [meter_of(dim) for dim in other]


def meter_of(dim: Dimension) -> tuple[str, Micros, str, Micros, bool]:
    """What makes a dimension the same meter under another limit."""
    return dim.name, dim.window, dim.calendar, dim.calendar_offset, any(dim.cap)


def translate(
    vector: tuple[int, ...],
    source: tuple[Dimension, ...],
    target: tuple[Dimension, ...],
    default: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """A vector of one list of dimensions in the order of another.

    The same meter first, else the same unit (requests per day cost what requests per minute cost).

    Args:
        vector: Micro-units, one per dimension of `source`.
        source: The dimensions that the vector follows.
        target: The dimensions that the result follows.
        default: What stands where `source` knows no such unit; zeros if None.
    """
    by_meter = {meter_of(dim): units for dim, units in zip(source, vector, strict=True)}
    by_unit = {dim.name: units for dim, units in zip(source, vector, strict=True)}
    return tuple(
        by_meter.get(meter_of(dim), by_unit.get(dim.name, default[i] if default else 0))
        for i, dim in enumerate(target)
    )


def never_fits(spec: PoolSpec, ask: Ask, index: int, ceiling: int) -> Never:
    """The refusal of a cost above its ceiling in that dimension."""
    dim, cost = spec.dimensions[index], ask.cost[index]
    return Never(rid=ask.rid, dimension=dim.name, cost=cost, ceiling=ceiling, because=dim.because)


def requests_only(spec: PoolSpec, cost: tuple[int, ...]) -> tuple[int, ...]:
    """What a refused call cost where the provider counts refused requests."""
    return tuple(
        units if dim.name == "requests" else 0
        for dim, units in zip(spec.dimensions, cost, strict=True)
    )
