"""The policy file as pydantic models: strict, frozen, nothing unknown. The one seat of pydantic.

These classes say what a file may hold, one entry at a time; what entries must be to each other
stands in `crosscheck.py`. Descriptions go into `schema.json`, where editors show them, so they are
written for operators. Quantities become our own units here (`quantity.py`); secrets arrive as
`Secret`, already resolved by `load.py`, and no message repeats them.

Over 400 lines because it is one table: the layout of the file, section by section, in the order
of ADR 11.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)

from gateway.policy import forms, quantity
from gateway.snapshot import Secret

Capability: TypeAlias = Literal[
    "tools", "parallel_tools", "vision", "audio", "pdf", "json_schema", "streaming", "thinking",
]  # fmt: skip
CAPABILITIES: tuple[Capability, ...] = get_args(Capability)


# --- words and quantities ---


def _said(pattern: str, examples: list[str]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": examples})


_SPAN = _said(r"^([0-9]+(\.[0-9]+)?(us|ms|s|m|h|d))+$", ["500ms", "30s", "5m", "1d"])

Duration = Annotated[int, BeforeValidator(quantity.duration), _SPAN]
PositiveDuration = Annotated[int, BeforeValidator(quantity.positive_duration), _SPAN]
Size = Annotated[
    int,
    BeforeValidator(quantity.size),
    _said(r"^[0-9]+(\.[0-9]+)? ?(B|kB|KB|MB|GB|KiB|MiB|GiB)$", ["40MiB"]),
]
Count = Annotated[
    int,
    BeforeValidator(quantity.count),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": quantity.MAX_COUNT},
                {"type": "string", "pattern": r"^[0-9][0-9_]*(\.[0-9]+)?[kKMG]?$"},
            ],
            "examples": [500, "30k", "2M"],
        }
    ),
]
Percent = Annotated[
    int,
    BeforeValidator(quantity.percent),
    _said(r"^[0-9]+(\.[0-9]+)? ?%$", ["1%", "110%"]),
]
Share = Annotated[
    int,
    BeforeValidator(quantity.share),
    _said(r"^[0-9]+(\.[0-9]+)? ?%$", ["85%", "100%"]),
]
Money = Annotated[
    int, BeforeValidator(quantity.money), _said(r"^[0-9]+(\.[0-9]+)? USD$", ["50 USD"])
]
UsdPerMillion = Annotated[
    int,
    BeforeValidator(quantity.price),
    WithJsonSchema({"type": "number", "minimum": 0, "examples": [2.5]}),
]
Instant = Annotated[float, BeforeValidator(quantity.instant), _said(r"^[0-9]{4}-", ["2027-01-31"])]
Offset = Annotated[
    int, BeforeValidator(quantity.offset), _said(r"^[+-][01][0-9]:[0-5][0-9]$", ["+01:00"])
]
Address = Annotated[
    tuple[str, int],
    BeforeValidator(quantity.address),
    _said(r"^.+:[0-9]{1,5}$", ["127.0.0.1:8484"]),
]
SecretText = Annotated[
    Secret,
    PlainValidator(forms.secret),
    WithJsonSchema(
        {"type": "string", "minLength": 1, "examples": ["${NAME}", "${file:/run/secrets/name}"]}
    ),
]

Number = Annotated[
    Decimal,
    PlainValidator(quantity.number),
    WithJsonSchema({"type": ["number", "string"], "examples": [0, 50_000, "0.01"]}),
]
ValuePath = Annotated[str, AfterValidator(forms.value_path)]
Regex = Annotated[str, AfterValidator(forms.regex)]
Name = Annotated[str, AfterValidator(forms.name)]
Pattern = Annotated[str, AfterValidator(forms.pattern)]
Patterns = Annotated[
    tuple[Pattern, ...],
    BeforeValidator(forms.listed, json_schema_input_type=str | list[str]),
    AfterValidator(forms.unique),
]
Names = Annotated[
    tuple[Name, ...],
    BeforeValidator(forms.listed, json_schema_input_type=str | list[str]),
    AfterValidator(forms.unique),
]
Algorithm: TypeAlias = Literal[
    "RS256", "RS384", "RS512", "ES256", "ES384", "ES512", "PS256", "PS384", "PS512",
]  # fmt: skip
Weight = Annotated[int, Field(ge=1, le=100)]
Mode: TypeAlias = Literal["enforce", "shadow", "off"]
ShapeName = Annotated[
    str,
    AfterValidator(forms.shape),
    _said(f"^({forms.SHAPE_FORM.pattern})$", ["bucket", "window_60s"]),
]
Dialect: TypeAlias = Literal["openai", "anthropic"]
KindName: TypeAlias = Literal[
    "openai", "anthropic", "azure", "bedrock", "gemini", "vertex", "groq", "cerebras", "vllm",
    "other",
]  # fmt: skip

MODE = "enforce: act; shadow: only count what it would have done; off: sleep."


class Section(BaseModel):
    """What every part of the file has in common."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        arbitrary_types_allowed=True,
    )


