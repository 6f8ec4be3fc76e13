from __future__ import annotations

from random import Random

import pytest

from gateway.resilience.breaker import (
    EASE,
    EASED,
    FOREVER,
    SETTLES,
    Allow,
    Breaker,
    BreakerRules,
    Results,
    State,
    Trip,
)
from gateway.resilience.probes import Handed
from gateway.units import MICRO

RULES = BreakerRules()
RNG = Random(3)


def opened(now: int = 0, rules: BreakerRules = RULES) -> Breaker:
    breaker = Breaker(rules)
    for _ in range(rules.in_a_row):
        breaker.failed(now=now, rng=RNG, reason="fault 500")
    assert breaker.state is State.OPEN
    return breaker


def half_open(now: int = 0) -> tuple[Breaker, int]:
    breaker = opened(now)
    ruling = breaker.ask(now=breaker.until)
    assert isinstance(ruling, Allow)
    return breaker, ruling.probe


def test_five_faults_in_a_row_open_it_at_once():
    breaker = Breaker(RULES)
    results = [breaker.failed(now=0, rng=RNG, reason="fault") for _ in range(5)]
    assert results == [False, False, False, False, True]
    assert isinstance(breaker.ask(now=1), Trip)


def test_four_faults_and_a_success_are_no_row():
    breaker = Breaker(BreakerRules(slow_volume=10**6))
    for _ in range(20):
        for _ in range(5):
            breaker.succeeded(now=0)
        for _ in range(4):
            breaker.failed(now=0, rng=RNG, reason="fault")
    assert breaker.state is State.CLOSED


def test_faults_in_a_row_spread_over_more_than_a_minute_do_not_count_as_a_row():
    breaker = Breaker(RULES)
    for step in range(8):
        breaker.failed(now=step * 20 * MICRO, rng=RNG, reason="fault")
    assert breaker.state is State.CLOSED


def test_half_of_ten_in_ten_seconds_opens_it():
    breaker = Breaker(RULES)
    for _ in range(5):
        breaker.succeeded(now=0)
    states = []
    for step in range(4):
        breaker.failed(now=step, rng=RNG, reason="fault")
        states.append(breaker.state)
    assert states == [State.CLOSED] * 4
    breaker.succeeded(now=5)
    for step in range(4):
        breaker.failed(now=6 + step, rng=RNG, reason="fault")
    assert breaker.state is State.OPEN


def test_a_trickle_of_failures_over_five_minutes_opens_it():
    breaker = Breaker(RULES)
    now = 0
    for _ in range(20):
        now += 11 * MICRO
        breaker.failed(now=now, rng=RNG, reason="fault")
        if breaker.state is State.OPEN:
            break
        breaker.succeeded(now=now)
        breaker.succeeded(now=now)
    assert breaker.state is State.OPEN


def test_old_failures_are_forgotten():
    breaker = Breaker(RULES)
    for _ in range(4):
        breaker.failed(now=0, rng=RNG, reason="fault")
    for _ in range(30):
        breaker.succeeded(now=400 * MICRO)
    for _ in range(4):
        breaker.failed(now=400 * MICRO, rng=RNG, reason="fault")
    assert breaker.state is State.CLOSED


def test_one_probe_at_a_time_and_three_good_ones_close_it():
    breaker, probe = half_open()
    now = breaker.until
    assert isinstance(breaker.ask(now=now), Trip)
    assert not breaker.succeeded(now=now, probe=probe)
    for last in (False, True):
        ruling = breaker.ask(now=now)
        assert isinstance(ruling, Allow)
        assert breaker.succeeded(now=now, probe=ruling.probe) is last
    assert breaker.state is State.CLOSED


