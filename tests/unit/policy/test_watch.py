"""Hot reload without a disk: an origin and a clock of the test's own."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import PolicyError
from gateway.policy.load import load_texts
from gateway.policy.watch import EVERY, RETRY_AFTER_LOOKS, PolicyWatch
from tests.unit.policy.sample import ENV, SMALL

BAD = SMALL.replace("kind: other", "kind: othr")
MORE = SMALL + "logging: {level: debug}\n"


class Origin:
    """A file whose text and age the test sets; a load can be told to break."""

    def __init__(self, text: str = SMALL) -> None:
        self.text = text
        self.env = dict(ENV)
        self.age = 0
        self.loads = 0
        self.breaks = False
        self.during_load = None

    def write(self, text: str) -> None:
        self.text = text
        self.age += 1

    def load(self):
        self.loads += 1
        if self.breaks:
            raise RuntimeError(self.env["UP_KEY"])
        policy = load_texts({"p.yaml": self.text.encode()}, env=self.env)
        if self.during_load is not None:
            act, self.during_load = self.during_load, None
            act()
        return policy

    def stamp(self, watched):
        return {**{str(path): None for path in watched}, "p.yaml": (0, 0, 0, self.age)}


class Looks:
    """A clock whose `sleep` lets the watch look a given number of times, then stops it."""

    def __init__(self) -> None:
        self.left = 0
        self.slept = 0.0

    def wall(self) -> float:
        return 1_000.0 + self.slept

    async def sleep(self, seconds: float) -> None:
        if self.left == 0:
            raise asyncio.CancelledError
        self.left -= 1
        self.slept += seconds


async def inline(function):
    return function()


class World:
    def __init__(self, text: str = SMALL) -> None:
        self.origin = Origin(text)
        self.clock = Looks()
        self.watch = PolicyWatch(self.origin, clock=self.clock, off_loop=inline)
        self.swaps = []
        self.refusals = []
        self.watch.on_swap.append(lambda old, new: self.swaps.append((old.revision, new.revision)))
        self.watch.on_refused.append(self.refusals.append)

    def look(self, times: int = 1) -> None:
        self.clock.left = times
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(self.watch.run())


def test_there_must_be_a_good_policy_to_begin_with():
    with pytest.raises(PolicyError):
        World(BAD)


def test_a_quiet_file_is_looked_at_and_not_loaded():
    world = World()
    world.look(50)
    assert world.origin.loads == 1
    assert world.clock.slept == 50 * EVERY


def test_a_change_is_in_force_once_it_has_settled():
    world = World()
    first = world.watch.current
    world.origin.write(MORE)
    world.look(1)
    assert world.watch.current is first
    world.look(2)
    assert world.watch.current.logs.level == "debug"
    assert first.logs.level == "info"
    assert world.swaps == [(1, 2)]
    assert world.watch.status.revision == 2


def test_a_file_still_being_written_is_left_alone():
    world = World()
    stamp = world.origin.stamp

    def growing(watched):
        world.origin.age += 1
        return stamp(watched)

    world.origin.stamp = growing
    world.look(30)
    assert world.origin.loads == 1


def test_a_bad_file_never_replaces_a_good_one_and_is_told_once():
    world = World()
    world.origin.write(BAD)
    world.look(RETRY_AFTER_LOOKS * 3)
    assert world.watch.current.revision == 1
    assert len(world.refusals) == 1
    assert "p.yaml:4:11: providers.up.kind" in world.refusals[0]
    assert world.watch.status.last_error == world.refusals[0]
    assert world.watch.status.failed_at > 1_000
    assert world.watch.status.refused > 1


def test_a_good_file_after_a_bad_one_is_taken_and_the_error_forgotten():
    world = World()
    world.origin.write(BAD)
    world.look(5)
    world.origin.write(MORE)
    world.look(5)
    status = world.watch.status
    assert (status.revision, status.last_error, status.failed_at) == (2, "", 0.0)
    assert status.refused == 1


def test_the_old_file_put_back_forgets_the_error_without_a_swap():
    world = World()
    world.origin.write(BAD)
    world.look(5)
    world.origin.write(SMALL)
    world.look(5)
    assert world.watch.status.last_error == ""
    assert world.swaps == []


def test_a_touched_file_is_no_new_revision():
    world = World()
    world.origin.write(SMALL)
    world.look(20)
    assert world.origin.loads == 2
    assert world.watch.current.revision == 1
    assert world.swaps == []


def test_a_rotated_secret_is_a_new_revision_with_the_same_digest():
    world = World()
    before = world.watch.current
    world.origin.env["UP_KEY"] = "rotated"
    world.origin.write(SMALL)
    world.look(5)
    assert world.watch.current.revision == 2
    assert world.watch.current.digest == before.digest
    assert world.watch.current.providers["up"].credentials[0].secret.reveal() == "rotated"


def test_what_a_refused_policy_lacks_is_looked_for_again():
    world = World()
    world.origin.write(MORE)
    missing = world.origin.env.pop("UP_KEY")
    world.look(5)
    assert "UP_KEY is not set" in world.watch.status.last_error
    world.origin.env["UP_KEY"] = missing
    world.look(RETRY_AFTER_LOOKS + 1)
    assert world.watch.current.revision == 2


def test_a_signal_loads_at_the_next_look():
    world = World()
    world.origin.text = MORE
    world.watch.poke()
    world.look(1)
    assert world.watch.current.revision == 2


def test_a_change_during_a_load_is_seen_next():
    world = World()
    world.origin.write(MORE)
    last = MORE.replace("debug", "error")
    world.origin.during_load = lambda: world.origin.write(last)
    world.look(8)
    assert world.watch.current.logs.level == "error"
    assert world.swaps == [(1, 2), (2, 3)]


def test_a_defect_of_ours_keeps_the_policy_and_tells_no_text():
    world = World()
    world.origin.breaks = True
    assert asyncio.run(world.watch.reload()) is False
    assert world.watch.status.last_error == "loading failed: RuntimeError"
    assert world.watch.current.revision == 1


def test_of_two_loads_at_once_none_brings_an_older_policy_back():
    world = World()
    gate: list[asyncio.Event] = []

    async def slow(function):
        found = function()
        event = asyncio.Event()
        gate.append(event)
        await event.wait()
        return found

    world.watch._off_loop = slow

    async def race() -> None:
        world.origin.write(MORE)
        one = asyncio.ensure_future(world.watch.reload())
        await asyncio.sleep(0)
        world.origin.write(MORE.replace("debug", "error"))
        two = asyncio.ensure_future(world.watch.reload())
        await asyncio.sleep(0)
        gate[1].set()
        await two
        gate[0].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gate[2].set()
        assert await one

    asyncio.run(race())
    assert world.watch.current.logs.level == "error"
    assert world.swaps == [(1, 2)]


def test_no_secret_stands_in_the_status():
    world = World()
    world.origin.write(BAD)
    world.look(5)
    assert "secret" not in repr(world.watch.status)
