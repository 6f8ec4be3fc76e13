"""A stream through our own client, relay and connection, on real sockets: nothing stands between.

The upstream is scripted, the client raw; the pipeline in between is one call of the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
from collections import deque

import pytest

from gateway.call import Reply
from gateway.clock import LoopClock
from gateway.http1.transport import Http1Transport
from gateway.opening import Relayed
from gateway.units import MICRO
from gateway.upstream import Outgoing
from gateway.wire.openai_chat import WithoutUsage
from tests.fixtures.asgi import CHAT_STREAM
from tests.fixtures.fake_service import SSE
from tests.fixtures.waiting import Turns
from tests.integration.test_edge_raw import parse, post, serve

pytestmark = pytest.mark.integration

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Upstream:
    """Sends `pieces`, each a chunk, and an end if `whole`; counts what the network took."""

    def __init__(self, pieces: list[bytes], *, whole: bool = True) -> None:
        self._pieces = pieces
        self._whole = whole
        self.taken = 0
        self.gone = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(ConnectionError):
            writer.write(HEAD)
            for piece in self._pieces:
                writer.write(framed(piece))
                await writer.drain()
                self.taken += len(piece)
            if self._whole:
                writer.write(b"0\r\n\r\n")
                await reader.read()
        writer.close()
        self.gone.set()


@contextlib.asynccontextmanager
async def through(upstream: Upstream, *, edit: bool = False):
    """The port of an edge in front of it, its transport, and the served edge."""
    clock = LoopClock()
    transport = Http1Transport(clock)
    server = await asyncio.start_server(upstream, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def service(_call) -> Reply:
        out = Outgoing(method="POST", base_url=url, target=b"/", headers=[], body=b"{}")
        incoming = await transport.send(out)
        rest = incoming.chunks()
        until = clock.now() + 60 * MICRO
        source = Relayed(incoming, deque(), rest, clock=clock, idle=5 * MICRO, until=until)
        reply = Reply(status=200, headers=list(SSE), source=source)
        reply.taps.append(source.touched)
        reply.edit = WithoutUsage() if edit else None
        return reply

    async with serve("httptools") as served:
        served.edge._service = service
        try:
            yield served, transport
        finally:
            await transport.close()
            server.close()


def events(count: int, rng: random.Random) -> list[bytes]:
    return [
        b'data: {"n":%d,"x":"%b"}\n\n'
        % (number, rng.randbytes(rng.randrange(1, 9000)).hex().encode())
        for number in range(count)
    ]


def connect(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


@pytest.mark.parametrize("edit", [False, True])
def test_a_slow_reader_holds_the_upstream_back_and_gets_every_byte(edit: bool) -> None:
    pieces = events(4000, random.Random(7))
    wanted = b"".join(pieces)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        upstream = Upstream(pieces)
        async with through(upstream, edit=edit) as (served, transport):
            sock = connect(served.port)
            await loop.sock_sendall(sock, post(CHAT_STREAM))
            last = -1
            while upstream.taken != last:
                last = upstream.taken
                await asyncio.sleep(0.3)
            assert upstream.taken < len(wanted) // 2  # the kernel's buffers and ours
            raw = bytearray()
            while not raw.endswith(b"\r\n0\r\n\r\n"):
                raw += await loop.sock_recv(sock, 65536)
            got = parse(bytes(raw), "open")
            assert hashlib.sha256(got.body).digest() == hashlib.sha256(wanted).digest()
            sock.close()
            await served.settled()
            assert not any(transport.in_flight().values())

    asyncio.run(main())


def test_a_client_that_leaves_ends_the_upstream_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        upstream = Upstream(events(100_000, random.Random(8)))
        async with through(upstream) as (served, transport):
            sock = connect(served.port)
            await loop.sock_sendall(sock, post(CHAT_STREAM))
            await loop.sock_recv(sock, 1000)
            sock.close()
            async with Turns() as since:
                await upstream.gone.wait()
                assert since.seconds < 1
            await served.settled()
            assert not any(transport.in_flight().values())

    asyncio.run(main())


def test_an_upstream_that_breaks_off_never_looks_whole() -> None:
    pieces = events(20, random.Random(9))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with through(Upstream(pieces, whole=False)) as (served, transport):
            sock = connect(served.port)
            await loop.sock_sendall(sock, post(CHAT_STREAM))
            raw = b""
            while data := await loop.sock_recv(sock, 65536):
                raw += data
            got = parse(raw, "closed")
            assert got.end == "broken"
            assert got.body.startswith(b"".join(pieces))
            sock.close()
            await served.settled()
            assert not any(transport.in_flight().values())

    asyncio.run(main())
