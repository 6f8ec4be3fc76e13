"""What a streamed event costs, whether anything holds events back, and what an idle stream holds.

`python -m loadtests.streams --json` (about 60 s):

* events: 64 streams at once, each event on its own, gateway and control in alternating pairs;
* lockstep: the upstream sends the next event only when the client has seen the last one, so a
  buffer
  anywhere stalls the stream for good; a stall is an event that did not come within a second;
* first token: calls at 100 a second through either way, differences of neighbours;
* idle streams: as many as the machine's file limits allow, up to `--streams`, and the memory they
  hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from loadtests import generator, governed, measure

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtests.measure import Sample, Server, Validity

EVENTS = 200
GAP = 0.005
"""Seconds between the events of one stream. Without a gap a read holds many events at once, and the
cost of one would be that of a fraction of a read: cheaper than any model's stream ever is."""

RATE = 100
FILES_SPARE = 200


def request(words: str, number: int) -> bytes:
    """A streaming call whose front tells the origin what to do."""
    body = (
        f'{{"user":"origin {words}","stream":true,"model":"{governed.MODEL}","max_tokens":80,'
        f'"stream_options":{{"include_usage":true}},'
        f'"messages":[{{"role":"user","content":"Question {number} of many"}}]}}'
    )
    return generator.post(governed.PATH, body.encode(), key=governed.key(number))


