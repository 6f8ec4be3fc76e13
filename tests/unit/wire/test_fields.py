"""What policy reads of a request, in every dialect, and how wrong types are refused."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.call import Dialect
from gateway.errors import MalformedCall
from gateway.wire import asks
from gateway.wire.codec import CODECS

HI = [{"role": "user", "content": "hi"}]
BASE: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"model": "m", "messages": HI},
    Dialect.MESSAGES: {"model": "m", "messages": HI},
    Dialect.COUNT_TOKENS: {"model": "m", "messages": HI},
    Dialect.RESPONSES: {"model": "m", "input": "hi"},
    Dialect.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Dialect.EMBEDDINGS: {"model": "m", "input": "hi"},
}
CAPPED = [Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES, Dialect.COMPLETIONS]


def fields(dialect: Dialect, **more: Any) -> Any:
    return CODECS[dialect].fields({**BASE[dialect], **more})


@pytest.mark.parametrize("dialect", list(BASE))
def test_the_smallest_request_names_a_model_and_needs_nothing(dialect: Dialect) -> None:
    read = fields(dialect)
    assert (read.model, read.stream, read.cap, read.needs) == ("m", False, None, frozenset())


@pytest.mark.parametrize("dialect", CAPPED)
@pytest.mark.parametrize(
    ("caps", "effective"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 4000}, 4000),
        ({"max_tokens": 1, "max_output_tokens": 4000}, 4000),
        ({"max_tokens": 10, "thinking": {"type": "enabled", "budget_tokens": 4000}}, 4000),
        ({"max_tokens": 10, "reasoning": {"max_tokens": 4000}}, 4000),
        ({"max_tokens": 10, "reasoning": {"effort": "high"}}, 10),
        ({"max_tokens": 128_000}, 128_000),
        ({"max_tokens": 100.0}, 100),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -5}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 10**12}, None),
        ({"max_tokens": 1e300}, None),
        ({"max_tokens": float("inf")}, None),
        ({"max_tokens": float("nan")}, None),
        ({"max_tokens": 10**12, "max_completion_tokens": 50}, 50),
        ({"max_tokens": -1, "max_completion_tokens": 50}, 50),
    ],
)
def test_the_effective_cap_is_the_largest_sound_one(
    dialect: Dialect, caps: dict[str, Any], effective: int | None
) -> None:
    assert fields(dialect, **caps).cap == effective


def test_the_cap_counts_for_every_answer() -> None:
    assert fields(Dialect.CHAT, max_tokens=200, n=8).cap == 1600
    assert fields(Dialect.COMPLETIONS, max_tokens=10, n=2, best_of=5).cap == 50
    assert fields(Dialect.COMPLETIONS, max_tokens=10, n=2, prompt=["a", "b", "c"]).cap == 60
    assert fields(Dialect.COMPLETIONS, max_tokens=10, prompt=[1, 2, 3]).cap == 10
    assert fields(Dialect.CHAT, max_tokens=10, n=None).cap == 10
    assert fields(Dialect.CHAT, max_tokens=10, n=0).cap == 10


def test_so_many_answers_that_a_cap_would_turn_absurd_are_refused() -> None:
    with pytest.raises(MalformedCall) as refused:
        fields(Dialect.CHAT, max_tokens=4000, n=10**6)
    assert refused.value.param == "n"


@pytest.mark.parametrize("dialect", list(BASE))
@pytest.mark.parametrize("wrong", [None, 1, "", [], {}, True, "m" * 300])
def test_a_model_that_is_no_name_is_refused_by_param(dialect: Dialect, wrong: Any) -> None:
    with pytest.raises(MalformedCall) as refused:
        fields(dialect, model=wrong)
    assert refused.value.param == "model"


@pytest.mark.parametrize("dialect", CAPPED)
@pytest.mark.parametrize("wrong", ["true", 1, [], {}])
def test_a_stream_flag_that_is_no_boolean_is_refused(dialect: Dialect, wrong: Any) -> None:
    with pytest.raises(MalformedCall) as refused:
        fields(dialect, stream=wrong)
    assert refused.value.param == "stream"


@pytest.mark.parametrize("dialect", CAPPED)
@pytest.mark.parametrize("wrong", ["100", True, 1.5, [], {}])
@pytest.mark.parametrize("cap", asks.CAPS)
def test_a_cap_that_is_no_whole_number_is_refused(dialect: Dialect, wrong: Any, cap: str) -> None:
    with pytest.raises(MalformedCall) as refused:
        fields(dialect, **{cap: wrong})
    assert refused.value.param == cap


@pytest.mark.parametrize(
    ("dialect", "place", "wrong"),
    [
        (Dialect.CHAT, "messages", "hi"),
        (Dialect.CHAT, "messages", None),
        (Dialect.CHAT, "tools", {}),
        (Dialect.CHAT, "stream_options", []),
        (Dialect.CHAT, "n", "2"),
        (Dialect.MESSAGES, "messages", {}),
        (Dialect.MESSAGES, "system", 1),
        (Dialect.MESSAGES, "tools", "x"),
        (Dialect.RESPONSES, "input", {}),
        (Dialect.RESPONSES, "previous_response_id", 7),
        (Dialect.COMPLETIONS, "prompt", 7),
        (Dialect.EMBEDDINGS, "input", None),
        (Dialect.EMBEDDINGS, "input", 7),
    ],
)
def test_a_governed_place_of_the_wrong_type_is_named(
    dialect: Dialect, place: str, wrong: Any
) -> None:
    with pytest.raises(MalformedCall) as refused:
        fields(dialect, **{place: wrong})
    assert refused.value.param == place


def test_a_thinking_budget_of_the_wrong_type_is_named() -> None:
    with pytest.raises(MalformedCall) as refused:
        fields(Dialect.MESSAGES, thinking={"budget_tokens": "x"})
    assert refused.value.param == "thinking.budget_tokens"


@pytest.mark.parametrize(
    "odd",
    [["x"], [None], [[1, 2]], [{}], [{"role": "user", "content": None}], [{"content": 3}],
     [{"content": [{"type": "from_the_future", "x": 1}]}], [{"content": [[["deep"]]]}],
     [{"content": [1.5]}]],
)  # fmt: skip
@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.MESSAGES])
def test_odd_messages_pass_and_are_countable(dialect: Dialect, odd: list[Any]) -> None:
    fields(dialect, messages=odd)
    assert list(CODECS[dialect].parts({**BASE[dialect], "messages": odd}))


def test_what_the_client_said_of_usage_is_kept_and_silence_is_none() -> None:
    assert fields(Dialect.CHAT).wants_usage is None
    assert fields(Dialect.CHAT, stream_options={"x": 1}).wants_usage is None
    assert fields(Dialect.CHAT, stream_options={"include_usage": False}).wants_usage is False
    assert fields(Dialect.CHAT, stream_options={"include_usage": True}).wants_usage is True


IMAGE = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
URL = {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("dialect", "body", "need"),
    [
        (Dialect.CHAT, {"tools": [TOOL]}, "tools"),
        (Dialect.CHAT, {"functions": [{"name": "f"}]}, "tools"),
        (Dialect.CHAT, {"parallel_tool_calls": True}, "parallel_tools"),
        (Dialect.CHAT, {"messages": [{"role": "assistant", "tool_calls": [TOOL, TOOL]}]},
         "parallel_tools"),
        (Dialect.CHAT, {"messages": [{"role": "user", "content": [URL]}]}, "vision"),
        (Dialect.CHAT, {"messages": [{"content": [{"type": "input_audio"}]}]}, "audio"),
        (Dialect.CHAT, {"modalities": ["text", "audio"]}, "audio"),
        (Dialect.CHAT, {"messages": [{"content": [{"type": "file"}]}]}, "pdf"),
        (Dialect.CHAT, {"response_format": {"type": "json_schema"}}, "json_schema"),
        (Dialect.CHAT, {"stream": True}, "streaming"),
        (Dialect.CHAT, {"reasoning_effort": "high"}, "thinking"),
        (Dialect.MESSAGES, {"tools": [{"name": "f"}]}, "tools"),
        (Dialect.MESSAGES, {"messages": [{"content": [IMAGE]}]}, "vision"),
        (Dialect.MESSAGES, {"messages": [{"content": [
            {"type": "tool_result", "content": [IMAGE]}]}]}, "vision"),
        (Dialect.MESSAGES, {"messages": [{"content": [{"type": "document"}]}]}, "pdf"),
        (Dialect.MESSAGES, {"messages": [{"content": [
            {"type": "tool_use"}, {"type": "tool_use"}]}]}, "parallel_tools"),
        (Dialect.MESSAGES, {"thinking": {"type": "enabled"}}, "thinking"),
        (Dialect.MESSAGES, {"thinking": {"type": "adaptive"}}, "thinking"),
        (Dialect.MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "json_schema"),
        (Dialect.MESSAGES, {"output_format": {"type": "json_schema"}}, "json_schema"),
        (Dialect.RESPONSES, {"tools": [{"type": "function"}]}, "tools"),
        (Dialect.RESPONSES, {"parallel_tool_calls": True}, "parallel_tools"),
        (Dialect.RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "vision"),
        (Dialect.RESPONSES, {"input": [{"type": "function_call_output",
                                        "output": [{"type": "input_image"}]}]}, "vision"),
        (Dialect.RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "json_schema"),
        (Dialect.RESPONSES, {"reasoning": {"effort": "low"}}, "thinking"),
        (Dialect.MESSAGES, {"stream": True}, "streaming"),
        (Dialect.RESPONSES, {"stream": True}, "streaming"),
        (Dialect.COMPLETIONS, {"stream": True}, "streaming"),
        (Dialect.EMBEDDINGS, {"input": [{"content": [URL]}]}, "vision"),
    ],
)  # fmt: skip
def test_what_a_request_uses_is_what_it_needs(
    dialect: Dialect, body: dict[str, Any], need: str
) -> None:
    assert fields(dialect, **body).needs == {need}


@pytest.mark.parametrize(
    "body",
    [{"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}, {"reasoning": {}},
     {"parallel_tool_calls": False}, {"stream": None}, {"tools": []}, {"modalities": "audio"},
     {"response_format": {"type": "text"}}, {"response_format": "json_schema"}],
)  # fmt: skip
def test_what_is_switched_off_needs_nothing(body: dict[str, Any]) -> None:
    assert fields(Dialect.CHAT, **body).needs == frozenset()


def test_signed_thinking_tools_and_images_are_noted() -> None:
    blocks = [{"type": "redacted_thinking", "data": "x"}, IMAGE]
    read = fields(Dialect.MESSAGES, messages=[{"content": blocks}], tools=[{"name": "f"}])
    assert (read.has_thinking, read.has_tools, read.has_images) == (True, True, True)
    assert fields(Dialect.RESPONSES, input=[{"type": "reasoning"}]).has_thinking


def test_a_previous_response_pins_the_call() -> None:
    read = fields(Dialect.RESPONSES, previous_response_id="resp_1")
    assert read.previous_response_id == "resp_1"
    assert fields(Dialect.RESPONSES, previous_response_id="").previous_response_id is None


def test_a_session_hint_is_found_and_bounded() -> None:
    assert fields(Dialect.MESSAGES, metadata={"user_id": "u"}).session == "u"
    assert fields(Dialect.RESPONSES, prompt_cache_key="k", metadata={"user_id": "u"}).session == "k"
    assert fields(Dialect.CHAT, metadata={"user_id": 7}).session == ""
    assert len(fields(Dialect.CHAT, prompt_cache_key="k" * 9999).session) == asks.MAX_SESSION
