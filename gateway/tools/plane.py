"""What the tool plane answers outside the governed calls: discovery, lists, notifications, streams.

A client asks for lists by itself after each call, and falls back to the older era where discovery
fails: neither waits, neither is limited. Lists show what this identity may use, so they are private
to it, whatever their server says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.call import Bytes, Call, Reply, ToolCall
from gateway.errors import MalformedCall, MethodNotAllowed, NoSuchRoute
from gateway.tools import access

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.call import Principal
    from gateway.snapshot import Server
    from gateway.tools.exchange import Exchanges
    from gateway.wire.mcp import Message

MOUNT = "/mcp/"


class Plane:
    """The service of everything that is not governed."""

    __slots__ = ("_exchanges",)

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    async def __call__(self, call: Call) -> Reply:
        """The answer."""
        if call.rpc is None:
            raise MethodNotAllowed(f"{call.path} is served for POST only", allow="POST")
        if call.rpc.batch:
            raise MalformedCall("Batches are not served yet.")
        message: Message = call.rpc.first
        server = self._server(call)
        if not message.is_request:
            return Reply(status=202, headers=[], source=Bytes(b""))
        tool = ToolCall(server=server, message=message, tool="", public="")
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        if message.method == "tools/list":
            tool.gates.append(lambda result: filtered(result, principal, server))
        return await self._exchanges.ask(call, tool)

    def _server(self, call: Call) -> Server:
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        server = call.snapshot.servers.get(call.path[len(MOUNT) :])
        if server is None or not access.may_use(principal, server):
            raise NoSuchRoute(
                f"No tool server is served to {principal.agent} at {call.path[:64]!r}."
            )
        return server


def filtered(result: Mapping[str, Any], principal: Principal, server: Server) -> bytes:
    """The list as this identity may see it, for its eyes only."""
    tools = result.get("tools")
    seen = [
        tool
        for tool in (tools if isinstance(tools, list) else [])
        if isinstance(tool, dict) and access.may_call(principal, server, str(tool.get("name")))
    ]
    return orjson.dumps({**result, "tools": seen, "cacheScope": "private"})
