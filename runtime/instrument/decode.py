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

from dataclasses import dataclass, field
from typing import Final

from runtime.errors import ModuleRefused

MAGIC: Final = b"\0asm\1\0\0\0"
COMPONENT: Final = b"\0asm\x0d\0\1\0"

TYPE, IMPORT, FUNCTION, TABLE, MEMORY, GLOBAL, EXPORT, START, ELEMENT = range(1, 10)
CODE, DATA, DATA_COUNT, TAG = 10, 11, 12, 13
ORDER: Final = (1, 2, 3, 4, 5, 13, 6, 7, 8, 9, 12, 10, 11)
"""Sections in the order the specification demands."""

NUMERIC: Final = frozenset({0x7F, 0x7E, 0x7D, 0x7C})
VECTOR: Final = 0x7B
REFERENCES: Final = frozenset({0x70, 0x6F})
REFERENCE_TYPES: Final = frozenset(range(0x63, 0x75)) - {0x6F, 0x70}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what is accepted; a recipe may raise them for its own module."""

    module_bytes: int = 32 << 20
    functions: int = 50_000
    body_bytes: int = 1 << 20
    locals: int = 5_000
    elements: int = 10_000
    checks: int = 200_000
    memory_pages: int = 1_024
    types: int = 20_000
    imports: int = 1_000
    exports: int = 10_000
    globals: int = 10_000


class Reader:
    """Bytes with a position; every read is checked against the end."""

    __slots__ = ("at", "data", "end", "origin")

    def __init__(self, data: bytes, at: int = 0, end: int | None = None, origin: int = 0) -> None:
        self.data = data
        self.at = at
        self.end = len(data) if end is None else end
        self.origin = origin

    def fail(self, what: str) -> ModuleRefused:
        """The refusal of this place."""
        return ModuleRefused("malformed", what, offset=self.origin + self.at)

    def byte(self) -> int:
        """The next byte."""
        if self.at >= self.end:
            raise self.fail("the module ends early")
        value = self.data[self.at]
        self.at += 1
        return value

    def u32(self) -> int:
        """An unsigned number of at most 32 bits."""
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 28:
                raise self.fail("a number is longer than five bytes")
        if value > 0xFFFFFFFF:
            raise self.fail("a number exceeds 32 bits")
        return value

    def count(self, limit: int, what: str) -> int:
        """A number of things, refused above its limit before anything is read."""
        value = self.u32()
        if value > limit:
            raise ModuleRefused(
                "too_large", f"{value} {what}; {limit} are allowed", offset=self.origin + self.at
            )
        return value

    def skip_leb(self, longest: int) -> None:
        """Step over one variable-length number."""
        for _ in range(longest):
            if self.byte() < 0x80:
                return
        raise self.fail(f"a number is longer than {longest} bytes")

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size < 0 or size > self.end - self.at:
            raise self.fail("the module ends early")
        start = self.at
        self.at += size
        return self.data[start : self.at]

    def name(self) -> str:
        """A UTF-8 name."""
        raw = self.take(self.u32())
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail("a name is not UTF-8") from None

    def done(self) -> bool:
        """Nothing is left."""
        return self.at >= self.end


@dataclass(frozen=True, slots=True)
class FuncType:
    """Parameter and result type bytes."""

    params: bytes
    results: bytes


@dataclass(frozen=True, slots=True)
class Import:
    """One import; `kind` 0 function, 1 table, 2 memory, 3 global, 4 tag."""

    module: str
    name: str
    kind: int
    type_index: int
    mutable: bool = False


@dataclass(frozen=True, slots=True)
class Export:
    """One export; `index` counts imports first."""

    name: str
    kind: int
    index: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Limits of a memory in pages of 64 KiB."""

    minimum: int
    maximum: int | None


@dataclass(frozen=True, slots=True)
class Global:
    """A global of this module; `init` is its constant expression with the end byte."""

    type: int
    mutable: bool
    init: bytes


# What the check placement needs to know of a body.
BLOCK, LOOP, IF, ELSE, END, BRANCH, BRANCH_IF, BRANCH_TABLE, LEAVE = range(9)
CALL, CALL_INDIRECT, FUNC, POINT = range(9, 13)
POINTS: Final = 0x3FFF
"""A POINT event at least every so many instructions, so that straight code has places for checks."""

Event = tuple[int, int, int, int, int]
"""(position after the instruction, kind, instructions so far, argument, start of the operand)."""


