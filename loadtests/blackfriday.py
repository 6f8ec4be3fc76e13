"""Black Friday: 400 agents ask for six times the quota; nobody is refused, little is unused.

The emulator meters 2 M tokens per minute on an exact sliding window of 60 s, which is not
shortened: what is scaled so that a run fits into 90 s are the prompts, a third of those in
`admission.md` §15 (median 500, heavy-tailed up to 40,000 tokens), and so the pauses between them.
The gateway is a real process with a policy of three tiers, of which 10, 40 and 50 % of the agents
are. All call for 64 s; then no new call comes, the queue empties, and every call must be answered.

    quota_used    mean share of the quota on the emulator's own meter over all seconds in which
                  calls waited, once a whole window had passed: before, it holds the credit of an
                  idle start
    wait_p99_ms   of what the gateway's log says each call waited, for the whole run
    ledgers_equal requests, tokens by kind and completed calls agree between the emulator's
                  ledger, the gateway's log, its metrics and the clients
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests import emulated, generator, governed, measure
from loadtests.measure import say
from loadtests.origin import WORDS

AGENTS = 400
SHARES = {1: 0.10, 2: 0.40, 3: 0.50}
MEDIAN, SPREAD, LONGEST = 500, 1.1, 40_000
OUTPUT = 110.0
DEMAND = 6.0
SURGE_S = 64.0
HUNG_S = 60.0
MODEL = "gpt-4o"


@dataclass(frozen=True)
class Load:
    """How large the quota is, and how the agents ask.

    Attributes:
        limit: Tokens per minute.
        requests: Requests per minute.
        stream_every: One call of so many is a stream.
    """

    limit: int = 2_000_000
    requests: int = 10_000
    stream_every: int = 2

    @property
    def emulator(self) -> dict[str, Any]:
        """The provider that meters it."""
        quota = {"name": "quota", "shape": "sliding", "rpm": self.requests, "tpm": self.limit}
        return {
            "limits": [quota],
            "answers": {"median": OUTPUT, "sigma": 0.7, "longest": 1500, "prompt_cache": False},
            "pacing": {"first_byte": 0.3, "tokens_per_second": 250.0, "jitter": 0.25},
        }

    @property
    def policy(self) -> str:
        """The gateway's policy, with the shape's own figures."""
        return POLICY.replace("$RPM", str(self.requests)).replace("$TPM", str(self.limit))

    def pause(self) -> float:
        """Seconds between two calls of an agent that nobody holds back, so that demand is met."""
        cycle = AGENTS * mean_tokens() / (DEMAND * self.limit / 60)
        return max(0.05, cycle - 0.8)


POLICY = """version: 1
providers:
  emulator:
    kind: openai
    base_url: ${ORIGIN_URL}
    keys: [{id: main, value: "${ORIGIN_KEY}"}]
pools:
  quota:
    provider: emulator
    limits: {rpm: $RPM, tpm: $TPM}
    shape: window_60s
    accounting: realtime
models:
  gpt-4o: {provider: emulator, pool: quota, context_window: 128_000}
tiers:
  interactive: {number: 1, max_wait: 170s}
  standard: {number: 2, max_wait: 170s}
  batch: {number: 3, max_wait: 170s}
fairness: agent
agents:
  first: {keys: [{pattern: "first-*"}], tier: interactive, loopback_only: true}
  second: {keys: [{pattern: "second-*"}], tier: standard, loopback_only: true}
  third: {keys: [{pattern: "third-*"}], tier: batch, loopback_only: true}
logging: {access: true}
tokenizer: preferred
"""

TUNED = """\
    # The last percent of the window is the most urgent tier's: its bursts need not wait for the
    # window to move. What large calls leave open is refilled 5 % faster than the window moves.
    ceilings: {standard: 99%, batch: 99%}
    guard: 0.5%
    pace: 105%
"""
"""What this run adds to the shape's own figures, unless `--shipped` asks for those."""

NAMES = {1: "first", 2: "second", 3: "third"}


@dataclass
class Seen:
    """What the clients saw."""

    issued: int = 0
    completed: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    ended: float = 0.0


