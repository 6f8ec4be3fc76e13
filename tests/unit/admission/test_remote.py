"""RemotePool: what one process sends to a shared pool, against the real core, in virtual time."""

from __future__ import annotations

import random

import pytest

from gateway.admission.core import Admit, Ask, Late, Outcome, PoolCore
from gateway.admission.packing import OK, Answer, Standing
from gateway.admission.profiles import pool_spec
from gateway.admission.remote import (
    JUDGED,
    LINGER,
    PROBE,
    TIMEOUT,
    TOO_SLOW,
    FailMode,
    RemotePool,
)
from gateway.units import MINUTE

SECOND = 1_000_000
START = 1_790_000_000 * SECOND


def spec_of(rpm: int = 600, **options):
    return pool_spec(name="pool:p", limits={"rpm": rpm}, because="pools.p", **options)


def ask_of(rid: str, **changes) -> Ask:
    fields = {
        "rid": rid, "lane": 1, "tenant": "t", "weight": 1, "deadline_in": 60 * SECOND,
        "cost": (SECOND,),
    }  # fmt: skip
    return Ask(**{**fields, **changes})


class Shared:
    """A core that several processes share, as a store would hold it."""

    def __init__(self, spec, *, cold: bool = False):
        self.spec = spec
        self.core = PoolCore(spec, START, cold=cold, epoch=START)

    def lose(self, now: int) -> None:
        """The store restarts empty."""
        self.core = PoolCore(self.spec, now, cold=True, epoch=now)

    def tick(self, now: int, batch) -> Answer:
        reply = self.core.tick(
            now, batch.caller, signals=batch.signals, settles=batch.settles, cancels=batch.cancels,
            lates=batch.lates, adopts=batch.adopts, acquires=batch.acquires,
        )  # fmt: skip
        meter, line = self.core.meter, self.core.line
        standing = Standing(
            in_flight=len(self.core.leases.held), factor_ppm=meter.factor,
            blocked_until=meter.blocked_until, would_have_waited=0, waiting=tuple(line.count),
            backlog=tuple(line.backlog), level=tuple(meter.level), used=meter.read(),
            foreign=tuple(meter.foreign),
        )  # fmt: skip
        seat = self.core.seats.by_name[batch.caller.gateway]
        return Answer(status=OK, reply=reply, standing=standing, letters=len(seat.mail))


class Desk:
    """One process at the shared pool; `go` runs whatever is due."""

    def __init__(self, shared: Shared, name: str = "g0", **options):
        self.shared = shared
        self.pool = RemotePool(shared.spec, name, **options)
        self.up = True
        self.now = START
        self.said = {}

    def acquire(self, ask: Ask):
        verdict = self.pool.acquire(self.now, ask, self.shared.spec.dimensions)
        if verdict is not None:
            self.said[ask.rid] = verdict
        return verdict

    def settle(self, rid: str, actual=None, outcome=Outcome.SERVED, retry_after=0) -> None:
        self.pool.settle(self.now, rid, outcome, actual, retry_after)

    def exchange(self, *, lost: bool = False):
        """One batch, if one is due: answered, or lost on the way out or back."""
        batch = self.pool.next(self.now)
        if batch is None:
            return None
        answer = self.shared.tick(self.now, batch) if self.up or lost else None
        if answer is None or lost:
            self.now += TIMEOUT
            self.pool.failed(self.now)
        else:
            self.pool.answered(self.now, answer)
        self.hear()
        return batch

    def hear(self) -> None:
        self.said.update((verdict.rid, verdict) for verdict in self.pool.verdicts())

    def run(self, until: int, *, step: int = 5_000) -> None:
        """Time passes until then; everything due is sent."""
        while self.now < until:
            at = self.pool.alarm(self.now)
            if at is None or at > until:
                self.now = until
                return
            self.now = max(self.now, at)
            if self.exchange() is None:
                self.now += step
                self.hear()


def test_an_idle_client_adds_no_delay_and_sends_nothing_by_itself():
    desk = Desk(Shared(spec_of()))
    assert desk.pool.alarm(desk.now) is None
    desk.acquire(ask_of("a"))
    assert desk.pool.alarm(desk.now) == desk.now
    desk.exchange()
    assert isinstance(desk.said["a"], Admit)
    assert desk.pool.alarm(desk.now) is None


def test_one_batch_is_in_flight_and_what_arrives_meanwhile_rides_on_the_next():
    desk = Desk(Shared(spec_of()))
    desk.acquire(ask_of("a"))
    first = desk.pool.next(desk.now)
    desk.acquire(ask_of("b"))
    desk.acquire(ask_of("c"))
    assert desk.pool.next(desk.now) is None
    desk.pool.answered(desk.now, desk.shared.tick(desk.now, first))
    second = desk.pool.next(desk.now)
    assert [ask.rid for ask in second.acquires] == ["b", "c"]


