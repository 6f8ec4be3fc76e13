"""Stores for tests, over real servers and over the core in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from gateway.admission.core import Ask
from gateway.admission.fleet import FAULTS, RedisLink
from gateway.admission.local import LocalStore
from gateway.admission.profiles import pool_spec
from gateway.admission.remote import TIMEOUT, FailMode
from gateway.admission.shared import SharedStore
from gateway.clock import LoopClock
from tests.fixtures.waiting import PATIENCE_S

SECOND = 1_000_000
_numbers = itertools.count()


def spec_of(name: str = "pool:p", *, limits=None, **options):
    return pool_spec(name=name, limits=limits or {"rpm": 6_000}, because="pools.p", **options)


def ask_of(rid: str, **changes) -> Ask:
    fields = {
        "rid": rid, "lane": 1, "tenant": "t", "weight": 1, "deadline_in": 20 * SECOND,
        "cost": (SECOND,),
    }  # fmt: skip
    return Ask(**{**fields, **changes})


@contextlib.asynccontextmanager
async def local():
    store = LocalStore(LoopClock(precise=True))
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def shared(url: str, *, mode=FailMode.LOCAL, cold: bool = False, prefix="tidegate:", **more):
    """A store of its own gateway at that server."""
    clock = more.pop("clock", None) or LoopClock(precise=True)
    link = RedisLink(url, timeout=TIMEOUT)
    store = SharedStore(
        link, clock, gateway=f"g{next(_numbers)}", faults=FAULTS, prefix=prefix, mode=mode,
        cold=cold, **more,
    )  # fmt: skip
    ready = asyncio.Event()
    running = asyncio.create_task(store.run(ready.set))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ready.wait(), 10)
    try:
        yield store
    finally:
        await store.close()
        assert not running.done(), "the store's own tasks ended early"
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def verdict(store, spec, ask, *, within: float = PATIENCE_S):
    found = store.acquire(spec, ask)
    return await asyncio.wait_for(found, within) if isinstance(found, asyncio.Future) else found
