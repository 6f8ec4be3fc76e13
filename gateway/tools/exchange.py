"""A message and its answer: to its server in the server's own era, back in the caller's.

Four pairs of eras, one way through: what goes out is the caller's bytes with named edits, what
comes back passes a `Passage`. A session at a server that was lost is begun anew, once, and only
where its server said that it did not run anything (HTTP 404).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import orjson

from gateway.call import Dialect, End, Family, Kind, Reply
from gateway.errors import (
    CallerFault,
    GatewayError,
    UpstreamFault,
    UpstreamMalformed,
    UpstreamUnreachable,
)
from gateway.telemetry.traces import parse_traceparent
from gateway.tools.lines import (
    Lines,
    Once,
    Upstream,
    begun,
    request,
    session_headers,
    stateless_meta,
)
from gateway.tools.passage import Passage, Stream, passes, stream_reply, whole_reply
from gateway.tools.remote import Ask, read_body, routing
from gateway.tools.sessions import no_such_session
from gateway.units import MICRO
from gateway.upstream import TransportFault
from gateway.wire import headers as wire_headers
from gateway.wire import mcp, mcp_bridge, ratelimit_headers, refusals
from gateway.wire.mcp import Era

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from gateway.call import Call, HeaderList, ToolCall
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.tools.lines import Peer
    from gateway.tools.passage import Adapt, Other
    from gateway.tools.remote import Sender
    from gateway.tools.sessions import Session
    from gateway.upstream import Incoming
    from gateway.wire.mcp import Message

    Spawn = Callable[[Coroutine[Any, Any, None]], object]

KINDS = {401: Kind.AUTH, 408: Kind.FAULT, 429: Kind.QUOTA, 503: Kind.CAPACITY, 529: Kind.CAPACITY}
TRACE = frozenset({b"traceparent", b"tracestate"})
EVENT = b"gw1."
"""In front of a server's own event id: only ids of this form are ever sent back to it."""


def kind_of(status: int) -> Kind | None:
    """What an answer's status means for breakers and retries."""
    if status < 400:
        return None
    return KINDS.get(status, Kind.FAULT if status >= 500 else Kind.CALLER)


@dataclass(slots=True, kw_only=True)
class Way:
    """How one message goes to its server and its answer comes back.

    Attributes:
        ask: What is sent.
        their: The id under which it is asked.
        adapt, other, rename: As `Passage`.
        lost: Awaited when the server has forgotten the session; None where there is none to lose.
        pooled: The session it shares with others of its principal.
    """

    ask: Ask
    their: bytes
    adapt: Adapt | None = None
    other: Other = passes
    rename: Callable[[bytes], bytes] | None = None
    lost: Callable[[], Coroutine[Any, Any, None]] | None = None
    pooled: Upstream | None = None


@dataclass(slots=True)
class Interrupt:
    """Ends the wait for a head when the caller takes its request back."""

    task: asyncio.Task[Any] | None = None
    incoming: Incoming | None = None
    fired: bool = field(default=False)

    def fire(self) -> None:
        """The request is not wanted any more."""
        self.fired = True
        if self.incoming is not None:
            self.incoming.abort("cancelled")
        elif self.task is not None:
            self.task.cancel()


