"""Mutated and random modules: an error or a correct module, never anything else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ModuleRefused
from runtime.instrument import checks, decode, exceptions
from runtime.instrument.module import CALL, uleb
from runtime.wasi import FUNCTIONS
from tests.unit.runtime.modules import body, vec, wasm

engine = pytest.importorskip("runtime.engine")
ENGINE = engine.Engine(interruptible=False)

SEEDS = [
    ENGINE.assemble(text)
    for text in (
        """(module (import "agent" "host_call" (func $h (param i32 i32 i32 i32) (result i32)))
        (memory (export "memory") 1 4) (global $g (mut i64) (i64.const 5)) (table 3 funcref)
        (elem (i32.const 0) $a $b) (data (i32.const 8) "hello")
        (func $a (param i32) (result i32) local.get 0 i32.const 1 i32.add)
        (func $b (param i32) (result i32) (local f64 i64)
          (loop $l local.get 0 i32.const 1 i32.sub local.tee 0 br_if $l)
          i32.const 8 i32.load8_u offset=1 local.get 0 i32.const 1 i32.and
          call_indirect (param i32) (result i32))
        (func (export "run") (param i32) (result i32)
          (block $x (block $y local.get 0 br_table $x $y $x) )
          local.get 0 call $b i32.const 0 i32.const 0 i32.const 0 i32.const 0 call $h i32.add
          f64.const 1.5 i32.trunc_sat_f64_s i32.add
          i32.const 0 i32.const 16 i32.const 4 memory.copy))""",
        """(module (tag $t (param i32)) (func $f (param i32) (result i32)
          (block $c (result i32)
            (try_table (result i32) (catch $t $c) local.get 0 throw $t)))
          (func (export "run") (param i32) (result i32) local.get 0 call $f))""",
    )
]


def mutated(seed: int) -> bytes:
    rng = random.Random(seed)
    data = bytearray(rng.choice(SEEDS))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(8, len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at : at + rng.randint(1, 4)]
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 4))
        if len(data) < 10:
            break
    return bytes(data)


def judge(data: bytes) -> str:
    """What became of a module; anything but a refusal must be right."""
    valid = ENGINE.validate(data) is None
    try:
        module = decode.decode(data)
        if "exceptions" in module.features:
            lowered = exceptions.lower(module)
            assert not valid or ENGINE.validate(lowered) is None, "a valid module was spoilt"
            module = decode.decode(lowered)
        checks.gate(module, adapters=frozenset(), wasi=frozenset(FUNCTIONS))
        done = checks.instrument(module)
    except ModuleRefused as refused:
        assert refused.code != "malformed" or not valid, f"valid, but {refused}"  # noqa: PT017
        return refused.code
    if valid:
        assert ENGINE.validate(done.wasm) is None, "a valid module was spoilt"
    return "valid" if valid else "invalid"


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**40))
def test_a_mutated_module_is_refused_or_instrumented_correctly(seed):
    judge(mutated(seed))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_behind_the_magic_are_refused_or_decoded(data):
    judge(b"\0asm\1\0\0\0" + data)


@st.composite
def programs(draw) -> bytes:
    """Functions of straight code and calls, of any shape of call graph."""
    count = draw(st.integers(1, 9))
    bodies = []
    for _ in range(count):
        code = b""
        for _ in range(draw(st.integers(0, 6))):
            code += b"\x01" * draw(st.sampled_from([1, 50, 20_000]))
            code += b"\x10" + uleb(draw(st.integers(0, count - 1)))
        bodies.append(body(code))
    return wasm(bodies)


def longest(module: decode.Module) -> int:
    """Most instructions without a check, by walking every body; recursion is cut at its check."""
    yields = 0  # index of the import `sched.yield_`
    acyclic = not checks.place(module)[1]
    memo: dict[int, tuple[int, int, int, int]] = {}

    def walk(number: int, above: frozenset[int]) -> tuple[int, int, int, int]:
        """(through or -1, to the first check, since the last check, most inside)."""
        if number in memo:
            return memo[number]
        since, first, met, most, seen = 0, 0, False, 0, 0
        for _, kind, count, argument, _ in module.bodies[number].events:
            since += count - seen
            seen = count
            if kind != CALL:
                continue
            if argument == yields:
                most, first, met, since = max(most, since), first if met else since, True, 0
            elif argument - 1 in above:
                continue  # its entry check stands before anything else
            else:
                through, to_first, last, inside = walk(argument - 1, above | {number})
                most = max(most, inside, since + to_first)
                if through >= 0:
                    since += through
                else:
                    first, met, since = first if met else since + to_first, True, last
        most = max(most, since)
        result = (-1 if met else since, first if met else since, since, most)
        if acyclic or not above:
            memo[number] = result
        return result

    return max(walk(number, frozenset())[3] for number in range(len(module.bodies)))


def cycles_without_check(module: decode.Module) -> set[int]:
    """Functions on a cycle whose first instruction is not a check."""
    graph = {
        number: {e[3] - 1 for e in one.events if e[1] == CALL and e[3] > 0}
        for number, one in enumerate(module.bodies)
    }
    free = {
        number
        for number, one in enumerate(module.bodies)
        if not one.data[one.code :].startswith(b"\x41\x00\x28\x42")
    }
    return {
        number
        for component in checks.components({n: sorted(to) for n, to in graph.items()})
        for number in component
        if (len(component) > 1 or number in graph[number]) and number in free
    }


@settings(max_examples=60, deadline=None)
@given(programs())
def test_no_path_runs_a_million_instructions_without_a_check(plain):
    module = decode.decode(checks.instrument(decode.decode(plain)).wasm)
    assert not cycles_without_check(module)
    assert longest(module) <= 1_000_000


def test_the_property_can_fail():
    """Without rule (c) the doubling chain is not bounded: the measuring above would notice."""
    chain = wasm([body((b"\x10" + uleb(n + 1)) * 2) for n in range(24)] + [body(b"\x01")])
    module = decode.decode(chain)
    assert checks.place(module)[0]
    unchecked = decode.decode(
        wasm(
            [body((b"\x10" + uleb(n + 2)) * 2) for n in range(24)] + [body(b"\x01")],
            imports=[("sched", "yield_", 0)],
        )
    )
    assert longest(unchecked) > 1_000_000


def test_elements_and_globals_survive_a_round_trip_in_form():
    plain = wasm(
        [body(b"\x01")], s4=vec([b"\x70\x00\x02"]), s9=vec([b"\x00\x41\x00\x0b" + vec([b"\0"])])
    )
    again = decode.decode(checks.instrument(decode.decode(plain)).wasm)
    assert again.in_tables == {1}
