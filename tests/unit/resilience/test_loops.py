"""Each rule of the loop breaker, turn by turn, and what its memory forgets."""

from __future__ import annotations

import sys

import pytest

from gateway.chains import MOST_STRETCH
from gateway.resilience import loops
from gateway.resilience.books import Spending
from gateway.resilience.loops import (
    KEPT_CALLS,
    SKETCH,
    Counts,
    Half,
    LoopRules,
    Pending,
    Rule,
    Stretch,
    Turn,
    Verdict,
    packed,
    sketch_of,
)
from gateway.resilience.memory import IDLE, Memory
from gateway.units import MICRO, MINUTE

RULES = LoopRules()


def never(_half):
    raise AssertionError("a sketch was made although sizes forbid it")


def turn(*calls, kind=1, size=None, sketch=never, exempt=False):
    """A turn of (exact, masked) calls; without a size each turn has one of its own."""
    turn.number += 1
    return Turn(
        calls=calls,
        kind=kind,
        size=4 ** (turn.number % 20) if size is None else size,
        sketch=sketch,
        exempt=exempt,
    )


turn.number = 0


def verdicts(*history, rules=RULES):
    """(rule, refuse, count) after each turn; None where nothing is said."""
    stretch = Stretch()
    found = []
    for one in history:
        stretch.fold(one, rules=rules)
        verdict = stretch.judge(one, rules)
        found.append(verdict and (verdict.rule, verdict.refuse, verdict.count))
    return found


def test_the_third_same_call_is_warned_of_and_the_fourth_refused():
    same = [turn((7, number)) for number in (1, 2, 3, 4)]
    assert verdicts(*same) == [
        None,
        None,
        (Rule.SAME_CALL, False, 3),
        (Rule.SAME_CALL, True, 4),
    ]


def test_other_calls_between_do_not_hide_a_repeated_one():
    history = [turn((call, call)) for call in (7, 1, 7, 2, 7, 3, 7)]
    assert verdicts(*history)[-1] == (Rule.SAME_CALL, True, 4)


def test_another_call_passes_after_the_trip():
    history = [turn((7, n)) for n in range(1, 6)] + [turn((8, 9))]
    assert verdicts(*history)[-2:] == [(Rule.SAME_CALL, True, 5), None]


def test_a_repeated_call_beside_a_new_one_is_named():
    stretch = Stretch()
    for number in range(1, 4):
        stretch.fold(turn((7, number)), rules=RULES)
    newest = turn((8, 20), (7, 21))
    stretch.fold(newest, rules=RULES)
    assert stretch.judge(newest, RULES) == Verdict(Rule.SAME_CALL, True, 4, 4, 1)


def test_masked_calls_with_the_same_result_are_refused_too():
    history = [turn((exact, 50)) for exact in (1, 2, 3, 4)]
    assert verdicts(*history)[2:] == [(Rule.SAME_MASKED, False, 3), (Rule.SAME_MASKED, True, 4)]


def test_calls_without_a_result_are_not_the_same_masked_call():
    assert verdicts(*[turn((exact, 0)) for exact in range(1, 9)]) == [None] * 8


def test_the_same_two_calls_alternating_are_refused_in_the_fourth_round():
    rules = LoopRules(same_call=100, same_masked=100, ping_pong=4)
    history = [turn((1 + n % 2, 10 + n)) for n in range(8)]
    found = verdicts(*history, rules=rules)
    assert found[:5] == [None] * 5
    assert found[5:] == [
        (Rule.PING_PONG, False, 3),
        (Rule.PING_PONG, False, 3),
        (Rule.PING_PONG, True, 4),
    ]


def test_a_third_call_or_mere_words_end_an_alternation():
    rules = LoopRules(same_call=100, same_masked=100)
    for breaker in (turn((3, 99)), turn(), turn((2, 98))):
        history = [turn((1 + n % 2, 10 + n)) for n in range(6)]
        history += [breaker] + [turn((1 + n % 2, 30 + n)) for n in range(4)]
        assert not [one for one in verdicts(*history, rules=rules) if one and one[1]]


def test_alternating_pairs_of_parallel_calls_do_not_depend_on_their_order():
    rules = LoopRules(same_call=100, same_masked=100)
    pair, other = ((1, 11), (2, 12)), ((3, 13), (4, 14))
    history = []
    for _ in range(2):
        history += [turn(*pair), turn(*other), turn(*pair[::-1]), turn(*other[::-1])]
    assert verdicts(*history, rules=rules)[-1] == (Rule.PING_PONG, True, 4)


