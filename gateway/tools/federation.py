"""Many servers behind `/mcp`: one list of what this identity may use, and the way back from a name.

A tool is `<server>__<tool>`; a server's name holds no underscore, so the first `__` splits. Model
APIs bear about 64 letters and clients add a prefix of their own, so a name above `LONGEST` ends in
a hash of the whole, and is found again among the names that its server has listed. A server that
does not answer is missing from the list and named in its `_meta`; the others keep their speed.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from gateway.clock import Expiry
from gateway.errors import GatewayError
from gateway.tools import access
from gateway.tools.access import SEPARATOR
from gateway.tools.exchange import MOST_PAGES, remember
from gateway.tools.lines import LONGEST_LIFE, lifetime, request, stateless_meta
from gateway.tools.remote import Ask, routing
from gateway.units import MICRO
from gateway.wire import mcp
from gateway.wire.mcp import Era
from gateway.wire.mcp_bridge import LISTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateway.call import Call, Principal
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.tools.lines import Lines, Peer
    from gateway.tools.lists import Lists
    from gateway.units import Micros
    from gateway.wire.mcp import Message

LONGEST = 50
"""Characters of a public name."""
HASHED = 8
"""Hexadecimal digits that end a shortened one."""
PATIENCE: Micros = 5 * MICRO
"""How long the federation waits for one server's list."""
AWAY: Micros = 10 * MICRO
"""How long a server that failed is not asked for its list again."""
MOST_ITEMS = 5_000
"""Items of one server's list that are shown."""
MOST_URIS = 50_000
"""Resources of one server whose place is remembered."""
STATUS = "tidegate/servers"
"""Member of a list's `_meta` that says which servers are missing, and why."""
CAPABILITIES: dict[str, Any] = {
    "tools": {"listChanged": True},
    "prompts": {"listChanged": True},
    "resources": {"listChanged": True},
}


def public(server: str, name: str) -> str:
    """The name by which callers of the federation know a server's tool or prompt."""
    whole = f"{server}{SEPARATOR}{name}"
    if len(whole) <= LONGEST:
        return whole
    mark = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=HASHED // 2).hexdigest()
    return f"{whole[: LONGEST - HASHED - 1]}_{mark}"


def split(name: str) -> tuple[str, str]:
    """Server and the rest of a public name; server "" where there is none."""
    server, mark, rest = name.partition(SEPARATOR)
    return (server, rest) if mark else ("", name)


def original(server: str, name: str, listed: Iterable[str]) -> str | None:
    """The server's own name for what callers know as `name`; None where that must be listed first.

    Args:
        server: Its name.
        name: The public name.
        listed: Names that the server is known to have; asked for shortened names only.
    """
    if len(name) < LONGEST:
        return split(name)[1]
    for own in listed:
        if public(server, own) == name:
            return own
    return None


