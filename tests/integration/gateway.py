"""A whole Tidegate as an operator starts it, for tests that talk to it from outside.

Three processes and two listeners of ours, each counting for itself, so that no statement about the
gateway rests on the gateway's own word:

    client → tap (the edge) → `tidegate serve` → tap (upstream) → `tidegate emulate`

A tap relays bytes and remembers them: what was sent on which connection, and when which side let
go. The emulator keeps the provider's books. Nothing of the gateway is imported; everything is
told by TIDEGATE_* variables, and the process must end with status 0 when it is asked to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

ROOT = Path(__file__).parents[2]
START_LIMIT = 60.0
STOP_LIMIT = 40.0
PATIENCE = 30.0
"""Seconds for what takes far less on an idle machine: what is late by so much does not come."""
UPSTREAM_KEY = "sk-upstream-credential-that-no-client-may-see"
"""A test's constant, no secret."""

T = TypeVar("T")


# --- one loop for a module's tests ---------------------------------------------------------------


class Stage:
    """An event loop that outlives single tests: what was started in one is there for the next."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Awaitable[T], limit: float = 120.0) -> T:
        """The coroutine's result; a test that hangs fails."""

        async def bounded() -> T:
            async with asyncio.timeout(limit):
                return await coroutine

        return self._runner.run(bounded())

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()


async def until(
    what: Callable[[], T | Awaitable[T]], *, limit: float = PATIENCE, every: float = 0.02
) -> T:
    """The first true value, polled; fails with the last one seen."""
    end = time.monotonic() + limit
    while True:
        seen: Any = what()
        if asyncio.iscoroutine(seen):
            seen = await seen
        if seen:
            return seen
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit} s, last seen: {seen!r}")
        await asyncio.sleep(every)


# --- HTTP by hand --------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """One answer as it stood on the wire.

    Attributes:
        whole: The framing was finished; False where the connection ended before.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    whole: bool = True
    raw: bytes = b""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")

    def json(self) -> Any:
        return json.loads(self.body)


class Incomplete(Exception):
    """More bytes are needed."""


def _head(data: bytes) -> tuple[bytes, list[tuple[str, str]], int]:
    end = data.find(b"\r\n\r\n")
    if end < 0:
        raise Incomplete
    first, *lines = data[:end].split(b"\r\n")
    pairs = []
    for line in lines:
        name, _, value = line.partition(b":")
        pairs.append((name.decode("latin-1").lower(), value.strip().decode("latin-1")))
    return first, pairs, end + 4


def _chunked(data: bytes, at: int) -> tuple[bytes, int, bool]:
    """Content, position after it, and whether it was finished."""
    parts = []
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return b"".join(parts), len(data), False
        size = int(data[at:end].split(b";")[0], 16)
        at = end + 2
        if size == 0:
            end = data.find(b"\r\n", at)
            return b"".join(parts), end + 2 if end >= 0 else len(data), end >= 0
        parts.append(data[at : at + size])
        if len(data) < at + size + 2:
            return b"".join(parts), len(data), False
        at += size + 2


def parse(data: bytes, at: int = 0, *, answer_to: str = "", closed: bool) -> tuple[Answer, int]:
    """The message that begins there, and where it ends. Requests have status 0.

    Args:
        data: What was seen so far.
        at: Where the message begins.
        answer_to: The request's method; "" parses a request.
        closed: Nothing more will come.

    Raises:
        Incomplete: Its end is not there yet.
    """
    first, headers, used = _head(data[at:])
    status = int(first.split(b" ")[1]) if answer_to else 0
    if 100 <= status < 200:
        return parse(data, at + used, answer_to=answer_to, closed=closed)
    names = dict(headers)
    body_at = at + used
    if answer_to == "HEAD" or status in (204, 304):
        body, end, whole = b"", body_at, True
    elif names.get("transfer-encoding") == "chunked":
        body, end, whole = _chunked(data, body_at)
    elif "content-length" in names:
        end = body_at + int(names["content-length"])
        body, whole = data[body_at:end], len(data) >= end
    elif answer_to:
        body, end, whole = data[body_at:], len(data), closed
    else:
        body, end, whole = b"", body_at, True
    if not whole and not closed:
        raise Incomplete
    return Answer(status, headers, body, whole, data[at:end]), min(end, len(data))


