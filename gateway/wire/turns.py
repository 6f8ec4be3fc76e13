"""The turns of an agent's history, newest first, in three dialects, and their fingerprints.

A turn is one answer of a model (words, tool calls) with what its tools returned. Reading goes from
the end of the history to the last *user turn*: a message in which a person speaks. Tool results
are none, nor are the reminders that coding agents add to them, nor system messages. The reader is
lazy: whoever knows the conversation stops after a turn or two.

Fingerprints ignore what does not change the meaning: the order of keys, white space, escapes; and
masked ones numbers, dates and ids too. Odd shapes never raise: what cannot be read as a turn is
left out, what cannot be parsed counts as the text it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeAlias

from gateway.call import Dialect
from gateway.resilience import loops
from gateway.wire import content

Body: TypeAlias = Mapping[str, Any]

Canonical: TypeAlias = Callable[[object], str]
"""Arguments (JSON text or values) to JSON with sorted keys and no optional white space; text that
is no JSON stays as it is. A parameter, because this room parses no JSON."""

MAX_RESULT = 32_768
"""Characters of a tool's result that are hashed: its first and its last half."""

MAX_MASKED = 4_096
"""Characters of arguments that are masked: their first and their last half."""

MAX_SAMPLE = 1_500
"""Characters of each part of a turn that are cut into shingles."""

MAX_WORDS = 192
"""Words of each half of a turn that are cut into shingles."""

WEAK_ID = 10
"""Shorter ids of calls (`call_0`) name a place in a conversation, not a call."""

MAX_OPENING = 2_048
"""Characters of the first user message that name a conversation."""


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """One call of a tool, as its dialect writes it; `result` is None while there is none."""

    id: str
    name: str
    arguments: object
    result: object = None


@dataclass(frozen=True, slots=True)
class Said:
    """One turn: the model's words, its calls."""

    text: str
    calls: tuple[ToolCall, ...]


# --- reading --------------------------------------------------------------------------------------


def of(dialect: Dialect, body: Body) -> Iterator[Said]:
    """The turns since the last user turn, newest first; none where a person spoke last."""
    reader = READERS.get(dialect)
    return iter(()) if reader is None else reader(body)


def length(dialect: Dialect, body: Body) -> int:
    """How many messages or items the history has."""
    return len(_listed(body.get("input" if dialect is Dialect.RESPONSES else "messages")))


def opening(dialect: Dialect, body: Body) -> str:
    """The beginning of the first user message, which names a conversation; "" without one."""
    asked = body.get("input" if dialect is Dialect.RESPONSES else "messages")
    if isinstance(asked, str):
        return asked[:MAX_OPENING]
    for message in _listed(asked)[:32]:
        if isinstance(message, Mapping) and message.get("role") == "user":
            words = [text for text in _texts(message.get("content")) if _spoken(text)]
            return " ".join(words)[:MAX_OPENING]
    return ""


def answered(dialect: Dialect, body: Body) -> bool:
    """Whether the model has spoken before: the conversation goes on, it does not begin."""
    if dialect is Dialect.RESPONSES:
        return bool(body.get("previous_response_id")) or any(
            isinstance(item, Mapping)
            and (item.get("role") == "assistant" or _text(item.get("type")).endswith("_call"))
            for item in _listed(body.get("input"))
        )
    return any(
        isinstance(message, Mapping) and message.get("role") == "assistant"
        for message in _listed(body.get("messages"))
    )


def _chat(body: Body) -> Iterator[Said]:
    messages = _listed(body.get("messages"))
    results: dict[str, object] = {}
    for at in range(len(messages) - 1, -1, -1):
        message = messages[at]
        if not isinstance(message, Mapping):
            continue
        role = message.get("role")
        if role == "user":
            if _human(message.get("content"), beside_results=False):
                return
        elif role in ("tool", "function"):
            key = message.get("tool_call_id") or message.get("name")
            results[_text(key)] = message.get("content")
        elif role == "assistant":
            calls = tuple(_chat_calls(message, results))
            results = {}
            if calls or at < len(messages) - 1:  # words at the very end are a prefill
                yield Said(" ".join(_texts(message.get("content"))), calls)


