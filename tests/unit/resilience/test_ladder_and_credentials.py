from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from gateway.resilience.credentials import CredentialHealth
from gateway.resilience.ladder import Rung, Wanted, unfit

RUNG = Rung(
    id="p/m",
    dialects=frozenset({"openai"}),
    context_window=1000,
    max_output=0,
    capabilities=frozenset({"tools", "streaming"}),
    provider="p",
)
WANTED = Wanted(dialect="openai", input=500, cap=500, needs=frozenset({"tools"}))


@dataclass(frozen=True)
class Key:
    id: str
    weight: int = 1


def change(value, **changes):
    fields = {name: getattr(value, name) for name in value.__slots__}
    return type(value)(**{**fields, **changes})


def test_a_rung_that_holds_everything_fits():
    assert unfit(RUNG, WANTED) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dialect": "anthropic"}, "dialect"),
        ({"input": 501}, "context"),
        ({"needs": frozenset({"vision"})}, "lacks vision"),
        ({"thinking_of": "other"}, "thinking"),
    ],
)
def test_a_rung_is_skipped_with_its_reason(changes, reason):
    assert reason in (unfit(RUNG, change(WANTED, **changes)) or "")


def test_unknown_context_and_capabilities_exclude_nothing():
    rung = change(RUNG, context_window=0, capabilities=frozenset())
    assert unfit(rung, change(WANTED, input=10**9, needs=frozenset({"audio"}))) is None


def test_a_refused_credential_is_passed_over_and_comes_back():
    health, keys = CredentialHealth(), (Key("a"), Key("b", 0))
    assert health.choose("p", keys, now=0, rng=Random(0)) == keys[0]
    health.cool("p/a", until=100)
    assert health.choose("p", keys, now=99, rng=Random(0)) == keys[1]
    assert health.choose("p", keys, now=100, rng=Random(0)) == keys[0]


def test_a_cool_down_only_ever_lengthens():
    health = CredentialHealth()
    health.cool("p/a", until=100)
    health.cool("p/a", until=50)
    assert health.out_until("p/a", now=60) == 100


def test_no_credential_is_chosen_when_all_are_out():
    health, keys = CredentialHealth(), (Key("a"), Key("b"))
    for key in keys:
        health.cool(f"p/{key.id}", until=100)
    assert health.choose("p", keys, now=0, rng=Random(0)) is None


def test_weights_share_the_calls():
    health, keys, rng = CredentialHealth(), (Key("a", 3), Key("b", 1)), Random(5)
    chosen = [health.choose("p", keys, now=0, rng=rng).id for _ in range(2000)]
    assert 0.70 < chosen.count("a") / len(chosen) < 0.80
