"""Where checks stand: at loops, on call cycles, and in long code without either."""

from __future__ import annotations

import pytest

from runtime.errors import ModuleRefused
from runtime.instrument import checks, decode
from runtime.instrument.module import CALL, LOOP, Limits, uleb
from tests.unit.runtime.modules import body, vec, wasm


def placed(*bodies: bytes, **more) -> tuple[list[list[int]], set[int]]:
    return checks.place(decode.decode(wasm(list(bodies), **more)))


def call(index: int) -> bytes:
    return b"\x10" + uleb(index)


def test_every_loop_has_a_check_behind_its_type():
    places, _ = placed(body(b"\x03\x40\x0c\x00\x0b\x03\x40\x0b"))
    assert places == [[3, 8]]


def test_a_loop_in_dead_code_has_its_check_too():
    places, _ = placed(body(b"\x00\x03\x40\x0c\x00\x0b"))
    assert len(places[0]) == 1


def test_straight_code_without_cycles_has_none():
    assert placed(body(b"\x01"), body(call(0))) == ([[], []], set())


def test_each_function_on_a_cycle_checks_at_its_entry():
    places, cyclic = placed(body(call(1)), body(call(0)), body(call(0)))
    assert cyclic == {0, 1}
    assert [len(one) for one in places] == [1, 1, 0]


def test_a_function_that_calls_itself_is_a_cycle():
    assert placed(body(call(0)))[1] == {0}


def test_an_indirect_call_reaches_every_element():
    table = {
        "s4": vec([b"\x70\x00\x02"]),
        "s9": vec([b"\x00\x41\x00\x0b" + vec([b"\x00", b"\x01"])]),
    }
    through = body(b"\x41\x00\x11\x00\x00")
    _, cyclic = placed(through, body(call(2)), body(call(0)), body(b"\x01"), **table)
    assert cyclic == {0, 1, 2}, "0 -> any element -> 1 -> 2 -> 0; 3 is in no element segment"


def test_doubling_calls_without_a_loop_meet_checks():
    """34 functions that each call the next twice: 2^34 calls, no loop and no cycle."""
    places, cyclic = placed(*(body(call(n + 1) * 2) for n in range(34)), body(b"\x01"))
    assert not cyclic
    assert sum(map(len, places)) >= 2
    assert not any(places[20:]), "the small ones at the bottom stay as they are"


def test_long_straight_code_meets_checks():
    places, _ = placed(body(b"\x01" * 250_000))
    assert len(places[0]) == 2
    gaps = [b - a for a, b in zip([0, *places[0]], [*places[0], 250_000], strict=True)]
    assert max(gaps) < 120_000


def test_a_check_that_a_branch_skips_counts_for_nothing():
    """Both arms of an `if` are long: a check in one of them must not excuse the other."""
    long = b"\x01" * 60_000
    arm = b"\x41\x00\x04\x40" + long + long + b"\x05" + b"\x01" * 90_000 + b"\x0b"
    places, _ = placed(body(arm + b"\x01" * 90_000))
    then_arm = [at for at in places[0] if at < 120_000]
    after = [at for at in places[0] if at > 120_000]
    assert then_arm
    assert after, "the else arm and what follows are 180,000 instructions without a check"


def checked(plain: bytes, **options) -> checks.Checked:
    return checks.instrument(decode.decode(plain), **options)


def test_function_indices_move_past_the_added_import():
    plain = wasm(
        [body(call(0)), body(call(1))],
        imports=[("agent", "host_call", 0)],
        exports=[("f", 0, 1), ("host", 0, 0)],
        s8=b"\x02",
    )
    module = decode.decode(checked(plain).wasm)
    assert [(one.module, one.name) for one in module.imports] == [
        ("agent", "host_call"), ("sched", "yield_"),
    ]  # fmt: skip
    called = [e[3] for one in module.bodies for e in one.events if e[1] == CALL]
    assert called == [0, 2], "the import keeps its place, f moved"
    exported = {one.name: one.index for one in module.exports}
    assert exported["f"] == 2
    assert exported["host"] == 0
    assert exported["__start"] == 3
    assert module.start is None, "the host calls it, once"


def test_mutable_globals_are_exported_and_constants_are_not():
    plain = wasm([body(b"\x01")], s6=vec([b"\x7f\x01\x41\x00\x0b", b"\x7e\x00\x42\x00\x0b",
                                         b"\x7c\x01\x44" + bytes(8) + b"\x0b"]))  # fmt: skip
    done = checked(plain)
    names = {one.name for one in decode.decode(done.wasm).exports}
    assert done.globals == {0: 0x7F, 2: 0x7C}
    assert {"__g0", "__g2", "__ctl"} <= names
    assert "__g1" not in names


@pytest.mark.parametrize("most", [None, 10, 5_000])
def test_memory_is_bounded_at_registration(most):
    limits = b"\x00\x02" if most is None else b"\x01\x02" + uleb(most)
    done = checked(wasm([body(b"\x01")], s5=vec([limits])), limits=Limits(memory_pages=64))
    own, control = decode.decode(done.wasm).memories
    assert own.maximum == min(most or 64, 64)
    assert (control.minimum, control.maximum) == (1, 1)


def test_a_memory_that_starts_too_large_is_refused():
    with pytest.raises(ModuleRefused, match="64 KiB"):
        checked(wasm([body(b"\x01")], s5=vec([b"\x00\x41"])), limits=Limits(memory_pages=64))


def test_more_checks_than_allowed_are_refused():
    loops = b"\x03\x40\x0b" * 9
    with pytest.raises(ModuleRefused, match="9 checks; 8 are allowed"):
        checked(wasm([body(loops)]), limits=Limits(checks=8))


@pytest.mark.parametrize("variant", checks.VARIANTS)
def test_the_check_is_stack_neutral_and_valid(variant):
    engine = pytest.importorskip("runtime.engine").Engine()
    plain = wasm([body(b"\x03\x40\x0b"), body(call(1))], s5=vec([b"\x00\x01"]))
    done = checked(plain, variant=variant)
    assert engine.validate(done.wasm) is None
    assert done.checks == 2
    assert sum(1 for e in decode.decode(done.wasm).bodies[0].events if e[1] == LOOP) == 1
