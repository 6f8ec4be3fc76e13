from __future__ import annotations

import asyncio
from random import Random

import pytest

from gateway.call import Bytes, Call, Dialect, End, Family, Fields, Kind, Reply
from gateway.clock import LoopClock
from gateway.errors import BreakerOpen, UpstreamUnreachable
from gateway.layers.trip import Breakers, Tripping
from gateway.snapshot import BreakerRules, Deployment, Provider, Snapshot, Tier
from gateway.units import MICRO
from tests.sim.loop import run

RUNG = Deployment(
    id="p/m", provider=Provider(name="p", dialects=frozenset({"openai"}), base_url="http://up")
)


def call(number: int = 1, *, lane: int = 2, patience: int = 60, rungs_left: int = 0) -> Call:
    made = Call(
        id=f"c{number}", dialect=Dialect.CHAT, family=Family.OPENAI, method="POST", path="/",
        target=b"/", headers=[], received=0,
        snapshot=Snapshot(revision=1, digest="", breaker=BreakerRules(in_a_row=1)),
    )  # fmt: skip
    made.fields = Fields(model="m")
    made.deployment = RUNG
    made.tier = Tier(name="t", number=lane)
    made.deadline = LoopClock().now() + patience * MICRO
    made.rungs_left = rungs_left
    return made


def layer(breakers: Breakers):
    return Tripping(breakers=breakers, clock=LoopClock(), rng=Random(1))


async def away(_call):
    raise UpstreamUnreachable("away", code="connect_failed")


async def well(_call):
    return Reply(status=200, headers=[], source=Bytes(b""))


def test_the_call_whose_failure_opens_the_breaker_is_not_cancelled_by_it():
    async def main():
        service = layer(Breakers())(away)
        with pytest.raises(UpstreamUnreachable):
            await service(call())
        await asyncio.sleep(0.1)  # a cancellation left behind would strike here
        return asyncio.current_task().cancelling()

    assert run(main()) == 0


def test_calls_still_in_a_pool_leave_it_when_the_breaker_opens_and_wait_for_it():
    async def main():
        breakers, gate = Breakers(), asyncio.Event()
        seen: list[str] = []

        async def inner(one: Call) -> Reply:
            seen.append(one.id)
            if one.id == "c1":
                raise UpstreamUnreachable("away", code="connect_failed")
            if seen.count(one.id) == 1:
                await gate.wait()  # stands in its pool, nothing sent
            return await well(one)

        service = layer(breakers)(inner)
        waiting = asyncio.ensure_future(service(call(2)))
        await asyncio.sleep(0)
        with pytest.raises(UpstreamUnreachable):
            await service(call(1))
        reply = await waiting
        return seen, reply.status

    assert run(main()) == (["c2", "c1", "c2"], 200)


def test_with_a_rung_left_an_open_breaker_refuses_at_once():
    async def main():
        service = layer(Breakers())(away)
        with pytest.raises(UpstreamUnreachable):
            await service(call(1))
        with pytest.raises(BreakerOpen) as refused:
            await service(call(2, rungs_left=1))
        return refused.value

    refused = run(main())
    assert refused.because == "breakers"
    assert refused.retry_after is not None


def test_a_caller_that_leaves_and_a_callers_fault_say_nothing_of_the_upstream():
    async def main():
        breakers = Breakers()

        async def faulty(_call):
            reply = Reply(status=400, headers=[], source=Bytes(b""))
            reply.kind = Kind.CALLER
            return reply

        for _ in range(20):
            reply = await layer(breakers)(faulty)(call())
            await reply.close(End.COMPLETE)
            reply = await layer(breakers)(well)(call())
            await reply.close(End.CLIENT_GONE)
        return [breaker.state.value for _, breaker in breakers]

    assert run(main()) == ["closed"]


def test_a_stream_that_is_cut_after_it_began_is_a_failure():
    async def main():
        breakers = Breakers()
        reply = await layer(breakers)(well)(call())
        await reply.close(End.CUT)
        return [breaker.state.value for _, breaker in breakers]

    assert run(main()) == ["open"]


def test_failures_are_counted_once_each():
    async def main():
        counted: list[str] = []
        service = layer(Breakers(on_failure=counted.append))(away)
        with pytest.raises(UpstreamUnreachable):
            await service(call())
        return counted

    assert run(main()) == ["p/m"]
