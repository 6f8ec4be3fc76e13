"""Binaryen's Asyncify: a checked module becomes one that can unwind its stack and rewind it.

`asyncify` calls libbinaryen (PyPI `icpp-binaryen`) through ctypes **in this process**. On bad input
Binaryen aborts the process and on large input it takes gigabytes, so only the bounded child of
`register.py` may call it. An unknown pass argument is silently ignored by Binaryen, therefore the
result is inspected: it must export Asyncify's four functions and hold one more memory, of the size
asked for, which is then exported as `__astk`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Final

from runtime.errors import ModuleRefused
from runtime.instrument import checks
from runtime.instrument import module as form

STACK_PAGES: Final = 65
"""Native stack limit (4 MiB) plus a page: a saved frame was never larger than its native one."""
DISTRIBUTION: Final = "icpp-binaryen"
EXPORTS: Final = tuple(
    f"asyncify_{verb}_{what}" for verb in ("start", "stop") for what in ("unwind", "rewind")
)


class _Written(ctypes.Structure):
    _fields_ = (("binary", ctypes.c_void_p), ("size", ctypes.c_size_t), ("map", ctypes.c_void_p))


def version() -> str:
    """Name and version of the backend, part of the cache key.

    Raises:
        ModuleRefused: `instrumentation_failed`, when it is not installed.
    """
    try:
        return f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}"
    except importlib.metadata.PackageNotFoundError:
        raise ModuleRefused(
            "instrumentation_failed",
            "Binaryen is not installed: pip install 'tidegate[worker]' (glibc 2.35 or newer)",
        ) from None


def _library() -> ctypes.CDLL:
    version()
    found = importlib.util.find_spec("icpp_binaryen")
    if found is None or found.origin is None:
        raise ModuleRefused("instrumentation_failed", "the package icpp_binaryen has no files")
    library = ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libbinaryen.so"))
    pointer = ctypes.c_void_p
    library.BinaryenModuleRead.restype = pointer
    library.BinaryenModuleRead.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.BinaryenFeatureAll.restype = ctypes.c_uint32
    library.BinaryenModuleSetFeatures.argtypes = [pointer, ctypes.c_uint32]
    library.BinaryenModuleRunPasses.argtypes = [
        pointer, ctypes.POINTER(ctypes.c_char_p), ctypes.c_uint32,
    ]  # fmt: skip
    library.BinaryenModuleOptimize.argtypes = [pointer]
    library.BinaryenModuleValidate.argtypes = [pointer]
    library.BinaryenModuleValidate.restype = ctypes.c_bool
    library.BinaryenSetPassArgument.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.BinaryenModuleAllocateAndWrite.argtypes = [pointer, ctypes.c_char_p]
    library.BinaryenModuleAllocateAndWrite.restype = _Written
    return library


def asyncify(wasm: bytes, suspending: tuple[str, ...], *, level: int = 1) -> bytes:
    """The module with Asyncify applied and its stack exported as `__astk`.

    Args:
        wasm: Checked and valid: Binaryen aborts the process otherwise.
        suspending: Imports that may suspend, each `module.name`.
        level: Binaryen's optimization level; without any, code grows four times.

    Raises:
        ModuleRefused: `instrumentation_failed`.
    """
    library = _library()
    library.BinaryenSetOptimizeLevel(level)
    library.BinaryenSetShrinkLevel(0)
    library.BinaryenClearPassArguments()
    for key, value in (
        ("asyncify-imports", ",".join(suspending)),
        ("asyncify-in-secondary-memory", "1"),
        ("asyncify-secondary-memory-size", str(STACK_PAGES)),
    ):
        library.BinaryenSetPassArgument(key.encode(), value.encode())
    source = ctypes.create_string_buffer(wasm, len(wasm))
    module = library.BinaryenModuleRead(source, len(wasm))
    library.BinaryenModuleSetFeatures(module, library.BinaryenFeatureAll())
    library.BinaryenModuleRunPasses(module, (ctypes.c_char_p * 1)(b"asyncify"), 1)
    library.BinaryenModuleOptimize(module)
    written = library.BinaryenModuleAllocateAndWrite(module, None)
    result = ctypes.string_at(written.binary, written.size)
    memories = len(decode_memories(wasm))
    return export_stack(result, memories)


def decode_memories(wasm: bytes) -> list[form.Memory]:
    """Limits of the module's own memories."""
    for ident, payload in _sections(wasm):
        if ident == form.MEMORY:
            reader = form.Reader(payload)
            found = []
            for _ in range(reader.u32()):
                flags = reader.byte()
                minimum = reader.u32()
                found.append(form.Memory(minimum, reader.u32() if flags & 1 else None))
            return found
    return []


