"""One OpenTelemetry span per call, where the operator asked for them; else this layer is not there.

Outside observe, so that it sees every end. The context a client sends is continued, or a trace
begins here; what goes upstream names our span as its parent. Attributes follow the GenAI
conventions; prompt text is never among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.call import Call, Dialect, End, Reply, Service
from gateway.errors import GatewayError
from gateway.telemetry import traces
from gateway.telemetry.traces import Operation, Span, begin, parse_traceparent
from gateway.units import MICRO

if TYPE_CHECKING:
    from gateway.clock import Clock
    from gateway.telemetry.traces import Spans, TraceContext
    from gateway.units import Rng

OPERATIONS = {
    Dialect.CHAT: Operation.CHAT,
    Dialect.RESPONSES: Operation.CHAT,
    Dialect.MESSAGES: Operation.CHAT,
    Dialect.COMPLETIONS: Operation.TEXT_COMPLETION,
    Dialect.EMBEDDINGS: Operation.EMBEDDINGS,
}
CONTEXT = frozenset({b"traceparent", b"tracestate"})


class Tracing:
    """The layer."""

    __slots__ = ("_clock", "_ratio", "_rng", "_spans")

    def __init__(self, spans: Spans, *, ratio: float, clock: Clock, rng: Rng) -> None:
        self._spans = spans
        self._ratio = ratio
        self._clock = clock
        self._rng = rng

    def __call__(self, inner: Service) -> Service:
        """The service, traced."""

        async def serve(call: Call) -> Reply:
            operation = OPERATIONS.get(call.dialect)
            if call.dialect is Dialect.MCP and call.rpc is not None:
                operation = Operation.EXECUTE_TOOL
            if operation is None:
                return await inner(call)
            received = call.header(b"traceparent") or told(call)
            state = call.header(b"tracestate") or b""
            parent = parse_traceparent(received, state) if received is not None else None
            context = begin(parent, ratio=self._ratio, rng=self._rng)
            pass_on(call, context)
            above = parent.span if parent is not None else 0
            try:
                reply = await inner(call)
            except GatewayError as error:
                self._end(call, operation, context, above, error.code)
                raise
            except BaseException as error:
                self._end(call, operation, context, above, type(error).__name__)
                raise
            reply.on_close(
                lambda end: self._end(call, operation, context, above, fault_of(reply, end))
            )
            return reply

        return serve

    def _end(
        self, call: Call, operation: Operation, context: TraceContext, parent: int, error: str
    ) -> None:
        if not context.sampled:
            return
        tool = operation is Operation.EXECUTE_TOOL
        model = call.fields.model if call.fields is not None else ""
        self._spans.ended(
            Span(
                name=tool_name(call) if tool else f"{operation.value} {model}",
                context=context,
                parent=parent,
                start=call.received,
                end=self._clock.now(),
                attributes=tool_attributes(call) if tool else attributes(call, operation),
                error=error,
                outgoing=not tool,
            )
        )


def told(call: Call) -> bytes | None:
    """The context inside an MCP message: some clients write it there alone."""
    if call.rpc is None:
        return None
    value = call.rpc.first.meta.get("traceparent")
    return value.encode("ascii", "replace") if isinstance(value, str) else None


def tool_name(call: Call) -> str:
    """As the MCP conventions name a span: the method, and the tool where there is one."""
    method: str = call.rpc.first.method
    return f"{method} {call.tool.tool}".rstrip() if call.tool is not None else method


def tool_attributes(call: Call) -> dict[str, str | int | float | bool | None]:
    """By the names of the conventions; None is left out. No argument and no result."""
    message, tool, principal = call.rpc.first, call.tool, call.principal
    called = tool is not None and tool.method == "tools/call"
    return {
        traces.MCP_METHOD: message.method,
        traces.MCP_SESSION: tool.session or None if tool is not None else None,
        traces.MCP_PROTOCOL: message.version or None,
        traces.MCP_RESOURCE: message.subject if message.method == "resources/read" else None,
        traces.TOOL_NAME: tool.tool if tool is not None and called else None,
        traces.JSONRPC_ID: message.id.decode("utf-8", "replace").strip('"') or None,
        traces.AGENT_ID: principal.agent if principal is not None else None,
        traces.CALL_ID: call.id,
        traces.TIER: call.tier.name if call.tier is not None else None,
        traces.QUEUE_SECONDS: call.queue_us / MICRO,
    }


def pass_on(call: Call, context: TraceContext) -> None:
    """What goes upstream continues our span."""
    call.headers = [pair for pair in call.headers if pair[0] not in CONTEXT]
    call.headers.append((b"traceparent", context.traceparent))
    if context.state:
        call.headers.append((b"tracestate", context.state))


def fault_of(reply: Reply, end: End) -> str:
    """`error.type` of an answered call; "" where it ended well."""
    if reply.kind is not None:
        return reply.code or reply.kind.value
    return "" if end is End.COMPLETE or reply.terminal else end.value


def attributes(call: Call, operation: Operation) -> dict[str, str | int | float | bool | None]:
    """By the names of the conventions; None is left out."""
    fields, usage, principal = call.fields, call.usage, call.principal
    deployment = call.deployment
    first = (call.first_byte - call.received) / MICRO if call.first_byte else None
    return {
        traces.OPERATION: operation.value,
        traces.PROVIDER: deployment.provider.name if deployment is not None else None,
        traces.REQUEST_MODEL: fields.model if fields is not None else None,
        traces.REQUEST_MAX_TOKENS: fields.cap if fields is not None else None,
        traces.REQUEST_STREAM: fields.stream if fields is not None else None,
        traces.RESPONSE_MODEL: deployment.upstream_model if deployment is not None else None,
        traces.TIME_TO_FIRST_CHUNK: first,
        traces.INPUT_TOKENS: usage.input if usage is not None else None,
        traces.OUTPUT_TOKENS: usage.output if usage is not None else None,
        traces.CACHE_READ_TOKENS: usage.cache_read if usage is not None else None,
        traces.CACHE_CREATION_TOKENS: usage.cache_write if usage is not None else None,
        traces.REASONING_TOKENS: usage.reasoning if usage is not None else None,
        traces.CONVERSATION_ID: call.session or None,
        traces.AGENT_ID: principal.agent if principal is not None else None,
        traces.CALL_ID: call.id,
        traces.TIER: call.tier.name if call.tier is not None else None,
        traces.QUEUE_SECONDS: call.queue_us / MICRO,
        traces.TOKENS_RESERVED: call.reserved or None,
    }
