"""Registration: a plain module becomes a suspendable one, or gets one clear refusal.

Two bounded children do the work, each a fresh process in its own group, with limits on CPU, address
space and output, without inherited descriptors, killed at a deadline:

- `instrument`: decode, feature gate, checks, Asyncify. Binaryen aborts its process on bad input, so
  nothing else lives there.
- `prove`: wasmtime validation, self-test, compilation. It never loads Binaryen: machine code is
  written only by a process that parsed nothing with it.

What comes out is cached by the hash of everything it was made from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime import settings
from runtime.clock import cpu_us
from runtime.engine import Engine, room_on_main_thread
from runtime.errors import ModuleRefused
from runtime.hostcalls import ADAPTERS, SUSPENDING
from runtime.instrument import asyncify, checks, decode, exceptions
from runtime.instrument import module as form
from runtime.instrument.selftest import TEST_SECONDS, self_test
from runtime.sandbox import Loaded, load
from runtime.wasi import FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.engine import Compiled
    from runtime.instrument.cache import Cache

INSTRUMENTER: Final = "4"
"""Raised whenever a module would come out different: running tasks stay on their old one."""
CHILD_SECONDS: Final = 300
CHILD_CPU: Final = 120
CHILD_BYTES: Final = 2 << 30
CHILD_OUTPUT: Final = 64 << 20
STAGES: Final = ("read", "decode", "checks", "asyncify", "validate", "compile", "self-test", "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a module is registered; part of its key.

    Attributes:
        main: Entry export; "" takes `_start`, else `run`.
        arguments: Raw bits passed to it by the self-test.
        argv, files: What the self-test's guest sees.
        variant: `flag` or `fuel`.
        cpu_seconds, memory_pages: Bounds that a recipe may raise.
        test_seconds: CPU seconds after which a self-test that has not ended is given up.
        optimize: By Cranelift; see `Engine`.
        stack_pages: Pages of C stack with a floor; see `stack.py`.
    """

    main: str = ""
    arguments: tuple[int, ...] = ()
    argv: tuple[str, ...] = ("agent",)
    files: dict[str, str] = field(default_factory=dict)
    variant: str = "flag"
    cpu_seconds: int = CHILD_CPU
    memory_pages: int = 1_024
    test_seconds: int = TEST_SECONDS
    optimize: bool = True
    stack_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A module that can be suspended.

    Attributes:
        plain_hash, module_hash: BLAKE2b-256 of what came in and went out.
        main: Entry export.
        variant: Of its checks.
        wasm: The instrumented module.
        report: Counts, stages with CPU seconds, self-test.
        optimize: How its machine code is made.
    """

    plain_hash: str
    module_hash: str
    main: str
    variant: str
    wasm: bytes = field(repr=False)
    report: dict[str, Any]
    optimize: bool = True


def key_of(plain_hash: str, options: Options, backend: str) -> str:
    """The cache key: everything the result depends on."""
    made_from = [plain_hash, INSTRUMENTER, backend, asdict(options)]
    return hashlib.blake2b(
        json.dumps(made_from, sort_keys=True).encode(), digest_size=32
    ).hexdigest()


def register(
    plain: bytes,
    cache: Cache,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Registered:
    """The suspendable form of a module, from the cache or made now.

    Raises:
        ModuleRefused: Why not, and where.
    """
    options = options or Options()
    tell = progress or (lambda _stage: None)
    tell("read")
    most = form.Limits().module_bytes
    if len(plain) > most:
        raise ModuleRefused("too_large", f"{len(plain)} bytes; {most} are allowed")
    plain_hash = hashlib.blake2b(plain, digest_size=32).hexdigest()
    key = key_of(plain_hash, options, asyncify.version())
    if (known := _cached(cache, key)) is not None:
        tell("done")
        return known
    with cache.turn(key):
        # Another process may have made it while this one waited.
        made = _cached(cache, key) or _made(plain, plain_hash, cache, options, tell)
    tell("done")
    return made


def _made(
    plain: bytes, plain_hash: str, cache: Cache, options: Options, tell: Callable[[str], None]
) -> Registered:
    """The two children's work, kept in the cache."""
    backend = asyncify.version()
    (cache.folder / "jobs").mkdir(exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache.folder / "jobs") as name:
        folder = Path(name)
        (folder / "plain.wasm").write_bytes(plain)
        (folder / "job.json").write_text(json.dumps({**asdict(options), "plain_hash": plain_hash}))
        report = _child("instrument", folder, options, tell)
        report |= _child("prove", folder, options, tell)
        wasm = (folder / "out.wasm").read_bytes()
        machine_code = (folder / "out.cwasm").read_bytes()
    module_hash = hashlib.blake2b(wasm, digest_size=32).hexdigest()
    made = Registered(
        plain_hash=plain_hash,
        module_hash=module_hash,
        main=report.pop("main"),
        variant=options.variant,
        wasm=wasm,
        report={**report, "backend": backend, "instrumenter": INSTRUMENTER},
        optimize=options.optimize,
    )
    head = {name: getattr(made, name) for name in made.__slots__ if name != "wasm"}
    text = json.dumps(head).encode()
    key = key_of(plain_hash, options, backend)
    cache.put("module", key, len(text).to_bytes(4, "little") + text + wasm)
    cache.put("native", Engine().native_key(module_hash, optimize=options.optimize), machine_code)
    return made


