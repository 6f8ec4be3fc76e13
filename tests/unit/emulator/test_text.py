"""What the emulator says: deterministic, believable, and JSON that fits its schema."""

from __future__ import annotations

import statistics

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.emulator.text import Draw, Instance, Reel, approximate, as_json, in_pieces


def test_draws_depend_on_every_part_of_the_seed():
    assert Draw(1, "a").bits() == Draw(1, "a").bits()
    assert len({Draw(1, "ab").bits(), Draw(1, "a", "b").bits(), Draw(2, "ab").bits()}) == 3


def test_draws_are_spread_evenly():
    draw = Draw(5)
    units = [draw.unit() for _ in range(2_000)]
    assert all(0 <= unit < 1 for unit in units)
    assert abs(statistics.mean(units) - 0.5) < 0.03
    lengths = sorted(draw.lognormal(200, 0.8) for _ in range(2_001))
    assert 180 < lengths[1_000] < 220
    assert all(0.5 <= draw.spread(0.5) < 1.5 for _ in range(100))


@pytest.mark.parametrize("length", [0, 1, 7, 200, 9_000, 20_000])
def test_a_stretch_is_whole_sentences_of_at_least_that_length(length):
    pieces = Reel(1).stretch(Draw(2), length)
    text = "".join(pieces)
    assert length <= len(pieces) <= length + 120
    assert text[0].isupper()
    assert text.endswith(".")
    assert "  " not in text


def test_streamed_text_does_not_repeat_itself():
    pieces = Reel(1).stretch(Draw(2), 500)
    assert all(len(set(pieces[i : i + 100])) > 20 for i in range(400))


def test_mixed_script_has_characters_of_several_bytes():
    text = "".join(Reel(1, "mixed").stretch(Draw(2), 200))
    assert {len(character.encode()) for character in text} == {1, 2, 3, 4}


@given(st.text(max_size=200))
def test_counting_is_about_a_quarter_of_the_characters_and_zero_only_for_nothing(text):
    count = approximate(text)
    assert (count == 0) == (text == "")
    assert len(text) / 4 <= count <= len(text) * 5 / 8 + 1


def test_counting_takes_a_lone_surrogate():
    assert approximate("\ud83d") == 1
    assert as_json("\ud83d") == b'"\\ud83d"'
    assert as_json(2**70) == str(2**70).encode()


def test_pieces_join_to_the_text():
    assert "".join(in_pieces("abcdefghij")) == "abcdefghij"
    assert in_pieces("") == ()


LEAF = st.one_of(
    st.just({"type": "string"}),
    st.just({"type": "string", "minLength": 40}),
    st.just({"type": "string", "maxLength": 3}),
    st.just({"type": "string", "format": "date-time"}),
    st.just({"type": "integer", "minimum": 3, "maximum": 9}),
    st.just({"type": "number", "exclusiveMinimum": 1}),
    st.just({"type": "integer", "multipleOf": 5}),
    st.just({"type": ["string", "null"]}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"enum": ["a", 3, None]}),
    st.just({"const": {"x": 1}}),
    st.just({"type": "integer", "default": 4}),
    st.just({"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    st.just({"$ref": "#/$defs/inner"}),
)
SCHEMA = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.builds(lambda s: {"type": "array", "items": s, "minItems": 2}, inner),
        st.builds(
            lambda a, b: {
                "type": "object", "properties": {"a": a, "b": b}, "required": ["a", "b"],
                "additionalProperties": False,
            },
            inner, inner,
        ),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=40)
@given(SCHEMA, st.integers(0, 1_000))
def test_made_values_fit_their_schema(schema, seed):
    schema = {**schema, "$defs": {"inner": {"type": "object", "properties": {}}}}
    jsonschema.validate(Instance(Draw(seed), schema).make(), schema)


def test_a_schema_that_refers_to_itself_ends():
    schema = {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "name": {"type": "string"}},
        "required": ["name", "child"],
    }
    assert as_json(Instance(Draw(1), schema).make())


@pytest.mark.parametrize(
    "schema",
    [None, [], "x", {"$ref": "#/nowhere"}, {"$ref": 5}, {"properties": 7}, {"type": "object"},
     {"type": "array", "minItems": "x"}, {"anyOf": [5]}, {"type": "integer", "minimum": "low"},
     {"type": "string", "minLength": 10**9}, {"type": "array", "minItems": 10**9}],
)  # fmt: skip
def test_an_odd_schema_gets_some_small_value(schema):
    assert len(as_json(Instance(Draw(1), schema).make())) < 100_000
