"""Call, Principal, Reply: what the layers pass to each other. Aliases `Service` and `Layer`.

A `Call` is one request on its way through the pipeline. It is the one mutable value of the gateway:
each field has exactly one writer, named beside it, and a layer reads only what outer layers wrote.
A `Reply` owns everything that must be given back; `close()` is idempotent and must be called.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from gateway.admission.profiles import Accounting, Estimate, Usage
from gateway.resilience.attempts import Kind
from gateway.toolcall import ToolCall
from gateway.units import Micros, RuleId, Tokens, maker, new_tuple, valueclass

if TYPE_CHECKING:
    import asyncio

    from gateway.snapshot import AgentRule, Deployment, Model, Snapshot, Tier

__all__ = [
    "Bytes", "Call", "ClientKind", "Dialect", "End", "Estimate", "Family", "Fields", "HeaderList",
    "HeldCall", "Kind", "Layer", "Lines", "Part", "PartKind", "Piece", "Principal", "Remembered",
    "Reply", "Service", "Source", "ToolCall", "Usage", "VerdictNote",
]  # fmt: skip

HeaderList: TypeAlias = "list[tuple[bytes, bytes]]"
"""Header pairs, names in lower case, order and repeats kept. Never build a dict of them."""


SAYS = frozenset({
    b"baggage", b"mcp-session-id", b"priority", b"session-id", b"session_id", b"thread-id",
    b"tidegate-tier", b"x-claude-code-session-id", b"x-stainless-read-timeout",
    b"x-stainless-retry-count", b"x-stainless-timeout",
})  # fmt: skip
"""Headers in which a caller says something of itself: picked once, because most calls have none and
each layer that asks would look through all of them."""


class Lines(list[tuple[bytes, bytes]]):
    """The header lines of a request that is served, and what was derived of them alone.

    A client repeats its head from call to call, and the edge hands out the same lines then: what
    was found out once holds again. Nobody changes them; who wants others makes a list. The length
    is not among them: what the body is, `Call` and `framing.Head` say.

    Attributes:
        said: Those that `SAYS` names.
        digest: SHA-256 of the credential; None until it was asked for, or where there is none.
        onward: What goes on to an upstream, by what it is told (`wire.headers.to_upstream`).
        trace: Id of the trace they belong to (`record.trace_of`); None until it was asked for.
    """

    __slots__ = ("digest", "onward", "said", "trace")

    def __init__(self, lines: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(lines)
        self.said: HeaderList = [pair for pair in self if pair[0] in SAYS]
        self.digest: bytes | None = None
        self.trace: str | None = None
        self.onward: dict[tuple[bool, bool], HeaderList] = {}


class Family(StrEnum):
    """Whose error shape and header family a route speaks."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    MCP = "mcp"
    TIDEGATE = "tidegate"


class Dialect(StrEnum):
    """The route's wire format."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    MODELS = "models"
    PASSTHROUGH = "passthrough"
    MCP = "mcp"


class ClientKind(StrEnum):
    """Self-reported client; chooses a shape, never a right."""

    SDK = "sdk"
    CODEX = "codex"
    CLAUDE_CODE = "claude_code"


@valueclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What policy needs of a request body, in any dialect.

    Attributes:
        model: Public model name as asked.
        stream: Whether the client asked for a stream.
        cap: Effective output cap times n; None where none is named (or it is absurd).
        wants_usage: `stream_options.include_usage` as the client set it; None if it did not.
        needs: Capabilities the request uses; see `snapshot.Deployment.capabilities`.
        has_tools, has_images: For the learned input bias.
        previous_response_id: Responses: pins the upstream.
        session: A session hint found in the body (metadata.user_id, prompt_cache_key), or "".
        has_thinking: Signed thinking blocks are present.
    """

    model: str
    stream: bool = False
    cap: Tokens | None = None
    wants_usage: bool | None = None
    needs: frozenset[str] = frozenset()
    has_tools: bool = False
    has_images: bool = False
    previous_response_id: str | None = None
    session: str = ""
    has_thinking: bool = False


make_fields = maker(Fields)


class PartKind(StrEnum):
    """How a part of a prompt that is no text is counted."""

    TOKEN_IDS = "token_ids"  # noqa: S105 - a kind of part
    IMAGE = "image"
    AUDIO = "audio"
    FILE = "file"
    OVERHEAD = "overhead"