def _cached(cache: Cache, key: str) -> Registered | None:
    content = cache.get("module", key)
    if content is None:
        return None
    size = int.from_bytes(content[:4], "little")
    head = json.loads(content[4 : 4 + size])
    if {*head, "wasm"} != set(Registered.__slots__):
        return None  # another release keeps its modules here too
    return Registered(wasm=content[4 + size :], **head)


def find(cache: Cache, module_hash: str) -> Registered | None:
    """The registered module of that hash: what a snapshot names."""
    for key in cache.entries("module"):
        known = _cached(cache, key)
        if known is not None and known.module_hash == module_hash:
            return known
    return None


def compiled(made: Registered, engine: Engine, cache: Cache) -> Compiled:
    """Machine code of a registered module: from this node's cache, or compiled now.

    Raises:
        ModuleRefused: `compile_failed`.
    """
    key = engine.native_key(made.module_hash, optimize=made.optimize)
    content = cache.get("native", key)
    if content is not None:
        with contextlib.suppress(ModuleRefused):
            return engine.load(content, optimize=made.optimize)
    code = engine.compile(made.wasm, optimize=made.optimize)
    cache.put("native", key, code.serialize())
    return code


def loaded(made: Registered, engine: Engine, cache: Cache) -> Loaded:
    """A registered module ready to make sandboxes."""
    return load(
        engine,
        compiled(made, engine, cache),
        plain_hash=made.plain_hash,
        module_hash=made.module_hash,
        main=made.main,
        variant=made.variant,
    )


# --- the parent's side ----------------------------------------------------------------------------


