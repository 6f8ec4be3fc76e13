"""Credential -> Principal; unknown is refused; what the identity may not use is refused.

Here also the call gets its tier (a wish, capped by the identity), its session and its deadline: the
least of policy, the protocol's cap and what the client itself will wait for (`protocols.md` §3).
Hints in headers and body name sessions and wish for tiers; they never raise a right.
"""

from __future__ import annotations

from collections.abc import Awaitable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gateway.call import Call, Layer, Reply, Service, VerdictNote
from gateway.errors import Forbidden, NoSuchRoute
from gateway.identity import session_of, tier_wish
from gateway.wire import keepalive

if TYPE_CHECKING:
    from gateway.call import Principal
    from gateway.clock import Clock
    from gateway.identity import Identities


def allowed_model(principal: Principal, model: str) -> bool:
    """Whether the identity may use this public model name."""
    return any(glob == "*" or fnmatchcase(model, glob) for glob in principal.rule.models)


def check_model(call: Call, principal: Principal) -> None:
    """The model exists and the identity may use it.

    Raises:
        Forbidden: It exists and is not for this identity.
        NoSuchRoute: No policy names it.
    """
    fields = call.fields
    if fields is None:
        return
    rule = principal.rule
    if not allowed_model(principal, fields.model):
        text = (
            f"The model {fields.model[:100]!r} is not allowed for {principal.agent} "
            f"(rule {rule.because}.models)."
        )
        raise Forbidden(text, because=f"{rule.because}.models", param="model")
    call.model = call.snapshot.model(fields.model)
    if call.model is None:
        text = f"No policy names a model {fields.model[:100]!r}."
        raise NoSuchRoute(text, code="model_not_found", param="model")


def identify(*, identities: Identities, clock: Clock) -> Layer:
    """The layer."""

    def layer(inner: Service) -> Service:
        async def serve(call: Call) -> Reply:
            found = identities.principal(call.snapshot, call.headers, call.peer, clock.wall())
            principal = await found if isinstance(found, Awaitable) else found
            rule = principal.rule
            call.principal = principal
            wish = tier_wish(call.headers, call.snapshot.tiers)
            number = max(wish or rule.default_tier, rule.tier_cap)
            tier = call.tier = call.snapshot.tier(number)
            call.session = session_of(call.headers, call.fields)
            longest = tier.max_wait if rule.max_wait is None else min(tier.max_wait, rule.max_wait)
            stream = call.fields is not None and call.fields.stream
            wait = keepalive.queue_deadline(
                longest,
                keepalive.hold_cap(call.dialect, stream=stream),
                keepalive.client_timeout(call.headers),
            )
            call.deadline = call.received + wait
            detail = f"{principal.agent} tier {number}"
            call.notes.append(VerdictNote("identify", "known", rule.because, call.received, detail))
            check_model(call, principal)
            return await inner(call)

        return serve

    return layer