def shingles(*words):
    return lambda half: sketch_of(list(words) if half is Half.SAID else [1])


def test_turns_that_are_nearly_alike_are_refused():
    common = range(100, 160)
    history = [turn((n, n), size=1000, sketch=shingles(*common, n)) for n in range(4)]
    stretch = Stretch()
    found = []
    before = None
    for one in history:
        stretch.fold(one, previous=before, rules=RULES)
        found.append(stretch.judge(one, RULES))
        before = one.sketch
    assert [one and one.refuse for one in found] == [None, None, False, True]
    assert found[-1] == Verdict(Rule.ALIKE_TURNS, True, 4, 4, 0)


def test_a_turn_that_differs_ends_the_row():
    alike = [turn((n, n), size=1000, sketch=shingles(*range(60))) for n in range(3)]
    other = [turn((n, n), size=1000, sketch=shingles(*range(90, 150))) for n in (8, 9)]
    assert not [one for one in verdicts(*alike, *other, *alike) if one and one[1]]


def test_paging_says_the_same_and_gets_something_else():
    pages = [
        turn(
            (n, n),
            size=1000,
            sketch=lambda half, n=n: sketch_of([1, 2] if half is Half.SAID else [n]),
        )
        for n in range(9)
    ]
    assert verdicts(*pages) == [None] * 9


def test_sketches_are_made_only_where_tools_and_sizes_are_alike():
    history = [
        turn((1, 1), size=1000), turn((2, 2), size=1400), turn((3, 3), size=1400, kind=2),
        turn(size=0, kind=0), turn(size=0, kind=0),
    ]  # fmt: skip
    assert verdicts(*history) == [None] * 5


def test_the_very_same_turns_are_alike_without_a_sketch():
    rules = LoopRules(same_call=100, same_masked=100)
    history = [turn((7, 8)) for _ in range(4)]
    assert verdicts(*history, rules=rules)[-1] == (Rule.ALIKE_TURNS, True, 4)


def test_the_same_calls_without_results_are_compared_by_their_text():
    rules = LoopRules(same_call=100, same_masked=100)
    history = [
        turn((7, 0), size=900, sketch=shingles(*range(n * 50, n * 50 + 50))) for n in range(6)
    ]
    assert verdicts(*history, rules=rules) == [None] * 6


def test_words_alone_that_repeat_are_a_loop_of_no_call():
    stretch = Stretch()
    for _ in range(5):
        newest = turn(kind=0, size=300, sketch=shingles(1, 2, 3))
        stretch.fold(newest, rules=RULES)
    assert stretch.judge(newest, RULES) == Verdict(Rule.ALIKE_TURNS, True, 4, 4, -1)


def test_polling_repeats_freely_and_hides_nothing():
    poll = [turn(exempt=True, size=100) for _ in range(20)]
    assert verdicts(*poll) == [None] * 20
    mixed = []
    for number in range(1, 5):
        mixed += [turn((7, number)), turn(exempt=True)]
    assert verdicts(*mixed)[-2:] == [(Rule.SAME_CALL, True, 4), None]


def test_a_polling_turn_is_not_blamed_for_what_was_before():
    rules = LoopRules(same_call=100, same_masked=100)
    history = [turn((1 + n % 2, 10 + n)) for n in range(8)] + [turn(exempt=True)]
    assert verdicts(*history, rules=rules)[-2:] == [(Rule.PING_PONG, True, 4), None]
    history = [turn((7, 8)) for _ in range(4)] + [turn(exempt=True)]
    assert verdicts(*history, rules=rules)[-2:] == [(Rule.ALIKE_TURNS, True, 4), None]


def test_iterations_are_warned_of_at_four_fifths_and_refused_beyond_the_limit():
    rules = LoopRules(max_iterations=10)
    found = verdicts(*[turn((n, n)) for n in range(1, 12)], rules=rules)
    assert found[6] == (Rule.MAX_ITERATIONS, False, 8)
    assert found[8] == (Rule.MAX_ITERATIONS, False, 10)
    assert found[9] == (Rule.MAX_ITERATIONS, True, 11)
    assert found[5] is None


def test_polling_counts_as_iterations():
    rules = LoopRules(max_iterations=5)
    assert verdicts(*[turn(exempt=True) for _ in range(5)], rules=rules)[-1] == (
        Rule.MAX_ITERATIONS, True, 6,
    )  # fmt: skip


def test_a_refusal_outweighs_a_warning_of_an_earlier_rule():
    rules = LoopRules(same_call=5, max_iterations=4)
    assert verdicts(*[turn((7, n)) for n in range(1, 5)], rules=rules)[-1] == (
        Rule.MAX_ITERATIONS, True, 5,
    )  # fmt: skip


