"""Proof S1: a guest stopped at random moments continues in fresh processes, bit-identical.

`python -m loadtests.hops --json [--hops N] [--seed S] [--guests kernel,javascript,python]`

Every slice is a process of its own: it reads the snapshot's bytes, runs for a random 5 to 25 ms or
until an effect, writes the next snapshot and ends. The same work, undisturbed in one process on the
*plain*, uninstrumented module, gives what must be equal: result or output, memory, requests. A
guest whose interpreter cannot be had is null, with the reason.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from importlib import resources
from pathlib import Path

from loadtests.measure import finish, say
from runtime import abi, engine, sandbox, settings, snapshot
from runtime.errors import SandboxError
from runtime.guests import shelf
from runtime.instrument import register
from runtime.instrument.cache import Cache

ROOT = Path(__file__).parents[1]
KEY = b"loadtests" * 3
NOW = 1_790_000_000_000_000_000
KERNELS = {0: 900, 1: 60_000, 2: 33, 3: 2_200, 4: 3_000}
"""Kind to size: each some 40 ms of CPU on the plain module."""

JAVASCRIPT = """
const draw = () => Math.floor(Math.random() * 1e9), seen = new Map();
function* lcg(x) { while (true) { x = (x * 1103515245 + 12345) % 2147483648; yield x; } }
const g = lcg(7);
function score(text, rounds) {
  let s = 0n;
  for (let i = 0; i < rounds; i++) {
    s = (s * 31n + BigInt(text.charCodeAt(i % text.length) ^ g.next().value)) % 1000000007n;
  }
  return s;
}
const fib = (n) => (n < 2 ? n : fib(n - 1) + fib(n - 2));
const t0 = Date.now();
for (let step = 0; step < 6; step++) {
  const answer = agent.llm(`step ${step}: ünïcode ${draw()}`);
  seen.set(step, [answer.length, score(answer, ROUNDS).toString(), draw(), fib(10 + step)]);
  if (step % 2) { agent.put('step', step); agent.sleep(50); }
  console.log('step', step, JSON.stringify(seen.get(step)), Date.now() - t0);
}
const [owner, again] = agent.all([agent.later.tool('crm.owner', { id: agent.input.id }),
  agent.later.llm('both')]);
agent.checkpoint('facts gathered');
try { agent.tool('no_such_tool', {}); } catch (e) { console.log('caught', e.code, e.message); }
agent.emit({ owner, again, text: 'x'.repeat(3000).length });
const last = agent.llm('y'.repeat(5000)).length;
console.log('RESULT', JSON.stringify([...seen]), agent.get('step'), last);
"""

PYTHON = """
import agent

def work(n):
    if n == 0:
        return agent.llm("deep " + str(agent.input["id"]))
    here = [n * i for i in range(n)]
    below = work(n - 1)
    return below + str(sum(here) % 10)

def sieve(n):
    marks = bytearray(n)
    found = 0
    for i in range(2, n):
        if not marks[i]:
            found += 1
            for k in range(i * i, n, i):
                marks[k] = 1
    return found

seen = {}
for step in range(5):
    seen[step] = (work(6 + step), sieve(ROUNDS + step * 100))
    agent.put("step", step)
    print("step", step, seen[step])
agent.sleep(20)
try:
    agent.tool("no_such_tool")
except agent.Error as problem:
    print("caught", problem.code)
