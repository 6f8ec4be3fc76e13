"""Compiled validators of arguments and results, and regular expressions that cannot run away.

The one seat of jsonschema-rs (docs/adr/0050). What makes a schema safe to obey: its size and its
work are bounded before it compiles (`bounds.py`), its regular expressions run in an engine
of linear time, no reference is ever fetched, and the work it would do on a value of that size is
known. A schema beyond a bound is `Unusable`, and policy says what that means for its tool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jsonschema_rs
import orjson

from gateway.contracts.bounds import Unusable, looks

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BYTES = 256 * 1024
"""Bytes of a schema."""
MOST_WORK = 8_000_000
"""Looks at parts of one value, about a tenth of a second."""
BYTES_PER_PART = 6
"""Bytes of JSON text that a part of a value takes at least, on average."""
MOST_VALIDATORS = 2_000
"""Validators kept; the one unused for longest is forgotten."""
LONGEST_REASON = 200
DRAFTS = ("http://json-schema.org/", "https://json-schema.org/")
REGEX = jsonschema_rs.RegexOptions(size_limit=1 << 18, dfa_size_limit=1 << 20)

Schema: TypeAlias = "Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class Breach:
    """What is wrong with a value, and where.

    Attributes:
        path: Where, such as `lines[2].price`; "" is the whole value.
        reason: For the caller alone: it may quote the value.
    """

    path: str
    reason: str


class Validator:
    """One compiled schema.

    Attributes:
        looks: Looks that one path through a value can cost.
    """

    __slots__ = ("_inner", "looks")

    def __init__(self, schema: Schema) -> None:
        """Compile.

        Raises:
            Unusable: It is no schema, or one beyond our bounds.
        """
        named = schema.get("$schema")
        if named is not None and not (isinstance(named, str) and named.startswith(DRAFTS)):
            raise Unusable("it names a dialect ($schema) that is none of JSON Schema's drafts")
        self.looks = looks(schema)
        try:
            self._inner = jsonschema_rs.validator_for(
                dict(schema), offline=True, pattern_options=REGEX, validate_formats=False
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise Unusable(f"it is no JSON Schema: {error.message[:LONGEST_REASON]}") from error
        except ValueError as error:
            raise Unusable(f"it cannot be compiled: {str(error)[:LONGEST_REASON]}") from error

    def breach(self, value: object, *, size: int) -> Breach | None:
        """The first thing wrong with the value; None if it fits.

        Args:
            value: Decoded JSON.
            size: Bytes of its text.
        """
        if size // BYTES_PER_PART * self.looks > MOST_WORK:
            return Breach("", f"{size} bytes are too many to be checked against this schema")
        try:
            if self._inner.is_valid(value):
                return None
            error = next(self._inner.iter_errors(value))
        except ValueError as error_:
            return Breach("", f"it cannot be checked: {str(error_)[:LONGEST_REASON]}")
        return Breach(dotted(error.instance_path), error.message[:LONGEST_REASON])


def dotted(path: Sequence[str | int]) -> str:
    """A path for people: `lines[2].price`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part[:64]}" if text else part[:64]
    return text


class Validators:
    """Validators by what their schema says; equal schemas share one."""

    __slots__ = ("_kept", "_limit")

    def __init__(self, limit: int = MOST_VALIDATORS) -> None:
        self._kept: OrderedDict[bytes, Validator | Unusable] = OrderedDict()
        self._limit = limit

    def __len__(self) -> int:
        """Validators kept."""
        return len(self._kept)

    def of(self, schema: object) -> Validator | Unusable:
        """The validator of this schema, or why there is none."""
        if not isinstance(schema, Mapping):
            return Unusable("it is no object")
        try:
            key = orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)
        except TypeError:
            return Unusable("it is nested too deeply")
        if len(key) > MOST_BYTES:
            return Unusable(f"it is larger than {MOST_BYTES} bytes")
        found = self._kept.get(key)
        if found is None:
            try:
                found = Validator(schema)
            except Unusable as error:
                found = error
            self._kept[key] = found
            if len(self._kept) > self._limit:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return found


class Pattern:
    """A regular expression of linear time, for text that somebody else wrote.

    Attributes:
        text: The expression; `(?i)` in front lets case not matter.
    """

    __slots__ = ("_inner", "text")

    def __init__(self, text: str) -> None:
        """Compile.

        Raises:
            ValueError: It is none that runs in linear time (no look-around, no back references).
        """
        self.text = text
        try:
            self._inner = jsonschema_rs.validator_for(
                {"pattern": text}, offline=True, pattern_options=REGEX
            )
        except (jsonschema_rs.ValidationError, ValueError) as error:
            raise ValueError("no regular expression of linear time") from error

    def __repr__(self) -> str:
        """The expression."""
        return f"Pattern({self.text!r})"

    def found(self, text: str) -> bool:
        """Whether it matches anywhere in the text."""
        return bool(self._inner.is_valid(text))
