"""The store of held calls, in memory: every promise of the protocol that needs no disk."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from scheduler.api import (
    HoldsFull,
    IllegalTransition,
    KeyReused,
    Limits,
    Message,
    Refusal,
    StaleEpoch,
    State,
    StoreFault,
    UnknownHold,
)
from scheduler.stores.base import Held
from tests.fixtures.held import BODY, HOUR, NOW, memory_store, new_hold, reply

WIDE = Limits()
WHY = Refusal(status=403, code="identity_revoked", message="gone")


def with_store(scenario):
    """The scenario, run with a store of its own."""

    def test():
        with memory_store() as store:
            asyncio.run(scenario(store))

    test.__name__ = scenario.__name__
    return test


async def claimed(store, number: int = 1, **facts):
    await store.keep(new_hold(number, **facts), limits=WIDE)
    [(held, _)] = await store.claim("m", limit=1, now=NOW)
    return held


async def sent(store, number: int = 1, **facts):
    held = await claimed(store, number, **facts)
    await store.sending(held.id, held.epoch, to="p/m", now=NOW)
    return held


@with_store
async def test_a_call_comes_back_as_it_was_kept(store):
    kept = await store.keep(new_hold(7, webhook="https://h/x", dedupe="k", digest="d"), limits=WIDE)
    assert kept.state is State.OPEN
    [(held, request)] = await store.claim("m", limit=5, now=NOW)
    assert request == Message(headers=[(b"x-a", b"\xff")], body=BODY)
    changed = {"state": State.CLAIMED, "epoch": 1}
    assert held == dataclasses.replace(kept, **changed)
    assert held.target == b"/v1/chat/completions"


@with_store
async def test_calls_are_claimed_by_tier_and_age_and_each_once(store):
    for number, tier in enumerate([3, 2, 1, 3, 2, 1]):
        await store.keep(new_hold(number, tier=tier), limits=WIDE)
    first = await store.claim("m", limit=3, now=NOW)
    rest = await store.claim("m", limit=10, now=NOW)
    assert [held.id for held, _ in first + rest] == ["h002", "h005", "h001", "h004", "h000", "h003"]
    assert await store.claim("m", limit=10, now=NOW) == []


@with_store
async def test_only_what_may_go_now_is_claimed(store):
    await store.keep(new_hold(1, model="other"), limits=WIDE)
    await store.keep(new_hold(2, deadline=NOW), limits=WIDE)
    held = await claimed(store, 3)
    await store.give_back(held.id, held.epoch, reason="503", not_before=NOW + 5, refused=True)
    assert await store.claim("m", limit=9, now=NOW + 4) == []
    [(again, _)] = await store.claim("m", limit=9, now=NOW + 5)
    assert (again.id, again.epoch, again.tries, again.reason) == (held.id, 2, 1, "503")


@with_store
async def test_what_came_back_keeps_its_age(store):
    for number in range(3):
        await store.keep(new_hold(number), limits=WIDE)
    [(first, _)] = await store.claim("m", limit=1, now=NOW)
    await store.give_back(first.id, first.epoch, reason="", not_before=0, refused=False)
    [(again, _)] = await store.claim("m", limit=1, now=NOW)
    assert (again.id, again.tries) == (first.id, 0)


@with_store
async def test_whoever_lost_a_call_cannot_act_on_it(store):
    old = await claimed(store)
    await store.give_back(old.id, old.epoch, reason="", not_before=0, refused=False)
    [(new, _)] = await store.claim("m", limit=1, now=NOW)
    for step in (
        store.sending(old.id, old.epoch, to="p", now=NOW),
        store.give_back(old.id, old.epoch, reason="", not_before=0, refused=False),
        store.complete(old.id, old.epoch, reply(), now=NOW),
        store.refuse(old.id, old.epoch, WHY, now=NOW),
        store.doubt(old.id, old.epoch, WHY, now=NOW),
    ):
        with pytest.raises(StaleEpoch):
            await step
    await store.sending(new.id, new.epoch, to="p", now=NOW)


@with_store
async def test_each_attempt_is_counted_with_its_time_and_place(store):
    held = await sent(store)
    await store.sending(held.id, held.epoch, to="q/m", now=NOW + 1)
    found = await store.find(held.id, "key:dev")
    assert (found.attempt, found.sent_at, found.sent_to) == (2, NOW + 1, "q/m")


@with_store
async def test_a_reply_is_kept_and_its_request_is_not(store):
    held = await sent(store)
    done = await store.complete(held.id, held.epoch, reply(b"abc", 201), now=NOW + 9)
    assert (done.state, done.status, done.finished) == (State.DONE, 201, NOW + 9)
    assert await store.reply(held.id) == reply(b"abc", 201)
    assert done.bytes == reply(b"abc").size
    (parts,) = await store._writer.ask(lambda db: [r[0] for r in db.execute(
        "SELECT part FROM held_body")])  # fmt: skip
    assert parts == "reply"


@with_store
async def test_nothing_is_completed_that_was_not_marked_as_sent(store):
    held = await claimed(store)
    with pytest.raises(IllegalTransition):
        await store.complete(held.id, held.epoch, reply(), now=NOW)
    with pytest.raises(IllegalTransition):
        await store.doubt(held.id, held.epoch, WHY, now=NOW)


@with_store
async def test_a_final_state_stays_whoever_asks(store):
    held = await sent(store)
    await store.complete(held.id, held.epoch, reply(), now=NOW)
    with pytest.raises(StaleEpoch):
        await store.sending(held.id, held.epoch, to="p", now=NOW)
    with pytest.raises(StaleEpoch):
        await store.refuse(held.id, held.epoch, WHY, now=NOW)
    with pytest.raises(IllegalTransition):
        await store.cancel(held.id, "key:dev", now=NOW)
    with pytest.raises(StoreFault, match="final hold"):
        await store._writer.ask(lambda db: db.execute("UPDATE held_call SET state = 'open'"))


@with_store
async def test_a_cancel_reaches_a_call_in_every_live_state(store):
    await store.keep(new_hold(1), limits=WIDE)
    assert (await store.cancel("h001", "key:dev", now=NOW)).state is State.CANCELLED
    held = await claimed(store, 2)
    assert "sent" not in (await store.cancel(held.id, "key:dev", now=NOW)).message
    held = await sent(store, 3)
    gone = await store.cancel(held.id, "key:dev", now=NOW)
    assert "had been sent" in gone.message
    assert (gone.status, gone.code) == (410, "hold_cancelled")
    with pytest.raises(StaleEpoch):
        await store.complete(held.id, held.epoch, reply(), now=NOW)


@with_store
async def test_nobody_sees_the_holds_of_others(store):
    held = await claimed(store)
    for step in (
        store.find(held.id, "key:other"),
        store.cancel(held.id, "key:other", now=NOW),
        store.forget(held.id, "key:other"),
        store.find("none", "key:dev"),
    ):
        with pytest.raises(UnknownHold):
            await step
    assert await store.listing("key:other", after=0, limit=9) == []
    assert [one.id for one in await store.listing("key:dev", after=0, limit=9)] == [held.id]
    assert await store.listing("key:dev", after=held.seq, limit=9) == []


@with_store
async def test_an_open_call_expires_and_one_under_way_does_not(store):
    await store.keep(new_hold(1), limits=WIDE)
    held = await claimed(store, 2)
    await store.keep(new_hold(3), limits=WIDE)
    gone = await store.expire(now=NOW + HOUR, limit=9)
    assert held.id == "h001"  # the oldest was claimed
    assert [one.id for one in gone] == ["h002", "h003"]
    assert {(one.state, one.status, one.code) for one in gone} == {
        (State.EXPIRED, 504, "hold_expired")
    }


@with_store
async def test_a_dead_holders_calls_are_open_or_in_doubt(store):
    held = await sent(store, 1)
    await claimed(store, 2)
    await store.keep(new_hold(3), limits=WIDE)
    left = await store.recover(now=NOW + 1)
    assert left.opened == 1
    [doubted] = left.doubted
    assert (doubted.id, doubted.state, doubted.code) == (held.id, State.IN_DOUBT, "hold_in_doubt")
    assert [one.id for one, _ in await store.claim("m", limit=9, now=NOW)] == ["h002", "h003"]
    assert (await store.recover(now=NOW)).doubted == ()


@with_store
async def test_every_bound_refuses_by_name_and_frees_what_ended(store):
    for number in range(3):
        await store.keep(new_hold(number, owner=f"key:{number}"), limits=WIDE)
    size = new_hold().request.size
    for limits, bound in (
        (Limits(max_calls=3), "max_calls"),
        (Limits(max_bytes=4 * size - 1), "max_bytes"),
    ):
        with pytest.raises(HoldsFull) as full:
            await store.keep(new_hold(9), limits=limits)
        assert full.value.bound == bound
    with pytest.raises(HoldsFull) as full:
        await store.keep(new_hold(9, owner="key:1"), limits=Limits(max_per_owner=1))
    assert full.value.bound == "max_per_agent"
    await store.cancel("h001", "key:1", now=NOW)
    await store.keep(new_hold(9, owner="key:1"), limits=Limits(max_per_owner=1, max_bytes=3 * size))
    calls, total = await store._writer.ask(
        lambda db: tuple(db.execute("SELECT calls, bytes FROM held_total").fetchone())
    )
    assert (calls, total) == (4, 3 * size)


@with_store
async def test_one_key_is_one_hold_until_it_is_forgotten(store):
    first = await store.keep(new_hold(1, dedupe="k", digest="d"), limits=WIDE)
    assert await store.keep(new_hold(2, dedupe="k", digest="d"), limits=WIDE) == first
    with pytest.raises(KeyReused) as reused:
        await store.keep(new_hold(3, dedupe="k", digest="e"), limits=WIDE)
    assert reused.value.id == first.id
    await store.cancel(first.id, first.owner, now=NOW)
    assert (await store.keep(new_hold(4, dedupe="k", digest="d"), limits=WIDE)).id == first.id
    await store.forget(first.id, first.owner)
    assert (await store.keep(new_hold(5, dedupe="k", digest="d"), limits=WIDE)).id == "h005"


@with_store
async def test_a_live_hold_is_not_erased(store):
    held = await claimed(store)
    with pytest.raises(IllegalTransition, match="cancel it first"):
        await store.forget(held.id, "key:dev")


@with_store
async def test_results_are_forgotten_after_their_time_and_not_while_a_push_is_due(store):
    for number, webhook in ((1, ""), (2, "https://h/x")):
        held = await sent(store, number, webhook=webhook)
        await store.complete(held.id, held.epoch, reply(), now=NOW)
    await store.keep(new_hold(3), limits=WIDE)
    assert await store.prune(before=NOW, limit=9) == 0
    assert await store.prune(before=NOW + 1, limit=9) == 1
    [due] = await store.due_pushes(now=NOW, limit=9)
    assert (due.id, due.push_state, due.push_tries) == ("h002", "pending", 0)
    await store.pushed(due.id, state="pending", next_at=NOW + 50)
    assert await store.due_pushes(now=NOW + 49, limit=9) == []
    [due] = await store.due_pushes(now=NOW + 50, limit=9)
    assert due.push_tries == 1
    await store.pushed(due.id, state="delivered", next_at=0)
    assert await store.prune(before=NOW + 1, limit=9) == 1
    assert await store.reply("h002") is None
    assert await store.counts() == {State.OPEN: 1}


@with_store
async def test_what_is_open_is_summed_by_model_and_tier(store):
    for number, (model, tier) in enumerate([("a", 3), ("b", 1), ("a", 1), ("a", 3)]):
        await store.keep(new_hold(number, model=model, tier=tier), limits=WIDE)
    found = [(one.model, one.tier, one.count, one.oldest) for one in await store.waiting()]
    assert found == [("b", 1, 1, NOW + 1), ("a", 1, 1, NOW + 2), ("a", 3, 2, NOW)]


@with_store
async def test_an_abandoned_call_is_cancelled_though_its_keeper_did_not_wait(store):
    keeping = asyncio.ensure_future(store.keep(new_hold(1), limits=WIDE))
    await asyncio.sleep(0)
    keeping.cancel()
    store.abandon("h001", "key:dev", NOW)
    assert await store.counts() == {State.CANCELLED: 1}


@with_store
async def test_a_failed_operation_of_a_group_undoes_itself_alone(store):
    steps = [store.keep(new_hold(number), limits=WIDE) for number in (1, 1, 2)]
    results = await asyncio.gather(*steps, return_exceptions=True)
    assert [type(one) for one in results] == [Held, StoreFault, Held]
    assert await store.counts() == {State.OPEN: 2}


@with_store
async def test_a_defect_in_an_operation_does_not_end_the_thread(store):
    with pytest.raises(StoreFault, match="ZeroDivisionError"):
        await store._writer.ask(lambda _db: 1 // 0)
    assert await store.waiting() == []


def test_a_closed_store_says_so_and_closing_twice_is_nothing():
    async def scenario(store) -> None:
        await store.close()
        await store.close()
        with pytest.raises(StoreFault, match="closed"):
            await store.waiting()

    with memory_store() as store:
        asyncio.run(scenario(store))


@with_store
async def test_a_batch_is_bounded_in_bytes_and_takes_one_in_any_case(store):
    for number in range(4):
        await store.keep(new_hold(number), limits=WIDE)
    size = new_hold().request.size
    sizes = [
        len(await store.claim("m", limit=9, now=NOW, most_bytes=most))
        for most in (1, 2 * size, 9 * size)
    ]
    assert sizes == [1, 2, 1]
