"""Editing raw JSON: the standard decoder sees the edit and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import MalformedCall
from gateway.wire import splice

NAMES = ["model", "stream", "n", "max_tokens", "a", 'q"uote', "é", "back\\slash", "stream_options"]
TEXT = st.one_of(st.text(max_size=12), st.sampled_from(['"', "\\", '{"model":1}', "[", "\u2028"]))
VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=7)
FORM = st.tuples(st.booleans(), st.sampled_from([None, 0, 1, "\t"]))


def written(value: object, form: tuple[bool, object]) -> bytes:
    text = json.dumps(value, ensure_ascii=form[0], indent=form[1])
    return text.encode("utf-8", "surrogatepass")


@given(OBJECT, FORM)
@settings(max_examples=60, deadline=None)
def test_members_are_those_of_the_decoder_in_order(body: dict, form: tuple) -> None:
    raw = written(body, form)
    members = list(splice.members(raw))
    assert [member.key for member in members] == list(body)
    for member in members:
        assert json.loads(raw[member.start : member.end]) == body[member.key]


@given(OBJECT, FORM, VALUE)
@settings(max_examples=60, deadline=None)
def test_a_spliced_value_changes_that_key_and_no_other_byte(
    body: dict, form: tuple, value: object
) -> None:
    body = {"x": 1, **body, "model": "old"}
    raw = written(body, form)
    new = written(value, (True, None))
    edited = splice.splice(raw, "model", new)
    assert json.loads(edited) == {**body, "model": value}
    member = splice.locate(raw, "model")
    assert member is not None
    assert edited[: member.start] == raw[: member.start]
    assert edited[member.start + len(new) :] == raw[member.end :]


@given(OBJECT, FORM)
@settings(max_examples=60, deadline=None)
def test_an_inserted_key_leaves_every_other_byte(body: dict, form: tuple) -> None:
    raw = written(body, form)
    edited = splice.insert(raw, "new_key", b"[1]")
    assert json.loads(edited) == {**body, "new_key": [1]}
    assert edited.replace(b'"new_key":[1],', b"").replace(b'"new_key":[1]', b"") == raw


@given(OBJECT, FORM)
@settings(max_examples=60, deadline=None)
def test_usage_can_be_asked_for_beside_any_other_option(body: dict, form: tuple) -> None:
    options = body.get("stream_options")
    raw = written(body, form)
    if options is not None and not isinstance(options, dict):
        with pytest.raises(MalformedCall):
            splice.splice_in(raw, "stream_options", "include_usage", b"true")
        return
    edited = json.loads(splice.splice_in(raw, "stream_options", "include_usage", b"true"))
    assert edited == {**body, "stream_options": {**(options or {}), "include_usage": True}}


@given(OBJECT, FORM, st.sampled_from(["model", "n", "max_tokens"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_doubled_governed_key_is_found_however_it_is_spelled(
    body: dict, form: tuple, name: str, escaped: bool
) -> None:
    body = {**body, "last": None}
    raw = written(body, form)
    assert splice.duplicate_keys(raw, splice.MODEL_KEYS) is None
    spelled = "".join(f"\\u{ord(mark):04x}" for mark in name) if escaped else name
    doubled = raw.rstrip()[:-1] + f',"{spelled}":0}}'.encode()
    expected = name if name in body else None
    assert splice.duplicate_keys(doubled, splice.MODEL_KEYS) == expected
    if expected:
        with pytest.raises(MalformedCall):
            splice.splice(doubled, name, b"1")


@given(OBJECT, FORM, st.integers(1, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_truncated_body_is_an_error_and_never_a_hang(body: dict, form: tuple, cut: int) -> None:
    raw = written(body, form)
    with pytest.raises(MalformedCall):
        list(splice.members(raw[: -(cut % len(raw)) or -1]))


@given(st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_members_or_an_error(raw: bytes) -> None:
    try:
        list(splice.members(b"{" + raw))
    except MalformedCall:
        return
