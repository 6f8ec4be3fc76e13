"""The worker over an in-memory source: parked, crashed and fenced, results stay equal."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("wasmtime")
pytest.importorskip("icpp_binaryen")

from runtime import abi
from runtime.engine import Engine
from runtime.sandbox import Finished, HostFault, Preempted, Sandbox, Trapped, Waiting
from runtime.worker import Broken, Claim, Step, Worker
from tests.integration.runtime_tasks import KEY, Programs, Tasks, program, reply

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.fixture(scope="module")
def agent(engine):
    return program(engine)


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
        assert source.done.wait(240)
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
        assert source.done.wait(240)
    finally:
        last.stop()
    finished(source, {name: wanted[name] for name in source.rows})


def test_kill_9_of_a_worker_takes_nobody_down_and_loses_nothing_committed(tmp_path, wanted):
    """Two processes share the tasks; one of them is killed again and again, and replaced."""
    tasks = Tasks(tmp_path / "tasks.db")
    tasks.add(60)

    def begin() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.integration.runtime_tasks"]
        one = subprocess.Popen(
            [*command, str(tmp_path / "tasks.db")], cwd=ROOT, text=True, stdout=subprocess.PIPE
        )
        assert one.stdout is not None
        assert one.stdout.readline() == "working\n"
        return one

    steady, kills = begin(), 0
    try:
        while kills < 4:
            tasks.add(60)
            victim = begin()
            time.sleep(0.15)
            kills += victim.poll() is None
            victim.kill()
            victim.communicate()
        assert steady.wait(240) == 0, "the other worker went on to the end"
    finally:
        steady.kill()
        steady.communicate()
    for name, number, found in tasks.rows("select name, number, ending from task"):
        ending, output = wanted[f"t{number}"]
        assert pickle.loads(found) == ending
        assert [
            data for (data,) in tasks.rows("select data from output where task = ?", name)
        ] == output
        effects = tasks.rows("select ordinal, times from effect where task = ?", name)
        assert effects == [(number, 1) for number in range(5)], "each INTENT was committed once"
    assert tasks.rows("select 1 from task where owner is not null") == []


def test_a_corrupt_snapshot_is_filed_by_name_and_the_others_go_on(engine, agent, wanted):
    source = Memory(3)
    source.rows["t1"].chain = [b"TGSN" + bytes(200)]
    worker = Worker(engine, source, Programs(agent), KEY, count=1, quantum_s=0.01)
    worker.start()
    try:
        assert source.done.wait(240)
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