# --- providers and their quotas ---


class Accounting(Section):
    """When the provider charges what; see the kinds of provider for the defaults."""

    profile: Literal["upfront_max", "reserve_settle", "realtime", "input_only", "none"] = Field(
        description="upfront_max: estimate + output cap, no refund. reserve_settle: the same, "
        "refunded to actual. realtime: as produced. input_only: input alone. none: no tokens."
    )
    cached_input_counts: bool | None = Field(
        default=None, description="Whether cache reads count against the limits."
    )
    output_weight: int | None = Field(
        default=None, ge=1, le=100, description="Input tokens that one output token burns."
    )
    refused_counts: bool | None = Field(
        default=None, description="Whether a refused request counts against the request limit."
    )
    missing_cap: Count | None = Field(
        default=None,
        description="Output reserved where a call names no cap; default: what was learned.",
    )


AccountingOf = Annotated[
    Accounting, BeforeValidator(forms.profiled, json_schema_input_type=str | Accounting)
]


class ProviderKey(Section):
    """One credential of a provider; health is kept for each."""

    id: Annotated[str, AfterValidator(forms.key_id)] = Field(description="Name in logs and status.")
    value: SecretText = Field(description="The key: ${NAME} or ${file:/path}.")
    weight: int = Field(
        default=1,
        ge=0,
        le=100,
        description="Share of calls among the healthy keys; 0 is a standby.",
    )
    header: Literal["bearer", "x-api-key", "api-key"] | None = Field(
        default=None, description="How it is sent; default: as its kind of provider wants."
    )
    models: Patterns = Field(default=("*",), description="Public model names it may be used for.")


class Timeouts(Section):
    """Deadlines towards the provider; waiting in our own queue never counts."""

    connect: PositiveDuration = Field(
        default=quantity.duration("5s"), description="For a connection."
    )
    first_byte: PositiveDuration = Field(
        default=quantity.duration("180s"), description="From sending to the first byte of a stream."
    )
    idle: PositiveDuration = Field(
        default=quantity.duration("120s"), description="Between two bytes of a stream."
    )
    total: PositiveDuration = Field(
        default=quantity.duration("3600s"), description="For a whole streamed answer."
    )
    total_plain: PositiveDuration = Field(
        default=quantity.duration("600s"), description="For a whole answer that is not streamed."
    )


class Provider(Section):
    """One upstream API with its credentials."""

    kind: KindName = Field(
        description="Whose API it is. Sets dialects, key header, accounting, meter shape, header "
        "family and pass-through paths; each can be overruled below."
    )
    base_url: Annotated[str, AfterValidator(forms.base_url)] = Field(
        description="Scheme, host, port and prefix in front of the caller's /v1. May be ${NAME}."
    )
    keys: tuple[ProviderKey, ...] = Field(
        default=(), description="Credentials; none for open servers."
    )
    dialects: tuple[Dialect, ...] | None = Field(
        default=None, min_length=1, description="Dialects it speaks; nothing is translated."
    )
    accounting: AccountingOf | None = Field(default=None, description="When it charges what.")
    shape: ShapeName | None = Field(default=None, description="How its meters forget.")
    headers: Literal["openai", "anthropic", "azure", "groq", "cerebras", "none"] | None = Field(
        default=None, description="Family of its rate-limit headers."
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="Deadlines towards it.")
    concurrency: int | None = Field(
        default=None, ge=1, le=100_000, description="Calls in flight towards it; default: no limit."
    )
    stream_options: bool | None = Field(
        default=None, description="Whether stream_options.include_usage may be added to a stream."
    )
    idempotency: bool | None = Field(
        default=None, description="Whether Idempotency-Key is passed on to it."
    )
    count_tokens: Literal["relay", "local"] | None = Field(
        default=None, description="Who answers /v1/messages/count_tokens."
    )
    count_tokens_pool: Names | None = Field(
        default=None, description="Pools that relayed count_tokens calls spend."
    )
    passthrough: tuple[Annotated[str, AfterValidator(forms.path)], ...] | None = Field(
        default=None, description="Further paths relayed without reading bodies; [] for none."
    )
    passthrough_pool: Names | None = Field(
        default=None, description="Pools that relayed paths spend (requests only)."
    )
    query: dict[Name, SecretText] = Field(
        default={}, description="Parameters added to each request, such as api-version."
    )
    extra_headers: dict[Annotated[str, AfterValidator(forms.header)], SecretText] = Field(
        default={}, description="Headers added to each request."
    )
    on_disconnect: Literal["close", "drain"] = Field(
        default="close",
        description="When the client leaves: close the upstream, or read to the end.",
    )


