"""The TaskStore protocol: the only door to durable state: held calls, effects, approvals.

Tasks and schedules join this protocol with the execution tier; they share the database, its writer
and its migrations. Promises of every implementation:

* A method that returned has its effect on disk (power loss included, as far as the disk is honest).
* One method is one transaction. Of several concurrent ones, each sees the others whole or not.
* Every change of state is a compare-and-swap by the table of `holds.py`, `effects.py` or
  `approvals.py`.
* Readers see committed rows only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler.approvals import Approval, Caps, Document, Move, Signed, Stand
    from scheduler.effects import Bounds, Effect, Judgment, Mark, NewEffect
    from scheduler.holds import Limits, State
    from scheduler.units import Micros, Tier

Headers = list[tuple[bytes, bytes]]
"""Pairs with names in lower case, order and repeats kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A request or a reply: headers and body bytes as sent. `status` is 0 for a request."""

    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)
    status: int = 0

    @property
    def size(self) -> int:
        """Bytes it counts for."""
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What a hold says from the day it was kept. No field holds a credential.

    Attributes:
        id: The call's id, unguessable.
        owner: Principal id; nobody else may see the hold.
        agent, tenant, rule: As the credential was read; `rule` is the policy path of its rights.
        tier, model: Order and scope of its release.
        dialect, family, client, target, coding, peer: To make the call anew.
        streams: The caller asked for a stream.
        received, deadline: Instants; past the deadline it expires.
        digest: Hash of the request, compared when a key comes again.
        webhook: Where to push the result; "" nowhere.
        reason, because: Why it is held, in words and as the rule that decided.
    """

    id: str
    owner: str
    agent: str
    tenant: str
    rule: str
    tier: Tier
    model: str
    dialect: str
    family: str
    client: str
    target: bytes
    coding: str
    peer: str
    streams: bool
    received: Micros
    deadline: Micros
    digest: str = ""
    webhook: str = ""
    reason: str = ""
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewHold(Hold):
    """A call to be kept.

    Attributes:
        dedupe: Hash of owner and Idempotency-Key; "" without one.
        request: Headers without credentials, and the body.
    """

    dedupe: str = ""
    request: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Hold):
    """One held call as it stands, without its bodies.

    Attributes:
        seq: Age: lower is older.
        epoch: Raised by every claim; the fence of every later step.
        attempt: Times it was handed to a provider; sent_at, sent_to: the last time, and where.
        tries: Times a provider refused it and it came back.
        not_before: It stays back until then.
        status, code, message: How it ended: of the reply, or of the refusal said in its stead.
        finished: Instant of its end; 0 while it lives.
        push_at, push_tries, push_state: The webhook's next delivery (0: none), how often it was
            tried, and "", "pending", "delivered" or "failed".
    """

    seq: int
    state: State
    epoch: int
    attempt: int
    sent_at: Micros
    sent_to: str
    tries: int
    not_before: Micros
    status: int
    code: str
    message: str
    finished: Micros
    push_at: Micros
    push_tries: int
    push_state: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What is said instead of a reply; `status` is the HTTP status it would have had."""

    status: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Open calls of one model and tier: how many, when the oldest came, when the next may go."""

    model: str
    tier: Tier
    count: int
    oldest: Micros
    next_at: Micros


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a dead holder left: ids opened again, and rows that are in doubt."""

    opened: int
    doubted: tuple[Held, ...]


class HeldCalls(Protocol):
    """The part of the store that keeps calls."""

    async def keep(self, new: NewHold, *, limits: Limits) -> Held:
        """The call is on disk; an equal one under the same key is returned in its stead.

        Raises:
            HoldsFull, KeyReused: Nothing was kept.
        """
        ...

    def abandon(self, hold: str, owner: str, now: Micros) -> None:
        """Cancel a call whose `keep` was asked for before and whose caller did not wait."""
        ...

    async def claim(
        self, model: str, *, limit: int, now: Micros, most_bytes: int = 1 << 62
    ) -> list[tuple[Held, Message]]:
        """The first of its open calls by (tier, age), now in the asker's hands under a new epoch.

        At most `limit`, and together at most `most_bytes` large, but one in any case. Only what
        may go now: `not_before` and deadline are respected. A claim is safe from other processes
        because only the owner of the store may claim (`own`).
        """
        ...

    async def sending(self, hold: str, epoch: int, *, to: str, now: Micros) -> None:
        """It may be handed to a provider from now on. Raises StaleEpoch."""
        ...

    async def give_back(
        self,
        hold: str,
        epoch: int,
        *,
        reason: str,
        not_before: Micros,
        refused: bool,
    ) -> None:
        """It is open again: no provider served it. `refused` counts a try. Raises StaleEpoch."""
        ...

    async def complete(self, hold: str, epoch: int, reply: Message, *, now: Micros) -> Held:
        """Its reply is on disk, and its request is not any more. Raises StaleEpoch."""
        ...

    async def refuse(self, hold: str, epoch: int, refusal: Refusal, *, now: Micros) -> Held:
        """It will never be served; the refusal says why. Raises StaleEpoch."""
        ...

    async def doubt(self, hold: str, epoch: int, refusal: Refusal, *, now: Micros) -> Held:
        """Whether a provider served it is unknown; it is never sent again. Raises StaleEpoch."""
        ...

    async def cancel(self, hold: str, owner: str, *, now: Micros) -> Held:
        """It will not be executed (again). Raises UnknownHold, IllegalTransition."""
        ...

    async def forget(self, hold: str, owner: str) -> None:
        """A final hold and its reply are erased. Raises UnknownHold, IllegalTransition."""
        ...

    async def expire(self, *, now: Micros, limit: int) -> list[Held]:
        """Open calls past their deadline, now expired."""
        ...

    async def recover(self, *, now: Micros) -> Recovered:
        """Rows of holders that are gone: opened again, or in doubt. Only for the owner."""
        ...

    async def prune(self, *, before: Micros, limit: int) -> int:
        """Final holds that ended before that instant are erased, except while a push is due."""
        ...

    async def find(self, hold: str, owner: str) -> Held:
        """The hold. Raises UnknownHold."""
        ...

    async def reply(self, hold: str) -> Message | None:
        """The reply of a hold that is done."""
        ...

    async def listing(self, owner: str, *, after: int, limit: int) -> list[Held]:
        """The owner's holds, oldest first, with `seq` above `after`."""
        ...

    async def waiting(self) -> list[Waiting]:
        """What is open, by model and tier, urgent first."""
        ...

    async def counts(self) -> dict[State, int]:
        """Rows by state."""
        ...

    async def due_pushes(self, *, now: Micros, limit: int) -> list[Held]:
        """Final holds whose webhook is to be called now."""
        ...

    async def pushed(self, hold: str, *, state: str, next_at: Micros) -> None:
        """A delivery was tried: `state` as in `Held`, and when to try again (0: never)."""
        ...


