"""Which server and which tool an MCP call means, and whether this identity may use them.

Sets what the inner layers need: `Call.tool`, the deployment (its id is the breaker's scope, its
pools are the server's) and what the call is expected to cost. Who may not use a server is told the
same as for a server that does not exist.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from gateway.call import Call, Estimate, Reply, Service, ToolCall, VerdictNote
from gateway.errors import Forbidden, NoSuchRoute
from gateway.snapshot import Deployment
from gateway.tools import access
from gateway.wire import mcp

if TYPE_CHECKING:
    from gateway.call import Principal
    from gateway.snapshot import Server
    from gateway.tools.federation import Federation
    from gateway.tools.sessions import Sessions
    from gateway.wire.mcp import Message

ONE_REQUEST = Estimate(input=0, output=0)
"""What a tool call is expected to cost before its result is known: a request."""
MOUNT = "/mcp/"
MOST_TOOLS = 10_000
"""Tools whose deployment is remembered: a caller may name what no server has."""


class Target:
    """The layer.

    Args:
        members: Finds servers by public names.
        sessions: Finds the sessions of clients of the older era.
    """

    __slots__ = ("_deployments", "_members", "_sessions")

    def __init__(self, members: Federation, sessions: Sessions) -> None:
        self._members = members
        self._sessions = sessions
        self._deployments: OrderedDict[str, tuple[Server, Deployment]] = OrderedDict()

    def __call__(self, inner: Service) -> Service:
        """The service for calls that know their tool."""

        async def serve(call: Call) -> Reply:
            tool = call.tool = await self._aim(call)
            call.deployment = self._deployment(tool)
            if tool.server.wait is not None:
                tool.waits = {pool.name: tool.server.wait for pool in tool.server.pools}
            call.estimate = ONE_REQUEST
            return await inner(call)

        return serve

    def _deployment(self, tool: ToolCall) -> Deployment:
        """The one way to serve that tool; the same value for all its calls under one policy."""
        scope, server = scope_of(tool), tool.server
        known = self._deployments.get(scope)
        if known is not None and known[0] is server:
            return known[1]
        made = Deployment(
            id=scope,
            provider=server.provider,
            pools=server.pools,
            accounting=server.provider.accounting,
            because=server.because,
        )
        self._deployments[scope] = server, made
        if len(self._deployments) > MOST_TOOLS:
            self._deployments.popitem(last=False)
        return made

    async def _aim(self, call: Call) -> ToolCall:
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        message: Message = call.rpc.first
        mcp.check_subject(message)
        subject = message.subject
        stateless = message.era is mcp.Era.STATELESS
        conversation = None if stateless else self._sessions.of(call)
        mount = call.path[len(MOUNT) :]
        if mount:
            server, name = mounted(call, principal, mount), subject
        else:
            server, name = await self._members.route(call, principal, message)
        rule = server.rule(name)
        if message.method == "tools/call" and not access.may_call(principal, server, name):
            because = rule.because if rule is not None and rule.deny else ""
            because = because or f"{principal.rule.because}.tools"
            call.notes.append(VerdictNote("target", "denied", because, call.received, subject))
            raise Forbidden(
                f"The tool {subject[:100]!r} is not allowed for {principal.agent} "
                f"(rule {because}).",
                because=because,
                param="params.name",
            )
        return ToolCall(
            server=server,
            message=message,
            tool=name,
            public=subject,
            rule=rule,
            stateless=stateless,
            conversation=conversation,
        )


def mounted(call: Call, principal: Principal, name: str) -> Server:
    """The server of a single mount, if this identity may use it.

    Raises:
        NoSuchRoute: There is none for this identity.
    """
    server = call.snapshot.servers.get(name)
    if server is None or not access.may_use(principal, server):
        raise NoSuchRoute(f"No tool server {name[:32]!r} is served to {principal.agent}.")
    return server


def scope_of(tool: ToolCall) -> str:
    """What a breaker watches: the tool of its server, else the server."""
    if tool.method == "tools/call":
        return f"{tool.server.name}/{tool.tool}"
    return tool.server.name
