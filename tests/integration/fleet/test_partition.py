"""A gateway that loses its store while the others keep it, and a store that answers too late."""

from __future__ import annotations

import asyncio

import pytest

from gateway.admission.core import Admit, Outcome
from gateway.admission.remote import FailMode
from tests.fixtures.waiting import PATIENCE_S, Turns, until
from tests.integration.fleet import desk
from tests.integration.fleet.desk import SECOND, ask_of, spec_of, verdict
from tests.integration.fleet.wire import Wire

pytestmark = pytest.mark.integration

RATE = 50
"""Grants a second of the pool, fleet-wide."""


async def demand(store, spec, name: str, seen: list[float], stop: asyncio.Event) -> None:
    """Always eight calls that want in; each is over at once. Notes when each was granted."""
    loop = asyncio.get_running_loop()

    async def one(worker: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            rid = f"{name}{worker}.{number}"
            got = await verdict(
                store, spec, ask_of(rid, deadline_in=60 * SECOND), within=2 * PATIENCE_S
            )
            assert isinstance(got, Admit), got
            seen.append(loop.time())
            store.settle(spec.name, rid, outcome=Outcome.SERVED, actual=None)

    async with asyncio.TaskGroup() as group:
        for worker in range(8):
            group.create_task(one(worker))


def test_a_gateway_cut_off_lives_of_its_share_and_the_others_go_on(valkey, prefix):
    async def run():
        loop = asyncio.get_running_loop()
        spec = spec_of(limits={"rpm": RATE * 60})
        async with (
            Wire(valkey.port) as wire,
            desk.shared(valkey.url, prefix=prefix) as connected,
            desk.shared(wire.url, prefix=prefix) as alone,
        ):
            stop = asyncio.Event()
            ours: list[float] = []
            theirs: list[float] = []
            async with asyncio.TaskGroup() as group:
                group.create_task(demand(connected, spec, "c", ours, stop))
                group.create_task(demand(alone, spec, "a", theirs, stop))
                await asyncio.sleep(6)
                cut_at = loop.time()
                wire.cut = True
                await until(lambda: alone.away)
                away_at = loop.time()
                await asyncio.sleep(8)
                healed_at = loop.time()
                assert not connected.away
                wire.cut = False
                await until(lambda: not alone.away)
                back_at = loop.time()
                await asyncio.sleep(4)
                stop.set()
            during = max(cut_at + 2, away_at), healed_at
            span = during[1] - during[0]
            share = sum(during[0] < at < during[1] for at in theirs) / (RATE * span)
            rest = sum(during[0] < at < during[1] for at in ours) / (RATE * span)
            assert 0.2 < share <= 0.5, "nine tenths of the half that it had of the demand, or less"
            assert rest > 0.8, "who kept the store was not held up"
            after = sum(at > back_at for at in (*ours, *theirs)) / (RATE * (loop.time() - back_at))
            assert after < 1.1, "no herd on return"
            assert sum(at > back_at for at in theirs) > 0
            await until(lambda: connected.waiting() == alone.waiting() == 0)
            with valkey.client() as client:
                key = f"{prefix}adm:{{{spec.name}}}"
                assert client.hlen(f"{key}:rq") == 0, "nobody waits at the store"

    asyncio.run(run())


def test_a_store_that_answers_after_five_seconds_is_as_good_as_none(valkey, prefix):
    async def run():
        spec = spec_of(limits={"rpm": 6_000})
        async with Wire(valkey.port) as wire, desk.shared(wire.url, prefix=prefix) as store:
            await verdict(store, spec, ask_of("a"))
            wire.delay_s = 5.0
            async with Turns() as since:
                for n in range(20):
                    assert isinstance(await verdict(store, spec, ask_of(f"b{n}")), Admit)
                assert since.seconds < 2.5, "two answers that do not come are enough to know"
            assert store.away
            wire.delay_s = 0.0
            await until(lambda: not store.away)
            assert isinstance(await verdict(store, spec, ask_of("c")), Admit)

    asyncio.run(run())


def test_who_is_cut_off_in_closed_mode_keeps_its_waiters_and_brings_them_back(valkey, prefix):
    async def run():
        spec = spec_of(concurrency=1)
        async with (
            Wire(valkey.port) as wire,
            desk.shared(valkey.url, prefix=prefix) as connected,
            desk.shared(wire.url, prefix=prefix, mode=FailMode.CLOSED) as alone,
        ):
            await verdict(connected, spec, ask_of("held"))
            waits = alone.acquire(spec, ask_of("w", deadline_in=60 * SECOND))
            await asyncio.sleep(0.2)
            wire.cut = True
            await asyncio.sleep(7)  # longer than a silent gateway keeps its waiters
            connected.settle(spec.name, "held", outcome=Outcome.SERVED, actual=None)
            await asyncio.sleep(0.5)
            assert not waits.done()
            wire.cut = False
            assert isinstance(await asyncio.wait_for(waits, PATIENCE_S), Admit)

    asyncio.run(run())
