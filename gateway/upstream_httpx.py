"""The Transport protocol over httpx: an extension, never the default.

For tests against an ASGI app in process (`httpx.ASGITransport`) and for whoever must bring an httpx
transport of their own (a corporate proxy, a recorder). Its pool walks every connection on each call
(`performance.md` §4), so a gateway holding hundreds of calls must not use it. httpx's client is not
used either: it would add headers and cookies, follow redirects and decode bodies.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, Any

import httpx

from gateway.units import MICRO
from gateway.upstream import (
    IDLE,
    TransportFault,
    forwarded,
    framing,
    pass_on,
    request_head,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.call import HeaderList
    from gateway.units import Micros
    from gateway.upstream import Incoming, Outgoing, Sent, Take


_ENDED = ("Server disconnected", "peer closed connection")
"""h11's two ways to say that the connection ended early; all else is a breach of the protocol."""


class HttpxTransport:
    """Any httpx transport behind our protocol; HTTP/1.1 over sockets where none is given."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport | None = None,
        *,
        idle: Micros = IDLE,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Nothing is opened until the first `send`.

        Args:
            inner: Closed with this transport. None makes a pool without bounds.
            idle: How long a connection may rest in the pool made here.
            tls: Own trust roots of the pool made here.
        """
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=idle / MICRO
        )
        self._inner = inner or httpx.AsyncHTTPTransport(
            verify=tls or True, limits=limits, trust_env=False
        )

    async def send(self, out: Outgoing) -> Incoming:
        """True after: the head has arrived, the body is unread.

        Raises:
            TransportFault: The exchange broke before the head was complete.
        """
        request_head(out, prefix=b"", host=b"")  # for its checks: httpx writes its own
        progress = _Progress()
        try:
            request = _request(out, progress)
            response = await self._inner.handle_async_request(request)
        except httpx.TransportError as error:
            raise _fault(error, sent=progress.left()) from error
        except (httpx.InvalidURL, ValueError) as error:
            raise TransportFault("connect", sent="nothing", detail=str(error)) from error
        return _Answer(response)

    async def close(self) -> None:
        """All connections are closed."""
        await self._inner.aclose()


class _Progress:
    """How much of a request has left, by httpcore's own trace events."""

    __slots__ = ("sent",)

    def __init__(self) -> None:
        self.sent: Sent = "nothing"

    async def __call__(self, event: str, info: Any) -> None:  # noqa: ANN401, ARG002 - httpcore's hook
        if event == "http11.send_request_headers.started":
            self.sent = "unknown"
        elif event == "http11.send_request_body.complete":
            self.sent = "all"

    def left(self) -> Sent:
        """For failures after the dial: an inner transport without trace events tells nothing."""
        return "unknown" if self.sent == "nothing" else self.sent


class _Body(httpx.AsyncByteStream):
    """The body, whole or streamed; httpcore pulls it."""

    def __init__(self, out: Outgoing) -> None:
        self._out = out

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The pieces of the body."""
        if self._out.upload is None:
            if self._out.body:
                yield self._out.body
        else:
            async for piece in self._out.upload:
                yield piece


def _request(out: Outgoing, progress: _Progress) -> httpx.Request:
    url = httpx.URL(out.base_url)
    if url.scheme not in {"http", "https"} or not url.host or url.userinfo:
        raise ValueError("a base URL is http(s)://host[:port][/prefix]")
    target = url.raw_path.rstrip(b"/") + out.target
    if target.isascii():  # what an app in process is shown
        url = url.copy_with(raw_path=target)
    timeout = {"connect": out.connect / MICRO, "pool": out.connect / MICRO}
    return httpx.Request(
        out.method,
        url,
        headers=[(b"host", url.netloc), *forwarded(out.headers), *framing(out)],
        stream=_Body(out),
        # httpx rewrites percent-encodings; httpcore sends the extension's bytes as they are.
        extensions={"target": target, "timeout": timeout, "trace": progress},
    )


class _Answer:
    """An httpx response as Incoming."""

    __slots__ = ("_fault", "_response", "_stream", "headers", "status")

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers: HeaderList = [(name.lower(), value) for name, value in response.headers.raw]
        self._response = response
        self._fault: TransportFault | None = None
        self._stream = aiter(response.stream)  # type: ignore[arg-type]

    @property
    def whole(self) -> bool:
        """Never known: httpx hides what it has read."""
        return False

    def at_once(self) -> bytes | None:
        """Never known, as above."""
        return None

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes exactly as they arrive."""
        return self

    async def pass_to(self, take: Take) -> bool:
        """The rest of the body was given to `take`, unless it had enough."""
        return await pass_on(self, take)

    def __aiter__(self) -> _Answer:
        """Itself."""
        return self

    async def __anext__(self) -> bytes:
        """The next bytes that come."""
        if self._fault is not None:
            raise self._fault
        try:
            return await anext(self._stream)
        except httpx.TransportError as error:
            raise self._fault or _fault(error, sent="all", reading=True) from error

    def abort(self, kind: str) -> None:
        """A later read raises TransportFault(kind).

        Weakness: httpcore has no synchronous way to break a pending read, so the connection closes
        with `close`, and a reader that waits must be cancelled.
        """
        self._fault = self._fault or TransportFault(kind, sent="all")

    async def close(self, *, reuse: bool) -> None:
        """The connection is in its pool (httpcore keeps it if the body was read) or closed."""
        del reuse
        await self._response.stream.aclose()  # type: ignore[union-attr]


def _fault(error: httpx.TransportError, *, sent: Sent, reading: bool = False) -> TransportFault:
    match error:
        case httpx.ConnectTimeout():
            kind, sent = "connect_timeout", "nothing"
        case httpx.PoolTimeout():
            kind, sent = "pool_timeout", "nothing"
        case httpx.ConnectError():
            kind, sent = _dial_kind(error), "nothing"
        case httpx.LocalProtocolError() | httpx.UnsupportedProtocol():
            kind, sent = "malformed", "nothing"
        case httpx.RemoteProtocolError() if not str(error).startswith(_ENDED):
            kind = "malformed"
        case _:
            kind = "cut" if reading else "reset"
    return TransportFault(kind, sent=sent, detail=f"{type(error).__name__}: {str(error)[:200]}")


def _dial_kind(error: BaseException) -> str:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLError):
            return "tls"
        if isinstance(seen, socket.gaierror):
            return "resolve"
        seen = seen.__cause__ or seen.__context__
    return "connect"
