"""Pushes and alerts by script: what is tried again, what is given up; none of it raises."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gateway.clock import LoopClock
from gateway.holds.push import ALERT_TRIES, MAX_ALERTS, MAX_PUSHING, Pushing
from gateway.snapshot import HoldRules, Snapshot, WebhookRules
from gateway.telemetry.metrics import Metrics
from gateway.units import MICRO
from gateway.webhooks import MAX_TRIES, Delivered, Undelivered
from scheduler.api import State, StoreFault
from tests.sim.loop import run
from tests.unit.holds.test_resume import HOOKS, FakeHooks, Lines
from tests.unit.layers.test_hold import row

LATER = Undelivered("h.example answered 500", again=True)
NEVER = Undelivered("h.example answered 410", again=False)


class Store:
    """Remembers what was said of deliveries."""

    def __init__(self, error: Exception | None = None) -> None:
        self.said: list[tuple[str, int]] = []
        self.error = error

    async def reply(self, _hold: str) -> None:
        return None

    async def pushed(self, _hold: str, *, state: str, next_at: int) -> None:
        if self.error is not None:
            raise self.error
        self.said.append((state, next_at))


class World:
    def __init__(self, *outcomes, rules: WebhookRules = HOOKS, error=None) -> None:
        self.clock = LoopClock()
        self.hooks, self.log, self.store = FakeHooks(), Lines(), Store(error)
        self.hooks.outcomes = list(outcomes)
        self.metrics = Metrics()
        self.pushing = Pushing(
            store=self.store, hooks=self.hooks, clock=self.clock, rng=Random(1),
            snapshot=lambda: Snapshot(revision=1, digest="d", holds=HoldRules(webhooks=rules)),
            metrics=self.metrics, log=self.log,
        )  # fmt: skip

    def due(self, **facts):
        return replace(row(), webhook="https://h.example/x", state=State.EXPIRED,
                       push_at=self.clock.now(), push_state="pending", **facts)  # fmt: skip


def pushed(*outcomes, tries: int = 0, **facts) -> World:
    async def main() -> World:
        made = World(*outcomes, **facts)
        await made.pushing.push(made.due(push_tries=tries))
        assert made.pushing.busy == set()
        return made

    return run(main())


def test_a_taken_result_is_not_pushed_again():
    assert pushed(Delivered(204)).store.said == [("delivered", 0)]


def test_one_that_was_not_taken_is_put_off():
    made = pushed(LATER)
    [(state, at)] = made.store.said
    assert state == "pending"
    assert at >= made.clock._anchor + 5 * MICRO
    assert made.log.named("webhook")[0]["why"] == LATER.why


@pytest.mark.parametrize(("outcome", "tries"), [(NEVER, 0), (LATER, MAX_TRIES - 1)])
def test_one_that_will_never_be_taken_is_given_up(outcome, tries):
    assert pushed(outcome, tries=tries).store.said == [("failed", 0)]


def test_a_host_that_policy_no_longer_lists_is_not_called():
    made = pushed(rules=replace(HOOKS, hosts=()))
    assert (made.store.said, made.hooks.sent) == ([("failed", 0)], [])


@pytest.mark.parametrize("error", [StoreFault("disk full"), ZeroDivisionError()])
def test_no_failure_of_a_push_reaches_the_loop(error):
    made = pushed(Delivered(204), error=error)
    assert made.log.named("hold_store" if isinstance(error, StoreFault) else "webhook_crashed")


def test_only_so_many_are_pushed_at_once_each_once_and_none_before_its_time():
    async def main() -> None:
        made = World()
        held = made.due()
        assert made.pushing.wants(held)
        assert not made.pushing.wants(replace(held, push_at=0))
        assert not made.pushing.wants(replace(held, push_at=made.clock.now() + MICRO))
        made.pushing.busy.add(held.id)
        assert not made.pushing.wants(held)
        made.pushing.busy |= {str(number) for number in range(MAX_PUSHING)}
        assert not made.pushing.wants(replace(held, id="other"))

    run(main())


@pytest.mark.parametrize(
    ("outcomes", "sent", "failed"),
    [
        ([Delivered(200)], 1, False), ([LATER, Delivered(200)], 2, False),
        ([LATER] * 9, ALERT_TRIES, True), ([NEVER], 1, True),
    ],
)  # fmt: skip
def test_an_alert_is_tried_a_few_times_under_one_id(outcomes, sent, failed):
    async def main() -> World:
        made = World(*outcomes)
        await made.pushing.alert({"type": "hold.begun"})
        return made

    made = run(main())
    assert len(made.hooks.sent) == sent
    assert len({name for _, _, name in made.hooks.sent}) == 1
    assert bool(made.log.named("webhook")) is failed


def test_alerts_go_nowhere_without_a_target_and_only_so_many_at_once():
    async def main() -> None:
        quiet = World(rules=replace(HOOKS, alerts=""))
        await quiet.pushing.alert({"type": "x"})
        full = World()
        full.pushing._alerts = MAX_ALERTS
        await full.pushing.alert({"type": "x"})
        assert quiet.hooks.sent == full.hooks.sent == []

    run(main())


def test_an_alert_that_crashes_is_said_and_forgotten():
    async def main() -> World:
        made = World()

        async def crash(*_args, **_facts):
            raise ZeroDivisionError

        made.hooks.send = crash
        await made.pushing.alert({"type": "x"})
        assert made.pushing._alerts == 0
        return made

    assert run(main()).log.named("webhook")[0]["why"] == "ZeroDivisionError"
