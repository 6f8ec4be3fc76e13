"""Followers hear of every byte once, of silence only where there was one."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.call import End, Reply
from gateway.clock import LoopClock
from gateway.holds import follow
from gateway.holds.follow import Followers, Run
from gateway.upstream import TransportFault
from tests.fixtures.fake_service import FakeSource
from tests.sim.loop import run as virtually
from tests.unit.layers.test_hold import row

SECOND = 1_000_000


def reply(*steps) -> Reply:
    return Reply(status=200, headers=[], source=FakeSource(list(steps)))


def test_bytes_come_as_they_are_read_and_a_silence_is_told():
    async def scenario() -> list[bytes]:
        followers, one = Followers(LoopClock()), Run(row())

        async def hear() -> list[bytes]:
            return [piece async for piece in followers.bytes_of(one, 2 * SECOND)]

        hearing = asyncio.ensure_future(hear())
        await followers.read(one, reply(b"a", b"b", 5.0, b"", b"c"))
        followers.changed(one.held.id)  # news that brings no byte is no silence
        await asyncio.sleep(1)
        followers.over(one)
        return await hearing

    assert virtually(scenario()) == [b"a", b"b", b"", b"", b"c"]


def test_whoever_comes_late_hears_it_from_the_beginning():
    async def scenario() -> list[bytes]:
        followers, one = Followers(LoopClock()), Run(row())
        await followers.read(one, reply(b"a", b"b"))
        followers.over(one)
        return [piece async for piece in followers.bytes_of(one, SECOND)]

    assert virtually(scenario()) == [b"a", b"b"]


def test_a_reply_is_closed_as_it_ended():
    async def scenario() -> list[End | None]:
        followers, ends = Followers(LoopClock()), []
        for steps in ([b"a"], [b"a", TransportFault("cut", sent="all")], [b"a", ValueError()]):
            made = reply(*steps)
            with contextlib.suppress(ValueError):
                await followers.read(Run(row()), made)
            ends.append(made.ended)
        return ends

    assert virtually(scenario()) == [End.COMPLETE, End.CUT, End.DRAINED]


def test_replies_fill_a_bounded_memory_which_their_ends_give_back(monkeypatch):
    monkeypatch.setattr(follow, "MAX_KEPT", 10)

    async def scenario() -> None:
        followers = Followers(LoopClock())
        one, other, third = Run(row()), Run(row()), Run(row())
        assert (await followers.read(one, reply(b"x" * 8)))[1] is None
        broken = (await followers.read(other, reply(b"x" * 8)))[1]
        assert broken is not None
        assert broken.code == "replies_too_large"
        for run in (one, other):
            followers.over(run)
        assert (await followers.read(third, reply(b"x" * 8)))[1] is None

    virtually(scenario())


def test_nobody_is_left_waiting_when_the_process_stops():
    async def scenario() -> bool:
        followers = Followers(LoopClock())
        waiting = asyncio.ensure_future(followers.news("h", 3_600 * SECOND))
        await asyncio.sleep(0)
        followers.leave()
        assert followers._waiting == {}
        return await waiting

    assert virtually(scenario()) is True


def test_a_follower_that_leaves_is_forgotten():
    async def scenario() -> None:
        followers = Followers(LoopClock())
        waiting = asyncio.ensure_future(followers.news("h", SECOND))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert followers._waiting == {}
        assert not followers.crowded
        assert await followers.news("h", SECOND) is False

    virtually(scenario())
