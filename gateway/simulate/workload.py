"""Who calls when, for what: agents in closed loops, and recorded calls at their own instants.

Every agent draws from a stream of its own, derived from the run's seed and its name: what one
strategy makes of a call never changes what another agent asks for, so strategies are compared on
the same demand. A closed loop slows down as it waits, as agents do; recorded calls do not.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import exp, log
from random import Random  # noqa: TID251 - the one place where a simulation's seeds become streams
from typing import TYPE_CHECKING

from gateway.simulate.scenario import WHOLE
from gateway.simulate.scopes import NOWHERE
from gateway.units import MICRO, MINUTE, Micros, Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.admission.profiles import Usage
    from gateway.simulate.meters import Ticket
    from gateway.simulate.scenario import Lengths, Population, Upstream
    from gateway.simulate.scopes import Target

SAMPLED = 4_000
"""Calls drawn to learn what the mean call of a population costs."""

LEAST_PAUSE: Micros = 20_000
"""No agent calls again sooner."""

LEAST_CYCLE = 0.05
"""Seconds: the shortest mean pause, however great the demand."""

NEVER = 3e9
"""Seconds: the pause of agents that ask for nothing."""

HALVINGS = 60

PATIENCE: Micros = 540 * MICRO
"""How long a client waits for its answer to begin, kept alive (`protocols.md` §3)."""

SPREAD = (0.8, 1.3)
"""Each answer takes a share of its nominal time in between."""


def stream(seed: int, *names: object) -> Random:
    """A generator of that component's own."""
    return Random(f"{seed}:" + ":".join(map(str, names)))  # noqa: S311 - no secret is drawn


class Op:
    """One call on its way through a simulation.

    Attributes:
        number: In order of asking; `agent` asked it at `asked`.
        wish: The tier asked for, 0 for none; `tier` what it became.
        input, output, cap: True tokens; cap 0 names none.
        counted: What our tokenizer makes of `input`.
        cached: Tokens of the input read from the provider's cache.
        takes: Micros from arrival at the provider to the end of the answer.
        leaves: Instant at which the client hangs up, or 0; `ends`: at which its answer is over.
        returns: How often it may still come back after a refusal; `keeps`: whether it does so at
            all, and is kept a place; `asked_again`: when it last did.
        patience: How long its client waits.
        sent: When the attempt that was served went out; `waited` until then.
        attempt: Numbers the attempts from 1.
        mine: What the strategy keeps with it.
        target: Where the present attempt goes; `tickets`: what the provider keeps with it.
    """

    __slots__ = (
        "agent", "asked", "asked_again", "attempt", "cached", "cap", "counted", "ends", "gateway",
        "input", "keeps", "leaves", "mine", "model", "number", "output", "over", "patience",
        "principal", "produced", "returns", "sent", "serving", "session", "source", "takes",
        "target", "tenant", "tickets", "tier", "usage", "wish",
    )  # fmt: skip

    def __init__(self, number: int, source: Source, asked: Micros) -> None:
        self.number = number
        self.source = source
        self.agent = source.name
        self.gateway = source.gateway
        self.principal = source.principal
        self.model = source.model
        self.wish = source.wish
        self.tier = source.wish or 2
        self.asked = asked
        self.input: Tokens = 0
        self.output: Tokens = 0
        self.cap: Tokens = 0
        self.counted: Tokens = 0
        self.cached: Tokens = 0
        self.takes: Micros = 0
        self.leaves: Micros = 0
        self.ends: Micros = 0
        self.returns = 0
        self.keeps = False
        self.patience: Micros = PATIENCE
        self.asked_again: Micros = 0
        self.sent: Micros = 0
        self.attempt = 1
        self.produced: Tokens = 0
        self.over = False
        self.serving = False
        self.session = ""
        self.tenant = ""
        self.mine: object = None
        self.tickets: list[Ticket] = []
        self.target: Target = NOWHERE
        self.usage: Usage | None = None


class Source:
    """Where calls come from: an agent of a population, or the recorded calls of one.

    Attributes:
        name: Unique; also the concrete agent where the policy's rule covers many.
        principal: The agent of the policy.
        gateway: Index of the gateway that it calls.
    """

    __slots__ = ("gateway", "model", "name", "principal", "wish")

    def __init__(self, name: str, principal: str, model: str, wish: int, gateway: int) -> None:
        self.name = name
        self.principal = principal
        self.model = model
        self.wish = wish
        self.gateway = gateway


def draw_length(rng: Random, lengths: Lengths) -> Tokens:
    """A log-normal length within its bounds."""
    drawn = int(exp(log(lengths.median) + lengths.sigma * rng.gauss(0.0, 1.0)))
    return min(lengths.most, max(lengths.least, drawn))


