"""The one door into this room: opens the store and re-exports its values, decisions and errors.

Held calls are the first tenants. Tasks, effects, approvals, usage and revisions come through the
same door later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.errors import (
    HoldsFull,
    IllegalTransition,
    KeyReused,
    SchedulerError,
    StaleEpoch,
    StoreFault,
    UnknownHold,
)
from scheduler.holds import FINAL, LIVE, Limits, Ramp, State, pause
from scheduler.stores.base import (
    Held,
    HeldCalls,
    Message,
    NewHold,
    Recovered,
    Refusal,
    TaskStore,
    Waiting,
)
from scheduler.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "FINAL", "LIVE", "Held", "HeldCalls", "HoldsFull", "IllegalTransition", "KeyReused", "Limits",
    "Message", "NewHold", "Ramp", "Recovered", "Refusal", "SchedulerError", "StaleEpoch", "State",
    "StoreFault", "TaskStore", "UnknownHold", "Waiting", "open", "pause",
]  # fmt: skip

FILE = "tasks.db"
"""Name of the embedded store in the state folder."""


def open(state_dir: Path) -> TaskStore:  # noqa: A001 - the design's word
    """The embedded store of that state folder, made when first opened. Blocks: call it at start.

    Raises:
        StoreFault: It cannot be used; the message is one clear sentence.
    """
    return SqliteStore(state_dir / FILE)
