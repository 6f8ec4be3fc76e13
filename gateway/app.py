"""Composition root: settings and policy -> stores, clients, pipeline -> two listeners.

Start order: state folder and keys, the emulator if the policy wants it, policy, parts, sockets,
ready.
Stop order: refuse new calls, let waiting ones go with a soft refusal, let streams finish up to the
drain limit, close listeners, clients, log. Nothing here decides about a call.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import secrets
import signal
import sys
import traceback
from pathlib import Path
from random import Random  # noqa: TID251 - the one seed of this process
from typing import TYPE_CHECKING, Any

import uvloop

from gateway import __version__, connection, ownership, private_store, serving, settings
from gateway.admin import admin
from gateway.beside import Emulator
from gateway.clock import LoopClock
from gateway.edge import Edge, Hooks
from gateway.errors import PolicyError, StoreUnavailable
from gateway.identity import dev_key
from gateway.machine import Machine, missing_vocabulary
from gateway.pipeline import pipeline
from gateway.policy.watch import Files, PolicyWatch
from gateway.status import View
from gateway.tasks import Holds, beside
from gateway.telemetry.logs import Foreign, Log, Redactor
from gateway.telemetry.metrics import Metrics
from scheduler.api import StoreFault

if TYPE_CHECKING:
    import socket

    from gateway.errors import GatewayError
    from gateway.settings import Settings
    from gateway.snapshot import Snapshot

EMULATOR_VARIABLE = "TIDEGATE_EMULATOR_URL"
DEV_KEY_VARIABLE = "TIDEGATE_DEV_KEY"
COLLECT = (10_000, 20, 20)
"""Python's 700 new objects are four calls in flight: its collector would look at each of them."""

DEFAULTS = {"": ("127.0.0.1", 8484), "ADMIN_": ("127.0.0.1", 8485)}


def serve(chosen: Settings) -> int:
    """Run the gateway until a signal; the exit status. Failures to start are one clear sentence."""
    try:
        stranger = ownership.check()
        if stranger is not None:
            raise OSError(stranger)  # noqa: TRY301 - one way out for all failures to start
        if chosen.data_fd >= 0:
            private_store.die_with_parent()  # a worker without its supervisor has nobody to stop it
        serving.raise_file_limit()
        settings.export_vocabulary_dir(chosen.vocabulary_dir)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_main(chosen))
    except PolicyError as error:
        sys.stderr.write(f"{error}\ntidegate: the policy above was refused; nothing was started.\n")
    except (
        serving.PortBusy,
        StoreFault,
        StoreUnavailable,
        OSError,
        ValueError,
        ImportError,
    ) as error:
        sys.stderr.write(f"tidegate: {error}\n")
    return 1


async def _main(chosen: Settings) -> int:
    return await Gateway(chosen).run()


def mentions(path: Path, variable: str) -> bool:
    """Whether a policy file or folder names this variable."""
    files = sorted(path.glob("*.y*ml")) if path.is_dir() else [path]
    needle = f"${{{variable}}}".encode()
    return any(needle in file.read_bytes() for file in files if file.is_file())


def addresses(chosen: Settings, snapshot: Snapshot) -> tuple[tuple[str, int], tuple[str, int]]:
    """Data and admin addresses: the environment wins over policy, policy over the defaults."""
    given, wanted = chosen.environment, snapshot.listeners

    def pick(host: str, port: int, policy: tuple[str, int] | None, prefix: str) -> tuple[str, int]:
        if policy is None:
            return host, port
        names = (f"TIDEGATE_{prefix}HOST", f"TIDEGATE_{prefix}PORT")
        return (
            host if given.get(names[0]) or host != DEFAULTS[prefix][0] else policy[0],
            port if given.get(names[1]) or port != DEFAULTS[prefix][1] else policy[1],
        )

    return (
        pick(chosen.host, chosen.port, wanted.data, ""),
        pick(chosen.admin_host, chosen.admin_port, wanted.admin, "ADMIN_"),
    )


