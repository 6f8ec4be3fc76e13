"""A caller's own limits: when it is told to come back, and what its SDK reads of them."""

from __future__ import annotations

import asyncio

from gateway.errors import QueueFull
from gateway.units import MICRO
from tests.sim.loop import run
from tests.sim.test_gateway import at, world
from tests.sim.world import policy


def own_limits(text: str) -> str:
    """The policy whose agent has these limits of its own."""
    return policy().replace(
        "    loopback_only: true", f"    loopback_only: true\n    limits: {text}"
    )


def test_a_limit_that_allows_no_wait_says_when_it_will_serve():
    async def main():
        w = await world(own_limits("{rpm: 2, max_wait: 0s}"))
        assert (await w.ask()).ok
        await asyncio.sleep(10.0)
        assert (await w.ask()).ok
        told = await w.ask()
        assert isinstance(told.error, QueueFull)
        assert told.error.because == "agents.load.limits.rpm"
        await asyncio.sleep(told.error.retry_after / MICRO - 1.0)
        assert not (await w.ask()).ok
        await asyncio.sleep(1.0)
        assert (await w.ask()).ok
        w.nothing_left()

    run(main())


def test_a_refusal_carries_the_callers_own_limits_as_its_sdk_reads_them():
    async def main():
        w = await world(own_limits("{rpm: 2, max_wait: 0s}"))
        for _ in range(2):
            assert (await w.ask()).ok
        told = await w.ask()
        headers = dict(told.call.extra_headers)
        assert headers[b"x-ratelimit-limit-requests"] == b"2"
        assert headers[b"x-ratelimit-remaining-requests"] == b"0"

    run(main())


def test_a_limit_in_shadow_holds_nobody_back_and_is_not_shown_to_its_caller():
    async def main():
        w = await world(own_limits("{rpm: 2, max_wait: 0s, mode: shadow}"))
        told = [await w.ask() for _ in range(4)]
        assert all(one.ok for one in told)
        names = {name for one in told for name, _ in one.call.extra_headers}
        assert not [name for name in names if b"ratelimit" in name]
        assert w.view("agent:sim-1").would_have_waited == 2

    run(main())


def test_a_call_that_waited_in_vain_is_told_for_how_long():
    async def main():
        w = await world(own_limits("{concurrency: 1, max_wait: 1s}"), first_byte=30.0)
        first, late = await asyncio.gather(w.ask(), at(0.1, w.ask()))
        assert first.ok
        assert "waited 1 s" in late.error.message
        assert late.error.because == "agents.load.limits.concurrency"

    run(main())
