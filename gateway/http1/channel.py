"""One connection to an upstream: bytes become an answer within bounds, requests keep their pace.

A channel serves one exchange after another. Its law:

* An answer is as long as its framing says. What comes behind its end, or between two exchanges,
  ends the channel: it would be taken for the next answer.
* What came before a break is delivered before the break is.
* Nothing grows without a bound: a head, the lines in it, the interim answers before it, bytes that
  are no body (chunk extensions, trailers), and a body that nobody reads. Reading stops where
  2 x `BUFFERED` bytes are held and goes on when a reader has taken them and asks for more, so a
  slow one holds less than 2 x `BUFFERED` + `READ`.
* Chunks of a body are held for who awaits them, or given to a `Take` in the very step of the loop
  in which they were read: no task is woken for an event of a stream (docs/adr/0031).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import httptools

from gateway.upstream import BUFFERED, LONGEST_HEADER, MOST_HEADERS, MOST_INTERIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.call import HeaderList
    from gateway.units import Micros
    from gateway.upstream import Probe, Take

MOST_HEAD = 128 * 1024
"""Bytes of a head with the interim ones before it, and of what may follow a chunk without body."""

IDLE, HEAD, BODY, OVER = range(4)
"""Phases: between exchanges; a request has left; its answer's head has come; all of it has."""

_CHUNKED: Final = b"chunked"


class Malformed(Exception):
    """Raised inside the parser's callbacks; its text names the rule and quotes nothing."""


