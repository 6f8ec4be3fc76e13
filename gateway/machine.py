"""The parts of a running gateway, made once, wired, and closed together.

`app.py` owns the process (signals, sockets, order of start and stop); this file owns what a call
passes through. Nothing here decides about a call.
"""

from __future__ import annotations

import importlib
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway import __version__, bodies
from gateway.admission.estimate import Learned
from gateway.admission.local import LocalStore
from gateway.admission.places import Tickets
from gateway.admission.remote import FailMode
from gateway.desk import Desk
from gateway.holds.push import Pushing
from gateway.holds.resume import Resuming
from gateway.http1.transport import Http1Transport
from gateway.identity import Identities, JwksSource, derive, process_secret
from gateway.layers.admit import Admission
from gateway.layers.count import CountTokens
from gateway.layers.dispatch import Credentials, Dispatch
from gateway.layers.estimate import Estimating
from gateway.layers.gate import Gate
from gateway.layers.guard_loops import LoopGuard
from gateway.layers.hold import Holding
from gateway.layers.identify import Recognizer
from gateway.layers.invoke import Invoke
from gateway.layers.models import Models
from gateway.layers.observe import Observing
from gateway.layers.retry import Retrying
from gateway.layers.settle import Settling, unpacked
from gateway.layers.target import Target
from gateway.layers.trace import Tracing
from gateway.layers.trip import Breakers
from gateway.pipeline import Parts, held_pipeline
from gateway.record import MOST_REFUSALS, MOST_REFUSED_BYTES, Recorder, Refusals
from gateway.resilience.breaker import State
from gateway.resilience.budget import RetryBudget
from gateway.sealing import AesSeal
from gateway.sharing import Sharing
from gateway.spending import Spending
from gateway.steering import OwnLimits, Steering
from gateway.telemetry.decisions import Decisions
from gateway.telemetry.traces import open_spans
from gateway.tokens import Counter, Missing, Vocabulary
from gateway.tools.guards import Guards, Upkeep, guards
from gateway.tools.remote import Remote
from gateway.tools.wiring import Tools
from gateway.webhooks import Webhooks
from scheduler import api as scheduler

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Iterator, Mapping
    from pathlib import Path

    from gateway.admission.core import PoolSpec
    from gateway.admission.shared import SharedStore
    from gateway.call import Call
    from gateway.clock import LoopClock
    from gateway.policy.watch import PolicyWatch
    from gateway.resilience.breaker import Breaker
    from gateway.settings import Settings
    from gateway.snapshot import Snapshot
    from gateway.telemetry.logs import Log, Redactor
    from gateway.telemetry.metrics import Metrics
    from gateway.units import Rng
    from gateway.upstream import PooledTransport
    from scheduler.api import Approval

    Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]


def decoded(call: Call) -> Mapping[str, Any]:
    """The call's body once more, after the parsed copy was dropped."""
    return bodies.decode(unpacked(call.coding, call.body))


def encodings(snapshot: Snapshot) -> tuple[str, ...]:
    """Every encoding that a deployment of this policy counts with."""
    found = {
        deployment.encoding
        for model in snapshot.models.values()
        for deployment in model.deployments
    }
    return tuple(sorted(found | {"o200k_base"}))


def missing_vocabulary(snapshot: Snapshot, folder: Path) -> str:
    """Why a policy that requires exact counts cannot have them here; "" where it can."""
    if snapshot.tokenizer != "required":
        return ""
    for encoding in encodings(snapshot):
        opened = Vocabulary(folder).open(encoding)
        if isinstance(opened, Missing):
            return opened.warning
    return ""


PROBE_NAME = "x"
"""A concrete name for each pattern: what a family's models share is the same for all of them."""


def pools_of(snapshot: Snapshot) -> Iterator[PoolSpec]:
    """The pools of this policy that can be named without a call, some of them more than once."""
    named = [pattern.make(PROBE_NAME) for pattern in snapshot.patterns]
    for model in (*snapshot.models.values(), *named):
        for deployment in model.deployments:
            yield from deployment.pools
    for provider in snapshot.providers.values():
        yield from (*provider.passthrough_pools, *provider.count_tokens_pools)
    for agent in snapshot.agents.values():
        yield from (*agent.pools, *agent.tenant_pools)
    for server in snapshot.servers.values():
        yield from server.pools