class Gateway:
    """One gateway process, from its start to its drained end."""

    def __init__(self, chosen: Settings) -> None:
        self._settings = chosen
        self._path = chosen.policy or settings.default_policy()
        self._clock = LoopClock(precise=True)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._rng = Random(secrets.randbits(64))  # noqa: S311 - jitter and ids
        self._metrics = Metrics(version=__version__)
        self._redact = Redactor()
        self._log = Log(
            sys.stderr.buffer,
            wall=self._clock.wall,
            redact=self._redact,
            level=chosen.log_level or "info",
            on_drop=self._metrics.log_dropped,
        )
        logging.getLogger().addHandler(Foreign(self._log))
        self._emulator: Emulator | None = None

    async def run(self) -> int:
        """Serve until a signal, drain, and leave nothing behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            await self._serve(await self._environment())
        finally:
            if self._emulator is not None:
                await self._emulator.stop()
            self._log.close()
        return 0

    def _signalled(self) -> None:
        """The first signal drains, a second one ends the draining."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _environment(self) -> dict[str, str]:
        """The variables that policy may name: the process's, the development key, the emulator."""
        chosen = self._settings
        environment = dict(chosen.environment)
        if not environment.get(DEV_KEY_VARIABLE):
            try:
                environment[DEV_KEY_VARIABLE] = dev_key(chosen.state_dir, secrets.token_bytes)
            except OSError as error:
                why = error.strerror or type(error).__name__
                text = f"The state folder {chosen.state_dir} cannot be used ({why}); "
                raise OSError(text + "choose another with TIDEGATE_STATE_DIR.") from error
        if EMULATOR_VARIABLE not in environment and mentions(self._path, EMULATOR_VARIABLE):
            self._emulator = Emulator(self._clock)
            environment[EMULATOR_VARIABLE] = await self._emulator.start()
        return environment

    async def _serve(self, environment: dict[str, str]) -> None:
        clock = self._clock
        watch = PolicyWatch(Files(self._path, env=environment), clock=clock)
        missing = missing_vocabulary(watch.current, self._settings.vocabulary_dir)
        if missing:
            raise ValueError(f"the policy says `tokenizer: required`, and {missing}")
        where = addresses(self._settings, watch.current)
        inherited = self._settings.data_fd
        sockets = [
            serving.inherited(inherited)
            if inherited >= 0
            else serving.bind(*where[0], what="data listener", variable="TIDEGATE_PORT"),
            serving.bind(*where[1], what="admin listener", variable="TIDEGATE_ADMIN_PORT"),
        ]
        machine = Machine(
            settings=self._settings,
            clock=clock,
            rng=self._rng,
            metrics=self._metrics,
            log=self._log,
            redact=self._redact,
            watch=watch,
        )
        if machine.sharing is not None:
            await machine.sharing.check()
        async with machine, asyncio.TaskGroup() as tasks:
            edge = Edge(
                service=pipeline(machine.parts),
                snapshot=lambda: watch.current,
                clock=clock,
                spawn=tasks.create_task,
                rng=self._rng,
                hooks=Hooks(
                    recognize=machine.parts.recognize,
                    refused=functools.partial(self._early_refusal, machine),
                    crashed=self._crashed,
                ),
            )
            machine.spawn = tasks.create_task
            machine.tools.owned_by(tasks.create_task)
            view = View(machine=machine, edge=edge, version=__version__)
            holds = Holds(
                resuming=machine.resuming,
                identities=machine.identities,
                snapshot=lambda: watch.current,
                clock=clock,
            )
            data = serving.listener(
                beside(edge, holds.app()), http=connection.protocol(lambda: clock)
            )
            control = serving.listener(admin(view.admin()))
            servers = [
                tasks.create_task(data.serve([sockets[0]])),
                tasks.create_task(control.serve([sockets[1]])),
            ]
            upkeep = machine.upkeep()
            await upkeep.turn()  # what a dead process left is in doubt before anybody asks
            running = (
                watch.run(),
                machine.resuming.run(),
                machine.tools.start(watch.current.servers),
                machine.tools.run(),
                upkeep.run(),
            )
            others = [tasks.create_task(one) for one in running]
            if machine.spending is not None:
                others.append(tasks.create_task(machine.spending.run()))
            if machine.sharing is not None:
                others.append(tasks.create_task(machine.sharing.run()))
            if self._emulator is not None:
                others.append(tasks.create_task(self._miss(self._emulator)))
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, watch.poke)
            await machine.preload()  # building an encoder holds the interpreter: before any call
            while not (data.started and control.started):
                await clock.sleep(0.01)
            self._announce(sockets, environment, watch.current)
            await self._stop.wait()
            await self._drain(edge, machine, watch.current)
            data.should_exit = control.should_exit = True
            await asyncio.wait(servers)
            await machine.tools.close()  # commands end before whoever listens to them
            for task in others:
                task.cancel()

    def _announce(
        self, sockets: list[socket.socket], environment: dict[str, str], snapshot: Snapshot
    ) -> None:
        gc.collect()
        gc.freeze()  # what is here now lives as long as the process
        gc.set_threshold(*COLLECT)
        host, port = sockets[0].getsockname()[:2]
        admin_port = sockets[1].getsockname()[1]
        model = next(iter(snapshot.models), "gpt-4o")
        # A policy without the development key knows other keys, which only their agents have.
        key = environment[DEV_KEY_VARIABLE] if mentions(self._path, DEV_KEY_VARIABLE) else ""
        text = serving.announce(host, port, key=key, model=model)
        sys.stdout.write(f"{text}\nready: {self._path} on port {port}, admin on {admin_port}\n")
        sys.stdout.flush()

    async def _drain(self, edge: Edge, machine: Machine, snapshot: Snapshot) -> None:
        self._log.info("stopping", in_flight=edge.in_flight)
        limit = snapshot.edge.drain
        machine.tools.changes.end()  # what stands would be waited for in vain
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(edge.drain(limit))
            resuming = tasks.create_task(machine.resuming.drain(limit))
            hurried = tasks.create_task(self._hurry.wait())
            effects = tasks.create_task(machine.guards.ledger.drain(limit))
            left: set[asyncio.Task[Any]] = {draining, resuming, effects}
            while left and not hurried.done():
                await asyncio.wait({*left, hurried}, return_when=asyncio.FIRST_COMPLETED)
                left = {one for one in left if not one.done()}
            if left:
                self._log.warning("drain_cut_short", in_flight=edge.in_flight)
            for one in (*left, hurried):
                one.cancel()
        if resuming.cancelled():
            await machine.resuming.drain(0)
        if effects.cancelled():
            await machine.guards.ledger.drain(0)
        if draining.cancelled():
            await edge.drain(0)
        else:
            self._log.info("drained", cut=draining.result())

    async def _miss(self, emulator: Emulator) -> None:
        """The emulator is a stand-in for a provider: its end is news, not the gateway's end."""
        status = await emulator.ended()
        if not self._stop.is_set():
            self._log.error("emulator_ended", status=status)

    def _early_refusal(self, machine: Machine, call_id: str, error: GatewayError) -> None:
        self._metrics.refused(error.code)
        machine.refusals(call_id, error)

    def _crashed(self, call_id: str, error: BaseException) -> None:
        where = traceback.extract_tb(error.__traceback__)[-3:]
        lines = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in where]
        self._log.error("call_crashed", call=call_id, error=type(error).__name__, where=lines)
