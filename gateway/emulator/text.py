"""What the emulator says, and how it counts: deterministic, cheap, believable.

Prose comes from a *reel*, sentences built once from a small vocabulary; an answer is a stretch of
it that begins at a sentence. Each piece of the Latin reel is exactly one token of o200k_base and of
cl100k_base (verified by a test where the vocabularies are at hand), so that counting pieces is
counting tokens and a gateway that counts the stream arrives at the reported figure.

Input is counted by `approximate`: (characters + UTF-8 bytes) / 8, rounded up: four characters of
ASCII, fewer of other scripts. Measured against o200k_base on English, code, JSON, Markdown and on
Chinese, Russian and Hindi, the mean is 0.84 to 1.25 of the truth. Tests that need exact figures
inject a tokenizer.

`Draw` is the only source of chance: a counter hashed with a seed, so that two processes agree.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import orjson

Tokenizer: TypeAlias = Callable[[str], int]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_OPENERS = _words("The A This That Each Every One Another Our Their")
_ADJECTIVES = _words(
    "small large simple careful quiet central early recent local common useful stable clear open "
    "strong final direct whole narrow wide single shared short long slow fast safe steady formal "
    "public private active hidden modern first second next"
)
_NOUNS = _words(
    "system model query river market garden station signal window report library method record "
    "project budget result team plan message network region question answer village engine tool "
    "table letter student doctor machine number story season bridge forest ocean island theory "
    "sample limit queue token task service client cache version source value pattern event change "
    "process structure context layer path measure"
)
_VERBS = _words(
    "keeps follows supports carries explains describes changes requires returns holds reaches "
    "shows builds protects measures connects includes replaces reduces improves considers counts "
    "opens moves answers leads needs gives finds makes takes adds uses"
)
_LINKS = _words("and but because while although when so where since before after until")
_TAILS = _words("again today slowly together quickly often later instead already carefully well")
_PREPOSITIONS = _words(
    "in near with under through across from between against behind beyond for without within over"
)
_DETERMINERS = _words("the a this that each every one another our their its any some")
_MIXED = (" café", " über", "東京", " город", " Zürich", " 你好", " naïve", "🙂")

REEL_PIECES = 8_192
"""Pieces of one reel: long enough that answers differ, small enough to build in a few ms."""


def approximate(text: str) -> int:
    """About how many tokens the text has; 0 only for no text."""
    if text.isascii():
        return (len(text) + 3) // 4
    return (len(text) + len(text.encode("utf-8", "surrogatepass")) + 7) // 8


class Draw:
    """Numbers that depend on a seed and on how many were drawn before, on nothing else."""

    __slots__ = ("_buffer", "_count", "_offset", "_seed")

    def __init__(self, *seed: bytes | int | str) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for part in seed:
            raw = part if isinstance(part, bytes) else str(part).encode()
            digest.update(struct.pack("<I", len(raw)) + raw)
        self._seed = digest.digest()
        self._count = 0
        self._buffer = b""
        self._offset = 64

    def bits(self) -> int:
        """64 random bits."""
        if self._offset >= 64:
            self._buffer = hashlib.blake2b(
                self._seed + self._count.to_bytes(8, "little"), digest_size=64
            ).digest()
            self._count += 1
            self._offset = 0
        self._offset += 8
        return int.from_bytes(self._buffer[self._offset - 8 : self._offset], "little")

    def unit(self) -> float:
        """A float in [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        return self.bits() % n

    def spread(self, width: float) -> float:
        """A factor in [1 - width, 1 + width)."""
        return 1.0 + width * (2.0 * self.unit() - 1.0)

    def lognormal(self, median: float, sigma: float) -> float:
        """A lognormal number with that median."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.unit()))
        return median * math.exp(sigma * radius * math.cos(2.0 * math.pi * self.unit()))

    def hex(self, digits: int) -> str:
        """That many hexadecimal digits."""
        return "".join(f"{self.bits():016x}" for _ in range((digits + 15) // 16))[:digits]


class Reel:
    """Endless prose as pieces of one token each, built once."""

    __slots__ = ("_ends", "_pieces", "_starts")

    def __init__(self, seed: int, script: str = "latin") -> None:
        draw = Draw(seed, "reel", script)
        pieces: list[str] = []
        starts: list[int] = []
        while len(pieces) < REEL_PIECES:
            starts.append(len(pieces))
            pieces.extend(_sentence(draw, mixed=script == "mixed"))
        # Twice in a row, so that a stretch never has to wrap.
        self._pieces = pieces + pieces
        self._starts = starts
        ends = [*starts[1:], len(pieces)]
        self._ends = ends + [end + len(pieces) for end in ends]

    def stretch(self, draw: Draw, length: int) -> tuple[str, ...]:
        """Whole sentences of at least that many pieces; the first begins without a space."""
        taken: list[str] = []
        while len(taken) < max(1, length):
            start = self._starts[draw.below(len(self._starts))]
            want = min(max(1, length) - len(taken), REEL_PIECES)
            end = self._ends[bisect_left(self._ends, start + want)]
            taken += self._pieces[start:end]
        taken[0] = taken[0].lstrip()
        return tuple(taken)


def _pick(draw: Draw, words: tuple[str, ...]) -> str:
    return words[draw.below(len(words))]


def _clause(draw: Draw) -> Iterator[str]:
    if draw.below(2):
        yield " " + _pick(draw, _ADJECTIVES)
    yield " " + _pick(draw, _NOUNS)
    yield " " + _pick(draw, _VERBS)
    yield " " + _pick(draw, _DETERMINERS)
    if draw.below(2):
        yield " " + _pick(draw, _ADJECTIVES)
    yield " " + _pick(draw, _NOUNS)
    if draw.below(3) == 0:
        yield " " + _pick(draw, _PREPOSITIONS)
        yield " " + _pick(draw, _DETERMINERS)
        yield " " + _pick(draw, _NOUNS)


def _sentence(draw: Draw, *, mixed: bool) -> Iterator[str]:
    yield " " + _pick(draw, _OPENERS)
    yield from _clause(draw)
    for _ in range(draw.below(3)):
        if draw.below(2):
            yield ","
        yield " " + _pick(draw, _LINKS)
        yield " " + _pick(draw, _DETERMINERS)
        yield from _clause(draw)
    if mixed:
        yield _MIXED[draw.below(len(_MIXED))]
    if draw.below(3) == 0:
        yield " " + _pick(draw, _TAILS)
    yield "."


# --- JSON that fits a schema --------------------------------------------------------------------

MAX_DEPTH = 8
"""Schemas may refer to themselves; deeper than this only the smallest value is made."""

_FORMATS = {
    "date": "2026-01-15",
    "date-time": "2026-01-15T09:30:00Z",
    "time": "09:30:00Z",
    "email": "reader@example.com",
    "uri": "https://example.com/report",
    "uuid": "6f1d3c1e-8a52-4c3b-9b8e-2f6f0c1d4e5a",
    "ipv4": "192.0.2.10",
    "hostname": "example.com",
}


class Instance:
    """Makes a value that a JSON schema accepts, as far as common keywords say.

    Honors type, enum, const, default, properties, items, minItems, bounds of numbers and lengths,
    format, local `$ref`, and the first of allOf, anyOf, oneOf. Weakness: `pattern`, `not` and
    dependencies are not read; a schema that is no mapping gets an empty object.
    """

    __slots__ = ("_draw", "_root")

    def __init__(self, draw: Draw, root: object) -> None:
        self._draw = draw
        self._root = root if isinstance(root, Mapping) else {}

    def make(self) -> Any:  # noqa: ANN401 - any JSON value
        """A value for the root schema."""
        return self._value(self._root, 0)

    def _value(self, schema: object, depth: int) -> Any:  # noqa: ANN401 - any JSON value
        if not isinstance(schema, Mapping):
            return self._word()
        schema = self._resolved(schema, depth)
        if "const" in schema:
            return schema["const"]
        enum = schema.get("enum")
        if isinstance(enum, list) and enum:
            return enum[self._draw.below(len(enum))]
        if "default" in schema:
            return schema["default"]
        match self._type(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "integer" | "number" as kind:
                return self._number(schema, whole=kind == "integer")
            case "boolean":
                return bool(self._draw.below(2))
            case "null":
                return None
            case _:
                return self._text(schema)

    def _resolved(self, schema: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        for _ in range(MAX_DEPTH):
            reference = schema.get("$ref")
            if isinstance(reference, str) and depth <= MAX_DEPTH:
                target: object = self._root
                for part in reference.lstrip("#").strip("/").split("/"):
                    target = target.get(part) if isinstance(target, Mapping) and part else target
                schema = target if isinstance(target, Mapping) else {}
                continue
            branches = [b for k in ("allOf", "anyOf", "oneOf") for b in _list(schema.get(k))]
            if not branches or not isinstance(branches[0], Mapping):
                break
            rest = {k: v for k, v in schema.items() if k not in ("allOf", "anyOf", "oneOf")}
            schema = {**rest, **branches[0]}
        return schema

    @staticmethod
    def _type(schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((k for k in kind if k != "null"), "null")
        if isinstance(kind, str):
            return kind
        return "object" if "properties" in schema else "array" if "items" in schema else "string"

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        required = _list(schema.get("required"))
        if not isinstance(properties, Mapping):
            return {}
        return {
            name: self._value(inner, depth + 1)
            for name, inner in properties.items()
            if name in required or depth < MAX_DEPTH // 2
        }

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least = _number(schema.get("minItems"), 0)
        count = max(int(least), 0 if depth >= MAX_DEPTH else 1)
        most = _number(schema.get("maxItems"), 64)
        return [self._value(schema.get("items"), depth + 1) for _ in range(int(min(count, most)))]

    def _number(self, schema: Mapping[str, Any], *, whole: bool) -> float:
        low = _number(schema.get("minimum"), _number(schema.get("exclusiveMinimum"), 0) + 1)
        high = _number(schema.get("maximum"), max(low, 100.0))
        step = _number(schema.get("multipleOf"), 1.0) or 1.0
        value = math.ceil(low / step) * step + step * self._draw.below(
            max(1, min(50, int((high - low) / step)))
        )
        return int(value) if whole else float(value)

    def _text(self, schema: Mapping[str, Any]) -> str:
        named = _FORMATS.get(str(schema.get("format")))
        if named is not None:
            return named
        text = f"{self._word()} {_pick(self._draw, _NOUNS)}"
        least = int(_number(schema.get("minLength"), 0))
        most = int(_number(schema.get("maxLength"), 10_000))
        return (text * (min(least, 10_000) // len(text) + 1))[: max(least, min(len(text), most))]

    def _word(self) -> str:
        return _pick(self._draw, _ADJECTIVES)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object, default: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return float(value) if math.isfinite(value) and abs(value) < 1e12 else default


def as_json(value: object) -> bytes:
    """JSON, also of what orjson refuses: lone surrogates, integers above 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def in_pieces(text: str, size: int = 4) -> tuple[str, ...]:
    """The text cut into pieces of `size` characters, each counted as one token."""
    return tuple(text[i : i + size] for i in range(0, len(text), size))
