"""Patterns: the two questions against brute force over small alphabets."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.globs import covers, overlap

NAMES = ["".join(word) for length in range(7) for word in product("ab", repeat=length)]
patterns = st.text("ab*?", max_size=4)
long_patterns = st.text("abc*?", max_size=40)


def accepted(pattern: str) -> set[str]:
    return {name for name in NAMES if fnmatchcase(name, pattern)}


@given(patterns, patterns)
def test_overlap_is_the_question_whether_some_name_fits_both(a, b):
    assert overlap(a, b) == bool(accepted(a) & accepted(b))


@given(patterns, patterns)
def test_what_covers_really_accepts_all(wide, narrow):
    if covers(wide, narrow):
        assert accepted(narrow) <= accepted(wide)


@given(long_patterns, long_patterns)
def test_overlap_does_not_ask_who_comes_first(a, b):
    assert overlap(a, b) == overlap(b, a)


@given(long_patterns)
def test_a_star_covers_and_meets_everything(a):
    assert covers("*", a) or a.count("*") > 5
    assert overlap("*", a)
    assert covers(a, a)


@given(long_patterns, st.text("abc", max_size=10))
def test_a_concrete_name_meets_exactly_the_patterns_that_match_it(pattern, name):
    assert overlap(pattern, name) == fnmatchcase(name, pattern) == covers(pattern, name)
