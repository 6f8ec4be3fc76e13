"""Every section in every form: decoded, or refused with one code."""

from __future__ import annotations

import pytest

from runtime.errors import ModuleRefused
from runtime.instrument import checks, decode, exceptions
from runtime.instrument.module import Limits, encode
from tests.unit.runtime.modules import body, name, vec, wasm

NOP = body(b"\x01")
ENV = name("env")


def code_of(plain: bytes, limits: Limits | None = None) -> str:
    """What becomes of a module: its refusal, else its first feature, else `fine`."""
    try:
        module = decode.decode(plain, limits)
        return next(iter(module.features), "fine")
    except ModuleRefused as refused:
        return refused.code.removeprefix("unsupported:")


def imported(kind: bytes) -> bytes:
    return wasm([NOP], s2=vec([ENV + name("x") + kind]))


@pytest.mark.parametrize(
    ("plain", "code"),
    [
        (imported(b"\x01\x70\x00\x01"), "fine"),
        (imported(b"\x02\x01\x01\x02"), "fine"),
        (imported(b"\x02\x03\x01\x02"), "threads"),
        (imported(b"\x02\x05\x01\x02"), "memory64"),
        (imported(b"\x02\x08\x01"), "memory64"),
        (imported(b"\x02\x09\x01"), "memory64"),
        (imported(b"\x02\x10\x01"), "malformed"),
        (imported(b"\x03\x7f\x01"), "fine"),
        (imported(b"\x03\x6f\x01"), "reference-locals"),
        (imported(b"\x03\x63\x70\x01"), "function-references"),
        (imported(b"\x03\x6e\x01"), "gc"),
        (imported(b"\x03\x11\x01"), "malformed"),
        (imported(b"\x04\x00\x00"), "exceptions"),
        (imported(b"\x05\x00"), "malformed"),
        (wasm([NOP], types=[b"\x60\x01\x7b\0"]), "simd"),
        (wasm([NOP], types=[b"\x5f\0"]), "gc"),
        (wasm([NOP], types=[b"\x11\0"]), "malformed"),
        (wasm([NOP], s4=vec([b"\x40\0\x70\0\x01\xd0\x70\x0b"])), "function-references"),
        (wasm([NOP], s4=vec([b"\x63\x70\0\x01"])), "function-references"),
        (wasm([NOP], s5=vec([b"\0\x01", b"\0\x01"])), "fine"),
        (wasm([NOP], s6=vec([b"\x70\x00\xd2\x00\x0b"])), "fine"),
        (wasm([NOP], s6=vec([b"\x70\x01\xd0\x70\x0b"])), "reference-locals"),
        (wasm([NOP], s6=vec([b"\x7d\x00\x43" + bytes(4) + b"\x0b"])), "fine"),
        (wasm([NOP], s6=vec([b"\x7f\x00\x41\x01\x41\x02\x6a\x0b"])), "fine"),
        (wasm([NOP], s6=vec([b"\x7f\x02\x41\x00\x0b"])), "malformed"),
        (wasm([NOP], s6=vec([b"\x7b\x00\xfd\x0c" + bytes(16) + b"\x0b"])), "simd"),
        (wasm([NOP], s6=vec([b"\x7b\x00\xfd\x0d\x0b"])), "malformed"),
        (wasm([NOP], s6=vec([b"\x7f\x00\xfb\x00\x0b"])), "gc"),
        (wasm([NOP], s6=vec([b"\x7f\x00\x10\x00\x0b"])), "malformed"),
        (wasm([NOP], s7=vec([name("a") + b"\x09\0"])), "malformed"),
        (wasm([NOP], s7=vec([name("a") + b"\0\0"] * 2)), "malformed"),
        (wasm([NOP], s7=vec([name("m") + b"\x02\x03"])), "malformed"),
        (wasm([NOP], s7=vec([b"\x01\xff\0\0"])), "malformed"),
        (wasm([NOP], s9=vec([b"\x08"])), "malformed"),
        (wasm([NOP], s9=vec([b"\x01\x01\0"])), "malformed"),
        (wasm([NOP], s9=vec([b"\x05\x63\0"])), "function-references"),
        (wasm([NOP], s9=vec([b"\x01\x00" + vec([b"\0"] * 30)]), s4=b"\0"), "fine"),
        (wasm([NOP], s11=vec([b"\x00\x41\x00\x0b\x01x"])), "fine"),
        (wasm([NOP], s11=vec([b"\x02\x00\x41\x00\x0b\x01x", b"\x01\x01y"])), "fine"),
        (wasm([NOP], s11=vec([b"\x03"])), "malformed"),
        (wasm([NOP], s11=vec([b"\x01\x01y"]), s12=b"\x02"), "malformed"),
        (wasm([NOP], s13=vec([b"\0\0"])), "exceptions"),
        (wasm([NOP], s1=vec([b"\x60\0\0"]) + b"x"), "malformed"),
        (wasm([], of_type=[0]), "malformed"),
        (encode([(3, vec([b"\0"])), (1, vec([b"\x60\0\0"]))]), "malformed"),
        (encode([(1, vec([]))] * 2), "malformed"),
        (encode([(14, b"")]), "malformed"),
        (encode([(0, b"\x09x")]), "malformed"),
        (encode([(1, vec([b"\x60\0\0"])), (3, vec([b"\0"]))]), "malformed"),
        (wasm([NOP])[:4] + b"\x02\0\0\0", "malformed"),
    ],
)
def test_sections(plain, code):
    assert code_of(plain) == code


