"""How to speak with a server: its era, and the sessions we hold there on behalf of callers.

A server's era is what policy says, or is asked once and remembered: `server/discover` answered
means stateless, anything else means sessions. Sessions at a server are pooled per principal, never
opened per call (mcp-context-forge#6481: 6.5 s each), and begun anew, once, where the server has
lost one. The first caller performs what is shared; others wait for its outcome, whatever it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from gateway import __version__
from gateway.clock import Expiry
from gateway.errors import UpstreamFault, UpstreamMalformed, UpstreamTimeout
from gateway.tools.remote import Answered, Answering, Ask, Sender, routing
from gateway.units import MICRO
from gateway.wire import mcp
from gateway.wire.mcp import Era

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gateway.call import HeaderList
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.units import Micros

T = TypeVar("T")

ASKING: Micros = 10 * MICRO
"""Longest wait for an answer to a question of ours: discovery, handshake, a list."""
SILENCE: Micros = 20 * MICRO
"""A command that says nothing to a discovery for so long is spoken to in sessions. Longer than a
program takes to start on a busy machine: one that answers late has chosen its era by then."""
LEAVING: Micros = 2 * MICRO
"""How long a stopping process spends on ending sessions at servers."""
REMEMBERED: Micros = 300 * MICRO
"""How long a server that speaks in sessions is believed to: it may be upgraded."""
LONGEST_LIFE: Micros = 3_600 * MICRO
"""Nothing that a server says is believed for longer, whatever `ttlMs` it gives."""
MOST_POOLED = 5_000
"""Pooled sessions at one server; the one longest unused is ended first."""
LONGEST_THEIRS = 1_024
"""Characters of a server's own session id: it becomes part of ours."""
CLIENT = {"name": "tidegate", "version": __version__}
OUR_ID = b'"tidegate"'
"""Id of questions of ours: each stands alone in its exchange."""


class Once(Generic[T]):
    """A value that several ask for and one makes."""

    __slots__ = ("_making", "value")

    def __init__(self) -> None:
        self.value: T | None = None
        self._making: asyncio.Future[None] | None = None

    async def get(self, make: Callable[[], Awaitable[T]]) -> T:
        """The value, made now if nobody has.

        Raises:
            UpstreamFault: Making it failed, here or where it was being made meanwhile.
        """
        while self.value is None:
            if self._making is None:
                return await self._make(make)
            making = self._making
            await asyncio.wait((making,))  # a waiter that leaves must not end it for the others
            if not making.cancelled() and (error := making.exception()) is not None:
                raise error
        return self.value

    async def _make(self, make: Callable[[], Awaitable[T]]) -> T:
        making = self._making = asyncio.get_running_loop().create_future()
        try:
            self.value = value = await make()
        except UpstreamFault as error:
            self._making = None
            making.set_exception(error)
            making.exception()  # nobody need have waited
            raise
        except BaseException:
            self._making = None
            making.cancel()  # whoever waited tries for himself
            raise
        self._making = None
        making.set_result(None)
        return value


@dataclass(slots=True)
class Upstream:
    """A session at a server.

    Attributes:
        id: The server's own id; "" where it keeps no sessions.
        version: Revision agreed on.
        result: What `initialize` said.
        serial: Ids given to requests so far.
    """

    id: str
    version: str
    result: Mapping[str, Any]
    serial: int = 0

    def next_id(self) -> bytes:
        """An id for one request: clients that share this session choose the same ones."""
        self.serial += 1
        return b"%d" % self.serial

    def headers(self) -> HeaderList:
        """What each request of this session carries."""
        return session_headers(self.id, self.version)


def session_headers(ident: str, version: str) -> HeaderList:
    """What each request of a session carries."""
    headers: HeaderList = [(mcp.H_VERSION, version.encode("ascii", "replace"))] if version else []
    if ident:
        headers.append((mcp.H_SESSION, ident.encode("latin-1")))
    return headers


@dataclass(slots=True)
class Peer:
    """What this process knows of one server.

    Attributes:
        era: With the instant until which it is believed.
        found: Its discovery, where it is stateless; `stays` is when that is to be asked again.
        pooled: Sessions by principal.
        tools: Names and mirrored arguments of tools that it has listed.
    """

    server: Server
    era: Once[Era] = field(default_factory=Once)
    believed: Micros = 0
    found: Mapping[str, Any] | None = None
    stays: Micros = 0
    pooled: OrderedDict[str, Once[Upstream]] = field(default_factory=OrderedDict)
    tools: dict[str, Any] = field(default_factory=dict)