def _chat_calls(message: Body, results: Mapping[str, object]) -> Iterator[ToolCall]:
    for call in _listed(message.get("tool_calls")):
        if not isinstance(call, Mapping):
            continue
        inner = call.get("function")
        if not isinstance(inner, Mapping):
            inner = call.get("custom")
        if isinstance(inner, Mapping):
            arguments = inner.get("arguments")
            yield ToolCall(
                id=_text(call.get("id")),
                name=_text(inner.get("name")),
                arguments=inner.get("input") if arguments is None else arguments,
                result=results.get(_text(call.get("id"))),
            )
    legacy = message.get("function_call")
    if isinstance(legacy, Mapping):
        name = _text(legacy.get("name"))
        yield ToolCall(
            id="", name=name, arguments=legacy.get("arguments"), result=results.get(name)
        )


def _messages(body: Body) -> Iterator[Said]:
    messages = _listed(body.get("messages"))
    results: dict[str, object] = {}
    for at in range(len(messages) - 1, -1, -1):
        message = messages[at]
        if not isinstance(message, Mapping):
            continue
        blocks = message.get("content")
        if message.get("role") == "user":
            found = dict(_results(blocks))
            if _human(blocks, beside_results=bool(found)):
                return
            results.update(found)
        elif message.get("role") == "assistant":
            results.update(_results(blocks))  # of tools that the provider runs
            calls = tuple(
                ToolCall(
                    id=_text(block.get("id")),
                    name=_text(block.get("name")),
                    arguments=block.get("input"),
                    result=results.get(_text(block.get("id"))),
                )
                for block in _listed(blocks)
                if isinstance(block, Mapping) and _text(block.get("type")).endswith("tool_use")
            )
            results = {}
            if calls or at < len(messages) - 1:
                yield Said(" ".join(_texts(blocks)), calls)


def _results(blocks: object) -> Iterator[tuple[str, object]]:
    for block in _listed(blocks):
        if isinstance(block, Mapping) and _text(block.get("type")).endswith("tool_result"):
            yield _text(block.get("tool_use_id")), block.get("content")


def _responses(body: Body) -> Iterator[Said]:
    items = _listed(body.get("input"))
    results: dict[str, object] = {}
    calls: list[ToolCall] = []
    words: list[str] = []
    for at in range(len(items) - 1, -1, -1):
        item = items[at]
        if not isinstance(item, Mapping):
            continue
        kind = _text(item.get("type"))
        if kind.endswith("_call_output"):
            if calls or words:
                yield _answer(words, calls)
                words, calls = [], []
            results[_text(item.get("call_id"))] = item.get("output")
        elif kind.endswith("_call"):
            calls.append(_item_call(item, kind, results))
        elif item.get("role") == "user":
            if _human(item.get("content"), beside_results=False):
                break
        elif item.get("role") == "assistant" and at < len(items) - 1:
            words += _texts(item.get("content"))
    if calls or words:
        yield _answer(words, calls)


def _answer(words: list[str], calls: list[ToolCall]) -> Said:
    return Said(" ".join(reversed(words)), tuple(reversed(calls)))


def _item_call(item: Body, kind: str, results: Mapping[str, object]) -> ToolCall:
    """A function's call, or a built-in tool's, whose arguments stand under a name of its own."""
    id_ = _text(item.get("call_id") or item.get("id"))
    result = results.get(id_)
    keys = ("arguments", "input", "action", "operation", "queries", "code")
    return ToolCall(
        id=id_,
        name=_text(item.get("name")) or kind,
        arguments=next((item[key] for key in keys if item.get(key) is not None), None),
        result=item.get("output") if result is None else result,
    )


READERS: Mapping[Dialect, Callable[[Body], Iterator[Said]]] = MappingProxyType(
    {Dialect.CHAT: _chat, Dialect.MESSAGES: _messages, Dialect.RESPONSES: _responses}
)
"""The dialects whose requests hold a history of turns."""


def _human(blocks: object, *, beside_results: bool) -> bool:
    """Whether a person speaks in the content of a user message.

    Beside tool results only words count: pictures there are the tool's.
    """
    if isinstance(blocks, str):
        return _spoken(blocks)
    for block in _listed(blocks):
        if isinstance(block, str):
            if _spoken(block):
                return True
        elif isinstance(block, Mapping):
            text = block.get("text")
            if isinstance(text, str):
                if _spoken(text):
                    return True
            elif not beside_results and not _text(block.get("type")).endswith("tool_result"):
                return True
    return False


def _spoken(text: str) -> bool:
    """Whether it is more than nothing and no reminder that a coding agent added by itself."""
    text = text.strip()
    return bool(text) and not (
        text.startswith("<system-reminder>") and text.endswith("</system-reminder>")
    )


