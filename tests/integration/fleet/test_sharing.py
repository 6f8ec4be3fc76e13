"""News between gateways: breakers, revoked credentials, an edited policy."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.errors import StoreUnavailable
from gateway.gathering import MOST_PENDING, hear
from gateway.resilience.alternation import Step
from gateway.resilience.books import Spending
from gateway.resilience.breaker import State
from gateway.resilience.loops import LoopRules
from gateway.resilience.repeats import Event, Exchanges, Print, Tally
from tests.fixtures.ports import free_port
from tests.fixtures.waiting import until
from tests.integration.fleet import servers
from tests.integration.fleet.members import RULES, SECOND, member, soon, tell

pytestmark = pytest.mark.integration

LOOPS = LoopRules()


def test_a_breaker_that_opens_is_open_everywhere_within_a_second(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            theirs = two.breakers.of("p/d/m", RULES)
            tell(one, "p/d/m", State.OPEN)
            assert await soon(lambda: theirs.state is State.OPEN) < 1
            assert theirs.reason == "five faults in a row"
            assert 15 * SECOND < theirs.until - two.clock.now() <= 20 * SECOND
            tell(one, "p/d/m", State.CLOSED)
            assert await soon(lambda: theirs.state is State.CLOSED) < 1
            assert [state for _, state in two.changes] == [State.OPEN, State.CLOSED]

    asyncio.run(run())


def fails(one, scope: str) -> bool:
    """One failure at that gateway; whether its breaker opened by it alone."""
    breaker = one.breakers.of(scope, RULES)
    one.breakers.on_failure(scope, breaker)
    return breaker.failed(now=one.clock.now(), rng=random.Random(2), reason="fault 500")


def succeeds(one, scope: str) -> None:
    one.breakers.of(scope, RULES).started(now=one.clock.now())


def test_failures_of_all_gateways_open_a_breaker_that_none_would_open_alone(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            members = (one, two)
            for each in members:  # eight failures of ten; each saw five results, too few to judge
                succeeds(each, "p/d/m")
                assert not any(fails(each, "p/d/m") for _ in range(4))
            states = lambda: [e.breakers.of("p/d/m", RULES).state for e in members]  # noqa: E731
            assert await soon(lambda: states() == [State.OPEN] * 2) < 1.5
            assert one.breakers.of("p/d/m", RULES).sick

    asyncio.run(run())


def test_what_goes_well_elsewhere_keeps_it_closed(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            for _ in range(60):
                succeeds(one, "s")
            fails(one, "s")
            await until(lambda: one.sharing.results._scopes["s"].ours)
            fails(two, "s")
            succeeds(two, "s")
            theirs = two.breakers.of("s", RULES)
            await until(lambda: sum(each.good for _, each in theirs._others.values()) >= 60)
            for _ in range(5):  # six of twelve: alone that would be half, and enough to judge by
                succeeds(two, "s")
                assert not fails(two, "s")
            await asyncio.sleep(0.6)
            states = {each.breakers.of("s", RULES).state for each in (one, two)}
            assert states == {State.CLOSED}

    asyncio.run(run())


def test_an_old_change_does_not_undo_a_newer_one_of_our_own(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "one") as one:
            tell(one, "s", State.OPEN)
            await asyncio.sleep(0.2)
            async with member(valkey.url, prefix, "two") as two:
                await soon(lambda: two.breakers.of("s", RULES).state is State.OPEN)
                tell(two, "s", State.CLOSED)
                tell(two, "other", State.OPEN)
                await soon(lambda: one.breakers.of("s", RULES).state is State.CLOSED)
                await soon(lambda: one.breakers.of("other", RULES).state is State.OPEN)
            async with member(valkey.url, prefix, "late") as late:
                await soon(lambda: late.breakers.of("other", RULES).state is State.OPEN)
                assert late.breakers.of("s", RULES).state is State.CLOSED

    asyncio.run(run())


def test_a_revoked_credential_is_refused_everywhere_and_by_those_who_come_later(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            one.sharing.revoke("key:ci")
            assert "key:ci" in one.sharing.revoked
            assert await soon(lambda: "key:ci" in two.sharing.revoked) < 1
        async with member(valkey.url, prefix, "three") as three:
            await soon(lambda: "key:ci" in three.sharing.revoked)

    asyncio.run(run())


def test_what_a_task_uses_is_added_up_and_begins_anew_everywhere(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            books = [Spending(name=77, lasts=60 * SECOND) for _ in range(2)]
            here, there = books
            pairs = ((one, here), (two, there))
            for _ in range(5):
                for each, book in pairs:
                    book.pour(10, 2)
                    each.sharing.books.tell(book)
                await asyncio.sleep(0.02)
            for each, book in pairs:
                await until(lambda e=each, b=book: reads(e, b, (100, 20)))

            here.clear()
            one.sharing.books.tell(here)
            here.pour(3, 1)
            one.sharing.books.tell(here)
            await until(lambda: reads(two, there, (3, 1)))
            assert (here.tokens, here.money) == (3, 1)

    asyncio.run(run())


async def reads(one, book: Spending, sums: tuple[int, int]) -> bool:
    """Whether that is what the book says at that gateway, once it has heard of the fleet."""
    await hear(one.sharing.books.ask((book,), one.clock.now() + 2 * SECOND), one.clock)
    return (book.tokens, book.money) == sums


READ = Print(exact=1, masked=2, changes=False)
WRITE = Print(exact=3, masked=4, changes=True)


async def heard(one, tally: Tally) -> None:
    """Whatever that gateway had to tell is told, and it knows what the store knows."""
    since = one.clock.now()

    async def new() -> bool:
        await hear(one.sharing.lists.ask(tally, LOOPS, one.clock.now() + 2 * SECOND), one.clock)
        return tally.heard_at > since

    await until(new)


async def calls(one, tally: Tally, made: Print, result: int | None = None):
    """A tool call at that gateway; what the rules say of it first."""
    await heard(one, tally)
    now = one.clock.now()
    verdict = tally.judge(made, LOOPS, now)
    tally.made(made, LOOPS, now)
    one.sharing.lists.note(tally, Event(now, made), LOOPS)
    if result is not None:
        tally.returned(made, result, now + 1)
        one.sharing.lists.note(tally, Event(now + 1, made, result), LOOPS)
    await heard(one, tally)  # so the store has heard of it, and the others will
    return None if verdict is None else (verdict.rule.value, verdict.refuse, verdict.count)


def test_tool_calls_by_way_of_two_gateways_are_repeated_as_if_it_were_one(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            here, there = (Tally(name=91) for _ in range(2))
            assert await calls(one, here, READ) is None
            assert await calls(two, there, READ) is None
            assert await calls(one, here, READ) == ("same_call", False, 3)
            assert await calls(two, there, READ) == ("same_call", True, 4)
            assert await calls(one, here, WRITE) is None
            assert await calls(two, there, READ) is None, "something changed in between"

            here.clear()
            one.sharing.lists.clear(here, LOOPS)
            await heard(one, here)
            assert await calls(one, here, WRITE) is None
            assert await calls(two, there, WRITE) is None, "began anew, at both"

    asyncio.run(run())


async def exchanged(one, others: Exchanges, agent: int, call: int):
    """A tool call of one of a tenant's agents at that gateway; what the rules say of it first."""
    for telling in (False, True):
        if telling:
            verdict = others.judge(agent, call, LOOPS, one.clock.now())
            others.made(agent, call, one.clock.now())
            one.sharing.lists.note(others, Step(one.clock.now(), agent, call), LOOPS)
        await hear(one.sharing.lists.ask(others, LOOPS, one.clock.now() + 2 * SECOND), one.clock)
    return None if verdict is None else (verdict.refuse, verdict.count)


