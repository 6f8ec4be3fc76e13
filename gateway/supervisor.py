"""`tidegate serve --workers N`: one listening socket, N gateway processes, one admin listener.

The supervisor serves no call. It opens the data listener and hands it to every worker, so that a
worker that dies takes no waiting connection with it; starts a private Valkey or Redis where none is
named, because without a shared store N processes would let N times the limits through; starts the
emulator once where the policy wants it; and starts a dead worker again. SIGTERM and SIGINT drain
all workers, a second one cuts the draining short, SIGHUP makes them look at the policy.

Its admin listener answers for all: status and explain ask every worker, metrics carry the label
`worker`, readiness needs every worker, and what an operator orders is ordered everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import ownership, private_store, serving, settings
from gateway.admin import admin
from gateway.app import DEV_KEY_VARIABLE, EMULATOR_VARIABLE, addresses, mentions
from gateway.beside import Emulator
from gateway.clock import Expiry, LoopClock
from gateway.errors import PolicyError
from gateway.identity import dev_key
from gateway.members import Member, Members
from gateway.policy.watch import Files, PolicyWatch
from gateway.units import MICRO

if TYPE_CHECKING:
    import socket

    from gateway.settings import Settings
    from gateway.snapshot import Snapshot
    from gateway.units import Micros

READY = "ready: "
START: Micros = 60 * MICRO
STORE_START: Micros = 10 * MICRO
STOP: Micros = 60 * MICRO
"""Beyond the policy's own drain limit, after which a worker has cut its calls by itself."""

QUICK_DEATH: Micros = 5 * MICRO
LONGEST_PAUSE_S = 30.0
"""A worker that dies soon after its start is started again after 1, 2, 4 … seconds."""


class Failed(Exception):
    """Nothing can be served; the message is one clear sentence."""


@dataclass(slots=True)
class Worker:
    """One gateway process."""

    number: int
    process: asyncio.subprocess.Process | None = None
    admin_port: int = 0
    started: Micros = 0
    deaths: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """It runs and has said that it is ready."""
        return self.process is not None and self.process.returncode is None and self.admin_port > 0


def supervise(chosen: Settings, workers: int) -> int:
    """Run that many gateways until a signal; the exit status."""
    try:
        stranger = ownership.check()
        if stranger is not None:
            raise Failed(stranger)  # noqa: TRY301 - one way out for all failures to start
        serving.raise_file_limit()
        return asyncio.run(_main(chosen, workers))
    except PolicyError as error:
        sys.stderr.write(f"{error}\ntidegate: the policy above was refused; nothing was started.\n")
    except (Failed, serving.PortBusy, OSError, ValueError) as error:
        sys.stderr.write(f"tidegate: {error}\n")
    return 1


async def _main(chosen: Settings, workers: int) -> int:
    return await Supervisor(chosen, workers).run()


