"""Faults of this room.

    SchedulerError
    ├─ Unknown             no such row
    │  ├─ UnknownHold      no such hold, or not this owner's: the two are never told apart
    │  ├─ UnknownEffect    no such key in the ledger
    │  └─ UnknownApproval  no such approval
    ├─ Full                a bound on what is kept is reached; `bound` names it
    │  ├─ HoldsFull
    │  ├─ LedgerFull
    │  └─ ApprovalsFull
    ├─ KeyReused           the owner's idempotency key stands for another request
    ├─ IllegalTransition   the state table has no such pair
    ├─ StaleEpoch          the row was claimed anew, or moved on: whoever asked must not act
    └─ StoreFault          the database failed (disk full, locked, corrupt, closed)

No message holds a request, a reply or a secret.
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Abstract: what this room raises."""


class Unknown(SchedulerError):
    """Abstract: no such row."""


class UnknownHold(Unknown):
    """No hold of that id belongs to that owner."""


class UnknownEffect(Unknown):
    """The ledger does not hold that key."""


class UnknownApproval(Unknown):
    """There is no approval of that id."""


class Full(SchedulerError):
    """Abstract: nothing was kept, because a bound is reached.

    Attributes:
        bound: Its name, such as `max_calls`.
    """

    def __init__(self, bound: str, limit: int) -> None:
        super().__init__(f"{bound} is reached ({limit})")
        self.bound = bound


class HoldsFull(Full):
    """Of held calls: `max_calls`, `max_bytes` or `max_per_agent`."""


class LedgerFull(Full):
    """Of effects: `rows` or `bytes`."""


class ApprovalsFull(Full):
    """Of approvals: `rows` or `open_of_owner`."""


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