def test_a_bad_probe_opens_it_again_for_longer_at_most_the_cap():
    breaker, probe = half_open()
    longest = 0
    for _ in range(30):
        now = breaker.until + 1
        breaker.failed(now=now, rng=RNG, reason="fault", probe=probe)
        assert breaker.state is State.OPEN
        longest = max(longest, breaker.until - now)
        ruling = breaker.ask(now=breaker.until)
        assert isinstance(ruling, Allow)
        probe = ruling.probe
    assert longest <= RULES.cap
    assert longest > 10 * MICRO


def test_an_aborted_probe_frees_its_place_without_a_verdict():
    breaker, probe = half_open()
    breaker.aborted(probe=probe)
    assert isinstance(breaker.ask(now=breaker.until), Allow)
    assert breaker.state is State.HALF_OPEN


def test_a_lost_probe_frees_its_place_when_its_lease_ends():
    breaker = opened()
    now = breaker.until
    assert isinstance(breaker.ask(now=now), Allow)
    assert isinstance(breaker.ask(now=now + RULES.probe_lease - 1), Trip)
    assert isinstance(breaker.ask(now=now + RULES.probe_lease), Allow)


def test_a_late_failure_of_an_old_attempt_only_lengthens_the_wait():
    breaker = opened()
    until = breaker.until
    breaker.failed(now=1, rng=RNG, reason="late")
    assert breaker.until == until
    breaker.failed(now=1, rng=RNG, reason="late", hint=50 * MICRO)
    assert breaker.until == 50 * MICRO + 1


def test_three_identical_quota_refusals_start_the_ladder_but_are_no_sickness():
    breaker = Breaker(RULES)
    results = [breaker.refused_for_quota(key="tokens", blocked_until=9 * MICRO) for _ in range(3)]
    assert results == [False, False, True]
    ruling = breaker.ask(now=0)
    assert isinstance(ruling, Trip)
    assert not ruling.sick


@pytest.mark.parametrize("between", ["other code", "success"])
def test_a_run_of_quota_refusals_is_broken_by(between):
    breaker = Breaker(RULES)
    for _ in range(2):
        breaker.refused_for_quota(key="tokens", blocked_until=MICRO)
    if between == "success":
        breaker.started()
    else:
        breaker.refused_for_quota(key="requests", blocked_until=MICRO)
    breaker.refused_for_quota(key="tokens", blocked_until=MICRO)
    assert breaker.state is State.CLOSED


def test_shut_without_a_reset_waits_for_an_operator():
    breaker = Breaker(RULES)
    breaker.shut(until=None, reason="money")
    assert isinstance(breaker.ask(now=FOREVER - 1), Trip)
    breaker.told(State.CLOSED, until=0, reason="operator")
    assert isinstance(breaker.ask(now=0), Allow)


def test_a_shut_breaker_is_only_ever_shut_for_longer():
    breaker = Breaker(RULES)
    breaker.shut(until=100, reason="period")
    breaker.shut(until=50, reason="period")
    assert breaker.until == 100
    assert isinstance(breaker.ask(now=100), Allow)


def test_peeking_grants_no_probe():
    breaker = opened()
    now = breaker.until
    assert isinstance(breaker.peek(now=now), Allow)
    assert isinstance(breaker.peek(now=now), Allow)
    assert isinstance(breaker.ask(now=now), Allow)
    assert isinstance(breaker.peek(now=now), Trip)


# --- just closed ---


def closed_again(now: int = 0) -> tuple[Breaker, int]:
    breaker, probe = half_open(now)
    at = breaker.until + now + MICRO
    for _ in range(RULES.probes):
        breaker.succeeded(now=at, probe=probe)
        ruling = breaker.ask(now=at)
        assert isinstance(ruling, Allow)
        probe = ruling.probe
    assert breaker.state is State.CLOSED
    return breaker, at


def test_a_breaker_that_has_just_closed_lets_calls_in_slowly():
    breaker, at = closed_again()
    assert breaker.crowded(RULES.probes - 1, now=at) is None
    trip = breaker.crowded(RULES.probes, now=at)
    assert trip is not None
    assert trip.until == at + EASE
    breaker.started(now=at)  # one good head: one more may be under way
    assert breaker.crowded(RULES.probes, now=at) is None
    assert breaker.crowded(RULES.probes + 1, now=at) is not None


