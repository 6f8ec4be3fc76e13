"""The client's end of one exchange: heads, bodies, keep-alive bytes, refusals, broken ends.

An `Outlet` knows how much the client has seen. From that follows what may still be said: a real
status before the head, an event of the dialect after it, nothing after the last byte. A body that
did not end well never ends cleanly: its framing stays unfinished and the connection is dropped, so
that no client takes half an answer for a whole one (`protocols.md` §2.4; Portkey#1797).

Bytes pass chunk by chunk; taps see each before it is sent. Where the connection is ours, a chunk of
a stream goes from socket to socket in one step and this call's task sleeps; a client that falls
behind pauses the upstream until it has caught up. Elsewhere awaiting `send` is the back pressure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from gateway import framing
from gateway.call import COMPLETE, ClientKind, Dialect, End, Family
from gateway.errors import (
    StreamCut,
    UpstreamFault,
    UpstreamMalformed,
    UpstreamTimeout,
)
from gateway.link import LINK
from gateway.units import MICRO, Micros
from gateway.upstream import TransportFault
from gateway.wire import mcp_stream, refusals, sse
from gateway.wire.headers import coding_of, is_event_stream
from gateway.wire.keepalive import ResponsesOpening

if TYPE_CHECKING:
    from gateway.call import Edit, HeaderList, Reply, Source
    from gateway.clock import Clock, Timer
    from gateway.errors import GatewayError
    from gateway.link import Link

Message: TypeAlias = "MutableMapping[str, Any]"
Scope: TypeAlias = Message
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

CLIENT_STALL: Micros = 60 * MICRO
"""A client that takes no byte for so long (at most twice it) is gone; shorter than an upstream's
idle deadline, so that a slow reader is never mistaken for a silent provider."""

LARGE = 64 * 1024
"""Declared bytes up to which an answer fits the socket's buffer and nobody can stall it."""

MAX_REFUSAL = 64 * 1024
"""Bytes read of an upstream's refusal that has to be said in-band."""

STREAM_HEAD: HeaderList = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_BODILESS = frozenset((204, 304))
_NAME = itemgetter(0)
# To ask an enumeration for a member costs ten times what a name does.
_PASSTHROUGH, _SDK = Dialect.PASSTHROUGH, ClientKind.SDK
_OPENAI, _ANTHROPIC = Family.OPENAI, Family.ANTHROPIC


