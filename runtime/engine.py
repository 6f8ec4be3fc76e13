"""wasmtime behind one seat: configuration, programs, calls without exceptions, the kill switch.

wasmtime-py keeps the exception of a host callback in a module global that threads share
(measured: with callbacks raising in four threads, of 16,000 calls 68 exceptions surfaced in the
wrong thread and 143 were lost). So nothing of ours passes through its Python callbacks: host
functions are raw C callbacks made by `trampoline`, which catches everything, stores the fault in
the sandbox and answers with a trap; calls go through the C interface with prebuilt arguments,
which also halves their cost. This file uses wasmtime-py's private bindings and is bound to one
minor version of it.

A sandbox's callbacks are shared by all instances of a program (one Linker and one InstancePre: 41
us and 20 KB a sandbox against 779 us and 108 KB); they find their sandbox in a thread-local, set
for the duration of a call. One store is used by one thread at a time.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import platform
import resource
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import wasmtime
from wasmtime import _ffi as native

from runtime.errors import ModuleRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STACK_BYTES: Final = 4 << 20
"""Native stack of a guest: some 700 frames of JavaScript, whose interpreter's frame is large."""
THREAD_BYTES: Final = STACK_BYTES + (4 << 20)
"""Stack of a thread that runs guests: theirs, and ours above it."""
KINDS: Final = {0x7F: 0, 0x7E: 1, 0x7D: 2, 0x7C: 3}
"""Value type byte of the format to wasmtime's kind number."""
WIDTHS: Final = {0: 4, 1: 8, 2: 4, 3: 8}
TRAPS: Final = (
    "stack", "bounds", "misaligned", "table", "null-call", "signature", "overflow", "division",
    "conversion", "unreachable", "unresponsive", "fuel",
)  # fmt: skip
MASK32: Final = 0xFFFFFFFF

# The same library without giving up the interpreter lock, for calls too short to be worth it.
_quick = ctypes.PyDLL(str(native.filename))


def _bind(name: str) -> Any:  # noqa: ANN401  (a foreign function)
    there, here = getattr(native.dll, name), getattr(_quick, name)
    here.restype, here.argtypes = there.restype, there.argtypes
    return here


_export_get = _bind("wasmtime_instance_export_get")
_memory_data = _bind("wasmtime_memory_data")
_memory_size = _bind("wasmtime_memory_data_size")
_global_get = _bind("wasmtime_global_get")
_global_set = _bind("wasmtime_global_set")
_call = native.dll.wasmtime_func_call
_async_stack_size = native.dll.wasmtime_config_async_stack_size_set
_async_stack_size.restype = None
_async_stack_size.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_no_finalizer = ctypes.cast(0, ctypes.CFUNCTYPE(None, ctypes.c_void_p))
_deadline_callback = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.POINTER(native.wasmtime_context_t),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint8),
)

VERSION: Final = importlib.metadata.version("wasmtime")


def room_on_main_thread() -> None:
    """The main thread's stack may grow to what a guest on it can ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if 0 <= soft < THREAD_BYTES:
        most = THREAD_BYTES if hard < 0 else min(THREAD_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (most, hard))


class Running(Protocol):
    """What callbacks need of the sandbox on this thread."""

    def fault(self, name: str, problem: BaseException) -> None:
        """A callback failed: our defect, to be reported when the call ends."""
        ...

    def overdue(self) -> bool:
        """The kill time has passed."""
        ...


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code, with the configuration of wasmtime it belongs to."""

    module: wasmtime.Module
    raw: wasmtime.Engine

    def serialize(self) -> bytes:
        """For `Engine.load`, on this node only."""
        return bytes(self.module.serialize())


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended: raw result bits, or a trap's kind and text."""

    values: tuple[int, ...] = ()
    trap: str = ""
    message: str = ""