agent.emit({"steps": len(seen), "last": seen[4][0]})
print("RESULT", seen, agent.get("step"))
"""


def served(request: abi.Request) -> bytes:
    """The pretend gateway: a pure function of the request, so that two runs can be compared."""

    def one(call: abi.Request) -> dict:
        if call.op == "llm.chat":
            return {"ok": {"text": "re: " + call.args["messages"][0]["content"].upper() * 3}}
        if call.op == "tool.call" and call.args["name"] != "no_such_tool":
            return {"ok": {"content": "found", "structured": {"email": "owner@example.test"}}}
        if call.op == "tool.call":
            return abi.error("unknown_tool", call.args["name"])
        if call.op == "memory.get":
            return {"ok": {"value": 5, "version": 1}}
        if call.op == "memory.put":
            return {"ok": {"version": 1}}
        return {"ok": None}

    body = {"ok": [one(c) for c in request.calls]} if request.op == "batch" else one(request)
    return abi.seal(body, request.ordinal, NOW + 400_000_000 * (request.ordinal + 1))


def cache() -> Cache:
    """The user's cache, so that interpreters are registered once."""
    return Cache(settings.from_environment().cache_dir)


def kernels(shelf_cache: Cache, variant: str = "flag") -> register.Registered:
    """The kernels, registered."""
    text = resources.files("runtime.guests").joinpath("examples/kernels/kernels.wat").read_text()
    options = register.Options(main="run", arguments=(4, 3), variant=variant)
    return register.register(engine.Engine.assemble(text), shelf_cache, options)


def plain_kernels(own: engine.Engine) -> sandbox.Loaded:
    """The kernels as they were compiled, for reference."""
    text = resources.files("runtime.guests").joinpath("examples/kernels/kernels.wat").read_text()
    module = own.compile(own.assemble(text))
    return sandbox.load(own, module, plain_hash="", module_hash="", main="run")


def guest(name: str, own: engine.Engine, where: Cache) -> shelf.Guest:
    """An interpreter, installed at first use."""
    if not shelf.installed(name, where):
        say(f"{name}: installing, once")
        shelf.install(name, where)
    return shelf.ready(name, own, where)


def loaded_for(job: dict, own: engine.Engine, where: Cache) -> sandbox.Loaded:
    """The program a job names."""
    if job["guest"] == "kernel":
        return register.loaded(kernels(where), own, where)
    return guest(job["guest"], own, where).loaded


def fresh(job: dict, program: sandbox.Loaded) -> sandbox.Sandbox:
    """The job's guest, not yet started."""
    if job["guest"] == "kernel":
        return sandbox.Sandbox(program, abi.State(argv=[]), arguments=tuple(job["arguments"]))
    state = shelf.recipe(job["guest"]).state(job["script"], {"id": 7}, seed="5a" * 32, clock_ns=NOW)
    return sandbox.Sandbox(program, state)


def one_slice(folder: Path, ms: float) -> None:
    """What a slice's process does: bytes in, bytes out."""
    job = json.loads((folder / "job.json").read_text())
    own = engine.Engine()
    program = loaded_for(job, own, cache())
    before = folder / "snapshot"
    reply = at = None
    if before.exists():
        image = snapshot.restore([snapshot.decode(before.read_bytes(), KEY)])
        one = sandbox.Sandbox(program, image=image)
        if one.pending is not None:
            reply = served(one.pending.request)
            at = json.loads(reply)["at"]
    else:
        one = fresh(job, program)
    one.prepare()
    timer = threading.Timer(ms / 1e3, one.ask_to_yield)
    timer.start()
    outcome = one.run(reply, at_ns=at)
    timer.cancel()
    timer.join()
    row = {"kind": type(outcome).__name__, "bytes": 0}
    if isinstance(outcome, sandbox.Waiting):
        row["request"] = outcome.request.digest
    if isinstance(outcome, (sandbox.Waiting, sandbox.Preempted)):
        data = snapshot.encode(one.capture(), KEY)
        before.write_bytes(data)
        row["bytes"] = len(data)
    else:
        row["ending"] = repr(outcome)
        row["memory"] = abi.digest(one.memory())
    row["output"] = [[r.kind, repr(r.data)] for r in one.outbox]
    print(json.dumps(row))