@pytest.mark.parametrize("flags", range(8))
def test_every_form_of_an_element_segment(flags):
    where = b"" if flags & 1 else (b"\0" if flags & 2 else b"") + b"\x41\0\x0b"
    kind = b"" if not flags & 3 else (b"\x70" if flags & 4 else b"\0")
    items = vec([b"\xd2\x01\x0b", b"\xd0\x70\x0b"] if flags & 4 else [b"\x01", b"\x00"])
    plain = wasm(
        [NOP, NOP], s4=vec([b"\x70\0\x02"]), s9=vec([bytes([flags]) + where + kind + items])
    )
    module = decode.decode(plain)
    assert 1 in module.in_tables
    moved = decode.decode(checks.instrument(module).wasm)
    assert moved.in_tables == {one + 1 for one in module.in_tables}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (b"\x02\x7b\x0b", "simd"),
        (b"\x02\x11\x0b", "fine"),
        (b"\x05", "fine"),
        (b"\x1c\x01\x7f", "fine"),
        (b"\x1c\x01\x70", "reference-locals"),
        (b"\x3f\x01", "multi-memory"),
        (b"\xfc\x0b\x01", "multi-memory"),
        (b"\xfc\x0a\x00\x00", "fine"),
        (b"\xfc\x0c\x00\x00", "table-mutation"),
        (b"\xfc\x10\x00", "fine"),
        (b"\xfd\x00\x02\x00", "simd"),
        (b"\xfd\x15\x00", "simd"),
        (b"\xfd\x54\x00\x00\x01", "simd"),
        (b"\xfd\x9a\x01", "malformed"),
        (b"\x25\x00", "reference-locals"),
        (b"\xd1", "reference-locals"),
        (b"\xd2\x00", "reference-locals"),
        (b"\xd4", "function-references"),
        (b"\xd5\x00", "function-references"),
        (b"\xd3", "gc"),
        (b"\x13\x00\x00", "tail-calls"),
        (b"\x08\x00", "malformed"),
        (b"\x0a", "exceptions"),
        (b"\x1f\x40\x01\x07\x00\x0b", "malformed"),
        (b"\x43" + bytes(4) + b"\x44" + bytes(8) + b"\x42\x01", "fine"),
        (b"\x42" + b"\x80" * 10 + b"\x00", "malformed"),
    ],
)
def test_instructions(code, found):
    assert code_of(wasm([body(code)])) == found


def test_an_else_without_its_if_is_refused_by_the_placement():
    with pytest.raises(ModuleRefused, match="else without its if"):
        checks.place(decode.decode(wasm([body(b"\x02\x40\x05\x0b")])))


def test_an_unknown_variant_is_a_mistake_of_ours():
    with pytest.raises(ValueError, match="flag, fuel"):
        checks.instrument(decode.decode(wasm([NOP])), variant="hope")


def test_a_second_memory_is_refused_by_the_gate():
    module = decode.decode(wasm([NOP], s5=vec([b"\0\x01", b"\0\x01"])))
    with pytest.raises(ModuleRefused, match="2 memories"):
        checks.gate(module, adapters=frozenset(), wasi=frozenset())


def test_the_reference_differs_only_in_the_exported_memory():
    plain = wasm([NOP], s5=vec([b"\0\x01"]), exports=[("f", 0, 0)])
    again = decode.decode(checks.reference(decode.decode(plain)))
    assert [one.name for one in again.exports] == ["f", "__memory"]
    bare = wasm([NOP], exports=[("f", 0, 0)])
    assert checks.reference(decode.decode(bare)) == bare
    begun = decode.decode(checks.reference(decode.decode(wasm([NOP], s8=b"\0"))))
    assert begun.start is None
    assert [one.name for one in begun.exports] == ["__start"]


def test_two_tags_are_told_apart():
    engine = pytest.importorskip("runtime.engine")
    sandbox = pytest.importorskip("runtime.sandbox")
    plain = engine.Engine.assemble(
        """(module (tag $a (param i32)) (tag $b (param i64 f32 f64))
        (func $f (param i32) (result i64)
          local.get 0 i32.eqz if i32.const 5 throw $a end
          local.get 0 i32.const 1 i32.eq
            if i64.const 70 f32.const 2 f64.const 3 throw $b end
          i64.const 1)
        (func (export "run") (param i32) (result i64)
          (block $ca (result i32)
            (block $cb (result i64 f32 f64)
              (try_table (catch $a $ca) (catch $b $cb) local.get 0 call $f return)
              unreachable)
            i64.trunc_f64_s drop i64.trunc_f32_s i64.add return)
          i64.extend_i32_u))"""
    )
    own = engine.Engine(interruptible=False)

    def run(module: bytes, argument: int) -> object:
        program = sandbox.load(own, own.compile(module), plain_hash="", module_hash="", main="run")
        return sandbox.Sandbox(program, arguments=(argument,)).run()

    lowered = exceptions.lower(decode.decode(plain))
    assert [run(lowered, n) for n in range(3)] == [run(plain, n) for n in range(3)]


@pytest.mark.parametrize(
    ("plain", "what"),
    [
        (wasm([NOP], s13=vec([b"\0\0"]), s7=vec([name("t") + b"\x04\0"])), "crosses"),
        (wasm([NOP], types=[b"\x60\0\0", b"\x60\x01\x70\0"], s13=vec([b"\0\x01"])), "not numbers"),
        (
            wasm(
                [body(b"\x08\x00")],
                types=[b"\x60\0\x01\x70", b"\x60\0\0"],
                s13=vec([b"\0\x01"]),
            ),
            "returns more than numbers",
        ),
        (wasm([body(b"\x03\x69\x0b")], s13=vec([b"\0\0"])), "a loop or if that yields"),
    ],
)
def test_exceptions_of_other_shapes_are_refused(plain, what):
    with pytest.raises(ModuleRefused, match=what):
        exceptions.lower(decode.decode(plain))