class Effects(Protocol):
    """The part of the store that is the idempotency ledger."""

    async def look(self, key: str) -> tuple[Effect, bytes | None] | None:
        """The row of this key with its answer, or None."""
        ...

    async def reserve(self, new: NewEffect, *, now: Micros, bounds: Bounds) -> Judgment:
        """`effects.judge` of the row as it is; with `Go` it is reserved, and on disk.

        Raises:
            LedgerFull: Nothing was reserved, and nothing may be sent.
        """
        ...

    async def extend(self, key: str, epoch: int, *, deadline: Micros) -> None:
        """The same reservation for one more attempt. Raises StaleEpoch."""
        ...

    async def settle(
        self, key: str, epoch: int, answer: bytes, *, tokens: int, now: Micros, bounds: Bounds
    ) -> Effect:
        """Its outcome is on disk; an answer beyond the bounds is noted without its bytes.

        Raises:
            StaleEpoch: It was reserved anew, or resolved.
        """
        ...

    async def release(self, key: str, epoch: int) -> None:
        """It was definitely not done: the key is free. Raises StaleEpoch."""
        ...

    async def doubt(self, key: str, epoch: int, note: str) -> None:
        """Whether it was done is unknown; what may be repeated is released. Raises StaleEpoch."""
        ...

    async def resolve(self, key: str, *, done: bool, note: str, now: Micros) -> Effect:
        """A human's word on an effect in doubt. Raises UnknownEffect, IllegalTransition."""
        ...

    async def overdue(self, *, now: Micros, limit: int) -> list[Effect]:
        """What was reserved for too long, now in doubt (released, where repeating is harmless)."""
        ...

    async def abandoned(self, *, before: Micros) -> list[Effect]:
        """The same for all that was reserved before that instant: only for the owner."""
        ...

    async def doubts(self, *, limit: int) -> list[Effect]:
        """What waits for a human, oldest first."""
        ...

    async def prune(self, *, now: Micros, limit: int) -> int:
        """Settled effects whose retention is over are erased; reserved ones and doubts never."""
        ...

    async def counts(self) -> dict[Mark, int]:
        """Rows by state."""
        ...