def _sections(wasm: bytes) -> list[tuple[int, bytes]]:
    reader, out = form.Reader(wasm, 8), []
    while not reader.done():
        ident = reader.byte()
        out.append((ident, reader.take(reader.u32())))
    return out


def _globals(sections: dict[int, bytes], exports: bytes) -> tuple[int, int]:
    """Indices of Asyncify's state and data, read from its own entry points.

    The host sets these globals instead of calling the entry points: a nested call needs native
    stack, which a guest preempted in its deepest frame does not have, so that being preempted
    there would have killed it.
    """
    reader, found = form.Reader(exports), {}
    for _ in range(reader.u32()):
        name, kind, index = reader.name(), reader.byte(), reader.u32()
        if kind == 0:
            found[name] = index
    imports = form.Reader(sections.get(form.IMPORT, b"\0"))
    # All imports of an instrumented module are functions; the gate saw to it.
    code = form.Reader(sections[form.CODE])
    bodies = [code.take(code.u32()) for _ in range(code.u32())]
    first = imports.u32()
    begin = bodies[found["asyncify_start_unwind"] - first]
    end = bodies[found["asyncify_stop_unwind"] - first]
    match = _BEGIN.match(begin)
    if match is None:
        raise ModuleRefused("instrumentation_failed", "Asyncify's entry point has another shape")
    state, place = (form.Reader(one).u32() for one in match.groups())
    if not end.startswith(b"\0\x41\0\x24" + form.uleb(state)):
        raise ModuleRefused("instrumentation_failed", "Asyncify's end has another shape")
    return state, place


_BEGIN: Final = re.compile(
    rb"\x00\x41\x01\x24([\x80-\xff]{0,4}[\x00-\x7f])\x20\x00\x24([\x80-\xff]{0,4}[\x00-\x7f])",
    re.DOTALL,
)
"""No locals; state = 1; data = the argument."""


def export_stack(wasm: bytes, memories: int) -> bytes:
    """Asyncify's output with its memory exported; custom sections are dropped.

    Args:
        wasm: What Binaryen wrote.
        memories: How many memories went in; Asyncify's is the one after them.

    Raises:
        ModuleRefused: `instrumentation_failed`: the pass did not do what was asked.
    """
    found = decode_memories(wasm)
    sections = [(ident, payload) for ident, payload in _sections(wasm) if ident]
    exports = dict(sections).get(form.EXPORT, b"\0")
    missing = [name for name in EXPORTS if name.encode() not in exports]
    if len(found) != memories + 1 or missing:
        raise ModuleRefused("instrumentation_failed", "Asyncify made no stack or no entry points")
    if found[-1].minimum != STACK_PAGES:
        raise ModuleRefused("instrumentation_failed", "Asyncify's stack has another size")
    state, place = _globals(dict(sections), exports)
    reader = form.Reader(exports)
    count = reader.u32()
    grown = form.uleb(count + 3) + exports[reader.at :]
    for name, kind, index in (
        (checks.STACK, 2, memories),
        (checks.STATE, 3, state),
        (checks.PLACE, 3, place),
    ):
        grown += form.uleb(len(name)) + name.encode() + bytes([kind]) + form.uleb(index)
    return form.encode(
        [(ident, grown if ident == form.EXPORT else payload) for ident, payload in sections]
    )
