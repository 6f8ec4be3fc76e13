"""A C stack with room and a floor: a module's stack pointer moved into pages of its own.

Pure. The stack that C code keeps in linear memory is as large as its build said, often 64 KiB, and
grows down into the module's data. QuickJS built for WASI checks no bound: some 220 nested calls of
JavaScript overwrote the interpreter's own tables, and it went on with them. With pages of its own
the native limit is met first by calls of usual size; frames with very many variables meet the
floor, which every function on a call cycle checks when entered. Both are traps.

Sound for modules whose allocator takes its first heap from linker symbols and more from
`memory.grow`, as wasi-libc does; not for one that asks `memory.size` where its heap ends. So a
recipe asks for it, after its interpreter was looked at.
"""

from __future__ import annotations

from typing import Final

from runtime.errors import ModuleRefused
from runtime.instrument import module as form

PAGE: Final = 65_536
POINTER: Final = b"\x7f\x01\x41"
"""LLVM's stack pointer is the first global: a mutable i32 of constant value."""


def with_pages(wasm: bytes, pages: int) -> bytes:
    """The module with so many pages of stack behind its first memory, which grows by them.

    Args:
        wasm: One memory; its first global is the stack pointer.
        pages: Of 64 KiB, at least 1.

    Raises:
        ModuleRefused: `malformed`: it has another shape.
    """
    reader, sections = form.Reader(wasm, len(form.MAGIC)), []
    while not reader.done():
        ident = reader.byte()
        sections.append((ident, reader.take(reader.u32())))
    parts = dict(sections)
    memory, values = form.Reader(parts.get(form.MEMORY, b"\0")), parts.get(form.GLOBAL, b"\0")
    if memory.u32() != 1:
        raise ModuleRefused("malformed", "a stack is moved in modules of one memory")
    flags, minimum = memory.byte(), memory.u32()
    if flags not in (0, 1):
        raise ModuleRefused("malformed", "a stack is moved in plain memories")
    limit = form.uleb(memory.u32() + pages) if flags else b""
    grown = b"\x01" + bytes([flags]) + form.uleb(minimum + pages) + limit
    globals_ = form.Reader(values)
    count = globals_.u32()
    if not count or not values.startswith(POINTER, globals_.at):
        raise ModuleRefused("malformed", "its first global is no stack pointer")
    globals_.at += len(POINTER)
    globals_.skip_leb(5)
    top = (minimum + pages) * PAGE
    moved = form.uleb(count) + POINTER + _signed(top) + values[globals_.at :]
    new = {form.MEMORY: grown, form.GLOBAL: moved}
    return form.encode([(ident, new.get(ident, payload)) for ident, payload in sections])


def floor_check(module: form.Module, pages: int) -> bytes:
    """Code that traps when the stack pointer is in the lowest of those pages.

    The lowest page is for what one more frame takes: a function compares what its caller left.
    """
    top = form.Reader(module.globals[0].init, 1).u32()
    lowest = top - (pages - 1) * PAGE
    return b"\x23\0\x41" + _signed(lowest) + b"\x49\x04\x40\0\x0b"


def _signed(value: int) -> bytes:
    """A non-negative number in the signed encoding."""
    raw = form.uleb(value)
    return raw if raw[-1] < 0x40 else raw[:-1] + bytes([raw[-1] | 0x80, 0])