@valueclass(frozen=True, slots=True)
class Part:
    """One countable piece of a prompt that is no text; a payload is never in it.

    Attributes:
        kind: How to count it.
        count: TOKEN_IDS and OVERHEAD: tokens. FILE: payload bytes.
        width, height: IMAGE: pixels, 0 where unknown.
        detail: IMAGE: "low", "high", "auto".
    """

    kind: PartKind
    count: int = 0
    width: int = 0
    height: int = 0
    detail: str = "auto"


Piece: TypeAlias = "Part | str"
"""One countable piece of a prompt: nearly all are texts, which stand for themselves."""


@valueclass(frozen=True, slots=True)
class Terms:
    """What a call of some principal gets.

    Attributes:
        snapshot: The policy that says so.
        tier: Its tier.
        wait: How long it may queue in all.
        detail: The same in words, for the chain of verdicts.
    """

    snapshot: Snapshot
    tier: Tier
    wait: Micros
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who calls: from the credential alone; hints never raise its rights.

    Attributes:
        id: Stable id for the log ("key:dev", "jwt:spiffe://…"); never the secret.
        agent, tenant: Names for fairness, limits and status.
        rule: What it may do.
        pools: Its own and its tenant's limits, instantiated, in acquiring order: budgets, agent,
            tenant.
        actors: RFC 8693 `act` chain, outermost first.
        expires: Wall-clock seconds; 0 never.
        session, workflow: From mapped claims of the credential; "" where it names none. They win
            over hints in headers and body.
        accountings: How each of `pools` charges, by its rule.
        usual: What its calls get that say nothing of themselves, by dialect and whether they
            stream: remembered by identify, no part of the value.
    """

    id: str
    agent: str
    tenant: str
    rule: AgentRule
    pools: tuple[Any, ...] = ()
    actors: tuple[str, ...] = ()
    expires: float = 0.0
    session: str = ""
    workflow: str = ""
    accountings: tuple[Accounting, ...] = field(init=False)
    usual: dict[tuple[Dialect, bool], Terms] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """What does not change from call to call is asked of the rule once."""
        charged = tuple(self.rule.accounting_for(pool.name) for pool in self.pools)
        object.__setattr__(self, "accountings", charged)


class VerdictNote(NamedTuple):
    """One link of the chain of because: which layer decided what, by which rule, when."""

    layer: str
    verdict: str
    because: RuleId
    at: Micros
    detail: str = ""


class End(StrEnum):
    """How a reply ended, as the edge saw it."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    CUT = "cut"
    STALLED = "stalled"
    FAILED = "failed"
    DRAINED = "drained"


COMPLETE = End.COMPLETE
BROKEN = (End.CUT, End.STALLED, End.FAILED)
"""Ends of an answer that is not whole. Named here, as `COMPLETE` is, for the data path: to ask an
enumeration for a member costs ten times what a name does."""


