"""Our own client on a connection without a socket: framing, bounds, pace, and what had left."""

from __future__ import annotations

import asyncio

import pytest

from gateway.clock import LoopClock
from gateway.http1.channel import MOST_HEAD, Channel
from gateway.http1.dial import Trust, origin_of
from gateway.http1.exchange import Exchange
from gateway.http1.pool import Pool
from gateway.upstream import BUFFERED, READ, Outgoing, TransportFault

OUT = Outgoing(method="POST", base_url="http://h", target=b"/x", headers=[], body=b"{}")
ASK = b"POST /x HTTP/1.1\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\n"
SIZED = HEAD + b"content-length: 2\r\n\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """A connection that records, and may die at its first write."""

    def __init__(self, *, dies=False, closing=False):
        super().__init__()
        self.written = b""
        self.closing = closing
        self.dies = dies
        self.reading = True

    def write(self, data):
        self.written += b"" if self.dies else data
        self.closing = self.closing or self.dies

    def is_closing(self):
        return self.closing

    def abort(self):
        self.closing = True

    def get_extra_info(self, name, default=None):
        return default

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True


class Bench:
    """One channel in use, its exchange and its pool; bytes are fed by hand."""

    def __init__(self, **wire):
        loop = asyncio.get_running_loop()
        self.buffer = memoryview(bytearray(READ))
        self.pool = Pool(
            origin_of("http://h"), clock=LoopClock(), idle_for=1_000_000, trust=Trust(None),
            probe=lambda _: False, buffer=self.buffer,
        )  # fmt: skip
        self.lost = []
        self.wire = Wire(**wire)
        self.channel = Channel(loop, self.buffer, self.lost.append)
        self.channel.connection_made(self.wire)
        self.again()

    def again(self):
        """The next exchange on the same channel."""
        self.pool.in_use += 1
        self.exchange = Exchange(self.pool, self.channel)

    def feed(self, data):
        """Reads of at most one buffer."""
        for at in range(0, len(data), READ):
            piece = data[at : at + READ]
            self.channel.get_buffer(-1)[: len(piece)] = piece
            self.channel.buffer_updated(len(piece))

    async def answered(self, *reads, out=OUT):
        """The exchange after these reads, its head here."""
        task = asyncio.ensure_future(self.exchange.run(out, ASK))
        await asyncio.sleep(0)
        for data in reads:
            self.feed(data)
        await task
        return self.exchange

    async def fault(self, *reads, out=OUT):
        async def whole():
            await read(await self.answered(*reads, out=out))

        with pytest.raises(TransportFault) as caught:
            await whole()
        return caught.value

    @property
    def idle(self):
        return list(self.pool._idle)


def run(case, **wire):
    async def main():
        await case(Bench(**wire))

    asyncio.run(main())


async def read(exchange):
    return [chunk async for chunk in exchange.chunks()]


# --- what had left --------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [{"closing": True}, {"dies": True}])
def test_a_connection_that_took_no_byte_sent_nothing(wire):
    async def case(bench):
        fault = await bench.fault()
        assert (fault.kind, fault.sent) == ("reset", "nothing")
        assert bench.wire.written == b""
        assert bench.wire.closing
        assert bench.pool.in_use == 0

    run(case, **wire)


def test_a_connection_lost_after_the_write_sent_all():
    async def case(bench):
        task = asyncio.ensure_future(bench.exchange.run(OUT, ASK))
        await asyncio.sleep(0)
        assert bench.wire.written == ASK + b"{}"
        bench.channel.connection_lost(None)
        with pytest.raises(TransportFault) as caught:
            await task
        assert (caught.value.kind, caught.value.sent) == ("reset", "all")
        assert bench.lost == [bench.channel]

    run(case)


def test_an_upload_waits_while_the_upstream_takes_nothing():
    async def upload():
        for _ in range(3):
            yield b"abc"

    async def case(bench):
        out = Outgoing(
            method="POST", base_url="http://h", target=b"/x", headers=[], upload=upload()
        )
        bench.channel.pause_writing()
        task = asyncio.ensure_future(bench.exchange.run(out, ASK))
        for _ in range(5):
            await asyncio.sleep(0)
        assert bench.wire.written == ASK + b"3\r\nabc\r\n"
        bench.channel.resume_writing()
        for _ in range(5):
            await asyncio.sleep(0)
        assert bench.wire.written == ASK + b"3\r\nabc\r\n" * 3 + b"0\r\n\r\n"
        bench.feed(SIZED + b"ok")
        await task
        await read(bench.exchange)
        await bench.exchange.close(reuse=True)
        assert bench.idle == [bench.channel]

    run(case)


def test_a_channel_with_half_a_request_in_it_serves_no_other():
    async def upload():
        yield b"abc"
        await asyncio.Event().wait()

    async def case(bench):
        out = Outgoing(
            method="POST", base_url="http://h", target=b"/x", headers=[], upload=upload()
        )
        task = asyncio.ensure_future(bench.exchange.run(out, ASK))
        for _ in range(5):
            await asyncio.sleep(0)
        bench.feed(SIZED + b"no")
        await task
        assert await read(bench.exchange) == [b"no"]
        await bench.exchange.close(reuse=True)
        assert bench.idle == []
        assert bench.wire.closing

    run(case)


# --- where an answer ends -------------------------------------------------------------------------


def test_a_whole_body_keeps_the_channel_and_a_second_close_does_nothing():
    async def case(bench):
        exchange = await bench.answered(HEAD + b"X-A: 1\r\ncontent-length: 2\r\n\r\nok")
        assert (exchange.status, exchange.headers[0]) == (200, (b"x-a", b"1"))
        assert exchange.whole
        assert await read(exchange) == [b"ok"]
        await exchange.close(reuse=True)
        await exchange.close(reuse=False)
        assert bench.idle == [bench.channel]
        assert bench.pool.in_use == 0
        assert await read(exchange) == []

    run(case)


@pytest.mark.parametrize("stray", [b"x", SIZED + b"no", b"HTTP/1.1 408 x\r\n\r\n"])
@pytest.mark.parametrize("together", [True, False])
def test_bytes_behind_the_end_end_the_channel_and_not_the_answer(stray, together):
    async def case(bench):
        rest = SIZED + b"ok"
        exchange = await bench.answered(*([rest + stray] if together else [rest, stray]))
        assert await read(exchange) == [b"ok"]
        await exchange.close(reuse=True)
        assert bench.idle == []
        assert bench.wire.closing

    run(case)


def test_bytes_between_exchanges_end_the_channel():
    async def case(bench):
        exchange = await bench.answered(SIZED + b"ok")
        await read(exchange)
        await exchange.close(reuse=True)
        bench.feed(SIZED + b"no")
        assert bench.wire.closing
        assert bench.pool.idle() is None

    run(case)


def test_a_body_in_answer_to_head_is_none_and_ends_the_channel():
    async def case(bench):
        out = Outgoing(method="HEAD", base_url="http://h", target=b"/x", headers=[])
        exchange = await bench.answered(SIZED, out=out)
        assert exchange.whole
        assert await read(exchange) == []
        await exchange.close(reuse=True)
        assert bench.idle == [bench.channel]
        bench.pool.idle()
        bench.pool.in_use -= 1
        bench.again()
        exchange = await bench.answered(SIZED + b"ok", out=out)
        assert await read(exchange) == []
        await exchange.close(reuse=True)
        assert bench.idle == []

    run(case)


@pytest.mark.parametrize(("exc", "kind"), [(None, None), (ConnectionResetError("x"), "cut")])
def test_a_body_without_framing_ends_with_a_clean_end_only(exc, kind):
    async def case(bench):
        exchange = await bench.answered(HEAD + b"\r\nsome")
        bench.feed(b" more")
        bench.channel.connection_lost(exc)
        assert await anext(exchange) == b"some more"
        if kind is None:
            assert await read(exchange) == []
        else:
            with pytest.raises(TransportFault) as caught:
                await anext(exchange)
            assert caught.value.kind == kind
        await exchange.close(reuse=True)
        assert bench.idle == []

    run(case)


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip", b"identity", b"chunked, chunked"])
def test_a_transfer_coding_that_we_cannot_undo_is_malformed(coding):
    async def case(bench):
        fault = await bench.fault(HEAD + b"transfer-encoding: " + coding + b"\r\n\r\n2\r\nok\r\n")
        assert fault.kind == "malformed"

    run(case)


@pytest.mark.parametrize("turns", [0, 3])
def test_a_parse_error_in_a_body_comes_after_all_that_came_before_it(turns):
    async def case(bench):
        task = asyncio.ensure_future(bench.exchange.run(OUT, ASK))
        await asyncio.sleep(0)
        bench.feed(CHUNKED + b"3\r\none\r\n")
        for _ in range(turns):
            await asyncio.sleep(0)
        bench.feed(b"zz\r\n")
        await task
        assert await anext(bench.exchange) == b"one"
        with pytest.raises(TransportFault) as caught:
            await anext(bench.exchange)
        assert (caught.value.kind, caught.value.sent) == ("malformed", "all")
        await bench.exchange.close(reuse=True)
        assert bench.idle == []

    run(case)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reads", "why"),
    [
        ([HEAD + b"a: b\r\n" * 300 + b"\r\n"], "too many headers"),
        ([HEAD + b"x: " + b"y" * 65_600 + b"\r\n\r\n"], "too long"),
        ([HEAD, b"x: " + b"y" * (MOST_HEAD + READ)], "too many bytes"),
        ([b"HTTP/1.1 102 P\r\n\r\n" * 33], "no final answer"),
        ([b"HTTP/1.1 101 S\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"], "no final answer"),
        ([b"HTTP/1.1 099 S\r\n\r\n"], ""),
        ([CHUNKED, b"2;" + b"x" * (MOST_HEAD + READ)], "without a body"),
        ([CHUNKED + b"0\r\n", b"x: " + b"y" * (MOST_HEAD + READ)], "without a body"),
        ([CHUNKED + b"0\r\n", b"x: y\r\n" * (MOST_HEAD // 4)], "without a body"),
    ],
    ids=[
        "count",
        "line",
        "head",
        "interim",
        "upgrade",
        "status",
        "extension",
        "trailer",
        "trailers",
    ],
)
def test_nothing_that_is_no_body_grows_without_a_bound(reads, why):
    async def case(bench):
        fault = await bench.fault(*reads)
        assert fault.kind == "malformed"
        assert why in fault.detail
        assert "yyy" not in fault.detail
        assert bench.wire.closing

    run(case)


def test_interim_answers_are_passed_over_and_their_headers_forgotten():
    async def case(bench):
        hints = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
        exchange = await bench.answered(hints * 3, SIZED + b"ok")
        assert exchange.headers == [(b"content-length", b"2")]

    run(case)


def test_trailers_are_no_headers():
    async def case(bench):
        exchange = await bench.answered(CHUNKED + b"2\r\nok\r\n0\r\nx-late: 1\r\n\r\n")
        assert exchange.headers == [(b"transfer-encoding", b"chunked")]
        assert await read(exchange) == [b"ok"]

    run(case)


# --- pace -----------------------------------------------------------------------------------------


def test_reading_stops_where_nobody_takes_and_goes_on_when_somebody_asks():
    async def case(bench):
        body = b"x" * (4 * BUFFERED)
        exchange = await bench.answered(HEAD + b"content-length: %d\r\n\r\n" % len(body))
        bench.feed(body[:BUFFERED])
        assert bench.wire.reading
        bench.feed(body[BUFFERED : 2 * BUFFERED])
        assert not bench.wire.reading
        assert bench.channel.held == 2 * BUFFERED
        assert await anext(exchange) == body[: 2 * BUFFERED]
        assert not bench.wire.reading  # what was taken is still being sent
        asking = asyncio.ensure_future(anext(exchange))
        await asyncio.sleep(0)
        assert bench.wire.reading
        bench.feed(body[2 * BUFFERED :])
        assert await asking == body[2 * BUFFERED :]
        assert await read(exchange) == []
        await exchange.close(reuse=True)
        assert bench.wire.reading  # for the next exchange
        assert bench.idle == [bench.channel]

    run(case)


def test_a_taker_gets_each_read_in_the_step_it_came_in_and_no_task_runs():
    async def case(bench):
        exchange = await bench.answered(CHUNKED + b"3\r\none\r\n")
        got = []

        def take(chunk):
            got.append(chunk)
            return True

        passing = asyncio.ensure_future(exchange.pass_to(take))
        await asyncio.sleep(0)
        assert got == [b"one"]  # what was held comes first
        bench.feed(b"3\r\ntwo\r\n")
        assert got == [b"one", b"two"]
        bench.feed(b"5\r\nth")
        bench.feed(b"ree\r\n1\r\n!\r\n0\r\n\r\n")
        assert got == [b"one", b"two", b"th", b"ree!"]
        assert not passing.done()
        assert await passing is True
        await exchange.close(reuse=True)
        assert bench.idle == [bench.channel]

    run(case)


def test_a_taker_that_has_enough_pauses_the_upstream_until_it_comes_again():
    async def case(bench):
        exchange = await bench.answered(CHUNKED)
        got = []

        def take(chunk):
            got.append(chunk)
            return len(got) != 1

        passing = asyncio.ensure_future(exchange.pass_to(take))
        await asyncio.sleep(0)
        bench.feed(b"3\r\none\r\n")
        assert not bench.wire.reading
        bench.feed(b"3\r\ntwo\r\n")  # what the loop had read already
        assert await passing is False
        assert got == [b"one"]
        passing = asyncio.ensure_future(exchange.pass_to(take))
        await asyncio.sleep(0)
        assert got == [b"one", b"two"]
        assert bench.wire.reading
        bench.feed(b"0\r\n\r\n")
        assert await passing is True

    run(case)


def test_a_taker_that_has_enough_at_the_last_chunk_is_told_of_the_end():
    async def case(bench):
        exchange = await bench.answered(CHUNKED + b"3\r\none\r\n0\r\n\r\n")
        assert await exchange.pass_to(lambda _: False) is False
        assert await exchange.pass_to(lambda _: False) is True

    run(case)


@pytest.mark.parametrize("early", [True, False])
def test_an_error_of_the_taker_is_raised_where_the_body_is_awaited(early):
    class BrokenError(Exception):
        pass

    def take(_):
        raise BrokenError

    async def case(bench):
        exchange = await bench.answered(CHUNKED + (b"3\r\none\r\n" if early else b""))
        passing = asyncio.ensure_future(exchange.pass_to(take))
        await asyncio.sleep(0)
        bench.feed(b"3\r\ntwo\r\n")
        with pytest.raises(BrokenError):
            await passing
        await exchange.close(reuse=False)
        assert bench.wire.closing

    run(case)


@pytest.mark.parametrize("how", ["cut", "malformed", "stalled"])
def test_a_break_reaches_the_taker_after_all_that_came_before(how):
    async def case(bench):
        exchange = await bench.answered(CHUNKED)
        got = []
        passing = asyncio.ensure_future(exchange.pass_to(lambda chunk: got.append(chunk) is None))
        await asyncio.sleep(0)
        if how == "malformed":
            bench.feed(b"3\r\none\r\nzz\r\n")
        else:
            bench.feed(b"3\r\none\r\n")
        if how == "stalled":
            exchange.abort("stalled")
        if how == "cut":
            bench.channel.connection_lost(None)
        with pytest.raises(TransportFault) as caught:
            await passing
        assert caught.value.kind == how
        assert got == [b"one"]
        with pytest.raises(TransportFault, match=how):
            await exchange.pass_to(got.append)
        await exchange.close(reuse=True)
        assert bench.idle == []

    run(case)


def test_what_comes_while_a_taker_is_cancelled_is_held_and_not_given():
    async def case(bench):
        exchange = await bench.answered(CHUNKED)
        got = []
        passing = asyncio.ensure_future(exchange.pass_to(got.append))
        await asyncio.sleep(0)
        passing.cancel()
        await asyncio.sleep(0)  # its future is cancelled, the task not yet awake
        bench.feed(b"3\r\none\r\n")
        with pytest.raises(asyncio.CancelledError):
            await passing
        assert got == []
        assert bench.channel.held == 3

    run(case)


# --- leaving --------------------------------------------------------------------------------------


def test_an_abort_after_the_body_has_arrived_still_fails_the_reader():
    async def case(bench):
        exchange = await bench.answered(SIZED + b"ok")
        exchange.abort("total")
        for _ in range(2):
            with pytest.raises(TransportFault) as caught:
                await anext(exchange)
            assert caught.value.kind == "total"
        assert bench.wire.closing
        assert bench.pool.in_use == 0

    run(case)


def test_a_body_that_was_not_read_is_not_reused():
    async def case(bench):
        exchange = await bench.answered(SIZED + b"ok")
        await exchange.close(reuse=True)
        assert bench.idle == []
        assert bench.wire.closing

    run(case)
