"""Prompts of every shape are read and counted; what each dialect writes hangs together."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.emulator.config import Fault, Pacing
from gateway.emulator.exchange import ConnectionBroken
from tests.unit.emulator.driving import PLAIN, Driver

DOCUMENT = {"type": "document", "source": {"type": "text", "data": "some text"}}


@pytest.mark.parametrize(
    "content",
    [
        [],
        [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
        [DOCUMENT],
        [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}],
        [{"type": "tool_result", "tool_use_id": "t"}],
        [{"type": "tool_result", "tool_use_id": "t", "content": "x"}],
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}],
        [{"type": "search_result", "title": "x", "cache_control": {"type": "ephemeral"}}],
    ],
)
def test_messages_content_of_every_kind_is_read(content):
    body = {
        "model": "m", "max_tokens": 20, "cache_control": {"type": "ephemeral"},
        "system": [{"type": "text", "text": "be brief"}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "long " * 500, "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": content},
        ],
    }  # fmt: skip
    got = Driver().call("/v1/messages", body)
    assert got.status == 200
    usage = got.json["usage"]
    assert 10 < usage["input_tokens"] + usage["cache_creation_input_tokens"] < 3_000


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image"}], [{"type": "text"}], [{"type": "tool_use"}], [{"type": "tool_result"}],
        [{"type": "thinking"}], [{"type": "tool_result", "tool_use_id": "t", "content": 5}],
        [{"type": "tool_result", "tool_use_id": "t", "content": [5]}], [5], 5,
    ],
)  # fmt: skip
def test_messages_content_at_fault_is_named_by_its_path(content):
    body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": content}]}
    got = Driver().call("/v1/messages", body)
    assert got.status == 400
    assert got.json["error"]["message"].startswith("messages.0.content")


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"thinking": {"type": "disabled"}}, 200), ({"thinking": {"type": "adaptive"}}, 200),
        ({"thinking": 5}, 400), ({"thinking": {}}, 400), ({"thinking": {"type": "enabled"}}, 400),
        ({"tool_choice": 5}, 400), ({"tool_choice": {}}, 400), ({"tools": 5}, 400),
        ({"tools": [5]}, 400), ({"temperature": "x"}, 400), ({"system": "s"}, 200),
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "none"}}, 200),
        ({"tools": [{"name": "a", "input_schema": {}}],
          "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, 200),
        ({"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "auto"}}, 200),
    ],
)  # fmt: skip
def test_messages_options_are_read_or_refused(more, status):
    assert Driver().messages(**more).status == status


def test_a_thinking_block_fits_even_the_smallest_cap():
    for cap in (1, 2, 5):
        got = Driver().messages(max_tokens=cap, thinking={"type": "adaptive"}).json
        assert got["stop_reason"] == "max_tokens"
        assert got["usage"]["output_tokens"] == cap


def test_a_tool_call_cut_by_its_cap_has_no_broken_input():
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 90}}}
    tools = [{"name": "alpha", "input_schema": schema}]
    got = Driver().messages("alpha", tools=tools, max_tokens=8).json
    assert (got["stop_reason"], got["content"][0]["input"]) == ("max_tokens", {})


@pytest.mark.parametrize(
    "content",
    [
        [
            {"type": "text", "text": "x"},
            {"type": "image_url", "image_url": "https://example.com/a"},
        ],
        [{"type": "input_audio", "input_audio": {"data": "A" * 10_000}}],
        [{"type": "file", "file": {"file_data": "A" * 10_000}}],
    ],
)
def test_chat_parts_of_every_kind_are_read(content):
    body = {"model": "m", "messages": [{"role": "user", "name": "n", "content": content}]}
    assert Driver().call("/v1/chat/completions", body).status == 200


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, 200), ({"tools": [5]}, 400),
        ({"tools": []}, 400), ({"tool_choice": "none"}, 200), ({"stream_options": 5}, 400),
        ({"response_format": {"type": "text"}}, 200), ({"response_format": 5}, 400),
        ({"response_format": {"type": "json_schema"}}, 400),
    ],
)  # fmt: skip
def test_chat_options_are_read_or_refused(more, status):
    assert Driver().chat(**more).status == status


@pytest.mark.parametrize(
    ("choice", "status"),
    [("auto", 200), ("odd", 400), (5, 400), ({"type": "allowed_tools"}, 200),
     ({"type": "function", "function": {"name": "other"}}, 400)],
)  # fmt: skip
def test_a_tool_choice_must_be_possible(choice, status):
    tools = [{"type": "function", "function": {"name": "alpha"}}]
    assert Driver().chat(tools=tools, tool_choice=choice).status == status


def test_any_json_is_an_object_where_no_schema_is_given():
    got = Driver().chat(response_format={"type": "json_object"}).json
    assert isinstance(json.loads(got["choices"][0]["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("more", "status"),
    [({"prompt": [1, 2, 3]}, 200), ({"prompt": [[1], [2]]}, 200), ({"prompt": [[]]}, 400),
     ({"prompt": 5}, 400), ({"prompt": []}, 400), ({"n": 3, "best_of": 2}, 400), ({}, 200),
     ({"prompt": ["x"] * 100, "n": 2}, 400)],
)  # fmt: skip
def test_completions_take_texts_and_ids(more, status):
    assert Driver().call("/v1/completions", {"model": "m", **more}).status == status


def test_responses_input_of_every_kind_is_read():
    items = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [
            {"type": "input_text", "text": "x"}, {"type": "refusal", "refusal": "no"},
            {"type": "input_image", "image_url": "data:" + "A" * 9_000, "detail": "low"},
            {"type": "input_file", "file_data": "A" * 9_000},
        ]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text"}]},
    ]  # fmt: skip
    body = {"model": "m", "input": items, "instructions": "be brief", "tools": []}
    got = Driver().call("/v1/responses", body)
    assert got.status == 200
    assert got.json["usage"]["input_tokens"] < 3_000
    assert got.json["instructions"] == "be brief"


@pytest.mark.parametrize(
    "more",
    [{"instructions": 5}, {"input": [{"type": 5}]},
     {"input": [{"role": "user", "content": [5]}]},
     {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}],
)  # fmt: skip
def test_responses_input_at_fault_is_named(more):
    assert Driver().call("/v1/responses", {"model": "m", "input": "x", **more}).status == 400


def test_tools_in_a_namespace_are_called_with_it():
    inner = {"type": "function", "name": "alpha", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "mcp", "tools": [inner, {"type": "odd"}, 5]}]
    body = {"model": "m", "input": "call alpha", "tools": tools}
    for choice in (None, "required", {"type": "function", "name": "alpha"}):
        got = Driver().call("/v1/responses", {**body, "tool_choice": choice})
        assert (got.json["output"][0]["name"], got.json["output"][0]["namespace"]) == (
            "alpha",
            "mcp",
        )
    got = Driver().call("/v1/responses", {**body, "tool_choice": {"type": "mcp"}, "stream": True})
    assert got.events[-1]["response"]["output"][0]["namespace"] == "mcp"


def test_a_response_is_kept_unless_told_otherwise_and_the_oldest_is_dropped_first():
    driver = Driver()
    body = {"model": "m", "input": "x", "max_output_tokens": 16}
    first = driver.call("/v1/responses", body).json["id"]
    dropped = driver.call("/v1/responses", {**body, "store": False}).json["id"]
    assert driver.call(f"/v1/responses/{first}", method="GET").json["id"] == first
    assert driver.call(f"/v1/responses/{dropped}", method="GET").status == 404
    assert driver.call(f"/v1/responses/{first}/cancel").status == 400
    assert driver.call(f"/v1/responses/{first}", method="PUT").status == 404
    assert driver.call(f"/v1/responses/{first}", method="DELETE").json["deleted"] is True
    assert driver.call(f"/v1/responses/{first}", method="GET").status == 404


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions"])
@pytest.mark.parametrize("action", ["error_event", "flood", "malformed"])
def test_faults_inside_a_stream_speak_the_dialect(path, action):
    fault = Fault(action=action, after_events=5, size=1_000, code="server_error")
    driver = Driver(replace(PLAIN, faults=(fault,)))
    body = {
        "model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 30, "stream": True,
    }  # fmt: skip
    got = driver.call(path, body)
    assert got.complete
    if action == "error_event":
        last = got.events[-1]
        assert last.get("type", "error") == "error"
        assert "message" in str(last)
    elif action == "flood":
        assert b"x" * 1_000 in got.body
        assert driver.app.ledger()["completed"] == 1
    else:
        assert b'[{"delta":\n\n' in got.body


def test_embeddings_meet_faults_and_pay_for_input_only():
    body = {"model": "m", "input": "word " * 3_000}
    driver = Driver()
    for _ in range(2):
        usage = driver.call("/v1/embeddings", body).json["usage"]
        assert usage["prompt_tokens"] == usage["total_tokens"] == 3_750
    charged = driver.app.ledger()["charged"]
    assert (charged["tokens"], charged["cache_read"], charged["output"]) == (7_500, 0, 0)
    driver.app.set_faults((Fault(action="malformed", nth=(1,)), Fault(action="cut", after_bytes=9)))
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        _ = driver.call("/v1/embeddings", body).json
    with pytest.raises(ConnectionBroken):
        driver.call("/v1/embeddings", body)
    assert driver.app.ledger()["faulted"] == 1
    driver.app.set_faults((Fault(action="usage", usage="missing"),))
    assert "usage" not in driver.call("/v1/embeddings", body).json
    driver.app.set_faults((Fault(action="status", status=500),))
    assert driver.call("/v1/embeddings", body).status == 500


def test_fast_pacing_writes_several_events_at_once_and_slow_pacing_each_alone():
    slow = Driver(replace(PLAIN, pacing=Pacing(tokens_per_second=50)))
    fast = Driver(replace(PLAIN, pacing=Pacing(tokens_per_second=100_000), events_per_write=10))
    one, two = (driver.chat(stream=True, max_tokens=40) for driver in (slow, fast))
    assert one.body == two.body
    assert one.writes > 40
    assert two.writes <= 6


def test_the_controls_answer_and_mistakes_are_told():
    driver = Driver()
    assert driver.call("/emulator/faults", [{"action": "reset"}]).json["rules"][0]["fired"] == 0
    assert len(driver.call("/emulator/faults", method="GET").json["rules"]) == 1
    bad = driver.call("/emulator/faults", {"rules": [{"action": "rset"}]})
    assert bad.status == 400
    assert "did you mean reset" in bad.json["error"]["problems"][0]
    assert driver.call("/emulator/faults", b"{").status == 400
    assert driver.call("/emulator/reset").json == {"reset": True}
    assert driver.call("/emulator/faults", method="GET").json == {"rules": []}
    assert driver.call("/emulator/ledger", method="GET", query=b"timeline=1").json["timeline"] == []


def test_lifespan_is_answered_and_websockets_are_not_spoken():
    driver = Driver()
    told: list[str] = []
    asked = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> dict[str, str]:
        return {"type": next(asked)}

    async def send(message: dict[str, str]) -> None:
        told.append(message["type"])

    with pytest.raises(StopIteration):
        driver.app({"type": "lifespan"}, receive, send).send(None)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(ValueError, match="websocket"):
        driver.app({"type": "websocket"}, receive, send).send(None)


@pytest.mark.parametrize("ending", [asyncio.CancelledError, ConnectionError])
def test_a_call_that_is_cancelled_or_fails_below_gives_everything_back(ending):
    driver = Driver()

    async def receive() -> dict[str, object]:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
        return {"type": "http.request", "body": body}

    async def send(_message: dict[str, object]) -> None:
        raise ending

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    with pytest.raises(ending):
        driver.app(scope, receive, send).send(None)
    ledger = driver.app.ledger()
    assert (ledger["in_flight"], ledger["abandoned"], ledger["completed"]) == (0, 1, 0)


def test_a_client_that_leaves_while_sending_its_body_is_no_request():
    driver = Driver()

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def send(_message: dict[str, object]) -> None:
        raise AssertionError("nobody listens")

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    with pytest.raises(StopIteration):
        driver.app(scope, receive, send).send(None)
    assert driver.app.ledger()["requests"] == 0
