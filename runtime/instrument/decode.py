"""Module bytes become sections, and every instruction of every body becomes visible.

Pure. One unknown opcode would misplace all later ones, so an unknown opcode, a trailing byte, an
over-long number or a read past an end is a refusal (`ModuleRefused`), never a guess and never
another exception. What is decoded here is not *validated*: types are checked by wasmtime after
instrumentation. The features the instrumenter cannot carry are collected with the first place of
each, so that an author sees all refusals at once.

Source: WebAssembly core specification 2.0, binary format, with the opcodes of the tail-call,
exception-handling, threads, SIMD and function-references proposals (to be named when refused).
"""

from __future__ import annotations

from typing import Final

from runtime.errors import ModuleRefused
from runtime.instrument.bodies import Scan
from runtime.instrument.module import (
    CALL,
    CODE,
    COMPONENT,
    DATA,
    DATA_COUNT,
    ELEMENT,
    EXPORT,
    FUNC,
    FUNCTION,
    GLOBAL,
    IMPORT,
    MAGIC,
    MEMORY,
    ORDER,
    REFERENCES,
    START,
    TABLE,
    TAG,
    TYPE,
    Export,
    FuncType,
    Global,
    Import,
    Limits,
    Memory,
    Module,
    Reader,
    value_type,
)


def decode(  # noqa: C901  (one refusal a line)
    data: bytes, limits: Limits | None = None
) -> Module:
    """The module in these bytes.

    Args:
        data: A whole file.
        limits: Bounds; the defaults of `Limits` when None.

    Raises:
        ModuleRefused: `malformed` or `too_large`, and for encodings whose length is unknown
            `unsupported:gc`. Other unsupported features are in `Module.features`.
    """
    limits = limits or Limits()
    if len(data) > limits.module_bytes:
        raise ModuleRefused("too_large", f"{len(data)} bytes; {limits.module_bytes} are allowed")
    if data[:8] == COMPONENT:
        raise ModuleRefused(
            "unsupported:component", "this is a component; build a core module", offset=4
        )
    if data[:4] != MAGIC[:4]:
        raise ModuleRefused("malformed", "not a WebAssembly module", offset=0)
    if data[:8] != MAGIC:
        raise ModuleRefused("malformed", "an unknown version of the format", offset=4)
    module = Module(sections=[])
    reader = Reader(data, 8)
    rank, pending_code = -1, None
    while not reader.done():
        ident = reader.byte()
        size = reader.u32()
        origin = reader.at
        payload = reader.take(size)
        module.sections.append((ident, payload))
        part = Reader(payload, origin=origin)
        if ident == 0:
            part.name()
            continue
        if ident not in ORDER:
            raise ModuleRefused("malformed", f"an unknown section {ident}", offset=origin)
        if ORDER.index(ident) <= rank:
            raise ModuleRefused(
                "malformed", f"section {ident} is repeated or out of order", offset=origin
            )
        rank = ORDER.index(ident)
        if ident == CODE:
            pending_code = part
        else:
            _SECTIONS[ident](module, part, limits)
            if not part.done():
                raise part.fail(f"section {ident} has bytes left over")
    _code(module, pending_code, limits)
    _indices(module)
    return module


# --- sections -------------------------------------------------------------------------------------


def _types(module: Module, reader: Reader, limits: Limits) -> None:
    for _ in range(reader.count(limits.types, "types")):
        form = reader.byte()
        if form in (0x4D, 0x4E, 0x4F, 0x50, 0x5E, 0x5F):
            raise ModuleRefused(
                "unsupported:gc", "a garbage-collected type", offset=reader.origin + reader.at - 1
            )
        if form != 0x60:
            raise reader.fail(f"an unknown type form 0x{form:02x}")
        sides = [
            bytes(
                value_type(module, reader, "a function type")
                for _ in range(reader.count(1_000, "parameters"))
            )
            for _ in range(2)
        ]
        module.types.append(FuncType(*sides))


def _limits(module: Module, reader: Reader, what: str) -> Memory:
    flags = reader.byte()
    offset = reader.origin + reader.at - 1
    if flags > 7:
        if flags & 8 and what == "memory":
            raise ModuleRefused("unsupported:memory64", "custom page sizes", offset=offset)
        raise reader.fail(f"unknown limits 0x{flags:02x}")
    if flags & 4:
        module.note("memory64", f"a 64-bit {what}; build for wasm32", offset=offset)
    if flags & 2:
        module.note("threads", f"a shared {what}; build without -pthread", offset=offset)
    longest = 10 if flags & 4 else 5
    if longest == 10:
        for _ in range(1 + (flags & 1)):
            reader.skip_leb(10)
        return Memory(0, None)
    minimum = reader.u32()
    return Memory(minimum, reader.u32() if flags & 1 else None)