class Lines:
    """The peers of this process, and the questions they are asked."""

    __slots__ = ("_answering", "_clock", "_peers", "sender")

    def __init__(self, sender: Sender, clock: Clock) -> None:
        self.sender = sender
        self._clock = clock
        self._answering = Answering(sender, clock)
        self._peers: dict[str, Peer] = {}

    def of(self, server: Server) -> Peer:
        """The peer of this server; a new policy's server is another one if it is elsewhere."""
        peer = self._peers.get(server.name)
        if peer is not None and peer.server is server:
            return peer
        if peer is None or place(peer.server) != place(server):
            peer = self._peers[server.name] = Peer(server)
        peer.server = server
        return peer

    def named(self, name: str) -> Peer | None:
        """The peer of this name, if it was ever spoken to."""
        return self._peers.get(name)

    # --- era -------------------------------------------------------------------------------------

    async def era(self, peer: Peer) -> Era:
        """How the server speaks.

        Raises:
            UpstreamFault: It cannot be asked.
        """
        said = peer.server.era
        if said != "auto":
            return Era(said)
        if peer.era.value is Era.SESSION and self._clock.now() >= peer.believed:
            peer.era = Once()
        if peer.era.value is not None:
            return peer.era.value
        return await peer.era.get(lambda: self._probe(peer))

    async def _probe(self, peer: Peer) -> Era:
        try:
            answer = await self._discover(peer.server, SILENCE if peer.server.command else ASKING)
        except UpstreamTimeout:
            if not peer.server.command:
                raise
            peer.believed = self._clock.now() + REMEMBERED
            return Era.SESSION
        peer.believed = self._clock.now() + REMEMBERED
        result = answer.result
        if result is not None and isinstance(result.get("supportedVersions"), list):
            self._found(peer, result)
            return Era.STATELESS
        if answer.code == mcp.UNSUPPORTED_VERSION:
            return Era.STATELESS
        if answer.status >= 500 or answer.status in (401, 403, 429):
            raise UpstreamFault(
                f"The tool server {peer.server.name} answered its discovery with HTTP status "
                f"{answer.status}.",
                code=f"upstream_{answer.status}",
            )
        return Era.SESSION

    async def discover(self, peer: Peer) -> Mapping[str, Any]:
        """What a stateless server says of itself, as long as it lets us remember that.

        Its last word where it says nothing now.

        Raises:
            UpstreamFault: It never said anything.
        """
        left = peer.stays - self._clock.now()
        if peer.found is not None and left > 0:
            return {**peer.found, "ttlMs": left // 1_000}
        try:
            result = (await self._discover(peer.server, ASKING)).result
        except UpstreamFault:
            if peer.found is None:
                raise
            return {**peer.found, "ttlMs": 0}
        if result is not None:
            self._found(peer, result)
        if peer.found is None:
            raise UpstreamMalformed(f"The tool server {peer.server.name} cannot be discovered.")
        return peer.found

    def _found(self, peer: Peer, result: Mapping[str, Any]) -> None:
        peer.found = result
        peer.stays = self._clock.now() + lifetime(result)

    async def _discover(self, server: Server, limit: Micros) -> Answered:
        version = mcp.STATELESS_VERSIONS[0]
        body = request("server/discover", {"_meta": stateless_meta()})
        ask = Ask(body=body, headers=routing("server/discover", version, ""))
        return await self._answering.ask(server, ask, limit=limit)

    # --- sessions at servers ---------------------------------------------------------------------

    async def upstream(self, peer: Peer, principal: str) -> Upstream:
        """The pooled session of this principal, begun if there is none.

        A command knows one session at a time, whoever asks.
        """
        principal = _holder(peer, principal)
        once = peer.pooled.get(principal)
        if once is None:
            once = peer.pooled[principal] = Once()
            if len(peer.pooled) > MOST_POOLED:
                peer.pooled.popitem(last=False)
        else:
            peer.pooled.move_to_end(principal)
        params = {
            "protocolVersion": mcp.SESSION_VERSIONS[0],
            "capabilities": {},
            "clientInfo": CLIENT,
        }
        return await once.get(lambda: self._begin(peer, params))

    def lost(self, peer: Peer, principal: str, upstream: Upstream) -> None:
        """The server has forgotten this session: the next caller begins another."""
        principal = _holder(peer, principal)
        once = peer.pooled.get(principal)
        if once is not None and once.value is upstream:
            peer.pooled[principal] = Once()

    async def _begin(self, peer: Peer, params: Mapping[str, Any]) -> Upstream:
        server = peer.server
        answer = await self.initialize(server, params)
        upstream = begun(server, answer)
        if upstream is None:
            peer.believed = 0  # it may speak otherwise than we thought: the next call asks
            raise UpstreamMalformed(
                f"The tool server {server.name} refuses to begin a session (HTTP status "
                f"{answer.status}, code {answer.code})."
            )
        return upstream

    async def initialize(self, server: Server, params: Mapping[str, Any]) -> Answered:
        """The handshake, both halves; the answer to its first, which may be an error."""
        body = request("initialize", params)
        answer = await self._answering.ask(server, Ask(body=body), limit=ASKING)
        upstream = begun(server, answer)
        if upstream is not None:
            await self.notify(server, upstream.headers(), "notifications/initialized")
        return answer

    async def notify(
        self, server: Server, headers: HeaderList, method: str, params: object = None
    ) -> None:
        """The server was told something that it owes no answer to; that it fails is nothing."""
        message = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params  # type: ignore[assignment]
        ask = Ask(body=orjson.dumps(message), headers=headers)
        try:
            await self._answering.ask(server, ask, limit=ASKING)
        except UpstreamFault:
            return

    async def tell(self, server: Server, body: bytes, headers: HeaderList) -> None:
        """A client's own notification or response was passed on."""
        await self._answering.ask(server, Ask(body=body, headers=headers), limit=ASKING)

    async def end(self, server: Server, headers: HeaderList) -> int:
        """The session is ended at its server; the status it answered with, 0 for none."""
        if server.command:
            return 200
        try:
            ask = Ask(method="DELETE", headers=headers)
            return (await self._answering.ask(server, ask, limit=ASKING)).status
        except UpstreamFault:
            return 0

    async def plain(self, server: Server, ask: Ask) -> Answered:
        """The answer to any request of ours, read whole."""
        return await self._answering.ask(server, ask, limit=ASKING)

    async def keep(self, servers: Mapping[str, Server]) -> None:
        """Peers that policy names no more are forgotten, their sessions ended."""
        gone = [self._peers.pop(name) for name in list(self._peers) if name not in servers]
        held = [
            (peer.server, once.value)
            for peer in gone
            for once in peer.pooled.values()
            if once.value is not None and once.value.id
        ]
        async with asyncio.TaskGroup() as group:
            for server, upstream in held:
                group.create_task(self.end(server, upstream.headers()))

    async def close(self) -> None:
        """Every pooled session is ended, as far as its server says so in time."""
        with contextlib.suppress(TimeoutError), Expiry(self._clock, LEAVING):
            await self.keep({})


def lifetime(result: Mapping[str, Any]) -> Micros:
    """How long its server lets a result be remembered; 0 where it does not."""
    told = result.get("ttlMs")
    if not isinstance(told, int | float) or isinstance(told, bool) or not told > 0:
        return 0
    return min(LONGEST_LIFE, round(min(told, 1e12) * 1_000))


def begun(server: Server, answer: Answered) -> Upstream | None:
    """The session that this answer to `initialize` began; None where it is an error.

    Raises:
        UpstreamMalformed: The session's id cannot be a header.
    """
    result = answer.result
    if result is None or answer.status != 200:
        return None
    ident = answer.header(mcp.H_SESSION)
    if not (ident.isascii() and (ident.isprintable() or not ident)) or len(ident) > LONGEST_THEIRS:
        raise UpstreamMalformed(f"The tool server {server.name} gave a session an unusable id.")
    version = result.get("protocolVersion")
    return Upstream(ident, version if isinstance(version, str) else "", result)


def request(method: str, params: Mapping[str, Any]) -> bytes:
    """A request of ours."""
    return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (
        OUR_ID, orjson.dumps(method), orjson.dumps(params),
    )  # fmt: skip


def stateless_meta() -> dict[str, Any]:
    """What we say of ourselves in the stateless era."""
    return {
        mcp.META_VERSION: mcp.STATELESS_VERSIONS[0],
        mcp.META_CAPABILITIES: {},
        mcp.META_CLIENT: CLIENT,
    }


def _holder(peer: Peer, principal: str) -> str:
    return "" if peer.server.command else principal


def place(server: Server) -> tuple[object, ...]:
    """Where a server is: under the same name, another place is another server."""
    return server.provider.base_url, server.target, server.command, server.cwd, server.env
