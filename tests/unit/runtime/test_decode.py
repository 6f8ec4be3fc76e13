"""The decoder: every instruction seen, every bound checked, one refusal for each feature."""

from __future__ import annotations

import pytest

from runtime.errors import ModuleRefused
from runtime.instrument import checks, decode
from runtime.instrument.module import CALL, END, LOOP, Limits, encode, uleb
from tests.unit.runtime.modules import body, vec, wasm

NOP = b"\x01"


def test_a_module_written_back_is_the_file():
    plain = wasm([body(b"\x03\x40\x0c\x00\x0b"), body(b"\x10\x00")]) + b"\0\x05\x04name"
    assert encode(decode.decode(plain).sections) == plain


def test_events_stand_behind_their_instructions():
    module = decode.decode(wasm([body(NOP * 3 + b"\x03\x40\x10\x00\x0b")]))
    events = module.bodies[0].events
    assert [one[1] for one in events] == [LOOP, CALL, END, END]
    assert [one[2] for one in events] == [4, 5, 6, 7], "instructions so far"
    assert events[1][3] == 0, "the function called"


def test_every_prefix_of_a_module_is_refused_and_nothing_else():
    plain = wasm([body(b"\x41\xff\xff\x03\x1a\x02\x40\x0e\x01\x00\x00\x0b")])
    for size in range(8, len(plain)):
        try:
            decode.decode(plain[:size])
        except ModuleRefused as refused:
            assert refused.code == "malformed"  # noqa: PT017  (a cut between sections is a module)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (b"\x27", "unknown opcode 0x27"),
        (b"\xfc\x40", "unknown opcode 0xfc"),
        (b"\xfd\xff\x02", "unknown opcode 0xfd"),
        (b"\x41\x80\x80\x80\x80\x80\x00", "longer than 5"),
        (b"\x10\xff\xff\xff\xff\x1f", "exceeds 32 bits"),
        (b"\x0c\x01", "branch out of the function"),
        (b"\x0e\xff\xff\x03", "longer than its body"),
        (b"\x41", "without its end"),
        (b"\x44\0", "ends early"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(code, sentence):
    with pytest.raises(ModuleRefused, match=sentence) as caught:
        decode.decode(wasm([body(code)]))
    assert caught.value.code == "malformed"
    assert caught.value.function == 0
    assert caught.value.offset


@pytest.mark.parametrize(
    ("code", "feature"),
    [
        (b"\xfe\x10\x02\x00", "threads"),
        (b"\x12\x00", "tail-calls"),
        (b"\xfb\x00\x00", "gc"),
        (b"\x14\x00", "function-references"),
        (b"\xd0\x70\x1a", "reference-locals"),
        (b"\x26\x00", "table-mutation"),
        (b"\xfc\x0f\x00", "table-mutation"),
        (b"\xfc\x09\x00", "segment-drop"),
        (b"\x06\x40\x0b", "exceptions"),
        (b"\xfd\x0c" + bytes(16), "simd"),
        (b"\xfd\x80\x02", "relaxed-simd"),
        (b"\x28\x42\x01\x00", "multi-memory"),
    ],
)
def test_a_feature_that_cannot_be_carried_is_named(code, feature):
    def features() -> set[str]:
        try:
            return set(decode.decode(wasm([body(code)])).features)
        except ModuleRefused as refused:
            return {refused.code.removeprefix("unsupported:")}

    assert feature in features()


def test_a_refusal_names_function_and_offset():
    module = decode.decode(wasm([body(NOP), body(NOP + b"\x12\x00")]))
    assert str(module.features["tail-calls"]).startswith(
        "unsupported:tail-calls: a tail call; build without -mtail-call in function 1 at 0x"
    )


def test_a_component_is_told_apart_from_rubbish():
    with pytest.raises(ModuleRefused, match="component"):
        decode.decode(b"\0asm\x0d\0\1\0")
    with pytest.raises(ModuleRefused, match="not a WebAssembly module"):
        decode.decode(b"\x7fELF0000")


@pytest.mark.parametrize(
    ("plain", "limits", "what"),
    [
        (wasm([body(NOP)] * 3), Limits(functions=2), "functions"),
        (wasm([body(NOP * 50)]), Limits(body_bytes=40), "bytes in a body"),
        (wasm([body(NOP, [(9, 0x7F)])]), Limits(locals=8), "locals"),
        (wasm([body(NOP)], s4=vec([b"\x70\0" + uleb(99)])), Limits(elements=50), "elements"),
        (wasm([body(NOP)]), Limits(module_bytes=10), "bytes"),
    ],
)
def test_each_bound_is_reached(plain, limits, what):
    with pytest.raises(ModuleRefused, match=what) as caught:
        decode.decode(plain, limits)
    assert caught.value.code == "too_large"


def test_a_function_that_does_not_exist_is_refused():
    with pytest.raises(ModuleRefused, match="function 7 does not exist"):
        decode.decode(wasm([body(b"\x10\x07")]))
    with pytest.raises(ModuleRefused, match="type 3 does not exist"):
        decode.decode(wasm([body(NOP)], of_type=[3]))


@pytest.mark.parametrize(
    ("imported", "code"),
    [
        (("env", "print"), "unsupported:unknown-import"),
        (("sched", "yield_"), "unsupported:reserved-name"),
        (("agent", "asyncify_start_unwind"), "unsupported:reserved-name"),
        (("wasi_snapshot_preview1", "sock_open"), "unsupported:unknown-import"),
    ],
)
def test_imports_are_served_or_refused(imported, code):
    module = decode.decode(wasm([body(NOP)], imports=[(*imported, 0)]))
    with pytest.raises(ModuleRefused) as caught:
        checks.gate(module, adapters=frozenset(), wasi=frozenset({"fd_write"}))
    assert caught.value.code == code


@pytest.mark.parametrize("export", ["__ctl", "__astk", "__g0", "asyncify_stop_rewind", "__memory"])
def test_our_names_cannot_be_exported(export):
    module = decode.decode(wasm([body(NOP)], exports=[(export, 0, 0)]))
    with pytest.raises(ModuleRefused, match="is the host's"):
        checks.gate(module, adapters=frozenset(), wasi=frozenset())


def test_names_of_the_linker_are_left_alone():
    module = decode.decode(wasm([body(NOP)], exports=[("__heap_base", 0, 0)]))
    checks.gate(module, adapters=frozenset(), wasi=frozenset())
