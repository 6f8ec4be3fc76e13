"""What a task uses by way of several gateways, whatever the store forgets."""

from __future__ import annotations

import asyncio

import pytest

from gateway.gathering import FRESH
from gateway.resilience.loops import LoopRules
from gateway.units import Mode
from tests.fixtures.ports import free_port
from tests.fixtures.waiting import Turns, until
from tests.integration.fleet import servers
from tests.integration.fleet.member import member

pytestmark = pytest.mark.integration

BUDGET = LoopRules(mode=Mode.ENFORCE, task_tokens=1_000)
REFUSED = "refused loops.task_tokens"
BODY = {"messages": [{"role": "user", "content": "go on"}]}


async def spend(each, tokens: int, *, task: str = "w") -> str:
    """One call of the task; what the rules say of it."""
    return await each.ask(BODY, workflow=task, tokens=tokens)


async def told(*members) -> None:
    """Whatever they had to tell stands in the store."""
    await until(lambda: not any(len(each.sharing.books) for each in members))
    await asyncio.sleep(0.05)


def used(each) -> int:
    """Tokens of the task, as that gateway knows them."""
    return sum(book.tokens for book in each.guard._tasks)


def stale(*members) -> None:
    """A second has passed since they heard of the fleet."""
    for each in members:
        for book in each.guard.books():
            book.heard_at -= FRESH + 1


async def knows(each, tokens: int) -> bool:
    """Whether that is what a call would be judged by."""
    stale(each)
    await spend(each, 0)
    return used(each) == tokens


def test_spending_survives_a_store_that_is_emptied(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one", BUDGET) as one,
            member(valkey.url, prefix, "two", BUDGET) as two,
            member(valkey.url, prefix, "three", BUDGET) as three,
        ):
            await spend(one, 300)
            await spend(two, 200)
            await until(lambda: knows(one, 500))
            await until(lambda: knows(two, 500))
            await told(one, two)
            with valkey.client() as client:
                client.flushall()
            async with Turns() as turns:
                assert await knows(two, 500), "it remembers what it has heard"
                await until(lambda: knows(three, 500))
                assert turns.seconds < 1
            await spend(one, 600)
            await until(lambda: knows(three, 1_100))
            assert await spend(three, 1) == REFUSED

    asyncio.run(run())


def test_spending_survives_a_store_that_starts_anew(prefix):
    async def run():
        port = free_port()
        with servers.running("valkey", port=port) as server:
            one = member(server.url, prefix, "one", BUDGET)
            two = member(server.url, prefix, "two", BUDGET)
            first, second = await one.__aenter__(), await two.__aenter__()
            await spend(first, 300)
            await spend(second, 200)
            await until(lambda: knows(first, 500))
            server.process.kill()
            server.process.wait()
            await spend(first, 50)
            await spend(second, 5)
            assert used(first) == 550, "it remembers, and counts for itself"
            await told(first, second)  # in vain
        with servers.running("valkey", port=port) as server:
            async with member(server.url, prefix, "three", BUDGET) as third:
                await until(lambda: knows(third, 555))
                await until(lambda: knows(first, 555))
                await until(lambda: knows(second, 555))
            await one.__aexit__(None, None, None)
            await two.__aexit__(None, None, None)

    asyncio.run(run())


def test_the_share_of_a_gateway_that_is_gone_is_told_by_those_who_heard_of_it(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "one", BUDGET) as one:
            async with member(valkey.url, prefix, "gone", BUDGET) as gone:
                await spend(gone, 400)
                await until(lambda: knows(one, 400))
            with valkey.client() as client:
                client.flushall()
            await until(lambda: knows(one, 400))
            async with member(valkey.url, prefix, "new", BUDGET) as new:
                await until(lambda: knows(new, 400))

    asyncio.run(run())


def test_a_gateway_that_is_not_asked_hears_of_the_loss_and_tells_what_it_alone_knows(
    valkey, prefix
):
    async def run():
        async with (
            member(valkey.url, prefix, "one", BUDGET) as one,
            member(valkey.url, prefix, "two", BUDGET) as two,
            member(valkey.url, prefix, "three", BUDGET) as three,
        ):
            await spend(one, 300)
            await spend(two, 10, task="another")
            await told(one, two)
            with valkey.client() as client:
                client.flushall()
            stale(two)
            await spend(two, 0, task="another")
            await until(lambda: knows(three, 300))

    asyncio.run(run())


def test_a_reset_holds_after_a_loss_and_a_loss_after_a_reset(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one", BUDGET) as one,
            member(valkey.url, prefix, "two", BUDGET) as two,
        ):
            await spend(one, 300)
            await spend(two, 900)
            await until(lambda: knows(one, 1_200))
            assert await spend(one, 1) == REFUSED
            one.sharing.loops_reset("w")
            one.guard.reset("w")
            await until(lambda: knows(one, 0))
            await until(lambda: knows(two, 0))
            await spend(two, 20)
            await until(lambda: knows(one, 20))
            await told(one, two)
            with valkey.client() as client:
                client.flushall()
            await until(lambda: knows(one, 20))
            await until(lambda: knows(two, 20))
            await spend(one, 3)
            await until(lambda: knows(two, 23))

    asyncio.run(run())


def test_a_book_that_was_forgotten_and_opened_again_adds_to_what_it_had(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "one", BUDGET) as one:
            await spend(one, 300)
            await told(one)
            for key in list(one.guard._tasks._kept):
                one.guard._tasks.pop(key)
            await spend(one, 50)
            await until(lambda: knows(one, 350))

    asyncio.run(run())
