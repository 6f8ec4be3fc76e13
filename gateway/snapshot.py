"""Snapshot: one compiled policy with its revision. Immutable; every call is pinned to one.

`policy/compile.py` builds it whole, `policy/watch.py` swaps one reference; all here is a value.
Secrets live in `Secret`, whose `repr` and `str` are `***`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import TYPE_CHECKING

from gateway.admission.core import PoolSpec
from gateway.admission.profiles import Accounting, Profile
from gateway.admission.ramp import RampRules
from gateway.keys import Secret, hash_key, parse_stored_key, stored_key
from gateway.resilience.backoff import BackoffRules
from gateway.resilience.breaker import BreakerRules
from gateway.resilience.loops import LoopRules
from gateway.toolrules import ApprovalRules, EffectRules, Screen, ToolRule
from gateway.units import MICRO, Micros, MicroUsd, Mode, RuleId, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.admission.profiles import Usage

__all__ = [
    "Accounting", "AgentRule", "ApiKey", "BackoffRules", "BreakerRules", "Credential", "Deployment",
    "EdgeRules", "JwtIssuer", "KeyPattern", "Listeners", "LogRules", "LoopRules", "Mode", "Model",
    "ModelPattern",
    "Place", "PoolSpec", "Price", "Provider", "RampRules", "Secret", "Server", "Snapshot", "Tier",
    "Timeouts", "ToolRule", "hash_key", "parse_stored_key", "stored_key",
]  # fmt: skip

MAX_PATTERN_MODELS = 10_000
"""Concrete models instantiated from patterns and remembered; beyond it they are made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rule stands in the policy files."""

    file: str
    line: int
    column: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines towards an upstream (`protocols.md` §2.4)."""

    connect: Micros = 5 * MICRO
    first_byte: Micros = 180 * MICRO
    idle: Micros = 120 * MICRO
    total: Micros = 3_600 * MICRO
    total_plain: Micros = 600 * MICRO


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """One key of a provider. `header` is its form: bearer, x-api-key, api-key or none."""

    id: str
    secret: Secret
    header: str = "bearer"
    weight: int = 1
    models: tuple[str, ...] = ("*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One upstream API.

    Attributes:
        name: As in policy.
        dialects: "openai", "anthropic", or both.
        base_url: Scheme, host, port and optional path prefix, no trailing slash, no query.
        query: Extra query string the provider wants on each request (may hold a secret).
        extra_headers: Extra headers the provider wants on each request (may hold secrets).
        credentials: Tried in order of weight and health.
        header_family: Its rate-limit headers: "openai", "anthropic", "azure", "groq", "none".
        accepts_stream_options: Whether `stream_options.include_usage` may be added.
        supports_idempotency: Whether `Idempotency-Key` is passed on.
        count_tokens: "relay", "local": who answers `count_tokens`.
        passthrough: Path patterns (fnmatch on the path without query) relayed without parsing.
        passthrough_pools: Quotas that relayed paths spend (requests only); may be empty.
        count_tokens_pools: Quotas of the token-counting endpoint; may be empty.
        on_disconnect: "close" or "drain".
    """

    name: str
    dialects: frozenset[str]
    base_url: str
    query: Secret | None = None
    extra_headers: tuple[tuple[str, Secret], ...] = ()
    credentials: tuple[Credential, ...] = ()
    timeouts: Timeouts = Timeouts()
    accounting: Accounting = Accounting()
    header_family: str = "openai"
    accepts_stream_options: bool = True
    supports_idempotency: bool = False
    count_tokens: str = "relay"
    passthrough: tuple[str, ...] = ()
    passthrough_pools: tuple[PoolSpec, ...] = ()
    count_tokens_pools: tuple[PoolSpec, ...] = ()
    on_disconnect: str = "close"
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Micro-dollars per million tokens; 0 is free.

    A cache that policy gives no price of its own has that of the input: `policy/compile.py` fills
    it in.
    """

    input: MicroUsd = 0
    output: MicroUsd = 0
    cache_read: MicroUsd = 0
    cache_write: MicroUsd = 0

    def of(self, usage: Usage) -> MicroUsd:
        """What this usage cost, rounded up."""
        total = (
            (usage.input or 0) * self.input
            + (usage.output or 0) * self.output
            + (usage.cache_read or 0) * self.cache_read
            + (usage.cache_write or 0) * self.cache_write
        )
        return -(-total // 1_000_000)

    def expected(self, tokens: Tokens, cached: Tokens, output: Tokens) -> MicroUsd:
        """What a call of so many input tokens is expected to cost, rounded up.

        Args:
            tokens: Input, the cached share included.
            cached: The share expected to be read from the provider's cache.
            output: Predicted output.
        """
        total = (tokens - cached) * self.input + cached * self.cache_read + output * self.output
        return -(-total // 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One way to serve a model: the breaker's scope and a rung of the ladder.

    Attributes:
        id: "provider/upstream-model"; unique within the snapshot.
        upstream_model: Name to send; None sends the caller's own.
        pools: Provider quotas it spends, narrower first, the organization's last.
        encoding: tiktoken encoding for counting ("o200k_base", "cl100k_base").
        max_output: Model's own output maximum.
        capabilities: What the rung can do: tools, parallel_tools, vision, audio, pdf, json_schema,
            streaming, thinking.
        model: Public name this rung belongs to; differs from the model asked for on a downgrade.
    """

    id: str
    provider: Provider
    model: str = ""
    upstream_model: str | None = None
    pools: tuple[PoolSpec, ...] = ()
    accounting: Accounting = Accounting()
    context_window: Tokens = 0
    max_output: Tokens = 0
    capabilities: frozenset[str] = frozenset()
    encoding: str = "o200k_base"
    price: Price = Price()
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A public model name with its ladder; `deployments[0]` is the first choice.

    Attributes:
        name: Concrete public name.
        downgrade: "auto", "never": policy's own say; a caller may still opt out.
    """

    name: str
    deployments: tuple[Deployment, ...]
    downgrade: str = "auto"
    created: int = 0
    because: RuleId = ""

    def own(self, family: str) -> Deployment | None:
        """The first rung of this very model that speaks the family's dialect.

        Rungs of its ladder are other models: they stand in for a sick one, and say so. A dialect
        that the model does not speak is nothing that passes.
        """
        for rung in self.deployments:
            if rung.model in ("", self.name) and family in rung.provider.dialects:
                return rung
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A QoS tier. `number` 1 (most urgent) to 3 is its admission lane."""

    name: str
    number: int
    max_wait: Micros = 120 * MICRO
    keepalive_after: Micros = 12 * MICRO
    keepalive_every: Micros = 10 * MICRO
    hold: bool = False
    downgrade: bool = True
    because: RuleId = ""


BUDGETS = (":tokens:day", ":tokens:month", ":money:day", ":money:month")
"""Ends of the names of pools that are budgets; `policy/compile.py` gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRule:
    """What one agent (or a pattern of agents) may do.

    Attributes:
        id: Name in policy; for patterns the concrete id is known only with the key.
        tenant: Tenant name.
        default_tier, tier_cap: Tier numbers; a wish below `tier_cap` (more urgent) is raised to it.
        models: fnmatch patterns of public model names it may use.
        pools: Its own limits and budgets, budgets first; names hold "{id}" for pattern agents.
        tenant_pools: The tenant's limits and budgets, budgets first.
        max_wait: Own longest wait; None means the tier's.
        accounting: How `pools` charge tokens; budgets included.
        own_wait: Longest wait in `pools`; None: as long as the call may wait.
        tenant_accounting, tenant_wait: The same for `tenant_pools`.
        match: JWT agents: (claim path, fnmatch pattern), all of which must fit.
        many: The rule covers many agents: each is named by its key or claim, which also replaces
            "{id}" in the names of `pools`. False: the agent's name is `id`.
    """

    id: str
    tenant: str
    default_tier: int = 2
    tier_cap: int = 1
    weight: int = 1
    fair_by: str = "tenant"
    models: tuple[str, ...] = ("*",)
    tools: tuple[str, ...] = ("*",)
    pools: tuple[PoolSpec, ...] = ()
    tenant_pools: tuple[PoolSpec, ...] = ()
    max_wait: Micros | None = None
    loopback_only: bool = False
    accounting: Accounting = Accounting(profile=Profile.RESERVE_SETTLE)
    own_wait: Micros | None = None
    tenant_accounting: Accounting = Accounting(profile=Profile.RESERVE_SETTLE)
    tenant_wait: Micros | None = None
    match: tuple[tuple[str, str], ...] = ()
    many: bool = False
    because: RuleId = ""

    def concrete(self, name: str) -> AgentRule:
        """The rule of one agent: itself, or for a rule of many one with pools of its own."""
        if not self.many:
            return self

        def own(pools: tuple[PoolSpec, ...]) -> tuple[PoolSpec, ...]:
            return tuple(replace(pool, name=pool.name.replace("{id}", name)) for pool in pools)

        return replace(self, id=name, pools=own(self.pools), tenant_pools=own(self.tenant_pools))

    def accounting_for(self, pool: str) -> Accounting:
        """How one of its own or its tenant's pools, given by name, charges tokens.

        A budget reserves what a call is expected to use: agents that always ask for 128,000 tokens
        of output would else be refused for ever by every smaller budget.
        """
        said = self.tenant_accounting if pool.startswith("tenant:") else self.accounting
        if pool.endswith(BUDGETS):
            return replace(said, profile=Profile.REALTIME)
        return said

    def wait_for(self, pool: str) -> Micros | None:
        """Longest wait in one of those pools; None: as long as the call may wait."""
        return self.tenant_wait if pool.startswith("tenant:") else self.own_wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """Bounds of a stdio server's processes; `cpu` 0 is none."""

    memory: int = 4 << 30
    open_files: int = 1024
    cpu: Micros = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One MCP server.

    Attributes:
        name: As in policy; `[a-z0-9-]{1,16}`.
        provider: Base URL, credential, headers and deadlines, as for a model's upstream; its base
            URL is "" where a command speaks over pipes.
        target: Path of its endpoint behind the base URL.
        command, env, cwd, child: How it is started, where it is a command.
        era: "auto", "stateless", "session".
        max_result: Bytes of one of its messages.
        agents, tenants: fnmatch patterns of who may use it.
        pools: Limits of all calls to it together.
        tools: Rules, exact names first, then in the order of the file.
    """

    name: str
    provider: Provider
    target: bytes = b"/"
    command: tuple[str, ...] = ()
    env: tuple[tuple[str, Secret], ...] = ()
    cwd: str = ""
    child: ChildLimits = ChildLimits()
    era: str = "auto"
    max_result: int = 8 << 20
    agents: tuple[str, ...] = ("*",)
    tenants: tuple[str, ...] = ("*",)
    pools: tuple[PoolSpec, ...] = ()
    wait: Micros | None = None
    tools: tuple[ToolRule, ...] = ()
    because: RuleId = ""

    def rule(self, tool: str) -> ToolRule | None:
        """The rule of this tool; None where policy says nothing of it."""
        for rule in self.tools:
            if rule.pattern == tool or fnmatchcase(tool, rule.pattern):
                return rule
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A stored key: salted SHA-256, never the key.

    Attributes:
        id: For keys of the form tg_<id>_<secret> that id, else a name from policy.
        salt, digest: digest = SHA-256(salt + key as sent), both bytes.
        expires: Wall-clock seconds after which it is refused; 0 never (rotation grace).
    """

    id: str
    salt: bytes
    digest: bytes
    agent: AgentRule
    expires: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPattern:
    """Keys accepted by pattern, each an agent of its own: for load tests and loopback only."""

    pattern: str
    agent: AgentRule


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtIssuer:
    """Who may sign tokens for us, and which claims mean what (`protocols.md` §7)."""

    name: str
    issuer: str
    audience: str
    jwks_url: str = ""
    jwks_file: str = ""
    algorithms: tuple[str, ...] = ("RS256", "ES256", "PS256")
    claims: tuple[tuple[str, str], ...] = ()
    agents: tuple[AgentRule, ...] = ()
    spiffe: bool = False
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Where policy wants the process to listen, read at start; None leaves it to the settings."""

    data: tuple[str, int] | None = None
    admin: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRules:
    """What the data listener accepts."""

    max_body: int = 40 * 1024 * 1024
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    anonymous: AgentRule | None = None
    drain: Micros = 5 * MICRO
    max_in_flight: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRules:
    """What is logged. Prompt text never is."""

    level: str = "info"
    access: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRules:
    """Where results of held calls and alerts may be pushed.

    Attributes:
        secret: Signs every delivery; None where nothing may be pushed.
        hosts: Hosts that callers may name: "host", "*.domain", "host:port", "host:*".
        networks: Non-public networks that may be reached all the same.
        alerts: URL told of holds; "" for none.
    """

    secret: Secret | None = None
    hosts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    alerts: str = ""
    because: RuleId = "holds.webhooks"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRules:
    """Calls kept while a breaker is open.

    Attributes:
        mode: ENFORCE or OFF; who is kept, tiers and callers say.
        longest: Longest time a call is kept.
        keep: How long its result stays.
        max_calls, max_bytes: Of all kept calls and results.
        max_per_agent: Waiting calls of one principal.
        rate, at_once: Calls of one model resumed per second, and under way, at most.
    """

    mode: Mode = Mode.ENFORCE
    longest: Micros = 86_400 * MICRO
    keep: Micros = 86_400 * MICRO
    max_calls: int = 10_000
    max_bytes: int = 1 << 30
    max_per_agent: int = 1_000
    rate: int = 200
    at_once: int = 64
    webhooks: WebhookRules = WebhookRules()
    because: RuleId = "holds"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRules:
    """What several gateways share, read at start; `when_away` is "local", "closed" or "open"."""

    redis: Secret | None = None
    when_away: str = "local"
    prefix: str = "tidegate:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPattern:
    """A family of public model names, each concrete name a model of its own."""

    pattern: str
    make: Callable[[str], Model]


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """One compiled policy. Treat as immutable; `_made` only remembers pattern models."""

    revision: int
    digest: str
    files: tuple[str, ...] = ()
    providers: Mapping[str, Provider] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    patterns: tuple[ModelPattern, ...] = ()
    tiers: tuple[Tier, Tier, Tier] = (
        Tier(name="interactive", number=1),
        Tier(name="standard", number=2),
        Tier(name="batch", number=3),
    )
    keys: tuple[ApiKey, ...] = ()
    key_patterns: tuple[KeyPattern, ...] = ()
    jwt: tuple[JwtIssuer, ...] = ()
    edge: EdgeRules = EdgeRules()
    backoff: BackoffRules = BackoffRules()
    breaker: BreakerRules = BreakerRules()
    loops: LoopRules = LoopRules()
    logs: LogRules = LogRules()
    holds: HoldRules = HoldRules()
    fleet: FleetRules = FleetRules()
    approvals: ApprovalRules = ApprovalRules()
    effects: EffectRules = EffectRules()
    screen: Screen = Screen()
    tokenizer: str = "preferred"
    ramps: Mapping[str, RampRules] = field(default_factory=dict)
    places: Mapping[RuleId, Place] = field(default_factory=dict)
    listeners: Listeners = Listeners()
    agents: Mapping[str, AgentRule] = field(default_factory=dict)
    servers: Mapping[str, Server] = field(default_factory=dict)
    _made: dict[str, Model] = field(default_factory=dict)
    _by_id: dict[str, list[ApiKey]] = field(default_factory=dict, init=False)
    _by_salt: dict[bytes, dict[bytes, ApiKey]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """The indexes of `find_key` are built."""
        for key in self.keys:
            self._by_id.setdefault(key.id, []).append(key)
            self._by_salt.setdefault(key.salt, {})[key.digest] = key

    def find_key(self, presented: str) -> ApiKey | None:
        """The stored key this credential is, expired ones included; None if there is none.

        `tg_<id>_<secret>` costs one hash. Any other text costs one per distinct salt: keys that
        policy holds in plain share one, so only foreign keys stored as hashes add to it.
        """
        raw = presented.encode("utf-8", "surrogatepass")
        if presented.startswith("tg_"):
            for key in self._by_id.get(presented[3:].partition("_")[0], ()):
                if sha256(key.salt + raw).digest() == key.digest:
                    return key
        for salt, stored in self._by_salt.items():
            found = stored.get(sha256(salt + raw).digest())
            if found is not None:
                return found
        return None

    def place(self, rule: RuleId) -> Place | None:
        """Where the rule stands in the files; a default stands where its written parent does."""
        while rule:
            place = self.places.get(rule)
            if place is not None:
                return place
            rule = rule.rpartition(".")[0]
        return None

    def model(self, name: str) -> Model | None:
        """The model of this public name: exact names first, then patterns in order."""
        model = self.models.get(name) or self._made.get(name)
        if model is not None:
            return model
        for pattern in self.patterns:
            if fnmatchcase(name, pattern.pattern):
                model = pattern.make(name)
                if len(self._made) < MAX_PATTERN_MODELS:
                    self._made[name] = model
                return model
        return None

    def tier(self, number: int) -> Tier:
        """The tier of that number, 1 to 3."""
        return self.tiers[number - 1]
