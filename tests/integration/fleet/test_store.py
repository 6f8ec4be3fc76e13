"""The shared store alone: several gateways, faults of the store, checks at the start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import uvloop

from gateway.admission.address import parse
from gateway.admission.core import Admit, Late, Outcome
from gateway.admission.fleet import FAULTS, Addition, Entry, Listing, RedisLink
from gateway.admission.remote import FailMode
from gateway.errors import StoreUnavailable
from loadtests.redis_server import leases
from tests.fixtures.waiting import PATIENCE_S, until
from tests.integration.fleet import desk, servers
from tests.integration.fleet.desk import SECOND, ask_of, spec_of, verdict

pytestmark = pytest.mark.integration

START = 1_700_000_000 * SECOND
"""Before any instant of a clock that goes right."""


def settle(store, rid: str, pool: str = "pool:p") -> None:
    store.settle(pool, rid, outcome=Outcome.SERVED, actual=None)


def test_two_gateways_share_one_limit_and_one_line(server, prefix):
    async def run():
        async with (
            desk.shared(server.url, prefix=prefix) as one,
            desk.shared(server.url, prefix=prefix) as two,
        ):
            spec = spec_of(concurrency=1)
            await verdict(one, spec, ask_of("a"))
            second = two.acquire(spec, ask_of("b"))
            await until(lambda: two.view("pool:p") is not None)
            third = one.acquire(spec, ask_of("c"))
            await asyncio.sleep(0.1)
            assert not second.done()
            settle(one, "a")
            await asyncio.wait_for(second, PATIENCE_S)
            assert not third.done()
            settle(two, "b")
            assert isinstance(await asyncio.wait_for(third, PATIENCE_S), Admit)

    asyncio.run(run())


def test_an_idle_store_sends_nothing(server, prefix):
    async def run():
        async with desk.shared(server.url, prefix=prefix) as store:
            await verdict(store, spec_of(), ask_of("a"))
            settle(store, "a")

            async def quiet() -> bool:
                before = store.calls()
                await asyncio.sleep(1)
                return store.calls() == before

            await until(quiet)

    asyncio.run(run())


def test_what_arrives_together_leaves_together(server, prefix):
    async def run():
        async with desk.shared(server.url, prefix=prefix) as store:
            waits = [store.acquire(spec_of(), ask_of(f"r{n}")) for n in range(200)]
            await asyncio.gather(*waits)
            assert store.calls() <= 3

    asyncio.run(run())


def test_pools_that_begin_together_share_one_connection(prefix):
    async def run():
        with servers.running("valkey") as server, server.client() as client:
            async with desk.shared(server.url, prefix=prefix) as store:
                waits = [store.acquire(spec_of(f"pool:{n}"), ask_of(f"r{n}")) for n in range(20)]
                await asyncio.gather(*waits)
                ours = [one["cmd"] for one in client.client_list() if one["name"] == "tidegate"]
                assert sorted(ours) == ["fcall", "subscribe"]

    asyncio.run(run())


def test_a_connection_that_has_just_ended_is_a_store_that_does_not_answer(valkey, prefix):
    """uvloop says RuntimeError to who writes to it, and what is no fault ends the process."""

    async def run():
        link = RedisLink(valkey.url, timeout=SECOND)
        sums = [Addition(key=f"{prefix}sum", anew=False, amounts=(1,), ttl_s=60)]
        try:
            assert await link.add(sums) == [(1,)]
            [kept] = link._client.connection_pool._available_connections
            kept._writer.transport.abort()  # who looks now finds it open, who writes finds it gone
            with pytest.raises(FAULTS):
                await link.add(sums)
            assert await link.add(sums) == [(2,)]
        finally:
            await link.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


ODD = (
    b"+OK\r\n", b":1\r\n", b":-5\r\n", b":x\r\n", b"$-1\r\n", b"$2\r\nabc\r\n", b"$x\r\n",
    b"$4\r\n\xff\xfe\x00\x01\r\n", b"*0\r\n", b"*-1\r\n", b"*1\r\n*1\r\n*0\r\n",
    b"*2\r\n:1\r\n$1\r\na\r\n", b"%1\r\n+a\r\n:1\r\n", b"~1\r\n+x\r\n", b">2\r\n+a\r\n+b\r\n",
    b"_\r\n", b"#t\r\n", b",1.5\r\n", b"-ERR x\r\n", b"-MOVED 1 a:b\r\n", b"nonsense\r\n", b"\r\n",
)  # fmt: skip
"""Answers of a server that is none, or not asked what it answers."""


async def answered_oddly(link: RedisLink) -> None:
    """Each question once; whatever it raises is one of the faults, or says what to change."""

    def heard(channel: str, news: bytes) -> None:
        """News of nobody."""

    for ask in (
        lambda: link.check(),
        lambda: link.add([Addition(key="k", anew=True, amounts=(1, 2), ttl_s=9)]),
        lambda: link.enter([Entry(key="k", own={b"a": b"1"}, missing={}, ttl_s=9)]),
        lambda: link.extend([Listing(key="k", anew=True, items=[b"x"], most=3, ttl_s=9)]),
        lambda: link.load("k"),
        lambda: link.save("k", "f", b"v", ttl_s=9),
        lambda: link.publish("c", b"news"),
        lambda: link.run(("f", b"source"), "k", "word"),
        lambda: link.call("k", b"batch", b"", "c"),
        lambda: asyncio.wait_for(link.listen(("c",), heard, lambda: None), 0.02),
    ):
        with contextlib.suppress(*FAULTS, StoreUnavailable):
            await ask()


def test_whatever_a_server_answers_is_a_fault_and_no_crash():
    rng = random.Random(3)

    async def serve(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(b"".join(rng.choices(ODD, k=max(1, data.count(b"\r\n*") + 1))))
        writer.close()

    async def run():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for _ in range(150):
            link = RedisLink(f"redis://127.0.0.1:{port}", timeout=SECOND // 20)
            try:
                await answered_oddly(link)
            finally:
                await link.close()
        server.close()

    asyncio.run(run())


def test_a_fault_of_who_hears_the_news_is_no_fault_of_the_store(valkey, prefix):
    async def run():
        link = RedisLink(valkey.url, timeout=SECOND)
        ready = asyncio.Event()

        def heard(channel, news):
            raise KeyError(channel)

        try:
            listening = asyncio.create_task(link.listen((f"{prefix}c",), heard, ready.set))
            await ready.wait()
            await link.publish(f"{prefix}c", b"news")
            with pytest.raises(KeyError):
                await listening
        finally:
            await link.close()

    asyncio.run(run())


def test_a_lost_function_is_loaded_again(server, prefix):
    async def run():
        async with desk.shared(server.url, prefix=prefix) as store:
            await verdict(store, spec_of(), ask_of("a"))
            with server.client() as client:
                client.function_flush("SYNC")
            assert isinstance(await verdict(store, spec_of(), ask_of("b")), Admit)
            assert store.view("pool:p").dimensions[0].used == 2 * SECOND

    asyncio.run(run())


def test_the_highest_revision_of_the_rules_holds_for_everybody(server, prefix):
    async def run():
        async with (
            desk.shared(server.url, prefix=prefix) as new,
            desk.shared(server.url, prefix=prefix) as old,
        ):
            await verdict(old, spec_of(limits={"rpm": 600}), ask_of("a"))
            strict = replace(spec_of(limits={"rpm": 1}), revision=9)
            assert not isinstance(await verdict(new, strict, ask_of("b", deadline_in=0)), Admit)
            waits = old.acquire(spec_of(limits={"rpm": 600}), ask_of("c", deadline_in=SECOND // 2))
            assert not isinstance(await waits, Admit)

    asyncio.run(run())


def test_what_is_in_flight_can_be_read_from_the_keys_alone(server, prefix):
    """Young grants ride in the state, older ones lie in a hash: the load tests count both."""

    async def run(first, then, over):
        async with desk.shared(server.url, prefix=prefix) as store:
            for n in first:
                await verdict(store, spec_of(), ask_of(f"r{n}"))
            for n in over:
                settle(store, f"r{n}")
            for n in then:
                await verdict(store, spec_of(), ask_of(f"r{n}"))
            with server.client() as client:
                return leases(client, f"{prefix}adm:{{pool:p}}")

    found = asyncio.run(run(range(3), range(3, 5), [1]))
    assert sorted(found) == ["r0", "r2", "r3", "r4"]
    assert min(found.values()) > START
    found = asyncio.run(run(range(10, 80), range(80, 82), range(10, 40)))
    assert sorted(found) == sorted(["r0", "r2", "r3", "r4", *(f"r{n}" for n in range(40, 82))])


def test_a_store_that_stops_opens_local_shares_and_takes_what_they_cost_when_it_is_back(prefix):
    async def run():
        with servers.running("valkey") as server:
            async with desk.shared(server.url, prefix=prefix) as store:
                spec = spec_of()
                await verdict(store, spec, ask_of("a"))
                os.kill(server.process.pid, signal.SIGSTOP)
                got = await verdict(store, spec, ask_of("b"))
                assert isinstance(got, Admit)
                assert store.away
                settle(store, "b")
                os.kill(server.process.pid, signal.SIGCONT)
                await until(lambda: not store.away)
                await verdict(store, spec, ask_of("c"))
                await until(lambda: store.view("pool:p").dimensions[0].used >= 3 * SECOND * 0.5)
                assert store.view("pool:p").in_flight == 2, (
                    "a and c; what the outage cost holds no lease"
                )

    asyncio.run(run())


def test_a_store_that_restarts_empty_loses_no_waiter_and_starts_with_a_full_window(prefix):
    async def run():
        with servers.running("valkey") as first:
            port = first.port
            async with desk.shared(first.url, prefix=prefix) as store:
                spec = spec_of(limits={"rpm": 600}, concurrency=3)
                for n in range(3):
                    await verdict(store, spec, ask_of(f"held{n}"))
                waits = [
                    store.acquire(spec, ask_of(f"r{n}", deadline_in=60 * SECOND)) for n in range(5)
                ]
                await asyncio.sleep(0.1)
                first.process.kill()
                first.process.wait()
                with servers.running("valkey", port=port):
                    for n in range(3):
                        settle(store, f"held{n}")
                    for n, wait in enumerate(waits):
                        got = await asyncio.wait_for(wait, PATIENCE_S)
                        assert isinstance(got, Admit)
                        settle(store, f"r{n}")
                    await until(lambda: not store.away)
                    await verdict(store, spec, ask_of("after"))
                    used = store.view("pool:p").dimensions[0].used
                    assert used > 500 * SECOND, "a new store must think its window spent"

    asyncio.run(run())


def test_a_closed_pool_keeps_its_waiters_to_their_deadline(prefix):
    async def run():
        with servers.running("valkey") as server:
            async with desk.shared(server.url, prefix=prefix, mode=FailMode.CLOSED) as store:
                await verdict(store, spec_of(), ask_of("a"))
                os.kill(server.process.pid, signal.SIGSTOP)
                got = await verdict(store, spec_of(), ask_of("b", deadline_in=2 * SECOND))
                assert isinstance(got, Late)
                os.kill(server.process.pid, signal.SIGCONT)

    asyncio.run(run())


def test_a_killed_gateway_at_the_head_of_the_line_delays_the_others_by_seconds_at_most(
    valkey, prefix
):
    program = (
        "import asyncio, sys\n"
        "from tests.integration.fleet import desk\n"
        "from tests.integration.fleet.desk import *\n"
        "async def run():\n"
        "    async with desk.shared(sys.argv[1], prefix=sys.argv[2]) as store:\n"
        "        store.acquire(spec_of(concurrency=1), ask_of('head', lane=1))\n"
        "        await asyncio.sleep(0.3)\n"
        "        print('waiting', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(run())\n"
    )

    async def run():
        async with desk.shared(valkey.url, prefix=prefix) as store:
            spec = spec_of(concurrency=1)
            await verdict(store, spec, ask_of("a"))
            other = subprocess.Popen(  # noqa: ASYNC220 - a test's own process
                [sys.executable, "-c", program, valkey.url, prefix], stdout=subprocess.PIPE
            )
            try:
                await asyncio.to_thread(other.stdout.readline)
                mine = store.acquire(spec, ask_of("b", lane=2, deadline_in=60 * SECOND))
                await asyncio.sleep(0.2)
            finally:
                other.kill()
                other.communicate()
            settle(store, "a")  # the dead one's head is granted first, into nobody's mail
            got = await asyncio.wait_for(mine, 15)
            assert isinstance(got, Admit)

    asyncio.run(run())


def test_an_evicting_store_is_refused_with_the_setting_to_change():
    async def run(url):
        link = RedisLink(url, timeout=SECOND)
        try:
            await link.check()
        finally:
            await link.close()

    with (
        servers.running("valkey", "--maxmemory-policy", "allkeys-lru") as server,
        pytest.raises(StoreUnavailable, match="noeviction"),
    ):
        asyncio.run(run(server.url))


def test_a_store_that_does_not_let_us_in_is_refused_without_repeating_the_password():
    async def run(port):
        link = RedisLink(f"redis://:wrong-secret@127.0.0.1:{port}", timeout=SECOND)
        try:
            await link.check()
        finally:
            await link.close()

    with servers.running("valkey", "--requirepass", "right") as server:
        with pytest.raises(StoreUnavailable, match="credentials") as caught:
            asyncio.run(run(server.port))
        assert "wrong-secret" not in str(caught.value)


def test_a_store_says_its_name_and_version(server):
    async def run():
        link = RedisLink(server.url, timeout=SECOND)
        try:
            return await link.check()
        finally:
            await link.close()

    assert asyncio.run(run()).split()[0].lower() == server.name


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://host", "is allowed"),
        ("redis+sentinel://a:26379", "which primary"),
        ("redis+cluster://a:port", "has no port"),
        ("redis+cluster://:7000", "names no host"),
        ("", "is allowed"),
    ],
)
def test_a_wrong_address_is_one_clear_sentence_without_the_password(url, what):
    with pytest.raises(ValueError, match=what):
        parse(url)
    with pytest.raises(ValueError, match="which primary") as caught:
        parse("redis+sentinel://user:secret@a:26379")
    assert "secret" not in str(caught.value)
