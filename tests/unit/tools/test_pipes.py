"""Messages of one child process reach whom they are for."""

from __future__ import annotations

from types import SimpleNamespace

import orjson

from gateway.tools.stdio import Child
from gateway.wire import mcp


def made():
    written: list[bytes] = []
    stdin = SimpleNamespace(write=written.append)
    noticed: list[object] = []
    child = Child(SimpleNamespace(stdin=stdin, returncode=None), 1, noticed.append)
    return child, written, noticed


def ask(child, method, **params):
    parsed = {"jsonrpc": "2.0", "id": "mine", "method": method, "params": params}
    return child.ask(orjson.dumps(parsed), parsed)


def note(method, **params):
    return orjson.dumps({"jsonrpc": "2.0", "method": f"notifications/{method}", "params": params})


def heard(waiting):
    return [orjson.loads(waiting.messages.get_nowait()) for _ in range(waiting.messages.qsize())]


def test_a_log_message_is_for_the_only_call_whatever_subscription_stands_beside_it():
    child, _, _ = made()
    number, subscription = ask(child, "subscriptions/listen", notifications={})
    _, call = ask(child, "tools/call", name="t")
    child.heard(note("message", level="info"))
    named = {"_meta": {mcp.META_SUBSCRIPTION: number}}
    child.heard(note("tools/list_changed", **named))
    assert [one["method"] for one in heard(call)] == ["notifications/message"]
    assert [one["method"] for one in heard(subscription)] == ["notifications/tools/list_changed"]


def test_a_subscription_that_nobody_holds_is_nobodys_and_is_noticed_all_the_same():
    child, _, noticed = made()
    number, call = ask(child, "tools/call", name="t")
    for foreign in (number, 99, "x", None):
        child.heard(note("tools/list_changed", _meta={mcp.META_SUBSCRIPTION: foreign}))
    assert [one["method"] for one in heard(call)] == ["notifications/tools/list_changed"]  # None
    assert noticed == ["notifications/tools/list_changed"] * 4


def test_of_two_calls_neither_gets_what_names_none():
    child, _, _ = made()
    calls = [ask(child, "tools/call", name="t")[1] for _ in range(2)]
    child.heard(note("message", level="info"))
    assert [heard(one) for one in calls] == [[], []]


def test_progress_and_answers_come_back_under_the_callers_own_names():
    child, written, _ = made()
    number, call = ask(child, "tools/call", name="t", _meta={"progressToken": "p"})
    sent = orjson.loads(written[0])
    assert (sent["id"], sent["params"]["_meta"]["progressToken"]) == (number, number)
    child.heard(note("progress", progressToken=number, progress=1))
    child.heard(orjson.dumps({"jsonrpc": "2.0", "id": number, "result": {}}))
    first, last = heard(call)
    assert first["params"]["progressToken"] == "p"
    assert last["id"] == "mine"
    assert child.waiting == {}


def test_an_answer_with_half_an_emoji_reaches_its_call():
    child, _, _ = made()
    number, call = ask(child, "tools/call", name="t")
    said = b'{"jsonrpc":"2.0","id":%d,"result":{"text":"cut \\ud83d"}}' % number
    child.heard(said)
    assert child.noise == 0
    assert call.messages.get_nowait() == said.replace(b'"id":%d' % number, b'"id":"mine"')


def test_a_call_nobody_waits_for_is_cancelled_by_its_number():
    child, written, _ = made()
    number, _ = ask(child, "tools/call", name="t")
    child.drop(number)
    told = orjson.loads(written[-1])
    assert (told["method"], told["params"]["requestId"]) == ("notifications/cancelled", number)


def test_noise_is_counted_and_dropped():
    child, _, _ = made()
    for raw in (b"Listening on port 1", b"[1]", b"7", b"null"):
        child.heard(raw)
    assert child.noise == 4
