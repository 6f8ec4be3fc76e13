from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.call import End, Kind
from gateway.errors import BreakerOpen, DeadlinePassed, NeverFits, QueueFull, UpstreamTimeout
from gateway.layers.downgrade import Downgrading, Stays, rungs_for
from gateway.snapshot import Tier
from tests.sim.loop import run
from tests.unit.layers.ground import answering, deployment, made, reply, the_clock

FIRST = deployment("up/m", context_window=100_000, capabilities=frozenset({"tools", "streaming"}))
SMALL = deployment(
    "up/small", context_window=100_000, capabilities=frozenset({"tools", "streaming"}),
    upstream_model="small", because="models.m.ladder[0]",
)  # fmt: skip
TINY = deployment("up/tiny", context_window=50, capabilities=frozenset())


def layer():
    async def re_estimate(call, rung):
        call.deployment = rung

    return Downgrading(clock=the_clock(), re_estimate=re_estimate, stays=Stays(lambda *_: True))


def headers(call) -> dict[bytes, bytes]:
    return dict(call.extra_headers)


@pytest.mark.parametrize(
    "outcome",
    [
        BreakerOpen("open"),
        NeverFits("never"),
        QueueFull("full"),
        UpstreamTimeout("slow"),
        Kind.CAPACITY, Kind.FAULT, Kind.PERIOD, Kind.MONEY, Kind.AUTH, Kind.RAMP,
    ],
)  # fmt: skip
def test_what_another_rung_may_mend_goes_to_it(outcome):
    async def main():
        bad = reply(503, kind=outcome) if isinstance(outcome, Kind) else outcome
        good = reply()
        call = made(rungs=(FIRST, SMALL))
        assert await layer()(answering(bad, good))(call) is good
        assert call.deployment is SMALL
        assert headers(call)[b"tidegate-model-requested"] == b"m"
        assert headers(call)[b"tidegate-downgrade-reason"]
        if isinstance(outcome, Kind):
            assert bad.ended is End.FAILED  # its permits are back before the next rung asks

    run(main())


def test_a_callers_own_fault_is_its_own_on_every_rung():
    async def main():
        bad = reply(400, kind=Kind.CALLER)
        inner = answering(bad)
        assert await layer()(inner)(made(rungs=(FIRST, SMALL))) is bad
        assert len(inner.seen) == 1

    run(main())


def test_a_deadline_that_has_passed_is_not_mended_elsewhere():
    async def main():
        inner = answering(DeadlinePassed("late"))
        with pytest.raises(DeadlinePassed):
            await layer()(inner)(made(rungs=(FIRST, SMALL)))
        assert len(inner.seen) == 1

    run(main())


def test_the_last_rungs_refusal_is_what_the_caller_hears():
    async def main():
        last = BreakerOpen("both are away")
        with pytest.raises(BreakerOpen, match="both"):
            await layer()(answering(BreakerOpen("first"), last))(made(rungs=(FIRST, SMALL)))

    run(main())


def test_a_rung_that_cannot_serve_the_call_is_skipped_with_its_reason():
    async def main():
        call = made(rungs=(FIRST, TINY, SMALL))
        assert rungs_for(call) == [FIRST, SMALL]
        skipped = [note for note in call.notes if note.verdict == "skip"]
        assert len(skipped) == 1
        assert skipped[0].detail

    run(main())


def test_inner_layers_know_how_many_rungs_are_left():
    async def main():
        left = []

        async def inner(call):
            left.append(call.rungs_left)
            return reply(500, kind=Kind.FAULT)

        await layer()(inner)(made(rungs=(FIRST, SMALL)))
        assert left == [1, 0]

    run(main())


def test_places_of_one_pool_mean_nothing_in_another():
    async def main():
        call = made(rungs=(FIRST, SMALL))
        call.tags = {"pool:a": 5}
        await layer()(answering(BreakerOpen("open"), reply()))(call)
        assert call.tags is None

    run(main())


