"""Circuit breaker of the rung now tried (`admission.md` §13); it is what publishes holds later.

Outside admit: nobody queues for an open breaker. With a rung left the call goes there at once;
without one it waits here, holding nothing, until the breaker lets somebody through or its deadline
comes. A
breaker that opened for quota is not sick: without another rung its callers keep waiting in the
pool.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from gateway.call import Call, End, Kind, Reply, Service, VerdictNote
from gateway.errors import BreakerOpen, UpstreamFault
from gateway.resilience.breaker import Allow, Breaker, State, Trip
from gateway.units import MICRO, Micros, Mode, Rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.clock import Clock
    from gateway.resilience.breaker import BreakerRules

MAX_BREAKERS = 10_000
"""Scopes remembered; the least recently used closed one is forgotten first."""
SICK = frozenset({Kind.FAULT, Kind.CAPACITY})
SPENT = frozenset({Kind.PERIOD, Kind.MONEY})


class Breakers:
    """The breakers of this process by scope, with those who wait for them.

    Attributes:
        on_change: Called with scope and breaker after every change of state, for metrics and log.
        on_failure: Called with the scope of every failure counted, for metrics.
    """

    __slots__ = ("_by_scope", "_waiting", "on_change", "on_failure")

    def __init__(
        self,
        on_change: Callable[[str, Breaker], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._by_scope: OrderedDict[str, Breaker] = OrderedDict()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self.on_change = on_change
        self.on_failure = on_failure

    def of(self, scope: str, rules: BreakerRules) -> Breaker:
        """The breaker of this scope, made when first asked for."""
        breaker = self._by_scope.get(scope)
        if breaker is None:
            breaker = self._by_scope[scope] = Breaker(rules)
            if len(self._by_scope) > MAX_BREAKERS:
                self._forget()
        else:
            breaker.replace_rules(rules)
        return breaker

    def _forget(self) -> None:
        for scope, breaker in self._by_scope.items():
            if breaker.state is State.CLOSED and scope not in self._waiting:
                del self._by_scope[scope]
                return

    def __iter__(self) -> Iterator[tuple[str, Breaker]]:
        """Scopes and breakers, for status."""
        return iter(self._by_scope.items())

    def changed(self, scope: str) -> None:
        """Tell the observer and wake whoever waits for this scope."""
        breaker = self._by_scope.get(scope)
        if breaker is not None and self.on_change is not None:
            self.on_change(scope, breaker)
        self.wake(scope)

    def wake(self, scope: str) -> None:
        """Whoever waits for this scope asks again."""
        for future in self._waiting.pop(scope, ()):
            if not future.done():
                future.set_result(None)

    async def wait(self, scope: str, *, until: Micros, clock: Clock) -> None:
        """Return at a change of this breaker, or at that instant."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(scope, []).append(future)

        def due() -> None:
            if not future.done():
                future.set_result(None)

        timer = clock.after(until - clock.now(), due)
        try:
            await future
        finally:
            timer.cancel()
            waiting = self._waiting.get(scope)
            if waiting is not None and future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._waiting[scope]


