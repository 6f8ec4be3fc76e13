"""The emulator on a socket: the real SDKs parse all it says, faults reach the wire, books agree."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anthropic
import httpx
import jsonschema
import openai
import pytest
import tiktoken
import uvloop
import zstandard

from gateway.admission.profiles import Accounting, Profile
from gateway.emulator.config import (
    Answers,
    EmulatorConfig,
    Fault,
    LimitRule,
    ModelSpec,
    Pacing,
)
from gateway.emulator.server import Running, bind, running, serve
from gateway.emulator.text import Draw, Reel
from gateway.settings import export_vocabulary_dir, from_environment
from gateway.simulate.meters import Quota, Shape
from tests.fixtures.waiting import PATIENCE_S, until

pytestmark = pytest.mark.integration

VOCABULARIES = {
    "o200k_base": "fb374d419588a4632f3f557e76b4b70aebbca790",
    "cl100k_base": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
}
QUIET = Answers(tool_probability=0.0)
FAST = EmulatorConfig(pacing=Pacing(), answers=QUIET)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}


def chat_tools() -> list[dict]:
    return [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "get_time", "parameters": CLOCK}},
    ]


@asynccontextmanager
async def sdks(
    config: EmulatorConfig = FAST,
) -> AsyncIterator[tuple[Running, openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    async with (
        running(config) as up,
        openai.AsyncOpenAI(base_url=up.url + "/v1", api_key="sk-test", max_retries=0) as gpt,
        anthropic.AsyncAnthropic(base_url=up.url, api_key="sk-ant", max_retries=0) as claude,
    ):
        yield up, gpt, claude


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def run(coroutine) -> None:
    with asyncio.Runner() as runner:
        runner.run(coroutine)


# --- OpenAI -------------------------------------------------------------------------------------


def test_chat_plain_and_streamed_say_the_same_with_the_same_usage():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            plain = await gpt.chat.completions.create(model="gpt-4o", messages=say("hello"))
            stream = await gpt.chat.completions.create(
                model="gpt-4o",
                messages=say("hello"),
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == plain.choices[0].message.content
            assert plain.choices[0].finish_reason == "stop"
            assert chunks[-1].choices == []
            assert chunks[-1].usage == plain.usage
            assert all(chunk.usage is None for chunk in chunks[:-1])
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[0].choices[0].delta.role == "assistant"
            assert plain.model == "gpt-4o"
            assert plain.id.startswith("chatcmpl-")
            assert len({chunk.id for chunk in chunks} | {plain.id}) == 2

    run(scenario())


def test_a_stream_without_include_usage_carries_none():
    async def scenario() -> None:
        async with sdks() as (up, gpt, _claude):
            stream = await gpt.chat.completions.create(
                model="gpt-4o", messages=say("hello"), stream=True
            )
            assert all([chunk.usage is None and chunk.choices async for chunk in stream])
            assert up.app.ledger()["reported"]["usages"] == 0

    run(scenario())


def test_a_cap_is_obeyed_in_every_dialect():
    async def scenario() -> None:
        async with sdks() as (_, gpt, claude):
            chat = await gpt.chat.completions.create(
                model="gpt-4o", messages=say("hello"), max_completion_tokens=7
            )
            assert chat.choices[0].finish_reason == "length"
            assert chat.usage.completion_tokens == 7
            text = await gpt.completions.create(model="gpt-3.5-turbo-instruct", prompt="Say")
            assert text.choices[0].finish_reason == "length"
            assert text.usage.completion_tokens == 16
            response = await gpt.responses.create(
                model="gpt-5.4", input="hello", max_output_tokens=16
            )
            assert response.status == "incomplete"
            assert response.incomplete_details.reason == "max_output_tokens"
            assert response.usage.output_tokens == 16
            message = await claude.messages.create(
                model="claude-sonnet-4-6", messages=say("hello"), max_tokens=9
            )
            assert message.stop_reason == "max_tokens"
            assert message.usage.output_tokens == 9

    run(scenario())


def test_completions_stream_with_several_prompts_and_choices():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            stream = await gpt.completions.create(
                model="gpt-3.5-turbo-instruct",
                prompt=["one", "two"],
                n=2,
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert {c.choices[0].index for c in chunks if c.choices} == {0, 1, 2, 3}
            assert chunks[-1].usage.completion_tokens == 20

    run(scenario())


def test_chat_choices_are_interleaved_and_each_ends_once():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            stream = await gpt.chat.completions.create(
                model="gpt-4o", messages=say("hello"), n=3, max_tokens=20, stream=True
            )
            finished = []
            order = []
            async for chunk in stream:
                order.append(chunk.choices[0].index)
                if chunk.choices[0].finish_reason:
                    finished.append(chunk.choices[0].index)
            assert sorted(finished) == [0, 1, 2]
            assert order[:6] == [0, 1, 2, 0, 1, 2]

    run(scenario())


def test_chat_tools_a_named_tool_is_called_and_its_result_answered_with_text():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            question = say("What does get_weather say?")
            first = await gpt.chat.completions.create(
                model="gpt-4o", messages=question, tools=chat_tools()
            )
            [call] = first.choices[0].message.tool_calls
            assert first.choices[0].finish_reason == "tool_calls"
            assert call.function.name == "get_weather"
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
            messages = [
                *question,
                first.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
            ]
            second = await gpt.chat.completions.create(
                model="gpt-4o", messages=messages, tools=chat_tools()
            )
            assert second.choices[0].finish_reason == "stop"
            assert second.choices[0].message.content

    run(scenario())


def test_chat_tools_parallel_calls_stream_and_accumulate():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            async with gpt.chat.completions.stream(
                model="gpt-4o",
                messages=say("Use get_weather and get_time."),
                tools=chat_tools(),
                stream_options={"include_usage": True},
            ) as stream:
                final = await stream.get_final_completion()
            calls = final.choices[0].message.tool_calls
            assert [call.function.name for call in calls] == ["get_weather", "get_time"]
            jsonschema.validate(json.loads(calls[0].function.arguments), WEATHER)
            jsonschema.validate(json.loads(calls[1].function.arguments), CLOCK)
            assert len({call.id for call in calls}) == 2
            one = await gpt.chat.completions.create(
                model="gpt-4o",
                messages=say("Use get_weather and get_time."),
                tools=chat_tools(),
                parallel_tool_calls=False,
            )
            assert len(one.choices[0].message.tool_calls) == 1

    run(scenario())


def test_a_json_schema_answer_fits_its_schema():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            answer = await gpt.chat.completions.create(
                model="gpt-4o",
                messages=say("weather as JSON"),
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "w", "schema": WEATHER, "strict": True},
                },
            )
            jsonschema.validate(json.loads(answer.choices[0].message.content), WEATHER)
            response = await gpt.responses.create(
                model="gpt-5.4",
                input="weather",
                text={"format": {"type": "json_schema", "name": "w", "schema": WEATHER}},
            )
            jsonschema.validate(json.loads(response.output_text), WEATHER)

    run(scenario())


def test_responses_events_come_in_order_and_numbered():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            stream = await gpt.responses.create(model="gpt-5.4", input="hello", stream=True)
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type for event in events]
            deltas = kinds.count("response.output_text.delta")
            assert kinds == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                *["response.output_text.delta"] * deltas,
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
            final = events[-1].response
            text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            assert final.output_text == text
            assert final.usage.output_tokens == deltas
            async with gpt.responses.stream(model="gpt-5.4", input="hello") as helper:
                again = await helper.get_final_response()
            assert again.output_text == text

    run(scenario())


def test_responses_tools_stream_and_continue_a_stored_response():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            tools = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
            async with gpt.responses.stream(
                model="gpt-5.4", input="call get_weather", tools=tools
            ) as stream:
                kinds = [event.type async for event in stream]
                first = await stream.get_final_response()
            assert "response.function_call_arguments.delta" in kinds
            [call] = first.output
            assert call.type == "function_call"
            jsonschema.validate(json.loads(call.arguments), WEATHER)
            second = await gpt.responses.create(
                model="gpt-5.4",
                previous_response_id=first.id,
                tools=tools,
                input=[
                    {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
                ],
            )
            assert second.output_text
            assert second.usage.input_tokens > first.usage.input_tokens
            assert (await gpt.responses.retrieve(first.id)).id == first.id
            await gpt.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await gpt.responses.retrieve(first.id)
            with pytest.raises(openai.BadRequestError, match="not found"):
                await gpt.responses.create(
                    model="gpt-5.4", input="x", previous_response_id="resp_none"
                )

    run(scenario())


def test_reasoning_tokens_are_reported_and_are_part_of_the_output():
    async def scenario() -> None:
        config = replace(FAST, answers=replace(QUIET, reasoning=0.5))
        async with sdks(config) as (up, gpt, _claude):
            response = await gpt.responses.create(model="gpt-5.4", input="hello")
            hidden = response.usage.output_tokens_details.reasoning_tokens
            assert 0 < hidden < response.usage.output_tokens
            assert [item.type for item in response.output] == ["reasoning", "message"]
            stream = await gpt.responses.create(model="gpt-5.4", input="hello", stream=True)
            last = [event async for event in stream][-1]
            assert last.response.usage == response.usage
            assert up.app.ledger()["produced"] == 2 * response.usage.output_tokens

    run(scenario())


def test_embeddings_in_both_encodings_are_equal_and_of_unit_length():
    async def scenario() -> None:
        async with sdks() as (_, gpt, _claude):
            coded = await gpt.embeddings.create(
                model="text-embedding-3-small", input=["one", "two"], dimensions=256
            )
            floats = await gpt.embeddings.create(
                model="text-embedding-3-small",
                input=["one", "two"],
                dimensions=256,
                encoding_format="float",
            )
            assert [len(item.embedding) for item in coded.data] == [256, 256]
            assert coded.data[0].embedding == pytest.approx(floats.data[0].embedding)
            assert coded.data[0].embedding != coded.data[1].embedding
            assert sum(x * x for x in coded.data[0].embedding) == pytest.approx(1, abs=1e-5)
            ids = await gpt.embeddings.create(model="text-embedding-3-small", input=[[1, 2, 3]])
            assert ids.usage.prompt_tokens == 3
            assert len(ids.data) == 1
            assert len(ids.data[0].embedding) == 1_536

    run(scenario())


def test_models_are_listed_in_the_shape_of_whoever_asks():
    async def scenario() -> None:
        async with sdks() as (_, gpt, claude):
            names = [model.id async for model in gpt.models.list()]
            assert "gpt-4o" in names
            assert (await gpt.models.retrieve("gpt-4o")).owned_by == "openai"
            listed = [model async for model in claude.models.list()]
            assert [model.id for model in listed] == names
            assert (await claude.models.retrieve("claude-opus-5")).max_tokens == 128_000

    run(scenario())


# --- Anthropic ----------------------------------------------------------------------------------


def test_messages_plain_and_streamed_say_the_same_with_the_same_usage():
    async def scenario() -> None:
        async with sdks() as (_, _gpt, claude):
            plain = await claude.messages.create(
                model="claude-opus-5", messages=say("hello"), max_tokens=1_000
            )
            async with claude.messages.stream(
                model="claude-opus-5", messages=say("hello"), max_tokens=1_000
            ) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_message()
            assert final.content[0].text == plain.content[0].text
            assert final.usage.input_tokens == plain.usage.input_tokens
            assert final.usage.output_tokens == plain.usage.output_tokens
            assert final.stop_reason == plain.stop_reason == "end_turn"
            started = next(event for event in events if event.type == "message_start")
            assert started.message.usage.output_tokens == 1

    run(scenario())


def test_messages_tools_call_and_answer_streamed():
    async def scenario() -> None:
        async with sdks() as (_, _gpt, claude):
            tools = [
                {"name": "get_weather", "input_schema": WEATHER},
                {"name": "get_time", "input_schema": CLOCK},
            ]
            question = say("ask get_weather and get_time")
            async with claude.messages.stream(
                model="claude-opus-5", messages=question, tools=tools, max_tokens=1_000
            ) as stream:
                first = await stream.get_final_message()
            calls = [block for block in first.content if block.type == "tool_use"]
            assert first.stop_reason == "tool_use"
            assert [call.name for call in calls] == ["get_weather", "get_time"]
            jsonschema.validate(calls[0].input, WEATHER)
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "fine"} for call in calls
            ]
            second = await claude.messages.create(
                model="claude-opus-5",
                max_tokens=1_000,
                tools=tools,
                messages=[
                    *question,
                    {
                        "role": "assistant",
                        "content": [c.model_dump(exclude_none=True) for c in calls],
                    },
                    {"role": "user", "content": results},
                ],
            )
            assert second.stop_reason == "end_turn"
            forced = await claude.messages.create(
                model="claude-opus-5",
                max_tokens=1_000,
                tools=tools,
                tool_choice={"type": "tool", "name": "get_time"},
                messages=say("hello"),
            )
            assert [block.name for block in forced.content] == ["get_time"]

    run(scenario())


def test_thinking_blocks_are_signed_and_may_be_sent_back():
    async def scenario() -> None:
        async with sdks() as (_, _gpt, claude):
            async with claude.messages.stream(
                model="claude-opus-5",
                messages=say("hello"),
                max_tokens=4_000,
                thinking={"type": "enabled", "budget_tokens": 1_024},
            ) as stream:
                message = await stream.get_final_message()
            thinking, text = message.content
            assert thinking.type == "thinking"
            assert thinking.signature
            again = await claude.messages.create(
                model="claude-opus-5",
                max_tokens=4_000,
                messages=[
                    *say("hello"),
                    {"role": "assistant", "content": [thinking.model_dump(), text.model_dump()]},
                    *say("go on"),
                ],
            )
            assert again.content[0].type == "text"

    run(scenario())


def test_stop_sequences_cut_the_text_and_name_themselves():
    async def scenario() -> None:
        async with sdks() as (_, gpt, claude):
            message = await claude.messages.create(
                model="claude-opus-5", messages=say("hello"), max_tokens=900, stop_sequences=["."]
            )
            assert message.stop_reason == "stop_sequence"
            assert message.stop_sequence == "."
            assert "." not in message.content[0].text
            chat = await gpt.chat.completions.create(
                model="gpt-4o", messages=say("hello"), stop=["."]
            )
            assert chat.choices[0].finish_reason == "stop"
            assert "." not in chat.choices[0].message.content

    run(scenario())


def test_count_tokens_agrees_with_the_reported_input():
    async def scenario() -> None:
        async with sdks() as (up, _gpt, claude):
            asked = {
                "model": "claude-opus-5",
                "messages": say("hello there"),
                "system": "Be brief.",
                "tools": [{"name": "get_time", "input_schema": CLOCK}],
            }
            counted = await claude.messages.count_tokens(**asked)
            message = await claude.messages.create(**asked, max_tokens=50)
            assert counted.input_tokens == message.usage.input_tokens
            assert up.app.ledger()["other"] == {"count_tokens": 1}

    run(scenario())


def test_prompt_caches_are_reported_the_way_each_provider_does():
    async def scenario() -> None:
        async with sdks() as (up, gpt, claude):
            long = "All work and no play makes a dull day. " * 200
            history = [{"role": "system", "content": long}, *say("first")]
            one = await gpt.chat.completions.create(model="gpt-4o", messages=history)
            history += [{"role": "assistant", "content": "fine"}, *say("second")]
            two = await gpt.chat.completions.create(model="gpt-4o", messages=history)
            assert one.usage.prompt_tokens_details.cached_tokens == 0
            assert two.usage.prompt_tokens_details.cached_tokens >= 1_024
            assert two.usage.prompt_tokens_details.cached_tokens % 128 == 0
            system = [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]
            ask = {"model": "claude-opus-5", "max_tokens": 20, "system": system}
            first = await claude.messages.create(**ask, messages=say("first"))
            second = await claude.messages.create(**ask, messages=say("second"))
            assert first.usage.cache_creation_input_tokens > 1_000
            assert first.usage.cache_read_input_tokens == 0
            assert second.usage.cache_read_input_tokens == first.usage.cache_creation_input_tokens
            assert second.usage.cache_creation_input_tokens == 0
            assert second.usage.input_tokens < 20
            reported = up.app.ledger()["reported"]
            assert reported["cache_write"] == first.usage.cache_creation_input_tokens

    run(scenario())


# --- determinism and errors ---------------------------------------------------------------------


def test_two_emulators_with_one_seed_agree_and_with_another_do_not():
    async def text(seed: int) -> str:
        async with sdks(replace(FAST, seed=seed)) as (_, gpt, _claude):
            answer = await gpt.chat.completions.create(model="gpt-4o", messages=say("hello"))
            return answer.choices[0].message.content

    async def scenario() -> None:
        assert await text(1) == await text(1)
        assert await text(1) != await text(2)

    run(scenario())


def test_sdks_raise_their_own_errors_for_keys_models_and_bodies():
    async def scenario() -> None:
        config = replace(
            FAST,
            require_key=True,
            keys={"sk-good": "alice"},
            any_model=False,
            models=(ModelSpec(name="gpt-4o", context=2_000, max_output=500),),
        )
        async with sdks(config) as (up, gpt, claude):
            with pytest.raises(openai.AuthenticationError) as wrong:
                await gpt.chat.completions.create(model="gpt-4o", messages=say("x"))
            assert wrong.value.code == "invalid_api_key"
            assert "sk-test" not in str(wrong.value.response.text)
            with pytest.raises(anthropic.AuthenticationError):
                await claude.messages.create(model="gpt-4o", messages=say("x"), max_tokens=5)
            good = gpt.with_options(api_key="sk-good")
            with pytest.raises(openai.NotFoundError) as unknown:
                await good.chat.completions.create(model="gpt-9", messages=say("x"))
            assert unknown.value.code == "model_not_found"
            mine = claude.with_options(api_key="sk-good")
            with pytest.raises(anthropic.NotFoundError, match="model: claude-9"):
                await mine.messages.create(model="claude-9", messages=say("x"), max_tokens=5)
            with pytest.raises(openai.BadRequestError) as long:
                await good.chat.completions.create(model="gpt-4o", messages=say("word " * 4_000))
            assert long.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="too large"):
                await good.chat.completions.create(
                    model="gpt-4o", messages=say("x"), max_tokens=501
                )
            assert [row["key"] for row in up.app.ledger()["rows"]][-1] == "alice"

    run(scenario())


def test_a_quota_refusal_is_what_each_sdk_calls_a_rate_limit_with_a_true_retry_after():
    async def scenario() -> None:
        limits = (LimitRule(name="two", quota=Quota(requests=2), per="model"),)
        async with sdks(replace(FAST, limits=limits)) as (up, gpt, claude):
            for _ in range(2):
                raw = await gpt.chat.completions.with_raw_response.create(
                    model="gpt-4o", messages=say("x"), max_tokens=2
                )
            assert raw.headers["x-ratelimit-limit-requests"] == "2"
            assert raw.headers["x-ratelimit-remaining-requests"] == "0"
            with pytest.raises(openai.RateLimitError) as refused:
                await gpt.chat.completions.create(model="gpt-4o", messages=say("x"))
            assert refused.value.code == "rate_limit_exceeded"
            assert refused.value.type == "requests"
            assert 55 <= int(refused.value.response.headers["retry-after"]) <= 60
            assert 55_000 <= int(refused.value.response.headers["retry-after-ms"]) <= 60_001
            for _ in range(2):
                await claude.messages.create(model="claude-opus-5", messages=say("x"), max_tokens=2)
            with pytest.raises(anthropic.RateLimitError) as denied:
                await claude.messages.create(model="claude-opus-5", messages=say("x"), max_tokens=2)
            assert denied.value.body["error"]["type"] == "rate_limit_error"
            assert denied.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
            assert "retry-after-ms" not in denied.value.response.headers
            assert up.app.ledger()["refused"] == {"requests": 2}

    run(scenario())


@pytest.mark.parametrize(
    ("code", "status"), [("overloaded", 529), ("rate_limit", 429), ("insufficient_quota", 400)]
)
def test_scripted_refusals_reach_the_anthropic_sdk(code, status):
    async def scenario() -> None:
        config = replace(FAST, faults=(Fault(action="status", code=code),))
        async with sdks(config) as (_, _gpt, claude):
            with pytest.raises(anthropic.APIStatusError) as failed:
                await claude.messages.create(model="c", messages=say("x"), max_tokens=2)
            assert failed.value.status_code == status

    run(scenario())


def test_a_request_that_says_zstd_is_read():
    async def scenario() -> None:
        async with sdks() as (up, _gpt, _claude), httpx.AsyncClient(base_url=up.url) as client:
            raw = json.dumps({"model": "m", "messages": say("hi"), "max_tokens": 3}).encode()
            packed = zstandard.ZstdCompressor().compress(raw)
            headers = {"content-encoding": "zstd", "content-type": "application/json"}
            answer = await client.post("/v1/chat/completions", content=packed, headers=headers)
            assert answer.status_code == 200

    run(scenario())


# --- faults on the wire -------------------------------------------------------------------------


async def raw_call(
    up: Running, body: dict, path: str = "/v1/chat/completions", *, leave_after: bytes = b""
) -> tuple[bytes, str]:
    """The answer's bytes and how the connection ended: "fin", "rst", or "open" where we left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
    payload = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: x\r\nanthropic-version: 1\r\ncontent-length: "
        f"{len(payload)}\r\n\r\n".encode()
        + payload
    )
    got = b""
    end = "open"
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                part = await reader.read(65_536)
                if not part:
                    end = "fin"
                    break
                got += part
                if got.endswith(b"0\r\n\r\n") or (leave_after and leave_after in got):
                    break
    except ConnectionResetError:
        end = "rst"
    except TimeoutError:
        pass
    finally:
        writer.close()
    return got, end


