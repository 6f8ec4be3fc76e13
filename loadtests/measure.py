"""How the load tests measure: CPU time of process trees, pinned cores, interleaved pairs, validity.

The figure is CPU time per request, user plus system of the server's whole process tree as the
operating system counts it, because latency on a shared machine moves by factors and CPU time by
percents. Gateway and control alternate in pairs; the ratio of a pair is what counts, and

    normalized cost = median of the pairs' ratios x the control's reference on a quiet machine.

A run that breaks a rule of `Validity` still prints its figures, marked invalid with the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtests import generator

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROOT = Path(__file__).parents[1]
TICK = os.sysconf("SC_CLK_TCK")

REFERENCE_MS = {"c64": 0.115, "c1": 0.245, "60k": 0.253}
"""The control's CPU-ms per call in one quiet run each; 60k means 60 kB prompts at c64."""

REFERENCE_US_EVENT = 36.0
"""The control's CPU-microseconds per streamed event: median of six runs."""

BUSY = 0.95
SPREAD = 0.20
OTHERS = 0.10


def say(text: str) -> None:
    """Progress goes to standard error; the last line of standard output is the result."""
    print(text, file=sys.stderr, flush=True)


# --- process trees --------------------------------------------------------------------------------


def tree(pid: int) -> set[int]:
    """The process and all its descendants."""
    found, todo = {pid}, [pid]
    while todo:
        one = todo.pop()
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{one}/task").iterdir():
                for child in (task / "children").read_text().split():
                    if int(child) not in found:
                        found.add(int(child))
                        todo.append(int(child))
    return found


def _ticks(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))  # utime, stime and those of waited-for children
    return 0


def cpu(pid: int) -> float:
    """CPU seconds the process tree has used so far."""
    return sum(_ticks(one) for one in tree(pid)) / TICK


def pss_mb(pid: int) -> float:
    """Proportional set size of the tree in MB: pages shared with others are divided among them."""
    return _smaps_mb(pid, "Pss:")


def anonymous_mb(pid: int) -> float:
    """What the tree has allocated, in MB: unlike `pss_mb` no other process that maps the same files
    moves it by coming or going."""
    return _smaps_mb(pid, "Anonymous:")


def _smaps_mb(pid: int, field: str) -> float:
    total = 0
    for one in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith(field):
                    total += int(line.split()[1]) * 1024
    return total / 1e6


def machine_busy() -> float:
    """CPU seconds of all processes of the machine together."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / TICK


# --- servers --------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of this machine nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(slots=True)
class Server:
    """A started process that listens on `port`."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    admin_port: int = 0
    start_s: float = 0.0

    @property
    def pid(self) -> int:
        """Root of its process tree."""
        return self.process.pid

    def stop(self) -> None:
        """End it, kindly first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


async def until_open(port: int, process: subprocess.Popen[bytes], limit: float = 60.0) -> None:
    """Return once the port accepts connections.

    Raises:
        RuntimeError: The process ended or was not ready in time.
    """
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"ended with {process.returncode} before it listened on {port}")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.01)
            continue
        writer.close()
        return
    raise RuntimeError(f"did not listen on {port} within {limit} s")


async def start(
    name: str,
    command: list[str],
    *,
    port: int,
    env: dict[str, str] | None = None,
    core: int | None = 0,
    output: Path | None = None,
) -> Server:
    """Start a server and wait until it listens; `start_s` is what that took."""
    began = time.monotonic()
    with (output or Path(os.devnull)).open("ab") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - a fork is all it does here
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=None if core is None else lambda: _pin_self(core),
        )  # fmt: skip
    server = Server(name, process, port)
    try:
        await until_open(port, process)
    except RuntimeError as error:
        server.stop()
        raise RuntimeError(f"{name}: {error}") from error
    server.start_s = time.monotonic() - began
    return server


def raise_files() -> int:
    """As many open files as the machine lets us have; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def pin_self(core: int) -> None:
    """Run on that core from now on, where the machine has it."""
    _pin_self(core)


def _pin_self(core: int) -> None:
    if (os.cpu_count() or 1) > core:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})


async def start_origin() -> Server:
    """The upstream, on the generator's core."""
    port = free_port()
    return await start(
        "origin", [sys.executable, "-m", "loadtests.origin", "--port", str(port)], port=port, core=1
    )


async def start_control(origin: Server) -> Server:
    """The control program, on the server's core."""
    port = free_port()
    command = [sys.executable, "-m", "loadtests.control", "--port", str(port)]
    return await start(
        "control", [*command, "--upstream", f"http://127.0.0.1:{origin.port}"], port=port
    )


