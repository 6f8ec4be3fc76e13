"""`python -m runtime`: what an author does on their own machine, without a task store.

    register FILE [--main NAME] [--arg N]... [--variant flag|fuel]
    run FILE [--input JSON] [--tier T] [--model NAME] [--suspend-after MS] [--out FILE]
    resume FILE [--suspend-after MS] [--out FILE]
    guest install NAME [--from FILE] | guest list | guest notices
    logs [TASK] [--follow]

Every command takes `--json`: one JSON object a line on standard output. `tidegate agent …` and
`tidegate guest …` hand their arguments to this program unchanged. Exit status: 0 as asked (a
suspension included), 1 the agent failed, 2 refused or wrong usage with one sentence on standard
error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime import local, settings, snapshot
from runtime.clock import sleep
from runtime.engine import Engine, room_on_main_thread
from runtime.errors import SandboxError, SnapshotMismatch
from runtime.guests import shelf
from runtime.instrument import register
from runtime.instrument.cache import Cache
from runtime.instrument.module import MAGIC, Limits
from runtime.outbound import Caller
from runtime.sandbox import CPU_LIMIT_US, Sandbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.abi import State
    from runtime.sandbox import Loaded

MAX_SCRIPT: Final = 1 << 20
MAX_SNAPSHOT: Final = 256 << 20
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
TIERS: Final = ("T0", "T1", "T2", "T3")


class Usage(SandboxError):
    """The command cannot be carried out as given."""

    code = "usage"


@dataclass(frozen=True, slots=True)
class Room:
    """What the commands share."""

    settings: settings.Settings
    cache: Cache
    as_json: bool

    def say(self, text: str, **fields: object) -> None:
        """A result: one line for people or one object for programs."""
        line = json.dumps(fields, ensure_ascii=False) if self.as_json else text
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def progress(self, stage: str) -> None:
        """A progress bar on standard error, on a terminal only."""
        if not sys.stderr.isatty() or self.as_json:
            return
        stages = register.STAGES
        done = stages.index(stage) if stage in stages else 0
        bar = "#" * (done * 3) + "." * ((len(stages) - 1 - done) * 3)
        sys.stderr.write(f"\r[{bar}] {stage:10}" + ("\n" if stage == "done" else ""))
        sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    options = parser().parse_args(argv)
    room_on_main_thread()
    try:
        read = settings.from_environment()
        room = Room(read, Cache(read.cache_dir), options.json)
        return int(options.run(room, options))
    except SandboxError as error:
        name = getattr(options, "file", None)
        where = f"{Path(name).name}: refused, " if name and not isinstance(error, Usage) else ""
        sys.stderr.write(f"tidegate: {where}{error}\n")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The command line."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="one JSON object a line")
    top = argparse.ArgumentParser(prog="tidegate agent", description=__doc__.partition("\n")[0])
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser(
        "register", parents=[shared], help="make a module or script suspendable"
    )
    one.add_argument("file")
    one.add_argument("--name", default="", help="what to call it in the output")
    one.add_argument("--main", default="", help="entry export (default _start, else run)")
    one.add_argument("--arg", type=int, action="append", default=[], help="argument of the entry")
    one.add_argument("--variant", choices=("flag", "fuel"), default="flag")
    one.set_defaults(run=run_register)

    one = commands.add_parser("run", parents=[shared], help="run an agent in the foreground")
    one.add_argument("file")
    one.add_argument(
        "--input", default="null", help="JSON, or a file of it, or - for standard input"
    )
    one.add_argument("--tier", choices=TIERS, default="")
    one.add_argument("--model", default="", help="for calls that name none (TIDEGATE_MODEL)")
    one.add_argument("--main", default="")
    one.add_argument("--arg", type=int, action="append", default=[])
    _suspending(one)
    one.set_defaults(run=run_agent)

    one = commands.add_parser("resume", parents=[shared], help="continue from a snapshot file")
    one.add_argument("file")
    _suspending(one)
    one.set_defaults(run=run_resume)

    guest = commands.add_parser("guest", help="interpreters on this machine")
    guests = guest.add_subparsers(dest="what", required=True, metavar="WHAT")
    one = guests.add_parser("install", parents=[shared], help="fetch, verify and register")
    one.add_argument("name")
    one.add_argument("--from", dest="source", help="a wheel or module already here")
    one.set_defaults(run=run_install)
    one = guests.add_parser("list", parents=[shared], help="what there is")
    one.set_defaults(run=run_guests)
    one = guests.add_parser("notices", parents=[shared], help="what an image must carry")
    one.set_defaults(run=run_notices)

    one = commands.add_parser("logs", parents=[shared], help="output and calls of a local run")
    one.add_argument("task", nargs="?", default="")
    one.add_argument("--follow", action="store_true")
    one.set_defaults(run=run_logs)
    return top


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _suspending(one: argparse.ArgumentParser) -> None:
    one.add_argument("--suspend-after", type=float, metavar="MS", help="suspend after so long")
    one.add_argument("--out", default="", help="where the snapshot goes (default TASK.tgsn)")
    one.add_argument(
        "--cpu-limit", type=_seconds, default=CPU_LIMIT_US / 1e6, metavar="S",
        help="seconds of compute in all, before and after suspensions (default %(default)g)",
    )  # fmt: skip


# --- register and guests --------------------------------------------------------------------------


def read_file(name: str, most: int) -> bytes:
    """A bounded file.

    Raises:
        Usage: It is absent, unreadable or too large.
    """
    try:
        with Path(name).open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise Usage(f"{name} cannot be read: {error.strerror}") from None
    if len(content) > most:
        raise Usage(f"{name} is larger than {most} bytes")
    return content


def read_script(name: str) -> str:
    """A script's text."""
    try:
        return read_file(name, MAX_SCRIPT).decode()
    except UnicodeDecodeError:
        raise Usage(f"{name} is not UTF-8") from None


