"""The worker: claim a task, run a slice, file the result; everything durable is behind two seams.

`Source` is the queue and the journal: it hands out claims fenced by an epoch and takes steps. The
durable one is the execution tier's and plugs in here; nothing in this file knows of SQL.
`Programs` finds the loaded program and base image a claim names; it never fetches.

The order of a stop is: capture (a copy) → the slot is free for the next guest → encode → commit.
Only a committed step may be claimed again, and a commit that fails or is fenced off leaves the
older snapshot as
the truth: nothing of the slice is sent or shown. Encoding happens on one thread of its own; when
it falls behind, slots wait for it, so that images in memory stay bounded.

What cannot be restored is filed as `Broken`, by name; a slice that ended in `HostFault` is filed
without a snapshot, so the task returns to its last one.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from runtime import snapshot
from runtime.errors import SandboxError
from runtime.sandbox import CPU_LIMIT_US, HostFault, Preempted, Sandbox, Waiting
from runtime.slots import Slots

if TYPE_CHECKING:
    from runtime.abi import Record, State
    from runtime.engine import Engine
    from runtime.sandbox import Loaded, Outcome
    from runtime.slots import Stats

MAX_DELTAS: Final = 16
BACKLOG_PER_SLOT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A task to run for one slice.

    Attributes:
        task, epoch: Whose, under which fence.
        program: Name for `Programs`.
        state: Of a task that has not run yet, else None.
        arguments: For the main entry of a new task.
        chain: Encoded snapshots, a full one and its deltas; empty for a new task.
        files: The guest's files, where the chain does not carry them.
        reply, at_ns: Of the effect it waits for.
        urgent: Runs on the tier-0 thread.
        cpu_limit_us: Compute in all slices together.
    """

    task: str
    epoch: int
    program: str
    state: State | None = None
    arguments: tuple[int, ...] = ()
    chain: tuple[bytes, ...] = ()
    files: dict[str, bytes] | None = None
    reply: bytes | None = None
    at_ns: int | None = None
    urgent: bool = False
    cpu_limit_us: int = CPU_LIMIT_US


@dataclass(frozen=True, slots=True)
class Broken:
    """The task could not be put on a slot: a corrupt or foreign snapshot, an absent program."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one slice did, to be committed whole or not at all.

    Attributes:
        task, epoch: The fence.
        outcome: How it ended; a `Waiting` carries the request to send once this is durable.
        data: The new snapshot, None when the task ended or must return to the last one.
        kind: `full` starts a new chain, `delta` goes on the old one.
        records: Output, in order.
        stats: CPU and latencies; None when it never ran.
    """

    task: str
    epoch: int
    outcome: Outcome | Broken
    data: bytes | None = None
    kind: str = ""
    records: tuple[Record, ...] = ()
    stats: Stats | None = None


class Source(Protocol):
    """The queue and the journal. Called from several threads."""

    def claim(self) -> Claim | None:
        """The next task for this worker, its epoch raised; None when there is none."""
        ...

    def commit(self, step: Step) -> bool:
        """Make it durable; False when the fence refused it. Must not raise."""
        ...


class Programs(Protocol):
    """Where programs and base images are."""

    def find(self, name: str) -> tuple[Loaded, tuple[str, bytes]]:
        """The program and (id, memory) of its base image.

        Raises:
            SandboxError: It is not on this node.
        """
        ...


@dataclass(slots=True)
class _Job:
    """A claim on a slot."""

    claim: Claim
    sandbox: Sandbox
    reply: bytes | None
    at_ns: int | None
    base: tuple[str, bytes]
    parent: tuple[str, bytes]
    sizes: list[int] = field(default_factory=list)