def test_after_a_while_or_enough_good_heads_any_number_is_let_in():
    breaker, at = closed_again()
    assert breaker.crowded(10_000, now=at + EASE) is None
    breaker, at = closed_again()
    for _ in range(EASED):
        breaker.started(now=at)
    assert breaker.crowded(10_000, now=at) is None


def test_a_breaker_that_was_never_open_or_opened_for_quota_lets_anybody_in():
    breaker = Breaker(RULES)
    assert breaker.crowded(10_000, now=0) is None
    for _ in range(RULES.identical_quota):
        breaker.refused_for_quota(key="rate_limit", blocked_until=MICRO)
    assert isinstance(breaker.ask(now=MICRO), Allow)
    assert breaker.crowded(10_000, now=MICRO) is None
    assert breaker.closed_at == MICRO


def test_what_the_fleet_saw_opens_a_closed_breaker_and_nothing_else():
    breaker = Breaker(RULES)
    breaker.started(now=0)
    assert not breaker.together(now=0, rng=RNG)
    breaker.heard(0, 7, Results(3, 6))
    assert breaker.together(now=0, rng=RNG), "six of ten"
    assert breaker.state is State.OPEN
    assert breaker.sick
    version = breaker.version
    assert not breaker.together(now=0, rng=RNG)
    assert breaker.version == version


def test_results_heard_of_a_cell_replace_what_was_heard_of_it_before_and_grow_old():
    breaker = Breaker(RULES)
    breaker.heard(0, 7, Results(0, 9))
    breaker.heard(MICRO, 7, Results(30, 9))
    assert not breaker.together(now=MICRO, rng=RNG), "9 of 39: not half, not 30 %"
    breaker.heard(RULES.slow_window + MICRO, 200, Results(0, 9))
    assert not breaker.together(now=RULES.slow_window + MICRO, rng=RNG), "9 alone"
    breaker.heard(RULES.slow_window + MICRO, 201, Results(0, 1))
    assert breaker.together(now=RULES.slow_window + MICRO, rng=RNG)


def test_a_breaker_that_closes_forgets_what_the_fleet_saw():
    breaker = Breaker(RULES)
    breaker.heard(0, 7, Results(0, 30))
    breaker.told(State.CLOSED, until=0, reason="operator")
    assert not breaker.together(now=0, rng=RNG)


# --- probes of a fleet ---


def test_a_probe_counts_on_from_what_the_fleet_has_counted():
    breaker, probe = half_open()
    now = breaker.until
    assert breaker.kept(probe, until=now + 9, good=2)
    assert breaker.handed_on(now=now) == Handed(good=2)
    assert breaker.probed(now=now, probe=probe)
    assert breaker.state is State.CLOSED
    assert breaker.handed_on(now=now) == Handed(good=0, rest=SETTLES)


def test_without_a_word_of_the_fleet_a_probe_counts_on_from_its_own():
    breaker, probe = half_open()
    now = breaker.until
    assert breaker.kept(probe, until=now + 9, good=1)
    breaker.probed(now=now, probe=probe)
    ruling = breaker.ask(now=now)
    assert breaker.kept(ruling.probe, until=now + 9)
    assert breaker.probed(now=now, probe=ruling.probe)


def test_a_place_is_kept_until_then_and_no_longer():
    breaker, probe = half_open()
    now = breaker.until
    breaker.kept(probe, until=now + 9)
    assert isinstance(breaker.ask(now=now + 8), Trip)
    assert isinstance(breaker.ask(now=now + 9), Allow)
    assert not breaker.kept(probe, until=now + 99), "another probe has it"


