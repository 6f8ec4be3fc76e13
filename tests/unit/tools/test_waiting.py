"""A tool call that waits is kept alive in the form its client can take, and only then."""

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
    messages,
    policy,
    result,
    text,
)
from tests.sim.loop import run

ONE_AT_A_TIME = policy(server="    limits: {concurrency: 1, max_wait: 100s}", era="stateless")


def slow(seconds):
    """A server whose tools take so long."""

    def server(message, _out):
        return Said(result(message, text("done")), wait=seconds)

    return server


def asked(ground, *, accept=b"application/json, text/event-stream", **meta):
    """One call under way."""
    message = ground.message("tools/call", {"name": "echo", "arguments": {}})
    message["params"]["_meta"] |= meta
    headers = [
        (name, accept if name == b"accept" else value) for name, value in ground.headers(message)
    ]
    return ground.stage.request("POST", "/mcp/up", headers, orjson.dumps(message))


def queued(text_=ONE_AT_A_TIME, *, seconds=25.0, **wish):
    """The second of two calls to a server that serves one at a time; its answer."""

    async def main():
        async with Ground(text_, Servers(tools=slow(seconds))) as ground:
            first = asked(ground)
            await asyncio.sleep(1)
            second = asked(ground, **wish)
            await first.done()
            return await second.done()

    return run(main())


def progress(exchange):
    return [one["params"] for one in messages(exchange) if "method" in one]


def test_a_queued_call_is_kept_alive_by_comments_and_its_answer_is_the_one_event():
    one = queued()
    assert one.status == 200
    assert one.header(b"content-type").startswith(b"text/event-stream")
    assert one.body.startswith(b": queued\n")
    (answer,) = messages(one)
    assert answer["result"]["content"] == [{"type": "text", "text": "done"}]
    assert answer["id"] == 2
    assert one.complete


def test_progress_rises_under_the_clients_own_token_and_stays_below_any_of_the_tools():
    one = queued(progressToken="p-1")
    told = progress(one)
    assert [params["progressToken"] for params in told] == ["p-1"] * len(told)
    steps = [params["progress"] for params in told]
    assert len(steps) >= 3
    assert steps == sorted(set(steps))
    assert steps[-1] < 0
    assert messages(one)[-1]["result"]["content"]


@pytest.mark.parametrize("token", [7, 0, 'quo"te', "ü"])
def test_a_token_is_given_back_as_the_value_it_was(token):
    assert progress(queued(progressToken=token))[0]["progressToken"] == token


@pytest.mark.parametrize("token", [True, None, [1], 1.5])
def test_what_is_no_token_is_answered_with_comments(token):
    one = queued(progressToken=token)
    assert progress(one) == []
    assert one.body.startswith(b": queued\n")


@pytest.mark.parametrize("accept", [b"application/json", b"*/*"])
def test_a_client_that_takes_no_stream_waits_in_silence_for_its_json(accept):
    one = queued(accept=accept, progressToken="p")
    assert one.header(b"content-type") == b"application/json"
    assert one.json["result"]["content"]


def test_a_call_that_is_answered_soon_is_never_made_a_stream():
    async def main():
        async with Ground(policy(), Servers(tools=slow(5.0))) as ground:
            return await asked(ground, progressToken="p").done()

    one = run(main())
    assert one.header(b"content-type") == b"application/json"
    assert one.json["result"]["content"]


def test_a_tool_that_streams_goes_on_in_the_stream_that_was_kept_alive():
    def server(message, _out):
        note = {"jsonrpc": "2.0", "method": "notifications/progress",
                "params": {"progressToken": "p", "progress": 0}}  # fmt: skip
        return Said(steps=[note, 3.0, result(message, text("done"))], wait=20.0)

    async def main():
        async with Ground(policy(), Servers(tools=server)) as ground:
            return await asked(ground, progressToken="p").done()

    one = run(main())
    steps = [params["progress"] for params in progress(one)]
    assert steps == [-1.0, 0]
    assert messages(one)[-1]["result"]["content"]


def test_a_client_of_the_session_era_is_kept_alive_too():
    old = OldServer()
    old.answer = lambda message, _out: Said(result(message, {"content": []}), wait=25.0)

    async def main():
        async with Ground(policy(era="auto"), Servers(tools=old)) as ground:
            client = OldClient(ground)
            await client.begin()
            params = {"name": "echo", "arguments": {}, "_meta": {"progressToken": 5}}
            return await client.ask("tools/call", params, ident="a")

    one = run(main())
    assert [params["progressToken"] for params in progress(one)] == [5, 5]
    assert messages(one)[-1] == {"jsonrpc": "2.0", "id": "a", "result": {"content": []}}


def test_a_slow_handshake_stays_silent_because_its_head_names_the_session():
    old = OldServer()

    def late(message, out):
        said = old(message, out)
        if message and message.get("method") == "initialize":
            said.wait = 9.0
        return said

    async def main():
        async with Ground(policy(era="auto"), Servers(tools=late)) as ground:
            client = OldClient(ground)
            return await client.begin()

    one = run(main())
    assert one.header(b"mcp-session-id")
    assert one.header(b"content-type") == b"application/json"


def test_a_client_that_leaves_while_it_is_kept_alive_gives_its_place_back():
    async def main():
        async with Ground(ONE_AT_A_TIME, Servers(tools=slow(40.0))) as ground:
            first = asked(ground)
            await asyncio.sleep(1)
            second = asked(ground, progressToken="p")
            await asyncio.sleep(20)
            second.leave()
            await second.done()
            await first.done()
            return ground, second

    ground, second = run(main())
    assert second.chunks  # it had been kept alive
    assert len(ground.servers.sent) == 1


def test_a_denial_as_a_result_follows_the_comments():
    text_ = policy(
        server="    limits: {concurrency: 1, max_wait: 20s}\n    tools: {echo: {denial: result}}",
        era="stateless",
    )
    one = queued(text_, seconds=60.0)
    (answer,) = messages(one)
    assert answer["result"]["isError"] is True
    assert one.body.startswith(b": queued\n")
