"""Byte items and `${variables}`: what a case says → what is written, and when (FORM.md §2)."""

from __future__ import annotations

import base64
import re
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import brotli
import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_VARIABLE = re.compile(r"\$\{([a-z0-9_]+)\}")
_TIME = re.compile(r"(date|epoch|rfc3339)_in_([0-9]+)([sh])")
MIB = 1 << 20


class UnknownVariable(Exception):
    """A text names a variable that has no value here."""


class Fill(Protocol):
    """Replaces the variables of a text."""

    def __call__(self, text: str) -> str:
        """The text with all its variables replaced; `UnknownVariable` where one has no value."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One write. `wait` is the seconds before it; None means the answer's usual gap."""

    data: bytes
    wait: float | None = None


class Names:
    """Variables and their values; a view laid over another one may add and replace."""

    def __init__(self, values: Mapping[str, str], below: Names | None = None) -> None:
        self._values = dict(values)
        self._below = below

    def over(self, **values: str) -> Names:
        """These values over the present ones."""
        return Names(values, self)

    def set(self, name: str, value: str) -> None:
        """Keep a value under that name."""
        self._values[name] = value

    def get(self, name: str) -> str | None:
        """The value, or None."""
        if name in self._values:
            return self._values[name]
        return self._below.get(name) if self._below else None

    def fill(self, text: str) -> str:
        """The text with all its variables replaced.

        Raises:
            UnknownVariable: One has no value.
        """
        if "${" not in text:
            return text

        def value(match: re.Match[str]) -> str:
            found = self.get(match[1])
            if found is None:
                raise UnknownVariable(match[1])
            return found

        return _VARIABLE.sub(value, text)


def times(now: datetime) -> dict[str, str]:
    """The variables that stand for a time relative to `now`."""
    made = {"date_past": format_datetime(now - timedelta(days=400), usegmt=True)}
    for name in (
        "date_in_2s", "date_in_1h", "epoch_in_1s", "rfc3339_in_1s", "date_in_1s", "rfc3339_in_2s",
        "epoch_in_2s",
    ):  # fmt: skip
        match = _TIME.fullmatch(name)
        assert match is not None
        at = now + timedelta(seconds=int(match[2]) * (3600 if match[3] == "h" else 1))
        made[name] = {
            "date": format_datetime(at, usegmt=True),
            "epoch": str(round(at.timestamp())),
            "rfc3339": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        }[match[1]]
    return made


def now() -> datetime:
    """The wall clock, in UTC."""
    return datetime.now(tz=UTC)


@lru_cache(maxsize=4)
def _bomb(mib: int, head: bytes, tail: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    parts = [packer.compress(head)]
    blanks = b" " * MIB
    parts += [packer.compress(blanks) for _ in range(mib)]
    return b"".join([*parts, packer.compress(tail), packer.flush()])


def _one(item: Any, fill: Fill) -> Iterator[Step]:
    if not isinstance(item, dict):
        yield Step(fill(str(item)).encode())
    elif "b64" in item:
        yield Step(base64.b64decode(item["b64"], validate=True))
    elif "fill" in item:
        yield Step(fill(item["fill"]).encode() * int(item["times"]))
    elif "join" in item:
        yield Step(content(item["join"], fill))
    elif "bytewise" in item:
        for number, byte in enumerate(content(item["bytewise"], fill)):
            yield Step(bytes((byte,)), float(item["every"]) if number else None)
    elif "repeat" in item:
        repeat = item["repeat"]
        for number in range(int(repeat["times"])):

            def numbered(text: str, number: int = number) -> str:
                return fill(text.replace("${i}", str(number)))

            yield Step(
                content(repeat["item"], numbered), float(repeat["every"]) if number else None
            )
    elif "gzip_bomb" in item:
        bomb = item["gzip_bomb"]
        yield Step(
            _bomb(int(bomb["mib"]), fill(bomb["head"]).encode(), fill(bomb["tail"]).encode())
        )
    else:
        raise ValueError(f"no byte item: {item!r}")


def steps(value: Any, fill: Fill) -> list[Step]:
    """The writes of one item or a list of items; a pause becomes the wait of the next write."""
    made: list[Step] = []
    pause: float | None = None
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and "pause" in item:
            pause = (pause or 0.0) + float(item["pause"])
            continue
        for step in _one(item, fill):
            made.append(step if pause is None else Step(step.data, pause + (step.wait or 0.0)))
            pause = None
    if pause is not None:
        made.append(Step(b"", pause))
    return made


def content(value: Any, fill: Fill) -> bytes:
    """All bytes of the items, without their timing."""
    return b"".join(step.data for step in steps(value, fill))


def unpack(coding: str, data: bytes) -> bytes:
    """The plain form of bytes in that content coding.

    Raises:
        ValueError: They are not, or the coding is not known.
    """
    try:
        match coding:
            case "gzip":
                return zlib.decompress(data, 31)
            case "deflate":
                return zlib.decompress(data)
            case "br":
                return bytes(brotli.decompress(data))
            case "zstd":
                return zstandard.ZstdDecompressor().decompressobj().decompress(data)
            case "" | "identity":
                return data
    except (zlib.error, brotli.error, zstandard.ZstdError) as error:
        raise ValueError(f"not {coding}: {error}") from error
    raise ValueError(f"no such content coding: {coding}")


def transcribed(text: str) -> bytes:
    r"""The bytes that an `is` transcription stands for: ASCII, \xNN, \r, \n, \\."""
    escapes = {"r": b"\r", "n": b"\n", "\\": b"\\", "t": b"\t"}

    def byte(match: re.Match[bytes]) -> bytes:
        word = match[1].decode()
        return bytes((int(word[1:], 16),)) if word.startswith("x") else escapes[word]

    return re.sub(rb"\\(x[0-9a-fA-F]{2}|[rnt\\])", byte, text.encode())
