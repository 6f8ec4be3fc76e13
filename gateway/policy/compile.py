"""Policy to Snapshot: what the pipeline looks up, built whole. Pure; no loaded policy fails here.

Defaults of the provider's kind, of tiers and of fairness are filled in here, modes are weakened by
the file's own, names become references, and each rule keeps its id, so that `explain` finds its
line. Nothing of pydantic leaves this module.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

from gateway import snapshot as made
from gateway.admission.core import PoolSpec
from gateway.admission.profiles import (
    Accounting,
    Overrides,
    Profile,
    Reserve,
    Shape,
    pool_spec,
)
from gateway.policy import globs, tool_rules
from gateway.policy.kinds import KINDS
from gateway.policy.lookups import (
    DEFAULT_TENANT,
    DEFAULT_TIERS,
    PER_MODEL,
    deployments_of,
    given,
    price_of,
    ramps_of,
    tier_numbers,
)
from gateway.policy.models import CAPABILITIES
from gateway.policy.servers import compile_servers
from gateway.snapshot import Mode, hash_key, parse_stored_key
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from gateway.policy import models as file
    from gateway.policy.load import Policy

Value = TypeVar("Value")

_WEAKNESS = {Mode.ENFORCE: 0, Mode.SHADOW: 1, Mode.OFF: 2}


def compile(policy: Policy, *, revision: int) -> made.Snapshot:  # noqa: A001 - the design's word
    """The snapshot of this policy.

    Args:
        policy: As `load` returned it.
        revision: Higher than that of any snapshot made before in this process.
    """
    return _Compiler(policy, revision).snapshot()


class _Compiler:
    def __init__(self, policy: Policy, revision: int) -> None:
        self._policy = policy
        self._rules = policy.rules
        self._revision = revision
        self._tiers = tier_numbers(policy.rules)
        self._pools = {name: self._pool(name) for name in self._rules.pools}
        self._providers = {name: self._provider(name) for name in self._rules.providers}
        self._agents = {name: self._agent(name) for name in self._rules.agents}

    def snapshot(self) -> made.Snapshot:
        """Everything, wired."""
        rules = self._rules
        exact = {name: self._model(name, name) for name in rules.models if _plain(name)}
        patterns = tuple(
            made.ModelPattern(pattern=name, make=partial(self._model, name))
            for name in rules.models
            if not _plain(name)
        )
        return made.Snapshot(
            revision=self._revision,
            digest=self._policy.digest,
            files=self._policy.files,
            providers=self._providers,
            models=exact,
            patterns=patterns,
            tiers=self._tier_set(),
            keys=self._keys(),
            key_patterns=tuple(
                made.KeyPattern(pattern=key.pattern, agent=self._agents[name])
                for name, agent in rules.agents.items()
                for key in agent.keys
                if key.pattern is not None
            ),
            jwt=tuple(self._issuer(name) for name in rules.issuers),
            edge=self._edge(),
            backoff=self._backoff(),
            breaker=self._breaker(),
            loops=self._loops(),
            logs=made.LogRules(
                level=rules.logging.level,
                access=rules.logging.access,
            ),
            holds=self._holds(),
            fleet=made.FleetRules(
                redis=rules.fleet.redis,
                when_away=rules.fleet.when_away,
                prefix=rules.fleet.prefix,
            ),
            approvals=tool_rules.approval_rules(rules.approvals),
            effects=tool_rules.effect_rules(rules.effects),
            screen=tool_rules.screen(rules.screen, weaken=self._mode),
            tokenizer=rules.tokenizer,
            ramps=ramps_of(rules, self._mode),
            places=self._policy.places,
            listeners=made.Listeners(data=rules.listeners.data, admin=rules.listeners.admin),
            agents=self._agents,
            servers=compile_servers(rules, mode=self._mode, revision=self._revision),
        )

    def _mode(self, mode: str) -> Mode:
        """The rule's mode, weakened by the file's."""
        return max(Mode(mode), Mode(self._rules.mode), key=_WEAKNESS.__getitem__)

    # --- providers and pools ---

    def _accounting(self, said: file.Accounting | None, default: Accounting) -> Accounting:
        if said is None:
            return default
        base = default if said.profile == default.profile else Accounting()
        return Accounting(
            profile=Profile(said.profile),
            cached_input_counts=_or(said.cached_input_counts, base.cached_input_counts),
            output_weight=_or(said.output_weight, base.output_weight),
            refused_counts=_or(said.refused_counts, base.refused_counts),
            missing_cap=_or(said.missing_cap, base.missing_cap),
        )

    def _provider_accounting(self, name: str) -> Accounting:
        provider = self._rules.providers[name]
        return self._accounting(provider.accounting, KINDS[provider.kind].accounting)

    def _pool_accounting(self, name: str) -> Accounting:
        pool = self._rules.pools[name]
        return self._accounting(pool.accounting, self._provider_accounting(pool.provider))

    def _pool(self, name: str) -> PoolSpec:
        pool = self._rules.pools[name]
        provider = self._rules.providers[pool.provider]
        shape, window = meter(pool.shape or provider.shape or KINDS[provider.kind].shape)
        limits = given(pool.limits)
        because = f"pools.{name}"
        spec = pool_spec(
            name=f"pool:{name}",
            limits={key: limit for key, limit in limits.items() if key != "concurrency"},
            shape=shape,
            profile=self._pool_accounting(name).profile,
            concurrency=limits.get("concurrency", 0),
            reserve=Reserve(pool.reserve),
            overrides=Overrides(
                guard_ppm=pool.guard,
                spread=pool.spread,
                pace_ppm=pool.pace,
                ceilings_ppm=self._ceilings(pool),
                max_waiting=pool.max_waiting,
            ),
            window=window,
            calendar_offset=pool.utc_offset,
            mode=self._mode(pool.mode),
            because=because,
            revision=self._revision,
        )
        return _with_concurrency(spec, because)

    def _ceilings(self, pool: file.Pool) -> tuple[int, int, int] | None:
        """What tiers 1, 2, 3 may fill: the pool's word, else the tiers', else the shape's."""
        shares = pool.ceilings
        if shares is None and pool.reserve == "none":
            shares = {
                name: tier.ceiling
                for name, tier in self._rules.tiers.items()
                if tier.ceiling is not None
            }
        if not shares:
            return None
        by_number = {self._tiers[name]: share for name, share in shares.items()}
        return tuple(by_number.get(number, MICRO) for number in (1, 2, 3))  # type: ignore[return-value]

    def _named_pools(self, names: tuple[str, ...] | None) -> tuple[PoolSpec, ...]:
        return tuple(self._pools[name] for name in names or () if name != PER_MODEL)

    def _provider(self, name: str) -> made.Provider:
        said = self._rules.providers[name]
        kind = KINDS[said.kind]
        times = said.timeouts
        return made.Provider(
            name=name,
            dialects=frozenset(said.dialects or kind.dialects),
            base_url=said.base_url,
            query=_query(said),
            extra_headers=tuple(said.extra_headers.items()),
            credentials=tuple(
                made.Credential(
                    id=key.id,
                    secret=key.value,
                    header=key.header or kind.header,
                    weight=key.weight,
                    models=key.models,
                )
                for key in sorted(said.keys, key=lambda key: -key.weight)
            ),
            timeouts=made.Timeouts(
                connect=times.connect,
                first_byte=times.first_byte,
                idle=times.idle,
                total=times.total,
                total_plain=times.total_plain,
            ),
            accounting=self._provider_accounting(name),
            header_family=said.headers or kind.headers,
            accepts_stream_options=_or(said.stream_options, kind.stream_options),
            supports_idempotency=_or(said.idempotency, kind.idempotency),
            count_tokens=said.count_tokens or kind.count_tokens,
            passthrough=_or(said.passthrough, kind.passthrough),
            passthrough_pools=(*self._named_pools(said.passthrough_pool), *self._whole(name)),
            count_tokens_pools=self._named_pools(said.count_tokens_pool),
            on_disconnect=said.on_disconnect,
            because=f"providers.{name}",
        )

    # --- models ---

    def _model(self, entry: str, name: str) -> made.Model:
        """The model of this concrete name, which the entry describes."""
        said = self._rules.models[entry]
        rungs: dict[str, made.Deployment] = {}
        self._climb(entry, name, name, rungs)
        return made.Model(
            name=name,
            deployments=tuple(rungs.values()),
            downgrade=said.downgrade,
            created=int(said.created),
            because=f"models.{entry}",
        )

    def _climb(self, entry: str, name: str, asked: str, rungs: dict[str, made.Deployment]) -> None:
        """The entry's own rungs, then those of its ladder, depth first, each once."""
        said = self._rules.models[entry]
        for index, rung in enumerate(deployments_of(said)):
            because = f"models.{entry}" + (f".also[{index - 1}]" if index else "")
            deployment = self._deployment(rung, name, asked, because)
            rungs.setdefault(deployment.id, deployment)
        for below in said.ladder or ():
            self._climb(below, below, asked, rungs)

    def _deployment(
        self, said: file.Deployment, name: str, asked: str, because: str
    ) -> made.Deployment:
        """A rung of the model asked for; its body is edited only where the name differs."""
        target = said.upstream or name
        own = getattr(said, "price", None)
        return made.Deployment(
            id=f"{said.provider}/{target}",
            provider=self._providers[said.provider],
            model=name,
            upstream_model=target if target != asked else None,
            pools=self._quota(said, target, because),
            accounting=self._deployment_accounting(said),
            context_window=said.context_window or 0,
            max_output=said.max_output or 0,
            capabilities=frozenset(_or(said.capabilities, CAPABILITIES)),
            encoding=said.encoding,
            price=_price(own or price_of(self._rules, name)),
            because=because,
        )

    def _deployment_accounting(self, said: file.Deployment) -> Accounting:
        for pool in said.pool:
            if pool != PER_MODEL:
                return self._pool_accounting(pool)
        return self._provider_accounting(said.provider)

    def _quota(self, said: file.Deployment, target: str, because: str) -> tuple[PoolSpec, ...]:
        whole = self._whole(said.provider)
        if said.pool != (PER_MODEL,):
            return (*self._named_pools(said.pool), *whole)
        spec = pool_spec(
            name=f"model:{said.provider}/{target}",
            limits={},
            mode=self._mode("enforce"),
            because=because,
            revision=self._revision,
        )
        return (spec, *whole)

    def _whole(self, provider: str) -> tuple[PoolSpec, ...]:
        """The bound on all concurrent calls towards a provider, taken last of all pools."""
        bound = self._rules.providers[provider].concurrency
        if not bound:
            return ()
        because = f"providers.{provider}.concurrency"
        spec = pool_spec(
            name=f"provider:{provider}",
            limits={},
            concurrency=bound,
            mode=self._mode("enforce"),
            because=because,
            revision=self._revision,
        )
        return (replace(spec, concurrency_because=because),)

    # --- tiers, agents, tenants ---

    def _tier_set(self) -> tuple[made.Tier, made.Tier, made.Tier]:
        by_number = {number: name for name, number in self._tiers.items()}
        first, second, third = (
            self._tier(by_number.get(number, shipped), number) for number, shipped in DEFAULT_TIERS
        )
        return first, second, third

    def _tier(self, name: str, number: int) -> made.Tier:
        said = self._rules.tiers.get(name)
        if said is None:
            return made.Tier(name=name, number=number, because=f"tiers.{name}")
        return made.Tier(
            name=name,
            number=number,
            max_wait=said.max_wait,
            keepalive_after=said.keepalive.after,
            keepalive_every=said.keepalive.every,
            hold=said.hold,
            downgrade=said.downgrade,
            because=f"tiers.{name}",
        )

    def _agent(self, name: str) -> made.AgentRule:
        said = self._rules.agents[name]
        tenant_name = said.tenant or DEFAULT_TENANT
        tenant = self._rules.tenants.get(tenant_name)
        many = covers_many(said)
        fair_by = self._rules.fairness or ("tenant" if self._rules.tenants else "agent")
        cap, default = self._tier_rights(said, tenant)
        return made.AgentRule(
            id=name,
            tenant=tenant_name,
            default_tier=default,
            tier_cap=cap,
            weight=said.weight if fair_by == "agent" else tenant.weight if tenant else 1,
            fair_by=fair_by,
            models=said.models,
            tools=said.tools,
            pools=self._own(f"agent:{'{id}' if many else name}", f"agents.{name}", said),
            tenant_pools=self._own(f"tenant:{tenant_name}", f"tenants.{tenant_name}", tenant),
            max_wait=said.max_wait,
            loopback_only=said.loopback_only or any(key.pattern for key in said.keys),
            accounting=self._own_accounting(said.limits),
            own_wait=said.limits.max_wait if said.limits else None,
            tenant_accounting=self._own_accounting(tenant.limits if tenant else None),
            tenant_wait=tenant.limits.max_wait if tenant and tenant.limits else None,
            match=tuple(said.jwt.match.items()) if said.jwt else (),
            many=many,
            because=f"agents.{name}",
        )

    def _tier_rights(self, said: file.Agent, tenant: file.Tenant | None) -> tuple[int, int]:
        """Cap and default. Nobody may ask for more than its default tier unless a cap says so."""
        own = self._tiers[said.tier_cap] if said.tier_cap else None
        shared = self._tiers[tenant.tier_cap] if tenant and tenant.tier_cap else 1
        default = self._tiers[said.tier] if said.tier else max(2, own or 1, shared)
        return max(own or default, shared), default

    def _own_accounting(self, limits: file.OwnLimits | None) -> Accounting:
        default = Accounting(profile=Profile.RESERVE_SETTLE, refused_counts=False)
        return self._accounting(limits.accounting if limits else None, default)

    def _own(
        self, name: str, because: str, said: file.Agent | file.Tenant | None
    ) -> tuple[PoolSpec, ...]:
        """Budgets, then limits, as pools of ours."""
        if said is None:
            return ()
        pools = [
            self._budget(name, f"{because}.budgets[{index}]", budget)
            for index, budget in enumerate(said.budgets)
        ]
        if said.limits is not None:
            limits = given(said.limits)
            spec = pool_spec(
                name=name,
                limits={key: limit for key, limit in limits.items() if key != "concurrency"},
                shape=Shape.OWN,
                profile=self._own_accounting(said.limits).profile,
                concurrency=limits.get("concurrency", 0),
                queue=said.limits.max_wait != 0,
                mode=self._mode(said.limits.mode),
                because=because,
                revision=self._revision,
            )
            pools.append(_with_concurrency(spec, because))
        return tuple(pools)

    def _budget(self, name: str, because: str, budget: file.Budget) -> PoolSpec:
        kind = "tokens" if budget.money is None else "money"
        amount = budget.tokens if budget.money is None else budget.money
        limit = f"{kind}_{budget.per}"
        return pool_spec(
            name=f"{name}:{kind}:{budget.per}",
            limits={limit: amount or 0},
            shape=Shape.OWN,
            calendar_offset=budget.utc_offset,
            queue=False,
            mode=self._mode(budget.mode),
            because=because,
            reasons={limit: f"{because}.{kind}"},
            revision=self._revision,
        )

    def _keys(self) -> tuple[made.ApiKey, ...]:
        # One salt for all keys that the file refers to: `Snapshot.find_key` then needs one hash.
        salt = sha256(b"tidegate key salt" + self._policy.fingerprint).digest()[:16]
        keys = []
        for name, agent in self._rules.agents.items():
            for index, key in enumerate(agent.keys, 1):
                if key.pattern is not None:
                    continue
                if key.key is not None:
                    text = key.key.reveal()
                    stored = (salt, hash_key(salt, text))
                    inner = text[3:].partition("_")[0] if text.startswith("tg_") else ""
                else:
                    stored, inner = parse_stored_key(key.hash or ""), ""
                keys.append(
                    made.ApiKey(
                        id=key.id or inner or f"{name}-{index}",
                        salt=stored[0],
                        digest=stored[1],
                        agent=self._agents[name],
                        expires=key.expires or 0.0,
                    )
                )
        return tuple(keys)

    def _issuer(self, name: str) -> made.JwtIssuer:
        said = self._rules.issuers[name]
        return made.JwtIssuer(
            name=name,
            issuer=said.issuer or "",
            audience=said.audience,
            jwks_url=said.jwks_url or "",
            jwks_file=said.jwks_file or "",
            algorithms=said.algorithms,
            claims=tuple({"agent": "sub", **said.claims}.items()),
            agents=tuple(
                self._agents[agent]
                for agent, rule in self._rules.agents.items()
                if rule.jwt is not None and rule.jwt.issuer == name
            ),
            spiffe=said.spiffe,
            because=f"issuers.{name}",
        )

    # --- the process ---

    def _edge(self) -> made.EdgeRules:
        said = self._rules.edge
        return made.EdgeRules(
            max_body=said.max_body,
            allowed_hosts=said.allowed_hosts,
            cors_origins=said.cors_origins,
            anonymous=self._agents[said.anonymous] if said.anonymous else None,
            drain=said.drain,
            max_in_flight=said.max_in_flight,
        )

    def _backoff(self) -> made.BackoffRules:
        said = self._rules.retry
        return made.BackoffRules(
            kind=said.backoff,
            base=said.base,
            cap=said.cap,
            attempts=said.attempts,
            requeues=said.requeues,
            max_retry_after=said.max_retry_after,
            budget_ratio_ppm=said.budget.ratio,
            budget_min_per_second=said.budget.min_per_second,
            budget_max=said.budget.max,
            mode=self._mode(said.mode),
        )

    def _breaker(self) -> made.BreakerRules:
        said = self._rules.breakers
        return made.BreakerRules(
            fast_window=said.fast.window,
            fast_volume=said.fast.volume,
            fast_ratio_ppm=said.fast.ratio,
            slow_window=said.slow.window,
            slow_volume=said.slow.volume,
            slow_ratio_ppm=said.slow.ratio,
            in_a_row=said.in_a_row,
            in_a_row_within=said.in_a_row_within,
            identical_quota=said.identical_quota,
            probes=said.probes,
            probe_lease=said.probe_lease,
            base=said.base,
            cap=said.cap,
            mode=self._mode(said.mode),
        )

    def _loops(self) -> made.LoopRules:
        said = self._rules.loops
        return made.LoopRules(
            same_call=said.same_call,
            same_masked=said.same_masked,
            alike_turns=said.alike_turns,
            alike_ppm=said.alike,
            ping_pong=said.ping_pong,
            max_iterations=said.max_iterations or 0,
            tokens_per_minute=said.tokens_per_minute or 0,
            max_tokens=said.max_tokens or 0,
            max_money=said.max_money or 0,
            task_tokens=said.task_tokens or 0,
            task_money=said.task_money or 0,
            polling_tools=said.polling_tools,
            window=said.window,
            mode=self._mode(said.mode),
        )

    def _holds(self) -> made.HoldRules:
        said = self._rules.holds
        hooks = said.webhooks
        return made.HoldRules(
            mode=Mode(said.mode),
            longest=said.longest,
            keep=said.keep,
            max_calls=said.max_calls,
            max_bytes=said.max_bytes,
            max_per_agent=said.max_per_agent,
            rate=said.rate,
            at_once=said.at_once,
            webhooks=made.WebhookRules(
                secret=hooks.signing_key,
                hosts=hooks.hosts,
                networks=hooks.networks,
                alerts=hooks.alerts or "",
            ),
        )


