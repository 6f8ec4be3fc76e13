"""What one process owes a shared pool: inputs that no answer has confirmed yet. Pure.

An input stays here until the batch that carried it is answered, so that a lost answer loses
nothing; the same object is taken out, never a newer one of the same request id.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from gateway.admission.values import Outcome, Settle

if TYPE_CHECKING:
    from gateway.admission.packing import Batch
    from gateway.admission.values import Adopt

MOST_ITEMS = 512
"""Items per batch: bounds the script's time."""

MOST_OWED = 20_000
"""Settlements kept for a store that is away; beyond it the oldest are left to their leases."""


class Load(NamedTuple):
    """What fits into one batch, in the order in which the pool takes it."""

    settles: list[Settle]
    cancels: list[str]
    lates: list[str]
    adopts: list[Adopt]
    acquires: list[str]


class Outbox:
    """Inputs by request id, oldest first.

    Attributes:
        acquires: Who wants in; of them `patient` may linger.
        signal: The largest foreign use told since; None for none.
    """

    __slots__ = ("acquires", "adopts", "cancels", "lates", "patient", "settles", "signal")

    def __init__(self) -> None:
        self.acquires: dict[str, None] = {}
        self.patient: set[str] = set()
        self.settles: dict[str, Settle] = {}
        self.cancels: dict[str, None] = {}
        self.lates: dict[str, None] = {}
        self.adopts: dict[str, Adopt] = {}
        self.signal: tuple[int, ...] | None = None

    def __bool__(self) -> bool:
        """Something is owed."""
        return self.hasty or self.lingering or bool(self.acquires)

    @property
    def hasty(self) -> bool:
        """Something must leave at once: somebody waits for it."""
        return bool(len(self.acquires) > len(self.patient) or self.cancels or self.lates)

    @property
    def lingering(self) -> bool:
        """Something may wait a moment for company."""
        return bool(self.settles or self.adopts or self.patient or self.signal is not None)

    def owe(self, done: Settle) -> None:
        """The attempt is over: the pool shall know, and its lease need not be renewed."""
        self.settles[done.rid] = done
        self.adopts.pop(done.rid, None)
        if len(self.settles) > MOST_OWED:
            del self.settles[next(iter(self.settles))]

    def heard(self, foreign: tuple[int, ...]) -> None:
        """Others use at least this much."""
        old = self.signal
        self.signal = foreign if old is None else tuple(map(max, old, foreign))

    def unask(self, rid: str) -> None:
        """That call need not be asked for any more."""
        self.acquires.pop(rid, None)
        self.patient.discard(rid)

    def load(self, *, asking: bool) -> Load:
        """What the next batch carries, within its bound.

        Args:
            asking: Calls may ask. They do so only once everything that is to be adopted has been:
                what an outage cost comes before anybody new.
        """
        room = MOST_ITEMS
        if len(self.settles) + len(self.acquires) <= room and not (
            self.cancels or self.lates or self.adopts
        ):
            return Load(
                list(self.settles.values()), [], [], [], list(self.acquires) if asking else []
            )
        settles = list(islice(self.settles.values(), room))
        room -= len(settles)
        cancels = list(islice(self.cancels, room))
        room -= len(cancels)
        lates = list(islice(self.lates, room))
        room -= len(lates)
        adopts = list(islice(self.adopts.values(), room))
        room -= len(adopts)
        asking = asking and len(adopts) == len(self.adopts)
        acquires = list(islice(self.acquires, room)) if asking else []
        return Load(settles, cancels, lates, adopts, acquires)

    def forget(self, batch: Batch) -> None:
        """What that batch carried is done."""
        settles = self.settles
        for done in batch.settles:
            if settles.get(done.rid) is done:
                del settles[done.rid]
        for rid in batch.cancels:
            self.cancels.pop(rid, None)
        for rid in batch.lates:
            self.lates.pop(rid, None)
        for lease in batch.adopts:
            if self.adopts.get(lease.rid) is lease:
                del self.adopts[lease.rid]
            if lease.charge:  # what an outage cost is charged now: its lease is of no use
                self.owe(Settle(lease.rid, Outcome.SERVED))
        for ask in batch.acquires:
            self.unask(ask.rid)
        if batch.signals and self.signal == batch.signals[0]:
            self.signal = None
