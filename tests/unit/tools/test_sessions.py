"""Clients of the session era: ids that any process serves, handshakes, streams, the other era."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.tools import sessions
from tests.fixtures.tool_ground import Ground, OldClient, OldServer, Said, Servers, policy, result
from tests.sim.loop import run

AUTO = policy(era="auto")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BATCHED = "2025-03-26"


def played(play, text=AUTO, old=None):
    """What `play(ground, client)` returns, with the server it spoke to."""
    server = old or OldServer()

    async def main():
        async with Ground(text, Servers(tools=server)) as ground:
            return await play(ground, OldClient(ground)), ground, server

    return run(main())


def test_a_session_begins_works_and_ends_at_the_server_too():
    async def play(_ground, client):
        init = await client.begin()
        ready = await client.tell("notifications/initialized")
        one, two = await client.call("echo"), await client.call("echo")
        headers = client.headers()
        gone = await client.ground.post(b"", headers, path="/mcp/up", method="DELETE")
        after = await client.call("echo")
        return init, ready, one, two, gone, after

    (init, ready, one, two, gone, after), ground, server = played(play)
    assert init.json["result"]["serverInfo"]["name"] == "old"
    assert (ready.status, ready.body) == (202, b"")
    assert two.json["result"]["content"][0]["text"] == "call 2"
    assert one.json["id"] == 7
    assert gone.status == 200
    assert not server.known
    assert (after.status, after.json["error"]["code"]) == (404, -31404)
    # both halves of the handshake are the gateway's, and its client's is swallowed
    assert len(ground.servers.asked("notifications/initialized")) == 1


def test_the_servers_own_session_id_is_not_shown_as_such_and_ours_is_visible_ascii():
    async def play(_ground, client):
        await client.begin()
        return client.session

    ident, *_ = played(play)
    assert ident
    assert ident != "up-1"
    assert all(0x21 <= ord(mark) <= 0x7E for mark in ident)


def test_a_session_is_served_by_a_process_that_did_not_see_it_begin():
    async def main():
        server = OldServer()
        async with Ground(AUTO, Servers(tools=server)) as here:
            client = OldClient(here)
            await client.begin()
            await client.call("echo")
            async with Ground(AUTO, here.servers) as there:
                client.ground = there
                return await client.call("echo"), server.begun

    one, begun = run(main())
    assert one.json["result"]["content"][0]["text"] == "call 2"
    assert begun == 1


@pytest.mark.parametrize("change", ["another's", "another mount", "changed", "empty", "foreign"])
def test_a_session_id_is_its_owners_alone(change):
    text = policy(era="auto", more="").replace(
        "agents:", "  two:\n    url: http://tools.test/mcp\nagents:"
    )

    async def play(_ground, client):
        await client.begin()
        if change == "another's":
            client.key = "tool-2"
        elif change == "another mount":
            client.path = "/mcp/two"
        elif change == "changed":
            client.session = client.session[:-2] + ("AA" if client.session[-2:] != "AA" else "BB")
        elif change == "foreign":
            client.session = "up-1"
        else:
            client.session = ""
        return await client.call("echo")

    one, ground, _ = played(play, text)
    expected = (400, -32600) if change == "empty" else (404, -31404)
    assert (one.status, one.json["error"]["code"], one.json["id"]) == (*expected, 7)
    assert not ground.servers.asked("tools/call")


def test_a_session_that_its_server_lost_is_begun_anew_once_and_nobody_notices():
    async def play(_ground, client):
        await client.begin()
        await client.call("echo")
        server.forget()
        return await client.call("echo"), await client.call("echo")

    server = OldServer()
    (one, two), ground, _ = played(play, old=server)
    assert one.status == two.status == 200
    assert server.begun == 2
    second = ground.servers.asked("initialize")[1].message["params"]
    assert second["capabilities"] == {"sampling": {}}


def test_a_request_of_an_id_that_is_under_way_is_refused():
    async def play(_ground, client):
        await client.begin()
        server.answer = lambda message, _out: Said(result(message, {"content": []}), wait=5.0)
        both = [asyncio.ensure_future(client.call("echo")) for _ in range(2)]
        return [await one for one in both], await client.call("echo")

    server = OldServer()
    (both, later), *_ = played(play, old=server)
    assert sorted(one.status for one in both) == [200, 400]
    assert later.status == 200


def test_leaving_does_not_cancel_and_a_cancellation_does():
    async def play(ground, client):
        await client.begin()
        server.answer = lambda message, _out: Said(steps=[5.0, result(message, {"content": []})])
        raw = {"jsonrpc": "2.0", "id": 3, "method": "tools/call",
               "params": {"name": "echo", "arguments": {}}}  # fmt: skip
        one = ground.stage.request("POST", "/mcp/up", client.headers(), orjson.dumps(raw))
        await asyncio.sleep(1)
        one.leave()
        await one.done()
        heard_out = list(ground.servers.aborted)
        two = asyncio.ensure_future(client.call("echo", ident=4))
        await asyncio.sleep(1)
        told = await client.tell("notifications/cancelled", {"requestId": 4})
        await two
        return heard_out, told.status, two.result()

    server = OldServer()
    (heard_out, told, two), ground, _ = played(play, old=server)
    assert heard_out == []
    assert told == 202
    assert not two.complete
    assert "cancelled" in ground.servers.aborted
    (cancel,) = ground.servers.asked("notifications/cancelled")
    assert cancel.message["params"]["requestId"] == 4


@pytest.mark.parametrize("head", [False, True])
def test_work_of_a_client_that_left_runs_on_for_a_minute_and_no_longer(head):
    async def play(ground, client):
        await client.begin()
        answer = {"steps": [500.0]} if head else {"body": {}, "wait": 500.0}
        server.answer = lambda _message, _out: Said(**answer)
        raw = {"jsonrpc": "2.0", "id": 3, "method": "tools/call",
               "params": {"name": "echo", "arguments": {}}}  # fmt: skip
        one = ground.stage.request("POST", "/mcp/up", client.headers(), orjson.dumps(raw))
        await asyncio.sleep(1)
        left = asyncio.get_running_loop().time()
        one.leave()
        await one.done()
        return asyncio.get_running_loop().time() - left

    server = OldServer()
    seconds, *_ = played(play, old=server)
    assert 59 <= seconds <= 62


def test_an_old_server_is_told_when_a_new_client_leaves_before_its_head():
    async def play(ground, _client):
        await ground.call("echo")
        server.answer = lambda message, _out: Said(result(message, {}), wait=30.0)
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        raw = orjson.dumps(message)
        one = ground.stage.request("POST", "/mcp/up", ground.headers(message), raw)
        await asyncio.sleep(1)
        one.leave()
        await one.done()
        await asyncio.sleep(1)

    server = OldServer()
    _, ground, _ = played(play, old=server)
    call = ground.servers.asked("tools/call")[1]
    (cancel,) = ground.servers.asked("notifications/cancelled")
    assert cancel.message["params"]["requestId"] == call.message["id"]


def test_a_stream_resumes_by_ids_that_name_the_gateway_in_front_of_the_servers_own():
    async def play(ground, client):
        await client.begin()
        note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info"}}
        server.streams = [
            Said(steps=[b"id: 17\nretry: 50\ndata: " + orjson.dumps(note) + b"\n\n"]),
            Said(steps=[b": nothing new\n\n"]),
            Said(steps=[b": nothing new\n\n"]),
        ]
        first = await ground.post(b"", client.headers(), method="GET")
        again = client.headers((b"last-event-id", b"gw1.17"))
        second = await ground.post(b"", again, method="GET")
        foreign = client.headers((b"last-event-id", b"17"))
        third = await ground.post(b"", foreign, method="GET")
        return first, second, third

    server = OldServer()
    (first, second, third), ground, _ = played(play, old=server)
    assert b"id: gw1.17\nretry: 50\n" in first.body
    asked = [one.header(b"last-event-id") for one in ground.servers.sent if one.out.method == "GET"]
    assert asked == [None, b"17", None]
    assert second.status == third.status == 200


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_without_a_session_there_is_nothing_to_get_or_to_delete(method):
    one, *_ = played(lambda ground, client: ground.post(b"", client.headers(), method=method))
    assert (one.status, one.header(b"allow")) == (405, b"POST")


def test_a_batch_of_the_one_revision_that_has_them_passes_policy_message_by_message():
    deny = policy(era="auto", server="    tools:\n      wipe: {deny: true}")

    async def play(ground, client):
        await client.begin(BATCHED)
        call = {"jsonrpc": "2.0", "method": "tools/call"}
        batch = [
            {**call, "id": 5, "params": {"name": "echo", "arguments": {}}},
            {**call, "id": "six", "params": {"name": "wipe", "arguments": {}}},
            {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}},
        ]
        return await ground.post(batch, client.headers()), await ground.post([], client.headers())

    (one, empty), ground, _ = played(play, deny, OldServer(version=BATCHED))
    first, second = one.json
    assert (one.status, first["id"], second["id"]) == (200, 5, "six")
    assert first["result"]["content"]
    assert second["error"]["code"] == -31403
    assert len(ground.servers.asked("tools/call")) == 1
    assert (empty.status, empty.json["error"]["code"]) == (400, -32600)


def test_a_batch_of_a_later_revision_is_refused_even_without_a_version_header():
    async def play(ground, client):
        await client.begin("2025-06-18")
        client.version = BATCHED  # sends no version header
        batch = [{"jsonrpc": "2.0", "id": 5, "method": "ping"}]
        return await ground.post(batch, client.headers())

    one, *_ = played(play)
    assert (one.status, one.json["error"]["code"]) == (400, -32600)


# --- across eras ----------------------------------------------------------------------------------


def test_a_new_client_reaches_an_old_server_over_one_pooled_session():
    async def play(ground, _client):
        found = await ground.ask("server/discover")
        listed = await ground.ask("tools/list")
        calls = [await ground.call("echo") for _ in range(3)]
        other = await ground.call("echo", key="tool-2")
        return found, listed, calls, other

    (found, listed, calls, other), ground, server = played(play)
    assert "2026-07-28" in found.json["result"]["supportedVersions"]
    assert listed.json["result"]["resultType"] == "complete"
    assert (listed.json["result"]["ttlMs"], listed.json["result"]["cacheScope"]) == (0, "private")
    assert calls[2].json["result"]["content"][0]["text"] == "call 3"
    assert calls[2].json["result"]["resultType"] == "complete"
    assert other.json["result"]["content"][0]["text"] == "call 1"
    assert server.begun == 2  # one for each principal
    sent = [one.message["id"] for one in ground.servers.asked("tools/call")]
    assert len(set(sent[:3])) == 3


def test_a_pooled_session_that_was_lost_is_begun_anew_once():
    async def play(ground, _client):
        await ground.call("echo")
        server.forget()
        return await ground.call("echo")

    server = OldServer()
    one, *_ = played(play, old=server)
    assert (one.status, server.begun) == (200, 2)


def test_an_old_server_is_told_when_a_new_client_leaves():
    async def play(ground, _client):
        server.answer = lambda message, _out: Said(steps=[30.0, result(message, {"content": []})])
        message = ground.message("tools/call", {"name": "echo", "arguments": {}})
        raw = orjson.dumps(message)
        one = ground.stage.request("POST", "/mcp/up", ground.headers(message), raw)
        await asyncio.sleep(1)
        one.leave()
        await one.done()
        await asyncio.sleep(1)

    server = OldServer()
    _, ground, _ = played(play, old=server)
    (call,) = ground.servers.asked("tools/call")
    (cancel,) = ground.servers.asked("notifications/cancelled")
    assert cancel.message["params"]["requestId"] == call.message["id"]


def new_server(message, out):
    """A server of the stateless era alone."""
    method = (message or {}).get("method")
    if method == "initialize" or out.method != "POST":
        error = {"code": -32601, "message": "no such method"}
        return Said({"jsonrpc": "2.0", "id": message["id"], "error": error}, status=404)
    value = {"resultType": "complete", "ttlMs": 0, "cacheScope": "public"}
    if method == "server/discover":
        info = {"io.modelcontextprotocol/serverInfo": {"name": "n", "version": "2"}}
        value |= {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "_meta": info}
    elif method == "tools/list":
        region = {"type": "string", "x-mcp-header": "Region"}
        schema = {"type": "object", "properties": {"region": region}}
        value |= {"tools": [{"name": "echo", "inputSchema": schema}]}
    elif method == "tools/call" and message["params"]["name"] == "none":
        error = {"code": -32601, "message": "no such tool"}
        return Said({"jsonrpc": "2.0", "id": message["id"], "error": error}, status=404)
    else:
        value |= {"content": []}
    return Said(result(message, value))


def test_an_old_client_reaches_a_new_server_which_gets_its_meta_and_its_headers():
    async def play(_ground, client):
        init = await client.begin()
        one = await client.call("echo", region="eu")
        bad = await client.call("none", ident=9)
        return init, one, bad

    (init, one, bad), ground, _ = played(play, old=new_server)
    assert init.json["result"]["protocolVersion"] == "2025-06-18"
    assert init.json["result"]["serverInfo"] == {"name": "n", "version": "2"}
    assert one.json["id"] == 7
    sent = ground.servers.asked("tools/call")[0]
    assert (
        sent.message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    )
    assert sent.message["params"]["arguments"] == {"region": "eu"}
    assert sent.header(b"mcp-method") == b"tools/call"
    assert sent.header(b"mcp-name") == b"echo"
    assert sent.header(b"mcp-param-region") == b"eu"
    # a 404 would tell an old client that its session is gone
    assert (bad.status, bad.json["error"]["code"]) == (200, -32601)


def both(message, out):
    """A server of both eras: an envelope of the stateless one makes a request one of it."""
    meta = (message or {}).get("params", {}).get("_meta", {})
    if "io.modelcontextprotocol/protocolVersion" in meta:
        if not any(name == b"mcp-method" for name, _ in out.headers):
            error = {"code": -32020, "message": "The header mcp-method is missing"}
            return Said({"jsonrpc": "2.0", "id": message["id"], "error": error}, status=400)
        return new_server(message, out)
    return both.old(message, out)


@pytest.mark.parametrize("tracing", [False, True])
def test_a_server_of_both_eras_held_to_sessions_gets_no_envelope_of_the_other(tracing):
    both.old = OldServer()
    both.old.answer = lambda message, _out: Said(result(message, {"content": [], "said": message}))

    async def play(ground, _client):
        meta = {"progressToken": "p"} | ({"traceparent": TRACE} if tracing else {})
        message = ground.message("tools/call", {"name": "echo", "arguments": {"a": 1}})
        message["params"]["_meta"] |= meta
        listed = await ground.ask("tools/list")
        return listed, await ground.post(message, ground.headers(message))

    (listed, one), ground, _ = played(play, policy(era="session"), both)
    assert (listed.status, one.status) == (200, 200)
    sent = ground.servers.asked("tools/call")[0].message["params"]
    assert sent["arguments"] == {"a": 1}
    assert sent["_meta"] == {"progressToken": "p"} | ({"traceparent": TRACE} if tracing else {})
    assert one.json["result"]["resultType"] == "complete"


def test_discovery_never_fails_for_a_server_that_is_away():
    def away(_message, _out):
        return Said(b"boom", status=500)

    one, *_ = played(lambda ground, _client: ground.ask("server/discover"), old=away)
    assert one.status == 200
    assert "2026-07-28" in one.json["result"]["supportedVersions"]


def test_what_a_process_remembers_of_sessions_is_bounded_and_idle_ones_end_at_their_server(
    monkeypatch,
):
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)

    async def play(ground, client):
        for _ in range(5):
            client.session = ""
            await client.begin()
        kept = len(ground.world.tools.sessions)
        await asyncio.sleep(sessions.IDLE / 1e6 + 1)
        swept = await ground.world.tools.plane.sweep()
        return kept, swept, len(ground.world.tools.sessions)

    server = OldServer()
    (kept, swept, left), *_ = played(play, old=server)
    assert (kept, swept, left) == (3, 3, 0)
    assert len(server.known) == 2  # those that were forgotten before


def test_a_session_with_an_open_stream_is_not_idle():
    async def play(ground, client):
        await client.begin()
        server.streams = [Said(steps=[1e6])]
        one = ground.stage.request("GET", "/mcp/up", client.headers(), b"")
        await asyncio.sleep(sessions.IDLE / 1e6 + 1)
        swept = await ground.world.tools.plane.sweep()
        one.leave()
        await one.done()
        await asyncio.sleep(sessions.IDLE / 1e6 + 1)
        return swept, await ground.world.tools.plane.sweep()

    server = OldServer()
    (during, after), *_ = played(play, old=server)
    assert (during, after) == (0, 1)


# --- a fleet --------------------------------------------------------------------------------------


class Fleet:
    """Gateways that hear from each other, with the ears of some stopped."""

    def __init__(self, *grounds):
        self.all = [ground.world.tools.sessions for ground in grounds]
        self.told = 0
        self.away = False
        for one in self.all:
            one.on_used = self._told(one)
            one.hears = lambda: not self.away

    def _told(self, speaker):
        def tell(text):
            self.told += 1
            for one in self.all:
                if one is not speaker and not self.away:
                    one.used_elsewhere(text)

        return tell


def in_fleet(play, old=None):
    async def main():
        server = old or OldServer()
        servers = Servers(tools=server)
        async with Ground(AUTO, servers) as here, Ground(AUTO, servers) as there:
            client = OldClient(here)
            await client.begin()
            return await play(here, there, client, Fleet(here, there)), server

    return run(main())


def test_a_session_that_another_gateway_serves_is_not_ended_by_one_that_forgot_it():
    async def play(here, there, client, fleet):
        client.ground = there
        swept = 0
        for _ in range(12):  # two hours, all of them there
            await asyncio.sleep(600)
            assert (await client.call("echo")).status == 200
            swept += await here.world.tools.plane.sweep()
        return swept, fleet.told

    (swept, told), server = in_fleet(play)
    assert swept == 0
    assert server.known == {"up-1": 12}
    assert told <= 12 + 1


def test_an_open_stream_at_one_gateway_keeps_the_session_at_all_of_them():
    async def play(here, there, client, _fleet):
        swept = 0
        server.streams = [Said(steps=[1e6])]
        one = there.stage.request("GET", "/mcp/up", client.headers(), b"")
        for _ in range(60):  # an hour of looking, this gateway always first
            await asyncio.sleep(60)
            swept += await here.world.tools.plane.sweep()
            swept += await there.world.tools.plane.sweep()
        one.leave()
        await one.done()
        return swept

    server = OldServer()
    swept, _ = in_fleet(play, server)
    assert swept == 0
    assert server.known


def test_a_session_that_nobody_uses_is_ended_at_its_server_in_a_fleet_too():
    async def play(here, there, client, _fleet):
        client.ground = there
        await client.call("echo")
        await asyncio.sleep((sessions.IDLE + sessions.TELL) / 1e6 + 1)
        swept = [await one.world.tools.plane.sweep() for one in (here, there)]
        return swept, await client.call("echo")

    (swept, later), server = in_fleet(play)
    assert swept == [1, 1]
    assert later.status == 200  # begun anew behind the same id
    assert server.begun == 2


def test_nothing_is_ended_while_the_others_cannot_be_heard():
    async def play(here, there, client, fleet):
        client.ground = there
        fleet.away = True
        await asyncio.sleep(1500)
        await client.call("echo")
        await asyncio.sleep(1500)
        deaf = await here.world.tools.plane.sweep()
        fleet.away = False
        back = await here.world.tools.plane.sweep()
        await asyncio.sleep((sessions.IDLE + sessions.TELL) / 1e6 + 1)
        return deaf, back, await here.world.tools.plane.sweep()

    (deaf, back, later), _ = in_fleet(play)
    assert (deaf, back, later) == (0, 0, 1)


@pytest.mark.parametrize("head", [False, True])
def test_what_was_under_way_when_the_session_was_ended_elsewhere_is_told_so(head):
    async def play(ground, client):
        await client.begin()
        answer = {"steps": [50.0]} if head else {"body": {}, "wait": 50.0}
        server.answer = lambda _message, _out: Said(**answer)
        one = asyncio.ensure_future(client.call("echo"))
        await asyncio.sleep(1)
        ground.world.tools.sessions.deleted_elsewhere(client.session)
        return await one

    server = OldServer()
    one, ground, _ = played(play, old=server)
    if head:
        assert not one.complete  # it had begun to stream
    else:
        assert (one.status, one.json["error"]["code"]) == (404, -31404)
    assert ground.world.tools.sessions.idle() == []


def test_the_fleet_is_told_before_a_client_hears_that_its_session_has_ended():
    async def play(here, there, client, _fleet):
        async def tell(text):
            await asyncio.sleep(0.2)
            there.world.tools.sessions.deleted_elsewhere(text)

        here.world.tools.sessions.on_deleted = tell
        gone = await here.post(b"", client.headers(), method="DELETE")
        client.ground = there
        return gone.status, (await client.call("echo")).status

    (gone, after), _ = in_fleet(play)
    assert (gone, after) == (200, 404)


def test_frequent_use_is_told_seldom():
    async def play(_here, _there, client, fleet):
        for _ in range(100):
            await asyncio.sleep(6)
            await client.call("echo")
        return fleet.told

    told, _ = in_fleet(play)
    assert 1 <= told <= 3