class Outlet:
    """What has been said to the client of one exchange, and what may still be.

    Attributes:
        always: Headers that go on whatever head is sent: call id, CORS.
        model, begun: What a Responses event must repeat.
        resource_metadata: Where OAuth clients learn how to get a token; "" for nowhere.
        rpc_id: JSON text of the id under which an MCP refusal is said; b"" for null.
        dialect, family, client: In whose language refusals are put.
        started: A head was sent.
        answered: That head, or bytes after it, are an upstream's.
        opening: How we opened a Responses stream ourselves; None where we did not.
        over: Nothing more can be said.
        deaf: The client is gone, but the upstream is heard out; nothing is sent.
    """

    __slots__ = (
        "_clock", "_method", "_moves", "_on_stall", "_seen", "_send", "_stream", "_tail",
        "_timer", "always", "answered", "begun", "call_id", "client", "closing", "deaf", "dialect",
        "family", "link", "model", "opening", "over", "resource_metadata",
        "rpc_id", "started", "status",
    )  # fmt: skip

    def __init__(self, scope: Scope, send: Send, call_id: str, begun: Micros = 0) -> None:
        self._send = send
        self._method: str = scope["method"]
        extensions = scope.get("extensions")
        self.link: Link | None = extensions.get(LINK) if extensions is not None else None
        self.call_id = call_id
        self.model = ""
        self.rpc_id = b""
        self.resource_metadata = ""
        self.begun = begun
        self.always: HeaderList = [(b"tidegate-call-id", call_id.encode())]
        self.dialect = _PASSTHROUGH
        self.family = _OPENAI
        self.client = _SDK
        self.started = False
        self.answered = False
        self.over = False
        self.deaf = False
        self.closing = False
        self.status = 0
        self.opening: ResponsesOpening | None = None
        self._stream = False
        self._tail = b"\n"
        self._moves = 0
        self._seen = 0
        self._timer: Timer | None = None
        self._clock: Clock | None = None
        self._on_stall: Callable[[], None] | None = None

    # --- small answers of our own --------------------------------------------------------------

    async def plain(self, status: int, headers: HeaderList, body: bytes = b"") -> None:
        """A whole answer of our own was sent."""
        await self._head(status, headers, length=None if status in _BODILESS else len(body))
        await self._last(body)

    async def refuse(
        self,
        error: GatewayError,
        *,
        extra: HeaderList | None = None,
        linger: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """The refusal was said in the strongest form still possible.

        Args:
            error: Why.
            extra: Headers that layers wrote.
            linger: Reads on for a while before the connection closes: a client that is still
                sending its body would otherwise see a reset instead of the refusal.
        """
        if self.over:
            return
        if self.answered:
            await self.cut(error)
        elif self.started:
            await self._push(self._in_band(error))
            await self._last(b"")
        else:
            await self._refusal(error, extra or [], linger)

    async def _refusal(
        self,
        error: GatewayError,
        extra: HeaderList,
        linger: Callable[[], Awaitable[None]] | None,
    ) -> None:
        said = refusals.refusal(
            error,
            dialect=self.dialect,
            family=self.family,
            client=self.client,
            request_id=self.call_id,
            rpc_id=self._rpc_id(),
            resource_metadata=self.resource_metadata,
        )
        names = {name for name, _ in said.headers}
        headers = said.headers + [pair for pair in extra if pair[0] not in names]
        body = orjson.dumps(said.body)
        await self._head(said.status, headers, length=len(body))
        if linger is not None:
            await self._push(body)
            await linger()
            body = b""
        await self._last(body)

    # --- keep-alive before an answer -----------------------------------------------------------

    async def keep_alive(self, data: bytes, extra: HeaderList) -> None:
        """The bytes were sent in a stream of ours; the first of them commit its head."""
        if self.over or self.answered:
            return
        if not self.started:
            self._stream = True
            self._watch()
            await self._head(200, STREAM_HEAD + extra, length=None)
        await self._push(data)

    # --- an upstream's answer ------------------------------------------------------------------

    async def relay(self, reply: Reply, extra: HeaderList) -> End:
        """The reply was passed on as far as it came; it is finished, its source not yet closed.

        Raises:
            UpstreamMalformed: Its head is none; nothing was said yet.
        """
        if self.started:
            return await self._relay_into(reply)
        if not 200 <= reply.status <= 599:
            raise UpstreamMalformed(f"The upstream answered with status {reply.status}.")
        bodiless = reply.status in _BODILESS
        headers, length = framing.end_to_end(reply.headers)
        if reply.edit is not None:
            length = None  # its bytes are not ours to count
        self._stream = length is None and is_event_stream(headers) and not coding_of(headers)
        self.answered = True
        headers += extra
        bare = bodiless or self._method == "HEAD"
        if length is not None and length <= LARGE and not bare:
            body = at_once(reply.source)
            if body is not None:
                whole = self._whole_body(reply, headers, length, body)
                return whole if isinstance(whole, End) else await whole
        await self._head(reply.status, headers, length=None if bodiless else length)
        if bare:
            reply.finish(End.COMPLETE)
            await self._last(b"")
            return End.COMPLETE
        if length is None:
            return await self._stream_body(reply, reply.edit)
        return await self._sized_body(reply, length)

    async def _relay_into(self, reply: Reply) -> End:
        """The reply's events follow our keep-alive bytes; anything else is said as an error."""
        if self.dialect is Dialect.MCP and not is_event_stream(reply.headers):
            return await self._as_event(reply)
        if reply.status != 200 or coding_of(reply.headers) or not is_event_stream(reply.headers):
            error = await _as_error(reply)
            reply.finish(End.COMPLETE)
            await self.refuse(error)
            return End.COMPLETE
        self.answered = True
        return await self._stream_body(reply, self.opening or reply.edit)

    async def _as_event(self, reply: Reply) -> End:
        """A tool's answer that is one JSON object, after our keep-alive bytes."""
        self.answered = True
        parts: list[bytes] = []
        fault: GatewayError | None = None
        try:
            async for chunk in reply.source.chunks():
                for tap in reply.taps:
                    tap(chunk)
                parts.append(chunk)
        except TransportFault as error:
            fault = _fault_of(error)
        return await self._ended(reply, fault, mcp_stream.event(b"".join(parts)))

    async def _stream_body(self, reply: Reply, edit: Edit | None) -> End:
        """A body of unknown length, chunk by chunk."""
        fault: GatewayError | None = None
        self._watch()
        try:
            if self.link is None:
                await self._send_chunks(reply, edit)
            else:
                await self._pass_chunks(reply, edit, self.link)
        except TransportFault as error:
            fault = _fault_of(error)
        except (StreamCut, UpstreamMalformed, UpstreamTimeout) as error:
            fault = error
        if fault is not None and reply.terminal:
            fault = None  # everything had arrived; how the upstream hung up does not matter
        return await self._ended(reply, fault, b"" if edit is None else edit.rest())

    async def _send_chunks(self, reply: Reply, edit: Edit | None) -> None:
        """Through a server that takes messages only."""
        taps = reply.taps
        async for chunk in reply.source.chunks():
            for tap in taps:
                tap(chunk)
            out = chunk if edit is None else edit.feed(chunk)
            if out:
                self._tail = out
                await self._push(out)

    async def _pass_chunks(self, reply: Reply, edit: Edit | None, link: Link) -> None:
        """From socket to socket: a chunk leaves in the step of the loop in which it came.

        This task sleeps meanwhile, and wakes where the client has to catch up (docs/adr/0031).
        """
        taps, push = reply.taps, link.push

        def take(chunk: bytes) -> bool:
            for tap in taps:
                tap(chunk)
            out = chunk if edit is None else edit.feed(chunk)
            if out:
                self._tail = out
                self._moves += 2
                return self.deaf or push(out)
            return True

        over = False
        while not over:
            if link.paused and not self.deaf:
                self._moves += 1
                await link.drain()
                self._moves += 1
            over = await reply.source.pass_to(take)

    def _whole_body(
        self, reply: Reply, headers: HeaderList, length: int, body: bytes
    ) -> End | Awaitable[End]:
        """A body of which every byte is here: head and body leave in one write.

        Nearly every plain answer is relayed in this very step, without a coroutine.
        """
        link = self.link
        if link is None or link.paused or reply.finishing or len(body) != length:
            return self._checked_body(reply, headers, length, body)
        self._begin(link, reply.status, headers, length, hold=True)
        if body:
            for tap in reply.taps:
                tap(body)
        reply.finish(COMPLETE)
        self.over = True
        if not self.deaf:
            link.finish(body)
        return COMPLETE

    async def _checked_body(
        self, reply: Reply, headers: HeaderList, length: int, body: bytes
    ) -> End:
        """The same where anything about it is out of the ordinary."""
        await self._head(reply.status, headers, length=length, hold=True)
        if body:
            for tap in reply.taps:
                tap(body)
        fault: GatewayError | None = None
        if len(body) < length:
            fault = StreamCut("The upstream sent less than it had declared.")
        elif len(body) > length:
            fault = UpstreamMalformed("The upstream sent more than it had declared.")
        return await self._ended(reply, fault, body)

    async def _sized_body(self, reply: Reply, length: int) -> End:
        """A body of declared length; its last chunk goes out with the end, in one write."""
        taps = reply.taps
        left = length
        last = b""
        fault: GatewayError | None = None
        if length > LARGE:
            self._watch()
        try:
            async for chunk in reply.source.chunks():
                for tap in taps:
                    tap(chunk)
                left -= len(chunk)
                if left < 0:
                    fault = UpstreamMalformed("The upstream sent more than it had declared.")
                    break
                if left == 0:
                    last = last or chunk
                elif chunk:
                    await self._push(chunk)
        except TransportFault as error:
            fault = _fault_of(error) if left else None
        except (StreamCut, UpstreamMalformed, UpstreamTimeout) as error:
            fault = error
        if fault is None and left:
            fault = StreamCut("The upstream sent less than it had declared.")
        return await self._ended(reply, fault, last)

    async def _ended(self, reply: Reply, fault: GatewayError | None, last: bytes) -> End:
        """The reply is finished as it ended, and the client was told so.

        Args:
            reply: Its source has nothing more.
            fault: What broke the body; None if it came to its end.
            last: Bytes still to be sent if all is well.
        """
        end = End.COMPLETE
        if fault is not None:
            end = End.STALLED if isinstance(fault, UpstreamTimeout) else End.CUT
        said = b""
        for hook in reply.finishing:
            said = hook(end)
            if said:
                break
        if fault is None and said:
            end = End.CUT
        reply.finish(end)
        if end is End.COMPLETE:
            await self._last(last)
        else:
            await self.cut(fault, said=said)
        return end

    async def cut(self, error: GatewayError | None, *, said: bytes = b"") -> None:
        """The body was broken off so that nobody takes it for whole.

        An error event is sent first where one can be understood: in a plain stream and not in the
        middle of a line, where it would only make the half event parse as a whole, broken one.
        """
        if self.over:
            return
        if self._stream and self._tail[-1:] in (b"\n", b"\r"):
            if not said and error is not None:
                said = self._in_band(error)
            if said:
                await self._push(said if _at_boundary(self._tail) else b"\n" + said)
        self.abort()

    # --- the connection ------------------------------------------------------------------------

    def abort(self, *, hard: bool = False) -> None:
        """The connection is dropped, its framing unfinished; `hard` forgets unsent bytes too.

        Without the extension, leaving the ASGI call unfinished has the same effect.
        """
        self.over = True
        if self.link is not None:
            self.link.abort(hard)

    def guard(self, clock: Clock, on_stall: Callable[[], None]) -> None:
        """From now on a client that takes nothing of a long body for `CLIENT_STALL` is reported."""
        self._clock = clock
        self._on_stall = on_stall

    def _watch(self) -> None:
        if self._timer is None and self._clock is not None:
            self._seen = 0
            self._timer = self._clock.after(CLIENT_STALL, self._check)

    def _check(self) -> None:
        # Odd: a send is being awaited. The same one as at the last look: it makes no progress.
        if self._moves & 1 and self._moves == self._seen and self._on_stall is not None:
            self._on_stall()
        elif self._clock is not None:
            self._seen = self._moves
            self._timer = self._clock.after(CLIENT_STALL, self._check)

    def unwatch(self) -> None:
        """No callback will come, and nothing here holds on to who would have heard it."""
        self._on_stall = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _named(self, headers: HeaderList) -> HeaderList:
        """The headers, and those that go on whatever head is sent."""
        name = b"request-id" if self.family is _ANTHROPIC else b"x-request-id"
        headers = headers + self.always
        if name not in map(_NAME, headers):
            headers.append((name, self.always[0][1]))
        return headers

    def _begin(
        self, link: Link, status: int, headers: HeaderList, length: int | None, *, hold: bool
    ) -> None:
        """The head is said, where the connection is ours."""
        self.started = True
        self.status = status
        if not self.deaf:
            link.begin(status, self._named(headers), length, hold=hold, close=self.closing)

    async def _head(
        self, status: int, headers: HeaderList, *, length: int | None, hold: bool = False
    ) -> None:
        if self.link is not None:
            self._begin(self.link, status, headers, length, hold=hold)
            return
        self.started = True
        self.status = status
        if self.deaf:
            return
        headers = self._named(headers)
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        if self.closing:
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _push(self, data: bytes) -> None:
        self._moves += 1
        if self.deaf:
            pass
        elif self.link is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        else:
            if self.link.paused:
                await self.link.drain()
            self.link.push(data)
        self._moves += 1

    async def _last(self, data: bytes) -> None:
        self.over = True
        self._moves += 1
        if self.deaf:
            pass
        elif self.link is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            if self.link.paused:
                await self.link.drain()
            self.link.finish(data)
        self._moves += 1

    def _rpc_id(self) -> object:
        return orjson.Fragment(self.rpc_id) if self.rpc_id else None

    def _in_band(self, error: GatewayError) -> bytes:
        opening = self.opening
        before = b""
        if opening is None and self.dialect is Dialect.RESPONSES and not self.answered:
            # SDKs refuse any event, a failure too, before the one that opens a response.
            opening = ResponsesOpening(f"resp_{self.call_id}")
            name, body = opening.created(model=self.model, at=self.begun)
            before = sse.frame(orjson.dumps(body), name)
        name, body = refusals.in_band(
            error,
            dialect=self.dialect,
            request_id=self.call_id,
            model=self.model,
            now=self.begun,
            response_id=opening.response_id if opening is not None else "",
            sequence=opening.next() if opening is not None else 0,
            rpc_id=self._rpc_id(),
        )
        return before + sse.frame(orjson.dumps(body), name)


def at_once(source: Source) -> bytes | None:
    """The whole body, where the source can tell that every byte of it is here; else None."""
    ask: Callable[[], bytes | None] | None = getattr(source, "at_once", None)
    return ask() if ask is not None else None


def _at_boundary(tail: bytes) -> bool:
    return tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) or tail == b"\n"


