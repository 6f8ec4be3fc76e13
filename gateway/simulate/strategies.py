"""What agents and gateways do without Tidegate: the strategies it is compared with.

    exponential       the client alone: 2, 4, 8 … s, at most a minute, no jitter
    full_jitter       the same, drawn between nothing and that
    decorrelated      between a second and three times the delay before
    retry_after       as told, plus a little jitter: what SDKs do
    post_hoc_counter  a shared counter per minute, looked at before a call, raised after it; full:
                      refused, and the client backs off
    static_85         each gateway alone has its share of 85 % of the quota and lets calls wait

All give up after eight attempts. They see answers only, as clients do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from gateway.admission.core import Admit, Ask, Outcome, Settle
from gateway.admission.estimate import Learned
from gateway.admission.profiles import Accounting, Estimate, Shape, pool_spec, reserve, settle
from gateway.resilience.backoff import BackoffRules, next_delay
from gateway.simulate.link import Near
from gateway.simulate.workload import stream
from gateway.units import MICRO, MINUTE, Micros

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.admission.core import PoolSpec, Verdict
    from gateway.resilience.attempts import Kind
    from gateway.simulate.scopes import Target
    from gateway.simulate.workload import Op
    from gateway.simulate.world import World

ATTEMPTS = 8
"""After so many a client gives up."""

LONGEST: Micros = 60 * MICRO
RULES = BackoffRules(base=MICRO, cap=LONGEST)
FULL = BackoffRules(kind="full", base=MICRO, cap=LONGEST)
SPARED = 85
"""Percent of the quota that operators dare to use who count each gateway alone."""

PATIENT: Micros = 3_600 * MICRO


class Naive:
    """Sends at once; a refused attempt is made again after a delay."""

    name: ClassVar[str]

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = stream(world.scenario.seed, "client")
        self._waiting = [0, 0, 0]

    def submit(self, op: Op) -> None:
        """Sends at once."""
        self._send(op)

    def _send(self, op: Op) -> None:
        if not op.over:
            self._world.send(op, self._target(op))

    def _target(self, op: Op) -> Target:
        return self._world.first_target(op.model)

    def head(self, op: Op) -> None:
        """Nothing to learn."""

    def turned_away(self, op: Op, kind: Kind, retry_after: Micros | None, code: str) -> None:
        """Again after a delay, as often as clients try."""
        self._later(op, retry_after, because=f"provider: {kind.value}", code=code, step=self._send)

    def _later(
        self, op: Op, retry_after: Micros | None, *, because: str, code: str,
        step: Callable[[Op], None],
    ) -> None:  # fmt: skip
        op.attempt += 1
        if op.attempt > ATTEMPTS:
            self._world.refused(op, because=because, code=code)
            return
        self._waiting[op.tier - 1] += 1
        self._world.engine.after(self._delay(op, retry_after), self._due, (op, step))

    def _due(self, told: tuple[Op, Callable[[Op], None]]) -> None:
        op, step = told
        self._waiting[op.tier - 1] -= 1
        if not op.over:
            step(op)

    def _delay(self, op: Op, retry_after: Micros | None) -> Micros:
        """After the attempt before `op.attempt` failed."""
        raise NotImplementedError

    def finished(self, op: Op, *, complete: bool) -> None:
        """The agent goes on."""
        del complete
        self._world.ended(op)

    def withdrawn(self, op: Op) -> None:
        """Nothing is kept for it."""

    def waiting(self) -> tuple[int, int, int]:
        """Calls between two attempts."""
        one, two, three = self._waiting
        return one, two, three

    def close(self) -> None:
        """Nothing to say."""


class Exponential(Naive):
    """Doubling, without jitter."""

    name = "exponential"

    def _delay(self, op: Op, retry_after: Micros | None) -> Micros:
        del retry_after
        return min(LONGEST, MICRO << (op.attempt - 1))


class FullJitter(Naive):
    """Doubling, anywhere below."""

    name = "full_jitter"

    def _delay(self, op: Op, retry_after: Micros | None) -> Micros:
        del retry_after
        return next_delay(FULL, previous=0, attempt=op.attempt - 1, rng=self._rng)


class Decorrelated(Naive):
    """Up to three times the delay before."""

    name = "decorrelated"

    def _delay(self, op: Op, retry_after: Micros | None) -> Micros:
        del retry_after
        before = op.mine if isinstance(op.mine, int) else 0
        delay = next_delay(RULES, previous=before, attempt=op.attempt - 1, rng=self._rng)
        op.mine = delay
        return delay


class RetryAfter(Naive):
    """As told, plus jitter."""

    name = "retry_after"

    def _delay(self, op: Op, retry_after: Micros | None) -> Micros:
        jitter = self._rng.uniform(0, min(8 * MICRO, MICRO << (op.attempt - 1)))
        return (retry_after or 0) + int(jitter)


class PostHoc(Decorrelated):
    """A counter that all share, checked before and raised after."""

    name = "post_hoc_counter"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._minute = -1
        self._used: dict[str, tuple[int, int]] = {}

    def submit(self, op: Op) -> None:
        """Sent unless the counter is full."""
        now = self._world.engine.now
        if now // MINUTE != self._minute:
            self._minute = now // MINUTE
            self._used.clear()
        for scope in self._target(op).scopes:
            quota = scope.meter.quota
            tokens, requests = self._used.get(scope.pool, (0, 0))
            most = quota.tokens or quota.input
            if (most and tokens >= most) or (quota.requests and requests >= quota.requests):
                self._later(op, None, because="counter", code="counter_full", step=self.submit)
                return
        self._count(op, 0, 1)
        self._send(op)

    def _count(self, op: Op, tokens: int, requests: int) -> None:
        for scope in self._target(op).scopes:
            before = self._used.get(scope.pool, (0, 0))
            self._used[scope.pool] = (before[0] + tokens, before[1] + requests)

    def finished(self, op: Op, *, complete: bool) -> None:
        """Counted now that it is over."""
        self._count(op, op.input + op.produced, 0)
        super().finished(op, complete=complete)


class Static(RetryAfter):
    """Each gateway its own leaky bucket of a fixed share; calls wait in the order they came."""

    name = "static_85"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._pools: dict[tuple[int, str], tuple[Near, PoolSpec, Accounting]] = {}
        self._learned = Learned()

    def submit(self, op: Op) -> None:
        """Asks the pools of its gateway, one after the other."""
        self._waiting[op.tier - 1] += 1
        op.mine = 0
        self._ask(op)

    def _ask(self, op: Op) -> None:
        scopes = self._target(op).scopes
        while isinstance(op.mine, int) and op.mine < len(scopes):
            near, spec, accounting = self._pool(op.gateway, scopes[op.mine].pool)
            output = self._learned.outputs.predict(op.model, op.agent, cap=op.cap or None)
            estimate = Estimate(input=op.counted, output=output, cap=op.cap or None)
            cost = reserve(accounting, estimate, spec)
            ask = Ask(
                rid=f"c{op.number}", lane=1, tenant="all", weight=1, deadline_in=PATIENT, cost=cost
            )
            verdict = near.acquire(ask, op)
            if verdict is None:
                return
            if not self._granted(op, verdict):
                return
        self._waiting[op.tier - 1] -= 1
        self._send(op)

    def _granted(self, op: Op, verdict: Verdict) -> bool:
        if not isinstance(verdict, Admit):
            self._waiting[op.tier - 1] -= 1
            self._world.refused(op, because="share of 85 %", code="never_fits")
            return False
        assert isinstance(op.mine, int)  # noqa: S101 - `submit` set it
        op.mine += 1
        return True

    def _verdict(self, op: Op, verdict: Verdict) -> None:
        if not op.over and self._granted(op, verdict):
            self._ask(op)

    def _pool(self, gateway: int, name: str) -> tuple[Near, PoolSpec, Accounting]:
        made = self._pools.get((gateway, name))
        if made is None:
            made = self._pools[gateway, name] = self._made(gateway, name)
        return made

    def _made(self, gateway: int, name: str) -> tuple[Near, PoolSpec, Accounting]:
        quota = next(
            scope.meter.quota
            for target in self._world.targets.values()
            for scope in target.scopes
            if scope.pool == name
        )
        share = SPARED / 100 / self._world.scenario.fleet.gateways
        said = {"rpm": quota.requests, "tpm": quota.tokens, "itpm": quota.input}
        limits = {key: max(1, int(limit * share)) for key, limit in said.items() if limit}
        accounting = quota.accounting
        spec = pool_spec(
            name=f"{gateway}:{name}", limits=limits, shape=Shape.OWN, profile=accounting.profile
        )
        return Near(self._world.engine, spec, self._verdict), spec, accounting

    def finished(self, op: Op, *, complete: bool) -> None:
        """What was reserved becomes what was used."""
        self._learned.outputs.learn(op.model, op.agent, op.produced)
        for scope in self._target(op).scopes:
            near, spec, accounting = self._pool(op.gateway, scope.pool)
            held = near.core.leases.held.get(f"c{op.number}")
            if held is not None:
                actual = settle(accounting, op.usage, held.cost, spec, Outcome.SERVED)
                near.settle(Settle(f"c{op.number}", Outcome.SERVED, actual))
        super().finished(op, complete=complete)

    def withdrawn(self, op: Op) -> None:
        """Its place and its share are free."""
        for scope in self._target(op).scopes:
            self._pool(op.gateway, scope.pool)[0].cancel(f"c{op.number}")
