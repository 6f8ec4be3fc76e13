"""What a stream is charged, by the fault cases' own books, wherever its bytes are cut.

The streams and the expected tokens come from `tests/cases`; the cuts from hypothesis.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.call import Dialect
from gateway.wire.codec import CODECS
from gateway.wire.openai_chat import WithoutUsage
from gateway.wire.sse import Events
from gateway.wire.stream import Reader, Tap
from tests.cases import form, items

PATHS = {
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/messages": Dialect.MESSAGES,
    "/v1/responses": Dialect.RESPONSES,
}
PROMPT = 7


def _booked() -> list[Any]:
    """Cases with one stream, read to its end, and a book to compare: name, dialect, bytes, book."""
    found = []
    for variant in form.read_all():
        book = variant.expect.get("accounting")
        answers = [answer for upstream in variant.upstreams for answer in upstream["answers"]]
        if not book or len(answers) != 1 or len(variant.calls) != 1:
            continue
        call, answer = variant.calls[0], answers[0]
        headers = dict(answer.get("headers", []))
        path = call.get("request", {}).get("path", "")
        if (
            headers.get("content-type") != "text/event-stream"
            or "content-encoding" in headers
            or call.get("abort")
            or path not in PATHS
            or variant.policy == "messages-over-chat"  # translation: the codecs are the upstream's
        ):
            continue
        names = items.Names({"model": variant.model, "fresh": "1", "rpc_id": "1"})
        chunks = [step for step in answer.get("chunks", []) if step != {"hold": True}]
        body = b"".join(step.data for step in items.steps(chunks, names.fill))
        if body:
            found.append(pytest.param(PATHS[path], body, book, id=variant.name))
    return found


BOOKED = _booked()


def folded(dialect: Dialect, chunks: list[bytes]) -> Reader:
    make = CODECS[dialect].reader
    assert make is not None
    tap = Tap(Events(), make(), json.loads)
    for chunk in chunks:
        tap(chunk)
    return tap.reader


def within(count: int | None, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return count is not None and wanted.get("min", 0) <= count <= wanted.get("max", 10**9)
    return count == wanted


def test_the_cases_hold_books_of_every_dialect() -> None:
    assert len(BOOKED) > 25
    assert {case.values[0] for case in BOOKED} == set(PATHS.values())


@pytest.mark.parametrize(("dialect", "body", "book"), BOOKED)
@given(places=st.lists(st.integers(0, 1 << 20), max_size=8))
@settings(max_examples=10, deadline=None)
def test_a_stream_is_charged_as_its_case_says_wherever_it_is_cut(
    dialect: Dialect, body: bytes, book: dict[str, Any], places: list[int]
) -> None:
    marks = sorted({place % (len(body) + 1) for place in places} | {0, len(body)})
    reader = folded(dialect, [body[a:b] for a, b in pairwise(marks)])
    usage = reader.settled(PROMPT)
    for word, count in (
        ("input_tokens", usage.input),
        ("output_tokens", usage.output),
        ("cache_read_tokens", usage.cache_read),
        ("cache_write_tokens", usage.cache_write),
    ):
        if word in book:
            assert within(count, book[word]), (word, count, book[word])
    if "estimated_settlements" in book:
        assert usage.estimated == bool(book["estimated_settlements"])
    if "calls_ok" in book:
        assert reader.ok == bool(book["calls_ok"])


@pytest.mark.parametrize(("dialect", "body", "book"), BOOKED)
def test_breaking_off_anywhere_is_never_free_and_never_raises(
    dialect: Dialect, body: bytes, book: dict[str, Any]
) -> None:
    del book
    for end in range(0, len(body), max(1, len(body) // 40)):
        reader = folded(dialect, [body[:end]])
        usage = reader.settled(PROMPT)
        assert usage.input is not None
        assert usage.output is not None
        assert usage.output >= 1 or not reader.text_bytes


@given(
    st.sampled_from([case.values[1] for case in BOOKED if case.values[0] is Dialect.CHAT]),
    st.lists(st.integers(0, 1 << 20), max_size=8),
)
@settings(max_examples=80, deadline=None)
def test_without_our_usage_chunk_a_stream_is_the_same_but_for_that_event(
    body: bytes, places: list[int]
) -> None:
    marks = sorted({place % (len(body) + 1) for place in places} | {0, len(body)})
    whole, cut = WithoutUsage(), WithoutUsage()
    wanted = whole.feed(body) + whole.rest()
    got = b"".join(cut.feed(body[a:b]) for a, b in pairwise(marks)) + cut.rest()

    def texts(raw: bytes) -> list[bytes]:
        return [event.data for event in Events().feed(raw)]

    assert texts(got) == texts(wanted)
    kept = [t for t in texts(body) if not (b'"choices":[]' in t and b'"usage":{' in t)]
    joined = [t for t in kept if b"\n" not in t]  # one case splits its usage over data lines
    assert [t for t in texts(got) if b"\n" not in t] == joined


WORD = st.sampled_from(
    [None, 0, -1, 7, 2.0, 1e30, True, "3", "", [], {}, {"input_tokens": 5}, "stop", "error",
     "response.completed", "message_delta", [{"finish_reason": "stop"}], [None], [[1]]]
)  # fmt: skip
KEY = st.sampled_from(
    ["usage", "choices", "error", "type", "response", "message", "delta", "id", "model", "status",
     "prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "code", "details",
     "prompt_tokens_details", "finish_reason", "incomplete_details", "stop_reason"]
)  # fmt: skip
ODD = st.recursive(
    st.dictionaries(KEY, WORD, max_size=5),
    lambda inner: st.dictionaries(KEY, st.one_of(inner, WORD, st.lists(inner, max_size=2))),
    max_leaves=12,
)


@given(
    st.sampled_from([d for d, codec in CODECS.items() if codec.reader]),
    st.lists(st.tuples(st.sampled_from([b"", b"error", b"message_stop", b"x"]), ODD), max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_no_event_of_whatever_shape_makes_a_reader_raise(
    dialect: Dialect, events: list[tuple[bytes, dict[str, Any]]]
) -> None:
    raw = b"".join(
        (b"event: %b\n" % name if name else b"") + b"data: " + json.dumps(body).encode() + b"\n\n"
        for name, body in events
    )
    reader = folded(dialect, [raw])
    assert reader.events == len(events)
    usage = reader.settled(PROMPT)
    assert usage.input is not None
    assert usage.output is not None
    codec = CODECS[dialect]
    for _, body in events:
        codec.usage_of(body)
        codec.error_of(body)
