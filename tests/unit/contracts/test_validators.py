"""Compiled schemas: what they find, and what a hostile one cannot do."""

from __future__ import annotations

import pytest

from gateway.contracts.bounds import MOST_LOOKS, MOST_NODES, Unusable, looks
from gateway.contracts.validators import MOST_BYTES, Pattern, Validator, Validators

ORDER = {
    "type": "object",
    "required": ["lines"],
    "additionalProperties": False,
    "properties": {
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"price": {"type": "number", "minimum": 0}},
            },
        }
    },
}


def breach(schema, value, size=100):
    return Validator(schema).breach(value, size=size)


def test_a_value_that_fits_passes():
    assert breach(ORDER, {"lines": [{"price": 1}]}) is None


@pytest.mark.parametrize(
    ("value", "path", "word"),
    [
        ({"lines": [{"price": 1}, {"price": -1}]}, "lines[1].price", "minimum"),
        ({}, "", "lines"),
        ({"lines": [], "x": 1}, "", "x"),
        ({"lines": {}}, "lines", "array"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(value, path, word):
    found = breach(ORDER, value)
    assert found is not None
    assert found.path == path
    assert word in found.reason


def test_a_reason_is_short_whatever_it_quotes():
    found = breach({"type": "integer"}, "x" * 100_000)
    assert found is not None
    assert len(found.reason) <= 200


def doubling(levels):
    """Each level looks twice at the next: 2**levels looks at one value."""
    defs = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(levels)}
    return {"$defs": {**defs, f"a{levels}": {}}, "$ref": "#/$defs/a0"}


TREE = {"anyOf": [{"properties": {"a": {"$ref": "#"}}}, {"properties": {"a": {"$ref": "#"}}}]}

HOSTILE = {
    "a reference bomb": (doubling(40), "looked at"),
    "recursion that doubles at each level": (TREE, "looked at"),
    "the same over items": (
        {"items": {"$ref": "#"}, "contains": {"$ref": "#"}}, "looked at",
    ),
    "a reference to itself": ({"$ref": "#"}, "itself"),
    "two that refer to each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"not": {"$ref": "#/$defs/a"}}},
         "$ref": "#/$defs/a"}, "itself",
    ),
    "a remote reference": ({"$ref": "http://127.0.0.1:9/schema"}, "another document"),
    "a file": ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "another document"),
    "a relative document": ({"$ref": "other.json#/a"}, "another document"),
    "a place that is not there": ({"$ref": "#/$defs/none"}, "not there"),
    "an anchor that is not there": ({"$ref": "#none"}, "not there"),
    "a schema with a name inside": ({"properties": {"a": {"$id": "http://x/y"}}}, "$id"),
    "a foreign dialect": ({"$schema": "http://evil.test/schema"}, "dialect"),
    "no schema": ({"type": 7}, "no JSON Schema"),
    "too many subschemas": (
        {"properties": {f"p{n}": {} for n in range(MOST_NODES + 1)}}, "subschemas",
    ),
    "too many patterns": (
        {"properties": {f"p{n}": {"pattern": "a"} for n in range(201)}}, "regular expressions",
    ),
    "a pattern without end": ({"pattern": "a" * 3_000}, "longer"),
    "a pattern that explodes": ({"pattern": "((a{1000}){1000}){1000}"}, "no JSON Schema"),
    "look-around": ({"pattern": "^(?=a)a"}, "no JSON Schema"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "word"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_schema_is_refused_before_it_costs(schema, word):
    with pytest.raises(Unusable, match=word.replace("$", r"\$")):
        Validator(schema)


def test_a_schema_deeper_than_its_compiler_goes_is_refused():
    schema = {}
    for _ in range(2_000):
        schema = {"not": schema}
    with pytest.raises(Unusable):
        Validator(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
         "$ref": "#/$defs/node"},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}},
                   {"type": "object", "additionalProperties": {"$ref": "#"}},
                   {"type": "string"}]},
        {"$id": "http://x/root", "$defs": {"a": {"$anchor": "here", "type": "integer"}},
         "properties": {"n": {"$ref": "#here"}, "m": {"$ref": "http://x/root#/$defs/a"}}},
    ],
)  # fmt: skip
def test_honest_recursion_and_local_names_are_obeyed(schema):
    assert looks(schema) < MOST_LOOKS
    assert breach(schema, {"next": {"next": {}}}) is None


def test_a_linked_list_is_looked_at_once_a_level():
    schema = {"properties": {"next": {"$ref": "#"}}}
    assert looks(schema) < 1_000


def test_a_regular_expression_that_backtracks_elsewhere_takes_linear_time_here():
    assert breach({"pattern": "^(a+)+$"}, "a" * 200_000 + "b") is not None


def test_a_value_too_large_for_its_schema_is_refused_and_not_checked():
    schema = doubling(12)
    found = breach(schema, {}, size=100_000_000)
    assert found is not None
    assert "too many" in found.reason


def test_equal_schemas_share_a_validator_and_the_memory_is_bounded():
    validators = Validators(limit=2)
    one = validators.of({"type": "object", "properties": {"a": {}}})
    assert validators.of({"properties": {"a": {}}, "type": "object"}) is one
    validators.of({"type": "string"})
    validators.of({"type": "number"})
    assert len(validators) == 2
    assert validators.of({"type": "object", "properties": {"a": {}}}) is not one


@pytest.mark.parametrize("schema", [None, [], "x", True, {"description": "x" * MOST_BYTES}])
def test_what_is_no_schema_or_too_large_is_unusable_and_remembered_as_such(schema):
    assert isinstance(Validators().of(schema), Unusable)


def test_a_pattern_finds_text_and_ignores_case_where_told():
    assert Pattern("(?i)ignore (all )?previous").found("please IGNORE previous orders")
    assert not Pattern("ignore").found("IGNORE")
    for text in ("(", "(?=a)", r"(a)\1"):
        with pytest.raises(ValueError, match="linear"):
            Pattern(text)
