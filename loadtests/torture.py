"""Proof S2: a yield at every check, and a fresh instance from bytes every 500, change nothing.

`python -m loadtests.torture --json [--seconds N] [--moves N] [--guests kernel,javascript,python]`

For `--seconds` of wall time a guest (kernels: each kind in turn) is stopped at *every* check it
reaches and replaced by its own bytes every `--moves` yields; then it runs on to its end
undisturbed. What it did must equal the uninterrupted run of the plain module.
"""

from __future__ import annotations

import argparse
import json
import time

from loadtests import hops
from loadtests.measure import finish, say
from runtime import abi, engine, sandbox, snapshot
from runtime.errors import SandboxError


def tormented(
    job: dict, program: sandbox.Loaded, seconds: float, every: int, least: int = 0
) -> dict:
    """The job under torture for so long and so many yields, then to its end."""
    one = hops.fresh(job, program)
    end = time.monotonic() + seconds
    yields = moves = 0
    reply = at = None
    requests = []
    while True:
        one.prepare()
        if yields < least or yields % 64 or time.monotonic() < end:
            one.ask_to_yield()
        outcome = one.run(reply, at_ns=at)
        reply = at = None
        if isinstance(outcome, sandbox.Waiting):
            requests.append(outcome.request.digest)
            reply = hops.served(outcome.request)
            at = json.loads(reply)["at"]
        elif isinstance(outcome, sandbox.Preempted):
            yields += 1
        else:
            break
        if (yields + len(requests)) % every == 0:
            records = one.outbox
            data = snapshot.encode(one.capture(), hops.KEY)
            one.close()
            one = sandbox.Sandbox(
                program, image=snapshot.restore([snapshot.decode(data, hops.KEY)])
            )
            one.outbox = records
            moves += 1
    return {
        "ending": repr(outcome),
        "memory": abi.digest(one.memory()),
        "output": [[r.kind, repr(r.data)] for r in one.outbox],
        "requests": requests,
        "yields": yields,
        "moves": moves,
    }


def torment(name: str, seconds: float, every: int, own: engine.Engine, *, least: int = 0) -> dict:
    """All jobs of a guest, with `least` yields between them however slow the machine is."""
    where = hops.cache()
    jobs = hops.jobs_for(name)
    out: dict = {"yields": 0, "moves": 0, "exact": True}
    for job in jobs:
        want = hops.reference(job, own, where)
        program = hops.loaded_for(job, own, where)
        got = tormented(job, program, seconds / len(jobs), every, -(-least // len(jobs)))
        out["yields"] += got["yields"]
        out["moves"] += got["moves"]
        different = [what for what in want if want[what] != got[what]]
        if different:
            out["exact"] = False
            out["why"] = f"{job['guest']}: {different} differ"
    return out


def main() -> None:
    """Run the proof."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--json", action="store_true")
    options.add_argument("--seconds", type=float, default=13.0, help="for each guest")
    options.add_argument("--moves", type=int, default=500, help="yields between moves")
    options.add_argument("--guests", default="kernel,javascript,python")
    given = options.parse_args()
    begun = time.monotonic()
    own = engine.Engine()
    out: dict = {}
    for name in given.guests.split(","):
        try:
            out[name] = torment(name, given.seconds, given.moves, own)
        except SandboxError as error:
            out[name] = {"null_because": str(error)}
        say(f"{name}: {out[name]}")
    finish(out, began=begun)


if __name__ == "__main__":
    main()
