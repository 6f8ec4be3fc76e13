"""Real clients through the gateway: one turn, a hold of 30 s, a hard refusal, counted on the wire.

`python -m loadtests.clients --json` (about 100 s with the programs in the cache, 130 s without):

* every client is a program as its users run it: Claude Code, Codex, the SDKs of both languages;
* `turn_ok`: one turn through `tidegate serve` and the emulator ended well;
* `held_30s_upstream_requests`: requests upstream of a turn that first waited 30 s for a limit;
* `refused_requests`: requests at the edge that a spent budget made of one turn.

Figures are null where a program could not be installed; `why` then says so. Python's MCP client
follows with the tool plane.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from loadtests import measure
from tests.acceptance.agents import PACKAGES, NotInstalled, Programs, Ran, cache, run
from tests.integration.gateway import ROOT, World, ask, policy, request, until, world

HOLD = 30.0
LIMIT = 120.0
SPENT = 100_000
NAMES = ("claude_code", "codex", "openai_py", "anthropic_py", "openai_js", "anthropic_js")
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
    result: dict[str, Any] = {name: {"version": version(name)} for name in NAMES}
    programs = Programs(cache())
    able = list(NAMES)
    for name in PACKAGES:
        try:
            await programs.install(name)
        except NotInstalled as error:
            able.remove(name)
            result[name] |= {"why": str(error)[:200]}
    keys = {f"{name.upper()}_KEY": f"tg-{name}-0123456789" for name in (*NAMES, "spent")}
    agents: dict[str, Any] = {
        name: {"keys": [{"key": f"${{{name.upper()}_KEY}}"}], "limits": {"concurrency": 1}}
        for name in NAMES
    }
    agents["spent"] = {
        "keys": [{"key": "${SPENT_KEY}"}], "budgets": [{"tokens": SPENT, "per": "day"}],
    }  # fmt: skip
    async with world(policy(agents=agents), keys=keys) as made:
        for name in able:
            ran = await turn(made, programs, name, made.gateway.key, f"turn-{name}-mark")
            result[name]["turn_ok"] = ran.status == 0
            measure.say(f"{name}: {ran.seconds:.1f} s, exit {ran.status} {ran.err[-200:]!r}")
        await made.emulator.faults(
            {"action": "slow_first_byte", "seconds": HOLD, "models": ["gpt-plug"]}
        )
        counts = await asyncio.gather(*(held(made, programs, name) for name in able))
        text = "word " * (SPENT * 19 // 20)
        spend = {"model": "gpt-x", "messages": [{"role": "user", "content": text}]}
        spent = made.gateway.keys["SPENT_KEY"]
        await ask(made.gateway.port, request("/v1/chat/completions", spend, key=spent))
        for name, count in zip(able, counts, strict=True):
            result[name]["held_30s_upstream_requests"] = count
            result[name]["refused_requests"] = await refused(made, programs, name)
    for name in NAMES:
        for key in ("turn_ok", "held_30s_upstream_requests", "refused_requests"):
            result[name].setdefault(key, None)
    return {**result, "mcp_py": None, "install_s": round(programs.seconds, 1)}


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
