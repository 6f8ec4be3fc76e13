"""Validation errors in the operator's words: what is wrong, what is allowed, what was meant. Pure.

Takes the error records of the models (type, location, context) and the JSON Schema, which knows
the keys allowed at each place. A record's input is looked at only to name a misspelled *word*, and
never inside the regions of `tree.QUIET`, where it could be a secret.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from gateway.policy import tree
from gateway.policy.problems import clean
from gateway.policy.quantity import Unreadable, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gateway.policy.problems import Path, Report

_EXPECTED = {
    "string_type": "a text is expected (numbers and true/false need quotes to be texts)",
    "int_type": "a whole number is expected",
    "int_from_float": "a whole number is expected",
    "float_type": "a number is expected",
    "bool_type": "true or false is expected",
    "tuple_type": "a list is expected",
    "dict_type": "a mapping is expected",
    "model_type": "a mapping is expected",
    "model_attributes_type": "a mapping is expected",
}
_QUOTED = re.compile(r"'([^']*)'|\b([0-9]+)\b")
_HARMLESS_KEY = re.compile(r"[A-Za-z_]{1,40}", re.ASCII)


class Schema:
    """The keys that a place of the file may hold."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._definitions: Mapping[str, Any] = schema.get("$defs", {})

    def keys(self, path: Path) -> tuple[str, ...]:
        """The keys allowed in the mapping at this path; () where any is."""
        found: dict[str, None] = {}
        for branch in self._walk(path):
            found.update(dict.fromkeys(branch.get("properties", {})))
        return tuple(found)

    def _walk(self, path: Path) -> list[Mapping[str, Any]]:
        here = self._branches(self._root)
        for step in path:
            below: list[Mapping[str, Any]] = []
            for branch in here:
                below.extend(self._step(branch, step))
            here = below
        return here

    def _step(self, branch: Mapping[str, Any], step: str | int) -> Iterable[Mapping[str, Any]]:
        if isinstance(step, int):
            child = branch.get("items")
        else:
            child = branch.get("properties", {}).get(step) or branch.get("additionalProperties")
        return self._branches(child) if isinstance(child, dict) else ()

    def _branches(self, node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The node and its alternatives, references followed."""
        if "$ref" in node:
            return self._branches(self._definitions[node["$ref"].rpartition("/")[2]])
        found = [node]
        for word in ("anyOf", "oneOf", "allOf"):
            for child in node.get(word, ()):
                found.extend(self._branches(child))
        return found


def report_errors(
    records: Iterable[Mapping[str, Any]],
    report: Report,
    schema: Callable[[], Schema],
    *,
    failed: set[Path],
) -> None:
    """Each record is one problem, unless its place has been reported already."""
    known: Schema | None = None
    for record in records:
        path: Path = tuple(record["loc"])
        at_key = bool(path) and path[-1] == "[key]"
        path = path[:-1] if at_key else path
        if record["type"] == "extra_forbidden":
            # That the key does not exist says more than what is wrong with its value.
            report.forget(path)
            known = known or schema()
            _unknown_key(path, report, known)
        elif not any(path[: len(above)] == above for above in failed):
            _one(record, path, report, at_key=at_key)


def _one(record: Mapping[str, Any], path: Path, report: Report, *, at_key: bool) -> None:
    kind: str = record["type"]
    context: Mapping[str, Any] = record.get("ctx", {})
    quiet = tree.fits(path, tree.QUIET, inside=True)
    wrong = context.get("error")
    if isinstance(wrong, Unreadable):
        value = record.get("input")
        near = (value, wrong.options) if isinstance(value, str) and not quiet else None
        hidden = quiet and shown(value) in wrong.what
        what = "is not valid here" if hidden else wrong.what
        report.error(path, what, allowed=wrong.allowed, near=near, at_key=at_key)
    elif kind == "missing":
        report.error(path, "is required and missing", at_key=True)
    elif kind == "literal_error":
        _unknown_word(record, path, report, quiet=quiet, at_key=at_key)
    elif kind in _EXPECTED:
        report.error(path, _EXPECTED[kind], at_key=at_key)
    else:
        report.error(path, _limit(kind, context), at_key=at_key)


def _unknown_key(path: Path, report: Report, schema: Schema) -> None:
    quiet = tree.fits(path, tree.QUIET, inside=True)
    key = str(path[-1])
    known = schema.keys(path[:-1])
    if quiet and not _HARMLESS_KEY.fullmatch(key):
        report.error(path[:-1], "an unknown key", allowed=", ".join(known), at_key=True)
        return
    report.error(
        path,
        f"unknown key {clean(key)!r}",
        allowed=", ".join(known),
        near=(key, known),
        at_key=True,
    )


def _unknown_word(
    record: Mapping[str, Any], path: Path, report: Report, *, quiet: bool, at_key: bool
) -> None:
    expected = str(record.get("ctx", {}).get("expected", ""))
    words = [a or b for a, b in _QUOTED.findall(expected)]
    value = record.get("input")
    if quiet or not isinstance(value, (str, int, float)):
        report.error(path, "not one of the words allowed here", allowed=", ".join(words))
        return
    near = (str(value), words)
    text = shown(value)
    report.error(path, f"{text} is not known", allowed=", ".join(words), near=near, at_key=at_key)


def _limit(kind: str, context: Mapping[str, Any]) -> str:
    """Bounds of numbers, texts and lists."""
    bounds = {
        "greater_than": ("must be above", "gt"),
        "greater_than_equal": ("must be at least", "ge"),
        "less_than": ("must be below", "lt"),
        "less_than_equal": ("must be at most", "le"),
        "too_short": ("needs at least this many entries:", "min_length"),
        "too_long": ("takes at most this many entries:", "max_length"),
        "string_too_short": ("needs at least this many characters:", "min_length"),
        "string_too_long": ("takes at most this many characters:", "max_length"),
    }
    if kind in bounds:
        words, bound = bounds[kind]
        return f"{words} {context.get(bound)}"
    return f"is not valid here ({kind})"
