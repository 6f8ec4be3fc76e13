"""The official Python client, in both eras, against servers over HTTP and over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError

from tests.fixtures.waiting import Turns
from tests.integration.gateway import Stage, until
from tests.integration.tools import ToolWorld, client, piped, tool_world, words

pytestmark = pytest.mark.integration
MODES = ["auto", "legacy"]
SERVERS = {
    "pipes": piped("-m", "tests.fixtures.mcp_server", "--stdio"),
    "time": piped("-m", "mcp_server_time", "--local-timezone", "UTC"),
    "git": piped("-m", "mcp_server_git"),
    "away": {"url": "http://127.0.0.1:9/mcp"},
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


@pytest.fixture(scope="module")
def world(stage: Stage) -> Iterator[ToolWorld]:
    context = tool_world(SERVERS)
    made = stage.run(context.__aenter__())
    yield made
    stage.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mount", ["/fixture", "/pipes"])
def test_tools_prompts_and_resources_of_one_server(
    stage: Stage, world: ToolWorld, mount: str, mode: str
):
    async def main():
        async with client(world.url(mount), mode=mode) as one:
            listed = [tool.name for tool in (await one.list_tools()).tools]
            told = await one.call_tool("echo", {"text": "hällo", "n": 3})
            failed = await one.call_tool("test_error_handling", {})
            prompt = await one.get_prompt("test_simple_prompt")
            resource = await one.read_resource("test://static-text")
            return listed, told, failed, prompt, resource

    listed, told, failed, prompt, resource = stage.run(main())
    assert "echo" in listed
    assert words(told) == "hällo3"
    assert failed.is_error
    assert prompt.messages
    assert "static text resource" in resource.contents[0].text


@pytest.mark.parametrize("mode", MODES)
def test_progress_reaches_a_client_through_a_stream_and_through_a_pipe(
    stage: Stage, world: ToolWorld, mode: str
):
    async def main(mount):
        seen: list[float] = []

        async def progress(done, _total, _message):
            seen.append(done)

        async with client(world.url(mount), mode=mode) as one:
            await one.call_tool("test_tool_with_progress", {}, progress_callback=progress)
        return seen

    assert stage.run(main("/fixture")) == [0, 50, 100]
    assert stage.run(main("/pipes")) == [0, 50, 100]


def test_many_callers_share_one_process_and_each_gets_its_own_answer(
    stage: Stage, world: ToolWorld
):
    async def one_of(number):
        async with client(world.url("/pipes"), mode=MODES[number % 2]) as one:
            return words(await one.call_tool("echo", {"n": number + 1}))

    async def main():
        return await asyncio.gather(*(one_of(number) for number in range(12)))

    assert stage.run(main()) == [str(number + 1) for number in range(12)]


@pytest.mark.parametrize("mode", MODES)
def test_the_federation_serves_what_works_and_names_what_does_not(
    stage: Stage, world: ToolWorld, mode: str
):
    async def main():
        async with client(world.url(""), mode=mode) as one:
            listed = await one.list_tools()
            now = await one.call_tool("time__get_current_time", {"timezone": "Europe/Paris"})
            told = await one.call_tool("pipes__echo", {"text": "x"})
            with pytest.raises(MCPError) as wrong:
                await one.call_tool("away__echo", {})
            return listed, now, told, wrong.value

    listed, now, told, wrong = stage.run(main())
    names = {tool.name for tool in listed.tools}
    assert {"fixture__echo", "pipes__echo", "time__get_current_time", "git__git_status"} <= names
    assert "Paris" in words(now)
    assert words(told) == "x"
    assert wrong.error.code == -31502
    assert list((listed.meta or {})["tidegate/servers"]) == ["away"]


async def told_of(change: Callable[[], Awaitable[object]], hearing: Awaitable[object]) -> object:
    """What is heard of a change. The gateway begins to listen once somebody wants to know, so one
    change may be too early."""
    heard = asyncio.ensure_future(hearing)
    while not heard.done():
        await asyncio.sleep(1)
        await change()
        await asyncio.wait({heard}, timeout=2)
    return heard.result()


@pytest.mark.parametrize("server", ["fixture", "pipes"])
def test_a_client_of_the_federation_hears_that_tools_changed_in_either_era(
    stage: Stage, world: ToolWorld, server: str
):
    trigger = f"{server}__test_trigger_tool_change"

    async def new():
        async with client(world.url("")) as one, one.listen(tools_list_changed=True) as heard:
            return await told_of(lambda: one.call_tool(trigger, {}), anext(aiter(heard)))

    async def old():
        heard: asyncio.Queue[object] = asyncio.Queue()

        async def told(message: object) -> None:
            await heard.put(message)

        async with client(world.url(""), mode="legacy", message_handler=told) as one:
            return await told_of(lambda: one.call_tool(trigger, {}), heard.get())

    assert type(stage.run(new())).__name__ == "ToolsListChanged"
    assert "ToolListChanged" in repr(stage.run(old()))


def test_a_real_git_server_answers_for_a_real_repository(stage: Stage, world: ToolWorld):
    folder = world.folder / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "new.txt").write_text("x")

    async def main():
        async with client(world.url("/git")) as one:
            return words(await one.call_tool("git_status", {"repo_path": str(folder)}))

    assert "new.txt" in stage.run(main())


def test_a_command_that_dies_is_started_anew_and_its_sessions_go_on(stage: Stage, world: ToolWorld):
    async def main(mode):
        async with client(world.url("/pipes"), mode=mode) as one:
            await one.call_tool("echo", {"n": 1})
            (pid,) = children(world.gateway.pid, "tests.fixtures.mcp_server")
            os.kill(pid, signal.SIGKILL)
            # a zombie has no command line any more, but is dead to the gateway once it is reaped
            await until(lambda: not Path(f"/proc/{pid}").exists())
            again = words(await one.call_tool("echo", {"n": 2}))
            (fresh,) = children(world.gateway.pid, "tests.fixtures.mcp_server")
            return again, fresh != pid

    assert stage.run(main("auto")) == ("2", True)
    assert stage.run(main("legacy")) == ("2", True)


def test_a_call_whose_client_leaves_is_cancelled_in_the_new_era(stage: Stage, world: ToolWorld):
    async def main():
        async with Turns() as since:
            async with client(world.url("/fixture"), read_timeout_seconds=1) as one:
                with pytest.raises(MCPError):
                    await one.call_tool("slow", {"seconds": 30})
            return since.seconds

    assert stage.run(main()) < 10


def test_the_process_stops_at_once_and_leaves_no_command_behind(stage: Stage):
    async def main():
        async with tool_world({"pipes": SERVERS["pipes"]}) as made:
            async with client(made.url("/pipes")) as one:
                await one.call_tool("echo", {"n": 1})
            pids = children(made.gateway.pid, "tests.fixtures.mcp_server")
            async with Turns() as since:
                await made.gateway.stop()
                seconds = since.seconds
            await until(lambda: not any(_runs(pid) for pid in pids))
            return pids, seconds

    pids, seconds = stage.run(main())
    assert len(pids) == 1
    assert seconds < 12


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b") ")[2][:1] != b"Z"  # whoever adopts it may take its time


def children(parent: int, word: str) -> list[int]:
    """Live children of a process whose command holds that word."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            stat = (folder / "stat").read_bytes() if folder.name.isdigit() else b""
            command = (folder / "cmdline").read_bytes() if stat else b""
        except OSError:
            continue
        state, owner = (stat.rpartition(b") ")[2].split() or [b"Z", b"0"])[:2]
        if int(owner) == parent and word.encode() in command and state != b"Z":
            found.append(int(folder.name))
    return found


def test_a_stopping_gateway_ends_a_subscription_and_does_not_wait_for_it(stage: Stage):
    async def main():
        patient = {"drain": "120s"}  # calls in flight would be waited for so long
        async with (
            contextlib.AsyncExitStack() as stack,
            tool_world(edge=patient) as made,
            client(made.url("")) as one,
        ):
            async with one.listen(tools_list_changed=True) as heard:
                since = await stack.enter_async_context(Turns())
                stopping = asyncio.ensure_future(made.gateway.stop())
                events = [event async for event in heard]  # one that broke off would raise
            await stopping
            return events, since.seconds

    events, seconds = stage.run(main(), 100)
    assert events == []
    assert seconds < 60