class Call:
    """One request under way.

    Attributes, with their writer:
        id, dialect, family, client, method, path, target, headers, body, coding, snapshot,
            received, peer (edge): `target` is path and query exactly as sent; `headers` are the
            client's, `said` those of them that `SAYS` names; `body` is the raw body as sent, b""
            while `upload` streams one, of `upload_length` bytes (None: chunked, as it came);
            `coding` its encoding.
        parsed (edge; dropped by admit before a wait): decoded JSON, or None.
        fields (edge): what policy needs of the body; None on routes that are not parsed.
        rpc (edge): the JSON-RPC messages of an MCP POST, a `wire.mcp.Posted`; else None.
        tool (target): what is asked of a tool server; None for all other calls.
        task (edge): the task that answers it, for deadlines and evictions; None if nobody said.
        principal, session, tier, deadline (identify): `deadline` is an instant of `clock.now()`.
        model, deployment, estimate (estimate, then downgrade): the rung now tried.
        attempt (retry): 1 on the first.
        rungs_left (downgrade): rungs not yet tried, so that inner layers know whether to wait.
        queue_us, reserved, tags, meters (admit): micros waited in all, tokens reserved, places held
            and our meter at the grant, by pool.
        place_key (admit): names a kept place; "" until one is asked for.
        sent (dispatch): the first request byte was handed to the transport in this attempt.
        answer (dispatch): the last upstream's reply, for whoever must close what a failing layer
            let fall.
        usage_injected (dispatch): `stream_options.include_usage` was added in the client's stead.
        upstream_us (dispatch): micros spent waiting for upstream heads, all attempts together.
        upstream_status, first_byte, credential (dispatch): of the last attempt; `first_byte` is an
            instant.
        usage, end (settle): what it cost in the end, and how it ended.
        overhead_us (observe): our own part, neither waiting nor upstream.
        notes (everybody): the chain of verdicts.
        extra_headers (everybody): `tidegate-*` headers of the answer.
    """

    __slots__ = (
        "answer", "attempt", "body", "client", "coding", "credential", "deadline", "deployment",
        "dialect", "end", "estimate", "extra_headers", "family", "fields", "first_byte", "headers",
        "id", "meters", "method", "model", "notes", "overhead_us", "parsed", "path", "peer",
        "place_key", "principal", "queue_us", "received", "reserved", "rpc", "rungs_left", "said",
        "sent", "session", "snapshot", "tags", "target", "task", "tier", "tool", "upload",
        "upload_length", "upstream_status", "upstream_us", "usage", "usage_injected",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - the edge states every fact of the request once
        self,
        *,
        id: str,  # noqa: A002 - the glossary's word
        dialect: Dialect,
        family: Family,
        method: str,
        path: str,
        target: bytes,
        headers: HeaderList,
        snapshot: Snapshot,
        received: Micros,
        body: bytes = b"",
        client: ClientKind = ClientKind.SDK,
    ) -> None:
        self.id = id
        self.dialect = dialect
        self.family = family
        self.client = client
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.said = headers.said if isinstance(headers, Lines) else Lines(headers).said
        self.body = body
        self.coding = ""
        self.upload: AsyncIterator[bytes] | None = None
        self.upload_length: int | None = None
        self.snapshot = snapshot
        self.received = received
        self.peer = ""
        self.task: asyncio.Task[object] | None = None
        self.parsed: Mapping[str, Any] | None = None
        self.fields: Fields | None = None
        self.rpc: Any = None
        self.tool: ToolCall | None = None
        self.principal: Principal | None = None
        self.session = ""
        self.tier: Tier | None = None
        self.deadline: Micros = 0
        self.model: Model | None = None
        self.deployment: Deployment | None = None
        self.estimate: Estimate | None = None
        self.attempt = 1
        self.rungs_left = 0
        self.queue_us: Micros = 0
        self.reserved: Tokens = 0
        self.place_key = ""
        self.tags: dict[str, int] | None = None
        self.meters: dict[str, tuple[int, ...]] | None = None
        self.sent = False
        self.answer: Reply | None = None
        self.credential = ""
        self.upstream_status = 0
        self.upstream_us: Micros = 0
        self.overhead_us: Micros = 0
        self.usage_injected = False
        self.first_byte: Micros = 0
        self.usage: Usage | None = None
        self.end: End | None = None
        self.notes: list[VerdictNote] = []
        self.extra_headers: HeaderList = []

    def note(self, layer: str, verdict: str, because: RuleId, at: Micros, detail: str = "") -> None:
        """One more link of the chain of verdicts."""
        # NamedTuple's own constructor is a Python function: three times as slow.
        self.notes.append(new_tuple(VerdictNote, (layer, verdict, because, at, detail)))

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, name in lower case; None if absent."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