class Limits(Section):
    """Whole requests and tokens per second, minute, hour or calendar day (UTC)."""

    rps: Count | None = Field(default=None, description="Requests per second.")
    rpm: Count | None = Field(default=None, description="Requests per minute.")
    rph: Count | None = Field(default=None, description="Requests per hour.")
    rpd: Count | None = Field(default=None, description="Requests per day.")
    tpm: Count | None = Field(default=None, description="Tokens per minute, input and output.")
    tph: Count | None = Field(default=None, description="Tokens per hour, input and output.")
    tpd: Count | None = Field(default=None, description="Tokens per day, input and output.")
    itpm: Count | None = Field(default=None, description="Input tokens per minute.")
    itpd: Count | None = Field(default=None, description="Input tokens per day.")
    otpm: Count | None = Field(default=None, description="Output tokens per minute.")
    otpd: Count | None = Field(default=None, description="Output tokens per day.")
    concurrency: int | None = Field(
        default=None, ge=1, le=100_000, description="Calls in flight at once."
    )


class Ramp(Section):
    """How fast use may grow, where a provider punishes sudden growth (`slow_down`)."""

    when: Literal["after_refusal", "always"] = Field(
        default="after_refusal",
        description="after_refusal: for 15 minutes after the provider has refused because of "
        "growth, slower with each such refusal.",
    )
    floor: Count = Field(
        default=1_000_000, description="Input tokens per minute that are never too sudden."
    )
    growth: Percent = Field(
        default=500_000, description="Growth in 15 minutes above their mean, or the floor."
    )
    mode: Mode = Field(default="enforce", description=MODE)


class Pool(Section):
    """One provider quota: an account and model class, or one self-hosted deployment."""

    provider: Name = Field(description="Whose quota it is.")
    limits: Limits = Field(description="As the provider states them.")
    shape: ShapeName | None = Field(default=None, description="Default: the provider's.")
    accounting: AccountingOf | None = Field(default=None, description="Default: the provider's.")
    reserve: Literal["none", "interactive", "ceilings"] = Field(
        default="none",
        description="What lower tiers leave free. none: burst depth alone. interactive: tiers 2 "
        "and 3 stop at 95 and 90 % of a window. ceilings: at 90 and 85 %.",
    )
    ceilings: dict[Name, Share] | None = Field(
        default=None,
        description="Per tier, the share it may fill; the tiers left out may fill all.",
    )
    guard: Share | None = Field(default=None, description="Share of the limit left unused.")
    spread: Duration | None = Field(
        default=None, description="How long log entries outlive a window, against arrival jitter."
    )
    pace: Percent | None = Field(default=None, description="Multiplier of the refill.")
    max_waiting: int | None = Field(
        default=None, ge=1, le=20_000, description="Calls that may wait here; default 20000."
    )
    utc_offset: Offset = Field(default=0, description="Where the provider's days begin.")
    ramp: Ramp = Field(default=Ramp.model_construct(), description="How fast use may grow.")
    mode: Mode = Field(default="enforce", description=MODE)


# --- models ---


class Price(Section):
    """US dollars per million tokens."""

    input: UsdPerMillion = Field(description="Fresh input.")
    output: UsdPerMillion = Field(description="Output, reasoning included.")
    cache_read: UsdPerMillion | None = Field(default=None, description="Default: as input.")
    cache_write: UsdPerMillion | None = Field(default=None, description="Default: as input.")


class Deployment(Section):
    """One way to serve a model."""

    provider: Name = Field(description="Who serves it.")
    pool: Names = Field(
        description="The pools it spends, narrower first; or per_model: each concrete name is a "
        "pool of its own without quota."
    )
    upstream: Name | None = Field(
        default=None, description="Name at the provider; default: the name the caller used."
    )
    context_window: Count | None = Field(default=None, description="Tokens; default: unknown.")
    max_output: Count | None = Field(default=None, description="Tokens; default: unknown.")
    capabilities: tuple[Capability, ...] | None = Field(
        default=None, description="What it can do; default: everything."
    )
    encoding: Literal["o200k_base", "cl100k_base"] = Field(
        default="o200k_base", description="Vocabulary that counts its tokens."
    )


class Spare(Deployment):
    """The same model elsewhere: tried when the first choice gives up."""

    price: Price | None = Field(default=None, description="Default: the model's price.")


class Model(Deployment):
    """A public model name, or a pattern of names, with its ladder."""

    also: tuple[Spare, ...] = Field(default=(), description="The same model elsewhere, in order.")
    ladder: Names | None = Field(
        default=None,
        description="Other public models to take instead, in order; their ladders follow.",
    )
    downgrade: Literal["auto", "never"] = Field(
        default="auto", description="never: this model is never replaced, whatever the tier says."
    )
    created: Instant = Field(default=0.0, description="Shown by /v1/models.")


# --- tiers, agents, tenants ---


class KeepAlive(Section):
    """What a waiting stream hears."""

    after: PositiveDuration = Field(
        default=quantity.duration("12s"), description="Silent until then."
    )
    every: PositiveDuration = Field(default=quantity.duration("10s"), description="From then on.")


