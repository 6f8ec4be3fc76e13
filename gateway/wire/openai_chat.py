"""Chat Completions, Completions and Embeddings: fields, countable parts, usage, terminal events.

Usage may come on any chunk, whatever its `choices` look like; the last one that says anything wins.
`prompt_tokens` include the cached ones, which are kept apart here. The end is the first finish
reason or `[DONE]`: servers exist that never send the one or the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gateway.admission.profiles import make_usage
from gateway.call import Fields, Piece, Usage, make_fields
from gateway.errors import MalformedCall
from gateway.wire import asks, content, sse
from gateway.wire.splice import splice_in
from gateway.wire.stream import Reader, any_of, failure_of, tokens

if TYPE_CHECKING:
    from gateway.wire.asks import Body
    from gateway.wire.stream import Failure

_WORTH = re.compile(
    rb'"(?:usage"\s*+:\s*+\{|finish_reason"\s*+:\s*+"|error"\s*+:\s*+[{"])',
)
"""What makes a chunk worth decoding. Within texts these keys have escaped quotes."""

_THINKING = ("enabled", "adaptive")

_AROUND = frozenset(("tools", "functions", "response_format", "prediction"))
"""What is counted beside the messages."""

_NEEDING = frozenset((
    "parallel_tool_calls", "modalities", "response_format", "stream", "thinking",
    "reasoning_effort", "reasoning",
))  # fmt: skip
"""Where a body says what it needs of a model, beside tools and contents."""

NOTHING: frozenset[str] = frozenset()
"""What nearly every call needs."""

_USAGE_ONLY = re.compile(rb'"choices"\s*+:\s*+\[\s*+\]')
_USAGE = re.compile(rb'"usage"\s*+:\s*+\{')


def fields(body: Body) -> Fields:
    """What policy needs of a Chat Completions request.

    Raises:
        MalformedCall: A governed place holds the wrong type; `param` names it.
    """
    messages = asks.entries(body, "messages", required=True)
    options = body.get("stream_options")
    wants = None
    if options is not None:
        if not isinstance(options, dict):
            raise MalformedCall("stream_options must be an object", param="stream_options")
        wants = options.get("include_usage")
    stream = asks.flag(body, "stream")
    tools = False
    if "tools" in body or "functions" in body:
        tools = bool(asks.entries(body, "tools") or asks.entries(body, "functions"))
    blocks, parallel = _looked_through(messages)
    kinds = content.kinds(blocks) if blocks else set()
    return make_fields(
        model=asks.model(body),
        stream=stream,
        cap=asks.cap(body, answers=asks.answers(body, "n") if "n" in body else 1),
        wants_usage=wants if isinstance(wants, bool) else None,
        needs=_needs(body, kinds, tools=tools, parallel=parallel)
        if tools or kinds or parallel or not _NEEDING.isdisjoint(body)
        else NOTHING,
        has_tools=tools,
        has_images=bool(kinds) and not kinds.isdisjoint(content.IMAGES),
        session=asks.session(body),
        has_thinking=bool(kinds) and not kinds.isdisjoint(content.THINKING),
    )


def _looked_through(messages: list[Any]) -> tuple[list[Any], bool]:
    """Contents that are no mere text, and whether one answer of the past called several tools."""
    blocks: list[Any] = []
    parallel = False
    for message in messages:
        if not isinstance(message, dict):
            continue
        found = message.get("content")
        if found is not None and not isinstance(found, str):
            blocks.append(found)
        if "tool_calls" in message and not parallel:
            calls = message["tool_calls"]
            parallel = isinstance(calls, list) and len(calls) > 1
    return blocks, parallel


def _needs(body: Body, kinds: set[str], *, tools: bool, parallel: bool) -> frozenset[str]:
    needs: list[str] = []
    if tools:
        needs.append("tools")
    if kinds:
        needs += content.media_needs(kinds)
    if parallel or body.get("parallel_tool_calls") is True:
        needs.append("parallel_tools")
    modalities = body.get("modalities")
    if isinstance(modalities, list) and "audio" in modalities:
        needs.append("audio")
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        needs.append("json_schema")
    if body.get("stream") is True:
        needs.append("streaming")
    if wants_thinking(body):
        needs.append("thinking")
    return frozenset(needs) if needs else NOTHING


def wants_thinking(body: Body) -> bool:
    """Whether the call asks for reasoning, in any dialect's spelling."""
    if "thinking" in body and asks.mapping(body["thinking"]).get("type") in _THINKING:
        return True
    if "reasoning_effort" not in body and "reasoning" not in body:
        return False
    efforts = (body.get("reasoning_effort"), asks.mapping(body.get("reasoning")).get("effort"))
    return any(isinstance(effort, str) and effort != "none" for effort in efforts)


def _parallel(messages: list[Any]) -> bool:
    """Whether one answer of the past called several tools."""
    for message in messages:
        if isinstance(message, dict) and "tool_calls" in message:
            calls = message["tool_calls"]
            if isinstance(calls, list) and len(calls) > 1:
                return True
    return False