def read_module(name: str) -> bytes:
    """A module, or its text form when the name ends in `.wat`."""
    if name.endswith(".wat"):
        return Engine.assemble(read_script(name))
    content = read_file(name, Limits().module_bytes)
    if not content.startswith(MAGIC[:4]):
        known = ", ".join(one for recipe in shelf.RECIPES.values() for one in recipe.suffixes)
        raise Usage(f"{name} is no WebAssembly module; scripts end in {known}")
    return content


def ready_guest(room: Room, name: str, engine: Engine) -> shelf.Guest:
    """An installed interpreter, installed now at its first use."""
    recipe = shelf.recipe(name)
    if recipe.experimental:
        sys.stderr.write(f"tidegate: {name} is experimental: {recipe.experimental}\n")
    if not shelf.installed(name, room.cache):
        shelf.install(name, room.cache, progress=room.progress)
    return shelf.ready(name, engine, room.cache)


def _arguments(options: argparse.Namespace) -> tuple[int, ...]:
    return tuple(one & (1 << 64) - 1 for one in options.arg)


def run_register(room: Room, options: argparse.Namespace) -> int:
    """A module through all stages, or a script through its self-test."""
    recipe = shelf.recipe_for(options.file)
    name = options.name or Path(options.file).stem
    if recipe is not None:
        script = read_script(options.file)
        engine = Engine()
        guest = ready_guest(room, recipe.name, engine)
        tested = shelf.test_script(guest, script, engine, room.cache)
        digest = hashlib.blake2b(script.encode(), digest_size=32).hexdigest()
        kind = f"{recipe.suffixes[0][1:]} on {recipe.name} ({recipe.title})"
    else:
        wanted = register.Options(
            main=options.main, arguments=_arguments(options), variant=options.variant
        )
        made = register.register(read_module(options.file), room.cache, wanted, room.progress)
        tested, digest = made.report["self_test"], made.module_hash
        kind = f"module, {made.report['functions']} functions, {made.report['checks']} checks"
    proof = (
        f"self-test: {tested['checks']:,} checks, {tested['moves']} moves, equal{_how(tested)}"
        if not tested["untested"]
        else f"untested: only {tested['checks']} checks reached; give a larger smoke input"
    )
    room.say(
        f"{name}@{digest[:8]}  {kind}  {proof}", name=name, hash=digest, kind=kind, self_test=tested
    )
    return 0


def _how(tested: dict[str, Any]) -> str:
    """How the tested run ended, when not well: every call is denied there."""
    if tested["ended"] in ("finished", "exited with 0"):
        return ""
    said = f": {tested['said']}" if tested["said"] else ""
    return f"; with every call denied it {tested['ended']}{said}"


