"""Every metric name and label set of the gateway process. Pinned by a test: dashboards use them.

No agent, key, session or call is ever a label. Model, pool, provider and scope names come from
policy or from callers, so every family has a bound (`SERIES`): past it, open labels become `other`,
and past a small spare all labels do. Together the bounds keep a page below 1,000 samples
(`performance.md` §8), because rendering fights the loop for the interpreter. Layers call plain
methods that take names and integers and cost a dictionary look-up and an increment. Counters count
what ended; gauges that mirror other parts (pools, timers) are set when a page is asked for.

Over 600 lines because it is one table: every family of the process with its labels and its bound.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.telemetry.tallies import Spread, Tally
from gateway.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from gateway.admission.profiles import Usage
    from gateway.admission.store import PoolView
    from gateway.clock import Clock
    from gateway.units import Micros, Tokens

OTHER = "other"
SPARE = 16
"""Series a full family may still open with its closed labels, before all labels become `other`."""

SERIES = {
    "calls": 96, "tokens": 60, "models": 24, "waits": 8, "pools": 20, "answers": 40,
    "first_byte": 5, "few": 14, "loops": 30, "tools": 6,
}  # fmt: skip
"""Series of a family, by what they count."""

MOST_KNOWN = 1_024
"""Sets of raw values whose child is remembered, per family."""

STATUSES = frozenset(
    (
        *range(200, 207), 301, 302, 304, 307, 308, *range(400, 406), 408, 409, 413, 415, 422, 424,
        426, 429, 499, *range(500, 505), 507, 520, 522, 524, 529,
    )
)  # fmt: skip
"""Statuses shown as they are; any other one as its class, `2xx` to `5xx`."""

WAIT_BUCKETS = (0.005, 0.05, 0.25, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
FIRST_BYTE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)
TOOL_BUCKETS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0, 60.0, 300.0)
OVERHEAD_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)

LANES = ("task", "1", "2", "3")
"""Lane 0 carries calls of interactive tasks; lanes 1 to 3 are the tiers."""

Kind = TypeVar("Kind", Counter, Gauge, Histogram)
Child = TypeVar("Child", Tally, Gauge, Spread)
Fold: TypeAlias = "Callable[..., tuple[str, ...]]"


def _as_they_are(*values: str) -> tuple[str, ...]:
    return values


class Bounded:
    """A label value kept as it is for the first `limit` of them, `other` beyond."""

    __slots__ = ("_limit", "_seen")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        """The value, or `other`."""
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return OTHER
        self._seen.add(value)
        return value


class Family(Generic[Child]):
    """One metric name whose children are bound once, at most `bound` and a spare of them.

    Attributes:
        fold: Makes labels of the values that callers give (a pool's full name, a status): once for
            each set of values, as long as that is remembered.
        known: Children by values as given. What every call counts looks here first: a dictionary is
            half as dear as a call.
    """

    __slots__ = ("_bound", "_children", "_make", "_open", "fold", "known")

    def __init__(
        self,
        make: Callable[[tuple[str, ...]], Child],
        *,
        bound: int,
        open_labels: tuple[int, ...],
    ) -> None:
        self._make: Callable[[tuple[str, ...]], Child] = make
        self._bound = bound
        self._open = frozenset(open_labels)
        self.fold: Fold = _as_they_are
        self._children: dict[tuple[str, ...], Child] = {}
        self.known: dict[tuple[object, ...], Child] = {}

    def __call__(self, *values: str | int) -> Child:
        """The child of these values, in the order of the labels."""
        child = self.known.get(values)
        if child is None:
            child = self._bind(self.fold(*values))
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            self.known[values] = child
        return child

    def _bind(self, values: tuple[str, ...]) -> Child:
        key = values
        if key not in self._children and len(self._children) >= self._bound:
            key = tuple(OTHER if at in self._open else value for at, value in enumerate(values))
            if key not in self._children and len(self._children) >= self._bound + SPARE:
                key = (OTHER,) * len(values)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._make(key)
        return child

    def __iter__(self) -> Iterator[Child]:
        """All children bound so far."""
        return iter(self._children.values())

    def __len__(self) -> int:
        """Children bound so far."""
        return len(self._children)


_SHOWN = {status: str(status) for status in STATUSES}


def status_label(status: int) -> str:
    """A bounded name of a status; `none` where no head came."""
    shown = _SHOWN.get(status)
    if shown is not None:
        return shown
    if 100 <= status <= 599:
        return f"{status // 100}xx"
    return "none" if status == 0 else OTHER


def pool_label(name: str) -> str:
    """The pool's own name for provider quotas; only its kind for pools of agents and tenants."""
    kind, colon, rest = name.partition(":")
    if not colon:
        return name
    return rest if kind == "pool" else kind


class Metrics:
    """The books of this process. Made once by the composition root, on a registry of its own."""

    _under_way = 0

    def __init__(  # noqa: PLR0915 - one table: every family once
        self, registry: CollectorRegistry | None = None, *, version: str = ""
    ) -> None:
        """All families are declared, so that a page names them before their first sample."""
        self.registry = registry or CollectorRegistry()
        self._written: list[Tally | Spread] = []
        self.catalogue: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._pool_names = Bounded(SERIES["pools"])
        self._model_names = Bounded(SERIES["models"])
        calls, few, pools = SERIES["calls"], SERIES["few"], SERIES["pools"]
        models = SERIES["models"]

        # --- calls, as the client sees them
        self._calls = self._counter(
            "calls", "Calls ended, by how they ended", "dialect model status outcome", calls, 1
        )
        self._refusals = self._counter("refusals", "Refusals by reason", "reason", few, 0)
        self._in_flight = self._gauge("in_flight", "Calls under way, waiting ones included")
        self._overhead = self._histogram(
            "overhead_seconds", "Our own part of a call: neither waiting nor upstream",
            "", OVERHEAD_BUCKETS, few,
        )  # fmt: skip
        self._keepalives = self._counter(
            "keepalives", "Keep-alives sent to waiting clients", "dialect", few, 0
        )
        self._shadowed = self._counter(
            "shadowed", "What a rule in shadow mode would have done", "verdict", few, 0
        )

        self._loops = self._counter(
            "loops", "What loop rules did: refused, warned, shadowed", "rule stage", SERIES["loops"]
        )
        self._gated = self._counter(
            "tool_gate", "What the gate of the tool plane did", "what verdict", few, 0
        )

        # --- tokens and money
        self._reserved = self._counter(
            "tokens_reserved", "Tokens reserved at admission", "model", models, 0
        )
        self._used = self._counter(
            "tokens_used", "Tokens settled; reasoning is a share of output", "model kind",
            SERIES["tokens"], 0,
        )  # fmt: skip
        self._cost = self._counter("cost_microusd", "Micro-dollars settled", "model", models, 0)
        self._usage_estimated = self._counter(
            "usage_estimated", "Calls settled by an estimate: usage was missing", "model", models, 0
        )
        self._input_estimated = self._counter(
            "input_estimated", "Prompts not counted exactly, by reason", "reason", few, 0
        )
        self._settlement_failures = self._counter(
            "settlement_failures", "Settlements that could not be written", "", few
        )
        self._malformed = self._counter(
            "malformed_events", "Stream events that accounting skipped", "dialect", few, 0
        )
        self._tokenizer_exact = self._gauge(
            "tokenizer_exact", "1 where the vocabulary is verified", "encoding", few, 0
        )

        # --- admission
        self._waits = self._histogram(
            "admission_wait_seconds", "Waiting per pool until granted", "pool tier",
            WAIT_BUCKETS, SERIES["waits"], 0,
        )  # fmt: skip
        self._waiting = self._gauge("waiting", "Calls waiting now", "pool tier", pools * 2, 0)
        self._pool_in_flight = self._gauge(
            "admission_in_flight", "Permits out now", "pool", pools, 0
        )
        self._use = self._gauge(
            "admission_use_ratio", "Share of the limit in use", "pool dimension", pools * 2, 0
        )
        self._foreign = self._gauge(
            "admission_foreign_ratio", "Share of the limit that others use", "pool dimension",
            pools * 2, 0,
        )  # fmt: skip
        self._factor = self._gauge("admission_factor", "Adaptive multiplier", "pool", pools, 0)
        self._blocked = self._gauge(
            "admission_blocked_seconds", "Left of the provider's word to wait", "pool", pools, 0
        )
        self._shed = self._counter(
            "admission_shed", "Calls refused because they would be late", "pool", pools, 0
        )
        self._mirrored = (
            self._waiting, self._pool_in_flight, self._use, self._foreign, self._factor,
            self._blocked,
        )  # fmt: skip
        self._mode = self._gauge("admission_mode", "1 for the store's present mode", "mode", few, 0)

        # --- upstreams
        self._upstream = self._counter(
            "upstream_answers", "Heads received, by status", "provider status", SERIES["answers"], 0
        )
        self._provider_refusals = self._counter(
            "provider_refusals", "Answers that refuse, by meaning", "kind", few, 0
        )
        self._transport_faults = self._counter(
            "transport_faults", "Exchanges that broke", "provider kind", pools, 0
        )
        self._first_byte = self._histogram(
            "first_byte_seconds", "From sending to the head", "provider",
            FIRST_BYTE_BUCKETS, SERIES["first_byte"], 0,
        )  # fmt: skip
        self._connections = self._gauge("upstream_connections", "Upstream connections in use")
        self._retries = self._counter("retries", "Further attempts, by reason", "reason", few, 0)
        self._downgrades = self._counter(
            "downgrades", "Calls served by another rung, by reason", "reason", few, 0
        )
        self._breaker_failures = self._counter(
            "breaker_failures", "Failures that breakers counted", "scope", few, 0
        )
        self._breaker_changes = self._counter(
            "breaker_changes", "Changes of state", "state", few, 0
        )
        self._breaker_open = self._gauge(
            "breaker_open", "1 open, 0.5 half-open, 0 closed", "scope", few, 0
        )

        # --- the process
        self._revision = self._gauge("policy_revision", "Revision in force")
        self._reload_errors = self._counter("policy_reload_errors", "Loads refused", "", few)
        self._log_dropped = self._counter(
            "log_dropped", "Log lines dropped because the reader was slow", "", few
        )
        self._timers = self._gauge("timers_armed", "Timers of the loop that are ours")
        self._declare_beside(few)
        build = self._gauge("build_info", "1 for the running version", "version", 1, 0)
        build(version or "unknown").set(1)

    # --- declaring

    def _fold_names(self) -> None:
        """What callers, pools and upstreams are called becomes a label with a bound."""
        model, pool = self._model_names, self._pool_names
        self._calls.fold = lambda dialect, name, status, outcome: (
            dialect, model(name), status_label(status), outcome,
        )  # fmt: skip
        self._upstream.fold = lambda provider, status: (provider, status_label(status))
        self._waits.fold = lambda name, tier: (pool(pool_label(name)), LANES[tier])
        for per_model in (self._reserved, self._cost, self._usage_estimated):
            per_model.fold = lambda name: (model(name),)
        self._used.fold = lambda name, kind: (model(name), kind)

    def _declare_beside(self, few: int) -> None:
        """Held calls, and the tool plane."""
        self._declare_holds(few)
        self._tool_seconds = self._histogram(
            "tool_seconds", "Calls of tools from arrival to end (mcp.server.operation.duration)",
            "server outcome", TOOL_BUCKETS, SERIES["tools"], 0,
        )  # fmt: skip
        self._tool_sessions = self._gauge(
            "tool_sessions",
            "Held: clients' sessions, streams, commands, servers heard",
            "kind",
            few,
        )

    def _declare_holds(self, few: int) -> None:
        self._holds = self._counter("holds", "What became of held calls", "event", few, 0)
        self._holds_waiting = self._gauge("holds_waiting", "Calls held now", "tier", 3)
        self._webhooks = self._counter("webhooks", "Deliveries by outcome", "outcome", few, 0)
        self._fold_names()

    def _note(self, name: str, kind: str, labels: str) -> tuple[str, tuple[str, ...]]:
        full, names = f"tidegate_{name}", tuple(labels.split())
        self.catalogue[f"{full}_total" if kind == "counter" else full] = (kind, names)
        return full, names

    def _counter(
        self, name: str, text: str, labels: str, bound: int, *open_labels: int
    ) -> Family[Tally]:
        full, names = self._note(name, "counter", labels)
        metric = Counter(full, text, names, registry=self.registry)

        def make(values: tuple[str, ...]) -> Tally:
            tally = Tally(_labelled(metric, values))
            self._written.append(tally)
            return tally

        return _family(make, names, bound, open_labels)

    def _gauge(
        self, name: str, text: str, labels: str = "", bound: int = 1, *open_labels: int
    ) -> Family[Gauge]:
        full, names = self._note(name, "gauge", labels)
        metric = Gauge(full, text, names, registry=self.registry)
        return _family(lambda values: _labelled(metric, values), names, bound, open_labels)

    def _histogram(
        self,
        name: str,
        text: str,
        labels: str,
        buckets: tuple[float, ...],
        bound: int,
        *open_labels: int,
    ) -> Family[Spread]:
        full, names = self._note(name, "histogram", labels)
        metric = Histogram(full, text, names, registry=self.registry, buckets=buckets)

        def make(values: tuple[str, ...]) -> Spread:
            spread = Spread(_labelled(metric, values), buckets)
            self._written.append(spread)
            return spread

        return _family(make, names, bound, open_labels)

    # --- calls

    def call_started(self) -> None:
        """One more call is under way."""
        self._under_way += 1

    def call_ended(self, *, dialect: str, model: str, status: int, outcome: str) -> None:
        """A call under way has ended.

        Args:
            dialect: Of the route.
            model: As served; "" where none was chosen.
            status: As the client saw it; 0 where it left before the head.
            outcome: ok, failed, cancelled or refused.
        """
        self._under_way -= 1
        calls = self._calls
        child = calls.known.get((dialect, model, status, outcome))
        (child or calls(dialect, model, status, outcome)).total += 1

    def overhead(self, span: Micros) -> None:
        """Our own part of a call that was served."""
        (self._overhead.known.get(()) or self._overhead()).observe(span / MICRO)

    def refused(self, reason: str) -> None:
        """A refusal of ours, by its code."""
        self._refusals(reason).inc()

    def kept_alive(self, dialect: str) -> None:
        """A keep-alive was sent."""
        self._keepalives(dialect).inc()

    def shadowed(self, verdict: str) -> None:
        """A rule in shadow mode would have acted."""
        self._shadowed(verdict).inc()

    def gated(self, what: str, verdict: str) -> None:
        """The gate of the tool plane refused, replayed, asked or marked something."""
        self._gated(what, verdict).inc()

    def loop(self, rule: str, stage: str) -> None:
        """A loop rule spoke."""
        self._loops(rule, stage).inc()

    # --- tokens and money

    def reserved(self, model: str, tokens: Tokens) -> None:
        """Tokens were reserved for an attempt."""
        (self._reserved.known.get((model,)) or self._reserved(model)).total += tokens

    def settled(self, model: str, usage: Usage) -> None:
        """A call was settled, exactly once."""
        used = self._used
        if usage.input:
            (used.known.get((model, "input")) or used(model, "input")).total += usage.input
        if usage.output:
            (used.known.get((model, "output")) or used(model, "output")).total += usage.output
        if usage.cache_read:
            self._spent(model, "cache_read", usage.cache_read)
        if usage.cache_write:
            self._spent(model, "cache_write", usage.cache_write)
        if usage.reasoning:
            self._spent(model, "reasoning", usage.reasoning)
        if usage.money:
            self._cost(model).inc(usage.money)
        if usage.estimated:
            self._usage_estimated(model).inc()

    def _spent(self, model: str, kind: str, tokens: Tokens) -> None:
        (self._used.known.get((model, kind)) or self._used(model, kind)).total += tokens

    def input_estimated(self, reason: str) -> None:
        """A prompt was not counted exactly."""
        self._input_estimated(reason).inc()

    def settlement_failed(self) -> None:
        """A settlement could not be written."""
        self._settlement_failures().inc()

    def malformed_events(self, dialect: str, count: int) -> None:
        """Accounting skipped events of a stream."""
        self._malformed(dialect).inc(count)

    def tokenizer(self, encoding: str, *, exact: bool) -> None:
        """Whether the vocabulary of this encoding is verified."""
        self._tokenizer_exact(encoding).set(1 if exact else 0)

    # --- admission

    def waited(self, pool: str, tier: int, span: Micros) -> None:
        """A call was granted by a pool after so long; tier 0 is the lane of tasks."""
        (self._waits.known.get((pool, tier)) or self._waits(pool, tier)).observe(span / MICRO)

    def shed(self, pool: str) -> None:
        """A call was refused because it could not be served before its deadline."""
        self._shed(self._pool(pool)).inc()

    def mode(self, mode: str) -> None:
        """The store's mode: embedded, shared, local, closed or open."""
        for child in self._mode:
            child.set(0)
        self._mode(mode).set(1)

    def pools(self, views: Iterable[PoolView]) -> None:
        """Mirror all pools alive. Under one label counts add up and ratios take the highest."""
        # By child, not by label: names past a bound share one.
        values: dict[Gauge, float] = {}

        def add(child: Gauge, value: float) -> None:
            values[child] = values.get(child, 0.0) + value

        def most(child: Gauge, value: float) -> None:
            values[child] = max(values.get(child, 0.0), value)

        for view in views:
            pool = self._pool(view.name)
            for tier, lane in zip(LANES, view.lanes, strict=False):
                add(self._waiting(pool, tier), lane.waiting)
            add(self._pool_in_flight(pool), view.in_flight)
            most(self._factor(pool), view.factor_ppm / 1_000_000)
            most(self._blocked(pool), view.blocked_for / MICRO)
            for dimension in view.dimensions:
                if dimension.limit > 0:
                    most(self._use(pool, dimension.name), dimension.used / dimension.limit)
                    most(self._foreign(pool, dimension.name), dimension.foreign / dimension.limit)
        for family in self._mirrored:
            for child in family:
                child.set(values.get(child, 0.0))

    def _pool(self, name: str) -> str:
        return self._pool_names(pool_label(name))

    # --- upstreams

    def answered(self, provider: str, status: int, kind: str | None) -> None:
        """A head came; `kind` is the meaning of one that refuses."""
        upstream = self._upstream
        (upstream.known.get((provider, status)) or upstream(provider, status)).total += 1
        if kind:
            self._provider_refusals(str(kind)).inc()

    def transport_fault(self, provider: str, kind: str) -> None:
        """An exchange broke."""
        self._transport_faults(provider, kind).inc()

    def first_byte(self, provider: str, span: Micros) -> None:
        """From sending to the head."""
        self._first_byte(provider).observe(span / MICRO)

    def retried(self, reason: str) -> None:
        """A further attempt is made."""
        self._retries(reason).inc()

    def downgraded(self, reason: str) -> None:
        """Another rung serves the call."""
        self._downgrades(reason).inc()

    def breaker_failed(self, scope: str) -> None:
        """A breaker counted a failure."""
        self._breaker_failures(scope).inc()

    def breaker_changed(self, scope: str, state: str) -> None:
        """A breaker is now closed, open or half_open."""
        self._breaker_changes(state).inc()
        self._breaker_open(scope).set({"open": 1.0, "half_open": 0.5}.get(state, 0.0))

    # --- held calls

    def held(self, event: str) -> None:
        """A call was held, went back, or came to its end."""
        self._holds(event).inc()

    def holds_waiting(self, tiers: Mapping[int, int]) -> None:
        """Calls held now, by tier."""
        for tier, count in tiers.items():
            self._holds_waiting(str(tier)).set(count)

    def webhook(self, outcome: str) -> None:
        """A delivery was made, put off, or given up."""
        self._webhooks(outcome).inc()

    # --- the process

    def policy(self, revision: int) -> None:
        """This revision is in force."""
        self._revision().set(revision)

    def policy_refused(self) -> None:
        """A load was refused; the old policy stays."""
        self._reload_errors().inc()

    def log_dropped(self, count: int) -> None:
        """Log lines were lost."""
        self._log_dropped().inc(count)

    def process(self, *, timers: int, connections: int) -> None:
        """Mirror what the loop and the transport hold."""
        self._timers().set(timers)
        self._connections().set(connections)

    def tool_ended(self, server: str, outcome: str, span: Micros) -> None:
        """A call of a tool has ended, so long after it came."""
        self._tool_seconds(server, outcome).observe(span / MICRO)

    def tools(self, counts: Mapping[str, int]) -> None:
        """Mirror what the tool plane holds."""
        for kind, count in counts.items():
            self._tool_sessions(kind).set(count)

    # --- showing

    def collect(self) -> Iterator[Metric]:
        """All families without `_created` samples, which would double the page for nothing."""
        self._in_flight().set(self._under_way)
        for one in list(self._written):
            one.tell()
        for metric in self.registry.collect():
            if not metric.name.endswith("_created"):
                metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
                yield metric

    def render(self) -> bytes:
        """The page in Prometheus' text format. Milliseconds of CPU: call it in a thread."""
        return generate_latest(self)


class Page:
    """The rendered page, made in a thread at most once a second, by one renderer at a time."""

    __slots__ = ("_at", "_clock", "_made", "_metrics", "_refresh", "_rendering")

    def __init__(self, metrics: Metrics, clock: Clock, refresh: Callable[[], None]) -> None:
        """`refresh` sets the mirroring gauges; it runs on the loop, just before each rendering."""
        self._metrics = metrics
        self._clock = clock
        self._refresh = refresh
        self._at: Micros = -MICRO
        self._made = b""
        self._rendering: asyncio.Lock = asyncio.Lock()

    async def __call__(self) -> bytes:
        """A page at most one second old."""
        async with self._rendering:
            now = self._clock.now()
            if now - self._at >= MICRO:
                self._refresh()
                self._made = await asyncio.to_thread(self._metrics.render)
                self._at = now
            return self._made


def _labelled(metric: Kind, values: tuple[str, ...]) -> Kind:
    """A metric without labels is its own child."""
    return metric.labels(*values) if values else metric


def _family(
    make: Callable[[tuple[str, ...]], Child],
    names: tuple[str, ...],
    bound: int,
    open_labels: tuple[int, ...],
) -> Family[Child]:
    family = Family(make, bound=bound, open_labels=open_labels)
    if not names:
        family()  # bound at once: a bound of its own would rename it
    return family
