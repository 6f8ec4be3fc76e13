from __future__ import annotations

import asyncio
from random import Random

import pytest

from gateway.call import Bytes, Call, Dialect, End, Family, Fields, Kind, Reply
from gateway.clock import LoopClock
from gateway.errors import BreakerOpen, UpstreamUnreachable
from gateway.layers.trip import Breakers, Tripping
from gateway.resilience.breaker import State
from gateway.resilience.probes import LOOK, Elsewhere, Handed, Lent
from gateway.snapshot import BreakerRules, Deployment, Provider, Snapshot, Tier
from gateway.units import MICRO
from tests.sim.loop import run

RUNG = Deployment(
    id="p/m", provider=Provider(name="p", dialects=frozenset({"openai"}), base_url="http://up")
)


def the_clock() -> LoopClock:
    """One clock per loop: a second one would be anchored elsewhere."""
    loop = asyncio.get_running_loop()
    if not hasattr(loop, "clock"):
        loop.clock = LoopClock()
    return loop.clock


def call(number: int = 1, *, lane: int = 2, patience: int = 60, rungs_left: int = 0) -> Call:
    made = Call(
        id=f"c{number}", dialect=Dialect.CHAT, family=Family.OPENAI, method="POST", path="/",
        target=b"/", headers=[], received=0,
        snapshot=Snapshot(revision=1, digest="", breaker=BreakerRules(in_a_row=1)),
    )  # fmt: skip
    made.fields = Fields(model="m")
    made.deployment = RUNG
    made.tier = Tier(name="t", number=lane)
    made.deadline = the_clock().now() + patience * MICRO
    made.rungs_left = rungs_left
    return made


def layer(breakers: Breakers):
    return Tripping(breakers=breakers, clock=the_clock(), rng=Random(1))


async def away(_call):
    raise UpstreamUnreachable("away", code="connect_failed")


async def well(_call):
    return Reply(status=200, headers=[], source=Bytes(b""))


def test_the_call_whose_failure_opens_the_breaker_is_not_cancelled_by_it():
    async def main():
        service = layer(Breakers())(away)
        with pytest.raises(UpstreamUnreachable):
            await service(call())
        await asyncio.sleep(0.1)  # a cancellation left behind would strike here
        return asyncio.current_task().cancelling()

    assert run(main()) == 0


def test_calls_still_in_a_pool_leave_it_when_the_breaker_opens_and_wait_for_it():
    async def main():
        breakers, gate = Breakers(), asyncio.Event()
        seen: list[str] = []

        async def inner(one: Call) -> Reply:
            seen.append(one.id)
            if one.id == "c1":
                raise UpstreamUnreachable("away", code="connect_failed")
            if seen.count(one.id) == 1:
                await gate.wait()  # stands in its pool, nothing sent
            return await well(one)

        service = layer(breakers)(inner)
        waiting = asyncio.ensure_future(service(call(2)))
        await asyncio.sleep(0)
        with pytest.raises(UpstreamUnreachable):
            await service(call(1))
        reply = await waiting
        return seen, reply.status

    assert run(main()) == (["c2", "c1", "c2"], 200)


def test_with_a_rung_left_an_open_breaker_refuses_at_once():
    async def main():
        service = layer(Breakers())(away)
        with pytest.raises(UpstreamUnreachable):
            await service(call(1))
        with pytest.raises(BreakerOpen) as refused:
            await service(call(2, rungs_left=1))
        return refused.value

    refused = run(main())
    assert refused.because == "breakers"
    assert refused.retry_after is not None


def test_a_caller_that_leaves_and_a_callers_fault_say_nothing_of_the_upstream():
    async def main():
        breakers = Breakers()

        async def faulty(_call):
            reply = Reply(status=400, headers=[], source=Bytes(b""))
            reply.kind = Kind.CALLER
            return reply

        for _ in range(20):
            reply = await layer(breakers)(faulty)(call())
            await reply.close(End.COMPLETE)
            reply = await layer(breakers)(well)(call())
            await reply.close(End.CLIENT_GONE)
        return [breaker.state.value for _, breaker in breakers]

    assert run(main()) == ["closed"]