def run_install(room: Room, options: argparse.Namespace) -> int:
    """Fetch, verify, register an interpreter."""
    source = Path(options.source) if options.source else None
    made = shelf.install(options.name, room.cache, source=source, progress=room.progress)
    tested = made.report["self_test"]
    proof = f"self-test equal over {tested['checks']:,} yields"
    text = f"{options.name}  {made.report['checks']:,} checks, {proof}"
    room.say(text, name=options.name, module_hash=made.module_hash, report=made.report)
    return 0


def run_guests(room: Room, _options: argparse.Namespace) -> int:
    """What guests there are."""
    for recipe in shelf.RECIPES.values():
        here = shelf.installed(recipe.name, room.cache)
        state = "installed" if here else recipe.refused or "not installed"
        note = f"  experimental: {recipe.experimental}" if recipe.experimental else ""
        text = f"{recipe.name:12} {state:14} {', '.join(recipe.suffixes):10} {recipe.title}{note}"
        room.say(
            text, name=recipe.name, installed=here, title=recipe.title, note=recipe.experimental
        )
    return 0


def run_notices(room: Room, _options: argparse.Namespace) -> int:
    """Licenses that an image with guests baked in must carry."""
    for recipe in shelf.RECIPES.values():
        origin = f"{recipe.requirement}, {recipe.member}"
        text = f"{recipe.name} ({origin})\n  {recipe.license}\n  {recipe.notice}"
        room.say(
            text,
            name=recipe.name,
            license=recipe.license,
            notice=recipe.notice,
            sha256=recipe.sha256,
        )
    return 0


# --- run and resume -------------------------------------------------------------------------------


def _given(text: str) -> object:
    """The input: JSON, a file of it, or standard input."""
    if text == "-":
        text = sys.stdin.read(MAX_SCRIPT)
    elif not text.lstrip().startswith(("{", "[", '"')) and Path(text).is_file():
        text = read_script(text)
    try:
        return json.loads(text)
    except ValueError:
        raise Usage(f"--input is neither JSON nor a file: {text[:80]!r}") from None


def run_agent(room: Room, options: argparse.Namespace) -> int:
    """A new agent in the foreground."""
    engine = Engine()
    task = local.new_task()
    info = {
        "task": task,
        "tier": options.tier,
        "attempt": 1,
        "model": options.model or room.settings.model,
    }
    recipe = shelf.recipe_for(options.file)
    given = _given(options.input)
    state: State
    if recipe is not None:
        script = read_script(options.file)
        guest = ready_guest(room, recipe.name, engine)
        loaded = guest.loaded
        state = recipe.state(
            script, given, seed=local.seed_of(task), clock_ns=local.started_ns(), info=info
        )
    else:
        wanted = register.Options(main=options.main, arguments=_arguments(options))
        made = register.register(read_module(options.file), room.cache, wanted, room.progress)
        loaded = register.loaded(made, engine, room.cache)
        state = local.module_state(task, given, info)
    sandbox = Sandbox(
        loaded, state, arguments=_arguments(options), cpu_limit_us=round(options.cpu_limit * 1e6)
    )
    return _foreground(room, options, engine, loaded, sandbox)


def run_resume(room: Room, options: argparse.Namespace) -> int:
    """Continue from a file, on the module its snapshot names."""
    data = read_file(options.file, MAX_SNAPSHOT)
    key = snapshot.key_of(room.settings.secret())
    image = snapshot.restore([snapshot.decode(data, key)])
    engine = Engine(canonical_nan=image.identity.nan == "canonical")
    made = register.find(room.cache, image.identity.module_hash)
    if made is None:
        for name, recipe in shelf.RECIPES.items():
            if not recipe.refused and recipe.script_path in image.state.files:
                ready_guest(room, name, engine)
        made = register.find(room.cache, image.identity.module_hash)
    if made is None:
        raise SnapshotMismatch(
            f"its module {image.identity.module_hash[:12]} is not registered here: register the "
            "file it was made of, with the same options"
        )
    loaded = register.loaded(made, engine, room.cache)
    sandbox = Sandbox(loaded, image=image, cpu_limit_us=round(options.cpu_limit * 1e6))
    return _foreground(room, options, engine, loaded, sandbox)


