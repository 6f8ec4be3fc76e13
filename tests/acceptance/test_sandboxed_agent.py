"""`tidegate agent run` through a whole gateway, to a provider and a real tool server of others.

The agent is the shipped example; what left it is told by the taps on both sides of the gateway and
by the bridge in front of `mcp-server-time`, never by the agent itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wasmtime")
pytest.importorskip("icpp_binaryen")

from tests.acceptance import mcp_time
from tests.acceptance.agents import NotInstalled
from tests.integration.gateway import ROOT, Stage, World, emulation, policy, staged

pytestmark = pytest.mark.acceptance

KEY = "tg-researcher-0123456789"
ROUNDS = 3
INPUT = {
    "topic": "tides",
    "rounds": ROUNDS,
    "tool": "time__get_current_time",
    "args": {"timezone": "Europe/Oslo"},
}
SLOW = emulation(pacing={"first_byte": 0.4, "tokens_per_second": 0, "jitter": 0})


@pytest.fixture(scope="module")
def tools() -> Iterator[mcp_time.TimeServer]:
    try:
        folder = mcp_time.install()
    except NotInstalled as missing:
        if os.environ.get("TIDEGATE_REQUIRE_GUESTS"):
            pytest.fail(f"required here: {missing}")
        pytest.skip(str(missing))
    server = mcp_time.TimeServer(folder)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def place(tools: mcp_time.TimeServer) -> Iterator[tuple[Stage, World]]:
    chosen = policy(
        agents={"researcher": {"keys": [{"key": "${RESEARCHER_KEY}"}], "tools": ["time__get_*"],
                               "tier": "batch", "tier_cap": "standard"}},
        servers={"time": {"url": f"http://127.0.0.1:{tools.port}/mcp"}},
    )  # fmt: skip
    with staged(chosen, provider=SLOW, keys={"RESEARCHER_KEY": KEY}) as (stage, world):
        stage.run(warm(world))
        yield stage, world


async def warm(world: World) -> None:
    """The interpreter is installed before anything is timed."""
    process = await start(world, "guest", "install", "quickjs")
    _, errors = await process.communicate()
    if process.returncode and not os.environ.get("TIDEGATE_REQUIRE_GUESTS"):
        pytest.skip(errors.decode())
    assert process.returncode == 0, errors.decode()


async def start(world: World, *words: str) -> asyncio.subprocess.Process:
    """The command an author types."""
    env = {
        **os.environ,
        "TIDEGATE_GATEWAY": f"http://127.0.0.1:{world.edge.port}",
        "TIDEGATE_AGENT_KEY": KEY,
        "TIDEGATE_MODEL": "gpt-any",
        "TIDEGATE_STATE_DIR": str(world.folder / "author"),
    }
    group = () if words[0] == "guest" else ("agent",)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *group, *words, cwd=ROOT, env=env,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def rows(process: asyncio.subprocess.Process) -> list[dict[str, Any]]:
    """What it said, after it ended well."""
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode() + out.decode()
    return [json.loads(line) for line in out.splitlines()]


def research(*more: str) -> tuple[str, ...]:
    example = ROOT / "runtime/guests/examples/research.js"
    return ("run", str(example), "--input", json.dumps(INPUT), "--tier", "T2", "--json", *more)


def calls(found: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    return [(row["n"], row["op"], row["outcome"]) for row in found if row.get("kind") == "call"]


MODEL = "/v1/chat/completions"


def unbroken(world: World, found: list[dict[str, Any]], tools: mcp_time.TimeServer) -> None:
    """The whole trace: ordinals without a gap, one trace, each call at each place once."""
    calls_of_all = [e for e in world.gateway.events("call") if e["agent"] == "researcher"]
    done = calls(found)
    assert [number for number, *_ in done] == list(range(len(done)))
    assert {outcome for *_, outcome in done} == {"ok"}
    ops = [op for _, op, _ in done]
    assert ops.count("tool.call") == ROUNDS
    assert ops.count("llm.chat") == ROUNDS + 1
    sent = world.edge.exchanges(f"session-id: {found[-1]['task']}")
    heads = [dict(one.request.headers) for one in sent]
    assert len(sent) == len({head["idempotency-key"] for head in heads}) == 2 * ROUNDS + 1
    (trace,) = {head["traceparent"].split("-")[1] for head in heads}
    assert {head["tidegate-tier"] for head in heads} == {"2"}
    traces = {row["trace"] for row in found if "trace" in row}
    assert traces == {trace}
    mine = [event for event in calls_of_all if event["session"] == found[-1]["task"]]
    assert len(mine) == 2 * ROUNDS + 1
    assert {event["tier"] for event in mine} == {2}, "its wish, within what policy grants"
    assert len(tools.asked) == ROUNDS
    (summary,) = [row["data"] for row in found if row.get("kind") == "emit"]
    assert summary["rounds"] == ROUNDS


@pytest.fixture
def fresh(place, tools: mcp_time.TimeServer) -> tuple[Stage, World]:
    stage, world = place
    world.edge.forget()
    world.upstream.forget()
    tools.asked.clear()
    return stage, world


def test_an_agent_asks_models_and_a_real_tool_under_its_own_identity(fresh, tools):
    stage, world = fresh

    async def scenario() -> None:
        before = len(world.upstream.exchanges(MODEL))
        found = await rows(await start(world, *research()))
        unbroken(world, found, tools)
        assert [one["params"]["arguments"] for one in tools.asked] == [INPUT["args"]] * ROUNDS
        assert len(world.upstream.exchanges(MODEL)) == before + ROUNDS + 1

    stage.run(scenario())


@pytest.mark.parametrize("how", ["ctrl-c", "suspend-after"])
def test_it_goes_on_in_another_process_with_no_call_repeated(fresh, tools, how):
    """Stopped again and again, in calls and between them, until it is done."""
    stage, world = fresh
    before_all = len(world.upstream.exchanges(MODEL))
    file = world.folder / f"{how}.tgsn"

    async def part(*words: str) -> list[dict[str, Any]]:
        more = ("--suspend-after", "700") if how == "suspend-after" else ()
        process = await start(world, *words, "--out", str(file), *more)
        if how == "ctrl-c":
            before = len(world.edge.exchanges("idempotency-key"))
            end = time.monotonic() + 60
            while process.returncode is None and time.monotonic() < end:
                if len(world.edge.exchanges("idempotency-key")) > before + 1:
                    process.send_signal(signal.SIGINT)
                    break
                await asyncio.sleep(0.02)
        return await rows(process)

    async def scenario() -> None:
        found = await part(*research())
        parts = 1
        while "suspended" in found[-1] and parts < 40:
            found += await part("resume", str(file), "--json")
            parts += 1
        assert parts > 1, "it was stopped at least once"
        unbroken(world, found, tools)
        assert len(world.upstream.exchanges(MODEL)) == before_all + ROUNDS + 1

    stage.run(scenario(), 240)


def test_a_tool_that_policy_does_not_grant_is_an_error_the_script_can_catch(fresh, tools):
    stage, world = fresh
    script = Path(world.folder) / "denied.js"
    script.write_text(
        "for (const [name, args] of [['time__convert_time', {}], ['time__nothing', {}],"
        " ['other__x', {}], ['time__get_current_time', {timezone: 'No/Where'}]])\n"
        "try { agent.emit(agent.tool(name, args)); } catch (e) { agent.emit([name, e.code]); }\n"
    )

    async def scenario() -> None:
        found = await rows(await start(world, "run", str(script), "--json"))
        said = [row["data"] for row in found if row.get("kind") == "emit"]
        assert [one[0] for one in said[:3]] == ["time__convert_time", "time__nothing", "other__x"]
        assert {one[1] for one in said[:3]} <= {"unknown_tool", "denied"}
        assert len(tools.asked) == 1, "only what is granted reached the server"

    stage.run(scenario())
