"""Where attempts go: a deployment at its provider, with the quotas that the provider keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.admission.drift import Reading

if TYPE_CHECKING:
    from gateway.admission.profiles import Profile
    from gateway.simulate import meters
    from gateway.units import Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """One quota as the provider keeps it."""

    pool: str
    meter: meters.Provider
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where an attempt goes: a deployment's provider and the quotas it spends there.

    Attributes:
        realtime: Whether some of them charges output as it is produced.
    """

    deployment: str
    provider: str
    scopes: tuple[Scope, ...]
    realtime: bool = False


NOWHERE = Target(deployment="", provider="", scopes=())
"""Where a call goes that has not been sent."""


def plain(pool: str) -> str:
    """The pool's name as the policy file has it."""
    return pool.removeprefix("pool:")


def readings(scope: Scope, now: Micros) -> list[Reading]:
    """What an answer's headers say of a quota now."""
    found = []
    for name in ("requests", "tokens", "input", "output"):
        standing = scope.meter.standing(now, name)
        if standing is not None:
            reading = Reading(name=name, limit=standing.limit, remaining=standing.remaining)
            found.append(reading)
    return found
