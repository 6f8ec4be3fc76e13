"""One scenario, one policy, one strategy: a run, and its books.

What the provider really meters is derived from the policy (a pool's limits are what the operator
was told), unless the scenario says otherwise for a pool: that is how a policy is tried against a
provider that counts in another shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gateway.admission.profiles import Profile
from gateway.simulate import meters
from gateway.simulate.books import Books
from gateway.simulate.engine import Engine
from gateway.simulate.ours import Tidegate
from gateway.simulate.scenario import Strategy
from gateway.simulate.scopes import Scope, Target
from gateway.simulate.strategies import (
    Decorrelated,
    Exponential,
    FullJitter,
    PostHoc,
    RetryAfter,
    Static,
)
from gateway.simulate.workload import Pace, agents, mean_cost
from gateway.simulate.world import World
from gateway.units import MICRO, MINUTE, Micros

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gateway.admission.core import PoolSpec
    from gateway.simulate.scenario import Population, Scenario, Stated
    from gateway.simulate.workload import Agent, Op
    from gateway.snapshot import Accounting, Deployment, Snapshot

LOOKS = 240
"""The line is looked at so often in a run, for its chart."""

NAIVE = {
    Strategy.EXPONENTIAL: Exponential,
    Strategy.FULL_JITTER: FullJitter,
    Strategy.DECORRELATED: Decorrelated,
    Strategy.RETRY_AFTER: RetryAfter,
    Strategy.POST_HOC: PostHoc,
    Strategy.STATIC: Static,
}


class Unsimulated(ValueError):
    """The policy or the scenario holds what no run can show; says what."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A run that is over.

    Attributes:
        strategy, policy: Who decided, by which file.
        meter: Shape and accounting of the first pool, as the provider keeps it.
        world: As it stands at the end.
        events: Callbacks run.
        span: From the first call to the end of the last.
    """

    scenario: Scenario
    strategy: Strategy
    policy: str
    meter: str
    snapshot: Snapshot
    world: World
    books: Books
    events: int
    span: Micros


def quota_of(spec: PoolSpec, accounting: Accounting) -> meters.Quota:
    """The quota that a pool mirrors.

    Raises:
        Unsimulated: A window that the meters do not know.
    """
    said: dict[str, Any] = {}
    shape = meters.Shape.BUCKET
    for dim in spec.dimensions:
        if dim.calendar == "day" and dim.name in ("requests", "tokens"):
            said[f"{dim.name}_per_day"] = dim.limit // MICRO
        elif dim.calendar or dim.window > MINUTE:
            raise Unsimulated(
                f"{dim.because}: the simulator has no meter of that period; state the provider's "
                f"quota under meters in the scenario"
            )
        else:
            said[dim.name] = dim.limit * MINUTE // dim.window // MICRO
            if any(dim.cap):
                short = dim.window < MINUTE
                shape = meters.Shape.SUB_MINUTE if short else meters.Shape.SLIDING
    return replace(
        meters.Quota(shape=shape, accounting=accounting, concurrency=spec.concurrency or None),
        **said,
    )


def targets_of(snapshot: Snapshot, scenario: Scenario, models: Iterable[str]) -> dict[str, Target]:
    """Every deployment that these models may reach, with meters that deployments share."""
    stated = {one.pool: one for one in scenario.upstream.meters}
    scopes: dict[str, Scope] = {}
    found: dict[str, Target] = {}
    for name in models:
        model = snapshot.model(name)
        for deployment in model.deployments if model is not None else ():
            if deployment.id in found:
                continue
            spends = tuple(
                scopes.setdefault(spec.name, _scope(spec, deployment, stated))
                for spec in deployment.pools
            )
            found[deployment.id] = Target(
                deployment=deployment.id,
                provider=deployment.provider.name,
                scopes=spends,
                realtime=any(scope.profile is Profile.REALTIME for scope in spends),
            )
    return found


def _scope(spec: PoolSpec, deployment: Deployment, stated: dict[str, Stated]) -> Scope:
    plain = spec.name.removeprefix("pool:")
    said = stated.get(plain)
    accounting = deployment.accounting
    if said is None:
        quota = quota_of(spec, accounting)
    else:
        quota = said.quota if said.limits else _limited(said.quota, quota_of(spec, accounting))
        if not said.accounting:
            quota = replace(quota, accounting=accounting)
    return Scope(pool=plain, meter=meters.Provider(quota), profile=quota.accounting.profile)


def _limited(shaped: meters.Quota, limits: meters.Quota) -> meters.Quota:
    """The one's shape with the other's limits."""
    kept = ("shape", "depth", "phase", "day_offset", "accounting")
    return replace(limits, **{name: getattr(shaped, name) for name in kept})


def first_of(snapshot: Snapshot, model: str, targets: dict[str, Target]) -> Target:
    """Where a client without a gateway sends calls of that model."""
    found = snapshot.model(model)
    if found is None:
        raise Unsimulated(f"no model {model!r} in the policy")
    return targets[found.deployments[0].id]


def simulate(  # noqa: PLR0913 - a run is stated in one place, by keyword
    scenario: Scenario,
    snapshot: Snapshot,
    strategy: Strategy,
    *,
    policy: str = "",
    recorded: Callable[[], Iterable[Op]] | None = None,
    models: Iterable[str] = (),
    told: Callable[[Micros], None] | None = None,
) -> Run:
    """The run, from its first call until nothing is left or the drain is over.

    Args:
        scenario: What to simulate.
        snapshot: The compiled policy.
        strategy: Who decides.
        policy: Name of the policy, for the report.
        recorded: Recorded calls in the order of their instants, each time anew.
        models: Models that recorded calls ask for.
        told: Called now and then with the present instant.

    Raises:
        Unsimulated: Something that no run can show.
    """
    engine, books = Engine(), Books()
    asked = dict.fromkeys([*(group.model for group in scenario.traffic), *models])
    targets = targets_of(snapshot, scenario, asked)
    world = World(engine, scenario, targets, books)
    world.first = {
        name: first_of(snapshot, name, targets) for name in asked if snapshot.model(name)
    }
    world.tenants = {
        name: rule.tenant if rule.fair_by == "tenant" else rule.id
        for name, rule in snapshot.agents.items()
    }
    decider = Tidegate(world, snapshot) if strategy is Strategy.TIDEGATE else NAIVE[strategy](world)
    world.strategy = decider
    world.start(population(scenario, world), recorded() if recorded is not None else ())
    step = max(MICRO, scenario.duration // LOOKS)

    def look(_: None) -> None:
        books.line.append((engine.now, decider.waiting()))
        if engine.now < scenario.duration or any(decider.waiting()):
            engine.after(step, look)

    engine.at(0, look)
    engine.run(scenario.duration + scenario.drain, told)
    decider.close()
    first = next(iter(targets.values()), None)
    return Run(
        scenario=scenario,
        strategy=strategy,
        policy=policy,
        meter=meter_name(first),
        snapshot=snapshot,
        world=world,
        books=books,
        events=engine.events,
        span=engine.now,
    )


def meter_name(target: Target | None) -> str:
    """Shape and accounting, in short."""
    if target is None or not target.scopes:
        return "none"
    quota = target.scopes[-1].meter.quota
    return f"{quota.shape.value}/{quota.accounting.profile.value}"


def population(scenario: Scenario, world: World) -> list[Agent]:
    """Every agent of the scenario, at the pace that its load asks for."""
    found: list[Agent] = []
    for group in scenario.traffic:
        found += agents(
            group,
            scenario.fleet.shares,
            paced(group, world, scenario),
            seed=scenario.seed,
        )
    return found


def paced(group: Population, world: World, scenario: Scenario) -> Pace:
    """The pace that a population's load asks for.

    Raises:
        Unsimulated: Without a quota there is nothing to be a share of.
    """
    scopes = world.first[group.model].scopes
    quota = scopes[0].meter.quota if scopes else None
    limit = (quota.tokens or quota.input or quota.requests) if quota is not None else None
    if quota is None or limit is None:
        raise Unsimulated(
            f"traffic.{group.name}.load: the model {group.model!r} has no quota to be a share of"
        )
    cost = mean_cost(
        group,
        scenario.seed,
        by_cap=quota.accounting.profile is Profile.UPFRONT_MAX,
        requests=not (quota.tokens or quota.input),
    )
    return Pace(group, scenario.upstream, limit=limit, cost=cost, seed=scenario.seed)
