"""An agent in the foreground: run, suspend into a file, continue from it in any process.

Without a task store: calls pass the gateway under an agent key, memory and locks live in the
snapshot. Ctrl-C, or a time, suspends. A call in flight is waited for first (a second Ctrl-C gives
up on it): its reply goes into the guest, which yields at its next check, so no call is sent
twice. A call given up on is sent again by the continuation under the same idempotency key.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from runtime import abi, snapshot
from runtime.clock import monotonic, pause, wall_ns
from runtime.outbound import Caller, Outbound
from runtime.sandbox import (
    Exited,
    Finished,
    HostFault,
    Preempted,
    Sandbox,
    Trapped,
    Waiting,
)
from runtime.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.abi import Record, Request
    from runtime.engine import Engine
    from runtime.sandbox import Loaded, Outcome

MAX_MEMORY: Final = 256 << 10
MAX_KEYS: Final = 1_000
STEP_S: Final = 0.01
LONGEST_PAUSE_S: Final = 60.0
"""Of a sleep: then the wall clock, which may have been set, is looked at again."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """The guest stopped; these bytes continue it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The guest ended."""

    outcome: Outcome


@dataclass(slots=True)
class _Job:
    sandbox: Sandbox
    reply: bytes | None = None
    at_ns: int | None = None


@dataclass(slots=True)
class Local:
    """One agent's run.

    Args:
        loaded: Its program.
        engine: Of the program.
        sandbox: At rest: new, or restored.
        caller: Under whose identity calls are made.
        gateway: Base URL.
        key: Snapshot key.
        show: Told every output record and every call, in order.
    """

    loaded: Loaded
    engine: Engine
    sandbox: Sandbox
    caller: Caller
    gateway: str
    key: bytes
    show: Callable[[str, dict[str, Any]], None]
    suspend_after_s: float | None = None
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _forced: asyncio.Event = field(default_factory=asyncio.Event)
    _slots: Slots[_Job] | None = None
    _begun: float = 0.0

    def suspend(self) -> None:
        """Stop at the next check; a second time, give up on the call in flight. From the loop."""
        if self._wanted.is_set():
            self._forced.set()
        self._wanted.set()
        if self._slots is not None:
            self._slots.slots[0].preempt()

    async def run(self) -> Suspended | Done:
        """Until it ends or is suspended."""
        loop = asyncio.get_running_loop()
        results: asyncio.Queue[Outcome] = asyncio.Queue()
        todo: list[_Job] = []

        def filed(_job: object, outcome: Outcome, _stats: object) -> None:
            loop.call_soon_threadsafe(results.put_nowait, outcome)

        self._slots = Slots(
            self.engine,
            lambda: todo.pop() if todo else None,
            filed,
            count=1,
            quantum_s=None,
            nice=0,
        )
        self._begun = monotonic()
        self._slots.start()
        timer = asyncio.ensure_future(self._after()) if self.suspend_after_s is not None else None
        try:
            async with Outbound(self.gateway) as outbound:
                return await self._steps(outbound, results, todo)
        finally:
            if timer is not None:
                timer.cancel()
            await asyncio.to_thread(self._slots.stop)

    async def _after(self) -> None:
        await pause(self.suspend_after_s or 0.0)
        self.suspend()

    async def _steps(
        self, outbound: Outbound, results: asyncio.Queue[Outcome], todo: list[_Job]
    ) -> Suspended | Done:
        slots = self._slots
        if slots is None:
            raise RuntimeError("started by run")
        waiting = self.sandbox.pending.request if self.sandbox.pending else None
        while True:
            reply = None
            if waiting is not None:
                reply = await self._effect(outbound, waiting)
                if reply is None:
                    return self._suspended()
            elif self._wanted.is_set() and self.sandbox.suspended:
                return self._suspended()
            todo.append(_Job(self.sandbox, *((None, None) if reply is None else reply)))
            slots.wake()
            if self._wanted.is_set():
                await self._nudge(slots, results)
            outcome = await results.get()
            self._drain()
            waiting = outcome.request if isinstance(outcome, Waiting) else None
            if not isinstance(outcome, Preempted | Waiting):
                return Done(outcome)
            if waiting is not None and self._wanted.is_set():
                # The call was not sent: the continuation sends it.
                return self._suspended()

    async def _nudge(self, slots: Slots[_Job], results: asyncio.Queue[Outcome]) -> None:
        """Suspension was asked for while the guest waited: stop it once it runs."""
        while results.empty() and not slots.slots[0].preempt():
            await pause(STEP_S)

    def _suspended(self) -> Suspended:
        owner = snapshot.Owner(task=self.caller.task)
        return Suspended(snapshot.encode(self.sandbox.capture(), self.key, owner=owner))

    def _drain(self) -> None:
        for record in self.sandbox.outbox:
            self.show("output", {"record": record})
        self.sandbox.outbox.clear()

    async def _effect(self, outbound: Outbound, request: Request) -> tuple[bytes, int] | None:
        """The reply and its stamp; None when it was given up."""
        begun = monotonic()
        work = asyncio.ensure_future(self._serve(outbound, request))
        force = asyncio.ensure_future(self._forced.wait())
        stop = asyncio.ensure_future(self._wanted.wait())
        try:
            waits = {work, force} | ({stop} if request.op == "sleep" else set())
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None
            body = work.result()
        finally:
            for one in (work, force, stop):
                one.cancel()
        at = max(self.sandbox.state.clock_ns, self._logical(request, begun))
        code = body["error"]["code"] if "error" in body else "ok"
        self.show("call", {"request": request, "outcome": code, "seconds": monotonic() - begun})
        return abi.seal(body, request.ordinal, at), at

    def _logical(self, request: Request, begun: float) -> int:
        """The stamp of a reply: what passed meanwhile, on the task's own clock."""
        if request.op == "sleep":
            return self.sandbox.state.clock_ns + int(request.args["ms"]) * 1_000_000
        return self.sandbox.state.clock_ns + round((monotonic() - begun) * 1e9)

    async def _serve(self, outbound: Outbound, request: Request) -> dict[str, Any]:
        if request.op == "sleep":
            return await self._sleep(request)
        if request.op == "batch" and any(
            one.op.startswith(("memory.", "lock.")) for one in request.calls
        ):
            out = []
            for one in request.calls:
                body = await self._serve(outbound, one)
                out.append({**body, "n": one.ordinal})
            return {"ok": out}
        if request.op.startswith(("memory.", "lock.")) or request.op == "checkpoint":
            return keep(self.sandbox.state.local, request)
        return await outbound.send(request, self.caller)

    async def _sleep(self, request: Request) -> dict[str, Any]:
        """Until its own hour: one that was suspended has slept on, wherever it wakes."""
        kept = self.sandbox.state.local
        wake = kept.setdefault("wake_ns", wall_ns() + int(request.args["ms"]) * 1_000_000)
        while (left := wake - wall_ns()) > 0:
            await pause(min(left / 1e9, LONGEST_PAUSE_S))
        del kept["wake_ns"]
        return {"ok": None}


