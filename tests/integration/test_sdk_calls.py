"""The real SDKs through the real process: served at once, after a wait, or refused.

Requests are counted on the wire on both sides, and answers compared byte by byte between them, so
that neither the SDK's reading nor the gateway's books are believed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import anthropic
import openai
import pytest

from tests.integration.gateway import (
    Exchange,
    Stage,
    World,
    ask,
    by_day,
    policy,
    request,
    staged,
    until,
)

pytestmark = pytest.mark.integration

HOLD = 5.0
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NARROW = {"provider": "emulator", "limits": {"concurrency": 1}}
POLICY = policy(
    pools={
        "narrow": NARROW,
        "rare": NARROW,
        "tiny": {"provider": "emulator", "limits": {"tpm": 200}},
    },
    models={
        **{
            f"{family}-{pool}": {"provider": "emulator", "pool": pool}
            for family in ("gpt", "claude", "text-embedding", "plug")
            for pool in ("narrow", "rare", "tiny")
        },
    },
    tiers={
        "interactive": {"number": 1, "keepalive": {"after": "1s", "every": "1s"}},
        "batch": {"number": 3, "max_wait": "500ms"},
    },
    agents={
        "awake": {"keys": [{"key": "${AWAKE_KEY}"}], "tier": "interactive"},
        "brief": {"keys": [{"key": "${BRIEF_KEY}"}], "tier": "interactive", "max_wait": "2500ms"},
        "hasty": {"keys": [{"key": "${HASTY_KEY}"}], "tier": "batch"},
        "narrowed": {"keys": [{"key": "${NARROWED_KEY}"}], "models": ["gpt-tiny"]},
        "spent": {
            "keys": [{"key": "${SPENT_KEY}"}],
            "budgets": [{"tokens": 1_000, "per": "day", "utc_offset": by_day()}],
        },
    },
)
KEYS = {f"{name.upper()}_KEY": f"tg-{name}-0123456789"
        for name in ("awake", "brief", "hasty", "narrowed", "spent")}  # fmt: skip


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    with staged(POLICY, keys=KEYS) as made:
        yield made


class Clients:
    """Both SDKs as one agent, on the edge's tap."""

    def __init__(self, world: World, agent: str = "tester", **options: Any) -> None:
        key = world.gateway.keys[f"{agent.upper()}_KEY"]
        base = f"http://127.0.0.1:{world.edge.port}"
        self.world = world
        self.gpt = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, **options)
        self.claude = anthropic.AsyncAnthropic(base_url=base, api_key=key, **options)

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gpt.close()
        await self.claude.close()


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# --- one case per API: asks in the SDK's own words, and reads what it gives ----------------------


async def chat(use: Clients, pool: str, mark: str) -> None:
    got = await use.gpt.chat.completions.create(model=f"gpt-{pool}", messages=said(mark))
    assert got.choices[0].message.content
    assert got.usage is not None
    assert got.usage.prompt_tokens > 0


async def chat_stream(use: Clients, pool: str, mark: str) -> None:
    stream = await use.gpt.chat.completions.create(
        model=f"gpt-{pool}", messages=said(mark), stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks), "nobody asked for usage"


async def chat_stream_with_usage(use: Clients, pool: str, mark: str) -> None:
    stream = await use.gpt.chat.completions.create(
        model=f"gpt-{pool}", messages=said(mark), stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


async def chat_tools(use: Clients, pool: str, mark: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    messages = said(mark)
    first = await use.gpt.chat.completions.create(
        model=f"gpt-{pool}", messages=messages, tools=tools, tool_choice="required"
    )
    [call, *_] = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    messages += [
        first.choices[0].message.model_dump(exclude_none=True),
        *[
            {"role": "tool", "tool_call_id": one.id, "content": "rain"}
            for one in first.choices[0].message.tool_calls or []
        ],
    ]
    second = await use.gpt.chat.completions.create(
        model=f"gpt-{pool}", messages=messages, tools=tools, tool_choice="none"
    )
    assert second.choices[0].message.content


async def responses(use: Clients, pool: str, mark: str) -> None:
    got = await use.gpt.responses.create(model=f"gpt-{pool}", input=mark)
    assert got.status == "completed"
    assert got.output_text
    assert got.usage is not None


async def responses_stream(use: Clients, pool: str, mark: str) -> None:
    async with use.gpt.responses.stream(model=f"gpt-{pool}", input=mark) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed"
    assert final.output_text


async def embeddings(use: Clients, pool: str, mark: str) -> None:
    got = await use.gpt.embeddings.create(model=f"text-embedding-{pool}", input=[mark, "two"])
    assert [one.index for one in got.data] == [0, 1]
    assert isinstance(got.data[0].embedding[0], float)


async def messages(use: Clients, pool: str, mark: str) -> None:
    got = await use.claude.messages.create(
        model=f"claude-{pool}", max_tokens=200, messages=said(mark)
    )
    assert got.content[0].type == "text"
    assert got.usage.output_tokens > 0


async def messages_stream(use: Clients, pool: str, mark: str) -> None:
    async with use.claude.messages.stream(
        model=f"claude-{pool}", max_tokens=200, messages=said(mark)
    ) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0


async def messages_tools(use: Clients, pool: str, mark: str) -> None:
    tools: Any = [{"name": "weather", "input_schema": WEATHER}]
    talk = said(mark)
    first = await use.claude.messages.create(
        model=f"claude-{pool}", max_tokens=200, messages=talk, tools=tools,
        tool_choice={"type": "any"},
    )  # fmt: skip
    calls = [block for block in first.content if block.type == "tool_use"]
    assert isinstance(calls[0].input, dict)
    talk += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": one.id, "content": "rain"} for one in calls
            ],
        },
    ]
    second = await use.claude.messages.create(
        model=f"claude-{pool}", max_tokens=200, messages=talk, tools=tools
    )
    assert second.content