class Wire:
    """One client connection, used byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.seen = b""
        self.ended = False

    @classmethod
    async def open(cls, port: int, *, limit: int = 2**16) -> Wire:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=limit))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def more(self) -> bool:
        """Some further bytes were read; False at the end."""
        try:
            data = await self.reader.read(2**16)
        except ConnectionError:
            data = b""
        self.seen += data
        self.ended = self.ended or not data
        return bool(data)

    async def wait_for(self, needle: bytes) -> None:
        """That text has come."""
        while needle not in self.seen:
            if not await self.more():
                raise AssertionError(f"{needle!r} never came, only {self.seen[-400:]!r}")

    async def answer(self, method: str = "POST") -> Answer:
        """The next answer, taken off what was seen."""
        while True:
            try:
                got, used = parse(self.seen, answer_to=method, closed=self.ended)
            except Incomplete:
                if self.ended:
                    raise AssertionError(f"no whole head came: {self.seen[:400]!r}") from None
                await self.more()
                continue
            self.seen = self.seen[used:]
            return got

    def drop(self) -> None:
        """Gone at once, as a killed client is."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def request(
    path: str,
    body: Any = None,
    *,
    key: str = "",
    method: str = "",
    headers: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> bytes:
    """A request's bytes; `body` is encoded as JSON unless it is bytes."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", f"host: {host}"]
    if key:
        lines.append(f"authorization: Bearer {key}")
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def ask(port: int, data: bytes, *, method: str = "POST") -> Answer:
    """One request on a connection of its own."""
    wire = await Wire.open(port)
    try:
        await wire.send(data)
        return await wire.answer(method)
    finally:
        await wire.close()


async def fetch(
    port: int, path: str, body: Any = None, *, key: str = "", method: str = ""
) -> Answer:
    """GET, or POST of JSON."""
    head = request(path, body, key=key, method=method, headers={"connection": "close"})
    return await ask(port, head, method=method or ("GET" if body is None else "POST"))


# --- a tap ---------------------------------------------------------------------------------------


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class Line:
    """One connection through a tap.

    Attributes:
        sent, received: Bytes of the client and of the server behind.
        client_left, server_left: Monotonic time at which that side ended; None while it has not.
        passing: Whether the server's bytes go on to the client.
    """

    opened: float
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    client_left: float | None = None
    server_left: float | None = None
    passing: asyncio.Event = field(default_factory=_set)

    @property
    def open(self) -> bool:
        return self.client_left is None and self.server_left is None


@dataclass(slots=True)
class Exchange:
    """A request and its answer as they passed a tap; `answer` is None while there is none."""

    line: Line
    first: str
    request: Answer
    answer: Answer | None


class Tap:
    """A relay of bytes that remembers."""

    def __init__(self, target: int, *, remember: bool = True) -> None:
        self.target = target
        self.port = 0
        self.lines: list[Line] = []
        self._remember = remember
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Tap:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def open(self) -> int:
        """Connections that neither side has ended."""
        return sum(line.open for line in self.lines)

    def forget(self) -> None:
        """Connections that are over are dropped from memory."""
        self.lines = [line for line in self.lines if line.open]

    def exchanges(self, needle: str = "") -> list[Exchange]:
        """Requests seen in order, those whose bytes hold the needle."""
        found = []
        for line in self.lines:
            found += [one for one in _exchanges(line) if needle.encode() in one.request.raw]
        return found

    @contextlib.contextmanager
    def holding(self, needle: str) -> Iterator[None]:
        """Answers under way to requests with that needle do not end before the block does."""
        held = [line for line in self.lines if line.open and needle.encode() in line.sent]
        assert held
        for line in held:
            line.passing.clear()
        try:
            yield
        finally:
            for line in held:
                line.passing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        line = Line(time.monotonic())
        self.lines.append(line)
        try:
            try:
                behind, ahead = await asyncio.open_connection("127.0.0.1", self.target)
            except OSError:
                line.server_left = time.monotonic()
                writer.transport.abort()
                return
            async with asyncio.TaskGroup() as both:
                both.create_task(self._up(line, reader, ahead))
                both.create_task(self._down(line, behind, writer))
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _up(
        self, line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._pump(reader, writer, line.sent, _set())
        if line.client_left is None:
            line.client_left = time.monotonic()

    async def _down(
        self, line: Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._pump(reader, writer, line.received, line.passing)
        if line.server_left is None:
            line.server_left = time.monotonic()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, memory: bytearray,
        passing: asyncio.Event,
    ) -> None:  # fmt: skip
        """Bytes pass until one side ends; then the other side hears of it."""
        try:
            while data := await reader.read(2**16):
                await passing.wait()
                if self._remember:
                    memory += data
                writer.write(data)
                await writer.drain()
        except (ConnectionError, OSError):
            pass
        finally:
            writer.close()


def _exchanges(line: Line) -> Iterator[Exchange]:
    sent, received = bytes(line.sent), bytes(line.received)
    at = back = 0
    while at < len(sent):
        try:
            asked, at = parse(sent, at, closed=line.client_left is not None)
        except Incomplete:
            return
        first = asked.raw.split(b"\r\n", 1)[0].decode("latin-1")
        answer = None
        with contextlib.suppress(Incomplete):
            answer, back = parse(
                received, back, answer_to=first.split(" ")[0], closed=not line.open
            )
        yield Exchange(line, first, asked, answer)


# --- policy --------------------------------------------------------------------------------------

WIDE = {"rpm": 1_000_000, "tpm": "400M"}


def policy(**changes: Any) -> dict[str, Any]:
    """A policy as a mapping: one provider, one wide pool, one agent; sections replace or extend.

    Args:
        changes: Sections; mappings are merged two levels deep, everything else replaces.
    """
    made: dict[str, Any] = {
        "version": 1,
        "providers": {
            "emulator": {
                "kind": "other",
                "base_url": "${UPSTREAM_URL}",
                "dialects": ["openai", "anthropic"],
                "keys": [{"id": "any", "value": "${UPSTREAM_KEY}"}],
                "headers": "openai",
                "stream_options": True,
                "passthrough": ["/v1/files"],
                "count_tokens": "relay",
            }
        },
        "pools": {"wide": {"provider": "emulator", "limits": WIDE, "shape": "window_60s",
                           "accounting": "realtime"}},
        "models": {
            "gpt-*": {"provider": "emulator", "pool": "wide"},
            "claude-*": {"provider": "emulator", "pool": "wide"},
            "text-embedding-*": {"provider": "emulator", "pool": "wide"},
        },
        "agents": {"tester": {"keys": [{"key": "${TESTER_KEY}"}]}},
        "loops": {"mode": "off"},
    }  # fmt: skip
    for name, section in changes.items():
        if isinstance(section, dict) and isinstance(made.get(name), dict):
            made[name] = {**made[name], **section}
        else:
            made[name] = section
    return made


def emulation(**changes: Any) -> dict[str, Any]:
    """An emulator that answers at once, shortly, and limits nothing unless told to."""
    return {
        "seed": 7,
        "require_key": True,
        "pacing": {"first_byte": 0, "tokens_per_second": 0, "jitter": 0},
        "answers": {"median": 40, "sigma": 0.3, "longest": 400, "tool_probability": 0},
        "limits": [],
        **changes,
    }


# --- processes -----------------------------------------------------------------------------------


def by_day() -> str:
    """An offset from UTC where midnight is hours away: no day ends while a test runs."""
    now = time.gmtime().tm_hour
    hours = min((-10, 10), key=lambda offset: abs((now + offset) % 24 - 12))
    return f"{hours:+d}:00"


def command(*arguments: str) -> list[str]:
    """The `tidegate` command of this very checkout."""
    return [sys.executable, "-m", "gateway", *arguments]


def environment(**more: str) -> dict[str, str]:
    """This process's variables without its own TIDEGATE_* and proxies, and those given."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TIDEGATE_") or name == "TIDEGATE_VOCABULARY_DIR"
    }
    return {**kept, **more}


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that ended."""

    status: int
    out: str
    err: str


async def run_command(*arguments: str, env: Mapping[str, str] | None = None) -> Ran:
    """A `tidegate` command, to its end."""
    process = await asyncio.create_subprocess_exec(
        *command(*arguments), cwd=ROOT, env=environment() if env is None else dict(env),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    return Ran(process.returncode or 0, out.decode(), err.decode())


class NotStarted(AssertionError):
    """The process did not become ready; says what it said."""


def die_with_parent() -> None:
    """A test run that is killed leaves no process behind. Linux only; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Process:
    """A started process whose output goes to files, so that nobody has to read it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.out = folder / f"{name}.out"
        self.err = folder / f"{name}.err"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, arguments: list[str], env: Mapping[str, str], ready: str) -> str:
        """The first line of its output that begins so.

        Raises:
            NotStarted: It ended, or said nothing in time.
        """
        with self.out.open("wb") as out, self.err.open("ab") as err:
            self.process = await asyncio.create_subprocess_exec(
                *arguments, cwd=ROOT, env=dict(env), stdin=asyncio.subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        end = time.monotonic() + START_LIMIT
        while time.monotonic() < end:
            for line in self.out.read_text().splitlines(keepends=True):
                if line.startswith(ready) and line.endswith("\n"):
                    return line.strip()
            if self.process.returncode is not None:
                break
            await asyncio.sleep(0.02)
        status = self.process.returncode
        await self.kill()
        raise NotStarted(f"exit {status}\n{self.err.read_text()[-3000:]}")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def interrupt(self) -> None:
        """As Ctrl-C in a terminal does: the whole process group hears it."""
        os.killpg(self.pid, signal.SIGINT)

    async def ended(self, limit: float = STOP_LIMIT) -> int:
        """Its exit status."""
        assert self.process is not None
        async with asyncio.timeout(limit):
            return await self.process.wait()

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def rss_mib(self) -> float:
        """Resident memory now."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) / 1024