class Supervisor:
    """All processes of one `tidegate serve --workers N`."""

    def __init__(self, chosen: Settings, workers: int) -> None:
        self._settings = chosen
        self._path = chosen.policy or settings.default_policy()
        self._workers = [Worker(number) for number in range(workers)]
        self._clock = LoopClock(precise=True)
        self._stop = asyncio.Event()
        self._emulator: Emulator | None = None
        self._store: asyncio.subprocess.Process | None = None
        self._folder: Path | None = None
        self._environment: dict[str, str] = {}

    async def run(self) -> int:
        """Serve until a signal, drain, and leave nothing behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, self._send, signal.SIGHUP)
        sockets: list[socket.socket] = []
        try:
            snapshot = self._policy()
            data, control = addresses(self._settings, snapshot)
            sockets = [
                serving.bind(*data, what="data listener", variable="TIDEGATE_PORT"),
                serving.bind(*control, what="admin listener", variable="TIDEGATE_ADMIN_PORT"),
            ]
            await self._prepare(snapshot)
            await self._serve(*sockets)
        finally:
            for sock in sockets:
                sock.close()
            await self._clear()
        return 0

    # --- before the workers

    def _policy(self) -> Snapshot:
        """The policy as a worker would read it: refused here, once, instead of N times."""
        environment = dict(self._settings.environment)
        if not environment.get(DEV_KEY_VARIABLE):
            environment[DEV_KEY_VARIABLE] = dev_key(self._settings.state_dir, secrets.token_bytes)
        environment.setdefault(EMULATOR_VARIABLE, "http://127.0.0.1:1")
        return PolicyWatch(Files(self._path, env=environment), clock=self._clock).current

    async def _prepare(self, snapshot: Snapshot) -> None:
        chosen = self._settings
        env = self._environment = dict(chosen.environment)
        env["TIDEGATE_STATE_DIR"] = str(chosen.state_dir)
        env["TIDEGATE_POLICY"] = str(self._path)
        env["TIDEGATE_ADMIN_HOST"], env["TIDEGATE_ADMIN_PORT"] = "127.0.0.1", "0"
        if not (chosen.redis_url or snapshot.fleet.redis is not None):
            await self._start_store()
        if EMULATOR_VARIABLE not in env and mentions(self._path, EMULATOR_VARIABLE):
            self._emulator = Emulator(self._clock)
            env[EMULATOR_VARIABLE] = await self._emulator.start()

    async def _start_store(self) -> None:
        """A private store for our workers, or a clear refusal."""
        server = private_store.find()
        if server is None:
            raise Failed(
                f"{len(self._workers)} workers need a shared store, or their limits would be "
                f"multiplied: {private_store.HINT}."
            )
        self._folder = Path(tempfile.mkdtemp(prefix="tidegate-store-"))
        place = self._folder / "store.sock"
        await self._launch_store(server, place)
        self._environment["TIDEGATE_REDIS_URL"] = f"unix://{place}"
        self._environment["TIDEGATE_REDIS_NEW"] = "1"
        sys.stderr.write(
            f"tidegate: {len(self._workers)} workers share a private {server.name} "
            f"({server}, memory only); TIDEGATE_REDIS_URL would name another.\n"
        )

    async def _launch_store(self, server: Path, place: Path) -> None:
        """The store runs and listens there."""
        place.unlink(missing_ok=True)  # noqa: ASYNC240 - a file of our own folder, before we serve
        self._store = await asyncio.create_subprocess_exec(
            *private_store.command(server, place),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us: calls that still drain need it
        )
        deadline = self._clock.now() + STORE_START
        while not place.exists():  # noqa: ASYNC240 - as above
            if self._store.returncode is not None or self._clock.now() > deadline:
                raise Failed(f"the private store {server} did not start; see its message above")
            await self._clock.sleep(0.02)

    async def _keep_store(self) -> None:
        """A private store that ended is started again; its pools start cold, as after any loss."""
        server = private_store.find()
        while self._store is not None and self._folder is not None and server is not None:
            status = await self._store.wait()
            sys.stderr.write(f"tidegate: the private store ended ({status}); starting it again\n")
            await self._clock.sleep(1)
            with contextlib.suppress(Failed):
                await self._launch_store(server, self._folder / "store.sock")

    # --- the workers

    async def _serve(self, data: socket.socket, control: socket.socket) -> None:
        os.set_inheritable(data.fileno(), True)  # noqa: FBT003 - the standard library's signature
        self._environment["TIDEGATE_DATA_FD"] = str(data.fileno())
        listener = serving.listener(admin(Members(self._members).view()))
        failed: Failed | None = None
        async with asyncio.TaskGroup() as tasks:
            keepers = [tasks.create_task(self._keep(worker, data)) for worker in self._workers]
            server = tasks.create_task(listener.serve([control]))
            storekeeper = tasks.create_task(self._keep_store())
            try:
                await self._all_ready()
                self._announce(control)
                await self._stop.wait()
            except Failed as error:
                failed = error  # told once everything has ended, and not as a group of one
            finally:
                self._stop.set()
                storekeeper.cancel()
                await self._leave(keepers)
                listener.should_exit = True
                await asyncio.wait([server])
        if failed is not None:
            raise failed

    async def _all_ready(self) -> None:
        deadline = self._clock.now() + START
        while not all(worker.alive for worker in self._workers) and not self._stop.is_set():
            if any(worker.deaths for worker in self._workers):
                raise Failed("a worker ended at its start; see its message above")
            if self._clock.now() > deadline:
                raise Failed("the workers did not become ready in time")
            await self._clock.sleep(0.02)

    def _announce(self, control: socket.socket) -> None:
        """What the first worker said, with our own admin port."""
        lines = self._workers[0].lines
        if not lines:
            return
        port = control.getsockname()[1]
        last = lines[-1].rpartition("admin on ")[0] + f"admin on {port}"
        text = "\n".join([*lines[:-1], f"{last}, {len(self._workers)} workers"])
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    async def _keep(self, worker: Worker, data: socket.socket) -> None:
        """The worker runs, and runs again after it died, until we stop."""
        while not self._stop.is_set():
            worker.started, worker.admin_port, worker.lines = self._clock.now(), 0, []
            worker.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", "serve",
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=[data.fileno()],
                start_new_session=True,  # signals come from us, once
            )  # fmt: skip
            await self._hear(worker, worker.process)
            status = await worker.process.wait()
            worker.admin_port = 0
            if self._stop.is_set():
                return
            quick = self._clock.now() - worker.started < QUICK_DEATH
            worker.deaths = worker.deaths + 1 if quick else 1
            pause = min(LONGEST_PAUSE_S, 2.0 ** (worker.deaths - 1)) if quick else 0.0
            sys.stderr.write(
                f"tidegate: worker {worker.number} ended with status {status}; "
                f"starting it again in {pause:.0f} s\n"
            )
            with contextlib.suppress(TimeoutError), Expiry(self._clock, round(pause * MICRO)):
                await self._stop.wait()

    @staticmethod
    async def _hear(worker: Worker, process: asyncio.subprocess.Process) -> None:
        """What a worker prints: nothing but the lines that say it is ready."""
        assert process.stdout is not None  # noqa: S101 - asked for
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            worker.lines.append(line)
            if line.startswith(READY):
                worker.admin_port = int(line.rpartition("admin on ")[2])

    def _members(self) -> list[Member]:
        """The workers as the admin listener asks them."""
        return [Member(worker.number, worker.admin_port) for worker in self._workers]

    # --- the end

    def _signalled(self) -> None:
        """The first signal drains, a second one ends the draining."""
        if self._stop.is_set():
            self._send(signal.SIGTERM)
        self._stop.set()

    def _send(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(number)

    async def _leave(self, keepers: list[asyncio.Task[Any]]) -> None:
        """Every worker has drained and ended; killed if it does not."""
        self._send(signal.SIGTERM)
        try:
            with Expiry(self._clock, STOP):
                await asyncio.wait(keepers)
        except TimeoutError:
            self._send(signal.SIGKILL)
            await asyncio.wait(keepers)

    async def _clear(self) -> None:
        if self._emulator is not None:
            await self._emulator.stop()
        if self._store is not None and self._store.returncode is None:
            self._store.terminate()
            await self._store.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
