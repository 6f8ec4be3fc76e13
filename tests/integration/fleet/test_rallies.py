"""Agents that answer each other by way of different gateways."""

from __future__ import annotations

import asyncio

import pytest

from gateway.gathering import FRESH
from tests.fixtures.ports import free_port
from tests.fixtures.waiting import Turns, until
from tests.integration.fleet.member import ENFORCE, member

pytestmark = pytest.mark.integration


def told(text):
    return {"messages": [{"role": "user", "content": text}]}


async def settled(*members) -> None:
    """Whatever they had to tell stands in the store."""
    await until(lambda: not any(len(each.sharing.lists) for each in members))
    await asyncio.sleep(0.05)


async def rally(ada, bob, rounds: int, *, fast: bool = False) -> list[str]:
    """Two agents answer each other; what the rules say of each call."""
    said = []
    for number in range(rounds):
        for each, who, text in ((ada, "ada", "please check"), (bob, "bob", "done")):
            if not fast:  # a model takes longer than what was heard stays fresh
                await settled(ada, bob)
                for one in (ada, bob):
                    for pair in one.guard._workflows:
                        pair.heard_at -= FRESH + 1
            body = told(f"{text} (attempt {number})")
            said.append(await each.ask(body, who=who, workflow="w"))
    return said


ALONE = ["", "", "", "", "", "warned loops.ping_pong", "warned loops.ping_pong",
         "refused loops.ping_pong"]  # fmt: skip


def test_two_agents_by_way_of_two_gateways_are_refused_in_the_fourth_round_as_by_one(
    valkey, prefix
):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            both = await rally(one, two, 4)
        async with member(valkey.url, prefix + "alone", "alone") as alone:
            return both, await rally(alone, alone, 4)

    both, alone = asyncio.run(run())
    assert both == alone == ALONE


def test_agents_that_answer_within_milliseconds_are_seen_within_a_second(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
            Turns() as turns,
        ):

            async def refused() -> bool:
                return "refused loops.ping_pong" in await rally(one, two, 1, fast=True)

            await until(refused)
            assert turns.seconds < 1

    asyncio.run(run())


def test_the_operator_ends_a_rally_in_the_whole_fleet(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            await rally(one, two, 3)
            one.sharing.loops_reset("w")
            one.guard.reset("w")
            await until(lambda: [pair.turn for pair in two.guard._workflows] == [1])
            await settled(one, two)
            return await rally(one, two, 4)

    assert asyncio.run(run()) == ALONE


def test_while_the_store_is_away_each_gateway_sees_what_comes_by_it(prefix):
    async def run():
        url = f"redis://127.0.0.1:{free_port()}"
        async with member(url, prefix, "one") as one, member(url, prefix, "two") as two:
            apart = await rally(one, two, 4, fast=True)
            return apart, await rally(one, one, 4, fast=True)

    apart, together = asyncio.run(run())
    assert apart == [""] * 8
    assert together == ALONE


def test_a_call_without_a_workflow_asks_nobody(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "one") as one:
            with valkey.client() as client:
                for _ in range(8):
                    await one.ask(told("please check"))
                await asyncio.sleep(0.2)
                assert client.keys(f"{prefix}said:*") == []
                await one.ask(told("please check"), workflow="w")
                await until(lambda: client.keys(f"{prefix}said:*") != [])
                [key] = client.keys(f"{prefix}said:*")
                assert 0 < client.ttl(key) <= 30 * 60 + 5
                assert client.llen(key) <= ENFORCE.ping_pong * 16

    asyncio.run(run())