def keep(local: dict[str, Any], request: Request) -> dict[str, Any]:
    """Memory keys and locks of a run without a store: they travel in its snapshot."""
    args = request.args
    memory = local.setdefault("memory", {})
    if request.op == "checkpoint":
        return {"ok": request.ordinal}
    if request.op == "memory.get":
        value, version = memory.get(args["key"], (None, 0))
        return {"ok": {"value": value, "version": version}}
    if request.op == "memory.put":
        _, version = memory.get(args["key"], (None, 0))
        if args.get("if_version") not in (None, version):
            return abi.error("conflict", f"{args['key']} is at version {version}")
        grown = {**memory, args["key"]: [args["value"], version + 1]}
        if len(grown) > MAX_KEYS or len(abi.dumps(grown)) > MAX_MEMORY:
            return abi.error("too_large", f"{MAX_MEMORY} bytes of memory without a store")
        local["memory"] = grown
        return {"ok": {"version": version + 1}}
    locks = local.setdefault("locks", {})
    if request.op == "lock.acquire":
        if args["name"] in locks:
            return abi.error("conflict", f"{args['name']} is held by this task already")
        locks[args["name"]] = request.ordinal
        return {"ok": {"token": request.ordinal, "dirty": False}}
    if locks.get(args["name"]) != args.get("token"):
        return abi.error("conflict", f"{args['name']} is not held under this token")
    del locks[args["name"]]
    return {"ok": None}


def new_task() -> str:
    """A name for a local run."""
    return f"local_{secrets.token_hex(8)}"


def seed_of(task: str) -> str:
    """The seed of a task's random bytes."""
    return hashlib.blake2b(task.encode(), digest_size=32, person=b"tidegate-seed").hexdigest()


def started_ns() -> int:
    """Where the logical clock of a new task begins."""
    return wall_ns()


def module_state(task: str, given: object, info: dict[str, Any]) -> abi.State:
    """The state of a module that is its own program."""
    return abi.State(
        argv=["agent"],
        files={"/agent/input.json": abi.dumps(given)},
        seed=seed_of(task),
        clock_ns=started_ns(),
        info=info,
    )


def describe(record: Record) -> dict[str, Any]:
    """A record as one JSON line."""
    data = record.data
    if isinstance(data, bytes):
        data = data.decode(errors="replace")
    return {"kind": record.kind, "n": record.sequence, "data": data}


def succeeded(outcome: Outcome) -> bool:
    """It ended by itself and well."""
    return isinstance(outcome, Finished) or outcome == Exited(0)


def words(outcome: Outcome) -> str:
    """How it ended, in a few words."""
    if isinstance(outcome, Finished):
        return (
            f"finished {[f'0x{one:x}' for one in outcome.values]}" if outcome.values else "finished"
        )
    if isinstance(outcome, Exited):
        return f"exited with {outcome.code}"
    if isinstance(outcome, Trapped):
        return f"ended by a trap, {outcome.kind}: {outcome.message}"[:500]
    if isinstance(outcome, HostFault):
        return f"ended by a defect of ours in {outcome.where}: {outcome.message}"[:500]
    raise ValueError(f"{outcome} is no end")
