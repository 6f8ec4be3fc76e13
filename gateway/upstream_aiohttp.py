"""The Transport protocol on aiohttp's pool: the selectable alternative to `http1`.

`AiohttpTransport` takes pool, dialing, TLS and the llhttp parser from aiohttp and nothing else: no
session, hence no cookies, redirects, proxies from the environment, added headers, decompression or
silent repeats. It writes the request itself, so target and header bytes leave as they came, and a
small request is one write without a task. What aiohttp would leave open:

- A pooled connection is checked before its first byte: an end of stream or stray bytes waiting in
  the kernel, or an answer nobody asked for, mean it is dead, and another one is taken. What is left
  is the race on the wire, which nobody can decide; so a request that left is never repeated here.
- Reads are `READ` bytes at most, so a slow reader holds `READ` + 2 x `BUFFERED` bytes per stream.
- An unfinished body ends with an abort: a graceful close would first flush, or wait for TLS.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError, StreamWriter
from aiohttp.streams import EofStream
from yarl import URL

from gateway.units import MICRO
from gateway.upstream import (
    BUFFERED,
    IDLE,
    INLINE,
    LONGEST_HEADER,
    MOST_HEADERS,
    MOST_INTERIM,
    READ,
    Sent,
    TransportFault,
    kernel_probe,
    pass_on,
    readable_target,
    request_head,
    slices,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

    from gateway.call import HeaderList
    from gateway.units import Micros
    from gateway.upstream import Incoming, Outgoing, Probe, Take


class AiohttpTransport:
    """One aiohttp pool per upstream, HTTP/1.1 only; the number in flight is admission's say."""

    def __init__(
        self, *, idle: Micros = IDLE, tls: ssl.SSLContext | None = None, probe: Probe | None = None
    ) -> None:
        """Nothing is opened until the first `send`, which must run in the loop of all others.

        Args:
            idle: How long a connection may rest in the pool.
            tls: Own trust roots or client certificates; None means the system's roots.
            probe: Whether the kernel knows that a connection has ended; None asks the kernel.
        """
        self._probe = probe or kernel_probe()
        self._idle = idle
        self._tls = tls
        self._upstreams: dict[str, _Upstream] = {}
        self._closed = False

    async def send(self, out: Outgoing) -> Incoming:
        """As `Transport`; a dead pooled connection is replaced, what left is never repeated."""
        upstream = self._upstreams.get(out.base_url)
        if upstream is None:
            upstream = self._open(out.base_url)
        head = request_head(out, prefix=upstream.prefix, host=upstream.host)
        exchange, reused = await upstream.begin(out, fresh=False)
        try:
            await exchange.run(out, head)
        except TransportFault as fault:
            if fault.sent != "nothing" or not reused:
                raise
        else:
            return exchange
        exchange, _ = await upstream.begin(out, fresh=True)
        await exchange.run(out, head)
        return exchange

    async def keep(self, base_urls: Collection[str]) -> None:
        """Pools of other upstreams are closed, each when its last exchange has ended."""
        for base_url in [known for known in self._upstreams if known not in base_urls]:
            await self._upstreams.pop(base_url).retire()

    async def close(self) -> None:
        """All connections are closed; exchanges under way break."""
        self._closed = True
        for upstream in self._upstreams.values():
            await upstream.shut()
        self._upstreams.clear()

    def in_flight(self) -> dict[str, int]:
        """Connections in use by upstream; a quiet gateway shows zeros."""
        return {base_url: upstream.in_use for base_url, upstream in self._upstreams.items()}

    def _open(self, base_url: str) -> _Upstream:
        if self._closed:
            raise TransportFault("connect", sent="nothing", detail="the transport is closed")
        try:
            made = _Upstream(base_url, idle=self._idle, tls=self._tls, probe=self._probe)
        except ValueError as error:
            raise TransportFault("connect", sent="nothing", detail=str(error)) from None
        return self._upstreams.setdefault(base_url, made)


class _Handler(ResponseHandler):
    """aiohttp's protocol; knows whether it has served, and lets no reader wait for a dead body."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.served = False
        self.descriptor = -1
        self.stream: aiohttp.StreamReader | None = None

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002 - aiohttp's
        # Asked after every read, and it parses once more: only what was paused can have a rest.
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        super().set_exception(exc, *cause)
        if self.stream is not None:
            self.reads(self.stream)

    def reads(self, stream: aiohttp.StreamReader) -> None:
        """This body is being read: what breaks the connection breaks it too, before or later.

        A parse error in a body (a bad chunk size) reaches the protocol but not the body's reader,
        which would wait for ever.
        """
        self.stream = stream
        error = self.exception()
        if error is not None and not stream.is_eof() and stream.exception() is None:
            stream.set_exception(error)


class _Pipe(asyncio.BufferedProtocol):
    """Between socket and `_Handler`: reads of at most `READ` bytes, in asyncio as in uvloop.

    The buffer is shared: fill and hand-over happen in one step of the loop.
    """

    def __init__(self, handler: _Handler, buffer: memoryview) -> None:
        self.handler = handler
        self._buffer = buffer
        self.connection_made = handler.connection_made  # type: ignore[method-assign]
        self.connection_lost = handler.connection_lost  # type: ignore[method-assign]
        self.pause_writing = handler.pause_writing  # type: ignore[method-assign]
        self.resume_writing = handler.resume_writing  # type: ignore[method-assign]
        self.eof_received = handler.eof_received  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.handler.data_received(bytes(self._buffer[:nbytes]))


class _Connector(aiohttp.TCPConnector):
    """aiohttp's pool with our pipe beneath each connection. Pinned by the fault suite."""

    def __init__(self, *, idle: Micros, tls: ssl.SSLContext | None) -> None:
        super().__init__(limit=0, keepalive_timeout=idle / MICRO, ssl=tls or True)
        buffer = memoryview(bytearray(READ))
        self._factory: Any = lambda: _Pipe(_Handler(self._loop), buffer)

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's signature
    ) -> ResponseHandler:
        pipe: Any = await super()._create_connection(req, traces, timeout)
        return cast("_Handler", pipe.handler)


