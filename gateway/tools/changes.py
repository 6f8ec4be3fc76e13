"""Lists that change: how the gateway hears of it, and who is told.

Two kinds of stream stand for a client. *Feeds* are the gateway's own: of the federation, and
wherever a client's era has a stream and its server's has none. *Standing* ones pass a server's
through (`streams.py`). A change of policy is told to both; a change at a server to feeds alone,
since whoever listens to the server hears it there.

The gateway listens to a server only while some feed is about it, over one connection, whoever the
feeds belong to: with its own credential every list is the same. What servers say in other streams
that pass is heard as well. Where a server does not announce changes, nobody can tell of them.
Changes are told by kind, never counted: a client that reads slowly hears each kind once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from gateway.clock import Expiry
from gateway.errors import GatewayError, UpstreamFault
from gateway.tools import access
from gateway.tools.lines import ASKING, REMEMBERED, place, request, stateless_meta
from gateway.tools.remote import Ask, routing
from gateway.units import MICRO
from gateway.upstream import TransportFault, pass_on
from gateway.wire import headers as wire_headers
from gateway.wire import mcp, mcp_stream, sse
from gateway.wire.mcp import Era
from gateway.wire.sse import Blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from gateway.call import Principal
    from gateway.clock import Clock, Timer
    from gateway.snapshot import AgentRule, Server, Snapshot
    from gateway.tools.lines import Lines, Peer
    from gateway.tools.remote import Sender
    from gateway.units import Micros, Rng
    from gateway.upstream import Incoming, Take
    from gateway.wire.mcp import Message

    Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

KINDS = ("tools", "prompts", "resources")
"""What a server lists."""
METHODS = {f"notifications/{kind}/list_changed": kind for kind in KINDS}
OURS = "tidegate:changes"
"""Whose session the gateway listens in, where a server keeps sessions."""
EVERY: Micros = 15 * MICRO
"""A feed without news says so often that it is alive."""
FIRST_PAUSE: Micros = MICRO
LONGEST_PAUSE: Micros = 60 * MICRO
"""Between two tries to listen to a server."""
LONGEST: Micros = 3_600 * MICRO
"""How long one connection is listened to: a peer that vanished says nothing for ever."""


class Listener(Protocol):
    """A client's stream that stands.

    Attributes:
        principal: Whose it is.
        server: Of its mount; "" for the federation.
    """

    principal: Principal
    server: str

    def tell(self, kind: str) -> None:
        """A list of this kind has changed; nothing happens where nobody asked for such news."""
        ...

    def end(self) -> None:
        """The stream ends now, as a stream that was not broken off."""
        ...


def said_of(kind: str, subscription: bytes) -> bytes:
    """The event that tells of a change.

    Args:
        kind: Of the list.
        subscription: JSON text of the subscription's id; b"" in the session era.
    """
    event: dict[str, Any] = {"jsonrpc": "2.0", "method": f"notifications/{kind}/list_changed"}
    if subscription:
        event["params"] = {"_meta": {mcp.META_SUBSCRIPTION: orjson.Fragment(subscription)}}
    return sse.frame(orjson.dumps(event))


def ended(subscription: bytes) -> bytes:
    """The last event of a subscription that ends well: the result of what asked for it."""
    result = {
        "resultType": "complete",
        "_meta": {mcp.META_SUBSCRIPTION: orjson.Fragment(subscription)},
    }
    event = {"jsonrpc": "2.0", "id": orjson.Fragment(subscription), "result": result}
    return sse.frame(orjson.dumps(event))


class Asked(NamedTuple):
    """What a client's stream is to tell of.

    Attributes:
        kinds: Of lists.
        subscription: JSON text of its id in the stateless era; b"" in the session era.
    """

    kinds: tuple[str, ...] = KINDS
    subscription: bytes = b""


def asked_by(message: Message) -> Asked:
    """What a subscription of the stateless era asks for."""
    said = message.params.get("notifications")
    if not isinstance(said, dict):
        return Asked((), message.id)
    kinds = tuple(kind for kind in KINDS if said.get(f"{kind}ListChanged") is True)
    return Asked(kinds, message.id)


SESSION = Asked()
"""What every stream of the session era tells of."""


class Feed:
    """The source of a stream of the gateway's own: first words, then which lists have changed."""

    __slots__ = (
        "_asked", "_clock", "_due", "_first", "_over", "_said", "_wake", "principal", "server",
    )  # fmt: skip

    def __init__(
        self, principal: Principal, server: str, clock: Clock, asked: Asked = SESSION
    ) -> None:
        """Prepare.

        Args:
            principal: Whose it is.
            server: Of its mount; "" for the federation.
            clock: For signs of life.
            asked: What it tells of; in the stateless era its first words acknowledge that.
        """
        self.principal = principal
        self.server = server
        self._clock = clock
        self._asked = asked
        self._due: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._over = False
        self._said: AsyncIterator[bytes] | None = None
        self._first = b":\n\n"
        if asked.subscription:
            event = {
                "jsonrpc": "2.0",
                "method": "notifications/subscriptions/acknowledged",
                "params": {
                    "notifications": {f"{kind}ListChanged": True for kind in asked.kinds},
                    "_meta": {mcp.META_SUBSCRIPTION: orjson.Fragment(asked.subscription)},
                },
            }
            self._first = sse.frame(orjson.dumps(event))

    def tell(self, kind: str) -> None:
        """See `Listener`."""
        if kind in self._asked.kinds:
            self._due[kind] = None
            self._wake.set()

    def end(self) -> None:
        """See `Listener`."""
        self._over = True
        self._wake.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The first words, then news as it comes, and signs of life between."""
        yield self._first
        while True:
            timer: Timer = self._clock.after(EVERY, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
            due, self._due = self._due, {}
            if self._over:
                break
            yield b"".join(said_of(kind, self._asked.subscription) for kind in due) or b":\n\n"
        if self._asked.subscription:
            yield ended(self._asked.subscription)

    async def pass_to(self, take: Take) -> bool:
        """As `chunks`."""
        self._said = self._said or self.chunks()
        return await pass_on(self._said, take)

    async def close(self, *, reuse: bool) -> None:
        """Nothing to give back."""


class Changes:
    """Who listens, and what the gateway listens to for them.

    Attributes:
        spawn: How a task gets an owner; set before the first stream.
        on_changed: Called with server and kind of every change at a server.
        on_fault: Called with a sentence where listening met what it does not expect.
    """

    def __init__(self, lines: Lines, sender: Sender, clock: Clock, rng: Rng) -> None:
        self._lines = lines
        self._sender = sender
        self._clock = clock
        self._rng = rng
        self._feeds: dict[Feed, frozenset[str]] = {}
        self._wanted: Counter[str] = Counter()
        self._standing: set[Listener] = set()
        self._snapshot: Snapshot | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.spawn: Spawn | None = None
        self.on_changed: Callable[[str, str], None] | None = None
        self.on_fault: Callable[[str], None] | None = None

    @property
    def listening(self) -> int:
        """Servers listened to."""
        return len(self._tasks)

    # --- who is told -----------------------------------------------------------------------------

    def enter(self, listener: Listener, snapshot: Snapshot) -> None:
        """The stream stands: it is told from now on."""
        if self._snapshot is None:
            self._snapshot = snapshot
        owner: Principal | None = listener.principal
        if snapshot is not self._snapshot:
            # Its call is pinned to a policy that was replaced while it was under way.
            rights = _rights(self._snapshot)
            _compare(listener, _View(snapshot, _rights(snapshot)), _View(self._snapshot, rights))
            owner = _owner(listener, rights)
        if not isinstance(listener, Feed):
            self._standing.add(listener)
            return
        self._feeds[listener] = about = _about(listener, owner, self._snapshot)
        self._wanted.update(about)
        self._attend(about)

    def leave(self, listener: Listener) -> None:
        """The stream has ended."""
        self._standing.discard(listener)
        if isinstance(listener, Feed):
            about = self._feeds.pop(listener, frozenset())
            self._wanted.subtract(about)
            self._attend(about)

    def changed(self, server: str, kind: str) -> None:
        """A list of that server is another one."""
        if self.on_changed is not None:
            self.on_changed(server, kind)
        for feed, about in self._feeds.items():
            if server in about:
                feed.tell(kind)

    def noticed(self, server: str, method: object) -> None:
        """The server has sent this notification to somebody."""
        kind = METHODS.get(method) if isinstance(method, str) else None
        if kind is not None:
            self.changed(server, kind)

    def policy(self, old: Snapshot, new: Snapshot) -> None:
        """Another policy is in force: whoever may see other lists now is told."""
        self._snapshot = new
        if _facts(old) == _facts(new):
            return  # as after most edits: nobody's lists are looked at one by one
        rights = _rights(new)
        before, after = _View(old, _rights(old)), _View(new, rights)
        for listener in (*self._standing, *self._feeds):
            _compare(listener, before, after)
        self._wanted.clear()
        for feed in self._feeds:
            self._feeds[feed] = about = _about(feed, _owner(feed, rights), new)
            self._wanted.update(about)
        for name in list(self._tasks):
            if name in new.servers and place(new.servers[name]) != place(old.servers[name]):
                self._tasks.pop(name).cancel()  # it is heard where it is now
        self._attend({*self._tasks, *self._wanted})

    def end(self) -> None:
        """The process stops: every stream that stands ends, so that its client goes elsewhere."""
        for listener in (*self._standing, *self._feeds):
            listener.end()

    # --- what is heard ---------------------------------------------------------------------------

    def _attend(self, names: Iterable[str]) -> None:
        """Of these servers those that some feed is about are listened to, and no others."""
        servers = self._snapshot.servers if self._snapshot is not None else {}
        for name in sorted(names):
            wanted = self._wanted[name] > 0 and name in servers
            if not wanted:
                del self._wanted[name]
                task = self._tasks.pop(name, None)
                if task is not None:
                    task.cancel()
            elif name not in self._tasks and self.spawn is not None:
                self._tasks[name] = self.spawn(self._listen(name))

    async def _listen(self, name: str) -> None:
        """The server is heard until nobody wants to know."""
        pause, stood = FIRST_PAUSE, False
        while self._snapshot is not None and (server := self._snapshot.servers.get(name)):
            began = self._clock.now()
            speaks = True
            try:
                speaks = await self._heard(server, again=stood)
            except (GatewayError, TransportFault, TimeoutError):
                pass  # it may the next time
            except Exception as error:  # noqa: BLE001 - it would take the whole task group with it
                self._fault(f"listening to {name}: {type(error).__name__}: {error}")
            if not speaks:
                await self._clock.sleep(REMEMBERED / MICRO)
                continue
            stood = stood or self._clock.now() - began >= ASKING
            pause = FIRST_PAUSE if self._clock.now() - began >= LONGEST_PAUSE else pause
            await self._clock.sleep(self._rng.uniform(pause / 2, pause) / MICRO)
            pause = min(LONGEST_PAUSE, pause * 2)

    def _fault(self, text: str) -> None:
        if self.on_fault is not None:
            self.on_fault(text)

    async def _heard(self, server: Server, *, again: bool) -> bool:
        """The server was heard until it hung up; False where it has nothing to say.

        Args:
            server: Whom to hear.
            again: It was heard before: what it said meanwhile is lost, so its lists may be others.

        Raises:
            GatewayError, TransportFault: It is away.
        """
        peer = self._lines.of(server)
        ask = await self._question(peer)
        if ask is None:
            return False
        incoming = await self._sender.send(server, ask)
        try:
            if incoming.status != 200 or not wire_headers.is_event_stream(incoming.headers):
                return self._refused(peer, incoming)
            if again:
                for kind in KINDS:
                    self.changed(server.name, kind)
            with Expiry(self._clock, LONGEST):
                await self._read(server, incoming)
        finally:
            incoming.abort("heard")
            await incoming.close(reuse=False)
        return True

    async def _question(self, peer: Peer) -> Ask | None:
        """What opens the server's stream; None where it announces no changes."""
        if await self._lines.era(peer) is Era.STATELESS:
            said = announced(await self._lines.discover(peer))
            if not said:
                return None
            asked = {f"{kind}ListChanged": True for kind in said}
            params = {"notifications": asked, "_meta": stateless_meta()}
            method = "subscriptions/listen"
            headers = routing(method, mcp.STATELESS_VERSIONS[0], "")
            return Ask(body=request(method, params), headers=headers, first_byte=ASKING)
        if peer.server.command:
            return None  # what it says comes through its pipe, whoever listens
        upstream = await self._lines.upstream(peer, OURS)
        if not announced(upstream.result):
            return None
        return Ask(method="GET", headers=upstream.headers(), first_byte=ASKING)

    def _refused(self, peer: Peer, incoming: Incoming) -> bool:
        """Whether to try again."""
        if incoming.status == 404:
            once = peer.pooled.get(OURS)
            if once is not None and once.value is not None:
                self._lines.lost(peer, OURS, once.value)
            return True
        return incoming.status >= 500 or incoming.status == 429

    async def _read(self, server: Server, incoming: Incoming) -> None:
        blocks = Blocks(server.max_result)
        async for chunk in incoming.chunks():
            for raw in blocks.feed(chunk):
                if blocks.open:
                    raise UpstreamFault("A message is larger than policy allows.")
                if not server.command:  # what comes through a pipe is noticed there
                    self.event(server.name, mcp_stream.block(raw).data)

    def event(self, server: str, data: bytes | None) -> None:
        """The data of one event of a server's standing stream."""
        if data is None or b"list_changed" not in data:
            return
        try:
            parsed = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if isinstance(parsed, dict):
            self.noticed(server, parsed.get("method"))

    async def close(self) -> None:
        """Nobody is listened to any more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._feeds.clear()
        self._wanted.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def announced(found: Mapping[str, Any]) -> list[str]:
    """The kinds of lists whose changes a server says that it announces.

    Args:
        found: Result of its discovery or of its `initialize`.
    """
    capabilities = found.get("capabilities")
    if not isinstance(capabilities, dict):
        return []
    return [
        kind
        for kind in KINDS
        if isinstance(capabilities.get(kind), dict) and capabilities[kind].get("listChanged")
    ]


class _View(NamedTuple):
    """A policy, with the rights that it gives by the names of their rules."""

    snapshot: Snapshot
    rights: Mapping[str, AgentRule]


def _facts(snapshot: Snapshot) -> object:
    """Everything that decides who may see which lists."""
    servers = [
        (server.agents, server.tenants, _shown(server)) for server in snapshot.servers.values()
    ]
    return servers, {rule.because: rule.tools for rule in snapshot.agents.values()}


def _shown(server: Server) -> object:
    """What decides which tools of a server are listed, for whoever may use it."""
    return server.name, place(server), [(rule.pattern, rule.deny) for rule in server.tools]


def _rights(snapshot: Snapshot) -> dict[str, AgentRule]:
    return {rule.because: rule for rule in snapshot.agents.values()}


def _owner(listener: Listener, rights: Mapping[str, AgentRule]) -> Principal | None:
    """The stream's principal with the rights that a policy gives it; None: it has none.

    The credential is not kept: rights are found by the name of their rule.
    """
    rule = rights.get(listener.principal.rule.because)
    return replace(listener.principal, rule=rule) if rule is not None else None


def _servers(listener: Listener, owner: Principal | None, snapshot: Snapshot) -> list[Server]:
    """The servers whose lists the stream is about."""
    usable = access.usable(owner, snapshot) if owner is not None else []
    return [server for server in usable if listener.server in ("", server.name)]


def _about(feed: Feed, owner: Principal | None, snapshot: Snapshot) -> frozenset[str]:
    return frozenset(server.name for server in _servers(feed, owner, snapshot))


def _compare(listener: Listener, before: _View, after: _View) -> None:
    """The stream's owner is told where it may see other lists after than before."""
    if _seen(listener, before) != _seen(listener, after):
        for kind in KINDS:
            listener.tell(kind)


def _seen(listener: Listener, view: _View) -> object:
    """What decides which lists the stream's owner may see."""
    owner = _owner(listener, view.rights)
    return owner and owner.rule.tools, [
        _shown(server) for server in _servers(listener, owner, view.snapshot)
    ]
