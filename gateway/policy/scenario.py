"""Scenario files of `tidegate simulate`: strict YAML in, a `Scenario` out.

The same words and units as in policies, the same errors with file, line and column. What a scenario
says of a policy (agents, models, pools) is checked by `against`, once that policy is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.admission import profiles
from gateway.admission.remote import FailMode
from gateway.policy import forms, load, quantity
from gateway.policy.models import (
    AccountingOf,
    Count,
    Duration,
    Limits,
    Name,
    Offset,
    Percent,
    PositiveDuration,
    Section,
    Share,
)
from gateway.policy.problems import Report
from gateway.simulate import meters, scenario
from gateway.simulate.scenario import WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gateway.snapshot import Snapshot
    from gateway.units import Micros

MAX_AGENTS = 100_000
MAX_EDGES = 100_000
"""Entries of a load, repeats unfolded."""

Word = Annotated[str, Field(min_length=1, max_length=200)]
Words = Annotated[
    tuple[Word, ...], BeforeValidator(forms.listed, json_schema_input_type=str | list[str])
]


class Lengths(Section):
    """Log-normal lengths in tokens."""

    median: Count = Field(description="Half are longer.")
    sigma: float = Field(default=1.0, ge=0, le=3, description="Spread of the logarithm.")
    least: Count = Field(default=1, description="None is shorter.")
    most: Count = Field(default=1_000_000, description="None is longer.")


class Leaving(Section):
    """Clients that hang up."""

    share: Share = Field(description="Of the calls.")
    after: PositiveDuration = Field(description="From asking.")


class Population(Section):
    """Agents alike, each in a closed loop of call, answer and pause."""

    agents: int = Field(ge=1, le=MAX_AGENTS, description="How many.")
    principals: Words = Field(description="Agents of the policy, dealt out in turn.")
    model: Word = Field(description="Public name they ask for.")
    tiers: dict[Literal["1", "2", "3"], Share] = Field(
        default={}, description="Share of the agents that wish for each tier; default: policy's."
    )
    load: dict[str, Percent] = Field(
        default={"0s": WHOLE},
        description="From when they ask for which share of the quota: {0s: 80%, 2m: 600%}.",
    )
    every: PositiveDuration | None = Field(
        default=None, description="The load begins anew so often."
    )
    input: Lengths = Field(
        default=Lengths(median=1_500, sigma=1.1, least=50, most=120_000), description="Prompts."
    )
    output: tuple[Lengths, ...] = Field(
        default=(Lengths(median=300, sigma=0.7, least=5, most=4_096),),
        min_length=1,
        max_length=20,
        description="Classes of answers; each agent has one.",
    )
    caps: tuple[Count, ...] = Field(
        default=(), max_length=20, description="Output caps, one drawn per call; none by default."
    )
    counted: Percent = Field(
        default=WHOLE, description="What our tokenizer counts of the true input: wrong estimates."
    )
    cached: Percent = Field(default=0, description="Share of the input read from a prompt cache.")
    leaving: Leaving | None = Field(default=None, description="Clients that hang up.")
    returns: int = Field(
        default=0, ge=0, le=100, description="How often a refused client comes back as told."
    )
    patience: PositiveDuration = Field(
        default=quantity.duration("540s"), description="How long a client waits for its answer."
    )


class StoreOutage(Section):
    """A time in which the shared store answers nobody."""

    at: Duration = Field(description="When it begins.")
    lasts: PositiveDuration = Field(description="How long.")
    returns: Literal["intact", "empty"] = Field(default="empty", description="How it comes back.")


class Fleet(Section):
    """Gateways before the provider."""

    gateways: int = Field(default=1, ge=1, le=1_000, description="Processes.")
    shares: tuple[Share, ...] = Field(default=(), description="Of the agents; default: equal.")
    store: tuple[Duration, Duration] | None = Field(
        default=None, description="Least and longest round trip to Redis; none: in the process."
    )
    mode: Literal["local", "closed", "open"] = Field(
        default="local", description="What holds while the store is away."
    )
    outages: tuple[StoreOutage, ...] = Field(
        default=(), max_length=100, description="When the store is away."
    )


class Meter(Section):
    """How the provider really meters a pool, where it differs from what policy says."""

    shape: Literal["bucket", "fixed", "sliding", "sub_minute"] = Field(
        description="Of its windows."
    )
    limits: Limits | None = Field(default=None, description="Default: the pool's of the policy.")
    accounting: AccountingOf | None = Field(default=None, description="When it charges what.")
    depth: int = Field(default=60, ge=1, le=3_600, description="Bucket: seconds of the rate.")
    phase: Duration = Field(default=0, description="Fixed: where windows begin.")
    utc_offset: Offset = Field(default=0, description="Where days begin.")


class Provider(Section):
    """How the provider and the way to it behave."""

    network: Duration = Field(default=quantity.duration("5ms"), description="Least time to it.")
    jitter: Duration = Field(default=quantity.duration("15ms"), description="Mean on top.")
    first_token: Duration = Field(default=quantity.duration("400ms"), description="To the head.")
    tokens_per_second: int = Field(default=90, ge=1, le=100_000, description="Pace of an answer.")
    refusal: Duration = Field(default=quantity.duration("20ms"), description="To a refusal.")
    patience: PositiveDuration = Field(
        default=quantity.duration("60s"), description="Before a hanging call is given up."
    )
    meters: dict[Name, Meter] = Field(default={}, description="By pool of the policy.")


class Outage(Section):
    """A time in which the provider does not serve."""

    at: Duration = Field(description="When it begins.")
    lasts: PositiveDuration = Field(description="How long.")
    provider: Name | None = Field(default=None, description="Of the policy; default: all.")
    fault: Literal["fails", "overloaded", "hangs"] = Field(default="fails", description="How.")


class Foreign(Section):
    """Somebody else on the same quota."""

    pool: Name = Field(description="Of the policy.")
    at: Duration = Field(description="When it begins.")
    lasts: PositiveDuration = Field(description="How long.")
    share: Share = Field(description="Of the quota.")


class ScenarioFile(Section):
    """Tidegate scenario, version 1: what `tidegate simulate` plays."""

    version: Literal[1] = Field(description="Layout of this file.")
    name: Annotated[str, Field(min_length=1, max_length=200)] = Field(description="For the report.")
    policy: Words = Field(default=(), description="Policies, relative to this file.")
    seed: int = Field(default=1, ge=0, le=2**63, description="Equal seeds, equal runs.")
    duration: PositiveDuration = Field(
        default=quantity.duration("15m"), description="New calls come until then."
    )
    drain: PositiveDuration = Field(
        default=quantity.duration("60m"), description="Longest time for what is left then."
    )
    settle: Duration = Field(
        default=quantity.duration("60s"), description="Measured from so long after a surge begins."
    )
    strategies: tuple[
        Literal[
            "exponential", "full_jitter", "decorrelated", "retry_after", "post_hoc_counter",
            "static_85", "tidegate",
        ],
        ...,
    ] = Field(default=("tidegate",), min_length=1, description="Who decides.")  # fmt: skip
    fleet: Fleet = Field(default=Fleet(), description="Gateways.")
    provider: Provider = Field(default=Provider(), description="Provider and network.")
    outages: tuple[Outage, ...] = Field(
        default=(), max_length=1_000, description="Of the provider."
    )
    foreign: tuple[Foreign, ...] = Field(default=(), max_length=100, description="Others.")
    traffic: dict[Name, Population] = Field(default={}, description="Who calls; none for a trace.")


def read(path: Path) -> tuple[scenario.Scenario, str]:
    """The scenario of that file, and a digest of its content.

    Raises:
        PolicyError: With every problem found.
    """
    found, digest = load.load_strictly(path, ScenarioFile, _check)
    return _made(found), digest


# --- what entries are to each other


def _check(found: ScenarioFile, report: Report) -> None:
    if len(set(found.strategies)) < len(found.strategies):
        report.error(("strategies",), "one stands twice")
    _check_fleet(found.fleet, report)
    for name, group in found.traffic.items():
        _check_group(("traffic", name), group, report, found.duration)
    for section in ("outages", "foreign"):
        for index, event in enumerate(getattr(found, section)):
            if event.at >= found.duration:
                report.error((section, index, "at"), "begins after the run has ended")
    for name, meter in found.provider.meters.items():
        if meter.limits is not None and not _limits(meter.limits):
            report.error(("provider", "meters", name, "limits"), "states no limit")


def _check_fleet(fleet: Fleet, report: Report) -> None:
    if fleet.shares and len(fleet.shares) != fleet.gateways:
        report.error(
            ("fleet", "shares"), f"{len(fleet.shares)} shares for {fleet.gateways} gateways"
        )
    if fleet.gateways > 1 and fleet.store is None:
        report.error(
            ("fleet", "gateways"),
            "several gateways share pools only through a store",
            allowed="store: [1ms, 5ms], the round trip to Redis",
        )
    if fleet.outages and fleet.store is None:
        report.error(("fleet", "outages"), "without a store none can be away", allowed="store")
    if fleet.store is not None and fleet.store[0] > fleet.store[1]:
        report.error(("fleet", "store"), "the longest round trip is shorter than the least")


def _check_group(
    path: tuple[str | int, ...], group: Population, report: Report, duration: Micros
) -> None:
    if not group.principals:
        report.error((*path, "principals"), "names nobody", allowed="an agent of the policy")
    if group.tiers and sum(group.tiers.values()) != WHOLE:
        report.error((*path, "tiers"), "the shares are not 100% together")
    for lengths, where in [(group.input, "input"), *((one, "output") for one in group.output)]:
        if not lengths.least <= lengths.median <= lengths.most:
            report.error((*path, where), "the median lies outside of least and most")
    edges = 0
    for at in group.load:
        try:
            begins = quantity.duration(at)
        except quantity.Unreadable as wrong:
            report.error((*path, "load", at), wrong.what, allowed=wrong.allowed, at_key=True)
            continue
        edges += 1
        if group.every is not None and begins >= group.every:
            report.error((*path, "load", at), "begins after the load begins anew", at_key=True)
    if not group.load:
        report.error((*path, "load"), "is empty", allowed="{0s: 100%}")
    if group.every is not None and edges * (duration // group.every + 1) > MAX_EDGES:
        report.error((*path, "every"), "too short for such a long run")


# --- values


def _limits(said: Limits) -> dict[str, Any]:
    names = {
        "rpm": "requests", "tpm": "tokens", "itpm": "input", "otpm": "output",
        "rpd": "requests_per_day", "tpd": "tokens_per_day", "concurrency": "concurrency",
    }  # fmt: skip
    stated = {key: getattr(said, key) for key in names}
    return {names[key]: limit for key, limit in stated.items() if limit is not None}


def _quota(said: Meter) -> meters.Quota:
    accounting = profiles.Accounting()
    if said.accounting is not None:
        stated = said.accounting.model_dump(exclude_none=True)
        stated["profile"] = profiles.Profile(stated["profile"])
        accounting = profiles.Accounting(**stated)
    quota = meters.Quota(
        shape=meters.Shape(said.shape),
        depth=said.depth,
        phase=said.phase,
        day_offset=said.utc_offset,
        accounting=accounting,
    )
    return replace(quota, **(_limits(said.limits) if said.limits is not None else {}))


def _lengths(said: Lengths) -> scenario.Lengths:
    return scenario.Lengths(**said.model_dump())


def _load(group: Population, duration: Micros) -> tuple[tuple[Micros, int], ...]:
    """The load over the whole run, repeats unfolded."""
    once = sorted((quantity.duration(at), share) for at, share in group.load.items())
    if group.every is None:
        return tuple(once)
    turns = range(duration // group.every + 1)
    return tuple((turn * group.every + at, share) for turn in turns for at, share in once)


def _group(name: str, said: Population, duration: Micros) -> scenario.Population:
    leaving = said.leaving
    one, two, three = (said.tiers.get(tier, 0) for tier in ("1", "2", "3"))
    return scenario.Population(
        name=name,
        agents=said.agents,
        principals=said.principals,
        model=said.model,
        tiers=(one, two, three),
        load=_load(said, duration),
        input=_lengths(said.input),
        outputs=tuple(_lengths(one) for one in said.output),
        caps=said.caps or (0,),
        counted=said.counted,
        cached=said.cached,
        leaving=scenario.Leaving(share=leaving.share, after=leaving.after) if leaving else None,
        returns=said.returns,
        patience=said.patience,
    )


def _made(found: ScenarioFile) -> scenario.Scenario:
    fleet, provider = found.fleet, found.provider
    shares = fleet.shares or (WHOLE,) * fleet.gateways
    return scenario.Scenario(
        name=found.name,
        seed=found.seed,
        duration=found.duration,
        drain=found.drain,
        settle=found.settle,
        policies=found.policy,
        strategies=tuple(scenario.Strategy(name) for name in found.strategies),
        fleet=scenario.Fleet(
            gateways=fleet.gateways,
            shares=shares,
            store=fleet.store,
            mode=FailMode(fleet.mode),
            outages=tuple(
                scenario.StoreOutage(
                    start=one.at, end=one.at + one.lasts, empty=one.returns == "empty"
                )
                for one in fleet.outages
            ),
        ),
        upstream=scenario.Upstream(
            network=provider.network,
            jitter=provider.jitter,
            first_token=provider.first_token,
            rate=provider.tokens_per_second,
            refusal=provider.refusal,
            patience=provider.patience,
            meters=tuple(
                scenario.Stated(
                    pool=name,
                    quota=_quota(meter),
                    limits=meter.limits is not None,
                    accounting=meter.accounting is not None,
                )
                for name, meter in provider.meters.items()
            ),
        ),
        outages=tuple(
            scenario.Outage(
                start=one.at, end=one.at + one.lasts, provider=one.provider or "",
                fault=scenario.Fault(one.fault),
            )
            for one in found.outages
        ),
        foreign=tuple(
            scenario.Foreign(pool=one.pool, start=one.at, end=one.at + one.lasts, share=one.share)
            for one in found.foreign
        ),
        traffic=tuple(_group(name, said, found.duration) for name, said in found.traffic.items()),
    )  # fmt: skip


# --- against a policy


def against(path: Path, snapshot: Snapshot, policy: str) -> None:
    """Every name of the scenario exists in that policy.

    Raises:
        PolicyError: With every name that does not, at its place in the scenario.
    """
    pools = [
        spec.name.removeprefix("pool:")
        for model in snapshot.models.values()
        for deployment in model.deployments
        for spec in deployment.pools
    ]

    def check(found: ScenarioFile, report: Report) -> None:
        for where, name, what, names in _named(found, snapshot, pools):
            if name not in names:
                report.error(
                    where,
                    f"no {what} {name!r} in {policy}",
                    allowed=", ".join(names[:20]),
                    near=(name, names),
                )

    load.load_strictly(path, ScenarioFile, check)


def _named(
    found: ScenarioFile, snapshot: Snapshot, pools: list[str]
) -> Iterator[tuple[tuple[str | int, ...], str, str, list[str]]]:
    """Each name of a policy that the scenario uses: where, which, of what, among which."""
    for name, group in found.traffic.items():
        for principal in group.principals:
            yield ("traffic", name, "principals"), principal, "agent", list(snapshot.agents)
        if snapshot.model(group.model) is None:
            yield ("traffic", name, "model"), group.model, "model", list(snapshot.models)
    for name in found.provider.meters:
        yield ("provider", "meters", name), name, "pool", pools
    for index, other in enumerate(found.foreign):
        yield ("foreign", index, "pool"), other.pool, "pool", pools
    for index, outage in enumerate(found.outages):
        if outage.provider is not None:
            where = ("outages", index, "provider")
            yield where, outage.provider, "provider", list(snapshot.providers)
