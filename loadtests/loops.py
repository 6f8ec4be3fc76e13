"""Runaway agents under load: how soon they are contained, and what watching costs everybody.

Forty agents repeat the same tool call with cosmetic changes (keys in another order, white space, a
counter), on Chat Completions, while others work honestly through tool histories of their own. The
gateway is the real process with loop rules in force; the provider's ledger says what was served.

    contained_ms         from sending the third repetition to the first refusal, the slowest agent
    served_after_third   calls of a runaway that the provider answered after its third repetition
    honest_refused       calls of honest agents that were cut: must be none
    cpu_us_per_call      of the rules alone, in this process, per call of an honest tool history
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtests import emulated, generator, governed, measure
from loadtests.measure import say

RUNAWAYS = 40
HONEST = 24
STEPS = 12
ROUNDS = 3
COSTED = 3_000
DEPTH = 30
"""Turns of an honest conversation, then it begins anew."""

POLICY = """version: 1
providers:
  emulator:
    kind: openai
    base_url: ${ORIGIN_URL}
    keys: [{id: main, value: "${ORIGIN_KEY}"}]
pools:
  quota:
    provider: emulator
    limits: {rpm: 1M, tpm: 100M}
models:
  gpt-4o: {provider: emulator, pool: quota, context_window: 128_000}
agents:
  load: {keys: [{pattern: "loops-*"}], loopback_only: true}
fairness: agent
loops: {mode: enforce}
tokenizer: preferred
"""

EMULATOR: dict[str, Any] = {
    "limits": [],
    "answers": {"median": 20, "sigma": 0.4, "longest": 60, "prompt_cache": False},
    "pacing": {"first_byte": 0.1, "tokens_per_second": 400.0, "jitter": 0.3},
}


def cosmetic(step: int) -> str:
    """The same arguments, written in another way each time."""
    ways = (
        '{"city":"Ulm","unit":"C"}', '{ "unit": "C", "city": "Ulm" }',
        '{"unit":"C","city":"Ulm"}', '{"city" : "Ulm",  "unit":"C"}',
    )  # fmt: skip
    return ways[step % len(ways)]


def turn(name: str, arguments: str, result: str, id_: str) -> list[dict[str, Any]]:
    """One answer that calls a tool, and what it returned."""
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id_, "content": result},
    ]


def raw(history: list[dict[str, Any]], key: str) -> bytes:
    """The request with that history."""
    body = {"model": "gpt-4o", "max_tokens": 60, "messages": history}
    return generator.post("/v1/chat/completions", json.dumps(body).encode(), key=key)


async def runaway(port: int, number: int, wait: float) -> tuple[float, int]:
    """Milliseconds from its third repetition to its refusal, and what was served between."""
    await asyncio.sleep(wait)
    history: list[dict[str, Any]] = [{"role": "user", "content": f"agent {number}: the weather?"}]
    client = await generator.connect(port)
    third, served = 0.0, 0
    try:
        for step in range(STEPS):
            if step:
                name = f"call_{number:04d}_{step:06d}"
                history += turn("weather", cosmetic(step), '{"sky":"grey"}', name)
            if step == 3:
                third = time.monotonic()
            status = await client.exchange(raw(history, f"loops-{number:04d}-0123456789"))
            if status == 429 and step >= 3:
                return 1e3 * (time.monotonic() - third), served - 1
            served += step >= 3 and status == 200
    finally:
        client.close()
    return float("inf"), served - 1


async def honest(port: int, number: int, stop: asyncio.Event, ends: dict[int, int]) -> None:
    """Tool calls that differ, until stopped."""
    client = await generator.connect(port)
    asked = 0
    while not stop.is_set():
        history: list[dict[str, Any]] = [{"role": "user", "content": f"task {number} {asked}"}]
        for step in range(DEPTH):
            status = await client.exchange(raw(history, f"loops-h{number:03d}-0123456789"))
            ends[status] = ends.get(status, 0) + 1
            if stop.is_set():
                break
            asked += 1
            path = json.dumps({"path": f"src/part_{number}_{asked}.py", "lines": [step, step + 40]})
            result = f"def work_{asked}(): return {asked * number}" * 6
            history += turn("read_file", path, result, f"call_h{number:03d}_{asked:07d}")
    client.close()


async def round_of(gateway: governed.Governed) -> dict[str, Any]:
    """All runaways at once, beside the honest."""
    port = gateway.server.port
    stop, ends = asyncio.Event(), dict[int, int]()
    async with asyncio.TaskGroup() as group:
        for number in range(HONEST):
            group.create_task(honest(port, number, stop, ends))
        await asyncio.sleep(1)
        found = await asyncio.gather(*(runaway(port, n, n * 0.02) for n in range(RUNAWAYS)))
        stop.set()
    return {
        "contained_ms": round(max(took for took, _ in found), 1),
        "served_after_third": sum(max(0, served) for _, served in found),
        "honest_calls": sum(ends.values()),
        "honest_refused": sum(count for status, count in ends.items() if status != 200),
    }


def cost() -> float:
    """CPU-microseconds of the rules per call of honest conversations, in this process."""
    from gateway.call import Call, Dialect, Family, Fields, Principal
    from gateway.layers.guard_loops import LoopGuard
    from gateway.resilience.loops import LoopRules
    from gateway.snapshot import AgentRule, Snapshot
    from gateway.units import Mode

    guard = LoopGuard()
    snapshot = Snapshot(revision=1, digest="", loops=LoopRules(mode=Mode.ENFORCE))
    rule = AgentRule(id="load", tenant="t")
    calls = []
    for number in range(COSTED // DEPTH):
        history: list[dict[str, Any]] = [{"role": "user", "content": f"task {number}"}]
        for step in range(DEPTH):
            call = Call(
                id="c", dialect=Dialect.CHAT, family=Family.OPENAI, method="POST", path="/",
                target=b"/", headers=[], snapshot=snapshot, received=1 + step,
            )  # fmt: skip
            call.parsed = json.loads(json.dumps({"model": "m", "messages": history}))
            call.fields = Fields(model="m", has_tools=True)
            call.principal = Principal(id=f"k{number}", agent="load", tenant="t", rule=rule)
            calls.append(call)
            path = json.dumps({"path": f"src/part_{number}_{step}.py", "lines": [step, step + 40]})
            result = f"def work_{step}(): return {step * number}" * 6
            history += turn("read_file", path, result, f"call_{number:04d}_{step:06d}")
    began = time.process_time()
    for call in calls:
        guard._look(call)  # noqa: SLF001 - the decision without the pipeline
    return 1e6 * (time.process_time() - began) / len(calls)


async def measured(seed: int) -> dict[str, Any]:
    """Some rounds."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-loops-"))
    emulator = gateway = None
    try:
        emulator = await emulated.start(EMULATOR | {"seed": seed}, folder=folder)
        gateway = await governed.start(emulator, text=POLICY)
        rounds, costs = [], []
        for number in range(ROUNDS):
            rounds.append(await round_of(gateway))
            costs.append(cost())
            say(f"  round {number + 1}: {rounds[-1]}, {costs[-1]:.1f} us")
            await asyncio.sleep(0.5)
    finally:
        for server in (gateway, emulator):
            if server is not None:
                server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        **measure.summary("contained_ms", [one["contained_ms"] for one in rounds], 1),
        **measure.summary("cpu_us_per_call", costs, 1),
        "served_after_third": sum(one["served_after_third"] for one in rounds),
        "honest_refused": sum(one["honest_refused"] for one in rounds),
        "honest_calls": sum(one["honest_calls"] for one in rounds),
        "runaways": RUNAWAYS * ROUNDS,
    }


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
