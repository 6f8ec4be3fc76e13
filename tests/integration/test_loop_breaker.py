"""Agents that repeat themselves, on both SDKs and all three APIs, through the real process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.fixtures.waiting import Turns
from tests.integration.gateway import Stage, World, fetch, policy, staged

pytestmark = pytest.mark.integration

CONTAINED = 1.2
"""Seconds from the third repetition until nothing reaches the provider any more."""

ARGUMENTS = (
    '{"city":"Ulm","unit":"C"}',
    '{ "unit": "C", "city": "Ulm" }',
    '{"city":"Ulm","unit":"C" }',
)


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    with staged(policy(loops={"mode": "enforce", "polling_tools": ["wait"]})) as made:
        yield made


class Agent:
    """One conversation on one API, with an SDK's own retries; it only ever repeats itself."""

    def __init__(self, world: World, mark: str) -> None:
        base = f"http://127.0.0.1:{world.edge.port}"
        key = world.gateway.key
        session = {"x-claude-code-session-id": mark}
        self.mark = mark
        self.gpt = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, default_headers=session)
        self.claude = anthropic.AsyncAnthropic(base_url=base, api_key=key, default_headers=session)
        self.history: list[Any] = [{"role": "user", "content": f"<{mark}> What is the weather?"}]
        self.steps = 0

    async def close(self) -> None:
        await self.gpt.close()
        await self.claude.close()

    async def ask(self) -> Any:
        """One model call with the history so far; the raw answer."""
        raise NotImplementedError

    def repeat(self, tool: str = "weather") -> None:
        """The model called the tool once more, and got the same."""
        raise NotImplementedError

    def speak(self) -> None:
        """The user says something."""
        self.history.append({"role": "user", "content": "Try another way."})

    def name(self) -> str:
        self.steps += 1
        return f"call_{self.mark}_{self.steps:04}"


class Chat(Agent):
    async def ask(self) -> Any:
        return await self.gpt.chat.completions.with_raw_response.create(
            model="gpt-now", messages=self.history
        )

    def repeat(self, tool: str = "weather") -> None:
        key, arguments = self.name(), ARGUMENTS[self.steps % 3]
        call = {"id": key, "type": "function", "function": {"name": tool, "arguments": arguments}}
        self.history += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": key, "content": "rain"},
        ]


class Responses(Agent):
    async def ask(self) -> Any:
        return await self.gpt.responses.with_raw_response.create(
            model="gpt-now", input=self.history
        )

    def repeat(self, tool: str = "weather") -> None:
        key, arguments = self.name(), ARGUMENTS[self.steps % 3]
        self.history += [
            {"type": "function_call", "call_id": key, "name": tool, "arguments": arguments},
            {"type": "function_call_output", "call_id": key, "output": "rain"},
        ]


class Messages(Agent):
    async def ask(self) -> Any:
        return await self.claude.messages.with_raw_response.create(
            model="claude-now", max_tokens=100, messages=self.history
        )

    def repeat(self, tool: str = "weather") -> None:
        key = self.name()
        asked = {"city": "Ulm", "unit": "C"} if self.steps % 2 else {"unit": "C", "city": "Ulm"}
        self.history += [
            {"role": "assistant",
             "content": [{"type": "tool_use", "id": key, "name": tool, "input": asked}]},
            {"role": "user",
             "content": [{"type": "tool_result", "tool_use_id": key, "content": "rain"}]},
        ]  # fmt: skip


APIS = (Chat, Responses, Messages)


async def looped(agent: Agent) -> tuple[Any, float]:
    """The refusal, and how long after the third repetition was sent it came."""
    third = 0.0
    async with Turns() as since:
        for count in range(10):
            if count == 3:
                third = since.seconds
            try:
                answer = await agent.ask()
            except (openai.RateLimitError, anthropic.RateLimitError) as error:
                assert count == 4
                return error, since.seconds - third
            warned = answer.headers.get("tidegate-warning", "")
            assert ("loops.same_call" in warned) is (count == 3)
            agent.repeat()
    raise AssertionError("it went on")