def _imports(module: Module, reader: Reader, limits: Limits) -> None:
    for _ in range(reader.count(limits.imports, "imports")):
        where, name, kind = reader.name(), reader.name(), reader.byte()
        index, mutable = 0, False
        if kind == 0:
            index = reader.u32()
        elif kind == 1:
            _table_type(module, reader)
        elif kind == 2:
            _limits(module, reader, "memory")
        elif kind == 3:
            value_type(module, reader, "a global")
            mutable = reader.byte() == 1
        elif kind == 4:
            module.note("exceptions", "an imported tag", offset=reader.origin + reader.at)
            reader.byte()
            index = reader.u32()
        else:
            raise reader.fail(f"an unknown import kind {kind}")
        module.imports.append(Import(where, name, kind, index, mutable))


def _functions(module: Module, reader: Reader, limits: Limits) -> None:
    count = reader.count(limits.functions, "functions")
    module.functions = [reader.u32() for _ in range(count)]


def _table_type(module: Module, reader: Reader) -> Memory:
    kind = reader.byte()
    if kind not in REFERENCES:
        module.note(
            "function-references", "a table of typed references", offset=reader.origin + reader.at
        )
        if kind in (0x63, 0x64):
            reader.skip_leb(5)
    return _limits(module, reader, "table")


def _tables(module: Module, reader: Reader, limits: Limits) -> None:
    module.tables = reader.count(100, "tables")
    for _ in range(module.tables):
        if reader.data[reader.at : reader.at + 2] == b"\x40\x00":
            module.note("function-references", "a table with an initializer", offset=reader.origin)
            raise module.features["function-references"]
        size = _table_type(module, reader).minimum
        if size > limits.elements:
            raise ModuleRefused(
                "too_large", f"a table of {size} elements; {limits.elements} are allowed"
            )


def _memories(module: Module, reader: Reader, _: Limits) -> None:
    for _number in range(reader.count(100, "memories")):
        module.memories.append(_limits(module, reader, "memory"))


def _constant(  # noqa: C901  (one table of opcodes)
    module: Module, reader: Reader
) -> list[tuple[int, int, int]]:
    """Step over a constant expression; spans (start, end, index) of its function operands."""
    spans: list[tuple[int, int, int]] = []
    while True:
        code = reader.byte()
        if code == 0x0B:
            return spans
        if code in {0x41, 0x23}:
            reader.skip_leb(5)
        elif code == 0x42:
            reader.skip_leb(10)
        elif code == 0x43:
            reader.take(4)
        elif code == 0x44:
            reader.take(8)
        elif code == 0xD0:
            reader.skip_leb(5)
        elif code == 0xD2:
            start = reader.at
            index = reader.u32()
            spans.append((start, reader.at, index))
        elif code == 0xFD:
            module.note("simd", "a vector constant", offset=reader.origin + reader.at)
            if reader.u32() != 12:
                raise reader.fail("an unknown vector constant")
            reader.take(16)
        elif code == 0xFB:
            raise ModuleRefused(
                "unsupported:gc", "a garbage-collected constant", offset=reader.origin + reader.at
            )
        elif code not in (0x6A, 0x6B, 0x6C, 0x7C, 0x7D, 0x7E):
            raise reader.fail(f"an unknown constant instruction 0x{code:02x}")


def _globals(module: Module, reader: Reader, limits: Limits) -> None:
    for _ in range(reader.count(limits.globals, "globals")):
        kind = reader.byte()
        reader.at -= 1
        reference = kind in REFERENCES
        if reference:
            reader.byte()
        else:
            kind = value_type(module, reader, "a global")
        flag = reader.byte()
        if flag > 1:
            raise reader.fail(f"unknown mutability {flag}")
        if reference and flag:
            module.note(
                "reference-locals", "a mutable global holding a reference", offset=reader.origin
            )
        start = reader.at
        module.global_spans += _constant(module, reader)
        module.globals.append(Global(kind, flag == 1, reader.data[start : reader.at]))


def _exports(module: Module, reader: Reader, limits: Limits) -> None:
    for _ in range(reader.count(limits.exports, "exports")):
        name, kind = reader.name(), reader.byte()
        if kind > 4:
            raise reader.fail(f"an unknown export kind {kind}")
        module.exports.append(Export(name, kind, reader.u32()))
    if len({one.name for one in module.exports}) != len(module.exports):
        raise reader.fail("two exports have one name")