def parts(body: Body) -> Iterator[Piece]:
    """Everything the provider counts of a Chat Completions request."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        yield content.MESSAGE_OVERHEAD
        if not isinstance(message, dict):
            yield from content.rendered(message)
            continue
        role, text = message.get("role"), message.get("content")
        if isinstance(role, str) and role:
            yield role
        if isinstance(text, str):  # nearly every message: no generator for each of its texts
            if text:
                yield text
        elif text is not None:
            yield from content.parts(text)
        if len(message) > 2 or "content" not in message:
            yield from _beside(message)
    if not _AROUND.isdisjoint(body):  # no generator for what most calls lack
        yield from _around(body)
    yield content.PRIMING


def _around(body: Body) -> Iterator[Piece]:
    """What is counted beside the messages."""
    for key in ("tools", "functions"):
        for tool in _listed(body.get(key)):
            yield from content.rendered(tool)
    if "response_format" in body:
        schema = asks.mapping(body["response_format"]).get("json_schema")
        yield from content.rendered(schema)
    if "prediction" in body:
        yield from content.parts(asks.mapping(body["prediction"]).get("content"))


def _beside(message: Body) -> Iterator[Piece]:
    """What a message holds beside role and content."""
    if message.get("name"):
        yield from content.text(message.get("name"))
        yield content.NAME_OVERHEAD
    for key in ("refusal", "reasoning_content", "reasoning"):
        if key in message:
            yield from content.text(message[key])
    if "reasoning_details" in message and not message.get("reasoning"):  # the same text, in blocks
        yield from content.parts(message["reasoning_details"])
    if "tool_calls" in message:
        for call in _listed(message["tool_calls"]):
            yield from _tool_call(call)
    legacy = message.get("function_call")
    if isinstance(legacy, dict):
        yield from _tool_call({"function": legacy})


def _tool_call(call: object) -> Iterator[Piece]:
    """A call's name and arguments; a custom tool's input."""
    if not isinstance(call, dict):
        return
    for key in ("function", "custom"):
        inner = call.get(key)
        if not isinstance(inner, dict):
            continue
        name = inner.get("name")
        if isinstance(name, str) and name:
            yield name
        for place in ("arguments", "input"):
            value = inner.get(place)
            if isinstance(value, str):
                if value:
                    yield value
            elif value is not None:
                yield from content.rendered(value)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def with_usage(raw: bytes) -> bytes:
    """The body with `stream_options.include_usage` on; its other bytes stay."""
    return splice_in(raw, "stream_options", "include_usage", b"true")


# --- Completions and Embeddings -------------------------------------------------------------------


def completions_fields(body: Body) -> Fields:
    """What policy needs of a Completions request; every prompt of a list is answered."""
    prompt = body.get("prompt")
    if prompt is not None and not isinstance(prompt, str | list):
        raise MalformedCall("prompt must be a text or a list", param="prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not content.token_ids(prompt) else 1
    wants = asks.mapping(body.get("stream_options")).get("include_usage")
    stream = asks.flag(body, "stream")
    answers = asks.answers(body, "n", "best_of") * max(1, min(prompts, asks.MAX_ANSWERS))
    return Fields(
        model=asks.model(body),
        stream=stream,
        cap=asks.cap(body, answers=answers),
        wants_usage=wants if isinstance(wants, bool) else None,
        needs=frozenset({"streaming"} if stream else ()),
        session=asks.session(body),
    )


def completions_parts(body: Body) -> Iterator[Piece]:
    """Everything the provider counts of a Completions request."""
    yield from content.parts(body.get("prompt"))
    yield from content.text(body.get("suffix"))


def embeddings_fields(body: Body) -> Fields:
    """What policy needs of an Embeddings request. There is no output to cap."""
    if not isinstance(body.get("input"), str | list | dict):
        raise MalformedCall("input must be a text or a list", param="input")
    images = not content.kinds(body.get("input")).isdisjoint(content.IMAGES)
    return Fields(
        model=asks.model(body),
        needs=frozenset({"vision"} if images else ()),
        has_images=images,
    )


def embeddings_parts(body: Body) -> Iterator[Piece]:
    """Each text by its own tokens, each token id as one."""
    yield from content.parts(body.get("input"))


def embeddings_usage_of(body: Body) -> Usage | None:
    """Usage of an Embeddings answer: its output is a reported nothing."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    count = tokens(usage.get("prompt_tokens"))
    if count is None:
        count = tokens(usage.get("total_tokens"))
    return None if count is None else Usage(input=count, output=0)


# --- answers --------------------------------------------------------------------------------------


