"""What the tool plane answers outside the governed calls: discovery, sessions, lists, streams.

A client asks for lists by itself after each call, and falls back to the older era where discovery
fails: neither waits, neither is limited. Lists show what this identity may use, so they are private
to it, whatever their server says. Clients of the session era get sessions of ours; the handshake
with the server, both halves of it, is the gateway's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from gateway.call import Bytes, Call, Reply, ToolCall
from gateway.errors import MethodNotAllowed, NoSuchRoute, UpstreamFault
from gateway.tools import access, federation
from gateway.tools.exchange import refusal_of, remember
from gateway.tools.lines import begun, session_headers
from gateway.tools.passage import whole_reply
from gateway.wire import mcp, mcp_bridge
from gateway.wire.mcp import Era

if TYPE_CHECKING:
    from gateway.call import HeaderList, Principal
    from gateway.snapshot import Server
    from gateway.tools.exchange import Exchanges
    from gateway.tools.federation import Federation
    from gateway.tools.lists import Lists
    from gateway.tools.sessions import Session, Sessions
    from gateway.tools.streams import Streams
    from gateway.units import Rng
    from gateway.wire.mcp import Message

MOUNT = "/mcp/"
SPOKEN = (*mcp.STATELESS_VERSIONS, *mcp.SESSION_VERSIONS)

Handler: TypeAlias = "Callable[[Call, Message], Awaitable[Reply]]"


class Plane:
    """The service of everything that is not governed.

    Attributes:
        sessions: Of clients of the older era.
        on_tools: Called with a server and the tools of every page of its list that passes.
    """

    def __init__(
        self,
        exchanges: Exchanges,
        sessions: Sessions,
        members: Federation,
        streams: Streams,
        lists: Lists,
        rng: Rng,
    ) -> None:
        self._exchanges = exchanges
        self._lines = exchanges.lines
        self.sessions = sessions
        self._members = members
        self._streams = streams
        self._lists = lists
        self._rng = rng
        self.on_tools: Callable[[Server, object], None] | None = None

    def _heard(self, server: Server, result: Mapping[str, Any]) -> None:
        """Whoever wants to know has heard a page of a server's list."""
        if self.on_tools is not None:
            self.on_tools(server, result.get("tools"))

    async def __call__(self, call: Call) -> Reply:
        """The answer."""
        if call.rpc is None:
            return await self._standing(call)
        message: Message = call.rpc.first
        if message.era is Era.STATELESS:
            return await self._stateless(call, message)
        if message.method == "initialize":
            return await self._initialize(call, message)
        return await self._in_session(call, message, self.sessions.of(call))

    # --- GET and DELETE --------------------------------------------------------------------------

    async def _standing(self, call: Call) -> Reply:
        """The stream or the end of a session; without a session there is neither."""
        if not mcp.header_text(call.headers, mcp.H_SESSION):
            raise MethodNotAllowed(f"{call.path} is served for POST only", allow="POST")
        session = self.sessions.of(call)
        server = self._server(call)
        if call.method == "DELETE":
            await self._close(server, session)
            return _empty(200)
        return await self._streams.standing(call, server, session)

    async def _close(self, server: Server | None, session: Session) -> None:
        await self.sessions.delete(session)
        if server is not None and session.exclusive and session.theirs:
            await self._lines.end(server, session_headers(session.theirs, session.version))

    async def sweep(self) -> int:
        """Sessions that nobody uses are closed, at their servers too; how many."""
        idle = self.sessions.idle()
        for session in idle:
            peer = self._lines.named(session.server)
            if peer is not None and session.exclusive and session.theirs:
                headers = session_headers(session.theirs, session.version)
                await self._lines.end(peer.server, headers)
        return len(idle)

    # --- stateless -------------------------------------------------------------------------------

    async def _stateless(self, call: Call, message: Message) -> Reply:
        server = self._server(call)
        if not message.is_request:
            return _empty(202)
        if message.method == "server/discover":
            return _result(message, await self._discovered(server, _principal(call)))
        if message.method == "subscriptions/listen":
            return await self._streams.listen(call, message, server)
        return await self._relayed(call, message, server, None)

    async def _discovered(self, server: Server | None, principal: Principal) -> Mapping[str, Any]:
        """What we say of a server, or of all. Never fails: a client would fall back for good."""
        if server is None:
            return federation.discovered()
        peer = self._lines.of(server)
        try:
            if await self._lines.era(peer) is Era.STATELESS:
                found = await self._lines.discover(peer)
                return {**found, "supportedVersions": list(SPOKEN), "cacheScope": "private"}
            upstream = await self._lines.upstream(peer, principal.id)
        except UpstreamFault:
            return federation.discovered()
        return mcp_bridge.discover_result(upstream.result)

    # --- sessions --------------------------------------------------------------------------------

    async def _initialize(self, call: Call, message: Message) -> Reply:
        """A session of ours begins, with one at the server where it speaks in sessions."""
        if not message.id:
            raise mcp.fault(mcp.INVALID_REQUEST, "initialize is a request and needs an id")
        server, principal = self._server(call), _principal(call)
        asked = message.params.get("protocolVersion")
        version = mcp_bridge.negotiated(asked)
        if server is None:
            return self._begun(message, principal, None, version, federation.discovered())
        if server.era != "stateless" and not server.command:
            # A server of both eras can ask its client back in this one: it is tried first.
            reply = await self._forwarded(message, principal, server, version)
            if reply is not None:
                return reply
        peer = self._lines.of(server)
        if await self._lines.era(peer) is Era.STATELESS:
            found = await self._lines.discover(peer)
        else:
            found = (await self._lines.upstream(peer, principal.id)).result
        return self._begun(message, principal, server, version, found)

    def _begun(
        self,
        message: Message,
        principal: Principal,
        server: Server | None,
        version: str,
        found: Mapping[str, Any],
    ) -> Reply:
        """A session that borrows pooled ones, or none."""
        name = server.name if server is not None else ""
        session = self.sessions.begin(principal, name, version, salt=self._salt())
        result = mcp_bridge.initialize_result(version, found)
        return _result(message, result, [(mcp.H_SESSION, session.id.encode())])

    async def _forwarded(
        self, message: Message, principal: Principal, server: Server, version: str
    ) -> Reply | None:
        """The client's own handshake with a server of sessions; None where it is none."""
        peer = self._lines.of(server)
        params = {**message.params, "protocolVersion": version}
        answer = await self._lines.initialize(server, params)
        upstream = begun(server, answer)
        if upstream is None:
            if answer.status < 500 and await self._lines.era(peer) is Era.STATELESS:
                return None
            error = answer.parsed.get("error")
            if not isinstance(error, Mapping) or answer.status >= 500:
                raise refusal_of(server, answer.status)
            return _message(message, {"error": error})
        session = self.sessions.begin(
            principal,
            server.name,
            upstream.version,
            theirs=upstream.id,
            initialize=params,
            salt=self._salt(),
        )
        return _result(message, upstream.result, [(mcp.H_SESSION, session.id.encode())])

    def _salt(self) -> bytes:
        return self._rng.getrandbits(96).to_bytes(12, "big")

    async def _in_session(self, call: Call, message: Message, session: Session) -> Reply:
        server = self._server(call)
        if not message.is_request:
            await self._told(message, server, session)
            return _empty(202)
        if message.method == "ping":
            return _result(message, {})
        return await self._relayed(call, message, server, session)

    async def _told(self, message: Message, server: Server | None, session: Session) -> None:
        """A notification of the client, or its response to a request of the server."""
        if message.method == "notifications/initialized":
            return  # the gateway has said so itself
        if server is not None and session.exclusive:
            headers = session_headers(session.theirs, session.version)
            await self._lines.tell(server, message.raw, headers)
        if message.method == "notifications/cancelled":
            ident = mcp.id_of({"id": message.params.get("requestId")}, message.raw)
            cancel = session.in_flight.get(ident)
            if cancel is not None:
                cancel()

    # --- everything else -------------------------------------------------------------------------

    async def _relayed(
        self, call: Call, message: Message, server: Server | None, session: Session | None
    ) -> Reply:
        principal = _principal(call)
        if server is None:
            return await self._federated(call, message, principal)
        tool = ToolCall(
            server=server,
            message=message,
            tool="",
            public="",
            stateless=message.era is Era.STATELESS,
            conversation=session,
        )
        # In a session of its own a server may list otherwise than in another.
        if message.method in mcp_bridge.LISTS and not (session is not None and session.exclusive):
            known = self._listed(message, principal, server)
            if known is not None:
                return known
            tool.gates.append(lambda result: self._keep(tool, principal, result))
        if message.method == "tools/list":
            peer = self._lines.of(server)
            tool.gates.append(lambda result: remember(peer, result))
            if self.on_tools is not None:
                tool.gates.append(partial(self._heard, server))
            tool.gates.append(lambda result: filtered(result, principal, server))
        elif message.method in mcp_bridge.LISTS and tool.stateless:
            tool.gates.append(private)
        return await self._exchanges.ask(call, tool)

    def _listed(self, message: Message, principal: Principal, server: Server) -> Reply | None:
        """The page that its server lets us remember, as this identity may see it; None for none."""
        cursor = message.params.get("cursor")
        page = self._lists.find(server, principal.id, message.method, cursor)
        if page is None:
            return None
        seen = filtered(page, principal, server) if message.method == "tools/list" else None
        result = orjson.Fragment(seen if seen is not None else private(page))
        body = orjson.dumps({"jsonrpc": "2.0", "id": orjson.Fragment(message.id), "result": result})
        return whole_reply(200, body)

    def _keep(self, tool: ToolCall, principal: Principal, result: Mapping[str, Any]) -> None:
        cursor = tool.message.params.get("cursor")
        self._lists.keep(
            tool.server, principal.id, tool.method, cursor, result, size=tool.result_bytes
        )

    async def _federated(self, call: Call, message: Message, principal: Principal) -> Reply:
        if message.method in mcp_bridge.LISTS:
            if message.params.get("cursor"):
                raise mcp.fault(mcp.INVALID_PARAMS, "The cursor is none of ours: lists are whole")
            return _result(message, await self._members.listed(call, principal, message.method))
        if message.method == "logging/setLevel":
            return _result(message, {})
        raise mcp.fault(
            mcp.METHOD_NOT_FOUND,
            f"{message.method[:100]!r} is not served for all servers at once; use /mcp/NAME",
            http=404 if message.era is Era.STATELESS else 200,
        )

    def _server(self, call: Call) -> Server | None:
        """The server of this mount; None for the federation."""
        name = call.path[len(MOUNT) :]
        if not name:
            return None
        principal = _principal(call)
        server = call.snapshot.servers.get(name)
        if server is None or not access.may_use(principal, server):
            raise NoSuchRoute(f"No tool server {name[:32]!r} is served to {principal.agent}.")
        return server


