"""Reading a configuration: defaults, every key once, every mistake named with its path."""

from __future__ import annotations

import pytest

from gateway.admission.profiles import Profile
from gateway.emulator.config import ConfigError, EmulatorConfig, from_mapping, rules_from
from gateway.simulate.meters import Dip, Shape
from gateway.units import MICRO


def test_an_empty_mapping_is_the_default_which_has_real_limits():
    assert from_mapping({}) == EmulatorConfig()
    [limit] = EmulatorConfig().limits
    assert (limit.quota.shape, limit.quota.tokens) == (Shape.SLIDING, 2_000_000)


def test_every_key_arrives_where_it_belongs():
    config = from_mapping(
        {
            "seed": 7, "require_key": True, "keys": {"sk-a": "alice"},
            "models": [{"name": "m", "context": 1000, "max_output": 10, "owner": "me"}],
            "strict_version": False, "max_body": 1000, "events_per_write": 3,
            "answers": {"median": 50, "sigma": 0, "longest": 99, "tool_probability": 1,
                        "reasoning": 0.5, "script": "mixed", "prompt_cache": False},
            "pacing": {"first_byte": 1, "tokens_per_second": 2.5, "jitter": 0.5},
            "limits": [{
                "name": "l", "models": "m*", "keys": ["alice"], "per": "key", "headers": "azure",
                "announce": False, "phase": 2, "shape": "bucket", "rpm": 1, "tpm": 2, "itpm": 3,
                "otpm": 4, "rpd": 5, "tpd": 6, "concurrency": 7, "depth": 8,
                "day_offset_hours": -8, "accounting": "reserve_settle", "output_weight": 5,
                "cached_input_counts": False, "refused_counts": False, "missing_cap": 9,
                "capacity": {"in_flight": 3, "dips": [{"start": 1, "seconds": 2, "in_flight": 0}]},
                "ramp": {"floor": 10, "growth_percent": 200},
            }],
            "faults": [{"action": "cut", "after_bytes": 0, "nth": [1, 3], "probability": 0.5}],
        }
    )  # fmt: skip
    assert not config.any_model
    assert config.keys == {"sk-a": "alice"}
    assert "sk-a" not in repr(config)
    assert config.answers.script == "mixed"
    assert config.pacing.tokens_per_second == 2.5
    [limit] = config.limits
    assert (limit.models, limit.keys, limit.per, limit.phase) == (
        ("m*",),
        ("alice",),
        "key",
        2_000_000,
    )
    quota = limit.quota
    assert (quota.requests, quota.tokens, quota.input, quota.output) == (1, 2, 3, 4)
    assert (quota.requests_per_day, quota.tokens_per_day, quota.concurrency) == (5, 6, 7)
    assert quota.day_offset == -8 * 3600 * MICRO
    assert quota.accounting.profile is Profile.RESERVE_SETTLE
    assert quota.accounting.output_weight == 5
    assert quota.capacity is not None
    assert quota.capacity.dips == (Dip(start=MICRO, end=3 * MICRO, limit=0),)
    assert quota.ramp == (10, 200)
    [fault] = config.faults
    assert (fault.nth, fault.after_bytes, fault.after_events) == ((1, 3), 0, None)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"sed": 1}, "sed: unknown key (did you mean seed?)"),
        ({"seed": "x"}, "seed: a whole number from 0 is allowed, got 'x'"),
        ({"seed": True}, "seed: a whole number"),
        ({"require_key": "no"}, "require_key: true or false"),
        ({"models": {"name": "m"}}, "models: a list"),
        ({"models": [{}]}, "models[0].name: a model needs a name"),
        ({"models": ["m"]}, "models[0]: a mapping"),
        ({"answers": {"reasoning": 1}}, "answers.reasoning: a number from 0 to 0.95"),
        ({"pacing": {"first_byte": -1}}, "pacing.first_byte: a number from 0"),
        ({"limits": [{"rpm": 0}]}, "limits[0].rpm: a whole number from 1"),
        ({"limits": [{"shape": "slidding"}]}, "did you mean sliding?"),
        ({"limits": [{"per": 3}]}, "limits[0].per: one of all, model"),
        ({"limits": [{"ramp": {"floor": 0}}]}, "limits[0].ramp.floor"),
        ({"limits": [{"day_offset_hours": "west"}]}, "hours from -24 to 24"),
        ({"limits": [{"models": []}]}, "limits[0].models: a text or a list"),
        ({"keys": {"sk-very-secret": 5}}, "keys: a mapping of secret to label"),
        ({"faults": [{}]}, "faults[0].action: missing"),
        ({"faults": [{"action": "cut", "status": 700}]}, "200 to 599"),
        ({"faults": [{"action": "flood"}]}, "flood needs a size"),
        ({"faults": [{"action": "cut", "nth": [0]}]}, "whole numbers from 1"),
        ({"faults": [{"action": "cut", "headers": [1]}]}, "a mapping of name to text"),
        ({"faults": [{"action": "cut", "name": 5}]}, "faults[0].name: a text"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_path_and_what_is_allowed(raw, words):
    with pytest.raises(ConfigError) as wrong:
        from_mapping(raw)
    assert words in str(wrong.value)
    assert "sk-very-secret" not in str(wrong.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as wrong:
        from_mapping({"seed": -1, "pacing": 5, "limts": []})
    assert len(wrong.value.problems) == 3


def test_fault_rules_come_as_a_list_or_under_rules():
    assert rules_from([{"action": "reset"}]) == rules_from({"rules": [{"action": "reset"}]})
    assert rules_from({"rules": []}) == ()
    for raw in ({}, 5, "x", {"rule": []}):
        with pytest.raises(ConfigError):
            rules_from(raw)
