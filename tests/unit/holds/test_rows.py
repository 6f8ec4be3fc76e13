"""What of a call is written down, and what is made of it again."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.call import Call, ClientKind, Dialect, Family, Fields, Principal
from gateway.errors import BreakerOpen, MalformedCall
from gateway.holds import rows
from gateway.machine import decoded
from gateway.snapshot import AgentRule, HoldRules, Snapshot, Tier
from gateway.units import MICRO
from scheduler.api import Held, Limits, Message, State
from tests.fixtures.held import BODY, memory_store

NOW = 1_000 * MICRO
SNAPSHOT = Snapshot(revision=1, digest="d", holds=HoldRules(longest=3_600 * MICRO))
OPEN = BreakerOpen("p/m is unavailable.", because="breakers")


def call(headers: dict[str, str] | None = None, *, stream: bool = False) -> Call:
    made = Call(
        id="c1", dialect=Dialect.CHAT, family=Family.OPENAI, method="POST",
        path="/v1/chat/completions", target=b"/v1/chat/completions?api-version=1",
        headers=[(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        snapshot=SNAPSHOT, received=NOW, body=BODY, client=ClientKind.CODEX,
    )  # fmt: skip
    made.peer = "127.0.0.1"
    made.fields = Fields(model="m", stream=stream)
    made.tier = Tier(name="batch", number=3)
    rule = AgentRule(id="dev", tenant="t", because="agents.dev")
    made.principal = Principal(id="key:dev", agent="dev", tenant="t", rule=rule)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "authorization", "x-api-key", "api-key", "cookie", "proxy-authorization", "x-auth-token",
        "x-goog-api-key", "x-amz-security-token", "openai-client-secret", "x-user-password",
        "host", "content-length", "prefer", "expect", "connection", "transfer-encoding",
        "tidegate-webhook",
    ],
)  # fmt: skip
def test_no_header_that_may_hold_a_credential_or_frames_a_message_is_written_down(name):
    assert rows.keepable([(name.encode(), b"hunter2")]) == []


def test_what_the_provider_needs_is_written_down_in_its_order():
    kept = [
        (b"content-type", b"application/json"), (b"x-a", b"1"), (b"x-a", b"2"),
        (b"baggage", b"workflow.id=w"), (b"idempotency-key", b"k"), (b"tidegate-tier", b"3"),
        (b"anthropic-version", b"2023-06-01"),
    ]  # fmt: skip
    assert rows.keepable(kept) == kept


def test_what_connection_names_is_not_written_down():
    assert rows.keepable([(b"x-hop", b"1"), (b"connection", b"X-Hop, close")]) == []


@pytest.mark.parametrize(
    ("value", "seconds"), [("5", 5), (" 5 ", 5), ("99999", 3_600), ("999999999", 3_600)]
)
def test_a_caller_may_shorten_its_hold_and_not_lengthen_it(value, seconds):
    headers = [(b"tidegate-hold-for", value.encode())]
    assert rows.kept_for(headers, 3_600 * MICRO) == seconds * MICRO


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "soon", "9" * 40, "٣"])
def test_a_time_that_cannot_be_read_is_refused(value):
    with pytest.raises(MalformedCall) as wrong:
        rows.kept_for([(b"tidegate-hold-for", value.encode())], 3_600 * MICRO)
    assert wrong.value.param == "tidegate-hold-for"


def test_a_call_made_again_is_the_call_that_was_held():
    first = call({"authorization": "Bearer tg_dev_x", "x-a": "1"}, stream=True)
    new = rows.new_hold(first, OPEN, now=NOW, webhook="")
    assert new.deadline == NOW + 3_600 * MICRO
    with memory_store() as store:
        held = asyncio.run(store.keep(new, limits=Limits()))
    again = rows.call_of(held, new.request, snapshot=SNAPSHOT, now=NOW + 5, decode=decoded)
    for name in ("id", "dialect", "family", "method", "path", "target", "body", "client", "peer"):
        assert getattr(again, name) == getattr(first, name), name
    assert again.headers == [(b"x-a", b"1")]
    assert again.received == NOW + 5
    assert again.fields is not None
    assert again.fields.model == "m"
    assert (again.who.id, again.who.rule, again.who.tier) == ("key:dev", "agents.dev", 3)
    assert again.who.until == new.deadline
    assert again.doubtful is False


def test_two_callers_keys_and_two_requests_are_told_apart():
    one, other = call({"idempotency-key": "k"}), call({"idempotency-key": "k"})
    assert rows.dedupe_of(one, "key:a") == rows.dedupe_of(other, "key:a")
    assert rows.dedupe_of(one, "key:a") != rows.dedupe_of(other, "key:b")
    assert rows.dedupe_of(call(), "key:a") == ""
    other.body += b" "
    assert rows.digest_of(one) != rows.digest_of(other)


def test_no_row_shows_a_header_a_body_or_a_key_to_its_owner():
    held = Held(
        seq=1, id="c1", owner="key:dev", agent="dev", tenant="t", rule="agents.dev", tier=2,
        model="m", dialect="chat", family="openai", client="sdk", target=b"/", coding="",
        peer="10.0.0.1", streams=False, received=NOW, deadline=NOW, digest="d",
        webhook="https://h/secret", reason="r", because="b", state=State.DONE, epoch=1, attempt=1,
        sent_at=NOW, sent_to="p/m", tries=0, not_before=0, status=200, code="", message="",
        finished=NOW, push_at=0, push_tries=1, push_state="delivered", bytes=9,
    )  # fmt: skip
    text = json.dumps(rows.shown(held))
    assert not [word for word in ("key:dev", "10.0.0.1", "secret", "digest") if word in text]
    assert rows.shown(held)["status"] == 200


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"a":1}', {"a": 1}),
        (b"data: x\n\n", "data: x\n\n"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
    ],
)
def test_a_reply_travels_as_json_where_it_is_and_as_text_where_not(body, shown):
    message = Message(headers=[(b"content-type", b"text/x")], body=body, status=207)
    assert rows.reply_value(message) == {"status": 207, "content_type": "text/x", "body": shown}


def test_a_long_reply_is_to_be_fetched():
    value = rows.reply_value(Message(headers=[], body=b"x" * (rows.PUSHED_BODY + 1), status=200))
    assert value["body"] is None
    assert value["omitted_bytes"] == rows.PUSHED_BODY + 1
