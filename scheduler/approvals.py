"""A human's consent to one call: what is signed, who may sign, and that it serves once. Pure.

    pending ──grant──▶ granted ──use──▶ used
       │ ├──deny──▶ denied    │ ├──expire──▶ expired
       │ ├──expire─▶ expired  │ └──void───▶ void
       │ └──void──▶ void      └──use (the same call, before each further attempt)──▶ used

Consent is to a *document*: tenant, agent, tool, the arguments, the policy in force, the instant of
expiry and a nonce. An approver signs, with Ed25519 (RFC 8032), a fixed prefix and the SHA-256 of
the document's canonical form with the decision in it, so that a denial can never be shown as a
grant. The signature is verified when it arrives and again before the call goes out, against the
approvers of the policy in force then. A rule may want several: the approval stays pending until so
many different approvers have granted it, and one denial ends it. Changed arguments are another
document. Nobody's waiting, and nobody's ceasing to wait, decides anything: only a signature or the
expiry does.
Source: `execution.md` §11.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from scheduler.canonical import canonical
from scheduler.errors import IllegalTransition
from scheduler.units import Micros

PREFIX = b"tidegate-approval-v1\0"
"""No signature of anything else can be taken for one of these."""


class Stand(StrEnum):
    """States of an approval."""

    PENDING = "pending"
    GRANTED = "granted"
    USED = "used"
    DENIED = "denied"
    EXPIRED = "expired"
    VOID = "void"


class Move(StrEnum):
    """What may happen to an approval."""

    GRANT = "grant"
    DENY = "deny"
    USE = "use"
    EXPIRE = "expire"
    VOID = "void"


TRANSITIONS: Mapping[tuple[Stand, Move], Stand] = MappingProxyType({
    (Stand.PENDING, Move.GRANT): Stand.GRANTED,
    (Stand.PENDING, Move.DENY): Stand.DENIED,
    (Stand.PENDING, Move.EXPIRE): Stand.EXPIRED,
    (Stand.PENDING, Move.VOID): Stand.VOID,
    (Stand.GRANTED, Move.USE): Stand.USED,
    (Stand.GRANTED, Move.EXPIRE): Stand.EXPIRED,
    (Stand.GRANTED, Move.VOID): Stand.VOID,
})  # fmt: skip
"""The only legal pairs."""

OPEN = frozenset((Stand.PENDING, Stand.GRANTED))


def move(stand: Stand, event: Move) -> Stand:
    """The state after that event. Raises IllegalTransition where the table has no such pair."""
    after = TRANSITIONS.get((stand, event))
    if after is None:
        raise IllegalTransition(f"an approval that is {stand.value} cannot {event.value}")
    return after


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What consent is asked for.

    Attributes:
        id: Of the approval; unguessable.
        owner, agent, tenant: Principal id, and names for people.
        tool: "server/tool".
        arguments: As the tool will get them.
        policy: Digest of the policy whose rule asks.
        rule: That rule.
        expires: Instant from which on it is worth nothing.
        nonce: Chance, so that no two documents are the same.
    """

    id: str
    owner: str
    agent: str
    tenant: str
    tool: str
    arguments: Mapping[str, Any]
    policy: str
    rule: str
    expires: Micros
    nonce: str

    def binding(self) -> str:
        """Hash of what makes two requests the same question: whose, which call, which policy."""
        value = [self.owner, self.tool, dict(self.arguments), self.policy, self.rule]
        return hashlib.sha256(canonical(value)).hexdigest()

    def signed(self, decision: Move) -> bytes:
        """The bytes an approver signs."""
        value = {
            "agent": self.agent,
            "arguments": dict(self.arguments),
            "decision": decision.value,
            "expires": self.expires,
            "id": self.id,
            "nonce": self.nonce,
            "owner": self.owner,
            "policy": self.policy,
            "rule": self.rule,
            "tenant": self.tenant,
            "tool": self.tool,
        }
        return PREFIX + hashlib.sha256(canonical(value)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """One approver's decision: who, the proof, what they said, when."""

    approver: str
    signature: bytes
    note: str
    at: Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """One approval as it stands.

    Attributes:
        seq: Age: lower is older.
        document: What is asked.
        reason: Why the rule asks, for people.
        call: Id of the call that asked first, or that used it.
        requested, decided, used: Instants; 0 where it has not happened.
        approver, signature, note: Who decided last, the proof, and what they said.
        grants: Every yes, in order.
    """

    seq: int
    document: Document
    state: Stand
    reason: str
    call: str
    requested: Micros
    decided: Micros
    used: Micros
    approver: str
    signature: bytes
    note: str
    grants: tuple[Signed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """How many approvals are kept.

    Attributes:
        rows: In all, decided ones included until retention forgets them.
        open_of_owner: Undecided or unused ones of one principal.
    """

    rows: int = 10_000
    open_of_owner: int = 100
