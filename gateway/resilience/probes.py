"""Who may probe an open breaker: the values, the protocol, and the rule of a process alone.

A breaker that is half open lets one probe through at a time. In a fleet that is one of all its
gateways: the place is a lease, asked for before the probe and given back at its end
(`fleet_probes.py`). A process that is alone asks nobody; its own breaker knows all (`OwnProbes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.units import MICRO, Micros

LOOK: Micros = 5 * MICRO
"""How long a gateway relies on what it last knew of a probe elsewhere. News of its end comes at
once; this is for news that was lost, and for a store that is gone since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """The probe may go.

    Attributes:
        good: How many in a row were good before it, in the whole fleet; None: as counted here.
    """

    good: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Another gateway has the place; to be asked again after that time."""

    left: Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a probe leaves behind.

    Attributes:
        good: Good probes in a row, its own included.
        rest: How long nobody is to probe; 0 where the next one may go at once.
    """

    good: int
    rest: Micros = 0


class Lease(Protocol):
    """The place of one probe."""

    @property
    def probe(self) -> int:
        """The probe's number at its own breaker, above 0."""
        ...

    async def answered(self) -> Lent | Elsewhere:
        """Whether the probe may go; within a second or so, whatever becomes of the fleet's store.

        May be cancelled; the lease is to be freed then as ever.
        """
        ...

    def free(self, handed: Handed | None) -> None:
        """The place is free, or will be as soon as can be; a second call changes nothing.

        Args:
            handed: None: the probe did not go, and everything is as before it.
        """
        ...


class Probes(Protocol):
    """Where leases come from."""

    def ask(self, scope: str, probe: int, lasts: Micros) -> Lease:
        """A lease of that breaker's place is asked for; whoever asks must free it.

        Args:
            scope: Of the breaker.
            probe: Its number there.
            lasts: A lease that nobody frees ends after that time.
        """
        ...


class _Own:
    """The lease of a process alone: the breaker has let nobody else through."""

    __slots__ = ("probe",)

    def __init__(self, probe: int) -> None:
        self.probe = probe

    async def answered(self) -> Lent | Elsewhere:
        """At once: nothing is awaited."""
        return Lent()

    def free(self, handed: Handed | None) -> None:
        """The breaker has been told, and there is nobody else to tell."""


class OwnProbes:
    """`Probes` of a process alone."""

    def ask(self, scope: str, probe: int, lasts: Micros) -> Lease:  # noqa: ARG002 - the protocol's
        """Granted: what the breaker allows is all there is to ask."""
        return _Own(probe)