@dataclass(slots=True)
class Body:
    """One function body.

    Attributes:
        start: First byte of the body (its local declarations) in the file.
        code: Offset of the first instruction within `data`.
        data: The body's bytes, locals included.
        events: Control flow and function operands in order.
        instructions: How many there are.
        tables: Branch-table targets, indexed by a BRANCH_TABLE event's argument.
    """

    start: int
    code: int
    data: bytes
    events: list[Event]
    instructions: int
    tables: list[tuple[int, ...]]


@dataclass(slots=True)
class Module:
    """A decoded module.

    `sections` holds (id, payload) in file order, custom ones included: written back they are the file.
    """

    sections: list[tuple[int, bytes]]
    types: list[FuncType] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    tables: int = 0
    memories: list[Memory] = field(default_factory=list)
    globals: list[Global] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    start: int | None = None
    in_tables: set[int] = field(default_factory=set)
    element_spans: list[tuple[int, int, int]] = field(default_factory=list)
    global_spans: list[tuple[int, int, int]] = field(default_factory=list)
    data_count: int | None = None
    bodies: list[Body] = field(default_factory=list)
    features: dict[str, ModuleRefused] = field(default_factory=dict)

    @property
    def imported_functions(self) -> int:
        """Function indices below this are imports."""
        return sum(1 for one in self.imports if one.kind == 0)

    @property
    def imported_globals(self) -> int:
        """Global indices below this are imports."""
        return sum(1 for one in self.imports if one.kind == 3)

    def section(self, number: int) -> bytes | None:
        """Payload of a section, None when absent."""
        return next((payload for ident, payload in self.sections if ident == number), None)

    def type_of(self, function: int) -> FuncType:
        """Type of a function by its index, imports first."""
        imported = [one.type_index for one in self.imports if one.kind == 0]
        if function < len(imported):
            return self.types[imported[function]]
        return self.types[self.functions[function - len(imported)]]

    def note(
        self, feature: str, sentence: str, *, function: int | None = None, offset: int | None = None
    ) -> None:
        """Remember the first place of a feature that will be refused."""
        if feature not in self.features:
            self.features[feature] = ModuleRefused(
                f"unsupported:{feature}", sentence, function=function, offset=offset
            )


