from __future__ import annotations

import asyncio

import pytest

from gateway.clock import GRANULARITY, Expiry, LoopClock
from gateway.units import MICRO
from tests.sim.loop import run


def test_deadlines_fire_in_order_and_at_most_one_granule_late():
    async def main():
        clock = LoopClock()
        start = clock.now()
        fired: list[tuple[int, int]] = []
        for delay in (300_000, 100_000, 200_000, 100_000):
            clock.after(delay, lambda delay=delay: fired.append((delay, clock.now() - start)))
        await clock.sleep(1)
        return fired

    fired = run(main())
    assert [delay for delay, _ in fired] == [100_000, 100_000, 200_000, 300_000]
    assert all(delay <= at <= delay + GRANULARITY + 25_000 for delay, at in fired)


def test_a_cancelled_deadline_never_fires():
    async def main():
        clock, fired = LoopClock(), []
        timer = clock.after(100_000, lambda: fired.append(1))
        timer.cancel()
        await clock.sleep(1)
        return fired

    assert run(main()) == []


def test_a_hundred_thousand_cancelled_deadlines_are_forgotten():
    async def main():
        clock = LoopClock()
        for _ in range(100_000):
            clock.after(3_600 * MICRO, lambda: None).cancel()
        return len(clock.deadlines)

    assert run(main()) < 2_100


def test_one_loop_timer_serves_all_deadlines():
    async def main():
        clock = LoopClock()
        for step in range(1000):
            clock.after(step * 1000 + 60_000_000, lambda: None)
        loop = asyncio.get_running_loop()
        return sum(1 for timer in loop._scheduled if not timer.cancelled())

    assert run(main()) == 1


def test_an_expiry_becomes_a_timeout():
    async def main():
        clock = LoopClock()
        with Expiry(clock, MICRO):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(main())


def test_an_expiry_leaves_work_in_time_alone():
    async def main():
        clock = LoopClock()
        with Expiry(clock, MICRO):
            await clock.sleep(0.2)
        await clock.sleep(5)
        return "fine"

    assert run(main()) == "fine"


def test_somebody_elses_cancellation_stays_a_cancellation():
    async def main():
        clock = LoopClock()

        async def work():
            with Expiry(clock, 10 * MICRO):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(work())
        await clock.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert run(main())


def test_an_alarm_is_precise_and_counted():
    async def main():
        clock, at = LoopClock(), []
        start = clock.now()
        clock.alarm(start + 123_457, lambda: at.append(clock.now() - start))
        armed = clock.alarms_armed
        await clock.sleep(1)
        return at, armed, clock.alarms_armed

    assert run(main()) == ([123_457], 1, 0)
