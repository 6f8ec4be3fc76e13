"""What a call costs without sockets: `python -m loadtests.inprocess --json` (about 20 s).

The whole gateway in this process between two fakes: bytes go into a connection of the data
listener, the upstream answers at once from memory. No kernel, no other process and no scheduling
come between, so the figures hold on a busy machine too and show what a change of a few per cent
did. They say nothing about sockets: `hotpath` stays the judge.

    cpu_us          CPU micros per call: the least of many short rounds
    calls           Python functions called per call, generators resumed included
    by_file         the same by file, the dearest first
    instructions    processor instructions per call, counted by valgrind if it is on PATH

Kinds of request: `small` as in `hotpath`, `warm` 60 kB whose history is known, `tools` a turn of an
agent's loop of tool calls, `tools_call` one call of a tool at the gateway, as in `tools`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from gateway import connection, settings
from gateway.clock import LoopClock
from gateway.edge import Edge, Hooks
from gateway.machine import Machine
from gateway.pipeline import pipeline
from gateway.policy.watch import Files, PolicyWatch
from gateway.telemetry.logs import Log, Redactor
from gateway.telemetry.metrics import Metrics
from loadtests import generator, governed, measure, origin, tools
from loadtests.hotpath import Bodies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.call import HeaderList
    from gateway.upstream import Outgoing

KINDS = ("small", "warm", "tools", "tools_call")
ROUNDS = 40
PER_ROUND = 250
PROFILED = 400
COUNTED = 400
"""Calls counted by valgrind, on top of as many that warm up."""
TOOL_ANSWER = tools.answer(b"1", tools.RESULT)


class Answer:
    """The upstream's answer, whole."""

    status = 200
    whole = True

    def __init__(self, body: bytes) -> None:
        self.headers: HeaderList = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        self._body = body
        self._left = True

    def at_once(self) -> bytes | None:
        self._left = False
        return self._body

    def chunks(self) -> AsyncIterator[bytes]:
        return self

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        self._left = False
        return self._body

    def abort(self, _kind: str) -> None:
        self._left = False

    async def close(self, *, reuse: bool) -> None:  # noqa: ARG002 - the protocol's signature
        self._left = False


class Upstream:
    """A transport that needs no upstream."""

    async def send(self, out: Outgoing) -> Answer:
        if b"server/discover" in out.body:
            return Answer(tools.answer(b'"tidegate"', tools.DISCOVERED))
        if b"tools/call" in out.body:
            return Answer(TOOL_ANSWER)
        return Answer(origin.JSON)

    async def close(self) -> None:
        pass


