"""The rules behind the pinned refusals, and words that must not break a header or a body."""

from __future__ import annotations

import inspect
import json

import pytest

from gateway import errors
from gateway.call import ClientKind, Dialect, Family
from gateway.wire import refusals
from gateway.wire.keepalive import ResponsesOpening

DIALECTS = [
    (Dialect.CHAT, Family.OPENAI),
    (Dialect.RESPONSES, Family.OPENAI),
    (Dialect.MESSAGES, Family.ANTHROPIC),
    (Dialect.MCP, Family.MCP),
    (Dialect.PASSTHROUGH, Family.TIDEGATE),
]


def made(kind: type[errors.GatewayError], **more: object) -> errors.GatewayError:
    if issubclass(kind, errors.MethodNotAllowed):
        return errors.MethodNotAllowed("x", allow="POST")
    return kind("x", **more)  # type: ignore[arg-type]


KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.GatewayError) and kind is not errors.PolicyError
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dialect", "family"), DIALECTS)
def test_every_error_of_the_tree_has_a_shape_in_every_dialect(
    kind: type[errors.GatewayError], dialect: Dialect, family: Family
) -> None:
    refusal = refusals.refusal(made(kind), dialect=dialect, family=family)
    assert 400 <= refusal.status <= 599
    assert "Tidegate" in json.dumps(refusal.body)
    name, body = refusals.in_band(made(kind), dialect=dialect)
    assert "Tidegate" in json.dumps(body)
    assert name == {Dialect.MESSAGES: "error", Dialect.RESPONSES: "response.failed",
                    Dialect.MCP: "message"}.get(dialect, "")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_status_without_a_rule_of_its_own_is_the_errors_default(
    kind: type[errors.GatewayError],
) -> None:
    refusal = refusals.refusal(made(kind), dialect=Dialect.CHAT, family=Family.OPENAI)
    assert refusal.status == kind.status


@pytest.mark.parametrize("kind", KINDS)
def test_codex_is_never_given_a_refusal_of_ours_that_it_answers_with_thirty(
    kind: type[errors.GatewayError],
) -> None:
    refusal = refusals.refusal(
        made(kind), dialect=Dialect.RESPONSES, family=Family.OPENAI, client=ClientKind.CODEX
    )
    assert refusal.status not in (402, 403, 409, 429, 503)


def test_codex_shape_is_for_responses_only() -> None:
    full = errors.QueueFull("x", retry_after=1)
    for dialect, family in ((Dialect.CHAT, Family.OPENAI), (Dialect.MCP, Family.MCP)):
        refusal = refusals.refusal(full, dialect=dialect, family=family, client=ClientKind.CODEX)
        assert refusal.status == 429


def test_never_fits_names_no_wait_even_if_one_is_given() -> None:
    never = errors.NeverFits("x", retry_after=5_000_000)
    headers = dict(refusals.refusal(never, dialect=Dialect.CHAT, family=Family.OPENAI).headers)
    assert b"retry-after" not in headers
    assert headers[b"x-should-retry"] == b"false"


def test_an_rpc_id_keeps_its_exact_type() -> None:
    for rpc_id in (0, "0", 9007199254740993, None):
        refusal = refusals.refusal(
            errors.Forbidden("x"), dialect=Dialect.MCP, family=Family.MCP, rpc_id=rpc_id
        )
        assert refusal.body["id"] == rpc_id
        assert type(refusal.body["id"]) is type(rpc_id)


def test_an_mcp_challenge_names_the_metadata_where_it_is_known() -> None:
    refusal = refusals.refusal(
        errors.Unauthenticated("x"), dialect=Dialect.MCP, family=Family.MCP,
        resource_metadata="https://gw.test/.well-known/oauth-protected-resource",
    )  # fmt: skip
    assert dict(refusal.headers)[b"www-authenticate"] == (
        b'Bearer resource_metadata="https://gw.test/.well-known/oauth-protected-resource"'
    )


def test_a_callers_words_can_neither_end_a_header_nor_break_an_encoder() -> None:
    error = errors.QueueFull("model \ud83d\r\nx", retry_after=1, place="a\r\nset-cookie: b")
    refusal = refusals.refusal(
        error, dialect=Dialect.CHAT, family=Family.OPENAI, request_id="id\r\nx: y\xe9"
    )
    for _, value in refusal.headers:
        assert b"\r" not in value
        assert b"\n" not in value
    json.dumps(refusal.body, ensure_ascii=False).encode()


def test_a_text_is_bounded() -> None:
    assert len(refusals.text(errors.MalformedCall("x" * 10**6))) <= refusals.MAX_TEXT


def test_a_rule_already_in_the_message_is_not_said_twice() -> None:
    error = errors.QueueFull("pools.a is full", because="pools.a", retry_after=2_000_000)
    assert refusals.text(error) == "Tidegate: pools.a is full. Please try again in 2s."


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (119, "119 s"), (120, "2 min"), (3599, "1 h"), (7260, "2 h 1 min"),
     (48 * 3600, "2 d"), (50 * 3600, "2 d 2 h")],
)  # fmt: skip
def test_a_span_reads_like_one_and_never_too_short(seconds: float, words: str) -> None:
    assert refusals.span(round(seconds * 1_000_000)) == words


def test_messages_in_band_says_overloaded_for_what_passes_and_the_truth_for_what_does_not() -> None:
    soft = refusals.in_band(errors.QueueFull("x", retry_after=1), dialect=Dialect.MESSAGES)[1]
    hard = refusals.in_band(errors.BudgetSpent("x"), dialect=Dialect.MESSAGES)[1]
    assert soft["error"]["type"] == "overloaded_error"
    assert hard["error"]["type"] == "rate_limit_error"


def test_responses_in_band_continues_the_openings_numbers_and_id() -> None:
    opening = ResponsesOpening("resp_9")
    opening.created(model="m", at=0)
    opening.keepalive()
    name, body = refusals.in_band(
        errors.QueueFull("x", retry_after=1), dialect=Dialect.RESPONSES, model="m",
        response_id=opening.response_id, sequence=opening.next(), now=7_000_000,
    )  # fmt: skip
    assert name == body["type"] == "response.failed"
    assert body["sequence_number"] == 2
    assert body["response"]["id"] == "resp_9"
    assert body["response"]["status"] == "failed"
    assert body["response"]["error"]["code"] == "rate_limit_exceeded"
    assert body["response"]["created_at"] == 7
