"""A scenario: what is simulated, as values. `policy/scenario.py` makes them from a YAML file.

Spans are micros from the beginning of the run, shares parts per million, amounts whole tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from gateway.admission.remote import FailMode
from gateway.units import MICRO, MINUTE, Micros, Tokens

if TYPE_CHECKING:
    from gateway.simulate.meters import Quota

WHOLE = 1_000_000
"""Parts per million of all."""


class Strategy(StrEnum):
    """Who decides when a call is sent."""

    EXPONENTIAL = "exponential"
    FULL_JITTER = "full_jitter"
    DECORRELATED = "decorrelated"
    RETRY_AFTER = "retry_after"
    POST_HOC = "post_hoc_counter"
    STATIC = "static_85"
    TIDEGATE = "tidegate"


class Fault(StrEnum):
    """What an outage does to calls."""

    FAILS = "fails"
    OVERLOADED = "overloaded"
    HANGS = "hangs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal lengths: heavy-tailed as prompts and answers are."""

    median: Tokens
    sigma: float
    least: Tokens = 1
    most: Tokens = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Clients that hang up: that share of calls, so long after asking."""

    share: int
    after: Micros


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Agents alike: closed loops of call, answer, pause.

    Attributes:
        name: As in the file.
        agents: How many.
        principals: Agents of the policy, dealt out in turn.
        model: Public name they ask for.
        tiers: Share of the agents per tier wish 1 to 3; all 0: the policy's default.
        load: From which instant the demand is which share of the quota of the model's first pool.
        input, outputs: Lengths; each agent has one of the output classes.
        caps: Output caps, drawn per call; 0 names none.
        counted: What our tokenizer counts of the true input.
        cached: Share of the input that the provider reads from its cache.
        leaving: Clients that hang up, or None.
        returns: How often a refused client comes back as told.
        patience: How long a client waits for its answer to begin, whatever its tier allows.
    """

    name: str
    agents: int
    principals: tuple[str, ...]
    model: str
    tiers: tuple[int, int, int] = (0, 0, 0)
    load: tuple[tuple[Micros, int], ...] = ((0, WHOLE),)
    input: Lengths = Lengths(median=1_500, sigma=1.1, least=50, most=120_000)
    outputs: tuple[Lengths, ...] = (Lengths(median=300, sigma=0.7, least=5, most=4_096),)
    caps: tuple[Tokens, ...] = (0,)
    counted: int = WHOLE
    cached: int = 0
    leaving: Leaving | None = None
    returns: int = 0
    patience: Micros = 540 * MICRO


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOutage:
    """From `start` to `end` the shared store answers nobody; `empty`: it comes back empty."""

    start: Micros
    end: Micros
    empty: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Gateways before the provider.

    Attributes:
        gateways: Processes.
        shares: Share of the agents that call each.
        store: Least and longest round trip to the shared store; None: each pool in the process.
        mode: What holds while the store is away.
        outages: When it is.
    """

    gateways: int = 1
    shares: tuple[int, ...] = (WHOLE,)
    store: tuple[Micros, Micros] | None = None
    mode: FailMode = FailMode.LOCAL
    outages: tuple[StoreOutage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """From `start` to `end` the provider does not serve."""

    start: Micros
    end: Micros
    provider: str
    fault: Fault = Fault.FAILS


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Somebody else uses a share of a pool's quota, in two sips a second."""

    pool: str
    start: Micros
    end: Micros
    share: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """How the provider really meters a pool.

    Attributes:
        limits, accounting: Whether the quota states these itself; else they are the policy's.
    """

    pool: str
    quota: Quota
    limits: bool
    accounting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """How the provider and the way to it behave.

    Attributes:
        network: Least time to it; `jitter`: mean of the exponential part.
        first_token: From arrival to the head.
        rate: Output tokens per second, the median; each call draws 80 to 130 % of its time.
        refusal: From arrival to a refusal's return.
        patience: How long a hanging call lasts until its client's side gives up.
        meters: How pools are really metered; others as policy says.
    """

    network: Micros = 5_000
    jitter: Micros = 15_000
    first_token: Micros = 400_000
    rate: int = 90
    refusal: Micros = 20_000
    patience: Micros = 60 * MICRO
    meters: tuple[Stated, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One thing to simulate.

    Attributes:
        duration: New calls come until then; after it the queue empties.
        drain: Longest time for that.
        settle: How long after its beginning a surge is measured: stored credit is gone then.
        policies: Files, relative to the scenario's own.
    """

    name: str
    seed: int = 1
    duration: Micros = 15 * MINUTE
    drain: Micros = 60 * MINUTE
    settle: Micros = MINUTE
    policies: tuple[str, ...] = ()
    traffic: tuple[Population, ...] = ()
    fleet: Fleet = field(default_factory=Fleet)
    upstream: Upstream = field(default_factory=Upstream)
    outages: tuple[Outage, ...] = ()
    foreign: tuple[Foreign, ...] = ()
    strategies: tuple[Strategy, ...] = (Strategy.TIDEGATE,)

    def surges(self) -> tuple[tuple[Micros, Micros], ...]:
        """Spans in which some population asks for more than the quota, measured ones only."""
        found: list[tuple[Micros, Micros]] = []
        edges = sorted({at for group in self.traffic for at, _ in group.load} | {self.duration})
        for start, end in pairwise(edges):
            asked = sum(load_at(group.load, start) for group in self.traffic)
            if asked > WHOLE and start < self.duration:
                if found and found[-1][1] == start:
                    found[-1] = (found[-1][0], min(end, self.duration))
                else:
                    found.append((start, min(end, self.duration)))
        return tuple(
            (start + self.settle, end) for start, end in found if end - start > self.settle
        )


def load_at(load: tuple[tuple[Micros, int], ...], now: Micros) -> int:
    """The share asked for at that instant; before the first entry nothing."""
    share = 0
    for at, value in load:
        if at > now:
            break
        share = value
    return share
