"""The one door into this room: opens the store and re-exports its values, decisions and errors.

Held calls, effects, approvals and usage. Tasks and revisions come through the same door later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler import approvals, effects
from scheduler.approvals import Approval, Caps, Document, Stand
from scheduler.canonical import NotCanonical, canonical, fingerprint
from scheduler.effects import Bounds, Effect, NewEffect
from scheduler.errors import (
    ApprovalsFull,
    Full,
    HoldsFull,
    IllegalTransition,
    KeyReused,
    LedgerFull,
    SchedulerError,
    StaleEpoch,
    StoreFault,
    Unknown,
    UnknownApproval,
    UnknownEffect,
    UnknownHold,
)
from scheduler.holds import FINAL, LIVE, Limits, Ramp, State, pause
from scheduler.stores.base import (
    Approvals,
    Effects,
    Held,
    HeldCalls,
    Message,
    NewHold,
    Recovered,
    Refusal,
    Spent,
    TaskStore,
    Usage,
    Waiting,
)
from scheduler.stores.bodies import Seal, Unreadable
from scheduler.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "FINAL",
    "LIVE",
    "Approval",
    "Approvals",
    "ApprovalsFull",
    "Bounds",
    "Caps",
    "Document",
    "Effect",
    "Effects",
    "Full",
    "Held",
    "HeldCalls",
    "HoldsFull",
    "IllegalTransition",
    "KeyReused",
    "LedgerFull",
    "Limits",
    "Message",
    "NewEffect",
    "NewHold",
    "NotCanonical",
    "Ramp",
    "Recovered",
    "Refusal",
    "SchedulerError",
    "Seal",
    "Spent",
    "StaleEpoch",
    "Stand",
    "State",
    "StoreFault",
    "TaskStore",
    "Unknown",
    "UnknownApproval",
    "UnknownEffect",
    "UnknownHold",
    "Unreadable",
    "Usage",
    "Waiting",
    "approvals",
    "canonical",
    "effects",
    "fingerprint",
    "open",
    "pause",
]  # fmt: skip

FILE = "tasks.db"
"""Name of the embedded store in the state folder."""


def open(state_dir: Path, *, seal: Seal | None = None) -> TaskStore:  # noqa: A001 - the design's word
    """The embedded store of that state folder, made when first opened. Blocks: call it at start.

    Args:
        state_dir: The folder.
        seal: Makes bodies of held calls, answers of effects and arguments of approvals unreadable
            for whoever finds the file.

    Raises:
        StoreFault: It cannot be used; the message is one clear sentence.
    """
    return SqliteStore(state_dir / FILE, seal=seal)
