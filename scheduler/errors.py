"""Faults of this room.

    SchedulerError
    ├─ UnknownHold         no such hold, or not this owner's: the two are never told apart
    ├─ HoldsFull           a bound on kept calls is reached; `bound` names it
    ├─ KeyReused           the owner's idempotency key stands for another request
    ├─ IllegalTransition   the state table has no such pair
    ├─ StaleEpoch          the row was claimed anew, or moved on: whoever asked must not act
    └─ StoreFault          the database failed (disk full, locked, corrupt, closed)

No message holds a request, a reply or a secret.
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Abstract: what this room raises."""


class UnknownHold(SchedulerError):
    """No hold of that id belongs to that owner."""


class HoldsFull(SchedulerError):
    """Nothing was kept: a bound is reached.

    Attributes:
        bound: `max_calls`, `max_bytes` or `max_per_agent`.
    """

    def __init__(self, bound: str, limit: int) -> None:
        super().__init__(f"{bound} is reached ({limit})")
        self.bound = bound


class KeyReused(SchedulerError):
    """The idempotency key was used for another request; `id` is the hold it stands for."""

    def __init__(self, id: str) -> None:  # noqa: A002 - the glossary's word
        super().__init__(f"the key stands for hold {id}, whose request differs")
        self.id = id


class IllegalTransition(SchedulerError):
    """A state and an event that do not go together."""


class StaleEpoch(SchedulerError):
    """The row is not in the asker's hands any more."""


class StoreFault(SchedulerError):
    """The database could not do it; nothing was changed."""
