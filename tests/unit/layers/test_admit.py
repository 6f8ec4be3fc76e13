from __future__ import annotations

import asyncio

import pytest

from gateway.admission.core import Admit, Late, Never, Shed
from gateway.admission.places import Tickets
from gateway.admission.profiles import pool_spec
from gateway.admission.store import Outcome
from gateway.call import End, Kind, Usage
from gateway.errors import BudgetSpent, DeadlinePassed, NeverFits, QueueFull, UpstreamTimeout
from gateway.layers.admit import Admission, admit, admit_caller
from gateway.units import MICRO
from tests.sim.loop import run
from tests.unit.layers.ground import FakeStore, answering, deployment, made, reply, the_clock

NARROW = pool_spec(name="pool:project", limits={"tpm": 10_000}, because="pools.project")
WIDE = pool_spec(name="pool:org", limits={"rpm": 100, "tpm": 50_000}, because="pools.org")
BUDGET = pool_spec(name="budget", limits={"tokens_day": 9_000}, queue=False, because="agents.b")


def admission(store: FakeStore) -> Admission:
    return Admission(store, the_clock(), tickets=Tickets(b"secret"))


def provided(store: FakeStore, inner):
    return admit(admission(store))(inner)


def call_of(*pools, **more):
    return made(rungs=(deployment(pools=pools),), **more)


def test_pools_are_taken_in_order_and_all_settled_when_the_body_ends():
    async def main():
        store = FakeStore()
        call = call_of(NARROW, WIDE)
        answer = await provided(store, answering(reply()))(call)
        assert [name for name, _ in store.asked] == ["pool:project", "pool:org"]
        assert not store.ended
        call.usage = Usage(input=10, output=5)
        await answer.close(End.COMPLETE)
        assert [(what, pool, actual) for what, pool, _, _, actual, _ in store.ended] == [
            ("settle", "pool:project", (15 * MICRO,)),
            ("settle", "pool:org", (MICRO, 15 * MICRO)),
        ]
        await answer.close(End.COMPLETE)
        assert len(store.ended) == 2

    run(main())


def test_a_call_granted_the_short_way_never_hashes_its_body():
    async def main():
        store, short = FakeStore(), []

        def at_once(spec, ask, _now):
            short.append(ask)
            return Admit(ask.rid, (0,) * len(spec.dimensions), 9) if spec is NARROW else None

        ready = Admission(store, the_clock(), tickets=Tickets(b"secret"), at_once=at_once)
        call = call_of(NARROW)
        await admit(ready)(answering(reply()))(call)
        assert (call.place_key, short[0].place_key, store.asked) == ("", None, [])
        assert (call.tags, call.notes[-1].verdict) == ({"pool:project": 9}, "granted")
        again = call_of(NARROW, WIDE)
        await admit(ready)(answering(reply()))(again)
        assert [(name, bool(ask.place_key)) for name, ask in store.asked] == [("pool:org", True)]

    run(main())


def test_a_place_of_ones_own_is_asked_for_in_full():
    async def main():
        store, short = FakeStore(), []
        ready = Admission(
            store,
            the_clock(),
            tickets=Tickets(b"secret"),
            at_once=lambda *asked: short.append(asked),
        )
        call = call_of(NARROW)
        call.tags = {"pool:project": 5}
        await admit(ready)(answering(reply()))(call)
        assert short == []
        assert store.asked[0][1].tag == 5

    run(main())


def test_a_later_pool_that_refuses_gives_the_earlier_ones_back_in_full():
    async def main():
        shed = Shed(rid="r", eta=90 * MICRO, tag=3, because="pools.org.limits.tpm")
        store = FakeStore(**{"pool:org": shed})
        inner = answering(reply())
        with pytest.raises(QueueFull) as refused:
            await provided(store, inner)(call_of(NARROW, WIDE))
        assert store.ended == [("cancel", "pool:project", "c1.1")]
        assert not inner.seen
        # ETA less half of what the call may wait, with a place in line to come back to.
        assert refused.value.retry_after == 60 * MICRO
        assert refused.value.place
        assert refused.value.because == "pools.org.limits.tpm"

    run(main())


def test_a_minute_and_the_logs_spread_are_still_a_minute():
    async def main():
        # 60.3 s until a limit per minute frees its first unit, and half a minute of patience.
        shed = Shed(rid="r", eta=90 * MICRO + 300_000, tag=3, because="b")
        with pytest.raises(QueueFull) as refused:
            await provided(FakeStore(**{"pool:org": shed}), answering(reply()))(call_of(WIDE))
        assert refused.value.retry_after == 60 * MICRO

    run(main())


def test_a_wait_above_a_minute_is_a_hard_refusal_without_a_ticket():
    async def main():
        shed = Shed(rid="r", eta=200 * MICRO, tag=3, because="b")
        with pytest.raises(QueueFull) as refused:
            await provided(FakeStore(**{"pool:org": shed}), answering(reply()))(call_of(WIDE))
        assert refused.value.retry_after is None
        assert refused.value.place is None

    run(main())


def test_what_never_fits_names_what_it_needs_and_what_there_is():
    async def main():
        never = Never(rid="r", dimension="tokens", cost=9 * MICRO, ceiling=5 * MICRO, because="b")
        with pytest.raises(NeverFits, match=r"needs 9 tokens.*at most 5"):
            await provided(FakeStore(**{"pool:org": never}), answering(reply()))(call_of(WIDE))

    run(main())