class Exchanges:
    """Asks servers on behalf of calls.

    Attributes:
        lines: How each server is spoken to.
        spawn: How a task gets an owner; set before the first call.
        on_notice: Called with server and method of every notification that passes in an answer.
    """

    def __init__(self, sender: Sender, clock: Clock) -> None:
        self._clock = clock
        self._sender = sender
        self.lines = Lines(sender, clock)
        self.spawn: Spawn | None = None
        self.on_notice: Callable[[str, object], None] | None = None

    def listed(self, server: Server) -> Iterable[str]:
        """Names of tools that the server is known to have."""
        return self.lines.of(server).tools

    async def ask(self, call: Call, tool: ToolCall) -> Reply:
        """The reply to a request.

        Raises:
            UpstreamFault: The server gave no answer that can be passed on.
            CallerFault: The caller took it back.
            NoSuchRoute: Its session was ended meanwhile, here or elsewhere in a fleet.
        """
        session = cast("Session | None", tool.conversation)
        if session is None:
            return await self._asked(call, tool, None, None)
        ident = tool.message.id
        if ident in session.in_flight:
            raise mcp.fault(mcp.INVALID_REQUEST, "A request of this id is under way already")
        interrupt = Interrupt(asyncio.current_task())
        session.in_flight[ident] = interrupt.fire
        try:
            reply = await self._asked(call, tool, session, interrupt)
        except BaseException as error:
            session.in_flight.pop(ident, None)
            if not (interrupt.fired and isinstance(error, asyncio.CancelledError)):
                raise
            if interrupt.task is not None and interrupt.task.uncancel():
                raise
            if session.ended:
                raise no_such_session() from None
            raise CallerFault("The caller took this request back.", code="cancelled") from None
        reply.on_close(lambda _end: session.in_flight.pop(ident, None) and None)
        return reply

    async def aside(self, call: Call, own: ToolCall) -> Mapping[str, Any] | None:
        """The result of a question of ours beside a call; None where it cannot be had."""
        own.ours = True
        end = End.CUT
        try:
            reply = await self.ask(call, own)
            try:
                async for chunk in reply.source.chunks():
                    for tap in reply.taps:
                        tap(chunk)
                end = End.COMPLETE
            finally:
                await reply.close(end)
        except (GatewayError, TransportFault):
            return None
        finally:
            call.sent = False  # the call itself has not been
            call.upstream_status = 0
        return own.result

    async def _asked(
        self, call: Call, tool: ToolCall, session: Session | None, interrupt: Interrupt | None
    ) -> Reply:
        """The reply, once its server has answered."""
        way, incoming = await self._sent(call, tool, self.lines.of(tool.server), session)
        if interrupt is not None:
            interrupt.incoming = incoming
        passage = Passage(
            tool.server,
            own=tool.message.id,
            their=way.their,
            tool=tool,
            adapt=way.adapt,
            other=way.other,
            rename_event=way.rename,
        )
        passage.on_notice = self.on_notice
        call.upstream_status = incoming.status
        reply = await self._answer(call, tool, incoming, passage)
        if way.pooled is not None and self.spawn is not None:
            upstream = way.pooled
            reply.on_close(lambda _end: self._abandoned(tool.server, upstream, way, passage))
        return reply

    # --- out -------------------------------------------------------------------------------------

    async def _sent(
        self, call: Call, tool: ToolCall, peer: Peer, session: Session | None
    ) -> tuple[Way, Incoming]:
        """The message has left; its answer's head is here. A lost session is begun anew, once."""
        exclusive = session is not None and session.exclusive
        era = Era.SESSION if exclusive else await self.lines.era(peer)
        way = await self._way(call, tool, peer, era, session)
        call.sent = True  # from here on its server may be at work: it is no call that only waits
        try:
            incoming = await self._sender.send(tool.server, way.ask)
            if incoming.status == 404 and way.lost is not None:
                incoming.abort("lost")
                await incoming.close(reuse=False)
                await way.lost()
                way = await self._way(call, tool, peer, era, session)
                incoming = await self._sender.send(tool.server, way.ask)
        except asyncio.CancelledError:
            if way.pooled is not None and way.ask.sent:
                self._tell_cancelled(tool.server, way.pooled, way)
            raise
        except UpstreamFault:
            call.sent = way.ask.sent
            raise
        return way, incoming

    async def _way(
        self, call: Call, tool: ToolCall, peer: Peer, era: Era, session: Session | None
    ) -> Way:
        body, trace = traced(body_of(tool), tool, call.headers)
        if era is Era.STATELESS:
            return await self._stateless(call, tool, peer, body, trace)
        if session is not None and session.exclusive:
            return Way(
                ask=Ask(
                    body=body, headers=session_headers(session.theirs, session.version) + trace
                ),
                their=tool.message.id,
                rename=named_event,
                lost=(lambda: self._begin_anew(tool.server, session)) if session.theirs else None,
            )
        assert call.principal is not None  # noqa: S101 - identify ran
        principal = call.principal.id
        upstream = await self.lines.upstream(peer, principal)
        their = upstream.next_id()

        async def lost() -> None:
            self.lines.lost(peer, principal, upstream)

        method = tool.method
        if tool.stateless:
            body = mcp_bridge.without_envelope(body)
        return Way(
            ask=Ask(body=mcp_bridge.under_id(body, their), headers=upstream.headers() + trace),
            their=their,
            adapt=(lambda found: mcp_bridge.for_stateless(method, found))
            if tool.stateless
            else None,
            other=only_notifications,
            lost=lost if upstream.id else None,
            pooled=upstream,
        )

    async def _stateless(
        self, call: Call, tool: ToolCall, peer: Peer, body: bytes, trace: HeaderList
    ) -> Way:
        if tool.stateless:
            version = tool.message.version  # equal to the header, or it would not be here
            mirrored = (
                await self._mirrored(tool, peer)
                if tool.ours
                else [pair for pair in call.headers if pair[0].startswith(mcp.H_PARAM)]
            )
        else:
            version = mcp.STATELESS_VERSIONS[0]
            meta = {key: orjson.dumps(value) for key, value in stateless_meta().items()}
            body = mcp_bridge.with_meta(body, meta)
            mirrored = await self._mirrored(tool, peer)
        headers = routing(tool.method, version, tool.tool) + mirrored + trace
        return Way(
            ask=Ask(body=body, headers=headers),
            their=tool.message.id,
            adapt=None if tool.stateless else for_session,
        )

    async def _mirrored(self, tool: ToolCall, peer: Peer) -> HeaderList:
        """The headers that repeat arguments, as the tool's schema asks; its list is read once."""
        if tool.method != "tools/call":
            return []
        if tool.tool not in peer.tools:
            await self.learn(peer)
        return mcp_bridge.mirror_headers(peer.tools.get(tool.tool) or (), tool.arguments)

    async def learn(self, peer: Peer) -> None:
        """The names and mirrored arguments of a stateless server's tools are known."""
        params: dict[str, Any] = {"_meta": stateless_meta()}
        for _ in range(MOST_PAGES):
            body = request("tools/list", params)
            headers = routing("tools/list", mcp.STATELESS_VERSIONS[0], "")
            answer = await self.lines.plain(peer.server, Ask(body=body, headers=headers))
            remember(peer, answer.result or {})
            cursor = (answer.result or {}).get("nextCursor")
            if not isinstance(cursor, str):
                return
            params["cursor"] = cursor

    async def _begin_anew(self, server: Server, session: Session) -> None:
        """The session has another one behind it, as its client once asked for."""
        if session.again is None:
            session.again = Once()
        once: Once[Upstream] = session.again
        await once.get(lambda: self._reinitialize(server, session))
        session.again = None

    async def _reinitialize(self, server: Server, session: Session) -> Upstream:
        params = session.initialize or {
            "protocolVersion": session.version,
            "capabilities": {},
            "clientInfo": stateless_meta()[mcp.META_CLIENT],
        }
        upstream = begun(server, await self.lines.initialize(server, params))
        if upstream is None:
            raise UpstreamMalformed(f"The tool server {server.name} refuses to begin a session.")
        session.theirs = upstream.id
        return upstream

    def _abandoned(self, server: Server, upstream: Upstream, way: Way, passage: Passage) -> None:
        """A stateless caller left before the answer: a server of sessions is told so."""
        if not passage.answered:
            self._tell_cancelled(server, upstream, way)

    def _tell_cancelled(self, server: Server, upstream: Upstream, way: Way) -> None:
        if self.spawn is not None:
            params = {"requestId": orjson.Fragment(way.their), "reason": "the caller left"}
            told = self.lines.notify(server, upstream.headers(), "notifications/cancelled", params)
            self.spawn(told)

    # --- back ------------------------------------------------------------------------------------

    async def _answer(
        self, call: Call, tool: ToolCall, incoming: Incoming, passage: Passage
    ) -> Reply:
        """The reply for an answer whose head is here."""
        server = tool.server
        if incoming.status == 200 and wire_headers.is_event_stream(incoming.headers):
            total = server.provider.timeouts.total
            source = Stream(server, incoming, passage, clock=self._clock, total=total)
            reply = stream_reply(source)
            source.on_answer = lambda: setattr(reply, "terminal", True)
            return reply
        body = await read_body(
            server, incoming, clock=self._clock, limit=server.provider.timeouts.idle
        )
        return self._whole(call, tool, incoming, body, passage)

    def _whole(
        self, call: Call, tool: ToolCall, incoming: Incoming, body: bytes, passage: Passage
    ) -> Reply:
        server, kind = tool.server, kind_of(incoming.status)
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
            reply = refused(call, refusal_of(server, incoming.status), own=tool.message.id)
        else:
            reply = whole_reply(status_for(tool, incoming.status, passage.failed), said)
        reply.kind = kind
        if kind is not None:
            reply.retry_after = ratelimit_headers.wait_told(
                incoming.headers, None, now=round(self._clock.wall() * MICRO)
            )
        return reply


