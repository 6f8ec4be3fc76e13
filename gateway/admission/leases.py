"""Grants in flight, each with its own end: a permit that nobody gives back heals by itself. Pure.

An entry with its own end, never a counter whose time to live each increment refreshes: that one
never heals. Leases of one pool are equally long, so the order of granting and renewing is the order
of ending, and the next end is found without searching. When a reload shortens them, a newer lease
may lie behind older, longer ones and ends with those: late by the old length at most, never early.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from gateway.admission.values import translate

if TYPE_CHECKING:
    from gateway.admission.values import Dimension
    from gateway.units import Micros

ENDED_PER_TICK = 1_000
"""Leases ended per tick at most."""


class Grant(NamedTuple):
    """A call in flight.

    Attributes:
        end: When the lease ends.
        at: When it was charged.
        cost: As charged, in the order of the pool's dimensions.
        span: As counted against its tenant; 0 where the pool has no line.
        shape: The dimensions in whose order its caller speaks.
        epoch: In which the meter holds its charge; 0 in none.
    """

    end: Micros
    at: Micros
    cost: tuple[int, ...]
    lane: int
    tenant: str
    weight: int
    span: Micros
    tag: int
    shape: tuple[Dimension, ...]
    epoch: int


class Leases:
    """The grants of one pool.

    Attributes:
        held: Request id to grant, in the order in which they end: a new one belongs at the end.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: OrderedDict[str, Grant] = OrderedDict()

    def renew(self, rid: str, end: Micros) -> bool:
        """The lease ends then, after all others; False if there is none."""
        grant = self.held.get(rid)
        if grant is None:
            return False
        self.held[rid] = grant._replace(end=end)
        self.held.move_to_end(rid)
        return True

    def next_end(self, none: Micros) -> Micros:
        """When the next lease ends; `none` if nothing is in flight."""
        for grant in self.held.values():
            return grant.end
        return none

    def expire(self, now: Micros) -> None:
        """Leases past their end are gone. Their tokens stay charged: the provider charged them."""
        for _ in range(ENDED_PER_TICK):
            rid = next(iter(self.held), None)
            if rid is None or self.held[rid].end > now:
                return
            del self.held[rid]

    def shift(self, by: Micros) -> None:
        """The clock stepped."""
        for rid, grant in self.held.items():
            moved = grant._replace(end=grant.end + by, at=grant.at + by, tag=grant.tag + by)
            self.held[rid] = moved

    def translate(self, before: tuple[Dimension, ...], after: tuple[Dimension, ...]) -> None:
        """Costs follow another list of dimensions."""
        for rid, grant in self.held.items():
            self.held[rid] = grant._replace(cost=translate(grant.cost, before, after))