def test_a_settlement_waits_for_company_and_not_for_long():
    desk = Desk(Shared(spec_of()))
    desk.acquire(ask_of("a"))
    desk.exchange()
    desk.settle("a")
    assert desk.pool.next(desk.now) is None
    desk.acquire(ask_of("b"))
    batch = desk.exchange()
    assert [done.rid for done in batch.settles] == ["a"]
    desk.settle("b")
    assert desk.pool.alarm(desk.now) == desk.now + LINGER


def test_a_lost_answer_is_sent_again_and_nothing_is_charged_twice():
    desk = Desk(Shared(spec_of()))
    desk.acquire(ask_of("a"))
    desk.exchange(lost=True)
    assert "a" not in desk.said
    desk.run(desk.now + SECOND)
    assert isinstance(desk.said["a"], Admit)
    assert desk.shared.core.meter.read() == (SECOND,)


def test_a_call_that_left_before_its_batch_costs_nothing():
    desk = Desk(Shared(spec_of()))
    desk.acquire(ask_of("a"))
    desk.pool.cancel(desk.now, "a")
    assert desk.pool.alarm(desk.now) is None
    assert desk.pool.quiet


def test_a_grant_that_meets_nobody_goes_back():
    desk = Desk(Shared(spec_of()))
    desk.acquire(ask_of("a"))
    batch = desk.pool.next(desk.now)
    answer = desk.shared.tick(desk.now, batch)
    desk.pool.cancel(desk.now, "a")
    desk.pool.answered(desk.now, answer)
    assert not desk.pool.verdicts()
    desk.exchange()
    assert desk.shared.core.leases.held == {}
    assert desk.shared.core.meter.read() == (0,)


def test_with_waiters_the_heartbeat_comes_well_within_what_counts_as_a_stall():
    desk = Desk(Shared(spec_of(rpm=1), cold=True))
    desk.acquire(ask_of("a", deadline_in=10 * MINUTE))
    desk.exchange()
    assert desk.pool.alarm(desk.now) < desk.now + desk.shared.spec.dead // 2


def test_a_store_that_restarts_empty_gets_every_waiter_again_in_order():
    shared = Shared(spec_of(rpm=60), cold=True)
    desk = Desk(shared)
    order = []
    for n in range(5):
        desk.acquire(ask_of(f"r{n}"))
        desk.exchange()
        desk.now += 1_000
    shared.lose(desk.now)
    while len(desk.said) < 5:
        seen = set(desk.said)
        desk.run(desk.now + SECOND)
        order += sorted(set(desk.said) - seen)
    assert order == [f"r{n}" for n in range(5)]
    assert all(isinstance(one, Admit) for one in desk.said.values())


def test_calls_in_flight_are_adopted_by_a_store_that_lost_them():
    shared = Shared(spec_of(concurrency=2))
    desk = Desk(shared)
    desk.acquire(ask_of("a"))
    desk.exchange()
    shared.lose(desk.now)
    desk.acquire(ask_of("b"))
    desk.run(desk.now + 2 * SECOND)
    assert "a" in shared.core.leases.held


def test_two_batches_without_an_answer_open_our_own_share():
    desk = Desk(Shared(spec_of()))
    desk.acquire(ask_of("a"))
    desk.exchange()
    desk.up = False
    desk.acquire(ask_of("b"))
    desk.exchange()
    desk.run(desk.now + SECOND)
    assert desk.pool.away
    desk.run(desk.now + 10 * SECOND)
    assert isinstance(desk.said["b"], Admit)


def test_what_an_outage_cost_is_charged_before_anybody_else_is_admitted():
    shared = Shared(spec_of())
    desk = Desk(shared)
    desk.acquire(ask_of("a"))
    desk.exchange()
    desk.up = False
    desk.acquire(ask_of("b"))
    desk.run(desk.now + 5 * SECOND)
    desk.settle("b")
    spent = shared.core.meter.read()[0]
    desk.up = True
    desk.run(desk.now + 30 * PROBE)
    assert not desk.pool.away
    assert shared.core.meter.read()[0] == spent + SECOND
    desk.run(desk.now + SECOND)
    assert not [rid for rid in shared.core.leases.held if "outage" in rid]


def test_a_share_too_small_for_a_call_makes_it_wait_for_the_store_and_never_says_never():
    shared = Shared(pool_spec(name="pool:p", limits={"rpm": 600, "tpm": 100_000}, because="p"))
    desk = Desk(shared)
    desk.up = False
    desk.acquire(ask_of("big", cost=(SECOND, 50_000 * SECOND)))
    desk.run(desk.now + 2 * SECOND)
    assert desk.pool.away
    assert "big" not in desk.said
    desk.up = True
    desk.run(desk.now + 120 * SECOND)
    assert isinstance(desk.said["big"], Admit)