class Gateway(Process):
    """`tidegate serve` with a policy of its own."""

    def __init__(self, folder: Path, name: str = "gateway") -> None:
        super().__init__(folder, name)
        self.folder = folder
        self.policy = folder / f"{name}.yaml"
        self.state = folder / "state"
        self.port = 0
        self.admin = 0
        self.keys: dict[str, str] = {}
        self.env: dict[str, str] = {}

    async def serve(
        self, chosen: Mapping[str, Any], *, upstream: int, keys: Mapping[str, str] | None = None
    ) -> Gateway:
        """It runs on free ports and is ready.

        Args:
            chosen: The policy; its `${TESTER_KEY}` and the like come from `keys`.
            upstream: Port of the provider.
            keys: Agents' keys by variable.
        """
        self.keys = {"TESTER_KEY": "tg-tester-0123456789", **(keys or {})}
        self.env = environment(
            TIDEGATE_STATE_DIR=str(self.state),
            UPSTREAM_URL=f"http://127.0.0.1:{upstream}",
            UPSTREAM_KEY=UPSTREAM_KEY,
            **self.keys,
        )
        self.write(chosen)
        await self.again()
        return self

    async def again(self) -> None:
        """Started, with what it was told last time."""
        arguments = command(
            "serve", "--policy", str(self.policy), "--port", "0", "--admin-port", "0"
        )
        line = await self.start(arguments, self.env, "ready: ")
        found = re.search(r"on port (\d+), admin on (\d+)$", line)
        assert found is not None, line
        self.port, self.admin = int(found[1]), int(found[2])

    def write(self, chosen: Mapping[str, Any] | str) -> None:
        """The policy file holds that from now on, replaced in one step."""
        text = chosen if isinstance(chosen, str) else yaml.safe_dump(dict(chosen), sort_keys=False)
        draft = self.policy.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self.policy)

    @property
    def key(self) -> str:
        """The agent `tester`'s key."""
        return self.keys["TESTER_KEY"]

    # --- what it says of itself

    async def status(self) -> dict[str, Any]:
        return (await fetch(self.admin, "/status")).json()

    async def metrics(self) -> dict[str, float]:
        """Samples by name and labels, as they stand on the page."""
        text = (await fetch(self.admin, "/metrics")).body.decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    async def total(self, name: str, **labels: str) -> float:
        """Sum of a family's samples with these labels, on a page that is not a kept one."""
        await asyncio.sleep(PAGE_AGE)
        return total(await self.metrics(), name, **labels)

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Log lines of that event."""
        found = []
        for line in self.err.read_text().splitlines():
            if line.startswith("{"):
                entry = json.loads(line)
                if not name or entry.get("event") == name:
                    found.append(entry)
        return found

    async def idle(self, limit: float = PATIENCE) -> None:
        """Nothing is under way, waiting or held, in any pool."""

        async def quiet() -> bool:
            return not busy(await self.status())

        try:
            await until(quiet, limit=limit)
        except AssertionError:
            raise AssertionError(f"still busy: {busy(await self.status())}") from None

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit status after that signal."""
        assert self.process is not None
        if self.process.returncode is None:
            self.signal(number)
        return await self.ended()

    def crashes(self) -> list[str]:
        """What must not be in any log: escapes, tracebacks, resource warnings."""
        bad = ("call_crashed", "Traceback", "never awaited", "ResourceWarning", "was destroyed")
        return [line for line in self.err.read_text().splitlines() if any(w in line for w in bad)]


