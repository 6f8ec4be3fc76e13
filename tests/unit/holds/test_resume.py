"""The loop that keeps and releases: its decisions, against a real store in memory."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from random import Random

import pytest

from gateway.call import Bytes, Call, HeldCall, Kind, Reply
from gateway.clock import LoopClock
from gateway.errors import BreakerOpen, Forbidden, KeyConflict
from gateway.holds.push import Pushing
from gateway.holds.resume import Resuming
from gateway.layers.mark import mark
from gateway.layers.trip import Breakers
from gateway.machine import decoded
from gateway.resilience.breaker import State as Breaks
from gateway.snapshot import Deployment, HoldRules, Model, Provider, Secret, Snapshot, WebhookRules
from gateway.telemetry.metrics import Metrics
from gateway.webhooks import PAUSES, Delivered, Undelivered
from scheduler.api import IllegalTransition, State, StoreFault, UnknownHold, pause
from tests.fixtures.held import memory_store
from tests.fixtures.waiting import until
from tests.unit.holds.test_rows import call

PROVIDER = Provider(name="p", dialects=frozenset({"openai"}), base_url="http://up")
RUNGS = tuple(Deployment(id=f"p/{name}", provider=PROVIDER, model="m") for name in "ab")
OPEN = BreakerOpen("p/a is unavailable.", because="breakers")
HOOKS = WebhookRules(
    secret=Secret("a signing key of 24 or more"),
    hosts=("h.example",),
    alerts="https://ops.example/",
)


class Lines(list):
    """A log that remembers."""

    def info(self, event: str, **facts: object) -> None:
        self.append((event, facts))

    warning = error = info

    def named(self, event: str) -> list[dict]:
        return [facts for name, facts in self if name == event]


class FakeHooks:
    """Receivers by script."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, str]] = []
        self.outcomes: list[Delivered | Undelivered] = []

    async def send(self, one, body, *, id, rules):  # noqa: A002
        self.sent.append((one.url, body, id))
        return self.outcomes.pop(0) if self.outcomes else Delivered(204)


class World:
    """A loop under way, with what it is wired to."""

    def __init__(self, store, **rules) -> None:
        self.store = store
        self.clock = LoopClock()
        self.snapshot = Snapshot(
            revision=1, digest="d", holds=HoldRules(webhooks=HOOKS, **rules),
            models={"m": Model(name="m", deployments=RUNGS)},
        )  # fmt: skip
        self.breakers = Breakers()
        self.metrics = Metrics()
        self.log = Lines()
        self.hooks = FakeHooks()
        self.seen: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        pushing = Pushing(
            store=store, hooks=self.hooks, snapshot=lambda: self.snapshot, clock=self.clock,
            rng=Random(1), metrics=self.metrics, log=self.log,
        )  # fmt: skip
        self.resuming = Resuming(
            store=store, snapshot=lambda: self.snapshot, breakers=self.breakers, clock=self.clock,
            metrics=self.metrics, log=self.log, pushing=pushing, decode=decoded,
        )  # fmt: skip
        self.resuming.serve_by(self.serve)

    async def serve(self, one: Call) -> Reply:
        one.deployment = RUNGS[0]

        async def inner(_call: Call) -> Reply:
            self.seen.append(one.id)
            one.sent = True
            await self.gate.wait()
            return Reply(status=200, headers=[], source=Bytes(b"{}"))

        return await mark(inner)(one)

    def shut(self, *states: Breaks, sick: bool = True) -> None:
        """The breakers of the rungs are in these states for a long time."""
        for rung, state in zip(RUNGS, states, strict=False):
            breaker = self.breakers.of(rung.id, self.snapshot.breaker)
            breaker.told(state, until=self.clock.now() + (1 << 50), reason="down")
            breaker.sick = sick

    def open_again(self) -> None:
        self.shut(Breaks.CLOSED, Breaks.CLOSED)
        self.resuming.poke()

    def wish(self, number: int = 1, **headers: str) -> Call:
        made = call({name.replace("_", "-"): value for name, value in headers.items()})
        made.id = f"c{number}"
        made.snapshot = self.snapshot
        return made

    async def ended(self, hold: str) -> State:
        async def finished() -> bool:
            return (await self.store.find(hold, "key:dev")).finished

        await until(finished)
        return (await self.store.find(hold, "key:dev")).state