def test_the_share_of_a_small_limit_is_one_request_at_least():
    desk = Desk(Shared(pool_spec(name="pool:p", limits={"rpm": 10}, queue=False, because="p")))
    desk.up = False
    for n in range(5):
        desk.acquire(ask_of(f"r{n}"))
    desk.run(desk.now + 2 * SECOND)
    assert sum(isinstance(one, Admit) for one in desk.said.values()) == 1
    assert len(desk.said) == 5


def test_a_closed_pool_grants_nothing_until_the_deadline():
    desk = Desk(Shared(spec_of()), mode=FailMode.CLOSED)
    desk.up = False
    desk.acquire(ask_of("a"))
    desk.run(desk.now + 2 * SECOND)
    assert desk.pool.away
    assert "a" not in desk.said
    desk.pool.late(desk.now, "a")
    desk.hear()
    assert isinstance(desk.said["a"], Late)


def test_an_open_pool_grants_everything():
    desk = Desk(Shared(spec_of(rpm=1)), mode=FailMode.OPEN)
    desk.up = False
    for n in range(50):
        desk.acquire(ask_of(f"r{n}"))
    desk.run(desk.now + 2 * SECOND)
    assert sum(isinstance(one, Admit) for one in desk.said.values()) == 50


def test_the_pool_says_what_was_ahead_of_a_late_call():
    desk = Desk(Shared(spec_of(rpm=60), cold=True))
    for n in range(3):
        desk.acquire(ask_of(f"r{n}"))
    desk.exchange()
    desk.pool.late(desk.now, "r2")
    desk.exchange()
    assert isinstance(desk.said["r2"], Late)
    assert desk.said["r2"].eta > 0


@pytest.mark.parametrize("seed", range(3))
def test_no_waiter_is_lost_and_no_lease_leaks_whatever_breaks(seed):
    rng = random.Random(seed)
    shared = Shared(spec_of(rpm=600, concurrency=30))
    desks = [Desk(shared, f"g{n}") for n in range(3)]
    asked, open_calls = set(), []
    now = START
    for step in range(500):
        now += int(rng.expovariate(1) * 20_000)
        desk = rng.choice(desks)
        for one in desks:
            one.now = max(one.now, now)
        if rng.random() < 0.6:
            rid = f"{desk.pool.gateway}.{step}"
            asked.add((desk.pool.gateway, rid))
            desk.acquire(ask_of(rid, lane=rng.randrange(1, 4), tenant=rng.choice("abc")))
        if rng.random() < 0.02:
            desk.up = not desk.up
        if rng.random() < 0.003:
            shared.lose(now)
        lost = rng.random() < 0.03
        desk.exchange(lost=lost)
        open_calls += [(desk, rid) for rid in desk.pool.held]
        rng.shuffle(open_calls)
        for _ in range(min(len(open_calls), rng.randrange(3))):
            owner, rid = open_calls.pop()
            owner.settle(rid)
        for name in shared.core.seats.by_name.values():
            if name.mail:
                for one in desks:
                    one.pool.nudge()
    end = max(desk.now for desk in desks) + 120 * SECOND
    for desk in desks:
        desk.up = True
    for at in range(max(desk.now for desk in desks), end, SECOND):
        for desk in desks:
            desk.run(at)
            desk.hear()
            for rid in list(desk.pool.held):
                desk.settle(rid)
    for desk in desks:
        assert not desk.pool.waits
        assert desk.pool.quiet
    answered = {(desk.pool.gateway, rid) for desk in desks for rid in desk.said}
    assert asked <= answered
    assert not shared.core.line.waiting
    shared.core.advance(end + 200 * SECOND)
    assert not shared.core.leases.held


def test_a_store_that_answers_slowly_is_as_good_as_away_until_it_answers_quickly():
    shared = Shared(spec_of())
    desk = Desk(shared, mode=FailMode.OPEN)

    def exchange(pace: int) -> None:
        batch = desk.pool.next(desk.now)
        if batch is None:
            desk.now = desk.pool.alarm(desk.now) or desk.now
            batch = desk.pool.next(desk.now)
        answer = shared.tick(desk.now, batch)
        desk.now += pace
        desk.pool.answered(desk.now, answer)
        desk.hear()

    for n in range(JUDGED):
        assert not desk.pool.away
        desk.acquire(ask_of(f"slow{n}"))
        exchange(TOO_SLOW * 3 // 2)
    assert desk.pool.away
    assert isinstance(desk.acquire(ask_of("meanwhile")), Admit)
    left = desk.now
    for _ in range(JUDGED):
        assert desk.pool.away
        exchange(1_000)
    assert not desk.pool.away
    assert desk.now - left >= 20 * PROBE - PROBE
