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


def folded(dialect: Dialect, chunks: list[bytes], *, whole: bool = False) -> Reader:
    make = CODECS[dialect].reader
    assert make is not None
    tap = Tap(Events(), make(), json.loads)
    for chunk in chunks:
        tap(chunk)
    if whole:
        tap.finish()
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
    reader = folded(dialect, [body[a:b] for a, b in pairwise(marks)], whole=True)
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


# --- events like the last one ---------------------------------------------------------------------

TEXTS = st.text(
    st.sampled_from('ab "\\\n\r:{},[]') | st.characters(codec="utf-8"), max_size=12
) | st.sampled_from(["usage", "error", "finish_reason", '"usage":{', '","error":{"a":1},"x":"'])


def _chat(text: str) -> bytes:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    return b"data: %b\n\n" % json.dumps({"id": "c", "choices": choices, "usage": None}).encode()


def _tight(text: str) -> bytes:
    return _chat(text).replace(b'": ', b'":').replace(b', "', b',"')


def _message(text: str) -> bytes:
    body = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}
    data = json.dumps(body, separators=(",", ":")).encode()
    return b"event: content_block_delta\ndata: %b\n\n" % data


def _raw(text: str) -> bytes:
    """No JSON where the text holds quotes or line ends: what a broken upstream may send."""
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode()


OTHER = [
    b": comment\n\n",
    b"event: ping\ndata: {}\n\n",
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n',
    b'data: {"choices":[{"delta":{"content":"a","x":"b"}}],"error":{"message":"m"}}\n\n',
    b'data: {"choices":[{"delta":{"content":"half',
    b'"}}]}\n\n',
    b"data: [DONE]\n\n",
    b"\n",
    b"data: x\r\n\r",
]


@settings(max_examples=300)
@given(
    st.sampled_from([Dialect.CHAT, Dialect.MESSAGES, Dialect.RESPONSES]),
    st.lists(
        st.tuples(st.sampled_from([_chat, _tight, _message, _raw]), TEXTS).map(
            lambda made: made[0](made[1])
        )
        | st.sampled_from(OTHER),
        max_size=30,
    ),
)
def test_an_event_like_the_last_one_is_read_as_if_it_were_the_first(dialect, chunks) -> None:
    """Byte by byte no chunk is like another, so that nothing can be remembered."""
    quick = folded(dialect, chunks)
    slow = folded(dialect, [bytes([byte]) for byte in b"".join(chunks)])
    for name in Reader.__slots__:
        assert getattr(quick, name) == getattr(slow, name), name


@pytest.mark.parametrize(
    ("dialect", "chunks"),
    [
        (Dialect.CHAT, [_raw("a"), _raw("b"), _raw("x\n\ny")]),
        (Dialect.CHAT, [_raw("a"), _raw("b"), _raw("x\r\ry")]),
        (Dialect.CHAT, [_raw("a"), _raw("b"), _raw("x\\")]),
        (Dialect.CHAT, [_raw("a"), _raw("b"), _raw('x","usage":{"prompt_tokens":3},"y":"z')]),
        (Dialect.CHAT, [_raw("a"), _raw("b"), _raw("")]),
        (Dialect.CHAT, [_raw("a"), _raw("b"), _raw("x")[:-1], b"\n"]),
        (
            Dialect.CHAT,
            [
                b'data: {"a":[{"content":"%b":{"prompt_tokens":3}}]}\n\n' % text
                for text in (b"a", b"b", b"usage")
            ],
        ),
        (
            Dialect.CHAT,
            [
                b': "content":"%b"}\ndata: {"content":"abc"}\n\n' % text
                for text in (b"abc", b"abc", b"longer")
            ],
        ),
        (
            Dialect.CHAT,
            [
                b'event: "content":"%b"}\ndata: {"content":"abc"}\n\n' % text
                for text in (b"a", b"b", b"longer")
            ],
        ),
        (
            Dialect.MESSAGES,
            [
                b"event: content_block_delta\n",
                b'data: {"delta":{"text":"a"}}\n\n',
                b"event: content_block_delta\n",
                b'data: {"delta":{"text":"b"}}\n\n',
                b'data: {"delta":{"text":"nameless"}}\n\n',
            ],
        ),
    ],
    ids=[
        "line",
        "return",
        "backslash",
        "quote",
        "empty",
        "cut",
        "name",
        "comment",
        "event",
        "nameless",
    ],
)
def test_what_only_looks_like_the_last_event_is_read_for_what_it_is(dialect, chunks) -> None:
    quick = folded(dialect, chunks)
    slow = folded(dialect, [bytes([byte]) for byte in b"".join(chunks)])
    for name in Reader.__slots__:
        assert getattr(quick, name) == getattr(slow, name), name


@pytest.mark.parametrize("make", [_tight, _message])
def test_a_stream_of_like_events_is_remembered_and_counted(make: Any) -> None:
    class Counting(Events):
        fed = 0

        def feed(self, chunk: bytes) -> Any:
            self.fed += 1
            return super().feed(chunk)

    dialect = Dialect.CHAT if make is _tight else Dialect.MESSAGES
    events = Counting()
    tap = Tap(events, CODECS[dialect].reader(), json.loads)  # type: ignore[misc]
    for number in range(50):
        tap(make(f"word{number} "))
    assert events.fed == 2  # the first is decoded, the second remembered
    assert tap.reader.deltas == tap.reader.events == 50
    assert tap.reader.text_bytes == sum(len(f"word{number} ") for number in range(50))
    assert events.total == 50


def test_what_differs_each_time_is_not_remembered_for_ever() -> None:
    tap = Tap(Events(), CODECS[Dialect.CHAT].reader(), json.loads)  # type: ignore[misc]
    for number in range(100):
        tap(b'data: {"n":%d,"choices":[{"delta":{"content":"x"}}]}\n\n' % number)
    assert tap._before == b""
    assert tap.reader.deltas == 100
