"""One client connection: the bounds that uvicorn's httptools protocol lacks.

Read in uvicorn 0.54, each reproduced by a test with raw sockets:

* A head has no size limit and no deadline: a client may send header bytes for ever.
* Trailers of a chunked body are appended to the *headers* of the scope, under the eyes of whoever
has checked them already.
* When a client that pipelined a second request leaves, only the second call hears of it.
* An answer cannot be broken off on purpose without an error in the log.
* Whether the client is still there can only be learned by a task that waits in `receive`. Here a
  callback does it, which saves every call a task (about 15 microseconds).

Everything else is uvicorn's. The h11 protocol bounds heads itself and needs none of this; with it
an `Outlet` falls back to leaving its ASGI call unfinished.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from gateway.clock import Clock, Timer

MAX_HEAD = 64 * 1024
"""Bytes of a request head; the largest heads of real clients have about 8 KiB."""

HEAD_TIME: Micros = 30 * MICRO
"""Time from the first byte of a connection or request to the end of its head."""

FLUSH_TIME: Micros = 10 * MICRO
"""Time in which a client may still take the bytes before a connection that is being dropped."""

LINK = "tidegate.link"
"""Name of the ASGI extension, whose value is the connection; `relay.Link` says what it offers."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: 155\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"Tidegate accepts request heads of at most 65536 bytes.",'
    b'"type":"invalid_request_error","param":null,"code":"request_head_too_large"}}\n'
)


def protocol(clock: Callable[[], Clock]) -> Callable[..., asyncio.Protocol]:
    """What uvicorn's `http` setting wants: a maker of connections that share this clock."""

    def make(**settings: Any) -> asyncio.Protocol:  # noqa: ANN401 - uvicorn's own parameters
        return Connection(clock(), **settings)

    return make


class Connection(HttpToolsProtocol):
    """A connection whose heads end, whose trailers vanish and which can be dropped."""

    def __init__(self, clock: Clock, **settings: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(**settings)
        self._clock = clock
        self._in_head = True
        self._head_bytes = 0
        self._patience: Timer | None = None
        self._active: RequestResponseCycle | None = None
        self._offer: dict[str, Any] = {LINK: self}
        self.on_gone: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; its first head has a deadline from now on."""
        super().connection_made(transport)
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
        super().data_received(data)
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._head_bytes:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._head_came()
        self.scope["extensions"] = self._offer
        super().on_headers_complete()
        # Trailers go the same way as headers: into this list. The scope keeps the other one.
        self.headers = deque(maxlen=0)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        """The request is whole; what follows is another head."""
        super().on_message_complete()
        self._head_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:  # noqa: ANN401
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client left: the call being answered hears of it, those behind never begin."""
        self._head_came()
        self.pipeline.clear()
        cycle = self._active
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        told, self.on_gone = self.on_gone, None
        if told is not None:
            told()

    @property
    def lost(self) -> bool:
        """The client of the call being answered is gone."""
        return self._active is not None and self._active.disconnected

    @property
    def whole(self) -> bool:
        """The body of the call being answered has arrived: `receive` will not wait."""
        return self._active is not None and not self._active.more_body

    def abort(self, hard: bool) -> None:  # noqa: FBT001 - a callback, not an interface for people
        """Drop the connection, the answer's framing unfinished; `hard` forgets unsent bytes too."""
        if self._active is not None:
            self._active.disconnected = True  # uvicorn then neither writes nor complains
            self._active.message_event.set()
        if hard:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()
            transport = self.transport
            self._patience = self._clock.after(FLUSH_TIME, transport.abort)
