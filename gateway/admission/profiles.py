"""What each provider meters, in which shape: call -> reserved vector, usage -> actual vector.

The accounting profiles of `admission.md` §2.1 and the table of ceilings of §7. A *vector* holds one
cost per dimension of a pool, in micro-units (`units.MICRO` is one request, one token or one
micro-dollar). Three steps use this module:

1. `pool_spec` compiles limits as people write them ("tpm": 450_000) into the dimensions of a pool.
2. `reserve` turns a call's estimate into the vector that the pool charges at the grant.
3. `settle` turns the reported usage into the vector that the meter should have held.

Pure: no clock, no chance, no input or output.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gateway.admission.core import Dimension, Outcome, PoolSpec
from gateway.units import (
    MICRO,
    MINUTE,
    Micros,
    MicroUsd,
    Mode,
    RuleId,
    Tokens,
    maker,
    valueclass,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

HOUR: Micros = 60 * MINUTE
DAY: Micros = 24 * HOUR
MONTH: Micros = 31 * DAY

MAX_LIMIT = 9_000_000_000
"""Units per window at most: micro-units stay exact in a double (2**53), as the Lua twin needs."""

MISSING_CAP_SHARE = 4
"""A call without a cap reserves at most one part in so many of a limit."""

LEASE: Micros = 120 * MICRO
"""How long a grant lives without renewal."""

SHORT_WINDOW: Micros = 15 * MICRO
"""Windows up to this long take the row "10 s window" of the table."""


class Profile(StrEnum):
    """When a provider charges what."""

    UPFRONT_MAX = "upfront_max"
    RESERVE_SETTLE = "reserve_settle"
    REALTIME = "realtime"
    INPUT_ONLY = "input_only"
    NONE = "none"


# Asking an enumeration for a member costs ten times what a name does; a call asks a dozen times.
_NONE, _INPUT_ONLY, _REALTIME = Profile.NONE, Profile.INPUT_ONLY, Profile.REALTIME
_UPFRONT_MAX = Profile.UPFRONT_MAX
_QUOTA, _RAMP = Outcome.QUOTA, Outcome.RAMP


class Shape(StrEnum):
    """How a meter forgets.

    UNKNOWN is treated as a sliding window, because "no 60 s interval exceeds L" is safe on a
    bucket, on a fixed and on a sliding window at once. OWN is a limit of ours, where we are the
    meter: the whole limit is usable at once, nothing is kept back, and no sliding window exceeds
    it.
    """

    BUCKET = "bucket"
    WINDOW = "window"
    UNKNOWN = "unknown"
    OWN = "own"


class Reserve(StrEnum):
    """What lower tiers leave free for higher ones.

    NONE: ceilings by depth alone. INTERACTIVE: tiers 2 and 3 stop at 95 and 90 % of a window.
    CEILINGS: the "85 % mode", tiers 2 and 3 stop at 90 and 85 %.
    """

    NONE = "none"
    INTERACTIVE = "interactive"
    CEILINGS = "ceilings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """A profile with its parameters.

    Attributes:
        profile: When the provider charges.
        cached_input_counts: Whether cache reads count against the limits.
        output_weight: What one output token burns, in input tokens (Bedrock, Claude 4 class: 5).
        refused_counts: Whether a refused request counts against the request limit.
        missing_cap: Output reserved where the call names no cap; None means the learned p99.
    """

    profile: Profile = Profile.REALTIME
    cached_input_counts: bool = True
    output_weight: int = 1
    refused_counts: bool = True
    missing_cap: Tokens | None = None


@valueclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a call is expected to cost, in whole tokens.

    Attributes:
        input: Input tokens, cached share included, bias applied.
        cached: The share of `input` expected to be read from the provider's cache.
        output: Predicted output, never above `cap`.
        cap: Effective output cap of the request times n; None where the request names none.
        money: Predicted price of the call.
        exact: False where a fallback counted.
        bias: What `input` was multiplied by.
        high: The learned p99 of output, reserved where neither call nor provider names a cap; None
            where nothing was learned, then `output` stands in.
    """

    input: Tokens
    output: Tokens
    cap: Tokens | None = None
    cached: Tokens = 0
    money: MicroUsd = 0
    exact: bool = True
    bias: float = 1.0
    high: Tokens | None = None


@valueclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a call really cost, in whole tokens; None is missing, zero is a reported zero.

    Attributes:
        input: Fresh input tokens, cached parts apart.
        output: Output tokens, reasoning included.
        cache_read: Input tokens read from the provider's cache.
        cache_write: Input tokens written to the provider's cache.
        reasoning: The share of `output` that was reasoning.
        estimated: True where we counted, because the provider did not say.
        money: Price of the call.
    """

    input: Tokens | None = None
    output: Tokens | None = None
    cache_read: Tokens | None = None
    cache_write: Tokens | None = None
    reasoning: Tokens | None = None
    estimated: bool = False
    money: MicroUsd = 0


make_estimate = maker(Estimate)
make_usage = maker(Usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What an operator may say differently from the table; None leaves the table's figure.

    Attributes:
        guard_ppm: g, the share of L left unused.
        spread: J, time log entries outlive the window.
        pace_ppm: Multiplier of the refill.
        depth_ppm: Bucket depth of tiers 1, 2, 3 as a share of L.
        ceilings_ppm: What tiers 1, 2, 3 may fill: log caps on windows, depths on buckets.
        lease: How long a grant lives without renewal.
        max_waiting: Waiters at most.
    """

    guard_ppm: int | None = None
    spread: Micros | None = None
    pace_ppm: int | None = None
    depth_ppm: tuple[int, int, int] | None = None
    ceilings_ppm: tuple[int, int, int] | None = None
    lease: Micros | None = None
    max_waiting: int | None = None


@dataclass(frozen=True, slots=True)
class _Unit:
    """What a limit's key means: the dimension it fills and over which time."""

    name: str
    window: Micros
    calendar: str = ""


LIMITS: Mapping[str, _Unit] = {
    "rps": _Unit("requests", MICRO),
    "rpm": _Unit("requests", MINUTE),
    "tpm": _Unit("tokens", MINUTE),
    "itpm": _Unit("input", MINUTE),
    "otpm": _Unit("output", MINUTE),
    "rph": _Unit("requests", HOUR),
    "tph": _Unit("tokens", HOUR),
    "rpd": _Unit("requests", DAY, "day"),
    "tpd": _Unit("tokens", DAY, "day"),
    "itpd": _Unit("input", DAY, "day"),
    "otpd": _Unit("output", DAY, "day"),
    "requests_day": _Unit("requests", DAY, "day"),
    "requests_month": _Unit("requests", MONTH, "month"),
    "tokens_day": _Unit("tokens", DAY, "day"),
    "tokens_month": _Unit("tokens", MONTH, "month"),
    "money_day": _Unit("money", DAY, "day"),
    "money_month": _Unit("money", MONTH, "month"),
}
"""Keys of limits. Values are whole requests, tokens or micro-dollars. Their order here is the order
of a pool's dimensions, whatever the order in the file."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the table in `admission.md` §7; shares in parts per million of L."""

    depth: tuple[int, int, int]
    cap: tuple[int, int, int]
    guard: int
    spread: Micros
    pace: int


_FULL = (1_000_000, 1_000_000, 1_000_000)
_NO_LOG = (0, 0, 0)
_SMOOTH = (50_000, 20_000, 10_000)