def usage_of(body: Body) -> Usage | None:
    """Usage of a plain answer or of one chunk; None where it reports none."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        usage = _elsewhere(body)
    if usage is None:
        return None
    cached = written = reasoning = None
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        cached = tokens(details.get("cached_tokens"))
        if "cache_write_tokens" in details:
            written = tokens(details["cache_write_tokens"])
    if cached is None and "prompt_cache_hit_tokens" in usage:
        cached = tokens(usage["prompt_cache_hit_tokens"])  # DeepSeek
    if cached is None and "cached_tokens" in usage:
        cached = tokens(usage["cached_tokens"])  # Moonshot
    details = usage.get("completion_tokens_details")
    if isinstance(details, dict):
        reasoning = tokens(details.get("reasoning_tokens"))
    return any_of(
        make_usage(
            input=fresh(tokens(usage.get("prompt_tokens")), cached, written),
            output=tokens(usage.get("completion_tokens")),
            cache_read=cached,
            cache_write=written,
            reasoning=reasoning,
        )
    )


def _elsewhere(body: Body) -> Body | None:
    """Usage in a choice (Moonshot) or in Groq's own object; None without one."""
    places = [body["x_groq"]] if "x_groq" in body else []
    choices = body.get("choices")
    if isinstance(choices, list):
        places += choices[-1:]
    for place in places:
        usage = asks.mapping(place).get("usage")
        if isinstance(usage, dict):
            return usage
    return None


def completing(earlier: Usage | None, later: Usage) -> Usage:
    """The later usage; a total that it lacks, and what belongs to it, is the earlier one's."""
    if earlier is None or (later.input is not None and later.output is not None):
        return later
    if later.input is None:
        later = replace(
            later, input=earlier.input, cache_read=earlier.cache_read,
            cache_write=earlier.cache_write,
        )  # fmt: skip
    if later.output is None:
        later = replace(later, output=earlier.output, reasoning=earlier.reasoning)
    return later


def fresh(whole: int | None, cached: int | None, written: int | None = None) -> int | None:
    """Input without its cached parts, which OpenAI's totals include; never below zero."""
    if whole is None:
        return None
    left = whole - (cached or 0) - (written or 0)
    return left if left > 0 else 0  # noqa: FURB136 - every answer


def error_of(body: Body) -> Failure | None:
    """The error inside a plain answer; None where it is none."""
    error = body.get("error")
    return failure_of(error) if error else None


class ChatReader(Reader):
    """The fold of a Chat Completions or Completions stream."""

    __slots__ = ("done", "text_key")

    def __init__(self, *, completions: bool = False) -> None:
        super().__init__()
        self.text_key = b'"text":"' if completions else b'"content":"'
        self.done = False  # [DONE] has come

    def skim(self, event: sse.Event) -> bool:
        """True for the first chunk and for those with usage, a finish reason or an error."""
        data = event.data
        self.events += 1
        if event.overflow:
            self.spoil()
            return False
        if len(data) < 16 and data.strip() == b"[DONE]":
            self.terminal = self.done = True
            return False
        self.note_text(data, self.text_key)
        return self.events == 1 or (_maybe_worth(data) and _WORTH.search(data) is not None)

    def feed(self, name: bytes, body: Mapping[str, Any]) -> None:
        """Fold a chunk."""
        self.note_identity(body)
        usage = usage_of(body)
        if usage is not None:
            self.usage = completing(self.usage, usage)
        for choice in _listed(body.get("choices")):
            reason = asks.mapping(choice).get("finish_reason")
            if reason is not None:
                self.terminal = True
                self.note_reason(reason)
                if reason == "error" and self.failure is None:
                    self.failure = failure_of(asks.mapping(choice).get("error"))
        error = body.get("error")
        if error:
            self.failure = failure_of(error)
        elif name == b"error" and self.failure is None:
            self.failure = failure_of(body)


def _maybe_worth(data: bytes) -> bool:
    """False for nearly every chunk, which `_WORTH` would search at each of its quotes.

    `find` and not `in`, which tries the needle as a number first and costs half as much again.
    """
    return (
        data.find(b'"usage"') >= 0
        or data.find(b'"error"') >= 0
        or data.count(b'"finish_reason"') != data.count(b'"finish_reason":null')
    )


LONGEST_HELD = 512 * 1024
"""Bytes of an unfinished event that are held back to see whether it is the usage-only chunk. What
is longer is none, and must not wait in memory for a client that does not read."""


class WithoutUsage:
    """A filter that drops the usage-only chunk which we asked for and the client did not.

    All other bytes pass, each event at the latest when it is whole. `feed` and `rest` are pure
    functions of the bytes so far, whatever the cuts.

    Weakness: behind an event longer than `LONGEST_HELD` the chunk passes too.
    """

    __slots__ = ("_blocks", "dropped")

    def __init__(self) -> None:
        self._blocks = sse.Blocks(LONGEST_HELD)
        self.dropped = 0

    def feed(self, chunk: bytes) -> bytes:
        """What the client may see of the bytes so far."""
        kept = []
        for block in self._blocks.feed(chunk):
            if _USAGE_ONLY.search(block) and _USAGE.search(block):
                self.dropped += 1
            else:
                kept.append(block)
        return b"".join(kept)

    def rest(self) -> bytes:
        """The unfinished tail, for the end of the stream."""
        return self._blocks.rest()
