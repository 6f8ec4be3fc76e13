"""Effects on their way out: keys, refusals, and answers in the guest's words."""

from __future__ import annotations

import pytest

from runtime import outbound
from runtime.outbound import Caller


def test_a_key_is_equal_whenever_an_effect_is_sent_again_and_no_other():
    one = Caller(task="t1", token="x")
    assert one.key(3) == Caller(task="t1", token="other machine").key(3)
    others = [one.key(4), Caller(task="t2", token="x").key(3), one.trace]
    assert one.key(3) not in others


def test_one_trace_for_the_whole_task():
    one = Caller(task="t1", token="x")
    traces = {one.headers(n)["traceparent"].split("-")[1] for n in range(5)}
    spans = {one.headers(n)["traceparent"].split("-")[2] for n in range(5)}
    assert traces == {one.trace}
    assert len(spans) == 5


@pytest.mark.parametrize(
    ("status", "answer", "code", "retryable", "words"),
    [
        (429, {"error": {"message": "wait 3 s"}}, "budget", True, "wait 3 s"),
        (400, {"error": {"message": "bad"}}, "bad_request", False, "bad"),
        (403, {"error": "no"}, "denied", False, "no"),
        (409, {"detail": 1}, "conflict", False, "detail"),
        (502, "x", "upstream", True, "502"),
        (0, "not reached", "upstream", True, "not reached"),
    ],
)
def test_a_refusal_keeps_the_gateways_words(status, answer, code, retryable, words):
    problem = outbound.refusal(status, answer)["error"]
    assert (problem["code"], problem["retryable"]) == (code, retryable)
    assert words in problem["message"]


def test_a_tools_text_is_text_and_other_content_stays():
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert outbound.flat(text) == "a\nb"
    mixed = [*text, {"type": "image", "data": ""}]
    assert outbound.flat(mixed) == mixed


def test_an_event_stream_yields_its_last_response():
    stream = (
        b'event: message\r\ndata: {"jsonrpc":"2.0","method":"notifications/progress"}\r\n\r\n'
        b'data: {"jsonrpc":"2.0","id":1,\ndata: "result":{"x":1}}\n\n'
    )
    assert outbound.decoded(stream, "text/event-stream")["result"] == {"x": 1}
    with pytest.raises(ValueError, match="no response"):
        outbound.decoded(b"data: {}\n\n", "text/event-stream")
