"""Where a guest can be stopped: checks at loops, at call cycles and in long straight code.

Pure. The check is stack-neutral: it loads the preempt flag and, when set, calls `sched.yield_`. It
goes

(a) at every `loop` header, after its block type;
(b) at the entry of every function on a cycle of the call graph, where an indirect call is an edge
    to one pseudo node that reaches every function of an element segment;
(c) wherever more than `MOST` instructions could have run since the last check. That is a data-flow
    pass over structured control: branches go forward or to a loop header, so the greatest
    check-free length at each point is the maximum over the paths joining there. A call adds the
    callee's own lengths, known because callees are placed first. Without (c), 34 functions that
    each call the next one twice get no check and run 2^34 calls.

Weakness: a return chain out of deep recursion passes at most `MOST_RETURNING` instructions a frame
without a check; the native stack limit bounds the frames, the epoch kill bounds the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from runtime.errors import ModuleRefused
from runtime.instrument import module as form
from runtime.instrument import stack
from runtime.instrument.module import Body, Limits, Module, Reader, uleb

MOST: Final = 100_000
"""Instructions without a check, per function; a POINT apart, so less than 120,000 in truth."""
MOST_RETURNING: Final = 1_000
HOST_CALL: Final = 1_000
"""What a call of an import counts as."""
INDIRECT: Final = -1

YIELD_MODULE, YIELD_NAME = "sched", "yield_"
CONTROL, STACK, MEMORY, START_EXPORT = "__ctl", "__astk", "__memory", "__start"
STATE, PLACE = "__astate", "__adata"
FLAG_AT, FUEL_AT = 0, 8
VARIANTS: Final = ("flag", "fuel")

WASI: Final = "wasi_snapshot_preview1"
AGENT: Final = "agent"


@dataclass(frozen=True, slots=True)
class Checked:
    """A module with checks.

    Attributes:
        wasm: The instrumented bytes.
        checks: How many checks were placed.
        cyclic: Functions on call cycles.
        functions: Functions of the module.
        globals: Value types of the exported mutable globals `__g<i>`, by i.
    """

    wasm: bytes
    checks: int
    cyclic: int
    functions: int
    globals: dict[int, int]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Check-free instruction counts of one function.

    `through` from entry to exit (-1: every path meets a check), `first` from entry to the first
    check or the exit, `last` from the last check, or the entry, to the exit.
    """

    through: int
    first: int
    last: int


IMPORTED: Final = Lengths(HOST_CALL, HOST_CALL, HOST_CALL)
ON_CYCLE: Final = Lengths(-1, 0, MOST - MOST_RETURNING)


def gate(module: Module, *, adapters: frozenset[tuple[str, str]], wasi: frozenset[str]) -> None:
    """Return when every feature and import of the module can be carried.

    Raises:
        ModuleRefused: The first feature found, by name, with its place.
    """
    for refused in module.features.values():
        raise refused
    for one in module.imports:
        known = (
            (one.module == AGENT and one.name == "host_call")
            or (one.module == WASI and one.name in wasi)
            or (one.module, one.name) in adapters
        )
        if one.module == YIELD_MODULE or one.name.startswith("asyncify_"):
            raise ModuleRefused(
                "unsupported:reserved-name", f"the import {one.module}.{one.name} is the host's"
            )
        if one.kind != 0 or not known:
            raise ModuleRefused(
                "unsupported:unknown-import",
                f"{one.module}.{one.name}; agent.host_call and WASI preview 1 are served",
            )
    for export in module.exports:
        if _reserved(export.name):
            raise ModuleRefused(
                "unsupported:reserved-name", f"the export {export.name!r} is the host's"
            )
    if len(module.memories) > 1:
        raise ModuleRefused("unsupported:multi-memory", f"{len(module.memories)} memories")


def _reserved(name: str) -> bool:
    return (
        name in (CONTROL, STACK, MEMORY, START_EXPORT, STATE, PLACE)
        or name.startswith("asyncify_")
        or (name.startswith("__g") and name[3:].isdigit())
    )


