"""Slots: the threads guests run on, one tier-0 thread, and the ticker that stops them.

- N slot threads at nice +10 and one tier-0 thread at normal priority, which is not a slot: with
  un-niced wasm threads an event loop beside them overslept by 5 ms. Threads inherit nice and
  cannot lower it again, so the main thread is never niced.
- A quantum is CPU time of the owner thread, not wall time: a guest is not charged for waiting for
  a core. Neither is it killed for it: the kill time after an unanswered flag counts CPU time too.
- A guest's flag is an address that dies with its store. It is written only here, under the slot's
  lock, after comparing the slot's generation; the slot is cleared under that lock before the
  owner may close the sandbox. Without this the host writes into freed memory.

Where work comes from and where outcomes go is the caller's: `claim` and `filed`. Nothing here
knows of tasks, stores or snapshots.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from runtime.clock import cpu_us, monotonic, read, sleep, thread_cpu_clock
from runtime.engine import THREAD_BYTES
from runtime.sandbox import HostFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.engine import Engine
    from runtime.sandbox import Outcome, Sandbox

NICE: Final = 10
TICK_S: Final = 0.002
EPOCH_S: Final = 0.025
KILL_AFTER_US: Final = 100_000
TIER0_KILL_US: Final = 60_000_000
MAX_TIER0: Final = 1_024


class Job(Protocol):
    """A slice to run: a sandbox at rest, and the reply it waits for."""

    sandbox: Sandbox
    reply: bytes | None
    at_ns: int | None


J = TypeVar("J", bound=Job)


@dataclass(slots=True)
class Stats:
    """Of one slice.

    Attributes:
        cpu_us: The owner thread's.
        waited_us: From submission to guest code, tier 0 only.
        preempt_us: From flag to unwound, 0 when it was not stopped.
    """

    cpu_us: int = 0
    waited_us: int = 0
    preempt_us: int = 0


class Slot:
    """One thread's right to compute; its flag is reachable only through here."""

    __slots__ = ("_lock", "_sandbox", "clock", "deadline", "generation", "number", "stopped_at")

    def __init__(self, number: int) -> None:
        self.number = number
        self._lock = threading.Lock()
        self._sandbox: Sandbox | None = None
        self.generation = 0
        self.clock = 0
        self.deadline: float | None = None
        self.stopped_at: float | None = None

    def publish(self, sandbox: Sandbox, quantum_s: float | None, kill_us: int | None) -> int:
        """The guest may be stopped from now on; its generation."""
        with self._lock:
            self.generation += 1
            self._sandbox = sandbox
            self.stopped_at = None
            used = cpu_us()
            left = max(0, sandbox.cpu_limit_us - sandbox.cpu_us)
            self.deadline = used / 1e6 + min(quantum_s or left / 1e6, left / 1e6)
            sandbox.kill_cpu_us = None if kill_us is None else used + kill_us
            return self.generation

    def clear(self) -> float | None:
        """Nobody can reach the guest any more; when it was told to stop."""
        with self._lock:
            self._sandbox = None
            return self.stopped_at

    def preempt(self, generation: int | None = None) -> bool:
        """Stop what runs here, if it still is that generation; callable from any thread."""
        with self._lock:
            sandbox = self._sandbox
            if sandbox is None or (generation is not None and generation != self.generation):
                return False
            if self.stopped_at is None:
                self.stopped_at = monotonic()
                used = int(read(self.clock) * 1e6)
                sandbox.kill_cpu_us = used + KILL_AFTER_US
                sandbox.ask_to_yield()
            return True

    def overrun(self) -> bool:
        """The quantum, or all the guest may compute, is used up and nobody has stopped it yet."""
        deadline = self.deadline
        return (
            self._sandbox is not None
            and deadline is not None
            and self.stopped_at is None
            and read(self.clock) >= deadline
        )


