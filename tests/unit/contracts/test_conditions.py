"""What policy says of single values."""

from __future__ import annotations

from decimal import Decimal

import pytest

from gateway.contracts.conditions import Condition, breach, met, steps, values
from gateway.contracts.validators import Pattern


def condition(path: str = "amount", **facts) -> Condition:
    for name in ("currency", "at_least", "at_most", "equals", "differs"):
        if name in facts:
            facts[name] = steps(facts[name])
    for name in ("min", "max", "above", "below"):
        if name in facts:
            facts[name] = Decimal(str(facts[name]))
    if "form" in facts:
        facts["matches"] = Pattern(facts["form"]).found
    return Condition(path=path, at=steps(path), **facts)


GOOD = [
    ({"kind": "integer"}, 5), ({"kind": "integer"}, 5.0), ({"kind": "number"}, 0.1),
    ({"kind": "string"}, "x"), ({"kind": "boolean"}, True), ({"kind": "array"}, []),
    ({"min": 0}, 0), ({"max": 10}, "10"), ({"above": 0}, "0.01"), ({"below": 1}, 0.99),
    ({"form": "^[A-Z]+$"}, "ABC"), ({"one_of": ("a", 1)}, 1), ({"none_of": ("a",)}, "b"),
    ({"money": True}, "12.50"), ({"money": True}, 12), ({"money": True}, "12.500"),
    ({"shortest": 1, "longest": 2}, "ab"), ({"shortest": 1}, [1]),
]  # fmt: skip

BAD = [
    ({"kind": "integer"}, 5.5, "integer"), ({"kind": "integer"}, True, "integer"),
    ({"kind": "number"}, "5", "number"), ({"kind": "string"}, 5, "string"),
    ({"min": 0}, -1, "at least"), ({"max": 10}, "10.01", "at most"),
    ({"above": 0}, 0, "more than"),
    ({"below": 1}, 1, "less than"), ({"min": 0}, "1e9", "no number"),
    ({"min": 0}, None, "no number"),
    ({"min": 0}, True, "no number"), ({"max": 1}, float("inf"), "no number"),
    ({"max": 1}, float("nan"), "no number"), ({"max": 1}, "9" * 50, "no number"),
    ({"form": "^[A-Z]+$"}, "abc", "match"), ({"form": "x"}, 5, "text"),
    ({"one_of": ("a", 1)}, True, "none of"), ({"one_of": (True,)}, 1, "none of"),
    ({"none_of": ("a",)}, "a", "not allowed"),
    ({"money": True}, "-0.01", "negative"), ({"money": True}, -0.0, "negative"),
    ({"money": True}, "1.005", "decimal places"), ({"money": True}, "ten", "no number"),
    ({"shortest": 1}, "", "at least"), ({"longest": 2}, "abc", "at most"),
    ({"longest": 2}, 5, "text"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "value"), GOOD)
def test_a_good_value_passes(facts, value):
    assert breach(condition(**facts), {"amount": value}) is None


@pytest.mark.parametrize(("facts", "value", "word"), BAD)
def test_a_bad_value_is_refused_with_its_place_and_why(facts, value, word):
    found = breach(condition(**facts), {"amount": value})
    assert found is not None
    assert found[0] == "amount"
    assert word in found[1]


def test_a_missing_value_breaks_only_what_requires_it():
    assert breach(condition(min=0), {}) is None
    assert breach(condition(min=0, required=True), {}) == ("amount", "it is missing")


def test_money_wants_its_currency_where_policy_names_one():
    money = condition(money=True, currency="currency")
    assert breach(money, {"amount": "5", "currency": "USD"}) is None
    for code in ({}, {"currency": "usd"}, {"currency": "DOLLAR"}, {"currency": 5}):
        found = breach(money, {"amount": "5", **code})
        assert found is not None
        assert "currency" in found[1]


CROSS = [
    ({"at_least": "from"}, {"amount": 5, "from": 5}, True),
    ({"at_least": "from"}, {"amount": 4, "from": 5}, False),
    ({"at_most": "limit"}, {"amount": "10.00", "limit": 10}, True),
    ({"at_most": "limit"}, {"amount": "10.01", "limit": 10}, False),
    ({"at_least": "from"}, {"amount": "2026-12-01", "from": "2026-11-01"}, True),
    ({"at_least": "from"}, {"amount": "2026-10-01", "from": "2026-11-01"}, False),
    ({"at_least": "from"}, {"amount": 5, "from": []}, False),
    ({"equals": "other"}, {"amount": 1, "other": True}, False),
    ({"equals": "other"}, {"amount": "a", "other": "a"}, True),
    ({"differs": "other"}, {"amount": "a", "other": "a"}, False),
    ({"differs": "other"}, {"amount": "a", "other": "b"}, True),
    ({"at_most": "limit"}, {"amount": 5}, True),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "root", "good"), CROSS)
def test_one_value_is_compared_with_another(facts, root, good):
    assert (breach(condition(**facts), root) is None) is good


def test_every_value_at_a_path_is_looked_at():
    root = {"order": {"lines": [{"price": 1}, {"price": -1}]}}
    assert breach(condition("order.lines[*].price", min=0), root) == (
        "order.lines[1].price", "-1 is not at least 0",
    )  # fmt: skip
    assert list(values(root, steps("order.lines[0].price"))) == [("order.lines[0].price", 1)]
    assert list(values({"a": [[1], [2]]}, steps("a[*][0]"))) == [("a[0][0]", 1), ("a[1][0]", 2)]


@pytest.mark.parametrize(
    "path", ["", ".", "a.", ".a", "a..b", "a[", "a[x]", "a[-1]", "a b[*]c", "[*]c", "a[*].[0]"]
)
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(ValueError, match="path"):
        steps(path)


def test_a_case_holds_where_all_its_conditions_do():
    large = (condition(above=50_000), condition("kind", one_of=("wire",)))
    assert met(large, {"amount": 60_000, "kind": "wire"})
    assert not met(large, {"amount": 50_000, "kind": "wire"})
    assert not met(large, {"amount": 60_000, "kind": "cash"})


@pytest.mark.parametrize("amount", [None, "much", [], {}, True, "6e4", float("inf")])
def test_what_cannot_be_judged_counts_as_met_so_that_nothing_slips_by(amount):
    assert met((condition(above=50_000),), {"amount": amount})
    assert met((condition(above=50_000),), {})


def test_one_of_many_values_is_enough_for_a_case_and_too_many_are_met():
    case = (condition("lines[*].amount", above=100),)
    assert met(case, {"lines": [{"amount": 1}, {"amount": 101}]})
    assert not met(case, {"lines": [{"amount": 1}]})
    many = {"lines": [{"amount": 1}] * 10_001}
    assert met(case, many)
    found = breach(condition("lines[*].amount", max=100), many)
    assert found is not None
    assert "more than" in found[1]
