from __future__ import annotations

from random import Random

import pytest

from gateway.call import Bytes, Call, Dialect, Family, Kind, Principal, Reply
from gateway.clock import LoopClock
from gateway.layers.retry import Retrying
from gateway.resilience.attempts import Again, Attempts, decide
from gateway.resilience.backoff import BackoffRules
from gateway.resilience.budget import RetryBudget
from gateway.snapshot import AgentRule, Snapshot
from gateway.units import MICRO, Mode
from tests.sim.loop import run

RULES = BackoffRules(attempts=3, requeues=2, max_retry_after=5 * MICRO)


def ruling(
    kind, *, retry_after=None, tried=None, remaining=60 * MICRO, other_key=False, rules=RULES
):
    return decide(
        kind=kind,
        retry_after=retry_after,
        rules=rules,
        tried=tried or Attempts(),
        remaining=remaining,
        other_key=other_key,
        rng=Random(1),
    )


@pytest.mark.parametrize("kind", [Kind.MONEY, Kind.PERIOD, Kind.AUTH, Kind.CALLER])
def test_what_cannot_help_is_never_retried(kind):
    assert isinstance(ruling(kind), str)


@pytest.mark.parametrize("kind", [Kind.MONEY, Kind.PERIOD, Kind.AUTH, Kind.QUOTA])
def test_another_credential_is_tried_at_once(kind):
    assert ruling(kind, other_key=True) == Again(0, "other credential")


def test_a_quota_refusal_requeues_and_does_not_sleep_here():
    assert ruling(Kind.QUOTA, retry_after=MICRO) == Again(0, "requeue")


def test_a_stated_wait_beyond_the_bound_is_not_waited_for():
    assert isinstance(ruling(Kind.QUOTA, retry_after=6 * MICRO), str)
    assert isinstance(ruling(Kind.FAULT, retry_after=86_400 * MICRO), str)


def test_requeues_are_bounded():
    assert isinstance(ruling(Kind.QUOTA, tried=Attempts(requeues=2)), str)


def test_a_fault_backs_off_at_least_as_long_as_told():
    again = ruling(Kind.FAULT, retry_after=2 * MICRO)
    assert isinstance(again, Again)
    assert again.wait >= 2 * MICRO


def test_attempts_by_backoff_are_bounded():
    assert isinstance(ruling(Kind.FAULT, tried=Attempts(backoffs=2)), str)


def test_a_wait_that_outlives_the_deadline_is_given_up():
    assert isinstance(ruling(Kind.CAPACITY, remaining=1), str)


def test_shadow_retries_nothing():
    rules = BackoffRules(mode=Mode.SHADOW)
    assert isinstance(ruling(Kind.FAULT, rules=rules), str)


def test_a_caller_whose_sdk_repeats_spends_its_own_budget_and_nobody_elses():
    async def main():
        clock = LoopClock()
        rules = BackoffRules(base=1, cap=2, attempts=2, budget_max=1, budget_min_per_second=0)
        shared = RetryBudget(rules, now=clock.now())
        attempts: list[str] = []

        async def faulty(one):
            attempts.append(one.id)
            reply = Reply(status=500, headers=[], source=Bytes(b""))
            reply.kind = Kind.FAULT
            return reply

        class NoSpares:
            def other_credential(self, _call):
                return False

        layer = Retrying(clock=clock, rng=Random(1), budget=shared, spares=NoSpares())

        async def ask(name, repeat):
            one = Call(
                id=name, dialect=Dialect.CHAT, family=Family.OPENAI, method="POST", path="/",
                target=b"/", received=0, snapshot=Snapshot(revision=1, digest="", backoff=rules),
                headers=[(b"x-stainless-retry-count", repeat)],
            )  # fmt: skip
            rule = AgentRule(id=name, tenant="t")
            one.principal = Principal(id=name, agent=name, tenant="t", rule=rule)
            one.deadline = clock.now() + 60 * MICRO
            await layer(faulty)(one)

        for _ in range(3):
            await ask("repeats", b"1")
        await ask("first", b"0")
        return attempts

    # Its own single retry once, then none; the shared one is still there for somebody else.
    assert run(main()) == ["repeats"] * 4 + ["first"] * 2
