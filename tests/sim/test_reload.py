"""A new policy holds at once, also for those who wait when nobody else calls."""

from __future__ import annotations

import asyncio

import pytest

from gateway.machine import pools_of
from tests.sim.loop import run
from tests.sim.test_gateway import at, world
from tests.sim.world import policy, snapshot


def reloaded(w, text: str) -> None:
    w.snapshot = snapshot(text, revision=2)
    for pool in pools_of(w.snapshot):
        w.store.follow(pool)


def test_a_raised_limit_frees_those_who_wait_without_another_call():
    async def main():
        w = await world(policy(limits="{rpm: 2}"))
        for _ in range(2):
            assert (await w.ask()).ok
        waiting = asyncio.get_running_loop().create_task(w.ask())
        await asyncio.sleep(3.0)
        assert w.store.waiting() == 1
        reloaded(w, policy(limits="{rpm: 6000}"))
        told = await waiting
        assert told.ok
        assert told.queued == pytest.approx(3.0, abs=0.1)
        w.nothing_left()

    run(main())


def test_a_lowered_limit_forgets_nothing_of_what_was_used():
    async def main():
        w = await world(policy(limits="{rpm: 20}", wait="120s"))
        for _ in range(10):
            assert (await w.ask()).ok
        reloaded(w, policy(limits="{rpm: 10}"))
        told = await w.ask()
        assert told.ok
        assert told.queued > 30.0
        w.nothing_left()

    run(main())


def test_an_older_policy_changes_nothing():
    async def main():
        w = await world(policy(limits="{rpm: 6000}"))
        assert (await w.ask()).ok
        reloaded(w, policy(limits="{rpm: 3000}"))
        for pool in pools_of(snapshot(policy(limits="{rpm: 2}"), revision=1)):
            w.store.follow(pool)
        told = await asyncio.gather(*(at(n * 0.1, w.ask()) for n in range(5)))
        assert all(one.queued < 0.1 for one in told)

    run(main())


def test_every_kind_of_pool_is_named():
    text = policy(
        more="""\
  own:
    keys: [{key: tg_own_0123456789abcdef0123}]
    limits: {rpm: 5}
    budgets: [{tokens: 1M, per: day}]
"""
    )
    names = {pool.name for pool in pools_of(snapshot(text))}
    assert {"pool:quota", "agent:own", "agent:own:tokens:day"} <= names
