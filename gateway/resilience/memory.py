"""What the loop rules remember of conversations: bounded in number and in time. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from gateway.units import MINUTE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.units import Micros

MAX_REMEMBERED = 50_000
"""Conversations kept; beyond it the one unused for longest is forgotten."""

IDLE: Micros = 30 * MINUTE
"""A conversation without a call for so long is forgotten."""


class Remembered(Protocol):
    """What a `Memory` keeps."""

    session: int
    touched: Micros

    def clear(self) -> None:
        """Nothing was seen so far."""
        ...


Kept = TypeVar("Kept", bound=Remembered)


class Memory(Generic[Kept]):
    """At most `limit` conversations, none idle for longer than `idle`; the oldest go first."""

    __slots__ = ("_kept", "_limit", "idle")

    def __init__(self, limit: int = MAX_REMEMBERED, *, idle: Micros = IDLE) -> None:
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._limit = limit
        self.idle = idle

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        """All of them, the one unused for longest first."""
        return iter(self._kept.values())

    def get(self, key: int, now: Micros) -> Kept | None:
        """The conversation of this key; None if there is none, or it was idle for too long."""
        found = self._kept.get(key)
        return None if found is None or now - found.touched > self.idle else found

    def pop(self, key: int) -> None:
        """The conversation goes on under another key."""
        self._kept.pop(key, None)

    def put(self, key: int, kept: Kept, now: Micros) -> None:
        """The conversation is the last used one; idle ones and what is too many are dropped."""
        kept.touched = now
        self._kept[key] = kept
        self._kept.move_to_end(key)
        for _ in range(2):  # two for each one added: the idle ones go sooner than they come
            oldest, first = next(iter(self._kept.items()))
            if len(self._kept) <= self._limit and now - first.touched <= self.idle:
                break
            del self._kept[oldest]

    def reset(self, session: int | None = None) -> int:
        """The conversations of a session (None: all of them) begin a new stretch; how many."""
        chosen = [kept for kept in self if session is None or kept.session == session]
        for kept in chosen:
            kept.clear()
        return len(chosen)
