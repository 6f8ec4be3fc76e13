"""What a waiting client is sent, and how long it may wait."""

from __future__ import annotations

import json

import pytest

from gateway.call import ClientKind, Dialect
from gateway.wire import keepalive, sse
from gateway.wire.keepalive import Form, ResponsesOpening


@pytest.mark.parametrize(
    ("dialect", "form"),
    [(Dialect.CHAT, Form.COMMENT), (Dialect.COMPLETIONS, Form.COMMENT),
     (Dialect.MESSAGES, Form.PING), (Dialect.RESPONSES, Form.COMMENT), (Dialect.MCP, Form.COMMENT),
     (Dialect.EMBEDDINGS, Form.SILENCE), (Dialect.PASSTHROUGH, Form.SILENCE),
     (Dialect.COUNT_TOKENS, Form.SILENCE)],
)  # fmt: skip
def test_each_dialects_streams_have_their_form_and_plain_answers_silence(
    dialect: Dialect, form: Form
) -> None:
    assert keepalive.form(dialect, stream=True) is form
    assert keepalive.form(dialect, stream=False) is Form.SILENCE


def test_only_codex_hears_a_response_opened_that_no_upstream_made() -> None:
    codex = ClientKind.CODEX
    assert keepalive.form(Dialect.RESPONSES, stream=True, client=codex) is Form.OPENING
    assert keepalive.form(Dialect.RESPONSES, stream=False, client=codex) is Form.SILENCE
    assert keepalive.form(Dialect.CHAT, stream=True, client=codex) is Form.COMMENT


def test_a_comment_ends_its_line_and_dispatches_nothing() -> None:
    beat = keepalive.beat(Form.COMMENT)
    assert beat == b": queued\n"
    stream = b"id: 7\ndata: a\n\n" + beat + beat + b"data: b\n\n"
    assert [event.data for event in sse.Events().feed(stream)] == [b"a", b"b"]


def test_a_ping_is_one_event_of_messages() -> None:
    [event] = sse.Events().feed(keepalive.beat(Form.PING))
    assert (event.name, json.loads(event.data)) == (b"ping", {"type": "ping"})


def test_silence_is_nothing_and_an_opening_without_its_stream_too() -> None:
    assert keepalive.beat(Form.SILENCE) == b""
    assert keepalive.beat(Form.OPENING) == b""


def test_a_responses_opening_counts_its_events_from_zero() -> None:
    opening = ResponsesOpening("resp_1")
    name, body = opening.created(model='m"x', at=1_500_000)
    assert name == "response.created"
    assert body["sequence_number"] == 0
    response = body["response"]
    assert isinstance(response, dict)
    assert (response["id"], response["status"], response["model"]) == ("resp_1", "queued", 'm"x')
    assert response["created_at"] == 1
    for number in (1, 2):
        [event] = sse.Events().feed(keepalive.beat(Form.OPENING, opening))
        assert json.loads(event.data) == {"type": "keepalive", "sequence_number": number}


CREATED = b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"ok"}\n\n'


@pytest.mark.parametrize(
    "created",
    [CREATED, b'data: {"type": "response.created"}\n\n', CREATED.replace(b"\n", b"\r\n")],
)
@pytest.mark.parametrize("comment", [b"", b": hello\n\n"])
def test_the_upstreams_created_is_swallowed_at_every_cut(created: bytes, comment: bytes) -> None:
    raw = comment + created + DELTA + created
    for cut in range(len(raw) + 1):
        opening = ResponsesOpening("r")
        out = opening.feed(raw[:cut]) + opening.feed(raw[cut:]) + opening.rest()
        assert out == comment + DELTA + created
        assert opening.swallowed


def test_another_first_event_means_nothing_is_swallowed() -> None:
    raw = b'event: error\ndata: {"type":"error"}\n\n' + CREATED
    for cut in range(len(raw) + 1):
        opening = ResponsesOpening("r")
        assert opening.feed(raw[:cut]) + opening.feed(raw[cut:]) + opening.rest() == raw
        assert not opening.swallowed


def test_after_the_opening_is_decided_partial_events_are_not_held_back() -> None:
    opening = ResponsesOpening("r")
    assert opening.feed(CREATED + b"event: resp") == b"event: resp"
    assert opening.feed(b"onse") == b"onse"


def test_a_first_event_without_end_is_let_through_at_the_bound() -> None:
    opening = ResponsesOpening("r")
    raw = b"data: " + b"x" * (sse.MAX_EVENT + 1)
    assert opening.feed(raw) == raw
    assert opening.feed(b"y") == b"y"


@pytest.mark.parametrize(
    ("dialect", "stream", "seconds"),
    [(Dialect.CHAT, True, 540), (Dialect.CHAT, False, 170), (Dialect.EMBEDDINGS, True, 170),
     (Dialect.MCP, True, 120), (Dialect.MCP, False, 120)],
)  # fmt: skip
def test_a_client_is_held_no_longer_than_it_bears(
    dialect: Dialect, stream: bool, seconds: int
) -> None:
    assert keepalive.hold_cap(dialect, stream=stream) == seconds * 1_000_000


@pytest.mark.parametrize(
    ("policy", "cap", "client", "deadline"),
    [(120, 170, None, 120), (120, 100, None, 100), (120, 170, 60, 54), (120, 170, 600, 120),
     (0, 170, 600, 0), (-1, 170, None, 0)],
)  # fmt: skip
def test_a_call_queues_for_the_least_of_policy_cap_and_its_clients_patience(
    policy: int, cap: int, client: int | None, deadline: int
) -> None:
    assert keepalive.queue_deadline(policy, cap, client) == deadline


@pytest.mark.parametrize(
    ("headers", "timeout"),
    [
        ([], None),
        ([(b"x-stainless-timeout", b"600")], 600_000_000),
        ([(b"x-stainless-timeout", b"600"), (b"x-stainless-read-timeout", b"5.5")], 5_500_000),
        ([(b"x-stainless-timeout", b"600"), (b"x-stainless-read-timeout", b"None")], 600_000_000),
        ([(b"x-stainless-timeout", b"NOT_GIVEN")], None),
        ([(b"x-stainless-timeout", b"-1")], None),
        ([(b"x-stainless-timeout", b"0")], None),
        ([(b"x-stainless-timeout", b"1e9")], None),
        ([(b"x-stainless-timeout", b"1.x")], None),
        ([(b"x-stainless-timeout", b"9" * 400)], None),
        ([(b"x-stainless-timeout", b"")], None),
    ],
)
def test_the_clients_own_timeout_is_read_or_absent(
    headers: list[tuple[bytes, bytes]], timeout: int | None
) -> None:
    assert keepalive.client_timeout(headers) == timeout
