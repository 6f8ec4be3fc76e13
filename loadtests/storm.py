"""A retry storm, with and without the gateway: what clients do to a provider that refuses.

Two provider emulators of the same seed, one called directly and one through the gateway, at the
same time. Two scenes each, without any warm-up.

    always_429   every request is refused with a Retry-After of 1 s, as by a provider that is out of
                 quota for longer than anybody waits; 300 calls of the openai SDK with its two
                 retries within 6 s, that wait 4 s at most. What counts is `upstream_per_call`:
                 direct it is 3, the call and its two repeats.
    herd         the failure path of a Black Friday: 400 agents ask at the same instant a provider
                 that can take 220 (a bucket of 22 s of 600 requests per minute); whoever is refused
                 comes back after 2, 4 and 8 s, all at the same instant, and gives up then. From the
                 first second on 5 newcomers a second join. Refused requests count against the
                 limit, as with real providers. What counts are `provider_429`, `completion` (the
                 share of agents that got an answer) and the peak.

`peak_requests_per_100ms` is that of the herd at its provider, after the first refusal; where nobody
is refused, after the first second. The books are read ten times a second. The four keys of `direct`
and `tidegate` come from the scene that each belongs to; both scenes stand whole beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai

from loadtests import emulated, generator, governed, measure
from loadtests.measure import say

CALLS = 300
ARRIVE_S = 6.0
RETRIES = 2
PER_CLIENT = 20
"""Calls that share one HTTP client: its pool is quadratic in them."""

AGENTS = 400
NEWCOMERS = 40
NEW_EVERY_S = 0.2
BACKOFF_S = (2.0, 4.0, 8.0)
"""What naive clients wait: always the same, so that they come back together."""

RPM = 600
BURST = 220
"""What the provider takes at once; 180 of the 400 are refused."""

LOOK_S = 0.1

POLICY = """version: 1
providers:
  emulator:
    kind: openai
    base_url: ${ORIGIN_URL}
    keys: [{id: main, value: "${ORIGIN_KEY}"}]
pools:
  always:
    provider: emulator
    limits: {rpm: 10_000, tpm: 2M}
    shape: window_60s
    accounting: realtime
  herd:
    provider: emulator
    limits: {rpm: 600}
    shape: bucket
    ceilings: {interactive: 36%, standard: 36%, batch: 36%}  # its bucket is 22 s deep, not 60
models:
  gpt-4o: {provider: emulator, pool: always, context_window: 128_000}
  gpt-4o-mini: {provider: emulator, pool: herd, context_window: 128_000}
tiers:
  interactive: {number: 1, max_wait: 50s}
  standard: {number: 2, max_wait: 4s}
  batch: {number: 3, max_wait: 10s}
fairness: agent
agents:
  load: {keys: [{pattern: "storm-*"}], tier: standard, tier_cap: interactive,
         loopback_only: true}
tokenizer: preferred
"""

EMULATOR: dict[str, Any] = {
    "limits": [
        {"name": "herd", "models": ["gpt-4o-mini"], "shape": "bucket", "rpm": RPM,
         "depth": BURST * 60 // RPM},
    ],
    "answers": {"median": 60, "sigma": 0.5, "longest": 300, "prompt_cache": False},
    "pacing": {"first_byte": 0.2, "tokens_per_second": 300.0, "jitter": 0.3},
    "faults": [
        {"action": "status", "name": "always", "models": ["gpt-4o"], "status": 429,
         "code": "rate_limit", "retry_after": ["1"]},
    ],
}  # fmt: skip

TEXT = (
    "the harbour lantern keeps seven quiet rivers under patient bridges while engines count " * 92
)
"""About two thousand tokens as the emulator counts."""


class Callers:
    """The SDK as an application uses it: a few clients, a timeout, two retries."""

    def __init__(self, base_url: str) -> None:
        self._clients = [
            openai.AsyncOpenAI(
                base_url=f"{base_url}/v1", api_key="storm-0123456789abcdef", max_retries=RETRIES,
                timeout=60.0, http_client=httpx.AsyncClient(trust_env=False),
            )
            for _ in range(CALLS // PER_CLIENT)
        ]  # fmt: skip
        self.ends: Counter[str] = Counter()
        self.took: list[float] = []

    async def call(self, number: int, wait: float) -> None:
        """One call, however it ends."""
        await asyncio.sleep(wait)
        began = time.monotonic()
        client = self._clients[number % len(self._clients)]
        try:
            await client.chat.completions.create(
                model="gpt-4o", max_tokens=400,
                messages=[{"role": "user", "content": f"{number} {TEXT}"}],
            )  # fmt: skip
            self.ends["ok"] += 1
        except openai.APIStatusError as error:
            self.ends[str(error.status_code)] += 1
        except openai.APIError as error:
            self.ends[type(error).__name__] += 1
        self.took.append(time.monotonic() - began)

    async def close(self) -> None:
        """No connection is left."""
        for client in self._clients:
            await client.close()


async def always(url: str, emulator: measure.Server, waits: list[float]) -> dict[str, Any]:
    """Every request is refused: what the provider saw of it."""
    callers = Callers(url)
    try:
        async with asyncio.TaskGroup() as group:
            for number, wait in enumerate(waits):
                group.create_task(callers.call(number, wait))
    finally:
        await callers.close()
    books = await emulated.ledger(emulator)
    took = sorted(callers.took)
    return {
        "provider_429": sum(books["refused"].values()),
        "completion": round(callers.ends["ok"] / len(waits), 4),
        "upstream_per_call": round(books["requests"] / len(waits), 3),
        "calls": len(waits),
        "ends": dict(callers.ends),
        "longest_s": round(took[-1], 1),
    }


async def agent(port: int, number: int, wait: float, ends: Counter[str]) -> None:
    """One naive agent: it asks, and comes back by its own clock."""
    await asyncio.sleep(wait)
    body = {
        "model": "gpt-4o-mini", "max_tokens": 400,
        "messages": [{"role": "user", "content": f"agent {number} asks for the stock"}],
    }  # fmt: skip
    raw = generator.post(
        "/v1/chat/completions", json.dumps(body).encode(), key="storm-0123456789abcdef",
        headers={"tidegate-tier": "interactive"},
    )  # fmt: skip
    client = await generator.connect(port)
    try:
        for pause in (*BACKOFF_S, 0.0):
            status = await client.exchange(raw)
            if status != 429 or not pause:
                break
            await asyncio.sleep(pause)
        ends[str(status)] += 1
    finally:
        client.close()


async def watched(emulator: measure.Server, seen: list[tuple[int, int]]) -> None:
    """Requests and refusals so far, ten times a second, until cancelled."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        books = await emulated.ledger(emulator)
        seen.append((books["requests"], sum(books["refused"].values())))
        due += LOOK_S
        await asyncio.sleep(max(0.0, due - loop.time()))


