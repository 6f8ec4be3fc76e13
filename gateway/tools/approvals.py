"""A human's consent to a tool call: asked for, waited for, verified, used once.

The call waits holding nothing: no permit, no place in a line, and its own deadline stands still. It
waits a bounded time, then it is told to come back; the question stays, and the same call finds it
again by its arguments. Whoever names an approval and sends other arguments has voided it.
Source: `execution.md` §11; `protocols.md` §5.6.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gateway.call import VerdictNote
from gateway.errors import ApprovalPending, Forbidden, MalformedCall, QueueFull, StoreUnavailable
from gateway.units import MICRO
from scheduler.api import (
    Caps,
    Document,
    Full,
    IllegalTransition,
    NotCanonical,
    SchedulerError,
    Stand,
    UnknownApproval,
)
from scheduler.api import approvals as decisions

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.call import Call, Principal, ToolCall
    from gateway.clock import Clock
    from gateway.toolrules import ApprovalRules, Approve
    from gateway.units import Micros
    from scheduler.api import Approval, Approvals

HEADER = b"tidegate-approval"
META = "tidegate/approval"
LOOK: Micros = MICRO
"""How often a waiting call looks for what another process may have written."""
COME_BACK: Micros = 2 * MICRO
LONGEST_WAIT: Micros = 58 * MICRO
"""Clients give up after a minute; whoever is told in time comes back."""
MOST_WAITING = 2_000
"""Calls waiting for a decision in this process; one more is told to come back at once."""
ID_BYTES = 12


def wall(clock: Clock) -> Micros:
    """Now, on the axis of stored instants."""
    return round(clock.wall() * MICRO)


def verified(approval: Approval, rules: ApprovalRules, approve: Approve) -> bool:
    """Whether as many approvers of the policy in force as the rule wants have granted it.

    Args:
        approval: Granted.
        rules: Who may consent now.
        approve: The rule: whom of these it admits, and how many it wants.
    """
    event, allowed = decisions.Move.GRANT, approve.approvers
    signed = {
        one.approver
        for one in approval.grants
        if one.approver
        == signed_by(approval.document, event, one.signature, rules=rules, allowed=allowed)
    }
    return len(signed) >= approve.signatures


def signed_by(
    document: Document,
    event: decisions.Move,
    signature: bytes,
    *,
    rules: ApprovalRules,
    allowed: tuple[str, ...],
) -> str | None:
    """The name of the approver who signed it; None if none of those who may."""
    message = document.signed(event)
    for name, key in rules.approvers.items():
        if allowed and name not in allowed:
            continue
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
        except (InvalidSignature, ValueError):
            continue
        return name
    return None


class Consent:
    """Asks for consent and waits for it.

    Args:
        store: Where approvals are.
        clock: For the wait.
        token: Makes random bytes that nobody can guess.
    """

    __slots__ = ("_clock", "_news", "_store", "_token", "on_asked", "on_ended", "waiting")

    def __init__(self, store: Approvals, clock: Clock, token: Callable[[int], bytes]) -> None:
        self._store = store
        self._clock = clock
        self._token = token
        self._news: dict[str, set[asyncio.Future[None]]] = {}
        self.waiting = 0
        self.on_asked: Callable[[Approval], None] | None = None
        self.on_ended: Callable[[str], None] | None = None

    def decided(self, approval: str) -> None:
        """Whoever waits for this approval looks now."""
        for future in self._news.pop(approval, ()):
            if not future.done():
                future.set_result(None)

    async def obtain(self, call: Call, tool: ToolCall, approve: Approve) -> str:
        """The id of a granted approval for exactly this call, not yet used.

        Raises:
            Forbidden: Denied, expired, void, or not decided yet (then coming back helps).
        """
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        try:
            approval = await self._asked(call, tool, approve, principal)
            approval = await self._awaited(call, approval)
        except Full as error:
            raise QueueFull(
                f"No more questions can be asked of approvers: {error} (rule {approve.because}).",
                because=approve.because,
                retry_after=60 * MICRO,
                code="approvals_full",
            ) from error
        except (SchedulerError, NotCanonical) as error:
            raise _fault(error, approve) from error
        return await self._judged(call, approval, approve)

    async def _asked(
        self, call: Call, tool: ToolCall, approve: Approve, principal: Principal
    ) -> Approval:
        rules = call.snapshot.approvals
        now = wall(self._clock)
        document = Document(
            id=f"ap_{self._token(ID_BYTES).hex()}",
            owner=principal.id,
            agent=principal.agent,
            tenant=principal.tenant,
            tool=f"{tool.server.name}/{tool.tool}",
            arguments=tool.arguments,
            policy=call.snapshot.digest,
            rule=approve.because,
            expires=now + approve.expires,
            nonce=self._token(ID_BYTES).hex(),
        )
        document.binding()  # what cannot be signed is the caller's fault, not the store's
        await self._void_if_changed(call, tool, document, now)
        caps = Caps(rows=rules.max_kept, open_of_owner=rules.max_open)
        approval = await self._store.ask(
            document, reason=approve.reason, call=call.id, now=now, caps=caps
        )
        if approval.document.id == document.id and self.on_asked is not None:
            self.on_asked(approval)
        return approval

    async def _void_if_changed(
        self, call: Call, tool: ToolCall, document: Document, now: Micros
    ) -> None:
        """An approval that the caller names is for these very arguments.

        Raises:
            Forbidden: It is for others; it is void now.
        """
        named = _named(call, tool)
        if not named:
            return
        try:
            known = await self._store.find(named)
        except UnknownApproval:
            known = None
        if known is None or known.document.owner != document.owner:
            raise Forbidden(f"There is no approval {named[:64]!r} of yours.",
                            code="approval_unknown")  # fmt: skip
        if known.document.binding() == document.binding():
            return
        if known.state in decisions.OPEN:
            await self._store.void(named, "another call was made under it", now=now)
            self.decided(named)
        raise Forbidden(
            f"The approval {named} was for another call or another policy; it is void. Ask anew.",
            because=document.rule,
            code="approval_void",
        )

    async def _awaited(self, call: Call, approval: Approval) -> Approval:
        """The approval once it is decided, or as it is when the wait is over."""
        if approval.state is not Stand.PENDING or self.waiting >= MOST_WAITING:
            return approval
        started = self._clock.now()
        until = started + min(call.snapshot.approvals.wait, LONGEST_WAIT)
        self.waiting += 1
        try:
            while approval.state is Stand.PENDING:
                left = until - self._clock.now()
                if left <= 0 or wall(self._clock) >= approval.document.expires:
                    break
                await self._look_later(approval.document.id, min(LOOK, left))
                approval = await self._store.find(approval.document.id)
        finally:
            self.waiting -= 1
            waited = self._clock.now() - started
            call.deadline += waited  # people's time is not the tool's
            call.queue_us += waited
        return approval

    async def _look_later(self, approval: str, delay: Micros) -> None:
        """Returns when it was decided here, or after that time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news.setdefault(approval, set()).add(future)
        timer = self._clock.after(delay, lambda: None if future.done() else future.set_result(None))
        try:
            await future
        finally:
            timer.cancel()
            waiting = self._news.get(approval)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._news[approval]

    async def _judged(self, call: Call, approval: Approval, approve: Approve) -> str:
        """Its id, if it is granted, in time, and signed by who may.

        Raises:
            Forbidden: It is not.
        """
        ident, state = approval.document.id, approval.state
        call.extra_headers.append((HEADER, ident.encode()))
        now = wall(self._clock)
        rules = call.snapshot.approvals
        if state in decisions.OPEN and now >= approval.document.expires:
            state = Stand.EXPIRED
        if state is Stand.GRANTED and not verified(approval, rules, approve):
            await self._void_quietly(ident, now)
            state = Stand.VOID
        call.notes.append(
            VerdictNote("gate", f"approval {state.value}", approve.because, call.received, ident)
        )
        if self.on_ended is not None:
            self.on_ended(state.value)
        if state is Stand.GRANTED:
            return ident
        why = f" Reason: {approve.reason}." if approve.reason else ""
        if state is Stand.PENDING:
            raise ApprovalPending(
                f"{_who(approve, approval)} must agree to this call (approval {ident}, rule "
                f"{approve.because}).{why} It is pending: make the same call again to wait on.",
                because=approve.because,
                retry_after=COME_BACK,
                details={"approval": ident, "expires": approval.document.expires // MICRO},
            )
        words = {
            Stand.DENIED: f"was denied by {approval.approver}",
            Stand.EXPIRED: "has expired without a decision in time",
            Stand.VOID: "is void",
        }.get(state, "was used already")
        note = f" {approval.note[:200]}" if approval.note and state is Stand.DENIED else ""
        raise Forbidden(
            f"The approval {ident} of this call {words} (rule {approve.because}).{note}",
            because=approve.because,
            code=f"approval_{state.value}",
            details={"approval": ident},
        )

    async def _void_quietly(self, approval: str, now: Micros) -> None:
        try:
            await self._store.void(approval, "its approver may not consent any more", now=now)
        except IllegalTransition:
            return

    async def use(self, approval: str, call: Call, approve: Approve) -> None:
        """The approval is spent on this call, before anything is sent.

        Raises:
            Forbidden: It was used, or ended, in between.
        """
        try:
            await self._store.use(approval, call.id, now=wall(self._clock))
        except (SchedulerError, NotCanonical) as error:
            raise _fault(error, approve) from error


def _who(approve: Approve, approval: Approval) -> str:
    """Who is still waited for."""
    left = approve.signatures - len(approval.grants)
    if approve.signatures == 1:
        return "A human"
    return f"{left} more of {approve.signatures} humans"


def _named(call: Call, tool: ToolCall) -> str:
    """The approval that the caller names; "" where it names none."""
    header = call.header(HEADER)
    named = header.decode("latin-1") if header is not None else tool.meta.get(META)
    return named if isinstance(named, str) else ""


def _fault(error: Exception, approve: Approve) -> Exception:
    if isinstance(error, IllegalTransition):
        return Forbidden(
            f"The approval cannot be used: {error} (rule {approve.because}).",
            because=approve.because,
            code="approval_spent",
        )
    if isinstance(error, NotCanonical):
        return MalformedCall(f"The arguments cannot be signed: {error}.", param="params.arguments")
    return StoreUnavailable("The store of approvals does not answer; nothing was called.")