def test_a_stream_that_is_cut_after_it_began_is_a_failure():
    async def main():
        breakers = Breakers()
        reply = await layer(breakers)(well)(call())
        await reply.close(End.CUT)
        return [breaker.state.value for _, breaker in breakers]

    assert run(main()) == ["open"]


def test_failures_are_counted_once_each():
    async def main():
        counted: list[str] = []
        service = layer(Breakers(on_failure=lambda scope, _breaker: counted.append(scope)))(away)
        with pytest.raises(UpstreamUnreachable):
            await service(call())
        return counted

    assert run(main()) == ["p/m"]


def spent(*, code: str = "insufficient_quota", wait: int | None = None, spares: bool = False):
    async def inner(_call):
        reply = Reply(status=429, headers=[], source=Bytes(b""))
        reply.kind, reply.code = Kind.MONEY, code
        reply.retry_after = wait
        reply.spares_pool = spares
        return reply

    return inner


def states(breakers: Breakers) -> list[str]:
    return [breaker.state.value for _, breaker in breakers]


def test_a_spent_account_is_not_asked_again_for_a_quarter_of_an_hour():
    async def main():
        breakers = Breakers()
        reply = await layer(breakers)(spent())(call())
        await reply.close(End.COMPLETE)
        with pytest.raises(BreakerOpen) as refused:
            await layer(breakers)(well)(call())
        await asyncio.sleep(901)
        later = await layer(breakers)(well)(call())
        return refused.value, later.status

    refused, status = run(main())
    assert "money insufficient_quota" in refused.message
    assert refused.retry_after is None  # hard: coming back within a minute does not help
    assert status == 200


def test_a_spent_account_shuts_nothing_while_another_credential_is_healthy():
    async def main():
        breakers = Breakers()
        reply = await layer(breakers)(spent(spares=True))(call())
        await reply.close(End.COMPLETE)
        return states(breakers)

    assert run(main()) == ["closed"]


def test_a_new_policy_gives_a_spent_account_a_fresh_chance():
    async def main():
        breakers = Breakers()
        reply = await layer(breakers)(spent(wait=3_600 * MICRO))(call())
        await reply.close(End.COMPLETE)
        before = states(breakers)
        breakers.renew()
        served = await layer(breakers)(well)(call())
        return before, served.status

    assert run(main()) == (["shut"], 200)


def test_having_no_credential_to_ask_with_says_nothing_of_the_upstream():
    async def main():
        breakers = Breakers()

        async def none_left(_call):
            raise BreakerOpen("no credential", code="no_credential")

        for _ in range(3):
            with pytest.raises(BreakerOpen):
                await layer(breakers)(none_left)(call())
        return states(breakers)

    assert run(main()) == ["closed"]


def recovered(breakers: Breakers):
    """The breaker of RUNG has been open and has just closed by three good probes."""

    async def run_probes() -> None:
        with pytest.raises(UpstreamUnreachable):
            await layer(breakers)(away)(call())
        for _ in range(3):
            reply = await layer(breakers)(well)(call())
            await reply.close(End.COMPLETE)

    return run_probes()


def test_who_waited_for_a_breaker_is_let_in_slowly_and_in_order_of_tier():
    async def main():
        breakers, gate = Breakers(), asyncio.Event()
        await recovered(breakers)
        inside: list[str] = []

        async def slow(one: Call) -> Reply:
            inside.append(one.id)
            one.sent = True
            await gate.wait()
            return await well(one)

        service = layer(breakers)(slow)
        lanes = [3, 3, 3, 3, 3, 3, 1, 2]
        tasks = [asyncio.ensure_future(service(call(n, lane=lane))) for n, lane in enumerate(lanes)]
        await asyncio.sleep(1)
        first = list(inside)
        gate.set()
        await asyncio.gather(*tasks)
        return first, inside[3:5], len(inside)

    first, next_two, total = run(main())
    assert len(first) == 3  # as many as there were probes
    assert next_two == ["c6", "c7"]  # then the most urgent of those who waited
    assert total == 8


def test_calls_kept_out_by_a_breaker_that_is_just_back_are_let_in_by_time_at_the_latest():
    async def main():
        breakers = Breakers()
        await recovered(breakers)

        async def silent(one: Call) -> Reply:
            one.sent = True
            await asyncio.sleep(30)
            return await well(one)

        began = the_clock().now()
        service = layer(breakers)(silent)
        tasks = [asyncio.ensure_future(service(call(n))) for n in range(20)]
        await asyncio.gather(*tasks)
        return (the_clock().now() - began) / MICRO

    assert run(main()) == pytest.approx(40, abs=0.5)  # ten seconds of patience, then the answer


