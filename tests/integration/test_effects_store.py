"""The ledger on a real disk: kill -9 between intent and outcome, at any moment."""

from __future__ import annotations

import asyncio
import signal
import sqlite3

import pytest

from scheduler import api
from scheduler.api import Bounds
from scheduler.effects import Doubt, Go, Mark, Replay
from tests.fixtures.effects import new_effect
from tests.fixtures.held import NOW
from tests.integration.test_holds_store import ROOT, program

pytestmark = pytest.mark.integration

ACTOR = """
import asyncio, sys, pathlib
from scheduler import api
from scheduler.api import Bounds
from scheduler.effects import Go, Replay
from tests.fixtures.effects import new_effect
from tests.fixtures.held import NOW

# Every lane works through its keys: reserve, act on the world (one line of output), settle. What
# an earlier incarnation has settled is skipped, what it left in doubt is not acted on.
async def main():
    store = api.open(pathlib.Path(sys.argv[1]))
    assert store.own()
    await store.effects.abandoned(before=NOW + 1)

    async def one(lane):
        for count in range(200):
            key = f"{lane}-{count}"
            judgment = await store.effects.reserve(new_effect(key), now=NOW, bounds=Bounds())
            if not isinstance(judgment, Go):
                continue
            sys.stdout.write(key + "\\n")
            sys.stdout.flush()
            await store.effects.settle(
                key, judgment.epoch, b"done", tokens=0, now=NOW, bounds=Bounds()
            )

    await asyncio.gather(*[one(lane) for lane in range(16)])

asyncio.run(main())
"""


def test_no_effect_happens_twice_however_often_its_actor_is_killed(tmp_path):
    acted: list[str] = []
    for number in range(8):
        process = program(ACTOR, str(tmp_path))
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(30 + 40 * number)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().splitlines(keepends=True)
        process.communicate()
        acted += [line.decode().strip() for line in lines if line.endswith(b"\n")]
    assert len(acted) > 1_000
    assert len(acted) == len(set(acted))

    async def books() -> None:
        store = api.open(tmp_path)
        try:
            await store.effects.abandoned(before=NOW + 1)
            counts = await store.effects.counts()
            assert set(counts) <= {Mark.SETTLED, Mark.IN_DOUBT}
            # Whatever acted is on record; what is in doubt is little, and is not sent again.
            for key in acted:
                judgment = await store.effects.reserve(
                    new_effect(key), now=NOW + 1, bounds=Bounds()
                )
                assert isinstance(judgment, Replay | Doubt)
        finally:
            await store.close()

    asyncio.run(books())


def test_a_store_of_the_first_version_is_taken_over(tmp_path):
    first = ROOT / "scheduler" / "stores" / "sql" / "0001_held_calls.sql"
    with sqlite3.connect(tmp_path / api.FILE) as db:
        db.executescript(f"{first.read_text()}\nPRAGMA user_version=1;")

    async def scenario() -> None:
        store = api.open(tmp_path)
        try:
            judgment = await store.effects.reserve(new_effect("k"), now=NOW, bounds=Bounds())
            assert judgment == Go(1)
            assert await store.counts() == {}
        finally:
            await store.close()

    asyncio.run(scenario())