class Tier(Section):
    """A quality of service; number 1 goes first."""

    number: Literal[1, 2, 3] = Field(description="1 most urgent, 3 least.")
    max_wait: Duration = Field(
        default=quantity.duration("120s"),
        description="Queue deadline: the longest wait of a call in all.",
    )
    keepalive: KeepAlive = Field(default=KeepAlive(), description="What a waiting stream hears.")
    ceiling: Share | None = Field(
        default=None, description="Share of every pool it may fill; a pool's own ceilings win."
    )
    hold: bool = Field(
        default=False, description="Keep calls (202) while a breaker is open, instead of refusing."
    )
    downgrade: bool = Field(default=True, description="Whether its calls may take the ladder.")


class OwnLimits(Limits):
    """Limits of ours, on top of the provider's."""

    max_wait: Duration | None = Field(
        default=None,
        description="Longest wait for these; 0s refuses at once; default: the call's own.",
    )
    accounting: AccountingOf | None = Field(
        default=None,
        description="Default reserve_settle: prompt + output cap, corrected at the end.",
    )
    mode: Mode = Field(default="enforce", description=MODE)


class Budget(Section):
    """A sum of tokens or money per calendar day or month; refused when spent."""

    tokens: Count | None = Field(default=None, description="Tokens, input and output.")
    money: Money | None = Field(default=None, description="Dollars, by the section prices.")
    per: Literal["day", "month"] = Field(description="The calendar period.")
    utc_offset: Offset = Field(default=0, description="Where days and months begin.")
    mode: Mode = Field(default="enforce", description=MODE)


class AgentKey(Section):
    """One way in: a stored hash, a key from the environment, or a pattern of keys."""

    hash: Annotated[str, AfterValidator(forms.stored)] | None = Field(
        default=None,
        description="sha256:<salt in hex>:<digest in hex>, as `tidegate agent` prints it.",
    )
    key: SecretText | None = Field(
        default=None, description="The key itself: ${NAME} or ${file:/path}."
    )
    pattern: Pattern | None = Field(
        default=None,
        description="Any key of this form, each an agent of its own; from loopback only.",
    )
    id: Annotated[str, AfterValidator(forms.key_id)] | None = Field(
        default=None, description="The id within tg_<id>_<secret>, or a name for logs."
    )
    expires: Instant | None = Field(default=None, description="Refused from then on: for rotation.")


class AgentToken(Section):
    """Agents that prove themselves by a signed token."""

    issuer: Name = Field(description="A name from the section issuers.")
    match: dict[str, Annotated[str, AfterValidator(forms.claim)]] = Field(
        default={}, description="Claims that must fit these patterns, all of them."
    )


class Agent(Section):
    """Who may call, from which credential, and what it may do."""

    tenant: Name | None = Field(
        default=None, description="Whose it is; default: the tenant `default`."
    )
    keys: tuple[
        Annotated[AgentKey, BeforeValidator(forms.hashed, json_schema_input_type=str | AgentKey)],
        ...,
    ] = Field(default=(), description="Keys; two at once while they are rotated.")
    jwt: AgentToken | None = Field(default=None, description="Or a signed token.")
    tier: Name | None = Field(default=None, description="Tier of its calls; default: number 2.")
    tier_cap: Name | None = Field(
        default=None, description="Most urgent tier a call may ask for; default: its tier."
    )
    weight: Weight = Field(default=1, description="Share among agents, where fairness is by agent.")
    models: Patterns = Field(default=("*",), description="Public model names it may use.")
    tools: Patterns = Field(default=("*",), description="Tools it may use.")
    limits: OwnLimits | None = Field(default=None, description="Its own limits.")
    budgets: tuple[Budget, ...] = Field(default=(), description="Its own budgets.")
    max_wait: Duration | None = Field(
        default=None, description="Longest wait of a call; default: tier's."
    )
    loopback_only: bool = Field(
        default=False, description="Accepted only from this machine's loopback addresses."
    )


class Tenant(Section):
    """A group of agents that shares limits and budgets."""

    weight: Weight = Field(
        default=1, description="Share among tenants, where fairness is by tenant."
    )
    tier_cap: Name | None = Field(
        default=None, description="Most urgent tier of any of its agents."
    )
    limits: OwnLimits | None = Field(default=None, description="Limits of all its agents together.")
    budgets: tuple[Budget, ...] = Field(
        default=(), description="Budgets of all its agents together."
    )


class Issuer(Section):
    """Who may sign tokens for us."""

    issuer: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="The `iss` claim; left out only for SPIFFE."
    )
    audience: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="The `aud` claim that names this gateway."
    )
    jwks_url: Annotated[str, AfterValidator(forms.url)] | None = Field(
        default=None, description="Where its keys are fetched."
    )
    jwks_file: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="Or the file that holds them."
    )
    algorithms: tuple[Algorithm, ...] = Field(
        default=("RS256", "ES256", "PS256"), min_length=1, description="Signatures accepted."
    )
    claims: dict[Literal["agent", "tenant", "tier", "session", "workflow"], str] = Field(
        default={}, description="Ours: theirs, dots for nesting. Default agent: sub."
    )
    spiffe: bool = Field(default=False, description="JWT-SVIDs: sub is a spiffe:// id.")


