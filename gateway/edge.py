"""The only ASGI code of the data path: bytes become a Call, a Reply or a refusal becomes bytes.

A request passes four gates before it costs anything: its head must be unambiguous (`framing`), its
path must be ours (`routes`), the process must have room, and its body must be readable in bounds
(`bodies`). Then the pipeline answers, and an `Outlet` (`relay`) says what the client may still
hear.

The law of a call's end: whoever ends it records why *before* anything is cancelled, the synchronous
half of closing (`Reply.finish`: settlement, permit) runs at once, the rest is shielded, and nothing
that the client does or omits can skip it. At most one task per call waits for its client to leave.
Source: `protocols.md` §1 to §4; `performance.md` §6, §8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from gateway import bodies, cors, framing, routes, wellknown
from gateway.call import Call, End, Reply, Service, make_call
from gateway.clock import Expiry
from gateway.errors import Draining, Forbidden, GatewayError, MalformedCall, QueueFull
from gateway.flight import Flight
from gateway.intake import Intake, Offload
from gateway.keeper import keeper_of
from gateway.relay import Outlet, Receive, Scope, Send
from gateway.units import MICRO, Micros, Rng

if TYPE_CHECKING:
    from gateway.clock import Clock
    from gateway.framing import Head
    from gateway.routes import Route
    from gateway.snapshot import EdgeRules, Snapshot

LINGER: Micros = 5 * MICRO
"""Time in which a client that is still sending may come to read why it was refused."""

LINGER_BYTES = 64 * 1024 * 1024
"""Bytes thrown away in that time."""

SMALL_REST = 64 * 1024
"""Declared bytes left unread up to which a refusal keeps the connection."""

SOFT: Micros = 1 * MICRO
"""Wait advised when the process itself is full or stopping."""

HELD_GRACE: Micros = 4 * MICRO
"""Time in which a waiting call may still be served once the process is stopping."""

LOOK: Micros = MICRO // 2
"""How often a stopping process looks for calls that wait."""

MOST_WAYS = 256
"""Ways remembered; nearly all calls take one of a handful."""

Spawn: TypeAlias = "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]"


def _nobody(_call: Call) -> None:
    """For tests of the edge alone: the pipeline recognizes."""


def _unheard(_call_id: str, _error: BaseException) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True)
class Way:
    """What the gates found of a request without query and origin: the same for all that are alike.

    Attributes:
        route: Where it goes.
        resource_metadata: See `Outlet`.
    """

    route: Route
    resource_metadata: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Who hears of what the pipeline cannot see.

    Attributes:
        recognize: Sets the call's principal from its headers, before a byte of its body is read: a
            stranger may cost us no effort. A coroutine where a key set must be fetched first.
        refused: (call id, error): a request was refused before the pipeline saw it.
        crashed: (call id, exception): something unexpected escaped. Log it, without any body.
    """

    recognize: Callable[[Call], Awaitable[None] | None] = _nobody
    refused: Callable[[str, GatewayError], None] = _unheard
    crashed: Callable[[str, BaseException], None] = _unheard