class Prompts:
    """Bodies with heavy-tailed prompts, cut from one long text, each with its own beginning."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        words = [draw.choice(WORDS) for _ in range(LONGEST)]
        self._text = " ".join(words)
        self._per_token = len(self._text) / len(words)

    def body(self, draw: random.Random, number: int, *, stream: bool) -> bytes:
        """One call."""
        tokens = min(LONGEST, max(20, int(MEDIAN * math.exp(SPREAD * draw.gauss(0, 1)))))
        size = int(tokens * 4)  # the emulator counts four characters a token
        start = draw.randrange(max(1, len(self._text) - size))
        text = f"Call {number}. {self._text[start : start + size]}"
        value: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 2_000,
            "messages": [{"role": "user", "content": text}],
        }
        if stream:
            value["stream"] = True
        return json.dumps(value).encode()


def mean_tokens() -> float:
    """Of one call, input and output."""
    return MEDIAN * math.exp(SPREAD**2 / 2) + OUTPUT * math.exp(0.7**2 / 2)


async def agent(
    ports: list[int],
    number: int,
    tier: int,
    *,
    load: Load,
    prompts: Prompts,
    seed: int,
    until: float,
    seen: Seen,
) -> None:
    """One agent: calls, waits for the whole answer, thinks, calls again; elsewhere if refused."""
    turn = number

    async def connected() -> generator.Client:
        nonlocal turn
        for _ in ports:
            try:
                return await generator.connect(ports[turn % len(ports)])
            except OSError:
                turn += 1
        return await generator.connect(ports[turn % len(ports)])

    draw = random.Random(seed * 10_000 + number)
    think = load.pause()
    await asyncio.sleep(draw.random() * think)
    client = await connected()
    tail = bytearray()

    def keep(data: bytes) -> None:
        tail.extend(data)
        del tail[:-64]

    serial = 0
    try:
        while time.monotonic() < until:
            serial += 1
            nth = number * 1_000 + serial
            body = prompts.body(draw, nth, stream=nth % load.stream_every == 1)
            request = generator.post(
                "/v1/chat/completions", body, key=f"{NAMES[tier]}-{number}-0123456789abcdef"
            )
            if client.lost:
                client = await connected()
            client.on_data = keep
            tail.clear()
            seen.issued += 1
            try:
                async with asyncio.timeout(170 + HUNG_S):
                    status = str(await client.exchange(request))
            except (ConnectionError, OSError, TimeoutError) as error:
                status = type(error).__name__
                client.close()
                client.lost = True
            whole = status == "200" and (not client.events or b"[DONE]" in tail)
            seen.completed += whole
            kind = status if whole or status != "200" else "200 cut"
            seen.statuses[kind] = seen.statuses.get(kind, 0) + 1
            seen.ended = time.monotonic()
            await asyncio.sleep(draw.expovariate(1 / think))
    finally:
        client.close()


def use(
    timeline: list[list[int]], calls: list[dict[str, Any]], limit: int
) -> tuple[list[float], int]:
    """Share of the quota on the meter in each saturated second of the run, after the first window.

    Args:
        limit: Tokens per minute.
        timeline: The emulator's [second, requests, refused, charged tokens].
        calls: The gateway's log; who waited when.
    """
    charged = {second: tokens for second, _, _, tokens in timeline}
    first = min(call["received"] for call in calls) // 1_000_000 + 1
    waits = [(c["received"] / 1e6, (c["received"] + c["waited_us"]) / 1e6) for c in calls]
    shares = []
    for second in range(first + 60, max(charged) + 1):
        # Somebody waited at its beginning, in its middle and at its end.
        marks = (second, second + 0.5, second + 1)
        if all(any(a < mark < b for a, b in waits) for mark in marks):
            held = sum(charged.get(at, 0) for at in range(second - 59, second + 1))
            shares.append(held / limit)
    return shares, first


def p99_ms(calls: list[dict[str, Any]], tier: int, share: float = 0.99) -> float | None:
    """What the slowest hundredth of a tier's calls waited at least."""
    waits = [call["waited_us"] / 1000 for call in calls if call["tier"] == tier]
    found = generator.percentile(waits, share)
    return None if found is None else round(found, 1)


def compare(
    books: dict[str, Any], calls: list[dict[str, Any]], samples: dict[str, float], seen: Seen
) -> dict[str, dict[str, Any]]:
    """Every figure that more than one side knows."""

    def used(kind: str) -> int:
        return sum((call["usage"] or {}).get(kind) or 0 for call in calls)

    ok = sum(call["outcome"] == "ok" for call in calls)
    return {
        "requests": {
            "emulator": books["requests"],
            "log": sum(call["attempts"] for call in calls if call["upstream_status"]),
            "metrics": emulated.total(samples, "tidegate_upstream_answers_total"),
        },
        "completed": {
            "emulator": books["completed"],
            "log": ok,
            "metrics": emulated.total(samples, "tidegate_calls_total", outcome="ok"),
            "clients": seen.completed,
        },
        "input": {
            "emulator": books["reported"]["input"] + books["reported"]["cache_write"],
            "log": used("input"),
            "metrics": emulated.total(samples, "tidegate_tokens_used_total", kind="input"),
        },
        "cache_read": {
            "emulator": books["reported"]["cache_read"],
            "log": used("cache_read"),
            "metrics": emulated.total(samples, "tidegate_tokens_used_total", kind="cache_read"),
        },
        "output": {
            "emulator": books["reported"]["output"],
            "log": used("output"),
            "metrics": emulated.total(samples, "tidegate_tokens_used_total", kind="output"),
        },
        "charged": {
            "emulator": books["charged"]["tokens"],
            "log": used("input") + used("output") + used("cache_read") + used("cache_write"),
        },
    }