def test_a_limit_of_two_never_warns_of_a_first_call():
    rules = LoopRules(same_call=2)
    assert verdicts(turn((7, 1)), turn((7, 2)), rules=rules) == [None, (Rule.SAME_CALL, True, 2)]


def test_clearing_begins_anew():
    stretch = Stretch()
    same = turn((7, 8), size=10)
    for _ in range(9):
        stretch.fold(same, rules=RULES)
    stretch.clear()
    assert stretch.judge(same, RULES) is None
    stretch.fold(same, rules=RULES)
    assert stretch.judge(same, RULES) is None


def test_counts_keep_what_was_seen_last_and_forget_the_oldest():
    counts = Counts()
    counts.add(1)
    for one in range(2, KEPT_CALLS + 1):
        counts.add(one)
    counts.add(1)
    counts.add(KEPT_CALLS + 1)
    assert (counts[1], counts[2], counts[3], counts[KEPT_CALLS + 1]) == (2, 0, 1, 1)


def test_counts_are_not_confused_by_bytes_across_two_keys():
    counts = Counts()
    counts.add(0x0100_0000_0000_0000)
    counts.add(0)
    # The bytes of 1 stand across the two keys above.
    assert counts[1] == 0
    counts.add(1)
    assert (counts[1], counts[0], counts[0x0100_0000_0000_0000]) == (1, 1, 1)


def test_counts_end_at_what_two_bytes_hold(monkeypatch):
    monkeypatch.setattr(loops, "MOST_COUNTED", 3)
    counts = Counts()
    for _ in range(9):
        counts.add(5)
    assert counts[5] == 3


def test_a_sketch_keeps_the_smallest_hashes():
    assert sketch_of(list(range(500, 0, -1))) == sketch_of(list(range(1, SKETCH + 1)))
    assert sketch_of([]) == b""