def stream_body(text: str = "hello") -> dict:
    return {"model": "m", "messages": say(text), "stream": True, "max_tokens": 50}


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(("action", "end"), [("reset", "rst"), ("cut", "fin")])
def test_a_connection_is_broken_after_exactly_so_many_bytes(action, end, loop):
    async def scenario() -> None:
        fault = Fault(action=action, after_bytes=700, nth=(1,))
        async with running(replace(FAST, faults=(fault,))) as up:
            got, seen = await raw_call(up, stream_body())
            assert seen == end
            head, _, body = got.partition(b"\r\n\r\n")
            assert b"200 OK" in head
            assert sum(len(part) for part in unchunked(body)) == 700
            got, seen = await raw_call(up, stream_body())
            assert seen == "open" or got.endswith(b"0\r\n\r\n")
            ledger = up.app.ledger()
            assert (ledger["faulted"], ledger["completed"], ledger["in_flight"]) == (1, 1, 0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


def unchunked(body: bytes) -> list[bytes]:
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return parts


@pytest.mark.parametrize("action", ["reset", "cut"])
def test_a_connection_may_be_broken_before_any_byte(action):
    async def scenario() -> None:
        async with running(replace(FAST, faults=(Fault(action=action),))) as up:
            got, seen = await raw_call(up, stream_body())
            assert got == b""
            assert seen == ("rst" if action == "reset" else "fin")

    run(scenario())


def test_a_plain_body_may_be_cut_below_its_length():
    async def scenario() -> None:
        fault = Fault(action="cut", after_bytes=100)
        async with running(replace(FAST, faults=(fault,))) as up:
            got, seen = await raw_call(up, {**stream_body(), "stream": False})
            head, _, body = got.partition(b"\r\n\r\n")
            assert len(body) == 100
            assert seen == "fin"
            assert int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) > 100

    run(scenario())