class Numbers:
    """Numbers that go on over the whole run, so that no call is like another."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """The next one."""
        self._last += 1
        return self._last


async def events(
    servers: tuple[Server, Server], origin: Server, numbers: Numbers, *, pairs: int, cpu_s: float,
    valid: Validity,
) -> tuple[list[Sample], list[Sample]]:  # fmt: skip
    """CPU per event of gateway and control, in alternating pairs."""
    found: tuple[list[Sample], list[Sample]] = ([], [])
    for pair in range(pairs):
        for way in (0, 1) if pair % 2 else (1, 0):
            server = servers[way]

            async def load(
                until: Callable[[generator.Tally], bool], server: Server = server
            ) -> generator.Tally:
                return await generator.closed_loop(
                    server.port,
                    lambda _: request(f"events={EVENTS} gap={GAP}", numbers.next()),
                    concurrency=64,
                    until=until,
                )

            one = await measure.sample(server, origin, load, cpu_s=cpu_s)
            valid.look(f"events {server.name}", one, saturating=False)
            found[way].append(one)
            measure.say(
                f"events {server.name:8} {one.us_per_event:.1f} CPU-us per event, "
                f"{one.tally.events} events, {one.busy:.0%} busy"
            )
    valid.spread("events", [one.us_per_event for one in found[1]])
    return found


async def lockstep(
    gateway: Server, origin: Server, numbers: Numbers, *, streams: int, count: int
) -> int:
    """How many events did not arrive within a second although the upstream had sent them."""

    async def one() -> int:
        number = numbers.next()
        seen = asyncio.Event()
        client, acks = await generator.connect(gateway.port), await generator.connect(origin.port)
        client.on_data = lambda _: seen.set()
        stalls = 0
        answer = client.exchange(request(f"lockstep id=n{number} events={count}", number))
        try:
            for at in range(count):
                try:
                    async with asyncio.timeout(1.0):
                        while client.events <= at:
                            seen.clear()
                            await seen.wait()
                except TimeoutError:
                    stalls += 1
                await acks.exchange(generator.post(f"/ack/n{number}", b"{}"))
            async with asyncio.timeout(5.0):
                await answer
        except (TimeoutError, ConnectionError):
            stalls += 1
        finally:
            answer.cancel()
            client.close()
            acks.close()
        return stalls

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def first_tokens(
    gateway: Server, control: Server, numbers: Numbers, *, seconds: float
) -> tuple[list[float], int]:
    """Differences of the time to the first byte, in ms, between neighbouring calls; and errors."""
    idle: dict[int, list[generator.Client]] = {gateway.port: [], control.port: []}
    errors = 0

    async def first(port: int, wait: float) -> float | None:
        nonlocal errors
        await asyncio.sleep(wait)
        client = idle[port].pop() if idle[port] else await generator.connect(port)
        try:
            async with asyncio.timeout(10):
                status = await client.exchange(request("events=3 delay=0.02", numbers.next()))
        except (TimeoutError, ConnectionError, OSError):
            errors += 1
            client.close()
            return None
        idle[port].append(client)
        if status != 200 or client.first_at is None:
            errors += 1
            return None
        return client.first_at - client.sent_at

    async def pair(number: int) -> float | None:
        half = 0.5 / RATE
        ways = (gateway.port, control.port) if number % 2 else (control.port, gateway.port)
        times = await asyncio.gather(first(ways[0], 0.0), first(ways[1], half))
        by_port = dict(zip(ways, times, strict=True))
        ours, theirs = by_port[gateway.port], by_port[control.port]
        return None if ours is None or theirs is None else 1000 * (ours - theirs)

    began = time.perf_counter()
    pairs: list[asyncio.Task[float | None]] = []
    async with asyncio.TaskGroup() as group:
        for number in range(round(RATE * seconds)):
            wait = began + number / RATE - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            pairs.append(group.create_task(pair(number)))
    for clients in idle.values():
        for client in clients:
            client.close()
    return [value for task in pairs if (value := task.result()) is not None], errors


async def idle_streams(gateway: Server, numbers: Numbers, *, wanted: int) -> dict[str, Any]:
    """Open streams that have had one event and wait for the next; memory before and with them."""
    count = min(wanted, (measure.raise_files() - FILES_SPARE) // 2)
    before = measure.pss_mb(gateway.pid)
    clients: list[generator.Client] = []
    answers: list[asyncio.Future[int]] = []
    errors = 0
    gate = asyncio.Semaphore(64)

    async def one() -> None:
        nonlocal errors
        async with gate:
            try:
                client = await generator.connect(gateway.port)
            except OSError:
                errors += 1
                return
            clients.append(client)
            seen = asyncio.Event()
            client.on_data = lambda _: seen.set()
            answers.append(client.exchange(request("events=2 gap=600", numbers.next())))
            try:
                async with asyncio.timeout(20):
                    await seen.wait()
            except TimeoutError:
                errors += 1

    await asyncio.gather(*(one() for _ in range(count)))
    await asyncio.sleep(1.0)
    lost = sum(client.lost for client in clients)
    during = measure.pss_mb(gateway.pid)
    for answer in answers:
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    for client in clients:
        client.close()
    await asyncio.sleep(0.5)
    opened = len(clients) - lost
    return {
        "open_streams": opened,
        "mb_streams": round(during, 1),
        "mb_before_streams": round(before, 1),
        "kb_per_stream": round(1000 * (during - before) / opened, 2) if opened else None,
        "errors": errors + lost,
    }


async def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Start everything, measure, stop everything."""
    measure.raise_files()
    measure.pin_self(1)
    pairs, cpu_s = (7, 3.0) if options.long else (options.pairs, options.cpu)
    valid = measure.Validity()
    numbers = Numbers()
    async with contextlib.AsyncExitStack() as stack:
        origin = await measure.start_origin()
        stack.callback(origin.stop)
        control = await measure.start_control(origin)
        stack.callback(control.stop)
        gateway = await governed.start(origin)
        stack.callback(gateway.stop)
        found = await governed.features(gateway)
        server = gateway.server
        ours, theirs = await events(
            (server, control), origin, numbers, pairs=pairs, cpu_s=cpu_s, valid=valid
        )
        ratios = [a.us_per_event / b.us_per_event for a, b in zip(ours, theirs, strict=True)]
        errors = sum(one.tally.failures for one in ours + theirs)
        stalls = await lockstep(server, origin, numbers, streams=8, count=50)
        measure.say(f"lockstep: {stalls} stalls")
        differences, missed = await first_tokens(server, control, numbers, seconds=options.ttft)
        measure.say(f"first token: {len(differences)} pairs, {missed} errors")
        result: dict[str, Any] = {
            "features": found,
            **measure.summary("cpu_us_per_event", [one.us_per_event for one in ours], 2),
            **measure.summary("control_cpu_us_per_event", [one.us_per_event for one in theirs], 2),
            **measure.summary("ratio_event", ratios, 3),
            **measure.summary(
                "normalized_us_per_event", [r * measure.REFERENCE_US_EVENT for r in ratios], 2
            ),
            "ratios_event": [round(ratio, 3) for ratio in ratios],
            "lockstep_stalls": stalls,
            "ttft_added_p50_ms": generator.percentile(differences, 0.5),
            "ttft_added_p99_ms": generator.percentile(differences, 0.99),
            "ttft_pairs": len(differences),
        }
        streams = await idle_streams(server, numbers, wanted=options.streams)
        errors += missed + streams.pop("errors")
        result |= streams
        result["errors"] = errors
    for name in ("ttft_added_p50_ms", "ttft_added_p99_ms"):
        if result[name] is not None:
            result[name] = round(result[name], 3)
    if result["ttft_pairs"] < 1000:
        valid.reasons.append(f"first token: a p99 from {result['ttft_pairs']} pairs")
    result |= {"valid": not valid.reasons, "why_invalid": sorted(set(valid.reasons))}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON (always done)"
    )
    parser.add_argument("--long", action="store_true", help="7 pairs of 3 s, for published figures")
    parser.add_argument("--pairs", type=int, default=3, help="pairs (default 3)")
    parser.add_argument("--cpu", type=float, default=1.0, help="CPU seconds per sample (default 1)")
    parser.add_argument(
        "--ttft", type=float, default=11.0, help="seconds of paced calls (default 11)"
    )
    parser.add_argument(
        "--streams", type=int, default=9900, help="idle streams to open (default 9900)"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    result = asyncio.run(measure_all(options))
    measure.finish(result, began=began, seed=options.seed)


if __name__ == "__main__":
    main()
