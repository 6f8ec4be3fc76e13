"""What policy asks of a request body in any dialect: names, flags, the effective output cap.

The law: a governed place holds the right type or the call is refused with `MalformedCall` and its
`param`; every other place may hold anything. The effective cap is the *largest* of the caps present
(a small decoy beside a large one must not be what is reserved, BerriAI/litellm PR#34223), times the
number of answers asked for. A cap of zero, below zero or beyond reason is no cap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from gateway.errors import MalformedCall

if TYPE_CHECKING:
    from gateway.units import Tokens

Body: TypeAlias = Mapping[str, Any]

CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

BUDGETS = (("thinking", "budget_tokens"), ("reasoning", "max_tokens"))
"""Tokens of thinking, which are output too: Anthropic's place and OpenRouter's."""

ABSURD: Tokens = 10_000_000
"""Above it a cap limits nothing that exists and is read as absent."""

MAX_ANSWERS = 1024
"""Answers per call; APIs allow 128. More would make an absurd cap, and so none, of a true one."""

MAX_SESSION = 256
"""Characters of a session hint that are kept."""


def model(body: Body) -> str:
    """The model's name, which must be there."""
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise MalformedCall("model must be a non-empty string", param="model")
    if len(name) > MAX_SESSION:
        raise MalformedCall("model is longer than any model's name", param="model")
    return name


def flag(body: Body, key: str) -> bool:
    """A boolean that defaults to false; null counts as absent."""
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise MalformedCall(f"{key} must be true or false", param=key)
    return value


def entries(body: Body, key: str, *, required: bool = False) -> list[Any]:
    """A list; empty where it is absent and need not be there."""
    value = body.get(key)
    if value is None and not required:
        return []
    if not isinstance(value, list):
        raise MalformedCall(f"{key} must be a list", param=key)
    return value


def mapping(value: object) -> Body:
    """The value if it is an object, else an empty one: for places nobody governs."""
    return value if isinstance(value, dict) else {}


def number(value: object, param: str) -> int | None:
    """A whole number, or None where it is absent or beyond reason (infinite, not a number)."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedCall(f"{param} must be a whole number", param=param)
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        return None
    if not value.is_integer():
        raise MalformedCall(f"{param} must be a whole number", param=param)
    return int(value)  # integers above 64 bits arrive as floats


def cap(body: Body, *, answers: int = 1) -> Tokens | None:
    """The effective output cap: the largest one present, times the answers; None without one.

    Args:
        body: A request of any dialect; foreign caps count too.
        answers: How many answers the call asks for.
    """
    largest = 0
    for key in CAPS:
        if key in body:
            value = body[key]
            if type(value) is not int:
                value = number(value, key)
            if value is not None and largest < value <= ABSURD:
                largest = value
    for outer, key in BUDGETS:
        budget = body.get(outer)
        if isinstance(budget, dict):
            value = number(budget.get(key), f"{outer}.{key}")
            if value is not None and largest < value <= ABSURD:
                largest = value
    return largest * answers if largest else None


def answers(body: Body, *keys: str) -> int:
    """How many answers are asked for: the largest of these counts, at least 1."""
    count = 1
    for key in keys:
        if key not in body:
            continue
        value = number(body[key], key)
        if value is not None and value > MAX_ANSWERS:
            raise MalformedCall(f"{key} must be at most {MAX_ANSWERS}", param=key)
        count = max(count, value or 1)
    return count


def session(body: Body) -> str:
    """A session hint: the prompt cache's key, else the user id of the metadata; "" without one."""
    if "prompt_cache_key" not in body and "metadata" not in body:
        return ""
    for hint in (body.get("prompt_cache_key"), mapping(body.get("metadata")).get("user_id")):
        if isinstance(hint, str) and hint:
            return hint[:MAX_SESSION]
    return ""