def test_equal_sketches_are_alike_and_disjoint_or_empty_ones_are_not():
    some = sketch_of([1, 2, 3, 4])
    assert loops.are_near(some, some, MICRO)
    assert loops.are_near(b"", b"", MICRO)
    assert not loops.are_near(b"", some, 1)
    assert not loops.are_near(some, sketch_of([7, 8]), 1)
    assert loops.are_near(some, sketch_of([3, 4, 5, 6]), MICRO // 3)
    assert not loops.are_near(some, sketch_of([3, 4, 5, 6]), MICRO // 3 + 1)


def test_a_sample_of_large_sets_is_compared_over_their_union():
    one = sketch_of(list(range(0, 1000, 2)))
    assert not loops.are_near(one, sketch_of(list(range(1, 1000, 2))), 1)
    near = sketch_of([*range(0, 1000, 2), 5])
    assert loops.are_near(one, near, MICRO * (SKETCH - 1) // SKETCH)
    assert not loops.are_near(one, near, MICRO * (SKETCH - 1) // SKETCH + 1)


# --- amounts --------------------------------------------------------------------------------------


def test_tokens_per_minute_drain_by_themselves():
    rules = LoopRules(tokens_per_minute=6000)
    spending = Spending()
    spending.drain(100 * MINUTE, rules)
    spending.pour(4_800, 0)
    assert spending.judge(rules) == Verdict(Rule.TOKENS_PER_MINUTE, False, 4_800, 6_000)
    spending.pour(1_200, 0)
    assert spending.judge(rules) == Verdict(Rule.TOKENS_PER_MINUTE, True, 6_000, 6_000)
    spending.drain(100 * MINUTE + 30 * MICRO, rules)
    assert spending.judge(rules) is None
    assert spending.tokens == 6_000


def test_a_clock_that_steps_back_drains_nothing_twice():
    rules = LoopRules(tokens_per_minute=6000)
    spending = Spending()
    spending.drain(10 * MINUTE, rules)
    spending.pour(6_000, 0)
    spending.drain(9 * MINUTE, rules)
    spending.drain(10 * MINUTE, rules)
    assert spending.judge(rules) == Verdict(Rule.TOKENS_PER_MINUTE, True, 6_000, 6_000)


def test_tokens_and_money_of_a_task_end_at_their_limits():
    rules = LoopRules(max_tokens=1000, max_money=500)
    spending = Spending()
    spending.pour(800, 400)
    assert spending.judge(rules) == Verdict(Rule.MAX_TOKENS, False, 800, 1000)
    spending.pour(0, 100)
    assert spending.judge(rules) == Verdict(Rule.MAX_MONEY, True, 500, 500)
    spending.pour(200, 0)
    assert spending.judge(rules) == Verdict(Rule.MAX_TOKENS, True, 1000, 1000)
    spending.clear()
    assert spending.judge(rules) is None


def test_a_correction_never_makes_an_amount_negative():
    spending = Spending()
    spending.pour(10, 10)
    spending.clear()
    spending.pour(-10, -10)
    assert (spending.tokens, spending.money) == (0, 0)


def test_rules_without_amounts_need_no_meter():
    assert not LoopRules().meters
    assert all(
        rules.meters
        for rules in (
            LoopRules(tokens_per_minute=1),
            LoopRules(max_tokens=1),
            LoopRules(max_money=1),
        )
    )


# --- the memory -----------------------------------------------------------------------------------


def test_the_memory_is_bounded_and_forgets_the_least_used():
    memory = Memory(limit=3)
    for key in (1, 2, 3):
        memory.put(key, Stretch(), 0)
    memory.put(1, memory.get(1, 0), 1)
    memory.put(4, Stretch(), 2)
    assert len(memory) == 3
    assert memory.get(2, 2) is None
    assert memory.get(1, 2) is not None


def test_what_is_idle_for_too_long_is_forgotten_and_soon_dropped():
    memory = Memory()
    for key in range(10):
        memory.put(key, Stretch(), 0)
    assert memory.get(0, IDLE) is not None
    assert memory.get(0, IDLE + 1) is None
    for key in range(10, 20):
        memory.put(key, Stretch(), IDLE + 1)
    assert len(memory) == 10


def test_a_conversation_that_moved_on_is_found_under_its_new_key_only():
    memory = Memory()
    memory.put(1, Stretch(), 0)
    memory.pop(1)
    memory.pop(1)
    assert memory.get(1, 0) is None


def test_the_operator_resets_one_session_or_all():
    memory = Memory()
    kept = [Spending(session=5), Spending(session=5), Spending(session=6)]
    for key, spending in enumerate(kept):
        spending.pour(100, 0)
        memory.put(key, spending, 0)
    assert memory.reset(5) == 2
    assert [one.tokens for one in kept] == [0, 0, 100]
    assert memory.reset() == 3
    assert kept[2].tokens == 0


def size_of(value):
    size = sys.getsizeof(value)
    if isinstance(value, tuple | list):
        return size + sum(map(size_of, value))
    slots = getattr(type(value), "__slots__", ())
    return size + sum(size_of(getattr(value, slot)) for slot in slots if hasattr(value, slot))


def test_a_conversation_takes_at_most_two_kibibytes():
    stretch = Stretch(session=1 << 60)
    big = 1 << 63
    for number in range(200):
        calls = tuple((big + number * 100 + at, big + number * 90 + at) for at in range(50))
        # The size of no turn may matter, nor may its parallel calls.
        newest = turn(
            *calls, size=10**6, kind=1 << 60,
            sketch=lambda half: sketch_of(
                [(1 << 31) + at * (9 if half is Half.SAID else 8) for at in range(300)]
            ),
        )  # fmt: skip
        stretch.fold(newest, rules=RULES)
        stretch.touched = 1 << 55
    stretch.name = big
    stretch.pending = packed(
        [Pending(id=big, exact=big, masked=big, exempt=False, name="n" * 99) for _ in range(99)]
    )
    assert stretch._said
    assert stretch._returned
    assert size_of(stretch) <= 2048
    assert len(stretch.packed()) <= MOST_STRETCH // 2 + 128


def test_a_stretch_goes_on_in_another_process_as_in_this_one():
    here = Stretch(session=5)
    history = [
        turn((n % 2 + 1, n % 3 + 1), kind=9, size=50, sketch=shingles(1, n)) for n in range(7)
    ]
    for one in history:
        here.fold(one, rules=RULES)
        there = Stretch.unpacked(here.packed(), session=5)
        assert there is not None
        assert there.judge(one, RULES) == here.judge(one, RULES)
        for following in (history[0], turn((1, 1), kind=9, size=50, sketch=shingles(1, 2))):
            ours, theirs = here.copy(), there.copy()
            ours.fold(following, rules=RULES)
            theirs.fold(following, rules=RULES)
            assert theirs.packed() == ours.packed()
            assert theirs.judge(following, RULES) == ours.judge(following, RULES)


@pytest.mark.parametrize("raw", [b"", b"\x02" * 60, Stretch().packed() + b"x"])
def test_a_stretch_of_another_release_is_not_read(raw):
    assert Stretch.unpacked(raw, session=0) is None
