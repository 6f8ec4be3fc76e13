"""One client connection: the bounds that uvicorn's httptools protocol lacks.

Read in uvicorn 0.54, each reproduced by a test with raw sockets:

* A head has no size limit and no deadline: a client may send header bytes for ever.
* Trailers of a chunked body are appended to the *headers* of the scope, under the eyes of whoever
has checked them already.
* When a client that pipelined a second request leaves, only the second call hears of it, and not
even that while the first one waits: nothing is read then.
* An answer cannot be broken off on purpose without an error in the log.
* Whether the client is still there can only be learned by a task that waits in `receive`. Here a
  callback does it, which saves every call a task (about 15 microseconds).
* A head and its body are two writes to the socket, each header two searches, each answer a timer
  of the loop. Here a whole answer is one write, a head is checked as one text, and one coarse timer
  per connection watches for idleness.

Everything else is uvicorn's. The h11 protocol bounds heads itself and needs none of this; with it
an `Outlet` falls back to leaving its ASGI call unfinished.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import deque
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from gateway.link import LINK
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.call import HeaderList
    from gateway.clock import Clock, Timer

MAX_HEAD = 64 * 1024
"""Bytes of a request head; the largest heads of real clients have about 8 KiB."""

HEAD_TIME: Micros = 30 * MICRO
"""Time from the first byte of a connection or request to the end of its head."""

FLUSH_TIME: Micros = 10 * MICRO
"""Time in which a client may still take the bytes before a connection that is being dropped."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: 155\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"Tidegate accepts request heads of at most 65536 bytes.",'
    b'"type":"invalid_request_error","param":null,"code":"request_head_too_large"}}\n'
)


MOST_AHEAD = 8
"""Requests that are read while the one before them is answered. With so many behind it, or a large
body among them, nothing more is read, and a client that leaves is not heard until it is sent to."""

MOST_PATHS = 256
"""Request targets whose parts are remembered; nearly all calls go to a handful."""

_TEXT = bytes(code for code in range(256) if code == ord("\t") or (code >= 32 and code != 127))
"""What the lines of a head are made of; between them stand line ends and nothing else."""

_TRAILERS: deque[tuple[bytes, bytes]] = deque(maxlen=0)
"""What is put in here is gone."""

Parts = tuple[str, bytes, bytes]
"""Path, raw path and query of a request target."""


_UNREADABLE = b"Tidegate cannot read this request: it is not HTTP/1.1."


def unreadable(url: bytes) -> bytes:
    """The whole answer to bytes that are no request; `url` is what was read of its target."""
    error = b'"message":"%b","type":"invalid_request_error"' % _UNREADABLE
    body = b'{"error":{%b,"param":null,"code":"malformed_http"}}' % error
    if url.startswith(b"/v1/messages"):
        body = b'{"type":"error","error":{%b}}' % error
    return (
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
        b"x-should-retry: false\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
    ) % (len(body), body)


def protocol(clock: Callable[[], Clock]) -> Callable[..., asyncio.Protocol]:
    """What uvicorn's `http` setting wants: a maker of connections that share this clock."""
    paths: dict[bytes, Parts] = {}

    def make(**settings: Any) -> asyncio.Protocol:  # noqa: ANN401 - uvicorn's own parameters
        return Connection(clock(), paths, **settings)

    return make