MOST_PAGES = 50
"""Pages of a server's list that are followed; a cursor that never ends must not hang a call."""
MOST_TOOLS = 5_000
"""Tools of one server that are remembered."""


def remember(peer: Peer, result: Mapping[str, Any]) -> None:
    """Names and mirrored arguments of the tools in this list are known."""
    tools = result.get("tools")
    for tool in tools if isinstance(tools, list) else []:
        name = tool.get("name") if isinstance(tool, dict) else None
        if isinstance(name, str) and len(peer.tools) < MOST_TOOLS:
            peer.tools[name] = mcp_bridge.mirrors(tool.get("inputSchema"))


def traced(body: bytes, tool: ToolCall, headers: HeaderList) -> tuple[bytes, HeaderList]:
    """Message and headers with one and the same trace context, wherever the caller wrote it."""
    trace = [pair for pair in headers if pair[0] in TRACE]
    message = cast("Message", tool.message)
    inner = message.meta.get("traceparent")
    outer = next((value for name, value in trace if name == b"traceparent"), None)
    if outer is None:
        if isinstance(inner, str) and parse_traceparent(inner.encode("ascii", "replace")):
            trace.append((b"traceparent", inner.encode()))
    elif inner != outer.decode("latin-1") and parse_traceparent(outer) is not None:
        body = mcp_bridge.with_meta(body, {"traceparent": b'"%b"' % outer.strip()})
    return body, trace