class Engine:
    """Two configurations of wasmtime, alike but for Cranelift's optimizer.

    Without it the one huge function of an interpreter comes out much better once it can be
    suspended: hundreds of locals that Asyncify saves are then not kept alive across it (QuickJS
    calls: 2.7 times the plain CPU instead of 4.9, and 5.5 KB of native stack a frame instead of
    9.4). Small kernels want it. A recipe says which.

    Args:
        canonical_nan: One bit pattern for every NaN, for fleets of mixed processors.
        reservation: Address space a memory, so that growing never moves it.
        interruptible: Checks for the kill switch (1-19 % of CPU).
    """

    def __init__(
        self,
        *,
        canonical_nan: bool = False,
        reservation: int = 64 << 20,
        interruptible: bool = True,
    ) -> None:
        self._reservation = reservation
        self.canonical_nan = canonical_nan
        self.interruptible = interruptible
        self.settings = f"nan={canonical_nan},reserve={reservation},epoch={interruptible}"
        self._raw = {wanted: wasmtime.Engine(self._config(wanted)) for wanted in (True, False)}
        self.local = threading.local()
        self._kill = _deadline_callback(self._overdue)

    def _config(self, optimize: bool) -> wasmtime.Config:  # noqa: FBT001  (a key of two)
        config = wasmtime.Config()
        config.wasm_multi_memory = True
        config.wasm_relaxed_simd = False
        config.wasm_threads = False
        config.wasm_tail_call = False
        config.wasm_component_model = False
        config.wasm_exceptions = True
        config.epoch_interruption = self.interruptible
        # No guest runs on such a stack, but wasmtime wants it as large as the other one.
        _async_stack_size(config.ptr(), STACK_BYTES)
        config.max_wasm_stack = STACK_BYTES
        config.memory_reservation = self._reservation
        config.memory_guard_size = 64 << 10
        config.memory_reservation_for_growth = 0
        config.memory_may_move = False
        config.parallel_compilation = False
        config.cranelift_nan_canonicalization = self.canonical_nan
        config.cranelift_opt_level = "speed" if optimize else "none"
        return config

    def tick(self) -> None:
        """Advance the epoch: running guests consult their kill time."""
        for raw in self._raw.values():
            raw.increment_epoch()

    def native_key(self, module_hash: str, *, optimize: bool = True) -> str:
        """The name of this module's machine code for this engine, here."""
        settings = f"{self.settings},stack={STACK_BYTES},optimize={optimize}"
        text = f"{module_hash}|{VERSION}|{settings}|{platform.machine()}|{_processor()}"
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    def compile(self, wasm: bytes, *, optimize: bool = True) -> Compiled:
        """Machine code of a module.

        Raises:
            ModuleRefused: `compile_failed`, wasmtime's own words.
        """
        try:
            return Compiled(wasmtime.Module(self._raw[optimize], wasm), self._raw[optimize])
        except wasmtime.WasmtimeError as error:
            raise ModuleRefused("compile_failed", _first_line(error)) from None

    @staticmethod
    def assemble(text: str) -> bytes:
        """A module written as text.

        Raises:
            ModuleRefused: `malformed`, wasmtime's own words.
        """
        try:
            return bytes(wasmtime.wat2wasm(text))
        except wasmtime.WasmtimeError as error:
            raise ModuleRefused("malformed", _first_line(error)) from None

    def validate(self, wasm: bytes) -> str | None:
        """None when wasmtime accepts the module, else its reason."""
        try:
            wasmtime.Module.validate(self._raw[True], wasm)
        except wasmtime.WasmtimeError as error:
            return _first_line(error)
        return None

    def load(self, machine_code: bytes, *, optimize: bool = True) -> Compiled:
        """Machine code that *this node* made, its keyed hash verified: it is executed as is.

        Raises:
            ModuleRefused: wasmtime does not take it; compile again.
        """
        try:
            module = wasmtime.Module.deserialize(self._raw[optimize], machine_code)
        except wasmtime.WasmtimeError as error:
            raise ModuleRefused("compile_failed", _first_line(error)) from None
        return Compiled(module, self._raw[optimize])

    def store(self, raw: wasmtime.Engine) -> wasmtime.Store:
        """A store whose guests can be killed."""
        store = wasmtime.Store(raw)
        if self.interruptible:
            native.dll.wasmtime_context_set_epoch_deadline(store._context(), 1)  # noqa: SLF001
            native.dll.wasmtime_store_epoch_deadline_callback(
                store.ptr(), self._kill, None, _no_finalizer
            )
        return store

    def _overdue(self, _context: object, _data: object, delta: Any, kind: Any) -> int:  # noqa: ANN401
        """One tick more, or the end; an exception here would be swallowed."""
        try:
            sandbox: Running | None = getattr(self.local, "sandbox", None)
            if sandbox is None or not sandbox.overdue():
                delta[0] = 1
                kind[0] = 0
                return 0
        except BaseException:  # noqa: BLE001, S110  (must never raise across the boundary)
            pass
        error = native.dll.wasmtime_error_new(ctypes.create_string_buffer(b"unresponsive"))
        return ctypes.cast(error, ctypes.c_void_p).value or 0


def _processor() -> str:
    """Processor features as the system names them; machine code may use any of them."""
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123  (read line by line)
            found = [line for line in lines if line.startswith(("flags", "Features"))]
    except OSError:
        found = []
    text = found[0] if found else platform.processor()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3])[:400]


Handler = "Callable[..., int | None]"


