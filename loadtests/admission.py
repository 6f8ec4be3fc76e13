"""What an admission costs: `python -m loadtests.admission --json` (about 50 s).

`local_cpu_us` is the CPU of one acquire and one settlement through `LocalStore`, uncontended, the
ask built by the caller included: 500 requests and 450,000 tokens per minute scaled so that all fit,
seven tenants, settled below the estimate. `local_cpu_us_saturated` is the same while a line of 200
waits, per call granted. `control_cpu_us` is a naive limiter in the same loop (one bucket, one dict,
no order, no log): it says how fast this machine is today. Rounds alternate.

`bytes_per_waiter` is what one waiting call adds to the pool core, `bytes_per_waiter_store` what it
adds in all, with its ask, future and deadline timer; `bytes_per_pool` what one key's own pool
holds. `calls_idle` counts ticks of a store that has pools and nobody waiting, over two seconds.

The shared store runs on a real server of this machine; its figures are the server's own CPU
accounting (`INFO cpu`), user and system, protocol included:

    redis_cpu_us_single   per call of the pool's function that settles one attempt and admits one
    redis_cpu_us_batch16  per admission and settlement where sixteen of each ride in one call
    redis_cpu_us_floor    per call of a function that does nothing, with as many bytes there and
                          back as the single call, in the same rounds: what server, kernel and this
                          machine take for any call at all
    client_cpu_us_single  of this process, per acquire and settlement through `SharedStore`, one
                          after the other: nothing rides along
    script_calls_per_op   calls of the function per acquire and settlement, 64 tasks in a loop
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.admission.core import Admit, Ask, Caller, Outcome, PoolCore, Settle
from gateway.admission.fleet import FAULTS, RedisLink
from gateway.admission.local import LocalStore
from gateway.admission.packing import Batch, pack_batch, pack_rules, unpack_answer
from gateway.admission.profiles import Shape, pool_spec
from gateway.admission.shared import SharedStore
from gateway.clock import LoopClock
from gateway.units import MICRO
from loadtests.measure import finish, say, summary
from loadtests.redis_server import Store

ROUNDS = 15
CALLS = 3_000
WAITERS = 10_000
LINE = 200
POOLS = 2_000
SHARED_ROUNDS = 5
POOL, CHANNEL = "bench:{wide}", "bench:"
ANSWERED = 201
"""Bytes of the answer to one settlement and one admission."""

WIDE = pool_spec(name="wide", limits={"rpm": 30_000_000, "tpm": 9_000_000_000}, because="wide")
ONE = pool_spec(name="one", limits={"rpm": 30_000_000}, concurrency=1, because="one")


def ask_of(number: int, cost: tuple[int, ...] = (MICRO, 1_000 * MICRO)) -> Ask:
    return Ask(
        rid=f"req-{number}.1",
        lane=2,
        tenant=f"tenant-{number % 7}",
        weight=1,
        deadline_in=120 * MICRO,
        cost=cost,
    )


def uncontended(clock: LoopClock) -> float:
    """CPU micros per acquire and settlement."""
    store, actual = LocalStore(clock), (MICRO, 600 * MICRO)
    began = time.process_time()
    for number in range(CALLS):
        ask = ask_of(number)
        if not isinstance(store.acquire(WIDE, ask), Admit):
            raise TypeError("an uncontended call waited")
        store.settle("wide", ask.rid, outcome=Outcome.SERVED, actual=actual)
    return (time.process_time() - began) / CALLS * 1e6


async def saturated(clock: LoopClock) -> float:
    """CPU micros per call that waits in a line of `LINE` and is granted by a settlement."""
    store, cost = LocalStore(clock), (MICRO,)
    held = ask_of(0, cost)
    store.acquire(ONE, held)
    line = [(ask := ask_of(n, cost), store.acquire(ONE, ask)) for n in range(1, LINE + 1)]
    began = time.process_time()
    for number in range(LINE + 1, LINE + 1 + CALLS):
        ask = ask_of(number, cost)
        line.append((ask, store.acquire(ONE, ask)))
        store.settle("one", held.rid, outcome=Outcome.SERVED, actual=None)
        held, wait = next((pair for pair in line[:8] if pair[1].done()), line[0])
        line.remove((held, wait))
        if not isinstance(await wait, Admit):
            raise TypeError("a waiter was refused")
    spent = (time.process_time() - began) / CALLS * 1e6
    await store.close()
    return spent


class Naive:
    """One token bucket and who is in flight: no order, no window, no reasons."""

    def __init__(self, rate: float, most: float) -> None:
        self.rate, self.most, self.level, self.at = rate, most, 0.0, 0.0
        self.held: dict[str, float] = {}

    def acquire(self, rid: str, cost: float, now: float) -> bool:
        self.level = max(0.0, self.level - (now - self.at) * self.rate)
        self.at = now
        if self.level + cost > self.most:
            return False
        self.level += cost
        self.held[rid] = cost
        return True

    def settle(self, rid: str, actual: float) -> None:
        self.level = max(0.0, self.level + actual - self.held.pop(rid))


def control(clock: LoopClock) -> float:
    """CPU micros of the naive limiter per acquire and settlement."""
    naive = Naive(150.0, 450_000_000.0)
    began = time.process_time()
    for number in range(CALLS):
        ask = ask_of(number)
        naive.acquire(ask.rid, 1_000.0, clock.now())
        naive.settle(ask.rid, 600.0)
    return (time.process_time() - began) / CALLS * 1e6


def grown(make: object) -> float:
    """Bytes that a call adds to the heap, its result kept alive."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = make()  # type: ignore[operator]
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return float(after - before)