async def count_tokens(use: Clients, pool: str, mark: str) -> None:
    got = await use.claude.messages.count_tokens(model=f"claude-{pool}", messages=said(mark))
    assert got.input_tokens > 0


Case: TypeAlias = Callable[[Clients, str, str], Awaitable[None]]
SPENDING: tuple[Case, ...] = (
    chat, chat_stream, chat_stream_with_usage, chat_tools, responses, responses_stream, embeddings,
    messages, messages_stream, messages_tools,
)  # fmt: skip
TURNS = {chat_tools: 2, messages_tools: 2}
STREAMS = (chat_stream, chat_stream_with_usage, responses_stream, messages_stream)


def mark_of(case: Case, why: str) -> str:
    """A text that stands in that case's requests and no others."""
    return f"<{case.__name__}/{why}> Tell me about it."


def on_the_wire(world: World, case: Case, why: str) -> tuple[list[Exchange], list[Exchange]]:
    """Its requests at the edge and upstream."""
    needle = f"<{case.__name__}/{why}>"

    def turn(exchange: Exchange) -> int:
        return len(exchange.request.body)  # a conversation only grows

    return (
        sorted(world.edge.exchanges(needle), key=turn),
        sorted(world.upstream.exchanges(needle), key=turn),
    )


def without_usage_chunk(body: bytes) -> bytes:
    """A Chat stream without the chunk that only reports usage."""
    frames = body.split(b"\n\n")
    return b"\n\n".join(frame for frame in frames if b'"choices":[]' not in frame)


def check_pair(case: Case, edge: Exchange, upstream: Exchange) -> None:
    """Request and answer are the same bytes on both sides, but for the edit that policy names."""
    assert edge.answer is not None
    assert upstream.answer is not None
    assert edge.answer.whole
    assert edge.answer.status == upstream.answer.status == 200
    if case is chat_stream:
        edited = json.loads(upstream.request.body)
        assert edited.pop("stream_options") == {"include_usage": True}
        assert edited == json.loads(edge.request.body)
        assert edge.answer.body == without_usage_chunk(upstream.answer.body)
    else:
        assert edge.request.body == upstream.request.body
        assert edge.answer.body == upstream.answer.body
    check_secrets(edge, upstream)


def check_secrets(edge: Exchange, upstream: Exchange) -> None:
    """No credential crosses the gateway, in either direction."""
    agents = [value.encode() for value in KEYS.values()] + [b"tg-tester-0123456789"]
    assert not any(key in upstream.request.raw for key in agents)
    assert edge.answer is not None
    assert b"sk-upstream-credential" not in edge.answer.raw


# --- at once -------------------------------------------------------------------------------------


def test_each_api_of_both_sdks_is_served_byte_for_byte(scene):
    stage, world = scene

    async def scenario() -> None:
        async with Clients(world) as use:
            await asyncio.gather(
                *(case(use, "now", mark_of(case, "now")) for case in (*SPENDING, count_tokens))
            )

    stage.run(scenario())
    for case in (*SPENDING, count_tokens):
        edge, upstream = on_the_wire(world, case, "now")
        assert len(edge) == len(upstream) == TURNS.get(case, 1), case.__name__
        for one, other in zip(edge, upstream, strict=True):
            check_pair(case, one, other)


