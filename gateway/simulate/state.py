"""What simulated gateways keep: of a call, of a deployment, of themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import ceil
from typing import TYPE_CHECKING

from gateway.admission.estimate import Learned
from gateway.admission.profiles import Estimate
from gateway.resilience.ladder import Rung, Wanted, unfit

if TYPE_CHECKING:
    from gateway.admission.core import PoolSpec
    from gateway.admission.profiles import Accounting, Usage
    from gateway.resilience.attempts import Attempts
    from gateway.resilience.breaker import Breaker
    from gateway.resilience.budget import RetryBudget
    from gateway.simulate.link import Client
    from gateway.simulate.workload import Op
    from gateway.snapshot import AgentRule, Deployment, Model, Tier
    from gateway.units import Micros


FAMILY = "openai"
"""The dialect of simulated calls, unless the provider speaks another one only."""


@dataclass(slots=True)
class Held:
    """One permit."""

    client: Client
    spec: PoolSpec
    cost: tuple[int, ...]
    accounting: Accounting
    rid: str


@dataclass(slots=True)
class Mine:
    """What Tidegate knows of one call.

    Attributes:
        step: Index of the next pool of `pools` to be taken.
        own: True while the caller's own limits are taken; `rid` is their request id.
        told: Pool and tag of the place it was told to come back to.
        turn: Counts waits outside pools; an alarm of another turn is stale.
        tried: Its further attempts; None before the first.
        scope: Its present rung at its gateway; None until asked for.
        inside: Whether it stands in the pools of its deployment, unsent.
    """

    rule: AgentRule
    tier: Tier
    model: Model
    deadline: Micros
    rungs: list[Deployment]
    pools: tuple[PoolSpec, ...]
    rid: str
    rung: int = 0
    estimate: Estimate | None = None
    step: int = 0
    own: bool = True
    mine: list[Held] = field(default_factory=list)
    theirs: list[Held] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)
    meters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tried: Attempts | None = None
    scope: Scope | None = None
    told: tuple[str, int] | None = None
    probe: int = 0
    turn: int = 0
    inside: bool = False
    begun: bool = False
    asking: Held | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What policy says of calls of one agent for one model with one wish, looked up once.

    Attributes:
        longest: How long they may wait, as far as policy says.
        tenant: Whose share of a pool they use.
        pools: The caller's own.
    """

    rule: AgentRule
    tier: Tier
    model: Model
    first: Deployment
    longest: Micros
    tenant: str
    pools: tuple[PoolSpec, ...]


class Scope:
    """One deployment at one gateway: its breaker, who waits for it, who stands in its pools."""

    __slots__ = ("breaker", "budget", "inside", "undecided", "waiting")

    def __init__(self, breaker: Breaker, budget: RetryBudget) -> None:
        self.breaker = breaker
        self.budget = budget
        self.inside: dict[Op, None] = {}
        self.waiting: dict[Op, None] = {}
        self.undecided = 0


class Gateway:
    """What one process keeps for itself."""

    __slots__ = ("clients", "learned", "producing", "scopes")

    def __init__(self) -> None:
        self.learned = Learned()
        self.scopes: dict[str, Scope] = {}
        self.clients: dict[str, Client] = {}
        self.producing: dict[str, int] = {}

    def expected(self, op: Op, rule: AgentRule, deployment: Deployment) -> Estimate:
        """What the call is expected to cost there, as `layers/estimate.py` has it."""
        learned, cap = self.learned, op.cap or None
        bias = learned.bias.factor(deployment.id, tools=False, images=False)
        tokens = ceil(op.counted * bias)
        most = deployment.max_output or None
        output = learned.outputs.predict(deployment.id, rule.id, cap=cap, most=most)
        cached = min(tokens, learned.cache.predict(op.session, tokens)) if op.session else 0
        return Estimate(
            input=tokens,
            output=output,
            cap=cap,
            cached=cached,
            money=deployment.price.expected(tokens, cached, output),
            bias=bias,
            high=learned.outputs.high(deployment.id, rule.id) if cap is None and output else None,
        )

    def learn(
        self, op: Op, rule: AgentRule, deployment: Deployment, estimate: Estimate, usage: Usage
    ) -> None:
        """What the call really cost."""
        learned = self.learned
        total = (usage.input or 0) + (usage.cache_read or 0)
        learned.bias.learn(
            deployment.id,
            counted=estimate.input / estimate.bias,
            reported=total,
            tools=False,
            images=False,
        )
        learned.outputs.learn(deployment.id, rule.id, usage.output or 0)
        if op.session:
            learned.cache.learn(op.session, read=usage.cache_read or 0, of=total)


def allowed(rule: AgentRule, model: str) -> bool:
    """Whether the agent may use that model."""
    return any(fnmatchcase(model, pattern) for pattern in rule.models)


def spare_rungs(model: Model, first: Deployment, estimate: Estimate | None) -> list[Deployment]:
    """The rungs after the first that can serve a call of that size."""
    assert estimate is not None  # noqa: S101 - made before
    wanted = Wanted(
        dialect=FAMILY if FAMILY in first.provider.dialects else "anthropic",
        input=estimate.input,
        cap=estimate.cap,
        needs=frozenset(),
    )
    return [
        rung
        for rung in model.deployments
        if rung is not first and unfit(rung_of(rung), wanted) is None
    ]


def rung_of(deployment: Deployment) -> Rung:
    """The deployment as the ladder sees it."""
    return Rung(
        id=deployment.id,
        dialects=deployment.provider.dialects,
        context_window=deployment.context_window,
        max_output=deployment.max_output,
        capabilities=deployment.capabilities,
        provider=deployment.provider.name,
    )
