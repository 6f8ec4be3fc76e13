"""Real clients through the gateway: one turn, a hold of 30 s, a hard refusal, counted on the wire.

`python -m loadtests.clients --json` (about 100 s with the programs in the cache, 130 s without):

* every client is a program as its users run it: Claude Code, Codex, the SDKs of both languages, and
  Python's MCP client in both of its modes, whose turn is one tool call at the fixture server;
* `turn_ok`: one turn through `tidegate serve` and the emulator ended well;
* `held_30s_upstream_requests`: requests upstream of a turn that first waited 30 s for a limit;
* `refused_requests`: requests at the edge that a spent budget made of one turn, or for tools a
  spent limit of requests a day.

Figures are null where a program could not be installed; `why` then says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from loadtests import measure
from tests.acceptance.agents import PACKAGES, NotInstalled, Programs, Ran, cache, run
from tests.integration.gateway import ROOT, Tap, World, ask, policy, request, scratch, until, world
from tests.integration.tools import Fixture

HOLD = 30.0
LIMIT = 120.0
SPENT = 100_000
NAMES = ("claude_code", "codex", "openai_py", "anthropic_py", "openai_js", "anthropic_js")
TOOLS = {"mcp_py": "auto", "mcp_py_legacy": "legacy"}
"""Python's MCP client by its modes."""
PYTHON = {
    "openai_py": """
import openai, sys
with openai.OpenAI() as client:
    with client.responses.stream(model="gpt-x", input=sys.argv[1]) as stream:
        assert stream.get_final_response().output_text
""",
    "anthropic_py": """
import anthropic, sys
with anthropic.Anthropic() as client:
    with client.messages.stream(
        model="claude-x", max_tokens=50, messages=[{"role": "user", "content": sys.argv[1]}]
    ) as stream:
        assert stream.get_final_text()
""",
}
CALL = """
import asyncio, os, sys, httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
async def main():
    headers = {"authorization": "Bearer " + os.environ["MCP_KEY"]}
    async with httpx2.AsyncClient(headers=headers, timeout=120) as http:
        way = streamable_http_client(os.environ["MCP_URL"], http_client=http)
        async with Client(way, mode=os.environ["MCP_MODE"]) as one:
            result = await one.call_tool("echo", {"text": sys.argv[1]})
            assert not result.is_error and result.content[0].text == sys.argv[1], result
asyncio.run(main())
"""
SCRIPTS = {
    "openai_js": """
import OpenAI from "openai";
const stream = await new OpenAI().responses.create(
  {model: "gpt-x", input: process.env.MARK, stream: true});
let last;
for await (const event of stream) last = event.type;
if (last !== "response.completed") throw new Error(last);
""",
    "anthropic_js": """
import Anthropic from "@anthropic-ai/sdk";
const said = await new Anthropic().messages.stream(
  {model: "claude-x", max_tokens: 50, messages: [{role: "user", content: process.env.MARK}]},
).finalMessage();
if (!said.content[0].text) throw new Error("no text");
""",
}
Turn: TypeAlias = Callable[[str, str], Any]


def version(name: str) -> str:
    """As pinned, or as installed."""
    if name in TOOLS:
        return importlib.metadata.version("mcp")
    if name in PACKAGES:
        return PACKAGES[name].rpartition("@")[2]
    return importlib.metadata.version(name.removesuffix("_py"))


async def turn(made: World, programs: Programs, name: str, key: str, mark: str) -> Ran:
    """One turn of that client, whose requests carry the mark."""
    base = f"http://127.0.0.1:{made.edge.port}"
    env = {
        "OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key, "MARK": mark,
    }  # fmt: skip
    if name in SCRIPTS:
        return await programs.script(name, SCRIPTS[name], env=env, limit=LIMIT)
    if name in PYTHON:
        arguments = [sys.executable, "-c", PYTHON[name], mark]
        return await run(arguments, env={**os.environ, **env}, cwd=ROOT, limit=LIMIT)
    home = made.folder / f"home-{mark}"
    home.mkdir()
    program = programs.claude if name == "claude_code" else programs.codex
    return await program(home, base=base, key=key, prompt=f"Say pong. {mark}", limit=LIMIT)


async def called(made: World, name: str, key: str, mark: str) -> Ran:
    """One tool call of that mode, whose request carries the mark."""
    env = {
        "MCP_URL": f"http://127.0.0.1:{made.edge.port}/mcp/fixture", "MCP_KEY": key,
        "MCP_MODE": TOOLS[name],
    }  # fmt: skip
    arguments = [sys.executable, "-c", CALL, mark]
    return await run(arguments, env={**os.environ, **env}, cwd=ROOT, limit=LIMIT)