def test_an_answer_says_what_became_of_its_call(scene):
    stage, world = scene

    async def scenario() -> None:
        async with Clients(world) as use:
            raw = await use.gpt.chat.completions.with_raw_response.create(
                model="gpt-now", messages=said("headers")
            )
            headers = raw.headers
            assert headers["tidegate-tier"] == "standard"
            assert headers["tidegate-model-served"] == "gpt-now"
            assert int(headers["tidegate-queue-ms"]) == 0
            assert float(headers["tidegate-overhead-ms"]) < 1_000
            assert int(headers["tidegate-tokens-reserved"]) > 0

            async def explained() -> Any:
                answer = await ask(
                    world.gateway.admin,
                    request(f"/explain/{headers['tidegate-call-id']}"),
                    method="GET",
                )
                return answer.json() if answer.status == 200 else None

            record = await until(explained)
            assert record["status"] == 200
            assert record["attempts"] == 1

    stage.run(scenario())


def test_the_models_listed_are_those_the_key_may_use(scene):
    stage, world = scene

    async def scenario() -> None:
        async with Clients(world) as all_of_them, Clients(world, "narrowed") as few:
            seen = [model.id async for model in all_of_them.gpt.models.list()]
            assert {"gpt-narrow", "claude-rare", "text-embedding-tiny"} <= set(seen)
            assert [model.id async for model in few.gpt.models.list()] == ["gpt-tiny"]
            listed = [model.id async for model in few.claude.models.list()]
            assert listed == ["gpt-tiny"]

    stage.run(scenario())


# --- after a wait --------------------------------------------------------------------------------


async def plugged(world: World, pool: str, seconds: float) -> asyncio.Task[Any]:
    """The pool's only permit is out for so long."""
    await world.emulator.faults(
        {"action": "slow_first_byte", "seconds": seconds, "models": [f"plug-{pool}"]}
    )
    data = request(
        "/v1/chat/completions",
        {"model": f"plug-{pool}", "messages": said("plug")},
        key=world.gateway.key,
    )
    plug = asyncio.create_task(ask(world.gateway.port, data))

    async def taken() -> bool:
        pools = (await world.gateway.status())["pools"]
        return any(one["name"] == f"pool:{pool}" and one["in_flight"] for one in pools)

    await until(taken)
    await until(lambda: world.upstream.exchanges(f"plug-{pool}"))
    return plug


def test_a_call_held_five_seconds_makes_one_request_upstream_in_every_api(scene):
    stage, world = scene

    async def all_wait(count: int) -> bool:
        return (await world.gateway.status())["waiting"] == count

    async def scenario() -> None:
        plug = await plugged(world, "narrow", HOLD)
        async with Clients(world) as use, Clients(world, "awake") as awake:
            with world.upstream.holding("plug-narrow"):
                held = [
                    asyncio.create_task(case(who, "narrow", mark_of(case, why)))
                    for cases, who, why in ((SPENDING, use, "held"), (STREAMS, awake, "awake"))
                    for case in cases
                ]
                await until(lambda: all_wait(len(held)))
                await asyncio.gather(asyncio.sleep(HOLD), refused_in_band(world))
                assert not any(task.done() for task in held)
            await asyncio.gather(*held)
        assert (await plug).status == 200

    stage.run(scenario())
    for case in SPENDING:
        edge, upstream = on_the_wire(world, case, "held")
        assert len(edge) == len(upstream) == TURNS.get(case, 1), case.__name__
        for one, other in zip(edge, upstream, strict=True):
            check_pair(case, one, other)
    for case in STREAMS:
        edge, upstream = on_the_wire(world, case, "awake")
        assert len(edge) == len(upstream) == 1, case.__name__
        check_kept_alive(case, edge[0], upstream[0])
    stage.run(world.gateway.idle())


async def refused_in_band(world: World) -> None:
    """After keep-alives a refusal can only stand in the stream, where each SDK must find it."""

    async def response() -> str:
        async with use.gpt.responses.stream(model="gpt-narrow", input="<brief>") as stream:
            [*_, last] = [event async for event in stream]
        assert last.type == "response.failed"
        assert last.response.error is not None
        return last.response.error.message

    async with Clients(world, "brief") as use:
        one, two, three = await asyncio.gather(
            chat_stream(use, "narrow", "<brief>"),
            messages_stream(use, "narrow", "<brief>"),
            response(),
            return_exceptions=True,
        )
    assert isinstance(one, openai.APIError)
    assert isinstance(two, anthropic.APIStatusError)
    assert all("Tidegate" in str(said) for said in (one, two, three))
    assert len(world.edge.exchanges("<brief>")) == 3
    assert world.upstream.exchanges("<brief>") == []


ALIVE = {
    chat_stream: b": queued\n",
    chat_stream_with_usage: b": queued\n",
    responses_stream: b": queued\n",
    messages_stream: b'event: ping\ndata: {"type":"ping"}\n\n',
}


def check_kept_alive(case: Case, edge: Exchange, upstream: Exchange) -> None:
    """Signs of life while it waited, then the upstream's own bytes."""
    assert edge.answer is not None
    assert upstream.answer is not None
    body, theirs = edge.answer.body, upstream.answer.body
    if case is chat_stream:
        theirs = without_usage_chunk(theirs)
    assert body.endswith(theirs)
    signs = body[: -len(theirs)]
    alive = ALIVE[case]
    assert signs.replace(alive, b"").strip() == b""
    assert 2 <= signs.count(alive) <= 6


