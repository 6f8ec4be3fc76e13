"""The store of held calls on a real disk: what a kill leaves, two processes, a full disk."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scheduler import api
from scheduler.api import Limits, State, StoreFault
from scheduler.stores import locks
from scheduler.stores.sqlite import SqliteStore
from tests.fixtures.held import NOW, new_hold, reply

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
WIDE = Limits(max_calls=1_000_000, max_per_owner=1_000_000, max_bytes=1 << 40)


def program(text: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A process of its own that runs this."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), *arguments], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


WRITER = """
import asyncio, sys, pathlib
from scheduler import api
from tests.fixtures.held import new_hold
from tests.integration.test_holds_store import WIDE

async def main():
    store = api.open(pathlib.Path(sys.argv[1]))
    number = int(sys.argv[2])

    async def one(lane):
        count = 0
        while True:
            call = f"{number}-{lane}-{count}"
            await store.keep(new_hold(1, id=call), limits=WIDE)
            sys.stdout.write(call + "\\n")
            sys.stdout.flush()
            count += 1

    await asyncio.gather(*[one(lane) for lane in range(16)])

asyncio.run(main())
"""


def test_nothing_acknowledged_is_lost_however_often_the_writer_is_killed(tmp_path):
    told: set[str] = set()
    for number in range(6):
        process = program(WRITER, str(tmp_path), str(number))
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(40 + 60 * number)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines(keepends=True)
        process.communicate()
        told |= {line.decode().strip() for line in lines if line.endswith(b"\n")}
    with sqlite3.connect(tmp_path / api.FILE) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        kept = {row[0] for row in db.execute("SELECT id FROM held_call")}
        bodies = db.execute("SELECT count(*) FROM held_body").fetchone()[0]
        calls, size = db.execute("SELECT calls, bytes FROM held_total").fetchone()
        real = db.execute("SELECT count(*), sum(bytes) FROM held_call").fetchone()
    assert len(told) > 500
    assert told <= kept
    assert bodies == len(kept)
    assert (calls, size) == real


def test_two_processes_write_at_once_and_one_of_them_owns(tmp_path):
    processes = [program(WRITER, str(tmp_path), str(number)) for number in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            for _ in range(200):
                assert process.stdout.readline()
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    one, other = api.open(tmp_path), api.open(tmp_path)
    try:
        assert one.own()
        assert one.own()
        assert not other.own()
        asyncio.run(one.close())
        assert other.own()
    finally:
        asyncio.run(one.close())
        asyncio.run(other.close())


def test_what_one_process_keeps_another_reads_at_once(tmp_path):
    async def scenario() -> None:
        one, other = api.open(tmp_path), api.open(tmp_path)
        try:
            held = await one.keep(new_hold(1), limits=WIDE)
            assert await other.find(held.id, held.owner) == held
            [(claimed, _)] = await one.claim("m", limit=1, now=NOW)
            await one.sending(claimed.id, claimed.epoch, to="p", now=NOW)
            await one.complete(claimed.id, claimed.epoch, reply(b"x" * 3_000_000), now=NOW)
            found = await other.reply(claimed.id)
            assert found is not None
            assert len(found.body) == 3_000_000
        finally:
            await one.close()
            await other.close()

    asyncio.run(scenario())


def test_a_full_disk_is_said_undoes_its_group_and_passes(tmp_path):
    async def scenario() -> None:
        store = api.open(tmp_path)
        assert isinstance(store, SqliteStore)
        try:
            await store.keep(new_hold(1), limits=WIDE)
            pages = await store._writer.ask(
                lambda db: db.execute("PRAGMA page_count").fetchone()[0]
            )
            await store._writer.ask(
                lambda db: db.execute(f"PRAGMA max_page_count={pages + 2}").fetchone()
            )
            large = new_hold(2, request=reply(b"x" * 1_000_000))
            small = [new_hold(number, request=reply(b"")) for number in (3, 4)]
            results = await asyncio.gather(
                *(store.keep(one, limits=WIDE) for one in (small[0], large, small[1])),
                return_exceptions=True,
            )
            assert [type(one).__name__ for one in results] == ["Held", "StoreFault", "Held"]
            assert "full" in str(results[1])
            assert await store.counts() == {State.OPEN: 3}
            await store._writer.ask(
                lambda db: db.execute("PRAGMA max_page_count=1000000").fetchone()
            )
            await store.keep(large, limits=WIDE)
            assert await store.counts() == {State.OPEN: 4}
        finally:
            await store.close()

    asyncio.run(scenario())


def test_the_log_is_copied_back_while_calls_come_and_is_small_after_the_end(tmp_path):
    async def scenario() -> None:
        store = api.open(tmp_path)
        for number in range(40):
            body = reply(b"x" * 1_000_000)
            await store.keep(new_hold(number, request=body), limits=WIDE)
        log = (tmp_path / (api.FILE + "-wal")).stat().st_size
        assert log < 64 * 1024 * 1024
        await store.close()

    asyncio.run(scenario())
    assert not (tmp_path / (api.FILE + "-wal")).exists()


def test_files_are_their_owners_alone(tmp_path):
    old = os.umask(0)
    try:
        store = api.open(tmp_path / "new")
        asyncio.run(store.keep(new_hold(1), limits=WIDE))
        modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "new").iterdir()}
        asyncio.run(store.close())
    finally:
        os.umask(old)
    assert set(modes.values()) == {0o600}, modes
    assert f"{api.FILE}-wal" in modes
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"this is no database, but it is long enough to look at" * 30, "not a database"), (None, "")],
)
def test_a_file_that_is_no_store_is_refused_with_one_sentence(tmp_path, content, said):
    path = tmp_path / api.FILE
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreFault) as fault:
        api.open(tmp_path)
    assert said in str(fault.value)
    assert str(path) in str(fault.value)


def test_a_store_of_a_newer_program_is_left_alone(tmp_path):
    asyncio.run(api.open(tmp_path).close())
    with sqlite3.connect(tmp_path / api.FILE) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(StoreFault, match="newer Tidegate"):
        api.open(tmp_path)


def test_the_file_system_of_a_path_is_known():
    assert locks.file_system(Path("/proc/self")) == "proc"
    assert locks.file_system(Path("/")) not in locks.NETWORK
