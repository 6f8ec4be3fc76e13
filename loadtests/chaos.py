"""Twenty thousand calls under random faults and vanishing clients: nothing may be left or wrong.

The upstream is the provider emulator as a process of its own, with faults of every kind by seed; a
shell around it notes for every call how often it was executed to its end and what usage was told.
The clients leave at any moment: before the body is sent, while waiting, before the head, within the
stream. Some calls wait, because the pool has fewer permits than there are clients. Afterwards:

    leaked_permits, leaked_leases, waiting_left   what the gateway's pools still hold
    ledgers_equal    for every call whose usage the gateway settled as reported, the upstream told
                     exactly that; every call a client saw complete was executed once; each call has
                     one line in the log; tokens of log and metrics agree
    answered_twice   calls executed to their end more than once, or answered twice to a client
    hung             calls without an end after a minute
    rss_slope_kb_per_1000_calls   anonymous memory of the gateway over the second half of the calls
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests import emulated, generator, governed, measure
from loadtests.measure import say

CALLS = 20_500
WORKERS = 380
PERMITS = 170
HUNG_S = 60.0
LIMIT_S = 104.0
MARK = "x-chaos-call"
USAGE = re.compile(rb'"prompt_tokens":(\d+),"completion_tokens":(\d+)')

POLICY = f"""version: 1
providers:
  emulator:
    kind: openai
    base_url: ${{ORIGIN_URL}}
    keys: [{{id: main, value: "${{ORIGIN_KEY}}"}}]
    timeouts: {{connect: 2s, first_byte: 2s, idle: 2s, total: 20s, total_plain: 8s}}
pools:
  quota:
    provider: emulator
    limits: {{rpm: 100M, tpm: 1G, concurrency: {PERMITS}}}
models:
  m-chaos: {{provider: emulator, pool: quota}}
tiers:
  interactive: {{number: 1, max_wait: 30s}}
  standard: {{number: 2, max_wait: 30s}}
  batch: {{number: 3, max_wait: 30s}}
fairness: agent
agents:
  load: {{keys: [{{pattern: "chaos-*"}}], tier: batch, tier_cap: interactive, loopback_only: true}}
retry: {{base: 50ms, cap: 500ms, attempts: 3, max_retry_after: 2s}}
breakers:
  in_a_row: 12
  base: 100ms
  cap: 1s