def parts_of(url: bytes) -> Parts:
    """What uvicorn makes of a request target."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return urllib.parse.unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


def head_of(status: int, headers: HeaderList) -> bytes:
    """Status line and headers as they are sent, with the empty line.

    Raises:
        RuntimeError: A name or value would end its own line, or holds another control character.
    """
    # Joined and not formatted, which costs three times as much.
    lines = b"\r\n".join(map(b": ".join, headers))
    if headers and lines.translate(None, _TEXT) != b"\r\n" * (len(headers) - 1):
        raise RuntimeError("a header of the answer holds a control character")
    return STATUS_LINE[status] + lines + (b"\r\n\r\n" if headers else b"\r\n")


def _nobody() -> None:
    """An answered exchange holds on to nothing of its connection."""


class Exchange(RequestResponseCycle):
    """One request and its answer: as uvicorn's, and the `link.Link` of the call that answers it.

    Attributes:
        on_gone, task: See `link.Link`.
        body: Pieces that have come and were not taken yet.
    """

    # What most exchanges neither change nor often read is said once for all.
    on_gone: Callable[[], None] | None = None
    task: asyncio.Task[None] | None = None
    held = b""
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding: bool | None = None
    expected_content_length = 0
    access_log = False
    size = 0
    news = False

    def __init__(  # the base class wants an event, two loggers and more, for each request
        self,
        connection: Connection,
        scope: Any,  # noqa: ANN401 - ASGI
        expects: bool,  # noqa: FBT001 - made in one place, for each request
        keep_alive: bool,  # noqa: FBT001
    ) -> None:
        self.scope = scope
        self.transport = connection.transport
        self.flow = connection.flow
        self.logger = connection.logger
        self.default_headers = connection.server_state.default_headers
        self.on_response = connection.on_response_complete
        self.on_abort = connection.dropped
        self.disconnected = False
        self._reader: asyncio.Future[None] | None = None
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects
        self.body: list[bytes] = []  # type: ignore[assignment] # a bytearray copies all it is given

    async def run(self, tasks: set[asyncio.Task[None]], app: Any) -> None:  # noqa: ANN401
        """The call ran; its task is none of the server's any more. As uvicorn's, in one frame."""
        try:
            await app(self.scope, self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                self.logger.error("ASGI callable returned without completing response.")
                await self._unfinished()
        except BaseException:
            self.logger.exception("Exception in ASGI application")
            await self._unfinished()
        finally:
            # Cycles that would wait for the collector.
            self.on_response = self.on_abort = _nobody
            self.scope["extensions"].clear()
            task, self.task = self.task, None
            if task is not None:
                tasks.discard(task)

    async def _unfinished(self) -> None:
        if self.response_started:
            self.transport.close()
        else:
            await self.send_500_response()

    # --- the request ---------------------------------------------------------------------------

    def came(self, piece: bytes) -> None:
        """A piece of the body came."""
        self.body.append(piece)
        self.size += len(piece)
        if self.size > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.news = True
        if self._reader is not None:
            self.stir()

    def stir(self) -> None:
        """There is news for whoever waits in `receive`."""
        self.news = True
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    @property
    def message_event(self) -> Exchange:  # type: ignore[override] # nobody else sets it
        """What uvicorn's `send` sets at the end."""
        return self

    set = stir

    async def receive(self) -> Any:  # noqa: ANN401 - ASGI
        """The next of the body, or that the client has left or was answered."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            while not self.news:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            self.news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._taken(), "more_body": self.more_body}

    def take(self) -> bytes | None:
        """The whole body, once, where all of it is here and its client as well; else None."""
        if self.more_body or self.disconnected:
            return None
        if self.flow.read_paused:  # by a large body; its client's leaving must be heard
            self.flow.resume_reading()
        self.news = False
        if len(self.body) == 1:
            self.size = 0
            return self.body.pop()
        return self._taken()

    def _taken(self) -> bytes:
        pieces, self.body = self.body, []
        self.size = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def begin(
        self, status: int, headers: HeaderList, length: int | None, *, hold: bool, close: bool
    ) -> None:
        """The head is sent, or held back to leave with the next bytes.

        Args:
            status: Of the answer.
            headers: All but the framing.
            length: Bytes of the body; None for a chunked one, or for a status that has none.
            hold: `finish` follows at once.
            close: The connection ends with the answer.

        Raises:
            RuntimeError: A header cannot be sent; nothing was.
        """
        if self.disconnected:
            return
        headers = self.default_headers + headers
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
            self.expected_content_length = length
            self.chunked_encoding = False
        elif self.scope["method"] != "HEAD" and status not in (204, 304):
            headers.append((b"transfer-encoding", b"chunked"))
            self.chunked_encoding = True
        if close or not self.keep_alive:
            self.keep_alive = False
            headers.append((b"connection", b"close"))
        head = head_of(status, headers)
        self.response_started = True
        self.waiting_for_100_continue = False
        if hold:
            self.held = head
        else:
            self.transport.write(head)

    def push(self, data: bytes) -> bool:
        """A piece of the body is sent; the rest follows. False if the client should catch up."""
        if self.disconnected or not data:
            return True
        if self.chunked_encoding:  # nearly every event of a stream
            data = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            self._count(data)
        if self.held:
            data, self.held = self.held + data, b""
        self.transport.write(data)
        return not self.flow.write_paused

    def finish(self, data: bytes) -> None:
        """The last piece of the body is sent; the answer is whole.

        Raises:
            RuntimeError: The body is not as long as declared.
        """
        if self.disconnected:
            return
        if self.scope["method"] == "HEAD":
            data = b""
        elif self.chunked_encoding:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        elif len(data) != self.expected_content_length:
            self._count(data)
            raise RuntimeError("the body is shorter than declared")
        held, self.held = self.held, b""
        if held or data:
            self.transport.write(held + data)
        self.response_complete = self.news = True
        if self._reader is not None:
            self.stir()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def _count(self, data: bytes) -> None:
        if len(data) > self.expected_content_length:
            raise RuntimeError("the body is longer than declared")
        self.expected_content_length -= len(data)

    # --- the connection ------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """The client takes less than it is sent: `drain` before more."""
        return self.flow.write_paused

    async def drain(self) -> None:
        """The client has taken enough of what was sent, or is gone."""
        if not self.disconnected:
            await self.flow.drain()

    def gone(self) -> None:
        """The client has left."""
        self.disconnected = True  # uvicorn then neither writes nor complains
        self.stir()

    def abort(self, hard: bool) -> None:  # noqa: FBT001 - a callback, not an interface for people
        """Drop the connection, the answer's framing unfinished; `hard` forgets unsent bytes too."""
        self.gone()
        if hard:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()
            self.on_abort()