# --- tool servers ---


class Condition(Section):
    """What the values at a path must be; several facts must hold together."""

    path: ValuePath = Field(description="Where: amount, order.lines[*].price, tags[0].")
    type: Literal["string", "number", "integer", "boolean", "array", "object"] | None = Field(
        default=None, description="Kind of value."
    )
    min: Number | None = Field(default=None, description="At least; text in digits counts as well.")
    max: Number | None = Field(default=None, description="At most.")
    above: Number | None = Field(default=None, description="More than.")
    below: Number | None = Field(default=None, description="Less than.")
    min_length: int | None = Field(default=None, ge=0, description="Of texts and arrays.")
    max_length: int | None = Field(default=None, ge=0, description="Of texts and arrays.")
    pattern: Regex | None = Field(
        default=None, description="Regular expression that matches somewhere; (?i) ignores case."
    )
    one_of: tuple[str | int | float | bool | None, ...] = Field(
        default=(), description="Only these values."
    )
    none_of: tuple[str | int | float | bool | None, ...] = Field(
        default=(), description="Never these values."
    )
    money: bool = Field(
        default=False, description="A decimal amount that is not negative, as number or text."
    )
    digits: int = Field(default=2, ge=0, le=9, description="Decimal places that money may have.")
    currency: ValuePath | None = Field(
        default=None, description="Where its ISO 4217 code stands; it must be there."
    )
    at_least: ValuePath | None = Field(
        default=None, description="Path of a value that this one must not be less than."
    )
    at_most: ValuePath | None = Field(
        default=None, description="Path of a value that this one must not exceed."
    )
    equals: ValuePath | None = Field(default=None, description="Path of an equal value.")
    differs: ValuePath | None = Field(default=None, description="Path of another value.")
    required: bool = Field(default=False, description="It must be there.")


class ToolLimits(OwnLimits):
    """A limit of ours on tool calls, by the same meters as for models."""

    per: Annotated[
        tuple[Literal["agent", "tenant", "tool"], ...],
        BeforeValidator(forms.listed, json_schema_input_type=str | list[str]),
        AfterValidator(forms.unique),
    ] = Field(
        default=(),
        description="Who has a count of its own: each agent, tenant, tool; default: one for all.",
    )


class Approve(Section):
    """A human must agree to each such call, by `tidegate approvals`."""

    reason: Annotated[str, Field(max_length=200)] = Field(
        default="", description="Shown to approvers and to the agent."
    )
    expires: PositiveDuration = Field(
        default=quantity.duration("15m"), description="A question without an answer is denied then."
    )
    approvers: Names = Field(default=(), description="Who may decide; default: all approvers.")
    signatures: int = Field(
        default=1, ge=1, le=20, description="How many of them must grant it; one denial ends it."
    )


class ToolCase(Section):
    """An argument class: what holds besides where the arguments meet all conditions.

    What is missing or of another kind counts as met, so leaving it out is no way around.
    """

    when: tuple[Condition, ...] = Field(min_length=1, description="All of them.")
    deny: bool = Field(default=False, description="Such calls are refused.")
    limits: tuple[ToolLimits, ...] = Field(default=(), description="Limits of such calls.")
    approve: Approve | None = Field(default=None, description="Such calls need a human's consent.")


class Reconcile(Section):
    """How its server is asked whether a call was done whose answer was lost.

    An answer that is neither leaves the doubt, and so does one that is both.
    """

    tool: Annotated[str, Field(min_length=1, max_length=128)] = Field(
        description="A tool of the same server that only reads."
    )
    arguments: dict[Annotated[str, Field(min_length=1, max_length=128)], ValuePath] = Field(
        min_length=1, description="What it is asked with: paths into the arguments of the call."
    )
    done: tuple[Condition, ...] = Field(
        min_length=1, description="What its structured answer is where the call was done."
    )
    absent: tuple[Condition, ...] = Field(
        min_length=1,
        description="What it is where the call was not done and never will be. Believed only once "
        "the first request cannot be under way any more.",
    )


class ToolRule(Section):
    """What holds for a tool of one server, or for a pattern of its tools."""

    deny: bool = Field(default=False, description="Nobody sees or calls it.")
    effect: Literal["read", "idempotent", "queryable", "irreversible"] = Field(
        default="irreversible",
        description="What running it twice does. read, idempotent: nothing, so failures are "
        "retried. queryable: harm, but its server can be asked whether it was done. The server's "
        "own hints decide nothing.",
    )
    reconcile: Reconcile | None = Field(
        default=None, description="How a queryable call is asked about."
    )
    polling: bool = Field(default=False, description="It may be called again and again.")
    duplicates: PositiveDuration | None = Field(
        default=None,
        description="The same call of the same session within this time is answered from the "
        "record, not run again. Calls with an idempotency key always are.",
    )
    contract: Mode = Field(
        default="enforce", description="The server's schemas and these assertions. " + MODE
    )
    unusable_schema: Literal["refuse", "pass"] = Field(
        default="refuse",
        description="When a schema of the server is none, refers elsewhere or is too costly.",
    )
    arguments: tuple[Condition, ...] = Field(default=(), description="What arguments must be.")
    results: tuple[Condition, ...] = Field(
        default=(), description="What structured results must be."
    )
    limits: tuple[ToolLimits, ...] = Field(default=(), description="Limits of its calls.")
    approve: Approve | None = Field(default=None, description="Each call needs consent.")
    cases: dict[Name, ToolCase] = Field(default={}, description="Argument classes by name.")
    denial: Literal["error", "result"] | None = Field(
        default=None,
        description="How a refusal is said: a JSON-RPC error, or a result with isError that the "
        "model reads. Default: error, but result for clients of the session era.",
    )