@pytest.mark.parametrize("state", [State.OPEN, State.SHUT, State.CLOSED])
def test_a_place_whose_breaker_changed_meanwhile_is_not_kept(state):
    breaker, probe = half_open()
    breaker.told(state, until=FOREVER, reason="the fleet")
    assert not breaker.kept(probe, until=FOREVER, good=2)


def test_while_another_gateway_probes_nobody_here_does_until_then_or_until_it_is_over():
    breaker, probe = half_open()
    now = breaker.until
    breaker.yielded(probe, until=now + 9)
    ruling = breaker.ask(now=now + 8)
    assert isinstance(ruling, Trip)
    assert ruling.until == now + 9
    assert isinstance(breaker.peek(now=now + 8), Trip)
    assert breaker.vacated()
    assert not breaker.vacated(), "nobody waits for it any more"
    ours = breaker.ask(now=now + 8)
    assert isinstance(ours, Allow)
    assert not breaker.vacated(), "our own probe is not over because of news"
    breaker.yielded(probe, until=now + 99)  # of one that has no place any more
    assert breaker.kept(ours.probe, until=now + 9)
    breaker.yielded(ours.probe, until=now + 20)
    assert isinstance(breaker.ask(now=now + 20), Allow)


def test_a_probe_that_was_yielded_says_nothing_any_more():
    breaker, probe = half_open()
    now = breaker.until
    breaker.yielded(probe, until=now + 9)
    breaker.aborted(probe=probe)
    assert not breaker.probed(now=now, probe=probe)
    assert not breaker.failed(now=now, rng=RNG, reason="late", probe=probe)
    assert isinstance(breaker.ask(now=now + 8), Trip)
    assert breaker.handed_on(now=now) == Handed(good=0)


def test_a_bad_probe_leaves_no_good_ones_and_a_place_that_rests_while_it_is_open():
    breaker, probe = half_open()
    now = breaker.until
    breaker.kept(probe, until=now + 9, good=2)
    breaker.failed(now=now, rng=RNG, reason="fault", probe=probe)
    assert breaker.handed_on(now=now) == Handed(good=0, rest=breaker.until - now)
    assert breaker.handed_on(now=breaker.until + 5) == Handed(good=0)
    breaker.shut(until=FOREVER, reason="money")
    assert breaker.handed_on(now=now) == Handed(good=0, rest=SETTLES)


def test_a_breaker_that_another_gateway_closed_lets_calls_in_slowly_as_well():
    breaker, _ = half_open()
    now = breaker.until + 7
    breaker.resumed(now=now)
    assert breaker.state is State.CLOSED
    assert breaker.closed_at == now
    assert breaker.crowded(RULES.probes, now=now) is not None
    assert breaker.crowded(RULES.probes - 1, now=now) is None
    for _ in range(RULES.in_a_row - 1):
        assert not breaker.failed(now=now, rng=RNG, reason="fault"), "old failures are forgiven"


def test_the_end_of_a_good_answer_ends_a_run_of_quota_refusals():
    breaker = Breaker(RULES)
    for _ in range(2):
        breaker.refused_for_quota(key="tokens", blocked_until=MICRO)
    breaker.ended()
    assert not breaker.refused_for_quota(key="tokens", blocked_until=MICRO)


def test_the_delay_continues_from_that_of_a_bad_probe_elsewhere():
    class Longest:
        def uniform(self, _least, most):
            return most

    breaker = Breaker(RULES)
    breaker.told(State.OPEN, until=4 * MICRO, reason="the fleet", delay=4 * MICRO)
    ruling = breaker.ask(now=4 * MICRO)
    breaker.failed(now=4 * MICRO, rng=Longest(), reason="fault", probe=ruling.probe)
    assert (breaker.delay, breaker.until) == (12 * MICRO, 16 * MICRO)
    breaker.told(State.SHUT, until=FOREVER, reason="operator")
    assert breaker.delay == 12 * MICRO
    breaker.resumed(now=17 * MICRO)
    assert breaker.delay == 0
