"""Gathering what is told together, whatever the store's client does."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.clock import LoopClock
from gateway.gathering import Gathering, Pending


class Deaf(Gathering[Pending]):
    """Its exchange answers where it is cancelled, as `asyncio.wait_for` of Python 3.11 does."""

    def __init__(self) -> None:
        super().__init__(LoopClock(), faults=(OSError,), away=lambda: False)
        self.under_way = asyncio.Event()

    async def exchange(self, taken: list[Pending]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self.under_way.set()
            await asyncio.Event().wait()


def test_it_ends_though_its_exchange_has_swallowed_that():
    async def main():
        deaf = Deaf()
        running = asyncio.create_task(deaf.run())
        deaf.put(1, Pending())
        deaf.hurry()
        await deaf.under_way.wait()
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        return running.cancelled()

    assert asyncio.run(main())
