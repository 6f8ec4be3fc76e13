"""An exchange on a connection without a socket: what a fault says had left."""

from __future__ import annotations

import asyncio

import pytest

from gateway import upstream_aiohttp as upstream
from gateway.upstream import Outgoing, TransportFault

OUT = Outgoing(method="POST", base_url="http://h", target=b"/x", headers=[], body=b"{}")
HEAD = b"POST /x HTTP/1.1\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n"


class Wire(asyncio.Transport):
    """A connection that records, and may die at its first write."""

    def __init__(self, *, dies=False, closing=False):
        super().__init__()
        self.written = b""
        self.closing = closing
        self.dies = dies

    def write(self, data):
        self.written += b"" if self.dies else data
        self.closing = self.closing or self.dies

    def is_closing(self):
        return self.closing

    def abort(self):
        self.closing = True

    close = abort

    def pause_reading(self):
        pass

    resume_reading = pause_reading


class Pooled:
    """What the pool hands out with a connection."""

    def __init__(self):
        self.state = "in use"

    def close(self):
        self.state = "closed"

    def release(self):
        self.state = "released"


class Counter:
    in_use = 1

    async def settle(self):
        pass


def started(**wire):
    handler = upstream._Handler(asyncio.get_running_loop())
    transport = Wire(**wire)
    handler.connection_made(transport)
    pooled = Pooled()
    return upstream._Exchange(Counter(), pooled, handler), handler, transport, pooled


@pytest.mark.parametrize("wire", [{"closing": True}, {"dies": True}])
def test_a_connection_that_took_no_byte_sent_nothing(wire):
    async def main():
        exchange, _, transport, pooled = started(**wire)
        with pytest.raises(TransportFault) as caught:
            await exchange.run(OUT, HEAD)
        assert caught.value.sent == "nothing"
        assert transport.written == b""
        assert pooled.state == "closed"
        assert exchange._upstream.in_use == 0

    asyncio.run(main())


def test_a_connection_lost_after_the_write_sent_all():
    async def main():
        exchange, handler, transport, pooled = started()
        task = asyncio.ensure_future(exchange.run(OUT, HEAD))
        await asyncio.sleep(0)
        assert transport.written == HEAD + b"{}"
        handler.connection_lost(None)
        with pytest.raises(TransportFault) as caught:
            await task
        assert (caught.value.kind, caught.value.sent) == ("reset", "all")
        assert pooled.state == "closed"

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 3])
def test_a_parse_error_in_a_body_wakes_its_reader_whenever_it_comes(turns):
    """aiohttp tells its protocol, not the body: without care the reader waits for ever."""

    async def main():
        exchange, handler, _, pooled = started()
        task = asyncio.ensure_future(exchange.run(OUT, HEAD))
        await asyncio.sleep(0)
        handler.data_received(CHUNKED)
        for _ in range(turns):
            await asyncio.sleep(0)
        handler.data_received(b"zz\r\n")
        await task
        assert await anext(exchange) == b"one"
        with pytest.raises(TransportFault) as caught:
            await anext(exchange)
        assert caught.value.kind == "malformed"
        await exchange.close(reuse=True)
        assert pooled.state == "closed"

    asyncio.run(main())


def test_a_whole_body_releases_and_a_second_close_does_nothing():
    async def main():
        exchange, handler, _, pooled = started()
        task = asyncio.ensure_future(exchange.run(OUT, HEAD))
        await asyncio.sleep(0)
        handler.data_received(b"HTTP/1.1 200 OK\r\nX-A: 1\r\ncontent-length: 2\r\n\r\nok")
        await task
        assert (exchange.status, exchange.headers[0]) == (200, (b"x-a", b"1"))
        assert [chunk async for chunk in exchange.chunks()] == [b"ok"]
        await exchange.close(reuse=True)
        await exchange.close(reuse=False)
        assert pooled.state == "released"
        assert exchange._upstream.in_use == 0

    asyncio.run(main())


def test_an_abort_after_the_body_has_arrived_still_fails_the_reader():
    async def main():
        exchange, handler, _, pooled = started()
        task = asyncio.ensure_future(exchange.run(OUT, HEAD))
        await asyncio.sleep(0)
        handler.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await task
        exchange.abort("total")
        with pytest.raises(TransportFault) as caught:
            await anext(exchange)
        assert caught.value.kind == "total"
        assert pooled.state == "closed"

    asyncio.run(main())
