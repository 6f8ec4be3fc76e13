"""Responses: fields, countable parts, usage and the five ends of its stream.

`response.completed`, `.incomplete`, `.failed`, `.cancelled` and `error` all end a call; usage is
optional in each, and failed is no success (envoyproxy/ai-gateway PR#2184). A stream that opens its
events without an `event` line is read by the `type` of its data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gateway.call import Fields, Piece, Usage
from gateway.errors import MalformedCall
from gateway.wire import asks, content
from gateway.wire.openai_chat import fresh, wants_thinking
from gateway.wire.stream import Failure, Reader, any_of, failure_of, tokens

if TYPE_CHECKING:
    from gateway.wire.asks import Body
    from gateway.wire.sse import Event

TERMINAL = frozenset(
    {b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled"}
)
_END = re.compile(
    rb'"type"\s*+:\s*+"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"'
)


def fields(body: Body) -> Fields:
    """What policy needs of a Responses request.

    Raises:
        MalformedCall: A governed place holds the wrong type; `param` names it.
    """
    asked = body.get("input")
    if asked is not None and not isinstance(asked, str | list):
        raise MalformedCall("input must be a text or a list", param="input")
    previous = body.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise MalformedCall("previous_response_id must be a text", param="previous_response_id")
    stream = asks.flag(body, "stream")
    tools = bool(asks.entries(body, "tools"))
    kinds = content.kinds(asked)
    return Fields(
        model=asks.model(body),
        stream=stream,
        cap=asks.cap(body),
        needs=frozenset(_needs(body, kinds, tools=tools)),
        has_tools=tools,
        has_images=not kinds.isdisjoint(content.IMAGES),
        previous_response_id=previous or None,
        session=asks.session(body),
        has_thinking="reasoning" in kinds,
    )


def _needs(body: Body, kinds: set[str], *, tools: bool) -> Iterator[str]:
    if tools:
        yield "tools"
    if body.get("parallel_tool_calls") is True:
        yield "parallel_tools"
    yield from content.media_needs(kinds)
    if asks.mapping(asks.mapping(body.get("text")).get("format")).get("type") == "json_schema":
        yield "json_schema"
    if body.get("stream") is True:
        yield "streaming"
    if wants_thinking(body):
        yield "thinking"


def parts(body: Body) -> Iterator[Piece]:
    """Everything the provider counts of a Responses request, as far as it stands in the body."""
    yield from content.parts(body.get("instructions"))
    asked = body.get("input")
    if isinstance(asked, list):
        for item in asked:
            yield from _item(item)
    elif asked is not None:
        yield content.MESSAGE_OVERHEAD
        yield from content.parts(asked)
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        yield from content.rendered(tool)
    form = asks.mapping(asks.mapping(body.get("text")).get("format"))
    yield from content.rendered(form.get("schema"))
    variables = asks.mapping(body.get("prompt")).get("variables")
    for value in asks.mapping(variables).values():
        yield from content.parts(value)
    yield content.PRIMING


def _item(item: object) -> Iterator[Piece]:
    """A message may leave out its type; every other item names it."""
    if isinstance(item, dict) and "type" not in item:
        item = {"type": "message", **item}
    elif not isinstance(item, dict) or item.get("type") != "message":
        yield content.MESSAGE_OVERHEAD
    if isinstance(item, dict):
        yield from content.text(item.get("role"))
    yield from content.parts(item)


def usage_of(body: Body) -> Usage | None:
    """Usage of a plain answer, or of the response inside an event; None where it reports none."""
    usage = asks.mapping(body.get("response")).get("usage")
    if not isinstance(usage, dict):
        usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    details = asks.mapping(usage.get("input_tokens_details"))
    cached = tokens(details.get("cached_tokens"))
    written = tokens(details.get("cache_write_tokens"))
    return any_of(
        Usage(
            input=fresh(tokens(usage.get("input_tokens")), cached, written),
            output=tokens(usage.get("output_tokens")),
            cache_read=cached,
            cache_write=written,
            reasoning=tokens(
                asks.mapping(usage.get("output_tokens_details")).get("reasoning_tokens")
            ),
        )
    )


def error_of(body: Body) -> Failure | None:
    """The error inside a plain answer or a `response` object; None where it did not fail."""
    error = body.get("error")
    if error:
        return failure_of(error)
    return Failure(code="failed") if body.get("status") == "failed" else None


class ResponsesReader(Reader):
    """The fold of a Responses stream."""

    __slots__ = ()

    text_key = b'"delta":"'

    def skim(self, event: Event) -> bool:
        """True for the first event and for the five ends."""
        self.events += 1
        if event.overflow:
            self.spoil()
            if event.name in TERMINAL:  # the whole output stands in it, hence its size
                self._end(event.name, {})
            return False
        if event.name.endswith(b".delta"):
            self.note_text(event.data, self.text_key)
            return self.events == 1
        if event.name not in (b"", b"message"):  # the name that an event without a name has
            return event.name in TERMINAL or event.name == b"error" or self.events == 1
        if b".delta" in event.data:
            self.note_text(event.data, self.text_key)
        return self.events == 1 or _END.search(event.data) is not None

    def feed(self, name: bytes, body: Mapping[str, Any]) -> None:
        """Fold an event; its type stands in the data, else in its name."""
        kind = body.get("type")
        if isinstance(kind, str):
            name = kind.encode("utf-8", "replace")
        response = asks.mapping(body.get("response"))
        self.note_identity(response)
        usage = usage_of(body)
        if usage is not None:
            self.usage = usage
        if name in TERMINAL:
            self._end(name, response)
        elif name == b"error" or (body.get("error") and not response):
            self.terminal = True
            error = body.get("error")
            self.failure = failure_of(error if isinstance(error, Mapping | str) else body)

    def _end(self, name: bytes, response: Body) -> None:
        self.terminal = True
        if name == b"response.failed":
            self.failure = error_of(response) or Failure(code="failed")
            self.note_reason("failed")
        else:
            reason = asks.mapping(response.get("incomplete_details")).get("reason")
            self.note_reason(reason or name.removeprefix(b"response.").decode())
