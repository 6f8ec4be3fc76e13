from __future__ import annotations

from random import Random

import pytest

from gateway.call import Kind
from gateway.layers.retry import Again, Attempts, decide
from gateway.resilience.backoff import BackoffRules
from gateway.units import MICRO, Mode

RULES = BackoffRules(attempts=3, requeues=2, max_retry_after=5 * MICRO)


def ruling(
    kind, *, retry_after=None, tried=None, remaining=60 * MICRO, other_key=False, rules=RULES
):
    return decide(
        kind=kind,
        retry_after=retry_after,
        rules=rules,
        tried=tried or Attempts(),
        remaining=remaining,
        other_key=other_key,
        rng=Random(1),
    )


@pytest.mark.parametrize("kind", [Kind.MONEY, Kind.PERIOD, Kind.AUTH, Kind.CALLER])
def test_what_cannot_help_is_never_retried(kind):
    assert isinstance(ruling(kind), str)


@pytest.mark.parametrize("kind", [Kind.MONEY, Kind.PERIOD, Kind.AUTH, Kind.QUOTA])
def test_another_credential_is_tried_at_once(kind):
    assert ruling(kind, other_key=True) == Again(0, "other credential")


def test_a_quota_refusal_requeues_and_does_not_sleep_here():
    assert ruling(Kind.QUOTA, retry_after=MICRO) == Again(0, "requeue")


def test_a_stated_wait_beyond_the_bound_is_not_waited_for():
    assert isinstance(ruling(Kind.QUOTA, retry_after=6 * MICRO), str)
    assert isinstance(ruling(Kind.FAULT, retry_after=86_400 * MICRO), str)


def test_requeues_are_bounded():
    assert isinstance(ruling(Kind.QUOTA, tried=Attempts(requeues=2)), str)


def test_a_fault_backs_off_at_least_as_long_as_told():
    again = ruling(Kind.FAULT, retry_after=2 * MICRO)
    assert isinstance(again, Again)
    assert again.wait >= 2 * MICRO


def test_attempts_by_backoff_are_bounded():
    assert isinstance(ruling(Kind.FAULT, tried=Attempts(backoffs=2)), str)


def test_a_wait_that_outlives_the_deadline_is_given_up():
    assert isinstance(ruling(Kind.CAPACITY, remaining=1), str)


def test_shadow_retries_nothing():
    rules = BackoffRules(mode=Mode.SHADOW)
    assert isinstance(ruling(Kind.FAULT, rules=rules), str)