def meter(shape: str) -> tuple[Shape, Micros | None]:
    """The meter's shape and, for windows, its length."""
    if not shape.startswith("window_"):
        return Shape(shape), None
    number, unit = int(shape[len("window_") : -1]), shape[-1]
    return Shape.WINDOW, number * (MICRO if unit == "s" else 60 * MICRO)


def covers_many(agent: file.Agent) -> bool:
    """Whether the entry stands for many agents, each named by its key or its claim."""
    if any(key.pattern for key in agent.keys):
        return True
    if agent.jwt is None:
        return False
    return not agent.jwt.match or any(map(globs.is_pattern, agent.jwt.match.values()))


def _plain(name: str) -> bool:
    return not globs.is_pattern(name)


def _or(said: Value | None, default: Value) -> Value:
    return default if said is None else said


def _query(said: file.Provider) -> made.Secret | None:
    if not said.query:
        return None
    return made.Secret(urlencode([(key, value.reveal()) for key, value in said.query.items()]))


def _price(said: file.Price | None) -> made.Price:
    if said is None:
        return made.Price()
    return made.Price(
        input=said.input,
        output=said.output,
        cache_read=_or(said.cache_read, said.input),
        cache_write=_or(said.cache_write, said.input),
    )


def _with_concurrency(spec: PoolSpec, because: str) -> PoolSpec:
    """The rule id of the concurrency limit is where the file has it."""
    if not spec.concurrency:
        return spec
    return replace(spec, concurrency_because=f"{because}.limits.concurrency")