def peak_after(seen: list[tuple[int, int]]) -> int:
    """Most requests between two looks after the first refusal, or after the first second."""
    first = next((at for at, (_, refused) in enumerate(seen) if refused), round(1 / LOOK_S))
    rest = [requests for requests, _ in seen[first:]]
    return max((after - before for before, after in itertools.pairwise(rest)), default=0)


async def herd(port: int, emulator: measure.Server) -> dict[str, Any]:
    """Four hundred at once, and newcomers."""
    ends: Counter[str] = Counter()
    seen: list[tuple[int, int]] = []
    waits = [0.0] * AGENTS + [1.0 + n * NEW_EVERY_S for n in range(NEWCOMERS)]
    began = time.monotonic()
    watcher = asyncio.ensure_future(watched(emulator, seen))
    async with asyncio.TaskGroup() as group:
        for number, wait in enumerate(waits):
            group.create_task(agent(port, number, wait, ends))
    watcher.cancel()
    lasted = time.monotonic() - began
    books = await emulated.ledger(emulator)
    return {
        "provider_429": sum(books["refused"].values()),
        "peak_requests_per_100ms": peak_after(seen),
        "peak_at_start": books["peak_requests_per_100ms"],
        "completion": round(ends["200"] / len(waits), 4),
        "upstream_per_call": round(books["requests"] / len(waits), 3),
        "agents": len(waits),
        "ends": dict(ends),
        "lasted_s": round(lasted, 1),
    }


async def reset(emulator: measure.Server) -> None:
    """Full meters and empty books."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://127.0.0.1:{emulator.port}/emulator/reset")
        answer.raise_for_status()


async def scenes(port: int, emulator: measure.Server, seed: int, name: str) -> dict[str, Any]:
    """Both scenes one after the other."""
    draw = random.Random(seed)
    say(f"{name}: every request refused")
    await reset(emulator)
    waits = sorted(draw.random() * ARRIVE_S for _ in range(CALLS))
    refused = await always(f"http://127.0.0.1:{port}", emulator, waits)
    say(f"{name}: a herd")
    await reset(emulator)
    crowd = await herd(port, emulator)
    kept = ("provider_429", "peak_requests_per_100ms", "completion")
    return {
        **{key: crowd[key] for key in kept},
        "upstream_per_call": refused["upstream_per_call"],
        "always_429": refused,
        "herd": crowd,
    }


async def measured(seed: int) -> dict[str, Any]:
    """One run."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-storm-"))
    started: list[Any] = []
    try:
        for name in ("direct", "behind"):
            (folder / name).mkdir()
            emulator = await emulated.start(EMULATOR | {"seed": seed}, folder=folder / name)
            started.append(emulator)
        gateway = await governed.start(started[1], text=POLICY)
        started.append(gateway)
        direct, through = await asyncio.gather(
            scenes(started[0].port, started[0], seed, "direct"),
            scenes(gateway.server.port, started[1], seed, "tidegate"),
        )
        status = await emulated.quiet(gateway)
        return {
            "direct": direct,
            "tidegate": through,
            "sdk": f"openai {openai.__version__}, max_retries {RETRIES}",
            "left": sum(p["in_flight"] + sum(p["waiting"]) for p in status["pools"]),
        }
    finally:
        for server in reversed(started):
            with contextlib.suppress(OSError):
                server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line (as always)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    measure.raise_files()
    measure.pin_self(1)
    result = asyncio.run(measured(options.seed))
    measure.finish(result, began=began, seed=options.seed)


if __name__ == "__main__":
    main()
