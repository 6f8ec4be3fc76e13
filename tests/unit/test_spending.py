"""Budgets across processes: what was used is written down, and a new process begins with it."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.admission.local import LocalStore
from gateway.admission.profiles import pool_spec
from gateway.admission.values import Admit, Ask, Outcome, Shed
from gateway.clock import LoopClock
from gateway.spending import EVERY_S, Spending
from gateway.units import MICRO
from scheduler.api import SchedulerError, Spent, StoreFault
from scheduler.stores.sqlite import MEMORY, SqliteStore

BUDGET = pool_spec(name="agent:ada:tokens:day", limits={"tpd": 1_000}, queue=False, because="b")
DAILY = pool_spec(name="pool:quota", limits={"rpm": 6_000, "rpd": 10}, because="p")


class Log:
    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, event: str, **_fields: Any) -> None:
        self.errors.append(event)


def ask(number: int, *cost: int) -> Ask:
    return Ask(
        rid=f"r{number}", lane=2, tenant="t", weight=1, deadline_in=0,
        cost=tuple(units * MICRO for units in cost),
    )  # fmt: skip


def process(usage: Any, clock: LoopClock) -> tuple[LocalStore, Spending, Log]:
    """A gateway's pools and books, as it starts."""
    pools, log = LocalStore(clock), Log()
    return pools, Spending(pools, usage, clock, log), log


async def with_table(scenario: Any) -> None:
    store = SqliteStore(MEMORY)
    try:
        await scenario(store.usage, LoopClock())
    finally:
        await store.close()


def test_a_budget_goes_on_where_the_process_before_left_it():
    async def scenario(usage, clock):
        pools, spending, _ = process(usage, clock)
        await spending.load()
        assert isinstance(pools.acquire(BUDGET, ask(1, 900)), Admit)
        pools.settle(BUDGET.name, "r1", outcome=Outcome.SERVED, actual=(700 * MICRO,))
        await spending.write()
        pools, spending, _ = process(usage, clock)
        await spending.load()
        assert isinstance(pools.acquire(BUDGET, ask(2, 301)), Shed)
        assert isinstance(pools.acquire(BUDGET, ask(3, 300)), Admit)

    asyncio.run(with_table(scenario))


def test_amounts_per_day_of_a_provider_go_on_and_those_per_minute_do_not():
    async def scenario(usage, clock):
        pools, spending, _ = process(usage, clock)
        await spending.load()
        for number in range(4):
            pools.acquire(DAILY, ask(number, 1, 1))
        await spending.write()
        pools, spending, _ = process(usage, clock)
        await spending.load()
        pools.acquire(DAILY, ask(9, 1, 1))
        view = pools.view(DAILY.name)
        minute, day = view.dimensions
        assert (minute.used // MICRO, day.level // MICRO) == (1, 5)

    asyncio.run(with_table(scenario))


def test_a_period_that_is_over_counts_for_nothing_and_is_forgotten():
    async def scenario(usage, clock):
        now = clock.now()
        old = Spent(
            pool=BUDGET.name, unit="tokens", calendar="day", start=now - 2 * 86_400 * MICRO,
            until=now - 86_400 * MICRO, used=999 * MICRO,
        )  # fmt: skip
        await usage.record([old], before=0)
        pools, spending, _ = process(usage, clock)
        await spending.load()
        assert isinstance(pools.acquire(BUDGET, ask(1, 1_000)), Admit)
        await usage.record([], before=now)
        assert await usage.standing(now=0) == []

    asyncio.run(with_table(scenario))


def test_only_what_has_changed_is_written():
    async def scenario(usage, clock):
        written: list[int] = []

        class Counting:
            async def record(self, rows, *, before):
                written.append(len(rows))
                await usage.record(rows, before=before)

        pools, spending, _ = process(Counting(), clock)
        await spending.write()
        pools.acquire(BUDGET, ask(1, 10))
        pools.acquire(DAILY, ask(2, 1, 1))
        await spending.write()
        await spending.write()
        pools.settle(BUDGET.name, "r1", outcome=Outcome.SERVED, actual=(5 * MICRO,))
        await spending.write()
        assert written == [2, 1]

    asyncio.run(with_table(scenario))


def test_a_store_that_fails_is_said_once_and_told_everything_once_it_is_back():
    async def scenario(usage, clock):
        class Failing:
            down = True

            async def record(self, rows, *, before):
                if self.down:
                    raise StoreFault("disk full")
                await usage.record(rows, before=before)

        failing = Failing()
        pools, spending, log = process(failing, clock)
        pools.acquire(BUDGET, ask(1, 10))
        await spending.write()
        await spending.write()
        assert log.errors == ["usage_store"]
        failing.down = False
        await spending.write()
        assert [row.used for row in await usage.standing(now=clock.now())] == [10 * MICRO]

    asyncio.run(with_table(scenario))


def test_books_that_cannot_be_read_keep_the_process_from_starting():
    async def scenario(_usage, clock):
        class Broken:
            async def standing(self, *, now):
                raise StoreFault("torn")

        _, spending, _ = process(Broken(), clock)
        try:
            await spending.load()
        except SchedulerError:
            return
        raise AssertionError("the budget would have begun anew")

    asyncio.run(with_table(scenario))


def test_a_pool_that_was_forgotten_and_is_made_again_begins_with_what_it_had():
    async def scenario(usage, clock):
        pools, spending, _ = process(usage, clock)
        await spending.load()
        pools.acquire(BUDGET, ask(1, 10))
        await spending.write()
        pools._pools.clear()
        pools.acquire(BUDGET, ask(2, 1))
        assert pools.view(BUDGET.name).dimensions[0].level == 11 * MICRO

    asyncio.run(with_table(scenario))


def test_it_writes_every_two_seconds():
    assert EVERY_S == 2.0
