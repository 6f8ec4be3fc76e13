"""Limits to pools, estimates to vectors, usage to settlements."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.admission.core import Mode, Outcome
from gateway.admission.periods import period
from gateway.admission.profiles import (
    Accounting,
    Estimate,
    Overrides,
    Profile,
    Reserve,
    Shape,
    Usage,
    own_accounting,
    pool_spec,
    reserve,
    settle,
)  # fmt: skip
from gateway.units import MICRO, MINUTE

U = MICRO


def pool(limits, **options):
    return pool_spec(name="p", limits=limits, because="pools.p", **options)


def shares(spec, i=0):
    """Depths and caps of tiers 1, 2, 3 in percent of the limit, rounded to a tenth."""
    dim = spec.dimensions[i]
    return tuple(
        tuple(round(amount / dim.limit * 100, 1) for amount in amounts[1:])
        for amounts in (dim.depth, dim.cap)
    )


@pytest.mark.parametrize(
    ("options", "depths", "caps", "spread", "pace"),
    [
        ({"shape": Shape.BUCKET}, (90, 60, 50), (0, 0, 0), 0, 995_000),
        ({}, (5, 2, 1), (99, 99, 99), 300_000, 1_100_000),
        ({"profile": Profile.UPFRONT_MAX}, (5, 2, 1), (100, 100, 100), 150_000, 1_000_000),
        ({"window": 10 * U}, (5, 2, 1), (97, 97, 97), 100_000, 970_000),
        ({"window": 10 * U, "profile": Profile.UPFRONT_MAX}, (5, 2, 1), (100, 100, 100), 100_000,
         1_000_000),
        ({"reserve": Reserve.INTERACTIVE}, (5, 2, 1), (99, 94.0, 89.1), 300_000, 1_100_000),
        ({"reserve": Reserve.CEILINGS}, (5, 2, 1), (99, 89.1, 84.2), 300_000, 1_100_000),
        ({"reserve": Reserve.CEILINGS, "shape": Shape.BUCKET}, (100, 90, 85), (0, 0, 0), 0,
         995_000),
        ({"shape": Shape.OWN}, (100, 100, 100), (100, 100, 100), 0, 1_000_000),
    ],
)  # fmt: skip
def test_each_line_of_the_table_of_ceilings(options, depths, caps, spread, pace):
    spec = pool({"tpm": 600_000}, **options)
    got_depths, got_caps = shares(spec)
    assert got_depths == depths
    assert got_caps == pytest.approx(caps, abs=0.1)
    assert (spec.spread, spec.pace_ppm) == (spread, pace)
    assert spec.dimensions[0].depth[0] == spec.dimensions[0].depth[1]


def test_dimensions_stand_in_one_order_with_their_rules():
    spec = pool({"tpd": 5_000, "tpm": 450, "rpm": 3}, calendar_offset=60 * U, revision=7)
    assert [(d.name, d.window // MINUTE, d.calendar) for d in spec.dimensions] == [
        ("requests", 1, ""), ("tokens", 1, ""), ("tokens", 1_440, "day"),
    ]  # fmt: skip
    assert [d.because for d in spec.dimensions] == [
        "pools.p.limits.rpm", "pools.p.limits.tpm", "pools.p.limits.tpd",
    ]  # fmt: skip
    assert spec.dimensions[2].calendar_offset == 60 * U
    assert spec.revision == 7
    renamed = pool({"rpm": 3}, reasons={"rpm": "agents.a.rate"})
    assert renamed.dimensions[0].because == "agents.a.rate"


def test_a_small_request_limit_keeps_its_last_request():
    assert pool({"rpm": 1}).dimensions[0].cap == (U,) * 4
    assert pool({"rpm": 600}).dimensions[0].cap == (594 * U,) * 4
    assert pool({"rpm": 600}, window=U).dimensions[0].cap == (10 * U,) * 4


def test_a_shorter_window_shrinks_the_limit_but_never_below_one_unit():
    dim = pool({"rpm": 60}, window=U).dimensions[0]
    assert (dim.limit, dim.window) == (U, U)
    slow = pool({"rpm": 30}, window=U).dimensions[0]
    assert (slow.limit, slow.window) == (U, 2 * U)
    same = pool({"rpm": 30}, window=2 * MINUTE).dimensions[0]
    assert (same.limit, same.window) == (30 * U, MINUTE)


def test_the_operators_figures_replace_the_tables():
    own = Overrides(
        guard_ppm=0, spread=5, pace_ppm=900_000, depth_ppm=(1, 1, 1), lease=7, max_waiting=9
    )
    spec = pool({"tpm": 1_000_000}, overrides=own)
    assert spec.dimensions[0].cap == (10**12,) * 4
    assert spec.dimensions[0].depth == (10**6,) * 4
    assert (spec.spread, spec.pace_ppm, spec.lease, spec.max_waiting) == (5, 900_000, 7, 9)
    ceilings = Overrides(ceilings_ppm=(1_000_000, 800_000, 700_000))
    assert shares(pool({"tpm": 10**6}, shape=Shape.OWN, overrides=ceilings))[1] == (100, 80, 70)
    assert shares(pool({"tpm": 10**6}, shape=Shape.BUCKET, overrides=ceilings))[0] == (100, 80, 70)
    guarded = pool({"tpm": 10**6}, shape=Shape.BUCKET, overrides=Overrides(guard_ppm=20_000))
    assert guarded.pace_ppm == 980_000


def test_a_pool_of_concurrency_alone_has_no_dimensions():
    spec = pool({}, concurrency=4, mode=Mode.SHADOW, queue=False)
    assert (spec.dimensions, spec.concurrency, spec.pace_ppm) == ((), 4, 1_000_000)
    assert spec.concurrency_because == "pools.p.concurrency"
    assert (spec.mode, spec.queue) == (Mode.SHADOW, False)


@pytest.mark.parametrize(
    ("limits", "options", "message"),
    [
        ({"rpn": 5}, {}, "unknown limit 'rpn'; allowed: rps, rpm"),
        ({"rpm": 0}, {}, "rpm must be 1 to 9000000000, is 0"),
        ({"tpm": 10**10}, {}, "tpm must be 1 to"),
        ({}, {"concurrency": -1}, "concurrency must not be negative"),
    ],
)
def test_wrong_limits_are_clear_errors(limits, options, message):
    with pytest.raises(ValueError, match=message):
        pool(limits, **options)


ALL = pool({"rpm": 10, "tpm": 10_000, "itpm": 10_000, "otpm": 10_000, "money_day": 10**6})
CALL = Estimate(input=100, cached=30, output=40, cap=200, money=5)


@pytest.mark.parametrize(
    ("accounting", "requests", "tokens", "input_", "output"),
    [
        (Accounting(profile=Profile.UPFRONT_MAX), 1, 300, 100, 200),
        (Accounting(profile=Profile.RESERVE_SETTLE), 1, 300, 100, 200),
        (Accounting(profile=Profile.RESERVE_SETTLE, cached_input_counts=False), 1, 270, 70, 200),
        (Accounting(profile=Profile.RESERVE_SETTLE, output_weight=5), 1, 1_100, 100, 200),
        (Accounting(), 1, 140, 100, 40),
        (Accounting(profile=Profile.INPUT_ONLY), 1, 100, 100, 0),
        (Accounting(profile=Profile.NONE), 1, 0, 0, 0),
    ],
)
def test_each_profile_reserves_its_vector(accounting, requests, tokens, input_, output):
    expected = tuple(n * U for n in (requests, tokens, input_, output, 5))
    assert reserve(accounting, CALL, ALL) == expected


@pytest.mark.parametrize(
    ("missing_cap", "high", "tokens"),
    [(64_000, None, 64_100), (None, 900, 1_000), (None, None, 140), (None, 9_000, 2_600)],
)
def test_a_missing_cap_reserves_the_providers_assumption_or_the_learned_p99(
    missing_cap, high, tokens
):
    accounting = Accounting(profile=Profile.RESERVE_SETTLE, missing_cap=missing_cap)
    call = Estimate(input=100, output=40, high=high)
    assert reserve(accounting, call, ALL)[1] == tokens * U


def settled(accounting, usage, outcome=Outcome.SERVED, reserved=None):
    reserved = reserved or reserve(accounting, CALL, ALL)
    actual = settle(accounting, usage, reserved, ALL, outcome)
    return None if actual is None else tuple(units / U for units in actual)


USED = Usage(input=50, cache_read=40, cache_write=10, output=20, money=3)


@pytest.mark.parametrize(
    ("accounting", "expected"),
    [
        (Accounting(profile=Profile.UPFRONT_MAX), (1, 300, 100, 200, 3)),
        (Accounting(profile=Profile.RESERVE_SETTLE), (1, 120, 100, 20, 3)),
        (Accounting(profile=Profile.RESERVE_SETTLE, cached_input_counts=False), (1, 80, 60, 20, 3)),
        (Accounting(output_weight=5), (1, 200, 100, 20, 3)),
        (Accounting(profile=Profile.INPUT_ONLY), (1, 100, 100, 0, 3)),
        (Accounting(profile=Profile.NONE), (1, 0, 0, 0, 3)),
    ],
)
def test_each_profile_settles_to_what_its_provider_counts(accounting, expected):
    assert settled(accounting, USED) == expected


def test_a_reported_zero_is_zero_and_a_missing_figure_keeps_the_reservation():
    accounting = Accounting(profile=Profile.RESERVE_SETTLE)
    assert settled(accounting, Usage(input=0, output=0)) == (1, 0, 0, 0, 0)
    assert settled(accounting, Usage(input=10)) == (1, 300, 10, 200, 0)
    assert settled(accounting, Usage(output=10, money=5)) == (1, 300, 100, 10, 5)
    assert settled(accounting, None) is None
    assert settled(accounting, None, Outcome.FAILED) is None
    assert settled(Accounting(), Usage(input=100, output=40, money=5)) is None


@pytest.mark.parametrize("outcome", [Outcome.QUOTA, Outcome.RAMP])
def test_a_refusal_gives_the_tokens_back_and_keeps_the_request_where_it_counts(outcome):
    assert settled(Accounting(), USED, outcome) == (1, 0, 0, 0, 0)
    assert settled(Accounting(refused_counts=False), None, outcome) == (0, 0, 0, 0, 0)


def test_our_own_limits_reserve_the_cap_settle_to_usage_and_follow_the_cache_rule():
    provider = Accounting(profile=Profile.NONE, cached_input_counts=False, output_weight=5)
    own = own_accounting(provider)
    assert own.profile is Profile.RESERVE_SETTLE
    assert reserve(own, CALL, ALL)[1] == 270 * U
    # Cases: 100,000 cached tokens leave a bucket of 1,000 alone.
    assert settled(own, Usage(input=50, cache_read=100_000, output=50))[1] == 100


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2026, 11, 29, 23, 59, 59, tzinfo=UTC),
        datetime(2026, 12, 31, 12, tzinfo=UTC),
        datetime(2028, 2, 29, tzinfo=UTC),
        datetime(2027, 2, 28, 23, tzinfo=UTC),
        datetime(2100, 2, 28, 12, tzinfo=UTC),
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(1970, 1, 1, 12, tzinfo=UTC),
        datetime(2000, 3, 1, tzinfo=UTC),
    ],
)
@pytest.mark.parametrize("hours", [0, 9, -8])
def test_days_and_months_begin_at_midnight_of_their_offset(moment, hours):
    offset = hours * 3_600 * U
    now = int(moment.timestamp()) * U
    local = datetime.fromtimestamp(moment.timestamp() + hours * 3_600, tz=UTC)
    day = local.replace(hour=0, minute=0, second=0)
    month = day.replace(day=1)
    following = month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)

    def at(date):
        return int(date.timestamp()) * U - offset

    assert period("day", offset, now) == (at(day), at(day) + 86_400 * U)
    assert period("month", offset, now) == (at(month), at(following))


def test_another_calendar_is_a_clear_error():
    with pytest.raises(ValueError, match="'day' or 'month', is 'week'"):
        period("week", 0, 0)
