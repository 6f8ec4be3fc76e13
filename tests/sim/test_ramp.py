"""A provider that punishes sudden growth, and the slope limit that keeps below it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.simulate.meters import Quota
from gateway.units import MICRO
from tests.fixtures.fake_transport import FakeProvider
from tests.sim.loop import run
from tests.sim.world import World, policy, sim_clock, snapshot

FLOOR = 100_000
"""Tokens per minute that the provider never calls sudden."""
MINUTES = 8


async def demand(ramp: str) -> tuple[int, int]:
    """Forty agents that ask as fast as they are served; refusals, and calls served."""
    clock = sim_clock()
    up = FakeProvider(clock.now, quota=Quota(ramp=(FLOOR, 150)), first_byte=0.4)
    text = policy(limits="{tpm: 10M}", pool=f"ramp: {ramp}", wait="170s")
    world = await World(snapshot(text), up, clock).ready()
    until = clock.now() + MINUTES * 60 * MICRO
    served = 0

    async def agent(number: int) -> None:
        nonlocal served
        while clock.now() < until:
            told = await world.ask(agent=f"sim-{number}", tokens=2_000, output=20)
            served += told.ok
            await asyncio.sleep(1)

    await asyncio.gather(*(agent(number) for number in range(40)))
    world.nothing_left()
    return up.books.refused["ramp"], served


@pytest.mark.slow
def test_a_slope_that_always_holds_is_never_refused_and_uses_what_may_be_used():
    refused, served = run(demand("{when: always, floor: 66k}"))
    assert refused == 0
    assert served > 0.8 * MINUTES * FLOOR / 2_000


@pytest.mark.slow
def test_after_a_refusal_the_slope_spares_the_provider_most_of_the_others():
    after, _ = run(demand("{floor: 66k}"))
    without, _ = run(demand("{mode: off}"))
    assert after > 0
    assert after * 4 < without
