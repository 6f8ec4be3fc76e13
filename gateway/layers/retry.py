"""Attempts, Retry-After, jitter, budget (`admission.md` §12).

Outside admit, because every attempt spends quota and sleeping must hold no permit. Quota and ramp
refusals never sleep here: they re-enter their pool with their original place, and the pool waits.
It never retries an open breaker, a caller's fault, spent money, and nothing once the answer has
begun.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from gateway.call import Call, End, Kind, Reply, Service, VerdictNote
from gateway.errors import UpstreamFault, UpstreamTimeout, UpstreamUnreachable
from gateway.resilience.attempts import BACKED_OFF, REQUEUED, Again, Attempts, decide
from gateway.resilience.backoff import next_delay
from gateway.resilience.budget import RetryBudget
from gateway.units import MICRO, Rng

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.clock import Clock

MOST_PURSES = 10_000
"""Principals whose own budget is remembered."""
REPEATABLE = (UpstreamTimeout, UpstreamUnreachable)


class Spares(Protocol):
    """Whether another credential could serve this deployment now; `Credentials` implements it."""

    def other_credential(self, call: Call) -> bool:
        """True if the next attempt would use a healthy credential other than the last one."""
        ...


def may_repeat(call: Call, outcome: Reply | UpstreamFault) -> bool:
    """Whether a tool may run again after this outcome: only where it is declared harmless to.

    A refusal for quota ran nothing, and an exception that came this far was never sent.
    """
    if call.tool is None or call.tool.repeatable or isinstance(outcome, UpstreamFault):
        return True
    return outcome.kind not in BACKED_OFF


def repeatable(error: UpstreamFault) -> bool:
    """Whether an attempt that ended in this exception may be made again.

    Only where provably nothing reached the upstream: a POST that left is never silently replayed.
    """
    return isinstance(error, REPEATABLE) and error.code in ("connect_failed", "connect_timeout")


class Retrying:
    """The layer.

    Attributes:
        on_retry: Called with the reason of every further attempt, for metrics.
    """

    __slots__ = ("_budget", "_clock", "_own", "_rng", "_spares", "on_retry")

    def __init__(
        self,
        *,
        clock: Clock,
        rng: Rng,
        budget: RetryBudget,
        spares: Spares,
        on_retry: Callable[[str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._budget = budget
        self._spares = spares
        self._own: OrderedDict[str, RetryBudget] = OrderedDict()
        self.on_retry = on_retry

    def __call__(self, inner: Service) -> Service:
        """The service with its further attempts."""

        async def serve(call: Call) -> Reply:
            tried: Attempts | None = None
            while True:
                outcome: Reply | UpstreamFault
                try:
                    outcome = await inner(call)
                except UpstreamFault as error:
                    if not repeatable(error):
                        raise
                    outcome = error
                else:
                    if outcome.kind is None:
                        self._purse(call).succeeded()
                        return outcome
                tried = tried or Attempts()
                ruling = self._rule(call, outcome, tried)
                if isinstance(ruling, str):
                    return await self._end(call, outcome)
                await self._again(call, outcome, ruling)

        return serve

    def _rule(self, call: Call, outcome: Reply | UpstreamFault, tried: Attempts) -> Again | str:
        now = self._clock.now()
        rules = call.snapshot.backoff
        reply = outcome if isinstance(outcome, Reply) else None
        kind = Kind.FAULT if reply is None or reply.kind is None else reply.kind
        if not may_repeat(call, outcome):
            note = VerdictNote("retry", "give_up", rules.because, now, "not declared repeatable")
            call.notes.append(note)
            return note.detail
        ruling = decide(
            kind=kind,
            retry_after=reply.retry_after if reply is not None else None,
            rules=rules,
            tried=tried,
            remaining=call.deadline - now,
            other_key=kind is not Kind.CALLER and self._spares.other_credential(call),
            rng=self._rng,
        )
        if isinstance(ruling, Again) and not self._purse(call).take(now=now):
            ruling = "the retry budget is spent"
        if isinstance(ruling, str):
            call.notes.append(VerdictNote("retry", "give_up", rules.because, now, ruling))
            return ruling
        tried.count(ruling)
        if kind in REQUEUED and reply is not None and reply.retry_after is None:
            # Without the provider's word the pool pauses for a jittered delay of ours.
            reply.retry_after = next_delay(rules, previous=0, attempt=1, rng=self._rng)
        note = VerdictNote("retry", ruling.why, rules.because, now, f"attempt after {kind.value}")
        call.notes.append(note)
        return ruling

    def _purse(self, call: Call) -> RetryBudget:
        """Whose budget pays for a further attempt.

        The deployment's: a sick upstream must not spend what a healthy one earned. Where an SDK
        repeats a call, the principal's own: its attempts and ours multiply, and a caller that
        repeats much must not spend everybody's.
        """
        repeat = None
        for key, value in call.said:
            if key == b"x-stainless-retry-count":
                repeat = value
                break
        if call.principal is not None and repeat is not None and repeat != b"0":
            name = f"principal {call.principal.id}"
        elif call.deployment is not None:
            name = call.deployment.id
        else:
            return self._budget
        own = self._own.get(name)
        if own is None:
            now = self._clock.now()
            own = self._own[name] = RetryBudget(call.snapshot.backoff, now=now)
            if len(self._own) > MOST_PURSES:
                self._own.popitem(last=False)
        else:
            self._own.move_to_end(name)
            own.replace_rules(call.snapshot.backoff)
        return own

    async def _end(self, call: Call, outcome: Reply | UpstreamFault) -> Reply:
        if isinstance(outcome, Reply) and ours_to_mend(call, outcome):
            await outcome.close(End.FAILED)
            provider = call.deployment.provider.name if call.deployment is not None else "upstream"
            text = f"{provider} refuses the gateway's own credential; its operator must act."
            raise UpstreamUnreachable(text, code="upstream_unauthorized")
        return give_up(outcome)

    async def _again(self, call: Call, outcome: Reply | UpstreamFault, ruling: Again) -> None:
        if self.on_retry is not None:
            self.on_retry(ruling.why)
        if isinstance(outcome, Reply):
            wait = outcome.retry_after
            await outcome.close(End.FAILED)
            pools = call.deployment.pools if call.deployment is not None else ()
            if ruling.why == "requeue" and not pools and wait:
                await self._clock.sleep(wait / MICRO)  # no pool could make it wait
        if ruling.wait:
            await self._clock.sleep(ruling.wait / MICRO)
        call.attempt += 1


def give_up(outcome: Reply | UpstreamFault) -> Reply:
    """The last outcome: a refusal goes on to downgrade or the client, a fault is raised."""
    if isinstance(outcome, UpstreamFault):
        raise outcome
    return outcome


def ours_to_mend(call: Call, reply: Reply) -> bool:
    """Whether the upstream refused *our* credential: no fault of the caller, whose own was fine."""
    return reply.kind is Kind.AUTH and reply.status == 401 and call.credential != ""
