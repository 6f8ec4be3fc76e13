"""Credential -> Principal; unknown is refused; what the identity may not use is refused.

Here also the call gets its tier (a wish, capped by the identity), its session and its deadline: the
least of policy, the protocol's cap and what the client itself will wait for (`protocols.md` §3).
Hints in headers and body name sessions and wish for tiers; they never raise a right.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gateway.call import Call, HeaderList, HeldCall, Layer, Principal, Reply, Service, Terms
from gateway.errors import Forbidden, NoSuchRoute, Unauthenticated
from gateway.identity import session_of, tier_wish
from gateway.identity.again import reinstated
from gateway.wire import keepalive

if TYPE_CHECKING:
    from collections.abc import Awaitable, Container

    from gateway.clock import Clock
    from gateway.identity import Identities


def allowed_model(principal: Principal, model: str) -> bool:
    """Whether the identity may use this public model name."""
    models = principal.rule.models
    return "*" in models or any(fnmatchcase(model, glob) for glob in models)


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


class Recognizer:
    """Sets a call's principal from its headers alone; for the edge, before the body is read."""

    __slots__ = ("_clock", "_identities", "_revoked")

    def __init__(
        self, identities: Identities, clock: Clock, revoked: Container[str] = frozenset()
    ) -> None:
        """Nobody is known yet.

        Args:
            identities: Who has which credential.
            clock: For what expires.
            revoked: Ids of principals refused whatever their credential says; may change.
        """
        self._identities = identities
        self._clock = clock
        self._revoked = revoked

    def __call__(self, call: Call) -> Awaitable[None] | None:
        """None once the principal is set; a coroutine while a key set must be fetched.

        Raises:
            Unauthenticated, MalformedCall, Forbidden: As the credential deserves.
        """
        found = self._identities.principal(
            call.snapshot, call.headers, call.peer, self._clock.wall()
        )
        if isinstance(found, Principal):
            call.principal = self._trusted(found)
            return None
        return self._later(call, found)

    async def _later(self, call: Call, found: Awaitable[Principal]) -> None:
        call.principal = self._trusted(await found)

    def _trusted(self, principal: Principal) -> Principal:
        if principal.id in self._revoked:
            raise Unauthenticated(
                f"The credential of {principal.agent} was revoked by the operator.",
                because=principal.rule.because,
            )
        return principal


def identify(recognize: Recognizer) -> Layer:
    """The layer; a principal that the edge has set already is not asked for again."""

    def layer(inner: Service) -> Service:
        def serve(call: Call) -> Awaitable[Reply]:
            if call.principal is None:
                pending = recognize(call)
                if pending is not None:
                    return later(call, pending)
            standing(call)
            return inner(call)

        async def later(call: Call, pending: Awaitable[None]) -> Reply:
            await pending
            standing(call)
            return await inner(call)

        return serve

    return layer


def standing(call: Call) -> None:
    """The call has its tier, session, deadline and model.

    Raises:
        Forbidden, NoSuchRoute: As `check_model`.
        MalformedCall: It wishes for a tier that is none.
    """
    principal = call.principal
    assert principal is not None  # noqa: S101 - recognized, or an exception was raised
    said = call.said
    stream = call.fields is not None and call.fields.stream
    usual = principal.usual.get((call.dialect, stream)) if not said else None
    if usual is None or usual.snapshot is not call.snapshot:
        usual = terms(call, principal, said, stream=stream)
        if not said:
            principal.usual[call.dialect, stream] = usual
    call.tier = usual.tier
    call.session = session_of(said, call.fields)
    call.deadline = call.received + usual.wait
    call.note("identify", "known", principal.rule.because, call.received, usual.detail)
    check_model(call, principal)


def terms(call: Call, principal: Principal, said: HeaderList, *, stream: bool) -> Terms:
    """What a call gets that says this of itself."""
    rule = principal.rule
    wish = tier_wish(said, call.snapshot.tiers) if said else None
    number = max(wish or rule.default_tier, rule.tier_cap)
    tier = call.snapshot.tier(number)
    longest = tier.max_wait if rule.max_wait is None else min(tier.max_wait, rule.max_wait)
    wait = keepalive.queue_deadline(
        longest,
        keepalive.hold_cap(call.dialect, stream=stream),
        keepalive.client_timeout(said) if said else None,
    )
    return Terms(call.snapshot, tier, wait, f"{principal.agent} tier {number}")


def identify_again(*, clock: Clock) -> Layer:
    """The same for calls that were held: no credential is left, so policy is asked by name.

    Nobody waits at the other end, so the queue's deadline is the tier's, within the hold's own.
    """

    def layer(inner: Service) -> Service:
        async def serve(call: Call) -> Reply:
            if not isinstance(call, HeldCall):
                raise TypeError("only held calls are identified again")
            who = call.who
            principal = reinstated(call.snapshot, who, call.headers, call.peer, clock.wall())
            rule = principal.rule
            call.principal = principal
            tier = call.tier = call.snapshot.tier(max(who.tier, rule.tier_cap))
            call.session = session_of(call.headers, call.fields)
            longest = tier.max_wait if rule.max_wait is None else min(tier.max_wait, rule.max_wait)
            call.deadline = min(who.until, call.received + longest)
            detail = f"{principal.agent} tier {tier.number}"
            call.note("identify", "again", rule.because, call.received, detail)
            check_model(call, principal)
            return await inner(call)

        return serve

    return layer