@asynccontextmanager
async def world(*, down: bool = True, owner: bool = True, **rules):
    with memory_store() as store:
        made = World(store, **rules)
        if not owner:
            store.own = lambda: False
        if down:
            made.shut(Breaks.OPEN, Breaks.OPEN)
        loop = asyncio.ensure_future(made.resuming.run())
        await asyncio.sleep(0)
        try:
            yield made
        finally:
            loop.cancel()
            await asyncio.wait([loop])


def test_a_call_waits_for_its_breaker_and_is_then_executed_once():
    async def scenario() -> None:
        async with world() as made:
            held = await made.resuming.keep(made.wish(), OPEN)
            await asyncio.sleep(0.01)
            assert made.seen == []
            made.open_again()
            assert await made.ended(held.id) is State.DONE
            assert made.seen == ["c1"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("states", "sick", "width"),
    [
        ((Breaks.OPEN, Breaks.OPEN), True, 0),
        ((Breaks.SHUT, Breaks.SHUT), False, 0),
        ((Breaks.OPEN, Breaks.CLOSED), True, "any"),
        ((Breaks.HALF_OPEN, Breaks.OPEN), True, 1),
        ((Breaks.OPEN, Breaks.OPEN), False, "any"),
        ((Breaks.CLOSED, Breaks.OPEN), True, "any"),
    ],
)
def test_as_many_go_on_as_the_breakers_of_the_ladder_let_through(states, sick, width):
    async def scenario() -> int:
        with memory_store() as store:
            made = World(store)
            made.shut(*states, sick=sick)
            assert made.resuming.width("nobody's model") > 1
            return made.resuming.width("m")

    found = asyncio.run(scenario())
    assert found > 1 if width == "any" else found == width


def test_a_cancelled_execution_is_cut_off_and_stays_cancelled():
    async def scenario() -> None:
        async with world(down=False) as made:
            made.gate.clear()
            held = await made.resuming.keep(made.wish(), OPEN)
            await until(lambda: made.seen)
            gone = await made.resuming.cancel(held.id, "key:dev")
            assert gone.state is State.CANCELLED
            await until(lambda: not made.resuming.running)
            assert await made.ended(held.id) is State.CANCELLED
            with pytest.raises(IllegalTransition):
                await made.resuming.cancel(held.id, "key:dev")
            with pytest.raises(UnknownHold):
                await made.resuming.cancel(held.id, "key:other")

    asyncio.run(scenario())


def test_a_stopping_process_gives_back_what_was_not_sent_and_doubts_what_was():
    async def scenario() -> None:
        async with world(down=False) as made:
            made.gate.clear()
            held = await made.resuming.keep(made.wish(), OPEN)
            await until(lambda: made.seen)
            other = await made.resuming.keep(made.wish(2), OPEN)
            await made.resuming.drain(10_000)
            assert await made.ended(held.id) is State.IN_DOUBT
            assert (await made.store.find(other.id, "key:dev")).state is State.OPEN
            assert made.resuming.running == 0
            assert made.resuming.followers.leaving

    asyncio.run(scenario())


def test_a_defect_in_the_pipeline_ends_its_call_alone():
    async def scenario() -> None:
        async with world(down=False, at_once=4) as made:
            serve = made.serve

            async def sometimes(one: Call) -> Reply:
                if one.id == "c1":
                    assert isinstance(one, HeldCall)
                    raise ZeroDivisionError
                return await serve(one)

            made.resuming.serve_by(sometimes)
            for number in (1, 2):
                await made.resuming.keep(made.wish(number), OPEN)
            assert await made.ended("c2") is State.DONE
            await until(lambda: made.log.named("hold_crashed"))
            [line] = made.log.named("hold_crashed")
            assert line["error"] == "ZeroDivisionError"

    asyncio.run(scenario())


def test_a_call_refused_again_keeps_its_age_and_the_ramp_begins_anew():
    async def scenario() -> None:
        async with world(down=False) as made:
            serve, refusals = made.serve, [1]

            async def refusing(one: Call) -> Reply:
                if refusals and refusals.pop():
                    reply = Reply(status=503, headers=[], source=Bytes(b""))
                    reply.kind = Kind.CAPACITY
                    return reply
                return await serve(one)

            made.resuming.serve_by(refusing)
            kept_at = made.clock.now()
            held = await made.resuming.keep(made.wish(), OPEN)
            await until(lambda: made.log.named("hold_given_back"))
            row = await made.store.find(held.id, "key:dev")
            assert (row.state, row.tries, row.seq) == (State.OPEN, 1, held.seq)
            assert row.not_before >= kept_at + pause(1)

    asyncio.run(scenario())


