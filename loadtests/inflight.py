"""Many calls at once: five thousand waiting with large bodies, all hang up; a thousand in flight.

* **waiting**: a pool with one permit, taken; calls wait for it, first 1,000 with 1.2 kB, then 5,000
  with 40 kB bodies. `mb_waiting_*` is what the gateway's tree holds above idle. `timers_armed` is
  what its own metric says while they wait, `pools` how many pools there are.
* **hang up**: those 5,000 leave at the same instant; `hangup_clear_s` is the time until status
  shows no waiting call, no call under way and the one permit as before.
* **in flight**: 1,000 connections in a closed loop against an upstream that answers after 500 ms;
  warm, `rps` beside the ideal of 2,000 (`performance.md` §4, goal 7: 1,300 with aiohttp's pool).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

from loadtests import emulated, generator, governed, measure
from loadtests.measure import say

if TYPE_CHECKING:
    from loadtests.measure import Server

IN_FLIGHT = 1_000
DELAY_S = 0.5
ROUNDS = 3
ROUND_S = 5.0
WAITING = 5_000
SMALL = 1_200
LARGE = 40_000
FILES_SPARE = 300

POLICY = """version: 1
providers:
  origin:
    kind: openai
    base_url: ${ORIGIN_URL}
    keys: [{id: main, value: "${ORIGIN_KEY}"}]
    timeouts: {total_plain: 600s}
pools:
  wide:
    provider: origin
    limits: {rpm: 100M, tpm: 8G, concurrency: 20000}
  narrow:
    provider: origin
    limits: {concurrency: 1}
models:
  m-wide: {provider: origin, pool: wide}
  m-narrow: {provider: origin, pool: narrow}
tiers:
  interactive: {number: 1, max_wait: 170s}
  standard: {number: 2, max_wait: 170s}
  batch: {number: 3, max_wait: 170s}
fairness: agent
agents:
  load: {keys: [{pattern: "flight-*"}], tier: standard, loopback_only: true}