def instrument(
    module: Module, *, variant: str = "flag", limits: Limits | None = None, stack_pages: int = 0
) -> Checked:
    """The module with checks, control memory and exported globals; gate it first.

    Args:
        module: Decoded and gated.
        variant: `flag` (any thread may stop it) or `fuel` (yield points repeat exactly).
        limits: Bounds on checks and memory.
        stack_pages: Of a module whose stack `stack.with_pages` moved; 0 checks no floor.

    Raises:
        ModuleRefused: `too_large`.
    """
    limits = limits or Limits()
    yield_index = module.imported_functions
    control = len(module.memories)
    check = _check(variant, control, yield_index)
    entry = stack.floor_check(module, stack_pages) + check if stack_pages else check
    places, cyclic = place(module)
    total = sum(map(len, places))
    if total > limits.checks:
        raise ModuleRefused("too_large", f"{total} checks; {limits.checks} are allowed")
    parts = {ident: payload for ident, payload in module.sections if ident}
    types = Reader(parts.get(form.TYPE, b"\0"))
    count = types.u32()
    parts[form.TYPE] = uleb(count + 1) + types.data[types.at :] + b"\x60\0\0"
    imports = Reader(parts.get(form.IMPORT, b"\0"))
    imported = imports.u32()
    parts[form.IMPORT] = (
        uleb(imported + 1)
        + imports.data[imports.at :]
        + _name(YIELD_MODULE)
        + _name(YIELD_NAME)
        + b"\0"
        + uleb(count)
    )
    parts[form.MEMORY] = _memories(module, limits)
    parts[form.EXPORT] = _exports(module, control, yield_index)
    parts.pop(form.START, None)
    for ident, spans in (
        (form.ELEMENT, module.element_spans),
        (form.GLOBAL, module.global_spans),
    ):
        if ident in parts:
            parts[ident] = _shift(parts[ident], spans, yield_index)
    if module.bodies:
        parts[form.CODE] = uleb(len(module.bodies)) + b"".join(
            _body(body, at, (entry, check), yield_index)
            for body, at in zip(module.bodies, places, strict=True)
        )
    wasm = form.encode([(ident, parts[ident]) for ident in form.ORDER if ident in parts])
    own = {index: one.type for index, one in enumerate(module.globals) if one.mutable}
    return Checked(wasm, total, len(cyclic), len(module.bodies), own)


def reference(module: Module) -> bytes:
    """The module as it came, memory and start function exported, for the self-test."""
    rows = [(one.name, one.kind, one.index) for one in module.exports]
    if module.memories:
        rows.append((MEMORY, 2, 0))
    if module.start is not None:
        rows.append((START_EXPORT, 0, module.start))
    exports = uleb(len(rows)) + b"".join(
        _name(name) + bytes([kind]) + uleb(index) for name, kind, index in rows
    )
    parts = {ident: payload for ident, payload in module.sections if ident}
    parts[form.EXPORT] = exports
    parts.pop(form.START, None)
    return form.encode([(ident, parts[ident]) for ident in form.ORDER if ident in parts])


def _check(variant: str, control: int, yield_index: int) -> bytes:
    """`if (flag) yield_()`, or `if (--fuel < 0) yield_()`."""
    memory = uleb(control)
    call = b"\x04\x40\x10" + uleb(yield_index) + b"\x0b"
    if variant == "flag":
        return b"\x41\0\x28\x42" + memory + uleb(FLAG_AT) + call
    if variant != "fuel":
        raise ValueError(f"variant {variant!r}: one of {', '.join(VARIANTS)}")
    load = b"\x41\0\x29\x43" + memory + uleb(FUEL_AT)
    spend = b"\x41\0" + load + b"\x42\x01\x7d\x37\x43" + memory + uleb(FUEL_AT)
    return spend + load + b"\x42\0\x53" + call


def _name(text: str) -> bytes:
    raw = text.encode()
    return uleb(len(raw)) + raw


def _memories(module: Module, limits: Limits) -> bytes:
    out = bytearray(uleb(len(module.memories) + 1))
    for one in module.memories:
        if one.minimum > limits.memory_pages:
            raise ModuleRefused(
                "too_large",
                f"a memory of {one.minimum} pages of 64 KiB; {limits.memory_pages} are allowed",
            )
        most = limits.memory_pages if one.maximum is None else min(one.maximum, limits.memory_pages)
        out += b"\x01" + uleb(one.minimum) + uleb(max(most, one.minimum))
    return bytes(out + b"\x01\x01\x01")