# --- pairs ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    """One stretch of load on one server."""

    cpu_s: float
    wall_s: float
    others_s: float
    tally: generator.Tally
    upstream_requests: int = 0

    @property
    def ms_per_call(self) -> float:
        """CPU milliseconds of the server's tree per call."""
        return 1000 * self.cpu_s / max(1, self.tally.calls)

    @property
    def us_per_event(self) -> float:
        """CPU microseconds of the server's tree per event."""
        return 1e6 * self.cpu_s / max(1, self.tally.events)

    @property
    def busy(self) -> float:
        """Share of its core that the server used."""
        return self.cpu_s / max(self.wall_s, 1e-9)


async def origin_requests(origin: Server) -> int:
    """How many requests the upstream has answered."""
    return int(json.loads(await generator.fetch(origin.port, "/stats"))["requests"])


async def sample(
    server: Server,
    origin: Server,
    load: Callable[[Callable[[generator.Tally], bool]], Awaitable[generator.Tally]],
    *,
    cpu_s: float,
    warm_s: float = 1.0,
    max_wall_s: float = 30.0,
) -> Sample:
    """Warm up, then load the server until its tree has used that much CPU."""
    end = time.monotonic() + warm_s
    await load(lambda _: time.monotonic() >= end)
    requests = await origin_requests(origin)
    ours = {server.pid, origin.pid, os.getpid()}
    before = {pid: cpu(pid) for pid in ours}
    all_before, began = machine_busy(), time.monotonic()
    state = {"next": 0.0, "stop": False}

    def enough(_: generator.Tally) -> bool:
        now = time.monotonic()
        if now >= state["next"] and not state["stop"]:
            state["next"] = now + 0.05
            state["stop"] = (
                cpu(server.pid) - before[server.pid] >= cpu_s or now - began > max_wall_s
            )
        return bool(state["stop"])

    tally = await load(enough)
    wall = time.monotonic() - began
    used = {pid: cpu(pid) - before[pid] for pid in ours}
    others = max(0.0, machine_busy() - all_before - sum(used.values()))
    seen = await origin_requests(origin) - requests
    return Sample(used[server.pid], wall, others, tally, seen)


@dataclass(slots=True)
class Validity:
    """Why a run is no measurement."""

    reasons: list[str] = field(default_factory=list)

    def look(self, what: str, one: Sample, *, saturating: bool) -> None:
        """Note what is wrong with one sample."""
        if one.tally.failures:
            self.reasons.append(f"{what}: errors {one.tally.errors}")
        if one.tally.reconnects:
            self.reasons.append(f"{what}: {one.tally.reconnects} reconnects")
        if one.upstream_requests != one.tally.calls + one.tally.failures:
            self.reasons.append(
                f"{what}: {one.tally.calls} calls, {one.upstream_requests} requests at the upstream"
            )
        if saturating and one.busy < BUSY:
            self.reasons.append(f"{what}: the server was only {one.busy:.0%} busy")
        if one.others_s > OTHERS * one.wall_s:
            share = one.others_s / one.wall_s
            self.reasons.append(f"{what}: other processes used {share:.0%} of a core")

    def spread(self, what: str, values: list[float]) -> None:
        """The control must agree with itself."""
        if values and (max(values) - min(values)) / statistics.median(values) > SPREAD:
            self.reasons.append(
                f"{what}: the control spread from {min(values):.4f} to {max(values):.4f}"
            )


def summary(name: str, values: list[float], digits: int = 4) -> dict[str, float | None]:
    """Median with `_min` and `_max` beside it."""
    if not values:
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    return {
        name: round(statistics.median(values), digits),
        f"{name}_min": round(min(values), digits),
        f"{name}_max": round(max(values), digits),
    }


# --- where and what -------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a reader must know before comparing figures."""
    flags = sysconfig.get_config_var("CONFIG_ARGS") or ""
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cores": os.cpu_count(),
        "cpu": model,
        "system": platform.platform(),
        "python": platform.python_version(),
        "pgo": "--enable-optimizations" in flags,
        "packages": {
            name: importlib.metadata.version(name)
            for name in ("uvicorn", "uvloop", "httptools", "aiohttp")
        },
    }


def revision() -> str:
    """The commit, with `+` if the tree differs from it; "" outside a repository."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")
    except OSError:
        return ""


def finish(result: dict[str, Any], *, began: float, seed: int = 0) -> None:
    """Print the one JSON line, with what every result carries."""
    result |= {
        "machine": machine(),
        "revision": revision(),
        "seed": seed,
        "duration_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result), flush=True)
