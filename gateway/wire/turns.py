"""The turns of an agent's history, newest first, in three dialects, and their fingerprints.

A turn is one answer of a model (words, tool calls) with what its tools returned. Reading goes from
the end of the history to the last *user turn*: a message in which a person speaks. Tool results
are none, nor are the reminders that coding agents add to them, nor system messages. The reader is
lazy: whoever knows the conversation stops after a turn or two.

Fingerprints ignore what does not change the meaning: the order of keys, white space, escapes; and
masked ones numbers, dates and ids too. Odd shapes never raise: what cannot be read as a turn is
left out, what cannot be parsed counts as the text it is. Objects are dictionaries, as decoders make
them: asking for the abstract `Mapping` costs ten times as much, per message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, TypeAlias
from zlib import crc32

from gateway.call import Dialect
from gateway.resilience import loops
from gateway.wire import content

Body: TypeAlias = Mapping[str, Any]

Canonical: TypeAlias = Callable[[object], str]
"""Arguments (JSON text or values) to JSON with sorted keys and no optional white space; text that
is no JSON stays as it is. A parameter, because this room parses no JSON."""

MAX_RESULT = 8_192
"""Characters of a tool's result that are hashed: its length, its beginning and its end."""

MAX_MASKED = 4_096
"""Characters of arguments that are masked: their first and their last half."""

MAX_SAMPLE = 360
"""Characters of each half of a turn that are cut into shingles: beginning, middle and end."""

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
        if isinstance(message, dict) and message.get("role") == "user":
            words = [text for text in _texts(message.get("content")) if _spoken(text)]
            return " ".join(words)[:MAX_OPENING]
    return ""


def latest(dialect: Dialect, body: Body) -> str:
    """The end of what was last said to the model by a person or another agent; "" without one."""
    asked = body.get("input" if dialect is Dialect.RESPONSES else "messages")
    if isinstance(asked, str):
        return asked[-MAX_OPENING:]
    for message in reversed(_listed(asked)[-32:]):
        if isinstance(message, dict) and message.get("role") == "user":
            words = [text for text in _texts(message.get("content")) if _spoken(text)]
            return " ".join(words)[-MAX_OPENING:]
    return ""


def answered(dialect: Dialect, body: Body) -> bool:
    """Whether the model has spoken before: the conversation goes on, it does not begin."""
    if dialect is Dialect.RESPONSES:
        return bool(body.get("previous_response_id")) or any(
            isinstance(item, dict)
            and (item.get("role") == "assistant" or _text(item.get("type")).endswith("_call"))
            for item in _listed(body.get("input"))
        )
    return any(
        isinstance(message, dict) and message.get("role") == "assistant"
        for message in _listed(body.get("messages"))
    )


def _chat(body: Body) -> Iterator[Said]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    results: dict[str, object] = {}
    for at in range(len(messages) - 1, -1, -1):
        message = messages[at]
        if not isinstance(message, dict):
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
        if not isinstance(call, dict):
            continue
        inner = call.get("function")
        if not isinstance(inner, dict):
            inner = call.get("custom")
        if isinstance(inner, dict):
            arguments = inner.get("arguments")
            yield ToolCall(
                id=_text(call.get("id")),
                name=_text(inner.get("name")),
                arguments=inner.get("input") if arguments is None else arguments,
                result=results.get(_text(call.get("id"))),
            )
    legacy = message.get("function_call")
    if isinstance(legacy, dict):
        name = _text(legacy.get("name"))
        yield ToolCall(
            id="", name=name, arguments=legacy.get("arguments"), result=results.get(name)
        )


def _messages(body: Body) -> Iterator[Said]:
    messages = _listed(body.get("messages"))
    results: dict[str, object] = {}
    for at in range(len(messages) - 1, -1, -1):
        message = messages[at]
        if not isinstance(message, dict):
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
                if isinstance(block, dict) and _text(block.get("type")).endswith("tool_use")
            )
            results = {}
            if calls or at < len(messages) - 1:
                yield Said(" ".join(_texts(blocks)), calls)


def _results(blocks: object) -> Iterator[tuple[str, object]]:
    for block in _listed(blocks):
        if isinstance(block, dict) and _text(block.get("type")).endswith("tool_result"):
            yield _text(block.get("tool_use_id")), block.get("content")


def _responses(body: Body) -> Iterator[Said]:
    items = _listed(body.get("input"))
    results: dict[str, object] = {}
    calls: list[ToolCall] = []
    words: list[str] = []
    for at in range(len(items) - 1, -1, -1):
        item = items[at]
        if not isinstance(item, dict):
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
        elif isinstance(block, dict):
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
        text = block.get("text") if isinstance(block, dict) else block
        if isinstance(text, str):
            found.append(text)
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