class ScreenRule(Section):
    """Words of tools and peers that give orders to a model."""

    pattern: Regex = Field(description="Regular expression of linear time; (?i) ignores case.")
    action: Literal["mark", "refuse"] = Field(
        default="mark", description="mark: say so beside the result. refuse: withhold it."
    )


class Screen(Section):
    """What results are looked through for; in a policy folder it may be a file of its own."""

    mode: Mode = Field(default="shadow", description=MODE)
    rules: dict[Name, ScreenRule] = Field(default={}, description="What to look for, by name.")


class Approvals(Section):
    """Who may consent to calls, and how long a call waits for it."""

    approvers: dict[Name, Annotated[str, AfterValidator(forms.public_key)]] = Field(
        default={}, description="ed25519:… by name, as `tidegate approvals key` prints them."
    )
    wait: Duration = Field(
        default=quantity.duration("50s"),
        description="How long a call waits for a decision before it is told to come back.",
    )
    keep: PositiveDuration = Field(
        default=quantity.duration("30d"), description="How long decisions are kept."
    )
    max_open: Count = Field(default=100, description="Undecided questions of one agent.")
    max_kept: Count = Field(default=10_000, description="Questions and decisions in all.")


class Effects(Section):
    """The record of side effects, from which repeated calls are answered."""

    keep: PositiveDuration = Field(
        default=quantity.duration("7d"), description="How long an idempotency key is known."
    )
    max_kept: Count = Field(default=1_000_000, description="Effects in all.")
    max_bytes: Size = Field(default=quantity.size("1GiB"), description="Bytes of their answers.")
    max_answer: Size = Field(
        default=quantity.size("1MiB"), description="Largest answer that is kept."
    )


class ChildLimits(Section):
    """What the process of a stdio server may use; it is killed or refused beyond."""

    memory: Size = Field(
        default=quantity.size("4GiB"), description="Address space of each of its processes."
    )
    open_files: int = Field(default=1024, ge=16, le=1_000_000, description="Open files.")
    cpu: PositiveDuration | None = Field(
        default=None, description="Processor time of one process in all; default: no limit."
    )


class Server(Section):
    """One MCP server: remote by its URL, or local by the command that starts it."""

    url: Annotated[str, AfterValidator(forms.url)] | None = Field(
        default=None, description="Its Streamable HTTP endpoint. May be ${NAME}."
    )
    command: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Or program and arguments, speaking over its pipes. Never through a shell.",
    )
    env: dict[Annotated[str, AfterValidator(forms.variable)], SecretText] = Field(
        default={}, description="Variables of the command; of ours it gets PATH, HOME and LANG."
    )
    cwd: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="Folder in which the command runs."
    )
    process: ChildLimits = Field(default=ChildLimits(), description="Bounds of the command.")
    key: SecretText | None = Field(
        default=None, description="Its credential, sent as a bearer: ${NAME} or ${file:/path}."
    )
    headers: dict[Annotated[str, AfterValidator(forms.header)], SecretText] = Field(
        default={}, description="Further headers of each request to its URL."
    )
    era: Literal["auto", "stateless", "session"] = Field(
        default="auto",
        description="stateless: 2026-07-28. session: older. auto: asked, and remembered.",
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="Deadlines towards it.")
    max_result: Size = Field(default=quantity.size("8MiB"), description="Largest message of it.")
    agents: Patterns = Field(default=("*",), description="Agents that may use it.")
    tenants: Patterns = Field(default=("*",), description="Tenants that may use it.")
    limits: OwnLimits | None = Field(default=None, description="Of all calls to it together.")
    tools: dict[Pattern, ToolRule] = Field(
        default={}, description="Rules by tool or pattern; exact names first, then in order."
    )


# --- the process ---


class ListenerSet(Section):
    """Where the process listens; TIDEGATE_HOST and the like win. Read at start only."""

    data: Address | None = Field(default=None, description="For agents; default 127.0.0.1:8484.")
    admin: Address | None = Field(
        default=None, description="For operators; default 127.0.0.1:8485."
    )


