"""A message and its answer: to its server in the server's own era, back in the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.call import Dialect, Family, Kind, Reply
from gateway.errors import UpstreamFault, UpstreamMalformed, UpstreamUnreachable
from gateway.tools.passage import Passage, Stream, stream_reply, whole_reply
from gateway.tools.remote import Ask, Remote, routing
from gateway.units import MICRO
from gateway.wire import headers as wire_headers
from gateway.wire import mcp, ratelimit_headers, refusals, splice

if TYPE_CHECKING:
    from gateway.call import Call, HeaderList, ToolCall
    from gateway.clock import Clock
    from gateway.errors import GatewayError
    from gateway.snapshot import Server
    from gateway.upstream import Incoming, Transport

KINDS = {401: Kind.AUTH, 408: Kind.FAULT, 429: Kind.QUOTA, 503: Kind.CAPACITY, 529: Kind.CAPACITY}
TRACE = frozenset({b"traceparent", b"tracestate"})


def kind_of(status: int) -> Kind | None:
    """What an answer's status means for breakers and retries."""
    if status < 400:
        return None
    return KINDS.get(status, Kind.FAULT if status >= 500 else Kind.CALLER)


class Exchanges:
    """Asks servers on behalf of calls."""

    __slots__ = ("_clock", "_remote")

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._clock = clock
        self._remote = Remote(transport, clock)

    def listed(self, server: Server) -> tuple[str, ...]:  # noqa: ARG002 - nothing is remembered yet
        """Names of tools that the server is known to have."""
        return ()

    async def ask(self, call: Call, tool: ToolCall) -> Reply:
        """The reply to a governed call.

        Raises:
            UpstreamFault: The server gave no answer that can be passed on.
        """
        if not tool.stateless:
            raise mcp.unsupported(mcp.header_text(call.headers, mcp.H_VERSION))
        server = tool.server
        ask = Ask(body=body_of(tool), headers=self._headers(call, tool))
        passage = Passage(server, own=tool.message.id, their=tool.message.id, tool=tool)
        try:
            incoming = await self._remote.send(server, ask)
        finally:
            call.sent = ask.sent
        call.upstream_status = incoming.status
        return await self._answer(call, server, incoming, passage)

    def _headers(self, call: Call, tool: ToolCall) -> HeaderList:
        version = mcp.header_text(call.headers, mcp.H_VERSION)
        headers = routing(tool.method, version, tool.tool)
        headers += [
            pair for pair in call.headers if pair[0] in TRACE or pair[0].startswith(mcp.H_PARAM)
        ]
        return headers

    async def _answer(
        self, call: Call, server: Server, incoming: Incoming, passage: Passage
    ) -> Reply:
        """The reply for an answer whose head is here."""
        try:
            if incoming.status == 200 and wire_headers.is_event_stream(incoming.headers):
                total = server.provider.timeouts.total
                source = Stream(server, incoming, passage, clock=self._clock, total=total)
                reply = stream_reply(source)
                reply.taps.append(lambda _chunk: _mark(reply, passage))
                return reply
            body = await self._remote.body(server, incoming, limit=server.provider.timeouts.idle)
        except BaseException:
            incoming.abort("given_up")
            await incoming.close(reuse=False)
            raise
        return self._whole(call, server, incoming, body, passage)

    def _whole(
        self, call: Call, server: Server, incoming: Incoming, body: bytes, passage: Passage
    ) -> Reply:
        status, kind = incoming.status, kind_of(incoming.status)
        try:
            # What a server thinks of our credential is not for its caller, whose own was fine.
            said = passage.message(body) if kind is not Kind.AUTH else None
        except UpstreamMalformed:
            if kind is None:
                raise
            said = None
        if said is None and kind is None:
            raise UpstreamMalformed(f"The tool server {server.name} answered another request.")
        if said is None:
            reply = refused(call, refusal_of(server, status), own=call.tool)
        else:
            reply = whole_reply(status, said)
        reply.kind = kind
        if kind is not None:
            reply.retry_after = ratelimit_headers.wait_told(
                incoming.headers, None, now=round(self._clock.wall() * MICRO), limits=None
            )
        return reply


def _mark(reply: Reply, passage: Passage) -> None:
    if passage.answered:
        reply.terminal = True


def body_of(tool: ToolCall) -> bytes:
    """The message as its server shall read it: with the server's own name of the tool."""
    raw = tool.message.raw
    if tool.tool == tool.public:
        return raw
    params = splice.locate(raw, "params")
    assert params is not None  # noqa: S101 - it names a tool
    key = mcp.NAMED[tool.method]
    inner = splice.splice(raw[params.start : params.end], key, orjson.dumps(tool.tool))
    return raw[: params.start] + inner + raw[params.end :]


def refusal_of(server: Server, status: int) -> GatewayError:
    """An answer that is no JSON-RPC, as an error of ours."""
    text = f"The tool server {server.name} answered with HTTP status {status}."
    if status == 401:
        text = f"The tool server {server.name} refuses the gateway's own credential."
        return UpstreamUnreachable(text, code="upstream_unauthorized")
    return UpstreamFault(text, code=f"upstream_{status}")


def refused(call: Call, error: GatewayError, *, own: ToolCall | None) -> Reply:
    """A refusal as a reply, for layers that judge replies."""
    ident = own.message.id if own is not None else b""
    said = refusals.refusal(
        error,
        dialect=Dialect.MCP,
        family=Family.MCP,
        request_id=call.id,
        rpc_id=orjson.Fragment(ident) if ident else None,
    )
    return whole_reply(said.status, orjson.dumps(said.body))
