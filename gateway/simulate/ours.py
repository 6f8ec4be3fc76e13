"""Tidegate in the simulator: the production decisions, called in the order of `pipeline.py`.

    identify, estimate      the policy's rule of the agent; `Learned` predicts
    caller's limits         `PoolCore` of agent, tenant and budgets, once per call
    ladder                  `ladder.unfit`; another rung where one gives up
    attempts                `attempts.decide`, `backoff`, `RetryBudget`
    breaker                 `Breaker`, one per gateway and deployment
    provider's pools        `PoolCore`, through `link.py`
    settle                  `profiles.settle`, `Price`, `Learned`

Every rule, figure and transition is the gateway's own code; here is only what the layers do with
coroutines, done with callbacks.

Over 400 lines because it is one state machine: each method is a step from which the others follow.

Weakness: loops, holds and several credentials are not simulated; breakers are each gateway's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.admission.core import Admit, Ask, Late, Never, Outcome, Settle
from gateway.admission.drift import foreign_use
from gateway.admission.places import come_back
from gateway.admission.profiles import Profile, Usage, reserve, settle
from gateway.resilience.attempts import REQUEUED, Attempts, Kind, decide
from gateway.resilience.backoff import next_delay
from gateway.resilience.breaker import Allow, Breaker, State, spent_for
from gateway.resilience.budget import RetryBudget
from gateway.simulate.link import Far, Near, Shared, Watch
from gateway.simulate.scopes import plain, readings
from gateway.simulate.state import FAMILY, Gateway, Held, Mine, Rights, Scope, allowed, spare_rungs
from gateway.simulate.workload import stream
from gateway.units import MICRO, Micros, Mode

if TYPE_CHECKING:
    from gateway.admission.core import PoolSpec, Verdict
    from gateway.simulate.link import Client
    from gateway.simulate.workload import Op
    from gateway.simulate.world import World
    from gateway.snapshot import Snapshot

OUTCOMES = {Kind.QUOTA: Outcome.QUOTA, Kind.RAMP: Outcome.RAMP}
SICK = frozenset({Kind.FAULT, Kind.CAPACITY})
SPENT = frozenset({Kind.PERIOD, Kind.MONEY})
NEXT_RUNG = frozenset(
    {Kind.CAPACITY, Kind.FAULT, Kind.PERIOD, Kind.MONEY, Kind.AUTH, Kind.QUOTA, Kind.RAMP}
)
NOTHING = Usage(input=0, output=0)
"""What a call cost that was turned away."""


class Tidegate:
    """The strategy."""

    def __init__(self, world: World, snapshot: Snapshot) -> None:
        self._world = world
        self._engine = world.engine
        self._books = world.books
        self._snapshot = snapshot
        fleet = world.scenario.fleet
        self._fleet = fleet
        self._gateways = [Gateway() for _ in range(fleet.gateways)]
        self._rng = stream(world.scenario.seed, "gateway")
        self._store = stream(world.scenario.seed, "store")
        self._shared: dict[str, Shared] = {}
        self._watches: list[Watch] = []
        self._rights: dict[tuple[str, str, str, int], Rights | tuple[str, str]] = {}
        self._waiting = [0, 0, 0]

    # --- the protocol of `world.Strategy`

    def submit(self, op: Op) -> None:
        """Identify, estimate, then the caller's own limits."""
        asks = (op.principal, op.agent, op.model, op.wish)
        found = self._rights.get(asks)
        if found is None:
            found = self._rights[asks] = self._looked_up(op)
        if isinstance(found, tuple):
            because, code = found
            self._world.refused(op, because=because, code=code)
            return
        tier, model = found.tier, found.model
        if tier.number != op.tier:
            self._books.retiered(op.tier, tier.number)
            op.tier = tier.number
        op.tenant = found.tenant
        op.mine = mine = Mine(
            rule=found.rule, tier=tier, model=model,
            deadline=self._engine.now + min(found.longest, op.patience), rungs=[found.first],
            pools=found.pools, rid=f"c{op.number}",
        )  # fmt: skip
        self._waiting[op.tier - 1] += 1
        self._estimate(op, mine)
        if len(model.deployments) > 1 and model.downgrade != "never" and tier.downgrade:
            mine.rungs += spare_rungs(model, found.first, mine.estimate)
        self._take(op, mine)

    def _looked_up(self, op: Op) -> Rights | tuple[str, str]:
        """What policy says of such a call; or the rule and the code of its refusal."""
        snapshot, found = self._snapshot, self._snapshot.agents.get(op.principal)
        if found is None:
            return "agents", "unauthorized"
        rule = found.concrete(op.agent)
        model = snapshot.model(op.model)
        if model is None:
            return "models", "model_not_found"
        if not allowed(rule, op.model):
            return f"{rule.because}.models", "model_not_allowed"
        tier = snapshot.tier(max(op.wish or rule.default_tier, rule.tier_cap))
        longest = tier.max_wait if rule.max_wait is None else min(tier.max_wait, rule.max_wait)
        return Rights(
            rule=rule, tier=tier, model=model, first=model.own(FAMILY) or model.deployments[0],
            longest=longest, tenant=rule.tenant if rule.fair_by == "tenant" else rule.id,
            pools=(*rule.pools, *rule.tenant_pools),
        )  # fmt: skip

    def head(self, op: Op) -> None:
        """The breaker hears of it, and what the headers say corrects the pools."""
        mine = mine_of(op)
        scope = self._scope(op, mine)
        scope.undecided -= 1
        mine.begun = True
        scope.breaker.started(now=self._engine.now)
        if mine.rungs[mine.rung].provider.header_family != "none":
            self._read_headers(op, mine)

    def turned_away(self, op: Op, kind: Kind, retry_after: Micros | None, code: str) -> None:
        """Settle, tell the breaker, then try again or give up."""
        mine, now = mine_of(op), self._engine.now
        scope = self._scope(op, mine)
        scope.undecided -= 1
        self._judge(op, scope, kind, retry_after, code)
        rules = self._snapshot.backoff
        tried = mine.tried = mine.tried or Attempts()
        ruling = decide(
            kind=kind, retry_after=retry_after, rules=rules, tried=tried,
            remaining=mine.deadline - now, other_key=False, rng=self._rng,
        )  # fmt: skip
        if not isinstance(ruling, str) and not scope.budget.take(now=now):
            ruling = "the retry budget is spent"
        if not isinstance(ruling, str):
            tried.count(ruling)
            if kind in REQUEUED and retry_after is None:
                retry_after = next_delay(rules, previous=0, attempt=1, rng=self._rng)
        self._settle_theirs(op, mine, OUTCOMES.get(kind, Outcome.FAILED), NOTHING, retry_after)
        self._waiting[op.tier - 1] += 1
        if isinstance(ruling, str):
            if kind in NEXT_RUNG and self._next_rung(op, mine):
                return
            self._refuse(op, mine, because=f"provider: {kind.value}", code=code or kind.value)
            return
        op.attempt += 1
        if ruling.wait:
            mine.turn += 1
            self._engine.after(ruling.wait, self._again, (op, mine.turn))
        else:
            self._attempt(op, mine)

    def finished(self, op: Op, *, complete: bool) -> None:
        """Settle by what was reported, and learn."""
        mine, now = mine_of(op), self._engine.now
        gateway, scope = self._gateways[op.gateway], self._scope(op, mine)
        deployment = mine.rungs[mine.rung]
        usage = op.usage
        assert usage is not None  # noqa: S101 - the world has set it
        money = deployment.price.of(usage)
        if money:
            usage = op.usage = replace(usage, money=money)
            self._books.money += money
        self._settle_theirs(op, mine, Outcome.SERVED, usage, None)
        for held in mine.mine:
            actual = settle(held.accounting, usage, held.cost, held.spec, Outcome.SERVED)
            held.client.settle(Settle(mine.rid, Outcome.SERVED, actual))
        if not complete:
            if not mine.begun:
                scope.undecided -= 1
            if mine.probe:
                scope.breaker.aborted(probe=mine.probe)
            self._wake(scope)
            self._world.ended(op)
            return
        scope.budget.succeeded()
        before = scope.breaker.version
        scope.breaker.succeeded(now=now, probe=mine.probe, begun=True)
        if scope.breaker.version != before or mine.probe:
            self._wake(scope)
        assert mine.estimate is not None  # noqa: S101 - made when it was submitted
        gateway.learn(op, mine.rule, deployment, mine.estimate, usage)
        if mine.rung:
            self._books.downgraded += 1
        self._world.ended(op)

    def withdrawn(self, op: Op) -> None:
        """The client has left: nothing is kept for it."""
        mine = mine_of(op)
        scope = self._scope(op, mine)
        mine.turn += 1
        scope.waiting.pop(op, None)
        if mine.asking is None and not mine.own and not mine.inside and mine.theirs:
            # Sent, and no byte has come: the prompt is spent (`admission.md` §10).
            scope.undecided -= 1
            spent = Usage(input=op.input, output=0, estimated=True)
            self._settle_theirs(op, mine, Outcome.FAILED, None, None)
            for held in mine.mine:
                actual = settle(held.accounting, spent, held.cost, held.spec, Outcome.FAILED)
                held.client.settle(Settle(mine.rid, Outcome.FAILED, actual))
        else:
            self._waiting[op.tier - 1] -= 1
            self._give_back(op, mine)
            self._cancel_own(mine)
        if mine.probe:
            scope.breaker.aborted(probe=mine.probe)
            self._wake(scope)

    def waiting(self) -> tuple[int, int, int]:
        """Calls unsent."""
        one, two, three = self._waiting
        return one, two, three

    def close(self) -> None:
        """The run is over: what only the strategy knows goes into the books."""
        self._books.overtakes = sum(watch.overtakes for watch in self._watches)
        self._books.script_calls = sum(shared.calls for shared in self._shared.values())

    # --- who, what, where

    def _scope(self, op: Op, mine: Mine) -> Scope:
        """The deployment of its present rung, at its gateway."""
        if mine.scope is None:
            mine.scope = self._scope_of(op, mine)
        return mine.scope

    def _scope_of(self, op: Op, mine: Mine) -> Scope:
        gateway, deployment = self._gateways[op.gateway], mine.rungs[mine.rung]
        scope = gateway.scopes.get(deployment.id)
        if scope is None:
            snapshot = self._snapshot
            budget = RetryBudget(snapshot.backoff, now=self._engine.now)
            scope = gateway.scopes[deployment.id] = Scope(Breaker(snapshot.breaker), budget)
        return scope

    def _client(self, gateway: int, spec: PoolSpec) -> Client:
        clients = self._gateways[gateway].clients
        client = clients.get(spec.name)
        if client is None:
            client = clients[spec.name] = self._made(gateway, spec)
        return client

    def _made(self, gateway: int, spec: PoolSpec) -> Client:
        if self._fleet.store is None:
            near = Near(self._engine, spec, self._verdict)
            self._watches.append(near.watch)
            return near
        shared = self._shared.get(spec.name)
        if shared is None:
            shared = Shared(self._engine, spec, self._fleet, self._store)
            self._watches.append(shared.watch)
            self._shared[spec.name] = shared
        return Far(shared, f"gateway-{gateway}", self._verdict)

    def _estimate(self, op: Op, mine: Mine) -> None:
        """What the call is expected to cost on its present rung."""
        gateway = self._gateways[op.gateway]
        mine.estimate = gateway.expected(op, mine.rule, mine.rungs[mine.rung])

    # --- pools

    def _take(self, op: Op, mine: Mine) -> None:
        """Pools are asked in order until one makes the call wait, or all have granted."""
        pools = mine.pools
        while mine.step < len(pools):
            spec = pools[mine.step]
            verdict = self._ask(op, mine, spec)
            if verdict is None:
                return
            mine.step += 1
            if not self._taken(op, mine, verdict):
                return
        if mine.own:
            self._attempt(op, mine)
        else:
            self._send(op, mine)

    def _ask(self, op: Op, mine: Mine, spec: PoolSpec) -> Verdict | None:
        rule, estimate, now = mine.rule, mine.estimate, self._engine.now
        assert estimate is not None  # noqa: S101
        patience = max(0, mine.deadline - now)
        if mine.own:
            accounting = rule.accounting_for(spec.name)
            own = rule.wait_for(spec.name)
            patience = patience if own is None else min(patience, own)
        else:
            accounting = mine.rungs[mine.rung].accounting
        client = self._client(op.gateway, spec)
        cost = reserve(accounting, estimate, spec)
        rid = mine.rid if mine.own else attempt_of(op, mine)
        mine.asking = Held(client, spec, cost, accounting, rid)
        return client.acquire(
            Ask(
                rid=rid,
                lane=op.tier,
                tenant=op.tenant,
                weight=rule.weight,
                deadline_in=patience,
                cost=cost,
                tag=mine.tags.get(spec.name),
                place_key=f"p{op.number}" if op.keeps and spec.queue else None,
            ),
            op,
        )

    def _verdict(self, op: Op, verdict: Verdict) -> None:
        """A pool has answered a call that waited."""
        if op.over:
            return
        mine = mine_of(op)
        mine.step += 1
        if self._taken(op, mine, verdict):
            self._take(op, mine)

    def _taken(self, op: Op, mine: Mine, verdict: Verdict) -> bool:
        """Whether the pool has granted; if not, the call has gone another way."""
        held, mine.asking = mine.asking, None
        assert held is not None  # noqa: S101 - it has just answered
        if type(verdict) is not Admit:
            self._shed(op, mine, held.spec, verdict)
            return False
        (mine.mine if mine.own else mine.theirs).append(held)
        if held.spec.queue:
            if mine.told is not None and mine.told[0] == held.spec.name:
                self._books.places_lost += verdict.tag > mine.told[1]
                mine.told = None
            mine.tags[held.spec.name] = verdict.tag
            mine.meters[held.spec.name] = verdict.meter
        return True

    def _shed(self, op: Op, mine: Mine, spec: PoolSpec, verdict: Verdict) -> None:
        """A pool refuses: the next rung, else the caller is told by which rule."""
        because = getattr(verdict, "because", "") or spec.because
        if mine.own:
            self._cancel_own(mine)
        else:
            self._give_back(op, mine)
            if not isinstance(verdict, Late) and self._next_rung(op, mine):
                return
        if isinstance(verdict, Never):
            self._refuse(op, mine, because=because, code="never_fits")
            return
        assert not isinstance(verdict, Admit)  # noqa: S101 - handled by the caller
        budget = not spec.queue and any(dim.calendar for dim in spec.dimensions)
        patience = mine.deadline - max(op.asked, op.asked_again)
        own = mine.rule.wait_for(spec.name) if mine.own else None
        wait = come_back(verdict.eta, patience if own is None else min(patience, own))
        code = "budget_spent" if budget else "late" if isinstance(verdict, Late) else "shed"
        if budget or wait is None or not op.returns:
            self._refuse(op, mine, because=because, code=code, hint=None if budget else wait)
            return
        self._return(op, mine, (spec.name, verdict.tag), wait)

    def _return(self, op: Op, mine: Mine, told: tuple[str, int], wait: Micros) -> None:
        """The client comes back when told, with the same bytes."""
        self._books.hints += 1
        self._books.hints_early += mine.told is not None
        op.returns -= 1
        mine.told = told
        mine.turn += 1
        self._waiting[op.tier - 1] -= 1
        self._cancel_own(mine)
        self._engine.after(wait, self._returned, (op, mine.turn))

    def _returned(self, due: tuple[Op, int]) -> None:
        op, turn = due
        mine = mine_of(op)
        if op.over or turn != mine.turn:
            return
        op.attempt += 1
        rule = mine.rule
        op.mine = fresh = Mine(
            rule=rule, tier=mine.tier, model=mine.model, rungs=mine.rungs,
            deadline=self._engine.now + mine.deadline - max(op.asked, op.asked_again),
            pools=(*rule.pools, *rule.tenant_pools), rid=f"c{op.number}r{op.attempt}",
            told=mine.told, turn=turn,
        )  # fmt: skip
        op.asked_again = self._engine.now
        self._estimate(op, fresh)
        self._waiting[op.tier - 1] += 1
        self._take(op, fresh)

    def _give_back(self, op: Op, mine: Mine) -> None:
        """Nothing of this attempt was sent: everything comes back."""
        scope = self._scope(op, mine)
        scope.inside.pop(op, None)
        mine.inside = False
        if mine.asking is not None:
            mine.asking.client.cancel(mine.asking.rid)
            mine.asking = None
        for held in reversed(mine.theirs):
            held.client.cancel(held.rid)
        mine.theirs.clear()

    def _cancel_own(self, mine: Mine) -> None:
        for held in reversed(mine.mine):
            held.client.cancel(held.rid)
        mine.mine.clear()

    # --- attempts, breaker, ladder

    def _attempt(self, op: Op, mine: Mine) -> None:
        """The breaker lets it through to the deployment's pools, or it waits, or goes elsewhere."""
        mine.own = False
        if not self._permitted(op, mine):
            return
        mine.pools = mine.rungs[mine.rung].pools
        mine.step = 0
        mine.inside = True
        self._scope(op, mine).inside[op] = None
        self._take(op, mine)

    def _again(self, due: tuple[Op, int]) -> None:
        """A pause is over, unless something else has ended it."""
        op, turn = due
        mine = mine_of(op)
        if op.over or turn != mine.turn:
            return
        self._scope(op, mine).waiting.pop(op, None)
        self._attempt(op, mine)

    def _permitted(self, op: Op, mine: Mine) -> bool:
        """As `layers/trip.py` does; False where the call waits or has gone another way."""
        scope, now = self._scope(op, mine), self._engine.now
        breaker, rules = scope.breaker, self._snapshot.breaker
        mine.probe = 0
        if breaker.state is State.CLOSED or rules.mode is not Mode.ENFORCE:
            return True
        ruling = breaker.ask(now=now)
        if isinstance(ruling, Allow):
            mine.probe = ruling.probe
            return True
        left = len(mine.rungs) - 1 - mine.rung
        if not ruling.sick and not left and breaker.state is State.OPEN:
            return True
        hopeless = breaker.state is not State.HALF_OPEN and ruling.until >= mine.deadline
        if left or now >= mine.deadline or hopeless:
            if not self._next_rung(op, mine):
                self._refuse(op, mine, because=ruling.because, code="breaker_open")
            return False
        mine.turn += 1
        scope.waiting[op] = None
        self._engine.at(min(ruling.until, mine.deadline), self._again, (op, mine.turn))
        return False

    def _wake(self, scope: Scope) -> None:
        """Who waits for this breaker asks again, the most urgent first."""
        waiting, scope.waiting = scope.waiting, {}
        for op in sorted(waiting, key=lambda op: op.tier):
            self._engine.after(0, self._again, (op, mine_of(op).turn))

    def _judge(
        self, op: Op, scope: Scope, kind: Kind, retry_after: Micros | None, code: str
    ) -> None:
        """The breaker hears of a bad answer."""
        mine, now, breaker = mine_of(op), self._engine.now, scope.breaker
        before = breaker.version
        if kind in SICK:
            breaker.failed(
                now=now, rng=self._rng, reason=f"{kind.value} {code}", hint=retry_after,
                probe=mine.probe, undecided=scope.undecided,
            )  # fmt: skip
        elif kind in SPENT:
            breaker.aborted(probe=mine.probe)
            breaker.shut(until=now + spent_for(retry_after), reason=f"{kind.value} {code}")
        elif kind is Kind.QUOTA:
            blocked = now + min(retry_after or MICRO, 300 * MICRO)
            breaker.refused_for_quota(key=code, blocked_until=blocked, probe=mine.probe)
        elif mine.probe:
            breaker.aborted(probe=mine.probe)
        if breaker.version != before or mine.probe:
            if breaker.state is State.SHUT or (breaker.state is State.OPEN and breaker.sick):
                self._evict(scope)
            self._wake(scope)

    def _evict(self, scope: Scope) -> None:
        """Nobody stays in line for a sick deployment: the ladder, or a wait that holds nothing."""
        for op in list(scope.inside):
            mine = mine_of(op)
            self._give_back(op, mine)
            op.attempt += 1
            mine.turn += 1
            self._engine.after(0, self._again, (op, mine.turn))

    def _next_rung(self, op: Op, mine: Mine) -> bool:
        """Whether the ladder has another rung; then the call is on its way there."""
        if mine.rung + 1 >= len(mine.rungs):
            return False
        mine.rung += 1
        mine.tags.clear()
        mine.tried = None
        mine.scope = None
        op.attempt += 1
        self._estimate(op, mine)
        mine.turn += 1
        self._engine.after(0, self._again, (op, mine.turn))
        return True

    def _send(self, op: Op, mine: Mine) -> None:
        """All pools have granted."""
        deployment = mine.rungs[mine.rung]
        scope = self._scope(op, mine)
        scope.inside.pop(op, None)
        mine.inside = False
        mine.begun = False
        scope.undecided += 1
        self._waiting[op.tier - 1] -= 1
        if deployment.provider.header_family != "none":
            self._produce(op, mine, 1)
        self._world.send(op, self._world.targets[deployment.id])

    def _settle_theirs(
        self, op: Op, mine: Mine, outcome: Outcome, usage: Usage | None,
        retry_after: Micros | None,
    ) -> None:  # fmt: skip
        """The attempt's permits end."""
        if mine.rungs[mine.rung].provider.header_family != "none":
            self._produce(op, mine, -1)
        for held in mine.theirs:
            actual = settle(held.accounting, usage, held.cost, held.spec, outcome)
            held.client.settle(Settle(held.rid, outcome, actual, retry_after or 0))
        mine.theirs.clear()

    def _refuse(
        self, op: Op, mine: Mine, *, because: str, code: str, hint: Micros | None = None
    ) -> None:
        """The call ends in a refusal."""
        self._waiting[op.tier - 1] -= 1
        self._cancel_own(mine)
        self._world.refused(op, because=because, code=code, retry_after=hint)

    # --- what headers say

    def _produce(self, op: Op, mine: Mine, sign: int) -> None:
        """Output expected of calls under way, by pool: what a realtime meter has not charged."""
        estimate, producing = mine.estimate, self._gateways[op.gateway].producing
        assert estimate is not None  # noqa: S101
        for spec in mine.rungs[mine.rung].pools:
            producing[spec.name] = producing.get(spec.name, 0) + sign * estimate.output

    def _read_headers(self, op: Op, mine: Mine) -> None:
        """As `steering.py` does: what the provider counts beyond ours is used by others."""
        gateway, deployment = self._gateways[op.gateway], mine.rungs[mine.rung]
        said = {scope.pool: readings(scope, self._engine.now) for scope in op.target.scopes}
        realtime = deployment.accounting.profile is Profile.REALTIME
        for spec in deployment.pools:
            meter = mine.meters.get(spec.name)
            if meter is None or not spec.dimensions:
                continue
            client = gateway.clients[spec.name]
            streaming = gateway.producing.get(spec.name, 0) if realtime else 0
            used = client.used() or meter
            risen = tuple(map(max, meter, used)) if meter else used
            foreign = foreign_use(spec, risen, said[plain(spec.name)], streaming=streaming)
            if foreign is not None:
                client.signal(foreign)


def mine_of(op: Op) -> Mine:
    """What Tidegate keeps with the call."""
    mine = op.mine
    assert isinstance(mine, Mine)  # noqa: S101 - `submit` has set it
    return mine


def attempt_of(op: Op, mine: Mine) -> str:
    """The request id of the present attempt."""
    return f"{mine.rid}.{op.attempt}"