logging: {{access: true}}
tokenizer: preferred
"""


STORM = 40
STORMS = [str(begin + n) for begin in range(1_000, 40_000, 2_000) for n in range(STORM)]
"""Requests that meet a storm: so many in a row are refused, every two thousand."""


def fault(action: str, probability: float, **more: Any) -> dict[str, Any]:
    """One rule."""
    return {"action": action, "probability": probability, "name": f"{action}-{len(more)}"} | more


EMULATOR: dict[str, Any] = {
    "limits": [],
    "answers": {"median": 12, "sigma": 0.6, "longest": 120, "prompt_cache": False},
    "pacing": {"first_byte": 0.05, "tokens_per_second": 250.0, "jitter": 0.5},
    "faults": [
        fault("status", 1.0, code="rate_limit", retry_after=["ms:150"], status=429, nth=STORMS),
        fault("status", 0.006, code="overloaded", status=529),
        fault("status", 0.01, code="server_error", status=500),
        fault("status", 0.004, code="bad_gateway", status=502),
        fault("cut", 0.008, after_bytes=60),
        fault("cut", 0.006, after_events=2),
        fault("reset", 0.006, after_bytes=0),
        fault("reset", 0.006, after_events=3),
        fault("stall", 0.003, seconds=4.0),
        fault("stall", 0.003, seconds=0, after_events=2),
        fault("slow_first_byte", 0.02, seconds=0.5),
        fault("malformed", 0.01, after_events=1),
        fault("error_event", 0.008, after_events=0),
        fault("error_event", 0.008, after_events=2),
        fault("usage", 0.01, usage="missing"),
        fault("usage", 0.01, usage="null"),
        fault("usage", 0.01, usage="zero"),
        fault("usage", 0.01, usage="wrong", factor=3),
        fault("flood", 0.003, after_events=1, size=100_000),
        fault("fragment", 0.02, size=11),
    ],
}


# --- the upstream, in its own process ------------------------------------------------------------


class Shell:
    """Around the emulator: how often each call was executed to its end, and what was told."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.requests: Counter[str] = Counter()
        self.ends: dict[str, list[list[int] | None]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/chaos/books":
            body = json.dumps({"requests": self.requests, "ends": self.ends}).encode()
            head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        mark = next((v.decode() for k, v in scope.get("headers", ()) if k == MARK.encode()), "")
        if not mark:
            await self._app(scope, receive, send)
            return
        self.requests[mark] += 1
        tail = bytearray()
        status = 0

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and status == 200:
                tail.extend(message.get("body", b""))
                del tail[:-2_000]
                whole = b"[DONE]" in tail or b'"object":"chat.completion",' in tail
                if not message.get("more_body") and whole:
                    told = USAGE.findall(bytes(tail))
                    usage = [int(part) for part in told[-1]] if told else None
                    self.ends.setdefault(mark, []).append(usage)

        await self._app(scope, receive, noting)


def upstream(port: int, config: Path) -> None:
    """The emulator behind its shell, until a signal."""
    from gateway.clock import LoopClock
    from gateway.emulator import server
    from gateway.emulator.app import Emulator
    from gateway.emulator.config import from_mapping

    told = from_mapping(json.loads(config.read_text()))

    async def run() -> None:
        app = Emulator(told, LoopClock())
        shell: Any = Shell(app)
        sock = server.bind("127.0.0.1", port)
        await server._serve(shell, sock, lambda _: None, asyncio.Event())  # noqa: SLF001

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


# --- the clients ---------------------------------------------------------------------------------


class Client(generator.Client):
    """Counts the answers to one request, and keeps the end of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = 0
        self.tail = bytearray()
        self.call_id = ""
        self.on_data = self._keep
        self.on_head = self._read

    def _keep(self, data: bytes) -> None:
        self.tail.extend(data)
        del self.tail[:-200]

    def _read(self, line: bytes) -> None:
        name, _, value = line.partition(b": ")
        if name.lower() == b"tidegate-call-id":
            self.call_id = value.decode()

    def send(self, part: bytes) -> None:
        """Write bytes, whatever they are."""
        self._transport.write(part)

    def vanish(self) -> None:
        """End the connection without a word."""
        self._transport.abort()

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self.answers += 1
        super().on_message_complete()


@dataclass
class Seen:
    """What the clients saw.

    Attributes:
        complete: Marks of calls answered 200 to the end.
        ids: Call id by mark, where a head was seen.
        statuses: Ends by kind.
    """

    begun: int = 0
    ended: int = 0
    hung: int = 0
    twice: int = 0
    complete: list[str] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float]] = field(default_factory=list)


TEXTS = [
    "tell me of rivers", "count to seven", "what is the harbour for", "name a quiet engine",
    "fold a lantern from copper leaves and say which way the morning returns, slowly, please",
]  # fmt: skip


def request(draw: random.Random, mark: str, worker: int) -> tuple[bytes, bool]:
    """The bytes of one call, and whether it streams."""
    stream = draw.random() < 0.6
    value: dict[str, Any] = {
        "model": "m-chaos",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": draw.choice(TEXTS)}],
    }
    if stream:
        value["stream"] = True
    headers = {MARK: mark, "tidegate-tier": str(draw.choice((1, 2, 2, 3, 3, 3)))}
    raw = generator.post(
        "/v1/chat/completions", json.dumps(value).encode(), headers=headers,
        key=f"chaos-{worker % 40:04d}-0123456789",
    )  # fmt: skip
    return raw, stream


async def leave(client: Client, raw: bytes, draw: random.Random, seen: Seen) -> None:
    """Send the call and vanish at some moment."""
    how = draw.randrange(4)
    if how == 0:  # within the request
        client.send(raw[: draw.randrange(1, len(raw))])
        await asyncio.sleep(draw.random() * 0.05)
    elif how == 1:  # at once
        client.exchange(raw).cancel()
    else:  # while it waits, before the head, within the answer
        future = client.exchange(raw)
        await asyncio.wait([future], timeout=draw.random() * draw.choice((0.02, 0.2, 0.8)))
        future.cancel()
    if draw.random() < 0.5:
        client.vanish()
    else:
        client.close()
    client.lost = True
    seen.statuses["left"] += 1


async def ask(client: Client, raw: bytes, mark: str, stream: bool, seen: Seen) -> None:
    """Send the call and wait for its end."""
    try:
        async with asyncio.timeout(HUNG_S):
            status = await client.exchange(raw)
    except TimeoutError:
        seen.hung += 1
        seen.statuses["hung"] += 1
        client.close()
        client.lost = True
        return
    except (ConnectionError, OSError):
        seen.statuses[f"cut in {client.status or 'nothing'}"] += 1
        client.close()
        client.lost = True
        return
    if client.answers > 1:
        seen.twice += 1
    whole = status == 200 and (not stream or b"[DONE]" in client.tail)
    if whole:
        seen.complete.append(mark)
    seen.statuses[f"{status}" if whole or status != 200 else "200 with error event"] += 1


async def worker(number: int, port: int, seed: int, calls: int, until: float, seen: Seen) -> None:
    """Calls, one after the other, until there have been enough."""
    draw = random.Random(seed * 100_003 + number)
    loop = asyncio.get_running_loop()
    client: Client | None = None
    while seen.begun < calls and time.monotonic() < until:
        seen.begun += 1
        mark = f"{number}.{seen.begun}"
        raw, stream = request(draw, mark, number)
        if client is None or client.lost:
            try:
                _, client = await loop.create_connection(Client, "127.0.0.1", port)
            except OSError:
                seen.statuses["no connection"] += 1
                continue
        client.answers, client.call_id = 0, ""
        client.tail.clear()
        if draw.random() < 0.18:
            await leave(client, raw, draw, seen)
        else:
            await ask(client, raw, mark, stream, seen)
        if client.call_id:
            seen.ids[mark] = client.call_id
        seen.ended += 1
    if client is not None:
        client.close()


def slope(memory: list[tuple[int, float]]) -> float | None:
    """Least squares of MB over calls in the second half, in kB per 1,000 calls."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return None
    mean_x = sum(x for x, _ in half) / len(half)
    mean_y = sum(y for _, y in half) / len(half)
    spread = sum((x - mean_x) ** 2 for x, _ in half)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in half)
    return round(rise / spread * 1e6, 1) if spread else None