class Connection(HttpToolsProtocol):
    """A connection whose heads end, whose trailers vanish and which can be dropped."""

    def __init__(
        self,
        clock: Clock,
        paths: dict[bytes, Parts],
        **settings: Any,  # noqa: ANN401 - uvicorn's own
    ) -> None:
        super().__init__(**settings)
        self._clock = clock
        self._paths = paths
        self._in_head = True
        self._head_bytes = 0
        self._patience: Timer | None = None
        self._idle: Timer | None = None
        self._idle_since: Micros = 0
        self._active: Exchange | None = None
        self._scope: dict[str, Any] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; its first head has a deadline from now on."""
        super().connection_made(transport)
        self._scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            "state": self.app_state.copy(),
        }
        self._wait_for_head()

    def _wait_for_head(self) -> None:
        if self._patience is None:
            self._patience = self._clock.after(HEAD_TIME, self._too_slow)

    def _too_slow(self) -> None:
        self._patience = None
        if not self.transport.is_closing():
            self.transport.close()

    def _head_came(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def data_received(self, data: bytes) -> None:
        """Bytes came; a head that grows too large or too slowly ends the connection."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("")
            return
        except httptools.HttpParserUpgrade:
            pass  # this listener upgrades nothing: the edge refuses it in its own words
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._head_bytes:
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """What is no request was refused in the words of the API it seems meant for."""
        cycle = self._active
        if cycle is None or cycle.response_complete:
            self.transport.write(unreadable(self.url))
        elif not cycle.response_started:  # garbage behind a request: its sender counted wrong
            self.transport.write(unreadable(cycle.scope["raw_path"]))
        self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        name = name.lower()
        if len(name) == 6 and name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_message_begin(self) -> None:
        """A request begins."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """The head is whole: the exchange begins, or waits for the one before it."""
        self._in_head = False
        if self._patience is not None:
            self._head_came()
        self._idle_since = 0
        parser = self.parser
        version = parser.get_http_version()
        scope = self._scope.copy()
        scope["http_version"] = version
        scope["method"] = parser.get_method().decode("ascii")
        scope["headers"] = self.headers
        parts = self._paths.get(self.url) or self._parts()
        scope["path"], scope["raw_path"], scope["query_string"] = parts
        former = self.cycle
        self.cycle = cycle = Exchange(
            self,
            scope,
            self.expect_100_continue,
            version != "1.0" and parser.should_keep_alive(),
        )
        scope["extensions"] = {LINK: cycle}
        if former is None or former.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.pipeline.appendleft((cycle, self.app))
            if len(self.pipeline) >= MOST_AHEAD:
                self.flow.pause_reading()
        # Trailers go the same way as headers: into this list. The scope keeps the other one.
        self.headers = _TRAILERS  # type: ignore[assignment]

    def _parts(self) -> Parts:
        parts = parts_of(self.url)
        if len(self._paths) < MOST_PATHS and not parts[2]:
            self._paths[self.url] = parts
        return parts

    def on_body(self, body: bytes) -> None:
        """A piece of a request's body."""
        cycle = self.cycle
        assert isinstance(cycle, Exchange)  # noqa: S101 - `on_headers_complete` makes no other
        if not cycle.response_complete:
            cycle.came(body)

    def on_message_complete(self) -> None:
        """The request is whole; what follows is another head."""
        cycle = self.cycle
        assert isinstance(cycle, Exchange)  # noqa: S101 - `on_headers_complete` makes no other
        cycle.more_body = False
        cycle.news = True
        if cycle._reader is not None:  # noqa: SLF001 - of the same file
            cycle.stir()
        self._head_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401
        assert isinstance(cycle, Exchange)  # noqa: S101 - `on_headers_complete` makes no other
        self._active = cycle
        # As uvicorn's, but the task leaves the set as its last step and not in one of its own. A
        # name, because asyncio would write a new one for each.
        cycle.task = task = self.loop.create_task(cycle.run(self.tasks, app), name="call")
        self.tasks.add(task)

    def on_response_complete(self) -> None:
        """The answer is whole: the next request may come, within the time to keep alive."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
            return
        # uvicorn arms a timer of the loop for every answer; this one looks at the stamp.
        self._idle_since = self._clock.now()
        if self._idle is None:
            self._idle = self._clock.after(self.timeout_keep_alive * MICRO, self._look)

    def _look(self) -> None:
        """Idle for too long: closed, once nothing is under way. Else looked at again later."""
        self._idle = None
        limit = self.timeout_keep_alive * MICRO
        idle = self._clock.now() - self._idle_since if self._idle_since else 0
        if idle >= limit:
            self.timeout_keep_alive_handler()
        elif not self.transport.is_closing():
            self._idle = self._clock.after(limit - idle, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: the call being answered hears of it, those behind never begin."""
        self._head_came()
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self.pipeline.clear()
        self.connections.discard(self)
        self.flow.resume_writing()
        self.parser = None  # type: ignore[assignment]  # it knows us: a cycle, one per connection
        if exc is None:
            self.transport.close()
        cycle = self._active
        if cycle is not None and not cycle.response_complete:
            cycle.gone()
            told, cycle.on_gone = cycle.on_gone, None
            if told is not None:
                told()

    def dropped(self) -> None:
        """The connection is being closed with bytes unsent: its client has a while to take them."""
        self._patience = self._clock.after(FLUSH_TIME, self.transport.abort)
