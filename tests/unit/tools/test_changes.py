"""Lists that change: streams of the gateway's own, what they tell, and what it listens to."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from tests.fixtures.tool_ground import (
    Ground,
    OldClient,
    OldServer,
    Said,
    Servers,
    echoes,
    messages,
    policy,
    result,
    text,
)
from tests.sim.loop import run
from tests.sim.world import snapshot

TWO = policy(era="stateless").replace(
    "agents:", "  old:\n    url: http://old.test/mcp\n    era: session\nagents:"
)
TOOLS = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
PROMPTS = {"jsonrpc": "2.0", "method": "notifications/prompts/list_changed"}
ANNOUNCES = {kind: {"listChanged": True} for kind in ("tools", "prompts", "resources")}
LISTENS = "io.modelcontextprotocol/subscriptionId"


class New:
    """A server of the stateless era whose subscriptions are scripted, one after the other."""

    def __init__(self, *streams, capabilities=ANNOUNCES, ttl=0):
        self.streams = list(streams)
        self.capabilities = capabilities
        self.ttl = ttl
        self.tools = ["echo", "wipe"]

    def __call__(self, message, out):
        method = (message or {}).get("method")
        value = {"resultType": "complete", "ttlMs": self.ttl, "cacheScope": "public"}
        if method == "server/discover":
            value |= {"supportedVersions": ["2026-07-28"], "capabilities": self.capabilities}
            return Said(result(message, value))
        if method == "subscriptions/listen":
            return Said(steps=self.streams.pop(0) if self.streams else [1e6])
        if method == "tools/list":
            tools = [{"name": name, "inputSchema": {"type": "object"}} for name in self.tools]
            return Said(result(message, value | {"tools": tools}))
        return echoes(message, out)


def played(play, text_=TWO, **by_host):
    async def main():
        async with Ground(text_, Servers(**{"old": OldServer(), "tools": New(), **by_host})) as one:
            found = await play(one)
            await asyncio.sleep(1)
            return found, one

    return run(main())


def subscribed(ground, *kinds, path="/mcp", key="tool-1"):
    """A subscription of the stateless era under way."""
    wants = {f"{kind}ListChanged": True for kind in kinds or ("tools", "prompts", "resources")}
    message = ground.message("subscriptions/listen", {"notifications": wants})
    headers = ground.headers(message, key=key)
    return ground.stage.request("POST", path, headers, orjson.dumps(message))


async def told(exchange, seconds=5.0):
    """What the stream has said after that time; the client leaves."""
    await asyncio.sleep(seconds)
    exchange.leave()
    await exchange.done()
    return messages(exchange)


def swap(ground, text_):
    """Another policy is in force."""
    old, new = ground.snapshot, snapshot(text_, revision=2)
    ground.stage.snapshot = ground.snapshot = new
    ground.world.tools.changes.policy(old, new)


# --- the federation -------------------------------------------------------------------------------


def test_a_subscription_to_all_servers_is_acknowledged_with_what_it_asked_for():
    found, _ = played(lambda g: told(subscribed(g, "tools", "prompts")))
    (first,) = found
    assert first["method"] == "notifications/subscriptions/acknowledged"
    assert first["params"]["notifications"] == {
        "toolsListChanged": True, "promptsListChanged": True,
    }  # fmt: skip
    assert first["params"]["_meta"] == {LISTENS: 1}


def test_what_a_server_announces_reaches_who_subscribed_to_all_under_its_own_id():
    new = New([3.0, TOOLS, PROMPTS, 1e6])
    found, ground = played(lambda g: told(subscribed(g, "tools")), tools=new)
    assert [one["method"] for one in found[1:]] == ["notifications/tools/list_changed"]
    assert found[1]["params"]["_meta"] == {LISTENS: 1}
    (asked,) = ground.servers.asked("subscriptions/listen")
    assert asked.message["params"]["notifications"]["toolsListChanged"] is True
    assert asked.header(b"authorization") == b"Bearer server-credential-secret"


def test_a_session_of_all_servers_has_a_stream_that_tells_what_changed():
    old = OldServer()
    old.streams = [Said(steps=[2.0, TOOLS, 1e6])]

    async def play(ground):
        client = OldClient(ground, path="/mcp")
        await client.begin()
        one = ground.stage.request("GET", "/mcp", client.headers(), b"")
        return await told(one), one

    (found, one), _ = played(play, old=old)
    assert one.status == 200
    assert one.header(b"content-type").startswith(b"text/event-stream")
    assert found == [TOOLS]


def test_however_many_listen_a_server_is_listened_to_once_and_only_while_somebody_does():
    async def play(ground):
        streams = [subscribed(ground, key=f"tool-{n}") for n in range(5)]
        await asyncio.sleep(2)
        while_they_listen = ground.world.tools.changes.listening, ground.servers.open
        for one in streams:
            one.leave()
            await one.done()
        await asyncio.sleep(1)
        return while_they_listen, (ground.world.tools.changes.listening, ground.servers.open)

    (during, after), ground = played(play)
    assert during[0] == 2  # each server once
    assert after == (0, 0)
    assert len(ground.servers.asked("subscriptions/listen")) == 1


def test_a_server_that_announces_nothing_is_not_listened_to():
    found, ground = played(
        lambda g: told(subscribed(g), 30.0), tools=New(capabilities={"tools": {}})
    )
    assert len(found) == 1
    assert not ground.servers.asked("subscriptions/listen")


def test_after_a_stream_of_a_server_broke_its_lists_may_be_others():
    new = New([30.0], [1e6])  # it ends by itself, and is opened again
    found, ground = played(lambda g: told(subscribed(g), 60.0), tools=new)
    methods = {one["method"] for one in found[1:]}
    assert methods == {
        f"notifications/{kind}/list_changed" for kind in ("tools", "prompts", "resources")
    }
    assert len(ground.servers.asked("subscriptions/listen")) == 2


def test_a_server_that_is_away_is_tried_again_with_pauses():
    def away(message, out):
        if (message or {}).get("method") == "server/discover":
            return New()(message, out)
        return Said(b"boom", status=503)

    _, ground = played(lambda g: told(subscribed(g), 100.0), tools=away)
    tries = len(ground.servers.asked("subscriptions/listen"))
    assert 4 <= tries <= 10


def test_a_change_told_inside_an_answer_reaches_listeners_too():
    def server(message, out):
        if (message or {}).get("method") == "tools/call":
            return Said(steps=[TOOLS, result(message, text("done"))])
        return New()(message, out)

    async def play(ground):
        one = subscribed(ground, "tools")
        await asyncio.sleep(1)
        await ground.call("up__echo", path="/mcp")
        return await told(one)

    found, _ = played(play, tools=server)
    assert [one["method"] for one in found[1:]] == ["notifications/tools/list_changed"]


def test_a_reader_that_is_slow_hears_each_kind_once():
    new = New([2.0, *[TOOLS] * 50, 1e6])
    found, _ = played(lambda g: told(subscribed(g)), tools=new)
    assert 1 <= len(found[1:]) < 50


# --- policy ---------------------------------------------------------------------------------------

DENIED = TWO.replace("  old:\n", "    tools: {wipe: {deny: true}}\n  old:\n")
OTHER = TWO.replace("tier: standard", "tier: batch")
LESS = TWO.replace("tier: standard", 'tools: ["up__*"]\n    tier: standard')


@pytest.mark.parametrize("new", [DENIED, LESS], ids=["a tool is denied", "a server is taken away"])
def test_a_policy_that_changes_what_is_listed_is_told(new):
    async def play(ground):
        one = subscribed(ground, "tools")
        await asyncio.sleep(1)
        swap(ground, new)
        return await told(one)

    found, _ = played(play)
    assert [one["method"] for one in found[1:]] == ["notifications/tools/list_changed"]


def test_a_policy_that_opens_a_server_to_an_agent_makes_it_listened_to():
    closed = TWO.replace(
        "    era: session\nagents:", "    era: session\n    agents: [other]\nagents:"
    )

    async def play(ground):
        one = subscribed(ground, "tools")
        await asyncio.sleep(1)
        before = ground.world.tools.changes.listening
        swap(ground, TWO)
        await asyncio.sleep(1)
        return before, ground.world.tools.changes.listening, await told(one)

    (before, after, found), _ = played(play, closed)
    assert (before, after) == (1, 2)
    assert [one["method"] for one in found[1:]] == ["notifications/tools/list_changed"]


def test_a_policy_that_changes_nothing_of_it_is_not_told():
    async def play(ground):
        one = subscribed(ground)
        await asyncio.sleep(1)
        swap(ground, OTHER)
        return await told(one)

    found, _ = played(play)
    assert len(found) == 1


def test_a_servers_own_stream_carries_news_of_policy_between_its_events():
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info"}}
    new = New([1.0, note, 5.0, note, 1e6])

    async def play(ground):
        one = subscribed(ground, "tools", path="/mcp/up")
        await asyncio.sleep(3)
        swap(ground, DENIED)
        return await told(one, 10.0)

    found, _ = played(play, tools=new)
    assert [one["method"].split("/")[1] for one in found] == ["message", "tools", "message"]
    assert found[1]["params"]["_meta"] == {LISTENS: 1}


# --- across eras ----------------------------------------------------------------------------------


def test_a_new_client_hears_of_an_old_servers_changes():
    old = OldServer()
    old.streams = [Said(steps=[2.0, TOOLS, PROMPTS, 1e6])]
    found, _ = played(lambda g: told(subscribed(g, "tools", path="/mcp/old")), old=old)
    assert [one["method"] for one in found[1:]] == ["notifications/tools/list_changed"]


def test_an_old_client_hears_of_a_new_servers_changes():
    def server(message, out):
        if (message or {}).get("method") == "initialize":
            error = {"code": -32601, "message": "no such method"}
            return Said({"jsonrpc": "2.0", "id": message["id"], "error": error}, status=404)
        return new(message, out)

    new = New([2.0, TOOLS, 1e6])

    async def play(ground):
        client = OldClient(ground)
        await client.begin()
        one = ground.stage.request("GET", "/mcp/up", client.headers(), b"")
        return await told(one)

    found, _ = played(play, text_=policy(era="auto"), tools=server)
    assert found == [TOOLS]


# --- lists that may be remembered -----------------------------------------------------------------


def test_a_list_is_asked_for_again_only_when_its_server_says_so():
    async def play(ground):
        answers = []
        for pause in (0, 2, 4):
            await asyncio.sleep(pause)
            answers.append(await ground.ask("tools/list"))
        return answers

    (first, second, third), ground = played(play, tools=New(ttl=5_000))
    assert len(ground.servers.asked("tools/list")) == 2
    lasts = [one.json["result"]["ttlMs"] for one in (first, second, third)]
    assert lasts == [5000, 3000, 5000]
    assert {one.json["result"]["cacheScope"] for one in (first, second)} == {"private"}
    assert second.json["result"]["tools"] == first.json["result"]["tools"]
    assert second.json["id"] == 2


def test_a_remembered_list_is_one_identitys_alone():
    async def play(ground):
        await ground.ask("tools/list")
        return await ground.ask("tools/list", key="tool-2")

    _, ground = played(play, tools=New(ttl=60_000))
    assert len(ground.servers.asked("tools/list")) == 2


def test_a_list_of_a_session_of_its_own_is_not_remembered():
    old = OldServer()
    value = {"tools": [], "ttlMs": 60_000}
    old.answer = lambda message, _out: Said(result(message, value))

    async def play(ground):
        client = OldClient(ground)
        await client.begin()
        return [await client.ask("tools/list", ident=n) for n in (1, 2)]

    _, ground = played(play, text_=policy(era="auto"), tools=old)
    assert len(ground.servers.asked("tools/list")) == 2


def test_a_remembered_list_obeys_the_policy_in_force():
    async def play(ground):
        await ground.ask("tools/list")
        swap(ground, DENIED)
        return await ground.ask("tools/list")

    one, ground = played(play, tools=New(ttl=60_000))
    assert len(ground.servers.asked("tools/list")) == 1
    assert [tool["name"] for tool in one.json["result"]["tools"]] == ["echo"]


@pytest.mark.parametrize("path", ["/mcp/up", "/mcp"])
def test_a_list_that_changed_is_asked_for_again(path):
    def server(message, out):
        if (message or {}).get("method") == "tools/call":
            return Said(steps=[TOOLS, result(message, text("done"))])
        return new(message, out)

    new = New(ttl=60_000)

    async def play(ground):
        await ground.ask("tools/list", path=path)
        new.tools.append("more")
        await ground.call("echo")
        return await ground.ask("tools/list", path=path)

    one, _ = played(play, tools=server)
    assert "more" in str([tool["name"] for tool in one.json["result"]["tools"]])


def test_the_list_of_all_servers_lasts_as_long_as_the_first_of_theirs_to_end():
    three = TWO.replace(
        "  old:\n    url: http://old.test/mcp\n    era: session\n",
        "  new:\n    url: http://new.test/mcp\n    era: stateless\n",
    )

    async def play(ground):
        first = await ground.ask("tools/list", path="/mcp")
        await asyncio.sleep(1)
        return first, await ground.ask("tools/list", path="/mcp")

    (first, second), ground = played(play, three, tools=New(ttl=9_000), new=New(ttl=4_000))
    assert [one.json["result"]["ttlMs"] for one in (first, second)] == [4000, 3000]
    assert len(ground.servers.asked("tools/list")) == 2


def test_a_list_that_lacks_a_server_is_not_to_be_remembered():
    one, _ = played(
        lambda g: g.ask("tools/list", path="/mcp"),
        tools=New(ttl=9_000), old=lambda *_: Said(b"boom", status=500),
    )  # fmt: skip
    assert one.json["result"]["ttlMs"] == 0
    assert one.json["result"]["_meta"]["tidegate/servers"]


@pytest.mark.parametrize("ttl", [0, -5, True, "60", None, float("nan")])
def test_a_lifetime_that_is_none_is_not_believed(ttl):
    new = New(ttl=ttl)

    async def play(ground):
        await ground.ask("tools/list")
        return await ground.ask("tools/list")

    _, ground = played(play, tools=new)
    assert len(ground.servers.asked("tools/list")) == 2


def test_a_discovery_is_asked_for_again_only_when_its_server_says_so():
    async def play(ground):
        answers = []
        for pause in (0, 2, 4):
            await asyncio.sleep(pause)
            answers.append(await ground.ask("server/discover"))
        return answers

    answers, ground = played(play, policy(era="stateless"), tools=New(ttl=5_000))
    assert [one.json["result"]["ttlMs"] for one in answers] == [5000, 3000, 5000]
    assert len(ground.servers.asked("server/discover")) == 2


# --- what may go wrong ----------------------------------------------------------------------------


def test_a_subscription_at_a_server_without_them_hears_of_policy_alone():
    def server(message, out):
        if (message or {}).get("method") == "subscriptions/listen":
            error = {"code": -32601, "message": "no such method"}
            return Said({"jsonrpc": "2.0", "id": message["id"], "error": error}, status=404)
        return New()(message, out)

    async def play(ground):
        one = subscribed(ground, "tools", path="/mcp/up")
        await asyncio.sleep(1)
        swap(ground, DENIED)
        return await told(one)

    found, _ = played(play, tools=server)
    assert [one["method"].split("/")[1] for one in found] == ["subscriptions", "tools"]


def test_a_server_that_moved_is_heard_where_it_is():
    async def play(ground):
        one = subscribed(ground, "tools")
        await asyncio.sleep(1)
        swap(ground, TWO.replace("http://tools.test/mcp", "http://new.test/mcp"))
        return await told(one)

    new = New([1.0, TOOLS, 1e6])
    found, ground = played(play, new=new)
    asked = [one.out.base_url for one in ground.servers.asked("subscriptions/listen")]
    assert asked == ["http://tools.test", "http://new.test"]
    assert [one["method"] for one in found[1:]].count("notifications/tools/list_changed") >= 1


def test_a_defect_while_listening_is_told_and_ends_nothing():
    faults = []

    def server(message, out):
        if (message or {}).get("method") == "subscriptions/listen":
            raise ZeroDivisionError
        return New()(message, out)

    async def play(ground):
        ground.world.tools.changes.on_fault = faults.append
        return await told(subscribed(ground, "tools"))

    found, _ = played(play, tools=server)
    assert len(found) == 1
    assert "ZeroDivisionError" in faults[0]


def test_a_stream_whose_call_was_pinned_to_the_policy_before_hears_of_the_change():
    async def play(ground):
        first = subscribed(ground, "tools")
        await asyncio.sleep(1)
        old = ground.snapshot
        swap(ground, DENIED)
        ground.stage.snapshot = old  # as if it had come a moment before
        late = subscribed(ground, "tools")
        found = await told(late)
        first.leave()
        await first.done()
        return found

    found, _ = played(play)
    assert [one["method"] for one in found[1:]] == ["notifications/tools/list_changed"]


@pytest.mark.parametrize("path", ["/mcp", "/mcp/up", "/mcp/old"])
def test_a_process_that_stops_ends_subscriptions_with_their_result(path):
    async def play(ground):
        one = subscribed(ground, path=path)
        await asyncio.sleep(1)
        ground.world.tools.changes.end()
        return await one.done()

    one, ground = played(play)
    assert one.complete
    assert messages(one)[-1] == {
        "jsonrpc": "2.0", "id": 1,
        "result": {"resultType": "complete", "_meta": {LISTENS: 1}},
    }  # fmt: skip
    assert ground.world.tools.changes.listening == 0


@pytest.mark.parametrize("path", ["/mcp", "/mcp/old"])
def test_a_process_that_stops_ends_streams_of_sessions_cleanly(path):
    old = OldServer()
    old.streams = [Said(steps=[1e6])]

    async def play(ground):
        client = OldClient(ground, path=path)
        await client.begin()
        one = ground.stage.request("GET", path, client.headers(), b"")
        await asyncio.sleep(1)
        ground.world.tools.changes.end()
        return await one.done()

    one, _ = played(play, old=old)
    assert one.complete
    assert messages(one) == []