def test_a_call_with_a_rung_left_goes_there_instead_of_waiting_to_be_let_in():
    async def main():
        breakers = Breakers()
        await recovered(breakers)

        async def silent(one: Call) -> Reply:
            await asyncio.sleep(30)
            return await well(one)

        service = layer(breakers)(silent)
        tasks = [asyncio.ensure_future(service(call(n, rungs_left=1))) for n in range(4)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        return [type(one) for one in done]

    assert run(main()) == [Reply, Reply, Reply, BreakerOpen]


def test_a_deployment_is_well_once_its_breaker_has_been_closed_for_half_a_minute():
    async def main():
        breakers = Breakers()
        clock = the_clock()
        seen = [breakers.well(RUNG.id, clock.now())]
        await recovered(breakers)
        seen.append(breakers.well(RUNG.id, clock.now()))
        await asyncio.sleep(30)
        return [*seen, breakers.well(RUNG.id, clock.now())]

    assert run(main()) == [True, False, True]


# --- places lent by a fleet ---


class Lending:
    """A fleet that answers as it is told; see `resilience.probes.Probes`.

    Attributes:
        answers: What it says, in turn; the last for ever.
        gate: Cleared: no answer comes.
        asked: Scopes.
        freed: What each lease was freed with.
    """

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[str] = []
        self.freed: list[Handed | None] = []

    def ask(self, scope, probe, lasts):
        self.asked.append(scope)
        return Place(self, probe)


class Place:
    def __init__(self, lending: Lending, probe: int) -> None:
        self.lending = lending
        self.probe = probe

    async def answered(self):
        await self.lending.gate.wait()
        answers = self.lending.answers
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def free(self, handed):
        self.lending.freed.append(handed)


async def sick(*answers) -> tuple[Breakers, Lending]:
    """A breaker that has opened and may be probed, and the fleet that lends its place."""
    breakers = Breakers()
    lending = breakers.probes = Lending(*answers)
    with pytest.raises(UpstreamUnreachable):
        await layer(breakers)(away)(call())
    await asyncio.sleep(2)
    return breakers, lending


def the_breaker(breakers: Breakers):
    return next(breaker for _, breaker in breakers)


def test_a_closed_breaker_asks_nobody_for_a_place():
    async def main():
        breakers = Breakers()
        lending = breakers.probes = Lending(Elsewhere(left=1))
        reply = await layer(breakers)(well)(call())
        await reply.close(End.COMPLETE)
        return lending.asked

    assert run(main()) == []


def test_the_last_good_probe_of_a_fleet_closes_the_breaker():
    async def main():
        breakers, lending = await sick(Lent(good=2))
        reply = await layer(breakers)(well)(call())
        assert lending.freed == []
        await reply.close(End.COMPLETE)
        return states(breakers), lending.asked, lending.freed

    assert run(main()) == (["closed"], ["p/m"], [Handed(good=0, rest=MICRO)])


def test_a_probe_that_is_not_the_last_hands_its_count_on():
    async def main():
        breakers, lending = await sick(Lent(good=1))
        reply = await layer(breakers)(well)(call())
        await reply.close(End.COMPLETE)
        return states(breakers), lending.freed

    assert run(main()) == (["half_open"], [Handed(good=2)])


def test_a_bad_probe_hands_on_that_the_place_rests():
    async def main():
        breakers, lending = await sick(Lent(good=2))
        with pytest.raises(UpstreamUnreachable):
            await layer(breakers)(away)(call())
        rest = the_breaker(breakers).until - the_clock().now()
        return states(breakers), lending.freed == [Handed(good=0, rest=rest)]

    assert run(main()) == (["open"], True)


@pytest.mark.parametrize("kind", [Kind.CALLER, Kind.QUOTA, None])
def test_a_probe_without_verdict_hands_on_what_it_was_lent(kind):
    async def main():
        breakers, lending = await sick(Lent(good=1))

        async def inner(_call):
            reply = Reply(status=400, headers=[], source=Bytes(b""))
            reply.kind = kind
            return reply

        reply = await layer(breakers)(inner)(call())
        await reply.close(End.COMPLETE if kind else End.CLIENT_GONE)
        return states(breakers), lending.freed

    assert run(main()) == (["half_open"], [Handed(good=1)])


def test_a_probe_that_shuts_the_breaker_hands_on_nothing():
    async def main():
        breakers, lending = await sick(Lent(good=1))
        reply = await layer(breakers)(spent())(call())
        await reply.close(End.COMPLETE)
        return states(breakers), lending.freed

    assert run(main()) == (["shut"], [Handed(good=0, rest=MICRO)])


def test_behind_a_probe_elsewhere_a_call_waits_until_it_may_look_again():
    async def main():
        breakers, lending = await sick(Elsewhere(left=3 * MICRO), Lent(good=0))
        began = the_clock().now()
        await layer(breakers)(well)(call())
        return (the_clock().now() - began) / MICRO, len(lending.asked), lending.freed

    waited, asked, freed = run(main())
    assert waited == pytest.approx(3, abs=0.1)
    assert asked == 2
    assert freed == [None]


def test_behind_a_probe_elsewhere_calls_wait_until_news_and_the_most_urgent_goes_first():
    async def main():
        breakers, lending = await sick(Elsewhere(left=3 * MICRO), Lent(good=0))
        served: list[str] = []

        async def inner(one: Call) -> Reply:
            served.append(one.id)
            return await well(one)

        service = layer(breakers)(inner)
        calls = [asyncio.ensure_future(service(call(n, lane=4 - n))) for n in range(3)]
        await asyncio.sleep(1)
        asked = len(lending.asked)
        breakers.vacated("unheard of")
        breakers.vacated("p/m")
        await asyncio.sleep(0.1)
        seen = list(served)
        for one in calls:
            one.cancel()
        return asked, seen

    assert run(main()) == (1, ["c2"])


def test_with_a_rung_left_a_call_does_not_wait_for_a_probe_elsewhere():
    async def main():
        breakers, _ = await sick(Elsewhere(left=3 * MICRO))
        began = the_clock().now()
        with pytest.raises(BreakerOpen):
            await layer(breakers)(well)(call(rungs_left=1))
        return the_clock().now() - began

    assert run(main()) == 0


def test_whoever_leaves_while_a_place_is_asked_for_gives_it_back_and_the_next_one_asks():
    async def main():
        breakers, lending = await sick(Lent(good=0))
        lending.gate.clear()
        service = layer(breakers)(well)
        first = asyncio.ensure_future(service(call(1)))
        second = asyncio.ensure_future(service(call(2)))
        await asyncio.sleep(0.1)
        assert len(lending.asked) == 1
        first.cancel()
        await asyncio.sleep(0.1)
        seen = len(lending.asked), list(lending.freed)
        lending.gate.set()
        return seen, (await second).status

    assert run(main()) == ((2, [None]), 200)


@pytest.mark.parametrize(("state", "served"), [(State.CLOSED, True), (State.OPEN, False)])
def test_a_place_that_comes_when_the_breaker_has_changed_is_given_back(state, served):
    async def main():
        breakers, lending = await sick(Lent(good=0))
        lending.gate.clear()
        waiting = asyncio.ensure_future(layer(breakers)(well)(call()))
        await asyncio.sleep(0.1)
        until = the_clock().now() + 30 * MICRO
        the_breaker(breakers).told(state, until=until, reason="the fleet")
        breakers.changed("p/m")
        lending.gate.set()
        await asyncio.sleep(0.1)
        seen = waiting.done(), lending.freed, len(lending.asked)
        waiting.cancel()
        return seen

    assert run(main()) == (served, [None], 1)


def test_calls_behind_one_that_asks_for_a_place_look_again_soon_if_it_never_hears():
    async def main():
        breakers, lending = await sick(Lent(good=0))
        lending.gate.clear()
        service = layer(breakers)(well)
        calls = [asyncio.ensure_future(service(call(n))) for n in range(3)]
        await asyncio.sleep(LOOK / MICRO + 0.2)
        asked = len(lending.asked)
        for one in calls:
            one.cancel()
        return asked

    assert run(main()) == 2