def _exports(module: Module, control: int, yield_index: int) -> bytes:
    rows = [
        (one.name, one.kind, one.index + (one.kind == 0 and one.index >= yield_index))
        for one in module.exports
    ]
    rows += [(f"__g{i}", 3, i) for i, one in enumerate(module.globals) if one.mutable]
    if module.memories:
        rows.append((MEMORY, 2, 0))
    rows.append((CONTROL, 2, control))
    if module.start is not None:
        rows.append((START_EXPORT, 0, module.start + (module.start >= yield_index)))
    return uleb(len(rows)) + b"".join(
        _name(name) + bytes([kind]) + uleb(index) for name, kind, index in rows
    )


def _shift(payload: bytes, spans: list[tuple[int, int, int]], yield_index: int) -> bytes:
    """The payload with function operands moved past the added import."""
    out, at = bytearray(), 0
    for start, end, index in spans:
        out += payload[at:start] + uleb(index + (index >= yield_index))
        at = end
    return bytes(out + payload[at:])


def _body(body: Body, places: list[int], check: tuple[bytes, bytes], yield_index: int) -> bytes:
    """The body with checks at these places, that of its entry and others; size first."""
    entry, inside = check
    edits = [(at, at, entry if at == body.code else inside) for at in places]
    edits += [
        (operand, position, uleb(index + (index >= yield_index)))
        for position, kind, _, index, operand in body.events
        if kind in (form.CALL, form.FUNC)
    ]
    edits.sort(key=lambda edit: edit[:2])
    out, at = bytearray(), 0
    for start, end, new in edits:
        out += body.data[at:start]
        out += new
        at = end
    out += body.data[at:]
    return uleb(len(out)) + bytes(out)


# --- placement ------------------------------------------------------------------------------------


def place(module: Module) -> tuple[list[list[int]], set[int]]:
    """Offsets of checks in each body (within `Body.data`), and the functions on call cycles."""
    first = module.imported_functions
    graph: dict[int, list[int]] = {}
    for number, body in enumerate(module.bodies):
        called = {one[3] - first for one in body.events if one[1] == form.CALL and one[3] >= first}
        if any(one[1] == form.CALL_INDIRECT for one in body.events):
            called.add(INDIRECT)
        graph[number] = sorted(called)
    graph[INDIRECT] = sorted(one - first for one in module.in_tables if one >= first)
    places: list[list[int]] = [[] for _ in module.bodies]
    lengths: dict[int, Lengths] = {}
    cyclic: set[int] = set()
    for component in components(graph):
        cycle = len(component) > 1 or component[0] in graph[component[0]]
        if INDIRECT in component:
            outside = [lengths[one] for one in graph[INDIRECT] if one in lengths]
            outside += [IMPORTED] + ([ON_CYCLE] if cycle else [])
            lengths[INDIRECT] = Lengths(
                max(one.through for one in outside),
                max(one.first for one in outside),
                max(one.last for one in outside),
            )
        members = [one for one in component if one != INDIRECT]
        if cycle:
            cyclic.update(members)
        known = dict.fromkeys(members, ON_CYCLE) if cycle else {}
        done = {
            number: _Placement(module.bodies[number], first, {**known}, lengths, entry=cycle).run()
            for number in members
        }
        for number, (at, own) in done.items():
            places[number] = at
            lengths[number] = own
    return places, cyclic


@dataclass(slots=True)
class _Label:
    """An open block: the joined state of branches to it, and of an `if` before its `else`."""

    loop: bool
    since: int = -1
    clear: int = -1
    saved: tuple[int, int] | None = None

    def join(self, since: int, clear: int) -> None:
        self.since = max(self.since, since)
        self.clear = max(self.clear, clear)


