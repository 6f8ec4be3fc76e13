"""One text for one value (RFC 8785)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.canonical import DEEPEST, NotCanonical, canonical, fingerprint, number

NUMBERS = [
    # RFC 8785, appendix B, and the borders of ECMAScript's three forms
    (0.0, "0"), (-0.0, "0"), (5e-324, "5e-324"), (-5e-324, "-5e-324"),
    (1.7976931348623157e308, "1.7976931348623157e+308"), (9007199254740992.0, "9007199254740992"),
    (295147905179352830000.0, "295147905179352830000"), (1e20, "100000000000000000000"),
    (9.999999999999997e22, "9.999999999999997e+22"), (1e23, "1e+23"), (1e21, "1e+21"),
    (9.999999999999997e-7, "9.999999999999997e-7"), (0.000001, "0.000001"), (1e-7, "1e-7"),
    (333333333.33333329, "333333333.3333333"),
    (-0.0000033333333333333333, "-0.0000033333333333333333"),
    (1424953923781206.2, "1424953923781206.2"), (1.0, "1"), (0.1, "0.1"), (-1.5e-9, "-1.5e-9"),
]  # fmt: skip

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(-(2.0**53), 2.0**53)  # beyond, ECMAScript's digits are a float's, not an integer's
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_a_number_is_written_as_ecmascript_writes_it(value, text):
    assert number(value) == text


def test_members_are_sorted_by_utf16_units_as_in_the_rfc():
    value = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\u00f6": 7}
    assert list(json.loads(canonical(value)).values()) == [2, 4, 6, 7, 1, 5, 3]


def test_text_is_escaped_as_in_the_rfc():
    assert canonical("\u20ac$\x0f\nA'B\"\\/\x7f") == '"\u20ac$\\u000f\\nA\'B\\"\\\\/\x7f"'.encode()


def test_white_space_order_and_the_form_of_numbers_do_not_matter():
    one = json.loads('{"b": [1.0, {"y": 1e2, "x": null}], "a": true}')
    other = json.loads('{"a":true,"b":[1,{"x":null,"y":100}]}')
    assert canonical(one) == canonical(other) == b'{"a":true,"b":[1,{"x":null,"y":100}]}'


def test_amounts_that_differ_never_share_a_hash():
    assert fingerprint({"amount": 9007199254740993}) != fingerprint({"amount": 9007199254740992})
    assert fingerprint({"n": 1}) != fingerprint({"n": True}) != fingerprint({"n": "1"})


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "\ud83d", {"\udc00": 1}, {"a": b"x"}, [{1}]]
)
def test_what_is_no_json_has_no_text(value):
    with pytest.raises(NotCanonical):
        canonical(value)


def test_nesting_is_bounded():
    def nested(levels):
        value = 1
        for _ in range(levels):
            value = [value]
        return value

    canonical(nested(DEEPEST))
    with pytest.raises(NotCanonical):
        canonical(nested(DEEPEST + 1))


@given(values)
def test_the_text_says_the_same_value_and_is_its_own_text(value):
    text = canonical(value)
    again = json.loads(text)
    assert again == value
    assert canonical(again) == text