def test_a_deadline_in_line_is_told_with_what_was_still_ahead():
    async def main():
        store = FakeStore(**{"pool:org": "wait"})
        task = asyncio.ensure_future(provided(store, answering(reply()))(call_of(WIDE)))
        await asyncio.sleep(5)
        store.waits["pool:org"].set_result(Late(rid="c1.1", because="b", eta=7 * MICRO, tag=3))
        with pytest.raises(DeadlinePassed, match="5 s"):
            await task

    run(main())


def test_waiting_drops_the_parsed_copy_and_is_counted():
    async def main():
        store = FakeStore(**{"pool:org": "wait"})
        call = call_of(WIDE)
        task = asyncio.ensure_future(provided(store, answering(reply()))(call))
        await asyncio.sleep(3)
        assert call.parsed is None
        store.waits["pool:org"].set_result(Admit(rid="c1.1", meter=(0, 0), tag=9))
        await (await task).close(End.COMPLETE)
        assert call.queue_us == 3 * MICRO
        assert call.tags == {"pool:org": 9}

    run(main())


def test_a_client_that_leaves_in_line_withdraws_and_gives_back_what_it_had():
    async def main():
        store = FakeStore(**{"pool:org": "wait"})
        inner = answering(reply())
        task = asyncio.ensure_future(provided(store, inner)(call_of(NARROW, WIDE)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.waits["pool:org"].cancelled()
        assert ("cancel", "pool:project", "c1.1") in store.ended
        assert not inner.seen

    run(main())


def test_what_was_never_sent_is_cancelled_and_what_was_sent_is_settled():
    async def main():
        async def sent(call):
            call.sent = True
            raise UpstreamTimeout("slow")

        unsent, charged = FakeStore(), FakeStore()
        with pytest.raises(UpstreamTimeout):
            await provided(unsent, answering(UpstreamTimeout("no connection")))(call_of(WIDE))
        with pytest.raises(UpstreamTimeout):
            await provided(charged, answering(sent))(call_of(WIDE))
        assert unsent.ended == [("cancel", "pool:org", "c1.1")]
        assert charged.ended == [("settle", "pool:org", "c1.1", Outcome.FAILED, None, 0)]

    run(main())


def test_a_quota_refusal_keeps_the_request_gives_tokens_back_and_tells_how_long():
    async def main():
        store = FakeStore()
        refused = reply(429, kind=Kind.QUOTA)
        refused.retry_after = 3 * MICRO
        answer = await provided(store, answering(refused))(call_of(WIDE))
        await answer.close(End.FAILED)
        assert store.ended == [("settle", "pool:org", "c1.1", Outcome.QUOTA, (MICRO, 0), 3 * MICRO)]

    run(main())


def test_the_next_attempt_has_another_id_and_its_old_place():
    async def main():
        store = FakeStore()
        call = call_of(WIDE)
        service = provided(store, answering(reply(429, kind=Kind.QUOTA), reply()))
        await (await service(call)).close(End.FAILED)
        call.attempt = 2
        await (await service(call)).close(End.COMPLETE)
        first, second = (ask for _, ask in store.asked)
        assert (first.rid, second.rid) == ("c1.1", "c1.2")
        assert (first.tag, second.tag) == (None, 7)

    run(main())


def test_a_lease_is_renewed_while_the_body_lasts_and_not_after():
    async def main():
        store = FakeStore()
        answer = await provided(store, answering(reply()))(call_of(WIDE))
        await asyncio.sleep(WIDE.lease / MICRO)
        renewed = sum(what[0] == "renew" for what in store.ended)
        assert renewed >= 2
        await answer.close(End.COMPLETE)
        await asyncio.sleep(WIDE.lease / MICRO)
        assert sum(what[0] == "renew" for what in store.ended) == renewed

    run(main())


def test_expected_output_counts_as_being_produced_until_the_end():
    async def main():
        whole = admission(FakeStore())
        service = admit(whole)(answering(reply()))
        answers = [await service(call_of(WIDE)) for _ in range(2)]
        assert whole.producing == {"pool:org": 100}
        for answer in answers:
            await answer.close(End.CLIENT_GONE)
        assert whole.producing == {}

    run(main())


def test_own_limits_are_taken_once_and_charged_what_the_call_cost():
    async def main():
        store = FakeStore()
        call = made(pools=(BUDGET,))
        answer = await admit_caller(admission(store))(answering(reply()))(call)
        call.usage = Usage(input=30, output=12)
        await answer.close(End.COMPLETE)
        assert store.ended == [("settle", "budget", "c1", Outcome.SERVED, (42 * MICRO,), 0)]

    run(main())


def test_a_spent_budget_says_when_it_starts_anew():
    async def main():
        shed = Shed(rid="c1", eta=7_200 * MICRO, tag=0, because="agents.b.limits.tokens_day")
        store = FakeStore(budget=shed)
        with pytest.raises(BudgetSpent, match="2 h"):
            await admit_caller(admission(store))(answering(reply()))(made(pools=(BUDGET,)))

    run(main())


def test_a_failed_call_costs_its_caller_no_tokens():
    async def main():
        store = FakeStore()
        call = made(pools=(BUDGET,))
        answer = await admit_caller(admission(store))(answering(reply(500, kind=Kind.FAULT)))(call)
        await answer.close(End.COMPLETE)
        assert store.ended == [("settle", "budget", "c1", Outcome.FAILED, (0,), 0)]

    run(main())


def test_a_grant_at_once_stands_in_the_chain_of_verdicts():
    async def main():
        call = call_of(NARROW, WIDE)
        answer = await provided(FakeStore(), answering(reply()))(call)
        await answer.close(End.COMPLETE)
        return [(n.layer, n.verdict, n.because, n.detail) for n in call.notes]

    assert run(main()) == [("admit", "granted", "pools.org", "pool:project, pool:org: at once")]
