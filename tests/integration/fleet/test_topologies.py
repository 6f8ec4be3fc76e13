"""Cluster, Sentinel, TLS and a primary that steps down, with real processes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from dataclasses import replace

import pytest
import redis
import uvloop

from gateway.admission.core import Admit, Outcome
from gateway.admission.fleet import Addition, Entry, Kept, Listing, RedisLink
from gateway.resilience.breaker import Allow, State
from gateway.resilience.probes import Elsewhere, Handed, Lent
from tests.fixtures.ports import free_port
from tests.fixtures.waiting import PATIENCE_S, until
from tests.integration.fleet import desk, servers
from tests.integration.fleet.desk import SECOND, ask_of, spec_of, verdict
from tests.integration.fleet.members import RULES, member

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster():
    """Three primaries that share the slots."""
    with contextlib.ExitStack() as stack:
        # By default the bus is the node's own port and ten thousand, which may not exist.
        buses = [free_port() for _ in range(3)]
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port")
        nodes = [
            stack.enter_context(servers.running("valkey", *options, str(bus))) for bus in buses
        ]
        clients = [stack.enter_context(node.client()) for node in nodes]
        for number, client in enumerate(clients):
            first, last = 16_384 * number // 3, 16_384 * (number + 1) // 3
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
            for node, bus in zip(nodes, buses, strict=True):
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        deadline = time.monotonic() + 60
        while not all("cluster_state:ok" in _state(client) for client in clients):
            assert time.monotonic() < deadline, "the cluster did not form"
            time.sleep(0.1)
        yield "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


def _state(client) -> str:
    raw = client.execute_command("CLUSTER", "INFO")
    return (
        raw
        if isinstance(raw, str)
        else raw.decode()
        if isinstance(raw, bytes)
        else str(raw).replace("'", "").replace(": ", ":")
    )


def test_pools_spread_over_a_cluster_and_wake_each_other(cluster, prefix):
    async def run():
        async with (
            desk.shared(cluster, prefix=prefix) as one,
            desk.shared(cluster, prefix=prefix) as two,
        ):
            for n in range(12):
                spec = spec_of(f"pool:{n}", concurrency=1)
                assert isinstance(await verdict(one, spec, ask_of(f"a{n}")), Admit)
                waiting = two.acquire(spec, ask_of(f"b{n}"))
                await asyncio.sleep(0.03)
                one.settle(spec.name, f"a{n}", outcome=Outcome.SERVED, actual=None)
                assert isinstance(await asyncio.wait_for(waiting, PATIENCE_S), Admit)

    asyncio.run(run())


def test_what_gateways_count_together_is_counted_over_a_cluster(cluster, prefix):
    async def run():
        link = RedisLink(cluster, timeout=1_000_000)
        try:
            sums = [
                Addition(key=f"{prefix}{n}", anew=n == 3, amounts=(n, -n), ttl_s=60)
                for n in range(12)
            ]
            assert await link.add(sums) == [(n, -n) for n in range(12)]
            again = await link.add(sums)
            assert again == [(n, -n) if n == 3 else (2 * n, -2 * n) for n in range(12)]
            lists = [
                Listing(key=f"{prefix}l{n}", anew=False, items=[b"a%d" % n, b"b"], most=2, ttl_s=60)
                for n in range(12)
            ]
            assert await link.extend(lists) == [[b"a%d" % n, b"b"] for n in range(12)]
            entries = [
                Entry(key=f"{prefix}e{n}", own={"a": b"%d" % n}, missing={"b": b"1"}, ttl_s=60)
                for n in range(12)
            ]
            assert await link.enter(entries) == [{b"a": b"%d" % n, b"b": b"1"} for n in range(12)]
            others = [replace(one, own={}, missing={"a": b"-"}) for one in entries]
            assert await link.enter(others) == [{b"a": b"%d" % n, b"b": b"1"} for n in range(12)]
            values = [Kept(f"{prefix}k{n}", b"%d" % n if n % 2 else b"", 60) for n in range(6)]
            read = [one.key for one in values]
            assert await link.remember(values, read) == [b"", b"1", b"", b"3", b"", b"5"]
            only_read = [replace(one, items=[]) for one in lists]
            assert await link.extend(only_read) == [[b"a%d" % n, b"b"] for n in range(12)]
        finally:
            await link.close()

    asyncio.run(run())


async def lent_and_back(url: str, prefix: str, scopes: list[str]) -> None:
    """Two gateways lend each other the places of probes there."""
    async with member(url, prefix, "one") as one, member(url, prefix, "two") as two:
        for scope in scopes:
            ours = one.sharing.probes.ask(scope, 1, 60 * SECOND)
            assert await ours.answered() == Lent(good=0)
            theirs = two.sharing.probes.ask(scope, 1, 60 * SECOND)
            assert isinstance(await theirs.answered(), Elsewhere)
            theirs.free(None)
            breaker = two.breakers.of(scope, RULES)
            breaker.told(State.HALF_OPEN, until=0, reason="")
            breaker.yielded(breaker.ask(now=0).probe, until=60 * SECOND)
            ours.free(Handed(good=1))
            await until(lambda: isinstance(breaker.ask(now=1), Allow))  # noqa: B023
            again = two.sharing.probes.ask(scope, 2, 60 * SECOND)
            assert await again.answered() == Lent(good=1)
            again.free(Handed(good=0))


def test_places_of_probes_are_lent_over_a_cluster(cluster, prefix):
    asyncio.run(lent_and_back(cluster, prefix, [f"p/m{n}" for n in range(9)]))


@pytest.fixture(scope="module")
def sentinel():
    """A primary, its replica, and one sentinel that may decide alone."""
    if "redis" not in servers.binaries():
        pytest.skip("no redis-server on this machine; deploy/servers.py says why")
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(servers.running("redis"))
        replica = stack.enter_context(
            servers.running("redis", "--replicaof", "127.0.0.1", str(primary.port))
        )
        watcher = stack.enter_context(servers.sentinel(primary.port))
        with watcher.client() as client:
            deadline = time.monotonic() + 60
            while True:
                state = client.execute_command("SENTINEL", "REPLICAS", "tide")
                if state:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield primary, replica, f"redis+sentinel://127.0.0.1:{watcher.port}/tide"


def test_places_of_probes_are_lent_by_the_primary_that_sentinels_name(sentinel, prefix):
    asyncio.run(lent_and_back(sentinel[2], prefix, ["p/m"]))


def test_after_a_failover_the_new_primary_goes_on(sentinel, prefix):
    primary, replica, url = sentinel

    async def run():
        async with desk.shared(url, prefix=prefix) as store:
            spec = spec_of(concurrency=1)
            assert isinstance(await verdict(store, spec, ask_of("a")), Admit)
            waiting = store.acquire(spec, ask_of("b", deadline_in=60 * SECOND))
            await asyncio.sleep(0.1)
            primary.process.kill()
            store.settle(spec.name, "a", outcome=Outcome.SERVED, actual=None)
            assert isinstance(await asyncio.wait_for(waiting, 30), Admit)
            await until(lambda: not store.away)
            with replica.client() as client, contextlib.suppress(redis.exceptions.RedisError):
                assert client.exists(f"{prefix}adm:{{pool:p}}:st")

    asyncio.run(run())


def asked_over(client) -> set[str]:
    """Connections whose last command was a batch."""
    return {one["id"] for one in client.client_list() if one["cmd"] == "fcall"}


def test_a_primary_that_steps_down_is_left_for_a_new_connection(prefix):
    """Behind the same name may stand another server by now."""

    async def run():
        with servers.running("valkey") as server, server.client() as client:
            async with desk.shared(server.url, prefix=prefix) as store:
                assert isinstance(await verdict(store, spec_of(), ask_of("a")), Admit)
                before = asked_over(client)
                client.replicaof("127.0.0.1", "1")
                waiting = store.acquire(spec_of(), ask_of("b"))
                await until(lambda: not asked_over(client) & before)
                client.replicaof("NO", "ONE")
                assert isinstance(await asyncio.wait_for(waiting, PATIENCE_S), Admit)

    asyncio.run(run())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server behind TLS and a password, and how to reach it."""
    openssl = shutil.which("openssl")
    if openssl is None or "redis" not in servers.binaries():
        pytest.skip("needs openssl and a redis-server with TLS")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    port = free_port()
    options = (
        "--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key),
        "--tls-ca-cert-file", str(cert), "--tls-auth-clients", "no", "--requirepass", "right",
    )  # fmt: skip
    with servers.running("redis", *options):
        yield f"rediss://:right@127.0.0.1:{port}/0?ssl_ca_certs={cert}"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_batches_go_through_tls(guarded, prefix, loop):
    async def run():
        async with desk.shared(guarded, prefix=prefix) as store:
            waits = [store.acquire(spec_of(f"pool:{n % 9}"), ask_of(f"r{n}")) for n in range(200)]
            assert all(isinstance(one, Admit) for one in await asyncio.gather(*waits))

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
