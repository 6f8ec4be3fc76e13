"""What a call costs on the data path: `python -m loadtests.hotpath --json` (about 90 s).

Small JSON calls at 64 and at 1 in flight, prompts of 60 kB whose history is new (cold) or known
(warm); each beside the control, in alternating pairs. `added_*` are quantiles of differences: each
call to the gateway is paired with one to the control right beside it.

    --long        7 pairs of 3 s CPU instead of 3 pairs of 1 s
    --redis       the same with shared limits in Redis (not available yet: reported as such)
    --peers       nginx, if it is on PATH; other peers are reported with the reason of their absence
    --soak MIN    then load at 64 for MIN minutes and report the growth of memory
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtests import generator, governed, measure, origin
from loadtests.redis_server import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtests.measure import Sample, Server, Validity

PAIRS_OF_CALLS = 1000
MESSAGES = 30


class Bodies:
    """Requests of each kind, the n-th unlike all others where that matters."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._texts = [self._text(rng, 1930) for _ in range(MESSAGES)]

    def _text(self, rng: random.Random, size: int) -> str:
        words: list[str] = []
        length = 0
        while length < size:
            word = rng.choice(origin.WORDS) if rng.random() < 0.8 else f"{rng.randrange(10**6):x}"
            words.append(word)
            length += len(word) + 1
        return " ".join(words)

    def small(self, number: int) -> bytes:
        """300 bytes with head."""
        content = f"Question {number}: {origin.text(number, 14)}?"
        body = (
            f'{{"model":"{governed.MODEL}","max_tokens":80,'
            f'"messages":[{{"role":"user","content":"{content}"}}]}}'
        )
        return self._post(body, number)

    def cold(self, number: int) -> bytes:
        """60 kB in 30 messages, every one of them new."""
        return self._long([f"{number} {text}" for text in self._texts], number)

    def warm(self, number: int) -> bytes:
        """60 kB in 30 messages, the last of them new."""
        return self._long([*self._texts[:-1], f"{number} {self._texts[-1]}"], number)

    def _long(self, texts: list[str], number: int) -> bytes:
        messages = ",".join(
            f'{{"role":"{"assistant" if at % 2 else "user"}","content":"{text}"}}'
            for at, text in enumerate(texts)
        )
        body = f'{{"model":"{governed.MODEL}","max_tokens":80,"messages":[{messages}]}}'
        return self._post(body, number)

    def _post(self, body: str, number: int) -> bytes:
        return generator.post(governed.PATH, body.encode(), key=governed.key(number))


class Bench:
    """Servers under measurement and the calls that have been numbered so far."""

    def __init__(self, origin_server: Server, control: Server, gateway: Server, seed: int) -> None:
        self.origin, self.control, self.gateway = origin_server, control, gateway
        self.bodies = Bodies(seed)
        self._number = 0

    def numbered(self, make: Callable[[int], bytes]) -> Callable[[int], bytes]:
        """Requests whose numbers go on over all runs, so that nothing is ever sent twice."""

        def request(_: int) -> bytes:
            self._number += 1
            return make(self._number)

        return request

    async def sample(
        self, server: Server, make: Callable[[int], bytes], concurrency: int, cpu_s: float
    ) -> Sample:
        """One stretch of load."""

        async def load(until: Callable[[generator.Tally], bool]) -> generator.Tally:
            return await generator.closed_loop(
                server.port, self.numbered(make), concurrency=concurrency, until=until
            )

        return await measure.sample(server, self.origin, load, cpu_s=cpu_s)

    async def pairs(
        self,
        name: str,
        make: Callable[[int], bytes],
        *,
        concurrency: int,
        pairs: int,
        cpu_s: float,
        valid: Validity,
    ) -> tuple[list[Sample], list[Sample]]:
        """Gateway and control in turn; which goes first changes with every pair."""
        ours, theirs = [], []
        for number in range(pairs):
            order = [self.control, self.gateway] if number % 2 else [self.gateway, self.control]
            for server in order:
                one = await self.sample(server, make, concurrency, cpu_s)
                valid.look(f"{name} {server.name}", one, saturating=concurrency >= 64)
                (ours if server is self.gateway else theirs).append(one)
                measure.say(
                    f"{name:10} {server.name:8} {one.ms_per_call:.4f} CPU-ms per call, "
                    f"{one.tally.calls} calls, {one.busy:.0%} busy"
                )
        valid.spread(name, [one.ms_per_call for one in theirs])
        return ours, theirs


