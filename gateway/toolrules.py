"""What policy says of tools, compiled: part of a `Snapshot`. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from gateway.contracts.screen import Screen
from gateway.units import MICRO, Micros, Mode, RuleId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.admission.core import PoolSpec
    from gateway.contracts.conditions import Condition

__all__ = [
    "ApprovalRules", "Approve", "Denial", "EffectRules", "Reconcile", "Screen", "ToolCase",
    "ToolLimit", "ToolRule",
]  # fmt: skip


class Denial(StrEnum):
    """How a refusal reaches the agent."""

    ERROR = "error"
    RESULT = "result"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimit:
    """A limit on tool calls: a pool, or one for each agent, tenant or tool.

    Attributes:
        spec: The pool; where `per` is not empty, its name is the beginning of many.
        per: "agent", "tenant", "tool".
        wait: Longest wait in it; None: as long as the call may wait.
    """

    spec: PoolSpec
    per: tuple[str, ...] = ()
    wait: Micros | None = None

    @property
    def of_caller(self) -> bool:
        """Whether it is the caller's own: taken once per call, however often we try."""
        return "agent" in self.per or "tenant" in self.per


@dataclass(frozen=True, slots=True, kw_only=True)
class Approve:
    """Humans must agree: so many. `approvers` empty means any approver of the policy."""

    reason: str = ""
    expires: Micros = 900 * MICRO
    approvers: tuple[str, ...] = ()
    signatures: int = 1
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCase:
    """An argument class: what holds besides where all conditions are met."""

    name: str
    when: tuple[Condition, ...]
    deny: bool = False
    limits: tuple[ToolLimit, ...] = ()
    approve: Approve | None = None
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconcile:
    """How a server is asked whether an effect in doubt was done.

    Attributes:
        tool: Of the same server; it only reads.
        arguments: Its arguments, by the path of each in those of the call.
        done, absent: What its structured answer must be for either.
    """

    tool: str
    arguments: tuple[tuple[str, tuple[str | int, ...]], ...]
    done: tuple[Condition, ...]
    absent: tuple[Condition, ...]
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRule:
    """What holds for the tools of one server that fit a pattern (fnmatch on the server's name).

    Attributes:
        effect: "read", "idempotent", "queryable", "irreversible": what running it twice does.
        reconcile: Of a queryable one.
        duplicates: For how long the same call of a session is answered from the record; 0 never.
        contract: Of the server's schemas, `arguments` and `results`.
        pass_unusable: A schema that cannot be obeyed is ignored rather than refused.
        denial: None: by the client's era.
    """

    pattern: str
    deny: bool = False
    effect: str = "irreversible"
    polling: bool = False
    duplicates: Micros = 0
    contract: Mode = Mode.ENFORCE
    pass_unusable: bool = False
    arguments: tuple[Condition, ...] = ()
    results: tuple[Condition, ...] = ()
    limits: tuple[ToolLimit, ...] = ()
    approve: Approve | None = None
    cases: tuple[ToolCase, ...] = ()
    reconcile: Reconcile | None = None
    denial: Denial | None = None
    because: RuleId = ""

    @property
    def repeatable(self) -> bool:
        """Whether running it twice does no harm."""
        return self.effect in ("read", "idempotent")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalRules:
    """Who may consent, and how long a call waits.

    Attributes:
        approvers: Ed25519 public keys, 32 bytes, by name.
        wait: How long a call waits before it is told to come back.
        keep: How long decisions are kept.
        max_open, max_kept: Questions of one agent; rows in all.
    """

    approvers: Mapping[str, bytes] = field(default_factory=dict)
    wait: Micros = 50 * MICRO
    keep: Micros = 30 * 86_400 * MICRO
    max_open: int = 100
    max_kept: int = 10_000
    because: RuleId = "approvals"


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRules:
    """What the record of side effects keeps."""

    keep: Micros = 7 * 86_400 * MICRO
    max_kept: int = 1_000_000
    max_bytes: int = 1 << 30
    max_answer: int = 1 << 20
    because: RuleId = "effects"
