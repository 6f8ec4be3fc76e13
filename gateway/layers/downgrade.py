"""Next model when the inside gives up (`admission.md` §14).

Outside retry, because another model has another breaker and other pools; it re-estimates, because
tokenizers and prices differ. It acts only before the first byte: once a reply is returned with a
good answer, neither this layer nor retry may act again.

A conversation stays on the rung that served it until the one above has been well for a while:
changing to and fro would lose the prompt cache of both each time. It is named by its session, else
by its caller and first user message.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from gateway.call import Call, End, Kind, Reply, Service, VerdictNote
from gateway.errors import BreakerOpen, GatewayError, NeverFits, QueueFull, UpstreamFault
from gateway.resilience.ladder import Rung, Wanted, unfit
from gateway.units import MICRO, Micros
from gateway.wire import turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.clock import Clock
    from gateway.snapshot import Deployment

NEXT_RUNG = frozenset(
    {Kind.CAPACITY, Kind.FAULT, Kind.PERIOD, Kind.MONEY, Kind.AUTH, Kind.QUOTA, Kind.RAMP}
)
"""Bad answers that another rung may serve; a caller's fault is the caller's on every rung."""

REASON = b"tidegate-downgrade-reason"

MOST_STAYS = 10_000
"""Conversations below their first rung that are remembered."""

STAY: Micros = 30 * MICRO
"""How long a conversation stays at least: a full queue has no breaker that says when it is over."""


def rung_of(deployment: Deployment) -> Rung:
    """The deployment as the ladder sees it."""
    return Rung(
        id=deployment.id,
        dialects=deployment.provider.dialects,
        context_window=deployment.context_window,
        max_output=deployment.max_output,
        capabilities=deployment.capabilities,
        provider=deployment.provider.name,
    )


def may_downgrade(call: Call) -> bool:
    """Whether policy and caller allow another model at all."""
    model = call.model
    if model is None or len(model.deployments) < 2 or model.downgrade == "never":
        return False
    if call.tier is not None and not call.tier.downgrade:
        return False
    if call.fields is not None and call.fields.previous_response_id:
        return False  # the response lives at the upstream that made it
    wish = call.header(b"tidegate-downgrade")
    return wish is None or wish.strip().lower() != b"never"


def rungs_for(call: Call) -> list[Deployment]:
    """Deployments able to serve this call, first choice first; the first choice is always kept.

    It is the one that estimate chose: the first of the model's own that speaks the dialect.
    """
    model, fields, estimate, first = call.model, call.fields, call.estimate, call.deployment
    if first is None:
        return []
    if model is None or fields is None or estimate is None or not may_downgrade(call):
        return [first]
    wanted = Wanted(
        dialect=call.family.value,
        input=estimate.input,
        cap=fields.cap,
        needs=fields.needs,
        thinking_of=first.provider.name if fields.has_thinking else "",
    )
    rungs = [first]
    for deployment in model.deployments:
        if deployment is first:
            continue
        why = unfit(rung_of(deployment), wanted)
        if why is None:
            rungs.append(deployment)
        else:
            call.notes.append(
                VerdictNote("downgrade", "skip", deployment.because, call.received, why)
            )
    return rungs


def reason_of(outcome: Reply | GatewayError) -> str:
    """Why the rung gave up, for the header: one word."""
    if isinstance(outcome, Reply):
        return outcome.kind.value if outcome.kind else "ok"
    if isinstance(outcome, BreakerOpen):
        return "breaker_open"
    if isinstance(outcome, NeverFits):
        return "never_fits"
    if isinstance(outcome, QueueFull):
        return "saturated"
    return outcome.code


class Stay(NamedTuple):
    """Where a conversation stays, at least until that instant."""

    deployment: str
    until: Micros


class Stays:
    """Conversations that left their first rung; the ones served longest ago are forgotten.

    Args:
        well: Whether a deployment's breaker has been closed for a while.
        limit: Conversations remembered at most.
    """

    __slots__ = ("_limit", "_rungs", "_well")

    def __init__(self, well: Callable[[str, Micros], bool], *, limit: int = MOST_STAYS) -> None:
        self._limit = limit
        self._rungs: OrderedDict[int, Stay] = OrderedDict()
        self._well = well

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._rungs)

    def ordered(self, call: Call, rungs: list[Deployment], now: Micros) -> list[Deployment]:
        """The rungs, that of the conversation first while it must stay there."""
        key = conversation(call) if self._rungs else 0
        stay = self._rungs.get(key) if key else None
        if stay is None:
            return rungs
        if now >= stay.until and self._well(rungs[0].id, now):
            del self._rungs[key]
            return rungs
        return sorted(rungs, key=lambda one: one.id != stay.deployment)

    def served(self, call: Call, first: Deployment, by: Deployment, now: Micros) -> None:
        """The conversation was served by that rung, because those above gave up just now."""
        key = conversation(call)
        if not key:
            return
        if by is first:
            self._rungs.pop(key, None)
            return
        self._rungs[key] = Stay(by.id, now + STAY)
        self._rungs.move_to_end(key)
        if len(self._rungs) > self._limit:
            self._rungs.popitem(last=False)


def conversation(call: Call) -> int:
    """The name of the call's conversation with that model; 0 where it has none."""
    principal, model = call.principal, call.model
    if principal is None or model is None:
        return 0
    name = principal.session or call.session
    if not name and call.parsed is not None:
        name = turns.opening(call.dialect, call.parsed)
    return hash((principal.id, model.name, name)) if name else 0