async def added(bench: Bench, count: int) -> list[float]:
    """Milliseconds each call took longer than its neighbour through the control."""
    ways = [await generator.connect(server.port) for server in (bench.gateway, bench.control)]
    request = bench.numbered(bench.bodies.small)
    differences = []
    for number in range(count):
        seconds = [0.0, 0.0]
        for way in (0, 1) if number % 2 else (1, 0):
            await ways[way].exchange(request(0))
            seconds[way] = time.perf_counter() - ways[way].sent_at
        differences.append(1000 * (seconds[0] - seconds[1]))
    for client in ways:
        client.close()
    return differences


def figures(
    name: str, ours: list[Sample], theirs: list[Sample], reference: float
) -> dict[str, Any]:
    """The keys of one kind of load."""
    ratios = [a.ms_per_call / b.ms_per_call for a, b in zip(ours, theirs, strict=True)]
    return {
        **measure.summary(f"cpu_ms_{name}", [one.ms_per_call for one in ours]),
        **measure.summary(f"control_cpu_ms_{name}", [one.ms_per_call for one in theirs]),
        **measure.summary(f"ratio_{name}", ratios, 3),
        f"ratios_{name}": [round(ratio, 3) for ratio in ratios],
        **measure.summary(f"normalized_ms_{name}", [ratio * reference for ratio in ratios]),
    }


# --- peers ---------------------------------------------------------------------------------------

NGINX = """daemon off; worker_processes 1; pid {folder}/pid; error_log stderr crit;
events {{ worker_connections 4096; }}
http {{ access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 64m; keepalive_requests 10000000;
  upstream origin {{ server 127.0.0.1:{origin}; keepalive 256; keepalive_requests 10000000; }}
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://origin; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_buffering off; }} }} }}
"""