@pytest.mark.parametrize(
    ("path", "needle"),
    [
        ("/v1/chat/completions", b'data: {"error":{"message"'),
        ("/v1/messages", b'event: error\ndata: {"type":"error"'),
    ],
)
def test_an_error_event_ends_a_stream_without_a_terminal_mark(path, needle):
    async def scenario() -> None:
        fault = Fault(action="error_event", after_events=4, code="overloaded")
        async with running(replace(FAST, faults=(fault,))) as up:
            got, _ = await raw_call(up, stream_body(), path)
            assert needle in got
            assert b"[DONE]" not in got
            assert b"message_stop" not in got
            assert up.app.ledger()["faulted"] == 1
            assert up.app.ledger()["reported"]["usages"] == 0

    run(scenario())


def test_sdks_see_an_error_event_as_their_own_error():
    async def scenario() -> None:
        config = replace(FAST, faults=(Fault(action="error_event", after_events=4),))
        async with sdks(config) as (_, gpt, claude):
            stream = await gpt.chat.completions.create(**stream_body())
            with pytest.raises(openai.APIError):
                _ = [chunk async for chunk in stream]
            with pytest.raises(anthropic.APIStatusError):
                async with claude.messages.stream(
                    model="m", messages=say("x"), max_tokens=50
                ) as messages:
                    await messages.get_final_message()

    run(scenario())


