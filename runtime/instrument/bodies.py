"""Every instruction of every body: its length, its control flow, the features it needs.

Pure. One unknown opcode would misplace all later ones, so it is a refusal.
"""

from __future__ import annotations

from typing import Final

from runtime.errors import ModuleRefused
from runtime.instrument.module import (
    BLOCK,
    BRANCH,
    BRANCH_IF,
    BRANCH_TABLE,
    CALL,
    CALL_INDIRECT,
    ELSE,
    END,
    FUNC,
    IF,
    LEAVE,
    LOOP,
    NUMERIC,
    POINT,
    POINTS,
    RETHROW,
    THROW,
    TRY,
    Body,
    Event,
    Module,
    Reader,
    value_type,
)

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


class Scan:
    """One pass over one body."""

    __slots__ = ("body", "depth", "events", "function", "module", "seen", "tables", "tries")

    def __init__(self, module: Module, body: Reader, function: int) -> None:
        self.module = module
        self.body = body
        self.function = function
        self.events: list[Event] = []
        self.tables: list[tuple[int, ...]] = []
        self.tries: list[tuple[int, list[tuple[int, int, int]]]] = []
        self.depth = 1
        self.seen = 0

    def run(self, start: int) -> Body:  # noqa: C901, PLR0912  (the hot loop, flat on purpose)
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
        return Body(start, code_start, body.data, self.events, self.seen, self.tables, self.tries)

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
            value_type(self.module, self.body, "a block type", self.function)
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
        if code in {0x10, 0x12}:
            start = body.at
            index = body.u32()
            if code == 0x12:
                self._note("tail-calls", "a tail call; build without -mtail-call")
            self._event(CALL, index, start)
        elif code == 0x0B:
            self.depth -= 1
            self._event(END)
        elif code in {0x02, 0x03}:
            self._block_type()
            self.depth += 1
            self._event(LOOP if code == 0x03 else BLOCK)
        elif code == 0x04:
            self._block_type()
            self.depth += 1
            self._event(IF)
        elif code == 0x05:
            self._event(ELSE)
        elif code in {0x0C, 0x0D}:
            label = self._label()
            self._event(BRANCH if code == 0x0C else BRANCH_IF, label)
        elif code == 0x0E:
            count = body.count(100_000, "branch targets")
            if count > body.end - body.at:
                raise body.fail("a branch table longer than its body")
            self.tables.append(tuple({self._label() for _ in range(count + 1)}))
            self._event(BRANCH_TABLE, len(self.tables) - 1)
        elif code in {0x0F, 0x00}:
            self._event(LEAVE)
        elif code in {0x11, 0x13}:
            if code == 0x13:
                self._note("tail-calls", "a tail call; build without -mtail-call")
            start = body.at
            body.u32()
            body.u32()
            self._event(CALL_INDIRECT, 0, start)
        elif code == 0x1C:
            for _ in range(body.count(1, "select types")):
                value_type(self.module, body, "a select", self.function)
        elif code in {0x3F, 0x40}:
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

    def _refused(self, code: int) -> None:  # noqa: C901  (one table of opcodes)
        """Opcodes whose length is known but which are always refused, and unknown ones."""
        body = self.body
        if code in {0x25, 0x26}:
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
        elif code in {0xD3, 0xFB}:
            self._note("gc", "a garbage-collected reference")
            raise self.module.features["gc"]
        elif code == 0xFE:
            self._note("threads", "atomic opcode; build without -pthread")
            raise self.module.features["threads"]
        elif code in (0x08, 0x0A, 0x1F):
            self._note("exceptions", "an exception instruction of a shape that is not carried")
            self._exception(code)
        elif code in (0x06, 0x07, 0x09, 0x18, 0x19):
            self._note("exceptions", "a legacy exception instruction; build with the new ones")
            raise self.module.features["exceptions"]
        else:
            raise body.fail(f"an unknown opcode 0x{code:02x}")

    def _exception(self, code: int) -> None:
        """`throw`, `throw_ref`, `try_table`: `exceptions.py` lowers them where it can."""
        body = self.body
        if code == 0x08:
            start = body.at
            tag = body.u32()
            if tag >= len(self.module.tags):
                raise body.fail(f"tag {tag} does not exist")
            self._event(THROW, tag, start)
        elif code == 0x0A:
            self._event(RETHROW)
        else:
            start = body.at
            self._block_type()
            end = body.at
            clauses = []
            for _ in range(body.count(1_000, "catch clauses")):
                kind = body.byte()
                if kind > 3:
                    raise body.fail(f"an unknown catch {kind}")
                tag = body.u32() if kind < 2 else 0
                clauses.append((kind, tag, self._label()))
            self.depth += 1
            self.tries.append((end, clauses))
            self._event(TRY, len(self.tries) - 1, start)


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