async def play(gateway: governed.Governed, seed: int, calls: int) -> Seen:
    """All calls."""
    seen = Seen()
    until = time.monotonic() + LIMIT_S * max(1.0, calls / CALLS)
    pid = gateway.server.pid

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.25)
            seen.memory.append((seen.ended, measure.anonymous_mb(pid)))
            if len(seen.memory) % 40 == 0:
                say(f"  {seen.ended} of {calls} calls, {seen.memory[-1][1]:.0f} MB")

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        await asyncio.wait(
            [
                group.create_task(worker(n, gateway.server.port, seed, calls, until, seen))
                for n in range(WORKERS)
            ]
        )
        watcher.cancel()
    return seen


def compare(
    seen: Seen, books: dict[str, Any], log: list[dict[str, Any]], samples: dict[str, float]
) -> dict[str, Any]:
    """Both sides' books; every entry but `compared` must be zero."""
    by_id = {entry["call"]: entry for entry in log}
    ends: dict[str, list[list[int] | None]] = books["ends"]
    differs = compared = 0
    for mark, call_id in seen.ids.items():
        entry = by_id.get(call_id)
        usage = entry["usage"] if entry else None
        if entry is None or usage is None or usage["estimated"] or entry["outcome"] != "ok":
            continue
        compared += 1
        told = [end for end in ends.get(mark, ()) if end is not None]
        if [usage["input"], usage["output"]] not in told:
            differs += 1
    counted = {
        kind: sum((entry["usage"] or {}).get(kind) or 0 for entry in log if good(entry))
        for kind in ("input", "output")
    }
    metered = {
        kind: emulated.total(samples, "tidegate_tokens_used_total", kind=kind)
        for kind in ("input", "output")
    }
    return {
        "compared": compared,
        "usage_differs": differs,
        "complete_but_not_executed_once": sum(
            len(ends.get(mark, ())) != 1 for mark in seen.complete
        ),
        "calls_without_a_line": sum(call_id not in by_id for call_id in seen.ids.values()),
        "calls_with_two_lines": len(log) - len(by_id),
        "metrics_minus_log": {kind: metered[kind] - counted[kind] for kind in counted},
    }


