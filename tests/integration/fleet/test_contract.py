"""What every `PoolStore` promises: the embedded store and the shared one, the same tests."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gateway.admission.core import Admit, Late, Never, Outcome, Shed
from gateway.units import Mode
from tests.fixtures.waiting import PATIENCE_S, until
from tests.integration.fleet import desk
from tests.integration.fleet.desk import SECOND, ask_of, spec_of, verdict

pytestmark = pytest.mark.integration


@pytest.fixture(params=["local", "shared"])
def opened(request, valkey, prefix):
    """How to open the store of this run."""
    if request.param == "local":
        return desk.local
    return lambda: desk.shared(valkey.url, prefix=prefix)


async def settled(store, pool: str = "pool:p") -> int:
    """Calls in flight, once everything said has been heard."""
    await until(lambda: (view := store.view(pool)) is not None and view.in_flight == 0)
    return store.view(pool).in_flight


def of(test):
    """A test on a loop of its own."""

    def run(opened):
        asyncio.run(test(opened))

    run.__name__ = test.__name__
    return run


@of
async def test_what_fits_is_granted_and_what_was_granted_counts(opened):
    async with opened() as store:
        spec = spec_of()
        got = await verdict(store, spec, ask_of("a"))
        assert isinstance(got, Admit)
        assert got.meter == (SECOND,)
        assert store.view("pool:p").in_flight == 1


@of
async def test_a_settlement_frees_the_permit_and_the_next_in_line_goes(opened):
    async with opened() as store:
        spec = spec_of(concurrency=1)
        await verdict(store, spec, ask_of("a"))
        second = store.acquire(spec, ask_of("b"))
        await asyncio.sleep(0.1)
        assert not second.done()
        store.settle("pool:p", "a", outcome=Outcome.SERVED, actual=(SECOND,))
        assert isinstance(await asyncio.wait_for(second, PATIENCE_S), Admit)


@of
async def test_a_cancelled_wait_leaves_the_line_to_the_next(opened):
    async with opened() as store:
        spec = spec_of(concurrency=1)
        await verdict(store, spec, ask_of("a"))
        gone, next_one = store.acquire(spec, ask_of("b")), store.acquire(spec, ask_of("c"))
        await asyncio.sleep(0.05)
        gone.cancel()
        store.settle("pool:p", "a", outcome=Outcome.SERVED, actual=None)
        assert isinstance(await asyncio.wait_for(next_one, PATIENCE_S), Admit)
        store.settle("pool:p", "c", outcome=Outcome.SERVED, actual=None)
        assert await settled(store) == 0


@of
async def test_a_grant_that_nobody_took_goes_back_in_full(opened):
    async with opened() as store:
        spec = spec_of()
        wait = store.acquire(spec, ask_of("a"))
        if isinstance(wait, asyncio.Future):
            while not wait.done():  # noqa: ASYNC110 - looks at facts of another process
                await asyncio.sleep(0)
            wait.cancel()
        else:
            store.cancel("pool:p", "a")
        assert await settled(store) == 0
        await verdict(store, spec, ask_of("b"))
        assert store.view("pool:p").dimensions[0].used == SECOND


@of
async def test_what_can_never_fit_is_refused_with_its_ceiling(opened):
    async with opened() as store:
        got = await verdict(store, spec_of(), ask_of("a", cost=(10**12,)))
        assert isinstance(got, Never)
        assert got.cost == 10**12
        assert got.because.startswith("pools.p")


@of
async def test_a_queue_beyond_the_deadline_is_refused_at_once(opened):
    async with opened() as store:
        spec = spec_of(limits={"rpm": 60})
        for n in range(60):
            store.acquire(spec, ask_of(f"r{n}"))
        got = await verdict(store, spec, ask_of("late", deadline_in=1_000))
        assert isinstance(got, Shed)
        assert got.eta > SECOND


@of
async def test_the_deadline_ends_a_wait(opened):
    async with opened() as store:
        spec = spec_of(concurrency=1)
        await verdict(store, spec, ask_of("a"))
        got = await verdict(store, spec, ask_of("b", deadline_in=SECOND // 5))
        assert isinstance(got, Late)


@of
async def test_the_deadline_ends_a_wait_of_more_than_a_second(opened):
    """The shared store watches long patiences only once the pool has let them wait."""
    async with opened() as store:
        spec = spec_of(concurrency=1)
        await verdict(store, spec, ask_of("a"))
        began = asyncio.get_running_loop().time()
        got = await verdict(store, spec, ask_of("b", deadline_in=SECOND * 13 // 10))
        assert isinstance(got, Late)
        assert asyncio.get_running_loop().time() - began >= 1.25


@of
async def test_the_more_urgent_lane_goes_first(opened):
    async with opened() as store:
        spec = spec_of(concurrency=1)
        await verdict(store, spec, ask_of("a"))
        order = []

        async def one(rid, lane):
            await verdict(store, spec, ask_of(rid, lane=lane))
            order.append(rid)
            store.settle("pool:p", rid, outcome=Outcome.SERVED, actual=None)

        async with asyncio.TaskGroup() as tasks:
            for rid, lane in (("low", 3), ("mid", 2), ("high", 1)):
                tasks.create_task(one(rid, lane))
                await asyncio.sleep(0.05)
            store.settle("pool:p", "a", outcome=Outcome.SERVED, actual=None)
        assert order == ["high", "mid", "low"]


@of
async def test_repeating_an_input_changes_nothing(opened):
    async with opened() as store:
        spec = spec_of()
        await verdict(store, spec, ask_of("a"))
        for _ in range(3):
            store.settle("pool:p", "a", outcome=Outcome.SERVED, actual=(SECOND // 2,))
            store.cancel("pool:p", "a")
        assert await settled(store) == 0
        await verdict(store, spec, ask_of("b"))
        assert store.view("pool:p").dimensions[0].used == SECOND + SECOND // 2


@of
async def test_a_budget_refuses_instead_of_queueing(opened):
    async with opened() as store:
        spec = spec_of(limits={"rpm": 1}, queue=False)
        await verdict(store, spec, ask_of("a"))
        got = await verdict(store, spec, ask_of("b"))
        assert isinstance(got, Shed)


@of
async def test_a_pool_that_is_off_admits_everything(opened):
    from dataclasses import replace

    async with opened() as store:
        spec = replace(spec_of(limits={"rpm": 1}), mode=Mode.OFF)
        got = [await verdict(store, spec, ask_of(f"r{n}")) for n in range(5)]
        assert all(isinstance(one, Admit) for one in got)


@of
async def test_newer_rules_free_those_who_wait(opened):
    from dataclasses import replace

    async with opened() as store:
        spec = spec_of(concurrency=1)
        await verdict(store, spec, ask_of("a"))
        second = store.acquire(spec, ask_of("b"))
        await asyncio.sleep(0.05)
        store.follow(replace(spec, concurrency=5, revision=2))
        assert isinstance(await asyncio.wait_for(second, PATIENCE_S), Admit)


@of
async def test_a_refusal_by_the_provider_blocks_the_pool_as_long_as_it_says(opened):
    async with opened() as store:
        spec = spec_of()
        await verdict(store, spec, ask_of("a"))
        store.settle("pool:p", "a", outcome=Outcome.QUOTA, actual=None, retry_after=SECOND // 2)
        began = asyncio.get_running_loop().time()
        await verdict(store, spec, ask_of("b"))
        assert asyncio.get_running_loop().time() - began >= 0.45
        assert store.view("pool:p").factor_ppm < 1_000_000


@of
async def test_closing_lets_waiters_go_with_a_soft_refusal(opened):
    with contextlib.suppress(asyncio.CancelledError):
        async with opened() as store:
            spec = spec_of(concurrency=1)
            await verdict(store, spec, ask_of("a"))
            waiting = store.acquire(spec, ask_of("b"))
            await asyncio.sleep(0.05)
            await store.close()
            assert isinstance(await waiting, Shed)
