"""Proof S13: mutated modules and snapshots end in an error or in a correct guest, never in a crash.

`python -m loadtests.mutants --json [--modules N] [--snapshots N] [--seed S]`

Hosts are child processes that take the mutants of their share one after the other, as a worker
would; a host that dies, or hangs for a minute, is a crash, told with the mutant that did it.

- A *module* is one of a few valid ones with bytes changed, removed, inserted or copied. What is
  refused is counted by code. What is not goes the whole way: checks, Asyncify (in a child that may
  die of it, as at registration), compilation, and the self-test: plain against a yield at every
  check and moves through bytes. `diverged` counts modules that did something else when stopped.
- A *snapshot* is altered in its bytes (accepting one is a failure: `accepted`), or behind its hash
  and signed again, as somebody with the key could: then it is refused, or restored and run, where
  it may trap.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

from loadtests import hops, measure
from runtime import abi, sandbox, snapshot
from runtime.clock import cpu_us
from runtime.engine import Engine
from runtime.errors import ModuleRefused, SnapshotCorrupt, SnapshotMismatch
from runtime.hostcalls import SUSPENDING
from runtime.instrument import asyncify, checks, decode, exceptions, selftest
from runtime.wasi import FUNCTIONS

SHARE = 500
HANG_S = 60.0
TEST_S = 0.02
TEST_YIELDS = 1_000
KINDS = ("modules", "snapshots")
FEATURES = """
(module (import "agent" "host_call" (func $h (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1 4) (global $g (mut i64) (i64.const 5)) (table 3 funcref)
  (elem (i32.const 0) $a $b) (data (i32.const 8) "hello")
  (func $a (param i32) (result i32) local.get 0 i32.const 1 i32.add)
  (func $b (param i32) (result i32) (local f64 i64)
    (loop $l local.get 0 i32.const 1 i32.sub local.tee 0 br_if $l)
    i32.const 8 i32.load8_u offset=1 local.get 0 i32.const 1 i32.and
    call_indirect (param i32) (result i32))
  (func (export "run") (param i32) (result i32)
    (block $x (block $y local.get 0 br_table $x $y $x))
    i32.const 9 call $b i32.const 0 i32.const 0 i32.const 0 i32.const 0 call $h i32.add
    f64.const 1.5 i32.trunc_sat_f64_s i32.add i32.const 0 i32.const 16 i32.const 4 memory.copy))
"""
THROWING = """
(module (tag $t (param i32)) (memory 1)
  (func $f (param i32) (result i32)
    (block $c (result i32) (try_table (result i32) (catch $t $c) local.get 0 throw $t)))
  (func (export "run") (param i32) (result i32) (local i32)
    (loop $l local.get 0 call $f drop local.get 1 i32.const 1 i32.add local.tee 1
      i32.const 200 i32.lt_u br_if $l) local.get 1))
"""


def seeds() -> list[bytes]:
    """Valid modules of several shapes."""
    examples = resources.files("runtime.guests").joinpath("examples")
    texts = [FEATURES, THROWING]
    texts += [
        examples.joinpath(name).read_text() for name in ("counter.wat", "kernels/kernels.wat")
    ]
    return [Engine.assemble(text) for text in texts]


def mutate(data: bytes, rng: random.Random, *, after: int = 8) -> bytes:
    """The bytes with one to six changes, most often one; none before `after`."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 6))):
        if len(out) <= after + 1:
            break
        at = rng.randrange(after, len(out))
        kind = rng.randrange(5)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at : at + rng.randint(1, 4)]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randint(1, 4))
        else:
            start = rng.randrange(after, len(out))
            out[at:at] = out[start : start + rng.randint(1, 40)]
    return bytes(out)


# --- one host's share -----------------------------------------------------------------------------


class ModuleShare:
    """Mutated modules, as far as each gets."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.seeds = seeds()

    def one(self, rng: random.Random, folder: Path) -> str:
        """What became of the next one."""
        plain = mutate(rng.choice(self.seeds), rng)
        try:
            module = decode.decode(plain)
            reference = checks.reference(module)
            if "exceptions" in module.features:
                module = decode.decode(exceptions.lower(module))
            checks.gate(module, adapters=frozenset(), wasi=frozenset(FUNCTIONS))
            if self.engine.validate(plain) is not None:
                return "malformed"
            checked = checks.instrument(module)
            wasm = self.stoppable(checked.wasm, module, folder)
            if wasm is None:
                return "instrumentation_failed"
            names = {"plain_hash": "", "module_hash": "", "main": "run"}
            if not any(one.name == "run" and one.kind == 0 for one in module.exports):
                return "untestable"
            before = sandbox.load(self.engine, self.engine.compile(reference), **names)
            after = sandbox.load(self.engine, self.engine.compile(wasm), **names)
            selftest.self_test(
                before, after, argv=["x"], files={}, seconds=TEST_S, yields=TEST_YIELDS
            )
        except ModuleRefused as refused:
            return refused.code
        return "equal"

    @staticmethod
    def stoppable(checked: bytes, module: decode.Module, folder: Path) -> bytes | None:
        """Asyncify's output, made by a child; None when it died of it."""
        imports = [
            f"{one.module}.{one.name}"
            for one in module.imports
            if (one.module, one.name) in SUSPENDING
        ]
        suspending = (f"{checks.YIELD_MODULE}.{checks.YIELD_NAME}", *imports)
        target = folder / "out.wasm"
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                target.write_bytes(asyncify.asyncify(checked, suspending))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        return target.read_bytes() if status == 0 else None