def test_a_malformed_event_is_one_among_good_ones():
    async def scenario() -> None:
        fault = Fault(action="malformed", after_events=3)
        async with running(replace(FAST, faults=(fault,))) as up:
            got, _ = await raw_call(up, stream_body())
            events = b"".join(unchunked(got.partition(b"\r\n\r\n")[2])).split(b"\n\n")
            bad = 0
            for event in events:
                if event.startswith(b"data: {"):
                    try:
                        json.loads(event[6:])
                    except ValueError:
                        bad += 1
            assert bad == 1
            assert got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    run(scenario())


def test_a_flood_is_one_event_of_that_size():
    async def scenario() -> None:
        fault = Fault(action="flood", after_events=1, size=2**21)
        async with sdks(replace(FAST, faults=(fault,))) as (_, gpt, _claude):
            stream = await gpt.chat.completions.create(**stream_body())
            lengths = [len(c.choices[0].delta.content or "") async for c in stream]
            assert max(lengths) == 2**21

    run(scenario())


def test_fragments_cut_everywhere_and_lose_nothing():
    async def scenario() -> None:
        mixed = replace(FAST, answers=replace(QUIET, script="mixed"))
        async with sdks(mixed) as (up, gpt, _claude):
            whole = await gpt.chat.completions.create(**{**stream_body("x"), "stream": False})
            up.app.set_faults((Fault(action="fragment", size=3),))
            stream = await gpt.chat.completions.create(**stream_body("x"))
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
            assert text == whole.choices[0].message.content
            assert not text.isascii()

    run(scenario())