tokenizer: preferred
"""

WORDS = "seven quiet rivers carry copper leaves under patient bridges while engines count "


def request(model: str, number: int, size: int, delay: float) -> bytes:
    """A call whose body has about that many bytes."""
    front = f'{{"user":"origin delay={delay}","model":"{model}","max_tokens":80,"messages":'
    text = f"Call {number}. " + WORDS * (size // len(WORDS))
    body = front + json.dumps([{"role": "user", "content": text[: max(16, size - 160)]}]) + "}"
    return generator.post(
        governed.PATH, body.encode(), key=f"flight-{number % 500:04d}-0123456789abcdef"
    )


# --- a thousand in flight ------------------------------------------------------------------------


async def flying(port: int) -> tuple[list[float], generator.Tally]:
    """Calls per second in each round, after a warm-up of one."""
    rates: list[float] = []
    whole = generator.Tally()
    serial = iter(range(1 << 40))
    marks: list[float] = []

    def enough(tally: generator.Tally) -> bool:
        now = time.monotonic()
        if not marks:
            marks.extend(now + ROUND_S * n for n in range(1, ROUNDS + 2))
            counts.append(0)
        while len(counts) <= len(marks) and now >= marks[len(counts) - 1]:
            counts.append(tally.calls)
            if len(counts) > len(marks):
                return True
        return len(counts) > len(marks)

    counts: list[int] = []
    tally = await generator.closed_loop(
        port, lambda _: request("m-wide", next(serial), 300, DELAY_S), concurrency=IN_FLIGHT,
        until=enough,
    )  # fmt: skip
    rates = [(counts[n + 1] - counts[n]) / ROUND_S for n in range(1, ROUNDS + 1)]
    whole.errors |= tally.errors
    whole.calls = tally.calls
    return rates, whole


# --- five thousand waiting -----------------------------------------------------------------------


class Crowd:
    """Connections whose calls wait."""

    def __init__(self) -> None:
        self.clients: list[generator.Client] = []
        self.answers: list[asyncio.Future[int]] = []

    async def grow(self, port: int, count: int, size: int) -> None:
        """So many more calls are sent."""
        serial = len(self.clients)
        for start in range(0, count, 100):
            batch = await asyncio.gather(
                *(generator.connect(port) for _ in range(min(100, count - start)))
            )
            for client in batch:
                serial += 1
                self.clients.append(client)
                self.answers.append(client.exchange(request("m-narrow", serial, size, 0.0)))

    def early(self) -> list[str]:
        """What came although all should wait."""
        found = []
        for answer in self.answers:
            if answer.done():
                error = answer.exception()
                found.append(type(error).__name__ if error else f"status {answer.result()}")
        return found

    def leave(self) -> None:
        """All hang up at the same instant."""
        for answer in self.answers:
            answer.cancel()
        for client in self.clients:
            client.close()
        self.clients.clear()
        self.answers.clear()


async def until_waiting(gateway: governed.Governed, count: int, limit: float = 30.0) -> int:
    """Calls waiting, once there are that many or time is up."""
    end = time.monotonic() + limit
    while True:
        status = await emulated.status(gateway)
        waiting = sum(sum(pool["waiting"]) for pool in status["pools"])
        if waiting >= count or time.monotonic() > end:
            return int(waiting)
        await asyncio.sleep(0.1)


async def crowded(gateway: governed.Governed, waiting: int) -> dict[str, Any]:
    """Memory, timers and the hang-up."""
    port = gateway.server.port
    holder = await generator.connect(port)
    held = holder.exchange(request("m-narrow", 0, 300, 170.0))
    await asyncio.sleep(0.3)
    idle = measure.pss_mb(gateway.server.pid)

    small = Crowd()
    await small.grow(port, min(1_000, waiting), SMALL)
    small_waiting = await until_waiting(gateway, min(1_000, waiting))
    mb_small = measure.pss_mb(gateway.server.pid) - idle
    early = small.early()
    small.leave()
    await cleared(gateway)
    idle = measure.pss_mb(gateway.server.pid)

    large = Crowd()
    say(f"{waiting} calls with {LARGE} B")
    await large.grow(port, waiting, LARGE)
    reached = await until_waiting(gateway, waiting)
    mb_large = measure.pss_mb(gateway.server.pid) - idle
    samples = await emulated.metrics(gateway)
    status = await emulated.status(gateway)
    early += large.early()
    began = time.monotonic()
    large.leave()
    clear = await cleared(gateway)
    after = await emulated.metrics(gateway)
    end = await emulated.status(gateway)
    held.cancel()
    holder.close()
    return {
        "waiting": reached,
        "waiting_small": small_waiting,
        "mb_waiting_1k": round(mb_small, 1),
        "mb_waiting_40k": round(mb_large, 1),
        "timers_armed": emulated.total(samples, "tidegate_timers_armed"),
        "pools": len(status["pools"]),
        "hangup_clear_s": None if clear is None else round(clear - began, 3),
        "left_after_hangup": {
            "calls": end["in_flight"] - 1,
            "waiting": sum(sum(pool["waiting"]) for pool in end["pools"]),
            "permits": sum(pool["in_flight"] for pool in end["pools"]) - 1,
            "timers": emulated.total(after, "tidegate_timers_armed"),
        },
        "mb_after_hangup": round(measure.pss_mb(gateway.server.pid) - idle, 1),
        "early": sorted(set(early)),
        "early_count": len(early),
    }


async def cleared(gateway: governed.Governed, limit: float = 20.0) -> float | None:
    """The instant at which nothing but the holder was left; None if that did not come."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        status = await emulated.status(gateway)
        waiting = sum(sum(pool["waiting"]) for pool in status["pools"])
        permits = sum(pool["in_flight"] for pool in status["pools"])
        if not waiting and status["in_flight"] <= 1 and permits <= 1:
            return time.monotonic()
        await asyncio.sleep(0.02)
    return None


async def measured() -> dict[str, Any]:
    """Both parts."""
    files = measure.raise_files()
    waiting = max(100, min(WAITING, files - FILES_SPARE))
    started: list[Server | governed.Governed] = []
    try:
        origin = await measure.start_origin()
        started.append(origin)
        gateway = await governed.start(origin, text=POLICY)
        started.append(gateway)
        crowd = await crowded(gateway, waiting)
        say(f"{IN_FLIGHT} in flight, {DELAY_S} s upstream")
        cpu = measure.cpu(gateway.server.pid)
        rates, tally = await flying(gateway.server.port)
        cpu = measure.cpu(gateway.server.pid) - cpu
    finally:
        for server in reversed(started):
            with contextlib.suppress(OSError):
                server.stop()
    errors = sum(tally.errors.values()) + crowd["early_count"]
    return {
        "in_flight": IN_FLIGHT,
        **measure.summary("rps", rates, 1),
        "ideal_rps": IN_FLIGHT / DELAY_S,
        **crowd,
        "errors": errors,
        "error_kinds": tally.errors,
        "calls": tally.calls,
        "cpu_ms_per_call": round(1000 * cpu / max(1, tally.calls), 3),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line (as always)")
    parser.parse_args()
    began = time.monotonic()
    measure.pin_self(1)
    result = asyncio.run(measured())
    measure.finish(result, began=began)


if __name__ == "__main__":
    main()
