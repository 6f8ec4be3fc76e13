"""WebAssembly exceptions rewritten into returns, because Asyncify cannot carry them.

Pure. `throw` stores its payload in globals and leaves; after every call that may throw stands a
test of that global, which branches to the innermost handler of the function or returns to the
caller, whose own test goes on. A function may throw when it throws or calls one that may, an
indirect call being an edge to every function of an element segment. What is carried is the shape
LLVM gives `setjmp` and cleanups:

- `catch tag label`: the label gets the payload;
- `catch_all_ref label` where nothing but `throw_ref` follows the label's block: the exception
  goes on outwards, so the clause is dropped;
- numbers as payload, tags of this module.

Every other shape is refused as `unsupported:exceptions`. Binaryen's own way, npm's newer library
and its legacy form, would bring a second package manager; see docs/adr/0022.

An exception that leaves the entry point is a trap there as well: the host looks at the exported
flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runtime.errors import ModuleRefused
from runtime.instrument import module as form
from runtime.instrument.checks import INDIRECT
from runtime.instrument.module import (
    BLOCK,
    CALL,
    CALL_INDIRECT,
    END,
    EXCEPTION,
    IF,
    LOOP,
    RETHROW,
    THROW,
    TRY,
    Body,
    Module,
    Reader,
    uleb,
)

ZEROS: Final = {
    0x7F: b"\x41\0",
    0x7E: b"\x42\0",
    0x7D: b"\x43" + bytes(4),
    0x7C: b"\x44" + bytes(8),
}
FLYING: Final = "__exc"
"""Exported: the host looks whether an exception left the entry point."""
RETURN, UNREACHABLE = b"\x0f", b"\x00"


@dataclass(frozen=True, slots=True)
class _Globals:
    """Indices of the added globals: which exception flies (tag + 1, 0 is none), and its payload."""

    flying: int
    payload: dict[int, list[int]]


def lower(module: Module) -> bytes:
    """The module without exceptions; decode it again.

    Raises:
        ModuleRefused: `unsupported:exceptions`, of a shape that is not carried.
    """
    if any(one.kind == 4 for one in module.imports) or any(e.kind == 4 for e in module.exports):
        raise _refused("a tag that crosses the module's border")
    parts = {ident: payload for ident, payload in module.sections if ident}
    first = module.imported_globals + len(module.globals)
    added, payload = [0x7F], {}
    for tag, kind in enumerate(module.tags):
        params = module.types[kind].params
        if not set(params) <= form.NUMERIC:
            raise _refused("a payload that is not numbers")
        payload[tag] = [first + len(added) + i for i in range(len(params))]
        added += params
    own = _Globals(first, payload)
    old = Reader(parts.get(form.GLOBAL, b"\0"))
    count = old.u32()
    parts[form.GLOBAL] = (
        uleb(count + len(added))
        + old.data[old.at :]
        + b"".join(bytes([kind]) + b"\x01" + ZEROS[kind] + b"\x0b" for kind in added)
    )
    parts.pop(form.TAG, None)
    exports = Reader(parts.get(form.EXPORT, b"\0"))
    name = FLYING.encode()
    parts[form.EXPORT] = (
        uleb(exports.u32() + 1)
        + exports.data[exports.at :]
        + uleb(len(name))
        + name
        + b"\x03"
        + uleb(own.flying)
    )
    throwing = may_throw(module)
    bodies = []
    for number, body in enumerate(module.bodies):
        new = _Rewrite(module, body, number, own, throwing).run()
        bodies.append(uleb(len(new)) + new)
    parts[form.CODE] = uleb(len(bodies)) + b"".join(bodies)
    return form.encode([(ident, parts[ident]) for ident in form.ORDER if ident in parts])


def may_throw(module: Module) -> set[int]:
    """Numbers of the functions of this module that may leave by an exception, and `INDIRECT`."""
    first = module.imported_functions
    callers: dict[int, list[int]] = {}
    todo: list[int] = []
    for number, body in enumerate(module.bodies):
        for _, kind, _, argument, _ in body.events:
            if kind == CALL and argument >= first:
                callers.setdefault(argument - first, []).append(number)
            elif kind == CALL_INDIRECT:
                callers.setdefault(INDIRECT, []).append(number)
            elif kind == THROW:
                todo.append(number)
    for index in module.in_tables:
        callers.setdefault(index - first, []).append(INDIRECT)
    found: set[int] = set()
    while todo:
        number = todo.pop()
        if number not in found:
            found.add(number)
            todo += callers.get(number, [])
    return found


def _refused(what: str, function: int | None = None, offset: int | None = None) -> ModuleRefused:
    return ModuleRefused(
        "unsupported:exceptions", f"{what}: not a shape that is carried", function=function,
        offset=offset,
    )  # fmt: skip


class _Rewrite:
    """One body rewritten."""

    def __init__(
        self, module: Module, body: Body, number: int, own: _Globals, throwing: set[int]
    ) -> None:
        self.module = module
        self.body = body
        self.number = number
        self.own = own
        self.throwing = throwing
        self.imports = module.imported_functions
        # One entry a label; of a try_table its catch clauses, else none.
        self.labels: list[list[tuple[int, int, int]]] = [[]]
        self.rethrown: list[bool] = [False]
        self.edits: list[tuple[int, int, bytes]] = []

    def run(self) -> bytes:
        """The body's new bytes."""
        for position, kind, _, argument, operand in self.body.events:
            self._step(position, kind, argument, operand)
        out, at = bytearray(), 0
        for start, end, new in self.edits:
            out += self.body.data[at:start]
            out += new
            at = end
        return bytes(out + self.body.data[at:])

    def _step(self, position: int, kind: int, argument: int, operand: int) -> None:
        data = self.body.data
        if kind in (BLOCK, LOOP, IF):
            exception = data[position - 1] == EXCEPTION and data[position - 2] in (0x02, 0x03, 0x04)
            if exception:
                if kind != BLOCK:
                    raise self._refuse("a loop or if that yields an exception", position)
                self.edits.append((position - 1, position, b"\x40"))
            self.labels.append([])
            self.rethrown.append(exception)
        elif kind == TRY:
            end, clauses = self.body.tries[argument]
            self._clauses(clauses, position)
            self.edits.append((operand - 1, position, b"\x02" + data[operand:end]))
            self.labels.append([one for one in clauses if one[0] == 0])
            self.rethrown.append(False)
        elif kind == END:
            self.labels.pop()
            if self.rethrown.pop() and data[position] != 0x0A:
                raise self._refuse("an exception that is kept", position)
        elif kind == RETHROW:
            self.edits.append((position - 1, position, UNREACHABLE))
        elif kind == THROW:
            store = b"".join(b"\x24" + uleb(one) for one in reversed(self.own.payload[argument]))
            fly = b"\x41" + _sleb(argument + 1) + b"\x24" + uleb(self.own.flying)
            self.edits.append(
                (operand - 1, position, store + fly + self._leave(argument, inside=0))
            )
        elif (kind == CALL and argument - self.imports in self.throwing) or (
            kind == CALL_INDIRECT and INDIRECT in self.throwing
        ):
            self.edits.append((position, position, self._test()))

    def _clauses(self, clauses: list[tuple[int, int, int]], position: int) -> None:
        for kind, _, label in clauses:
            if kind == 3 and self.rethrown[-1 - label]:
                continue
            if kind != 0:
                raise self._refuse("a catch that keeps the exception", position)

    def _test(self) -> bytes:
        """After a call: leave when an exception flies."""
        flying = b"\x23" + uleb(self.own.flying)
        out = flying + b"\x04\x40"
        tags = list(self.own.payload)
        for tag in tags[:-1]:
            out += flying + b"\x41" + _sleb(tag + 1) + b"\x46\x04\x40"
            out += self._leave(tag, inside=2) + b"\x0b"
        return out + self._leave(tags[-1], inside=1) + b"\x0b"

    def _leave(self, tag: int, *, inside: int) -> bytes:
        """To the innermost handler of the tag, or out of the function.

        Args:
            tag: Of the flying exception.
            inside: How many `if` of our own stand around.
        """
        for above, clauses in enumerate(reversed(self.labels)):
            for _, caught, label in clauses:
                if caught == tag:
                    clear = b"\x41\0\x24" + uleb(self.own.flying)
                    load = b"".join(b"\x23" + uleb(one) for one in self.own.payload[tag])
                    return clear + load + b"\x0c" + uleb(inside + above + 1 + label)
        results = self.module.types[self.module.functions[self.number]].results
        if not set(results) <= form.NUMERIC:
            raise self._refuse("a function that may throw and returns more than numbers", 0)
        return b"".join(ZEROS[one] for one in results) + RETURN

    def _refuse(self, what: str, position: int) -> ModuleRefused:
        return _refused(what, self.imports + self.number, self.body.start + position)


def _sleb(value: int) -> bytes:
    """A small non-negative number, signed encoding."""
    out = bytearray()
    while value > 0x3F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
