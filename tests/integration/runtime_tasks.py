"""An agent, its tasks in one SQLite file, and a worker process over them that a test may kill.

`python -m tests.integration.runtime_tasks FILE` is the worker. A claim belongs to a process; one
whose process is gone is claimed again under the next epoch, which fences off whatever the old one
might still write. A step is one transaction.
"""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
import sys
import threading
import time
from pathlib import Path

from loadtests import hops
from runtime import abi
from runtime.engine import Engine
from runtime.instrument import register
from runtime.sandbox import HostFault, Preempted, Waiting
from runtime.worker import Claim, Step, Worker

KEY = b"k" * 32
KINDS = 12
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
SCHEMA = """
create table if not exists task (name text primary key, number int, epoch int default 0,
  owner int, waits blob, ending blob);
create table if not exists snapshot (task text, at integer primary key, data blob);
create table if not exists output (task text, at integer primary key, data int);
create table if not exists effect (task text, ordinal int, digest text, times int,
  primary key (task, ordinal));
"""


def reply(request: abi.Request) -> bytes:
    value = {"value": request.ordinal * 7, "version": 1}
    return abi.seal({"ok": value}, request.ordinal, 1_000 * (request.ordinal + 1))


def program(engine: Engine):
    where = hops.cache()
    made = register.register(Engine.assemble(AGENT), where, register.Options(arguments=(3,)))
    return register.loaded(made, engine, where)


class Programs:
    """The one program there is, without a base image."""

    def __init__(self, loaded) -> None:
        self.loaded = loaded

    def find(self, name: str):
        assert name == "agent"
        return self.loaded, ("", b"")


def alive(process: int | None) -> bool:
    return process is not None and Path(f"/proc/{process}/stat").exists()


class Tasks:
    """The source of a worker process."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
        self.db.executescript("pragma journal_mode=wal;" + SCHEMA)
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        ((first,),) = self.rows("select count(*) from task")
        rows = [(f"t{number}", number % KINDS) for number in range(first, first + count)]
        self.db.executemany("insert into task (name, number) values (?, ?)", rows)

    def rows(self, query: str, *values: object) -> list[tuple]:
        with self.lock:
            return self.db.execute(query, values).fetchall()

    def claim(self) -> Claim | None:
        with self.lock:
            self.db.execute("begin immediate")
            try:
                return self._claim()
            finally:
                self.db.execute("commit")

    def _claim(self) -> Claim | None:
        query = "select name, number, epoch, owner, waits from task where ending is null"
        free = [row for row in self.db.execute(query).fetchall() if not alive(row[3])]
        if not free:
            return None
        name, number, epoch, _, waits = free[0]
        values = (epoch + 1, os.getpid(), name)
        self.db.execute("update task set epoch = ?, owner = ? where name = ?", values)
        query = "select data from snapshot where task = ? order by at"
        chain = tuple(data for (data,) in self.db.execute(query, (name,)))
        answer = None if waits is None else reply(pickle.loads(waits))
        return Claim(
            task=name, epoch=epoch + 1, program="agent", arguments=(number,),
            state=abi.State(argv=[]), chain=chain, files={}, reply=answer,
            at_ns=None if answer is None else json.loads(answer)["at"],
        )  # fmt: skip

    def commit(self, step: Step) -> bool:
        with self.lock:
            self.db.execute("begin immediate")
            try:
                return self._commit(step)
            finally:
                self.db.execute("commit")

    def _commit(self, step: Step) -> bool:
        row = self.db.execute("select epoch from task where name = ?", (step.task,)).fetchone()
        if row[0] != step.epoch:
            return False
        self.db.execute("update task set owner = null, waits = null where name = ?", (step.task,))
        if isinstance(step.outcome, HostFault):
            return True
        if step.kind == "full":
            self.db.execute("delete from snapshot where task = ?", (step.task,))
        if step.data is not None:
            values = (step.task, step.data)
            self.db.execute("insert into snapshot (task, data) values (?, ?)", values)
        output = [(step.task, one.data) for one in step.records]
        self.db.executemany("insert into output (task, data) values (?, ?)", output)
        if isinstance(step.outcome, Waiting):
            wanted = step.outcome.request
            query = "update task set waits = ? where name = ?"
            self.db.execute(query, (pickle.dumps(wanted), step.task))
            query = (
                "insert into effect values (?, ?, ?, 1) on conflict do update set times = times + 1"
            )
            self.db.execute(query, (step.task, wanted.ordinal, wanted.digest))
        elif not isinstance(step.outcome, Preempted):
            query = "update task set ending = ? where name = ?"
            self.db.execute(query, (pickle.dumps(step.outcome), step.task))
        return True


def main() -> None:
    """Work until no task is left."""
    engine = Engine()
    tasks = Tasks(Path(sys.argv[1]))
    worker = Worker(engine, tasks, Programs(program(engine)), KEY, count=2, quantum_s=0.001)
    worker.start()
    sys.stdout.write("working\n")
    sys.stdout.flush()
    while tasks.rows("select 1 from task where ending is null"):
        time.sleep(0.02)
    worker.stop()


if __name__ == "__main__":
    main()