async def tools(made: World, server: Tap, name: str) -> dict[str, Any]:
    """The figures of one mode."""
    keys = made.gateway.keys
    ran = await called(made, name, made.gateway.key, f"turn-{name}-mark")
    measure.say(f"{name}: {ran.seconds:.1f} s, exit {ran.status} {ran.err[-200:]!r}")
    figures: dict[str, Any] = {"turn_ok": ran.status == 0, "held_30s_upstream_requests": None}
    async with asyncio.TaskGroup() as group:
        group.create_task(plugged(made, name))
        await until(lambda: made.upstream.exchanges(f'"user": "{name}"'), limit=HOLD)
        mark = f"wait-{name}-mark"
        ran = await called(made, name, keys[f"{name.upper()}_KEY"], mark)
    measure.say(f"{name}: held {ran.seconds:.1f} s, exit {ran.status} {ran.err[-200:]!r}")
    if ran.status == 0 and ran.seconds >= HOLD - 2:
        figures["held_30s_upstream_requests"] = len(server.exchanges(mark))
    mark = f"spent-{name}-mark"
    once = keys[f"ONCE_{name.upper()}_KEY"]
    await called(made, name, once, f"once-{name}-mark")
    ran = await called(made, name, once, mark)
    if ran.status:
        figures["refused_requests"] = len(made.edge.exchanges(mark))
    return figures


async def plugged(made: World, name: str) -> None:
    """That client's only permit is out for as long as the hold lasts."""
    body = {"model": "gpt-plug", "messages": [{"role": "user", "content": "plug"}], "user": name}
    key = made.gateway.keys[f"{name.upper()}_KEY"]
    await ask(made.gateway.port, request("/v1/chat/completions", body, key=key))


async def held(made: World, programs: Programs, name: str) -> int | None:
    """Requests upstream of a turn that waited."""
    async with asyncio.TaskGroup() as group:
        group.create_task(plugged(made, name))
        await until(lambda: made.upstream.exchanges(f'"user": "{name}"'), limit=HOLD)
        mark = f"wait-{name}-mark"
        ran = await turn(made, programs, name, made.gateway.keys[f"{name.upper()}_KEY"], mark)
    measure.say(f"{name}: held {ran.seconds:.1f} s, exit {ran.status}")
    if ran.status != 0 or ran.seconds < HOLD - 2:
        return None
    return len(made.upstream.exchanges(mark))


async def refused(made: World, programs: Programs, name: str) -> int:
    """Requests at the edge of a turn whose budget is spent."""
    mark = f"spent-{name}-mark"
    await turn(made, programs, name, made.gateway.keys["SPENT_KEY"], mark)
    return len(made.edge.exchanges(mark))


async def measure_all() -> dict[str, Any]:
    result: dict[str, Any] = {name: {"version": version(name)} for name in (*NAMES, *TOOLS)}
    programs = Programs(cache())
    able = list(NAMES)
    for name in PACKAGES:
        try:
            await programs.install(name)
        except NotInstalled as error:
            able.remove(name)
            result[name] |= {"why": str(error)[:200]}
    once = [f"once_{name}" for name in TOOLS]
    names = (*NAMES, *TOOLS, *once, "spent")
    keys = {f"{name.upper()}_KEY": f"tg-{name}-0123456789" for name in names}
    agents: dict[str, Any] = {
        name: {
            "keys": [{"key": f"${{{name.upper()}_KEY}}"}],
            "limits": {"rpd": 1} if name in once else {"concurrency": 1},
        }
        for name in names[:-1]
    }
    agents["spent"] = {
        "keys": [{"key": "${SPENT_KEY}"}], "budgets": [{"tokens": SPENT, "per": "day"}],
    }  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch())
        fixture = await Fixture(folder, "fixture").serve()
        stack.push_async_callback(fixture.kill)
        server = await Tap(fixture.port).start()
        stack.push_async_callback(server.stop)
        servers = {"fixture": {"url": f"http://127.0.0.1:{server.port}/mcp"}}
        chosen = policy(agents=agents, servers=servers)
        made = await stack.enter_async_context(world(chosen, keys=keys))
        for name in able:
            ran = await turn(made, programs, name, made.gateway.key, f"turn-{name}-mark")
            result[name]["turn_ok"] = ran.status == 0
            measure.say(f"{name}: {ran.seconds:.1f} s, exit {ran.status} {ran.err[-200:]!r}")
        await made.emulator.faults(
            {"action": "slow_first_byte", "seconds": HOLD, "models": ["gpt-plug"]}
        )
        counts, found = await asyncio.gather(
            asyncio.gather(*(held(made, programs, name) for name in able)),
            asyncio.gather(*(tools(made, server, name) for name in TOOLS)),
        )
        for name, figures in zip(TOOLS, found, strict=True):
            result[name] |= figures
        text = "word " * (SPENT * 19 // 20)
        spend = {"model": "gpt-x", "messages": [{"role": "user", "content": text}]}
        spent = made.gateway.keys["SPENT_KEY"]
        await ask(made.gateway.port, request("/v1/chat/completions", spend, key=spent))
        for name, count in zip(able, counts, strict=True):
            result[name]["held_30s_upstream_requests"] = count
            result[name]["refused_requests"] = await refused(made, programs, name)
    for name in (*NAMES, *TOOLS):
        for key in ("turn_ok", "held_30s_upstream_requests", "refused_requests"):
            result[name].setdefault(key, None)
    return {**result, "install_s": round(programs.seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON (always done)"
    )
    parser.parse_args()
    began = time.monotonic()
    measure.finish(asyncio.run(measure_all()), began=began)


if __name__ == "__main__":
    main()
