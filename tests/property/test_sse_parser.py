"""The stream parser's law: chunk boundaries never matter, and nothing grows without bound."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.wire import sse

LINE = st.one_of(
    st.sampled_from(
        [
            b"data: a",
            b"data:b",
            b"data",
            b"data: ",
            b": comment",
            b":",
            b"event: e",
            b"event:f",
            b"id: 1",
            b"id: a\0b",
            b"retry: 3",
            b"unknown: x",
            b"data: \xe5\x8c\x97",
            b" data: no",
        ]
    ),
    st.binary(max_size=40).map(lambda raw: b"data: " + raw.translate(None, b"\r\n")),
)
END = st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b""])
STREAM = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb"]),
    st.lists(st.tuples(LINE, END).map(b"".join), max_size=12).map(b"".join),
).map(b"".join)


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({place % (len(raw) + 1) for place in places} | {0, len(raw)})
    return [raw[a:b] for a, b in pairwise(marks)]


def parsed(raw: bytes, chunks: list[bytes] | None = None, limit: int = sse.MAX_EVENT) -> list:
    parser = sse.Events(limit)
    return [event for chunk in (chunks or [raw]) for event in parser.feed(chunk)]


def by_the_book(raw: bytes) -> list[tuple[bytes, bytes, bytes | None]]:
    """WHATWG §9.2.6, line by line, without any cleverness."""
    lines = re.split(rb"(?>\r\n|\n|\r)", raw.removeprefix(b"\xef\xbb\xbf"))
    lines.pop()  # unfinished
    events, name, data, ident = [], b"", [], None
    for line in lines:
        if not line:
            if data:
                events.append((name, b"\n".join(data), ident))
            name, data, ident = b"", [], None
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        elif field == b"id" and b"\0" not in value:
            ident = value
    return events


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=6))
@settings(max_examples=120, deadline=None)
def test_any_cutting_gives_the_events_of_the_specification(raw: bytes, places: list[int]) -> None:
    events = parsed(raw, cut(raw, places))
    assert [(event.name, event.data, event.id) for event in events] == by_the_book(raw)


@given(STREAM)
@settings(max_examples=120, deadline=None)
def test_one_byte_at_a_time_gives_equal_events_sizes_included(raw: bytes) -> None:
    assert parsed(raw, [bytes([byte]) for byte in raw] or [b""]) == parsed(raw)


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=6), st.integers(1, 40))
@settings(max_examples=120, deadline=None)
def test_oversized_events_are_the_same_ones_for_every_cutting(
    raw: bytes, places: list[int], limit: int
) -> None:
    events = parsed(raw, cut(raw, places), limit)
    assert events == parsed(raw, limit=limit)
    assert all(len(event.data) <= limit for event in events)


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=6), st.integers(1, 60))
@settings(max_examples=120, deadline=None)
def test_what_is_held_stays_within_the_bound_and_a_chunk(
    raw: bytes, places: list[int], limit: int
) -> None:
    parser = sse.Events(limit)
    for chunk in cut(raw, places):
        parser.feed(chunk)
        assert len(parser._pending) <= limit + 1


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=6))
@settings(max_examples=120, deadline=None)
def test_a_scan_finds_what_a_full_reading_finds(raw: bytes, places: list[int]) -> None:
    scan = sse.Scan(b"a", b"e")
    found = [event for chunk in cut(raw, places) for event in scan.feed(chunk)]
    wanted = [e for e in parsed(raw) if any(n in e.data or n in e.name for n in (b"a", b"e"))]
    assert found == wanted


@given(STREAM, st.lists(st.integers(0, 10_000), max_size=6), st.integers(1, 60))
@settings(max_examples=120, deadline=None)
def test_raw_blocks_joined_are_the_stream_byte_for_byte(
    raw: bytes, places: list[int], limit: int
) -> None:
    blocks = sse.Blocks(limit)
    out = [block for chunk in cut(raw, places) for block in blocks.feed(chunk)]
    assert b"".join(out) + blocks.rest() == raw


@given(STREAM)
@settings(max_examples=120, deadline=None)
def test_an_event_inserted_at_a_boundary_is_one_more_event_and_harms_no_other(raw: bytes) -> None:
    parser = sse.Events()
    parser.feed(raw)
    if parser.at_boundary:
        extra = sse.frame(b"[1]", "error")
        after = by_the_book(raw + extra)
        assert after == [*by_the_book(raw), (b"error", b"[1]", None)]
