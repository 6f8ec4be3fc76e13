"""The idempotency ledger: which call may go, which is answered from the record. Pure.

An effect is a call that may change the world. It is known by a *key* that its repetition shares
(the caller's own, or session, tool and canonical arguments within a window), and never by a
JSON-RPC id, which changes with every try. Two durable marks make "once" true:

    (none) ──reserve──▶ reserved ──settle──▶ settled ──retention, window──▶ (none)
              ▲            │  └──release──▶ (none)     definitely not done: the key is free again
              │            └──doubt, crash──▶ in_doubt
              │                                 ├──settle (its answer came after all)──▶ settled
              └──repeat: class read, idempotent ┘ ├──resolve: done──▶ settled
                                                  └──resolve: not done──▶ (none)

`reserve` is on disk before the first byte goes to the server, `settle` when the answer is whole.
A process that dies in between leaves *reserved*; its successor makes that *in doubt*, and an
irreversible effect in doubt is never sent again: a human says what became of it. The epoch is
raised by every reservation; whoever holds an older one cannot settle.
Source: `execution.md` §6.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import TypeAlias

from scheduler.units import MICRO, Micros

KEY_BYTES = 20


class Class(StrEnum):
    """What repeating an effect would do; IRREVERSIBLE is assumed where nobody says otherwise."""

    READ = "read"
    IDEMPOTENT = "idempotent"
    IRREVERSIBLE = "irreversible"


REPEATABLE = frozenset((Class.READ, Class.IDEMPOTENT))


class Mark(StrEnum):
    """States of an effect."""

    RESERVED = "reserved"
    SETTLED = "settled"
    IN_DOUBT = "in_doubt"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEffect:
    """What a call wants to do.

    Attributes:
        key: See `key_of`.
        owner, agent, tenant: Principal id, and names for people.
        tool: "server/tool".
        kind: What repeating it would do.
        digest: Hash of tool and canonical arguments: the same key with another one is a conflict.
        call: Id of the call that asks.
        keep: How long its outcome answers repetitions.
        patience: How long it may be under way before it counts as in doubt.
    """

    key: str
    owner: str
    agent: str
    tenant: str
    tool: str
    kind: Class
    digest: str
    call: str
    keep: Micros
    patience: Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One row of the ledger.

    Attributes:
        epoch: Raised by every reservation.
        reserved, deadline: When it was reserved; from when on it counts as in doubt.
        keep: As asked; `expires` is counted from the settlement. 0 while it lives.
        settled: Instant of its outcome; 0 while there is none.
        kept: Whether the answer itself is here; one that was too large is not.
        note: For people: why it is in doubt, or who resolved it.
        tokens: Tokens of its answer.
    """

    key: str
    owner: str
    agent: str
    tenant: str
    tool: str
    kind: Class
    digest: str
    call: str
    state: Mark
    epoch: int
    reserved: Micros
    deadline: Micros
    keep: Micros
    settled: Micros
    expires: Micros
    kept: bool
    note: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Go:
    """Nothing of it has happened, or repeating it is harmless: reserve it under that epoch."""

    epoch: int
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """It was done: answer from the record."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Join:
    """It is under way: wait for that outcome, send nothing."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Conflict:
    """The key stands for other arguments."""

    effect: Effect


@dataclass(frozen=True, slots=True)
class Doubt:
    """It may have been done, and repeating it could do it twice: a human decides."""

    effect: Effect


Judgment: TypeAlias = Go | Replay | Join | Conflict | Doubt


def judge(known: Effect | None, new: NewEffect, *, now: Micros) -> Judgment:
    """What is to become of a call whose key the ledger knows so.

    Args:
        known: The row of its key, or None.
        new: What the call wants.
        now: The instant.
    """
    if known is None:
        return Go(1)
    if known.state is Mark.SETTLED and known.expires <= now:
        return Go(known.epoch + 1)
    if known.digest != new.digest:
        return Conflict(known)
    if known.state is Mark.SETTLED:
        return Replay(known)
    if known.state is Mark.RESERVED and now < known.deadline:
        return Join(known)
    # The class of both counts: a tool that was irreversible when it was called does not become
    # harmless because policy says so today.
    if {known.kind, new.kind} <= REPEATABLE:
        return Go(known.epoch + 1, repeats=True)
    return Doubt(known)


def key_of(*parts: str) -> str:
    """The key that these parts make together; no other parts make the same.

    Args:
        parts: Identity first, so that nobody can guess a key of somebody else's.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much the ledger keeps.

    Attributes:
        rows: Effects in all.
        bytes: Of their answers.
        result: Of one answer; a larger one is noted as done without it.
    """

    rows: int = 1_000_000
    bytes: int = 1 << 30
    result: int = 1 << 20


DEFAULT_KEEP: Micros = 7 * 86_400 * MICRO
"""A caller's key answers for a week, as long as `execution.md` §5 keeps it."""