def _row(shape: Shape, profile: Profile, reserve: Reserve, window: Micros) -> _Row:
    """The line of the table that holds for this meter."""
    if shape is Shape.OWN:
        return _Row(_FULL, _FULL, 0, 0, 1_000_000)
    if shape is Shape.BUCKET:
        ceilings = reserve is Reserve.CEILINGS
        depth = (1_000_000, 900_000, 850_000) if ceilings else (900_000, 600_000, 500_000)
        return _Row(depth, _NO_LOG, 5_000, 0, 995_000)
    caps = {
        Reserve.NONE: _FULL,
        Reserve.INTERACTIVE: (1_000_000, 950_000, 900_000),
        Reserve.CEILINGS: (1_000_000, 900_000, 850_000),
    }[reserve]
    upfront = profile is Profile.UPFRONT_MAX
    if window <= SHORT_WINDOW:
        guard = 0 if upfront else 30_000
        return _Row(_SMOOTH, caps, guard, 100_000, 1_000_000 - guard)
    if upfront and reserve is Reserve.NONE:
        return _Row(_SMOOTH, caps, 0, 150_000, 1_000_000)
    return _Row(_SMOOTH, caps, 10_000, 300_000, 1_100_000)


def _with(row: _Row, overrides: Overrides) -> _Row:
    """The row with the operator's figures in place."""
    depth, cap = overrides.depth_ppm or row.depth, row.cap
    if overrides.ceilings_ppm is not None:
        if cap == _NO_LOG:
            depth = overrides.depth_ppm or overrides.ceilings_ppm
        else:
            cap = overrides.ceilings_ppm
    guard = row.guard if overrides.guard_ppm is None else overrides.guard_ppm
    spread = row.spread if overrides.spread is None else overrides.spread
    pace = row.pace if overrides.pace_ppm is None else overrides.pace_ppm
    if overrides.guard_ppm is not None and overrides.pace_ppm is None and row.pace < 1_000_000:
        pace = 1_000_000 - guard
    return _Row(depth, cap, guard, spread, pace)


