"""Proofs S5 to S7: ten thousand agents, few of them live.

`python -m loadtests.density --json [--agents N] [--live N]`

Every agent is a JavaScript agent on QuickJS that waits in a call. At most `--live` have an
instance; the others are parked: bytes in a store (one SQLite file here, as in the execution tier),
of which the process holds only the name and the place in the queue. Then replies arrive for agents
at random: each is fetched, checked, restored, runs to its next call and is parked again. Latency is
from the reply to guest code, bytes read from the store included; CPU is that of decode and restore.
`resume_to_call_*` goes on to the guest's next call: rewinding and its own work between the two.
`start_to_call_cpu_ms` is a new agent's CPU, from its script to its first call.

`delta_bytes_20ms` is what a slice of 20 CPU ms adds to the chain of an agent that computes;
`_churning` the same for one that does nothing but replace objects and texts.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sqlite3
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from loadtests import hops
from loadtests.measure import finish, say, summary
from runtime import engine, sandbox, snapshot
from runtime.slots import Slots

SCRIPT = """
let seen = 0;
for (;;) {
  const answer = agent.llm(`turn ${seen} of ${agent.input.id}`);
  seen += answer.length;
}
"""


COMPUTING = """
const fib = (n) => (n < 2 ? n : fib(n - 1) + fib(n - 2)), rows = [], count = new Map();
function* lcg(x) { for (;;) yield (x = (x * 1103515245 + 12345) % 2147483648); }
const next = lcg(1);
let s = 0n, z = 0;
for (let i = 0;; i++) {
  if (i % 5000 === 0) { rows.push({ i, v: fib(i % 17) }); if (rows.length > 200) rows.shift(); }
  s = (s * 31n + BigInt(i % 977)) % 1000000007n;
  count.set('k' + i % 977, (count.get('k' + i % 977) || 0) + i * i % 7);
  z = (z ^ next.next().value) >>> 0;
}
"""
CHURNING = """
const seen = new Map();
for (let i = 0;; i++) {
  const key = `item ${i * 7919 % 500}`, old = seen.get(key) ?? { count: 0, last: '' };
  seen.set(key, { count: old.count + 1, last: key.split('').reverse().join('') });
}
"""


def deltas(own: engine.Engine, guest, script: str, count: int) -> list[int]:
    """Bytes of the deltas of that many slices, as the worker writes them."""
    state = guest.recipe.state(script, None, seed="5a" * 32, clock_ns=hops.NOW)
    one = sandbox.Sandbox(guest.loaded, state)
    before, sizes = guest.base, []
    done = threading.Event()

    def filed(job, outcome, _stats) -> None:
        nonlocal before
        image = job.sandbox.capture()
        kind = "delta" if sizes else "full"
        data = snapshot.encode(image, hops.KEY, kind=kind, beneath=before, embed_files=False)
        before = (snapshot.ident(data), image.memory)
        sizes.append(len(data))
        if len(sizes) > count or not isinstance(outcome, sandbox.Preempted):
            done.set()
        else:
            todo.append(job)

    todo = [Job(one)]
    slots = Slots(own, lambda: todo.pop() if todo else None, filed, count=1, quantum_s=0.02)
    slots.start()
    done.wait(60)
    slots.stop()
    one.close()
    if len(sizes) <= count:
        raise SystemExit("the computing agent ended")
    return sizes[1:]


@dataclass
class Job:
    """For the slots."""

    sandbox: sandbox.Sandbox
    reply: bytes | None = None
    at_ns: int | None = None


def status(name: str) -> float:
    """A figure of this process in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


