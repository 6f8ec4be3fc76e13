"""THE order of the layers, with a why beside each. The lists read in execution order.

Recorded in docs/adr/0002: the caller's own limits are taken once per call (`admit_caller`), outside
downgrade and retry; the provider's pools once per attempt (`admit`), inside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.call import Dialect, Service, stack
from gateway.layers.admit import Admission, admit, admit_caller
from gateway.layers.downgrade import Downgrading, Stays
from gateway.layers.estimate import Estimating, estimate
from gateway.layers.gate import commit
from gateway.layers.guard_loops import LoopGuard
from gateway.layers.identify import identify, identify_again
from gateway.layers.mark import mark
from gateway.layers.observe import Observing
from gateway.layers.trip import Breakers, Tripping
from gateway.tools.batches import Batches
from gateway.wire.mcp import GOVERNED

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from gateway.call import Call, Reply
    from gateway.clock import Clock
    from gateway.layers.count import CountTokens
    from gateway.layers.dispatch import Dispatch
    from gateway.layers.gate import Gate
    from gateway.layers.hold import Holding
    from gateway.layers.identify import Recognizer
    from gateway.layers.invoke import Invoke
    from gateway.layers.models import Models
    from gateway.layers.retry import Retrying
    from gateway.layers.settle import Settling
    from gateway.layers.target import Target
    from gateway.layers.trace import Tracing
    from gateway.tools.plane import Plane
    from gateway.units import Rng
    from gateway.wire.mcp import Posted


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything the layers are wired with; `app.py` and the simulated tests make it."""

    clock: Clock
    rng: Rng
    recognize: Recognizer
    estimating: Estimating
    admission: Admission
    breakers: Breakers
    retrying: Retrying
    settling: Settling
    dispatch: Dispatch
    observing: Observing
    models: Models
    count_tokens: CountTokens
    loops: LoopGuard = field(default_factory=LoopGuard)
    tracing: Tracing | None = None
    holding: Holding | None = None
    target: Target | None = None
    gate: Gate | None = None
    invoke: Invoke | None = None
    plane: Plane | None = None


def model_pipeline(parts: Parts) -> Service:
    """MODEL: every call that may reach a provider, pass-through included."""
    clock, rng = parts.clock, parts.rng
    return stack(
        # outermost where it is asked for: a span ends when everything has
        *([parts.tracing] if parts.tracing is not None else []),
        # must see every refusal and every escape
        parts.observing,
        # a stranger may cost us no effort
        identify(parts.recognize),
        # a call that is held has cost nothing yet, so outside everything that counts or charges
        *([parts.holding] if parts.holding is not None else []),
        # admission needs the cost; loops and gates will
        estimate(parts.estimating),
        # a runaway stops before it queues or asks anybody; what it cost is known by now
        parts.loops,
        # what a caller may use does not depend on how often we try: once per call
        admit_caller(parts.admission),
        # another model has another breaker and other pools, so outside retry
        Downgrading(clock=clock, re_estimate=parts.estimating, stays=Stays(parts.breakers.well)),
        # every attempt spends quota and sleeping must hold no permit, so outside admit
        parts.retrying,
        # nobody queues for an open breaker
        Tripping(
            breakers=parts.breakers,
            clock=clock,
            rng=rng,
            leaves=parts.holding.wants if parts.holding is not None else None,
        ),
        # the last wait before spending; the permit lives until the body closes
        admit(parts.admission),
        # inside admit: the cost is known before the permit goes
        parts.settling,
        service=parts.dispatch,
    )


def held_pipeline(parts: Parts) -> Service:
    """HELD: calls that were kept, executed now: MODEL for callers that are not there any more.

    No guard against loops: it has judged the call already, and coming back is no repetition.
    """
    clock, rng = parts.clock, parts.rng
    return stack(
        parts.observing,
        # no credential was kept: policy is asked anew, by name
        identify_again(clock=clock),
        estimate(parts.estimating),
        admit_caller(parts.admission),
        Downgrading(clock=clock, re_estimate=parts.estimating, stays=Stays(parts.breakers.well)),
        parts.retrying,
        # an open breaker sends it back at once, with its age kept
        Tripping(breakers=parts.breakers, clock=clock, rng=rng, leaves=lambda _call: True),
        admit(parts.admission),
        parts.settling,
        # nearest to the transport: every attempt is on disk before it is sent
        mark,
        service=parts.dispatch,
    )


def tool_pipeline(parts: Parts) -> Service:
    """TOOLS: every call that makes a tool server work."""
    assert parts.target is not None  # noqa: S101 - wired together with the plane
    assert parts.invoke is not None  # noqa: S101 - wired together with the plane
    return stack(
        # outermost where it is asked for: a span ends when everything has
        *([parts.tracing] if parts.tracing is not None else []),
        # must see every refusal and every escape
        parts.observing,
        # a stranger may cost us no effort
        identify(parts.recognize),
        # which server and tool is meant, and whether this identity may use them
        parts.target,
        # certain refusals, consent and stored replies come before anything scarce is held
        *([parts.gate] if parts.gate is not None else []),
        # what a caller may use does not depend on how often we try: once per call
        admit_caller(parts.admission),
        # sleeping must hold no permit, so outside admit; repeats only what may be repeated
        parts.retrying,
        # nobody queues for an open breaker
        Tripping(breakers=parts.breakers, clock=parts.clock, rng=parts.rng),
        # the last wait before spending; the permit lives until the body closes
        admit(parts.admission),
        # inside admit: the cost is known before the permit goes
        parts.settling,
        # nearest to the transport: what must be on disk before an attempt is sent
        commit,
        service=parts.invoke,
    )


def mcp_pipeline(parts: Parts) -> Service | None:
    """What `/mcp` is served by: TOOLS for work, the plane for all else; None without a plane."""
    if parts.plane is None:
        return None
    tools = tool_pipeline(parts)
    plane = local_pipeline(parts, parts.plane)

    async def single(call: Call) -> Reply:
        posted: Posted | None = call.rpc
        if posted is not None and posted.first.method in GOVERNED:
            return await tools(call)
        return await plane(call)

    batches = local_pipeline(parts, Batches(single, parts.plane.sessions))

    async def serve(call: Call) -> Reply:
        posted: Posted | None = call.rpc
        return await (batches if posted is not None and posted.batch else single)(call)

    return serve


def local_pipeline(parts: Parts, service: Service) -> Service:
    """Answers that no quota pays for: identified and observed, never queued or billed."""
    return stack(
        parts.observing,
        identify(parts.recognize),
        service=service,
    )


def pipeline(parts: Parts) -> Service:
    """The service of the data listener."""
    model = model_pipeline(parts)
    models = local_pipeline(parts, parts.models)
    count = local_pipeline(parts, parts.count_tokens)
    mcp = mcp_pipeline(parts)

    by_dialect = {Dialect.MODELS: models, Dialect.COUNT_TOKENS: count}
    if mcp is not None:
        by_dialect[Dialect.MCP] = mcp

    def serve(call: Call) -> Awaitable[Reply]:
        return by_dialect.get(call.dialect, model)(call)

    return serve