async def play(ports: list[int], *, load: Load, seed: int, surge_s: float) -> Seen:
    """All agents, spread over these gateways, until the last has its answer."""
    seen, prompts = Seen(), Prompts(seed)
    until = time.monotonic() + surge_s
    bounds = {1: AGENTS * SHARES[1], 2: AGENTS * (SHARES[1] + SHARES[2]), 3: AGENTS}

    async def tell() -> None:
        while True:
            await asyncio.sleep(10)
            left = until - time.monotonic()
            say(
                f"  {seen.completed} of {seen.issued} calls answered, {max(0, left):.0f} s of surge"
            )

    async with asyncio.TaskGroup() as group:
        teller = group.create_task(tell())
        agents = [
            group.create_task(
                agent(
                    ports, number, next(t for t, most in bounds.items() if number < most),
                    load=load, prompts=prompts, seed=seed, until=until, seen=seen,
                )
            )
            for number in range(AGENTS)
        ]  # fmt: skip
        await asyncio.wait(agents)
        teller.cancel()
    return seen


async def measured(seed: int, surge_s: float, *, shipped: bool = False) -> dict[str, Any]:
    """One run."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-blackfriday-"))
    emulator = gateway = None
    load = Load()
    try:
        emulator = await emulated.start(load.emulator | {"seed": seed}, folder=folder)
        text = load.policy
        if not shipped:
            text = text.replace("models:\n", f"{TUNED}models:\n", 1)
        gateway = await governed.start(emulator, text=text)
        pause, mean = load.pause(), mean_tokens()
        say(f"{AGENTS} agents, {pause:.2f} s between calls, {mean:.0f} tokens a call")
        began = time.monotonic()
        seen = await play([gateway.server.port], load=load, seed=seed, surge_s=surge_s)
        lasted = seen.ended - began
        status = await emulated.quiet(gateway)
        books = await emulated.ledger(emulator, timeline=True)
        samples = await emulated.metrics(gateway)
        gateway.server.stop()
        return report(load, seen, status, books, samples, emulated.calls(gateway)) | {
            "load_s": round(lasted, 1),
            "gateway_cpu_s": round(samples.get("process_cpu_seconds_total", 0.0), 2) or None,
        }
    finally:
        for server in (gateway, emulator):
            if server is not None:
                with contextlib.suppress(OSError):
                    server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def report(
    load: Load, seen: Seen, status: dict[str, Any], books: dict[str, Any],
    samples: dict[str, float], calls: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The figures, from the books."""
    shares, _ = use(books["timeline"], calls, load.limit)
    sides = compare(books, calls, samples, seen)
    peak = books["meters"]["quota"]["dimensions"]["tokens"]["peak"]
    provider = next(pool for pool in status["pools"] if pool["name"] == "pool:quota")
    return {
        "provider_429": emulated.quota_refusals(books),
        "quota_used": round(sum(shares) / len(shares), 4) if shares else None,
        "quota_used_min": round(min(shares), 4) if shares else None,
        "quota_used_max": round(max(shares), 4) if shares else None,
        "saturated_seconds": len(shares),
        "completion": round(seen.completed / seen.issued, 6),
        "wait_p99_ms": {str(tier): p99_ms(calls, tier) for tier in SHARES},
        "wait_p50_ms": {str(tier): p99_ms(calls, tier, 0.5) for tier in SHARES},
        "ops": len(calls),
        "ledgers_equal": all(len(set(side.values())) == 1 for side in sides.values()),
        "ledgers": sides,
        "calls_by_tier": {str(t): sum(c["tier"] == t for c in calls) for t in SHARES},
        "client_statuses": seen.statuses,
        "meter_peak": peak,
        "meter_limit": load.limit,
        "foreign_signalled": [d["foreign"] for d in provider["dimensions"]],
        "factor": provider["factor"],
        "left": {
            "in_flight": status["in_flight"],
            "waiting": sum(sum(pool["waiting"]) for pool in status["pools"]),
            "permits": sum(pool["in_flight"] for pool in status["pools"]),
        },
        "scaled": "prompts and pauses a third of admission.md; window 60 s, not shortened",
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line (as always)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--shipped", action="store_true", help="with the shape's own ceilings, guard and pace"
    )
    parser.add_argument("--surge", type=float, default=SURGE_S, help=argparse.SUPPRESS)
    options = parser.parse_args()
    began = time.monotonic()
    measure.raise_files()
    measure.pin_self(1)
    result = asyncio.run(measured(options.seed, options.surge, shipped=options.shipped))
    measure.finish(result, began=began, seed=options.seed)


if __name__ == "__main__":
    main()