def test_agents_that_alternate_two_tool_calls_by_way_of_two_gateways_are_refused(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            said = []
            here, there = Exchanges(name=93), Exchanges(name=93)
            for _ in range(4):
                said.append(await exchanged(one, here, 1, 5))
                said.append(await exchanged(two, there, 2, 6))
            assert said[-3:] == [(False, 3), (False, 3), (True, 4)]

            here.clear()
            one.sharing.lists.clear(here, LOOPS)
            assert await exchanged(one, here, 1, 5) is None
            assert await exchanged(two, there, 2, 6) is None, "began anew, at both"

    asyncio.run(run())


def test_results_that_come_elsewhere_count_as_well(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            here, there = (Tally(name=92) for _ in range(2))
            for page, (each, tally) in enumerate(((one, here), (two, there)) * 2):
                made = Print(exact=100 + page, masked=7, changes=False)
                said = await calls(each, tally, made, result=5)
            assert said == ("same_masked", True, 4)

    asyncio.run(run())


def test_while_the_store_is_away_nothing_is_told_twice_and_memory_is_bounded(prefix):
    async def run():
        with servers.running("valkey") as server:
            async with member(server.url, prefix, "one") as one:
                await away(server, one)

    async def away(server, one):
        book = Spending(name=78, lasts=60 * SECOND)
        book.pour(10, 0)
        one.sharing.books.tell(book)
        await until(lambda: reads(one, book, (10, 0)))
        await until(lambda: len(one.sharing.books) == 0)
        server.process.kill()
        for number in range(MOST_PENDING + 500):
            one.sharing.books.tell(Spending(name=1_000 + number))
        assert len(one.sharing.books) <= MOST_PENDING
        book.pour(10, 0)
        one.sharing.books.tell(book)
        assert await soon(lambda: len(one.sharing.books) == 0) < 5
        assert book.tokens == 20

    asyncio.run(run())


def test_an_edited_policy_makes_the_others_look_at_once(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            one.sharing.policy_changed()
            assert await soon(lambda: two.policy == 1) < 1
            assert one.policy == 0
            one.sharing.loops_reset("session-7")
            assert await soon(lambda: two.loops == ["session-7"]) < 1
            assert one.loops == []
            await one.sharing.session_deleted("signed-id")
            assert await soon(lambda: two.sessions == ["signed-id"]) < 1
            assert one.sessions == []
            one.sharing.session_used("signed-id")
            assert await soon(lambda: two.used == ["signed-id"]) < 1
            assert one.used == []

    asyncio.run(run())


def test_news_that_cannot_be_read_is_left_alone(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "one") as one:
            with valkey.client() as client:
                for news in (b"", b"[]", b'{"kind":"breaker"}', b"\xff", b'{"kind":7,"name":1}'):
                    client.publish(f"{prefix}news", news)
            one.sharing.revoke("key:still-hearing")
            await soon(lambda: "key:still-hearing" in one.sharing.revoked)

    asyncio.run(run())


def test_without_its_store_a_process_still_revokes_for_itself(prefix):
    async def run():
        port = free_port()
        async with member(f"redis://127.0.0.1:{port}", prefix, "alone") as alone:
            alone.sharing.revoke("key:ci")
            tell(alone, "s", State.OPEN)
            await asyncio.sleep(0.1)
            assert "key:ci" in alone.sharing.revoked

    asyncio.run(run())


def test_a_store_that_would_forget_is_refused_at_the_start(prefix):
    async def run(url):
        async with member(url, prefix, "one") as one:
            await one.sharing.check()

    with (
        servers.running("valkey", "--maxmemory-policy", "volatile-ttl") as server,
        pytest.raises(StoreUnavailable, match="noeviction"),
    ):
        asyncio.run(run(server.url))