class _Placement:
    """The data-flow pass over one body.

    `since` is the greatest number of instructions since the last check (or the entry) on any path
    to this point, -1 where no path leads; `clear` the same over paths without any check.
    """

    def __init__(
        self,
        body: Body,
        first: int,
        cycle: dict[int, Lengths],
        known: dict[int, Lengths],
        *,
        entry: bool,
    ) -> None:
        self.body = body
        self.imports = first
        self.cycle = cycle
        self.known = known
        self.at: list[int] = [body.code] if entry else []
        self.since = 0
        self.clear = -1 if entry else 0
        self.first = 0
        self.labels = [_Label(loop=False)]

    def run(self) -> tuple[list[int], Lengths]:
        """Offsets of the checks, and the lengths callers see."""
        counted = 0
        for position, kind, seen, argument, operand in self.body.events:
            if self.since >= 0:
                self.since += seen - counted
                self.clear += seen - counted if self.clear >= 0 else 0
            counted = seen
            self._step(position, kind, argument, operand)
            if self.since > MOST and self.labels:
                self._stop(position)
        self.first = max(self.first, self.clear)
        return self.at, Lengths(self.clear, self.first, max(self.since, 0))

    def _stop(self, position: int) -> None:
        """A check here."""
        self.at.append(position)
        self.first = max(self.first, self.clear)
        self.since, self.clear = 0, -1

    def _branch(self, label: _Label) -> None:
        if label.loop:
            self.first = max(self.first, self.clear)
        else:
            label.join(self.since, self.clear)

    def _step(  # noqa: C901  (one table of control instructions)
        self, position: int, kind: int, argument: int, operand: int
    ) -> None:
        labels = self.labels
        if kind == form.LOOP:
            labels.append(_Label(loop=True))
            self.at.append(position)
            self.first = max(self.first, self.clear)
            # Reachable or not: a loop in dead code gets its check too, so that all loops have one.
            self.since, self.clear = (0 if self.since >= 0 else -1), -1
        elif kind == form.BLOCK:
            labels.append(_Label(loop=False))
        elif kind == form.IF:
            labels.append(_Label(loop=False, saved=(self.since, self.clear)))
        elif kind == form.ELSE:
            self._else(position)
        elif kind == form.END:
            self._end()
        elif kind in (form.BRANCH, form.BRANCH_IF):
            self._branch(labels[-1 - argument])
        elif kind == form.BRANCH_TABLE:
            for target in self.body.tables[argument]:
                self._branch(labels[-1 - target])
        elif kind == form.LEAVE:
            labels[0].join(self.since, self.clear)
        elif kind == form.CALL:
            self._call(operand - 1, self._callee(argument))
        elif kind == form.CALL_INDIRECT:
            self._call(operand - 1, self.known[INDIRECT])
        if kind in (form.BRANCH, form.BRANCH_TABLE, form.LEAVE):
            self.since = self.clear = -1

    def _else(self, position: int) -> None:
        label = self.labels[-1]
        if label.saved is None:
            raise ModuleRefused(
                "malformed", "an else without its if", offset=self.body.start + position
            )
        label.join(self.since, self.clear)
        self.since, self.clear = label.saved
        label.saved = None

    def _end(self) -> None:
        label = self.labels.pop()
        if label.saved is not None:  # an if without an else: the untaken path joins here
            label.join(*label.saved)
        self.since = max(self.since, label.since)
        self.clear = max(self.clear, label.clear)

    def _callee(self, index: int) -> Lengths:
        if index < self.imports:
            return IMPORTED
        number = index - self.imports
        return self.cycle.get(number) or self.known[number]

    def _call(self, before: int, callee: Lengths) -> None:
        if self.since < 0:
            return
        if self.since + callee.first > MOST and self.since > callee.first // 8:
            self._stop(before)
        after = callee.last
        if callee.through >= 0:
            after = max(after, self.since + callee.through)
            self.clear = self.clear + callee.through if self.clear >= 0 else -1
        else:
            self.first = max(self.first, self.clear + callee.first if self.clear >= 0 else 0)
            self.clear = -1
        self.since = after


def components(  # noqa: C901  (one algorithm)
    graph: dict[int, list[int]],
) -> list[list[int]]:
    """Strongly connected components, callees before callers; iterative, so that depth is no bound.

    Source: Tarjan, "Depth-first search and linear graph algorithms", 1972.
    """
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    open_: set[int] = set()
    out: list[list[int]] = []
    for root, successors in graph.items():
        if root in number:
            continue
        number[root] = low[root] = len(number)
        stack.append(root)
        open_.add(root)
        work = [(root, iter(successors))]
        while work:
            node, rest = work[-1]
            for successor in rest:
                if successor not in number:
                    number[successor] = low[successor] = len(number)
                    stack.append(successor)
                    open_.add(successor)
                    work.append((successor, iter(graph[successor])))
                    break
                if successor in open_:
                    low[node] = min(low[node], number[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        open_.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    out.append(component)
    return out
