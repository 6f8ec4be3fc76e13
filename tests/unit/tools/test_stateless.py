"""The stateless era through the whole gateway: governed, byte-exact, under the caller's own id."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.upstream import TransportFault
from tests.fixtures.tool_ground import Ground, Said, Servers, messages, policy, result, text
from tests.sim.loop import run


def played(play, text=None, **by_host):
    """What `play(ground)` returns, and the servers it spoke to."""

    async def main():
        async with Ground(text, Servers(**by_host)) as ground:
            return await play(ground), ground

    return run(main())


def test_a_tool_is_called_and_its_answer_comes_back():
    one, ground = played(lambda g: g.call("echo", a=1))
    assert one.status == 200
    assert one.json["result"]["content"] == [{"type": "text", "text": '{"a":1}'}]
    assert one.header(b"content-type") == b"application/json"
    (sent,) = ground.servers.sent
    assert sent.out.target == b"/mcp"
    assert sent.header(b"mcp-method") == b"tools/call"
    assert sent.header(b"mcp-name") == b"echo"
    assert sent.header(b"mcp-protocol-version") == b"2026-07-28"


def test_the_agents_token_never_reaches_a_server_and_the_servers_own_does():
    _, ground = played(lambda g: g.call("echo"))
    (sent,) = ground.servers.sent
    assert sent.header(b"authorization") == b"Bearer server-credential-secret"
    assert not any(b"tool-1" in value for _, value in sent.out.headers)


@pytest.mark.parametrize(
    "ident", ["0", '"0"', "-7", '"req-1"', "9007199254740993", "123456789012345678901234567890",
              '"\\u0061\\n"', '"ü"', "-0"],
)  # fmt: skip
def test_an_id_comes_back_as_the_very_text_it_was(ident):
    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        headers = ground.headers(message)
        raw = orjson.dumps(message).replace(b'"id":1', b'"id":' + ident.encode())
        return await ground.post(raw, headers)

    def server(message, out):
        start = out.body.index(b'"id":') + 5
        raw = out.body[start : out.body.index(b',"method"', start)]
        return Said(b'{"jsonrpc":"2.0","id":' + raw + b',"result":{"content":[]}}')

    one, _ = played(play, tools=server)
    assert one.status == 200
    assert b'"id":' + ident.encode() + b"," in one.body


@pytest.mark.parametrize("odd", [b'"cut \\ud83d"', b"NaN", b'"caf\xe9"'])
@pytest.mark.parametrize("stream", [False, True])
def test_a_result_that_strict_decoders_refuse_is_passed_on_as_it_is(odd, stream):
    said = b'{"jsonrpc":"2.0","id":1,"result":{"content":[],"odd":' + odd + b"}}"

    def server(_message, _out):
        return Said(steps=[b"data: " + said + b"\n\n"]) if stream else Said(said)

    one, _ = played(lambda g: g.call("echo"), tools=server)
    assert one.status == 200
    assert b'"odd":' + odd in one.body


@pytest.mark.parametrize("ident", ["null", "1.5", "{}", "[1]", "true"])
def test_what_is_no_id_is_refused_and_no_server_hears_of_it(ident):
    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        raw = orjson.dumps(message).replace(b'"id":1', b'"id":' + ident.encode())
        return await ground.post(raw, ground.headers(message))

    one, ground = played(play)
    assert (one.status, one.json["error"]["code"], one.json["id"]) == (400, -32600, None)
    assert not ground.servers.sent


HEADERS = {
    "no version": (b"mcp-protocol-version", None),
    "another version": (b"mcp-protocol-version", b"2026-07-29"),
    "no method": (b"mcp-method", None),
    "another method": (b"mcp-method", b"tools/list"),
    "another case": (b"mcp-method", b"Tools/Call"),
    "no name": (b"mcp-name", None),
    "another name": (b"mcp-name", b"wipe"),
    "broken base64": (b"mcp-name", b"=?base64?!!?="),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_routing_headers_that_differ_from_the_body_are_refused_in_the_protocols_code(change):
    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        headers = [pair for pair in ground.headers(message) if pair[0] != change[0]]
        if change[1] is not None:
            headers.append(change)
        return await ground.post(message, headers)

    one, ground = played(play)
    assert (one.status, one.json["error"]["code"], one.json["id"]) == (400, -32020, 1)
    assert not ground.servers.sent


def test_a_revision_nobody_speaks_is_named_with_those_that_are():
    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        raw = orjson.dumps(message).replace(b"2026-07-28", b"2031-01-01")
        headers = [
            (name, b"2031-01-01" if name == b"mcp-protocol-version" else value)
            for name, value in ground.headers(message)
        ]
        return await ground.post(raw, headers)

    one, _ = played(play)
    error = one.json["error"]
    assert (one.status, error["code"]) == (400, -32022)
    assert error["data"]["requested"] == "2031-01-01"
    assert "2026-07-28" in error["data"]["supported"]


def test_a_doubled_name_is_refused_since_gateway_and_server_might_read_different_ones():
    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        raw = orjson.dumps(message).replace(b'"name":"echo"', b'"name":"wipe","name":"echo"')
        return await ground.post(raw, ground.headers(message))

    one, ground = played(play)
    assert (one.status, one.json["error"]["code"]) == (400, -32600)
    assert not ground.servers.sent


def test_a_message_too_deep_is_refused():
    async def play(ground):
        deep = b'{"a":' * 200 + b"1" + b"}" * 200
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        raw = orjson.dumps(message).replace(b'"arguments":{}', b'"arguments":' + deep)
        return await ground.post(raw, ground.headers(message))

    one, ground = played(play)
    assert (one.status, one.json["error"]["code"], one.json["id"]) == (400, -32600, 1)
    assert not ground.servers.sent


DENY = policy(server="    tools:\n      wipe: {deny: true}")
OWN = policy(agent="    tools: [up__echo]")


@pytest.mark.parametrize("rules", [DENY, OWN])
def test_a_tool_that_is_not_allowed_is_neither_called_nor_listed(rules):
    one, ground = played(lambda g: g.call("wipe"), rules)
    assert (one.status, one.json["error"]["code"], one.json["id"]) == (403, -31403, 1)
    assert not ground.servers.sent
    one, _ = played(lambda g: g.ask("tools/list"), rules)
    assert [tool["name"] for tool in one.json["result"]["tools"]] == ["echo"]
    assert one.json["result"]["cacheScope"] == "private"


def test_a_server_that_is_not_for_this_agent_does_not_exist_for_it():
    rules = policy(server="    agents: [nobody]")
    one, ground = played(lambda g: g.call("echo"), rules)
    assert (one.status, one.json["error"]["code"]) == (404, -31404)
    assert not ground.servers.sent


def test_a_stream_passes_notification_by_notification_up_to_its_answer():
    progress = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": 1}}

    def server(message, _out):
        return Said(steps=[progress, 0.5, result(message, text("done")), progress])

    one, _ = played(lambda g: g.call("echo"), tools=server)
    assert one.status == 200
    assert one.header(b"content-type") == b"text/event-stream"
    events = [orjson.loads(part[6:]) for part in one.body.split(b"\n\n") if part]
    assert events[0] == progress
    assert events[1]["result"]["content"][0]["text"] == "done"
    assert len(events) == 2
    assert one.complete


def test_a_stream_that_ends_without_an_answer_is_no_clean_end():
    one, _ = played(lambda g: g.call("echo"), tools=lambda *_: Said(steps=[b": hello\n\n"]))
    assert one.broken
    assert b'"code":-31502' in one.body
    assert b'"id":1' in one.body


def test_an_answer_under_a_foreign_id_is_not_the_answer():
    one, _ = played(
        lambda g: g.call("echo"),
        tools=lambda *_: Said({"jsonrpc": "2.0", "id": 999, "result": text("theirs")}),
    )
    assert (one.status, one.json["error"]["code"], one.json["id"]) == (502, -31502, 1)


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (Said(b"boom", status=500), 502, -31502),
        (Said(b"<html>", status=200), 502, -31502),
        (Said(b"[]", status=200), 502, -31502),
        (Said(b"x" * (9 << 20)), 502, -31502),
        (Said(fault=TransportFault("connect", sent="nothing")), 502, -31502),
        (Said({"error": "no"}, status=401), 502, -31502),
    ],
)
def test_what_is_no_message_becomes_an_error_under_the_callers_id(said, status, code):
    one, _ = played(lambda g: g.call("echo"), tools=lambda *_: said)
    assert (one.status, one.json["error"]["code"], one.json["id"]) == (status, code, 1)


def test_a_refusal_after_a_long_wait_is_the_last_event_of_a_stream_kept_alive():
    said = Said({"x": 1}, status=429, headers=[(b"retry-after", b"3")])
    one, ground = played(lambda g: g.call("echo"), tools=lambda *_: said)
    assert one.status == 200
    assert one.complete
    error = messages(one)[-1]
    assert (error["error"]["code"], error["id"]) == (-31502, 1)
    assert len(ground.servers.sent) > 1  # it asked for a wait, and so ran nothing


def test_a_tool_not_declared_repeatable_runs_once_whatever_its_server_says():
    _, ground = played(lambda g: g.call("echo"), tools=lambda *_: Said(b"boom", status=503))
    assert len(ground.servers.sent) == 1


def test_an_error_of_the_tool_passes_with_its_own_code():
    def server(message, _out):
        body = {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": "no"}}
        return Said(body, status=400)

    one, _ = played(lambda g: g.call("echo"), tools=server)
    assert (one.status, one.json["error"]) == (400, {"code": -32602, "message": "no"})


def test_the_servers_concurrency_makes_calls_wait_for_each_other():
    rules = policy(server="    limits: {concurrency: 1}")

    def server(message, _out):
        return Said(result(message, text("x")), wait=1.0)

    async def main():
        async with Ground(rules, Servers(tools=server)) as ground:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            both = [asyncio.ensure_future(ground.call("echo", n=n)) for n in range(2)]
            for one in both:
                assert (await one).status == 200
            return loop.time() - begun

    assert run(main()) >= 2.0


def test_a_client_that_leaves_cancels_its_call():
    def server(message, _out):
        return Said(steps=[30.0, result(message, text("late"))])

    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        one = ground.stage.request(
            "POST", "/mcp/up", ground.headers(message), orjson.dumps(message)
        )
        await asyncio.sleep(1)
        one.leave()
        await one.done()
        return asyncio.get_running_loop().time()

    _, ground = played(play, tools=server)
    assert ground.servers.aborted


# --- telemetry ------------------------------------------------------------------------------------

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize("where", ["header", "meta"])
def test_a_trace_reaches_the_server_in_header_and_meta_wherever_the_caller_wrote_it(where):
    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        headers = ground.headers(message)
        if where == "header":
            headers.append((b"traceparent", TRACE.encode()))
        else:
            message["params"]["_meta"]["traceparent"] = TRACE
        one = await ground.post(message, headers)
        return one, ground.world.ended

    (one, ended), ground = played(play)
    (sent,) = ground.servers.sent
    assert one.status == 200
    assert sent.header(b"traceparent") == TRACE.encode()
    assert sent.message["params"]["_meta"]["traceparent"] == TRACE
    assert len(ended) == 1


def test_a_broken_trace_harms_nothing():
    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        message["params"]["_meta"]["traceparent"] = 'x"\r\n'
        return await ground.post(message, ground.headers(message))

    one, ground = played(play)
    assert one.status == 200
    assert ground.servers.sent[0].header(b"traceparent") is None


def test_a_call_of_a_tool_is_counted_by_server_and_outcome():
    async def play(ground):
        await ground.call("echo")
        await ground.call("wipe")
        return ground.world.metrics.render().decode()

    page, _ = played(play, DENY)
    assert 'tidegate_tool_seconds_count{outcome="ok",server="up"} 1.0' in page
    assert 'tidegate_calls_total{dialect="mcp",model="",outcome="refused",status="403"} 1.0' in page


def test_what_the_gateway_asks_beside_a_call_repeats_no_argument_of_it():
    async def play(ground):
        message = ground.message("tools/call", {"name": "echo", "arguments": {"region": "eu"}})
        return await ground.post(message, [*ground.headers(message), (b"mcp-param-region", b"eu")])

    text_ = policy(server="    tools: {'*': {}}", era="stateless")
    one, ground = played(play, text_)
    assert one.status == 200
    listed, called = ground.servers.sent
    assert (listed.message["method"], called.message["method"]) == ("tools/list", "tools/call")
    assert called.header(b"mcp-param-region") == b"eu"
    assert listed.header(b"mcp-param-region") is None