def filtered(result: Mapping[str, Any], principal: Principal, server: Server) -> bytes:
    """The list as this identity may see it, for its eyes only."""
    tools = result.get("tools")
    seen = [
        tool
        for tool in (tools if isinstance(tools, list) else [])
        if isinstance(tool, dict)
        and access.may_call(principal, server, str(tool.get("name")))
        and mcp_bridge.mirrors(tool.get("inputSchema")) is not None
    ]
    return orjson.dumps({**result, "tools": seen, "cacheScope": "private"})


def private(result: Mapping[str, Any]) -> bytes:
    """The list for one identity's eyes only: which servers answer depends on who asks."""
    return orjson.dumps({**result, "cacheScope": "private"})


def _principal(call: Call) -> Principal:
    assert call.principal is not None  # noqa: S101 - identify ran
    return call.principal


def _result(message: Message, result: Mapping[str, Any], more: HeaderList | None = None) -> Reply:
    return _message(message, {"result": result}, more)


def _message(message: Message, rest: Mapping[str, Any], more: HeaderList | None = None) -> Reply:
    body = orjson.dumps({"jsonrpc": "2.0", "id": orjson.Fragment(message.id), **rest})
    return whole_reply(200, body, more)


def _empty(status: int) -> Reply:
    return Reply(status=status, headers=[], source=Bytes(b""))