def _fault_of(error: TransportFault) -> GatewayError:
    """What broke the body, as an error of ours; its kind tells a deadline from a cut."""
    if error.kind in {"reset", "cut"}:
        return StreamCut("The upstream broke the answer off before its end.")
    if error.kind == "malformed":
        return UpstreamMalformed("The upstream's answer stopped being HTTP.")
    return UpstreamTimeout(f"The upstream's answer was ended by a deadline ({error.kind}).")


async def _as_error(reply: Reply) -> GatewayError:
    """An answer that cannot follow keep-alive bytes, as an error: its text, read within a bound."""
    text = b""
    try:
        async for chunk in reply.source.chunks():
            for tap in reply.taps:
                tap(chunk)
            if len(text) < MAX_REFUSAL:
                text += chunk[:MAX_REFUSAL]
    except TransportFault:
        pass  # what came of a refusal that broke off is still the best word we have
    if reply.status == 200:
        return UpstreamMalformed("The upstream did not answer with the stream it was asked for.")
    return UpstreamFault(
        f"The upstream refused with {reply.status}: {_message_of(text)}",
        code=reply.code or None,
        retry_after=reply.retry_after,
    )


def _message_of(text: bytes) -> str:
    """The message of a provider's error body in any dialect; else its first words."""
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        body = None
    if isinstance(body, dict):
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(message, str):
            return message
    return text[:500].decode("utf-8", "replace")
