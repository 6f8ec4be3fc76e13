"""What policy says of single values: kind, range, form, choice, money, comparisons. Pure.

A schema is its server's word; these are the operator's, and hold whatever the server says. The same
condition serves twice: as an *assertion* that every value at a path must meet, and in a *case* that
says when something else applies (a limit, an approval).

A case is careful: what is missing or of another kind counts as met, so that leaving out the amount
is no way around the approval of large ones. An assertion is strict for the same reason: a value of
another kind breaks it, a missing one only where it is required.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

MOST_VALUES = 10_000
"""Values at one path that are looked at; more are a breach."""
LONGEST_NUMBER = 40
"""Characters of a decimal number."""
SHOWN = 60
"""Characters of a value that a reason quotes."""

KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}

_STEP = re.compile(r"([^.\[\]]+)|\[(\*|[0-9]{1,6})\]|(\.)")
_CURRENCY = re.compile(r"[A-Z]{3}")
_DECIMAL = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def steps(path: str) -> tuple[str | int, ...]:
    """The steps of a path such as `lines[*].price`; `[*]` is every item.

    Raises:
        ValueError: It has another form.
    """
    found: list[str | int] = []
    at = 0
    dot = True  # a name may only follow a dot or the beginning
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None or (match[1] is not None) is not dot:
            raise ValueError("a path is names and [index] or [*], with dots: lines[*].price")
        if match[1] is not None:
            found.append(match[1])
        elif match[2] is not None:
            found.append("*" if match[2] == "*" else int(match[2]))
        dot = match[3] is not None
        at = match.end()
    if dot:
        raise ValueError("a path is names and [index] or [*], with dots: lines[*].price")
    return tuple(found)


def values(root: object, path: tuple[str | int, ...]) -> Iterator[tuple[str, Any]]:
    """Every value at the path, with its own path; nothing where nothing is."""
    if not path:
        yield "", root
        return
    for name, child in _children(root, path[0]):
        for where, value in values(child, path[1:]):
            yield _join(name, where), value


def _children(root: object, step: str | int) -> Iterator[tuple[str, Any]]:
    """What one step leads to, by its name."""
    if isinstance(root, Mapping):
        if isinstance(step, str) and step in root:
            yield step, root[step]
    elif isinstance(root, list):
        if step == "*":
            for index, item in enumerate(root):
                yield f"[{index}]", item
        elif isinstance(step, int) and step < len(root):
            yield f"[{step}]", root[step]


def _join(step: str, rest: str) -> str:
    return f"{step}.{rest}" if rest and not rest.startswith("[") else step + rest


def decimal(value: object) -> Decimal | None:
    """The number that a value is, or that its text says; None where it is none.

    Text is read as plain decimal digits: `1e9` and `0x10` are no amounts.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return Decimal(value)
    if isinstance(value, float):
        text = repr(value)
    elif isinstance(value, str) and len(value) <= LONGEST_NUMBER and _DECIMAL.fullmatch(value):
        text = value
    else:
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a value at a path must be.

    Attributes:
        path: As written; `at` its steps.
        kind: A name of `KINDS`; "" any.
        min, max, above, below: Inclusive and exclusive bounds of numbers, or of texts that are.
        shortest, longest: Of texts and arrays; None is no bound.
        matches: Whether a text has the form; `form` names it in reasons.
        one_of, none_of: Values allowed, and not.
        money: A decimal number of at most `digits` places, not negative.
        currency: Path of its ISO 4217 code, which must be there; () without.
        at_least, at_most, equals, differs: Paths of other values to compare with; () without.
        required: It must be there.
    """

    path: str
    at: tuple[str | int, ...]
    kind: str = ""
    min: Decimal | None = None
    max: Decimal | None = None
    above: Decimal | None = None
    below: Decimal | None = None
    shortest: int | None = None
    longest: int | None = None
    matches: Callable[[str], bool] | None = None
    form: str = ""
    one_of: tuple[Any, ...] = ()
    none_of: tuple[Any, ...] = ()
    money: bool = False
    digits: int = 2
    currency: tuple[str | int, ...] = ()
    at_least: tuple[str | int, ...] = ()
    at_most: tuple[str | int, ...] = ()
    equals: tuple[str | int, ...] = ()
    differs: tuple[str | int, ...] = ()
    required: bool = False

    @property
    def numeric(self) -> bool:
        """Whether it can be met by numbers alone."""
        bounds = (self.min, self.max, self.above, self.below)
        return self.money or any(bound is not None for bound in bounds)


def breach(condition: Condition, root: Mapping[str, Any]) -> tuple[str, str] | None:
    """Path and reason of the first value that breaks the assertion; None if none does."""
    count = 0
    for where, value in values(root, condition.at):
        count += 1
        if count > MOST_VALUES:
            return condition.path, f"more than {MOST_VALUES} values stand here"
        reason = broken(condition, value, root)
        if reason:
            return where, reason
    if not count and condition.required:
        return condition.path, "it is missing"
    return None


def met(case: tuple[Condition, ...], root: Mapping[str, Any]) -> bool:
    """Whether all conditions are met by some value each; what cannot be judged counts as met."""
    return all(_met(condition, root) for condition in case)


def _met(condition: Condition, root: Mapping[str, Any]) -> bool:
    count = 0
    for _, value in values(root, condition.at):
        count += 1
        if count > MOST_VALUES or not _judged(condition, value):
            return True
        if not broken(condition, value, root):
            return True
    return not count


def _judged(condition: Condition, value: object) -> bool:
    """Whether the value is of the kind that the condition speaks of."""
    if condition.numeric:
        return decimal(value) is not None
    if condition.matches is not None:
        return isinstance(value, str)
    return True


def broken(condition: Condition, value: object, root: Mapping[str, Any]) -> str:
    """Why the value does not meet the condition; "" if it does."""
    return (
        _kind(condition, value)
        or (_number(condition, value) if condition.numeric else "")
        or (_money(condition, value, root) if condition.money else "")
        or _size(condition, value)
        or _form(condition, value)
        or _choice(condition, value)
        or _compared(condition, value, root)
    )


def _kind(condition: Condition, value: object) -> str:
    if not condition.kind:
        return ""
    if condition.kind == "integer" and isinstance(value, float) and value.is_integer():
        return ""
    fits = isinstance(value, KINDS[condition.kind])
    if isinstance(value, bool) and condition.kind != "boolean":
        fits = False
    return "" if fits else f"{condition.kind} is required"


def _number(condition: Condition, value: object) -> str:
    number = decimal(value)
    if number is None:
        return f"{shown(value)} is no number"
    for bound, good, words in (
        (condition.min, condition.min is None or number >= condition.min, "at least"),
        (condition.max, condition.max is None or number <= condition.max, "at most"),
        (condition.above, condition.above is None or number > condition.above, "more than"),
        (condition.below, condition.below is None or number < condition.below, "less than"),
    ):
        if not good:
            return f"{shown(value)} is not {words} {bound}"
    return ""


def _money(condition: Condition, value: object, root: Mapping[str, Any]) -> str:
    number = decimal(value)
    assert number is not None  # noqa: S101 - `_number` looked
    if number.is_signed():
        return f"{shown(value)} is negative"
    exponent = number.normalize().as_tuple().exponent
    if isinstance(exponent, int) and -exponent > condition.digits:
        return f"{shown(value)} has more than {condition.digits} decimal places"
    if condition.currency:
        codes = [code for _, code in values(root, condition.currency)]
        if not codes:
            return "the currency is missing"
        for code in codes:
            if not isinstance(code, str) or not _CURRENCY.fullmatch(code):
                return f"{shown(code)} is no ISO 4217 currency code"
    return ""


def _size(condition: Condition, value: object) -> str:
    if condition.shortest is None and condition.longest is None:
        return ""
    if not isinstance(value, str | list):
        return "text or an array is required"
    if condition.shortest is not None and len(value) < condition.shortest:
        return f"it has {len(value)} of at least {condition.shortest}"
    if condition.longest is not None and len(value) > condition.longest:
        return f"it has {len(value)} of at most {condition.longest}"
    return ""


def _form(condition: Condition, value: object) -> str:
    if condition.matches is None:
        return ""
    if not isinstance(value, str):
        return "text is required"
    return "" if condition.matches(value) else f"{shown(value)} does not match {condition.form!r}"


def _choice(condition: Condition, value: object) -> str:
    if condition.one_of and not any(same(value, one) for one in condition.one_of):
        choices = ", ".join(map(shown, condition.one_of[:10]))
        return f"{shown(value)} is none of {choices}"
    if any(same(value, one) for one in condition.none_of):
        return f"{shown(value)} is not allowed"
    return ""


def same(one: object, other: object) -> bool:
    """Whether two values are equal as JSON has it: `true` is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _compared(condition: Condition, value: object, root: Mapping[str, Any]) -> str:
    for path, sign, words in (
        (condition.at_least, 1, "less than"),
        (condition.at_most, -1, "more than"),
    ):
        for where, found in values(root, path) if path else ():
            order = _order(value, found)
            if order is None:
                return f"it cannot be compared with {where}"
            if order * sign < 0:
                return f"{shown(value)} is {words} {where} ({shown(found)})"
    for where, found in values(root, condition.equals) if condition.equals else ():
        if not same(value, found):
            return f"{shown(value)} differs from {where}"
    for where, found in values(root, condition.differs) if condition.differs else ():
        if same(value, found):
            return f"{shown(value)} is the same as {where}"
    return ""


def _order(one: object, other: object) -> int | None:
    """-1, 0 or 1; as numbers, else as texts (ISO dates order so); None where they are neither."""
    numbers = decimal(one), decimal(other)
    if numbers[0] is not None and numbers[1] is not None:
        return (numbers[0] > numbers[1]) - (numbers[0] < numbers[1])
    if isinstance(one, str) and isinstance(other, str):
        return (one > other) - (one < other)
    return None


def shown(value: object) -> str:
    """The beginning of a value, for its own caller."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
