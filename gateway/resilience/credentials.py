"""Health of upstream credentials, one by one: 401 takes a key out, 429 cools it, the next is used.

Pure: `now` and `rng` are parameters. A message limits the scope that sent it (one credential),
never a whole provider. Cool-downs only ever lengthen.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from gateway.units import Micros, Rng

FOREVER: Micros = 1 << 62
MAX_SCOPES = 10_000
"""Credentials remembered; policy names far fewer, so this only bounds a mistake."""


class Weighted(Protocol):
    """What the choice needs of a credential."""

    @property
    def id(self) -> str:
        """Unique within its provider."""
        ...

    @property
    def weight(self) -> int:
        """Share of calls among healthy ones; 0 is a spare, used when nothing else is healthy."""
        ...


C = TypeVar("C", bound=Weighted)


class CredentialHealth:
    """Which credentials are out, and until when."""

    __slots__ = ("_out",)

    def __init__(self) -> None:
        self._out: dict[str, Micros] = {}

    def out_until(self, scope: str, *, now: Micros) -> Micros | None:
        """The instant this credential comes back, or None if it is healthy."""
        until = self._out.get(scope)
        if until is None:
            return None
        if until <= now:
            del self._out[scope]
            return None
        return until

    def cool(self, scope: str, *, until: Micros) -> None:
        """Not before then; an earlier, longer word stands."""
        if len(self._out) < MAX_SCOPES or scope in self._out:
            self._out[scope] = max(until, self._out.get(scope, 0))

    def restore(self, scope: str) -> None:
        """An operator or a new configuration says it is good again."""
        self._out.pop(scope, None)

    def clear(self) -> None:
        """A new policy: every credential gets a fresh chance."""
        self._out.clear()

    def choose(
        self, provider: str, candidates: tuple[C, ...], *, now: Micros, rng: Rng
    ) -> C | None:
        """A healthy credential by weight, the first if all weights are 0; None if all are out."""
        if not self._out and len(candidates) == 1:
            return candidates[0]
        healthy = [
            one for one in candidates if self.out_until(f"{provider}/{one.id}", now=now) is None
        ]
        total = sum(one.weight for one in healthy)
        if total == 0:
            return healthy[0] if healthy else None
        mark = rng.random() * total
        for one in healthy:
            mark -= one.weight
            if mark < 0:
                return one
        return healthy[-1]