@pytest.mark.parametrize(
    ("usage", "expected"), [("wrong", "twice"), ("missing", None), ("null", None), ("zero", 0)]
)
def test_usage_may_lie_be_missing_null_or_zero(usage, expected):
    async def scenario() -> None:
        fault = Fault(action="usage", usage=usage, factor=2.0)
        async with sdks(replace(FAST, faults=(fault,))) as (up, gpt, _claude):
            answer = await gpt.chat.completions.create(model="m", messages=say("x"), max_tokens=10)
            got = answer.usage.completion_tokens if answer.usage else None
            assert got == (20 if expected == "twice" else expected)
            ledger = up.app.ledger()
            assert ledger["charged"]["output"] == 10
            assert ledger["reported"]["output"] == (got or 0)

    run(scenario())


def test_a_client_that_leaves_a_stalled_stream_is_noticed_and_holds_nothing():
    async def scenario() -> None:
        limits = (LimitRule(name="one", quota=Quota(concurrency=1)),)
        faults = (Fault(action="stall", after_events=3, nth=(1,)),)
        config = replace(FAST, limits=limits, faults=faults)
        async with running(config) as up:
            got, end = await raw_call(up, stream_body(), leave_after=b"data: ")
            assert end == "open"
            assert b"data: " in got
            await until(lambda: up.app.ledger()["in_flight"] == 0)
            assert up.app.ledger()["abandoned"] == 1
            got, _ = await raw_call(up, stream_body())
            assert b"200 OK" in got

    run(scenario())


