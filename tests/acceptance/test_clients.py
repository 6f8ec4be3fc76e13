"""Claude Code, Codex and the JavaScript SDKs through the whole process: served, held, refused.

Marked `clients`: they are large downloads. Where they cannot be had the tests are skipped, and say
why. Requests are counted on the wire at the edge and upstream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.acceptance.agents import NotInstalled, Programs, Ran, cache
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

pytestmark = [pytest.mark.acceptance, pytest.mark.clients]

HOLD = 30.0
LIMIT = 120.0
SPENT = 100_000
"""Tokens a day of the agent that has spent them."""

HELD = ("claude", "codex", "openai", "anthropic")
POLICY = policy(
    agents={
        **{
            f"held-{name}": {
                "keys": [{"key": f"${{HELD_{name.upper()}_KEY}}"}], "limits": {"concurrency": 1},
            }
            for name in HELD
        },
        "small": {"keys": [{"key": "${SMALL_KEY}"}], "limits": {"tpm": 1_000}},
        "barred": {"keys": [{"key": "${BARRED_KEY}"}], "models": ["text-embedding-*"]},
        "spent": {
            "keys": [{"key": "${SPENT_KEY}"}],
            "budgets": [{"tokens": SPENT, "per": "day", "utc_offset": by_day()}],
        },
    },
)  # fmt: skip
KEYS = {
    "SMALL_KEY": "tg-small-0123456789",
    "BARRED_KEY": "tg-barred-0123456789",
    "SPENT_KEY": "tg-spent-0123456789",
    **{f"HELD_{name.upper()}_KEY": f"tg-held-{name}-0123456789" for name in HELD},
}


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    with staged(POLICY, keys=KEYS) as made:
        yield made


@pytest.fixture(scope="module")
def programs(scene: tuple[Stage, World]) -> Programs:
    stage, _ = scene
    try:
        names = ("claude_code", "codex", "openai_js", "anthropic_js")
        return stage.run(Programs(cache()).install(*names), 900)
    except NotInstalled as error:
        pytest.skip(f"not to be had here: {error}")


def of(world: World, mark: str) -> tuple[list[Exchange], list[Exchange]]:
    """Requests that carry this text, at the edge and upstream."""
    return world.edge.exchanges(mark), world.upstream.exchanges(mark)


def base(world: World) -> str:
    return f"http://127.0.0.1:{world.edge.port}"


async def one_turn(
    world: World, programs: Programs, name: str, mark: str, key: str, **more: Any
) -> Ran:
    home = world.folder / f"home-{mark}"
    home.mkdir()
    turn = programs.claude if name == "claude" else programs.codex
    prompt = f"Say pong. Our reference is {mark}."
    return await turn(home, base=base(world), key=key, prompt=prompt, limit=LIMIT, **more)


def answered(name: str, ran: Ran) -> bool:
    """Whether it got an answer and says so."""
    if ran.status != 0:
        return False
    if name == "claude":
        [said] = ran.lines()
        return said["subtype"] == "success" and bool(said["result"])
    return ran.lines()[-1]["type"] == "turn.completed"


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_one_headless_turn_of_an_agent_is_served(scene, programs, name):
    stage, world = scene
    mark = f"turn-{name}"
    ran = stage.run(one_turn(world, programs, name, mark, world.gateway.key), LIMIT + 10)
    assert answered(name, ran), ran
    edge, upstream = of(world, mark)
    assert len(edge) == len(upstream) == 1
    assert edge[0].answer is not None
    assert upstream[0].answer is not None
    assert edge[0].answer.body == upstream[0].answer.body
    assert edge[0].request.body == upstream[0].request.body
    stage.run(world.gateway.idle())


def test_codex_is_told_to_leave_websockets_and_comes_over_http(scene, programs):
    stage, world = scene
    ran = stage.run(
        one_turn(world, programs, "codex", "turn-built-in", world.gateway.key, built_in=True),
        LIMIT + 10,
    )
    assert answered("codex", ran), ran
    upgrades = [one for one in world.edge.exchanges() if one.first.startswith("GET /v1/responses")]
    assert 1 <= len(upgrades) <= 3
    assert {one.answer.status for one in upgrades if one.answer is not None} == {426}
    edge, upstream = of(world, "turn-built-in")
    assert len(edge) == len(upstream) == 1


JS = {
    "openai": """
import OpenAI from "openai";
const client = new OpenAI();
const stream = await client.responses.create({model: "gpt-js", input: "wait-openai", stream: true});
const kinds = [];
for await (const event of stream) kinds.push(event.type);
const chat = await client.chat.completions.create(
  {model: "gpt-js", messages: [{role: "user", content: "after"}], stream: true});
