"""Units that every room of the gateway shares. All arithmetic on them is integer arithmetic.

Inside the gateway time is `Micros` (integer microseconds) and cost is `Tokens`: whole tokens on the
edge of the system, micro-tokens inside the pool core (`MICRO` of them are one token), so that the
Python core and its Lua twin agree bit for bit. Float seconds exist only in YAML, in HTTP headers
and in `Clock.sleep`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # To the type checker it is the frozen dataclass that it stands for.
    from dataclasses import dataclass as valueclass
else:
    from dataclasses import dataclass

    def valueclass(*, frozen, slots, kw_only=False):  # noqa: ANN001, ANN201 - typed above
        """A dataclass for values of the data path: frozen to the type checker, plain when it runs.

        A frozen one writes each field through `object.__setattr__`: 2 to 5 us per value, and a call
        makes two dozen. Nothing may change one all the same.
        """
        return dataclass(slots=slots, kw_only=kw_only, unsafe_hash=frozen)


__all__ = [
    "MICRO", "MINUTE", "MicroUsd", "Micros", "Mode", "Rng", "RuleId", "Tokens", "maker", "micros",
    "new_tuple", "valueclass",
]  # fmt: skip

new_tuple = tuple.__new__
"""Makes a named tuple of a tuple. By a name of the module: a method of a type is looked up anew
each time, which costs as much as all else together."""

P = ParamSpec("P")
T = TypeVar("T")


def maker(cls: Callable[P, T]) -> Callable[P, T]:
    """The constructor of a value class or a named tuple, as a function: half the cost.

    Calling a class with keywords makes a dictionary of them and takes it apart again, which a
    function does not. For what every call makes; elsewhere the class itself reads better.

    Args:
        cls: A `valueclass`, a plain dataclass without factories for defaults, a `NamedTuple`, or
            any class that is made by its `__init__` alone.
    """
    if isinstance(cls, type) and issubclass(cls, tuple):
        defaults: Mapping[str, object] = getattr(cls, "_field_defaults", {})
        names: Sequence[str] = getattr(cls, "_fields", ())
        body = f" return new(cls, ({', '.join(names)},))"
        new: Callable[..., object] = tuple.__new__
    elif not is_dataclass(cls):
        init = cls.__init__
        code = init.__code__
        names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
        plain = names[: code.co_argcount - 1]
        defaults = dict(init.__kwdefaults__ or {})
        defaults |= zip(reversed(plain), reversed(init.__defaults__ or ()), strict=False)
        given = ", ".join(f"{name}={name}" for name in names)
        body = f" it = new(cls)\n init(it, {given})\n return it"
        new = object.__new__
    else:
        found = fields(cls)
        names = [one.name for one in found]
        defaults = {one.name: one.default for one in found if one.default is not MISSING}
        body = "\n".join(
            [" it = new(cls)", *(f" it.{name} = {name}" for name in names), " return it"]
        )
        new = object.__new__
    heads = [f"{name}=defaults[{name!r}]" if name in defaults else name for name in names]
    scope: dict[str, Any] = {"cls": cls, "new": new, "defaults": defaults, "init": cls.__init__}
    first = next((at for at, name in enumerate(names) if name in defaults), len(names))
    if any(name not in defaults for name in names[first:]):
        heads.insert(first, "*")
    exec(f"def make({', '.join(heads)}):\n{body}", scope)  # noqa: S102 - as `dataclasses` does it
    made: Callable[P, T] = scope["make"]
    return made


Micros: TypeAlias = int
"""Microseconds: an instant (of the pool's clock) or a span. Never negative unless stated."""

Tokens: TypeAlias = int
"""Tokens, or micro-tokens where the docstring says so. Never negative unless stated."""

MicroUsd: TypeAlias = int
"""Millionths of a US dollar."""

RuleId: TypeAlias = str
"""Where a verdict came from, as written in policy: `pools.gpt.limits.tpm`."""

MICRO = 1_000_000
"""Micro-units in one unit: micro-tokens in a token, microseconds in a second."""

MINUTE: Micros = 60 * MICRO


class Mode(StrEnum):
    """Whether a rule acts, only counts what it would have done, or sleeps."""

    ENFORCE = "enforce"
    SHADOW = "shadow"
    OFF = "off"


class Rng(Protocol):
    """The part of `random.Random` that decisions may draw from; seeds come from the caller."""

    def random(self) -> float:
        """A float in [0, 1)."""
        ...

    def uniform(self, a: float, b: float, /) -> float:
        """A float between a and b."""
        ...

    def getrandbits(self, k: int, /) -> int:
        """A non-negative integer of k random bits."""
        ...


def micros(seconds: float) -> Micros:
    """The span in whole microseconds, rounded to nearest."""
    return round(seconds * MICRO)