def _lanes(shares: tuple[int, int, int], limit: int) -> tuple[int, int, int, int]:
    """Amounts for lanes 0..3; lane 0 has tier 1's."""
    one, two, three = (limit * share // 1_000_000 for share in shares)
    return (one, one, two, three)


def _whole(amounts: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Rounded up to whole requests.

    They are counted exactly, so a guard's fraction of one protects nothing, and a cap of 0.99
    requests would refuse every call for ever.
    """
    zero, one, two, three = (-(-amount // MICRO) * MICRO for amount in amounts)
    return (zero, one, two, three)


def _squeezed(limit: int, window: Micros, shorter: Micros) -> tuple[int, Micros]:
    """The same rate over a shorter window, which still holds one whole unit."""
    if shorter >= window:
        return limit, window
    squeezed = limit * shorter // window
    if squeezed >= MICRO:
        return squeezed, shorter
    return MICRO, min(window, -(-window * MICRO // limit))


def pool_spec(  # noqa: PLR0913 - a pool is stated in one place, by keyword
    *,
    name: str,
    limits: Mapping[str, int],
    shape: Shape = Shape.UNKNOWN,
    profile: Profile = Profile.REALTIME,
    concurrency: int = 0,
    reserve: Reserve = Reserve.NONE,
    overrides: Overrides | None = None,
    window: Micros | None = None,
    calendar_offset: Micros = 0,
    queue: bool = True,
    mode: Mode = Mode.ENFORCE,
    because: RuleId = "",
    reasons: Mapping[str, RuleId] | None = None,
    revision: int = 0,
) -> PoolSpec:
    """The rules of one pool, compiled from limits as people write them.

    Args:
        name: Unique name of the pool.
        limits: Whole units by key of `LIMITS`: `{"rpm": 500, "tpm": 450_000, "rpd": 10_000}`.
            `money_*` are micro-dollars. An empty mapping is a pool of concurrency alone.
        shape: How the provider's meter forgets; `Shape.OWN` for limits of ours.
        profile: When the provider charges; chooses the line of the table.
        concurrency: Calls in flight at most; 0 is unlimited.
        reserve: What lower tiers leave free for higher ones.
        overrides: The operator's own figures.
        window: Over how long the provider really enforces its per-minute limits, where shorter
            (Azure: 1 or 10 s); the limits shrink in proportion.
        calendar_offset: Micros east of UTC at which days and months begin.
        queue: False refuses at once what does not fit (budgets, own limits with no wait).
        mode: enforce, shadow or off.
        because: Policy path of the pool.
        reasons: Policy path per key, where it is not `<because>.limits.<key>`.
        revision: Policy revision that compiled it.

    Returns:
        The spec; dimensions stand in the order of `LIMITS`, whatever the order given.

    Raises:
        ValueError: An unknown key, a limit below 1 or beyond `MAX_LIMIT`, a negative concurrency.
    """
    if concurrency < 0:
        raise ValueError(f"concurrency must not be negative, is {concurrency}")
    own = overrides or Overrides()
    for key, limit in limits.items():
        if key not in LIMITS:
            raise ValueError(f"unknown limit {key!r}; allowed: {', '.join(LIMITS)}")
        most = MAX_LIMIT * MICRO if LIMITS[key].name == "money" else MAX_LIMIT
        if not 1 <= limit <= most:
            raise ValueError(f"{key} must be 1 to {most}, is {limit}")
    dimensions = []
    spread, pace = 0, 0
    for key, unit in LIMITS.items():
        if key not in limits:
            continue
        micro = limits[key] * MICRO
        reason = (reasons or {}).get(key) or f"{because}.limits.{key}"
        if unit.calendar:
            dimensions.append(
                Dimension(
                    name=unit.name,
                    limit=micro,
                    window=unit.window,
                    depth=(micro, micro, micro, micro),
                    calendar=unit.calendar,
                    calendar_offset=calendar_offset,
                    because=reason,
                )
            )
            continue
        span = unit.window
        if window is not None:
            micro, span = _squeezed(micro, span, window)
        row = _with(_row(shape, profile, reserve, span), own)
        # One spread and one pace per pool: every window has its log, so the larger ones are safe.
        spread, pace = max(spread, row.spread), max(pace, row.pace)
        cap = _lanes(row.cap, micro * (1_000_000 - row.guard) // 1_000_000)
        dimensions.append(
            Dimension(
                name=unit.name,
                limit=micro,
                window=span,
                depth=_lanes(row.depth, micro),
                cap=_whole(cap) if unit.name == "requests" else cap,
                because=reason,
            )
        )
    return PoolSpec(
        name=name,
        dimensions=tuple(dimensions),
        concurrency=concurrency,
        spread=spread,
        pace_ppm=pace or 1_000_000,
        lease=LEASE if own.lease is None else own.lease,
        max_waiting=20_000 if own.max_waiting is None else own.max_waiting,
        queue=queue,
        mode=mode,
        because=because,
        concurrency_because=f"{because}.concurrency" if concurrency else "",
        revision=revision,
        plain=[dimension.name for dimension in dimensions] == ["requests", "tokens"],
    )


def own_accounting(provider: Accounting) -> Accounting:
    """How our own limits (agent, tenant, budget) charge a call served by that provider.

    The reservation is input + output cap, corrected to the reported usage; whether cached input
    counts is the provider profile's say; a request that the provider refused used nothing of ours.
    """
    return Accounting(
        profile=Profile.RESERVE_SETTLE,
        cached_input_counts=provider.cached_input_counts,
        output_weight=1,
        refused_counts=False,
        missing_cap=provider.missing_cap,
    )


def _reserved_output(accounting: Accounting, estimate: Estimate) -> Tokens | None:
    """Output tokens charged at the grant; None where it depends on the limit that they meet."""
    profile = accounting.profile
    if profile is _REALTIME:
        return estimate.output
    if profile is _INPUT_ONLY or profile is _NONE:
        return 0
    return estimate.cap if estimate.cap is not None else accounting.missing_cap


def _uncapped(estimate: Estimate, limit: Tokens) -> Tokens:
    """The same of a call without a cap, against a limit of so many micro-tokens."""
    high = estimate.high if estimate.high is not None else estimate.output
    return max(estimate.output, min(high, limit // (MISSING_CAP_SHARE * MICRO)))


def reserve(accounting: Accounting, estimate: Estimate, spec: PoolSpec) -> tuple[int, ...]:
    """The vector that the pool charges at the grant, in micro-units.

    Args:
        accounting: Profile of the pool; `own_accounting` for limits of ours.
        estimate: What the call is expected to cost, whole tokens, none negative.
        spec: The pool whose dimensions it shall fit.
    """
    fresh = estimate.input
    if not accounting.cached_input_counts:
        fresh = max(0, fresh - estimate.cached)
    if accounting.profile is _NONE:
        fresh = 0
    output = _reserved_output(accounting, estimate)
    if spec.plain:  # as below, for nearly every pool
        if output is None:
            output = _uncapped(estimate, spec.dimensions[1].limit)
        burnt = fresh + accounting.output_weight * output
        return MICRO, burnt * MICRO if burnt > 0 else 0
    vector = []
    for dimension in spec.dimensions:
        name = dimension.name
        if name == "requests":
            vector.append(MICRO)
            continue
        if name == "money":
            units = estimate.money
        elif name == "input":
            units = fresh
        else:
            units = _uncapped(estimate, dimension.limit) if output is None else output
            if name != "output":
                units = fresh + accounting.output_weight * units
        vector.append(units * MICRO if units > 0 else 0)
    return tuple(vector)


def settle(
    accounting: Accounting,
    usage: Usage | None,
    reserved: tuple[int, ...],
    spec: PoolSpec,
    outcome: Outcome,
) -> tuple[int, ...] | None:
    """The vector that the meter should have held for this attempt; None: as reserved.

    A reported zero is zero. A missing figure keeps the reservation of every dimension that needs
    it. A quota or ramp refusal keeps the request (where the provider counts refused ones) and gives
    the tokens back. `upfront_max` never refunds tokens; money always settles to the actual price.

    Args:
        accounting: As given to `reserve`.
        usage: What was reported, or counted by us; None where nothing is known.
        reserved: What `reserve` returned.
        spec: As given to `reserve`.
        outcome: How the attempt ended.
    """
    if outcome is _QUOTA or outcome is _RAMP:
        return _refused(accounting, reserved, spec)
    if usage is None:
        return None
    fresh, output = _used(accounting, usage)
    standing = accounting.profile is _UPFRONT_MAX
    if spec.plain:  # as below, for nearly every pool
        if standing or fresh is None or output is None:
            return None
        used = fresh + accounting.output_weight * output
        micro = used * MICRO if used > 0 else 0
        return None if micro == reserved[1] else (reserved[0], micro)
    vector = []
    dimensions = spec.dimensions
    for at, cost in enumerate(reserved):  # a strict `zip` costs five times as much
        name = dimensions[at].name
        if name == "requests" or (standing and name != "money"):
            vector.append(cost)
            continue
        if name == "tokens":
            units = None
            if fresh is not None and output is not None:
                units = fresh + accounting.output_weight * output
        elif name == "money":
            units = usage.money
        else:
            units = fresh if name == "input" else output
        vector.append(cost if units is None else units * MICRO if units > 0 else 0)
    actual = tuple(vector)
    return None if actual == reserved else actual


def _refused(accounting: Accounting, reserved: tuple[int, ...], spec: PoolSpec) -> tuple[int, ...]:
    """What a call costs that the provider's quota turned away."""
    kept = accounting.refused_counts
    return tuple(
        cost if kept and dimension.name == "requests" else 0
        for dimension, cost in zip(spec.dimensions, reserved, strict=True)
    )


def _used(accounting: Accounting, usage: Usage) -> tuple[int | None, int | None]:
    """Input and output that the profile charges; None keeps the reservation."""
    profile = accounting.profile
    if profile is _NONE:
        return 0, 0
    fresh = usage.input
    if fresh is not None:
        fresh += usage.cache_write or 0
        if accounting.cached_input_counts:
            fresh += usage.cache_read or 0
    return fresh, 0 if profile is _INPUT_ONLY else usage.output