class Downgrading:
    """The layer; `re_estimate` sets `call.deployment` and `call.estimate` for another rung."""

    __slots__ = ("_clock", "_re_estimate", "_stays")

    def __init__(
        self,
        *,
        clock: Clock,
        re_estimate: Callable[[Call, Deployment], Awaitable[None]],
        stays: Stays,
    ) -> None:
        self._clock = clock
        self._re_estimate = re_estimate
        self._stays = stays

    def __call__(self, inner: Service) -> Service:
        """The service with its ladder."""

        def serve(call: Call) -> Awaitable[Reply]:
            rungs = rungs_for(call)
            if len(rungs) < 2:
                return inner(call)
            return self._climbed(inner, call, rungs)

        return serve

    async def _climbed(self, inner: Service, call: Call, rungs: list[Deployment]) -> Reply:
        """What the first rung says that can serve it, or the last one."""
        first, last = rungs[0], len(rungs) - 1
        rungs = self._stays.ordered(call, rungs, self._clock.now())
        if rungs[0] is not first:
            self._goes_on(call, rungs[0], "conversation")
        for place, deployment in enumerate(rungs):
            if deployment is not call.deployment:
                call.tags = None  # tags of different pools do not compare
                await self._re_estimate(call, deployment)
            call.rungs_left = last - place
            outcome = await rung(inner, call)
            if isinstance(outcome, Reply) and (place == last or not hopeless(outcome)):
                if place:
                    self._stays.served(call, first, deployment, self._clock.now())
                if deployment is not first:
                    announce(call, deployment, self._clock.now())
                return outcome
            if isinstance(outcome, GatewayError) and place == last:
                raise outcome
            self._goes_on(call, deployment, reason_of(outcome), outcome)
            if isinstance(outcome, Reply):
                await outcome.close(End.FAILED)
        raise AssertionError("a ladder ends in its last rung")

    def _goes_on(
        self,
        call: Call,
        deployment: Deployment,
        reason: str,
        outcome: Reply | GatewayError | None = None,
    ) -> None:
        """The call leaves that rung: for `explain` why, with what it said; the first, for all."""
        detail = reason
        if isinstance(outcome, Reply):
            detail = f"{reason}: {deployment.id} said {outcome.status} {outcome.code}".rstrip()
        note = VerdictNote("downgrade", "next", deployment.because, self._clock.now(), detail)
        call.notes.append(note)
        if not any(name == REASON for name, _ in call.extra_headers):
            call.extra_headers.append((REASON, reason.encode()))


async def rung(inner: Service, call: Call) -> Reply | GatewayError:
    """What one rung says; refusals that another rung could not mend are raised."""
    try:
        return await inner(call)
    except (BreakerOpen, NeverFits, QueueFull, UpstreamFault) as error:
        return error


def hopeless(reply: Reply) -> bool:
    """Whether this bad answer may be better elsewhere."""
    return reply.kind in NEXT_RUNG


def announce(call: Call, deployment: Deployment, now: Micros) -> None:
    """Which model was asked for and which one answers."""
    asked = call.fields.model if call.fields is not None else ""
    call.extra_headers.append((b"tidegate-model-requested", asked.encode("ascii", "replace")))
    call.notes.append(VerdictNote("downgrade", "served", deployment.because, now, deployment.id))
