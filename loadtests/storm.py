"""A retry storm, with and without the gateway: what SDKs do to a provider that refuses.

Real clients: the openai SDK with its two retries, against provider emulators of the same seed, one
called directly and one through the gateway, at the same time. Two scenes each.

    always_429   every request is refused with a Retry-After of 1 s, as by a provider that is out of
                 quota for longer than anybody waits; 300 calls within 6 s that wait 4 s at most.
                 What counts is `upstream_per_call`: direct it is 3, the call and its two repeats.
    herd         120 clients start at the same instant and ask for six fifths of what a bucket of a
                 minute holds; refused requests count against the request limit, as with real
                 providers. What counts are `provider_429`, the peak and `completion`: the share of
                 calls that got an answer.

The four keys of `direct` and `tidegate` come from the scene that each belongs to; both scenes stand
whole beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai

from loadtests import emulated, governed, measure
from loadtests.measure import say

CALLS = 300
ARRIVE_S = 6.0
CLIENTS = 120
WARM = 12
"""Calls of the herd's model before it starts: the gateway has learned how this provider counts."""
RETRIES = 2
HERD_TPM = 200_000
HERD_RPM = 900
PER_CLIENT = 20
"""Calls that share one HTTP client: its pool is quadratic in them."""

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
    limits: {rpm: 900, tpm: 200k}
    shape: bucket
    accounting: realtime
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
        {"name": "herd", "models": ["gpt-4o-mini"], "shape": "bucket", "rpm": HERD_RPM,
         "tpm": HERD_TPM},
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


TIERS = {"gpt-4o": "standard", "gpt-4o-mini": "interactive"}


class Callers:
    """The SDK as an application uses it: a few clients, a timeout, two retries."""

    def __init__(self, base_url: str) -> None:
        self._clients = [
            openai.AsyncOpenAI(
                base_url=f"{base_url}/v1", api_key="storm-0123456789abcdef", max_retries=RETRIES,
                timeout=60.0, http_client=httpx.AsyncClient(trust_env=False),
            )
            for _ in range(max(CALLS, CLIENTS) // PER_CLIENT)
        ]  # fmt: skip
        self.ends: Counter[str] = Counter()
        self.took: list[float] = []

    async def call(self, model: str, number: int, wait: float) -> None:
        """One call, however it ends."""
        await asyncio.sleep(wait)
        began = time.monotonic()
        client = self._clients[number % len(self._clients)]
        try:
            await client.chat.completions.create(
                model=model, max_tokens=400, extra_headers={"tidegate-tier": TIERS[model]},
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


async def scene(
    url: str, emulator: measure.Server, model: str, waits: list[float]
) -> dict[str, Any]:
    """All calls of one scene, and what the provider saw of them."""
    await reset(emulator)
    callers = Callers(url)
    try:
        async with asyncio.TaskGroup() as group:
            for number, wait in enumerate(waits):
                group.create_task(callers.call(model, number, wait))
    finally:
        await callers.close()
    books = await emulated.ledger(emulator)
    took = sorted(callers.took)
    return {
        "provider_429": sum(books["refused"].values()),
        "peak_requests_per_100ms": books["peak_requests_per_100ms"],
        "completion": round(callers.ends["ok"] / len(waits), 4),
        "upstream_per_call": round(books["requests"] / len(waits), 3),
        "calls": len(waits),
        "ends": dict(callers.ends),
        "longest_s": round(took[-1], 1),
    }


async def reset(emulator: measure.Server) -> None:
    """Full meters and empty books."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://127.0.0.1:{emulator.port}/emulator/reset")
        answer.raise_for_status()


async def scenes(url: str, emulator: measure.Server, seed: int, name: str) -> dict[str, Any]:
    """Both scenes one after the other."""
    draw = random.Random(seed)
    say(f"{name}: every request refused")
    arrivals = sorted(draw.random() * ARRIVE_S for _ in range(CALLS))
    always = await scene(url, emulator, "gpt-4o", arrivals)
    say(f"{name}: a herd")
    await scene(url, emulator, "gpt-4o-mini", [0.1 * n for n in range(WARM)])
    herd = await scene(url, emulator, "gpt-4o-mini", [0.0] * CLIENTS)
    kept = ("provider_429", "peak_requests_per_100ms", "completion")
    return {
        **{key: herd[key] for key in kept},
        "upstream_per_call": always["upstream_per_call"],
        "always_429": always,
        "herd": herd,
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
        urls = [f"http://127.0.0.1:{port}" for port in (started[0].port, gateway.server.port)]
        direct, through = await asyncio.gather(
            scenes(urls[0], started[0], seed, "direct"),
            scenes(urls[1], started[1], seed, "tidegate"),
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