def refusal(trip: Trip, scope: str, *, now: Micros) -> BreakerOpen:
    """The soft refusal of a call whose deadline comes before the breaker closes."""
    wait = trip.until - now
    hard = not trip.sick and wait > 60 * MICRO
    seconds = max(1, wait // MICRO)
    text = (
        f"{scope} is unavailable ({trip.reason}); "
        + (f"it is expected back in {seconds} s" if wait < 1 << 60 else "an operator must act")
        + f". Rule {trip.because}."
    )
    return BreakerOpen(text, because=trip.because, retry_after=None if hard else max(MICRO, wait))


class _Verdict:
    """What one attempt tells the breaker, exactly once."""

    __slots__ = ("breaker", "breakers", "clock", "probe", "rng", "scope", "told")

    def __init__(
        self, breakers: Breakers, breaker: Breaker, scope: str, *, probe: int, clock: Clock,
        rng: Rng,
    ) -> None:  # fmt: skip
        self.breakers = breakers
        self.breaker = breaker
        self.scope = scope
        self.probe = probe
        self.clock = clock
        self.rng = rng
        self.told = False

    def _tell(self, before: int, changed: bool) -> None:  # noqa: FBT001 - private
        if changed or self.breaker.version != before:
            self.breakers.changed(self.scope)
        elif self.probe:
            self.breakers.wake(self.scope)

    def failed(self, reason: str, hint: Micros | None = None) -> None:
        """The attempt failed by the upstream's fault."""
        if self.told:
            return
        self.told = True
        if self.breakers.on_failure is not None:
            self.breakers.on_failure(self.scope)
        before = self.breaker.version
        changed = self.breaker.failed(
            now=self.clock.now(), rng=self.rng, reason=reason, hint=hint, probe=self.probe
        )
        self._tell(before, changed)

    def answered(self, reply: Reply) -> None:
        """A head arrived: bad answers are judged now, good ones when they end."""
        kind = reply.kind
        now = self.clock.now()
        if kind is None:
            self.breaker.started()
        elif kind in SICK:
            self.failed(f"{kind.value} {reply.status} {reply.code}".rstrip(), reply.retry_after)
        elif kind in SPENT:
            self.told = True
            before = self.breaker.version
            self.breaker.aborted(probe=self.probe)
            self._tell(before, changed=False)
        elif kind is Kind.QUOTA:
            self.told = True
            before = self.breaker.version
            changed = self.breaker.refused_for_quota(
                key=reply.code or str(reply.status),
                blocked_until=now + min(reply.retry_after or MICRO, 300 * MICRO),
                probe=self.probe,
            )
            self._tell(before, changed)
        else:
            self.nothing()

    def nothing(self) -> None:
        """No verdict: the client left, or it was the caller's fault."""
        if self.told:
            return
        self.told = True
        if self.probe:
            self.breaker.aborted(probe=self.probe)
            self.breakers.wake(self.scope)

    def ended(self, end: End, reply: Reply) -> None:
        """The body of a good answer is over; an error inside it has given it a kind."""
        if self.told:
            return
        if reply.kind is not None:
            self.answered(reply)
        elif end is End.COMPLETE or reply.terminal:
            self.told = True
            before = self.breaker.version
            changed = self.breaker.succeeded(now=self.clock.now(), probe=self.probe)
            self._tell(before, changed)
        elif end in (End.CUT, End.STALLED, End.FAILED):
            self.failed(end.value)
        else:
            self.nothing()


class Tripping:
    """The layer."""

    __slots__ = ("_breakers", "_clock", "_rng")

    def __init__(self, *, breakers: Breakers, clock: Clock, rng: Rng) -> None:
        self._breakers = breakers
        self._clock = clock
        self._rng = rng

    def __call__(self, inner: Service) -> Service:
        """The service behind its breakers."""

        async def serve(call: Call) -> Reply:
            deployment = call.deployment
            rules = call.snapshot.breaker
            if deployment is None or rules.mode is Mode.OFF:
                return await inner(call)
            breaker = self._breakers.of(deployment.id, rules)
            probe = 0
            if breaker.state is not State.CLOSED:
                probe = await self._permission(call, breaker, deployment.id)
            return await self._watched(inner, call, breaker, probe)

        return serve

    async def _watched(self, inner: Service, call: Call, breaker: Breaker, probe: int) -> Reply:
        assert call.deployment is not None  # noqa: S101 - checked by the caller
        verdict = _Verdict(
            self._breakers, breaker, call.deployment.id, probe=probe, clock=self._clock,
            rng=self._rng,
        )  # fmt: skip
        try:
            reply = await inner(call)
        except UpstreamFault as error:
            verdict.failed(error.code)
            raise
        except BaseException:
            verdict.nothing()  # refused by admission, client gone: says nothing of the upstream
            raise
        verdict.answered(reply)
        reply.on_close(lambda end: verdict.ended(end, reply))
        return reply

    async def _permission(self, call: Call, breaker: Breaker, scope: str) -> int:
        """The number of the probe this call is, 0 for an ordinary call."""
        mode = call.snapshot.breaker.mode
        while True:
            now = self._clock.now()
            ruling = breaker.peek(now=now) if mode is Mode.SHADOW else breaker.ask(now=now)
            if isinstance(ruling, Allow):
                return ruling.probe
            if mode is Mode.SHADOW:
                call.notes.append(VerdictNote("trip", "shadow", ruling.because, now, ruling.reason))
                return 0
            if not ruling.sick and not call.rungs_left and breaker.state is State.OPEN:
                return 0  # the pool holds the quota's queue; this breaker only starts ladders
            if call.rungs_left or ruling.until >= call.deadline:
                call.notes.append(VerdictNote("trip", "open", ruling.because, now, ruling.reason))
                raise refusal(ruling, scope, now=now)
            until = min(ruling.until, call.deadline)
            await self._breakers.wait(scope, until=until, clock=self._clock)