def upstreams_of(snapshot: Snapshot) -> set[str]:
    """Base URLs that calls pinned to this policy may reach."""
    servers = (server.provider for server in snapshot.servers.values())
    return {one.base_url for one in (*snapshot.providers.values(), *servers)}


def secrets_of(snapshot: Snapshot) -> list[str]:
    """Every secret that this policy holds, for the log's redaction by value."""
    found: list[str] = []
    for provider in snapshot.providers.values():
        found += [one.secret.reveal() for one in provider.credentials]
        found += [value.reveal() for _, value in provider.extra_headers]
        if provider.query is not None:
            found.append(provider.query.reveal())
    for server in snapshot.servers.values():
        found += [one.secret.reveal() for one in server.provider.credentials]
        found += [value.reveal() for _, value in (*server.provider.extra_headers, *server.env)]
    if snapshot.fleet.redis is not None:
        found.append(snapshot.fleet.redis.reveal())
    hooks = snapshot.holds.webhooks
    if hooks.secret is not None:
        found.append(hooks.secret.reveal())
    return found


def transport_of(name: str, clock: LoopClock) -> PooledTransport:
    """How bytes reach providers, by its name in `settings.TRANSPORTS`."""
    if name == "http1":
        return Http1Transport(clock)
    # Only where it is asked for: aiohttp takes longer to import than the gateway to start.
    module = importlib.import_module("gateway.upstream_aiohttp")
    transport: PooledTransport = module.AiohttpTransport()
    return transport