class Program:
    """A compiled module whose imports are bound, shared by all its sandboxes.

    Args:
        engine: The engine that compiled it.
        code: Its machine code.
        handlers: (module, name) to a function of (sandbox, *unsigned arguments) answering an i32,
            or None for imports without a result. `HALT` ends the guest at once.
    """

    def __init__(
        self,
        engine: Engine,
        code: Compiled,
        handlers: Mapping[tuple[str, str], Callable[..., int | None]],
    ) -> None:
        self.engine = engine
        self.raw = code.raw
        module = code.module
        self.exports = {one.name for one in module.exports}
        self.suspendable = "asyncify_start_unwind" in self.exports
        linker = wasmtime.Linker(code.raw)
        self._keep: list[object] = []
        for one in module.imports:
            self._define(linker, one, handlers[one.module, one.name or ""])
        self._pre = linker.instantiate_pre(module)
        self.signatures = {
            one.name: one.type for one in module.exports if isinstance(one.type, wasmtime.FuncType)
        }

    def _define(
        self,
        linker: wasmtime.Linker,
        one: Any,  # noqa: ANN401  (wasmtime's import type)
        handler: Callable[..., int | None],
    ) -> None:
        callback = trampoline(self.engine.local, one.name, handler, one.type)
        self._keep.append(callback)
        where, name = one.module.encode(), one.name.encode()
        error = native.dll.wasmtime_linker_define_func(
            linker.ptr(),
            ctypes.create_string_buffer(where),
            len(where),
            ctypes.create_string_buffer(name),
            len(name),
            one.type.ptr(),
            callback,
            None,
            _no_finalizer,
        )
        if error:
            raise ModuleRefused("unsupported:unknown-import", f"{one.module}.{one.name}")

    def instance(self) -> Instance:
        """A fresh instance; no code of the guest has run."""
        return Instance(self, self._pre)


HALT: Final = -(1 << 40)
"""Answer of a handler: trap at once; why is in the sandbox."""


def trampoline(
    local: threading.local,
    name: str,
    handler: Callable[..., int | None],
    kind: Any,  # noqa: ANN401
) -> object:
    """The only way a function reaches a Linker: it never raises and answers its type."""
    wide = [str(one) == "i64" for one in kind.params]
    answers = len(kind.results) > 0

    def callback(_e: object, _c: object, arguments: Any, _n: int, results: Any, _m: int) -> int:  # noqa: ANN401
        value: int | None = HALT
        sandbox = getattr(local, "sandbox", None)
        try:
            value = handler(
                sandbox,
                *[
                    arguments[i].of.i64 if is_wide else arguments[i].of.i32 & MASK32
                    for i, is_wide in enumerate(wide)
                ],
            )
            if value != HALT:
                if answers:
                    results[0].kind = 0
                    results[0].of.i32 = value
                return 0
        except BaseException as problem:  # noqa: BLE001  (must never raise across the boundary)
            if sandbox is not None:
                sandbox.fault(name, problem)
        trap = native.dll.wasmtime_trap_new(ctypes.create_string_buffer(b"halt"), 4)
        return ctypes.cast(trap, ctypes.c_void_p).value or 0

    return native.wasmtime_func_callback_t(callback)