def uleb(value: int) -> bytes:
    """The shortest unsigned encoding."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode(sections: list[tuple[int, bytes]]) -> bytes:
    """A module file of these sections."""
    out = bytearray(MAGIC)
    for ident, payload in sections:
        out.append(ident)
        out += uleb(len(payload))
        out += payload
    return bytes(out)


def decode(data: bytes, limits: Limits | None = None) -> Module:
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


def _value_type(module: Module, reader: Reader, what: str, function: int | None = None) -> int:
    kind = reader.byte()
    offset = reader.origin + reader.at - 1
    if kind in NUMERIC:
        return kind
    if kind == VECTOR:
        module.note(
            "simd", f"v128 in {what}; build without -msimd128", function=function, offset=offset
        )
    elif kind in REFERENCES:
        module.note("reference-locals", f"a reference in {what}", function=function, offset=offset)
    elif kind in (0x63, 0x64):
        module.note("function-references", f"a typed reference in {what}", offset=offset)
        reader.skip_leb(5)
    elif kind in REFERENCE_TYPES:
        module.note("gc", f"a heap type in {what}", offset=offset)
    else:
        raise ModuleRefused("malformed", f"an unknown value type 0x{kind:02x}", offset=offset)
    return kind


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
                _value_type(module, reader, "a function type")
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
            _value_type(module, reader, "a global")
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


def _constant(module: Module, reader: Reader) -> list[tuple[int, int, int]]:
    """Step over a constant expression; spans (start, end, index) of its function operands."""
    spans = []
    while True:
        code = reader.byte()
        if code == 0x0B:
            return spans
        if code == 0x41 or code == 0x23:
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
            kind = _value_type(module, reader, "a global")
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


def _elements(module: Module, reader: Reader, limits: Limits) -> None:
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
        reader.u32()


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
        for one in [*module.functions, *(i.type_index for i in module.imports if i.kind == 0)]
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


# --- code -----------------------------------------------------------------------------------------


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
            _value_type(module, body, "a local", first + number)
        module.bodies.append(_Scan(module, body, first + number).run(start))
    if not reader.done():
        raise reader.fail("the code section has bytes left over")


# Immediates of one-byte opcodes. NONE and the LEB kinds are stepped over in the loop itself.
_NONE, _LEB32, _LEB64, _MEMORY, _BYTES4, _BYTES8, _SPECIAL = range(7)


def _plain_opcodes() -> bytes:
    kinds = bytearray([_SPECIAL] * 256)
    for code in (0x01, 0x1A, 0x1B, *range(0x45, 0xC5)):
        kinds[code] = _NONE
    for code in (*range(0x20, 0x25), 0x41):
        kinds[code] = _LEB32
    for code in range(0x28, 0x3F):
        kinds[code] = _MEMORY
    kinds[0x42], kinds[0x43], kinds[0x44] = _LEB64, _BYTES4, _BYTES8
    return bytes(kinds)


_KINDS: Final = _plain_opcodes()


class _Scan:
    """One pass over one body."""

    __slots__ = ("body", "depth", "events", "function", "module", "seen", "tables")

    def __init__(self, module: Module, body: Reader, function: int) -> None:
        self.module = module
        self.body = body
        self.function = function
        self.events: list[Event] = []
        self.tables: list[tuple[int, ...]] = []
        self.depth = 1
        self.seen = 0

    def run(self, start: int) -> Body:
        """Decode until the end that closes the function, which must be the last byte."""
        body, kinds = self.body, _KINDS
        code_start = body.at
        try:
            while self.depth:
                if body.at >= body.end:
                    raise body.fail("a body ends without its end")
                if self.seen & POINTS == POINTS:
                    self._event(POINT)
                code = body.data[body.at]
                body.at += 1
                self.seen += 1
                kind = kinds[code]
                if kind == _NONE:
                    continue
                if kind == _LEB32:
                    body.skip_leb(5)
                elif kind == _MEMORY:
                    self._memory()
                elif kind == _LEB64:
                    body.skip_leb(10)
                elif kind == _BYTES4:
                    body.take(4)
                elif kind == _BYTES8:
                    body.take(8)
                else:
                    self._special(code)
        except ModuleRefused as refused:
            if refused.function is not None:
                raise
            raise ModuleRefused(
                refused.code, refused.sentence, function=self.function, offset=refused.offset
            ) from None
        if body.at != body.end:
            raise ModuleRefused(
                "malformed",
                "bytes after the end of a body",
                function=self.function,
                offset=start + body.at,
            )
        return Body(start, code_start, body.data, self.events, self.seen, self.tables)

    def _note(self, feature: str, sentence: str) -> None:
        self.module.note(
            feature, sentence, function=self.function, offset=self.body.origin + self.body.at - 1
        )

    def _event(self, kind: int, argument: int = 0, operand: int = 0) -> None:
        self.events.append((self.body.at, kind, self.seen, argument, operand))

    def _memory(self) -> None:
        if self.body.u32() & 0x40:
            self._note("multi-memory", "an access to a second memory")
            self.body.skip_leb(5)
        self.body.skip_leb(10)

    def _block_type(self) -> None:
        first = self.body.byte()
        if first == 0x40 or first in NUMERIC:
            return
        if first & 0xC0 == 0x40:
            self.body.at -= 1
            _value_type(self.module, self.body, "a block type", self.function)
            return
        self.body.at -= 1
        self.body.skip_leb(5)

    def _label(self) -> int:
        depth = self.body.u32()
        if depth >= self.depth:
            raise self.body.fail("a branch out of the function")
        return depth

    def _special(self, code: int) -> None:  # noqa: C901, PLR0912  (one table of opcodes)
        body = self.body
        if code == 0x10 or code == 0x12:
            start = body.at
            index = body.u32()
            if code == 0x12:
                self._note("tail-calls", "a tail call; build without -mtail-call")
            self._event(CALL, index, start)
        elif code == 0x0B:
            self.depth -= 1
            self._event(END)
        elif code == 0x02 or code == 0x03:
            self._block_type()
            self.depth += 1
            self._event(LOOP if code == 0x03 else BLOCK)
        elif code == 0x04:
            self._block_type()
            self.depth += 1
            self._event(IF)
        elif code == 0x05:
            self._event(ELSE)
        elif code == 0x0C or code == 0x0D:
            label = self._label()
            self._event(BRANCH if code == 0x0C else BRANCH_IF, label)
        elif code == 0x0E:
            count = body.count(100_000, "branch targets")
            if count > body.end - body.at:
                raise body.fail("a branch table longer than its body")
            self.tables.append(tuple({self._label() for _ in range(count + 1)}))
            self._event(BRANCH_TABLE, len(self.tables) - 1)
        elif code == 0x0F or code == 0x00:
            self._event(LEAVE)
        elif code == 0x11 or code == 0x13:
            if code == 0x13:
                self._note("tail-calls", "a tail call; build without -mtail-call")
            start = body.at
            body.u32()
            body.u32()
            self._event(CALL_INDIRECT, 0, start)
        elif code == 0x1C:
            for _ in range(body.count(1, "select types")):
                _value_type(self.module, body, "a select", self.function)
        elif code == 0x3F or code == 0x40:
            if body.u32():
                self._note("multi-memory", "an access to a second memory")
        elif code == 0xFC:
            self._bulk(body.u32())
        elif code == 0xFD:
            self._vector(body.u32())
        else:
            self._refused(code)

    def _bulk(self, code: int) -> None:
        body = self.body
        if code < 8:
            return
        if code in (8, 10, 11):
            operands = [body.u32() for _ in range({8: 2, 10: 2, 11: 1}[code])]
            if any(operands[1 if code == 8 else 0 :]):
                self._note("multi-memory", "an access to a second memory")
        elif code in (9, 13):
            body.u32()
            self._note("segment-drop", "data.drop or elem.drop")
        elif code in (12, 14):
            body.u32()
            body.u32()
            self._note("table-mutation", "table.init or table.copy")
        elif code in (15, 17):
            body.u32()
            self._note("table-mutation", "table.grow or table.fill")
        elif code == 16:
            body.u32()
        else:
            raise body.fail(f"an unknown opcode 0xfc {code}")

    def _vector(self, code: int) -> None:
        body = self.body
        self._note("simd", "a vector instruction; build without -msimd128")
        if code >= 0x100:
            self._note("relaxed-simd", "a relaxed vector instruction, whose result may differ")
            if code > 0x113:
                raise body.fail(f"an unknown opcode 0xfd {code}")
        elif code <= 11 or code in (92, 93):
            self._memory()
        elif code in (12, 13):
            body.take(16)
        elif 21 <= code <= 34:
            body.byte()
        elif 84 <= code <= 91:
            self._memory()
            body.byte()
        elif code in _UNKNOWN_VECTOR:
            raise body.fail(f"an unknown opcode 0xfd {code}")

    def _refused(self, code: int) -> None:
        """Opcodes whose length is known but which are always refused, and unknown ones."""
        body = self.body
        if code == 0x25 or code == 0x26:
            body.u32()
            feature = "reference-locals" if code == 0x25 else "table-mutation"
            self._note(feature, "table.get" if code == 0x25 else "table.set")
        elif code == 0xD0:
            body.skip_leb(5)
            self._note("reference-locals", "ref.null")
        elif code == 0xD1:
            self._note("reference-locals", "ref.is_null")
        elif code == 0xD2:
            start = body.at
            index = body.u32()
            self._note("reference-locals", "ref.func")
            self._event(FUNC, index, start)
        elif code in (0x14, 0x15, 0xD5, 0xD6):
            body.u32()
            self._note("function-references", "a call or branch by reference")
        elif code == 0xD4:
            self._note("function-references", "ref.as_non_null")
        elif code == 0xD3 or code == 0xFB:
            self._note("gc", "a garbage-collected reference")
            raise self.module.features["gc"]
        elif code == 0xFE:
            self._note("threads", "atomic opcode; build without -pthread")
            raise self.module.features["threads"]
        elif code in (0x06, 0x07, 0x08, 0x09, 0x0A, 0x18, 0x19, 0x1F):
            self._note("exceptions", "an exception instruction; build with -fno-exceptions")
            raise self.module.features["exceptions"]
        else:
            raise body.fail(f"an unknown opcode 0x{code:02x}")


_UNKNOWN_VECTOR: Final = frozenset(
    {
        0x9A,
        0xA2,
        0xA5,
        0xA6,
        0xAF,
        0xB0,
        0xB2,
        0xB3,
        0xB4,
        0xBB,
        0xC2,
        0xC5,
        0xC6,
        0xCF,
        0xD0,
        0xD2,
        0xD3,
        0xD4,
        0xE2,
        0xEE,
    }
)
