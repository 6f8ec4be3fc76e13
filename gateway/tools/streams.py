"""Streams that stand: a session's own (GET), and subscriptions of the stateless era.

They carry what servers say without being asked, for as long as both sides like. They never queue
and hold no permit, so each identity may have only so many. A stream of the session era resumes by
event ids, which name the gateway in front of the server's own: an id that is not of this form is
never sent to a server.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import orjson

from gateway.call import Reply
from gateway.errors import MethodNotAllowed, QueueFull
from gateway.opening import Relayed
from gateway.tools.exchange import EVENT, named_event, refusal_of
from gateway.tools.lines import session_headers
from gateway.tools.passage import STREAM_HEAD
from gateway.tools.remote import Ask, routing
from gateway.units import MICRO
from gateway.upstream import pass_on
from gateway.wire import headers as wire_headers
from gateway.wire import mcp, mcp_stream, sse
from gateway.wire.mcp import Era
from gateway.wire.sse import Blocks

if TYPE_CHECKING:
    from gateway.call import Call
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.tools.lines import Lines
    from gateway.tools.remote import Sender
    from gateway.tools.sessions import Session
    from gateway.units import Micros
    from gateway.upstream import Incoming, Take
    from gateway.wire.mcp import Message

MOST_STREAMS = 64
"""Standing streams of one identity."""
LONGEST: Micros = 86_400 * MICRO
"""How long one may stand; whoever still wants it opens another."""
SOFT: Micros = 5 * MICRO


class Standing:
    """The source of a standing stream: the server's events, under our names of them."""

    __slots__ = ("_relayed", "_rename", "_said", "_server")

    def __init__(self, server: Server, incoming: Incoming, *, clock: Clock, rename: bool) -> None:
        self._server = server
        self._rename = rename
        self._said: AsyncIterator[bytes] | None = None
        self._relayed = Relayed(
            incoming,
            deque(),
            incoming.chunks().__aiter__(),
            clock=clock,
            idle=LONGEST,
            until=clock.now() + LONGEST,
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events as they come."""
        blocks = Blocks(self._server.max_result)
        async for chunk in self._relayed:
            for raw in blocks.feed(chunk):
                if blocks.open:
                    return  # larger than policy allows: nobody can say where it ends
                event = mcp_stream.block(raw)
                ident = None if event.id is None or not self._rename else named_event(event.id)
                yield mcp_stream.written(event, ident=ident)

    async def pass_to(self, take: Take) -> bool:
        """As `chunks`: each event may get another name, so each is awaited."""
        self._said = self._said or self.chunks()
        return await pass_on(self._said, take)

    async def close(self, *, reuse: bool) -> None:
        """The connection is closed."""
        await self._relayed.close(reuse=reuse)


class Streams:
    """Opens standing streams and counts them."""

    __slots__ = ("_clock", "_lines", "_open", "_sender")

    def __init__(self, lines: Lines, sender: Sender, clock: Clock) -> None:
        self._lines = lines
        self._sender = sender
        self._clock = clock
        self._open: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Streams that stand now."""
        return self._open.total()

    async def standing(self, call: Call, server: Server, session: Session) -> Reply:
        """The session's own stream, resumed where the client left it."""
        headers = session_headers(session.theirs, session.version)
        last = mcp.header_text(call.headers, mcp.H_LAST_EVENT).encode("latin-1")
        if last.startswith(EVENT):
            headers.append((mcp.H_LAST_EVENT, last.removeprefix(EVENT)))
        return await self._opened(call, server, Ask(method="GET", headers=headers), rename=True)

    async def listen(self, call: Call, message: Message, server: Server | None) -> Reply:
        """A subscription of the stateless era."""
        if server is not None and await self._lines.era(self._lines.of(server)) is Era.STATELESS:
            version = mcp.header_text(call.headers, mcp.H_VERSION)
            ask = Ask(body=message.raw, headers=routing(message.method, version, ""))
            return await self._opened(call, server, ask, rename=False)
        return self._quiet(call, message)

    def _quiet(self, call: Call, message: Message) -> Reply:
        """A subscription to nothing: acknowledged, then silent until somebody leaves."""
        subscription = {mcp.META_SUBSCRIPTION: orjson.Fragment(message.id)}
        event = {
            "jsonrpc": "2.0",
            "method": "notifications/subscriptions/acknowledged",
            "params": {"notifications": {}, "_meta": subscription},
        }
        source = Silence(sse.frame(orjson.dumps(event)), self._clock)
        return self._counted(call, Reply(status=200, headers=list(STREAM_HEAD), source=source))

    async def _opened(self, call: Call, server: Server, ask: Ask, *, rename: bool) -> Reply:
        self._room(call)
        incoming = await self._sender.send(server, ask)
        call.upstream_status = incoming.status
        if incoming.status != 200 or not wire_headers.is_event_stream(incoming.headers):
            status = incoming.status
            incoming.abort("refused")
            await incoming.close(reuse=False)
            if status == 405 or status < 400:
                text = f"The tool server {server.name} has no stream"
                raise MethodNotAllowed(text, allow="POST, DELETE")
            raise refusal_of(server, status)
        source = Standing(server, incoming, clock=self._clock, rename=rename)
        return self._counted(call, Reply(status=200, headers=list(STREAM_HEAD), source=source))

    def _room(self, call: Call) -> None:
        if self._open[_who(call)] >= MOST_STREAMS:
            raise QueueFull(
                f"{MOST_STREAMS} streams of this identity stand already", retry_after=SOFT
            )

    def _counted(self, call: Call, reply: Reply) -> Reply:
        self._room(call)
        who = _who(call)
        self._open[who] += 1

        def closed(_end: Any) -> None:  # noqa: ANN401 - how it ended does not matter
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]

        reply.on_close(closed)
        reply.terminal = True  # a stream that stands ends whenever either side likes
        return reply


class Silence:
    """A source that says one thing and then only that it is alive."""

    EVERY = 15.0

    __slots__ = ("_clock", "_first", "_said")

    def __init__(self, first: bytes, clock: Clock) -> None:
        self._said: AsyncIterator[bytes] | None = None
        self._first = first
        self._clock = clock

    async def chunks(self) -> AsyncIterator[bytes]:
        """The one event, then comments."""
        yield self._first
        while True:
            await self._clock.sleep(self.EVERY)
            yield b":\n\n"

    async def pass_to(self, take: Take) -> bool:
        """As `chunks`."""
        self._said = self._said or self.chunks()
        return await pass_on(self._said, take)

    async def close(self, *, reuse: bool) -> None:
        """Nothing to give back."""


def _who(call: Call) -> str:
    return call.principal.id if call.principal is not None else ""