@pytest.mark.parametrize("api", APIS)
def test_a_looping_agent_is_contained_and_its_session_lives(scene, api):
    stage, world = scene

    async def scenario() -> None:
        agent = api(world, f"loop-{api.__name__}")
        try:
            error, seconds = await looped(agent)
            assert seconds < CONTAINED
            assert error.response.headers["x-should-retry"] == "false"
            assert "weather(" in str(error)
            assert "A new user message" in str(error)
            needle = f"<loop-{api.__name__}>"
            # The SDK did not try again, and the provider never saw the fifth.
            assert len(world.edge.exchanges(needle)) == 5
            assert len(world.upstream.exchanges(needle)) == 4
            agent.speak()
            await agent.ask()
            for _ in range(2):
                agent.repeat()
                await agent.ask()
        finally:
            await agent.close()

    stage.run(scenario())


TOOL: Any = {
    "type": "function", "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Ulm"]}},
                   "required": ["city"], "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_that_only_the_provider_remembers_is_contained(scene, stream):
    """The agent sends results alone, and the emulator's model calls the one tool for ever."""
    stage, world = scene

    async def ask(agent: Agent, **more: Any) -> Any:
        made = await agent.gpt.responses.create(
            model="gpt-now", tools=[TOOL], tool_choice="required", stream=stream, **more
        )
        if not stream:
            return made
        ended = [event.response async for event in made if event.type == "response.completed"]
        return ended.pop()

    async def refused(agent: Agent, answer: Any) -> tuple[openai.RateLimitError, Any, int]:
        """The refusal, the last answer before it, and how many results were sent."""
        sent = 0
        for _ in range(10):
            results: Any = [
                {"type": "function_call_output", "call_id": one.call_id, "output": "rain"}
                for one in answer.output
                if one.type == "function_call"
            ]
            sent += len(results)
            try:
                answer = await ask(agent, input=results, previous_response_id=answer.id)
            except openai.RateLimitError as error:
                return error, answer, sent
        raise AssertionError("it went on")

    async def scenario() -> None:
        agent = Agent(world, f"chain-{stream}")
        try:
            answer = await ask(agent, input=f"<chain-{stream}> What is the weather?")
            error, answer, sent = await refused(agent, answer)
            assert "The tool call weather was made" in str(error)
            assert 4 <= sent <= 8, "answers of the emulator hold one call or two"
            await ask(agent, input="Try another way.", previous_response_id=answer.id)
        finally:
            await agent.close()

    stage.run(scenario())


def test_agents_of_one_session_side_by_side_do_not_add_up(scene):
    stage, world = scene

    async def one(number: int) -> None:
        agent = Chat(world, f"side-{number}")
        agent.gpt = agent.gpt.with_options(default_headers={"x-claude-code-session-id": "shared"})
        try:
            for _ in range(3):
                await agent.ask()
                agent.repeat()
        finally:
            await agent.close()

    async def scenario() -> None:
        await asyncio.gather(*(one(number) for number in range(8)))

    stage.run(scenario())


def test_a_polling_tool_may_repeat(scene):
    stage, world = scene

    async def scenario() -> None:
        agent = Chat(world, "poll")
        try:
            for _ in range(8):
                await agent.ask()
                agent.repeat("wait")
        finally:
            await agent.close()

    stage.run(scenario())


async def command(*words: str) -> tuple[int, str, str]:
    """Exit status and what `tidegate` said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


def test_the_operators_command_sends_a_session_on(scene):
    stage, world = scene

    async def scenario() -> None:
        agent = Chat(world, "command")
        admin = f"--admin=http://127.0.0.1:{world.gateway.admin}"
        try:
            await looped(agent)
            assert await command("loops", "reset", "command", admin) == (0, "reset: 1\n", "")
            await agent.ask()
            code, _, said = await command("loops", "reset", "nobody", admin)
            assert (code, said) == (1, "tidegate: nothing is remembered of 'nobody'\n")
        finally:
            await agent.close()

    stage.run(scenario())


def test_the_operator_sends_a_session_on_and_sees_what_happened(scene):
    stage, world = scene

    async def scenario() -> None:
        agent = Chat(world, "reset")
        try:
            await looped(agent)
            answer = await fetch(world.gateway.admin, "/loops/reset?session=reset", {})
            assert answer.json() == {"reset": 1}
            await agent.ask()
            assert (await world.gateway.status())["conversations"] >= 1
            refused = await world.gateway.total(
                "tidegate_loops_total", rule="same_call", stage="refused"
            )
            assert refused >= 1
            lines = [
                line for line in world.gateway.events() if line.get("because") == "loops.same_call"
            ]
            assert lines
            assert not any("Ulm" in str(line) for line in lines), "arguments are nobody's business"
        finally:
            await agent.close()

    stage.run(scenario())
