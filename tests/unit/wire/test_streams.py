"""Folds of streams: usage, ends, failures, and the estimate where usage never comes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.call import Dialect, Usage
from gateway.wire import anthropic, openai_chat, openai_responses, sse, stream
from gateway.wire.codec import CODECS
from gateway.wire.stream import Failure, Reader, Tap


def compact(body: Any) -> bytes:
    """JSON as providers write it."""
    return json.dumps(body, separators=(",", ":")).encode()


def fold(reader: Reader, *events: Any) -> Reader:
    """Feed events: a value is a data line, a pair has a name, bytes are raw."""
    tap = Tap(sse.Events(), reader, json.loads)
    for event in events:
        name, body = event if isinstance(event, tuple) else ("", event)
        tap(body if isinstance(body, bytes) else sse.frame(compact(body), name))
    return tap.reader


def chat(*events: Any) -> Reader:
    return fold(openai_chat.ChatReader(), *events)


def messages(*bodies: dict[str, Any], named: bool = True) -> Reader:
    reader = anthropic.MessagesReader()
    return fold(reader, *((str(body.get("type", "")) if named else "", body) for body in bodies))


def responses(*bodies: dict[str, Any], named: bool = True) -> Reader:
    reader = openai_responses.ResponsesReader()
    return fold(reader, *((str(body["type"]) if named else "", body) for body in bodies))


DONE = b"data: [DONE]\n\n"
STOP = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"prompt_tokens": 9, "completion_tokens": 4}


def delta(text: str, key: str = "content") -> dict[str, Any]:
    return {"id": "c1", "model": "m-1", "choices": [{"delta": {key: text}, "finish_reason": None}]}


# --- Chat -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "carrier", [{"choices": []}, {}, {"choices": None}, {"choices": [{"index": 0, "delta": {}}]},
                {"choices": [{"delta": {}, "finish_reason": "stop"}]}],
)  # fmt: skip
def test_usage_counts_whatever_the_choices_of_its_chunk(carrier: dict[str, Any]) -> None:
    reader = chat(delta("a"), STOP, {**carrier, "usage": USAGE}, DONE)
    assert reader.usage == Usage(input=9, output=4)
    assert reader.ok


@pytest.mark.parametrize(
    "last",
    [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": USAGE}]},
     {**STOP, "x_groq": {"id": "r", "usage": {"queue_time": 0.1, **USAGE}}}],
)  # fmt: skip
def test_usage_counts_where_moonshot_and_groq_put_it(last: dict[str, Any]) -> None:
    assert chat(delta("a"), last, DONE).usage == Usage(input=9, output=4)


def test_a_total_that_the_last_usage_lacks_is_the_one_before() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 3}}
    assert chat({"usage": {**USAGE, **details}}, {"usage": {"completion_tokens": 6}}).usage == (
        Usage(input=6, output=6, cache_read=3)
    )
    assert chat({"usage": USAGE}, {"usage": {"prompt_tokens": 7}}).usage == Usage(input=7, output=4)
    # a whole report replaces a whole one: no part of the earlier stays beside it
    assert chat({"usage": {**USAGE, **details}}, {"usage": USAGE}).usage == Usage(input=9, output=4)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r", b"\r\n"])
def test_a_last_event_without_its_blank_line_counts_once_the_stream_is_over(end: bytes) -> None:
    tap = Tap(sse.Events(), openai_chat.ChatReader(), json.loads)
    tap(sse.frame(compact(STOP)) + b"data: " + compact({"choices": [], "usage": USAGE}) + end)
    assert tap.reader.usage is None
    tap.finish()
    assert tap.reader.usage == Usage(input=9, output=4)
    seen = tap.reader.events
    tap.finish()
    assert tap.reader.events == seen


def test_an_event_called_message_is_one_without_a_name() -> None:
    end = {"type": "response.completed", "response": {"usage": {"input_tokens": 5}}}
    reader = fold(openai_responses.ResponsesReader(), ("message", OUT), ("message", end))
    assert reader.ok
    assert reader.text_bytes == 15
    assert reader.usage == Usage(input=5)


def test_cached_tokens_are_kept_apart_in_every_provider_s_spelling() -> None:
    for spelling in (
        {"prompt_tokens_details": {"cached_tokens": 6}},
        {"prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 3},
        {"cached_tokens": 6},
    ):
        assert chat({"usage": {**USAGE, **spelling}}).usage == (
            Usage(input=3, output=4, cache_read=6)
        )
    lifetimes = {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 30}
    for spelling, written in (
        ({"cache_creation": lifetimes}, 50),
        ({"cache_creation": lifetimes, "cache_creation_input_tokens": 49}, 49),
        ({"cache_creation": None}, None),
        ({"cache_creation": {}}, None),
    ):
        usage = anthropic.usage_of({"usage": {"input_tokens": 1, "output_tokens": 2, **spelling}})
        assert usage == Usage(input=1, output=2, cache_write=written)


def test_usage_beside_the_response_counts_too() -> None:
    end = {"type": "response.completed", "response": {}, "usage": {"input_tokens": 5}}
    assert responses(end).usage == Usage(input=5)


def test_the_last_usage_that_says_anything_wins() -> None:
    reader = chat(
        {"usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"usage": USAGE},
        {"usage": None},
        {"usage": {}},
        {"usage": {"prompt_tokens": "9", "completion_tokens": -4}},
    )
    assert reader.usage == Usage(input=9, output=4)


def test_a_reported_zero_is_zero_and_is_final() -> None:
    reader = chat(delta("some text"), {"usage": {"prompt_tokens": 0, "completion_tokens": 0}})
    assert reader.settled(99) == Usage(input=0, output=0)


def test_cached_and_reasoning_tokens_are_kept_apart() -> None:
    usage = {
        "prompt_tokens": 100_050,
        "completion_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 100_000},
        "completion_tokens_details": {"reasoning_tokens": 30},
    }
    assert openai_chat.usage_of({"usage": usage}) == Usage(
        input=50, output=50, cache_read=100_000, reasoning=30
    )
    deepseek = {"prompt_tokens": 10, "prompt_cache_hit_tokens": 8, "completion_tokens": 1}
    assert openai_chat.usage_of({"usage": deepseek}) == Usage(input=2, output=1, cache_read=8)
    odd = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 5}}
    assert openai_chat.usage_of({"usage": odd}) == Usage(input=0, cache_read=5)


@pytest.mark.parametrize("end", [STOP, DONE])
def test_either_end_mark_ends_a_chat(end: Any) -> None:
    assert chat(delta("a"), end).ok


def test_without_an_end_mark_a_stream_is_not_ok() -> None:
    reader = chat(delta("a"), {"usage": USAGE})
    assert not reader.terminal
    assert not reader.ok


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        ({"message": "Overloaded", "type": "server_error", "code": 503},
         Failure(code="server_error", type="server_error", message="Overloaded", status=503)),
        ("plain", Failure(message="plain")),
        ({"code": "429"}, Failure(status=429)),
        (["odd"], Failure()),
    ],
)  # fmt: skip
def test_an_error_object_midway_fails_the_chat(error: Any, failure: Failure) -> None:
    reader = chat(delta("a"), {"error": error}) if error != ["odd"] else chat({"error": error})
    assert reader.failure == failure
    assert not reader.ok


def test_an_error_as_the_first_event_has_not_started_the_answer() -> None:
    assert not chat({"error": {"message": "x"}}).started
    assert chat(delta("a")).started
    assert chat(delta("a"), {"error": {"message": "x"}}).started


def test_an_error_event_by_name_fails_the_chat() -> None:
    reader = chat(("error", {"message": "no", "type": "server_error"}))
    assert reader.failure == Failure(code="server_error", type="server_error", message="no")


def test_a_finish_reason_of_error_is_a_failure() -> None:
    reader = chat({"choices": [{"finish_reason": "error", "error": {"message": "x"}}]})
    assert reader.failure == Failure(message="x")
    assert reader.finish_reasons == ["error"]


def test_most_chunks_are_never_decoded() -> None:
    decoded: list[bytes] = []

    def decode(data: bytes) -> object:
        decoded.append(data)
        return json.loads(data)

    tap = Tap(sse.Events(), openai_chat.ChatReader(), decode)
    for event in [*[delta("word")] * 50, STOP, {"choices": [], "usage": USAGE}]:
        tap(sse.frame(compact(event)))
    tap(DONE)
    assert len(decoded) == 3
    assert tap.reader.events == 53
    assert (tap.reader.response_id, tap.reader.model) == ("c1", "m-1")


def test_words_about_usage_in_a_text_are_not_decoded() -> None:
    reader = openai_chat.ChatReader()
    fold(reader, delta("first"))
    sly = delta('"usage":{"prompt_tokens":1},"finish_reason":"stop","error":{')
    [event] = sse.Events().feed(sse.frame(compact(sly)))
    assert not reader.skim(event)
    assert not reader.terminal


@pytest.mark.parametrize("key", ["content", "reasoning_content", "refusal"])
def test_streamed_text_is_estimated_where_usage_never_comes(key: str) -> None:
    reader = chat(*[delta(f"word{n} ", key) for n in range(40)])
    usage = reader.settled(7)
    assert usage.estimated
    assert usage.input == 7
    assert usage.output is not None
    assert 40 <= usage.output <= 80
    assert reader.deltas == 40


def test_streamed_tool_arguments_are_estimated_too() -> None:
    call = {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "a" * 40}}]}}]}
    assert chat(call, call).streamed == 20


def test_quotes_and_blanks_in_texts_are_measured_whole() -> None:
    assert chat(delta('say "hi" now')).text_bytes == len(r"say \"hi\" now")
    spaced = b'data: {"choices": [{"delta": {"content": "abcdefgh"}}]}\n\n'
    assert chat(spaced).text_bytes == 8
    assert chat(delta("")).deltas == 0


def test_an_unreadable_event_is_skipped_and_counted() -> None:
    reader = chat(
        b"data: {broken\n\n", b"data: [1]\n\n", delta("a"), b'data: {"usage":{]\n\n', STOP
    )
    assert reader.malformed == 2
    assert reader.ok
    assert chat(b"data: [1]\n\n").malformed == 1


def test_an_oversized_event_leaves_the_estimate() -> None:
    tap = Tap(sse.Events(64), openai_chat.ChatReader(), json.loads)
    tap(sse.frame(json.dumps(delta("x" * 200)).encode()))
    tap(DONE)
    assert tap.reader.malformed == 1
    assert tap.reader.settled(5) == Usage(input=5, output=0, estimated=True)


def test_a_delta_that_comes_first_is_counted_once() -> None:
    assert messages(words("12345678")).text_bytes == 8
    assert responses(OUT).text_bytes == 15


def test_a_decoder_out_of_depth_is_no_crash() -> None:
    def decode(data: bytes) -> object:
        raise RecursionError

    tap = Tap(sse.Events(), openai_chat.ChatReader(), decode)
    tap(sse.frame(b"{}"))
    assert tap.reader.malformed == 1


def test_finish_reasons_are_bounded() -> None:
    many = {"choices": [{"finish_reason": "r" * 500}] * 500}
    reader = chat(many)
    assert len(reader.finish_reasons) == stream.MAX_REASONS
    assert len(reader.finish_reasons[0]) == 64


def test_completions_streams_keep_their_text_elsewhere() -> None:
    make = CODECS[Dialect.COMPLETIONS].reader
    assert make is not None
    reader = fold(make(), {"choices": [{"text": "abcdefgh", "finish_reason": None}]}, DONE)
    assert (reader.text_bytes, reader.ok) == (8, True)


def test_our_usage_chunk_is_dropped_and_an_empty_one_of_another_kind_is_kept() -> None:
    azure = b'data: {"choices":[],"prompt_filter_results":[{}]}\n\n'
    ours = b'data: {"choices": [], "usage": {"prompt_tokens":9}}\n\n'
    with_choice = b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":9}}\n\n'
    cut = openai_chat.WithoutUsage()
    out = cut.feed(azure + with_choice + ours + DONE + b"data: tail") + cut.rest()
    assert out == azure + with_choice + DONE + b"data: tail"
    assert cut.dropped == 1


def test_usage_is_asked_for_in_the_raw_body() -> None:
    assert openai_chat.with_usage(b'{"stream":true}') == (
        b'{"stream_options":{"include_usage":true},"stream":true}'
    )


# --- Messages -------------------------------------------------------------------------------------


def start(**usage: Any) -> dict[str, Any]:
    return {"type": "message_start", "message": {"id": "msg_1", "model": "m", "usage": usage}}


def told(reason: str | None = None, **usage: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}


def words(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}


END = {"type": "message_stop"}


@pytest.mark.parametrize("named", [True, False])
def test_cumulative_usage_is_replaced_and_never_added(named: bool) -> None:
    reader = messages(
        start(input_tokens=100, output_tokens=1),
        words("ok"),
        told(output_tokens=10),
        told("end_turn", output_tokens=50, input_tokens=140),
        END,
        named=named,
    )
    assert reader.settled(7) == Usage(input=140, output=50)
    assert reader.ok
    assert reader.finish_reasons == ["end_turn"]
    assert (reader.response_id, reader.model) == ("msg_1", "m")
    assert reader.text_bytes == 2


def test_input_stays_that_of_the_start_unless_a_delta_carries_it() -> None:
    reader = messages(
        start(input_tokens=3, cache_read_input_tokens=0, cache_creation_input_tokens=2000),
        told(output_tokens=10),
        END,
    )
    assert reader.settled(7) == Usage(input=3, output=10, cache_read=0, cache_write=2000)


def test_a_stream_cut_after_its_start_estimates_the_output_only() -> None:
    reader = messages(start(input_tokens=100, output_tokens=1), *[words("word ")] * 20)
    usage = reader.settled(7)
    assert (usage.input, usage.output, usage.estimated) == (100, 25, True)
    assert not reader.ok


@pytest.mark.parametrize(
    ("kind", "key"), [("input_json_delta", "partial_json"), ("thinking_delta", "thinking")]
)
@pytest.mark.parametrize("named", [True, False])
def test_tool_arguments_and_thinking_are_streamed_text_too(
    kind: str, key: str, named: bool
) -> None:
    body = {"type": "content_block_delta", "delta": {"type": kind, key: "12345678"}}
    empty = {"type": "content_block_delta", "delta": {"type": kind, key: ""}}
    reader = messages(start(input_tokens=1), body, empty, named=named)
    assert (reader.text_bytes, reader.deltas) == (8, 1)


@pytest.mark.parametrize("named", [True, False])
def test_an_error_event_fails_the_message(named: bool) -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    reader = messages(start(input_tokens=9), words("x"), error, named=named)
    assert reader.failure == Failure(
        code="overloaded_error", type="overloaded_error", message="Overloaded"
    )
    assert not reader.terminal


def test_an_event_of_a_later_kind_says_nothing() -> None:
    reader = messages({"type": "from_the_future", "x": 1}, END)
    assert (reader.usage, reader.failure, reader.ok) == (None, None, True)


def test_pings_and_block_marks_are_not_decoded() -> None:
    reader = anthropic.MessagesReader()
    fold(reader, ("ping", {"type": "ping"}))
    for name in (b"ping", b"content_block_start", b"content_block_stop", b"message_stop"):
        assert not reader.skim(sse.Event(name, b"{}"))
    assert reader.terminal


def test_an_oversized_message_event_is_counted_as_malformed() -> None:
    reader = anthropic.MessagesReader()
    assert not reader.skim(sse.Event(b"content_block_delta", b"", None, 9, overflow=True))
    assert reader.malformed == 1


def test_a_plain_message_reports_its_usage_or_its_error() -> None:
    plain = {"type": "message", "usage": {"input_tokens": 50, "output_tokens": 5}}
    assert anthropic.usage_of(plain) == Usage(input=50, output=5)
    assert anthropic.usage_of({"usage": None}) is None
    assert anthropic.error_of(plain) is None
    assert anthropic.error_of({"type": "error", "error": {"type": "x"}}) == Failure(
        code="x", type="x"
    )
    assert anthropic.error_of({"type": "error"}) == Failure(code="error", type="error")


# --- Responses ------------------------------------------------------------------------------------

CREATED = {"type": "response.created", "response": {"id": "resp_1", "model": "m", "status": "x"}}
OUT = {"type": "response.output_text.delta", "delta": "some words here"}


def ended(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "response": {"id": "resp_1", "status": kind, **more}}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["completed", "incomplete", "cancelled"])
def test_three_ends_of_a_response_are_no_failure(kind: str, named: bool) -> None:
    usage = {"input_tokens": 5, "output_tokens": 16}
    reader = responses(CREATED, OUT, ended(kind, usage=usage), named=named)
    assert reader.settled(7) == Usage(input=5, output=16)
    assert reader.ok
    assert (reader.response_id, reader.model) == ("resp_1", "m")
    assert reader.text_bytes == 15


def test_an_incomplete_response_says_why() -> None:
    end = ended("incomplete", incomplete_details={"reason": "max_output_tokens"})
    assert responses(CREATED, end).finish_reasons == ["max_output_tokens"]
    assert responses(CREATED, ended("completed")).finish_reasons == ["completed"]


@pytest.mark.parametrize("named", [True, False])
def test_a_failed_response_is_no_success_and_not_free(named: bool) -> None:
    end = ended("failed", error={"code": "server_error", "message": "boom"})
    reader = responses(CREATED, OUT, end, named=named)
    assert reader.terminal
    assert not reader.ok
    assert reader.failure == Failure(code="server_error", message="boom")
    usage = reader.settled(7)
    assert (usage.input, usage.output, usage.estimated) == (7, 4, True)


def test_a_failed_response_without_a_reason_is_still_failed() -> None:
    assert responses(CREATED, ended("failed")).failure == Failure(code="failed")


@pytest.mark.parametrize(
    "error",
    [{"type": "error", "code": "server_error", "message": "x"},
     {"type": "error", "error": {"code": "server_error", "message": "x"}}],
)  # fmt: skip
@pytest.mark.parametrize("named", [True, False])
def test_an_error_event_of_either_shape_ends_a_response(error: dict[str, Any], named: bool) -> None:
    reader = responses(CREATED, error, named=named)
    assert reader.terminal
    assert reader.failure is not None
    assert (reader.failure.code, reader.failure.message) == ("server_error", "x")


def test_usage_of_responses_keeps_classes_apart() -> None:
    usage = {
        "input_tokens": 100, "output_tokens": 20, "input_tokens_details": {"cached_tokens": 60},
        "output_tokens_details": {"reasoning_tokens": 15},
    }  # fmt: skip
    assert openai_responses.usage_of({"usage": usage}) == Usage(
        input=40, output=20, cache_read=60, reasoning=15
    )
    assert openai_responses.usage_of({"response": None}) is None
    assert openai_responses.error_of({"status": "completed"}) is None
    assert openai_responses.error_of({"error": {"code": "c"}}) == Failure(code="c")


def test_an_end_too_large_to_keep_is_still_an_end() -> None:
    tap = Tap(sse.Events(64), openai_responses.ResponsesReader(), json.loads)
    tap(sse.frame(json.dumps(CREATED).encode()[:20], "response.in_progress"))
    tap(sse.frame(b'{"response":"' + b"x" * 500 + b'"}', "response.completed"))
    assert tap.reader.ok
    lost = Tap(sse.Events(64), openai_responses.ResponsesReader(), json.loads)
    lost(sse.frame(b"x" * 500, "response.output_text.delta"))
    assert not lost.reader.terminal


# --- Embeddings and the shared base ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "expected"),
    [({"prompt_tokens": 3, "total_tokens": 3}, Usage(input=3, output=0)),
     ({"total_tokens": 4}, Usage(input=4, output=0)), ({}, None), (None, None), ([], None)],
)  # fmt: skip
def test_embeddings_report_an_output_of_nothing(usage: Any, expected: Usage | None) -> None:
    assert openai_chat.embeddings_usage_of({"usage": usage}) == expected


@pytest.mark.parametrize(
    ("value", "count"),
    [(0, 0), (7, 7), (7.0, 7), (None, None), ("7", None), (-1, None), (True, None), (1.5, None),
     (float("nan"), None), (float("inf"), None), (10**400, None), ([], None)],
)  # fmt: skip
def test_a_count_is_a_count_or_missing(value: Any, count: int | None) -> None:
    assert stream.tokens(value) == count


def test_the_bare_reader_is_only_a_shape() -> None:
    with pytest.raises(NotImplementedError):
        Reader().skim(sse.Event(b"", b""))
    with pytest.raises(NotImplementedError):
        Reader().feed(b"", {})


def test_an_error_in_a_plain_chat_answer_is_found() -> None:
    assert openai_chat.error_of({"error": {"code": "c"}}) == Failure(code="c")
    assert openai_chat.error_of({"error": None}) is None