def _texts(blocks: object) -> list[str]:
    """The texts of a content."""
    if isinstance(blocks, str):
        return [blocks]
    found = []
    for block in _listed(blocks):
        text = block.get("text") if isinstance(block, Mapping) else block
        if isinstance(text, str):
            found.append(text)
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


# --- fingerprints ---------------------------------------------------------------------------------

_MASKED = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}"
    r"|\b(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec"
    r"|january|february|march|april|august|september|october|november|december"
    r"|mon|tues?|wed|thurs?|fri|sat|sun|monday|tuesday|wednesday|thursday|friday|saturday|sunday"
    r"|am|pm)\b|\d+",
    re.IGNORECASE,
)


def hash64(text: str) -> int:
    """A stable hash of 64 bits, so that gateways of a fleet agree; never 0."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def folded(canonical: str) -> str:
    """Canonical JSON with every run of white space in its strings as one space, none at their ends.

    Escaped line ends and tabs count as white space.
    """
    if "\\" in canonical:
        canonical = _ESCAPED_SPACE.sub(" ", canonical)
    text = " ".join(canonical.split())
    if '" ' in text:
        text = text.replace('" ', '"')
    return text.replace(' "', '"') if ' "' in text else text


_ESCAPED_SPACE = re.compile(r"\\[nrtf]")


def masked(text: str) -> str:
    """The text with numbers, dates, times and long hexadecimal ids made equal."""
    return _MASKED.sub("#", _sampled(text, MAX_MASKED))


def result_text(result: object) -> str:
    """A tool's result as text, of bounded length."""
    if isinstance(result, str):
        text = result
    elif isinstance(result, list) and result:
        text = "\n".join(
            block["text"]
            if isinstance(block, Mapping) and isinstance(block.get("text"), str)
            else content.render(block)
            for block in result
        )
    else:
        text = content.render(result)
    return _sampled(text.strip(), MAX_RESULT)


def _sampled(text: str, most: int) -> str:
    """The text, or its length with its first and its last half."""
    if len(text) <= most:
        return text
    return f"{len(text)}:{text[: most // 2]}{text[-(most // 2) :]}"


def turn_of(said: Said, canonical: Canonical, exempt: Callable[[str], bool]) -> loops.Turn:
    """The turn in hashes.

    Args:
        said: One turn.
        canonical: See `Canonical`.
        exempt: Whether a tool of that name may repeat.
    """
    prints: list[tuple[int, int]] = []
    words, returned = [said.text], []
    polling = 0
    for call in said.calls:
        arguments = folded(canonical(call.arguments))
        words += call.name, arguments
        result = ""
        if call.result is not None:
            result = result_text(call.result)
            returned.append(result)
        if exempt(call.name):
            polling += 1
            continue
        like = 0
        if call.result is not None:
            like = hash64(f"{call.name}\0{masked(arguments)}\0{result}")
        prints.append((hash64(f"{call.name}\0{arguments}"), like))
    return loops.Turn(
        calls=tuple(prints),
        kind=hash64("\0".join([call.name for call in said.calls])) if said.calls else 0,
        size=sum(map(len, words)) + sum(map(len, returned)),
        exempt=bool(polling) and not prints,
        sketch=lambda: (_shingles(words), _shingles(returned)),
    )


_WORD = re.compile(r"\w+")


def _shingles(texts: list[str]) -> bytes:
    """The pairs of neighboring words, hashed; a single word is its own pair."""
    words = _WORD.findall(" ".join([_sampled(text, MAX_SAMPLE) for text in texts]))
    if len(words) > MAX_WORDS:
        words = words[: MAX_WORDS // 2] + words[-(MAX_WORDS // 2) :]
    pairs = set(zip(words, words[1:] or words, strict=False))
    return loops.sketch_of({hash64(f"{one} {two}") & 0xFFFF_FFFF for one, two in pairs})


def mark(said: Said, scope: str, first: Callable[[], str]) -> int:
    """The name under which a conversation is remembered after this turn; 0 where it has none.

    Args:
        said: The turn.
        scope: Whose conversation: what may be told apart by it never meets.
        first: The opening of the conversation, asked where ids do not name their call by
            themselves.
    """
    if not said.calls:
        # Short words ("Done.") would join conversations that have nothing to do with each other.
        return hash64(f"{scope}\0{said.text}") if len(said.text) >= 64 else 0
    ids = "\0".join([call.id for call in said.calls])
    if min([len(call.id) for call in said.calls]) >= WEAK_ID:
        return hash64(f"{scope}\0{ids}")
    return hash64(f"{scope}\0{ids}\0{said.calls[0].name}\0{first()}")
