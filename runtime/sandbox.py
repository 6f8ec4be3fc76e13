"""The sandbox: run a slice, stop at a check, become bytes, continue from bytes.

One thread at a time owns a sandbox; only its flag is touched from outside, and only under the
lock of `slots.py`, because its address dies with the store. The protocol of a suspension:

1. a check finds the flag set, or an import must wait: Asyncify unwinds, saving locals into
  `__astk`;
2. the entry returns; the sandbox is at rest and can be captured;
3. continuing calls *the same export with the same arguments*; Asyncify rewinds to the import, which
   then answers.

Entry points run in order, each of them stoppable: the module's start function, `_initialize`,
then the main entry. Effects always suspend. Host functions never raise: see `engine.py`. How a
slice ended is
a value: `Preempted | Waiting | Exited | Finished | Trapped | HostFault`.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from runtime import abi, wasi
from runtime.abi import Pending, Record, Request, State
from runtime.clock import cpu_us
from runtime.engine import HALT, VERSION, Program
from runtime.errors import SnapshotMismatch
from runtime.hostcalls import deliver, handlers_for
from runtime.instrument import checks
from runtime.instrument.exceptions import FLYING
from runtime.snapshot import PAGE, Identity, Image, differing, fits

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.engine import Compiled, Ended, Engine, Instance

STRUCT_AT: Final = 16
STACK_AT: Final = 64
CALLS_A_SLICE: Final = 100_000
CPU_LIMIT_US: Final = 600_000_000
"""Compute of a guest in all its slices together, on every machine it was on."""
NORMAL, UNWINDING, REWINDING = range(3)
SHIM_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Preempted:
    """Stopped at a check because the flag was set."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Stopped in an effect; continue with its reply."""

    request: Request


@dataclass(frozen=True, slots=True)
class Exited:
    """The guest ended itself."""

    code: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The main entry returned these raw bits."""

    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trapped:
    """The guest cannot go on: `stack`, `astk`, `unresponsive`, `limit`, or a trap of wasm."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class HostFault:
    """A host function failed: our defect, so back to the last snapshot, with an alert."""

    where: str
    message: str


