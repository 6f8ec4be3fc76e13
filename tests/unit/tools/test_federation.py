"""Many servers behind one endpoint: names, lists that stay partial, routes back, identities."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.tools import federation
from gateway.upstream import TransportFault
from tests.fixtures.tool_ground import (
    Ground,
    OldClient,
    OldServer,
    Said,
    Servers,
    echoes,
    policy,
    result,
)
from tests.sim.loop import run

TWO = policy(era="stateless").replace(
    "agents:", "  old:\n    url: http://old.test/mcp\n    era: session\nagents:"
)


def played(play, text=TWO, **by_host):
    async def main():
        async with Ground(text, Servers(**{"old": OldServer(), **by_host})) as ground:
            return await play(ground), ground

    return run(main())


def names(exchange):
    return [tool["name"] for tool in exchange.json["result"]["tools"]]


def test_tools_of_all_servers_stand_in_one_list_in_the_order_of_the_policy():
    one, _ = played(lambda g: g.ask("tools/list", path="/mcp"))
    assert names(one) == ["up__echo", "up__wipe", "old__echo", "old__wipe"]
    assert one.json["result"]["cacheScope"] == "private"
    assert "_meta" not in one.json["result"]


def test_a_tool_is_called_by_its_public_name_and_its_server_hears_its_own():
    async def play(ground):
        return await ground.call("up__echo", path="/mcp", a=1), await ground.call(
            "old__echo", path="/mcp"
        )

    (new, old), ground = played(play)
    assert new.json["result"]["content"][0]["text"] == '{"a":1}'
    assert old.json["result"]["content"][0]["text"] == "call 1"
    sent = ground.servers.asked("tools/call")
    assert [one.message["params"]["name"] for one in sent] == ["echo", "echo"]
    assert sent[0].header(b"mcp-name") == b"echo"


def test_a_name_of_no_server_is_invalid_params():
    async def play(ground):
        return [await ground.call(name, path="/mcp") for name in ("echo", "gone__echo", "up_echo")]

    answers, ground = played(play)
    assert [(one.status, one.json["error"]["code"]) for one in answers] == [(400, -32602)] * 3
    assert not ground.servers.asked("tools/call")


FAILURES = {
    "refused": Said(fault=TransportFault("connect", sent="nothing")),
    "answers 500": Said(b"boom", status=500),
    "hangs": Said(b"", wait=600.0),
    "no JSON": Said(b"<html>"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_dead_server_is_missing_from_the_list_and_named_and_the_rest_keeps_its_speed(failure):
    async def play(ground):
        loop = asyncio.get_running_loop()
        began = loop.time()
        init = await OldClient(ground, path="/mcp").begin()
        listed = await ground.ask("tools/list", path="/mcp")
        first = loop.time() - began
        again = await ground.ask("tools/list", path="/mcp")
        second = loop.time() - began - first
        call = await ground.call("up__echo", path="/mcp")
        dead = await ground.call("old__echo", path="/mcp", key="tool-2")
        return init, listed, again, call, dead, first, second

    (init, listed, again, call, dead, first, second), _ = played(
        play, old=lambda _message, _out: failure
    )
    assert init.status == call.status == 200
    assert names(listed) == names(again) == ["up__echo", "up__wipe"]
    assert list(listed.json["result"]["_meta"][federation.STATUS]) == ["old"]
    assert first <= 6.0
    assert second == 0.0
    assert dead.status in (502, 504)
    assert dead.json["error"]["code"] in (-31502, -31504)


def test_lists_and_calls_obey_the_same_patterns_of_one_identity():
    own = TWO.replace("agents:\n  load:", "agents:\n  load:\n    tools: [old__e*]")

    async def play(ground):
        listed = await ground.ask("tools/list", path="/mcp")
        calls = [
            await ground.call(name, path="/mcp") for name in ("old__echo", "old__wipe", "up__echo")
        ]
        return listed, calls

    (listed, calls), _ = played(play, own)
    assert names(listed) == ["old__echo"]
    assert [one.status for one in calls] == [200, 403, 400]


def test_an_old_client_uses_the_federation_too():
    async def play(ground):
        client = OldClient(ground, path="/mcp")
        await client.begin()
        listed = await client.ask("tools/list")
        call = await client.call("up__echo", a=2)
        unknown = await client.ask("elicitation/create")
        return listed, call, unknown

    (listed, call, unknown), _ = played(play)
    assert names(listed)[0] == "up__echo"
    assert call.json["result"]["content"][0]["text"] == '{"a":2}'
    assert (unknown.status, unknown.json["error"]["code"]) == (200, -32601)


def test_a_long_name_ends_in_a_hash_and_finds_its_tool():
    long = "a_very_long_name_of_a_tool_that_no_model_api_would_ever_bear_in_full"

    def server(message, out):
        if message["method"] == "tools/list":
            tools = [{"name": long, "inputSchema": {"type": "object"}}]
            return Said(result(message, {"tools": tools, "resultType": "complete"}))
        return echoes(message, out)

    async def play(ground):
        listed = await ground.ask("tools/list", path="/mcp")
        return names(listed)[0], await ground.call(names(listed)[0], path="/mcp")

    (name, one), ground = played(play, tools=server)
    assert len(name) == federation.LONGEST
    assert name.startswith("up__a_very_long")
    assert one.status == 200
    (sent,) = ground.servers.asked("tools/call")
    assert sent.message["params"]["name"] == long


def test_a_resource_is_read_from_the_server_that_lists_it():
    def server(message, out):
        if message["method"] == "resources/list":
            found = [{"uri": "test://a", "name": "a"}]
            return Said(result(message, {"resources": found, "resultType": "complete"}))
        return Said(result(message, {"contents": [], "resultType": "complete"}))

    async def play(ground):
        read = await ground.ask("resources/read", {"uri": "test://a"}, path="/mcp")
        missing = await ground.ask("resources/read", {"uri": "test://b"}, path="/mcp")
        return read, missing

    (read, missing), ground = played(play, tools=server)
    assert read.status == 200
    assert (missing.status, missing.json["error"]["code"]) == (400, -32602)
    assert ground.servers.asked("resources/read")[0].header(b"mcp-name") == b"test://a"


def test_pages_of_a_server_are_followed_and_a_foreign_cursor_is_refused():
    def server(message, out):
        cursor = message["params"].get("cursor")
        tools = [{"name": f"t{cursor or 0}", "inputSchema": {}}]
        more = {} if cursor == "2" else {"nextCursor": "1" if cursor is None else "2"}
        return Said(result(message, {"tools": tools, "resultType": "complete", **more}))

    async def play(ground):
        whole = await ground.ask("tools/list", path="/mcp")
        empty = await ground.ask("tools/list", {"cursor": ""}, path="/mcp")
        foreign = await ground.ask("tools/list", {"cursor": "x"}, path="/mcp")
        return whole, empty, foreign

    (whole, empty, foreign), _ = played(play, policy(), tools=server)
    assert names(whole) == names(empty) == ["up__t0", "up__t1", "up__t2"]
    assert (foreign.status, foreign.json["error"]["code"]) == (400, -32602)


def test_a_listener_hears_at_once_that_it_listens_and_lists_are_never_held_up_by_it():
    async def play(ground):
        message = ground.message(
            "subscriptions/listen", {"notifications": {"toolsListChanged": True}}
        )
        raw, headers = orjson.dumps(message), ground.headers(message)
        one = ground.stage.request("POST", "/mcp", headers, raw)
        await asyncio.sleep(40)
        standing = ground.world.tools.streams.open
        one.leave()
        await one.done()
        return one, standing, ground.world.tools.streams.open

    (one, standing, left), _ = played(play)
    first = orjson.loads(one.body.split(b"\n\n")[0][6:])
    assert first["method"] == "notifications/subscriptions/acknowledged"
    assert first["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == 1
    assert one.body.endswith(b":\n\n")
    assert (standing, left) == (1, 0)
