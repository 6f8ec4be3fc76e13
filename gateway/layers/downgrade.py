"""Next model when the inside gives up (`admission.md` §14).

Outside retry, because another model has another breaker and other pools; it re-estimates, because
tokenizers and prices differ. It acts only before the first byte: once a reply is returned with a
good answer, neither this layer nor retry may act again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.call import Call, End, Kind, Reply, Service, VerdictNote
from gateway.errors import BreakerOpen, GatewayError, NeverFits, QueueFull, UpstreamFault
from gateway.resilience.ladder import Rung, Wanted, unfit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.clock import Clock
    from gateway.snapshot import Deployment
    from gateway.units import Micros

NEXT_RUNG = frozenset({Kind.CAPACITY, Kind.FAULT, Kind.PERIOD, Kind.MONEY, Kind.AUTH, Kind.QUOTA})
"""Bad answers that another rung may serve; a caller's fault is the caller's on every rung."""


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


class Downgrading:
    """The layer; `re_estimate` sets `call.deployment` and `call.estimate` for another rung."""

    __slots__ = ("_clock", "_re_estimate")

    def __init__(
        self, *, clock: Clock, re_estimate: Callable[[Call, Deployment], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._re_estimate = re_estimate

    def __call__(self, inner: Service) -> Service:
        """The service with its ladder."""

        async def serve(call: Call) -> Reply:
            rungs = rungs_for(call)
            if len(rungs) < 2:
                return await inner(call)
            last = len(rungs) - 1
            for place, deployment in enumerate(rungs):
                if place:
                    call.tags = None  # tags of different pools do not compare
                    await self._re_estimate(call, deployment)
                call.rungs_left = last - place
                outcome = await rung(inner, call)
                if isinstance(outcome, Reply) and (place == last or not hopeless(outcome)):
                    if place:
                        announce(call, deployment, self._clock.now())
                    return outcome
                if isinstance(outcome, GatewayError) and place == last:
                    raise outcome
                await self._next(call, deployment, outcome, first=place == 0)
            raise AssertionError("a ladder ends in its last rung")

        return serve

    async def _next(
        self, call: Call, deployment: Deployment, outcome: Reply | GatewayError, *, first: bool
    ) -> None:
        reason = reason_of(outcome)
        if isinstance(outcome, Reply):
            await outcome.close(End.FAILED)
        note = VerdictNote("downgrade", "next", deployment.because, self._clock.now(), reason)
        call.notes.append(note)
        if first:
            call.extra_headers.append((b"tidegate-downgrade-reason", reason.encode()))


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
