"""How fast a population calls, whatever its answers take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.simulate.workload import LEAST_CYCLE, NEVER, pauses

BUSY = st.lists(st.floats(0.05, 120), min_size=1, max_size=6)


def called(busy, found) -> float:
    """Calls per second of the mean agent."""
    return sum(1 / (took + pause) for took, pause in zip(busy, found, strict=True)) / len(busy)


@given(busy=BUSY, rate=st.floats(0.001, 0.2))
def test_the_mean_agent_calls_at_the_rate_wanted_or_as_fast_as_it_can(busy, rate):
    found = pauses(busy, rate=rate)
    assert min(found) >= LEAST_CYCLE
    fastest = called(busy, [LEAST_CYCLE] * len(busy))
    assert called(busy, found) == pytest.approx(min(rate, fastest), rel=1e-6)


def test_agents_with_short_answers_do_not_call_more_often_than_those_who_keep_up():
    short, middle, long = pauses([2.0, 6.0, 15.0], rate=0.12)
    assert short + 2 == pytest.approx(middle + 6)
    assert long == LEAST_CYCLE
    assert called([2.0, 6.0, 15.0], [short, middle, long]) == pytest.approx(0.12)


def test_nobody_calls_where_nothing_is_asked_for():
    assert pauses([1.0, 2.0], rate=0) == [NEVER, NEVER]
