"""Proofs S3, S8 to S11: what stopping costs, and what it buys.

`python -m loadtests.quanta --json [--switches N] [--quantum-ms MS] [--rate PER_S] [--rounds N]`

1. `overhead`: CPU of each kernel, and of a script on QuickJS, as a ratio to the plain module.
2. `suspend_resume_cpu_us`: stop and go on in place, in a loop.
3. Saturation, in rounds: every core has a slot at nice +10 that computes; agents are switched
   after each quantum of CPU time, and at each switch the guest is captured and encoded as a delta
   against its last snapshot. `cpu_overhead_pct` is the CPU of those agents against the same work
   run to completion (measured before and after each round, per unit of work). Meanwhile tier-0
   jobs arrive at random: `tier0_*` is from submission to guest code on the tier-0 thread.
4. The design without a tier-0 thread, in each round: the same jobs, put at the *head* of the queue
   that the same slots share, wait for a slot to reach the end of its quantum: `shared_workers_*`.

Figures of rounds come as their median with `_min` and `_max`; percentiles are over all rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from loadtests import hops
from loadtests.measure import finish, say, summary
from runtime import abi, engine, sandbox, snapshot
from runtime.guests import shelf
from runtime.instrument import register
from runtime.slots import Slots

COMPUTE = 1
"""The kernel that saturates: floats whose last bit matters."""
TIER0 = (4, 20)
SCRIPTS = {
    "quickjs": """
const seen = new Map();
for (let i = 0; i < 60000; i++) seen.set('k' + i % 97, (seen.get('k' + i % 97) || 0) + i * i % 7);
console.log(JSON.stringify([...seen]).length);
""",
    "quickjs_calls": """
