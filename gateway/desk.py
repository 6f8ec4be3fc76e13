"""What operators do about tool calls: decide on approvals, resolve effects in doubt.

The admin listener asks it; `tidegate approvals` and `tidegate effects` ask the listener. Reaching
that listener is no authority: a decision counts only under an approver's signature, and is verified
here, when it arrives, and once more before the call goes out.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from gateway.tools.approvals import signed_by, wall
from gateway.units import MICRO
from scheduler.api import (
    IllegalTransition,
    SchedulerError,
    Stand,
    Unknown,
    canonical,
)
from scheduler.api import approvals as decisions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gateway.clock import Clock
    from gateway.snapshot import Snapshot
    from gateway.toolrules import Approve
    from gateway.tools.approvals import Consent
    from scheduler.api import Approval, Effect, TaskStore

MOST_LISTED = 200
LONGEST_NOTE = 500
EVENTS = {"grant": decisions.Move.GRANT, "deny": decisions.Move.DENY}


class Unfit(Exception):
    """The operator's request cannot be done: HTTP status, title, sentence."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title
        self.detail = detail


class Desk:
    """Approvals and effects, for operators."""

    def __init__(
        self,
        store: TaskStore,
        consent: Consent,
        *,
        snapshot: Callable[[], Snapshot],
        clock: Clock,
    ) -> None:
        self._store = store
        self._consent = consent
        self._snapshot = snapshot
        self._clock = clock

    async def approvals(self, state: str, after: int) -> dict[str, Any]:
        """Approvals of a state ("" means all), oldest first, without their arguments."""
        try:
            chosen = Stand(state) if state else None
        except ValueError as error:
            known = ", ".join(stand.value for stand in Stand)
            raise Unfit(400, "unknown state", f"{state[:40]!r} is none of {known}") from error
        found = await _asked(
            self._store.approvals.listing(state=chosen, after=after, limit=MOST_LISTED)
        )
        value: dict[str, Any] = {"approvals": [shown(one) for one in found]}
        if len(found) == MOST_LISTED:
            value["next"] = found[-1].seq
        return value

    async def approval(self, approval: str) -> dict[str, Any]:
        """One approval with all that is signed."""
        found = await _asked(self._store.approvals.find(approval))
        rule = rule_of(self._snapshot(), found.document.rule)
        needed = rule.signatures if rule is not None else 1
        return {**shown(found), "needed": needed, "document": written(found)}

    async def decide(self, approval: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A signed decision; whoever waits for it goes on."""
        event = EVENTS.get(str(body.get("decision")))
        note = body.get("note", "")
        if event is None or not isinstance(note, str) or len(note) > LONGEST_NOTE:
            words = f"decision is grant or deny; note is text of at most {LONGEST_NOTE}"
            raise Unfit(400, "malformed decision", words)
        try:
            signature = base64.b64decode(str(body.get("signature", "")), validate=True)
        except ValueError as error:
            raise Unfit(400, "malformed decision", "signature is base64") from error
        known = await _asked(self._store.approvals.find(approval))
        snapshot = self._snapshot()
        rule = rule_of(snapshot, known.document.rule)
        if known.document.policy != snapshot.digest or rule is None:
            raise Unfit(409, "policy has changed",
                        "The question was asked under another policy and is void; the agent must "
                        "ask anew.")  # fmt: skip
        name = signed_by(
            known.document, event, signature, rules=snapshot.approvals, allowed=rule.approvers
        )
        if name is None:
            raise Unfit(403, "not an approver",
                        "The signature is of no approver whom this rule admits.")  # fmt: skip
        signed = decisions.Signed(
            approver=name, signature=signature, note=note, at=wall(self._clock)
        )
        decided = await _asked(
            self._store.approvals.decide(
                approval, event, signed, needed=rule.signatures
            )
        )  # fmt: skip
        self._consent.decided(approval)
        return {**shown(decided), "needed": rule.signatures}

    async def doubts(self) -> dict[str, Any]:
        """Effects in doubt, oldest first."""
        found = await _asked(self._store.effects.doubts(limit=MOST_LISTED))
        return {"effects": [effect_shown(one) for one in found]}

    async def resolve(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A human's word on an effect in doubt: it was done, or it was not."""
        outcome, by = body.get("outcome"), body.get("by")
        if outcome not in ("done", "not_done") or not isinstance(by, str) or not 0 < len(by) <= 200:
            words = "outcome is done or not_done; by says who resolved it and how it is known"
            raise Unfit(400, "malformed resolution", words)
        effect = await _asked(
            self._store.effects.resolve(
                key, done=outcome == "done", note=f"resolved by {by}", now=wall(self._clock)
            )
        )
        return {**effect_shown(effect), "outcome": outcome}

    async def counts(self) -> dict[str, Any]:
        """Rows by state."""
        approvals = await _asked(self._store.approvals.counts())
        effects = await _asked(self._store.effects.counts())
        return {
            "approvals": {state.value: count for state, count in approvals.items()},
            "effects": {state.value: count for state, count in effects.items()},
        }


async def _asked(answer: Any) -> Any:  # noqa: ANN401 - whatever the store returns
    """The store's answer; its refusals in the operator's words."""
    try:
        return await answer
    except Unknown as error:
        raise Unfit(404, "unknown", f"There is no {str(error)[:80]!r}.") from error
    except IllegalTransition as error:
        raise Unfit(409, "not possible now", f"{error}.") from error
    except SchedulerError as error:
        raise Unfit(503, "store unavailable", str(error)) from error


def approve_rules(snapshot: Snapshot) -> Iterator[Approve]:
    """Every rule that asks for consent."""
    for server in snapshot.servers.values():
        for rule in server.tools:
            if rule.approve is not None:
                yield rule.approve
            for case in rule.cases:
                if case.approve is not None:
                    yield case.approve


def rule_of(snapshot: Snapshot, because: str) -> Approve | None:
    """The rule of that name; None where policy has none any more."""
    return next((rule for rule in approve_rules(snapshot) if rule.because == because), None)


def shown(approval: Approval) -> dict[str, Any]:
    """An approval without its arguments."""
    document = approval.document
    return {
        "id": document.id,
        "state": approval.state.value,
        "agent": document.agent,
        "tenant": document.tenant,
        "tool": document.tool,
        "rule": document.rule,
        "reason": approval.reason,
        "call": approval.call,
        "requested": approval.requested // MICRO,
        "expires": document.expires // MICRO,
        "decided": approval.decided // MICRO,
        "used": approval.used // MICRO,
        "approver": approval.approver,
        "granted_by": [one.approver for one in approval.grants],
        "note": approval.note,
        "seq": approval.seq,
    }


def written(approval: Approval) -> dict[str, Any]:
    """What is signed; arguments as their canonical text, which keeps every digit."""
    document = approval.document
    return {
        "id": document.id,
        "owner": document.owner,
        "agent": document.agent,
        "tenant": document.tenant,
        "tool": document.tool,
        "arguments": canonical(dict(document.arguments)).decode(),
        "policy": document.policy,
        "rule": document.rule,
        "expires": document.expires,
        "nonce": document.nonce,
    }


def effect_shown(effect: Effect) -> dict[str, Any]:
    """An effect, without its arguments or its answer."""
    return {
        "key": effect.key,
        "state": effect.state.value,
        "agent": effect.agent,
        "tenant": effect.tenant,
        "tool": effect.tool,
        "call": effect.call,
        "reserved": effect.reserved // MICRO,
        "note": effect.note,
    }
