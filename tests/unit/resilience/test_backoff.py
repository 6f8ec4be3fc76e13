from __future__ import annotations

from random import Random

import pytest

from gateway.resilience.backoff import BackoffRules, next_delay, wait_for
from gateway.resilience.budget import RetryBudget
from gateway.units import MICRO


def test_decorrelated_delays_stay_between_base_and_cap():
    rules, rng = BackoffRules(base=500_000, cap=20 * MICRO), Random(7)
    previous = 0
    for attempt in range(1, 200):
        previous = next_delay(rules, previous=previous, attempt=attempt, rng=rng)
        assert 500_000 <= previous <= 20 * MICRO


def test_decorrelated_delays_grow_at_most_threefold():
    rules, rng = BackoffRules(), Random(1)
    previous = 600_000
    assert all(
        next_delay(rules, previous=previous, attempt=2, rng=rng) <= 3 * previous for _ in range(100)
    )


def test_full_jitter_doubles_its_ceiling_and_never_overflows():
    rules = BackoffRules(kind="full", base=500_000, cap=20 * MICRO)
    assert all(
        next_delay(rules, previous=0, attempt=1, rng=Random(seed)) <= MICRO for seed in range(50)
    )
    assert next_delay(rules, previous=0, attempt=10_000, rng=Random(2)) <= 20 * MICRO


@pytest.mark.parametrize("retry_after", [0, 20_000, MICRO, 37 * MICRO])
def test_nobody_comes_earlier_than_the_provider_said(retry_after):
    rules = BackoffRules()
    waits = [
        wait_for(rules, delay=100, retry_after=retry_after, rng=Random(seed)) for seed in range(50)
    ]
    assert min(waits) >= retry_after
    assert max(waits) <= max(100, retry_after + MICRO)


def test_without_the_providers_word_the_delay_stands():
    assert wait_for(BackoffRules(), delay=123_456, retry_after=None, rng=Random(0)) == 123_456


def test_successes_earn_retries_and_an_outage_spends_them():
    rules = BackoffRules(budget_ratio_ppm=100_000, budget_min_per_second=1, budget_max=100)
    budget = RetryBudget(rules, now=0)
    assert sum(budget.take(now=0) for _ in range(50)) == 10
    for _ in range(20):
        budget.succeeded()
    assert sum(budget.take(now=0) for _ in range(50)) == 2


def test_a_quiet_minute_earns_no_more_than_the_maximum():
    budget = RetryBudget(BackoffRules(budget_max=5), now=0)
    assert sum(budget.take(now=10**15) for _ in range(50)) == 5


def test_a_clock_that_steps_back_earns_nothing():
    budget = RetryBudget(BackoffRules(), now=100 * MICRO)
    taken = sum(budget.take(now=100 * MICRO) for _ in range(10))
    assert taken == 10
    assert not budget.take(now=0)


def test_a_new_policy_changes_what_a_budget_may_hold_and_earns_from_then_on():
    budget = RetryBudget(BackoffRules(budget_max=100, budget_ratio_ppm=0), now=0)
    budget.replace_rules(BackoffRules(budget_max=3, budget_ratio_ppm=1_000_000))
    assert sum(budget.take(now=0) for _ in range(50)) == 3
    budget.succeeded()
    assert budget.take(now=0)
