"""Heads that were read before: told the same, whatever a client repeats or changes in its own."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway import framing
from gateway.call import ClientKind, Lines
from gateway.errors import MalformedCall
from gateway.framing import MAX_HEADERS, Head, Heads, read
from gateway.record import trace_of
from gateway.snapshot import Snapshot
from gateway.wire.headers import to_upstream
from tests.fixtures.asgi import CHAT, Stage
from tests.fixtures.fake_service import Answer, FakeService
from tests.sim.loop import run

LINES = [
    (b"host", b"gate:8484"),
    (b"authorization", b"Bearer tg_one"),
    (b"content-type", b"application/json"),
    (b"x-stainless-timeout", b"600"),
    (b"content-length", b"12"),
    (b"accept", b"*/*"),
]


def with_length(value, lines=LINES):
    return [(name, value if name == b"content-length" else old) for name, old in lines]


def told(head):
    return {one.name: getattr(head, one.name) for one in fields(Head)}


def outcome(work):
    try:
        return told(work())
    except MalformedCall as error:
        return str(error)


def test_a_repeated_head_is_the_same_but_for_its_length():
    heads = Heads()
    first, second = heads.read(LINES), heads.read(with_length(b"4711"))
    assert (first.length, second.length) == (12, 4711)
    assert second is not first
    assert second.kept is first.kept
    assert {**told(second), "length": 12} == told(first) == told(read(LINES))


@pytest.mark.parametrize("length", [b"", b"-1", b"1e3", b"1 2", b"+5", b"9" * 19])
def test_a_length_that_is_none_is_refused_though_the_head_is_known(length):
    heads = Heads()
    heads.read(LINES)
    with pytest.raises(MalformedCall, match="Content-Length"):
        heads.read(with_length(length))
    assert heads.read(LINES).length == 12


@pytest.mark.parametrize(
    "more",
    [
        (b"content-length", b"12"),
        (b"host", b"other"),
        (b"transfer-encoding", b"chunked"),
        (b"authorization", b"Bearer tg_two"),
        (b"connection", b"authorization"),
        (b"tidegate-tier", b"1"),
    ],
)
@pytest.mark.parametrize("at", [0, 2, 6])
def test_a_line_more_is_another_head(more, at):
    heads, changed = Heads(), LINES.copy()
    changed.insert(at, more)
    heads.read(LINES)
    for _ in range(2):
        assert outcome(lambda: heads.read(changed)) == outcome(lambda: read(changed))
    assert told(heads.read(LINES)) == told(read(LINES))


def test_without_a_length_or_lines_a_head_is_read_anew():
    heads = Heads()
    heads.read(LINES)
    for lines in ([], [pair for pair in LINES if pair[0] != b"content-length"]):
        assert outcome(lambda lines=lines: heads.read(lines)) == outcome(
            lambda lines=lines: read(lines)
        )


def test_who_waits_for_a_word_before_its_body_is_heard_each_time():
    heads, lines = Heads(), [*LINES, (b"expect", b"100-continue")]
    assert [heads.read(lines).expects for _ in range(2)] == [True, True]


NAMES = st.sampled_from([
    b"host", b"content-length", b"content-type", b"authorization", b"x-api-key", b"accept",
    b"connection", b"content-encoding", b"transfer-encoding", b"originator", b"anthropic-version",
    b"x-claude-code-session-id", b"origin", b"expect", b"tidegate-tier", b"mcp-session-id",
])  # fmt: skip
VALUES = st.sampled_from([
    b"", b"a", b"7", b"12", b"gzip", b"close", b"keep-alive, x-api-key", b"chunked", b"codex_cli",
    b"100-continue",
])  # fmt: skip
HEADS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


@example(seen=[[(b"host", b"a"), (b"content-length", b"")]], lengths=[b"7", b"12"])
@given(seen=st.lists(HEADS, max_size=6), lengths=st.lists(VALUES, min_size=1, max_size=3))
def test_whatever_was_seen_before_a_head_means_what_it_says(seen, lengths):
    heads = Heads()
    for lines in seen * 2:
        for length in lengths:
            lines_now = with_length(length, lines)
            assert outcome(lambda x=lines_now: heads.read(x)) == outcome(
                lambda x=lines_now: read(x)
            )


def test_what_is_remembered_is_bounded_in_number_and_bytes(monkeypatch):
    monkeypatch.setattr(Heads, "MOST", 3)
    heads = Heads()
    kept = [heads.read([*LINES, (b"x-n", b"%d" % n)]).kept for n in range(4)]
    again = [heads.read([*LINES, (b"x-n", b"%d" % n)]).kept for n in (3, 0)]
    assert again[0] is kept[3]
    assert again[1] is not kept[0]
    monkeypatch.setattr(Heads, "MOST_BYTES", 2_000)
    long = [*LINES, (b"x-n", b"n" * 800)]
    assert heads.read(long).kept is not heads.read([*LINES, (b"x-m", b"m" * 800)]).kept
    assert heads.read(long).kept is not heads.read(long[:-1]).kept
    huge = [*LINES, (b"x-n", b"n" * Heads.LONGEST)]
    assert heads.read(huge).kept is not heads.read(huge).kept


def test_what_is_derived_of_the_lines_is_found_once_and_is_what_a_plain_list_gives():
    lines = [*LINES, (b"traceparent", b"00-" + b"4" * 32 + b"-" + b"5" * 16 + b"-01")]
    kept, plain = Lines(lines), list(lines)
    for governed in (True, False):
        for idempotency in (True, False):
            options = {"governed": governed, "idempotency": idempotency}
            asked = [to_upstream(kept, **options) for _ in range(2)]
            assert asked[0] == asked[1] == to_upstream(plain, **options)
            asked[0].append((b"authorization", b"Bearer ours"))
            assert to_upstream(kept, **options) == asked[1]
    assert trace_of(kept) == trace_of(kept) == trace_of(plain) == "4" * 32
    assert kept.said == [(b"x-stainless-timeout", b"600")]


def test_a_client_told_by_its_head_is_told_again():
    heads, lines = Heads(), [*LINES, (b"originator", b"codex_cli_rs")]
    assert [heads.read(lines).client for _ in range(2)] == [ClientKind.CODEX] * 2


def test_an_upstreams_header_passes_where_its_value_is_text_without_white_space_at_its_ends():
    text = re.compile(rb"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")
    for code in range(256):
        one = bytes([code])
        for value in (b"", one, one + b"a", b"a" + one + b"b", b"a" + one):
            kept, _ = framing.end_to_end([(b"x-one", value)])
            if text.fullmatch(value):
                assert kept == [(b"x-one", value)]
            elif text.fullmatch(value.strip()):
                assert kept == [(b"x-one", value.strip())]
            else:
                assert kept == []


def test_a_head_with_more_lines_than_are_allowed_leaves_nothing_behind():
    heads = Heads()
    with pytest.raises(MalformedCall, match="header lines"):
        heads.read([*LINES, *[(b"x-n", b"n")] * MAX_HEADERS])
    assert not heads._at
    assert not heads._seen


def test_with_another_policy_no_lines_of_the_former_one_are_kept():
    service = FakeService(Answer())

    async def main():
        async with Stage(service) as stage:
            for revision in (1, 2):
                stage.snapshot = Snapshot(revision=revision, digest="e")
                await stage.ask(headers=[(b"x-first", b"under this policy")])
                for body in (CHAT, CHAT + b" "):
                    assert (await stage.ask(body=body)).status == 200

    run(main())
    _, one, again, _, later, last = [call.headers for call in service.calls]
    assert one is again
    assert later is last
    assert one is not later
    assert one == later
