"""What strangers, pages and servers may not do to the tool plane."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.upstream import TransportFault
from tests.fixtures.tool_ground import Ground, Said, Servers, policy, result, text
from tests.sim.loop import run

KNOWN = b"/.well-known/oauth-protected-resource"
SIGNED = policy(
    more="  signed: {jwt: {issuer: idp}}\nissuers:\n"
    "  idp: {issuer: https://idp.test, audience: gw, jwks_file: /nowhere/keys.json}\n"
)


def played(play, rules=None, **by_host):
    async def main():
        async with Ground(rules, Servers(**by_host)) as ground:
            return await play(ground), ground

    return run(main())


async def initialize(ground, *headers):
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize",
               "params": {"protocolVersion": "2025-06-18", "capabilities": {}}}  # fmt: skip
    pairs = [(b"authorization", b"Bearer tool-1"), (b"content-type", b"application/json")]
    return await ground.post(message, [*pairs, *headers])


@pytest.mark.parametrize(
    "origin",
    [
        b"http://evil.test", b"null", b"", b"http://127.0.0.1.evil.test", b"http://localhost@evil.test",
        b"http://localhost:8484.evil.test", b"file://", b"http://localhost:9999",
        b"http://localhost:8484/", b"HTTP://LOCALHOST:8484\x00",
    ],
)  # fmt: skip
def test_a_page_of_a_foreign_origin_is_refused_and_no_server_hears_of_it(origin):
    one, ground = played(lambda g: initialize(g, (b"origin", origin)))
    assert one.status == 403
    assert one.json["error"]["code"] == -31403
    assert not ground.servers.sent


@pytest.mark.parametrize(
    "host",
    [b"evil.test", b"127.0.0.1.evil.test", b"localhost@evil.test", b"localhost:99999", b"[::2]"],
)
def test_a_name_that_is_not_ours_is_refused_on_the_tool_plane_too(host):
    one, ground = played(lambda g: initialize(g, (b"host", host)))
    assert one.status == 400
    assert not ground.servers.sent


def test_a_page_of_this_very_listener_is_welcome():
    one, _ = played(lambda g: initialize(g, (b"origin", b"http://localhost:8484")))
    assert one.status == 200


def test_a_stranger_is_told_where_to_get_a_token_where_there_is_one():
    async def play(ground):
        message = ground.message("tools/list")
        headers = [pair for pair in ground.headers(message) if pair[0] != b"authorization"]
        refused = await ground.post(message, headers)
        found = await ground.stage.ask("GET", (KNOWN + b"/mcp/up").decode(), [], b"")
        unknown = await ground.stage.ask("GET", (KNOWN + b"/mcp/nobody").decode(), [], b"")
        return refused, found, unknown

    (refused, found, unknown), ground = played(play, SIGNED)
    assert refused.status == 401
    assert refused.header(b"www-authenticate") == (
        b'Bearer resource_metadata="http://localhost:8484' + KNOWN + b'/mcp/up"'
    )
    assert found.json == {
        "resource": "http://localhost:8484/mcp/up",
        "authorization_servers": ["https://idp.test"],
        "bearer_methods_supported": ["header"],
        "resource_name": "Tidegate /mcp/up",
    }
    assert unknown.status == 404
    assert not ground.servers.sent


def test_without_signers_nobody_is_sent_to_sign_in():
    async def play(ground):
        message = ground.message("tools/list")
        headers = [pair for pair in ground.headers(message) if pair[0] != b"authorization"]
        refused = await ground.post(message, headers)
        return refused, await ground.stage.ask("GET", (KNOWN + b"/mcp").decode(), [], b"")

    (refused, found), _ = played(play)
    assert refused.header(b"www-authenticate") == b'Bearer realm="Tidegate"'
    assert found.status == 404


def test_a_server_cannot_send_us_elsewhere():
    moved = Said(b"", status=302, headers=[(b"location", b"http://169.254.169.254/latest")])
    one, ground = played(lambda g: g.call("echo"), tools=lambda *_: moved)
    assert one.status == 502
    assert {sent.out.base_url for sent in ground.servers.sent} == {"http://tools.test"}


def test_no_credential_of_a_server_stands_in_any_answer():
    def server(message, out):
        heard = next(value for name, value in out.headers if name == b"authorization")
        return Said(heard, status=500)

    one, _ = played(lambda g: g.call("echo"), tools=server)
    assert b"server-credential-secret" not in one.body
    assert not any(b"server-credential-secret" in value for _, value in one.headers)


HOSTILE = {
    "a line without an end": Said(steps=[b"data: " + b"x" * (5 << 20), b"x" * (5 << 20)]),
    "an event that is no JSON": Said(steps=[b"data: {\n\n"]),
    "a list": Said(steps=[b"data: [1]\n\n"]),
    "a result that is none": Said(steps=[b'data: {"jsonrpc":"2.0","id":1,"result":7}\n\n']),
    "silence": Said(steps=[1e5]),
    "a break": Said(steps=[TransportFault("cut", sent="all")]),
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_stream_ends_in_an_error_under_the_callers_id(said):
    one, ground = played(lambda g: g.call("echo"), tools=lambda *_: said)
    assert b'"id":1' in one.body
    assert b'"code":-315' in one.body
    assert ground.servers.open == 0


def test_messages_behind_the_answer_go_no_further():
    def server(message, _out):
        evil = {"jsonrpc": "2.0", "id": 99, "method": "sampling/createMessage", "params": {}}
        return Said(steps=[result(message, text("ok")), evil, result(message, text("twice"))])

    one, _ = played(lambda g: g.call("echo"), tools=server)
    assert one.body.count(b"data: ") == 1
    assert one.complete


@pytest.mark.parametrize("body", [b"", b"{", b"7", b'"x"', b"{}", b'{"jsonrpc":"1.0","id":1}'])
def test_a_body_that_is_no_message_is_refused_in_json_rpc(body):
    async def play(ground):
        message = ground.message("tools/list")
        return await ground.post(body, ground.headers(message))

    one, ground = played(play)
    assert one.status == 400
    assert one.json["error"]["code"] in (-32700, -32600)
    assert not ground.servers.sent


def test_many_standing_streams_of_one_identity_are_bounded(monkeypatch):
    monkeypatch.setattr("gateway.tools.streams.MOST_STREAMS", 1)

    async def play(ground):
        message = ground.message("subscriptions/listen", {"notifications": {}})
        raw, headers = orjson.dumps(message), ground.headers(message)
        one = ground.stage.request("POST", "/mcp", headers, raw)
        await asyncio.sleep(1)
        two = await ground.post(raw, headers, path="/mcp")
        one.leave()
        await one.done()
        return two

    two, _ = played(play)
    assert (two.status, two.json["error"]["code"]) == (429, -31429)