class _Upstream:
    """The pool of one base URL."""

    def __init__(
        self, base_url: str, *, idle: Micros, tls: ssl.SSLContext | None, probe: Probe
    ) -> None:
        url = URL(base_url, encoded=True)
        host = url.host_port_subcomponent
        if url.scheme not in {"http", "https"} or not url.raw_host or host is None:
            raise ValueError("a base URL is http(s)://host[:port][/prefix]")
        if url.raw_user or url.raw_password or url.raw_query_string or url.raw_fragment:
            raise ValueError("a base URL holds no credentials, query or fragment")
        self.prefix = url.raw_path.rstrip("/").encode()
        if self.prefix and not readable_target(self.prefix):
            raise ValueError("the prefix of a base URL is visible ASCII without blanks")
        self.host = host.encode()
        self.in_use = 0
        self._probe = probe
        self._connector = _Connector(idle=idle, tls=tls)
        self._retired = False
        # One request object stands for the origin: the pool asks it where to dial and how.
        loop = asyncio.get_running_loop()
        self._origin = aiohttp.ClientRequest("GET", url.origin(), loop=loop, ssl=tls or True)
        self._connect: Micros = 0
        self._timeout = aiohttp.ClientTimeout()

    async def begin(self, out: Outgoing, *, fresh: bool) -> tuple[_Exchange, bool]:
        """A connection alive as far as the kernel knows, and whether it has served before."""
        if out.connect != self._connect:
            self._connect = out.connect
            self._timeout = aiohttp.ClientTimeout(total=None, connect=out.connect / MICRO)
        self.in_use += 1
        try:
            while True:
                connection = await self._connector.connect(self._origin, [], self._timeout)
                handler = connection.protocol
                assert isinstance(handler, _Handler)  # noqa: S101 - what `_Connector` makes
                reused = handler.served
                if not reused or not (fresh or self._ended(handler)):
                    handler.served = True
                    return _Exchange(self, connection, handler), reused
                handler.abort()
                connection.close()
        except BaseException as error:
            self.in_use -= 1
            if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
                raise _dial_fault(error) from error
            raise

    def _ended(self, handler: _Handler) -> bool:
        transport = handler.transport
        if transport is None or handler.should_close or transport.is_closing():
            return True
        if handler.descriptor < 0 and (sock := transport.get_extra_info("socket")):
            handler.descriptor = sock.fileno()
        return handler.descriptor >= 0 and self._probe(handler.descriptor)

    async def retire(self) -> None:
        """No new exchange comes; the pool closes with the last."""
        self._retired = True
        await self.settle()

    async def settle(self) -> None:
        """A retired pool without an exchange is closed."""
        if self._retired and self.in_use == 0:
            await self.shut()

    async def shut(self) -> None:
        """Every connection is closed now."""
        await self._connector.close(abort_ssl=True)