def test_a_client_that_leaves_a_paced_stream_stops_the_charges():
    async def scenario() -> None:
        pacing = Pacing(tokens_per_second=20)
        answers = replace(QUIET, median=2_000, sigma=0)
        async with running(EmulatorConfig(pacing=pacing, answers=answers)) as up:
            body = {**stream_body(), "max_tokens": 1_000}
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            payload = json.dumps(body).encode()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: "
                + str(len(payload)).encode()
                + b"\r\n\r\n"
                + payload
            )
            await reader.readuntil(b'"content":"')
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            await until(lambda: up.app.ledger()["in_flight"] == 0)
            first = up.app.ledger()
            assert first["abandoned"] == 1
            assert first["charged"]["output"] == first["produced"] < 40

    run(scenario())


# --- pacing, meters, books ----------------------------------------------------------------------


def test_pacing_spreads_an_answer_over_its_time():
    async def scenario() -> None:
        config = EmulatorConfig(pacing=Pacing(first_byte=0.1, tokens_per_second=100), answers=QUIET)
        async with sdks(config) as (_, gpt, _claude):
            loop = asyncio.get_running_loop()
            start = loop.time()
            stream = await gpt.chat.completions.create(**{**stream_body(), "max_tokens": 30})
            times = [loop.time() - start async for _ in stream]
            assert times[0] >= 0.09
            assert times[-1] >= 0.09 + 0.28
            start = loop.time()
            await gpt.chat.completions.create(model="m", messages=say("hello"), max_tokens=30)
            assert loop.time() - start >= 0.38

    run(scenario())


