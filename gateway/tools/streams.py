"""Streams that stand: a session's own (GET), and subscriptions of the stateless era.

They carry what servers say without being asked, for as long as both sides like. They never queue
and hold no permit, so each identity may have only so many. A stream of the session era resumes by
event ids, which name the gateway in front of the server's own: an id that is not of this form is
never sent to a server. Where no server's stream stands behind it (the federation, or a server of
the other era), it is a feed of ours (`changes.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from gateway.call import Reply
from gateway.errors import MethodNotAllowed, QueueFull
from gateway.opening import Relayed
from gateway.tools.changes import SESSION, Asked, Feed, asked_by, ended, said_of
from gateway.tools.exchange import EVENT, named_event, refusal_of
from gateway.tools.lines import session_headers
from gateway.tools.passage import STREAM_HEAD
from gateway.tools.remote import Ask, routing
from gateway.units import MICRO
from gateway.upstream import TransportFault, pass_on
from gateway.wire import headers as wire_headers
from gateway.wire import mcp, mcp_stream
from gateway.wire.mcp import Era
from gateway.wire.sse import Blocks

if TYPE_CHECKING:
    from gateway.call import Call, Principal
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.tools.changes import Changes
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


class NoStream(MethodNotAllowed):
    """A server has nothing that stands."""


class Standing:
    """The source of a server's standing stream: its events, and news of policy between them.

    Attributes:
        principal, server: See `changes.Listener`.
    """

    __slots__ = (
        "_asked", "_changes", "_due", "_incoming", "_max", "_over", "_relayed", "_said", "_take",
        "principal", "server",
    )  # fmt: skip

    def __init__(
        self,
        principal: Principal,
        server: Server,
        incoming: Incoming,
        changes: Changes,
        *,
        clock: Clock,
        asked: Asked,
    ) -> None:
        """Prepare.

        Args:
            principal: Whose stream it is.
            server: Who speaks.
            incoming: Its stream.
            changes: Hears of lists that change.
            clock: For its bounds.
            asked: What the client wants to hear of. In the session era events have ids to resume
                by, under our names of them.
        """
        self.principal = principal
        self.server = server.name
        self._changes = changes
        self._max = server.max_result
        self._asked = asked
        self._incoming = incoming
        self._over = False
        self._due: dict[str, None] = {}
        self._take: Take | None = None
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
        try:
            async for said in self._events():
                yield said
        except TransportFault:
            if not self._over:
                raise
        if self._over and self._asked.subscription:
            yield ended(self._asked.subscription)

    async def _events(self) -> AsyncIterator[bytes]:
        blocks = Blocks(self._max)
        async for chunk in self._relayed:
            for raw in blocks.feed(chunk):
                if blocks.open:
                    return  # larger than policy allows: nobody can say where it ends
                event = mcp_stream.block(raw)
                self._changes.event(self.server, event.data)
                for kind in self._due:
                    yield said_of(kind, self._asked.subscription)
                self._due.clear()
                ident = (
                    None if event.id is None or self._asked.subscription else named_event(event.id)
                )
                yield mcp_stream.written(event, ident=ident)

    async def pass_to(self, take: Take) -> bool:
        """As `chunks`: each event may get another name, so each is awaited."""
        self._said = self._said or self.chunks()
        self._take = take
        try:
            return await pass_on(self._said, take)
        finally:
            self._take = None

    def tell(self, kind: str) -> None:
        """See `changes.Listener`. Whole events were given to the client so far, so one more fits.

        Where the client is behind it waits for the server's next event.
        """
        if kind not in self._asked.kinds:
            return
        if self._take is not None:
            self._take(said_of(kind, self._asked.subscription))
        else:
            self._due[kind] = None

    def end(self) -> None:
        """See `changes.Listener`."""
        self._over = True
        self._incoming.abort("ended")

    async def close(self, *, reuse: bool) -> None:
        """The connection is closed."""
        await self._relayed.close(reuse=reuse)


class Streams:
    """Opens standing streams and counts them."""

    __slots__ = ("_changes", "_clock", "_lines", "_open", "_sender")

    def __init__(self, lines: Lines, sender: Sender, changes: Changes, clock: Clock) -> None:
        self._changes = changes
        self._lines = lines
        self._sender = sender
        self._clock = clock
        self._open: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Streams that stand now."""
        return self._open.total()

    async def standing(self, call: Call, server: Server | None, session: Session) -> Reply:
        """The session's own stream, resumed where the client left it; a feed where it has none."""
        if server is None or not session.exclusive:
            feed = Feed(_who(call), session.server, self._clock)
            return self._counted(call, feed, session)
        headers = session_headers(session.theirs, session.version)
        last = mcp.header_text(call.headers, mcp.H_LAST_EVENT).encode("latin-1")
        if last.startswith(EVENT):
            headers.append((mcp.H_LAST_EVENT, last.removeprefix(EVENT)))
        ask = Ask(method="GET", headers=headers)
        source = await self._opened(call, server, ask, SESSION)
        return self._counted(call, source, session)

    async def listen(self, call: Call, message: Message, server: Server | None) -> Reply:
        """A subscription of the stateless era; of a command the gateway holds one for all."""
        asked = asked_by(message)
        if (
            server is not None
            and not server.command
            and await self._lines.era(self._lines.of(server)) is Era.STATELESS
        ):
            version = mcp.header_text(call.headers, mcp.H_VERSION)
            ask = Ask(body=message.raw, headers=routing(message.method, version, ""))
            try:
                return self._counted(call, await self._opened(call, server, ask, asked))
            except NoStream:
                pass  # it has nothing to say; what policy changes is told all the same
        name = server.name if server is not None else ""
        return self._counted(call, Feed(_who(call), name, self._clock, asked))

    async def _opened(self, call: Call, server: Server, ask: Ask, asked: Asked) -> Standing:
        self._room(call)
        incoming = await self._sender.send(server, ask)
        call.upstream_status = incoming.status
        if incoming.status != 200 or not wire_headers.is_event_stream(incoming.headers):
            status = incoming.status
            incoming.abort("refused")
            await incoming.close(reuse=False)
            if status < 400 or status == 405 or (status == 404 and asked.subscription):
                text = f"The tool server {server.name} has no stream"
                raise NoStream(text, allow="POST, DELETE")
            raise refusal_of(server, status)
        return Standing(_who(call), server, incoming, self._changes, clock=self._clock, asked=asked)

    def _room(self, call: Call) -> None:
        if self._open[_who(call).id] >= MOST_STREAMS:
            raise QueueFull(
                f"{MOST_STREAMS} streams of this identity stand already", retry_after=SOFT
            )

    def _counted(
        self, call: Call, source: Standing | Feed, session: Session | None = None
    ) -> Reply:
        self._room(call)
        who = source.principal.id
        self._open[who] += 1
        self._changes.enter(source, call.snapshot)
        if session is not None:
            session.streams += 1

        def closed(_end: Any) -> None:  # noqa: ANN401 - how it ended does not matter
            self._changes.leave(source)
            if session is not None:
                session.streams -= 1
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]

        reply = Reply(status=200, headers=list(STREAM_HEAD), source=source)
        reply.on_close(closed)
        reply.terminal = True  # a stream that stands ends whenever either side likes
        return reply


def _who(call: Call) -> Principal:
    assert call.principal is not None  # noqa: S101 - identify ran
    return call.principal
