"""Countable parts of prompt content: one table of block types for every dialect.

Everything a provider counts is yielded once, in order: text, tool calls with their arguments, tool
results, images, audio, files, token ids, and overhead per message. Types of all dialects share one
table, because gateways and agents mix them and a block must never be free for standing elsewhere.

Odd shapes never raise: what is no known block is counted as the text it holds, except payloads,
which count as files (`media.opaque`). Nesting is bounded by `MAX_DEPTH`; what lies deeper counts as
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from gateway.call import Part, PartKind, Piece
from gateway.wire import media

Block: TypeAlias = Mapping[str, Any]

MAX_DEPTH = 16
"""Blocks within blocks (a document in a tool result); APIs allow two or three."""

MESSAGE_OVERHEAD = Part(PartKind.OVERHEAD, count=3)
"""Role and separators of one message (OpenAI's counting guide: 3 tokens)."""

PRIMING = Part(PartKind.OVERHEAD, count=3)
"""The start of the answer, once per call."""

NAME_OVERHEAD = Part(PartKind.OVERHEAD, count=1)


def text(value: object) -> Iterator[Piece]:
    """The text part of a string; nothing for an empty one or another type."""
    if isinstance(value, str) and value:
        yield value


def render(value: object) -> str:
    """A compact JSON-like rendering of a decoded value, for counting only.

    `repr` runs in C and differs from JSON in quotes and spaces, which are then made equal; escapes
    and `true` against `True` remain, at equal length. Values nested too deep for it, or numbers too
    long, are flattened instead.
    """
    if isinstance(value, str):
        return value
    try:
        plain = repr(value)
    except (RecursionError, ValueError):
        return " ".join(_leaves(value))
    return plain.replace("'", '"').replace('": ', '":').replace(", ", ",")


def rendered(value: object) -> Iterator[Piece]:
    """The text part of a rendered value; nothing for None and empty containers."""
    if value is not None and value not in ({}, [], ""):
        yield render(value)


def parts(content: object, depth: int = 0) -> Iterator[Piece]:
    """The parts of a message's content: a string, a block, or a list of both."""
    if isinstance(content, str):
        yield from text(content)
    elif isinstance(content, list):
        if ids := token_ids(content):
            yield ids
        elif depth > MAX_DEPTH:
            yield from _unknown(content)
        else:
            yield from _blocks(content, depth + 1)
    elif isinstance(content, dict):
        kind = content.get("type")
        rule = _RULES.get(kind) if isinstance(kind, str) else None
        if rule is None or depth > MAX_DEPTH:
            yield from _unknown(content)
        else:
            yield from rule(content, depth)


def _blocks(blocks: list[Any], depth: int) -> Iterator[Piece]:
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "text":
            inner = block.get("text")
            if isinstance(inner, str):  # nearly every block: no generators for it
                if inner:
                    yield inner
                continue
        yield from parts(block, depth)


def token_ids(value: list[Any]) -> Part | None:
    """One part for a list of token ids, each of which counts one; None if it is no such list."""
    if value and type(value[0]) is int and all(type(entry) is int for entry in value):
        return Part(PartKind.TOKEN_IDS, count=len(value))
    return None


def kinds(content: object) -> set[str]:
    """The types of all blocks in a content, within other blocks too."""
    found: set[str] = set()
    if isinstance(content, list):
        content = [block for block in content if not isinstance(block, str)]
    if content and not isinstance(content, str):
        _collect(content, found, 0)
    return found


def _collect(content: object, found: set[str], depth: int) -> None:
    if isinstance(content, list):
        if depth <= MAX_DEPTH:
            for block in content:
                if not isinstance(block, str | int):
                    _collect(block, found, depth + 1)
    elif isinstance(content, dict):
        kind = content.get("type")
        if isinstance(kind, str):
            found.add(kind)
        for key in ("content", "output", "source"):
            inner = content.get(key)
            if inner is not None and not isinstance(inner, str):
                _collect(inner, found, depth + 1)


IMAGES = frozenset({"image", "image_url", "input_image", "computer_screenshot"})
AUDIOS = frozenset({"input_audio", "audio"})
FILES = frozenset({"file", "input_file", "document"})
THINKING = frozenset({"thinking", "redacted_thinking"})
TOOL_CALLS = frozenset({"tool_use", "function_call", "custom_tool_call", "mcp_tool_use"})


def media_needs(found: set[str]) -> Iterator[str]:
    """The capabilities that blocks of these types need."""
    for need, types in (("vision", IMAGES), ("audio", AUDIOS), ("pdf", FILES)):
        if not found.isdisjoint(types):
            yield need


def _text_block(block: Block, depth: int) -> Iterator[Piece]:
    yield from parts(block.get("text"), depth)


def _refusal(block: Block, depth: int) -> Iterator[Piece]:
    yield from parts(block.get("refusal"), depth)


def _image_url(block: Block, _depth: int) -> Iterator[Piece]:
    link = block.get("image_url")
    if isinstance(link, dict):
        yield media.image(link.get("url"), link.get("detail"))
    else:
        yield media.image(link, block.get("detail"))


def _image(block: Block, _depth: int) -> Iterator[Piece]:
    source = block.get("source")
    data = source.get("data") if isinstance(source, dict) else None
    yield media.image(data if data is not None else block.get("data"))  # MCP has no source


def _audio(block: Block, _depth: int) -> Iterator[Piece]:
    clip = block.get("input_audio")
    yield media.audio(clip.get("data") if isinstance(clip, dict) else block.get("data"))


def _file(block: Block, _depth: int) -> Iterator[Piece]:
    inner = block.get("file")
    yield media.file((inner if isinstance(inner, dict) else block).get("file_data"))


def _document(block: Block, depth: int) -> Iterator[Piece]:
    yield from text(block.get("title"))
    yield from text(block.get("context"))
    source = block.get("source")
    if not isinstance(source, dict):
        yield media.file(None)
    elif source.get("type") == "text":
        yield from text(source.get("data"))
    elif source.get("type") == "content":
        yield from parts(source.get("content"), depth + 1)
    else:
        yield media.file(source.get("data"))


def _call(block: Block, _depth: int) -> Iterator[Piece]:
    """A tool call: its name and its arguments, which are text in one dialect, values in another."""
    yield from text(block.get("name"))
    for key in ("input", "arguments"):
        yield from rendered(block.get(key))


def _result(block: Block, depth: int) -> Iterator[Piece]:
    for key in ("content", "output"):
        yield from parts(block.get(key), depth + 1)


def _thinking(block: Block, _depth: int) -> Iterator[Piece]:
    yield from text(block.get("thinking"))


def _sealed(block: Block, _depth: int) -> Iterator[Piece]:
    """Encrypted content: opaque to us, counted by its bytes."""
    for key in ("data", "encrypted_content"):
        yield from (media.file(value) for value in (block.get(key),) if isinstance(value, str))


def _reasoning(block: Block, depth: int) -> Iterator[Piece]:
    for key in ("summary", "content"):
        yield from parts(block.get(key), depth + 1)
    yield from _sealed(block, depth)


def _message(block: Block, depth: int) -> Iterator[Piece]:
    yield MESSAGE_OVERHEAD
    yield from parts(block.get("content"), depth + 1)


def _unknown(block: Block | list[Any]) -> Iterator[Piece]:
    """Every leaf of a block of unknown type, payloads as files."""
    for leaf in _leaves(block):
        if media.opaque(leaf):
            yield media.file(leaf)
        else:
            yield from text(leaf)


def _leaves(value: object) -> Iterator[str]:
    """Keys and scalars of a value, depth first, however deep."""
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            yield top
        elif isinstance(top, dict):
            stack.extend(reversed([entry for pair in top.items() for entry in pair]))
        elif isinstance(top, list):
            stack.extend(reversed(top))
        elif isinstance(top, float):
            yield repr(top)
        elif isinstance(top, int):
            yield hex(top)  # decimal digits of huge integers are refused by Python
        # null counts nothing


_RULES: Mapping[str, Callable[[Block, int], Iterator[Piece]]] = {
    "text": _text_block,
    "input_text": _text_block,
    "output_text": _text_block,
    "summary_text": _text_block,
    "reasoning_text": _text_block,
    "refusal": _refusal,
    "image_url": _image_url,
    "input_image": _image_url,
    "computer_screenshot": _image_url,
    "image": _image,
    "input_audio": _audio,
    "audio": _audio,
    "file": _file,
    "input_file": _file,
    "document": _document,
    "tool_use": _call,
    "server_tool_use": _call,
    "mcp_tool_use": _call,
    "function_call": _call,
    "custom_tool_call": _call,
    "tool_result": _result,
    "mcp_tool_result": _result,
    "function_call_output": _result,
    "custom_tool_call_output": _result,
    "computer_call_output": _result,
    "thinking": _thinking,
    "redacted_thinking": _sealed,
    "compaction": _sealed,
    "reasoning": _reasoning,
    "message": _message,
}