@pytest.mark.parametrize("profile", [Profile.UPFRONT_MAX, Profile.RESERVE_SETTLE, Profile.REALTIME])
@pytest.mark.parametrize("shape", [Shape.BUCKET, Shape.FIXED, Shape.SLIDING])
def test_books_balance_under_concurrent_calls(profile, shape):
    async def scenario() -> None:
        quota = Quota(
            shape=shape, requests=60, tokens=12_000, accounting=Accounting(profile=profile)
        )
        limits = (LimitRule(name="tight", quota=quota, phase=0),)
        async with sdks(replace(FAST, limits=limits)) as (up, gpt, _claude):

            async def one(i: int) -> tuple[int, int] | None:
                try:
                    answer = await gpt.chat.completions.create(
                        model="m", messages=say(f"call {i}"), max_tokens=300
                    )
                except openai.RateLimitError:
                    return None
                return answer.usage.prompt_tokens, answer.usage.completion_tokens

            outcomes = await asyncio.gather(*(one(i) for i in range(80)))
            served = [usage for usage in outcomes if usage is not None]
            ledger = up.app.ledger()
            assert ledger["requests"] == 80
            assert ledger["admitted"] == ledger["completed"] == len(served)
            assert sum(ledger["refused"].values()) == 80 - len(served) > 0
            assert ledger["reported"]["input"] == sum(usage[0] for usage in served)
            assert ledger["reported"]["output"] == sum(usage[1] for usage in served)
            charged = sum(usage[0] for usage in served)
            charged += (
                300 * len(served)
                if profile is Profile.UPFRONT_MAX
                else sum(usage[1] for usage in served)
            )
            assert ledger["charged"]["tokens"] == charged
            assert ledger["in_flight"] == 0

    run(scenario())