class Machine:
    """Everything a call passes through. An asynchronous context: closed when it ends.

    Attributes:
        parts: What the pipeline is stacked from.
        spawn: How a task gets an owner; set by `app.py` inside its task group.
        store, transport, counter, breakers, decisions, identities: For status and readiness.
        sharing: The fleet that this process belongs to; None: it is alone.
        revoked: Ids of principals that are refused, whatever policy says.
        refused, refusals: What was refused before the pipeline, and who writes it down.
        tools: The tool plane below the layers.
        tasks, resuming: The store of what is durable, and who executes the calls held in it.
        spending: Writes down what budgets have used; None: the shared store does.
    """

    def __init__(  # noqa: PLR0913 - what the process owns, each once
        self,
        *,
        settings: Settings,
        clock: LoopClock,
        rng: Rng,
        metrics: Metrics,
        log: Log,
        redact: Redactor,
        watch: PolicyWatch,
    ) -> None:
        self._redact = redact
        self._level = settings.log_level
        redact.replace(secrets_of(watch.current))
        log.level = self._level or watch.current.logs.level
        self.clock = clock
        self.metrics = metrics
        self.log = log
        self.watch = watch
        self.settings = settings
        self.spans = open_spans(settings.otlp_endpoint, version=__version__)
        self._stamps: dict[int, int] = {}
        self.sharing = self._sharing(rng)
        self.revoked: set[str] = set() if self.sharing is None else self.sharing.revoked
        self.store: LocalStore | SharedStore = (
            LocalStore(clock) if self.sharing is None else self.sharing.store
        )
        self.transport = transport_of(settings.transport, clock)
        self.counter = Counter(Vocabulary(settings.vocabulary_dir).open, clock=clock)
        self.decisions = Decisions(redact)
        self.refused = Decisions(redact, most_calls=MOST_REFUSALS, most_bytes=MOST_REFUSED_BYTES)
        self.refusals = Refusals(log, self.refused, lambda: watch.current.places)
        self.sources = JwksSource()
        self.identities = Identities(clock=clock, fetch=self.sources)
        self.breakers = Breakers(on_change=self._breaker_changed, on_failure=self._breaker_failed)
        self.credentials = Credentials(clock, rng)
        self.loops = LoopGuard(on_loop=metrics.loop)
        self.loaded = False
        self.spawn: Spawn | None = None
        secret = process_secret(settings.state_dir, settings.secret_file, secrets.token_bytes)
        self.hooks = Webhooks(clock)
        seal = AesSeal(derive(secret, "holds"), secrets.token_bytes)
        self.tasks = scheduler.open(settings.state_dir, seal=seal)
        self.spending = (
            Spending(self.store, self.tasks.usage, clock, log)
            if isinstance(self.store, LocalStore)
            else None  # a fleet keeps its budgets in the shared store
        )
        self.resuming = self._resuming(rng)
        self.tools = Tools(
            Remote(self.transport, clock),
            clock,
            key=derive(secret, "mcp-session"),
            rng=rng,
            environment=settings.environment,
        )
        self.tools.pipes.on_line = lambda server, text: log.info(
            "tool_server_stderr", server=server, text=text
        )
        self.parts = self._wire(rng, Tickets(derive(secret, "place")))
        self.desk = Desk(
            self.tasks, self.guards.consent, snapshot=lambda: watch.current, clock=clock
        )
        self.resuming.serve_by(held_pipeline(self.parts))
        watch.on_swap.append(self._swapped)
        watch.on_refused.append(self._refused)
        metrics.policy(watch.current.revision)
        metrics.mode("embedded" if self.sharing is None else "shared")
        if self.sharing is not None:
            self._join(self.sharing)

    def _join(self, fleet: Sharing) -> None:
        """What this process shares with the others of its fleet is wired."""
        self.loops.fleet = fleet
        fleet.books.known = self.loops.books
        self.parts.estimating.chains = fleet.chains
        self.guards.repeats.fleet = fleet.lists
        self.breakers.probes = fleet.probes
        fleet.connect(
            self.breakers, lambda: self.watch.current.breaker, self.watch.poke, self._begin_anew
        )
        self.tools.sessions.on_deleted = fleet.session_deleted
        fleet.on_session = self.tools.sessions.deleted_elsewhere
        self.tools.sessions.on_used = fleet.session_used
        fleet.on_session_used = self.tools.sessions.used_elsewhere
        self.tools.sessions.hears = lambda: not fleet.store.away

    def _sharing(self, rng: Rng) -> Sharing | None:
        """The fleet that settings or policy name; None: this process is alone."""
        settings, rules = self.settings, self.watch.current.fleet
        url = settings.redis_url or (rules.redis.reveal() if rules.redis is not None else "")
        if not url:
            return None
        return Sharing(
            url,
            clock=self.clock,
            rng=rng,
            gateway=f"{rng.getrandbits(64):016x}",
            prefix=rules.prefix,
            mode=FailMode(rules.when_away),
            cold=not settings.redis_new,
            stamp=self._stamp,
            on_mode=self._mode_changed,
        )

    def _stamp(self, revision: int) -> int:
        """The fleet-wide number of one of our revisions: when its policy was written."""
        if revision not in self._stamps:
            status = self.watch.status
            newest = max(self._stamps.values(), default=0) + 1
            self._stamps[revision] = max(newest, status.changed_at)
        return self._stamps[revision]

    def _breaker_failed(self, scope: str, breaker: Breaker) -> None:
        self.metrics.breaker_failed(scope)
        if self.sharing is not None:
            self.sharing.breaker_failed(scope, breaker)

    def _mode_changed(self, mode: str) -> None:
        self.metrics.mode(mode)
        self.log.warning("admission_mode", mode=mode)
        self.tools.sessions.missed()

    def _wire(self, rng: Rng, tickets: Tickets) -> Parts:
        clock, metrics, tools = self.clock, self.metrics, self.tools
        estimating = Estimating(
            self.counter, Learned(), decode=decoded, on_estimated=metrics.input_estimated
        )
        admission = Admission(
            self.store,
            clock,
            tickets=tickets,
            at_once=self.store.grant if isinstance(self.store, LocalStore) else None,
            on_wait=metrics.waited,
            on_shed=metrics.shed,
        )
        dispatch = Dispatch(
            self.transport,
            clock,
            self.credentials,
            decode=unpacked,
            on_status=metrics.answered,
            on_head=Steering(self.store, clock, admission.producing).head,
        )
        self.guards = self._guards()
        return Parts(
            clock=clock,
            rng=rng,
            recognize=Recognizer(self.identities, clock, self.revoked),
            estimating=estimating,
            admission=admission,
            breakers=self.breakers,
            retrying=Retrying(
                clock=clock,
                rng=rng,
                budget=RetryBudget(self.watch.current.backoff, now=clock.now()),
                spares=self.credentials,
                on_retry=metrics.retried,
            ),
            settling=Settling(
                learn=estimating.learn,
                on_malformed=metrics.malformed_events,
                on_response=estimating.made,
            ),
            dispatch=dispatch,
            observing=Observing(
                clock=clock,
                metrics=metrics,
                own_limits=OwnLimits(self.store),
                on_end=Recorder(self.log, self.decisions, clock),
            ),
            models=Models(),
            tracing=self._tracing(rng),
            count_tokens=CountTokens(dispatch, self.counter, decoded, clock, self.store),
            loops=self.loops,
            holding=Holding(self.resuming.keep, clock, self._broken),
            target=Target(tools.members, tools.sessions),
            gate=Gate(self.guards),
            invoke=Invoke(tools.exchanges, clock, on_status=metrics.answered),
            plane=tools.plane,
        )

    def reset_loops(self, session: str) -> int:
        """A session ("" means all) begins anew, in the whole fleet; how many conversations here."""
        if self.sharing is not None:
            self.sharing.loops_reset(session)
        return self._begin_anew(session)

    def _begin_anew(self, session: str) -> int:
        return self.loops.reset(session) + self.guards.repeats.reset(session)

    def revoke(self, principal: str) -> None:
        """That principal is refused from now on; in the whole fleet, where there is one."""
        if self.sharing is not None:
            self.sharing.revoke(principal)
        else:
            self.revoked.add(principal)
            self.log.warning("revoked", principal=principal)

    def _broken(self, call: Call) -> bool:
        if call.deployment is None:
            return False
        breaker = self.breakers.of(call.deployment.id, call.snapshot.breaker)
        return breaker.state is not State.CLOSED

    def _guards(self) -> Guards:
        metrics, log = self.metrics, self.log
        made = guards(
            self.tools.exchanges,
            effects=self.tasks.effects,
            approvals=self.tasks.approvals,
            clock=self.clock,
            spawn=self._spawned,
            token=secrets.token_bytes,
        )
        self.tools.plane.on_tools = made.definitions.learn
        self.tools.changes.on_fault = lambda text: log.error("tool_changes", problem=text)
        made.contracts.on_verdict = metrics.gated
        made.repeats.on_loop = metrics.loop
        made.ledger.on_effect = partial(metrics.gated, "effect")
        made.ledger.on_fault = lambda text: log.error("effect_record", problem=text)
        made.consent.on_ended = partial(metrics.gated, "approval")
        made.consent.on_asked = self._asked
        self.loops.on_spoken = made.repeats.spoken
        return made

    def _spawned(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        assert self.spawn is not None  # noqa: S101 - set before the first call is served
        return self.spawn(work)

    def _asked(self, approval: Approval) -> None:
        document = approval.document
        self.log.warning(
            "approval_asked", approval=document.id, agent=document.agent, tool=document.tool,
            rule=document.rule, reason=approval.reason,
        )  # fmt: skip

    def upkeep(self) -> Upkeep:
        """Who tidies effects and approvals."""
        keeping = Upkeep(
            effects=self.tasks.effects,
            approvals=self.tasks.approvals,
            own=self.tasks.own,
            clock=self.clock,
            snapshot=lambda: self.watch.current,
        )
        keeping.on_doubt = lambda effect: self.log.error(
            "effect_in_doubt", effect=effect.key, agent=effect.agent, tool=effect.tool,
            call=effect.call,
        )  # fmt: skip
        keeping.on_fault = lambda text: self.log.error("effect_store", problem=text)
        return keeping

    def _resuming(self, rng: Rng) -> Resuming:
        def snapshot() -> Snapshot:
            return self.watch.current

        clock, metrics, log = self.clock, self.metrics, self.log
        return Resuming(
            store=self.tasks, snapshot=snapshot, breakers=self.breakers, clock=clock,
            metrics=metrics, log=log, decode=decoded,
            pushing=Pushing(store=self.tasks, hooks=self.hooks, snapshot=snapshot, clock=clock,
                            rng=rng, metrics=metrics, log=log),
        )  # fmt: skip

    def _tracing(self, rng: Rng) -> Tracing | None:
        if not self.settings.otlp_endpoint:
            return None
        return Tracing(self.spans, ratio=self.settings.trace_ratio, clock=self.clock, rng=rng)

    async def __aenter__(self) -> Machine:
        """Ready to be used inside its loop; budgets know what they have used."""
        if self.spending is not None:
            await self.spending.load()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is left: waiters shed, connections closed, threads ended."""
        if self.spending is not None:
            await self.spending.write()
        await self.store.close()
        await self.tools.close()
        await self.transport.close()
        await self.sources.close()
        await self.hooks.close()
        await self.tasks.close()
        self.counter.close()
        self.spans.close()

    async def preload(self) -> None:
        """The tokenizers that the policy needs are loaded, or their absence is said."""
        snapshot = self.watch.current
        for warning in await self.counter.preload(encodings(snapshot)):
            self.log.warning("tokenizer_estimates", what=warning)
        for encoding in encodings(snapshot):
            self.metrics.tokenizer(encoding, exact=self.counter.exact(encoding))
        self.loaded = True

    def lacking(self) -> list[str]:
        """What readiness misses; empty when ready."""
        missing = [] if self.loaded else ["the tokenizer is still loading"]
        if self.sharing is not None and self.sharing.closed:
            missing.append("the shared store is away, and policy lets nobody in without it")
        snapshot = self.watch.current
        if snapshot.tokenizer == "required" and self.loaded:
            missing += [f"tokenizer: {warning}" for warning in self.counter.warnings]
        faults = self.identities.key_set_faults(snapshot)
        return missing + [f"key set of {name}: {why}" for name, why in faults.items()]

    def refresh(self) -> None:
        """Set the gauges that mirror other parts."""
        views = (self.store.view(name) for name in self.store.pools())
        self.metrics.pools(view for view in views if view is not None)
        timers = self.clock.alarms_armed + (1 if len(self.clock.deadlines) else 0)
        self.metrics.tools(self.tools.counts())
        self.metrics.process(timers=timers, connections=sum(self.transport.in_flight().values()))

    def _breaker_changed(self, scope: str, breaker: Breaker) -> None:
        self.metrics.breaker_changed(scope, breaker.state.value)
        if self.sharing is not None:
            self.sharing.breaker_changed(scope, breaker)
        self.log.warning("breaker", scope=scope, state=breaker.state.value, reason=breaker.reason)
        self.resuming.poke()

    def _swapped(self, old: Snapshot, new: Snapshot) -> None:
        self._redact.replace(secrets_of(new))
        self.log.level = self._level or new.logs.level
        self.credentials.health.clear()
        self.breakers.renew()
        for pool in pools_of(new):
            self.store.follow(pool)
        self.tools.changes.policy(old, new)
        if self.spawn is not None:
            self.spawn(self.tools.keep(new.servers))
            # Pools of upstreams that are gone close when the last call pinned to them ends.
            self.spawn(self.transport.keep(upstreams_of(new)))
        self.metrics.policy(new.revision)
        self.log.info("policy_loaded", revision=new.revision, digest=new.digest)
        if self.sharing is not None:
            self.sharing.policy_changed()

    def _refused(self, problems: str) -> None:
        self.metrics.policy_refused()
        self.log.error("policy_refused", problems=problems)