def good(entry: dict[str, Any]) -> bool:
    """Calls whose tokens the metrics count: answered, and not by a refusal."""
    return entry["usage"] is not None


def equal(sides: dict[str, Any]) -> bool:
    """Whether nothing differs."""
    return sides["compared"] > 0 and not any(
        any(value.values()) if isinstance(value, dict) else value
        for name, value in sides.items()
        if name != "compared"
    )


async def measured(seed: int, calls: int) -> dict[str, Any]:
    """One run."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-chaos-"))
    gateway = emulator = None
    try:
        config = folder / "emulator.json"
        config.write_text(json.dumps(EMULATOR | {"seed": seed}))
        port = measure.free_port()
        emulator = await measure.start(
            "upstream",
            [sys.executable, "-m", "loadtests.chaos", "--upstream", str(port), str(config)],
            port=port, core=1, output=folder / "log",
        )  # fmt: skip
        gateway = await governed.start(emulator, text=POLICY)
        began = time.monotonic()
        trees = {"gateway": gateway.server.pid, "upstream": emulator.pid}
        before = {name: measure.cpu(pid) for name, pid in trees.items()}
        ours = time.process_time()
        seen = await play(gateway, seed, calls)
        lasted = time.monotonic() - began
        busy = {name: (measure.cpu(pid) - before[name]) / lasted for name, pid in trees.items()}
        busy["clients"] = (time.process_time() - ours) / lasted
        status = await emulated.quiet(gateway, limit=10)
        samples = await emulated.metrics(gateway)
        ledger = await emulated.ledger(emulator)
        books = json.loads(await generator.fetch(emulator.port, "/chaos/books"))
        gateway.server.stop()
        log = emulated.calls(gateway)
        crashes = (gateway.folder / "log").read_bytes().count(b"call_crashed")
    finally:
        for server in (gateway, emulator):
            if server is not None:
                server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    sides = compare(seen, books, log, samples)
    twice = [mark for mark, ends in books["ends"].items() if len(ends) > 1]
    pools = status["pools"]
    return {
        "calls": seen.begun,
        "leaked_permits": sum(pool["in_flight"] for pool in pools),
        "leaked_leases": sum(pool["in_flight"] for pool in pools),
        "waiting_left": sum(sum(pool["waiting"]) for pool in pools),
        "ledgers_equal": equal(sides),
        "answered_twice": len(twice) + seen.twice,
        "rss_slope_kb_per_1000_calls": slope(seen.memory),
        "hung": seen.hung,
        "calls_left": status["in_flight"],
        "upstream_connections_left": emulated.total(samples, "tidegate_upstream_connections"),
        "upstream_in_flight_left": ledger["in_flight"],
        "crashed": crashes,
        "ledgers": sides,
        "client_ends": dict(seen.statuses.most_common()),
        "gateway_ends": dict(Counter(entry["outcome"] for entry in log).most_common()),
        "waited": sum(entry["waited_us"] > 0 for entry in log),
        "retried": sum(entry["attempts"] > 1 for entry in log),
        "faults": ledger["faults"],
        "upstream_requests": sum(books["requests"].values()),
        "calls_per_s": round(seen.ended / lasted, 1),
        "busy": {name: round(share, 3) for name, share in busy.items()},
        "rss_mb": round(seen.memory[-1][1], 1) if seen.memory else None,
        "rss_mb_by_calls": [
            (n, round(mb, 1)) for n, mb in seen.memory[:: max(1, len(seen.memory) // 12)]
        ],
        "breakers": [(b["scope"], b["state"]) for b in status["breakers"]],
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line (as always)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--upstream", nargs=2, metavar=("PORT", "CONFIG"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        upstream(int(options.upstream[0]), Path(options.upstream[1]))
        return
    began = time.monotonic()
    measure.raise_files()
    measure.pin_self(1)
    result = asyncio.run(measured(options.seed, options.calls))
    measure.finish(result, began=began, seed=options.seed)


if __name__ == "__main__":
    main()