Outcome = Preempted | Waiting | Exited | Finished | Trapped | HostFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A program with the identity its snapshots carry.

    Attributes:
        program: Bound and compiled.
        identity: Goes into every snapshot.
        globals: How many mutable globals are exported, by name.
        main: Name of the main entry.
    """

    program: Program
    identity: Identity
    globals: tuple[str, ...]
    main: str

    @property
    def throws(self) -> bool:
        """Its exceptions were lowered."""
        return FLYING in self.program.exports

    @property
    def plan(self) -> tuple[str, ...]:
        """Entry points in order."""
        first = [
            name for name in (checks.START_EXPORT, "_initialize") if name in self.program.exports
        ]
        return (*(name for name in first if name != self.main), self.main)


def load(
    engine: Engine,
    code: Compiled,
    *,
    plain_hash: str,
    module_hash: str,
    main: str = "_start",
    variant: str = "flag",
) -> Loaded:
    """Bind a compiled module to the host functions.

    Raises:
        ModuleRefused: It has no such entry, or an import nobody serves.
    """
    program = Program(engine, code, handlers_for(code.module))
    identity = Identity(
        plain_hash=plain_hash,
        module_hash=module_hash,
        variant=variant,
        abi=abi.VERSION,
        shim=SHIM_VERSION,
        arch=platform.machine(),
        nan="canonical" if engine.canonical_nan else "native",
        engine=f"wasmtime {VERSION}",
    )
    names = tuple(
        sorted(
            (one for one in program.exports if one.startswith("__g") and one[3:].isdigit()),
            key=lambda one: int(one[3:]),
        )
    )
    return Loaded(program=program, identity=identity, globals=names, main=main)


class Sandbox:
    """One guest in one instance.

    Args:
        loaded: Its program.
        state: A new guest's state; ignored with an image.
        image: A stopped guest to continue.
        arguments: Raw bits for the main entry of a new guest.
        responder: Answers effects at once, for programs that cannot suspend (self-tests only).
        cpu_limit_us: CPU it may use in all; what it has used travels in its snapshot.

    Raises:
        SnapshotMismatch: The image belongs to another module or machine.
    """

    __slots__ = (
        "_base", "_calls", "_control", "_flag", "_instance", "_mode", "_reason", "_reply", "_stack",
        "arguments", "cpu_limit_us", "cpu_us", "ended", "fault_text", "kill_cpu_us", "loaded",
        "outbox", "pending", "responder", "stack_high", "state", "step", "suspended",
    )  # fmt: skip

    def __init__(
        self,
        loaded: Loaded,
        state: State | None = None,
        *,
        image: Image | None = None,
        arguments: tuple[int, ...] = (),
        responder: Callable[[Request], bytes] | None = None,
        cpu_limit_us: int = CPU_LIMIT_US,
    ) -> None:
        if image is not None:
            fits(image, loaded.identity)
        self.loaded = loaded
        self.state = state or State(argv=["agent"])
        self.arguments = arguments
        self.responder = responder
        self.outbox: list[Record] = []
        self.pending: Pending | None = None
        self.step = 0
        self.suspended = False
        self.cpu_us = 0
        self.cpu_limit_us = cpu_limit_us
        self.stack_high = 0
        self.fault_text: tuple[str, str] | None = None
        self.ended: Outcome | None = None
        self.kill_cpu_us: int | None = None
        self._mode = NORMAL
        self._reason = ""
        self._reply = b""
        self._calls = 0
        self._instance: Instance = loaded.program.instance()
        suspendable = loaded.program.suspendable
        memory = checks.MEMORY if checks.MEMORY in loaded.program.exports else "memory"
        self._base = memory if memory in loaded.program.exports else ""
        self._stack = self._instance.address(checks.STACK) if suspendable else 0
        control = self._instance.address(checks.CONTROL) if suspendable else 0
        self._control = control
        self._flag = ctypes.c_int32.from_address(control) if suspendable else ctypes.c_int32()
        if image is not None:
            self._put(image)

    # --- the slice ---

    @property
    def flag_address(self) -> int:
        """Where a 32-bit non-zero store stops the guest; valid only until `close`."""
        return self._control

    def ask_to_yield(self) -> None:
        """Yield at the next check; from the owner's thread or under the slot's lock."""
        self._flag.value = 1

    def prepare(self) -> None:
        """Clear the flag before the slot is published, so that no early stop is lost."""
        self._flag.value = 0
        self.kill_cpu_us = None

    def give_fuel(self, fuel: int) -> None:
        """Checks until the next yield, in the fuel variant."""
        ctypes.c_int64.from_address(self._control + checks.FUEL_AT).value = fuel

    def run(self, reply: bytes | None = None, *, at_ns: int | None = None) -> Outcome:
        """One slice: until the guest stops, waits or ends.

        Args:
            reply: For a waiting guest: the reply's JSON.
            at_ns: The reply's stamp; logical time jumps there, never back.

        Raises:
            ValueError: A reply without a wait, or the other way round, or the guest has ended.
        """
        if self.ended is not None:
            raise ValueError(f"the guest has ended: {self.ended}")
        if (reply is not None) is not (self.pending is not None):
            raise ValueError("a waiting guest continues with a reply, any other without")
        if reply is not None and len(reply) > abi.MAX_REPLY:
            raise ValueError(f"a reply of {len(reply)} bytes")
        self._reply = reply or b""
        self._calls = 0
        if at_ns is not None:
            self.state.clock_ns = max(self.state.clock_ns, at_ns)
        begun = cpu_us()
        outcome = self._slice()
        self.cpu_us += cpu_us() - begun
        if isinstance(outcome, Preempted | Waiting) and self.cpu_us >= self.cpu_limit_us:
            outcome = Trapped("limit", f"{self.cpu_limit_us / 1e6:g} s of compute are spent")
        if not isinstance(outcome, Preempted | Waiting):
            self.ended = outcome
        return outcome

    def _slice(self) -> Outcome:
        plan = self.loaded.plan
        while True:
            name = plan[self.step]
            last = self.step == len(plan) - 1
            if self.suspended:
                self.suspended = False
                self._mode = REWINDING
                self._asyncify(2)
            ended = self._instance.call(self, name, self.arguments if last else ())
            if self.fault_text is not None:
                return HostFault(*self.fault_text)
            if self.ended is not None:
                return self.ended
            if ended.trap:
                return self._trapped(ended)
            if self._mode == UNWINDING:
                return self._unwound()
            if self.loaded.throws and self._instance.bits(FLYING)[1]:
                return Trapped("exception", "an exception left the entry point")
            if last:
                return Finished(ended.values)
            self.step += 1

    def _unwound(self) -> Outcome:
        self._asyncify(0)
        self._mode = NORMAL
        if not STACK_AT <= self._saved() <= checks_stack_bytes(self._instance):
            return Trapped("astk", "the saved stack does not fit")
        self.suspended = True
        self.stack_high = max(self.stack_high, self._saved())
        if self._reason == "waiting" and self.pending is not None:
            return Waiting(self.pending.request)
        return Preempted()

    def _trapped(self, ended: Ended) -> Trapped:
        kind = "astk" if self._mode == UNWINDING else ended.trap
        # wasmtime tells the frames first, then what happened.
        said = ended.message.rpartition("wasm trap: ")[2].strip()
        return Trapped(kind, said.partition("\n")[0])

    def _begin_unwind(self, reason: str) -> None:
        self._reason = reason
        size = checks_stack_bytes(self._instance)
        ctypes.memmove(self._stack + STRUCT_AT, struct.pack("<II", STACK_AT, size), 8)
        self._asyncify(1)
        self._mode = UNWINDING

    def _asyncify(self, state: int) -> None:
        """Asyncify's state: 0 normal, 1 unwinding, 2 rewinding.

        Set as a global, not by its exports: a nested call needs native stack, which a guest
        stopped in its deepest frame does not have.
        """
        self._instance.set_bits(checks.STATE, 0, state)
        if state:
            self._instance.set_bits(checks.PLACE, 0, STRUCT_AT)

    def _saved(self) -> int:
        return int(ctypes.c_uint32.from_address(self._stack + STRUCT_AT).value)

    # --- what host functions use ---

    def read(self, at: int, size: int) -> bytes:
        """Bytes of the guest's memory."""
        if not self._base or at + size > self._instance.size(self._base):
            raise wasi.BadPointer
        return ctypes.string_at(self._instance.address(self._base) + at, size)

    def write(self, at: int, data: bytes) -> None:
        """Into the guest's memory."""
        if not self._base or at + len(data) > self._instance.size(self._base):
            raise wasi.BadPointer
        ctypes.memmove(self._instance.address(self._base) + at, data, len(data))

    def exit(self, code: int) -> int:
        """End the guest: unwound when it can be, cut off otherwise; never rewound."""
        self.ended = Exited(code)
        if self.loaded.program.suspendable:
            self._begin_unwind("exit")
            return 0
        return HALT

    def fault(self, name: str, problem: BaseException) -> None:
        """A host function failed."""
        self.fault_text = (name, f"{type(problem).__name__}: {problem}"[:500])

    def overdue(self) -> bool:
        """The flag went unanswered for too long, in CPU time of the owner thread."""
        return self.kill_cpu_us is not None and cpu_us() >= self.kill_cpu_us

    def yielded(self) -> None:
        """`sched.yield_`, which a check calls when the flag is set."""
        if self._mode == REWINDING:
            self._asyncify(0)
            self._mode = NORMAL
            return
        self._flag.value = 0
        self.kill_cpu_us = None
        self._begin_unwind("preempted")

    def served(self, answer: int | Pending) -> int:
        """An import answered, or must wait."""
        if isinstance(answer, int):
            return answer
        if self.responder is not None and not self.loaded.program.suspendable:
            return deliver(self, answer, self.responder(answer.request))
        self.pending = answer
        self._begin_unwind("waiting")
        return 0

    def returning(self) -> int | None:
        """At rewind, the answer of the import that waited; None when nothing is being rewound."""
        if self._mode != REWINDING:
            self._calls += 1
            if self._calls >= CALLS_A_SLICE:
                self._flag.value = 1
            return None
        self._asyncify(0)
        self._mode = NORMAL
        waited, self.pending = self.pending, None
        if waited is None:
            raise RuntimeError("rewound into an import that did not wait")
        return deliver(self, waited, self._reply)

    def over_budget(self, which: str) -> int:
        """End the guest: it went on after a budget's refusal."""
        self.ended = Trapped("limit", which)
        return HALT

    # --- capture and restore ---

    def capture(self) -> Image:
        """A copy of everything, to be encoded after the slot was handed over.

        Raises:
            ValueError: It is not at rest.
        """
        if not self.suspended or self.ended is not None:
            raise ValueError("only a stopped guest can be captured")
        instance = self._instance
        memory = b""
        if self._base:
            memory = ctypes.string_at(instance.address(self._base), instance.size(self._base))
        fuel = ctypes.c_int64.from_address(self._control + checks.FUEL_AT).value
        return Image(
            identity=self.loaded.identity,
            step=self.step,
            arguments=self.arguments,
            pending=self.pending,
            globals={name: instance.bits(name) for name in self.loaded.globals},
            memory=memory,
            stack=ctypes.string_at(self._stack, self._saved()),
            state=replace(
                self.state,
                fds={fd: list(entry) for fd, entry in self.state.fds.items()},
                local=deepcopy(self.state.local),
            ),
            cpu_us=self.cpu_us,
            fuel=fuel,
            stack_high=self.stack_high,
        )

    def memory(self) -> bytes:
        """A copy of the linear memory, also after the end."""
        if not self._base:
            return b""
        return ctypes.string_at(self._instance.address(self._base), self._instance.size(self._base))

    def _put(self, image: Image) -> None:  # noqa: C901  (one refusal a line)
        instance = self._instance
        if set(image.globals) != set(self.loaded.globals):
            raise SnapshotMismatch("it has other globals")
        if not 0 <= image.step < len(self.loaded.plan):
            raise SnapshotMismatch("it has other entry points")
        if not STACK_AT <= len(image.stack) <= instance.size(checks.STACK):
            raise SnapshotMismatch("its saved stack does not fit")
        saved = struct.unpack_from("<II", image.stack, STRUCT_AT)
        if saved != (len(image.stack), checks_stack_bytes(instance)):
            raise SnapshotMismatch("its saved stack is inconsistent")
        if image.memory or self._base:
            missing = len(image.memory) - instance.size(self._base)
            if missing < 0:
                raise SnapshotMismatch("its memory is smaller than the module's")
            try:
                if missing:
                    instance.grow(self._base, missing // 65_536)
            except MemoryError:
                raise SnapshotMismatch("its memory is larger than the module allows") from None
            self._fill(instance.address(self._base), image.memory)
        for name, (kind, bits) in image.globals.items():
            if instance.bits(name)[0] != kind:
                raise SnapshotMismatch("a global has another type")
            instance.set_bits(name, kind, bits)
        ctypes.memmove(self._stack, image.stack, len(image.stack))
        ctypes.c_int64.from_address(self._control + checks.FUEL_AT).value = image.fuel
        self.state = replace(
            image.state, fds={fd: list(entry) for fd, entry in image.state.fds.items()}
        )
        self.arguments, self.step = image.arguments, image.step
        self.pending, self.suspended = image.pending, True
        self.cpu_us, self.stack_high = image.cpu_us, image.stack_high

    @staticmethod
    def _fill(address: int, memory: bytes) -> None:
        """Write the pages that differ: what is only read stays without memory of its own."""
        now = ctypes.string_at(address, len(memory))
        for first, count, content in differing(memory, now):
            size = count * PAGE
            ctypes.memmove(address + first * PAGE, content or bytes(size), size)

    def close(self) -> None:
        """Free the instance now. The flag's address is dead afterwards."""
        self._flag = ctypes.c_int32()
        self._control = self._stack = 0
        self._instance.close()


def checks_stack_bytes(instance: Instance) -> int:
    """Bytes of `__astk`."""
    return instance.size(checks.STACK)
