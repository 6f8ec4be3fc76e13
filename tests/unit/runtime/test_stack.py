"""A C stack moved into pages of its own: its pointer, the memory, and nothing else."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("wasmtime")

from runtime.engine import Engine
from runtime.errors import ModuleRefused
from runtime.instrument import decode, stack
from runtime.instrument.module import Memory, Reader

PLAIN = Engine.assemble(
    """(module (memory 3 9) (global $sp (mut i32) (i32.const 193056)) (global i32 (i32.const 5))
    (data (i32.const 8) "kept") (func (export "run") (result i32) global.get $sp))"""
)


@pytest.mark.parametrize("pages", [1, 13, 32, 900])
def test_the_pointer_is_the_new_end_of_memory(pages):
    moved = decode.decode(stack.with_pages(PLAIN, pages))
    before = decode.decode(PLAIN)
    assert moved.memories == [Memory(3 + pages, 9 + pages)]
    assert Engine().validate(stack.with_pages(PLAIN, pages)) is None
    reader = Reader(moved.globals[0].init, 1)
    value = int.from_bytes(_unsigned(reader), "little")
    assert value == (3 + pages) * stack.PAGE
    assert moved.globals[1] == before.globals[1]
    kept = [one for one in before.sections if one[0] not in (5, 6)]
    assert [one for one in moved.sections if one[0] not in (5, 6)] == kept


def _unsigned(reader) -> bytes:
    value = shift = 0
    while True:
        byte = reader.byte()
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            assert not byte & 0x40, "a sign that was not meant"
            return value.to_bytes(5, "little")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(module (global (mut i32) (i32.const 9)))", "one memory"),
        ("(module (memory 1))", "no stack pointer"),
        ("(module (memory 1) (global i32 (i32.const 9)))", "no stack pointer"),
        ("(module (memory 1) (global (mut i64) (i64.const 9)))", "no stack pointer"),
        ("(module (memory i64 1) (global (mut i32) (i32.const 9)))", "plain memories"),
    ],
)
def test_another_shape_is_refused(text, why):
    with pytest.raises(ModuleRefused, match=why):
        stack.with_pages(Engine.assemble(text), 4)


def test_a_cut_file_is_refused_or_shorter_and_nothing_else():
    for end in range(9, len(PLAIN)):
        with contextlib.suppress(ModuleRefused):
            stack.with_pages(PLAIN[:end], 4)
