from __future__ import annotations

import asyncio

import pytest

from tests.sim.loop import Deadlock, VirtualLoop, run


def test_an_hour_passes_at_once():
    async def main():
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run(main()) == 3600.0


def test_equal_deadlines_run_in_the_order_they_were_set():
    async def main():
        seen: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_later(1.0, seen.append, number)
        await asyncio.sleep(2)
        return seen

    assert run(main()) == list(range(50))


def test_a_deadlock_is_an_error_and_not_a_hang():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())


def test_the_loop_relies_on_hooks_that_this_python_still_has():
    loop = asyncio.SelectorEventLoop()
    try:
        hooks = ("_scheduled", "_make_self_pipe", "_close_self_pipe", "_process_self_data")
        assert all(hasattr(loop, hook) for hook in hooks)
    finally:
        loop.close()
    assert issubclass(VirtualLoop, asyncio.SelectorEventLoop)
