"""Circuit breaker of the rung now tried (`admission.md` §13). Calls to be held leave it at once.

Outside admit: nobody queues for an open breaker. With a rung left the call goes there at once;
without one it waits here, holding nothing, until the breaker lets somebody through or its deadline
comes. Whoever already stands in a pool when the breaker opens is taken out of it, or a queue of
minutes would be sent to a sick upstream call by call. A breaker that opened for quota is not sick:
without another rung its callers keep waiting in the pool.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from gateway.call import BROKEN, COMPLETE, Call, End, Kind, Reply, Service, VerdictNote
from gateway.errors import BreakerOpen, UpstreamFault
from gateway.resilience.breaker import MOST_UNDECIDED, Allow, Breaker, State, Trip, spent_for
from gateway.resilience.probes import LOOK, Elsewhere, OwnProbes
from gateway.units import MICRO, Micros, Mode, Rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.clock import Clock
    from gateway.resilience.breaker import BreakerRules
    from gateway.resilience.probes import Lease, Probes

MAX_BREAKERS = 10_000
"""Scopes remembered; the least recently used closed one is forgotten first."""
OFF, CLOSED = Mode.OFF, State.CLOSED
SICK = frozenset({Kind.FAULT, Kind.CAPACITY})
SPENT = frozenset({Kind.PERIOD, Kind.MONEY})
WELL: Micros = 30 * MICRO
"""A breaker closed for so long is trusted again by conversations that left its deployment."""


class Breakers:
    """The breakers of this process by scope, with those who wait for them.

    Attributes:
        on_change: Called with scope and breaker after every change of state, for metrics and log.
        on_failure: Called with scope and breaker of every failure counted, for metrics and fleet.
        probes: Where a probe asks for its place; the fleet's, where there is one.
    """

    __slots__ = ("_by_scope", "_inside", "_waiting", "on_change", "on_failure", "probes")

    def __init__(
        self,
        on_change: Callable[[str, Breaker], None] | None = None,
        on_failure: Callable[[str, Breaker], None] | None = None,
    ) -> None:
        self._by_scope: OrderedDict[str, Breaker] = OrderedDict()
        self._waiting: dict[str, dict[asyncio.Future[None], int]] = {}
        self._inside: dict[str, dict[_Attempt, None]] = {}
        self.on_change = on_change
        self.on_failure = on_failure
        self.probes: Probes = OwnProbes()

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
            busy = scope in self._waiting or scope in self._inside
            if breaker.state is State.CLOSED and not busy:
                del self._by_scope[scope]
                return

    def __iter__(self) -> Iterator[tuple[str, Breaker]]:
        """Scopes and breakers, for status."""
        return iter(self._by_scope.items())

    def well(self, scope: str, now: Micros) -> bool:
        """Whether this deployment's breaker is closed, and has been for a while."""
        breaker = self._by_scope.get(scope)
        if breaker is None:
            return True
        return breaker.state is State.CLOSED and now - breaker.closed_at >= WELL

    def renew(self) -> None:
        """A new policy may bring another credential: who is shut gets a fresh chance."""
        for scope, breaker in list(self._by_scope.items()):
            if breaker.state is State.SHUT:
                breaker.told(State.HALF_OPEN, until=0, reason=breaker.reason)
                self.changed(scope)

    def changed(self, scope: str) -> None:
        """Tell the observer, take waiters out of pools where it is sick, wake who waits for it."""
        breaker = self._by_scope.get(scope)
        if breaker is not None:
            if self.on_change is not None:
                self.on_change(scope, breaker)
            if breaker.state is State.SHUT or (breaker.state is State.OPEN and breaker.sick):
                for inside in list(self._inside.get(scope, ())):
                    inside.evict()
        self.wake(scope)

    def vacated(self, scope: str) -> None:
        """The place of the fleet's probe is free: whoever waited for that asks again."""
        breaker = self._by_scope.get(scope)
        if breaker is not None and breaker.vacated():
            self.wake(scope)

    def wake(self, scope: str) -> None:
        """Whoever waits for this scope asks again, the most urgent first."""
        waiting = self._waiting.pop(scope, None)
        if waiting:
            for future in sorted(waiting, key=waiting.__getitem__):  # stable: then as they came
                if not future.done():
                    future.set_result(None)

    async def wait(self, scope: str, lane: int, *, until: Micros, clock: Clock) -> None:
        """Return at a change of this breaker, or at that instant."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(scope, {})[future] = lane

        def due() -> None:
            if not future.done():
                future.set_result(None)

        timer = clock.after(until - clock.now(), due)
        try:
            await future
        finally:
            timer.cancel()
            waiting = self._waiting.get(scope)
            if waiting is not None and waiting.pop(future, None) is not None and not waiting:
                del self._waiting[scope]

    def enter(self, scope: str, inside: _Attempt) -> None:
        """The attempt goes inside; it must `leave`."""
        found = self._inside.get(scope)
        if found is None:
            found = self._inside[scope] = {}
        found[inside] = None

    def under_way(self, scope: str) -> int:
        """Calls inside: let in, and without a head."""
        return len(self._inside.get(scope, ()))

    def undecided(self, scope: str) -> int:
        """Attempts of this scope that were sent and have no head yet, as far as they matter."""
        count = 0
        for inside in self._inside.get(scope, ()):
            count += inside.sent
            if count >= MOST_UNDECIDED:
                break
        return count

    def leave(self, scope: str, inside: _Attempt) -> None:
        """The call is inside no more: it has a head, or never will."""
        found = self._inside.get(scope)
        if found is not None and found.pop(inside, inside) is None and not found:
            del self._inside[scope]


class _Attempt:
    """One attempt behind a breaker: while it waits it can be taken out; it tells once how it ended.

    Attributes:
        lease: Of the probe that it is; None: it is an ordinary one.
        reply: What it was answered with.
    """

    __slots__ = (
        "_call", "_task", "breaker", "breakers", "clock", "evicted", "lease", "reply", "rng",
        "scope", "told",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913, PLR0917 - in order: where, who, and what it tells with
        self, breakers: Breakers, breaker: Breaker, scope: str, call: Call, lease: Lease | None,
        clock: Clock, rng: Rng,
    ) -> None:  # fmt: skip
        self.breakers = breakers
        self.breaker = breaker
        self.scope = scope
        self.lease = lease
        self.clock = clock
        self.rng = rng
        self.told = False
        self.evicted = False
        self.reply: Reply | None = None
        self._call = call
        self._task = call.task or asyncio.current_task()

    @property
    def sent(self) -> bool:
        """The upstream has it."""
        return self._call.sent

    def evict(self) -> None:
        """A call of which nothing was sent stops waiting; its permits go back."""
        if not self._call.sent and not self.evicted and self._task is not None:
            self.evicted = True
            self._task.cancel()

    def absorbs(self) -> bool:
        """Whether the cancellation that arrived is ours alone: not a client leaving as well."""
        return self.evicted and self._task is not None and self._task.uncancel() == 0

    @property
    def _probe(self) -> int:
        """The number of the probe that it is, 0 for an ordinary one."""
        return 0 if self.lease is None else self.lease.probe

    def _tell(self, before: int, changed: bool) -> None:  # noqa: FBT001 - private
        """The breaker has heard the verdict: so do those who wait for it, here and elsewhere."""
        if self.lease is not None:
            self.lease.free(self.breaker.handed_on(now=self.clock.now()))
        if changed or self.breaker.version != before:
            self.breakers.changed(self.scope)
        elif self.lease is not None or self.breaker.easing:
            self.breakers.wake(self.scope)

    def failed(self, reason: str, hint: Micros | None = None) -> None:
        """The attempt failed by the upstream's fault."""
        if self.told:
            return
        self.told = True
        if self.breakers.on_failure is not None:
            self.breakers.on_failure(self.scope, self.breaker)
        before = self.breaker.version
        changed = self.breaker.failed(
            now=self.clock.now(), rng=self.rng, reason=reason, hint=hint, probe=self._probe,
            undecided=self.breakers.undecided(self.scope),
        )  # fmt: skip
        self._tell(before, changed)

    def answered(self, reply: Reply) -> None:
        """A head arrived: bad answers are judged now, good ones when they end."""
        self.reply = reply
        kind = reply.kind
        now = self.clock.now()
        if kind is None:
            self.breaker.started(now=now)
            if self.breaker.easing:
                self.breakers.wake(self.scope)
        elif kind in SICK:
            self.failed(f"{kind.value} {reply.status} {reply.code}".rstrip(), reply.retry_after)
        elif kind in SPENT:
            self.told = True
            before = self.breaker.version
            self.breaker.aborted(probe=self._probe)
            if not reply.spares_pool:  # no other credential is left to serve
                stated = reply.retry_after
                reason = f"{kind.value} {reply.code}".rstrip()
                self.breaker.shut(until=now + spent_for(stated), reason=reason)
            self._tell(before, changed=False)
        elif kind is Kind.QUOTA:
            self.told = True
            before = self.breaker.version
            changed = self.breaker.refused_for_quota(
                key=reply.code or str(reply.status),
                blocked_until=now + min(reply.retry_after or MICRO, 300 * MICRO),
                probe=self._probe,
            )
            self._tell(before, changed)
        else:
            self.nothing()

    def nothing(self) -> None:
        """No verdict: the client left, or it was the caller's fault."""
        if self.told:
            return
        self.told = True
        self.breaker.aborted(probe=self._probe)
        self._tell(self.breaker.version, changed=False)

    def ended(self, end: End) -> None:
        """The body of a good answer is over; an error inside it has given it a kind."""
        reply = self.reply
        if self.told or reply is None:
            return
        if reply.kind is not None:
            self.answered(reply)
        elif end is COMPLETE or reply.terminal:
            self.told = True
            if self.lease is None:
                self.breaker.ended()
                if self.breaker.easing:
                    self.breakers.wake(self.scope)
                return
            before = self.breaker.version
            changed = self.breaker.probed(now=self.clock.now(), probe=self._probe)
            self._tell(before, changed)
        elif end in BROKEN:
            self.failed(end.value)
        else:
            self.nothing()


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


