"""What stands in a pool's keys: other releases' states, lost keys, and when young entries move."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import pytest

from gateway.admission.core import Admit, Caller, Outcome, Settle
from gateway.admission.fleet import RedisLink
from gateway.admission.packing import (
    NEEDS_RULES,
    NEWER_LAYOUT,
    OK,
    Batch,
    pack_batch,
    pack_rules,
    unpack_answer,
)
from loadtests.redis_server import leases
from tests.integration.fleet.desk import SECOND, ask_of, spec_of

pytestmark = pytest.mark.integration

LAYOUT = 3
SHADOW = 8 + 24 + 9 * 8
"""Where the state says how many calls would have waited: behind layout, head, nine numbers."""


class Desk:
    """One gateway that asks a pool directly."""

    def __init__(self, server, prefix, **spec):
        self.base = f"{prefix}adm:{{pool:p}}"
        self.client = server.client()
        self.link = RedisLink(server.url, timeout=SECOND)
        self.rules = pack_rules(spec_of(**spec))
        self.number = 0

    async def tick(self, *, asks=0, over=(), told=True):
        names = [f"r{self.number + n}" for n in range(asks)]
        self.number += asks
        batch = Batch(
            caller=Caller("g"),
            settles=[Settle(rid, Outcome.SERVED) for rid in over],
            acquires=[ask_of(rid) for rid in names],
            cold=False,
        )
        raw = pack_batch(batch, self.rules)
        body = self.rules.body if told else b""
        return unpack_answer(await self.link.call(self.base, raw, body, "n:"))

    def stored(self, name: str) -> bytes | None:
        return self.client.get(f"{self.base}:{name}")


@contextlib.asynccontextmanager
async def opened(server, prefix, **spec):
    desk = Desk(server, prefix, **spec)
    try:
        yield desk
    finally:
        await desk.link.close()
        desk.client.close()


def test_an_older_layout_starts_anew_and_leaves_nothing_behind(server, prefix):
    async def run():
        async with opened(server, prefix) as desk:
            first = await desk.tick(asks=1)
            desk.client.set(f"{desk.base}:st", struct.pack("<d", LAYOUT - 1) + b"whatever it held")
            desk.client.zadd(f"{desk.base}:ls", {"old": 1})
            desk.client.hset(f"{desk.base}:if", "old", "record")
            answer = await desk.tick(asks=1, told=False)
            assert answer.status == OK, "the rules are still known"
            assert answer.reply.epoch > first.reply.epoch
            assert answer.standing.in_flight == 1
            assert list(leases(desk.client, desk.base)) == ["r1"]
            assert not desk.client.exists(f"{desk.base}:ls", f"{desk.base}:if")

    asyncio.run(run())


def test_a_newer_layout_is_left_alone(server, prefix):
    async def run():
        async with opened(server, prefix) as desk:
            state = struct.pack("<d", LAYOUT + 1) + b"what we cannot read"
            desk.client.set(f"{desk.base}:st", state)
            answer = await desk.tick(asks=1)
            assert answer.status == NEWER_LAYOUT
            assert desk.stored("st") == state
            assert desk.stored("cf") is None

    asyncio.run(run())


def test_a_state_whose_rules_are_lost_starts_anew(server, prefix):
    async def run():
        async with opened(server, prefix) as desk:
            first = await desk.tick(asks=1)
            desk.client.delete(f"{desk.base}:cf")
            desk.client.function_flush("SYNC")  # as a server that was started again
            assert (await desk.tick(asks=1, told=False)).status == NEEDS_RULES
            answer = await desk.tick(asks=1)
            assert answer.reply.epoch > first.reply.epoch
            assert answer.standing.in_flight == 1

    asyncio.run(run())


def test_a_call_that_ends_soon_has_no_key_of_its_own(server, prefix):
    async def run():
        async with opened(server, prefix) as desk:
            for n in range(200):
                await desk.tick(asks=1, over=[f"r{n - 1}"])
            found = {key.decode().rpartition(":")[2] for key in desk.client.keys(f"{desk.base}*")}
            assert found <= {"st", "cf", "sh", "lg60000000"}
            assert desk.client.ttl(f"{desk.base}:st") > 80_000

    asyncio.run(run())


def test_a_usual_tick_reads_its_seal_and_writes_what_stands_behind_it(server, prefix):
    """Not a thousand bytes to compare, and as many to write: each costs, hashed on every way."""

    async def run():
        async with opened(server, prefix) as desk:
            for n in range(20):
                await desk.tick(asks=1, over=[f"r{n - 1}"])
            size = len(desk.stored("st"))
            desk.client.config_resetstat()
            for n in range(20, 40):
                await desk.tick(asks=1, over=[f"r{n - 1}"])
            called = desk.client.info("commandstats")
            assert "cmdstat_get" not in called
            assert called["cmdstat_getrange"]["calls"] >= 20
            assert called["cmdstat_setrange"]["calls"] >= 10
            assert len(desk.stored("st")) <= size + 512
            assert desk.client.ttl(f"{desk.base}:st") > 80_000

    asyncio.run(run())


def test_a_state_that_was_put_back_is_read_again(server, prefix):
    async def run():
        async with opened(server, prefix) as desk:
            await desk.tick(asks=3)
            before = desk.stored("st")
            await desk.tick(over=["r0", "r1"])
            desk.client.set(f"{desk.base}:st", before)
            assert (await desk.tick()).standing.in_flight == 3

    asyncio.run(run())


def test_what_another_server_wrote_is_not_taken_for_our_own(server, prefix):
    """Two primaries that could not see each other, at one version and instant."""

    async def run():
        async with opened(server, prefix) as desk:
            answer = await desk.tick(asks=1)
            raw = bytearray(desk.stored("st"))
            mark = struct.pack("<dd", answer.reply.epoch, answer.reply.version)
            writer = raw.index(mark) - 8
            raw[writer : writer + 8] = struct.pack("<d", 4_711)
            raw[SHADOW : SHADOW + 8] = struct.pack("<d", 7)
            desk.client.set(f"{desk.base}:st", bytes(raw))
            assert (await desk.tick()).standing.would_have_waited == 7

    asyncio.run(run())


def test_what_was_moved_is_found_again_by_a_server_that_remembers_nothing(server, prefix):
    async def run():
        async with opened(server, prefix) as desk:
            answer = await desk.tick(asks=100)
            assert sum(isinstance(event, Admit) for event in answer.reply.events) == 100
            await desk.tick(asks=20, over=[f"r{n}" for n in range(10)])
            held = {f"r{n}" for n in range(10, 120)}
            assert set(leases(desk.client, desk.base)) == held
            for key in ("st", "if", "gw"):
                assert desk.client.ttl(f"{desk.base}:{key}") > 80_000
            desk.client.function_flush("SYNC")
            answer = await desk.tick(over=["r9", "r10", "r110", "r119"])
            assert answer.standing.in_flight == 107

    asyncio.run(run())


def test_pools_with_more_calls_in_flight_than_are_remembered(server, prefix):
    """Above 2,000 grants lie in keys alone, with a list in the order of their ends."""

    async def run():
        async with opened(server, prefix, limits={"rpm": 6_000_000}) as desk:
            for _ in range(10):
                await desk.tick(asks=250)
            assert desk.client.zcard(f"{desk.base}:ls") > 2_000
            answer = await desk.tick(over=[f"r{n}" for n in range(500)])
            assert answer.standing.in_flight == 2_000
            for n in range(500, 2_500, 250):
                answer = await desk.tick(over=[f"r{m}" for m in range(n, n + 250)])
            assert answer.standing.in_flight == 0
            assert not desk.client.exists(f"{desk.base}:ls")

    asyncio.run(run())