# --- refused -------------------------------------------------------------------------------------

REFUSED: tuple[Case, ...] = (
    chat, chat_stream, responses, responses_stream, embeddings, messages, messages_stream,
)  # fmt: skip
FAULTS = (openai.APIStatusError, anthropic.APIStatusError)


async def refusal(use: Clients, case: Case, pool: str, mark: str) -> Any:
    """The SDK's exception."""
    with pytest.raises(FAULTS) as caught:
        await case(use, pool, mark)
    return caught.value


def test_a_softly_refused_call_comes_back_as_told_and_is_served(scene):
    stage, world = scene

    async def scenario() -> None:
        plug = await plugged(world, "rare", 2.0)
        async with Clients(world, "hasty", max_retries=4) as use:
            await asyncio.gather(*(case(use, "rare", mark_of(case, "soft")) for case in REFUSED))
        assert (await plug).status == 200

    stage.run(scenario())
    for case in REFUSED:
        edge, upstream = on_the_wire(world, case, "soft")
        assert len(upstream) == 1, case.__name__
        assert 2 <= len(edge) <= 5, case.__name__
        answers = [one.answer for one in edge if one.answer is not None]
        assert len(answers) == len(edge)
        # The tap lists by connection, and an SDK may repeat on an older one: not in order of time.
        refused = [answer for answer in answers if answer.status != 200]
        assert len(refused) == len(answers) - 1
        for answer in refused:
            assert answer.status == 429
            assert answer.header("x-should-retry") == "true"
            assert 1 <= int(answer.header("retry-after")) <= 60
            assert 0 < int(answer.header("retry-after-ms")) <= 60_000
            # An SDK that repeats a stream hangs up after the head; the tap may see no more of it.
            assert b"Tidegate" in answer.body or not answer.whole
    stage.run(world.gateway.idle())


def test_a_call_is_refused_before_its_sdk_would_give_up(scene):
    """An SDK that times out repeats blindly; a refusal tells it when to come back."""
    stage, world = scene

    async def scenario() -> None:
        plug = await plugged(world, "rare", 8.0)
        async with Clients(world, timeout=5.0, max_retries=0) as use:
            errors = await asyncio.gather(
                *(refusal(use, case, "rare", mark_of(case, "hurried")) for case in REFUSED)
            )
        assert {error.status_code for error in errors} == {429}
        assert (await plug).status == 200

    stage.run(scenario())
    for case in REFUSED:
        edge, upstream = on_the_wire(world, case, "hurried")
        assert (len(edge), len(upstream)) == (1, 0), case.__name__


@pytest.mark.parametrize(
    ("agent", "pool", "status", "types"),
    [
        ("spent", "now", 429, ("rate_limit_error", "rate_limit_error")),
        ("narrowed", "now", 403, ("permission_error", "permission_error")),
        ("tester", "tiny", 400, ("invalid_request_error", "invalid_request_error")),
    ],
)
def test_a_hard_refusal_makes_exactly_one_request_in_every_api(scene, agent, pool, status, types):
    stage, world = scene
    why = f"{agent}-{pool}"
    long = "word " * 300

    async def scenario() -> list[Any]:
        async with Clients(world, agent) as use:
            if agent == "spent":
                await use.gpt.chat.completions.create(
                    model="gpt-now", messages=said("word " * 800), max_tokens=100
                )
                await world.gateway.idle()
            return await asyncio.gather(
                *(refusal(use, case, pool, mark_of(case, why) + long) for case in REFUSED)
            )

    for case, error in zip(REFUSED, stage.run(scenario()), strict=True):
        assert error.status_code == status, (case.__name__, error.message)
        assert error.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in error.response.headers
        assert "Tidegate" in error.message
        body = error.body
        kind = body["error"]["type"] if "error" in body else body["type"]
        assert kind == types[case in (messages, messages_stream)]
        edge, upstream = on_the_wire(world, case, why)
        assert (len(edge), len(upstream)) == (1, 0), case.__name__


def test_an_unknown_key_is_refused_once_and_never_reaches_the_provider(scene):
    stage, world = scene

    async def scenario() -> list[Any]:
        world.gateway.keys["STRANGER_KEY"] = "tg-stranger"
        async with Clients(world, "stranger") as use:
            return await asyncio.gather(
                *(refusal(use, case, "now", mark_of(case, "stranger")) for case in REFUSED)
            )

    for case, error in zip(REFUSED, stage.run(scenario()), strict=True):
        assert error.status_code == 401
        edge, upstream = on_the_wire(world, case, "stranger")
        assert (len(edge), len(upstream)) == (1, 0), case.__name__