class Tripping:
    """The layer."""

    __slots__ = ("_breakers", "_clock", "_leaves", "_rng")

    def __init__(
        self,
        *,
        breakers: Breakers,
        clock: Clock,
        rng: Rng,
        leaves: Callable[[Call], bool] | None = None,
    ) -> None:
        """`leaves` says whose calls rather leave, to be held, than wait for an open breaker."""
        self._breakers = breakers
        self._clock = clock
        self._rng = rng
        self._leaves = leaves

    def __call__(self, inner: Service) -> Service:
        """The service behind its breakers."""

        async def serve(call: Call) -> Reply:
            deployment = call.deployment
            rules = call.snapshot.breaker
            if deployment is None or rules.mode is OFF:
                return await inner(call)
            breaker = self._breakers.of(deployment.id, rules)
            while True:
                lease = None
                if breaker.state is not CLOSED or breaker.easing:
                    lease = await self._permission(call, breaker, deployment.id)
                reply = await self._watched(inner, call, breaker, lease)
                if reply is not None:
                    return reply
                now = self._clock.now()
                call.notes.append(
                    VerdictNote("trip", "evicted", rules.because, now, breaker.reason)
                )

        return serve

    async def _watched(
        self, inner: Service, call: Call, breaker: Breaker, lease: Lease | None
    ) -> Reply | None:
        """The reply; None where the breaker opened while the call had not been sent."""
        assert call.deployment is not None  # noqa: S101 - checked by the caller
        scope = call.deployment.id
        breakers = self._breakers
        tried = _Attempt(breakers, breaker, scope, call, lease, self._clock, self._rng)
        call.sent = False  # an attempt before this one may have been
        breakers.enter(scope, tried)
        try:
            try:
                reply = await inner(call)
            finally:
                # Before any verdict: a call whose own failure opens the breaker must not be told
                # to leave a pool that it is no longer in.
                breakers.leave(scope, tried)
        except UpstreamFault as error:
            breakers.leave(scope, tried)  # decided
            if isinstance(error, BreakerOpen):
                tried.nothing()  # no credential was left to ask with
            else:
                tried.failed(error.code)
            raise
        except asyncio.CancelledError:
            tried.nothing()
            if tried.absorbs():
                return None
            raise
        except BaseException:
            tried.nothing()  # refused by admission: says nothing of the upstream
            raise
        tried.answered(reply)
        reply.on_close(tried.ended)
        return reply

    async def _permission(self, call: Call, breaker: Breaker, scope: str) -> Lease | None:
        """The lease of the probe that this call is, None for an ordinary call."""
        mode = call.snapshot.breaker.mode
        while True:
            now = self._clock.now()
            version = breaker.version
            ruling = breaker.peek(now=now) if mode is Mode.SHADOW else breaker.ask(now=now)
            if breaker.version != version:
                self._breakers.changed(scope)
            if isinstance(ruling, Allow):
                if ruling.probe:
                    lease = await self._lease(call, breaker, scope, ruling.probe)
                    if lease is not None:
                        return lease
                    continue
                crowded = breaker.crowded(self._breakers.under_way(scope), now=now)
                if crowded is None or mode is Mode.SHADOW:
                    return None
                ruling = crowded
            if mode is Mode.SHADOW:
                call.notes.append(VerdictNote("trip", "shadow", ruling.because, now, ruling.reason))
                return None
            if not ruling.sick and not call.rungs_left and breaker.state is State.OPEN:
                return None  # the pool holds the quota's queue; this breaker only starts ladders
            if self._gives_up(call, breaker, ruling, now):
                call.notes.append(VerdictNote("trip", "open", ruling.because, now, ruling.reason))
                raise refusal(ruling, scope, now=now)
            lane = call.tier.number if call.tier is not None else 0
            until = min(ruling.until, call.deadline)
            await self._breakers.wait(scope, lane, until=until, clock=self._clock)

    async def _lease(self, call: Call, breaker: Breaker, scope: str, probe: int) -> Lease | None:
        """The lease of that probe; None where it does not go: the breaker says why if asked."""
        breakers, clock, lasts = self._breakers, self._clock, call.snapshot.breaker.probe_lease
        lease = breakers.probes.ask(scope, probe, lasts)
        breaker.kept(probe, until=clock.now() + LOOK)  # who waits for the answer looks again then
        try:
            answer = await lease.answered()
        except BaseException:
            lease.free(None)
            breaker.aborted(probe=probe)
            breakers.wake(scope)
            raise
        now = clock.now()
        if isinstance(answer, Elsewhere):
            lease.free(None)
            breaker.yielded(probe, until=now + answer.left)
            return None
        if not breaker.kept(probe, until=now + lasts, good=answer.good):
            lease.free(None)  # it was opened, shut or closed meanwhile
            return None
        return lease

    def _gives_up(self, call: Call, breaker: Breaker, ruling: Trip, now: Micros) -> bool:
        """Whether the call leaves for another rung, a hold or its caller instead of waiting."""
        if call.rungs_left or now >= call.deadline:
            return True
        if breaker.state is State.CLOSED:
            return False  # it is being let in slowly: nothing to be held for
        if self._leaves is not None and self._leaves(call):
            return True
        # The stated end lies beyond the deadline. A probe under way may end any moment.
        return breaker.state is not State.HALF_OPEN and ruling.until >= call.deadline
