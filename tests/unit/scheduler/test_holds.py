"""The state table of held calls, and the pace at which they go on."""

from __future__ import annotations

import pytest

from scheduler.errors import IllegalTransition
from scheduler.holds import (
    FINAL,
    LIVE,
    TRANSITIONS,
    Event,
    Ramp,
    State,
    move,
    pause,
    sources,
)
from scheduler.units import MICRO

ALL = [(state, event) for state in State for event in Event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair not in TRANSITIONS])
def test_what_the_table_does_not_name_cannot_happen(state, event):
    with pytest.raises(IllegalTransition, match=state.value):
        move(state, event)


@pytest.mark.parametrize("state", sorted(FINAL))
def test_nothing_leaves_a_final_state(state):
    assert not [event for before, event in TRANSITIONS if before is state]


def test_a_call_that_may_have_been_sent_is_opened_again_only_by_one_who_knows_it_was_not_served():
    ways = {event for (before, event), after in TRANSITIONS.items()
            if before is State.SENDING and after in (State.OPEN, State.CLAIMED)}  # fmt: skip
    assert ways == {Event.GIVE_BACK}
    assert move(State.SENDING, Event.RECOVER) is State.IN_DOUBT
    assert move(State.CLAIMED, Event.RECOVER) is State.OPEN


def test_every_live_state_can_be_cancelled_and_every_state_is_live_or_final():
    assert set(sources(Event.CANCEL)) == LIVE
    assert set(State) == LIVE | FINAL
    assert sources(Event.RECOVER, State.IN_DOUBT) == (State.SENDING,)


def test_a_refused_call_stays_back_longer_each_time_up_to_a_minute():
    waits = [pause(tries) for tries in range(1, 9)]
    assert waits == [second * MICRO for second in (1, 2, 4, 8, 16, 32, 60, 60)]
    assert pause(10**9) == 60 * MICRO
    assert pause(0) == MICRO


def ramp(now: int = 0) -> Ramp:
    return Ramp(now)


def room(one: Ramp, now: int, *, rate: int = 1_000, widest: int = 64) -> int:
    return one.room(now=now, rate=rate, widest=widest)


def test_one_goes_first_and_then_twice_as_many_each_round():
    one, widths = ramp(), []
    for second in range(1, 9):
        count = room(one, second * MICRO)
        widths.append(count)
        one.started(count)
        assert room(one, second * MICRO) == 0
        for _ in range(count):
            one.served(widest=64)
    assert widths == [1, 2, 4, 8, 16, 32, 64, 64]


def test_a_call_that_comes_back_begins_the_round_anew():
    one = ramp()
    one.width = 16
    one.started(3)
    one.refused()
    assert (one.width, one.running) == (1, 2)
    assert room(one, MICRO) == 0  # two are still under way
    one.ended()
    one.ended()
    assert room(one, MICRO) == 1


def test_an_end_that_says_nothing_of_the_provider_changes_no_width():
    one = ramp()
    one.started()
    one.ended()
    assert (one.width, one.running) == (1, 0)


def test_no_more_than_the_rate_start_in_a_second_and_an_idle_hour_is_no_burst():
    one = ramp()
    one.width = 64
    assert room(one, 3_600 * MICRO, rate=10) == 10
    one.started(10)
    assert room(one, 3_600 * MICRO, rate=10) == 0
    assert room(one, 3_600 * MICRO + MICRO // 2, rate=10) == 5


def test_a_clock_that_steps_back_gives_nothing_away():
    one = ramp(10 * MICRO)
    one.started()
    assert room(one, 5 * MICRO) == 0
    one.ended()
    assert room(one, 9 * MICRO) == 0
    assert room(one, 11 * MICRO) == 1


def test_a_narrower_policy_takes_effect_at_once():
    one = ramp()
    one.width = 64
    assert room(one, MICRO, widest=3) == 3
    assert repr(one) == "<Ramp 0/3 good 0>"
