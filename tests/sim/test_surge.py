"""A surge of six times the quota against an exact meter: nobody refused, little unused."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from functools import cache

import pytest

from gateway.simulate.meters import Demand, Quota, Refusal, Shape
from gateway.units import MICRO
from tests.fixtures.fake_transport import FakeProvider
from tests.sim.loop import run
from tests.sim.world import Told, World, policy, sim_clock, snapshot

LIMIT = 2_000_000
SURGE = 66.0


@dataclass
class Outcome:
    told: list[Told] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)
    charges: list[tuple[int, int]] = field(default_factory=list)
    began: int = 0
    refused: int = 0
    foreign_refused: int = 0
    signalled: int = 0

    def fill(self, second: int) -> float:
        """Share of the quota that the provider's meter held at that second."""
        until = self.began + second * MICRO
        held = sum(c for at, c in self.charges if until - 60 * MICRO < at <= until)
        return held / LIMIT

    def use(self) -> float:
        """Mean share held while calls waited, once a whole window had passed."""
        fills = [self.fill(at) for at, count in self.waiting.items() if at > 60 and count]
        return sum(fills) / len(fills)

    def wait(self, tier: int, share: float) -> float:
        waits = sorted(t.queued for t in self.told if t.call and t.call.tier.number == tier)
        return waits[int(share * (len(waits) - 1))]


async def surge(seed: int, *, pool: str, foreign: float = 0.0) -> Outcome:
    clock = sim_clock()
    loop = asyncio.get_running_loop()
    quota = Quota(shape=Shape.SLIDING, tokens=LIMIT, requests=10_000)
    up = FakeProvider(clock.now, quota=quota, first_byte=0.4, per_token=1 / 300, announce=True)
    text = policy(limits="{tpm: 2M, rpm: 10000}", pool=pool, wait="170s")
    world = await World(snapshot(text), up, clock, seed=seed).ready()
    out = Outcome(began=clock.now(), charges=up.books.charges)

    async def agent(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        tier = 1 if number < 40 else 2 if number < 200 else 3
        await asyncio.sleep(draw.random() * 6)
        while loop.time() < SURGE:
            tokens = min(120_000, max(50, int(1500 * math.exp(1.1 * draw.gauss(0, 1)))))
            output = min(2_000, max(5, int(200 * math.exp(0.7 * draw.gauss(0, 1)))))
            told = await world.ask(
                agent=f"sim-{number}", tier=tier, tokens=tokens, output=output,
                stream=number % 2 == 0,
            )  # fmt: skip
            out.told.append(told)
            await asyncio.sleep(draw.expovariate(1 / 6))

    async def watch() -> None:
        for second in range(1, 80):
            await asyncio.sleep(second - loop.time())
            out.waiting[second] = world.store.waiting()
            out.signalled = max(out.signalled, world.view().dimensions[1].foreign // MICRO)

    async def others() -> None:
        """Somebody else uses the same quota from the fifth second on."""
        while foreign and loop.time() < 80:
            await asyncio.sleep(0.5)
            if loop.time() > 5:
                share = int(LIMIT / 60 * foreign * 0.5)
                verdict = up.provider.arrive(clock.now(), Demand(input=share))
                if isinstance(verdict, Refusal):
                    out.foreign_refused += 1
                else:
                    up.charge(clock.now(), share)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        group.create_task(others())
        for number in range(400):
            group.create_task(agent(number))
    out.refused = sum(up.books.refused.values())
    world.nothing_left()
    return out


@cache
def surged(seed: int, pool: str = "mode: enforce", foreign: float = 0.0) -> Outcome:
    """Each surge is played once, however many tests look at it."""
    return run(surge(seed, pool=pool, foreign=foreign))


RESERVE = "guard: 0.5%\n    pace: 105%\n    ceilings: {standard: 99%, batch: 99%}"


@pytest.mark.slow
def test_a_surge_is_never_refused_and_leaves_little_unused():
    out = surged(1)
    assert out.refused == 0
    assert all(told.ok for told in out.told)
    assert out.use() >= 0.97


def test_a_surge_into_an_empty_window_leaves_no_hole_for_the_most_urgent():
    assert surged(1).wait(1, 0.99) <= 2.5  # 6.5 s where the window fills faster than it moves


def test_our_own_rise_between_grant_and_head_is_not_taken_for_foreign_use():
    assert surged(1).signalled == 0


@pytest.mark.slow
def test_a_small_reserve_keeps_the_most_urgent_below_a_second():
    out = surged(2, RESERVE)
    assert out.refused == 0
    assert out.use() >= 0.97
    assert out.wait(1, 0.99) <= 0.7
    assert out.wait(1, 0.99) < out.wait(2, 0.5) < out.wait(3, 0.5)


@pytest.mark.slow
def test_a_foreign_consumer_of_a_fifth_is_noticed_and_made_room_for():
    out = surged(3, foreign=0.2)
    assert LIMIT * 0.15 < out.signalled < LIMIT * 0.25
    assert out.use() >= 0.95
    # It grows from nothing while our own large calls leave seconds without a head to read from.
    # Without feedback hundreds are refused.
    assert out.refused + out.foreign_refused <= 25
    assert all(told.ok for told in out.told)
