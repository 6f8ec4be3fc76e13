"""The worker over an in-memory source: parked, crashed and fenced, results stay equal."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

import pytest

pytest.importorskip("wasmtime")
pytest.importorskip("icpp_binaryen")

from loadtests import hops
from runtime import abi
from runtime.engine import Engine
from runtime.instrument import register
from runtime.sandbox import Finished, HostFault, Preempted, Sandbox, Trapped, Waiting
from runtime.worker import Broken, Claim, Step, Worker

pytestmark = pytest.mark.integration

KEY = b"k" * 32
AGENT = """
(module (import "agent" "host_call" (func $host (param i32 i32 i32 i32) (result i32)))
  (memory 1) (global $sum (mut i64) (i64.const 0))
  (data (i32.const 16) "{\\"v\\":1,\\"op\\":\\"memory.get\\",\\"args\\":{\\"key\\":\\"k\\"}}")
  (data (i32.const 80) "{\\"v\\":1,\\"op\\":\\"emit\\",\\"args\\":{\\"data\\":1}}")
  (func $work (param i32) (loop $l
    global.get $sum i64.const 6364136223846793005 i64.mul local.get 0 i64.extend_i32_u i64.add
    global.set $sum local.get 0 i32.const 1 i32.sub local.tee 0 br_if $l))
  (func (export "run") (param i32) (result i64) (local i32)
    (loop $l
      local.get 0 i32.const 300000 i32.add call $work
      i32.const 80 i32.const 37 i32.const 2000 i32.const 50 call $host drop
      i32.const 16 i32.const 44 i32.const 2000 i32.const 500 call $host
      i64.extend_i32_u global.get $sum i64.add i32.const 2006 i64.load i64.add global.set $sum
      local.get 1 i32.const 1 i32.add local.tee 1 i32.const 5 i32.lt_u br_if $l)
    i32.const 80 i32.const 37 i32.const 2000 i32.const 50 call $host drop
    global.get $sum))
