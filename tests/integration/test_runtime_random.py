"""Random programs of a small grammar and mutants: stopped at every check, they do the same.

The comparison is registration's own self-test: result, output, requests and memory.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("wasmtime")
pytest.importorskip("icpp_binaryen")

from runtime.engine import Engine
from runtime.instrument import register
from runtime.instrument.cache import Cache

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


class Writer:
    """Functions of locals, bounded loops, branches, memory and calls; one signature for all."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.count = self.rng.randint(3, 7)
        self.loops = 0

    def value(self, depth: int) -> str:
        rng = self.rng
        if depth <= 0:
            return rng.choice(
                [
                    "local.get $a",
                    "local.get $b",
                    "global.get $g",
                    f"i64.const {rng.randrange(1 << 40)}",
                ]
            )
        kind = rng.randrange(7)
        if kind < 3:
            op = rng.choice(["add", "mul", "xor", "sub", "rotl", "or"])
            return f"{self.value(depth - 1)} {self.value(depth - 1)} i64.{op}"
        if kind == 3:
            at = f"{self.value(depth - 1)} i32.wrap_i64 i32.const 4095 i32.and"
            return f"{at} i64.load offset={rng.randrange(64)}"
        if kind == 4:
            number = f"{self.value(depth - 1)} f64.convert_i64_s f64.const 1.37 f64.mul"
            return f"{number} f64.sqrt i64.reinterpret_f64 i64.const 0xfffffffffff i64.and"
        if kind == 5:
            which = f"{self.value(depth - 1)} i32.wrap_i64 i32.const 1 i32.and"
            return f"{self.value(depth - 1)} {self.value(depth - 1)} {which} select"
        return f"{self.value(depth - 1)} i64.popcnt"

    def statement(self, number: int, depth: int) -> str:
        rng = self.rng
        kind = rng.randrange(8)
        if kind < 2:
            return (
                f"{self.value(3)} {rng.choice(['local.set $a', 'local.set $b', 'global.set $g'])}"
            )
        if kind == 2:
            at = f"{self.value(1)} i32.wrap_i64 i32.const 4095 i32.and"
            return f"{at} {self.value(2)} i64.store offset={rng.randrange(64)}"
        if kind == 3 and depth:
            inner = self.block(number, depth - 1)
            other = self.block(number, depth - 1)
            return f"{self.value(1)} i64.const 3 i64.and i64.eqz if {inner} else {other} end"
        if kind == 4 and depth:
            self.loops += 1
            name, turns = f"$l{number}_{self.loops}", rng.randint(2, 9)
            inside = self.block(number, depth - 1)
            again = f"local.get $n{depth} i32.const 1 i32.sub local.tee $n{depth} br_if {name}"
            return f"i32.const {turns} local.set $n{depth} (loop {name} {inside} {again})"
        if kind == 5:
            return (
                f"(block $x{depth} {self.value(1)} i64.const 1 i64.and i64.eqz br_if $x{depth} "
                + (f"{self.value(2)} global.set $g)")
            )
        less = "local.get $fuel i32.const 1 i32.sub"
        call = f"{self.value(1)} {self.value(1)} {less} "
        if kind == 6:
            target = f"{self.value(1)} i32.wrap_i64 i32.const {self.count} i32.rem_u"
            return f"{call} {target} call_indirect (type $f) local.set $b"
        return f"{call} call $f{rng.randrange(self.count)} local.set $a"

    def block(self, number: int, depth: int) -> str:
        return " ".join(self.statement(number, depth) for _ in range(self.rng.randint(1, 3)))

    def module(self) -> str:
        functions = []
        for number in range(self.count):
            inside = self.block(number, 3)
            functions.append(
                f"(func $f{number} (type $f) (param $a i64) (param $b i64) (param $fuel i32) "
                "(result i64) (local $n1 i32) (local $n2 i32) (local $n3 i32) "
                f"local.get $fuel i32.eqz if local.get $a local.get $b i64.xor return end "
                f"{inside} {self.value(2)})"
            )
        names = " ".join(f"$f{n}" for n in range(self.count))
        bodies = "\n".join(functions)
        return f"""(module (type $f (func (param i64 i64 i32) (result i64)))
          (memory 1) (global $g (mut i64) (i64.const 7)) (table {self.count} funcref)
          (elem (i32.const 0) {names})
          {bodies}
          (func (export "run") (result i64) (local $i i32) (local $r i64)
            (loop $l local.get $r local.get $i i64.extend_i32_u i32.const 4 call $f0 local.set $r
              local.get $i i32.const 1 i32.add local.tee $i i32.const 150 i32.lt_u br_if $l)
            local.get $r))"""


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_a_random_program_does_the_same_when_stopped_everywhere(tmp_path, seed):
    wasm = Engine.assemble(Writer(seed).module())
    made = register.register(wasm, Cache(tmp_path / "cache"))
    assert made.report["self_test"]["checks"] >= 150


def test_mutants_end_in_an_error_or_in_a_correct_guest():
    """The short form of `python -m loadtests.mutants`: hosts of their own, which must not die."""
    command = [sys.executable, "-m", "loadtests.mutants", "--json"]
    done = subprocess.run(
        [*command, "--modules", "150", "--snapshots", "300", "--seed", "11"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mutants"] == 450
    assert (found["crashes"], found["diverged"], found["accepted"]) == (0, 0, 0), found
    assert found["modules"]["equal"] >= 5
    assert found["snapshots"]["snapshot_corrupt"] >= 30
    assert found["snapshots"]["ran: ended"] >= 30