PAGE_AGE = 1.1
"""Seconds for which the metrics page may be a kept one."""


def total(samples: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum of the samples of a family that carry these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for sample, value in samples.items()
        if sample.partition("{")[0] == name and all(one in sample for one in wanted)
    )


def busy(status: Mapping[str, Any]) -> dict[str, Any]:
    """What is under way; empty when nothing is."""
    found = {name: status[name] for name in ("in_flight", "waiting") if status[name]}
    for pool in status["pools"]:
        if pool["in_flight"] or any(pool["waiting"]):
            found[pool["name"]] = (pool["in_flight"], pool["waiting"])
    return found


class Emulator(Process):
    """`tidegate emulate`."""

    def __init__(self, folder: Path, name: str = "emulator") -> None:
        super().__init__(folder, name)
        self.config = folder / f"{name}.json"
        self.port = 0

    async def serve(self, chosen: Mapping[str, Any], *, port: int = 0) -> Emulator:
        self.config.write_text(json.dumps(dict(chosen)))
        arguments = command("emulate", "--config", str(self.config), "--port", str(port))
        line = await self.start(arguments, environment(), "emulator ready ")
        self.port = int(line.rpartition(":")[2])
        return self

    async def ledger(self) -> dict[str, Any]:
        return (await fetch(self.port, "/emulator/ledger")).json()

    async def reset(self) -> None:
        """Empty books and full meters."""
        assert (await fetch(self.port, "/emulator/reset", {})).status == 200

    async def faults(self, *rules: Mapping[str, Any]) -> None:
        """These rules replace all others."""
        answer = await fetch(self.port, "/emulator/faults", {"rules": list(rules)})
        assert answer.status == 200, answer.body


