"""A caller's own limits: when it is told to come back, and what its SDK reads of them."""

from __future__ import annotations

import asyncio

from gateway.errors import QueueFull
from gateway.units import MICRO
from tests.sim.loop import run
from tests.sim.test_gateway import world
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
