"""Short ways of the tool plane say what the long way says, for any history, text and numbers."""

from __future__ import annotations

import json
import re
from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.contracts import conditions
from gateway.contracts.conditions import Condition
from gateway.errors import MalformedCall
from gateway.resilience.loops import LoopRules, Rule, repeated
from gateway.resilience.repeats import RECENT, Exchanges
from gateway.tools.schemas import unique
from gateway.wire import turns

MICRO = 1_000_000


class Plain:
    """Alternation looked for as it is defined: back through everything, for each other agent."""

    def __init__(self):
        self.recent = deque(maxlen=RECENT)

    def judge(self, agent, exact, rules, now):
        own = next((call for who, call, _ in reversed(self.recent) if who == agent), None)
        if own != exact:
            return None
        since = now - rules.window
        others = {who for who, _, _ in self.recent if who != agent}
        longest = max([self.alternating(agent, exact, one, since) for one in others], default=0)
        return repeated(Rule.PING_PONG, longest // 2, rules.ping_pong, -1)

    def alternating(self, agent, exact, other, since):
        count, mine, theirs = 1, False, 0
        for who, call, at in reversed(self.recent):
            if who not in (agent, other):
                continue
            if at <= since or (who == agent) is not mine:
                break
            if mine and call != exact:
                break
            if not mine:
                if theirs not in (0, call):
                    break
                theirs = call
            count, mine = count + 1, not mine
        return count


CALLS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(0, 20)), min_size=1, max_size=90
)


@given(CALLS, st.integers(2, 5))
@example([(1, 1, 0), (2, 2, 0)] * 50, 4)
@settings(max_examples=60, deadline=None)
def test_alternation_is_found_as_by_looking_through_everything(calls, limit):
    rules = LoopRules(ping_pong=limit, window=60 * MICRO)
    ours, plain, now = Exchanges(), Plain(), 1_000 * MICRO
    for agent, call, pause in calls:
        now += pause * MICRO
        assert ours.judge(agent, call, rules, now) == plain.judge(agent, call, rules, now)
        ours.made(agent, call, now)
        plain.recent.append((agent, call, now))


NAMED = re.compile(r"#[ ,./-]*[A-Za-z]{2}|[A-Za-z]{2}[ ,./-]*#")


def masked(text):
    """As `turns.masked`, every expression over the whole text."""
    text = turns._sampled(text, turns.MAX_MASKED)
    if not any(mark in "0123456789" for mark in text):
        return text
    marked = turns._HEX.sub("#", text)
    text = re.sub("[0-9]", "#", marked)
    if NAMED.search(text) is None:
        return re.sub("#+", "#", text)
    pieces = text.split("#")
    if len(pieces) <= turns.MOST_PIECES:
        last = len(pieces) - 1
        pieces = [
            turns._undated(piece, after=at > 0, before=at < last)
            for at, piece in enumerate(pieces)
            if piece
        ]
    return "#".join([piece for piece in pieces if piece])


PIECES = st.sampled_from(
    ["1", "42", "2026", " may ", "May", "th", ", ", "-", ".", "deadbeefdeadbeef", "cafe", "é", "x",
     "123e4567-e89b-12d3-a456-426614174000", "DEADBEEF00000000ff", '"a":', "monday", " ", "#"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=14).map("".join))
@settings(max_examples=200, deadline=None)
def test_numbers_and_dates_are_masked_as_by_looking_at_every_letter(text):
    assert turns.masked(text) == masked(text)


NUMBER = st.one_of(
    st.integers(-3, 2_000), st.sampled_from([1 << 70, -(1 << 70)]),
    st.decimals(-1, 2000, places=3).map(float), st.sampled_from([0.0, -0.0, 1e-9, 1e300, 0.01]),
    st.floats(),
)  # fmt: skip
ODD = st.sampled_from([True, None, "5", "x", [1], {}])
BOUND = st.one_of(st.none(), st.integers(-1, 1_000))


@given(
    st.lists(NUMBER, min_size=conditions.MANY, max_size=12), st.lists(ODD, max_size=1),
    st.fixed_dictionaries({
        "min": BOUND, "max": BOUND, "above": BOUND, "below": BOUND, "money": st.booleans(),
        "kind": st.sampled_from(["", "number", "integer", "string"]),
    }),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_many_numbers_are_judged_as_each_of_them(numbers, odd, facts):
    asked = Condition(path="v[*]", at=("v", "*"), **facts)
    listed = [*numbers, *odd]
    one_by_one = next(
        (
            (f"v[{index}]", reason)
            for index, value in enumerate(listed)
            for check in asked.checks
            if (reason := check(asked, value, {}))
        ),
        None,
    )
    assert conditions.breach(asked, {"v": listed}) == one_by_one


@given(st.sampled_from([" ", "\n", "\t", "\r", "  \n", ""]), st.booleans(), st.booleans())
def test_a_doubled_key_is_found_whatever_stands_before_its_colon(space, doubled, decoy):
    more = ', "t": "a : b"' if decoy else ""
    second = f', "x"{space}: 2' if doubled else f', "y"{space}: 2'
    raw = f'{{"x": 1{second}{more}}}'.encode()
    if doubled:
        with pytest.raises(MalformedCall):
            unique(raw, json.loads(raw))
    else:
        unique(raw, json.loads(raw))
