"""Two engines of virtual time, one workload: the heap and the asyncio loop grant alike.

The heap runs pure functions for `tidegate simulate`; the loop runs the gateway's own store with its
futures and alarms. If they ever differ, one of them simulates something else than what is served.
"""

from __future__ import annotations

import asyncio
import random
from hashlib import blake2b

import pytest

from gateway.admission.core import Admit, Ask, Outcome, Settle
from gateway.admission.local import LocalStore
from gateway.admission.profiles import Profile, Shape, pool_spec
from gateway.simulate.engine import Engine
from gateway.simulate.link import Near
from gateway.units import MICRO
from tests.sim.loop import run
from tests.sim.world import START, sim_clock

CALLS = 600


class Job:
    """A call: when it asks, what it reserves, how long it takes, what it really cost."""

    def __init__(self, number: int, draw: random.Random) -> None:
        self.rid = f"r{number}"
        # Uneven instants: no two events of the whole run fall on one microsecond.
        self.at = draw.randrange(60 * MICRO) * 8 + 1
        self.lane = draw.choice([1, 2, 2, 3, 3, 3])
        self.tenant = f"t{draw.randrange(5)}"
        tokens = draw.randrange(50, 4_000)
        self.cost = (MICRO, tokens * MICRO)
        self.actual = (MICRO, draw.randrange(20, tokens + 500) * MICRO)
        self.takes = draw.randrange(4 * MICRO) * 8 + 3
        self.leaves = draw.randrange(1_000_000) if draw.random() < 0.05 else 0

    def ask(self) -> Ask:
        return Ask(
            rid=self.rid, lane=self.lane, tenant=self.tenant, weight=1 + len(self.rid) % 3,
            deadline_in=400 * MICRO, cost=self.cost,
        )  # fmt: skip


def jobs(seed: int) -> list[Job]:
    draw = random.Random(seed)
    return [Job(number, draw) for number in range(CALLS)]


def spec(shape: Shape):
    return pool_spec(
        name="pool:p", limits={"rpm": 400, "tpm": 100_000}, shape=shape, profile=Profile.REALTIME
    )


def on_the_heap(seed: int, shape: Shape) -> list[tuple[str, int, tuple[int, ...]]]:
    """Grants in order: who, when, and what the meter held."""
    engine, granted = Engine(START), []

    def told(job, verdict) -> None:
        if isinstance(verdict, Admit):
            granted.append((job.rid, engine.now - START, verdict.meter))
            engine.after(job.takes, done, job)

    near = Near(engine, spec(shape), told)

    def ask(job) -> None:
        verdict = near.acquire(job.ask(), job)
        if verdict is not None:
            told(job, verdict)
        elif job.leaves:
            engine.after(job.leaves, leave, job)

    def leave(job) -> None:
        if job.rid in near._waits:
            near.cancel(job.rid)

    def done(job) -> None:
        near.settle(Settle(job.rid, Outcome.SERVED, job.actual))

    for job in jobs(seed):
        engine.at(START + job.at, ask, job)
    engine.run(START + 3_600 * MICRO)
    return granted


def on_the_loop(seed: int, shape: Shape) -> list[tuple[str, int, tuple[int, ...]]]:
    granted = []

    async def main() -> None:
        clock = sim_clock()
        store = LocalStore(clock)

        async def call(job: Job) -> None:
            await clock.sleep(job.at / MICRO)
            verdict = store.acquire(spec(shape), job.ask())
            if isinstance(verdict, asyncio.Future):
                if job.leaves:
                    asyncio.get_running_loop().call_later(job.leaves / MICRO, verdict.cancel)
                try:
                    verdict = await verdict
                except asyncio.CancelledError:
                    return
            if isinstance(verdict, Admit):
                granted.append((job.rid, clock.now() - START, verdict.meter))
                await clock.sleep(job.takes / MICRO)
                store.settle("pool:p", job.rid, outcome=Outcome.SERVED, actual=job.actual)

        async with asyncio.TaskGroup() as group:
            for job in jobs(seed):
                group.create_task(call(job))
        await store.close()

    run(main())
    return granted


def digest(granted) -> str:
    return blake2b(repr(granted).encode(), digest_size=8).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape.BUCKET, Shape.WINDOW])
@pytest.mark.parametrize("seed", [1, 2])
def test_heap_and_loop_grant_the_same_calls_in_the_same_order_at_the_same_instants(seed, shape):
    heap, loop = on_the_heap(seed, shape), on_the_loop(seed, shape)
    assert len(heap) > CALLS // 2
    assert [entry[0] for entry in heap] == [entry[0] for entry in loop]
    assert digest([entry[0] for entry in heap]) == digest([entry[0] for entry in loop])
    late = max(abs(one[1] - other[1]) for one, other in zip(heap, loop, strict=True))
    assert late <= 2, late  # asyncio keeps time as floats of seconds
