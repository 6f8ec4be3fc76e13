"""Repeated tool calls of one agent, as hashes."""

from __future__ import annotations

from gateway.resilience.loops import LoopRules, Rule
from gateway.resilience.repeats import Print, Tally

RULES = LoopRules()
READ = Print(exact=1, masked=1, changes=False)


def change(number: int) -> Print:
    return Print(exact=number, masked=number, changes=True)


def test_the_third_call_is_warned_of_and_the_fourth_refused():
    tally, said = Tally(), []
    for now in range(4):
        verdict = tally.judge(READ, RULES, now)
        said.append(None if verdict is None else (verdict.rule, verdict.refuse))
        tally.made(READ, RULES, now)
    assert said == [None, None, (Rule.SAME_CALL, False), (Rule.SAME_CALL, True)]


def test_a_change_forgets_what_was_read_before_it_and_results_that_came_late():
    tally = Tally()
    for now in range(3):
        tally.made(READ, RULES, now)
        tally.returned(READ, 9, now)
    tally.made(change(2), RULES, 3)
    assert tally.judge(READ, RULES, 4) is None
    for now in range(4, 7):
        tally.returned(READ, 9, now)  # of readings that were under way
    assert tally.judge(READ, RULES, 7) is not None
    tally.made(change(3), RULES, 7)
    assert tally.judge(READ, RULES, 8) is None


def test_a_reading_forgets_nothing():
    tally = Tally()
    for now in range(3):
        tally.made(change(2), RULES, now)
        tally.made(READ, RULES, now)
    assert tally.judge(change(2), RULES, 3) is not None
