"""What policy says of single values: kind, range, form, choice, money, comparisons. Pure.

A schema is its server's word; these are the operator's, and hold whatever the server says. The same
condition serves twice: as an *assertion* that every value at a path must meet, and in a *case* that
says when something else applies (a limit, an approval).

A case is careful: what is missing or of another kind counts as met, so that leaving out the amount
is no way around the approval of large ones. An assertion is strict for the same reason: a value of
another kind breaks it, a missing one only where it is required.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice, repeat
from typing import Any, TypeAlias

MOST_VALUES = 10_000
"""Values at one path that are looked at; more are a breach."""
LONGEST_NUMBER = 40
"""Characters of a decimal number."""
BOUNDS = ("min", "max", "above", "below")
EXACT = 1 << 53
"""Whole numbers below it are exact as floats."""
MANY = 4
"""Values at one path from which on they are first looked at together."""
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

_NUMBERS = frozenset({int, float})
_NUMBER_KINDS = frozenset({"", "number", "integer"})

Check: TypeAlias = "Callable[[Condition, Any, Mapping[str, Any]], str]"
"""Why a value does not meet a condition; "" if it does."""

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


def found(root: object, path: tuple[str | int, ...]) -> list[Any]:
    """The same values in the same order without their paths: most are good, and need no name."""
    level = [root]
    for step in path:
        if step == "*":
            level = [item for one in level if isinstance(one, list) for item in one]
        elif isinstance(step, str):
            level = [one[step] for one in level if isinstance(one, Mapping) and step in one]
        else:
            level = [one[step] for one in level if isinstance(one, list) and step < len(one)]
    return level


def _join(step: str, rest: str) -> str:
    return f"{step}.{rest}" if rest and not rest.startswith("[") else step + rest


def decimal(value: object) -> int | Decimal | None:
    """The number that a value is, or that its text says, exactly; None where it is none.

    Text is read as plain decimal digits: `1e9` and `0x10` are no amounts. A float is the number
    that its shortest text says.
    """
    if type(value) is int:
        return value
    if type(value) is float:
        if value.is_integer():
            return int(value)
        return Decimal(repr(value)) if math.isfinite(value) else None
    if isinstance(value, str) and len(value) <= LONGEST_NUMBER and _DECIMAL.fullmatch(value):
        return Decimal(value)
    return None


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
    min: Decimal | int | None = None
    max: Decimal | int | None = None
    above: Decimal | int | None = None
    below: Decimal | int | None = None
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
    numeric: bool = field(init=False)
    """Whether it can be met by numbers alone."""
    whole: bool = field(init=False, repr=False)
    """Whether all bounds are whole numbers."""
    checks: tuple[Check, ...] = field(init=False, repr=False, compare=False)
    """What is asked of each value: only of what policy says something."""
    rest: tuple[Check, ...] = field(init=False, repr=False, compare=False)
    """Of these, what a look at many numbers at once does not answer."""

    def __post_init__(self) -> None:
        """The checks are chosen."""
        bounds = (self.min, self.max, self.above, self.below)
        numeric = self.money or any(bound is not None for bound in bounds)
        object.__setattr__(self, "numeric", numeric)
        whole = all(bound is None or bound == int(bound) < EXACT for bound in bounds)
        object.__setattr__(self, "whole", whole)
        for name, bound in zip(BOUNDS, bounds, strict=True):
            if whole and bound is not None:  # whole numbers compare faster
                object.__setattr__(self, name, int(bound))
        chosen: list[tuple[bool, Check]] = [
            (bool(self.kind), _kind),
            (numeric, _number),
            (self.money and bool(self.currency), _currency),
            (self.shortest is not None or self.longest is not None, _size),
            (self.matches is not None, _form),
            (bool(self.one_of or self.none_of), _choice),
            (bool(self.at_least or self.at_most or self.equals or self.differs), _compared),
        ]
        checks = tuple(check for said, check in chosen if said)
        object.__setattr__(self, "checks", checks)
        rest = tuple(check for check in checks if check not in (_kind, _number))
        object.__setattr__(self, "rest", rest)


def breach(condition: Condition, root: Mapping[str, Any]) -> tuple[str, str] | None:
    """Path and reason of the first value that breaks the assertion; None if none does."""
    listed = found(root, condition.at)
    if not listed:
        return (condition.path, "it is missing") if condition.required else None
    if len(listed) > MOST_VALUES:
        return condition.path, f"more than {MOST_VALUES} values stand here"
    checks = condition.checks
    if len(listed) >= MANY and _good_numbers(condition, listed):
        checks = condition.rest
    for index, value in enumerate(listed) if checks else ():
        for check in checks:
            reason = check(condition, value, root)
            if reason:
                where, _ = next(islice(values(root, condition.at), index, None))
                return where, reason
    return None


def _good_numbers(condition: Condition, listed: list[Any]) -> bool:
    """Whether all are surely numbers as the condition wants them; False where each must be asked.

    A list of prices is looked through by the interpreter, not by us: a fifth of the time.
    """
    kinds = set(map(type, listed))
    if not kinds <= _NUMBERS or condition.kind not in _NUMBER_KINDS or not condition.whole:
        return False
    if float in kinds:
        if condition.kind == "integer":
            return False
        try:
            if not all(map(math.isfinite, listed)):
                return False
        except OverflowError:
            return False
    least, most = min(listed), max(listed)
    if _bound(condition, least) or _bound(condition, most):
        return False
    if not condition.money:
        return True
    if float not in kinds:
        return bool(least >= 0)
    # What rounding does not change has no more places; zero might be -0.0, which has a sign.
    return least > 0 and list(map(round, listed, repeat(condition.digits))) == listed


def met(case: tuple[Condition, ...], root: Mapping[str, Any]) -> bool:
    """Whether all conditions are met by some value each; what cannot be judged counts as met."""
    return all(_met(condition, root) for condition in case)


def _met(condition: Condition, root: Mapping[str, Any]) -> bool:
    listed = found(root, condition.at)
    if not listed or len(listed) > MOST_VALUES:
        return True
    return any(
        not _judged(condition, value)
        or not any(check(condition, value, root) for check in condition.checks)
        for value in listed
    )


def _judged(condition: Condition, value: object) -> bool:
    """Whether the value is of the kind that the condition speaks of."""
    if condition.numeric:
        return decimal(value) is not None
    if condition.matches is not None:
        return isinstance(value, str)
    return True


def _kind(condition: Condition, value: object, _root: Mapping[str, Any]) -> str:
    if condition.kind == "integer" and isinstance(value, float) and value.is_integer():
        return ""
    fits = isinstance(value, KINDS[condition.kind])
    if isinstance(value, bool) and condition.kind != "boolean":
        fits = False
    return "" if fits else f"{condition.kind} is required"


def _number(condition: Condition, value: object, _root: Mapping[str, Any]) -> str:
    # A float stands on the same side of a whole bound as the number that its text says.
    if type(value) is float and condition.whole and math.isfinite(value):
        number: float | Decimal | None = value
    else:
        number = decimal(value)
    if number is None:
        return f"{shown(value)} is no number"
    broken = _bound(condition, number)
    if broken:
        return f"{shown(value)} is {broken}"
    return _money(condition, value) if condition.money else ""


def _bound(condition: Condition, number: float | Decimal) -> str:
    """The bound that the number breaks, in words; "" for none."""
    if condition.min is not None and number < condition.min:
        return f"not at least {condition.min}"
    if condition.max is not None and number > condition.max:
        return f"not at most {condition.max}"
    if condition.above is not None and number <= condition.above:
        return f"not more than {condition.above}"
    if condition.below is not None and number >= condition.below:
        return f"not less than {condition.below}"
    return ""


def _money(condition: Condition, value: object) -> str:
    if type(value) is int:
        return f"{shown(value)} is negative" if value < 0 else ""
    text = repr(value) if type(value) is float else str(value)
    if text.startswith("-"):
        return f"{shown(value)} is negative"
    if "e" in text:
        text = f"{Decimal(text):f}"
    if len(text.partition(".")[2].rstrip("0")) > condition.digits:
        return f"{shown(value)} has more than {condition.digits} decimal places"
    return ""


def _currency(condition: Condition, _value: object, root: Mapping[str, Any]) -> str:
    codes = found(root, condition.currency)
    if not codes:
        return "the currency is missing"
    for code in codes:
        if not isinstance(code, str) or not _CURRENCY.fullmatch(code):
            return f"{shown(code)} is no ISO 4217 currency code"
    return ""


def _size(condition: Condition, value: object, _root: Mapping[str, Any]) -> str:
    if not isinstance(value, str | list):
        return "text or an array is required"
    if condition.shortest is not None and len(value) < condition.shortest:
        return f"it has {len(value)} of at least {condition.shortest}"
    if condition.longest is not None and len(value) > condition.longest:
        return f"it has {len(value)} of at most {condition.longest}"
    return ""


def _form(condition: Condition, value: object, _root: Mapping[str, Any]) -> str:
    if condition.matches is None or not isinstance(value, str):
        return "text is required"
    return "" if condition.matches(value) else f"{shown(value)} does not match {condition.form!r}"


def _choice(condition: Condition, value: object, _root: Mapping[str, Any]) -> str:
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
        for where, other in values(root, path) if path else ():
            order = _order(value, other)
            if order is None:
                return f"it cannot be compared with {where}"
            if order * sign < 0:
                return f"{shown(value)} is {words} {where} ({shown(other)})"
    for where, other in values(root, condition.equals) if condition.equals else ():
        if not same(value, other):
            return f"{shown(value)} differs from {where}"
    for where, other in values(root, condition.differs) if condition.differs else ():
        if same(value, other):
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