make_call = maker(Call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What is left of an identity once its credential is forgotten; policy must know it anew.

    Attributes:
        id, agent: As in `Principal`.
        rule: Policy path of the rights it had.
        tier: The tier its call was held with: a wish, capped by its rights again.
        until: Instant at which the hold expires.
    """

    id: str
    agent: str
    rule: RuleId
    tier: int
    until: Micros


class HeldCall(Call):
    """A call that was kept and is executed now, with nobody waiting for it.

    Attributes, with their writer:
        who (resume): On whose behalf.
        sending (resume): Awaited before each attempt is handed to the transport, with the
            deployment's id: returns once that is on disk, raises if the call is not ours any more.
        doubtful (mark): A provider may have served it without our knowing.
    """

    __slots__ = ("doubtful", "sending", "who")

    who: Remembered
    sending: Callable[[str], Awaitable[None]]
    doubtful: bool


class Source(Protocol):
    """Where the bytes of a reply come from."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes exactly as they arrive; at most once."""
        ...

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        """Instead of `chunks`: the body was given to `take`, each chunk in the step it came in.

        True at its end, False once `take` returned False; then called again for the rest.
        """
        ...

    def close(self, *, reuse: bool) -> Awaitable[None]:
        """Once awaited, nothing of the source is left; callable twice.

        `reuse` keeps the connection if it can.
        """
        ...


class Bytes:
    """A source of bytes already here."""

    __slots__ = ("_body",)

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, at once."""
        if self._body:
            yield self._body

    def at_once(self) -> bytes:
        """The body; given out once."""
        body, self._body = self._body, b""
        return body

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        """The body, at once."""
        body, self._body = self._body, b""
        return not body or take(body)

    async def close(self, *, reuse: bool) -> None:
        """Nothing to give back."""


_NOTHING = Bytes(b"")


class Edit(Protocol):
    """A named edit of a stream: bytes in, the client's bytes out, never across a wait."""

    def feed(self, chunk: bytes) -> bytes:
        """What the client may see now."""
        ...

    def rest(self) -> bytes:
        """What is still held, at the end."""
        ...


class Reply:
    """An answer under way: a head, a source of bytes, taps beside it and what must be given back.

    Attributes:
        status, headers: The head as the client shall see it (hop-by-hop already removed).
        source: The body.
        kind: What a bad answer means; None where the answer is good.
        code: The body's own error code, for breakers and logs; "" where none.
        spares_pool: The refusal was one credential's and another is healthy: the quota stands.
        retry_after: The provider's word to wait, in micros from the head; None without one.
        taps: Synchronous observers of every chunk, called before it is sent; they must not raise.
        edit: What stands between the taps and the client, or None.
        terminal: Settle saw the body's terminal mark: a cut after it is no failure.
        finishing: Called once, after the last chunk and before `close`, to learn whether the body
            ended well: returns bytes to send in addition (a final error event), b"" for none.
        on_close: Called with a synchronous step, has it run when the reply ends; inner layers
            attach, and run, first.
    """

    __slots__ = (
        "_closers", "_ended", "code", "edit", "finishing", "headers", "kind", "on_close",
        "retry_after", "source", "spares_pool", "status", "taps", "terminal",
    )  # fmt: skip

    def __init__(self, status: int, headers: HeaderList, source: Source) -> None:
        self.status = status
        self.headers = headers
        self.source = source
        self.kind: Kind | None = None
        self.code = ""
        self.retry_after: Micros | None = None
        self.spares_pool = False
        self.terminal = False
        self.taps: list[Callable[[bytes], None]] = []
        self.edit: Edit | None = None
        self.finishing: list[Callable[[End], bytes]] = []
        self._closers: list[Callable[[End], None]] = []
        self.on_close: Callable[[Callable[[End], None]], None] = self._closers.append
        self._ended: End | None = None

    @property
    def ended(self) -> End | None:
        """How it ended; None while open."""
        return self._ended

    def finish(self, end: End) -> None:
        """First half of closing, synchronous and idempotent: everything counted is given back.

        A closer that fails keeps none of the others from giving back; its exception is raised last.
        """
        if self._ended is not None:
            return
        self._ended = end
        failure: Exception | None = None
        for closer in self._closers:
            try:
                closer(end)
            except Exception as error:  # noqa: BLE001 - raised below, once all have had their turn
                failure = failure or error
        # Closers close over their reply: dropped, because a call that is a cycle waits for the
        # collector with all that it holds, and a seventh of its cost is being collected.
        self._closers.clear()
        if failure is not None:
            raise failure

    async def close(self, end: End) -> None:
        """Everything is given back: `finish`, then the upstream connection. Idempotent."""
        self.finish(end)
        self.finishing.clear()
        await self.source.close(reuse=end is COMPLETE)
        self.source = _NOTHING


Service: TypeAlias = Callable[[Call], Awaitable[Reply]]
Layer: TypeAlias = Callable[[Service], Service]


def stack(*layers: Layer, service: Service) -> Service:
    """The service wrapped so that `layers` read in execution order, the first outermost."""
    for layer in reversed(layers):
        service = layer(service)
    return service