const fib = (n) => (n < 2 ? n : fib(n - 1) + fib(n - 2));
console.log(fib(24));
""",
}


@dataclass
class Job:
    """A guest and what it needs to go on."""

    sandbox: sandbox.Sandbox
    reply: bytes | None = None
    at_ns: int | None = None
    name: str = ""
    last: tuple[str, bytes] = ("", b"")
    submitted: float = 0.0
    cpu_us: int = 0


def thread_cpu(run) -> float:
    begun = time.thread_time()
    run()
    return time.thread_time() - begun


def kernel(program, kind: int, size: int) -> sandbox.Sandbox:
    return sandbox.Sandbox(program, abi.State(argv=[]), arguments=(kind, size))


def overheads(program, plain, own, where) -> dict[str, float]:
    """Ratio of CPU to the plain module, the least of interleaved rounds of each."""
    names = ("hash", "float", "calls", "depth", "pointers")
    out = {}
    for kind, size in hops.KERNELS.items():
        rounds = [
            (
                thread_cpu(kernel(plain, kind, size).run),
                thread_cpu(kernel(program, kind, size).run),
            )
            for _ in range(5)
        ]
        out[names[kind]] = round(min(r[1] for r in rounds) / min(r[0] for r in rounds), 2)
    guest = hops.guest("quickjs", own, where)
    untouched = shelf.plain(guest, own, where)

    def script(which, text):
        state = guest.recipe.state(text, None, seed="5a" * 32, clock_ns=hops.NOW)
        return sandbox.Sandbox(which, state).run

    for name, text in SCRIPTS.items():
        rounds = [
            (thread_cpu(script(untouched, text)), thread_cpu(script(guest.loaded, text)))
            for _ in range(5)
        ]
        out[name] = round(min(r[1] for r in rounds) / min(r[0] for r in rounds), 2)
    return out


def in_place(program) -> list[float]:
    """CPU microseconds of stopping and going on, by round."""
    one = kernel(program, COMPUTE, 2_000_000_000)
    one.prepare()
    times = []
    for _ in range(5):
        begun = time.thread_time()
        for _number in range(1_000):
            one.ask_to_yield()
            one.run()
        times.append((time.thread_time() - begun) / 1_000 * 1e6)
    one.close()
    return times


class Saturated:
    """Slots that always compute, with tier-0 jobs arriving."""

    def __init__(
        self, own, program, *, quantum_s: float, shared: bool, agents: int, size: int
    ) -> None:
        self.program = program
        self.shared = shared
        self.size = size
        self.queue: deque[Job] = deque()
        self.waits: list[float] = []
        self.preempts: list[float] = []
        self.switches = 0
        self.finished = 0
        self.cpu_us = 0
        self.lock = threading.Lock()
        self.slots = Slots(own, self.claim, self.filed, quantum_s=quantum_s)
        for _ in range(agents):
            self.queue.append(Job(kernel(program, COMPUTE, size), name="background"))

    def claim(self) -> Job | None:
        with self.lock:
            job = self.queue.popleft() if self.queue else None
        if job is not None and job.name == "tier0":
            self.waits.append((time.monotonic() - job.submitted) * 1e3)
        return job

    def filed(self, job: Job, outcome, stats) -> None:
        if job.name == "tier0":
            if not self.shared:
                self.waits.append(stats.waited_us / 1e3)
            job.sandbox.close()
            return
        job.cpu_us += stats.cpu_us
        if isinstance(outcome, sandbox.Preempted):
            begun = time.thread_time()
            image = job.sandbox.capture()
            kind = "delta" if job.last[0] else "full"
            data = snapshot.encode(image, hops.KEY, kind=kind, beneath=job.last, embed_files=False)
            job.last = (snapshot.ident(data), image.memory)
            job.cpu_us += round((time.thread_time() - begun) * 1e6)
            with self.lock:
                self.switches += 1
                if stats.preempt_us:
                    self.preempts.append(stats.preempt_us / 1e3)
                self.queue.append(job)
            return
        if not isinstance(outcome, sandbox.Finished):
            raise SystemExit(f"a guest ended badly: {outcome}")
        job.sandbox.close()
        with self.lock:
            self.finished += 1
            self.cpu_us += job.cpu_us
            self.queue.append(Job(kernel(self.program, COMPUTE, self.size), name="background"))

    def run(self, rng: random.Random, *, rate: float, until) -> None:
        """Tier-0 jobs at random until the condition holds."""
        self.slots.start()
        try:
            while not until(self):
                time.sleep(rng.expovariate(rate))
                job = Job(kernel(self.program, *TIER0), name="tier0", submitted=time.monotonic())
                if self.shared:
                    with self.lock:
                        self.queue.appendleft(job)
                    self.slots.wake()
                else:
                    self.slots.submit_tier0(job)
        finally:
            self.slots.stop()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) if ordered else 0.0


def saturate(own, program, rng, given, *, shared: bool, until) -> Saturated:
    """One phase of saturation."""
    cores = os.cpu_count() or 1
    run = Saturated(
        own, program, quantum_s=given.quantum_ms / 1e3, shared=shared, agents=cores * 3,
        size=given.size,
    )  # fmt: skip
    run.run(rng, rate=given.rate, until=until)
    return run


def to_completion(own, program, size: int, count: int) -> float:
    """CPU microseconds of a unit of work on niced slots, never stopped; the median."""
    times: list[int] = []
    queue = deque(Job(kernel(program, COMPUTE, size)) for _ in range(count))
    lock = threading.Lock()

    def claim():
        with lock:
            return queue.popleft() if queue else None

    def filed(job, _outcome, stats):
        times.append(stats.cpu_us)
        job.sandbox.close()

    slots = Slots(own, claim, filed, quantum_s=None)
    slots.start()
    while len(times) < count:
        time.sleep(0.01)
    slots.stop()
    return statistics.median(times)


@dataclass
class Rounds:
    """What the rounds of saturation found."""

    overheads: list[float] = field(default_factory=list)
    units: list[float] = field(default_factory=list)
    tier0: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    preempts: list[float] = field(default_factory=list)
    switches: int = 0
    finished: int = 0


def rounds(own, program, rng, given) -> Rounds:
    """Completion, saturation and the shared design, in turn."""
    found, cores = Rounds(), os.cpu_count() or 1
    found.units.append(to_completion(own, program, given.size, 2 * cores))
    for number in range(given.rounds):
        cap = time.monotonic() + given.most_s / given.rounds
        wanted = -(-given.switches // given.rounds)
        run = saturate(
            own, program, rng, given, shared=False,
            until=lambda run, cap=cap, n=wanted: run.switches >= n or time.monotonic() > cap,
        )  # fmt: skip
        found.units.append(to_completion(own, program, given.size, 2 * cores))
        mine, unit = run.cpu_us / max(1, run.finished), sum(found.units[-2:]) / 2
        if run.finished:
            found.overheads.append((mine / unit - 1) * 100)
        found.switches += run.switches
        found.finished += run.finished
        found.tier0 += run.waits
        found.preempts += run.preempts
        found.p99.append(percentile(run.waits, 0.99))
        say(f"round {number}: {run.switches} switches, {mine / 1e6:.3f} and {unit / 1e6:.3f} CPU s")
        end = time.monotonic() + given.shared_s / given.rounds
        found.theirs += saturate(
            own, program, rng, given, shared=True,
            until=lambda _, end=end: time.monotonic() > end,
        ).waits  # fmt: skip
    return found


def main() -> None:
    """Run the proof."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", action="store_true")
    options.add_argument("--switches", type=int, default=510)
    options.add_argument("--quantum-ms", type=float, default=200.0)
    options.add_argument("--rate", type=float, default=30.0, help="tier-0 jobs a second")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--size", type=int, default=1_300_000, help="of a unit of work")
    options.add_argument("--most-s", type=float, default=75.0, help="wall time of the switching")
    options.add_argument("--shared-s", type=float, default=9.0, help="of the shared design")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    begun = time.monotonic()
    rng = random.Random(given.seed)
    own, where = engine.Engine(), hops.cache()
    program = register.loaded(hops.kernels(where), own, where)
    overhead = overheads(program, hops.plain_kernels(own), own, where)
    say(f"overhead {overhead}")
    cost = in_place(program)
    say(f"suspend and resume in place {statistics.median(cost):.1f} us")
    found = rounds(own, program, rng, given)
    tier0, theirs = percentile(found.tier0, 0.99), percentile(found.theirs, 0.99)
    out = {
        "switches": found.switches,
        "quantum_ms": given.quantum_ms,
        **summary("cpu_overhead_pct", found.overheads, 2),
        "unit_cpu_s": round(statistics.median(found.units) / 1e6, 3),
        "units": found.finished,
        "tier0_jobs": len(found.tier0),
        "tier0_p50_ms": percentile(found.tier0, 0.5),
        "tier0_p99_ms": tier0,
        "tier0_p99_ms_min": min(found.p99),
        "tier0_p99_ms_max": max(found.p99),
        "shared_workers_jobs": len(found.theirs),
        "shared_workers_p50_ms": percentile(found.theirs, 0.5),
        "shared_workers_p99_ms": theirs,
        "tier0_ratio": round(theirs / tier0, 1) if tier0 else None,
        "preempt_p50_ms": percentile(found.preempts, 0.5),
        "preempt_p99_ms": percentile(found.preempts, 0.99),
        **summary("suspend_resume_cpu_us", cost, 1),
        "overhead": overhead,
    }
    finish(out, began=begun, seed=given.seed)


if __name__ == "__main__":
    main()
