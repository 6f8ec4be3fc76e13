"""Laws of the provider meters: what a window may hold, what a told wait is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.profiles import Accounting, Profile
from gateway.simulate.meters import (
    DAY,
    RAMP_MINUTES,
    Bucket,
    Calendar,
    Capacity,
    Demand,
    Dip,
    Fixed,
    Kind,
    Meter,
    Provider,
    Quota,
    Ramp,
    Refusal,
    Shape,
    Sliding,
    Ticket,
    sub_minute,
)
from gateway.units import MICRO, MINUTE

START = 1_790_000_000 * MICRO
STEPS = st.lists(
    st.tuples(st.integers(0, 40 * MICRO), st.integers(1, 120)), min_size=1, max_size=60
)


def meters() -> st.SearchStrategy[Meter]:
    return st.one_of(
        st.builds(Bucket, st.integers(1, 200), depth=st.integers(1, 300)),
        st.builds(Fixed, st.integers(1, 200), phase=st.integers(0, 3 * MINUTE)),
        st.builds(Sliding, st.integers(1, 200)),
        st.builds(
            Calendar, st.integers(1, 200), offset=st.integers(-12, 14).map(lambda h: h * DAY // 24)
        ),
        st.builds(sub_minute, st.integers(1, 2000)),
    )


def offer(meter: Meter, steps: list[tuple[int, int]], start: int = START) -> list[tuple[int, int]]:
    """Ask for each amount; charge what fits. Returns what was admitted, and when."""
    now = start
    admitted = []
    for delay, amount in steps:
        now += delay
        if meter.room(now) >= amount:
            meter.charge(now, amount)
            admitted.append((now, amount))
    return admitted


@given(st.integers(1, 300), STEPS)
def test_a_sliding_meter_never_admits_more_than_its_limit_in_any_window(limit, steps):
    admitted = offer(Sliding(limit), steps)
    for end, _ in admitted:
        assert sum(amount for at, amount in admitted if end - MINUTE < at <= end) <= limit


@given(st.integers(1, 300), st.integers(1, 400), STEPS)
def test_a_bucket_admits_at_most_its_depth_and_its_rate_over_any_span(limit, depth, steps):
    admitted = offer(Bucket(limit, depth=depth), steps)
    for first, (begin, _) in enumerate(admitted):
        for end, _ in admitted[first:]:
            total = sum(amount for at, amount in admitted if begin <= at <= end)
            assert total * MINUTE <= depth * MINUTE + limit * (end - begin)


@given(st.integers(1, 300), st.integers(0, 2 * MINUTE), STEPS)
def test_a_fixed_window_holds_at_most_its_limit_and_windows_are_aligned_to_the_phase(
    limit, phase, steps
):
    totals: dict[int, int] = {}
    for at, amount in offer(Fixed(limit, phase=phase), steps, start=0):
        totals[(at - phase % MINUTE) // MINUTE] = (
            totals.get((at - phase % MINUTE) // MINUTE, 0) + amount
        )
    assert all(total <= limit for total in totals.values())


@given(meters(), STEPS, st.integers(1, 250))
def test_waiting_exactly_as_told_is_enough_and_one_microsecond_less_is_not(meter, steps, amount):
    offer(meter, steps)
    now = START + sum(delay for delay, _ in steps)
    wait = meter.retry_in(now, amount)
    if wait is None:
        assert meter.room(now + 10 * DAY) < amount
    elif wait == 0:
        assert meter.room(now) >= amount
    else:
        assert meter.room(now + wait - 1) < amount
        assert meter.room(now + wait) >= amount


@given(meters(), STEPS)
def test_after_the_told_reset_a_meter_is_full_again_and_not_before(meter, steps):
    offer(meter, steps)
    now = START + sum(delay for delay, _ in steps)
    reset = meter.full_in(now)
    if reset:
        assert meter.used(now + reset - 1) > 0
    assert meter.used(now + reset) == 0


@given(meters(), STEPS, st.integers(1, 500))
def test_giving_back_at_once_leaves_the_meter_as_it_was(meter, steps, amount):
    offer(meter, steps)
    now = START + sum(delay for delay, _ in steps)
    before = meter.room(now)
    meter.charge(now, amount)
    meter.give_back(now, amount, now)
    assert meter.room(now) == before


@pytest.mark.parametrize("make", [Fixed, Sliding])
def test_giving_back_into_a_window_that_has_passed_changes_nothing(make):
    meter = make(100)
    meter.charge(START, 90)
    later = START + 2 * MINUTE
    meter.charge(later, 40)
    meter.give_back(later, 90, START)
    assert meter.used(later) == 40


def test_a_refund_into_an_old_slot_does_not_outlive_its_charge():
    meter = Sliding(100)
    meter.charge(START, 80)
    meter.give_back(START + 30 * MICRO, 50, START)
    meter.charge(START + 30 * MICRO, 70)
    assert meter.room(START + 30 * MICRO) == 0
    assert meter.room(START + MINUTE + 1_000) == 30


def test_a_sliding_log_stays_bounded_however_often_it_is_charged():
    meter = Sliding(10**9, window=MICRO)  # slots of 16 µs
    for i in range(70_000):
        meter.charge(START + i * 20, 1)
    assert len(meter._log) <= 62_502
    assert meter.used(START + 70_000 * 20) == 50_000


def test_a_charge_that_could_not_be_refused_overshoots_and_shows_in_the_peak():
    meter = Sliding(100)
    meter.charge(START, 150)
    assert (meter.room(START), meter.used(START), meter.peak) == (-50, 150, 150)


def test_a_bucket_asked_every_microsecond_drops_no_fraction():
    meter = Bucket(7)
    meter.charge(START, 7)
    for i in range(1, 2_001):
        meter.room(START + i)
    for i in range(2_000, MINUTE + 1, 999_999):
        meter.room(START + i)
    assert meter.used(START + MINUTE - 1) == 1
    assert meter.used(START + MINUTE) == 0


def test_a_calendar_day_begins_at_midnight_of_its_offset():
    pacific = Calendar(10, offset=-8 * DAY // 24)
    midnight = (START // DAY) * DAY + 8 * DAY // 24
    pacific.charge(midnight - 1, 10)
    assert pacific.room(midnight - 1) == 0
    assert pacific.room(midnight) == 10


def test_sixty_requests_per_minute_may_mean_one_per_second():
    meter = sub_minute(60, window=MICRO)
    meter.charge(START, 1)
    assert meter.room(START) == 0
    assert 0 < (meter.retry_in(START, 1) or 0) <= MICRO + 16


def test_growth_above_the_floor_is_bounded_by_the_mean_of_the_last_quarter_hour():
    ramp = Ramp(floor=1_000, growth_pct=150)
    minute = START - START % MINUTE
    assert ramp.room(minute) == 1_000
    for i in range(RAMP_MINUTES):
        ramp.charge(minute + i * MINUTE, 2_000)
    assert ramp.room(minute + RAMP_MINUTES * MINUTE) == 3_000
    assert ramp.retry_in(minute + RAMP_MINUTES * MINUTE + 1, 3_001) == MINUTE - 1
    assert ramp.room(minute + 100 * MINUTE) == 1_000


def test_a_ramp_gives_back_into_the_minute_of_the_charge():
    ramp = Ramp(floor=1_000)
    minute = START - START % MINUTE
    ramp.charge(minute, 600)
    ramp.give_back(minute + MINUTE, 600, minute)
    ramp.charge(minute + MINUTE, 5)
    ramp.give_back(minute + 90 * MINUTE, 5, minute + MINUTE)
    assert ramp.used(minute + MINUTE * 90) == 0
    assert ramp.full_in(minute + MINUTE * 90) == 0


@pytest.mark.parametrize("make", [Bucket, Fixed, Sliding])
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(make, limit):
    with pytest.raises(ValueError, match="at least 1"):
        make(limit)


def test_a_ramp_that_shrinks_is_refused():
    with pytest.raises(ValueError, match="growth_pct"):
        Ramp(growth_pct=99)


# --- the provider ------------------------------------------------------------------------------


def account(profile: Profile, **more: object) -> Accounting:
    return Accounting(profile=profile, **more)  # type: ignore[arg-type]


def admitted(outcome: Ticket | Refusal) -> Ticket:
    assert isinstance(outcome, Ticket), outcome
    return outcome


def refused(outcome: Ticket | Refusal) -> Refusal:
    assert isinstance(outcome, Refusal)
    return outcome


def used(provider: Provider, now: int, name: str) -> int:
    standing = provider.standing(now, name)
    assert standing is not None
    return standing.limit - standing.remaining


def test_upfront_charges_input_and_cap_and_gives_nothing_back():
    provider = Provider(Quota(tokens=1_000, accounting=account(Profile.UPFRONT_MAX)))
    ticket = admitted(provider.arrive(START, Demand(input=100, cap=400)))
    provider.produce(START, ticket, 50)
    provider.finish(START, ticket, 50)
    assert used(provider, START, "tokens") == 500
    assert provider.charged_tokens(ticket) == 500


def test_upfront_without_a_cap_reserves_what_the_profile_assumes():
    quota = Quota(tokens=1_000, accounting=account(Profile.UPFRONT_MAX, missing_cap=300))
    provider = Provider(quota)
    admitted(provider.arrive(START, Demand(input=100)))
    assert used(provider, START, "tokens") == 400


def test_reserve_settle_gives_the_unused_reservation_back_into_its_window():
    quota = Quota(tokens=1_000, output=900, accounting=account(Profile.RESERVE_SETTLE))
    provider = Provider(quota)
    ticket = admitted(provider.arrive(START, Demand(input=100, cap=400)))
    assert used(provider, START, "tokens") == 500
    provider.produce(START + 1, ticket, 30)
    provider.finish(START + MICRO, ticket, 30)
    assert used(provider, START + MICRO, "tokens") == 130
    assert used(provider, START + MICRO, "output") == 30
    assert used(provider, START + MINUTE + 1_000, "tokens") == 0


def test_reserve_settle_charges_an_output_above_its_reservation():
    quota = Quota(tokens=1_000, accounting=account(Profile.RESERVE_SETTLE, output_weight=5))
    provider = Provider(quota)
    ticket = admitted(provider.arrive(START, Demand(input=10, cap=2)))
    provider.finish(START, ticket, 4)
    assert used(provider, START, "tokens") == 10 + 4 * 5
    assert provider.charged_tokens(ticket) == 30


def test_realtime_charges_output_as_it_is_produced():
    quota = Quota(tokens=1_000, output=300, accounting=account(Profile.REALTIME))
    provider = Provider(quota)
    ticket = admitted(provider.arrive(START, Demand(input=100, cap=400)))
    assert used(provider, START, "tokens") == 100
    assert used(provider, START, "output") == 0
    provider.produce(START + 1, ticket, 30)
    provider.produce(START + 2, ticket, 20)
    provider.finish(START + 3, ticket, 50)
    assert used(provider, START + 3, "tokens") == 150
    assert used(provider, START + 3, "output") == 50


def test_realtime_admits_nobody_once_no_output_is_left():
    provider = Provider(Quota(output=10, accounting=account(Profile.REALTIME)))
    ticket = admitted(provider.arrive(START, Demand(input=1)))
    provider.produce(START, ticket, 25)
    refusal = refused(provider.arrive(START, Demand(input=1)))
    assert (refusal.dimension, refusal.used, refusal.limit) == ("output", 25, 10)


def test_cached_input_may_be_free_but_cache_writes_count():
    demand = Demand(input=10, cache_read=200, cache_write=30)
    free = Provider(
        Quota(input=1_000, accounting=account(Profile.REALTIME, cached_input_counts=False))
    )
    paid = Provider(Quota(input=1_000, accounting=account(Profile.REALTIME)))
    free.arrive(START, demand)
    paid.arrive(START, demand)
    assert used(free, START, "input") == 40
    assert used(paid, START, "input") == 240


def test_input_only_never_charges_output_and_none_charges_nothing():
    for profile, expected in ((Profile.INPUT_ONLY, 100), (Profile.NONE, 0)):
        provider = Provider(Quota(tokens=1_000, accounting=account(profile)))
        ticket = admitted(provider.arrive(START, Demand(input=100, cap=50)))
        provider.produce(START, ticket, 40)
        provider.finish(START, ticket, 40)
        assert used(provider, START, "tokens") == expected
        assert provider.charged_tokens(ticket) == expected


def test_a_refusal_charges_no_tokens_in_any_dimension():
    provider = Provider(Quota(requests=10, tokens=1_000, input=50))
    refusal = refused(provider.arrive(START, Demand(input=60)))
    assert refusal.dimension == "input"
    assert refusal.retry_in is None
    assert used(provider, START, "tokens") == 0


def test_refused_requests_count_against_the_request_limit_unless_told_otherwise():
    for counts, left in ((True, 7), (False, 9)):
        quota = Quota(
            requests=10, tokens=100, accounting=account(Profile.REALTIME, refused_counts=counts)
        )
        provider = Provider(quota)
        admitted(provider.arrive(START, Demand(input=100)))
        for _ in range(2):
            refused(provider.arrive(START, Demand(input=100)))
        standing = provider.standing(START, "requests")
        assert standing is not None
        assert standing.remaining == left


def test_clients_that_hammer_a_sliding_request_limit_keep_it_shut():
    provider = Provider(Quota(requests=10))
    outcomes = [provider.arrive(START + i * MICRO, Demand(input=1)) for i in range(300)]
    assert sum(isinstance(outcome, Ticket) for outcome in outcomes) == 10


def test_the_refusal_names_the_dimension_with_the_longest_wait():
    provider = Provider(Quota(requests=5, requests_per_day=1, tokens=100))
    admitted(provider.arrive(START, Demand(input=60)))
    refusal = refused(provider.arrive(START, Demand(input=60)))
    assert (refusal.kind, refusal.dimension) == (Kind.PERIOD, "requests_per_day")
    never = refused(provider.arrive(START, Demand(input=101)))
    assert (never.dimension, never.retry_in) == ("tokens", None)


def test_concurrency_is_held_until_finish_and_finish_is_idempotent():
    provider = Provider(Quota(concurrency=1))
    first = admitted(provider.arrive(START, Demand(input=1)))
    assert refused(provider.arrive(START, Demand(input=1))).dimension == "concurrency"
    provider.finish(START, first, 0)
    provider.finish(START, first, 0)
    admitted(provider.arrive(START, Demand(input=1)))
    assert (provider.in_flight, provider.peak_in_flight) == (1, 1)


def test_after_finish_nothing_more_is_charged():
    provider = Provider(Quota(tokens=100))
    ticket = admitted(provider.arrive(START, Demand(input=1)))
    provider.finish(START, ticket, 0)
    provider.produce(START, ticket, 50)
    assert used(provider, START, "tokens") == 1


def test_capacity_is_nobodys_quota_and_spends_no_request():
    dip = Dip(start=START, end=START + 5 * MICRO, limit=0)
    provider = Provider(Quota(requests=10, capacity=Capacity(limit=100, dips=(dip,))))
    refusal = refused(provider.arrive(START, Demand(input=1)))
    assert (refusal.kind, refusal.retry_in) == (Kind.CAPACITY, 5 * MICRO)
    assert used(provider, START, "requests") == 0
    admitted(provider.arrive(START + 5 * MICRO, Demand(input=1)))


def test_a_ramp_refusal_is_its_own_kind():
    provider = Provider(Quota(tokens=10_000, ramp=(100, 150)))
    refusal = refused(provider.arrive(START, Demand(input=101)))
    assert (refusal.kind, refusal.dimension) == (Kind.RAMP, "ramp")


@pytest.mark.parametrize("shape", list(Shape))
def test_headers_show_the_published_limit_whatever_the_shape_enforces(shape):
    provider = Provider(Quota(shape=shape, requests=600, tokens=60_000))
    admitted(provider.arrive(START, Demand(input=10)))
    standing = provider.standing(START, "tokens")
    assert standing is not None
    assert standing.limit == 60_000
    assert 0 < standing.full_in <= MINUTE + 1_000
    assert provider.standing(START, "input") is None
    assert provider.peaks()["tokens"]["peak"] == 10


@pytest.mark.parametrize("name", ["requests", "tokens", "concurrency"])
def test_a_quota_of_zero_is_an_error_and_not_a_silent_stop(name):
    with pytest.raises(ValueError, match=name):
        Quota(**{name: 0})


def test_a_depth_of_zero_is_an_error():
    with pytest.raises(ValueError, match="depth"):
        Quota(depth=0)


@given(
    st.sampled_from([Profile.UPFRONT_MAX, Profile.RESERVE_SETTLE, Profile.REALTIME]),
    st.sampled_from([Shape.FIXED, Shape.SLIDING, Shape.BUCKET]),
    st.lists(
        st.tuples(
            st.integers(0, 5 * MICRO), st.integers(0, 60), st.integers(1, 60), st.integers(0, 60)
        ),
        max_size=40,
    ),
)
def test_after_everything_is_finished_and_a_window_is_quiet_the_meter_is_empty(
    profile, shape, calls
):
    provider = Provider(Quota(shape=shape, tokens=300, accounting=account(profile)))
    now = START
    for delay, amount, cap, output in calls:
        now += delay
        outcome = provider.arrive(now, Demand(input=amount, cap=cap))
        if isinstance(outcome, Ticket):
            produced = min(cap, output)
            provider.produce(now + 10, outcome, produced)
            provider.finish(now + 20, outcome, produced)
            expected = cap if profile is Profile.UPFRONT_MAX else produced
            assert provider.charged_tokens(outcome) == amount + expected
        now += 20
    later = now + 3 * MINUTE
    assert used(provider, later, "tokens") == 0
    assert provider.in_flight == 0