class SnapshotShare:
    """Altered snapshots of a guest that was stopped in a call, and of one amid its computing."""

    def __init__(self) -> None:
        where, self.engine = hops.cache(), Engine()
        self.program = hops.loaded_for({"guest": "kernel"}, self.engine, where)
        self.wholes = []
        for kind in (0, 3, 4):
            one = sandbox.Sandbox(self.program, abi.State(argv=[]), arguments=(kind, 300))
            one.prepare()
            for _ in range(40):
                one.ask_to_yield()
                one.run()
            self.wholes.append(snapshot.encode(one.capture(), hops.KEY))
            one.close()

    def one(self, rng: random.Random, _folder: Path) -> str:
        """What became of the next one."""
        whole = rng.choice(self.wholes)
        if rng.random() < 0.4:
            data = mutate(whole, rng, after=0)
            if data == whole:
                return "unchanged"
        else:
            signed = self.altered(whole[: -snapshot.HASH], rng)
            tag = hashlib.blake2b(signed, key=hops.KEY, digest_size=snapshot.HASH).digest()
            data = signed + tag
        genuine = data[-snapshot.HASH :] == hashlib.blake2b(
            data[: -snapshot.HASH], key=hops.KEY, digest_size=snapshot.HASH
        ).digest()  # fmt: skip
        try:
            image = snapshot.restore([snapshot.decode(data, hops.KEY)])
            if not genuine:
                return "accepted"
            one = sandbox.Sandbox(self.program, image=image)
        except (SnapshotCorrupt, SnapshotMismatch) as refused:
            return refused.code
        return self.went_on(one)

    @staticmethod
    def altered(signed: bytes, rng: random.Random) -> bytes:
        """Other bytes behind the hash: anywhere, or in the body once it is inflated."""
        if rng.random() < 0.3:
            return mutate(signed, rng, after=4)
        head = snapshot.HEAD.unpack_from(signed)
        start = snapshot.HEAD.size + head[3]
        body = bytearray(snapshot.zstandard.ZstdDecompressor().decompress(signed[start:]))
        for _ in range(rng.randint(1, 12)):
            body[rng.randrange(min(len(body), rng.choice((200, 8_000, 1 << 30))))] = rng.choice(
                (0, 0xFF, rng.randrange(256))
            )
        packed = snapshot.zstandard.ZstdCompressor(level=1).compress(bytes(body))
        size = snapshot.HEAD.pack(*head[:4], len(packed))
        return size + signed[snapshot.HEAD.size : start] + packed

    @staticmethod
    def went_on(one: sandbox.Sandbox) -> str:
        """A guest with another stack or memory: it may do anything but harm."""
        one.prepare()
        one.kill_cpu_us = cpu_us() + 20_000
        reply = None if one.pending is None else hops.served(one.pending.request)
        outcome = one.run(reply)
        one.close()
        return f"ran: {outcome.kind if isinstance(outcome, sandbox.Trapped) else 'ended'}"


def share(kind: str, seed: int, first: int, count: int) -> None:
    """What a host does: its mutants in turn, each number told before it is tried."""
    host = ModuleShare() if kind == "modules" else SnapshotShare()
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name, selftest.ticking(host.engine):
        for number in range(first, first + count):
            print(json.dumps({"at": number}), flush=True)
            found[host.one(random.Random(f"{seed}/{kind}/{number}"), Path(name))] += 1
    print(json.dumps({"found": found}), flush=True)


# --- the proof ------------------------------------------------------------------------------------


def host(kind: str, seed: int, first: int, count: int) -> tuple[Counter[str], list[str]]:
    """One host's share: what became of its mutants, and its crashes; another host goes on."""
    found: Counter[str] = Counter()
    crashes: list[str] = []
    end = first + count
    while first < end:
        command = [sys.executable, "-m", "loadtests.mutants", "--share", kind]
        command += [f"{one}" for one in (seed, first, end - first)]
        limit = HANG_S + 0.5 * (end - first)
        try:
            done = subprocess.run(
                command, cwd=measure.ROOT, capture_output=True, text=True, check=False,
                timeout=limit,
            )  # fmt: skip
            lines, why = done.stdout.splitlines(), f"status {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired as hung:
            lines, why = (hung.stdout or b"").decode().splitlines(), f"no end within {limit:.0f} s"
        last = json.loads(lines[-1]) if lines else {"at": first}
        if "found" in last:
            return found + Counter(last["found"]), crashes
        crashes.append(f"{kind} {last['at']}: {why}")
        first = last["at"] + 1
    return found, crashes


def main() -> None:
    """Run the proof, or one host's share of it."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", action="store_true")
    options.add_argument("--modules", type=int, default=25_000)
    options.add_argument("--snapshots", type=int, default=25_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--share", nargs=4, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.share:
        kind, *numbers = given.share
        share(kind, *(int(one) for one in numbers))
        return
    began = time.monotonic()
    shares = [
        (kind, first, min(SHARE, total - first))
        for kind, total in (("modules", given.modules), ("snapshots", given.snapshots))
        for first in range(0, total, SHARE)
    ]
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    crashes: list[str] = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        asked = [(kind, pool.submit(host, kind, given.seed, *rest)) for kind, *rest in shares]
        for done, (kind, one) in enumerate(asked, 1):
            result, died = one.result()
            found[kind] += result
            crashes += died
            if done % 10 == 0:
                measure.say(f"{done} of {len(asked)} shares, {len(crashes)} crashes")
    out = {
        "mutants": sum(sum(one.values()) for one in found.values()) + len(crashes),
        "crashes": len(crashes),
        "why": crashes[:10],
        "diverged": found["modules"]["diverged"],
        "accepted": found["snapshots"]["accepted"],
        **{kind: dict(one.most_common()) for kind, one in found.items()},
    }
    measure.finish(out, began=began, seed=given.seed)


if __name__ == "__main__":
    main()