class Edge(Section):
    """What the data listener accepts."""

    max_body: Size = Field(
        default=40 * 1024 * 1024, description="Largest body, and its decoded form."
    )
    allowed_hosts: tuple[Annotated[str, AfterValidator(forms.host)], ...] = Field(
        default=(), description="Host headers accepted besides the listener's own addresses."
    )
    cors_origins: tuple[Annotated[str, AfterValidator(forms.origin)], ...] = Field(
        default=(), description="Browser origins allowed; default none."
    )
    drain: Duration = Field(
        default=quantity.duration("5s"), description="How long a stop waits for calls in flight."
    )
    max_in_flight: int = Field(
        default=20_000, ge=1, le=1_000_000, description="Calls in the process at once."
    )
    anonymous: Name | None = Field(
        default=None, description="Agent of calls without a credential; it must be loopback_only."
    )


class RetryBudget(Section):
    """How many repeats success earns."""

    ratio: Share = Field(default=100_000, description="Repeats per success.")
    min_per_second: int = Field(default=1, ge=0, le=1000, description="Refill without any success.")
    max: int = Field(default=100, ge=1, le=100_000, description="Most that is saved up.")


class Retry(Section):
    """Attempts, and waits between them."""

    backoff: Literal["decorrelated", "full"] = Field(
        default="decorrelated", description="Kind of jitter."
    )
    base: PositiveDuration = Field(default=quantity.duration("500ms"), description="First wait.")
    cap: PositiveDuration = Field(default=quantity.duration("20s"), description="Longest wait.")
    attempts: int = Field(default=3, ge=1, le=10, description="Attempts on one rung in all.")
    requeues: int = Field(
        default=8, ge=0, le=100, description="Quota refusals that rejoin the queue."
    )
    max_retry_after: PositiveDuration = Field(
        default=quantity.duration("60s"), description="Longest Retry-After that is waited out."
    )
    budget: RetryBudget = Field(
        default=RetryBudget(), description="How many repeats success earns."
    )
    mode: Mode = Field(default="enforce", description=MODE)


class FailureWindow(Section):
    """Failures counted over a rolling window."""

    window: PositiveDuration = Field(description="How far back.")
    volume: int = Field(ge=1, le=100_000, description="Calls before the ratio counts.")
    ratio: Share = Field(description="Share of failures that trips.")


class Breakers(Section):
    """When a deployment counts as sick."""

    fast: FailureWindow = Field(
        default=FailureWindow.model_construct(window=10_000_000, volume=10, ratio=500_000),
        description="For busy deployments.",
    )
    slow: FailureWindow = Field(
        default=FailureWindow.model_construct(window=300_000_000, volume=20, ratio=300_000),
        description="For a trickle of failures.",
    )
    in_a_row: int = Field(default=5, ge=1, le=1000, description="Failures in a row that trip.")
    in_a_row_within: PositiveDuration = Field(
        default=quantity.duration("60s"), description="Within this time."
    )
    identical_quota: int = Field(
        default=3, ge=1, le=1000, description="Equal quota refusals in a row that start the ladder."
    )
    probes: int = Field(default=3, ge=1, le=100, description="Good probes that close it again.")
    probe_lease: PositiveDuration = Field(
        default=quantity.duration("30s"), description="How long one probe may take."
    )
    base: PositiveDuration = Field(default=quantity.duration("500ms"), description="First pause.")
    cap: PositiveDuration = Field(default=quantity.duration("60s"), description="Longest pause.")
    mode: Mode = Field(default="enforce", description=MODE)


class Loops(Section):
    """When an agent repeats itself; the figure is the call that is refused."""

    same_call: int = Field(
        default=4, ge=2, le=1000, description="Same call since the last user turn."
    )
    same_masked: int = Field(
        default=4, ge=2, le=1000, description="Same call but for numbers, with the same result."
    )
    alike_turns: int = Field(
        default=4, ge=2, le=1000, description="Successive turns that are alike."
    )
    alike: Share = Field(default=850_000, description="How alike.")
    ping_pong: int = Field(
        default=4, ge=2, le=1000, description="Rounds of two agents alternating."
    )
    max_iterations: Count | None = Field(
        default=None, description="Calls allowed before the user speaks again."
    )
    tokens_per_minute: Count | None = Field(default=None, description="Tokens per conversation.")
    max_tokens: Count | None = Field(
        default=None, description="Tokens of a conversation before the user speaks again."
    )
    max_money: Money | None = Field(
        default=None, description="Dollars of a conversation before the user speaks again."
    )
    task_tokens: Count | None = Field(
        default=None, description="Tokens of a workflow, else of a session, in all."
    )
    task_money: Money | None = Field(
        default=None, description="Dollars of a workflow, else of a session, in all."
    )
    polling_tools: tuple[Pattern, ...] = Field(default=(), description="Tools that may repeat.")
    window: PositiveDuration = Field(
        default=quantity.duration("2m"),
        description="Tool plane: same calls of one agent count together within this time.",
    )
    mode: Mode = Field(default="shadow", description=MODE)