class Client(asyncio.Transport):
    """The client's end of a connection: counts what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5000), "sockname": ("127.0.0.1", 8484)})
        self.written = 0
        self.last = b""

    def write(self, data: bytes) -> None:
        self.written += 1
        self.last = data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        raise RuntimeError("the gateway closed the connection")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class ToolLoop:
    """Requests of agents that call one tool after another, each with its history."""

    def __init__(self, seed: int, turns: int = 24) -> None:
        rng = random.Random(seed)
        self._words = [origin.text(number, 40) for number in range(200)]
        self._rng = rng
        self._turns = turns
        self._history: list[dict[str, Any]] = []
        self._agent = 0

    def __call__(self, number: int) -> bytes:
        if not self._history or len(self._history) > 2 * self._turns:
            self._agent += 1
            task = f"Task {self._agent}: {self._words[self._agent % 200]}"
            self._history = [{"role": "user", "content": task}]
        name = f"call_{number:024x}"
        arguments = json.dumps({"path": f"src/{self._words[number % 199][:20]}/{number}.py"})
        function = {"name": "read_file", "arguments": arguments}
        self._history += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": name, "type": "function", "function": function}],
            },
            {
                "role": "tool",
                "tool_call_id": name,
                "content": f"{number} {self._words[number % 200]} {self._words[number % 191]}",
            },
        ]
        body = {"model": governed.MODEL, "max_tokens": 80, "messages": self._history}
        raw = json.dumps(body, separators=(",", ":")).encode()
        return generator.post(governed.PATH, raw, key=governed.key(self._agent))


class Bench:
    """A gateway in this process and a connection to it."""

    def __init__(self, folder: Path, policy: str) -> None:
        (folder / "policy.yaml").write_text(policy)
        environment = {"ORIGIN_URL": "http://127.0.0.1:9", "ORIGIN_KEY": "sk-bench"}
        clock = LoopClock(precise=True)
        metrics = Metrics(version="bench")
        redact = Redactor()
        sink = open(os.devnull, "wb")  # noqa: SIM115, PTH123 - lives as long as the process
        log = Log(sink, wall=clock.wall, redact=redact, on_drop=metrics.log_dropped)
        watch = PolicyWatch(Files(folder / "policy.yaml", env=environment), clock=clock)
        chosen = settings.Settings(
            environment=environment,
            state_dir=folder / "state",
            policy=folder / "policy.yaml",
            vocabulary_dir=settings.vocabulary_dir(dict(os.environ)),
        )
        self.machine = Machine(
            settings=chosen, clock=clock, rng=random.Random(1), metrics=metrics, log=log,
            redact=redact, watch=watch,
        )  # fmt: skip
        self.machine.parts.dispatch._transport = Upstream()  # noqa: SLF001 - the fake upstream
        self.machine.tools.lines.sender.remote._transport = Upstream()  # type: ignore[attr-defined]  # noqa: SLF001
        edge = Edge(
            service=pipeline(self.machine.parts),
            snapshot=lambda: watch.current,
            clock=clock,
            spawn=asyncio.get_running_loop().create_task,
            rng=random.Random(2),
            hooks=Hooks(recognize=self.machine.parts.recognize),
        )
        config = uvicorn.Config(
            edge,
            interface="asgi3",
            lifespan="off",
            access_log=False,
            log_config=None,
            ws="none",
            proxy_headers=False,
        )
        config.load()
        state = uvicorn.server.ServerState()
        make = connection.protocol(lambda: clock)
        self.client = Client()
        self._protocol: Any = make(config=config, server_state=state, app_state={})
        self._protocol.connection_made(self.client)

    async def exchange(self, request: bytes) -> None:
        """One call, answered."""
        before = self.client.written
        self._protocol.data_received(request)
        for turn in range(2_000):
            if self.client.written > before:
                return
            await asyncio.sleep(0 if turn < 100 else 0.005)  # a thread may be counting tokens
        raise RuntimeError("no answer")


def requests(kind: str, seed: int) -> Callable[[int], bytes]:
    """The n-th request of a kind."""
    if kind == "tools":
        return ToolLoop(seed)
    if kind == "tools_call":
        return tools.named_one
    bodies = Bodies(seed)
    return bodies.small if kind == "small" else bodies.warm


async def serving(folder: Path, make: Callable[[int], bytes], warm: int) -> Bench:
    """A bench that has served so many calls."""
    bench = Bench(folder, tools.POLICY if make is tools.named_one else governed.policy())
    await bench.machine.preload()
    for number in range(warm):
        await bench.exchange(make(number))
    if not bench.client.last.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"not served: {bench.client.last[:300]!r}")
    return bench


async def prepared(folder: Path, make: Callable[[int], bytes], warm: int) -> tuple[Bench, int]:
    """The same, whose garbage nobody collects from now on."""
    bench = await serving(folder, make, warm)
    gc.collect()
    gc.freeze()
    gc.disable()
    return bench, warm


async def timed(folder: Path, make: Callable[[int], bytes]) -> float:
    """The least CPU micros per call of many rounds."""
    bench, number = await prepared(folder, make, 500)
    best = 1e9
    for _ in range(ROUNDS):
        batch = [make(number + at) for at in range(PER_ROUND)]
        number += PER_ROUND
        gc.collect()
        began = time.thread_time()
        for request in batch:
            await bench.exchange(request)
        best = min(best, (time.thread_time() - began) / PER_ROUND * 1e6)
    return best


async def profiled(folder: Path, make: Callable[[int], bytes]) -> Counter[tuple[str, str]]:
    """How often each Python function was called."""
    bench, number = await prepared(folder, make, 500)
    batch = [make(number + at) for at in range(PROFILED)]
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, _arg: object) -> None:
        if event == "call":
            code = frame.f_code
            found[code.co_filename, code.co_qualname] += 1

    sys.setprofile(note)
    for request in batch:
        await bench.exchange(request)
    sys.setprofile(None)
    return found


async def run_only(folder: Path, make: Callable[[int], bytes], count: int) -> None:
    """Warm up and serve so many calls: what valgrind counts twice, with two counts."""
    bench, number = await prepared(folder, make, COUNTED)
    batch = [make(number + at) for at in range(2 * COUNTED)]  # as many in both runs
    for request in batch[:count]:
        await bench.exchange(request)


def instructions(kind: str, seed: int) -> float | None:
    """Instructions per call: those of a run of many calls less those of one of few."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        return None
    totals = []
    for count in (COUNTED, 2 * COUNTED):
        done = subprocess.run(
            [valgrind, "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null",
             sys.executable, "-m", "loadtests.inprocess", "--run", str(count), "--kind", kind,
             "--seed", str(seed)],
            capture_output=True, text=True, check=False, cwd=measure.ROOT,
            env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONMALLOC": "pymalloc"},
        )  # fmt: skip
        found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
        if found is None:
            return None
        totals.append(int(found[1].replace(",", "")))
    return (totals[1] - totals[0]) / COUNTED


def looked_at(kind: str, seed: int, *, counting: bool) -> dict[str, Any]:
    """The figures of one kind of request."""
    loop = uvloop.new_event_loop

    def run(work: Callable[[Path, Callable[[int], bytes]], Any]) -> Any:
        with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(work(Path(folder), requests(kind, seed)))

    cpu = run(timed)
    functions = run(profiled)
    by_file: Counter[str] = Counter()
    for (file, _), count in functions.items():
        by_file["/".join(Path(file).parts[-2:])] += count
    return {
        "cpu_us": round(cpu, 1),
        "calls": round(functions.total() / PROFILED, 1),
        "instructions": round(instructions(kind, seed) or 0) if counting else None,
        "by_file": {file: round(n / PROFILED, 1) for file, n in by_file.most_common(40)},
        "functions": {
            f"{Path(file).name}:{name}": round(n / PROFILED, 2)
            for (file, name), n in functions.most_common()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line")
    parser.add_argument("--kind", choices=KINDS, help="only this kind of request")
    parser.add_argument("--instructions", action="store_true", help="count them (minutes)")
    parser.add_argument("--functions", action="store_true", help="list every function called")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else list(KINDS)
    if options.run:
        make, loop = requests(kinds[0], options.seed), uvloop.new_event_loop
        with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=loop) as runner:
            runner.run(run_only(Path(folder), make, options.run))
        return
    began = time.monotonic()
    result: dict[str, Any] = {}
    for kind in kinds:
        found = looked_at(kind, options.seed, counting=options.instructions)
        if not options.functions:
            del found["functions"]
        measure.say(f"{kind}: {found['cpu_us']} us, {found['calls']} calls")
        result[kind] = found
    measure.finish(result, began=began, seed=options.seed)


if __name__ == "__main__":
    main()
