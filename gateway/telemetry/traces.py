"""Spans: W3C trace context (pure), the names of the GenAI and MCP conventions, and OpenTelemetry.

The conventions still move (semantic-conventions-genai v0.1.0, "Development"), so the names are our
own constants, pinned to one schema version (`protocols.md` §6). A span is one value made when the
call ends: until then a call carries a `TraceContext` and nothing else, and an unsampled call costs
nothing more. OpenTelemetry is an optional extra: without an endpoint no spans are made; the context
is passed on either way. No prompt text is ever an attribute.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.units import Micros, Rng

SCHEMA_URL = "https://opentelemetry.io/schemas/gen-ai/0.1.0"

# --- model spans: `{operation} {model}`
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_CREATION_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
CONVERSATION_ID = "gen_ai.conversation.id"
AGENT_ID = "gen_ai.agent.id"
ERROR_TYPE = "error.type"

# --- tool spans: `{method} {tool}`
MCP_METHOD = "mcp.method.name"
MCP_SESSION = "mcp.session.id"
MCP_PROTOCOL = "mcp.protocol.version"
MCP_RESOURCE = "mcp.resource.uri"
TOOL_NAME = "gen_ai.tool.name"
JSONRPC_ID = "jsonrpc.request.id"
RPC_STATUS = "rpc.response.status_code"

# --- our own
CALL_ID = "tidegate.call.id"
TIER = "tidegate.tier"
QUEUE_SECONDS = "tidegate.queue.seconds"
TOKENS_RESERVED = "tidegate.tokens.reserved"
DOWNGRADE_REASON = "tidegate.downgrade.reason"
RULE = "tidegate.rule"

MODEL_NAMES = (
    OPERATION, PROVIDER, REQUEST_MODEL, REQUEST_MAX_TOKENS, REQUEST_STREAM, RESPONSE_ID,
    RESPONSE_MODEL, FINISH_REASONS, TIME_TO_FIRST_CHUNK, INPUT_TOKENS, OUTPUT_TOKENS,
    CACHE_READ_TOKENS, CACHE_CREATION_TOKENS, REASONING_TOKENS, CONVERSATION_ID, AGENT_ID,
    ERROR_TYPE, CALL_ID, TIER, QUEUE_SECONDS, TOKENS_RESERVED, DOWNGRADE_REASON, RULE,
)  # fmt: skip
TOOL_NAMES = (
    MCP_METHOD, MCP_SESSION, MCP_PROTOCOL, MCP_RESOURCE, TOOL_NAME, JSONRPC_ID, RPC_STATUS,
    AGENT_ID, ERROR_TYPE, CALL_ID, TIER, QUEUE_SECONDS, RULE,
)  # fmt: skip
"""All attributes a span of each kind may carry; anything else is refused where the span is made."""

LONGEST_VALUE = 256
LONGEST_STATE = 512
"""Characters of a text attribute, and bytes of a `tracestate` passed on (W3C: at least 512)."""


class Operation(StrEnum):
    """`gen_ai.operation.name` of our dialects."""

    CHAT = "chat"
    TEXT_COMPLETION = "text_completion"
    EMBEDDINGS = "embeddings"
    EXECUTE_TOOL = "execute_tool"


_TRACEPARENT = re.compile(
    rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a call stands in a trace: as received, or as passed on.

    Attributes:
        trace: 128 bits, not 0.
        span: 64 bits, not 0.
        sampled: Somebody wants to keep this trace.
        state: `tracestate` as received, opaque.
    """

    trace: int
    span: int
    sampled: bool
    state: bytes = b""

    @property
    def traceparent(self) -> bytes:
        """The header's value, version 00."""
        return b"00-%032x-%016x-%02x" % (self.trace, self.span, self.sampled)


def parse_traceparent(value: bytes, state: bytes = b"") -> TraceContext | None:
    """The context of a `traceparent`; None for anything the recommendation calls invalid.

    Versions above 00 are read by their first four fields. A broken header starts a new trace; it
    never fails a call.

    Source: W3C Trace Context, 3.2.
    """
    match = _TRACEPARENT.fullmatch(value.strip(b" \t"))
    if match is None:
        return None
    version, trace, span, flags, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest is not None):
        return None
    trace_id, span_id = int(trace, 16), int(span, 16)
    if trace_id == 0 or span_id == 0:
        return None
    kept = state if len(state) <= LONGEST_STATE else b""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1), kept)


