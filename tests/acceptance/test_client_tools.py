"""Agent programs through both planes in one turn, and servers and tools that npm brings.

Marked `clients` where a large download is driven; Inspector and the npm servers are small.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.agents import NotInstalled, Programs, cache
from tests.integration.gateway import Stage, World, policy, staged
from tests.integration.tools import KEY, Fixture, client, tool_world, words

pytestmark = pytest.mark.acceptance

LIMIT = 120.0
TOOL = "fixture__echo"


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    with Stage() as loop, tempfile.TemporaryDirectory() as folder:
        fixture = loop.run(Fixture(Path(folder), "fixture").serve())
        servers = {"fixture": {"url": f"http://127.0.0.1:{fixture.port}/mcp"}}
        try:
            with staged(policy(servers=servers)) as made:
                yield made
        finally:
            loop.run(fixture.kill())


def installed(stage: Stage, *names: str) -> Programs:
    try:
        return stage.run(Programs(cache()).install(*names), 900)
    except NotInstalled as error:
        pytest.skip(f"not to be had here: {error}")


@pytest.mark.clients
@pytest.mark.parametrize("name", ["claude_code", "codex"])
def test_one_turn_goes_model_tool_model_through_both_planes(scene: tuple[Stage, World], name: str):
    stage, world = scene
    programs = installed(stage, name)
    mark = f"turn-of-{name}"
    home = world.folder / f"home-{mark}"
    home.mkdir()
    base = f"http://127.0.0.1:{world.edge.port}"
    before = len(world.edge.exchanges())
    if name == "claude_code":
        prompt = f"Please use mcp__gw__{TOOL} once. Our reference is {mark}."
        turn = programs.claude(home, base=base, key=KEY, prompt=prompt, limit=LIMIT, tool=TOOL)
    else:
        prompt = f"Please use {TOOL} once. Our reference is {mark}."
        turn = programs.codex(home, base=base, key=KEY, prompt=prompt, limit=LIMIT, tools=True)
    ran = stage.run(turn, LIMIT + 30)
    assert ran.status == 0, ran.err[-2000:]
    seen = world.edge.exchanges()[before:]
    called = [at for at, one in enumerate(seen) if b'"tools/call"' in one.request.body
              and TOOL.encode() in one.request.body and "/mcp" in one.first]  # fmt: skip
    models = [at for at, one in enumerate(seen) if mark.encode() in one.request.body]
    assert len(called) == 1, ran.out[-2000:]
    assert seen[called[0]].answer is not None
    assert b'"result"' in seen[called[0]].answer.body
    assert len(models) >= 2  # before the tool and after it
    assert not world.upstream.exchanges(KEY)


def test_the_inspector_lists_and_calls(scene: tuple[Stage, World]):
    stage, world = scene
    programs = installed(stage, "inspector")
    url = f"http://127.0.0.1:{world.gateway.port}/mcp"

    def inspect(*arguments: str):
        ran = stage.run(programs.inspector(url, *arguments, key=KEY, limit=LIMIT), LIMIT + 30)
        assert ran.status == 0, ran.err[-2000:]
        return json.loads(ran.out)

    listed = inspect("--method", "tools/list")
    assert TOOL in {tool["name"] for tool in listed["tools"]}
    said = inspect("--method", "tools/call", "--tool-name", TOOL, "--tool-arg", "text=seen")
    assert said["content"][0]["text"] == "seen"


def test_servers_from_npm_behind_pipes(scene: tuple[Stage, World]):
    stage, world = scene
    programs = installed(stage, "filesystem", "memory")
    folder = world.folder / "shared"
    folder.mkdir()
    (folder / "note.txt").write_text("a note")
    servers = {
        "files": {"command": [*programs.server("filesystem"), str(folder)],
                  "process": {"memory": "64GiB"}},
        "memory": {"command": programs.server("memory"), "process": {"memory": "64GiB"},
                   "env": {"MEMORY_FILE_PATH": str(world.folder / "memory.jsonl")}},
    }  # fmt: skip

    async def main():
        async with tool_world(servers) as made, client(made.url("")) as one:
            names = {tool.name for tool in (await one.list_tools()).tools}
            read = await one.call_tool("files__read_text_file", {"path": str(folder / "note.txt")})
            entity = {"name": "tide", "entityType": "thing", "observations": ["it comes"]}
            await one.call_tool("memory__create_entities", {"entities": [entity]})
            graph = await one.call_tool("memory__read_graph", {})
            return names, words(read), words(graph)

    names, read, graph = stage.run(main(), 120)
    assert {"files__read_text_file", "memory__read_graph"} <= names
    assert read == "a note"
    assert "it comes" in graph
