"""Which connection serves next, which are closed, and where a name leads."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.http1 import dial
from gateway.http1.channel import Channel
from gateway.http1.dial import Addresses, Trust, origin_of
from gateway.http1.pool import Pool
from tests.unit.upstream.test_http1_exchange import Wire

IDLE = 1_000_000


class HandClock:
    """A clock set by hand; `turn` fires what is due."""

    def __init__(self):
        self.at = 1
        self.timers = []

    def now(self):
        return self.at

    def after(self, delay, callback):
        timer = [self.at + delay, callback]
        self.timers.append(timer)
        return type("Timer", (), {"cancel": lambda _: self.timers.remove(timer)})()

    def turn(self, at):
        self.at = at
        for timer in [one for one in self.timers if one[0] <= at]:
            self.timers.remove(timer)
            timer[1]()


class Ground:
    def __init__(self, **pool):
        self.clock = HandClock()
        self.pool = Pool(
            origin_of("http://h"), clock=self.clock, idle_for=IDLE, trust=Trust(None),
            probe=pool.get("probe", lambda _: False), buffer=memoryview(bytearray(16)),
        )  # fmt: skip

    def served(self):
        """A channel in use whose answer is whole."""
        channel = Channel(asyncio.get_running_loop(), memoryview(b""), self.pool._channels.discard)
        channel.connection_made(Wire())
        channel.phase = 3
        self.pool._channels.add(channel)
        self.pool.in_use += 1
        return channel


def run(case, **pool):
    async def main():
        await case(Ground(**pool))

    asyncio.run(main())


def test_the_newest_idle_connection_serves_next():
    async def case(ground):
        first, second = ground.served(), ground.served()
        ground.pool.release(first, reuse=True)
        ground.pool.release(second, reuse=True)
        assert ground.pool.in_use == 0
        assert ground.pool.idle() is second
        assert ground.pool.idle() is first
        assert ground.pool.idle() is None
        assert ground.pool.in_use == 2

    run(case)


def test_what_was_idle_for_too_long_is_never_used():
    async def case(ground):
        channel = ground.served()
        ground.pool.release(channel, reuse=True)
        ground.clock.at += IDLE
        assert ground.pool.idle() is None
        assert channel.closing

    run(case)


def test_one_timer_closes_idle_connections_each_in_its_time():
    async def case(ground):
        first, second = ground.served(), ground.served()
        ground.pool.release(first, reuse=True)
        ground.clock.turn(IDLE // 2)
        ground.pool.release(second, reuse=True)
        assert len(ground.clock.timers) == 1
        ground.clock.turn(IDLE + 1)
        assert first.closing
        assert not second.closing
        assert len(ground.clock.timers) == 1
        ground.clock.turn(2 * IDLE)
        assert second.closing
        assert ground.clock.timers == []

    run(case)


def test_a_connection_that_the_kernel_knows_to_be_dead_is_passed_over():
    async def case(ground):
        alive, dead = ground.served(), ground.served()
        dead._descriptor = 7
        ground.pool.release(alive, reuse=True)
        ground.pool.release(dead, reuse=True)
        assert ground.pool.idle() is alive
        assert dead.closing

    run(case, probe=lambda descriptor: descriptor == 7)


def test_a_retired_pool_closes_with_its_last_exchange():
    async def case(ground):
        idle, busy = ground.served(), ground.served()
        ground.pool.release(idle, reuse=True)
        ground.pool.retire()
        assert not busy.closing
        ground.pool.release(busy, reuse=True)
        assert idle.closing
        assert busy.closing
        assert ground.clock.timers == []

    run(case)


# --- origins --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "secure", "host", "port", "authority", "prefix"),
    [
        ("http://h", False, "h", 80, b"h", b""),
        ("https://api.x.com/v1/", True, "api.x.com", 443, b"api.x.com", b"/v1"),
        ("HTTPS://API.x.com:443", True, "api.x.com", 443, b"api.x.com", b""),
        ("https://h:80/a%2Fb", True, "h", 80, b"h:80", b"/a%2Fb"),
        ("http://[::1]:8080", False, "::1", 8080, b"[::1]:8080", b""),
        (
            "http://bücher.example",
            False,
            "xn--bcher-kva.example",
            80,
            b"xn--bcher-kva.example",
            b"",
        ),
    ],
)
def test_the_parts_of_a_base_url(url, secure, host, port, authority, prefix):
    origin = origin_of(url)
    assert (origin.secure, origin.host, origin.port) == (secure, host, port)
    assert (origin.authority, origin.prefix) == (authority, prefix)


@pytest.mark.parametrize(
    "url",
    ["", "h", "ftp://h", "http://", "//h", "http://u:secret@h", "http://secret@h",
     "http://h?secret", "http://h#secret", "http://h:secret", "http://h:99999", "http://[::1",
     "http://h\0", "http://a b",
     "http://h/a\nb", "http://" + "ü" * 70],
)  # fmt: skip
def test_what_is_no_base_url_is_refused_without_quoting_it(url):
    with pytest.raises(ValueError, match="base URL") as caught:
        origin_of(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


# --- names ----------------------------------------------------------------------------------------


class Names:
    """A resolver by script."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, host, port, **_):
        self.asked += 1
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def resolving(names, case):
    async def main():
        clock = HandClock()
        asyncio.get_running_loop().getaddrinfo = names
        await case(Addresses(origin_of("http://h"), clock), clock)

    asyncio.run(main())


def test_a_burst_asks_once_and_addresses_take_turns():
    names = Names(["a", "b"], ["c"])

    async def case(addresses, clock):
        found = await asyncio.gather(*(addresses.next() for _ in range(4)))
        assert sorted(map(tuple, found)) == [("a", "b")] * 2 + [("b", "a")] * 2
        assert names.asked == 1
        clock.at += dial.FRESH
        assert await addresses.next() == ["c"]

    resolving(names, case)


def test_a_name_that_does_not_resolve_is_asked_again_after_a_second():
    names = Names(socket.gaierror(-2, "no"), ["a"])

    async def case(addresses, clock):
        for _ in range(3):
            with pytest.raises(socket.gaierror):
                await addresses.next()
        assert names.asked == 1
        clock.at += dial.FAILED
        assert await addresses.next() == ["a"]

    resolving(names, case)


def test_a_name_that_no_host_can_have_does_not_resolve():
    async def case(addresses, _clock):
        with pytest.raises(socket.gaierror):
            await addresses.next()

    resolving(Names(UnicodeError("label too long")), case)


def test_whoever_asked_first_may_leave_and_the_others_get_their_answer():
    names = Names(["a"], ["a"])

    async def case(addresses, _clock):
        first = asyncio.ensure_future(addresses.next())
        second = asyncio.ensure_future(addresses.next())
        await asyncio.sleep(0)
        first.cancel()
        assert await second == ["a"]
        with pytest.raises(asyncio.CancelledError):
            await first

    resolving(names, case)