def begin(parent: TraceContext | None, *, ratio: float, rng: Rng) -> TraceContext:
    """The context of our own span: a child of the parent's, or the root of a new trace.

    Args:
        parent: As received; its decision to sample is kept.
        ratio: Share of new traces to sample, 0 to 1.
        rng: Makes ids; 64 random bits are 0 once in 1.8e19, which is then 1.
    """
    span = rng.getrandbits(64) or 1
    if parent is not None:
        return TraceContext(parent.trace, span, parent.sampled, parent.state)
    # The lowest 56 bits decide, as W3C level 2 asks of random trace ids: all services that sample
    # by ratio then choose the same traces.
    trace = rng.getrandbits(128) or 1
    return TraceContext(trace, span, (trace & ((1 << 56) - 1)) < ratio * (1 << 56))


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A finished span.

    Attributes:
        name: `{operation} {model}` or `{method} {tool}`.
        context: Its own ids.
        parent: The span id it hangs on; 0 for a root.
        start, end: Micros since the epoch.
        attributes: By the names above; None is left out.
        error: `error.type`; "" where it ended well.
        outgoing: True for CLIENT spans (towards a provider), False for SERVER.
    """

    name: str
    context: TraceContext
    start: Micros
    end: Micros
    parent: int = 0
    attributes: Mapping[str, str | int | float | bool | Sequence[str] | None] = field(
        default_factory=dict
    )
    error: str = ""
    outgoing: bool = True


def attributes_of(span: Span) -> dict[str, Any]:
    """The attributes as exported: known names, no None, bounded texts, the error among them.

    Raises:
        ValueError: A name that is none of ours: prompts must not slip in by a typing error.
    """
    known: dict[str, Any] = {}
    for name, value in span.attributes.items():
        if name not in _KNOWN:
            raise ValueError(f"unknown span attribute {name!r}")
        if isinstance(value, str):
            known[name] = value[:LONGEST_VALUE]
        elif isinstance(value, bool | int | float):
            known[name] = value
        elif value is not None:
            known[name] = tuple(str(item)[:LONGEST_VALUE] for item in value[:16])
    if span.error:
        known[ERROR_TYPE] = span.error[:LONGEST_VALUE]
    return known


_KNOWN = frozenset({*MODEL_NAMES, *TOOL_NAMES})


class Spans(Protocol):
    """Where finished spans go."""

    def ended(self, span: Span) -> None:
        """The span is on its way, or dropped; never blocks.

        Raises:
            ValueError: An attribute that is none of ours.
        """
        ...

    def close(self) -> None:
        """What is on its way has left, within some seconds. Blocks: call it in a thread."""
        ...


class NoSpans:
    """Spans are not kept."""

    def ended(self, span: Span) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class OtelSpans:
    """Spans through OpenTelemetry's SDK: our ids and times, its batches, queue and exporter."""

    __slots__ = ("_api", "_processor", "_resource", "_scope", "_sdk")

    def __init__(self, processor: Any, *, version: str) -> None:  # noqa: ANN401 - an optional library
        """Takes a span processor of the SDK; its queue bounds what waits.

        Raises:
            ImportError: The extra `otel` is not installed.
        """
        self._api = importlib.import_module("opentelemetry.trace")
        self._sdk = importlib.import_module("opentelemetry.sdk.trace")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        scopes = importlib.import_module("opentelemetry.sdk.util.instrumentation")
        self._processor = processor
        self._resource = resources.Resource.create(
            {"service.name": "tidegate", "service.version": version}
        )
        self._scope = scopes.InstrumentationScope("tidegate", version, SCHEMA_URL)

    def ended(self, span: Span) -> None:
        """The span is in the exporter's queue if it is sampled."""
        context = span.context
        if not context.sampled:
            return
        api = self._api
        kind = api.SpanKind.CLIENT if span.outgoing else api.SpanKind.SERVER
        status = api.StatusCode.ERROR if span.error else api.StatusCode.UNSET
        self._processor.on_end(
            self._sdk.ReadableSpan(
                name=span.name,
                context=self._context(context, context.span, remote=False),
                parent=self._context(context, span.parent, remote=True) if span.parent else None,
                resource=self._resource,
                attributes=attributes_of(span),
                kind=kind,
                status=api.Status(status),
                start_time=span.start * 1_000,
                end_time=span.end * 1_000,
                instrumentation_scope=self._scope,
            )
        )

    def _context(self, context: TraceContext, span: int, *, remote: bool) -> Any:  # noqa: ANN401
        api = self._api
        return api.SpanContext(
            context.trace,
            span,
            remote,
            api.TraceFlags(api.TraceFlags.SAMPLED),
            api.TraceState.from_header([context.state.decode("latin-1")]),
        )

    def close(self) -> None:
        """What is in the queue has left, within some seconds."""
        self._processor.shutdown()


def open_spans(endpoint: str, *, version: str, headers: Mapping[str, str] | None = None) -> Spans:
    """Spans towards an OTLP endpoint over HTTP; `NoSpans` without one.

    Args:
        endpoint: For example "http://127.0.0.1:4318/v1/traces"; "" for none.
        version: Of this process.
        headers: For the exporter; may hold a secret.

    Raises:
        ImportError: An endpoint is set and the extra `otel` is not installed; says how to get it.
    """
    if not endpoint:
        return NoSpans()
    try:
        exporters = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        processors = importlib.import_module("opentelemetry.sdk.trace.export")
        exporter = exporters.OTLPSpanExporter(endpoint=endpoint, headers=dict(headers or {}))
        return OtelSpans(processors.BatchSpanProcessor(exporter), version=version)
    except ImportError as error:
        raise ImportError(
            f"traces are to go to {endpoint}, but {error.name or 'OpenTelemetry'} is not "
            "installed: install tidegate[otel]"
        ) from error
