"""One text for one JSON value, whoever wrote it: what is hashed and signed. Pure.

RFC 8785 (JSON Canonicalization Scheme): members sorted by UTF-16 code units, no white space,
shortest numbers in ECMAScript's form, so that an approver's own tool computes the same bytes. One
departure: integers beyond 2^53 keep their digits, because two amounts that differ must never share
a hash. Whoever cannot say such integers sends them as text, as that RFC advises.
Source: RFC 8785; ECMA-262 §6.1.6.1.20 (Number::toString).
"""

from __future__ import annotations

import hashlib
import math
from json.encoder import encode_basestring
from typing import Any

DEEPEST = 128
"""Levels of nesting; what is deeper was refused long before it comes here."""


LITERALS = {None: "null", True: "true", False: "false"}


class NotCanonical(ValueError):
    """The value is no JSON that could be written: not finite, a lone surrogate, too deep."""


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON
    """The one text of this value.

    Args:
        value: Decoded JSON; keys are text.

    Raises:
        NotCanonical: It has none.
    """
    pieces: list[str] = []
    _write(value, pieces, DEEPEST)
    try:
        return "".join(pieces).encode()
    except UnicodeEncodeError as error:
        raise NotCanonical("text holds a lone surrogate") from error


def fingerprint(value: Any) -> str:  # noqa: ANN401 - any JSON
    """SHA-256 of the canonical text, in hex. Raises NotCanonical."""
    return hashlib.sha256(canonical(value)).hexdigest()


def _write(value: object, pieces: list[str], left: int) -> None:
    if value is None or value is True or value is False:
        pieces.append(LITERALS[value])
    elif isinstance(value, str):
        pieces.append(encode_basestring(value))
    elif isinstance(value, int):
        pieces.append(str(value))
    elif isinstance(value, float):
        pieces.append(number(value))
    elif left == 0:
        raise NotCanonical(f"nested deeper than {DEEPEST} levels")
    elif isinstance(value, dict):
        _write_members(value, pieces, left)
    elif isinstance(value, list | tuple):
        mark = "["
        for item in value:
            pieces.append(mark)
            _write(item, pieces, left - 1)
            mark = ","
        pieces.append("]" if value else "[]")
    else:
        raise NotCanonical(f"{type(value).__name__} is no JSON")


def _write_members(value: dict[str, object], pieces: list[str], left: int) -> None:
    mark = "{"
    for key in sorted(value, key=_units):
        pieces += mark, encode_basestring(key), ":"
        _write(value[key], pieces, left - 1)
        mark = ","
    pieces.append("}" if value else "{}")


def _units(key: str) -> bytes:
    """Sorts as its UTF-16 code units do."""
    return key.encode("utf-16-be", "surrogatepass")


def number(value: float) -> str:
    """The number as ECMAScript writes it. Raises NotCanonical where it is not finite."""
    if not math.isfinite(value):
        raise NotCanonical("a number is not finite")
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    digits, point = _decimal(repr(abs(value)))
    count = len(digits)
    if count <= point <= 21:
        return f"{sign}{digits}{'0' * (point - count)}"
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    power = point - 1
    mantissa = digits[0] + (f".{digits[1:]}" if count > 1 else "")
    return f"{sign}{mantissa}e{'+' if power > 0 else '-'}{abs(power)}"


def _decimal(text: str) -> tuple[str, int]:
    """Shortest digits without zeros at either end, and where the point stands before them."""
    mantissa, _, power = text.partition("e")
    whole, _, part = mantissa.partition(".")
    digits = whole + part
    point = len(whole) + int(power or 0)
    stripped = digits.lstrip("0")
    point -= len(digits) - len(stripped)
    return stripped.rstrip("0"), point