def reference(job: dict, own: engine.Engine, where: Cache) -> dict:
    """The same job on the plain module, in one process, never stopped."""
    requests: list[str] = []
    holder: list[sandbox.Sandbox] = []

    def respond(request: abi.Request) -> bytes:
        requests.append(request.digest)
        answer = served(request)
        clock = holder[0].state
        clock.clock_ns = max(clock.clock_ns, json.loads(answer)["at"])
        return answer

    if job["guest"] == "kernel":
        program = plain_kernels(own)
    else:
        program = shelf.plain(guest(job["guest"], own, where), own, where)
    one = fresh(job, program)
    one.responder = respond
    holder.append(one)
    outcome = one.run()
    return {
        "ending": repr(outcome),
        "memory": abi.digest(one.memory()),
        "output": [[r.kind, repr(r.data)] for r in one.outbox],
        "requests": requests,
    }


def hop(job: dict, least: int, rng: random.Random, own: engine.Engine, where: Cache) -> dict:
    """Hop through fresh processes to the end; compare."""
    want = reference(job, own, where)
    got: dict = {"output": [], "requests": []}
    hops = processes = 0
    sizes: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        while True:
            ms = rng.uniform(5, 25) if hops < 3 * least else 2_000
            command = [sys.executable, "-m", "loadtests.hops", "--slice", name, "--ms", str(ms)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            processes += 1
            if done.returncode:
                return {
                    "hops": hops,
                    "processes": processes,
                    "exact": False,
                    "why": done.stderr[-500:],
                }
            row = json.loads(done.stdout.splitlines()[-1])
            got["output"] += row["output"]
            if "request" in row:
                got["requests"].append(row["request"])
            if "ending" in row:
                got |= {"ending": row["ending"], "memory": row["memory"]}
                break
            hops += 1
            sizes.append(row["bytes"])
    different = [what for what in want if want[what] != got[what]]
    result = {"hops": hops, "processes": processes, "exact": not different}
    result["snapshot_bytes_max"] = max(sizes, default=0)
    if different:
        result["why"] = f"{different} differ: {got} against {want}"[:1_000]
    return result


def total(rows: list[dict]) -> dict:
    """Several jobs of one guest as one figure."""
    out = {
        "hops": sum(row["hops"] for row in rows),
        "processes": sum(row["processes"] for row in rows),
        "exact": all(row["exact"] for row in rows),
        "snapshot_bytes_max": max(row.get("snapshot_bytes_max", 0) for row in rows),
    }
    why = [row["why"] for row in rows if "why" in row]
    return {**out, "why": why} if why else out


def jobs_for(name: str) -> list[dict]:
    """The jobs of a guest."""
    if name == "kernel":
        return [{"guest": "kernel", "arguments": [kind, size]} for kind, size in KERNELS.items()]
    if name == "javascript":
        return [{"guest": "quickjs", "script": JAVASCRIPT.replace("ROUNDS", "5000")}]
    return [{"guest": "micropython", "script": PYTHON.replace("ROUNDS", "20000")}]


def main() -> None:
    """Run the proof, or one slice of it."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", action="store_true")
    options.add_argument("--hops", type=int, default=20, help="at least so many for each guest")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--guests", default="kernel,javascript,python")
    options.add_argument("--slice", help=argparse.SUPPRESS)
    options.add_argument("--ms", type=float, default=20.0, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.slice:
        one_slice(Path(given.slice), given.ms)
        return
    begun = time.monotonic()
    rng = random.Random(given.seed)
    own, where = engine.Engine(), cache()
    out: dict = {}
    for name in given.guests.split(","):
        try:
            rows: list[dict] = []
            while sum(row["hops"] for row in rows) < given.hops and len(rows) < 20:
                rows += [hop(job, given.hops, rng, own, where) for job in jobs_for(name)]
            out[name] = total(rows)
        except SandboxError as error:
            out[name] = {"null_because": str(error)}
        say(f"{name}: {out[name]}")
    finish(out, began=begun, seed=given.seed)


if __name__ == "__main__":
    main()
