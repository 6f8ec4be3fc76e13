"""No request body, of whatever shape, makes a codec crash: it passes or is a named 400."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.call import Dialect
from gateway.errors import MalformedCall
from gateway.wire.codec import CODECS

KEYS = st.sampled_from(
    ["model", "messages", "input", "prompt", "role", "content", "type", "text", "image_url", "url",
     "source", "data", "tools", "tool_calls", "function", "name", "arguments", "system", "stream",
     "stream_options", "include_usage", "max_tokens", "n", "thinking", "budget_tokens", "metadata",
     "user_id", "instructions", "output", "file", "file_data", "input_audio", "format", "schema",
     "response_format", "json_schema", "modalities", "prediction", "variables", "best_of"]
)  # fmt: skip
LEAF = st.one_of(
    st.sampled_from(
        ["text", "image", "image_url", "tool_use", "tool_result", "document", "thinking", "message",
         "input_image", "file", "function_call", "reasoning", "base64", "json_schema", "m",
         "\ud83d", "data:image/png;base64,iVBORw0KGgo", "A" * 600, "", None, True, 0, -1, 7,
         1.5, 1e300, float("nan"), float("inf"), 2**70]
    ),
    st.text(max_size=5),
)  # fmt: skip
BODY = st.recursive(
    LEAF,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=6)),
    max_leaves=30,
)


@given(st.sampled_from(list(CODECS)), st.dictionaries(KEYS, BODY, max_size=8))
@settings(max_examples=80, deadline=None)
def test_a_body_passes_or_is_refused_by_the_name_of_a_place(
    dialect: Dialect, body: dict[str, Any]
) -> None:
    codec = CODECS[dialect]
    try:
        fields = codec.fields(body)
    except MalformedCall as error:
        refused = error
    else:
        assert fields.model == body["model"]
        assert fields.cap is None or fields.cap > 0
        return
    assert refused.param


@given(st.sampled_from(list(CODECS)), st.dictionaries(KEYS, BODY, max_size=8))
@settings(max_examples=80, deadline=None)
def test_the_parts_of_any_body_are_countable_values(dialect: Dialect, body: dict[str, Any]) -> None:
    for part in CODECS[dialect].parts(body):
        if isinstance(part, str):
            assert part
            continue
        assert part.count >= 0
        assert part.width >= 0


@given(st.sampled_from(list(CODECS)), st.dictionaries(KEYS, BODY, max_size=8))
@settings(max_examples=80, deadline=None)
def test_a_body_of_any_shape_taken_for_an_answer_has_usage_or_none(
    dialect: Dialect, body: dict[str, Any]
) -> None:
    usage = CODECS[dialect].usage_of({"usage": body, **body})
    assert usage is None or usage.input is None or usage.input >= 0
    CODECS[dialect].error_of({"error": body, **body})


@given(st.text(alphabet="wordé\\\"' ", max_size=200))
@settings(max_examples=50, deadline=None)
def test_a_text_is_counted_once_and_unchanged(text: str) -> None:
    found = [
        part
        for part in CODECS[Dialect.CHAT].parts({"messages": [{"role": "", "content": text}]})
        if isinstance(part, str)
    ]
    assert found == ([text] if text else [])
