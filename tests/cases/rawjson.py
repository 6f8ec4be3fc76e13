"""The exact text of JSON members: a parser would make something else of 9007199254740993."""

from __future__ import annotations

import json

_DECODER = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _value(text: str, at: int) -> int:
    return _DECODER.raw_decode(text, at)[1]


def members(text: str) -> dict[str, str]:
    """Name → exact text of each member of the object in `text`; {} where there is no object."""
    found: dict[str, str] = {}
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        return found
    at = _skip(text, at + 1)
    try:
        while text[at : at + 1] == '"':
            name, at = _DECODER.raw_decode(text, at)
            at = _skip(text, at)
            if text[at : at + 1] != ":":
                return found
            start = _skip(text, at + 1)
            at = _value(text, start)
            found[name] = text[start:at]
            at = _skip(text, at)
            if text[at : at + 1] != ",":
                break
            at = _skip(text, at + 1)
    except ValueError:
        return found
    return found


def member(text: str, name: str) -> str | None:
    """The exact text of one member, or None."""
    return members(text).get(name)


def elements(text: str) -> list[str]:
    """The exact texts of an array's elements; the text itself where it is no array."""
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        return [text] if text.strip() else []
    found = []
    at = _skip(text, at + 1)
    try:
        while at < len(text) and text[at] != "]":
            end = _value(text, at)
            found.append(text[at:end])
            at = _skip(text, end)
            if text[at : at + 1] == ",":
                at = _skip(text, at + 1)
    except ValueError:
        return found
    return found
