"""Servers reached by Streamable HTTP: one message out, the head of its answer in.

Over the same transport as models: no cookies, no redirects (a server cannot send us elsewhere), no
proxies of the environment. The caller's own headers stay here; what a server gets is written anew:
its credential, the routing headers of its revision, the trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gateway.bodies import read_answer
from gateway.clock import Expiry
from gateway.errors import UpstreamMalformed, UpstreamTimeout
from gateway.opening import fault_of
from gateway.units import MICRO
from gateway.upstream import Outgoing, TransportFault
from gateway.wire import headers as wire_headers
from gateway.wire import mcp, mcp_stream
from gateway.wire.sse import Blocks

if TYPE_CHECKING:
    from gateway.call import HeaderList
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.units import Micros
    from gateway.upstream import Incoming, Transport

BOTH = (b"accept", b"application/json, text/event-stream")
STREAM = (b"accept", b"text/event-stream")
JSON = (b"content-type", b"application/json")


@dataclass(slots=True, kw_only=True)
class Ask:
    """One request to a server.

    Attributes:
        method: HTTP method.
        body: A JSON-RPC message; b"" for GET and DELETE.
        headers: MCP's own and the trace's; never the caller's credential.
        first_byte: Longest wait for a head.
        sent: The transport has taken the request, or part of it.
    """

    method: str = "POST"
    body: bytes = b""
    headers: HeaderList = field(default_factory=list)
    first_byte: Micros = 0
    sent: bool = False


class Sender(Protocol):
    """How a message reaches a server: over HTTP, or into the pipes of a command."""

    async def send(self, server: Server, ask: Ask) -> Incoming:
        """The head of the answer; raises UpstreamFault."""
        ...


class Remote:
    """Sends to any server by its URL."""

    __slots__ = ("_clock", "_transport")

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock

    async def send(self, server: Server, ask: Ask) -> Incoming:
        """The head of the answer.

        Raises:
            UpstreamFault: There is none; `ask.sent` tells whether the server may have the message.
        """
        provider = server.provider
        headers = [STREAM if ask.method == "GET" else BOTH, *ask.headers]
        if ask.body:
            headers.append(JSON)
        headers.append((b"accept-encoding", b"identity"))
        headers += [
            (b"authorization", b"Bearer " + one.secret.reveal().encode())
            for one in provider.credentials
        ]
        headers += [
            (name.encode(), value.reveal().encode()) for name, value in provider.extra_headers
        ]
        out = Outgoing(
            method=ask.method,
            base_url=provider.base_url,
            target=server.target,
            headers=headers,
            body=ask.body,
            connect=provider.timeouts.connect,
        )
        limit = ask.first_byte or provider.timeouts.first_byte
        ask.sent = True
        try:
            with Expiry(self._clock, limit):
                return await self._transport.send(out)
        except TimeoutError as error:
            text = f"The tool server {server.name} sent no answer within {limit / MICRO:g} s."
            raise UpstreamTimeout(text, code="first_byte_timeout") from error
        except TransportFault as error:
            ask.sent = error.sent != "nothing"
            raise fault_of(error, f"The tool server {server.name}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A response that was read whole.

    Attributes:
        status, headers: Of the HTTP answer.
        parsed, raw: The JSON-RPC response.
    """

    status: int
    headers: HeaderList
    parsed: Mapping[str, Any]
    raw: bytes

    @property
    def result(self) -> Mapping[str, Any] | None:
        """Its result; None where it is an error."""
        result = self.parsed.get("result")
        return result if isinstance(result, Mapping) else None

    @property
    def code(self) -> int:
        """Its error's code; 0 where it is a result."""
        error = self.parsed.get("error")
        code = error.get("code") if isinstance(error, Mapping) else 0
        return code if isinstance(code, int) else mcp.INTERNAL_ERROR

    def header(self, name: bytes) -> str:
        """The first value of a header; "" if absent."""
        return mcp.header_text(self.headers, name)


class Answering:
    """Asks a server something of ours, and reads the answer whole."""

    __slots__ = ("_clock", "_sender")

    def __init__(self, sender: Sender, clock: Clock) -> None:
        self._sender = sender
        self._clock = clock

    async def ask(self, server: Server, ask: Ask, *, limit: Micros) -> Answered:
        """The response to this request of ours, whatever it says.

        Raises:
            UpstreamFault: There was none within the limit.
        """
        try:
            with Expiry(self._clock, limit):
                incoming = await self._sender.send(server, ask)
                try:
                    raw = await self._response(server, incoming)
                finally:
                    if not incoming.whole:
                        incoming.abort("read")
                    await incoming.close(reuse=incoming.whole)
        except TimeoutError as error:
            text = f"The tool server {server.name} did not answer within {limit / MICRO:g} s."
            raise UpstreamTimeout(text) from error
        except TransportFault as error:
            raise fault_of(error, f"The tool server {server.name}") from error
        try:
            parsed = read_answer(raw) if raw else {}
        except ValueError:
            parsed = {}
        if not isinstance(parsed, dict):
            parsed = {}
        return Answered(status=incoming.status, headers=incoming.headers, parsed=parsed, raw=raw)

    async def _response(self, server: Server, incoming: Incoming) -> bytes:
        """The body, or the first event that is a response."""
        if incoming.status == 200 and wire_headers.is_event_stream(incoming.headers):
            blocks = Blocks(server.max_result)
            async for chunk in incoming.chunks():
                for raw in blocks.feed(chunk):
                    data = mcp_stream.block(raw).data
                    if data and (b'"result"' in data or b'"error"' in data):
                        return data
            return b""
        parts: list[bytes] = []
        size = 0
        async for chunk in incoming.chunks():
            size += len(chunk)
            if size > server.max_result:
                return b""
            parts.append(chunk)
        return b"".join(parts)


async def read_body(server: Server, incoming: Incoming, *, clock: Clock, limit: Micros) -> bytes:
    """The whole body of an answer, within the server's bound and a time; it is closed after.

    Raises:
        UpstreamFault: It broke, was too large or too slow.
    """
    parts: list[bytes] = []
    size = 0
    whole = False
    try:
        here = incoming.at_once() if incoming.whole else None
        if here is not None:
            parts.append(here)
            size = len(here)
        elif incoming.whole:
            async for chunk in incoming.chunks():
                parts.append(chunk)
                size += len(chunk)
        else:
            with Expiry(clock, limit):
                async for chunk in incoming.chunks():
                    parts.append(chunk)
                    size += len(chunk)
                    if size > server.max_result:
                        break
        whole = size <= server.max_result
    except TimeoutError as error:
        text = f"The tool server {server.name} did not finish its answer in time."
        raise UpstreamTimeout(text, code="idle_timeout") from error
    except TransportFault as error:
        raise fault_of(error, f"The tool server {server.name}") from error
    finally:
        if not whole:
            incoming.abort("given_up")
        await incoming.close(reuse=whole)
    if not whole:
        raise UpstreamMalformed(
            f"The answer of the tool server {server.name} is larger than the "
            f"{server.max_result} bytes that policy allows.",
            because=f"{server.because}.max_result",
            code="result_too_large",
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


def routing(message_method: str, version: str, subject: str) -> HeaderList:
    """The headers that a stateless revision demands of a request with this subject."""
    headers = [(mcp.H_VERSION, version.encode()), (mcp.H_METHOD, message_method.encode())]
    if subject:
        headers.append((mcp.H_NAME, mcp.encoded_header(subject)))
    return headers