def test_operators_are_told_once_when_holding_begins_and_once_when_it_is_over():
    async def scenario() -> None:
        async with world() as made:
            for number in range(3):
                await made.resuming.keep(made.wish(number), OPEN)
            made.open_again()
            for number in range(3):
                assert await made.ended(f"c{number}") is State.DONE
            await until(lambda: made.resuming.poke() or len(made.hooks.sent) == 2)
            assert len(made.log.named("holds_begun")) == 1
            kinds = [(url, b"hold.begun" in body, b"hold.over" in body)
                     for url, body, _ in made.hooks.sent]  # fmt: skip
            assert kinds == [("https://ops.example/", True, False),
                             ("https://ops.example/", False, True)]  # fmt: skip

    asyncio.run(scenario())


def test_a_result_is_pushed_and_a_failed_push_is_put_off_in_the_store():
    async def scenario() -> None:
        async with world(down=False) as made:
            made.hooks.outcomes = [
                Delivered(204),
                Undelivered("h.example answered 500", again=True),
            ]
            wish = made.wish(tidegate_webhook="https://h.example/x")
            held = await made.resuming.keep(wish, OPEN)
            await made.ended(held.id)
            kept_at = made.clock.now()

            async def tried() -> bool:
                return (await made.store.find(held.id, "key:dev")).push_tries > 0

            await until(tried)
            row = await made.store.find(held.id, "key:dev")
            assert made.log.named("webhook")
            assert (row.push_state, row.push_tries) == ("pending", 1)
            assert row.push_at >= kept_at + PAUSES[0]
            assert f"{held.id}.result" in {name for _, _, name in made.hooks.sent}

    asyncio.run(scenario())


def test_what_cannot_be_kept_is_refused_and_says_why():
    async def scenario() -> None:
        async with world(max_per_agent=1) as made:
            await made.resuming.keep(made.wish(1, idempotency_key="k"), OPEN)
            with pytest.raises(BreakerOpen, match=r"holds\.max_per_agent") as full:
                await made.resuming.keep(made.wish(2), OPEN)
            assert full.value.because == "holds.max_per_agent"
            other = made.wish(3, idempotency_key="k")
            other.body += b" "
            with pytest.raises(KeyConflict, match="/v1/holds/c1"):
                await made.resuming.keep(other, OPEN)
            with pytest.raises(Forbidden, match="not allowed"):
                await made.resuming.keep(
                    made.wish(4, tidegate_webhook="https://evil.example/"), OPEN
                )

            async def fails(*_args, **_facts):
                raise StoreFault("disk full")

            made.store.keep = fails
            with pytest.raises(BreakerOpen, match="could not be held"):
                await made.resuming.keep(made.wish(5), OPEN)
            assert made.log.named("hold_store")

    asyncio.run(scenario())


def test_a_caller_that_leaves_before_it_hears_of_its_hold_has_it_cancelled():
    async def scenario() -> None:
        async with world() as made:
            keeping = asyncio.ensure_future(made.resuming.keep(made.wish(), OPEN))
            await asyncio.sleep(0)
            keeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await keeping
            assert await made.ended("c1") is State.CANCELLED

    asyncio.run(scenario())


def test_a_store_that_fails_is_said_once_and_asked_again():
    async def scenario() -> None:
        async with world() as made:
            await made.resuming.keep(made.wish(), OPEN)
            waiting, fails = made.store.waiting, [3]

            async def sometimes():
                if fails[0]:
                    fails[0] -= 1
                    made.resuming.poke()
                    raise StoreFault("disk full")
                return await waiting()

            made.store.waiting = sometimes
            made.open_again()
            assert await made.ended("c1") is State.DONE
            assert len(made.log.named("hold_store")) == 1

    asyncio.run(scenario())


def test_a_process_that_does_not_own_the_store_keeps_and_does_not_execute():
    async def scenario() -> None:
        async with world(down=False, owner=False) as made:
            await made.resuming.keep(made.wish(), OPEN)
            await asyncio.sleep(0.01)
            assert made.seen == []
            made.store.own = lambda: True
            made.resuming.poke()
            assert await made.ended("c1") is State.DONE

    asyncio.run(scenario())
