"""The stream parser on the sequences that broke others."""

from __future__ import annotations

import pytest

from gateway.wire import sse


def events(*chunks: bytes, limit: int = sse.MAX_EVENT) -> list[sse.Event]:
    parser = sse.Events(limit)
    return [event for chunk in chunks for event in parser.feed(chunk)]


def data(*chunks: bytes) -> list[bytes]:
    return [event.data for event in events(*chunks)]


def test_a_crlf_cut_between_cr_and_lf_ends_one_line_and_no_event() -> None:
    assert data(b"data: A\r\ndata: B\r", b"\ndata: C\r\n\r\n") == [b"A\nB\nC"]


def test_three_data_lines_cut_inside_a_crlf_join_to_the_usage_object() -> None:
    joined = data(
        b'data: {"choices":[],\r',
        b'\ndata: "usage":\r\ndata: {"prompt_tokens":9}}\r\n\r\n',
    )
    assert joined == [b'{"choices":[],\n"usage":\n{"prompt_tokens":9}}']


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_ends_a_line(end: bytes) -> None:
    assert data(b"data: a" + end + b"data: b" + end + end) == [b"a\nb"]


def test_a_stream_of_bare_cr_delivers_its_last_event_without_waiting_for_more() -> None:
    assert data(b"data: [DONE]\r\r") == [b"[DONE]"]


@pytest.mark.parametrize("at", range(1, 12))
def test_a_multibyte_character_survives_every_cut(at: int) -> None:
    raw = "data: 北京🌍é\n\n".encode()
    assert data(raw[:at], raw[at:]) == ["北京🌍é".encode()]


def test_a_byte_order_mark_is_no_data_even_cut_in_two() -> None:
    assert data(b"\xef", b"\xbb", b"\xbfdata: x\n\n") == [b"x"]


def test_a_second_byte_order_mark_is_part_of_its_line() -> None:
    assert data(b"data: x\n\n", b"\xef\xbb\xbfdata: y\n\n") == [b"x"]


def test_comments_never_become_data() -> None:
    assert data(b": OPENROUTER PROCESSING\n\n", b":\n\ndata: x\n: y\n\n") == [b"x"]


def test_the_space_after_the_colon_is_optional_and_only_one_is_dropped() -> None:
    assert data(b"data:a\n\ndata:  b\n\n") == [b"a", b" b"]


def test_an_event_without_data_is_none_but_a_bare_data_line_is_one() -> None:
    assert data(b"event: ping\n\n") == []
    assert data(b"data\n\n") == [b""]


def test_name_and_id_are_read_and_do_not_outlive_their_event() -> None:
    first, second = events(b"event: error\nid: 7\ndata: x\n\n", b"data: y\n\n")
    assert (first.name, first.id) == (b"error", b"7")
    assert (second.name, second.id) == (b"", None)


def test_a_line_of_two_mebibytes_passes() -> None:
    line = b"x" * (2 << 20)
    assert data(b"data: " + line, b"\n\n") == [line]


def test_an_oversized_event_is_counted_forgotten_and_keeps_its_name() -> None:
    parser = sse.Events(64)
    head = b"event: response.completed\ndata: "
    assert parser.feed(head + b"x" * 50) == []
    assert not parser.holding or len(parser._pending) == 0
    assert parser.feed(b"x" * 1000) == []
    assert not parser.at_boundary
    [lost, next_one] = parser.feed(b"x\n\ndata: y\n\n")
    assert (lost.name, lost.data, lost.overflow) == (b"response.completed", b"", True)
    assert lost.size == len(head) + 1051 + 2
    assert next_one.data == b"y"
    assert parser.overflows == 1
    assert parser.total == 2


@pytest.mark.parametrize(
    ("sent", "safe"),
    [
        (b"", True),
        (b"data: x\n\n", True),
        (b"data: x\r\n\r\n", True),
        (b"data: x\n\n: comment\n", True),
        (b"data: x\n\n: comm", False),
        (b"data: x\n", False),
        (b"data: x", False),
        (b"event: e\n", False),
    ],
)
def test_inserting_is_safe_between_events_only(sent: bytes, safe: bool) -> None:
    parser = sse.Events()
    parser.feed(sent)
    assert parser.at_boundary is safe


def test_a_frame_reads_back_as_its_event() -> None:
    [event] = events(sse.frame(b'{"a":1}', "error"))
    assert (event.name, event.data) == (b"error", b'{"a":1}')
    assert sse.frame(b"[DONE]") == b"data: [DONE]\n\n"


def test_a_scan_splits_nothing_until_a_needle_comes() -> None:
    scan = sse.Scan(b'"usage"')
    assert scan.feed(b"data: {}\n\n") == []
    assert scan.feed(b"data: {}\n\ndata: {}\n\n") == []
    assert scan.feed(b'data: {"us') == []
    [hit] = scan.feed(b'age":1}\n\n')
    assert hit.data == b'{"usage":1}'
    assert scan.total == 4
    assert scan.at_boundary


def test_blocks_beyond_the_bound_flow_uncut() -> None:
    blocks = sse.Blocks(10)
    assert blocks.feed(b"data: 0123456789") == [b"data: 0123456789"]
    assert blocks.open
    assert blocks.feed(b"x\n\n") == [b"x\n\n"]
    assert blocks.feed(b"") == []
    assert blocks.rest() == b""


def test_the_event_of_a_comment_block_is_none() -> None:
    assert sse.event_of(b": hello\n\n") is None
    event = sse.event_of(b"event: e\r\ndata: x\r\n\r\n")
    assert event is not None
    assert event.name == b"e"