class Agent(Source):
    """One closed loop."""

    __slots__ = ("_kind", "_outputs", "_pace", "_rng", "group")

    def __init__(
        self, group: Population, index: int, *, seed: int, gateway: int, wish: int, pace: Pace
    ) -> None:
        name = f"{group.name}-{index}"
        principal = group.principals[index % len(group.principals)]
        super().__init__(name, principal, group.model, wish, gateway)
        self.group = group
        self._pace = pace
        self._rng = stream(seed, "agent", group.name, index)
        self._kind = self._rng.randrange(len(group.outputs))
        self._outputs = group.outputs[self._kind]

    def first(self) -> Micros:
        """How long after the beginning it asks for the first time."""
        return int(self.pause(0) * self._rng.random())

    def pause(self, now: Micros) -> Micros:
        """From an answer to the next call."""
        mean = self._pace.mean(now, self._kind)
        return max(LEAST_PAUSE, int(self._rng.expovariate(1.0) * mean * MICRO))

    def ask(self, number: int, now: Micros) -> Op:
        """Its next call."""
        op, rng, group = Op(number, self, now), self._rng, self.group
        op.input = draw_length(rng, group.input)
        output = draw_length(rng, self._outputs)
        caps = group.caps
        op.cap = caps[0] if len(caps) == 1 else caps[rng.randrange(len(caps))]
        op.output = min(output, op.cap) if op.cap else output
        op.counted = max(1, op.input * group.counted // WHOLE)
        op.cached = op.input * group.cached // WHOLE
        op.session = self.name if group.cached else ""
        op.takes = self._pace.takes(op.output, rng)
        op.returns = group.returns
        op.keeps = group.returns > 0
        op.patience = group.patience
        leaving = group.leaving
        if leaving is not None and rng.random() * WHOLE < leaving.share:
            op.leaves = now + leaving.after
        return op


class Pace:
    """How fast a population must call to ask for its share of the quota."""

    __slots__ = ("_at", "_means", "upstream")

    def __init__(
        self, group: Population, upstream: Upstream, *, limit: Tokens, cost: float, seed: int
    ) -> None:
        """Means are worked out once.

        Args:
            group: Whose pace.
            upstream: How long answers take.
            limit: The quota of its model per minute.
            cost: What its mean call charges of that quota.
            seed: Of the run.
        """
        self.upstream = upstream
        rng = stream(seed, "pace", group.name)
        kinds = len(group.outputs)
        drawn = [draw_length(rng, group.outputs[i % kinds]) for i in range(SAMPLED)]
        way = (upstream.first_token + upstream.network + upstream.jitter) / MICRO
        stretch = sum(SPREAD) / 2 / upstream.rate
        busy = [
            way + stretch * sum(lengths) / len(lengths)
            for lengths in (drawn[kind::kinds] for kind in range(kinds))
        ]
        per_second = limit / (MINUTE / MICRO) / cost
        self._at = [at for at, _ in group.load]
        self._means = [
            pauses(busy, rate=share * per_second / WHOLE / group.agents) for _, share in group.load
        ]

    def mean(self, now: Micros, kind: int) -> float:
        """The mean pause in seconds of agents of that kind of output."""
        return self._means[max(0, bisect_right(self._at, now) - 1)][kind]

    def takes(self, output: Tokens, rng: Random) -> Micros:
        """How long an answer of that length takes, from arrival to end."""
        upstream = self.upstream
        stretched = output / upstream.rate * (SPREAD[0] + (SPREAD[1] - SPREAD[0]) * rng.random())
        return upstream.first_token + int(stretched * MICRO)


def pauses(busy: Sequence[float], *, rate: float) -> list[float]:
    """Mean pauses by kind of agent, so that the mean agent calls at that rate.

    Agents that wait long for their answers cannot call as often as others; those who can make up
    for them, all in one and the same cycle. `LEAST_CYCLE` where even that is too slow.

    Args:
        busy: Seconds that an answer takes, by kind.
        rate: Calls per second and agent.
    """
    if rate <= 0:
        return [NEVER] * len(busy)
    low, high = 0.0, 1 / rate + max(busy)
    for _ in range(HALVINGS):
        cycle = (low + high) / 2
        called = sum(1 / max(cycle, took + LEAST_CYCLE) for took in busy) / len(busy)
        low, high = (cycle, high) if called > rate else (low, cycle)
    return [max(LEAST_CYCLE, high - took) for took in busy]


def mean_cost(group: Population, seed: int, *, by_cap: bool, requests: bool) -> float:
    """What the mean call of a population charges a meter.

    Args:
        group: Whose calls.
        seed: Of the run.
        by_cap: Whether output is charged by its cap.
        requests: Whether only requests are counted.
    """
    if requests:
        return 1.0
    rng = stream(seed, "cost", group.name)
    total = 0
    for i in range(SAMPLED):
        total += draw_length(rng, group.input)
        cap = group.caps[i % len(group.caps)]
        output = draw_length(rng, group.outputs[i % len(group.outputs)])
        total += cap if by_cap and cap else min(output, cap or output)
    return total / SAMPLED


def dealt(index: int, of: int, shares: Sequence[int]) -> int:
    """Into which of these shares the agent falls, when dealt out evenly in order."""
    at, total = (2 * index + 1) * sum(shares), 0
    for i, share in enumerate(shares):
        total += share
        if at < 2 * of * total:
            return i
    return len(shares) - 1


def agents(group: Population, shares: tuple[int, ...], pace: Pace, *, seed: int) -> list[Agent]:
    """The agents of a population, tiers dealt out in order, gateways by chance."""
    where, total = stream(seed, "gateways", group.name), sum(shares)
    edges = list(accumulate(shares))
    found = []
    for index in range(group.agents):
        wish = dealt(index, group.agents, group.tiers) + 1 if any(group.tiers) else 0
        gateway = min(bisect_right(edges, where.random() * total), len(shares) - 1)
        found.append(Agent(group, index, seed=seed, gateway=gateway, wish=wish, pace=pace))
    return found
