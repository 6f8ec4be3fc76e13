"""Messages: fields, countable parts, cumulative usage, the end of its stream.

Input comes from `message_start` unless `message_delta` carries it too; output is the last
cumulative value. A field that is present replaces the earlier one and is never added to it: 100/1,
then 140/50, is 140/50. Cached tokens are apart already: `input_tokens` holds the fresh ones only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gateway.call import Fields, Part, PartKind, Piece, Usage
from gateway.errors import MalformedCall
from gateway.wire import asks, content
from gateway.wire.openai_chat import wants_thinking
from gateway.wire.stream import Reader, any_of, failure_of, tokens

if TYPE_CHECKING:
    from gateway.wire.asks import Body
    from gateway.wire.sse import Event
    from gateway.wire.stream import Failure

TOOL_PROMPT = Part(PartKind.OVERHEAD, count=346)
"""The prompt Anthropic adds once a call names tools (its pricing page, Claude 4: 313 to 346)."""

_SILENT = frozenset({b"ping", b"content_block_start", b"content_block_stop"})


def fields(body: Body) -> Fields:
    """What policy needs of a Messages or count_tokens request.

    Raises:
        MalformedCall: A governed place holds the wrong type; `param` names it.
    """
    messages = asks.entries(body, "messages", required=True)
    system = body.get("system")
    if system is not None and not isinstance(system, str | list):
        raise MalformedCall("system must be a text or a list of blocks", param="system")
    stream = asks.flag(body, "stream")
    tools = bool(asks.entries(body, "tools"))
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    kinds = content.kinds(contents)
    return Fields(
        model=asks.model(body),
        stream=stream,
        cap=asks.cap(body),
        needs=frozenset(_needs(body, contents, kinds, tools=tools)),
        has_tools=tools,
        has_images=not kinds.isdisjoint(content.IMAGES),
        session=asks.session(body),
        has_thinking=not kinds.isdisjoint(content.THINKING),
    )


def _needs(body: Body, contents: list[Any], kinds: set[str], *, tools: bool) -> Iterator[str]:
    if tools:
        yield "tools"
    if any(_calls(blocks) > 1 for blocks in contents):
        yield "parallel_tools"
    yield from content.media_needs(kinds)
    formats = (body.get("output_format"), asks.mapping(body.get("output_config")).get("format"))
    if any(asks.mapping(form).get("type") == "json_schema" for form in formats):
        yield "json_schema"
    if body.get("stream") is True:
        yield "streaming"
    if wants_thinking(body):
        yield "thinking"


def _calls(blocks: object) -> int:
    if not isinstance(blocks, list):
        return 0
    return sum(asks.mapping(block).get("type") in ("tool_use", "mcp_tool_use") for block in blocks)


def parts(body: Body) -> Iterator[Piece]:
    """Everything the provider counts of a Messages request."""
    yield from content.parts(body.get("system"))
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        yield content.MESSAGE_OVERHEAD
        if isinstance(message, dict):
            role = message.get("role")
            if isinstance(role, str) and role:
                yield role
            yield from content.parts(message.get("content"))
        else:
            yield from content.rendered(message)
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        yield TOOL_PROMPT
        for tool in tools:
            yield from content.rendered(tool)
    for form in (body.get("output_format"), asks.mapping(body.get("output_config")).get("format")):
        yield from content.rendered(asks.mapping(form).get("schema"))
    yield content.PRIMING


def usage_of(body: Body) -> Usage | None:
    """Usage of a plain answer, of `message_start` or of `message_delta`; None without one."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        usage = asks.mapping(body.get("message")).get("usage")
    if not isinstance(usage, dict):
        return None
    return any_of(
        Usage(
            input=tokens(usage.get("input_tokens")),
            output=tokens(usage.get("output_tokens")),
            cache_read=tokens(usage.get("cache_read_input_tokens")),
            cache_write=_written(usage),
        )
    )


def _written(usage: Body) -> int | None:
    """Tokens written to the cache: the total, else the sum of what each lifetime got."""
    total = tokens(usage.get("cache_creation_input_tokens"))
    if total is None and "cache_creation" in usage:
        lifetimes = asks.mapping(usage["cache_creation"]).values()
        parts = [count for count in map(tokens, lifetimes) if count is not None]
        total = sum(parts) if parts else None
    return total


def replaced(earlier: Usage | None, later: Usage) -> Usage:
    """The earlier usage with every field that the later one reports replaced."""
    if earlier is None:
        return later
    return Usage(
        input=earlier.input if later.input is None else later.input,
        output=earlier.output if later.output is None else later.output,
        cache_read=earlier.cache_read if later.cache_read is None else later.cache_read,
        cache_write=earlier.cache_write if later.cache_write is None else later.cache_write,
    )


def error_of(body: Body) -> Failure | None:
    """The error inside a plain answer; None where it is none."""
    error = body.get("error")
    if error:
        return failure_of(error)
    return failure_of(body) if body.get("type") == "error" else None


class MessagesReader(Reader):
    """The fold of a Messages stream.

    `message_start` reports one token before any was written, so only a `message_delta` makes the
    output a last word; a stream that breaks off before it must be estimated.
    """

    __slots__ = ("_delta_told",)

    text_key = b'"text":"'

    def __init__(self) -> None:
        super().__init__()
        self._delta_told = False

    @property
    def final(self) -> bool:
        """Whether a `message_delta` has reported the output."""
        return self._delta_told

    def skim(self, event: Event) -> bool:
        """True for the first event, message starts and deltas, and errors."""
        self.events += 1
        name, data = event.name, event.data
        if event.overflow:
            self.spoil()
            return False
        if name == b"content_block_delta":
            self.note_text(data, self.text_key)
            return self.events == 1
        if name == b"message_stop":
            self.terminal = True
            return self.events == 1
        if name in _SILENT:
            return self.events == 1
        return True  # message_start, message_delta, error, unknown names and none

    def feed(self, name: bytes, body: Mapping[str, Any]) -> None:
        """Fold an event; its type stands in the data, else in its name."""
        kind = body.get("type")
        if not isinstance(kind, str):
            kind = name.decode("utf-8", "replace")
        if kind == "content_block_delta":
            if name != b"content_block_delta":  # else `skim` has counted it
                self._note_delta(asks.mapping(body.get("delta")))
        elif kind == "message_stop":
            self.terminal = True
        elif kind == "error" or body.get("error"):
            self.failure = failure_of(body.get("error") or body)
        else:
            self._note_usage(kind, body)

    def _note_usage(self, kind: str, body: Mapping[str, Any]) -> None:
        self.note_identity(asks.mapping(body.get("message")))
        usage = usage_of(body)
        if usage is not None:
            self.usage = replaced(self.usage, usage)
            if kind == "message_delta" and usage.output is not None:
                self._delta_told = True
        self.note_reason(asks.mapping(body.get("delta")).get("stop_reason"))

    def _note_delta(self, delta: Mapping[str, Any]) -> None:
        for key in ("text", "partial_json", "thinking"):
            text = delta.get(key)
            if isinstance(text, str) and text:
                self.text_bytes += len(text.encode("utf-8", "replace"))
                self.deltas += 1
