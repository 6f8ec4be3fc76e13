"""What an admission costs: `python -m loadtests.admission --json` (about 20 s).

`local_cpu_us` is the CPU of one acquire and one settlement through `LocalStore`, uncontended, the
ask built by the caller included: 500 requests and 450,000 tokens per minute scaled so that all fit,
seven tenants, settled below the estimate. `local_cpu_us_saturated` is the same while a line of 200
waits, per call granted. `control_cpu_us` is a naive limiter in the same loop (one bucket, one dict,
no order, no log): it says how fast this machine is today. Rounds alternate.

`bytes_per_waiter` is what one waiting call adds to the pool core, `bytes_per_waiter_store` what it
adds in all, with its ask, future and deadline timer; `bytes_per_pool` what one key's own pool
holds. `calls_idle` counts ticks of a store that has pools and nobody waiting, over two seconds.

The figures of the shared store are null until `fleet.py` exists.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
import tracemalloc

from gateway.admission.core import Admit, Ask, Caller, Outcome, PoolCore
from gateway.admission.local import LocalStore
from gateway.admission.profiles import Shape, pool_spec
from gateway.clock import LoopClock
from gateway.units import MICRO
from loadtests.measure import finish, say, summary

ROUNDS = 15
CALLS = 3_000
WAITERS = 10_000
LINE = 200
POOLS = 2_000

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
        **summary("local_cpu_us", quiet, 2),
        **summary("local_cpu_us_saturated", busy, 2),
        **summary("control_cpu_us", naive, 2),
        "bytes_per_waiter": round(bytes_per_waiter(clock)),
        "bytes_per_waiter_store": round(bytes_per_waiter_store(clock)),
        "bytes_per_pool": round(bytes_per_pool(clock)),
        "calls_idle": await calls_idle(clock),
        "redis_cpu_us_single": None,
        "redis_cpu_us_batch16": None,
        "client_cpu_us_single": None,
        "script_calls_per_op": None,
        "null_because": "the shared store (gateway/admission/fleet.py) does not exist yet",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line")
    parser.parse_args()
    began = time.monotonic()
    finish(asyncio.run(measured()), began=began)


if __name__ == "__main__":
    main()
