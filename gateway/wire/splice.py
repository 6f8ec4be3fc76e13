r"""Raw JSON objects: replace one top-level value and keep every other byte; find doubled keys.

A body is never re-serialized: signed `thinking` blocks and prompt caches break when a byte changes
(`protocols.md` §1.5). So an edit names one key, and bytes are cut and joined around its value.

Keys are compared as a decoder reads them: `"mod\u0065l"` is `model`. A doubled key is an error,
not a choice: decoders keep the last, some upstreams the first, and a limit must not depend on that.

Everything scans forward: no recursion, so depth costs nothing, and no decoding, so a 33 MB image is
skipped at memory speed. The text must be one JSON object, which callers have decoded before; other
text raises `MalformedCall` and never hangs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gateway.errors import MalformedCall

if TYPE_CHECKING:
    from collections.abc import Iterator

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_KEY = re.compile(rb"[\s]*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STRUCTURE = re.compile(rb'[^"{}\[\]]*+(?:(")|([{\[])|([}\]]))', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,{}\[\]\":]++")
_SPACE = re.compile(rb"\s*+")
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_BACKSLASH = 0x5C
_PATIENCE = 64
"""Escaped quotes of one string stepped over one by one; beyond them the regular expression goes."""
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LETTER_ESCAPE = re.compile(rb"\\u00[567]")
"""An escape of a lower-case letter or an underscore; encoders never write one."""

MAX_MEMBERS = 100_000
"""Members of one object that are walked; no API has more than a few dozen."""

MAX_STRUCTURE = 1_000_000
"""Brackets and strings walked in one value; 33 MB of brackets would hold the loop for seconds."""


class Member(NamedTuple):
    """One member of an object: its key as read, and where its value stands in the raw text."""

    key: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KeySet:
    """Keys that may stand only once, with the pattern that finds candidates for them."""

    names: frozenset[str]
    pattern: re.Pattern[bytes]


def key_set(*names: str) -> KeySet:
    """The set of these names; lower-case letters and underscores only."""
    choice = b"|".join(re.escape(name.encode()) for name in sorted(names))
    return KeySet(frozenset(names), re.compile(rb'"(' + choice + rb')"\s*+:'))


MODEL_KEYS = key_set(
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "max_output_tokens", "thinking", "n", "best_of",
)  # fmt: skip
"""What a model call is governed by: a second one of these could be the one the upstream reads."""

MCP_KEYS = key_set("jsonrpc", "method", "params", "id")
"""The same of a JSON-RPC message; `params.name` is checked in its own object."""

PARAMS_KEYS = key_set("name", "uri", "arguments")


def members(raw: bytes, start: int = 0) -> Iterator[Member]:
    """The members of the object that opens at or after `start`, white space skipped.

    Raises:
        MalformedCall: What stands there is no JSON object.
    """
    at = _opening(raw, start) + 1
    if raw[_skip(raw, at) : _skip(raw, at) + 1] == b"}":
        return
    for _ in range(MAX_MEMBERS):
        match = _KEY.match(raw, at)
        if match is None:
            raise _broken(at)
        end = _value_end(raw, match.end())
        yield Member(_plain(match[1]), match.end(), end)
        at = _skip(raw, end)
        mark = raw[at : at + 1]
        if mark == b"}":
            return
        if mark != b",":
            raise _broken(at)
        at += 1
    raise MalformedCall("the body has too many members to be edited")


def elements(raw: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each element of the array that the text is.

    Raises:
        MalformedCall: It is no JSON array.
    """
    at = _skip(raw, 3 if raw.startswith(b"\xef\xbb\xbf") else 0)
    if raw[at : at + 1] != b"[":
        raise _broken(at)
    at = _skip(raw, at + 1)
    if raw[at : at + 1] == b"]":
        return
    for _ in range(MAX_MEMBERS):
        end = _value_end(raw, at)
        yield at, end
        at = _skip(raw, end)
        if raw[at : at + 1] == b"]":
            return
        if raw[at : at + 1] != b",":
            raise _broken(at)
        at = _skip(raw, at + 1)
    raise MalformedCall("the body has too many members to be edited")


def duplicate_keys(raw: bytes, keys: KeySet) -> str | None:
    """The first of these keys that stands twice at the top level; None if each stands once at most.

    Cheap where nothing is suspicious, which is nearly always: one search for the names, one for
    escapes that could spell them. Only then are the members walked.
    """
    seen = keys.pattern.findall(raw)
    if len(set(seen)) == len(seen) and not _spells_letters(raw):
        return None
    found: set[str] = set()
    for member in members(raw):
        if member.key in keys.names:
            if member.key in found:
                return member.key
            found.add(member.key)
    return None


def locate(raw: bytes, key: str, start: int = 0) -> Member | None:
    """Where the value of a key of the object at `start` stands; None if the key is absent.

    Raises:
        MalformedCall: The key stands twice, or the text is no JSON object.
    """
    once = start == 0 and _single(raw, key)
    found = None
    for member in members(raw, start):
        if member.key == key:
            if found is not None:
                raise MalformedCall(f"the key {key!r} stands twice", param=key)
            found = member
            if once:
                break
    return found


