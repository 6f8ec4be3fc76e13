"""LocalStore: waits that can be left at any moment, one alarm, bounded pools. Virtual time only."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.admission.core import Admit, Ask, Late, Mode, Never, Outcome, Shed
from gateway.admission.local import LocalStore
from gateway.admission.profiles import Shape, pool_spec
from gateway.clock import LoopClock
from gateway.units import MICRO, MINUTE
from tests.sim.loop import run

U = MICRO
BUCKET = pool_spec(name="b", limits={"tpm": 1_000}, shape=Shape.BUCKET, because="pools.b")
SPEC = pool_spec(name="p", limits={"tpm": 1_000}, shape=Shape.OWN, because="pools.p")
ONE = pool_spec(name="one", limits={}, concurrency=1, because="pools.one")


class Counting(LoopClock):
    """The real clock, with its alarms counted."""

    def __init__(self):
        super().__init__()
        self.armed = 0

    def alarm(self, at, callback):
        self.armed += 1
        return super().alarm(at, callback)


def ask(rid, tokens=None, **changes):
    cost = () if tokens is None else (tokens * U,)
    fields = {"lane": 2, "tenant": "t", "weight": 1, "deadline_in": 10 * MINUTE, "cost": cost}
    return Ask(rid=rid, **{**fields, **changes})


def store_and_clock(**options):
    clock = Counting()
    return LocalStore(clock, **options), clock


def test_what_fits_is_granted_without_a_future():
    async def main():
        store, clock = store_and_clock()
        verdict = store.acquire(SPEC, ask("a", 600))
        assert isinstance(verdict, Admit)
        assert clock.armed == 0
        assert store.view("p").in_flight == 1

    run(main())


def test_the_short_way_grants_what_fits_and_else_changes_nothing():
    async def main():
        store, clock = store_and_clock()
        assert (
            store.grant(SPEC, ask("a", 600), clock.now()) is None
        )  # a pool begins with a full question
        assert isinstance(store.acquire(SPEC, ask("a", 600)), Admit)
        assert isinstance(store.grant(SPEC, ask("b", 300), clock.now()), Admit)
        assert store.grant(SPEC, ask("c", 300), clock.now()) is None
        assert store.grant(replace(SPEC, revision=2), ask("c", 1), clock.now()) is None
        assert store.view("p").dimensions[0].used == 900 * U
        assert store.waiting() == clock.armed == 0

    run(main())


def test_the_short_way_is_shut_where_a_place_is_kept():
    async def main():
        store, clock = store_and_clock()
        store.acquire(ONE, ask("a"))
        refused = store.acquire(ONE, ask("b", deadline_in=0, place_key="k"))
        assert isinstance(refused, Shed)
        store.settle("one", "a", outcome=Outcome.SERVED, actual=None)
        assert store.grant(ONE, ask("c"), clock.now()) is None
        assert isinstance(store.acquire(ONE, ask("b2", place_key="k")), Admit)

    run(main())


def test_a_waiter_is_granted_when_a_settlement_makes_room():
    async def main():
        store, _ = store_and_clock()
        store.acquire(ONE, ask("a"))
        wait = store.acquire(ONE, ask("b"))
        assert isinstance(wait, asyncio.Future)
        store.settle("one", "a", outcome=Outcome.SERVED, actual=None)
        assert wait.done()
        assert isinstance(await wait, Admit)

    run(main())


def test_a_waiter_is_granted_by_one_alarm_at_the_wake():
    async def main():
        store, clock = store_and_clock()
        began = clock.now()
        assert isinstance(store.acquire(SPEC, ask("a", 600)), Admit)
        verdict = await store.acquire(SPEC, ask("b", 600))
        assert isinstance(verdict, Admit)
        # The first call leaves a sliding window of 60 s, rounded up to a slot of 100 ms.
        assert MINUTE < clock.now() - began <= MINUTE + 200_000
        assert verdict.waited == pytest.approx(clock.now() - began, abs=10)
        assert clock.armed <= 3

    run(main())


def test_an_idle_pool_has_no_timer():
    async def main():
        store, clock = store_and_clock()
        store.acquire(ONE, ask("a"))
        wait = store.acquire(ONE, ask("b"))
        assert clock.alarms_armed == 1
        wait.cancel()
        assert clock.alarms_armed == 0
        assert store.waiting() == 0

    run(main())


def test_many_waiters_arm_one_alarm():
    async def main():
        store, clock = store_and_clock()
        store.acquire(SPEC, ask("first", 1_000))
        waits = [store.acquire(SPEC, ask(str(i), 10)) for i in range(50)]
        assert clock.alarms_armed == 1
        assert clock.armed <= 2
        for wait in waits:
            wait.cancel()

    run(main())


def test_cancelling_a_waiting_task_withdraws_before_the_loop_goes_on():
    async def main():
        store, _ = store_and_clock()
        store.acquire(ONE, ask("a"))

        async def call():
            await store.acquire(ONE, ask("b"))

        task = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        assert store.waiting() == 1
        task.cancel()
        assert store.waiting() == 0
        assert store.view("one").lanes[2].waiting == 0
        with pytest.raises(asyncio.CancelledError):
            await task
        store.settle("one", "a", outcome=Outcome.SERVED, actual=None)
        assert store.view("one").in_flight == 0

    run(main())


@pytest.mark.parametrize("grant_first", [True, False])
def test_grant_and_cancellation_in_one_turn_leak_nothing(grant_first):
    async def main():
        store, _ = store_and_clock()
        store.acquire(SPEC, ask("a", 1_000))

        async def call():
            await store.acquire(SPEC, ask("b", 700))

        task = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        if grant_first:
            store.settle("p", "a", outcome=Outcome.SERVED, actual=(0,))
            assert store.view("p").in_flight == 1
            task.cancel()
        else:
            task.cancel()
            store.settle("p", "a", outcome=Outcome.SERVED, actual=(0,))
        # Even before the task has run again: nothing is held.
        view = store.view("p")
        assert (view.in_flight, view.dimensions[0].level, view.dimensions[0].used) == (0, 0, 0)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())


def test_a_grant_that_was_given_back_is_not_returned_even_to_a_task_that_goes_on():
    async def main():
        store, _ = store_and_clock()
        store.acquire(ONE, ask("a"))
        wait = store.acquire(ONE, ask("b"))
        store.settle("one", "a", outcome=Outcome.SERVED, actual=None)
        assert wait.done()
        assert not wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            wait.result()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert store.view("one").in_flight == 0

    run(main())


def test_cancelling_a_wait_whose_grant_was_taken_changes_nothing():
    async def main():
        store, _ = store_and_clock()
        store.acquire(ONE, ask("a"))
        for take in ("await", "result"):
            wait = store.acquire(ONE, ask(take))
            store.settle("one", "a", outcome=Outcome.SERVED, actual=None)
            assert isinstance(await wait if take == "await" else wait.result(), Admit)
            wait.cancel()
            assert store.view("one").in_flight == 1
            store.settle("one", take, outcome=Outcome.SERVED, actual=None)
            store.acquire(ONE, ask("a"))

    run(main())


def test_a_wait_inside_asyncio_wait_survives_a_timeout_of_the_waiter():
    async def main():
        store, _ = store_and_clock()
        store.acquire(ONE, ask("a"))
        wait = store.acquire(ONE, ask("b"))
        done, _ = await asyncio.wait({wait}, timeout=1)
        assert not done
        store.settle("one", "a", outcome=Outcome.SERVED, actual=None)
        done, _ = await asyncio.wait({wait}, timeout=1)
        assert isinstance(done.pop().result(), Admit)

    run(main())


def test_a_passed_deadline_is_told_though_the_waiter_is_not_first():
    async def main():
        store, clock = store_and_clock()
        store.acquire(ONE, ask("a"))
        first = store.acquire(ONE, ask("first"))
        began = clock.now()
        verdict = await store.acquire(ONE, ask("second", deadline_in=5 * MICRO))
        assert isinstance(verdict, Late)
        assert verdict.because == "pools.one.concurrency"
        assert 5 * MICRO <= clock.now() - began <= 5 * MICRO + 100_000
        assert store.waiting() == 1
        first.cancel()

    run(main())


def test_no_wait_allowed_means_an_answer_at_once():
    async def main():
        store, _ = store_and_clock()
        store.acquire(SPEC, ask("a", 1_000))
        verdict = store.acquire(SPEC, ask("b", 1, deadline_in=0))
        assert isinstance(verdict, Shed)
        assert verdict.eta > 59 * MICRO
        assert verdict.because == "pools.p.limits.tpm"

    run(main())


def test_the_same_ask_twice_waits_in_one_future():
    async def main():
        store, _ = store_and_clock()
        store.acquire(ONE, ask("a"))
        wait = store.acquire(ONE, ask("b"))
        assert store.acquire(ONE, ask("b")) is wait
        wait.cancel()

    run(main())


def test_cancel_by_id_ends_the_wait_and_the_unsent_grant():
    async def main():
        store, _ = store_and_clock()
        store.acquire(SPEC, ask("a", 1_000))
        wait = store.acquire(SPEC, ask("b", 1))
        store.cancel("p", "b")
        assert wait.cancelled()
        store.cancel("p", "a")
        store.cancel("p", "nobody")
        store.cancel("no such pool", "a")
        assert store.view("p").dimensions[0].level == 0

    run(main())


def test_an_unknown_settlement_changes_nothing():
    async def main():
        store, _ = store_and_clock()
        store.settle("no such pool", "a", outcome=Outcome.SERVED, actual=None)
        store.acquire(SPEC, ask("a", 500))
        for _ in range(2):
            store.settle("p", "a", outcome=Outcome.QUOTA, actual=None, retry_after=5 * MICRO)
        view = store.view("p")
        assert view.factor_ppm == 980_000
        assert view.blocked_for == 5 * MICRO

    run(main())


def test_closing_answers_every_waiter_softly_and_stops_every_timer():
    async def main():
        store, clock = store_and_clock()
        store.acquire(ONE, ask("a"))
        waits = [store.acquire(ONE, ask(str(i))) for i in range(3)]
        await store.close()
        for wait in waits:
            verdict = await wait
            assert isinstance(verdict, Shed)
            assert verdict.eta > 0
        assert clock.alarms_armed == 0
        assert isinstance(store.acquire(ONE, ask("late")), Shed)
        store.settle("one", "a", outcome=Outcome.SERVED, actual=None)
        assert store.view("one").in_flight == 0
        assert clock.alarms_armed == 0

    run(main())


def test_any_number_of_keys_in_turn_leaves_memory_flat():
    async def main():
        store, clock = store_and_clock()
        most = 0
        for i in range(1_200):
            spec = replace(SPEC, name=f"agent:{i}")
            assert isinstance(store.acquire(spec, ask(str(i), 100)), Admit)
            store.settle(spec.name, str(i), outcome=Outcome.SERVED, actual=None)
            if i % 20 == 0:
                await clock.sleep(2)
            most = max(most, len(store.pools()))
        # Twenty new keys per 2 s, each kept for its window of 60 s: 600, and some unseen yet.
        assert most <= 800

    run(main())


def test_more_pools_than_allowed_are_refused_not_grown():
    async def main():
        store, _ = store_and_clock(max_pools=3)
        for i in range(3):
            store.acquire(replace(ONE, name=f"one{i}"), ask(str(i)))
        verdict = store.acquire(replace(ONE, name="one too many"), ask("x"))
        assert isinstance(verdict, Shed)
        assert verdict.full
        store.settle("one0", "0", outcome=Outcome.SERVED, actual=None)
        assert isinstance(store.acquire(replace(ONE, name="room again"), ask("y")), Admit)

    run(main())


def test_a_higher_revision_frees_waiters_at_once_and_loses_none():
    async def main():
        store, _ = store_and_clock()
        store.acquire(SPEC, ask("a", 1_000))
        waits = [store.acquire(SPEC, ask(str(i), 100)) for i in range(5)]
        more = pool_spec(
            name="p", limits={"tpm": 1_300}, shape=Shape.OWN, because="pools.p", revision=2
        )
        assert isinstance(store.acquire(more, ask("new", 1, lane=1)), Admit)
        assert [wait.done() for wait in waits] == [True, True, False, False, False]
        for wait in waits:
            wait.cancel()

    run(main())


def test_a_call_pinned_to_older_rules_neither_reverts_them_nor_breaks():
    async def main():
        store, _ = store_and_clock()
        newer = pool_spec(
            name="p", limits={"rpm": 5, "tpm": 2_000}, shape=Shape.OWN, because="p", revision=2
        )
        store.acquire(newer, ask("n", cost=(U, 10 * U)))
        assert isinstance(store.acquire(SPEC, ask("old", 500)), Admit)
        store.settle("p", "old", outcome=Outcome.SERVED, actual=(400 * U,))
        dims = store.view("p").dimensions
        assert [dim.limit for dim in dims] == [5 * U, 2_000 * U]
        assert [dim.used for dim in dims] == [U, 410 * U]

    run(main())


def test_two_policies_of_one_revision_are_told_loudly_and_the_first_stays(caplog):
    async def main():
        store, _ = store_and_clock()
        other = pool_spec(name="p", limits={"tpm": 9}, shape=Shape.OWN, because="elsewhere")
        assert isinstance(store.acquire(SPEC, ask("a", 10)), Admit)
        for i in range(3):
            assert isinstance(store.acquire(other, ask(f"b{i}", 10)), Admit)
        equal = replace(SPEC)
        assert isinstance(store.acquire(equal, ask("c", 10)), Admit)

    run(main())
    assert [record.message for record in caplog.records] == ["pool_conflict"]


def test_a_pool_that_is_off_costs_nothing_and_grants():
    async def main():
        store, _ = store_and_clock()
        off = replace(SPEC, mode=Mode.OFF)
        assert isinstance(store.acquire(off, ask("a", 10**6)), Admit)
        assert store.pools() == ()
        assert store.view("p") is None

    run(main())


def test_what_can_never_fit_is_refused_at_once_with_its_ceiling():
    async def main():
        store, _ = store_and_clock()
        verdict = store.acquire(SPEC, ask("a", 1_001))
        assert verdict == Never(
            rid="a", dimension="tokens", cost=1_001 * U, ceiling=1_000 * U,
            because="pools.p.limits.tpm",
        )  # fmt: skip

    run(main())


def test_renewing_keeps_a_long_stream_alive_and_silence_frees_its_permit():
    async def main():
        store, clock = store_and_clock()
        store.acquire(ONE, ask("a"))
        for _ in range(5):
            await clock.sleep(40)
            store.renew("one", "a")
        assert store.view("one").in_flight == 1
        began = clock.now()
        verdict = await store.acquire(ONE, ask("b", deadline_in=10 * MINUTE))
        assert isinstance(verdict, Admit)
        assert clock.now() - began == pytest.approx(120 * MICRO, abs=100)
        store.renew("one", "a")
        store.renew("no such pool", "a")
        assert store.view("one").in_flight == 1

    run(main())


def test_a_signal_of_foreign_use_narrows_the_pool():
    async def main():
        store, _ = store_and_clock()
        store.acquire(SPEC, ask("a", 100))
        store.signal("p", (900 * U,))
        store.signal("p", (1, 2, 3))
        store.signal("no such pool", (1,))
        assert store.view("p").dimensions[0].foreign == 900 * U
        wait = store.acquire(SPEC, ask("b", 100))
        assert isinstance(wait, asyncio.Future)
        wait.cancel()

    run(main())


def test_the_view_names_every_limit_with_what_is_used_and_when_it_resets():
    async def main():
        store, clock = store_and_clock()
        spec = pool_spec(
            name="v", limits={"rpm": 10, "tokens_day": 5_000}, shape=Shape.OWN, because="p"
        )
        store.acquire(spec, ask("a", cost=(U, 700 * U)))
        await clock.sleep(10)
        view = store.view("v")
        requests, day = view.dimensions
        assert (requests.name, requests.used, requests.window) == ("requests", U, MINUTE)
        assert requests.because == "p.limits.rpm"
        assert 49 * MICRO < requests.resets_in <= 50 * MICRO + 200_000
        assert (day.calendar, day.level, day.limit) == ("day", 700 * U, 5_000 * U)
        assert 0 < day.resets_in <= 86_400 * MICRO
        assert view.eta == (0, 0, 0, 0)

    run(main())


def test_what_is_told_of_a_pools_use_is_a_tenth_of_a_second_old_at_most():
    async def main():
        store, clock = store_and_clock()
        store.acquire(BUCKET, ask("a", 600))
        used = [store.standing("b")[0][1]]
        for _ in range(3):
            await clock.sleep(0.06)
            used.append(store.standing("b")[0][1])
        # The bucket drains 2 tokens in 0.12 s; looked at after 0.06 and 0.18 s it is as it was.
        assert used[0] == used[1] == 600 * U
        assert 597 * U < used[2] == used[3] < 599 * U
        await clock.sleep(60)
        assert store.standing("b")[0][1] == 0

    run(main())