def _child(
    stage: str, folder: Path, options: Options, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run one bounded child to its end; its report.

    Raises:
        ModuleRefused: The child's own refusal, or how it died.
    """
    command = [sys.executable, "-m", "runtime.instrument.register", stage, str(folder)]
    root = Path(__file__).resolve().parents[2]
    environment = settings.child_environment()
    environment["PYTHONPATH"] = os.pathsep.join(
        one for one in (str(root), environment.get("PYTHONPATH", "")) if one
    )
    with (folder / f"{stage}.err").open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603  (our own module, no shell)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        timer = threading.Timer(
            max(CHILD_SECONDS, options.cpu_seconds * 2), _kill_group, (process.pid,)
        )
        timer.start()
        last, refused = "start", None
        try:
            for line in process.stdout or ():
                row = _row(line)
                if "stage" in row:
                    last = str(row["stage"])
                    tell(last)
                refused = row.get("refused", refused)
        finally:
            timer.cancel()
            if process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                _kill_group(process.pid)
            process.wait()
            if process.stdout:
                process.stdout.close()
    if refused is not None:
        raise ModuleRefused(
            refused["code"],
            refused["sentence"],
            function=refused["function"],
            offset=refused["offset"],
        )
    if process.returncode != 0:
        raise _death(stage, last, process.returncode, folder / f"{stage}.err")
    return dict(json.loads((folder / f"{stage}.json").read_text()))


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _death(stage: str, last: str, status: int, errors: Path) -> ModuleRefused:
    text = errors.read_bytes()[-2_000:].decode(errors="replace").strip()
    said = "; ".join(line.strip() for line in text.splitlines()[-3:])
    name = signal.Signals(-status).name if status < 0 else f"status {status}"
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and not said):
        said = "it took more time than is allowed"
    code = "instrumentation_failed" if stage == "instrument" else "compile_failed"
    return ModuleRefused(code, f"{last} ended with {name}: {said or 'no words'}"[:600])


# --- the child's side -----------------------------------------------------------------------------


def _say(**row: object) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def _bound(cpu_seconds: int) -> None:
    """Limits of this process; called before a byte of the module is read."""
    for what, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, CHILD_BYTES),
        (resource.RLIMIT_FSIZE, CHILD_OUTPUT),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))
    room_on_main_thread()


def _instrument(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    plain = (folder / "plain.wasm").read_bytes()
    limits = form.Limits(memory_pages=job["memory_pages"])
    _say(stage="decode")
    module = decode.decode(plain, limits)
    (folder / "reference.wasm").write_bytes(checks.reference(module))
    if any(one.name == exceptions.FLYING for one in module.exports):
        raise ModuleRefused(
            "unsupported:reserved-name", f"the export {exceptions.FLYING!r} is the host's"
        )
    if "exceptions" in module.features:
        module = decode.decode(exceptions.lower(module), limits)
    checks.gate(module, adapters=ADAPTERS, wasi=frozenset(FUNCTIONS))
    problem = Engine().validate(plain)
    if problem:
        raise ModuleRefused("malformed", f"wasmtime: {problem}")
    main = _main(module, job)
    _say(stage="checks")
    checked = checks.instrument(
        module, variant=job["variant"], limits=limits, stack_pages=job["stack_pages"]
    )
    suspending = [f"{checks.YIELD_MODULE}.{checks.YIELD_NAME}"] + [
        f"{one.module}.{one.name}" for one in module.imports if (one.module, one.name) in SUSPENDING
    ]
    _say(stage="asyncify")
    begun = cpu_us()
    wasm = asyncify.asyncify(checked.wasm, tuple(suspending))
    (folder / "out.wasm").write_bytes(wasm)
    return {
        "main": main,
        "functions": checked.functions,
        "checks": checked.checks,
        "cyclic": checked.cyclic,
        "bytes_plain": len(plain),
        "bytes_out": len(wasm),
        "asyncify_cpu_s": round((cpu_us() - begun) / 1e6, 2),
    }


def _main(module: form.Module, job: dict[str, Any]) -> str:
    """The entry export: as told, or the usual one."""
    functions = {one.name: one.index for one in module.exports if one.kind == 0}
    wanted = [job["main"]] if job["main"] else ["_start", "run"]
    name = next((one for one in wanted if one in functions), None)
    if name is None:
        raise ModuleRefused(
            "untestable",
            f"no function {' or '.join(map(repr, wanted))} is exported; name the entry",
        )
    if not set(module.type_of(functions[name]).params) <= form.NUMERIC:
        raise ModuleRefused("untestable", f"{name!r} takes more than numbers")
    return name


def _prove(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    wasm = (folder / "out.wasm").read_bytes()
    engine = Engine()
    _say(stage="validate")
    problem = engine.validate(wasm)
    if problem:
        raise ModuleRefused("invalid_output", f"our own output is invalid: {problem}")
    _say(stage="compile")
    begun = cpu_us()
    code = engine.compile(wasm, optimize=job["optimize"])
    spent = cpu_us() - begun
    (folder / "out.cwasm").write_bytes(code.serialize())
    _say(stage="self-test")
    main = json.loads((folder / "instrument.json").read_text())["main"]
    names = {"plain_hash": job["plain_hash"], "module_hash": "self-test"}
    plain = engine.compile((folder / "reference.wasm").read_bytes())
    report = self_test(
        load(engine, plain, main=main, **names),
        load(engine, code, main=main, variant=job["variant"], **names),
        argv=job["argv"],
        files={path: text.encode() for path, text in job["files"].items()},
        arguments=tuple(job["arguments"]),
        seconds=job["test_seconds"],
    )
    return {"compile_cpu_s": round(spent / 1e6, 2), "self_test": report}


def main(arguments: list[str]) -> int:
    """The child: stage and folder; progress and refusals as JSON lines."""
    stage, folder = arguments[0], Path(arguments[1])
    job = json.loads((folder / "job.json").read_text())
    _bound(int(job["cpu_seconds"]))
    try:
        report = (_instrument if stage == "instrument" else _prove)(folder, job)
    except ModuleRefused as refused:
        _say(
            refused={
                "code": refused.code,
                "sentence": refused.sentence,
                "function": refused.function,
                "offset": refused.offset,
            }
        )
        return 0
    (folder / f"{stage}.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
