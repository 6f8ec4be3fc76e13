"""The values of a decoded module, and the reader that checks every step against the end.

Pure.
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
EXCEPTION: Final = 0x69
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
CALL, CALL_INDIRECT, FUNC, POINT, TRY, THROW, RETHROW = range(9, 16)
POINTS: Final = 0x3FFF
"""A POINT event every so many instructions: straight code needs places for checks, too."""

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
        tries: Of `try_table`, indexed by a TRY event's argument: end of the block type, then the
            clauses (kind, tag, label).
    """

    start: int
    code: int
    data: bytes
    events: list[Event]
    instructions: int
    tables: list[tuple[int, ...]]
    tries: list[tuple[int, list[tuple[int, int, int]]]] = field(default_factory=list)


@dataclass(slots=True)
class Module:
    """A decoded module.

    `sections` holds (id, payload) in file order, custom ones included: written back they are the
    file.
    """

    sections: list[tuple[int, bytes]]
    types: list[FuncType] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    tables: int = 0
    memories: list[Memory] = field(default_factory=list)
    globals: list[Global] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
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


def value_type(module: Module, reader: Reader, what: str, function: int | None = None) -> int:
    """A value type byte; the ones we cannot carry are noted."""
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
    elif kind == EXCEPTION:
        module.note("exceptions", f"an exception in {what}", function=function, offset=offset)
    elif kind in (0x63, 0x64):
        module.note("function-references", f"a typed reference in {what}", offset=offset)
        reader.skip_leb(5)
    elif kind in REFERENCE_TYPES:
        module.note("gc", f"a heap type in {what}", offset=offset)
    else:
        raise ModuleRefused("malformed", f"an unknown value type 0x{kind:02x}", offset=offset)
    return kind
