"""What servers say of their tools: names and schemas, remembered from their lists.

Learned from every list that passes, and asked for where a rule needs one that is not known: a
client may call a tool without ever having listed it. A list is asked for once, however many calls
wait for it, and again when it is old; where it cannot be had, the call goes on without a schema,
because its server will say itself what is wrong.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from gateway.call import ToolCall
from gateway.units import MICRO
from gateway.wire.mcp import Message

if TYPE_CHECKING:
    from gateway.call import Call
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.tools.exchange import Exchanges
    from gateway.units import Micros

Fetch: TypeAlias = "Callable[[Call, Server], Awaitable[list[Mapping[str, Any]] | None]]"
"""The server's whole list of tools, asked for on behalf of that call; None where it gave none."""

FRESH: Micros = 300 * MICRO
"""A list is believed for so long."""
AGAIN: Micros = 15 * MICRO
"""After a list that did not come, or did not hold the tool, it is not asked for sooner."""
MOST_SERVERS = 1_000
MOST_TOOLS = 5_000
"""Tools remembered of one server."""
MOST_PAGES = 50


class Definition:
    """What a server says of one tool.

    Attributes:
        said: Its entry in the list.
        at: When it was last heard.
        made: What readers have made of its schemas, by their names, for as long as it stands.
    """

    __slots__ = ("at", "made", "said")

    def __init__(self, said: Mapping[str, Any], at: Micros) -> None:
        self.said = said
        self.at = at
        self.made: dict[str, Any] = {}


class _Known:
    """What is known of one server's tools."""

    __slots__ = ("asked", "pending", "tools")

    def __init__(self) -> None:
        self.tools: dict[str, Definition] = {}
        self.asked: Micros = -FRESH
        self.pending: asyncio.Future[None] | None = None


class Definitions:
    """The memory of all servers' tools."""

    __slots__ = ("_clock", "_fetch", "_servers")

    def __init__(self, fetch: Fetch, clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._servers: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    def _of(self, server: Server) -> _Known:
        # A name may stand for another server after a reload.
        key = (server.name, server.provider.base_url)
        known = self._servers.get(key)
        if known is None:
            known = self._servers[key] = _Known()
            if len(self._servers) > MOST_SERVERS:
                self._servers.popitem(last=False)
        return known

    def learn(self, server: Server, tools: object) -> None:
        """A page of a list passed."""
        known, now = self._of(server), self._clock.now()
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                found = known.tools.get(tool["name"])
                if found is not None and found.said == tool:
                    found.at = now
                    continue
                if found is None and len(known.tools) >= MOST_TOOLS:
                    return
                known.tools[tool["name"]] = Definition(tool, now)

    async def find(
        self, call: Call, server: Server, tool: str, *, fresh: Micros = FRESH
    ) -> Definition | None:
        """What the server says of this tool, not longer ago than that; None if nothing.

        What it said before stands where it is not to be asked again so soon.
        """
        known = self._of(server)
        found = known.tools.get(tool)
        now = self._clock.now()
        if found is not None and now - found.at < fresh:
            return found
        if known.pending is None and now - known.asked < AGAIN:
            return found
        await self._ask(call, server, known)
        return known.tools.get(tool)

    async def _ask(self, call: Call, server: Server, known: _Known) -> None:
        """The list was asked for, by us or by whoever was first."""
        pending = known.pending
        if pending is not None:
            await asyncio.shield(pending)
            return
        known.pending = pending = asyncio.get_running_loop().create_future()
        try:
            tools = await self._fetch(call, server)
            if tools is not None:
                names = [tool.get("name") for tool in tools if isinstance(tool, dict)]
                for gone in known.tools.keys() - {name for name in names if isinstance(name, str)}:
                    del known.tools[gone]
                self.learn(server, tools)
        finally:
            known.asked = self._clock.now()
            known.pending = None
            pending.set_result(None)


def fetching(exchanges: Exchanges) -> Fetch:
    """Asks for lists as the caller itself would, in its era and session."""

    async def fetch(call: Call, server: Server) -> list[Mapping[str, Any]] | None:
        tools: list[Mapping[str, Any]] = []
        cursor: object = None
        for page in range(MOST_PAGES):
            result = await _page(exchanges, call, server, asked(call.rpc.first, page, cursor))
            if result is None:
                return None
            found = result.get("tools")
            tools += found if isinstance(found, list) else []
            cursor = result.get("nextCursor")
            if cursor is None:
                break
        return tools

    return fetch


async def _page(
    exchanges: Exchanges, call: Call, server: Server, message: Message
) -> Mapping[str, Any] | None:  # fmt: skip
    """One page of the list; None where it cannot be had."""
    tool, own = call.tool, ToolCall(server=server, message=message, tool="", public="")
    if tool is not None:
        own.stateless, own.conversation = tool.stateless, tool.conversation
    return await exchanges.aside(call, own)


def asked(message: Message, page: int, cursor: object) -> Message:
    """The request for a page of the list, by the revision of another request."""
    params: dict[str, Any] = {"_meta": dict(message.meta)} if message.meta else {}
    if cursor is not None:
        params["cursor"] = cursor
    ident = f"tidegate-list-{page}"
    parsed = {"jsonrpc": "2.0", "id": ident, "method": "tools/list", "params": params}
    return Message(
        raw=orjson.dumps(parsed),
        parsed=parsed,
        method="tools/list",
        id=b'"%b"' % ident.encode(),
        era=message.era,
        version=message.version,
    )