def splice(raw: bytes, key: str, value: bytes) -> bytes:
    """The text with the value of one top-level key replaced; every other byte stays.

    Args:
        raw: A JSON object.
        key: Its name as a decoder reads it.
        value: JSON text.

    Raises:
        MalformedCall: The key is absent or stands twice.
    """
    member = locate(raw, key)
    if member is None:
        raise MalformedCall(f"the key {key!r} is missing", param=key)
    return raw[: member.start] + value + raw[member.end :]


def insert(raw: bytes, key: str, value: bytes, start: int = 0) -> bytes:
    """The text with one more member in front of the object's others; the key must be absent."""
    at = _opening(raw, start) + 1
    comma = b"" if raw[_skip(raw, at) : _skip(raw, at) + 1] == b"}" else b","
    return b'%b"%b":%b%b%b' % (raw[:at], key.encode(), value, comma, raw[at:])


def without(raw: bytes, keys: frozenset[str]) -> bytes:
    """The text without these members of its object; the others keep every byte, and their order.

    Raises:
        MalformedCall: It is no JSON object.
    """
    begin = at = _opening(raw, 0) + 1
    end = _skip(raw, at)
    kept: list[bytes] = []
    for member in members(raw):
        if member.key not in keys:
            kept.append(raw[at : member.end])
        end = _skip(raw, member.end)
        at = end + 1  # behind the comma
    return raw[:begin] + b",".join(kept) + raw[end:]


def splice_in(raw: bytes, outer: str, key: str, value: bytes) -> bytes:
    """The text with `outer.key` set; `outer` becomes an object if it is absent or null.

    Its other members stay as they are. Raises MalformedCall where `outer` is another kind of value.
    """
    member = locate(raw, outer)
    if member is None:
        return insert(raw, outer, b'{"%b":%b}' % (key.encode(), value))
    text = raw[member.start : member.end]
    if text == b"null":
        return raw[: member.start] + b'{"%b":%b}' % (key.encode(), value) + raw[member.end :]
    if not text.startswith(b"{"):
        raise MalformedCall(f"{outer} must be an object", param=outer)
    inner = locate(raw, key, member.start)
    if inner is None:
        return insert(raw, key, value, member.start)
    return raw[: inner.start] + value + raw[inner.end :]


def _single(raw: bytes, key: str) -> bool:
    """Whether a second member of that name is impossible: a search may stop at the first."""
    return raw.count(b'"%b"' % key.encode()) <= 1 and not _spells_letters(raw)


def _spells_letters(raw: bytes) -> bool:
    """Whether some escape could hide a governed name."""
    # `find` and not `in`, which tries what it looks for as a number first: three times as dear.
    return raw.find(b"\\") >= 0 and _LETTER_ESCAPE.search(raw) is not None


def _opening(raw: bytes, start: int) -> int:
    at = start
    if at == 0 and raw.startswith(b"\xef\xbb\xbf"):
        at = 3
    at = _skip(raw, at)
    if raw[at : at + 1] != b"{":
        raise _broken(at)
    return at


def _skip(raw: bytes, at: int) -> int:
    match = _SPACE.match(raw, at)
    return match.end() if match else at


def _value_end(raw: bytes, at: int) -> int:
    """Where the value beginning at `at` ends."""
    first = raw[at : at + 1]
    if first == b'"':
        return _string_end(raw, at)
    if first in (b"{", b"["):
        return _nested_end(raw, at)
    match = _SCALAR.match(raw, at)
    if match is None:
        raise _broken(at)
    return match.end()


def _string_end(raw: bytes, at: int) -> int:
    """Where the string opening at `at` ends: from quote to quote, as far as few are escaped."""
    quote = at
    for _ in range(_PATIENCE):
        quote = raw.find(b'"', quote + 1)
        if quote < 0:
            raise _broken(at)
        before = quote - 1
        while raw[before] == _BACKSLASH:
            before -= 1
            if quote - before > _PATIENCE:
                return _regular_end(raw, at + 1)
        if (quote - before) % 2:
            return quote + 1
    return _regular_end(raw, quote + 1)


def _regular_end(raw: bytes, at: int) -> int:
    match = _REST_OF_STRING.match(raw, at)
    if match is None:
        raise _broken(at)
    return match.end()


def _nested_end(raw: bytes, at: int) -> int:
    depth = 0
    for _ in range(MAX_STRUCTURE):
        match = _STRUCTURE.match(raw, at)
        if match is None:
            raise _broken(at)
        at = match.end()
        if match.lastindex == 1:
            at = _string_end(raw, at - 1)
        elif match.lastindex == 2:
            depth += 1
        else:
            depth -= 1
            if not depth:
                return at
    raise MalformedCall("the body has too many members to be edited")


def _plain(text: bytes) -> str:
    """A key as a decoder reads it. Lone surrogates stay what they are: no governed key has one."""
    inner = text[1:-1].decode("utf-8", "replace")
    if "\\" not in inner:
        return inner
    return _ESCAPED.sub(
        lambda match: chr(int(match[1], 16)) if match[1] else _SHORT.get(match[2], match[2]), inner
    )


def _broken(at: int) -> MalformedCall:
    return MalformedCall(f"the body is not a JSON object (byte {at})")
