"""Outermost layer: sees every refusal and every escape, and writes each call's end exactly once.

It names the answer's `tidegate-*` headers, counts what ended and how, and hands the chain of
verdicts to the log and to `explain`. The one broad `except` of the pipeline stands here: what
escapes is counted and passed on, never swallowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.call import BROKEN, COMPLETE, Call, End, HeaderList, Kind, Reply, Service
from gateway.errors import CallerFault, GatewayError, Saturated
from gateway.wire import ratelimit_headers

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.clock import Clock
    from gateway.telemetry.metrics import Metrics
    from gateway.units import Micros
    from gateway.wire.ratelimit_headers import OwnLimit

MOST_NAMED = 1_024
"""Headers with names of tiers and models that are remembered."""

_THOUSANDTHS = (b"", *[b".%03d" % part for part in range(1, 1_000)])
"""How milliseconds end: to write a number with leading zeros costs twenty times a look-up."""

_NOT_QUEUED = (b"tidegate-queue-ms", b"0")

OK, FAILED, CANCELLED, REFUSED = "ok", "failed", "cancelled", "refused"


def outcome_of(reply: Reply, end: End) -> str:
    """How a call that was answered ended, in one word."""
    kind = reply.kind
    if end is COMPLETE and kind is None:
        return OK
    if end is End.CLIENT_GONE and not reply.terminal:
        return CANCELLED
    if kind is Kind.CALLER:
        return REFUSED
    if kind is not None or end in BROKEN:
        return FAILED
    return CANCELLED if end is End.DRAINED else OK


def advice(reply: Reply) -> HeaderList:
    """What a relayed refusal says of coming back.

    The provider's word to wait is kept within what SDKs bear, but the gateway has spent its tries:
    an SDK that tries again at once would multiply them, so it is told not to.
    """
    stop = ratelimit_headers.retry_headers(None, hard=True)
    wait = reply.retry_after
    if wait is None or ratelimit_headers.is_hard(wait):
        return stop
    told = ratelimit_headers.retry_headers(wait)
    return [pair for pair in told if pair[0] != b"x-should-retry"] + stop


class Observing:
    """The layer.

    Attributes:
        own_limits: The caller's own limits as they stand, for the answer's rate-limit headers.
        on_end: Called once per call with its status and outcome: log line and decision record.
    """

    __slots__ = ("_clock", "_metrics", "_named", "on_end", "own_limits")

    def __init__(
        self,
        *,
        clock: Clock,
        metrics: Metrics,
        own_limits: Callable[[Call], list[OwnLimit]],
        on_end: Callable[[Call, int, str, GatewayError | None], None],
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self.own_limits = own_limits
        self.on_end = on_end
        self._named: dict[tuple[bytes, str], tuple[bytes, bytes]] = {}

    def __call__(self, inner: Service) -> Service:
        """The service, observed."""

        async def serve(call: Call) -> Reply:
            metrics = self._metrics
            metrics.call_started()
            try:
                reply = await inner(call)
            except GatewayError as error:
                self._refused(call, error)
                raise
            except BaseException as error:
                # A cancellation is the client leaving; anything else is a defect, which edge.py
                # logs with its call id and answers in the caller's dialect.
                status = 0 if not isinstance(error, Exception) else 500
                if call.usage is not None:
                    metrics.settled(_model(call), call.usage)
                self._ended(call, status, FAILED if status else CANCELLED, None)
                raise
            self._answered(call, reply)

            def closed(end: End) -> None:
                if call.usage is not None:
                    metrics.settled(_model(call), call.usage)
                self._ended(call, reply.status, outcome_of(reply, end), None)

            reply.on_close(closed)
            return reply

        return serve

    def _refused(self, call: Call, error: GatewayError) -> None:
        self._metrics.refused(error.code)
        self._name(call)
        if call.principal is not None:
            self._limits(call, self._clock.now())
        ours = isinstance(error, CallerFault | Saturated)
        self._ended(call, type(error).status, REFUSED if ours else FAILED, error)

    def _ended(self, call: Call, status: int, outcome: str, error: GatewayError | None) -> None:
        model = call.model
        self._metrics.call_ended(
            dialect=call.dialect,
            model=model.name if model is not None else "",
            status=status,
            outcome=outcome,
        )
        if call.tool is not None:
            span = self._clock.now() - call.received
            self._metrics.tool_ended(call.tool.server.name, outcome, span)
        self.on_end(call, status, outcome, error)

    def _answered(self, call: Call, reply: Reply) -> None:
        """The head is known: name its facts."""
        now = self._clock.now()
        overhead = now - call.received - call.queue_us - call.upstream_us
        if overhead < 0:  # noqa: PLR1730 - on every answer
            overhead = 0
        call.overhead_us = overhead
        self._metrics.overhead(overhead)
        model, deployment = call.model, call.deployment
        if call.reserved:
            self._metrics.reserved(model.name if model is not None else "", call.reserved)
        self._name(call)
        headers = call.extra_headers
        headers.append((b"tidegate-overhead-ms", _ms(overhead)))
        if deployment is not None and model is not None:
            served = deployment.upstream_model or model.name
            headers.append(self._pair(b"tidegate-model-served", served))
        if reply.kind is not None:
            headers += advice(reply)
        self._limits(call, now)

    def _limits(self, call: Call, now: Micros) -> None:
        """The caller's own limits, on refusals too: that is when its SDK looks at them."""
        limits = self.own_limits(call)
        if limits:
            call.extra_headers += ratelimit_headers.limits_out(call.family, limits, now=now)

    def _name(self, call: Call) -> None:
        """Headers that refusals carry as well."""
        headers = call.extra_headers
        if call.tier is not None:
            headers.append(self._pair(b"tidegate-tier", call.tier.name))
        waited = call.queue_us
        headers.append((b"tidegate-queue-ms", _ms(waited)) if waited else _NOT_QUEUED)
        if call.reserved:
            headers.append((b"tidegate-tokens-reserved", b"%d" % call.reserved))

    def _pair(self, header: bytes, name: str) -> tuple[bytes, bytes]:
        """A header with a name from policy as its value."""
        pair = self._named.get((header, name))
        if pair is None:
            pair = (header, name.encode("ascii", "replace"))
            if len(self._named) >= MOST_NAMED:
                self._named.clear()
            self._named[header, name] = pair
        return pair


def _model(call: Call) -> str:
    return call.model.name if call.model is not None else ""


def _ms(span: Micros) -> bytes:
    """Milliseconds with three digits behind the point, as short as they are."""
    return b"%d" % (span // 1_000) + _THOUSANDTHS[span % 1_000]