# --- all of it -----------------------------------------------------------------------------------


class World:
    """Gateway and emulator with a tap on each side of the gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gateway = Gateway(folder)
        self.emulator = Emulator(folder)
        self.upstream = Tap(0)
        self.edge = Tap(0)

    async def start(
        self,
        chosen: Mapping[str, Any],
        *,
        provider: Mapping[str, Any] | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> World:
        await self.emulator.serve(emulation() if provider is None else provider)
        self.upstream.target = self.emulator.port
        await self.upstream.start()
        await self.gateway.serve(chosen, upstream=self.upstream.port, keys=keys)
        self.edge.target = self.gateway.port
        await self.edge.start()
        return self

    async def stop(self) -> None:
        """Everything has ended: the gateway with status 0, and its log holds no crash."""
        try:
            process = self.gateway.process
            if process is not None and process.returncode is None:
                assert await self.gateway.stop() == 0, self.gateway.err.read_text()[-3000:]
                crashes = self.gateway.crashes()
                assert crashes == []
        finally:
            await self.edge.stop()
            await self.upstream.stop()
            await self.gateway.kill()
            await self.emulator.kill()


@contextlib.asynccontextmanager
async def world(
    chosen: Mapping[str, Any] | None = None,
    *,
    provider: Mapping[str, Any] | None = None,
    keys: Mapping[str, str] | None = None,
) -> AsyncIterator[World]:
    """A world for the time of the block."""
    with scratch() as folder:
        made = World(folder)
        try:
            yield await made.start(policy() if chosen is None else chosen, provider=provider,
                                   keys=keys)  # fmt: skip
        finally:
            await made.stop()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the time of the block."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-e2e-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def staged(
    chosen: Mapping[str, Any] | None = None,
    *,
    provider: Mapping[str, Any] | None = None,
    keys: Mapping[str, str] | None = None,
) -> Iterator[tuple[Stage, World]]:
    """A world on a stage: what a module's fixture yields to tests that are plain functions."""
    with Stage() as stage, scratch() as folder:
        made = World(folder)
        try:
            chosen = policy() if chosen is None else chosen
            stage.run(made.start(chosen, provider=provider, keys=keys), START_LIMIT * 2)
            yield stage, made
        finally:
            stage.run(made.stop(), STOP_LIMIT * 2)