class Channel(asyncio.BufferedProtocol):
    """One connection. Made by `dial`, owned by a pool, used by one exchange at a time.

    Attributes:
        phase: See above.
        status, headers: Of the answer; complete from phase BODY on.
        broke: Why no more will come of this answer, as fault kind and detail; None while it may.
        reusable: The answer did not end the connection.
        idle_since: When its last exchange ended; set by the pool.
    """

    __slots__ = (
        "_arrived", "_bodiless", "_buffer", "_descriptor", "_drained", "_dry", "_full", "_held",
        "_interim", "_loop", "_lost", "_parser", "_paused", "_pieces", "_take", "_transport",
        "_waiter", "broke", "headers", "idle_since", "on_body", "phase", "reusable", "status",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        buffer: memoryview,
        lost: Callable[[Channel], None],
    ) -> None:
        """A channel that is not connected yet.

        Args:
            loop: The running one.
            buffer: Shared by all channels of a transport: filled and parsed in one step.
            lost: Told once, when the connection has ended.
        """
        self._loop = loop
        self._buffer = buffer
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._take: Take | None = None
        self._arrived: list[bytes] = []  # of the read being parsed
        self.on_body = self._arrived.append  # httptools', without a frame of ours
        self._pieces: list[bytes] = []  # of earlier reads, not taken yet
        self._held = 0
        self._dry = 0  # bytes read since the last that mattered
        self._interim = 0
        self._bodiless = False
        self._paused = False
        self._full = False
        self._drained: asyncio.Future[None] | None = None
        self.phase = IDLE
        self.status = 0
        self.headers: HeaderList = []
        self.broke: tuple[str, str] | None = None
        self.reusable = True
        self.idle_since: Micros = 0

    # --- for the pool --------------------------------------------------------------------------

    def ended(self, probe: Probe) -> bool:
        """Whether it is known here, or to the kernel, that an idle channel cannot serve."""
        return self.closing or (self._descriptor >= 0 and probe(self._descriptor))

    @property
    def closing(self) -> bool:
        """Nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    @property
    def held(self) -> int:
        """Bytes of the body that were read from the socket and not taken yet."""
        return self._held

    def begin(self, *, bodiless: bool) -> None:
        """A request is about to leave; what is read from now on is its answer."""
        self.phase = HEAD
        self.status = 0
        self.headers = []
        self._dry = self._interim = 0
        self._bodiless = bodiless
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
            # Line ends without CR and blanks behind a chunk's size are read by every client; what
            # a strict parser refuses beyond that could mean two things.
            self._parser.set_dangerous_leniencies(
                lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
            )

    def end(self) -> bool:
        """The exchange is over; whether another may follow."""
        whole = self.phase == OVER and not self._pieces
        if not whole or not self.reusable or self.closing:
            return False
        self.phase = IDLE
        self.headers = []
        self.resume()
        return True

    def drop(self, detail: str = "closed by the gateway") -> None:
        """The connection is closed now, and whoever waits is told.

        An abort: a graceful close would first flush what nobody reads, or wait for TLS.
        """
        if self.broke is None and self.phase != OVER:
            self.broke = ("reset" if self.phase == HEAD else "cut", detail)
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()
        self._wake(end=False)

    # --- writing -------------------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        """Whether the connection took it: False if it was, or has just turned out to be, closed.

        Both loops try the kernel at once, so where a first write fails it has taken nothing.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        transport.write(data)
        return not transport.is_closing()

    @property
    def full(self) -> bool:
        """The upstream takes less than it is sent: `drained` before more."""
        return self._full

    async def drained(self) -> None:
        """The upstream has taken enough, or the connection has ended."""
        if self._full and not self.closing:
            self._drained = self._loop.create_future()
            await self._drained

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """The transport's buffer has room again."""
        self._full = False
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # --- waiting -------------------------------------------------------------------------------

    def changed(self) -> asyncio.Future[bool]:
        """Done once something came: the head, a piece of the body, its end or a break.

        Called anew for each wait, by one at a time.
        """
        if self._paused:
            self.resume()
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def taken(self) -> bytes:
        """What is held of the body; afterwards nothing is."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._held = 0
        return data

    async def pass_to(self, take: Take) -> bool:
        """All that comes was given to `take`: True at the end, False for a pause or a break."""
        if self._pieces and not take(self.taken()):
            return False
        if self.phase == OVER or self.broke is not None:
            return self.phase == OVER
        self._take = take
        try:
            return await self.changed()
        finally:
            self._take = None

    def _wake(self, *, end: bool) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(end)

    def pause(self) -> None:
        """Nothing more is read until somebody asks."""
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """The socket is read again."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    # --- reading -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Connected, TLS included."""
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self._descriptor = sock.fileno()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        """Where the next read goes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes were read: they are parsed, and what they hold is given on."""
        parser = self._parser
        if parser is None or not HEAD <= self.phase <= BODY:
            self._stray()
            return
        self._dry += nbytes
        try:
            parser.feed_data(self._buffer[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(error)
        arrived = self._arrived
        if not arrived:
            self._bare()
            return
        self._dry = 0
        data = arrived[0] if len(arrived) == 1 else b"".join(arrived)
        arrived.clear()
        take, waiter = self._take, self._waiter
        if take is None or waiter is None or waiter.done():
            self._hold(data)
            return
        try:
            more = take(data)
        except Exception as error:  # noqa: BLE001 - raised where the body is awaited
            self._take = None
            waiter.set_exception(error)
            return
        if self.phase == OVER:
            waiter.set_result(True)
        elif not more or self.broke is not None:
            self._take = None
            self.pause()
            waiter.set_result(False)

    def _bare(self) -> None:
        """A read without a byte of body: heads, framing, an end or a break."""
        if self.phase == OVER or self.broke is not None:
            self._wake(end=self.phase == OVER)
        elif self._dry > MOST_HEAD:
            self._break("malformed", "too many bytes without a body")
            self._wake(end=False)
        elif self.phase == BODY and self._take is None:
            self._wake(end=False)  # the head is here, its body is not

    def _hold(self, data: bytes) -> None:
        """Nobody takes it yet: kept, and whoever waits is told."""
        if self._bodiless:
            self.reusable = False
            self._wake(end=True)
            return
        self._pieces.append(data)
        self._held += len(data)
        if self._held >= 2 * BUFFERED:
            self.pause()
        if self._take is None:
            self._wake(end=False)

    def _stray(self) -> None:
        """Bytes that no request asked for."""
        self.reusable = False
        if self.phase == IDLE:
            self.drop("bytes that nobody asked for")

    def _refuse(self, error: Exception) -> None:
        if self.phase == OVER:  # the answer counts as it was framed; what follows it does not
            self.reusable = False
            return
        cause = error.__context__
        if isinstance(cause, Malformed):
            self._break("malformed", str(cause))
        else:
            # llhttp's reasons are constants of its own, but a later one might quote: bounded.
            self._break("malformed", f"{type(error).__name__}: {str(error)[:80]}")

    def _break(self, kind: str, detail: str) -> None:
        if self.broke is None:
            self.broke = (kind, detail)
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> None:
        """The upstream sends nothing more, though it may still read: no answer can come."""
        self._finish(None)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._finish(exc)
        self._transport = self._parser = None
        self.resume_writing()
        self._lost(self)

    def _finish(self, exc: Exception | None) -> None:
        self.reusable = False
        if self.broke is None and self.phase in (HEAD, BODY):
            if self.phase == BODY and exc is None and self._unframed():
                self.phase = OVER
            else:
                why = "ended early" if exc is None else f"{type(exc).__name__}: {str(exc)[:200]}"
                self.broke = ("reset" if self.phase == HEAD else "cut", why)
        self._wake(end=self.phase == OVER)

    def _unframed(self) -> bool:
        """Whether the body ends with its connection."""
        framings = (b"content-length", b"transfer-encoding")
        return not any(name in framings for name, _ in self.headers)

    # --- what httptools found ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins; behind a whole answer it is one that nobody asked for."""
        if self.phase == OVER:
            raise Malformed("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers come the same way and are dropped."""
        if self.phase == HEAD:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """A head is whole: interim, or the answer's."""
        if self.phase != HEAD:
            return
        assert self._parser is not None  # noqa: S101 - it calls this
        status = self._parser.get_status_code()
        headers = self.headers
        if self._dry > LONGEST_HEADER or len(headers) > MOST_HEADERS:
            _check_size(headers)
        if status < 200:
            self._interim += 1
            if status == 101 or status < 100 or self._interim > MOST_INTERIM:
                raise Malformed("no final answer")
            return
        for name, value in headers:
            if name == b"transfer-encoding" and value.lower() != _CHUNKED:
                raise Malformed("a transfer coding other than chunked")
        self.status = status
        if self._bodiless:
            # llhttp would wait for the body that the head speaks of; its parser is spent.
            self.reusable = self.reusable and self._parser.should_keep_alive()
            self._parser = None
            self.phase = OVER
        else:
            self.phase = BODY

    def on_message_complete(self) -> None:
        """The end of the answer, or of an interim one."""
        if self.phase == BODY:
            assert self._parser is not None  # noqa: S101 - it calls this
            self.phase = OVER
            self.reusable = self.reusable and self._parser.should_keep_alive()
        elif self.phase == HEAD:
            self.headers = []


def _check_size(headers: HeaderList) -> None:
    if len(headers) > MOST_HEADERS:
        raise Malformed("too many headers")
    if any(len(name) + len(value) > LONGEST_HEADER for name, value in headers):
        raise Malformed("a header is too long")