"""


def reply(request: abi.Request) -> bytes:
    value = {"value": request.ordinal * 7, "version": 1}
    return abi.seal({"ok": value}, request.ordinal, 1_000 * (request.ordinal + 1))


@dataclass
class Row:
    number: int
    epoch: int = 0
    chain: list[bytes] = field(default_factory=list)
    waits: abi.Request | None = None
    output: list = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    end: object = None
    slices: int = 0
    claimed: bool = False


class Memory:
    """A source that keeps what was committed, and refuses what is fenced or made to fail."""

    def __init__(self, count: int, *, fail_every: int = 0, urgent: frozenset[int] = frozenset()):
        self.rows = {f"t{n}": Row(n) for n in range(count)}
        self.lock = threading.Lock()
        self.commits = 0
        self.fail_every = fail_every
        self.urgent = urgent
        self.done = threading.Event()

    def claim(self) -> Claim | None:
        with self.lock:
            for name, row in self.rows.items():
                if row.end is None and not row.claimed:
                    row.claimed = True
                    row.epoch += 1
                    answer = None if row.waits is None else reply(row.waits)
                    return Claim(
                        task=name, epoch=row.epoch, program="agent", arguments=(row.number,),
                        state=abi.State(argv=[]), chain=tuple(row.chain), files={}, reply=answer,
                        at_ns=None if answer is None else json.loads(answer)["at"],
                        urgent=row.number in self.urgent,
                    )  # fmt: skip
        return None

    def commit(self, step: Step) -> bool:
        with self.lock:
            row = self.rows[step.task]
            self.commits += 1
            if step.epoch != row.epoch:
                return False
            row.claimed = False
            if self.fail_every and self.commits % self.fail_every == 0:
                return False  # the disk was full: nothing of this slice counts
            row.slices += 1
            if isinstance(step.outcome, HostFault):
                return True
            row.output += [r.data for r in step.records]
            row.waits = None
            if isinstance(step.outcome, Waiting):
                row.waits = step.outcome.request
                known = row.digests.setdefault(row.waits.ordinal, row.waits.digest)
                assert known == row.waits.digest, "a determinism breach"
            if step.data is not None:
                row.chain = [step.data] if step.kind == "full" else [*row.chain, step.data]
            elif not isinstance(step.outcome, Preempted):
                row.end = step.outcome
            if all(one.end is not None for one in self.rows.values()):
                self.done.set()
            return True


class Programs:
    def __init__(self, loaded) -> None:
        self.loaded = loaded

    def find(self, name: str):
        assert name == "agent"
        return self.loaded, ("", b"")


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.fixture(scope="module")
def agent(engine):
    where = hops.cache()
    made = register.register(Engine.assemble(AGENT), where, register.Options(arguments=(3,)))
    return register.loaded(made, engine, where)


@pytest.fixture(scope="module")
def wanted(agent):
    """Each agent alone, never stopped but in its calls."""
    out = {}
    for number in range(12):
        one = Sandbox(agent, abi.State(argv=[]), arguments=(number,))
        one.prepare()
        outcome = one.run()
        while isinstance(outcome, Waiting):
            answer = reply(outcome.request)
            outcome = one.run(answer, at_ns=json.loads(answer)["at"])
        out[f"t{number}"] = (outcome, [r.data for r in one.outbox])
    return out


def finished(source: Memory, wanted) -> None:
    for name, row in source.rows.items():
        assert (row.end, row.output) == wanted[name], name


@pytest.mark.parametrize("fail_every", [0, 5], ids=["sound disk", "every fifth commit fails"])
def test_agents_share_slots_and_end_as_they_would_alone(engine, agent, wanted, fail_every):
    source = Memory(12, fail_every=fail_every, urgent=frozenset({3, 7}))
    worker = Worker(engine, source, Programs(agent), KEY, count=2, quantum_s=0.001)
    worker.start()
    try:
        assert source.done.wait(60)
    finally:
        worker.stop()
    finished(source, wanted)
    assert all(row.slices > 5 for row in source.rows.values()), "five calls and some quanta"


def test_a_worker_that_vanishes_loses_nothing_committed(engine, agent, wanted):
    source = Memory(6)
    for _ in range(4):
        first = Worker(engine, source, Programs(agent), KEY, count=2, quantum_s=0.001)
        first.start()
        time.sleep(0.05)
        with source.lock:  # its leases lapse: what it still files is fenced off
            for row in source.rows.values():
                row.epoch += 1
                row.claimed = False
        first.stop()
        with source.lock:
            for row in source.rows.values():
                row.epoch += 1
                row.claimed = False
    last = Worker(engine, source, Programs(agent), KEY, count=2, quantum_s=None)
    last.start()
    try:
        assert source.done.wait(60)
    finally:
        last.stop()
    finished(source, {name: wanted[name] for name in source.rows})


def test_a_corrupt_snapshot_is_filed_by_name_and_the_others_go_on(engine, agent, wanted):
    source = Memory(3)
    source.rows["t1"].chain = [b"TGSN" + bytes(200)]
    worker = Worker(engine, source, Programs(agent), KEY, count=1, quantum_s=0.01)
    worker.start()
    try:
        assert source.done.wait(60)
    finally:
        worker.stop()
    broken = source.rows["t1"].end
    assert isinstance(broken, Broken)
    assert broken.code == "snapshot_corrupt"
    del source.rows["t1"]
    finished(source, {name: wanted[name] for name in source.rows})


def test_the_wanted_ending_is_an_ending(wanted):
    assert all(
        isinstance(end, Finished) and not isinstance(end, Trapped) for end, _ in wanted.values()
    )
    assert len({end.values for end, _ in wanted.values()}) == 12
    assert all(output == [1] * 6 for _, output in wanted.values()), "emitted in every part"