class Federation:
    """Lists of all servers, and routes by name or by URI."""

    __slots__ = ("_away", "_clock", "_lines", "_lists", "_uris")

    def __init__(self, lines: Lines, lists: Lists, clock: Clock) -> None:
        self._lines = lines
        self._lists = lists
        self._clock = clock
        self._away: dict[str, tuple[Micros, str]] = {}
        self._uris: dict[str, dict[str, None]] = {}

    # --- lists -----------------------------------------------------------------------------------

    async def listed(self, call: Call, principal: Principal, method: str) -> dict[str, Any]:
        """The result of a list method over all servers that this identity may use."""
        servers = access.usable(principal, call.snapshot)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._from(server, principal, method)) for server in servers]
        items: list[Any] = []
        status: dict[str, str] = {}
        lifetimes: list[Micros] = []
        for server, task in zip(servers, asked, strict=True):
            found = task.result()
            if isinstance(found, str):
                status[server.name] = found
                lifetimes.append(0)
            else:
                items += found[0]
                lifetimes.append(found[1])
        result: dict[str, Any] = {
            "resultType": "complete",
            LISTS[method]: items,
            "ttlMs": min(lifetimes, default=0) // 1_000,
            "cacheScope": "private",
        }
        if status:
            result["_meta"] = {STATUS: status}
        return result

    async def _from(
        self, server: Server, principal: Principal, method: str
    ) -> tuple[list[Any], Micros] | str:
        """One server's items under their public names and how long they stand, or why not."""
        until, why = self._away.get(server.name, (0, ""))
        if self._clock.now() < until:
            return why
        try:
            with Expiry(self._clock, PATIENCE):
                items, lasts = await self.items(server, principal, method)
        except (GatewayError, TimeoutError) as error:
            why = error.message if isinstance(error, GatewayError) else "no answer in time"
            self._away[server.name] = (self._clock.now() + AWAY, why)
            return why
        shown = [self._shown(server, principal, method, item) for item in items]
        return [item for item in shown if item], lasts

    def _shown(self, server: Server, principal: Principal, method: str, item: Any) -> Any:  # noqa: ANN401 - a list's item
        """The item as this identity may see it; None where it may not."""
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str):
            return None
        if method in ("resources/list", "resources/templates/list"):
            uri = item.get("uri")
            known = self._uris.setdefault(server.name, {})
            if isinstance(uri, str) and len(known) < MOST_URIS:
                known[uri] = None
            return item
        if method == "tools/list" and not access.may_call(principal, server, name):
            return None
        return {**item, "name": public(server.name, name)}

    async def items(
        self, server: Server, principal: Principal, method: str
    ) -> tuple[list[Any], Micros]:
        """All items of one server's list as it knows them, and how long they may be remembered.

        Raises:
            UpstreamFault: It cannot be asked.
        """
        peer = self._lines.of(server)
        items: list[Any] = []
        params: dict[str, Any] = {}
        lasts = LONGEST_LIFE
        for _ in range(MOST_PAGES):
            result = await self._page(peer, principal, method, params)
            lasts = min(lasts, lifetime(result))
            if method == "tools/list":
                remember(peer, result)
            page = result.get(LISTS[method])
            items += page if isinstance(page, list) else []
            cursor = result.get("nextCursor")
            if not isinstance(cursor, str) or len(items) >= MOST_ITEMS:
                break
            params = {"cursor": cursor}
        return items[:MOST_ITEMS], lasts

    async def _page(
        self, peer: Peer, principal: Principal, method: str, params: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """One page; {} where the server has no such list."""
        if await self._lines.era(peer) is Era.STATELESS:
            cursor = params.get("cursor")
            known = self._lists.find(peer.server, principal.id, method, cursor)
            if known is not None:
                return known
            body = request(method, {**params, "_meta": stateless_meta()})
            ask = Ask(body=body, headers=routing(method, mcp.STATELESS_VERSIONS[0], ""))
            answer = await self._lines.plain(peer.server, ask)
            if answer.result is not None:
                size = len(answer.raw)
                self._lists.keep(
                    peer.server, principal.id, method, cursor, answer.result, size=size
                )
            return answer.result or {}
        for _ in range(2):
            upstream = await self._lines.upstream(peer, principal.id)
            body = b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (
                upstream.next_id(), orjson.dumps(method), orjson.dumps(params),
            )  # fmt: skip
            answer = await self._lines.plain(
                peer.server, Ask(body=body, headers=upstream.headers())
            )
            if answer.status != 404:
                return answer.result or {}
            self._lines.lost(peer, principal.id, upstream)
        return {}

    # --- the way back ----------------------------------------------------------------------------

    async def route(self, call: Call, principal: Principal, message: Message) -> tuple[Server, str]:
        """Server and its own name of what the message is about.

        Raises:
            ProtocolFault: No server of this identity has it.
        """
        subject = message.subject
        if message.method == "resources/read":
            return await self._holder(call, principal, subject), subject
        server = call.snapshot.servers.get(split(subject)[0])
        if server is not None and access.may_use(principal, server):
            peer = self._lines.of(server)
            own = original(server.name, subject, peer.tools)
            if own is None:
                await self.items(server, principal, "tools/list")
                own = original(server.name, subject, peer.tools) or split(subject)[1]
            return server, own
        raise mcp.fault(
            mcp.INVALID_PARAMS,
            f"Unknown: {subject[:100]!r}. Names here are <server>{SEPARATOR}<name>",
        )

    async def _holder(self, call: Call, principal: Principal, uri: str) -> Server:
        """The first server, in policy's order, that lists this resource."""
        servers = access.usable(principal, call.snapshot)
        for attempt in range(2):
            for server in servers:
                if uri in self._uris.get(server.name, ()):
                    return server
            if attempt == 0:
                await self.listed(call, principal, "resources/list")
        raise mcp.fault(
            mcp.INVALID_PARAMS,
            f"No server here lists the resource {uri[:100]!r}; unlisted ones are read at /mcp/NAME",
            data={"uri": uri[:500]},
        )


def discovered() -> dict[str, Any]:
    """What the federation says of itself: it answers for servers that may be away just now."""
    return {
        "resultType": "complete",
        "supportedVersions": [*mcp.STATELESS_VERSIONS, *mcp.SESSION_VERSIONS],
        "capabilities": CAPABILITIES,
        "ttlMs": 0,
        "cacheScope": "private",
        "_meta": {mcp.META + "serverInfo": stateless_meta()[mcp.META_CLIENT]},
    }