class Worker:
    """Slots, fed from a source.

    Args:
        engine: Of all programs.
        source, programs: See there.
        key: Snapshot key of the fleet.
        count: Slots; 0 is one a core.
        quantum_s: CPU seconds a slice.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        programs: Programs,
        key: bytes,
        *,
        count: int = 0,
        quantum_s: float | None = 0.2,
    ) -> None:
        self._source = source
        self._programs = programs
        self._key = key
        self._slots: Slots[_Job] = Slots(
            engine, self._next, self._filed, count=count, quantum_s=quantum_s
        )
        backlog = BACKLOG_PER_SLOT * len(self._slots.slots)
        self._captured: queue.Queue[tuple[_Job, snapshot.Image, Outcome, Stats] | None]
        self._captured = queue.Queue(backlog)
        self._committer = threading.Thread(target=self._commit, name="committer")

    def start(self) -> None:
        """Start claiming."""
        self._committer.start()
        self._slots.start()

    def stop(self) -> None:
        """Stop every guest at its next check, commit what was captured, end."""
        self._slots.stop()
        self._captured.put(None)
        self._committer.join()

    def wake(self) -> None:
        """There is something to claim."""
        self._slots.wake()

    # --- on slot threads ---

    def _next(self) -> _Job | None:
        """The next job for a slot; urgent claims go to the tier-0 thread on the way."""
        while (claim := self._source.claim()) is not None:
            try:
                job = self._ready(claim)
            except SandboxError as error:
                broken = Broken(error.code, str(error))
                self._source.commit(Step(task=claim.task, epoch=claim.epoch, outcome=broken))
                continue
            if not claim.urgent or not self._slots.submit_tier0(job):
                return job
        return None

    def _ready(self, claim: Claim) -> _Job:
        loaded, base = self._programs.find(claim.program)
        if not claim.chain:
            sandbox = Sandbox(
                loaded, claim.state, arguments=claim.arguments, cpu_limit_us=claim.cpu_limit_us
            )
            return _Job(claim, sandbox, None, None, base, ("", b""))
        chain = [snapshot.decode(one, self._key) for one in claim.chain]
        image = snapshot.restore(chain, base=base, files=claim.files)
        sandbox = Sandbox(loaded, image=image, cpu_limit_us=claim.cpu_limit_us)
        sizes = [len(one) for one in claim.chain]
        return _Job(
            claim, sandbox, claim.reply, claim.at_ns, base, (chain[-1].id, image.memory), sizes
        )

    def _filed(self, job: _Job, outcome: Outcome, stats: Stats) -> None:
        if isinstance(outcome, Preempted | Waiting):
            image = job.sandbox.capture()
            job.sandbox.close()
            self._captured.put((job, image, outcome, stats))
            return
        job.sandbox.close()
        # After a defect of ours nothing of the slice counts, its output included.
        records = () if isinstance(outcome, HostFault) else tuple(job.sandbox.outbox)
        self._source.commit(
            Step(
                task=job.claim.task,
                epoch=job.claim.epoch,
                outcome=outcome,
                records=records,
                stats=stats,
            )
        )

    # --- on the committer's thread ---

    def _commit(self) -> None:
        while (taken := self._captured.get()) is not None:
            job, image, outcome, stats = taken
            deltas = job.sizes[1:]
            full = not job.sizes or len(deltas) >= MAX_DELTAS or sum(deltas) > job.sizes[0]
            if isinstance(outcome, Waiting) and outcome.request.op == "checkpoint":
                full = True
            data = snapshot.encode(
                image,
                self._key,
                owner=snapshot.Owner(task=job.claim.task, epoch=job.claim.epoch),
                kind="full" if full else "delta",
                beneath=job.base if full else job.parent,
                depth=0 if full else len(deltas) + 1,
                embed_files=False,
            )
            self._source.commit(
                Step(
                    task=job.claim.task,
                    epoch=job.claim.epoch,
                    outcome=outcome,
                    data=data,
                    kind="full" if full else "delta",
                    records=tuple(job.sandbox.outbox),
                    stats=stats,
                )
            )
