"""A principal once more, long after its credential was seen and forgotten. Pure.

Held calls run on behalf of who asked for them, but no credential is kept. So policy is asked anew
by the principal's id and by the rule its rights came from: a key that was revoked or has expired,
an agent that was renamed, an issuer that is gone, all end the call. Rights are those of the policy
now in force.

Weakness: a signed token cannot be verified again and may have expired since; its agent counts as
known while its issuer's rule stands. What its claims had narrowed was checked when it was held.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gateway.errors import Forbidden
from gateway.identity import forwarded, loopback, principal_of

if TYPE_CHECKING:
    from gateway.call import HeaderList, Principal, Remembered
    from gateway.snapshot import Snapshot


def reinstated(
    snapshot: Snapshot, who: Remembered, headers: HeaderList, peer: str, now: float
) -> Principal:
    """The principal under this policy.

    Args:
        snapshot: The policy now in force.
        who: What was kept of it.
        headers: Of the request, for rules that admit callers of this machine only.
        peer: Address it came from, for the same.
        now: Wall-clock seconds.

    Raises:
        Forbidden: The policy does not know it any more.
    """
    principal = _known(snapshot, who, now)
    if principal is None:
        raise Forbidden(
            f"The policy no longer lets {who.agent[:100]} in (it was {who.rule or 'no rule'}); the "
            "held call was not executed.",
            because=who.rule,
            code="identity_revoked",
        )
    if principal.rule.loopback_only and (not loopback(peer) or forwarded(headers)):
        raise Forbidden(
            f"Agent {principal.agent!r} may call from this machine only.",
            because=principal.rule.because,
        )
    return principal


def _known(snapshot: Snapshot, who: Remembered, now: float) -> Principal | None:
    kind, _, name = who.id.partition(":")
    if who.id == "anonymous":
        rule = snapshot.edge.anonymous
        return None if rule is None else principal_of(rule, credential=who.id, name=who.id)
    if kind == "key":
        return _by_key(snapshot, who, name, now)
    if kind == "jwt":
        for issuer in snapshot.jwt:
            for rule in issuer.agents:
                if rule.because == who.rule:
                    return principal_of(rule, credential=who.id, name=who.agent)
    return None


def _by_key(snapshot: Snapshot, who: Remembered, name: str, now: float) -> Principal | None:
    for key in snapshot.keys:
        fits = key.id == name and key.agent.because == who.rule
        if fits and not (key.expires and now >= key.expires):
            return principal_of(key.agent, credential=who.id, name=name, expires=key.expires)
    for pattern in snapshot.key_patterns:
        # The name of a key that is no plain word is a hash, which no pattern can be held against.
        fits = fnmatchcase(name, pattern.pattern) or name.startswith("key-")
        if fits and pattern.agent.because == who.rule:
            return principal_of(pattern.agent, credential=who.id, name=name)
    return None