@pytest.mark.parametrize("how", ["header", "model", "tier", "previous"])
def test_whoever_refuses_another_model_gets_none(how):
    async def main():
        headers = [(b"tidegate-downgrade", b" Never ")] if how == "header" else []
        call = made(rungs=(FIRST, SMALL), headers=headers)
        if how == "model":
            call.model = replace(call.model, downgrade="never")
        elif how == "tier":
            call.tier = Tier(name="t", number=2, downgrade=False)
        elif how == "previous":
            call.fields = replace(call.fields, previous_response_id="resp_1")
        inner = answering(BreakerOpen("open"))
        with pytest.raises(BreakerOpen):
            await layer()(inner)(call)
        assert len(inner.seen) == 1

    run(main())


# --- conversations stay ---


def staying(well: list[bool]):
    async def re_estimate(call, rung):
        call.deployment = rung

    return Downgrading(clock=the_clock(), re_estimate=re_estimate, stays=Stays(lambda *_: well[-1]))


def again(session: str = "s1"):
    call = made(rungs=(FIRST, SMALL))
    call.session = session
    return call


def test_a_conversation_stays_on_its_rung_until_the_first_has_been_well_for_a_while():
    async def main():
        well = [False]
        ladder = staying(well)
        await ladder(answering(BreakerOpen("open"), reply()))(again())
        served = []
        for wait in (0, 25, 10):
            await asyncio.sleep(wait)
            call = again()
            await ladder(answering(reply()))(call)
            served.append(call.deployment.id)
            if call.deployment is SMALL:
                assert headers(call)[b"tidegate-downgrade-reason"] == b"conversation"
                assert headers(call)[b"tidegate-model-requested"] == b"m"
        well.append(True)
        call = again()
        await ladder(answering(reply()))(call)
        return [*served, call.deployment.id], headers(call)

    served, last = run(main())
    assert served == ["up/small", "up/small", "up/small", "up/m"]
    assert b"tidegate-downgrade-reason" not in last


def test_a_conversation_stays_for_half_a_minute_where_no_breaker_was_the_reason():
    async def main():
        ladder = staying([True])
        await ladder(answering(QueueFull("full"), reply()))(again())
        served = []
        for wait in (0, 29, 2):
            await asyncio.sleep(wait)
            call = again()
            await ladder(answering(reply()))(call)
            served.append(call.deployment.id)
        return served

    assert run(main()) == ["up/small", "up/small", "up/m"]


def test_other_conversations_begin_at_the_first_rung():
    async def main():
        ladder = staying([False])
        await ladder(answering(BreakerOpen("open"), reply()))(again())
        call = again("another")
        await ladder(answering(reply()))(call)
        return call.deployment.id

    assert run(main()) == "up/m"


def test_without_a_session_the_first_user_message_names_the_conversation():
    async def main():
        ladder = staying([False])
        await ladder(answering(BreakerOpen("open"), reply()))(again(""))
        same, other = again(""), again("")
        other.parsed = {"messages": [{"role": "user", "content": "something else"}]}
        for call in (same, other):
            await ladder(answering(reply()))(call)
        return same.deployment.id, other.deployment.id

    assert run(main()) == ("up/small", "up/m")


def test_a_rung_that_fails_its_conversation_gives_it_back_to_the_first():
    async def main():
        ladder = staying([False])
        await ladder(answering(BreakerOpen("open"), reply()))(again())
        call = again()
        await ladder(answering(BreakerOpen("open too"), reply()))(call)
        assert call.deployment is FIRST
        after = again()
        await ladder(answering(reply()))(after)
        return after.deployment.id

    assert run(main()) == "up/m"


def test_only_so_many_conversations_are_remembered():
    async def main():
        stays = Stays(lambda *_: False, limit=3)
        for number in range(10):
            stays.served(again(f"s{number}"), FIRST, SMALL, 0)
        return len(stays), stays.ordered(again("s9"), [FIRST, SMALL], 1)[0]

    assert run(main()) == (3, SMALL)


def test_what_a_rung_said_stands_in_the_chain_of_verdicts():
    async def main():
        bad = reply(429, kind=Kind.MONEY)
        bad.code = "insufficient_quota"
        call = made(rungs=(FIRST, SMALL))
        await layer()(answering(bad, reply()))(call)
        return [note.detail for note in call.notes if note.verdict == "next"]

    assert run(main()) == ["money: up/m said 429 insufficient_quota"]
