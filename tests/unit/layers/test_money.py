"""What a call costs: rounded up, caches at their own price, free where policy says so."""

from __future__ import annotations

import pytest

from gateway.call import Usage
from gateway.snapshot import Price
from tests.unit.policy.sample import SMALL, snapshot

MILLION = 1_000_000


def compiled(price: str) -> Price:
    """The price as the layers get it."""
    made = snapshot(SMALL + f"prices:\n  m-*: {price}\n").model("m-1")
    assert made is not None
    return made.deployments[0].price


@pytest.mark.parametrize(
    ("price", "dollars"),
    [
        ("{input: 2, output: 10}", 2 + 10 + 2 + 2),
        ("{input: 2, output: 10, cache_read: 0.5}", 2 + 10 + 0.5 + 2),
        ("{input: 2, output: 10, cache_read: 0, cache_write: 0}", 2 + 10),
        ("{input: 0, output: 10}", 10),
    ],
)
def test_each_kind_of_token_has_its_price_and_nothing_is_free_unless_policy_says_so(price, dollars):
    usage = Usage(input=MILLION, output=MILLION, cache_read=MILLION, cache_write=MILLION)
    assert compiled(price).of(usage) == dollars * MILLION


def test_a_cached_prompt_is_expected_to_cost_what_its_cache_costs():
    free, dear = compiled("{input: 2, output: 0, cache_read: 0}"), compiled("{input: 2, output: 0}")
    assert free.expected(MILLION, MILLION, 0) == 0
    assert dear.expected(MILLION, MILLION, 0) == 2 * MILLION


def test_a_fraction_of_a_micro_dollar_is_one():
    assert compiled("{input: 0.1, output: 0}").of(Usage(input=1, output=0)) == 1