def test_the_ledger_faults_and_reset_are_reachable_over_http():
    async def scenario() -> None:
        async with sdks() as (up, gpt, _claude), httpx.AsyncClient(base_url=up.url) as client:
            rules = [{"action": "status", "status": 418, "body": "tea", "nth": 1}]
            answer = await client.post("/emulator/faults", json={"rules": rules})
            assert answer.json()["rules"][0]["fired"] == 0
            with pytest.raises(openai.APIStatusError) as tea:
                await gpt.chat.completions.create(model="m", messages=say("x"))
            assert tea.value.status_code == 418
            await gpt.chat.completions.create(model="m", messages=say("x"))
            ledger = (await client.get("/emulator/ledger", params={"timeline": 1})).json()
            assert ledger["refused"] == {"fault": 1}
            assert ledger["peak_requests_per_100ms"] >= 1
            assert sum(second[1] for second in ledger["timeline"]) == 2
            assert ledger["meters"]["default"]["dimensions"]["requests"]["peak"] == 1
            bad = await client.post("/emulator/faults", json=[{"action": "explode", "nht": 1}])
            assert bad.status_code == 400
            assert "did you mean nth" in bad.text
            assert (await client.post("/emulator/faults", content=b"{")).status_code == 400
            await client.post("/emulator/reset")
            assert (await client.get("/emulator/ledger")).json()["requests"] == 0

    run(scenario())


def test_each_piece_of_an_answer_is_one_token_of_both_vocabularies():
    folder = from_environment().vocabulary_dir
    for name, file in VOCABULARIES.items():
        if not (folder / file).is_file():
            pytest.skip(f"no {name} in {folder}: deploy/bootstrap.py puts it there")
    export_vocabulary_dir(folder)
    pieces = Reel(1).stretch(Draw(2), 20_000)
    for name in VOCABULARIES:
        assert len(tiktoken.get_encoding(name).encode("".join(pieces))) == len(pieces)


# --- serving ------------------------------------------------------------------------------------


def test_serve_tells_its_port_and_stops_when_told():
    async def scenario() -> None:
        stop = asyncio.Event()
        up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(FAST, ready=up.set_result, stop=stop))
        port = await up
        async with httpx.AsyncClient() as client:
            url = f"http://127.0.0.1:{port}/v1/models"
            assert (await client.get(url)).status_code == 200
        stop.set()
        await task
        with pytest.raises(OSError, match=r"."):
            await asyncio.open_connection("127.0.0.1", port)

    run(scenario())


def test_a_cancelled_server_leaves_no_listener_and_no_call_behind():
    async def scenario() -> None:
        up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        config = replace(FAST, faults=(Fault(action="stall"),))
        task = asyncio.create_task(serve(config, ready=up.set_result))
        port = await up
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        payload = json.dumps(stream_body()).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: "
            + str(len(payload)).encode()
            + b"\r\n\r\n"
            + payload
        )
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(OSError, match=r"."):
            await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()

    run(scenario())


def test_a_busy_port_is_an_error_that_names_it():
    async def scenario() -> None:
        taken = bind("127.0.0.1", 0)
        taken.listen()
        try:
            with pytest.raises(OSError, match="in use"):
                await serve(FAST, port=taken.getsockname()[1])
        finally:
            taken.close()

    run(scenario())