class Instance:
    """One instance in its own store: memories by address, calls, globals as raw bits."""

    __slots__ = (
        "_context", "_externs", "_instance", "_memories", "_trap", "program", "store",
    )  # fmt: skip

    def __init__(self, program: Program, pre: wasmtime.InstancePre) -> None:
        self.program = program
        self.store = program.engine.store(program.raw)
        self._context = self.store._context()  # noqa: SLF001
        self._instance = native.wasmtime_instance_t()
        self._trap = ctypes.POINTER(native.wasm_trap_t)()
        self._externs: dict[str, Any] = {}
        self._memories: dict[str, int] = {}
        error = native.dll.wasmtime_instance_pre_instantiate(
            pre.ptr(), self._context, ctypes.byref(self._instance), ctypes.byref(self._trap)
        )
        if error:
            raise ModuleRefused("untestable", f"instantiation failed: {_take_error(error)}")
        if bool(self._trap):  # a null pointer is false
            raise ModuleRefused("untestable", f"instantiation trapped: {self._take_trap().trap}")

    def _extern(self, name: str) -> Any:  # noqa: ANN401  (a foreign structure)
        found = self._externs.get(name)
        if found is None:
            found = native.wasmtime_extern_t()
            raw = name.encode()
            if not _export_get(
                self._context, ctypes.byref(self._instance), ctypes.create_string_buffer(raw),
                len(raw), ctypes.byref(found),
            ):  # fmt: skip
                raise KeyError(name)
            self._externs[name] = found
        return found

    # --- memory ---

    def address(self, memory: str) -> int:
        """Host address of a memory; it never moves while the instance lives, and dies with it."""
        known = self._memories.get(memory)
        if known is None:
            data = _memory_data(self._context, ctypes.byref(self._extern(memory).of.memory))
            known = ctypes.cast(data, ctypes.c_void_p).value or 0
            self._memories[memory] = known
        return known

    def size(self, memory: str) -> int:
        """Bytes of a memory now."""
        return int(_memory_size(self._context, ctypes.byref(self._extern(memory).of.memory)))

    def grow(self, memory: str, pages: int) -> None:
        """Grow by so many pages of 64 KiB.

        Raises:
            MemoryError: Its maximum is smaller.
        """
        before = ctypes.c_uint64()
        error = native.dll.wasmtime_memory_grow(
            self._context, ctypes.byref(self._extern(memory).of.memory), pages, ctypes.byref(before)
        )
        if error:
            raise MemoryError(_take_error(error))

    # --- globals ---

    def bits(self, name: str) -> tuple[int, int]:
        """(kind, raw bits) of a global: a float through Python could lose a NaN's payload."""
        value = native.wasmtime_val_t()
        _global_get(self._context, ctypes.byref(self._extern(name).of.global_), ctypes.byref(value))
        return int(value.kind), _raw(value)

    def set_bits(self, name: str, kind: int, bits: int) -> None:
        """Set a global to these raw bits."""
        value = _value(kind, bits)
        error = _global_set(
            self._context, ctypes.byref(self._extern(name).of.global_), ctypes.byref(value)
        )
        if error:
            raise ValueError(_take_error(error))

    # --- calls ---

    def call(self, sandbox: Running, export: str, arguments: tuple[int, ...] = ()) -> Ended:
        """Call an export with raw argument bits; the interpreter lock is free inside."""
        kind = self.program.signatures[export]
        params = [KIND_OF[str(one)] for one in kind.params]
        if len(params) != len(arguments):
            raise ValueError(f"{export} takes {len(params)} arguments, not {len(arguments)}")
        passed = (native.wasmtime_val_t * max(1, len(params)))(
            *(_value(k, bits) for k, bits in zip(params, arguments, strict=True))
        )
        results = (native.wasmtime_val_t * max(1, len(kind.results)))()
        local = self.program.engine.local
        local.sandbox = sandbox
        try:
            error = _call(
                self._context, ctypes.byref(self._extern(export).of.func), passed, len(params),
                results, len(kind.results), ctypes.byref(self._trap),
            )  # fmt: skip
        finally:
            local.sandbox = None
        if error:
            text = _take_error(error)
            return Ended(trap="unresponsive" if "unresponsive" in text else "error", message=text)
        if bool(self._trap):
            return self._take_trap()
        return Ended(tuple(_raw(results[i]) for i in range(len(kind.results))))

    def _take_trap(self) -> Ended:
        trap, self._trap = self._trap, ctypes.POINTER(native.wasm_trap_t)()
        code = ctypes.c_uint8(255)
        known = native.dll.wasmtime_trap_code(trap, ctypes.byref(code))
        message = native.wasm_message_t()
        native.dll.wasm_trap_message(trap, ctypes.byref(message))
        text = ctypes.string_at(message.data, message.size).decode(errors="replace").rstrip("\0")
        native.dll.wasm_byte_vec_delete(ctypes.byref(message))
        native.dll.wasm_trap_delete(trap)
        kind = TRAPS[code.value] if known and code.value < len(TRAPS) else "other"
        if native.dll.wasmtime_context_has_exception(self._context):
            kind = "exception"
        return Ended(trap=kind, message=text[:2_000])

    def close(self) -> None:
        """Free the store now; addresses of its memories are dead afterwards."""
        self._externs.clear()
        self._memories.clear()
        self.store.close()


KIND_OF: Final = {"i32": 0, "i64": 1, "f32": 2, "f64": 3}


def _raw(value: Any) -> int:  # noqa: ANN401  (a foreign structure)
    if value.kind in (0, 2):
        return int(value.of.i32) & MASK32
    return int(value.of.i64) & (1 << 64) - 1


def _value(kind: int, bits: int) -> Any:  # noqa: ANN401  (a foreign structure)
    value: Any = native.wasmtime_val_t()
    value.kind = kind
    if WIDTHS[kind] == 4:
        value.of.i32 = bits & MASK32
    else:
        value.of.i64 = bits & (1 << 64) - 1
    return value


def _take_error(error: Any) -> str:  # noqa: ANN401  (a foreign pointer)
    message = native.wasm_name_t()
    native.dll.wasmtime_error_message(error, ctypes.byref(message))
    text = ctypes.string_at(message.data, message.size).decode(errors="replace")
    native.dll.wasm_byte_vec_delete(ctypes.byref(message))
    native.dll.wasmtime_error_delete(error)
    return text[:2_000]