let text = "";
for await (const chunk of chat) text += chunk.choices[0]?.delta?.content ?? "";
console.log(JSON.stringify({kinds, text}));
""",
    "anthropic": """
import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic();
const stream = client.messages.stream(
  {model: "claude-js", max_tokens: 50, messages: [{role: "user", content: "wait-anthropic"}]});
const said = await stream.finalMessage();
console.log(JSON.stringify({kinds: [said.stop_reason], text: said.content[0].text}));
""",
}


async def javascript(world: World, programs: Programs, name: str, key: str) -> Ran:
    env = {
        "OPENAI_BASE_URL": f"{base(world)}/v1", "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base(world), "ANTHROPIC_API_KEY": key,
    }  # fmt: skip
    return await programs.script(f"{name}_js", JS[name], env=env, limit=LIMIT)


async def plugged(world: World, key: str) -> asyncio.Task[Any]:
    """The only permit of that agent is out for as long as the hold lasts."""
    body = {"model": "gpt-plug", "messages": [{"role": "user", "content": "plug"}]}
    before = len(world.upstream.exchanges("gpt-plug"))
    plug = asyncio.create_task(
        ask(world.gateway.port, request("/v1/chat/completions", body, key=key))
    )
    await until(lambda: len(world.upstream.exchanges("gpt-plug")) > before)
    return plug


def test_a_hold_of_thirty_seconds_makes_one_request_upstream(scene, programs):
    """All clients at once, each held by a limit of its own."""
    stage, world = scene

    async def held(name: str) -> Ran:
        key = world.gateway.keys[f"HELD_{name.upper()}_KEY"]
        plug = await plugged(world, key)
        if name in ("claude", "codex"):
            ran = await one_turn(world, programs, name, f"wait-{name}", key)
        else:
            ran = await javascript(world, programs, name, key)
        assert (await plug).status == 200
        return ran

    async def scenario() -> list[Ran]:
        await world.emulator.faults(
            {"action": "slow_first_byte", "seconds": HOLD, "models": ["gpt-plug"]}
        )
        return await asyncio.gather(*(held(name) for name in HELD))

    for name, ran in zip(HELD, stage.run(scenario(), LIMIT + 20), strict=True):
        assert ran.seconds > HOLD - 2, ran
        if name in ("claude", "codex"):
            assert answered(name, ran), ran
        else:
            assert ran.status == 0, ran
            said = json.loads(ran.out)
            assert said["text"]
            assert said["kinds"][-1] in ("response.completed", "end_turn", "max_tokens")
        edge, upstream = of(world, f"wait-{name}")
        assert len(edge) == len(upstream) == 1, name
    stage.run(world.gateway.idle())


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_a_call_that_can_never_fit_is_refused_with_one_request(scene, programs, name):
    """Claude Code answers a 400 with six requests, whatever its headers say."""
    stage, world = scene
    mark = f"never-{name}"
    ran = stage.run(one_turn(world, programs, name, mark, world.gateway.keys["SMALL_KEY"]), LIMIT)
    assert ran.status not in (0, None), ran
    edge, upstream = of(world, mark)
    assert (len(edge), len(upstream)) == (1, 0)
    assert edge[0].answer is not None
    assert b"can never fit" in edge[0].answer.body


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_a_model_that_policy_forbids_is_refused_with_one_request(scene, programs, name):
    stage, world = scene
    mark = f"barred-{name}"
    ran = stage.run(one_turn(world, programs, name, mark, world.gateway.keys["BARRED_KEY"]), LIMIT)
    assert ran.status not in (0, None), ran
    edge, upstream = of(world, mark)
    assert (len(edge), len(upstream)) == (1, 0)


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_a_spent_budget_is_refused_with_one_request(scene, programs, name):
    stage, world = scene
    key = world.gateway.keys["SPENT_KEY"]
    mark = f"spent-{name}"

    async def scenario() -> Ran:
        text = "word " * (SPENT * 19 // 20)
        body = {"model": "gpt-x", "messages": [{"role": "user", "content": text}], "max_tokens": 5}
        await ask(world.gateway.port, request("/v1/chat/completions", body, key=key))
        await world.gateway.idle()
        return await one_turn(world, programs, name, mark, key)

    ran = stage.run(scenario(), LIMIT + 20)
    assert ran.status not in (0, None), ran
    assert "Tidegate" in ran.out + ran.err
    edge, upstream = of(world, mark)
    assert (len(edge), len(upstream)) == (1, 0)