class Store:
    """Parked agents: their bytes on disk."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path)
        self.db.execute("pragma journal_mode=off")
        self.db.execute("pragma cache_size=-2000")
        self.db.execute("create table snapshot (agent integer primary key, data blob)")

    def keep(self, agent: int, data: bytes) -> None:
        self.db.execute("insert or replace into snapshot values (?, ?)", (agent, data))

    def fetch(self, agent: int) -> bytes:
        row = self.db.execute("select data from snapshot where agent = ?", (agent,)).fetchone()
        return row[0]


def start(agent: int, guest) -> sandbox.Sandbox:
    """A new agent, run to its first call."""
    state = guest.recipe.state(SCRIPT, {"id": agent}, seed="5a" * 32, clock_ns=hops.NOW)
    one = sandbox.Sandbox(guest.loaded, state)
    one.prepare()
    if not isinstance(one.run(), sandbox.Waiting):
        raise SystemExit("the agent did not reach its first call")
    return one


def files_of(agent: int, guest) -> dict[str, bytes]:
    """The guest's files: script and input are in the task's row, not in every snapshot."""
    return guest.recipe.files(SCRIPT, {"id": agent})


def park(agent: int, one: sandbox.Sandbox, guest, store: Store) -> int:
    """Bytes into the store, the instance gone; how many bytes."""
    data = snapshot.encode(one.capture(), hops.KEY, beneath=guest.base, embed_files=False)
    one.close()
    store.keep(agent, data)
    return len(data)


def resume(agent: int, guest, store: Store) -> tuple[sandbox.Sandbox, float, float, float]:
    """The agent at its next call; ms and CPU ms from bytes to guest code, and ms to that call."""
    begun, cpu = time.perf_counter(), time.thread_time()
    data = store.fetch(agent)
    image = snapshot.restore(
        [snapshot.decode(data, hops.KEY)], base=guest.base, files=files_of(agent, guest)
    )
    one = sandbox.Sandbox(guest.loaded, image=image)
    ready, used = time.perf_counter(), time.thread_time()
    reply = hops.served(one.pending.request)
    one.prepare()
    if not isinstance(one.run(reply, at_ns=json.loads(reply)["at"]), sandbox.Waiting):
        raise SystemExit("the agent ended")
    ended = time.perf_counter()
    return one, (ready - begun) * 1e3, (used - cpu) * 1e3, (ended - begun) * 1e3


def main() -> None:
    """Run the proof."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", action="store_true")
    options.add_argument("--agents", type=int, default=10_000)
    options.add_argument("--live", type=int, default=200)
    options.add_argument("--resumes", type=int, default=3_000)
    options.add_argument("--deltas", type=int, default=50, help="slices whose deltas are weighed")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    begun = time.monotonic()
    rng = random.Random(given.seed)
    own = engine.Engine()
    guest = hops.guest("quickjs", own, hops.cache())
    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name) / "parked.db")
        live = {agent: start(agent, guest) for agent in range(given.live)}
        gc.collect()
        rss_live, address = status("VmRSS"), status("VmSize") / 1024
        say(f"{given.live} live: {rss_live:.0f} MB resident, {address:.0f} GiB of addresses")
        sizes, starts = [], []
        for agent in range(given.live, given.agents):
            cpu = time.thread_time()
            fresh = start(agent, guest)
            starts.append((time.thread_time() - cpu) * 1e3)
            sizes.append(park(agent, fresh, guest, store))
            if agent % 2_000 == 0:
                say(f"{agent} agents, {status('VmRSS'):.0f} MB resident")
        parked = len(sizes)
        gc.collect()
        rss_all = status("VmRSS")
        waits, cpus, calls = [], [], []
        queue = list(live)
        for _ in range(given.resumes):
            agent = rng.randrange(given.live, given.agents)
            if agent in live:
                continue
            oldest = queue.pop(0)
            park(oldest, live.pop(oldest), guest, store)
            live[agent], wait, used, to_call = resume(agent, guest, store)
            queue.append(agent)
            waits.append(wait)
            cpus.append(used)
            calls.append(to_call)
        most = len(live)
        rss_end = status("VmRSS")
        for one in live.values():
            one.close()
    waits.sort()
    calls.sort()
    out = {
        "agents": given.agents,
        "live": most,
        "parked": given.agents - most,
        "rss_mb": round(rss_end, 1),
        "rss_mb_live_only": round(rss_live, 1),
        "kb_per_parked": round(max(0.0, rss_all - rss_live) * 1024 / parked, 3),
        "resume_p50_ms": round(waits[len(waits) // 2], 3),
        "resume_p99_ms": round(waits[int(len(waits) * 0.99)], 3),
        "resume_cpu_ms": round(statistics.median(cpus), 3),
        "resume_to_call_p50_ms": round(calls[len(calls) // 2], 3),
        "resume_to_call_p99_ms": round(calls[int(len(calls) * 0.99)], 3),
        "start_to_call_cpu_ms": round(statistics.median(starts), 3),
        "address_gib": round(address, 1),
        "snapshot_bytes_median": int(statistics.median(sizes)),
        **summary("delta_bytes_20ms", deltas(own, guest, COMPUTING, given.deltas), 0),
        **summary("delta_bytes_20ms_churning", deltas(own, guest, CHURNING, given.deltas), 0),
        "resumes": len(waits),
    }
    finish(out, began=begun, seed=given.seed)


if __name__ == "__main__":
    main()
