"""What counting a prompt costs, and how long it holds the loop.

`python -m loadtests.tokens --json`. Texts are lines of this checkout's own files, mixed by seed.
Costs are CPU time of this process, threads included; a stall is the lateness of a 1 ms ticker in
the loop, with the same ticker beside nothing as control. Each figure is the median of the rounds;
texts are new in each round, so that only "warm" figures meet the cache. `exact_vs_tiktoken`
compares the whole corpus, counted in slices, with tiktoken's own encoders counting it in one piece.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import subprocess
import sys
import time
from pathlib import Path

import tiktoken

from gateway.clock import LoopClock
from gateway.settings import export_vocabulary_dir, from_environment
from gateway.tokens import PINNED, Counted, Counter, Vocabulary, slices
from loadtests.measure import finish, say, summary

ROOT = Path(__file__).resolve().parent.parent
ENCODING = "o200k_base"


def corpus(rng: random.Random) -> list[str]:
    """Lines of source and prose, in random order."""
    lines: list[str] = []
    for pattern in ("*.md", "docs/**/*.md", "gateway/**/*.py", "tests/**/*.py", "deploy/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            lines += path.read_text(errors="replace").splitlines(keepends=True)
    rng.shuffle(lines)
    return lines


def text_of(lines: list[str], rng: random.Random, size: int) -> str:
    """A new text of about that many characters."""
    picked: list[str] = []
    while size > 0:
        line = rng.choice(lines)
        picked.append(line)
        size -= len(line)
    return "".join(picked)


def of_tokens(lines: list[str], rng: random.Random, encoder: tiktoken.Encoding, count: int) -> str:
    """A new text of exactly about that many tokens."""
    text = text_of(lines, rng, count * 5)
    return encoder.decode(encoder.encode_ordinary(text)[:count])


async def count(counter: Counter, texts: list[str], tenant: str) -> tuple[Counted, float]:
    """The count and the CPU milliseconds of the process that it took."""
    parts = list(texts)
    began = time.process_time()
    counted = counter.count(parts, encoding=ENCODING, tenant=tenant)
    if not isinstance(counted, Counted):
        counted = await counted
    return counted, (time.process_time() - began) * 1e3


class Ticker:
    """Largest lateness, in ms, of a 1 ms sleep while the block ran."""

    async def __aenter__(self) -> Ticker:
        self.worst = 0.0
        self.stop = False
        self.task = asyncio.create_task(self.tick())
        await asyncio.sleep(0.005)
        self.worst = 0.0
        return self

    async def tick(self) -> None:
        while not self.stop:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            self.worst = max(self.worst, (time.perf_counter() - began - 0.001) * 1e3)

    async def __aexit__(self, *_: object) -> None:
        self.stop = True
        await self.task


async def one_round(
    counter: Counter, reference: tiktoken.Encoding, lines: list[str], rng: random.Random, name: str
) -> dict[str, float]:
    """Every figure once."""
    found: dict[str, float] = {}
    text = of_tokens(lines, rng, reference, 2_500)  # below the inline bound of 12 kB
    pieces = [text[:11_000]] * 8
    counted, cpu = await count(counter, [pieces[0]], f"{name}-small")
    total_tokens, total_cpu = counted.tokens, cpu
    for n, piece in enumerate(pieces[1:]):
        counted, cpu = await count(counter, [piece], f"{name}-small-{n}")
        total_tokens, total_cpu = total_tokens + counted.tokens, total_cpu + cpu
    found["us_per_token_cold"] = total_cpu * 1e3 / total_tokens

    messages = [text_of(lines, rng, 2_000)[:2_000] for _ in range(30)]
    _, found["ms_30_messages_cold"] = await count(counter, messages, name)
    warm = [(await count(counter, messages, name))[1] for _ in range(20)]
    found["ms_30_messages_warm"] = sum(warm) / len(warm)

    async with Ticker() as ticker:
        await asyncio.sleep(0.05)
    found["control_loop_stall_ms"] = ticker.worst

    long = of_tokens(lines, rng, reference, 100_000)
    counted, found["cpu_ms_100k_tokens"] = await count(counter, [long], name)
    found["tokens_counted"] = counted.tokens
    async with Ticker() as ticker:
        counted, _ = await count(counter, [long], f"{name}-again")
    found["loop_stall_ms_100k_tokens"] = ticker.worst

    async with Ticker() as ticker:
        counted, found["cpu_ms_1mb_a"] = await count(counter, ["a" * 1_000_000], name)
    found["loop_stall_ms_1mb_a"] = ticker.worst
    found["estimated_1mb_a"] = float(not counted.exact)
    return found


def exactness(lines: list[str], folder: Path) -> tuple[bool, int]:
    """Whether slices count as the whole does, and the largest difference seen."""
    export_vocabulary_dir(folder)
    text = "".join(lines) + "<|endoftext|><|im_start|>" * 100
    worst = 0
    for name in PINNED:
        ours = Vocabulary(folder).open(name)
        whole = len(tiktoken.get_encoding(name).encode(text, disallowed_special=()))
        sliced = sum(len(ours.encode_ordinary(piece)) for piece in slices(text))
        worst = max(worst, abs(whole - sliced))
    return worst == 0, worst


async def measure(rounds: int, seed: int, folder: Path) -> dict[str, object]:
    rng = random.Random(seed)
    lines = corpus(rng)
    counter = Counter(Vocabulary(folder).open, clock=LoopClock())
    began = time.perf_counter()
    warnings = await counter.preload([ENCODING])
    load = time.perf_counter() - began
    result: dict[str, object] = {"load_s": round(load, 3), "warnings": list(warnings)}
    if warnings:
        return {**result, "null_because": warnings[0], "exact_vs_tiktoken": None}
    exact, worst = exactness(lines, folder)
    reference = tiktoken.get_encoding(ENCODING)
    gc.collect()
    gc.freeze()  # as the gateway does after its start
    await one_round(counter, reference, lines, rng, "warm-up")
    all_rounds = []
    for number in range(rounds):
        all_rounds.append(await one_round(counter, reference, lines, rng, f"round-{number}"))
        say(f"round {number + 1}: {all_rounds[-1]}")
    counter.close()
    for key in all_rounds[0]:
        result |= summary(key, [one[key] for one in all_rounds])
    return {**result, "exact_vs_tiktoken": exact, "largest_difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; JSON is always printed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    subprocess.run([sys.executable, ROOT / "deploy" / "vocabulary.py"], check=False)
    folder = from_environment().vocabulary_dir
    result = asyncio.run(measure(max(3, options.rounds), options.seed, folder))
    finish(
        {**result, "encoding": ENCODING, "rounds": max(3, options.rounds)},
        began=began,
        seed=options.seed,
    )


if __name__ == "__main__":
    main()