class Slots(Generic[J]):
    """The threads.

    Args:
        engine: Whose epoch the ticker advances.
        claim: Next job for a slot, or None; called without a lock, must not block.
        filed: Told how a slice ended, on the thread that ran it; must not raise, and may close
          the sandbox.
        count: Slot threads; 0 is one a core.
        quantum_s: CPU seconds a slice; None runs to completion.
        nice: Of slot threads; 0 leaves them.
    """

    def __init__(
        self,
        engine: Engine,
        claim: Callable[[], J | None],
        filed: Callable[[J, Outcome, Stats], None],
        *,
        count: int = 0,
        quantum_s: float | None = 0.2,
        nice: int = NICE,
    ) -> None:
        self._engine = engine
        self._claim = claim
        self._filed = filed
        self._quantum_s = quantum_s
        self._nice = nice
        self._idle = threading.Condition()
        self._urgent: deque[tuple[J, float]] = deque()
        self._urgent_wake = threading.Condition()
        self._stopping = False
        self.slots = [Slot(number) for number in range(count or os.cpu_count() or 1)]
        self.tier0 = Slot(-1)
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"slot-{slot.number}")
            for slot in self.slots
        ]
        self._threads.append(threading.Thread(target=self._serve_tier0, name="tier-0"))
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        before = threading.stack_size(THREAD_BYTES)
        try:
            for thread in [*self._threads, self._ticker]:
                thread.start()
        finally:
            threading.stack_size(before)

    def stop(self) -> None:
        """Stop every guest at its next check, file it, and return when all threads have ended."""
        self._stopping = True
        with self._idle:
            self._idle.notify_all()
        with self._urgent_wake:
            self._urgent_wake.notify_all()
        while any(thread.is_alive() for thread in self._threads):
            for slot in [*self.slots, self.tier0]:
                slot.preempt()
            for thread in self._threads:
                thread.join(0.01)
        self._ticker.join()

    def wake(self) -> None:
        """There is something to claim."""
        with self._idle:
            self._idle.notify()

    def submit_tier0(self, job: J) -> bool:
        """Run on the tier-0 thread next; False when too many wait there already."""
        with self._urgent_wake:
            if len(self._urgent) >= MAX_TIER0:
                return False
            self._urgent.append((job, monotonic()))
            self._urgent_wake.notify()
        return True

    # --- threads ---

    def _work(self, slot: Slot) -> None:
        if self._nice and sys.platform == "linux":
            # A sandbox may forbid even this; then the threads stay at normal priority.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        slot.clock = thread_cpu_clock(threading.get_ident())
        while not self._stopping:
            job = self._claim()
            if job is None:
                with self._idle:
                    if not self._stopping:
                        self._idle.wait(0.05)
                continue
            self._run(slot, job, self._quantum_s, None, Stats())

    def _serve_tier0(self) -> None:
        slot = self.tier0
        slot.clock = thread_cpu_clock(threading.get_ident())
        while True:
            with self._urgent_wake:
                while not self._urgent and not self._stopping:
                    self._urgent_wake.wait(1.0)
                if not self._urgent:
                    return  # stopping, and all that was submitted is filed
                job, submitted = self._urgent.popleft()
            waited = round((monotonic() - submitted) * 1e6)
            self._run(slot, job, None, TIER0_KILL_US, Stats(waited_us=waited))

    def _run(
        self, slot: Slot, job: J, quantum_s: float | None, kill_us: int | None, stats: Stats
    ) -> None:
        sandbox = job.sandbox
        begun = cpu_us()
        sandbox.prepare()
        slot.publish(sandbox, quantum_s, kill_us)
        if self._stopping:
            slot.preempt()
        try:
            outcome: Outcome = sandbox.run(job.reply, at_ns=job.at_ns)
        except Exception as problem:  # noqa: BLE001  (the worker's loop: one job never ends a slot)
            outcome = HostFault("slot", f"{type(problem).__name__}: {problem}")
        finally:
            stopped_at = slot.clear()
        stats.cpu_us = cpu_us() - begun
        if stopped_at is not None:
            stats.preempt_us = round((monotonic() - stopped_at) * 1e6)
        self._filed(job, outcome, stats)

    def _tick(self) -> None:
        last = monotonic()
        while any(thread.is_alive() for thread in self._threads):
            sleep(TICK_S)
            for slot in (*self.slots, self.tier0):
                if slot.overrun():
                    slot.preempt(slot.generation)
            now = monotonic()
            if now - last >= EPOCH_S:
                self._engine.tick()
                last = now
