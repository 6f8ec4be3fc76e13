"""A thousand held calls resume when their provider comes back: how fast, in which order, how often.

The provider refuses everything; a thousand calls of three tiers ask to be held and are. Then it is
back, and the time runs until the last hold is final. Every result is fetched and the provider's
ledger says how often each call was executed; the order is read from the store's own file.

    resume_s           from the provider's return to the last result, median of the rounds
    lost               holds that did not end in an answer
    executed_twice     answers that the provider gave beyond one per hold
    overtaken_most     places between a call's rank by tier and age and its rank by sending; a batch
                       of `at_once` is sent at the same time, so up to 64 is no overtaking
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from loadtests import emulated, generator, governed, measure
from loadtests.measure import say

if TYPE_CHECKING:
    from loadtests.governed import Governed

HOLDS = 1_000
ROUNDS = 3
CLIENTS = 20
LIMIT_S = 40.0
MODEL = "gpt-4o"

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
  load: {keys: [{pattern: "holds-*"}], tier: batch, tier_cap: interactive, loopback_only: true}
fairness: agent
retry: {attempts: 1}
breakers: {in_a_row: 3, base: 300ms, cap: 600ms}
holds: {rate: 500, at_once: 64}
tokenizer: preferred
"""

EMULATOR: dict[str, Any] = {
    "limits": [],
    "answers": {"median": 12, "sigma": 0.4, "longest": 60, "prompt_cache": False},
    "pacing": {"first_byte": 0.05, "tokens_per_second": 500.0, "jitter": 0.3},
}
DOWN = {"action": "status", "status": 503, "code": "overloaded", "name": "down"}


def call(number: int) -> bytes:
    """One call that asks to be held; an agent of its own for each fifty, within what one may."""
    body = {
        "model": MODEL, "max_tokens": 60,
        "messages": [{"role": "user", "content": f"hold number {number}"}],
    }  # fmt: skip
    return generator.post(
        "/v1/chat/completions", json.dumps(body).encode(), key=f"holds-{number // 50:04d}-0123456",
        headers={"prefer": "respond-async", "tidegate-tier": str(number % 3 + 1)},
    )  # fmt: skip


async def faults(emulator: measure.Server, *rules: dict[str, Any]) -> None:
    """These are the provider's faults from now on."""
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{emulator.port}/emulator/faults"
        (await client.post(url, json={"rules": rules})).raise_for_status()


async def trip(port: int) -> None:
    """The breaker is open: three failures of callers that do not want to be held."""
    for number in range(4):
        client = await generator.connect(port)
        raw = call(number).replace(b"prefer: respond-async\r\n", b"tidegate-hold: never\r\n")
        answer = client.exchange(raw)
        await asyncio.wait([answer], timeout=0.5)
        answer.cancel()
        client.close()


async def keep(port: int, numbers: list[int], kept: dict[int, str], refused: list[int]) -> None:
    """These calls are held, one after the other on one connection."""
    client = await generator.connect(port)
    place = [""]

    def note(line: bytes) -> None:
        name, _, value = line.partition(b": ")
        if name.lower() == b"location":
            place[0] = value.decode()

    client.on_head = note
    for number in numbers:
        place[0] = ""
        status = await client.exchange(call(number))
        if status == 202 and place[0]:
            kept[number] = place[0]
        else:
            refused.append(status)
    client.close()


async def until_over(gateway: Governed) -> bool:
    """Whether no hold is waiting or running any more within the limit."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        holds = (await emulated.status(gateway))["holds"]
        if not holds["waiting"] and not holds["running"]:
            return True
        await asyncio.sleep(0.02)
    return False


async def fetched(port: int, numbers: list[int], kept: dict[int, str]) -> int:
    """How many of these holds ended in an answer."""
    client = await generator.connect(port)
    good = 0
    for number in numbers:
        key = f"holds-{number // 50:04d}-0123456"
        head = f"GET {kept[number]} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}"
        good += await client.exchange(f"{head}\r\n\r\n".encode()) == 200
    client.close()
    return good


def overtaken(store: Path) -> int:
    """The most places that a call lost or won against tier and age."""
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as db:
        found = db.execute("SELECT tier, seq, sent_at FROM held_call WHERE sent_at > 0").fetchall()
    due = {row[1]: rank for rank, row in enumerate(sorted(found))}
    sent = sorted(found, key=lambda row: (row[2], row[0], row[1]))
    return max((abs(due[row[1]] - rank) for rank, row in enumerate(sent)), default=0)


async def round_of(emulator: measure.Server, holds: int) -> dict[str, Any]:
    """One gateway, its holds, and the return of its provider."""
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{emulator.port}/emulator/reset"
        (await client.post(url)).raise_for_status()
    await faults(emulator, DOWN)
    gateway = await governed.start(emulator, text=POLICY)
    try:
        port = gateway.server.port
        await trip(port)
        kept: dict[int, str] = {}
        refused: list[int] = []
        shares = [list(range(at, holds, CLIENTS)) for at in range(CLIENTS)]
        began = time.monotonic()
        await asyncio.gather(*(keep(port, share, kept, refused) for share in shares))
        keep_s = time.monotonic() - began
        await faults(emulator)
        began = time.monotonic()
        over = await until_over(gateway)
        resume_s = time.monotonic() - began
        good = sum(
            await asyncio.gather(
                *(fetched(port, [n for n in share if n in kept], kept) for share in shares)
            )
        )
        books = await emulated.ledger(emulator)
        return {
            "held": len(kept),
            "not_held": len(refused),
            "keep_s": round(keep_s, 2),
            "resume_s": round(resume_s, 2) if over else None,
            "lost": len(kept) - good,
            "executed_twice": max(0, books["completed"] - good),
            "overtaken_most": overtaken(gateway.folder / "state" / "tasks.db"),
        }
    finally:
        gateway.stop()


async def measured(seed: int, holds: int) -> dict[str, Any]:
    """Some rounds."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-holds-"))
    emulator = None
    try:
        emulator = await emulated.start(EMULATOR | {"seed": seed}, folder=folder)
        rounds = []
        for number in range(ROUNDS):
            rounds.append(await round_of(emulator, holds))
            say(f"  round {number + 1}: {rounds[-1]}")
    finally:
        if emulator is not None:
            emulator.stop()
        shutil.rmtree(folder, ignore_errors=True)
    ended = [one["resume_s"] for one in rounds if one["resume_s"] is not None]
    return {
        "holds": holds,
        **measure.summary("resume_s", ended, 2),
        **measure.summary("keep_s", [one["keep_s"] for one in rounds], 2),
        "lost": sum(one["lost"] + one["not_held"] for one in rounds),
        "executed_twice": sum(one["executed_twice"] for one in rounds),
        "overtaken_most": max(one["overtaken_most"] for one in rounds),
        "unfinished_rounds": ROUNDS - len(ended),
        "rounds": rounds,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line (as always)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--holds", type=int, default=HOLDS)
    options = parser.parse_args()
    began = time.monotonic()
    measure.raise_files()
    measure.pin_self(1)
    result = asyncio.run(measured(options.seed, options.holds))
    measure.finish(result, began=began, seed=options.seed)


if __name__ == "__main__":
    main()