class Approvals(Protocol):
    """The part of the store that keeps consent."""

    async def ask(
        self, document: Document, *, reason: str, call: str, now: Micros, caps: Caps
    ) -> Approval:
        """The approval of this question: the open or still denied one, else a new pending one.

        Raises:
            ApprovalsFull: Nothing was asked.
        """
        ...

    async def decide(
        self, approval: str, event: Move, signed: Signed, *, needed: int = 1
    ) -> Approval:
        """Denied, or granted by one more approver; in all, once `needed` have.

        Raises UnknownApproval, IllegalTransition (decided, expired, or granted by the same one).
        """
        ...

    async def use(self, approval: str, call: str, *, now: Micros) -> Approval:
        """Granted becomes used; the same call may ask again. Raises IllegalTransition."""
        ...

    async def void(self, approval: str, note: str, *, now: Micros) -> Approval:
        """It is worth nothing any more. Raises UnknownApproval, IllegalTransition."""
        ...

    async def find(self, approval: str) -> Approval:
        """The approval. Raises UnknownApproval."""
        ...

    async def expire(self, *, now: Micros, limit: int) -> list[Approval]:
        """Open approvals past their expiry, now expired."""
        ...

    async def listing(self, *, state: Stand | None, after: int, limit: int) -> list[Approval]:
        """Approvals with `seq` above `after`, oldest first."""
        ...

    async def prune(self, *, before: Micros, limit: int) -> int:
        """Approvals that ended before that instant are erased."""
        ...

    async def counts(self) -> dict[Stand, int]:
        """Rows by state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was used of one calendar amount in one period.

    Attributes:
        pool, unit, calendar: Which amount: `agent:ada:money:day`, `money`, `day`.
        start, until: The period.
        used: Micro-units.
    """

    pool: str
    unit: str
    calendar: str
    start: Micros
    until: Micros
    used: int


class Usage(Protocol):
    """What was spent of budgets."""

    async def record(self, rows: Sequence[Spent], *, before: Micros) -> None:
        """These stand as given; periods that ended before that instant are forgotten."""
        ...

    async def standing(self, *, now: Micros) -> list[Spent]:
        """What was used of every amount in the period that holds `now`."""
        ...


class TaskStore(HeldCalls, Protocol):
    """Everything durable."""

    @property
    def usage(self) -> Usage:
        """What was spent of budgets."""
        ...

    @property
    def effects(self) -> Effects:
        """The idempotency ledger."""
        ...

    @property
    def approvals(self) -> Approvals:
        """Consent to single calls."""
        ...

    def own(self) -> bool:
        """Whether this process alone may claim and recover; tried anew at each call until it is.

        The embedded store keeps ownership in a lock of the operating system, which ends with the
        process however it ends: no lease has to run out, and no clock is believed.
        """
        ...

    async def close(self) -> None:
        """What was accepted is on disk, threads and locks are gone."""
        ...