def _foreground(
    room: Room, options: argparse.Namespace, engine: Engine, loaded: Loaded, sandbox: Sandbox
) -> int:
    info = sandbox.state.info
    task = str(info.get("task", ""))
    caller = Caller(
        task=task,
        token=room.settings.agent_key,
        tier=str(info.get("tier", "")),
        model=str(info.get("model", room.settings.model)),
    )
    out = Path(options.out or f"{task}.tgsn")
    if options.out and (not os.access(out.parent, os.W_OK) or out.is_dir()):
        raise Usage(f"a snapshot could not be written to {out}: choose another --out")
    log = room.settings.state_dir / "agents" / f"{task}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("a", encoding="utf-8") as journal:

        def show(kind: str, fields: dict[str, Any]) -> None:
            row = _row(kind, fields)
            journal.write(json.dumps(row, ensure_ascii=False) + "\n")
            journal.flush()
            if room.as_json:
                room.say("", **row)
            else:
                _print(row)

        runner = local.Local(
            loaded, engine, sandbox, caller, room.settings.gateway,
            snapshot.key_of(room.settings.secret()), show,
            options.suspend_after / 1e3 if options.suspend_after is not None else None,
        )  # fmt: skip
        ended = asyncio.run(_with_signals(runner))
        for number in SIGNALS:  # until the process is gone: the interpreter's end resets handlers
            signal.signal(number, signal.SIG_IGN)
    if isinstance(ended, local.Suspended):
        out = _keep(ended.data, out, log.with_suffix(".tgsn"))
        size = len(ended.data)
        text = f"suspended in {out}, {size} bytes; continue with: tidegate agent resume {out}"
        room.say(text, task=task, suspended=str(out), bytes=len(ended.data), trace=caller.trace)
        return 0
    well = local.succeeded(ended.outcome)
    if room.as_json or not well:
        text = local.words(ended.outcome)
        room.say(text, task=task, ended=text, ok=well, trace=caller.trace)
    return 0 if well else 1


def _keep(data: bytes, out: Path, instead: Path) -> Path:
    """Where the snapshot is: a full disk is no reason to lose what was done.

    Raises:
        Usage: Neither place took it.
    """
    for place in (out, instead):
        unfinished = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            unfinished.write_bytes(data)
            unfinished.replace(place)
        except OSError as error:
            sys.stderr.write(f"tidegate: {place} cannot be written: {error.strerror}\n")
            with contextlib.suppress(OSError):
                unfinished.unlink()
            continue
        return place
    raise Usage(f"the snapshot of {len(data)} bytes is lost")


async def _with_signals(runner: local.Local) -> local.Suspended | local.Done:
    """Signals suspend, and are ignored from then on: one more must not cost the snapshot."""
    loop = asyncio.get_running_loop()

    def suspend(_number: int, _frame: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(runner.suspend)

    for number in SIGNALS:
        signal.signal(number, suspend)
    return await runner.run()


def _row(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    if kind == "output":
        return local.describe(fields["record"])
    request = fields["request"]
    return {
        "kind": "call",
        "n": request.ordinal,
        "op": request.op,
        "outcome": fields["outcome"],
        "seconds": round(fields["seconds"], 3),
        "digest": request.digest[:16],
    }


def _print(row: dict[str, Any]) -> None:
    if row["kind"] in ("stdout", "stderr"):
        stream = sys.stdout if row["kind"] == "stdout" else sys.stderr
        stream.write(row["data"])
        stream.flush()
    elif row["kind"] == "emit":
        sys.stdout.write(json.dumps(row["data"], ensure_ascii=False) + "\n")
    elif row["kind"] == "log":
        sys.stderr.write(f"log {json.dumps(row['data'], ensure_ascii=False)}\n")
    else:
        sys.stderr.write(f"#{row['n']} {row['op']} {row['outcome']} {row['seconds']} s\n")


# --- logs -----------------------------------------------------------------------------------------


def run_logs(room: Room, options: argparse.Namespace) -> int:
    """Output and calls of a local run; without a task, the names of all."""
    folder = room.settings.state_dir / "agents"
    if not options.task:
        for path in sorted(folder.glob("*.jsonl")):
            room.say(path.stem, task=path.stem)
        return 0
    path = folder / f"{options.task}.jsonl"
    if "/" in options.task or not path.is_file():
        raise Usage(f"no local run {options.task!r} here")
    with path.open(encoding="utf-8") as lines:
        while True:
            line = lines.readline()
            if line:
                sys.stdout.write(line)
                sys.stdout.flush()
            elif not options.follow:
                return 0
            else:
                sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