def bytes_per_waiter(clock: LoopClock) -> float:
    """In the core alone: asks belong to their callers and exist before."""
    now, asks = clock.now(), [ask_of(n, (MICRO,)) for n in range(WAITERS + 1)]
    core, caller = PoolCore(ONE, now), Caller("measured")

    def fill() -> PoolCore:
        for ask in asks:
            core.tick(now, caller, acquires=(ask,))
        return core

    return grown(fill) / WAITERS


def bytes_per_waiter_store(clock: LoopClock) -> float:
    """With ask, future and deadline timer."""
    store = LocalStore(clock)
    store.acquire(ONE, ask_of(0, (MICRO,)))
    waits: list[object] = []

    def fill() -> list[object]:
        waits.extend(store.acquire(ONE, ask_of(n, (MICRO,))) for n in range(1, WAITERS + 1))
        return waits

    size = grown(fill) / WAITERS
    for wait in waits:
        wait.cancel()  # type: ignore[attr-defined]
    return size


def bytes_per_pool(clock: LoopClock) -> float:
    """One key's own limit, used once."""
    store = LocalStore(clock)

    def fill() -> LocalStore:
        for number in range(POOLS):
            spec = pool_spec(
                name=f"agent:{number}", limits={"rpm": 1_000}, shape=Shape.OWN, because="agents"
            )
            ask = ask_of(number, (MICRO,))
            store.acquire(spec, ask)
            store.settle(spec.name, ask.rid, outcome=Outcome.SERVED, actual=None)
        return store

    return grown(fill) / POOLS


async def calls_idle(clock: LoopClock) -> int:
    """Ticks of an idle store over two seconds."""
    store = LocalStore(clock)
    store.acquire(ONE, ask_of(0, (MICRO,)))
    wait = store.acquire(ONE, ask_of(1, (MICRO,)))
    wait.cancel()
    before = store.ticks()
    await clock.sleep(2)
    return store.ticks() - before


# --- the shared store


async def server_cpu(store: Store, batch: int, seconds: float) -> float:
    """The server's CPU micros per admission and settlement, so many of each in one call."""
    link = RedisLink(store.url, timeout=MICRO)
    rules, cost, used = pack_rules(WIDE), (MICRO, 1_000 * MICRO), (MICRO, 600 * MICRO)
    over: list[Ask] = []

    async def call(number: int, body: bytes = b"") -> None:
        nonlocal over
        asks = [ask_of(number * batch + k, cost) for k in range(batch)]
        done = [Settle(ask.rid, Outcome.SERVED, used) for ask in over]
        over = asks
        load = Batch(caller=Caller("bench"), settles=done, acquires=asks, cold=False)
        raw = await link.call(POOL, pack_batch(load, rules), body, CHANNEL)
        if len(unpack_answer(raw).reply.events) != batch:  # type: ignore[union-attr]
            raise TypeError("an uncontended call waited")

    try:
        with store.client() as client:
            client.flushall()
        await call(0, rules.body)
        return await per_call(store, call, seconds) / batch
    finally:
        await link.close()