# --- fingerprints ---------------------------------------------------------------------------------


def hash64(text: str) -> int:
    """A stable hash of 64 bits, so that gateways of a fleet agree; never 0."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") or 1


def folded(canonical: str) -> str:
    """Canonical JSON with every run of white space in its strings as one space, none at their ends.

    Escaped line ends, tabs and control characters count as white space.
    """
    text = canonical
    if "\\" in text:
        for escape in ("\\n", "\\t", "\\r", "\\f"):
            text = text.replace(escape, " ")
        if "\\u00" in text:
            text = _CONTROL.sub(" ", text)
    # Looking for what is rare costs a tenth of splitting. Other white space stands in plain text.
    if "  " in text or "\n" in text or "\t" in text or not text.isascii():
        text = " ".join(text.split())
    if '" ' in text:
        text = text.replace('" ', '"')
    return (text.replace(' "', '"') if ' "' in text else text).strip()


_CONTROL = re.compile(r"\\u00[01][0-9a-f]")


_DIGITS = bytes(ord("#") if chr(byte).isdigit() and byte < 128 else byte for byte in range(256))
_HEX = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-fA-F]{16,}")
_NAMES = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep",
    "sept", "oct", "nov", "dec", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday",
    "sunday", "mon", "tue", "tues", "wed", "thur", "thurs", "fri", "sat", "sun", "am", "pm", "st",
    "nd", "rd", "th",
)  # fmt: skip
_LONGEST_NAME = max(map(len, _NAMES))
_ANY_NAME = "|".join(_NAMES)
_SEPARATORS = " ,./-"
_HEAD = re.compile(rf"(?:[ ,./-]*(?:{_ANY_NAME})(?![^\W_]))+[ ,./-]*", re.IGNORECASE)
_TAIL = re.compile(rf"(?:(?<![^\W_])(?:{_ANY_NAME})[ ,./-]*)+$", re.IGNORECASE)
_NAMED = re.compile(r"#[ ,./-]*[A-Za-z]{2}")
"""Letters behind a run of digits; in front of one, where the text is read backwards. An expression
that may begin at any letter tries them all: ten times the work."""
_SHAPES = bytes(
    ord("x") if chr(byte) in "0123456789abcdefABCDEF" else byte if byte == ord("-") else ord(" ")
    for byte in range(256)
)
_LONG_SHAPE = b"x" * 16
_UUID_SHAPE = b"xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"

MOST_PIECES = 64
"""Runs of digits beside which names of months and days are looked for."""


def masked(text: str) -> str:
    """The text with numbers, dates, times and long hexadecimal ids made equal.

    Every run of digits, with its signs, becomes one mark; names of months and days count as digits
    where they stand beside some.
    """
    text = _sampled(text, MAX_MASKED)
    data = text.encode("utf-8", "surrogatepass")
    marked = data.translate(_DIGITS)
    if marked == data:  # most arguments hold no digit: nothing else is searched for
        return text
    shapes = data.translate(_SHAPES)
    if _LONG_SHAPE in shapes or _UUID_SHAPE in shapes:
        marked = _HEX.sub("#", text).encode("utf-8", "surrogatepass").translate(_DIGITS)
    text = marked.decode("utf-8", "surrogatepass")
    if _NAMED.search(text) is None and _NAMED.search(text[::-1]) is None:
        while "##" in text:
            text = text.replace("##", "#")
        return text
    pieces = text.split("#")
    if len(pieces) <= MOST_PIECES:
        last = len(pieces) - 1
        pieces = [
            _undated(piece, after=at > 0, before=at < last)
            for at, piece in enumerate(pieces)
            if piece
        ]
    return "#".join([piece for piece in pieces if piece])


def _undated(piece: str, *, after: bool, before: bool) -> str:
    """What stands after or before a run of digits, without names of months and days beside it."""
    # Where no name stands, which is nearly always, looking is a tenth of trying them all.
    if (
        after
        and piece.lstrip(_SEPARATORS)[:_LONGEST_NAME].lower().startswith(_NAMES)
        and (found := _HEAD.match(piece))
    ):
        piece = piece[found.end() :]
    if (
        before
        and piece.rstrip(_SEPARATORS)[-_LONGEST_NAME:].lower().endswith(_NAMES)
        and (found := _TAIL.search(piece, max(0, len(piece) - 32)))
    ):
        piece = piece[: found.start()]
    return piece


def result_text(result: object) -> str:
    """A tool's result as text, of bounded length."""
    if isinstance(result, str):
        text = result
    elif isinstance(result, list) and result:
        text = "\n".join(
            block["text"]
            if isinstance(block, dict) and isinstance(block.get("text"), str)
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


_ODD = 0x9E37_79B9_7F4A_7C15
_WHOLE = 0xFFFF_FFFF_FFFF_FFFF


def printed(name: str, arguments: str) -> tuple[int, int]:
    """The exact and the masked fingerprint of a call, without its result.

    Args:
        name: The tool's.
        arguments: Canonical and folded.
    """
    exact, plain = hash64(f"{name}\0{arguments}"), masked(arguments)
    return exact, exact if plain is arguments else hash64(f"{name}\0{plain}")


def with_result(masked_print: int, result: str) -> int:
    """The masked fingerprint of a call with its result; never 0."""
    return (masked_print ^ hash64(result) * _ODD) & _WHOLE or 1


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
        result = None
        if call.result is not None:
            result = result_text(call.result)
            returned.append(result)
        if exempt(call.name):
            polling += 1
            continue
        exact, like = printed(call.name, arguments)
        prints.append((exact, 0 if result is None else with_result(like, result)))
    return loops.Turn(
        calls=tuple(prints),
        kind=hash(tuple([call.name for call in said.calls])),
        size=sum(map(len, words)) + sum(map(len, returned)),
        exempt=bool(polling) and not prints,
        sketch=lambda half: _shingles(words if half is loops.Half.SAID else returned),
    )


def pending_of(
    calls: tuple[ToolCall, ...], canonical: Canonical, exempt: Callable[[str], bool]
) -> list[loops.Pending]:
    """Calls of an answer, until their results come."""
    found = []
    for call in calls[: loops.MOST_PENDING]:
        exact, like = printed(call.name, folded(canonical(call.arguments)))
        found.append(
            loops.Pending(
                id=hash64(call.id),
                exact=exact,
                masked=like,
                exempt=exempt(call.name),
                name=call.name,
            )
        )
    return found


def answered_turn(pending: list[loops.Pending], outputs: Mapping[str, object]) -> loops.Turn:
    """The turn of pending calls whose results have come; of calls unknown only an iteration.

    Every hash in it is the same in every process.
    """
    results = {hash64(key): result_text(output) for key, output in outputs.items()}
    came = [one for one in pending if one.id in results]
    returned = [results[one.id] for one in came]
    calls = tuple(
        (one.exact, with_result(one.masked, results[one.id])) for one in came if not one.exempt
    )
    said = [call[0] & 0xFFFF_FFFF for call in calls]
    return loops.Turn(
        calls=calls,
        kind=hash64("\0".join([one.name for one in came])),
        size=sum(map(len, returned)) + 1,
        exempt=not calls,
        sketch=lambda half: (
            loops.sketch_of(said) if half is loops.Half.SAID else _shingles(returned, _stable)
        ),
    )


def _stable(pair: tuple[str, str]) -> int:
    """A hash of 32 bits that is the same in every process: some sketches travel."""
    return crc32("\0".join(pair).encode("utf-8", "surrogatepass"))


def _shingles(texts: list[str], hashed: Callable[[tuple[str, str]], int] = hash) -> bytes:
    """The pairs of neighboring words in three samples, hashed; a single word is its own pair.

    So few words are taken that hardly any is dropped by `loops.sketch_of`: what is compared then
    does not depend on Python's seed of hashes, which is good for sketches that stay here.
    """
    text = " ".join(texts)
    if len(text) > MAX_SAMPLE:
        third, middle = MAX_SAMPLE // 3, len(text) // 2
        text = f"{text[:third]} {text[middle - third // 2 : middle + third // 2]} {text[-third:]}"
    words = text.replace('"', " ").replace(",", " ").replace(":", " ").split()
    pairs = set(zip(words, words[1:] or words, strict=False))
    return loops.sketch_of([hashed(pair) & 0xFFFF_FFFF for pair in pairs])


def mark(said: Said, scope: int, first: Callable[[], str]) -> int:
    """The name under which a process remembers a conversation after this turn; 0: it has none.

    Args:
        said: The turn.
        scope: Whose conversation: what may be told apart by it never meets.
        first: The opening of the conversation, asked where ids do not name their call by
            themselves.
    """
    calls = said.calls
    if len(calls) == 1 and len(calls[0].id) >= WEAK_ID:
        return hash((scope, calls[0].id)) or 1
    if not calls:
        # Short words ("Done.") would join conversations that have nothing to do with each other.
        return (hash((scope, said.text)) or 1) if len(said.text) >= 64 else 0
    ids = tuple([call.id for call in calls])
    if min(map(len, ids)) >= WEAK_ID:
        return hash((scope, ids)) or 1
    return hash((scope, ids, calls[0].name, first())) or 1
