"""Raw JSON edits on the bodies that clients really send, and on hostile ones."""

from __future__ import annotations

import pytest

from gateway.errors import MalformedCall
from gateway.wire import splice


def test_only_the_models_name_changes() -> None:
    raw = b'{ "model" : "m-1", "x_new":{"a":1.0},"messages":[{"role":"user","content":"\\u00e9"}] }'
    assert splice.splice(raw, "model", b'"spare-1"') == raw.replace(b'"m-1"', b'"spare-1"')


def test_signed_thinking_with_odd_escapes_keeps_its_bytes() -> None:
    raw = (
        b'{"messages":[{"role":"assistant","content":[ {"type":"thinking",'
        b'"thinking":"Let me\\u2026  see \\/ ","signature":"AAA=\\u002b"} ]}],"model":"m"}'
    )
    assert splice.splice(raw, "model", b'"n"') == raw[:-4] + b'"n"}'


def test_a_nested_key_of_the_same_name_is_not_touched() -> None:
    raw = b'{"metadata":{"model":"x"},"model":"y","tools":[{"model":"z"}]}'
    assert splice.splice(raw, "model", b"1") == raw.replace(b'"y"', b"1")
    assert splice.duplicate_keys(raw, splice.MODEL_KEYS) is None


def test_a_key_spelled_with_escapes_is_the_key() -> None:
    assert splice.splice(b'{"mod\\u0065l":"a"}', "model", b'"b"') == b'{"mod\\u0065l":"b"}'


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","mod\\u0065l":"b"}',
        b'{"\\u006Dodel":"a","\\u006dodel":"b"}',
        b'{"model":"a","x":"\\"","model":"b"}',
    ],
)
def test_two_keys_of_one_name_are_named(raw: bytes) -> None:
    assert splice.duplicate_keys(raw, splice.MODEL_KEYS) == "model"


@pytest.mark.parametrize("name", ["method", "params", "id", "jsonrpc"])
def test_doubled_keys_of_a_json_rpc_message_are_named(name: str) -> None:
    raw = b'{"%b":1,"x":{"id":2},"%b":3}' % (name.encode(), name.encode())
    assert splice.duplicate_keys(raw, splice.MCP_KEYS) == name


def test_a_governed_name_inside_a_text_is_no_key() -> None:
    raw = b'{"model":"m","messages":[{"content":"say \\"model\\": twice, \\"model\\":"}]}'
    assert splice.duplicate_keys(raw, splice.MODEL_KEYS) is None


def test_a_text_of_many_escaped_quotes_is_stepped_over() -> None:
    text = b'\\"\\\\' * 500
    raw = b'{"a":"' + text + b'","deep":[{"b":"' + text + b'"}],"model":"m"}'
    assert splice.splice(raw, "model", b"1").endswith(b'"model":1}')


def test_a_text_of_backslashes_ends_where_it_ends() -> None:
    raw = b'{"a":"' + b"\\" * 200 + b'","model":"m"}'
    assert splice.splice(raw, "model", b"1").endswith(b'"model":1}')


def test_a_byte_order_mark_stays_in_front() -> None:
    assert splice.splice(b'\xef\xbb\xbf {"a":1}', "a", b"2") == b'\xef\xbb\xbf {"a":2}'


def test_inserting_into_an_empty_object_needs_no_comma() -> None:
    assert splice.insert(b"{ }", "a", b"1") == b'{"a":1 }'
    assert splice.insert(b'{"b":2}', "a", b"1") == b'{"a":1,"b":2}'


@pytest.mark.parametrize(
    ("raw", "edited"),
    [
        (b'{"model":"m"}', b'{"stream_options":{"include_usage":true},"model":"m"}'),
        (b'{"stream_options":null}', b'{"stream_options":{"include_usage":true}}'),
        (b'{"stream_options":{}}', b'{"stream_options":{"include_usage":true}}'),
        (
            b'{"stream_options":{ "x_vendor":1 }}',
            b'{"stream_options":{"include_usage":true, "x_vendor":1 }}',
        ),
        (
            b'{"stream_options":{"include_usage":false,"x":1}}',
            b'{"stream_options":{"include_usage":true,"x":1}}',
        ),
    ],
)
def test_usage_is_asked_for_and_other_options_survive(raw: bytes, edited: bytes) -> None:
    assert splice.splice_in(raw, "stream_options", "include_usage", b"true") == edited


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b'{"a"', b'{"a":}', b'{"a":1', b'{"a":"x'])
def test_what_is_no_object_is_an_error(raw: bytes) -> None:
    with pytest.raises(MalformedCall):
        list(splice.members(raw))


@pytest.mark.parametrize("raw", [b'{"a":[1,{"b":[]}', b'{"a":1 2}', b'{"a":{"b":"x}'])
def test_an_unclosed_value_is_an_error(raw: bytes) -> None:
    with pytest.raises(MalformedCall):
        list(splice.members(raw))


def test_a_missing_key_cannot_be_replaced() -> None:
    with pytest.raises(MalformedCall) as refused:
        splice.splice(b'{"a":1}', "model", b"1")
    assert refused.value.param == "model"


def test_stream_options_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(MalformedCall) as refused:
        splice.splice_in(b'{"stream_options":[]}', "stream_options", "include_usage", b"true")
    assert refused.value.param == "stream_options"


def test_depth_costs_nothing() -> None:
    raw = b'{"a":' + b"[" * 3000 + b"]" * 3000 + b',"model":"m"}'
    assert splice.splice(raw, "model", b"1").endswith(b'"model":1}')


@pytest.mark.parametrize(
    "raw", [b'{"a":' + b'"' + b'\\"' * 100, b'{"a":"' + b"\\" * 99, b'{"a":[["x']
)
def test_a_text_without_end_is_an_error_however_it_is_scanned(raw: bytes) -> None:
    with pytest.raises(MalformedCall):
        list(splice.members(raw))


@pytest.mark.slow
def test_members_without_end_are_bounded() -> None:
    raw = b"{" + b'"a":1,' * splice.MAX_MEMBERS + b'"a":1}'
    assert splice.duplicate_keys(raw, splice.key_set("a")) == "a"
    with pytest.raises(MalformedCall, match="too many"):
        list(splice.members(raw))


@pytest.mark.slow
def test_brackets_without_end_are_bounded() -> None:
    raw = b'{"a":[' + b"[]," * (splice.MAX_STRUCTURE // 2) + b"0]}"
    with pytest.raises(MalformedCall, match="too many"):
        splice.splice(raw, "a", b"1")
