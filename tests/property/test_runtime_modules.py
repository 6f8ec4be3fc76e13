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

pytest.importorskip("wasmtime")

from loadtests.mutants import FEATURES, THROWING, mutate
from runtime import engine

ENGINE = engine.Engine(interruptible=False)

SEEDS = [ENGINE.assemble(text) for text in (FEATURES, THROWING)]


def mutated(seed: int) -> bytes:
    rng = random.Random(seed)
    return mutate(rng.choice(SEEDS), rng)


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
