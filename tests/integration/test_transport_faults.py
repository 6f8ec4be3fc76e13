"""What every Transport must survive: scripted upstreams on raw sockets, byte by byte.

Each case runs over our own client and over aiohttp, both on asyncio and on uvloop (production), and
over httpx where its library allows. `drive` fails a case that leaves a task, an exchange or an open
server connection behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import itertools
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from gateway.clock import LoopClock
from gateway.http1.transport import Http1Transport
from gateway.upstream import Incoming, Outgoing, PooledTransport, Transport, TransportFault
from gateway.upstream_aiohttp import AiohttpTransport
from gateway.upstream_httpx import HttpxTransport
from tests.fixtures.waiting import PATIENCE_S, Turns, until

pytestmark = pytest.mark.integration

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

Script = Callable[["Link"], Awaitable[None]]
Case = Callable[["Rig"], Awaitable[None]]


@dataclass
class Request:
    """One request as the upstream read it."""

    head: bytes
    body: bytes

    @property
    def lines(self) -> list[bytes]:
        return self.head.split(b"\r\n")[:-2]


class Link:
    """One connection as the upstream sees it."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.requests: list[Request] = []
        self.ended = asyncio.Event()

    async def request(self) -> Request:
        """The next request, whole; raises IncompleteReadError at the end of the connection."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        body = b""
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                body = await self.reader.readexactly(int(line.split(b":")[1]))
            elif line == b"transfer-encoding: chunked":
                while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
        self.requests.append(Request(head, body))
        return self.requests[-1]

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Returns once the peer has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


@dataclass
class Rig:
    """A transport and its scripted upstream."""

    transport: Transport
    name: str
    script: Script | None = None
    links: list[Link] = field(default_factory=list)
    base_url: str = ""
    scheme: str = "http"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(len(self.links), reader, writer)
        self.links.append(link)
        try:
            assert self.script is not None
            await self.script(link)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except RuntimeError as error:  # uvloop's way to say that the peer has gone
            if "handler is closed" not in str(error):
                raise
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
            link.ended.set()

    def out(self, **changes: Any) -> Outgoing:
        fields: dict[str, Any] = {
            "method": "POST",
            "base_url": self.base_url,
            "target": b"/v1/x",
            "headers": [(b"content-type", b"application/json")],
            "body": b"{}",
        }
        return Outgoing(**fields | changes)

    async def send(self, **changes: Any) -> Incoming:
        return await self.transport.send(self.out(**changes))

    async def exchange(self, **changes: Any) -> tuple[int, bytes]:
        """Status and whole body, the connection given back."""
        answer = await self.send(**changes)
        try:
            return answer.status, await read(answer)
        finally:
            await answer.close(reuse=True)

    async def fault(self, **changes: Any) -> TransportFault:
        """The fault an exchange must end in, head or body."""
        with pytest.raises(TransportFault) as caught:
            await self.exchange(**changes)
        return caught.value

    async def quiet(self) -> None:
        """Every connection the upstream ever saw has ended."""
        await self.transport.close()
        for link in self.links:
            await link.ended.wait()


async def read(answer: Incoming) -> bytes:
    return b"".join([chunk async for chunk in answer.chunks()])


def http1(**settings: Any) -> Http1Transport:
    return Http1Transport(LoopClock(), **settings)


TRANSPORTS: dict[str, tuple[Callable[..., Transport], Callable[[], asyncio.AbstractEventLoop]]] = {
    "http1": (http1, asyncio.new_event_loop),
    "http1-uvloop": (http1, uvloop.new_event_loop),
    "aiohttp": (AiohttpTransport, asyncio.new_event_loop),
    "aiohttp-uvloop": (AiohttpTransport, uvloop.new_event_loop),
    "httpx": (HttpxTransport, asyncio.new_event_loop),
}
POOLED = [name for name in TRANSPORTS if name != "httpx"]

Drive = Callable[..., None]


@pytest.fixture(params=TRANSPORTS)
def drive(request: pytest.FixtureRequest) -> Drive:
    """Run a case against a script; then nothing may be left."""
    return functools.partial(run, request.param)


@pytest.fixture(params=POOLED)
def drive_pooled(request: pytest.FixtureRequest) -> Drive:
    """For promises that httpx does not keep."""
    return functools.partial(run, request.param)


def run(
    name: str,
    case: Case,
    script: Script | None = None,
    *,
    settings: dict[str, Any] | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    make, loop_factory = TRANSPORTS[name]

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(unexpected)
        async with asyncio.timeout(PATIENCE_S):
            rig = Rig(make(**(settings or {})), name, script)
            server = await asyncio.start_server(rig.serve, "127.0.0.1", 0, ssl=tls)
            scheme, host = ("https", "localhost") if tls else ("http", "127.0.0.1")
            rig.base_url = f"{scheme}://{host}:{server.sockets[0].getsockname()[1]}"
            try:
                await case(rig)
                if isinstance(rig.transport, PooledTransport):
                    assert not any(rig.transport.in_flight().values())
            finally:
                await rig.transport.close()
                server.close()
                for link in rig.links:
                    # CPython 3.11 forgets its loop when a close has flushed, and abort trips on it.
                    with contextlib.suppress(AttributeError):
                        link.writer.transport.abort()
                for link in rig.links:
                    await link.ended.wait()
        assert ours() == {asyncio.current_task()}
        assert not complaints

    complaints: list[dict[str, Any]] = []

    def unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        complaints.append(context)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def ours() -> set[asyncio.Task[Any]]:
    """All tasks but those of the scripted upstream."""
    names = ("Rig.serve", "_accept_connection2")
    return {t for t in asyncio.all_tasks() if not any(n in repr(t.get_coro()) for n in names)}


async def serve_ok(link: Link) -> None:
    while True:
        await link.request()
        await link.send(OK)


def answering(*pieces: bytes, pause: float = 0) -> Script:
    """Each request gets these bytes, then the connection closes."""

    async def script(link: Link) -> None:
        await link.request()
        for piece in pieces:
            await link.send(piece)
            if pause:
                await asyncio.sleep(pause)

    return script


# --- what leaves ---------------------------------------------------------------------------------


def test_the_request_leaves_byte_for_byte_as_it_came(drive: Drive) -> None:
    target = b"/v1/a%2Fb/%7e?beta=true&x=a+b%20c&y=[1]&z=%e4"
    headers = [
        (b"anthropic-version", b"2026-10-21"),
        (b"x-twice", b"one"),
        (b"x-between", b"inner  space"),
        (b"x-twice", b"two"),
        (b"x-utf8", "grüß".encode()),
        (b"x-empty", b""),
    ]
    body = b'{ "model" : "m", "x": 1.0 }\n'

    async def case(rig: Rig) -> None:
        assert await rig.exchange(target=target, headers=headers, body=body) == (200, b"ok")
        (request,) = rig.links[0].requests
        assert request.lines[0] == b"POST " + target + b" HTTP/1.1"
        assert request.body == body
        host = rig.base_url.removeprefix("http://").encode()
        seen = [tuple(line.split(b": ", 1)) for line in request.lines[1:]]
        trimmed = [(name, value.strip(b" ")) for name, value in headers]
        expected = [(b"host", host), *trimmed, (b"content-length", b"28")]
        assert [(n.lower(), v.strip(b" ")) for n, v in seen] == expected

    drive(case, serve_ok)


def test_bytes_outside_utf8_pass_in_headers(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        await rig.exchange(headers=[(b"x-latin", b"caf\xe9")])
        assert b"x-latin: caf\xe9\r\n" in rig.links[0].requests[0].head

    drive(case, serve_ok)


def test_the_prefix_of_the_base_url_stands_before_the_target(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        await rig.exchange(base_url=rig.base_url + "/openai/v9", target=b"/chat?x=%2f")
        assert rig.links[0].requests[0].lines[0] == b"POST /openai/v9/chat?x=%2f HTTP/1.1"

    drive(case, serve_ok)


def test_a_second_framing_or_host_among_the_headers_never_leaves(drive: Drive) -> None:
    headers = [
        (b"host", b"evil.test"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"0"),
        (b"connection", b"close"),
        (b"expect", b"100-continue"),
        (b"upgrade", b"websocket"),
        (b"x-kept", b"1"),
    ]

    async def case(rig: Rig) -> None:
        await rig.exchange(headers=headers)
        names = [line.split(b":")[0].lower() for line in rig.links[0].requests[0].lines[1:]]
        assert names == [b"host", b"x-kept", b"content-length"]

    drive(case, serve_ok)


@pytest.mark.parametrize(
    "changes",
    [
        {"headers": [(b"x", b"a\r\nevil: 1")]},
        {"headers": [(b"x", b"a\nevil: 1")]},
        {"headers": [(b"x\r\nevil", b"1")]},
        {"headers": [(b"x:y", b"1")]},
        {"headers": [(b"", b"1")]},
        {"headers": [(b"x", b"\0")]},
        {"target": b"/v1 HTTP/1.1\r\nevil: 1"},
        {"target": b"/a b"},
        {"target": b"no-slash"},
        {"target": b""},
        {"method": "GET /evil"},
        {"method": ""},
    ],
)
def test_a_request_that_could_be_read_as_two_is_refused_unsent(
    drive: Drive, changes: dict[str, Any]
) -> None:
    async def case(rig: Rig) -> None:
        fault = await rig.fault(**changes)
        assert (fault.kind, fault.sent) == ("malformed", "nothing")
        assert not rig.links

    drive(case, serve_ok)


@pytest.mark.parametrize(
    ("method", "framing"),
    [("GET", []), ("HEAD", []), ("OPTIONS", []), ("POST", [b"content-length: 0"])],
)
def test_an_empty_body_is_framed_only_where_one_is_expected(
    drive: Drive, method: str, framing: list[bytes]
) -> None:
    async def script(link: Link) -> None:
        while True:
            await link.request()
            await link.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    async def case(rig: Rig) -> None:
        assert await rig.exchange(method=method, body=b"", headers=[]) == (204, b"")
        assert [line.lower() for line in rig.links[0].requests[0].lines[2:]] == framing

    drive(case, script)


@pytest.mark.parametrize("size", [64 * 1024, 64 * 1024 + 1, 3_000_000])
def test_a_large_body_arrives_whole_without_a_warning(drive: Drive, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    async def case(rig: Rig) -> None:
        for _ in range(2):
            assert await rig.exchange(body=body) == (200, b"ok")
        assert [request.body == body for request in rig.links[0].requests] == [True, True]

    drive(case, serve_ok)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(0)


def test_an_upload_streams_chunked_or_with_its_known_length(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        upload = pieces(b"one", b"", b"two" * 50_000, b"three")
        assert await rig.exchange(body=b"", upload=upload) == (200, b"ok")
        upload = pieces(b"one", b"two")
        assert await rig.exchange(body=b"", upload=upload, length=6) == (200, b"ok")
        first, second = rig.links[0].requests
        assert first.body == b"one" + b"two" * 50_000 + b"three"
        assert b"transfer-encoding: chunked" in first.head.lower()
        assert second.body == b"onetwo"
        assert b"content-length: 6" in second.head.lower()

    drive(case, serve_ok)


@pytest.mark.parametrize("length", [5, 7])
def test_an_upload_that_breaks_its_promised_length_ends_the_exchange(
    drive_pooled: Drive, length: int
) -> None:
    async def case(rig: Rig) -> None:
        fault = await rig.fault(body=b"", upload=pieces(b"one", b"two"), length=length)
        assert (fault.kind, fault.sent) == ("cut", "unknown")
        await rig.links[0].ended.wait()
        assert not rig.links[0].requests

    drive_pooled(case, serve_ok)


class HungUpError(Exception):
    pass


def test_an_error_of_the_upload_reaches_the_caller_and_ends_the_connection(drive: Drive) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"some"
        await asyncio.sleep(0.02)
        raise HungUpError

    async def case(rig: Rig) -> None:
        with pytest.raises(HungUpError):
            await rig.send(body=b"", upload=broken())
        await rig.links[0].ended.wait()
        assert not rig.links[0].requests

    drive(case, serve_ok)


# --- what comes back -----------------------------------------------------------------------------


def test_head_and_body_come_back_byte_for_byte(drive: Drive) -> None:
    answer = (
        b"HTTP/1.1 418 I'm a Teapot\r\nSet-Cookie: a=1\r\nX-Odd: caf\xe9\r\nset-cookie: b=2\r\n"
        b"Content-Encoding: gzip\r\nLocation: /elsewhere\r\nContent-Length: 9\r\n\r\nnot gzip!"
    )

    async def case(rig: Rig) -> None:
        incoming = await rig.send()
        assert incoming.status == 418
        assert incoming.headers == [
            (b"set-cookie", b"a=1"),
            (b"x-odd", b"caf\xe9"),
            (b"set-cookie", b"b=2"),
            (b"content-encoding", b"gzip"),
            (b"location", b"/elsewhere"),
            (b"content-length", b"9"),
        ]
        assert await read(incoming) == b"not gzip!"
        await incoming.close(reuse=True)

    drive(case, answering(answer))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 401, 407, 429, 503])
def test_no_status_makes_the_transport_act_on_its_own(drive: Drive, status: int) -> None:
    head = b"HTTP/1.1 %d X\r\nlocation: /other\r\nset-cookie: a=1\r\ncontent-length: 0\r\n\r\n"

    async def script(link: Link) -> None:
        while True:
            await link.request()
            await link.send(head % status)

    async def case(rig: Rig) -> None:
        for _ in range(2):
            assert await rig.exchange(method="GET", body=b"") == (status, b"")
        assert len(rig.links) == 1
        assert len(rig.links[0].requests) == 2
        assert b"cookie" not in rig.links[0].requests[1].head.lower()

    drive(case, script)


@pytest.mark.parametrize("count", [1, 5])
def test_interim_answers_are_passed_over(drive: Drive, count: int) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * count

    async def case(rig: Rig) -> None:
        assert await rig.exchange() == (200, b"ok")

    drive(case, answering(interim, OK, pause=0.005))


def test_endless_interim_answers_end(drive_pooled: Drive) -> None:
    async def script(link: Link) -> None:
        await link.request()
        while True:
            await link.send(b"HTTP/1.1 102 Processing\r\n\r\n")
            await asyncio.sleep(0)

    async def case(rig: Rig) -> None:
        fault = await rig.fault()
        assert fault.kind == "malformed"
        await rig.links[0].ended.wait()

    drive_pooled(case, script)


def test_an_upgrade_nobody_asked_for_is_malformed(drive_pooled: Drive) -> None:
    head = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"

    async def case(rig: Rig) -> None:
        fault = await rig.fault()
        assert (fault.kind, fault.sent) == ("malformed", "all")

    drive_pooled(case, answering(head))


@pytest.mark.parametrize(
    ("method", "answer", "status"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", 200),
        ("HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", 200),
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        ("GET", b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n", 304),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n", 304),
    ],
)
def test_answers_without_a_body_keep_the_connection(
    drive: Drive, method: str, answer: bytes, status: int
) -> None:
    async def script(link: Link) -> None:
        while True:
            await link.request()
            await link.send(answer)

    async def case(rig: Rig) -> None:
        for _ in range(3):
            assert await rig.exchange(method=method, body=b"", headers=[]) == (status, b"")
        assert len(rig.links) == 1

    drive(case, script)


def test_chunk_extensions_and_trailers_are_not_body(drive: Drive) -> None:
    body = b"3;a=b\r\none\r\n3;c\r\ntwo\r\n0\r\nx-trailer: 1\r\n\r\n"

    async def script(link: Link) -> None:
        while True:
            await link.request()
            for at in range(len(body)):
                await link.send((CHUNKED if at == 0 else b"") + body[at : at + 1])

    async def case(rig: Rig) -> None:
        for _ in range(2):
            assert await rig.exchange() == (200, b"onetwo")
        assert len(rig.links) == 1

    drive(case, script)


def test_the_first_event_arrives_alone(drive: Drive) -> None:
    async def script(link: Link) -> None:
        await link.request()
        await link.send(CHUNKED + b"3\r\none\r\n")
        await first_read.wait()
        await link.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async def case(rig: Rig) -> None:
        answer = await rig.send()
        stream = answer.chunks()
        assert await anext(stream) == b"one"
        first_read.set()
        assert await anext(stream) == b"two"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await answer.close(reuse=True)

    first_read = asyncio.Event()
    drive(case, script)


def test_a_body_without_a_length_ends_with_its_connection(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        for number in range(2):
            assert await rig.exchange() == (200, b"to the end")
            assert len(rig.links) == number + 1

    drive(case, answering(b"HTTP/1.1 200 OK\r\n\r\nto the", b" end", pause=0.005))


def test_connection_close_is_obeyed(drive: Drive) -> None:
    async def script(link: Link) -> None:
        await link.request()
        await link.send(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        await link.gone()

    async def case(rig: Rig) -> None:
        for number in range(2):
            assert await rig.exchange() == (200, b"ok")
            await rig.links[number].ended.wait()

    drive(case, script)


def test_a_64_kilobyte_header_passes(drive: Drive) -> None:
    value = b"v" * 64_000
    answer = OK.replace(b"\r\n\r\n", b"\r\nx-long: " + value + b"\r\n\r\n")

    async def case(rig: Rig) -> None:
        incoming = await rig.send()
        assert dict(incoming.headers)[b"x-long"] == value
        assert await read(incoming) == b"ok"
        await incoming.close(reuse=True)

    drive(case, answering(answer))


@pytest.mark.parametrize(
    "flood",
    [b"x-long: " + b"v" * 200_000 + b"\r\n", b"x: y\r\n" * 100_000, b"x" * 2_000_000],
    ids=["line", "count", "name"],
)
def test_an_endless_head_is_malformed_not_memory(drive: Drive, flood: bytes) -> None:
    async def script(link: Link) -> None:
        await link.request()
        await link.send(b"HTTP/1.1 200 OK\r\n" + flood)
        await link.gone()

    async def case(rig: Rig) -> None:
        assert (await rig.fault()).kind == "malformed"
        await rig.links[0].ended.wait()

    drive(case, script)


# --- broken answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_a_head_cut_at_any_byte_is_a_reset_and_never_repeated(
    drive_pooled: Drive, end: str
) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"

    async def script(link: Link) -> None:
        await link.request()
        await link.send(head[: link.number])
        if end == "reset":
            await asyncio.sleep(0.001)
            link.reset()

    async def case(rig: Rig) -> None:
        for at in range(len(head)):
            fault = await rig.fault()
            assert fault.kind in {"reset", "malformed"}, at
            assert fault.sent == "all"
            assert len(rig.links) == at + 1

    drive_pooled(case, script)


@pytest.mark.parametrize("end", ["fin", "reset"])
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n0123456789",
        CHUNKED + b"5\r\n01234\r\n5;x=y\r\n56789\r\n0\r\nx: y\r\n\r\n",
    ],
    ids=["length", "chunked"],
)
def test_a_body_cut_at_any_byte_is_a_cut_after_all_that_came(
    drive: Drive, answer: bytes, end: str
) -> None:
    start = answer.index(b"\r\n\r\n") + 4

    async def script(link: Link) -> None:
        await link.request()
        await link.send(answer[: start + link.number])
        if end == "reset":
            await asyncio.sleep(0.01)
            link.reset()

    async def case(rig: Rig) -> None:
        for at in range(len(answer) - start):
            incoming = await rig.send()
            got, fault = b"", None
            try:
                async for chunk in incoming.chunks():
                    got += chunk
            except TransportFault as error:
                fault = error
            await incoming.close(reuse=True)
            assert fault is not None, at
            kinds = {"cut", "malformed"} if rig.name == "httpx" else {"cut"}  # h11 says it so
            assert fault.kind in kinds, at
            assert fault.sent == "all"
            assert b"0123456789".startswith(got)
            if end == "fin" and b"chunked" not in answer:
                assert len(got) == at

    drive(case, script)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2x\r\n\r\nok",
    ],
)
def test_an_answer_that_is_not_http_is_malformed(drive_pooled: Drive, answer: bytes) -> None:
    async def script(link: Link) -> None:
        await link.request()
        await link.send(answer)
        await link.gone()

    async def case(rig: Rig) -> None:
        fault = await rig.fault()
        assert fault.kind == "malformed"
        assert fault.sent != "nothing"
        await rig.links[0].ended.wait()

    drive_pooled(case, script)


def test_both_length_headers_are_refused(drive_pooled: Drive) -> None:
    answer = (
        CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 5\r\n\r\n") + b"2\r\nok\r\n0\r\n\r\n"
    )

    async def case(rig: Rig) -> None:
        assert (await rig.fault()).kind == "malformed"

    drive_pooled(case, answering(answer))


@pytest.mark.parametrize("size", [b"zz", b"-1", b"", b"0x3", b"3 3", b"f" * 40])
def test_a_bad_chunk_size_ends_the_body_at_once(drive: Drive, size: bytes) -> None:
    async def script(link: Link) -> None:
        await link.request()
        await link.send(CHUNKED + b"3\r\none\r\n")
        await asyncio.sleep(0.005)
        await link.send(size + b"\r\ntwo\r\n")
        await link.gone()

    async def case(rig: Rig) -> None:
        assert (await rig.fault()).kind in {"malformed", "cut"}
        await rig.links[0].ended.wait()

    drive(case, script)


@pytest.mark.parametrize("late", [False, True], ids=["with", "after"])
@pytest.mark.parametrize(
    "stray", [b"x", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n", OK]
)
def test_bytes_after_the_end_never_become_the_next_answer(
    drive_pooled: Drive, stray: bytes, late: bool
) -> None:
    async def script(link: Link) -> None:
        await link.request()
        if link.number > 0:
            await link.send(OK.replace(b"ok", b"no"))
        elif late:
            await link.send(OK)
            await asyncio.sleep(0.02)
            await link.send(stray)
        else:
            await link.send(OK + stray)
        sent.set()
        await link.gone()

    async def case(rig: Rig) -> None:
        if stray == b"x" and not late and rig.name.startswith("aiohttp"):
            # Both in one read, and the rest is no answer: aiohttp gives up the whole read. Ours
            # takes an answer for as long as it said it was, however the network cuts the bytes.
            assert (await rig.fault()).kind == "malformed"
        else:
            assert await rig.exchange() == (200, b"ok")
        await sent.wait()
        await asyncio.sleep(0.05)  # turns of the loop, in which it is read
        assert await rig.exchange() == (200, b"no")
        await rig.links[0].ended.wait()
        assert len(rig.links[0].requests) == 1

    sent = asyncio.Event()
    drive_pooled(case, script)


def test_slow_heads_and_bodies_arrive_byte_by_byte(drive: Drive) -> None:
    async def script(link: Link) -> None:
        await link.request()
        for at in range(len(OK)):
            await link.send(OK[at : at + 1])
            await asyncio.sleep(0.001)

    async def case(rig: Rig) -> None:
        assert await rig.exchange() == (200, b"ok")

    drive(case, script)


# --- connections ---------------------------------------------------------------------------------


def test_connections_are_reused_one_after_another(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        for _ in range(20):
            assert await rig.exchange() == (200, b"ok")
        assert len(rig.links) == 1

    drive(case, serve_ok)


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_a_connection_closed_while_idle_is_replaced_unseen(drive: Drive, end: str) -> None:
    async def script(link: Link) -> None:
        await link.request()
        await link.send(OK)
        await asyncio.sleep(0.01)
        if end == "reset":
            link.reset()

    async def case(rig: Rig) -> None:
        for number in range(3):
            assert await rig.exchange() == (200, b"ok")
            assert len(rig.links) == number + 1
            await rig.links[number].ended.wait()
            await asyncio.sleep(0.05)  # turns of the loop, in which we hear of it

    drive(case, script)


class Sly:
    """An upstream in a thread: closes while our loop is blocked, so that only the kernel knows."""

    def __init__(self, end: str) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.served: list[int] = []
        self._end = end
        self._idle = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                peer, _ = self.listener.accept()
                with peer:
                    if not peer.recv(65536):
                        continue
                    self.served.append(number)
                    peer.sendall(OK)
                    self._idle.wait(PATIENCE_S)
                    if self._end == "reset":
                        linger = struct.pack("ii", 1, 0)
                        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self._closed.set()

    def close_the_idle_one(self) -> None:
        """Blocks our loop on purpose."""
        self._idle.set()
        assert self._closed.wait(PATIENCE_S)

    def stop(self) -> None:
        self._idle.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._thread.join(PATIENCE_S)


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_an_end_the_loop_has_not_seen_is_seen_before_the_first_byte(
    drive_pooled: Drive, end: str
) -> None:
    async def case(rig: Rig) -> None:
        upstream = Sly(end)
        try:
            assert await rig.exchange(base_url=upstream.url) == (200, b"ok")
            upstream.close_the_idle_one()
            assert await rig.exchange(base_url=upstream.url) == (200, b"ok")
            assert upstream.served == [0, 1]
        finally:
            upstream.stop()

    drive_pooled(case)


@pytest.mark.parametrize("end", ["fin", "reset"])
def test_an_end_that_slips_past_the_check_is_repeated_only_if_nothing_left(
    drive_pooled: Drive, end: str
) -> None:
    async def case(rig: Rig) -> None:
        upstream = Sly(end)
        try:
            assert await rig.exchange(base_url=upstream.url) == (200, b"ok")
            upstream.close_the_idle_one()
            if end == "reset":
                # The kernel knows the reset, so the first write fails: provably nothing left.
                assert await rig.exchange(base_url=upstream.url) == (200, b"ok")
                assert upstream.served == [0, 1]
            else:
                # A write after a FIN is accepted: nobody can prove that it was never read.
                fault = await rig.fault(base_url=upstream.url)
                assert (fault.kind, fault.sent) == ("reset", "all")
                assert upstream.served == [0]
        finally:
            upstream.stop()

    drive_pooled(case, settings={"probe": lambda _: False})


def test_a_post_cut_on_a_fresh_connection_is_never_repeated(drive: Drive) -> None:
    async def script(link: Link) -> None:
        await link.request()

    async def case(rig: Rig) -> None:
        fault = await rig.fault()
        assert (fault.kind, fault.sent) == ("reset", "all")
        assert len(rig.links) == 1

    drive(case, script)


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_request_that_met_a_reset_on_reuse_is_reported_not_repeated(
    drive: Drive, method: str
) -> None:
    async def script(link: Link) -> None:
        await link.request()
        await link.send(OK)
        await link.request()
        link.reset()

    async def case(rig: Rig) -> None:
        assert await rig.exchange(method=method) == (200, b"ok")
        fault = await rig.fault(method=method)
        assert fault.kind == "reset"
        assert fault.sent != "nothing"
        assert len(rig.links) == 1
        assert len(rig.links[0].requests) == 2

    drive(case, script)


def test_an_answer_before_the_upload_ends_is_delivered(drive_pooled: Drive) -> None:
    asked = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b"x" * 65536
            await asyncio.sleep(0)

    async def script(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        await link.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        await link.gone()

    async def case(rig: Rig) -> None:
        assert await rig.exchange(body=b"", upload=endless()) == (413, b"big")
        before = asked
        await rig.links[0].ended.wait()
        assert asked == before
        # Half a request was written: the connection must not serve another.
        assert await rig.exchange(body=b"", upload=endless()) == (413, b"big")
        assert len(rig.links) == 2

    drive_pooled(case, script)


def test_an_upstream_that_stops_reading_slows_the_upload_down(drive: Drive) -> None:
    given = 0

    async def upload() -> AsyncIterator[bytes]:
        nonlocal given
        while given < 400:
            given += 1
            yield b"x" * 65536
            await asyncio.sleep(0)

    async def script(link: Link) -> None:
        link.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await link.reader.readuntil(b"\r\n\r\n")
        link.writer.transport.pause_reading()
        await stop.wait()
        link.reset()

    async def case(rig: Rig) -> None:
        task = asyncio.create_task(rig.fault(body=b"", upload=upload()))
        last = -1
        while given != last:
            last = given
            await asyncio.sleep(0.15)
        assert given < 200  # the rest of 25 MB waits for the upstream
        stop.set()
        fault = await task
        assert fault.sent == "unknown"

    stop = asyncio.Event()
    drive(case, script)


def test_leaving_an_upload_that_nobody_reads_does_not_wait_for_it(drive_pooled: Drive) -> None:
    """A graceful close would keep the socket until the upstream has read what is buffered."""

    async def script(link: Link) -> None:
        link.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await link.reader.readuntil(b"\r\n\r\n")
        link.writer.transport.pause_reading()
        paused.set()
        await stop.wait()
        link.reset()

    async def case(rig: Rig) -> None:
        task = asyncio.create_task(rig.send(body=b"x" * 8_000_000))
        await paused.wait()
        await asyncio.sleep(0.2)  # the kernel takes what it takes
        before = sockets()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: sockets() == before - 1)
        stop.set()

    def sockets() -> int:
        links = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
        return sum(str(link).startswith("socket:") for link in links)

    paused, stop = asyncio.Event(), asyncio.Event()
    drive_pooled(case, script)


def test_a_half_closed_upstream_still_answers(drive: Drive) -> None:
    async def script(link: Link) -> None:
        await link.request()
        link.writer.write(OK)
        link.writer.write_eof()
        await link.gone()

    async def case(rig: Rig) -> None:
        for number in range(2):
            assert await rig.exchange() == (200, b"ok")
            await rig.links[number].ended.wait()

    drive(case, script)


def test_idle_connections_end_before_the_upstreams_own_limit(drive_pooled: Drive) -> None:
    async def case(rig: Rig) -> None:
        assert await rig.exchange() == (200, b"ok")
        await asyncio.sleep(0.25)
        assert await rig.exchange() == (200, b"ok")
        assert len(rig.links) == 2
        await rig.links[0].ended.wait()

    drive_pooled(case, serve_ok, settings={"idle": 200_000})


def test_small_writes_do_not_wait_for_nagle(drive_pooled: Drive) -> None:
    async def case(rig: Rig) -> None:
        answer: Any = await rig.send()
        wire = answer._channel._transport if "http1" in rig.name else answer._handler.transport
        sock = wire.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        await read(answer)
        await answer.close(reuse=True)

    drive_pooled(case, serve_ok)


def test_one_dead_upstream_does_not_slow_another(drive: Drive) -> None:
    async def script(link: Link) -> None:
        request = await link.request()
        if b"/dead" in request.head:
            await link.gone()
        else:
            await link.send(OK)

    async def case(rig: Rig) -> None:
        dead = [asyncio.create_task(rig.send(base_url=rig.base_url + "/dead")) for _ in range(200)]
        await asyncio.sleep(0.1)
        async with Turns() as since:
            assert await rig.exchange() == (200, b"ok")
            assert since.seconds < 3
        for task in dead:
            task.cancel()
        await asyncio.gather(*dead, return_exceptions=True)

    drive(case, script)


def test_a_retired_pool_closes_with_its_last_exchange(drive_pooled: Drive) -> None:
    async def case(rig: Rig) -> None:
        assert isinstance(rig.transport, PooledTransport)
        assert await rig.exchange() == (200, b"ok")
        answer = await rig.send()
        await rig.transport.keep([])
        assert rig.transport.in_flight() == {}
        assert await read(answer) == b"ok"
        await answer.close(reuse=True)
        await rig.links[0].ended.wait()
        assert await rig.exchange() == (200, b"ok")
        await rig.transport.keep([rig.base_url])
        assert await rig.exchange() == (200, b"ok")
        assert len(rig.links) == 2
        await rig.transport.keep([])
        await rig.links[1].ended.wait()

    drive_pooled(case, serve_ok)


# --- no connection -------------------------------------------------------------------------------


def test_a_refused_connection_sent_nothing(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            fault = await rig.fault(base_url=f"http://127.0.0.1:{port}")
        assert (fault.kind, fault.sent) == ("connect", "nothing")

    drive(case)


def test_an_unresolvable_host_sent_nothing(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        fault = await rig.fault(base_url="http://nowhere.invalid:1")
        assert (fault.kind, fault.sent) == ("resolve", "nothing")

    drive(case)


def test_tls_towards_a_plain_server_fails_as_tls(drive: Drive) -> None:
    async def script(link: Link) -> None:
        await link.reader.read(1)
        await link.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await link.gone()

    async def case(rig: Rig) -> None:
        fault = await rig.fault(base_url=rig.base_url.replace("http://", "https://"))
        assert (fault.kind, fault.sent) == ("tls", "nothing")

    drive(case, script)


def test_a_listener_that_never_accepts_meets_the_connect_deadline(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            with contextlib.ExitStack() as stack:
                for _ in range(3):  # fill the backlog, so that the next SYN is not answered
                    filler = stack.enter_context(socket.socket())
                    filler.setblocking(False)
                    filler.connect_ex(address)
                fault = await rig.fault(base_url=f"http://127.0.0.1:{address[1]}", connect=200_000)
        assert (fault.kind, fault.sent) == ("connect_timeout", "nothing")

    drive(case)


def test_a_tls_handshake_that_stalls_meets_the_connect_deadline(drive: Drive) -> None:
    async def script(link: Link) -> None:
        await link.gone()

    async def case(rig: Rig) -> None:
        url = rig.base_url.replace("http://", "https://")
        fault = await rig.fault(base_url=url, connect=1_000_000)
        assert (fault.kind, fault.sent) == ("connect_timeout", "nothing")
        await until(lambda: rig.links)
        await rig.links[0].ended.wait()

    drive(case, script)


@pytest.mark.parametrize(
    "base_url",
    ["", "ftp://host", "http://", "//host", "http://user:pass@host", "http://host?x=1", "h\0://x"],
)
def test_a_base_url_that_is_none_sent_nothing_and_names_no_secret(
    drive_pooled: Drive, base_url: str
) -> None:
    async def case(rig: Rig) -> None:
        fault = await rig.fault(base_url=base_url)
        assert (fault.kind, fault.sent) == ("connect", "nothing")
        assert "pass" not in str(fault)

    drive_pooled(case)


def test_a_closed_transport_sends_nothing(drive_pooled: Drive) -> None:
    async def case(rig: Rig) -> None:
        await rig.exchange()
        await rig.transport.close()
        await rig.transport.close()
        fault = await rig.fault()
        assert (fault.kind, fault.sent) == ("connect", "nothing")

    drive_pooled(case, serve_ok)


class Resolver:
    """Answers for every name, when told to; on asyncio, where a loop can be taught."""

    def __init__(self, *ports: int) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self._ports = ports
        loop: Any = asyncio.get_running_loop()
        loop.getaddrinfo = self

    async def __call__(self, host: str, port: int, **_: Any) -> list[Any]:
        await self.gate.wait()
        stream = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*stream, ("127.0.0.1", one)) for one in self._ports or (port,)]


def test_a_dead_address_is_passed_over_for_the_next() -> None:
    async def case(rig: Rig) -> None:
        port = int(rig.base_url.rpartition(":")[2])
        with socket.socket() as full, socket.socket() as refusing, contextlib.ExitStack() as stack:
            refusing.bind(("127.0.0.1", 0))
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(3):  # fill the backlog, so that the next SYN is not answered
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            dead = [one.getsockname()[1] for one in (full, refusing)]
            Resolver(*dead, port)
            for _ in range(3):  # whichever of them has its turn first
                answer = await rig.send(base_url=f"http://many.test:{port}")
                assert await read(answer) == b"ok"
                await answer.close(reuse=False)
        assert len(rig.links) == 3

    run("http1", case, serve_ok)


def test_a_transport_that_closes_while_it_dials_sends_nothing_and_keeps_nothing() -> None:
    async def case(rig: Rig) -> None:
        resolver = Resolver()
        resolver.gate.clear()
        sending = asyncio.create_task(rig.fault())
        await asyncio.sleep(0.01)
        await rig.transport.close()
        resolver.gate.set()
        fault = await sending
        assert (fault.kind, fault.sent) == ("connect", "nothing")
        await rig.links[0].ended.wait()
        assert not rig.links[0].requests

    run("http1", case, serve_ok)


def test_a_dial_that_is_given_up_at_any_await_leaves_nothing(drive_pooled: Drive) -> None:
    """Cancel after n turns of the loop, with a new connection each time."""

    async def case(rig: Rig) -> None:
        finished = 0
        for turns in itertools.count():
            task = asyncio.create_task(rig.send())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close(reuse=False)
                finished += 1
            assert isinstance(rig.transport, PooledTransport)
            assert not any(rig.transport.in_flight().values())
            assert ours() == {asyncio.current_task()}
            if finished == 3:
                break
        await ended_within(2, rig.links)

    drive_pooled(case, serve_ok)


# --- leaving early -------------------------------------------------------------------------------


async def ended_within(seconds: float, links: list[Link]) -> None:
    """All of them have, in that time."""
    async with Turns() as since:
        for link in links:
            await link.ended.wait()
        assert since.seconds < seconds


async def endless_stream(link: Link) -> None:
    await link.request()
    await link.send(CHUNKED)
    while True:
        await link.send(b"5\r\nevent\r\n")
        await asyncio.sleep(0.001)


def test_close_without_reuse_is_seen_upstream_at_once(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        answer = await rig.send()
        await anext(answer.chunks())
        await answer.close(reuse=False)
        await ended_within(1, rig.links[:1])
        await answer.close(reuse=True)

    drive(case, endless_stream)


def test_an_unread_body_is_not_reused(drive: Drive) -> None:
    async def case(rig: Rig) -> None:
        answer = await rig.send()
        await answer.close(reuse=True)
        await ended_within(1, rig.links[:1])

    drive(case, endless_stream)


def test_abort_wakes_a_reader_with_its_reason(drive_pooled: Drive) -> None:
    async def script(link: Link) -> None:
        await link.request()
        await link.send(CHUNKED + b"3\r\none\r\n")
        await link.gone()

    async def case(rig: Rig) -> None:
        answer = await rig.send()
        stream = answer.chunks()
        assert await anext(stream) == b"one"
        asyncio.get_running_loop().call_later(0.02, answer.abort, "idle")
        for _ in range(2):
            with pytest.raises(TransportFault) as caught:
                await anext(stream)
            assert caught.value.kind == "idle"
        await rig.links[0].ended.wait()
        await answer.close(reuse=True)

    drive_pooled(case, script)


@pytest.mark.parametrize("kind", ["small", "large", "upload"])
def test_a_cancel_at_any_await_leaves_nothing(drive_pooled: Drive, kind: str) -> None:
    """Cancel after n turns of the loop, for every n until the exchange ends by itself."""

    async def case(rig: Rig) -> None:
        finished = 0
        for turns in itertools.count():
            body: dict[str, Any] = {"body": b"x" * 500_000} if kind == "large" else {}
            if kind == "upload":
                body = {"body": b"", "upload": pieces(b"a" * 70_000, b"b" * 70_000)}
            task = asyncio.create_task(rig.exchange(**body))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert await task == (200, b"ok")
                finished += 1
            assert isinstance(rig.transport, PooledTransport)
            assert not any(rig.transport.in_flight().values())
            assert ours() == {asyncio.current_task()}
            if finished == 3:
                break
        assert turns > 3

    drive_pooled(case, serve_ok)


def test_a_thousand_aborts_leave_no_connection_and_no_task(drive_pooled: Drive) -> None:
    async def case(rig: Rig) -> None:
        async def one(number: int) -> None:
            if number % 3 == 0:
                task = asyncio.create_task(rig.send())
                await asyncio.sleep(0.0005 * (number % 7))
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await task).close(reuse=False)
                return
            answer = await rig.send()
            await anext(answer.chunks())
            if number % 3 == 1:
                answer.abort("idle")
            await answer.close(reuse=False)

        for start in range(0, 1000, 50):
            await asyncio.gather(*(one(number) for number in range(start, start + 50)))
        assert isinstance(rig.transport, PooledTransport)
        assert not any(rig.transport.in_flight().values())
        await ended_within(2, rig.links)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    drive_pooled(case, endless_stream)


@pytest.mark.parametrize("pausing", [False, True])
def test_a_body_passed_on_arrives_whole_however_often_it_is_paused(
    drive: Drive, pausing: bool
) -> None:
    total = 2 * 1024 * 1024

    async def script(link: Link) -> None:
        while True:
            await link.request()
            await link.send(CHUNKED)
            for _ in range(total // 65536):
                await link.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await link.send(b"0\r\n\r\n")

    async def case(rig: Rig) -> None:
        for _ in range(2):
            got = pauses = 0

            def take(chunk: bytes) -> bool:
                nonlocal got
                got += len(chunk)
                return not pausing

            answer = await rig.send()
            while not await answer.pass_to(take):
                pauses += 1
                await asyncio.sleep(0.001)
            assert got == total
            assert bool(pauses) == pausing
            await answer.close(reuse=True)
        assert len(rig.links) == 1

    drive(case, script)


def test_a_body_that_breaks_while_it_is_passed_on_is_a_cut_after_all_that_came(
    drive: Drive,
) -> None:
    async def case(rig: Rig) -> None:
        answer, got = await rig.send(), []
        with pytest.raises(TransportFault) as caught:
            await answer.pass_to(lambda chunk: got.append(chunk) is None)
        assert caught.value.kind in ({"cut", "malformed"} if rig.name == "httpx" else {"cut"})
        assert b"".join(got) == b"onetwo"
        await answer.close(reuse=True)

    pieces = [CHUNKED + b"3\r\none\r\n", b"3\r\ntwo\r\n", b"9\r\n"]
    drive(case, answering(*pieces, pause=0.01))


def test_a_slow_reader_holds_128_kilobytes_at_most(drive_pooled: Drive) -> None:
    total = 8 * 1024 * 1024

    async def script(link: Link) -> None:
        await link.request()
        await link.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for _ in range(total // 65536):
            await link.send(b"x" * 65536)

    async def case(rig: Rig) -> None:
        answer: Any = await rig.send()
        got = 0
        most = 0
        async for chunk in answer.chunks():
            got += len(chunk)
            await asyncio.sleep(0.002)
            held = answer._channel.held if "http1" in rig.name else answer._body._size
            most = max(most, len(chunk), held)
        assert got == total
        assert 64 * 1024 <= most <= 128 * 1024
        await answer.close(reuse=True)

    drive_pooled(case, script)


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server with a certificate for localhost, and of a client that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(private + certificate)
        file.flush()
        server.load_cert_chain(file.name)
    return server, ssl.create_default_context(cadata=certificate.decode())


def test_an_untrusted_certificate_sent_nothing(
    drive: Drive, authority: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async def script(link: Link) -> None:
        await link.gone()

    async def case(rig: Rig) -> None:
        fault = await rig.fault()
        assert (fault.kind, fault.sent) == ("tls", "nothing")

    drive(case, script, tls=authority[0])


def test_tls_exchanges_reuse_their_connection_and_close_at_once(
    drive_pooled: Drive, authority: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    server, client = authority
    body = b"x" * 2_000_000

    async def script(link: Link) -> None:
        await link.request()
        await link.send(OK)
        await link.request()
        await link.send(CHUNKED)
        while True:
            await link.send(b"4000\r\n" + b"y" * 0x4000 + b"\r\n")

    async def case(rig: Rig) -> None:
        assert await rig.exchange(body=body) == (200, b"ok")
        assert rig.links[0].requests[0].body == body
        answer = await rig.send()
        assert (await anext(answer.chunks())).startswith(b"y")
        await asyncio.sleep(0.05)  # the upstream fills every buffer and waits
        await answer.close(reuse=False)
        await ended_within(1, rig.links[:1])
        assert len(rig.links) == 1

    drive_pooled(case, script, tls=server, settings={"tls": client})