async def nginx(bench: Bench, ours_ms: float, cpu_s: float, valid: Validity) -> dict[str, Any]:
    """The floor of a plain reverse proxy in C."""
    binary = shutil.which("nginx")
    if binary is None:
        return {"null_because": "not on PATH"}
    folder = Path(tempfile.mkdtemp(prefix="tidegate-nginx-"))
    port = measure.free_port()
    try:
        conf = folder / "nginx.conf"
        conf.write_text(NGINX.format(folder=folder, origin=bench.origin.port, port=port))
        server = await measure.start(
            "nginx", [binary, "-p", str(folder), "-c", str(conf)], port=port
        )
        try:
            samples = []
            for _ in range(3):
                one = await bench.sample(server, bench.bodies.small, 64, cpu_s / 2)
                valid.look("peer nginx", one, saturating=False)
                samples.append(one.ms_per_call)
        finally:
            server.stop()
    except RuntimeError as error:
        return {"null_because": str(error)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    cost = statistics.median(samples)
    return {
        "cpu_ms_c64": round(cost, 4),
        "rps_per_core_c64": round(1000 / cost),
        "ratio_to_ours": round(cost / ours_ms, 3),
        "does": ["relay with kept-alive connections"],
        "does_not": [
            "identity",
            "counting",
            "limits",
            "waiting",
            "retries",
            "breaker",
            "usage",
            "metrics",
        ],
    }


async def peers(bench: Bench, ours_ms: float, cpu_s: float) -> dict[str, Any]:
    """Every peer, with figures or with the reason why there are none."""
    because = "not installed: the peers' own environments are not set up yet"
    valid = measure.Validity()
    found: dict[str, Any] = {"nginx": await nginx(bench, ours_ms, cpu_s, valid)}
    if valid.reasons:
        found["nginx"]["why_invalid"] = valid.reasons
    for name in ("envoy", "tensorzero", "portkey", "litellm"):
        found[name] = {"null_because": because}
    return found


# --- soak ----------------------------------------------------------------------------------------


def slope(points: list[tuple[float, float]]) -> float:
    """Least-squares slope of y over x."""
    if len(points) < 2:
        return 0.0
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def soak(bench: Bench, minutes: float) -> dict[str, Any]:
    """Growth of memory under steady load; the first 5 minutes (or a third) are warm-up."""
    began = time.monotonic()
    points: list[tuple[float, float]] = []
    skip = min(300.0, minutes * 20)

    async def watch() -> None:
        while True:
            at = time.monotonic() - began
            points.append((at, measure.pss_mb(bench.gateway.pid)))
            await asyncio.sleep(min(10.0, minutes * 2))

    watcher = asyncio.create_task(watch())
    try:
        tally = await generator.closed_loop(
            bench.gateway.port,
            bench.numbered(bench.bodies.small),
            concurrency=64,
            until=lambda _: time.monotonic() - began > minutes * 60,
        )
    finally:
        watcher.cancel()
    late = [(at, mb) for at, mb in points if at >= skip]
    return {
        "soak_mb_per_10min": round(slope(late) * 600, 3),
        "soak_minutes": minutes,
        "soak_calls": tally.calls,
        "soak_errors": tally.failures,
    }


# --- all -----------------------------------------------------------------------------------------


async def with_redis(
    bench: Bench, stack: contextlib.AsyncExitStack, *, pairs: int, cpu_s: float, valid: Validity
) -> dict[str, Any]:
    """The small call at c64 with every limit in a real store on the generator's core.

    Each call passes two pools, its agent's and the provider's: two calls of the pool's function.
    """
    store = Store(core=1)
    await store.start()
    stack.push_async_callback(store.kill)
    settings = {"TIDEGATE_REDIS_URL": store.url, "TIDEGATE_REDIS_NEW": "1"}
    gateway = await governed.start(bench.origin, settings=settings)
    stack.callback(gateway.stop)
    other = Bench(bench.origin, bench.control, gateway.server, 2)
    await other.sample(gateway.server, other.bodies.small, 64, 0.2)
    before = store.cpu_s()
    ours, theirs = await other.pairs(
        "c64_redis", other.bodies.small, concurrency=64, pairs=pairs, cpu_s=cpu_s, valid=valid
    )
    calls = sum(one.tally.calls for one in ours)
    spent = store.cpu_s() - before
    return figures("c64_redis", ours, theirs, measure.REFERENCE_MS["c64"]) | {
        "redis_cpu_us_per_call": round(spent / max(1, calls) * 1e6, 1),
        "redis": store.binary.name,
        "errors": sum(one.tally.failures for one in ours + theirs),
    }


async def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Start everything, measure, stop everything."""
    measure.raise_files()
    measure.pin_self(1)
    pairs, cpu_s = (7, 3.0) if options.long else (options.pairs, options.cpu)
    valid = measure.Validity()
    async with contextlib.AsyncExitStack() as stack:
        origin_server = await measure.start_origin()
        stack.callback(origin_server.stop)
        control = await measure.start_control(origin_server)
        stack.callback(control.stop)
        gateway = await governed.start(origin_server)
        stack.callback(gateway.stop)
        bench = Bench(origin_server, control, gateway.server, options.seed)
        await asyncio.sleep(0.5)
        idle = measure.pss_mb(gateway.server.pid)
        found = await governed.features(gateway)
        measure.say(
            f"ready in {gateway.server.start_s:.2f} s, idle {idle:.0f} MB, on: {', '.join(found)}"
        )
        result: dict[str, Any] = {"features": found, "pairs": pairs, "cpu_s_per_sample": cpu_s}
        errors = 0
        for name, make, concurrency, reference in (
            ("c64", bench.bodies.small, 64, "c64"),
            ("c1", bench.bodies.small, 1, "c1"),
            ("60k_cold", bench.bodies.cold, 64, "60k"),
            ("60k_warm", bench.bodies.warm, 64, "60k"),
        ):
            ours, theirs = await bench.pairs(
                name, make, concurrency=concurrency, pairs=pairs, cpu_s=cpu_s, valid=valid
            )
            result |= figures(name, ours, theirs, measure.REFERENCE_MS[reference])
            errors += sum(one.tally.failures for one in ours + theirs)
            if name == "c64":
                result["rss_mb_load"] = round(measure.pss_mb(gateway.server.pid), 1)
        differences = await added(bench, PAIRS_OF_CALLS)
        result |= {
            "rps_per_core_c64": round(1000 / result["cpu_ms_c64"]),
            "added_p50_ms": round(generator.percentile(differences, 0.5) or 0.0, 3),
            "added_p99_ms": round(generator.percentile(differences, 0.99) or 0.0, 3),
            "rss_mb_idle": round(idle, 1),
            "start_s": round(gateway.server.start_s, 3),
            "errors": errors,
        }
        if options.redis:
            shared = await with_redis(bench, stack, pairs=pairs, cpu_s=cpu_s, valid=valid)
            result["errors"] += shared.pop("errors")
            result |= shared
        if options.peers:
            result["peers"] = await peers(bench, result["cpu_ms_c64"], cpu_s)
        if options.soak:
            result |= await soak(bench, options.soak)
    result |= {"valid": not valid.reasons, "why_invalid": sorted(set(valid.reasons))}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON (always done)"
    )
    parser.add_argument("--long", action="store_true", help="7 pairs of 3 s, for published figures")
    parser.add_argument("--redis", action="store_true", help="also with shared limits in Redis")
    parser.add_argument("--peers", action="store_true", help="also the peers that are installed")
    parser.add_argument(
        "--soak", type=float, default=0.0, metavar="MIN", help="then load for MIN minutes"
    )
    parser.add_argument("--pairs", type=int, default=3, help="pairs per figure (default 3)")
    parser.add_argument("--cpu", type=float, default=1.0, help="CPU seconds per sample (default 1)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    result = asyncio.run(measure_all(options))
    measure.finish(result, began=began, seed=options.seed)


if __name__ == "__main__":
    main()
