"""A call as a row of the store, and a row as a call once more.

What is kept is what policy and provider need: the body as sent, and the headers without anything
that looks like a credential, without framing, and without what was meant for us alone. A call made
anew is read by the same codec as the first time.
Source: `execution.md` §15; `protocols.md` §1.3.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from gateway.call import Call, ClientKind, Dialect, Family, HeldCall, Remembered
from gateway.errors import MalformedCall
from gateway.layers.hold import PATH
from gateway.units import MICRO, Micros
from gateway.wire.codec import CODECS
from gateway.wire.headers import CALLERS, HOP_BY_HOP, named_by_connection
from scheduler.api import FINAL, Held, Message, NewHold

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.call import HeaderList
    from gateway.errors import BreakerOpen
    from gateway.snapshot import Snapshot

SECRETIVE = re.compile(rb"auth|token|secret|cookie|api-?key|password|credential|signature")
"""Header names that may carry a credential of the caller: none of them reaches the disk."""

UNKEPT = (CALLERS | HOP_BY_HOP | frozenset((b"tidegate-webhook",))) - frozenset((b"baggage",))
"""Read or meant for this connection only; `baggage` names the workflow and is kept."""

MOST_SECONDS = 10**9

PUSHED_BODY = 256 * 1024
"""Bytes of a reply that travel inside a webhook; longer ones are fetched."""


def keepable(headers: HeaderList) -> HeaderList:
    """The headers that may be written down."""
    named = named_by_connection(headers)
    return [
        (name, value)
        for name, value in headers
        if name not in UNKEPT and name not in named and not SECRETIVE.search(name)
    ]


def kept_for(headers: HeaderList, longest: Micros) -> Micros:
    """How long to keep the call: policy's word, or the caller's if it is shorter.

    Raises:
        MalformedCall: `tidegate-hold-for` is no number of seconds.
    """
    for name, value in headers:
        if name == b"tidegate-hold-for":
            text = value.strip()
            if not text.isdigit() or not 0 < int(text[:12]) <= MOST_SECONDS:
                raise MalformedCall(
                    "tidegate-hold-for must be a whole number of seconds above 0.",
                    param="tidegate-hold-for",
                )
            return min(longest, int(text) * MICRO)
    return longest


def digest_of(call: Call) -> str:
    """Names the request: the same target and body, the same digest."""
    made = blake2b(call.target, digest_size=16)
    made.update(b"\0")
    made.update(call.body)
    return made.hexdigest()


def dedupe_of(call: Call, owner: str) -> str:
    """Names the caller's idempotency key without showing it; "" where it sent none."""
    key = call.header(b"idempotency-key")
    if not key:
        return ""
    return blake2b(owner.encode() + b"\0" + key, digest_size=16).hexdigest()


def new_hold(call: Call, error: BreakerOpen, *, now: Micros, webhook: str) -> NewHold:
    """The call as it is to be written down."""
    principal, tier, fields = call.principal, call.tier, call.fields
    assert principal is not None  # noqa: S101 - the layer stands inside identify
    assert tier is not None  # noqa: S101 - the same
    assert fields is not None  # noqa: S101 - only governed calls are held
    return NewHold(
        id=call.id,
        owner=principal.id,
        agent=principal.agent,
        tenant=principal.tenant,
        rule=principal.rule.because,
        tier=tier.number,
        model=fields.model,
        dialect=call.dialect.value,
        family=call.family.value,
        client=call.client.value,
        target=call.target,
        coding=call.coding,
        peer=call.peer,
        streams=fields.stream,
        received=call.received,
        deadline=now + kept_for(call.headers, call.snapshot.holds.longest),
        dedupe=dedupe_of(call, principal.id),
        digest=digest_of(call),
        webhook=webhook,
        reason=error.message,
        because=error.because,
        request=Message(headers=keepable(call.headers), body=call.body),
    )


def call_of(
    held: Held,
    request: Message,
    *,
    snapshot: Snapshot,
    now: Micros,
    decode: Callable[[Call], Mapping[str, Any]],
) -> HeldCall:
    """The call as the edge made it, pinned to the policy now in force.

    Raises:
        CallerFault: The codec of today refuses what that of the day it was held took.
    """
    call = HeldCall(
        id=held.id,
        dialect=Dialect(held.dialect),
        family=Family(held.family),
        method="POST",
        path=held.target.partition(b"?")[0].decode("latin-1"),
        target=held.target,
        headers=list(request.headers),
        snapshot=snapshot,
        received=now,
        body=request.body,
        client=ClientKind(held.client),
    )
    call.coding = held.coding
    call.peer = held.peer
    call.parsed = decode(call)
    call.fields = CODECS[call.dialect].fields(call.parsed)
    call.who = Remembered(
        id=held.owner, agent=held.agent, rule=held.rule, tier=held.tier, until=held.deadline
    )
    call.doubtful = False
    return call


# --- a row as its owner sees it -------------------------------------------------------------------


def shown(held: Held) -> dict[str, Any]:
    """A hold as its owner sees it. No header, no body, no name of a credential."""
    value: dict[str, Any] = {
        "id": held.id,
        "object": "tidegate.hold",
        "state": held.state.value,
        "model": held.model,
        "tier": held.tier,
        "created_at": held.received // MICRO,
        "expires_at": held.deadline // MICRO,
        "location": f"{PATH}{held.id}",
        "reason": held.reason,
        "because": held.because,
        "attempts": held.attempt,
        "streams": held.streams,
    }
    if held.state in FINAL:
        value["finished_at"] = held.finished // MICRO
        value["status"] = held.status
        if held.code:
            value["code"] = held.code
            value["message"] = held.message
    if held.webhook:
        value["webhook"] = held.push_state or "waiting"
    return value


def reply_value(reply: Message) -> dict[str, Any]:
    """A reply inside JSON: its body as JSON where it is, else as text; long ones are left out."""
    value: dict[str, Any] = {"status": reply.status, "content_type": "", "body": None}
    for name, text in reply.headers:
        if name == b"content-type":
            value["content_type"] = text.decode("latin-1")
    if len(reply.body) > PUSHED_BODY:
        value["omitted_bytes"] = len(reply.body)
        return value
    try:
        value["body"] = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        value["body"] = reply.body.decode("utf-8", "replace")
    return value