class Edge:
    """The data listener's ASGI application.

    Attributes:
        draining: The process is stopping; new calls are refused.
    """

    def __init__(  # noqa: PLR0913 - the composition root hands over each dependency once
        self,
        *,
        service: Service,
        snapshot: Callable[[], Snapshot],
        clock: Clock,
        spawn: Spawn,
        rng: Rng,
        hooks: Hooks | None = None,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        self._service = service
        self._snapshot = snapshot
        self._clock = clock
        self._spawn = spawn
        self._rng = rng
        self._hooks = hooks or Hooks()
        self._intake = Intake(clock, offload)
        self._flights: set[Flight] = set()
        self._idle: asyncio.Event | None = None
        self._heads = framing.Heads()
        self._hosts = framing.HostRule(snapshot().edge)
        self._ways_of: Snapshot | None = None
        self._ways: dict[tuple[object, ...], Way] = {}
        self.draining = False

    @property
    def in_flight(self) -> int:
        """Calls under way."""
        return len(self._flights)

    @property
    def held(self) -> int:
        """Bytes of request bodies held."""
        return self._intake.held

    @property
    def waiting(self) -> int:
        """Calls of which nothing went upstream yet."""
        return sum(flight.waiting for flight in self._flights)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One exchange, whatever happens in it."""
        if scope["type"] != "http":
            await _decline(scope, receive, send)
            return
        received = self._clock.now()
        # Sortable by time, unguessable enough to name a call in a ticket.
        call_id = "%011x%013x" % (received // 1000, self._rng.getrandbits(52))  # noqa: UP031 - cheaper
        outlet = Outlet(scope, send, call_id, received)
        outlet.closing = self.draining
        head: Head | None = None
        try:
            head = self._heads.read(scope["headers"])
            entry = self._enter(scope, head, outlet)
            if isinstance(entry, int):
                await outlet.plain(entry, [])
                return
            if isinstance(entry, bytes):
                await outlet.plain(200, [(b"content-type", b"application/json")], entry)
                return
            call = self._call(scope, head, outlet, entry, received)
        except GatewayError as error:
            await self._refuse_early(outlet, scope, head or framing.Head(), receive, error)
            return
        flight = Flight(call, head, outlet, receive, self._clock)
        call.task = flight.task
        await self._fly(flight, streams=entry.streams_upload)

    # --- the gates -----------------------------------------------------------------------------

    def _enter(self, scope: Scope, head: Head, outlet: Outlet) -> Route | int | bytes:
        """The route, or the status of an answer without body, or a document; or it raises."""
        snapshot = self._snapshot()
        if self._ways_of is not snapshot:
            self._ways_of = snapshot
            self._ways.clear()
            self._heads = framing.Heads()
        outlet.client = head.client
        key = (scope["method"], scope["raw_path"], head.host, scope.get("server"), head.anthropic)
        plain = head.origin is None and not scope["query_string"]
        way = self._ways.get(key) if plain else None
        if way is None:
            found = self._way(scope, head, outlet, snapshot)
            if not isinstance(found, Way):
                return found
            way = found
            if plain and not snapshot.edge.cors_origins:
                if len(self._ways) >= MOST_WAYS:
                    self._ways.clear()
                self._ways[key] = way
        outlet.resource_metadata = way.resource_metadata
        if self.draining or len(self._flights) >= snapshot.edge.max_in_flight:
            raise self._no_room(snapshot.edge)
        route = way.route
        outlet.dialect = route.dialect
        outlet.family = route.family
        return route

    def _way(
        self, scope: Scope, head: Head, outlet: Outlet, snapshot: Snapshot
    ) -> Way | int | bytes:
        """As `_enter`, found out anew."""
        rules = snapshot.edge
        if self._hosts.rules is not rules:
            self._hosts = framing.HostRule(rules)
        path = _raw_path(scope)
        server = scope.get("server")
        if not self._hosts.allows(head.host, server[0] if server else ""):
            raise MalformedCall(
                f"Host {head.host.decode('latin-1')[:128]!r} is not one this listener answers to; "
                "add it to edge.allowed_hosts",
                code="host_not_allowed",
                because="edge.allowed_hosts",
            )
        method = scope["method"]
        if method == "OPTIONS":
            outlet.always += _preflight(scope, head, rules)
            return 204
        if rules.cors_origins:
            outlet.always += cors.answer_headers(head.origin, rules.cors_origins)
        _check_caller(scope["query_string"], head, rules)
        mount = wellknown.resource(path, snapshot)
        if mount and method in {"GET", "HEAD"}:
            return orjson.dumps(wellknown.document(mount, head.host, snapshot))
        metadata = outlet.resource_metadata = wellknown.address(path, head.host, snapshot)
        route = routes.choose(method, path, anthropic=head.anthropic, snapshot=snapshot)
        if isinstance(route, GatewayError):
            raise route
        return 204 if route.hello else Way(route, metadata)

    def _no_room(self, rules: EdgeRules) -> GatewayError:
        if self.draining:
            return Draining("The process is stopping; the call was not begun", retry_after=SOFT)
        return QueueFull(
            f"{rules.max_in_flight} calls are under way, the gateway's own limit "
            "(edge.max_in_flight)",
            retry_after=SOFT,
            because="edge.max_in_flight",
        )

    def _call(
        self, scope: Scope, head: Head, outlet: Outlet, route: Route, received: Micros
    ) -> Call:
        query = scope["query_string"]
        raw = scope["raw_path"]
        call = make_call(
            id=outlet.call_id,
            dialect=route.dialect,
            family=route.family,
            method=scope["method"],
            path=scope["path"],
            target=raw + b"?" + query if query else raw,
            headers=head.kept,
            snapshot=self._snapshot(),
            received=received,
            client=head.client,
        )
        call.coding = head.coding
        client = scope.get("client")
        if client:
            call.peer = client[0]
        return call

    # --- one call ------------------------------------------------------------------------------

    async def _fly(self, flight: Flight, *, streams: bool) -> None:
        """The call is answered, and everything it held is given back."""
        self._flights.add(flight)
        try:
            error = await self._attempt(flight, streams=streams)
            if error is not None:
                await self._say(flight, error)
        except asyncio.CancelledError:
            if flight.why is None or flight.task is None:
                raise
            flight.task.uncancel()
        finally:
            flight.over = True
            self._intake.give_back(flight)
            self._flights.discard(flight)
            if self._idle is not None and not self._flights:
                self._idle.set()
            flight.outlet.unwatch()
            if flight.keeper is not None:
                flight.keeper.cancel()
            if flight.watcher is not None:
                flight.watcher.cancel()
            if flight.grace is not None:
                flight.grace.cancel()
            link = flight.outlet.link
            if link is not None:
                link.on_gone = None
            reply = flight.reply or flight.call.answer  # a layer may have failed with it in hand
            if reply is not None:
                await self._close(reply, flight.why or flight.ended, flight.call.id)

    async def _attempt(self, flight: Flight, *, streams: bool) -> GatewayError | None:
        """None once the call was answered or its client is gone; else what to say instead."""
        call = flight.call
        try:
            pending = self._begin(flight, streams=streams)
            if pending is not None:
                await pending
            self._begin_watch(flight)
            flight.outlet.guard(self._clock, flight.client_stalled)
            flight.keeper = keeper_of(call, flight.outlet, clock=self._clock, spawn=self._spawn)
            flight.entered = True
            flight.reply = await self._service(call)
            if flight.keeper is not None:
                await flight.keeper.stop()
            flight.ended = await flight.outlet.relay(flight.reply, call.extra_headers)
        except bodies.ClientGone:
            flight.why = End.CLIENT_GONE
        except asyncio.CancelledError:
            if flight.why is not End.DRAINED or flight.task is None:
                raise
            flight.task.uncancel()
            return Draining("The process is stopping; the call was ended", retry_after=SOFT)
        except GatewayError as error:
            return error
        except Exception as error:  # noqa: BLE001 - the last line: escapes get an answer
            self._hooks.crashed(call.id, error)
            return _internal(call.id)
        return None

    def _begin(self, flight: Flight, *, streams: bool) -> Awaitable[None] | None:
        """The caller is known, then its body is here, or on its way; or what is left of that.

        Usually nothing is left: no step of it costs a coroutine then.
        """
        pending = self._hooks.recognize(flight.call)
        if pending is not None:
            return self._begin_later(flight, pending, streams=streams)
        return self._take(flight, streams=streams)

    async def _begin_later(
        self, flight: Flight, pending: Awaitable[None], *, streams: bool
    ) -> None:
        await pending
        taking = self._take(flight, streams=streams)
        if taking is not None:
            await taking

    def _take(self, flight: Flight, *, streams: bool) -> Awaitable[None] | None:
        if streams:
            self._intake.stream(flight)
        elif flight.call.method == "POST":
            return self._intake.take(flight)
        return None

    async def _say(self, flight: Flight, error: GatewayError) -> None:
        """The client hears why there is no answer."""
        if flight.keeper is not None:
            await flight.keeper.stop()
        if not flight.entered:
            self._hooks.refused(flight.call.id, error)
        linger = self._lingering(flight.outlet, flight.head, flight.receive, unread=flight.unread)
        if linger is not None and flight.watcher is not None:
            flight.watcher.cancel()  # the connection has one reader at a time
        await flight.outlet.refuse(error, extra=flight.call.extra_headers, linger=linger)

    def _begin_watch(self, flight: Flight) -> None:
        """From now on the call ends when its client leaves.

        A connection of ours calls back; any other server, and a body still on its way, needs a
        task.
        """
        link = flight.outlet.link
        if link is None or flight.upload is not None:
            flight.watcher = self._spawn(self._watch(flight))
            return
        if link.disconnected:
            raise bodies.ClientGone
        link.on_gone = flight.client_left

    async def _watch(self, flight: Flight) -> None:
        """The connection is read until the client leaves; what comes of a body is passed on."""
        try:
            while True:
                message = await flight.receive()
                if message["type"] == "http.disconnect":
                    break
                if flight.upload is not None:
                    more = message.get("more_body", False)
                    await flight.upload.put(message.get("body", b""), more=more)
                    flight.unread = more
        except Exception as error:  # noqa: BLE001 - it would take the whole task group with it
            self._hooks.crashed(flight.call.id, error)
        flight.client_left()

    async def _close(self, reply: Reply, end: End, call_id: str) -> None:
        """The reply is closed even if somebody cancels this very task meanwhile."""
        try:
            await reply.close(end)
        except asyncio.CancelledError:
            self._spawn(self._close(reply, end, call_id))
            raise
        except Exception as error:  # noqa: BLE001 - the answer was given; a close must not undo it
            self._hooks.crashed(call_id, error)

    # --- refusals before a call ----------------------------------------------------------------

    async def _refuse_early(
        self, outlet: Outlet, scope: Scope, head: Head, receive: Receive, error: GatewayError
    ) -> None:
        path = _raw_path(scope)
        outlet.dialect = routes.dialect_of(path)
        outlet.family = routes.family_of(path, anthropic=head.anthropic)
        if not head.host:  # the head itself was refused: nothing of this connection can be trusted
            outlet.closing = True
        self._hooks.refused(outlet.call_id, error)
        linger = self._lingering(outlet, head, receive, unread=head.has_body)
        await outlet.refuse(error, linger=linger)

    def _lingering(
        self, outlet: Outlet, head: Head, receive: Receive, *, unread: bool
    ) -> Callable[[], Awaitable[None]] | None:
        """What to do about a body that nobody will read: close, after giving its sender time.

        Closing a socket with unread bytes resets it, and the reset overtakes the refusal. Small
        rests are read by the server itself and cost no connection.
        """
        if not unread or (head.length is not None and head.length <= SMALL_REST):
            return None
        outlet.closing = True
        if head.expects:
            return None  # it was never told to go on

        async def linger() -> None:
            size = 0
            try:
                with Expiry(self._clock, LINGER):
                    while size < LINGER_BYTES:
                        message = await receive()
                        size += len(message.get("body", b""))
                        if not message.get("more_body", False):
                            return
            except TimeoutError:
                return

        return linger

    # --- stopping ------------------------------------------------------------------------------

    async def drain(self, limit: Micros) -> int:
        """No call is under way any more; returns how many had to be cut off.

        New calls are refused at once, waiting ones softly after `HELD_GRACE`, streams after
        `limit`.
        """
        self.draining = True
        began = self._clock.now()
        grace = min(HELD_GRACE, limit // 2)
        while self._flights and (passed := self._clock.now() - began) < limit:
            if passed >= grace:
                for flight in [one for one in self._flights if one.waiting]:
                    flight.end(End.DRAINED)
            await self._rest(min(LOOK, limit - passed))
        cut = list(self._flights)
        for flight in cut:
            flight.end(End.DRAINED)
        await self._rest(LOOK)
        for flight in list(self._flights):
            flight.drop(End.DRAINED)
        return len(cut)

    async def _rest(self, span: Micros) -> None:
        """Returns after that time, or once no call is under way."""
        if not self._flights:
            return
        self._idle = event = asyncio.Event()
        timer = self._clock.after(span, event.set)
        try:
            await event.wait()
        finally:
            timer.cancel()
            self._idle = None


def _raw_path(scope: Scope) -> str:
    raw: bytes = scope["raw_path"]
    return raw.decode("latin-1")


def _check_secrets(query: bytes) -> None:
    name = framing.secret_in_query(query)
    if name is not None:
        raise MalformedCall(
            f"The query parameter {name!r} carries a credential. Send it in the Authorization "
            "or x-api-key header: URLs are written to logs.",
            code="credential_in_query",
        )


def _check_caller(query: bytes, head: Head, rules: EdgeRules) -> None:
    """No credential in the query, no page of a foreign origin."""
    if query:
        _check_secrets(query)
    if head.origin is not None:
        _check_origin(head, head.origin, rules)


def _check_origin(head: Head, origin: bytes, rules: EdgeRules) -> None:
    """A page of a foreign origin is refused, with or without a credential (`protocols.md` §5.6).

    Rewriting Host disarms the upstream's own check against DNS rebinding, so this one is ours.
    """
    if origin in (b"http://" + head.host, b"https://" + head.host):
        return  # a page of this very listener: its name has been checked, and it serves none
    if not cors.allowed(origin, rules.cors_origins):
        raise Forbidden(
            "Requests of web pages need an origin that the policy names in edge.cors_origins",
            because="edge.cors_origins",
        )


def _preflight(scope: Scope, head: Head, rules: EdgeRules) -> list[tuple[bytes, bytes]]:
    requested = None
    for name, value in scope["headers"]:
        if name == b"access-control-request-headers":
            requested = value
    return cors.preflight_headers(head.origin, rules.cors_origins, requested=requested)


def _internal(call_id: str) -> GatewayError:
    return GatewayError(
        f"The gateway failed inside; the provider is not at fault. Its log has call {call_id}"
    )


async def _decline(scope: Scope, receive: Receive, send: Send) -> None:
    """WebSockets are closed before they open; other protocols are not ours."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1000})
        return
    raise RuntimeError(f"the data listener does not speak {scope['type']!r}")