async def floor_cpu(store: Store, seconds: float) -> float:
    """The server's CPU micros per call of a function that does nothing.

    It takes and gives as many bytes as a call that settles one attempt and admits one.
    """
    rules, ask = pack_rules(WIDE), ask_of(10_000, (MICRO, 1_000 * MICRO))
    done = Settle(ask.rid, Outcome.SERVED, (MICRO, 600 * MICRO))
    load = Batch(caller=Caller("bench"), settles=[done], acquires=[ask], cold=False)
    taken = pack_batch(load, rules)
    name = "tidegate_floor"
    source = (
        f"#!lua name={name}\nlocal answer = '{'x' * ANSWERED}'\n"
        f"redis.register_function('{name}', function(keys, args) return answer end)"
    )
    link = RedisLink(store.url, timeout=MICRO, library=(name, source.encode()))

    async def call(_: int) -> None:
        if len(await link.call(POOL, taken, b"", CHANNEL)) != ANSWERED:
            raise TypeError("another answer")

    try:
        return await per_call(store, call, seconds)
    finally:
        await link.close()


async def per_call(store: Store, call: Callable[[int], Awaitable[None]], seconds: float) -> float:
    """The server's CPU micros per call, after two hundred of them."""
    for number in range(1, 200):
        await call(number)
    cpu, number, began = store.cpu_s(), 200, time.monotonic()
    while time.monotonic() - began < seconds:
        await call(number)
        number += 1
    return (store.cpu_s() - cpu) / (number - 200) * 1e6


@contextlib.asynccontextmanager
async def opened(store: Store, clock: LoopClock) -> AsyncIterator[SharedStore]:
    """A shared store of a gateway of its own."""
    link = RedisLink(store.url, timeout=MICRO)
    shared = SharedStore(link, clock, gateway="bench", faults=FAULTS, cold=False)
    running = asyncio.create_task(shared.run())
    try:
        yield shared
    finally:
        await shared.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def one_by_one(shared: SharedStore, number: int, calls: int) -> None:
    for n in range(calls):
        ask = ask_of(number + n)
        wait = shared.acquire(WIDE, ask)
        verdict = await wait if isinstance(wait, asyncio.Future) else wait
        if not isinstance(verdict, Admit):
            raise TypeError("an uncontended call was refused")
        actual = (MICRO, 600 * MICRO)
        shared.settle("wide", ask.rid, outcome=Outcome.SERVED, actual=actual)


async def shared_figures(clock: LoopClock) -> dict[str, object]:
    """Over a real server."""
    store = Store()
    single: list[float] = []
    sixteen: list[float] = []
    floor: list[float] = []
    client: list[float] = []
    await store.start()
    try:
        for round_ in range(SHARED_ROUNDS):
            say(f"shared store, round {round_ + 1} of {SHARED_ROUNDS}")
            single.append(await server_cpu(store, 1, 1.5))
            sixteen.append(await server_cpu(store, 16, 1.5))
            floor.append(await floor_cpu(store, 1.0))
            async with opened(store, clock) as shared:
                await one_by_one(shared, 10**6 * round_, 100)
                began = time.process_time()
                await one_by_one(shared, 10**6 * round_ + 500, 1_000)
                client.append((time.process_time() - began) / 1_000 * 1e6)
        async with opened(store, clock) as shared:
            before = shared.calls()
            async with asyncio.TaskGroup() as tasks:
                for task in range(64):
                    tasks.create_task(one_by_one(shared, 10**9 + 10**6 * task, 100))
            per_op = (shared.calls() - before) / 6_400
            await clock.sleep(1)
            before = shared.calls()
            await clock.sleep(2)
            idle = shared.calls() - before
    finally:
        await store.kill()
    return {
        **summary("redis_cpu_us_single", single, 1),
        **summary("redis_cpu_us_batch16", sixteen, 1),
        **summary("redis_cpu_us_floor", floor, 1),
        **summary("client_cpu_us_single", client, 1),
        "script_calls_per_op": round(per_op, 3),
        "calls_idle_shared": idle,
        "redis": store.binary.name,
    }


async def measured() -> dict[str, object]:
    clock = LoopClock()
    quiet: list[float] = []
    busy: list[float] = []
    naive: list[float] = []
    for round_ in range(ROUNDS):
        say(f"round {round_ + 1} of {ROUNDS}")
        quiet.append(uncontended(clock))
        naive.append(control(clock))
        busy.append(await saturated(clock))
    return {
        **await shared_figures(clock),
        **summary("local_cpu_us", quiet, 2),
        **summary("local_cpu_us_saturated", busy, 2),
        **summary("control_cpu_us", naive, 2),
        "bytes_per_waiter": round(bytes_per_waiter(clock)),
        "bytes_per_waiter_store": round(bytes_per_waiter_store(clock)),
        "bytes_per_pool": round(bytes_per_pool(clock)),
        "calls_idle": await calls_idle(clock),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line")
    parser.parse_args()
    began = time.monotonic()
    finish(asyncio.run(measured()), began=began)


if __name__ == "__main__":
    main()