class _Exchange:
    """One request and its answer on one connection. Implements Incoming once `run` has returned."""

    __slots__ = (
        "_body", "_connection", "_fault", "_handler", "_sent", "_upstream", "headers", "status",
    )  # fmt: skip

    def __init__(self, upstream: _Upstream, connection: Connection, handler: _Handler) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self._upstream = upstream
        self._connection: Connection | None = connection
        self._handler = handler
        self._body: aiohttp.StreamReader | None = None
        self._sent: Sent = "nothing"
        self._fault: TransportFault | None = None

    async def run(self, out: Outgoing, head: bytes) -> None:
        """The request has left and the head of the answer is here, or the connection is gone."""
        try:
            self._handler.set_response_params(
                skip_payload=out.method == "HEAD",
                read_until_eof=True,
                auto_decompress=False,
                read_bufsize=BUFFERED,
                max_line_size=LONGEST_HEADER,
                max_field_size=LONGEST_HEADER,
                max_headers=MOST_HEADERS,
            )
            if out.upload is None and len(out.body) <= INLINE:
                self._write(head + out.body)
                self._sent = "all"
                await self._read_head()
            else:
                self._write(head)
                await self._converse(out)
        except BaseException:
            self._drop()
            raise

    def _write(self, data: bytes) -> None:
        transport = self._handler.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            # Both loops write at once: if that first write failed, the kernel has taken nothing.
            if not transport.is_closing():
                self._sent = "unknown"
                return
        raise TransportFault("reset", sent="nothing", detail="closed before the first byte")

    async def _converse(self, out: Outgoing) -> None:
        """Body out, head in, at the same time; a head that comes first ends the upload."""
        try:
            async with asyncio.TaskGroup() as both:
                upload = both.create_task(self._upload(out))
                await self._read_head()
                upload.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        if self._sent != "all":
            self._handler.force_close()

    async def _upload(self, out: Outgoing) -> None:
        writer = StreamWriter(self._handler, asyncio.get_running_loop())
        if out.upload is not None and out.length is None:
            writer.enable_chunking()
        length = len(out.body) if out.upload is None else out.length
        count = 0
        async for piece in slices(out.body) if out.upload is None else out.upload:
            if not piece:
                continue
            count += len(piece)
            if length is not None and count > length:
                break
            try:
                await writer.write(piece)
            except (aiohttp.ClientConnectionError, OSError):
                return  # the reader of the head meets the same end, and knows more
        if length is not None and count != length:
            raise TransportFault(
                "cut", sent=self._sent, detail="the upload broke its promised length"
            )
        try:
            await writer.write_eof()
        except (aiohttp.ClientConnectionError, OSError):
            return
        self._sent = "all"

    async def _read_head(self) -> None:
        for _ in range(MOST_INTERIM):
            try:
                message, body = await self._handler.read()
            except (aiohttp.ClientError, OSError, HttpProcessingError, EofStream) as error:
                kind = "malformed" if isinstance(error, HttpProcessingError) else "reset"
                raise TransportFault(kind, sent=self._sent, detail=_reason(error)) from error
            if message.code >= 200:
                self._body = body
                self._handler.reads(body)
                self.status = message.code
                self.headers = [(name.lower(), value) for name, value in message.raw_headers]
                return
            if message.code == 101:
                break
        raise TransportFault("malformed", sent=self._sent, detail="no final answer")

    @property
    def whole(self) -> bool:
        """The body's end has been read from the socket."""
        return self._body is not None and self._body.is_eof()

    def at_once(self) -> bytes | None:
        """The rest of the body if every byte of it is here, else None."""
        body = self._body
        if body is None or not body.is_eof() or self._fault is not None:
            return None
        return body.read_nowait() if body.exception() is None else None

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes exactly as they arrive."""
        return self

    async def pass_to(self, take: Take) -> bool:
        """The rest of the body was given to `take`, unless it had enough."""
        return await pass_on(self, take)

    def __aiter__(self) -> _Exchange:
        """Itself: one coroutine per chunk, no generator around it."""
        return self

    async def __anext__(self) -> bytes:
        """The bytes that are here, or the next that come."""
        body = self._body
        if self._fault is not None or body is None:
            raise self._fault or StopAsyncIteration
        try:
            data = await body.readany()
        except (aiohttp.ClientError, OSError, HttpProcessingError) as error:
            # aiohttp would drop what came before the break: deliver it, the next read raises again.
            data = b"" if self._fault else body._read_nowait(-1)  # noqa: SLF001
            if not data:
                kind = "malformed" if isinstance(error, HttpProcessingError) else "cut"
                fault = TransportFault(kind, sent=self._sent, detail=_reason(error))
                raise self._fault or fault from error
        if data:
            return data
        raise StopAsyncIteration

    def abort(self, kind: str) -> None:
        """The connection is closed now; a pending or later read raises TransportFault(kind)."""
        if self._fault is None:
            self._fault = TransportFault(kind, sent=self._sent)
        if self._body is not None:
            self._body.set_exception(self._fault)
        self._drop()

    async def close(self, *, reuse: bool) -> None:
        """The connection is back in its pool (body fully read and `reuse`) or closed."""
        connection, body = self._connection, self._body
        if connection is None or body is None or not (reuse and body.at_eof()):
            self._drop()
        else:
            self._connection = self._handler.stream = None
            connection.release()  # aiohttp closes it where the answer or stray bytes say so
            self._upstream.in_use -= 1
        await self._upstream.settle()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._handler.abort()
            connection.close()
            self._upstream.in_use -= 1


def _dial_fault(error: Exception) -> TransportFault:
    """No connection, hence nothing sent."""
    kind = "connect"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        kind = "resolve"
    elif isinstance(error, aiohttp.ClientSSLError | aiohttp.ClientConnectorSSLError | ssl.SSLError):
        kind = "tls"
    elif isinstance(error, TimeoutError):
        kind = "connect_timeout"
    return TransportFault(kind, sent="nothing", detail=_reason(error))


def _reason(error: Exception) -> str:
    """What happened, in one bounded line, without bytes of the exchange."""
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    if isinstance(cause, HttpProcessingError):
        # Its text quotes the answer, which may hold anything: the first line names the rule.
        text = (cause.message or "").splitlines()[:1]
        return f"{type(cause).__name__}: {text[0][:120] if text else ''}"
    return f"{type(cause).__name__}: {str(cause)[:200]}"
