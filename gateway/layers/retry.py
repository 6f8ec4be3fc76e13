"""Attempts, Retry-After, jitter, budget (`admission.md` §12).

Outside admit, because every attempt spends quota and sleeping must hold no permit. Quota and ramp
refusals never sleep here: they re-enter their pool with their original place, and the pool waits. It
never retries an open breaker, a caller's fault, spent money, and nothing once the answer has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gateway.call import Call, End, Kind, Layer, Reply, Service, VerdictNote
from gateway.errors import UpstreamFault, UpstreamTimeout, UpstreamUnreachable
from gateway.resilience.backoff import next_delay, wait_for
from gateway.units import MICRO, Micros, Mode, Rng

if TYPE_CHECKING:
    from gateway.clock import Clock
    from gateway.resilience.backoff import BackoffRules
    from gateway.resilience.budget import RetryBudget

REQUEUED = frozenset({Kind.QUOTA, Kind.RAMP})
BACKED_OFF = frozenset({Kind.CAPACITY, Kind.FAULT})
OTHER_KEY = frozenset({Kind.AUTH, Kind.MONEY, Kind.PERIOD})
REPEATABLE = (UpstreamTimeout, UpstreamUnreachable)


class Spares(Protocol):
    """Whether another credential could serve this deployment now; `Credentials` implements it."""

    def other_credential(self, call: Call) -> bool:
        """True if the next attempt would use a healthy credential other than the last one."""
        ...


@dataclass(slots=True)
class Attempts:
    """How often one call has tried."""

    backoffs: int = 0
    requeues: int = 0
    keys: int = 0
    delay: Micros = 0


@dataclass(frozen=True, slots=True)
class Again:
    """Try again after that long; `why` goes into the chain of verdicts."""

    wait: Micros
    why: str


def decide(  # noqa: PLR0913 - one decision, every fact of it named
    *,
    kind: Kind,
    retry_after: Micros | None,
    rules: BackoffRules,
    tried: Attempts,
    remaining: Micros,
    other_key: bool,
    rng: Rng,
) -> Again | str:
    """Whether to try again, and when; a string says why not.

    Args:
        kind: What the failed attempt means.
        retry_after: The provider's word, or None.
        rules: Of the policy in force.
        tried: So far; the caller counts up.
        remaining: Micros until the call's deadline.
        other_key: Whether a healthy credential other than the refused one exists.
        rng: Draws the jitter.
    """
    if rules.mode is not Mode.ENFORCE:
        return "retry is off"
    if kind in OTHER_KEY:
        return Again(0, "other credential") if other_key else f"{kind.value} is never retried"
    if kind in REQUEUED:
        if other_key:
            return Again(0, "other credential")
        if tried.requeues >= rules.requeues:
            return f"{rules.requeues} requeues used"
        if retry_after is not None and retry_after > min(remaining, rules.max_retry_after):
            return "the stated reset lies beyond the deadline"
        return Again(0, "requeue")
    if kind not in BACKED_OFF:
        return f"{kind.value} is never retried"
    if tried.backoffs + 1 >= rules.attempts:
        return f"{rules.attempts} attempts used"
    if retry_after is not None and retry_after > rules.max_retry_after:
        return "the stated wait is longer than policy waits"
    delay = next_delay(rules, previous=tried.delay, attempt=tried.backoffs + 1, rng=rng)
    wait = wait_for(rules, delay=delay, retry_after=retry_after, rng=rng)
    if wait > remaining:
        return "the wait lies beyond the deadline"
    tried.delay = delay
    return Again(wait, "backoff")


def repeatable(error: UpstreamFault) -> bool:
    """Whether an attempt that ended in this exception may be made again.

    Only where provably nothing reached the upstream: a POST that left is never silently replayed.
    """
    return isinstance(error, REPEATABLE) and error.code in ("connect_failed", "connect_timeout")


def retry(*, clock: Clock, rng: Rng, budget: RetryBudget, spares: Spares) -> Layer:
    """The layer."""

    def layer(inner: Service) -> Service:
        async def serve(call: Call) -> Reply:
            tried = Attempts()
            while True:
                reply: Reply | None = None
                fault: UpstreamFault | None = None
                try:
                    reply = await inner(call)
                except UpstreamFault as error:
                    if not repeatable(error):
                        raise
                    fault = error
                kind = reply.kind if reply is not None else Kind.FAULT
                if kind is None:
                    budget.succeeded()
                    assert reply is not None  # noqa: S101 - kind is None only with a reply
                    return reply
                ruling = decide(
                    kind=kind,
                    retry_after=reply.retry_after if reply is not None else None,
                    rules=call.snapshot.backoff,
                    tried=tried,
                    remaining=call.deadline - clock.now(),
                    other_key=kind is not Kind.CALLER and spares.other_credential(call),
                    rng=rng,
                )
                if isinstance(ruling, Again) and not budget.take(now=clock.now()):
                    ruling = "retry budget spent"
                now = clock.now()
                if isinstance(ruling, str):
                    call.notes.append(
                        VerdictNote("retry", "give_up", call.snapshot.backoff.because, now, ruling)
                    )
                    if fault is not None:
                        raise fault
                    assert reply is not None  # noqa: S101 - either a reply or a fault
                    return reply
                if ruling.why == "backoff":
                    tried.backoffs += 1
                elif ruling.why == "requeue":
                    tried.requeues += 1
                else:
                    tried.keys += 1
                call.notes.append(
                    VerdictNote("retry", ruling.why, call.snapshot.backoff.because, now, kind.value)
                )
                if reply is not None:
                    await reply.close(End.FAILED)
                if ruling.wait:
                    await clock.sleep(ruling.wait / MICRO)
                call.attempt += 1

        return serve

    return layer
