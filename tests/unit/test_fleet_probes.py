"""Leases of probes against a store in this process, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gateway.fleet_probes import LEAST, PATIENCE, FleetProbes
from gateway.resilience.probes import LOOK, Elsewhere, Handed, Lent
from gateway.units import MICRO
from tests.fixtures.waiting import until
from tests.sim.loop import run
from tests.sim.world import sim_clock

SECOND = MICRO


class Store:
    """The function of `probe.lua`, over a dict, with the faults of a network.

    Attributes:
        asked: Everything that arrived, in order.
        way, gate: Cleared: nothing arrives; answers do not come.
        faults: How many exchanges fail from now on, before they arrive.
    """

    def __init__(self, clock) -> None:
        self.clock = clock
        self.places: dict[str, dict] = {}
        self.asked: list[tuple] = []
        self.published: list[bytes] = []
        self.way, self.gate = asyncio.Event(), asyncio.Event()
        self.way.set()
        self.gate.set()
        self.faults = 0

    @property
    def whats(self) -> list[str]:
        """What was asked."""
        return [words[0] for words in self.asked]

    async def run(self, library, key, *words):
        if self.faults:
            self.faults -= 1
            raise ConnectionError("away")
        if words[0] == "take":
            await self.way.wait()
        self.asked.append(words)
        answer = getattr(self, words[0])(key, *words[1:])
        await asyncio.sleep(0.001)
        await self.gate.wait()
        return answer

    def take(self, key, token, lasts, _kept):
        place = self.places.setdefault(key, {"by": "", "ends": 0, "good": 0})
        now = self.clock.now() // 1_000
        if place["ends"] > now and place["by"] != token:
            return [0, place["ends"] - now]
        place.update(by=token, ends=now + lasts)
        return [1, place["good"]]

    def free(self, key, token, good, rest, _kept, _channel, news):
        place = self.places.get(key)
        if place is None or place["by"] != token:
            return [0, 0]
        place.update(by="", ends=self.clock.now() // 1_000 + rest if rest else 0)
        if good != "":
            place["good"] = int(good)
        if not rest:
            self.published.append(news)
        return [1, 0]

    def void(self, key):
        self.places.get(key, {}).update(good=0)
        return [1, 0]


@contextlib.asynccontextmanager
async def gateways(*names: str, away=lambda: False):
    """The store, and probes of so many gateways."""
    clock = sim_clock()
    store = Store(clock)
    found = [
        FleetProbes(
            store, clock, prefix="t:", gateway=name, channel="t:news", faults=(OSError,), away=away
        )
        for name in names
    ]
    running = [asyncio.ensure_future(one.run()) for one in found]
    await asyncio.sleep(0)
    try:
        yield store, *found
    finally:
        for one in running:
            one.cancel()
        await asyncio.wait(running)


async def quiet(*probes: FleetProbes) -> None:
    await until(lambda: not any(len(one) for one in probes))


def test_one_gateway_has_the_place_and_the_count_goes_with_it():
    async def main():
        async with gateways("a", "b") as (store, a, b):
            ours = a.ask("s", 1, 30 * SECOND)
            theirs = b.ask("s", 1, 30 * SECOND)
            answers = [await ours.answered(), await theirs.answered()]
            theirs.free(None)
            ours.free(Handed(good=1))
            await quiet(a, b)
            assert len(store.published) == 1
            assert store.whats == ["take", "take", "free"]
            again = b.ask("s", 2, 30 * SECOND)
            return [*answers, await again.answered()]

    assert run(main()) == [Lent(good=0), Elsewhere(left=LOOK), Lent(good=1)]


def test_whoever_is_refused_asks_again_once_the_lease_ends_but_not_in_a_hurry():
    async def main():
        async with gateways("a", "b") as (_store, a, b):
            await a.ask("s", 1, 2 * SECOND).answered()
            first = await b.ask("s", 1, SECOND).answered()
            await asyncio.sleep(1.99)
            return first, await b.ask("s", 2, SECOND).answered()

    first, last = run(main())
    assert SECOND < first.left <= 2 * SECOND
    assert last == Elsewhere(left=LEAST)


def test_a_refusal_that_news_has_overtaken_is_asked_for_again():
    async def main():
        async with gateways("a", "b") as (store, a, b):
            held = a.ask("s", 1, 30 * SECOND)
            await held.answered()
            store.gate.clear()
            refused = b.ask("s", 1, 30 * SECOND)
            other = b.ask("other", 1, 30 * SECOND)
            await asyncio.sleep(0.01)  # the store has said no, and the answer is on its way
            held.free(Handed(good=1))
            await asyncio.sleep(0.01)
            b.heard("s")
            store.gate.set()
            await other.answered()
            return await refused.answered(), store.whats.count("take")

    assert run(main()) == (Lent(good=1), 4)


def test_a_gateways_own_next_probe_asks_after_its_last_one_was_given_back():
    async def main():
        async with gateways("a") as (_store, a):
            held = a.ask("s", 1, 30 * SECOND)
            await held.answered()
            held.free(Handed(good=1))
            return await a.ask("s", 2, 30 * SECOND).answered()

    assert run(main()) == Lent(good=1)


def test_a_probe_that_did_not_go_leaves_the_count_as_it_was():
    async def main():
        async with gateways("a") as (store, a):
            for handed in (Handed(good=2), None):  # the second did not go
                lease = a.ask("s", 1, SECOND)
                await lease.answered()
                lease.free(handed)
                lease.free(Handed(good=7))  # a second time: nothing
                await quiet(a)
            assert store.whats == ["take", "free"] * 2
            return await a.ask("s", 1, SECOND).answered()

    assert run(main()) == Lent(good=2)


@pytest.mark.parametrize("slow", ["way", "gate"])
def test_a_lease_that_was_given_up_before_the_answer_is_given_back_after_it(slow):
    async def main():
        async with gateways("a") as (store, a):
            getattr(store, slow).clear()
            lease = a.ask("s", 1, 30 * SECOND)
            asking = asyncio.ensure_future(lease.answered())
            await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait([asking])
            lease.free(None)
            await asyncio.sleep(0.01)
            getattr(store, slow).set()
            await quiet(a)
            return store.places["t:probe:s"]["by"], store.whats

    assert run(main()) == ("", ["take", "free"])


def test_a_lease_that_was_given_up_before_it_was_asked_for_is_never_asked_for():
    async def main():
        async with gateways("a") as (store, a):
            first = a.ask("s", 1, SECOND)
            await first.answered()
            store.gate.clear()
            first.free(Handed(good=1))
            second = a.ask("s", 2, SECOND)
            await asyncio.sleep(0.01)
            second.free(None)
            store.gate.set()
            await quiet(a)
            return store.whats

    assert run(main()) == ["take", "free"]


@pytest.mark.parametrize("faults", [1, 2])
def test_the_store_is_asked_twice_before_a_gateway_probes_by_itself(faults):
    async def main():
        async with gateways("a") as (store, a):
            store.faults = faults
            answer = await a.ask("s", 1, SECOND).answered()
            return answer, len(store.asked)

    assert run(main()) == {1: (Lent(good=0), 1), 2: (Lent(good=None), 0)}[faults]


def test_a_store_that_hangs_is_waited_for_a_second_and_what_it_lent_is_given_back():
    async def main():
        async with gateways("a") as (store, a):
            store.gate.clear()
            began = a._clock.now()
            lease = a.ask("s", 1, 30 * SECOND)
            answer = await lease.answered()
            waited = a._clock.now() - began
            lease.free(Handed(good=1))
            store.gate.set()
            await quiet(a)
            return answer, waited, store.places["t:probe:s"]

    answer, waited, place = run(main())
    assert answer == Lent(good=None)
    assert PATIENCE <= waited <= PATIENCE + SECOND // 10
    assert (place["by"], place["good"]) == ("", 1)


def test_while_the_store_is_known_to_be_away_nobody_is_asked():
    async def main():
        async with gateways("a", away=lambda: True) as (store, a):
            lease = a.ask("s", 1, SECOND)
            answer = await lease.answered()
            lease.free(Handed(good=1))
            a.void("s")
            await quiet(a)
            return answer, store.asked

    assert run(main()) == (Lent(), [])


def test_a_lease_that_cannot_be_given_back_is_left_to_its_time():
    async def main():
        async with gateways("a", "b") as (store, a, b):
            lease = a.ask("s", 1, SECOND)
            await lease.answered()
            store.faults = 2
            lease.free(Handed(good=1))
            await quiet(a)
            store.faults = 2
            a.void("s")
            await quiet(a)
            await asyncio.sleep(1)
            return await b.ask("s", 1, SECOND).answered()

    assert run(main()) == Lent(good=0)


def test_a_phase_that_is_over_voids_the_count():
    async def main():
        async with gateways("a") as (_store, a):
            lease = a.ask("s", 1, SECOND)
            await lease.answered()
            lease.free(Handed(good=2))
            await quiet(a)
            a.void("s")
            await quiet(a)
            return await a.ask("s", 1, SECOND).answered()

    assert run(main()) == Lent(good=0)


def test_before_and_after_its_run_a_process_probes_by_itself():
    async def main():
        async with gateways("a") as (store, a):
            lease = a.ask("s", 1, SECOND)
            await lease.answered()
        lease.free(Handed(good=1))
        a.void("s")
        return await a.ask("s", 2, SECOND).answered(), store.whats

    assert run(main()) == (Lent(), ["take"])