def _start(module: Module, reader: Reader, _: Limits) -> None:
    module.start = reader.u32()


def _elements(  # noqa: C901  (eight forms of one section)
    module: Module, reader: Reader, limits: Limits
) -> None:
    total = 0
    for _ in range(reader.count(limits.elements, "element segments")):
        flags = reader.u32()
        if flags > 7:
            raise reader.fail(f"unknown element flags {flags}")
        if flags & 1 == 0:
            if flags & 2:
                reader.u32()
            module.element_spans += _constant(module, reader)
        if flags & 3:
            kind = reader.byte()
            if flags < 4 and kind != 0:
                raise reader.fail(f"an unknown element kind {kind}")
            if flags >= 4 and kind not in REFERENCES:
                raise ModuleRefused("unsupported:function-references", "typed elements")
        count = reader.count(limits.elements, "elements")
        total += count
        if total > limits.elements:
            raise ModuleRefused("too_large", f"more than {limits.elements} elements")
        for _number in range(count):
            if flags & 4:
                spans = _constant(module, reader)
            else:
                start = reader.at
                index = reader.u32()
                spans = [(start, reader.at, index)]
            module.element_spans += spans
            module.in_tables.update(index for _, _, index in spans)


def _data_count(module: Module, reader: Reader, _: Limits) -> None:
    module.data_count = reader.u32()


def _data(module: Module, reader: Reader, limits: Limits) -> None:
    count = reader.count(100_000, "data segments")
    for _ in range(count):
        flags = reader.u32()
        if flags > 2:
            raise reader.fail(f"unknown data flags {flags}")
        if flags == 2:
            reader.u32()
        if flags != 1:
            _constant(module, reader)
        reader.take(reader.count(limits.module_bytes, "bytes of data"))
    if module.data_count is not None and module.data_count != count:
        raise reader.fail("the data count is wrong")


def _tags(module: Module, reader: Reader, _: Limits) -> None:
    for _number in range(reader.count(1_000, "tags")):
        module.note("exceptions", "a tag", offset=reader.origin + reader.at)
        reader.byte()
        module.tags.append(reader.u32())


_SECTIONS: Final = {
    TYPE: _types,
    IMPORT: _imports,
    FUNCTION: _functions,
    TABLE: _tables,
    MEMORY: _memories,
    GLOBAL: _globals,
    EXPORT: _exports,
    START: _start,
    ELEMENT: _elements,
    DATA_COUNT: _data_count,
    DATA: _data,
    TAG: _tags,
}


def _indices(module: Module) -> None:
    """Every index that the instrumenter follows points somewhere."""
    functions = module.imported_functions + len(module.functions)
    wrong = [
        one
        for one in [
            *module.functions,
            *module.tags,
            *(i.type_index for i in module.imports if i.kind == 0),
        ]
        if one >= len(module.types)
    ]
    if wrong:
        raise ModuleRefused("malformed", f"type {wrong[0]} does not exist")
    used = [e.index for e in module.exports if e.kind == 0]
    used += [index for _, _, index in module.element_spans + module.global_spans]
    used += [] if module.start is None else [module.start]
    used += [e[3] for body in module.bodies for e in body.events if e[1] in (CALL, FUNC)]
    if any(one >= functions for one in used):
        raise ModuleRefused("malformed", f"function {max(used)} does not exist")
    for export in module.exports:
        if export.kind == 2 and export.index >= len(module.memories) + sum(
            1 for one in module.imports if one.kind == 2
        ):
            raise ModuleRefused("malformed", f"memory {export.index} does not exist")


def _code(module: Module, reader: Reader | None, limits: Limits) -> None:
    if reader is None:
        if module.functions:
            raise ModuleRefused("malformed", "functions without code")
        return
    count = reader.count(limits.functions, "bodies")
    if count != len(module.functions):
        raise reader.fail(f"{len(module.functions)} functions have {count} bodies")
    first = module.imported_functions
    for number in range(count):
        size = reader.count(limits.body_bytes, "bytes in a body")
        start = reader.origin + reader.at
        body = Reader(reader.take(size), origin=start)
        declared = 0
        for _ in range(body.count(limits.locals, "local declarations")):
            declared += body.u32()
            if declared > limits.locals:
                raise ModuleRefused(
                    "too_large",
                    f"more than {limits.locals} locals",
                    function=first + number,
                    offset=start,
                )
            value_type(module, body, "a local", first + number)
        module.bodies.append(Scan(module, body, first + number).run(start))
    if not reader.done():
        raise reader.fail("the code section has bytes left over")