class Webhooks(Section):
    """Where results of held calls and alerts may be pushed, and how they are signed."""

    signing_key: SecretText | None = Field(
        default=None,
        description="Signs every delivery (Standard Webhooks: whsec_… or any text of 24 or more).",
    )
    hosts: tuple[Annotated[str, AfterValidator(forms.target_host)], ...] = Field(
        default=(),
        description="Hosts that callers may name: host, *.domain, host:port, host:*; else 443.",
    )
    networks: tuple[Annotated[str, AfterValidator(forms.network)], ...] = Field(
        default=(),
        description="Non-public networks that may be reached, http allowed: 10.1.0.0/16.",
    )
    alerts: Annotated[str, AfterValidator(forms.target_url)] | None = Field(
        default=None, description="Told when calls begin to be held, and when all are resumed."
    )


class Holds(Section):
    """Calls kept (202) while a breaker is open, and executed once it closes."""

    mode: Literal["enforce", "off"] = Field(
        default="enforce", description="off: nobody's call is kept."
    )
    longest: PositiveDuration = Field(
        default=quantity.duration("24h"), description="Longest time a call is kept."
    )
    keep: PositiveDuration = Field(
        default=quantity.duration("24h"), description="How long its result can be fetched."
    )
    max_calls: Count = Field(default=10_000, description="Kept calls and results at most.")
    max_bytes: Size = Field(
        default=quantity.size("1GiB"), description="Bytes of their requests and results."
    )
    max_per_agent: Count = Field(default=1_000, description="Waiting calls of one principal.")
    rate: int = Field(
        default=200, ge=1, le=10_000, description="Calls of one model resumed per second."
    )
    at_once: int = Field(
        default=64, ge=1, le=1_000, description="Resumed calls of one model under way at most."
    )
    webhooks: Webhooks = Field(default=Webhooks(), description="Where to push results and alerts.")


class Fleet(Section):
    """Several gateways that share limits, queues, budgets and breakers; read when they start."""

    redis: SecretText | None = Field(
        default=None,
        description="URL of the shared Redis or Valkey; TIDEGATE_REDIS_URL wins. None: alone.",
    )
    when_away: Literal["local", "closed", "open"] = Field(
        default="local",
        description="While it is away: own share of each limit, nobody new, or everybody.",
    )
    prefix: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        default="tidegate:", description="Of its keys and channels; fleets with equal ones share."
    )


class Logging(Section):
    """What is logged."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="From here up."
    )
    access: bool = Field(default=True, description="One line per call.")


class PolicyFile(Section):
    """Tidegate policy, version 1. One file, or a folder merged in name order."""

    version: Literal[1] = Field(description="Layout of this file.")
    mode: Mode = Field(
        default="enforce",
        description="Weakens every rule: shadow lets nothing act, off puts all asleep.",
    )
    listeners: ListenerSet = Field(default=ListenerSet(), description="Where the process listens.")
    edge: Edge = Field(default=Edge(), description="What the data listener accepts.")
    providers: dict[Name, Provider] = Field(min_length=1, description="Upstream APIs by name.")
    pools: dict[Name, Pool] = Field(default={}, description="Provider quotas by name.")
    models: dict[Pattern, Model] = Field(
        min_length=1,
        description="Public model names or patterns; exact names first, then in order.",
    )
    prices: dict[Pattern, Price] = Field(
        default={},
        description="Prices by public model name or pattern; exact names first, then in order.",
    )
    tiers: dict[Name, Tier] = Field(
        default={}, description="At most three; the rest is as shipped."
    )
    fairness: Literal["tenant", "agent"] | None = Field(
        default=None,
        description="Who shares alike; default: tenant where tenants are given, else agent.",
    )
    tenants: dict[Name, Tenant] = Field(default={}, description="Groups of agents by name.")
    agents: dict[Name, Agent] = Field(min_length=1, description="Callers by name.")
    issuers: dict[Name, Issuer] = Field(default={}, description="Signers of tokens by name.")
    servers: dict[Annotated[str, AfterValidator(forms.server_name)], Server] = Field(
        default={}, description="MCP servers by name; each is served at /mcp/NAME."
    )
    retry: Retry = Field(default=Retry(), description="Attempts, and waits between them.")
    breakers: Breakers = Field(default=Breakers(), description="When a deployment counts as sick.")
    loops: Loops = Field(default=Loops(), description="When an agent repeats itself.")
    holds: Holds = Field(default=Holds(), description="Calls kept while a breaker is open.")
    fleet: Fleet = Field(default=Fleet(), description="Gateways that share one store.")
    approvals: Approvals = Field(default=Approvals(), description="Who may consent to tool calls.")
    effects: Effects = Field(default=Effects(), description="The record of side effects.")
    screen: Screen = Field(
        default=Screen(), description="What tool results are looked through for."
    )
    logging: Logging = Field(default=Logging(), description="What is logged.")
    tokenizer: Literal["preferred", "required"] = Field(
        default="preferred", description="required: refuse to start without the exact vocabulary."
    )