def body_of(tool: ToolCall) -> bytes:
    """The message as its server shall read it: with the server's own name of the tool."""
    if tool.tool == tool.public:
        return tool.message.raw
    return mcp_bridge.renamed(tool.message.raw, tool.method, orjson.dumps(tool.tool))


def status_for(tool: ToolCall, status: int, code: int) -> int:
    """The HTTP status of a response towards its caller: errors have one in the stateless era."""
    if not code:
        return status
    if not tool.stateless:
        return 200  # a 404 would tell an older client that its session is gone
    return mcp_bridge.STATUS.get(code, 200) if status == 200 else status


def only_notifications(parsed: Mapping[str, Any], raw: bytes) -> bytes | None:
    """A server's own requests stop here: we declared that nobody answers any."""
    return None if "id" in parsed else raw


def for_session(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """A stateless server's result for an older client, which cannot be asked for more input."""
    if result.get("resultType") == "input_required":
        return {
            "content": [{"type": "text", "text": "This tool needs input that your client's "
                         "revision of MCP cannot give through Tidegate."}],
            "isError": True,
        }  # fmt: skip
    return None


def named_event(ident: bytes) -> bytes:
    """The caller's name of a server's event id."""
    return EVENT + ident


def refusal_of(server: Server, status: int) -> GatewayError:
    """An answer that is no JSON-RPC, as an error of ours."""
    text = f"The tool server {server.name} answered with HTTP status {status}."
    if status == 401:
        text = f"The tool server {server.name} refuses the gateway's own credential."
        return UpstreamUnreachable(text, code="upstream_unauthorized")
    return UpstreamFault(text, code=f"upstream_{status}")


def refused(call: Call, error: GatewayError, *, own: bytes) -> Reply:
    """A refusal as a reply, for layers that judge replies."""
    said = refusals.refusal(
        error,
        dialect=Dialect.MCP,
        family=Family.MCP,
        request_id=call.id,
        rpc_id=orjson.Fragment(own) if own else None,
    )
    return whole_reply(said.status, orjson.dumps(said.body))
