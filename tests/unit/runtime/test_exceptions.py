"""Exceptions lowered to returns: what is carried behaves the same, every other shape is refused."""

from __future__ import annotations

import pytest

from runtime.errors import ModuleRefused
from runtime.instrument import decode, exceptions

engine = pytest.importorskip("runtime.engine")
sandbox = pytest.importorskip("runtime.sandbox")

THROWER = """
(module
  (tag $t (param i32))
  (table 2 funcref) (elem (i32.const 0) $odd $deep)
  (func $odd (param i32) (result i32)
    local.get 0 i32.const 1 i32.and
    if local.get 0 i32.const 100 i32.add throw $t end
    local.get 0)
  (func $deep (param i32) (result i32)
    local.get 0 i32.eqz if (result i32) i32.const 7 else
      local.get 0 i32.const 1 i32.sub
      local.get 0 i32.const 3 i32.rem_u
      i32.const 0 i32.ne call_indirect (param i32) (result i32)
      local.get 0 i32.add end)
  (func (export "run") (param i32) (result i32)
    (block $caught (result i32)
      (try_table (result i32) (catch $t $caught)
        local.get 0 call $deep i32.const 1000 i32.mul)
      return)
    i32.const 2 call $odd i32.add
    i32.const -1 i32.mul))
"""


def run(wasm: bytes, argument: int) -> object:
    own = engine.Engine(interruptible=False)
    program = sandbox.load(own, own.compile(wasm), plain_hash="", module_hash="", main="run")
    return sandbox.Sandbox(program, arguments=(argument,)).run()


@pytest.mark.slow
def test_thrown_through_direct_and_indirect_calls_to_the_same_handler():
    plain = engine.Engine.assemble(THROWER)
    lowered = exceptions.lower(decode.decode(plain))
    assert not decode.decode(lowered).features
    assert engine.Engine().validate(lowered) is None
    for argument in range(12):
        assert end(run(lowered, argument)) == end(run(plain, argument)), argument


def end(outcome: object) -> object:
    """An ending without the words of a trap."""
    return outcome.kind if isinstance(outcome, sandbox.Trapped) else outcome


def test_an_exception_that_leaves_the_entry_point_is_a_trap():
    plain = engine.Engine.assemble(
        '(module (tag $t) (func (export "run") (param i32) local.get 0 if throw $t end))'
    )
    lowered = exceptions.lower(decode.decode(plain))
    assert [end(run(lowered, n)) for n in (0, 1)] == [sandbox.Finished(()), "exception"]
    assert [end(run(plain, n)) for n in (0, 1)] == [sandbox.Finished(()), "exception"]


def test_a_function_that_cannot_throw_is_left_alone():
    plain = engine.Engine.assemble(
        "(module (tag $t) (func $a) (func $b call $a) (func $c call $b throw $t) (func call $c))"
    )
    assert exceptions.may_throw(decode.decode(plain)) == {2, 3}


@pytest.mark.parametrize(
    "inside",
    [
        "(block $l (result exnref) (try_table (catch_all_ref $l) call $f) return) drop",
        "(block $l (try_table (catch_all $l) call $f))",
    ],
)
def test_a_catch_that_keeps_the_exception_is_refused(inside):
    plain = engine.Engine.assemble(f"(module (tag $t) (func $f throw $t) (func {inside}))")
    with pytest.raises(ModuleRefused) as caught:
        exceptions.lower(decode.decode(plain))
    assert caught.value.code == "unsupported:exceptions"
    assert caught.value.function == 1
