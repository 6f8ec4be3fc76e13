"""The ledger's decisions, and its table in memory."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.api import (
    Bounds,
    IllegalTransition,
    LedgerFull,
    StaleEpoch,
    UnknownEffect,
)
from scheduler.effects import Class, Conflict, Doubt, Go, Join, Mark, Replay, judge, key_of
from tests.fixtures.effects import MINUTE, new_effect
from tests.fixtures.held import HOUR, NOW
from tests.unit.scheduler.test_store import with_store

WIDE = Bounds()


async def reserved(store, key="k1", **facts):
    judgment = await store.effects.reserve(new_effect(key, **facts), now=NOW, bounds=WIDE)
    assert isinstance(judgment, Go)
    return judgment.epoch


async def asked(store, *, now=NOW, **facts):
    return await store.effects.reserve(new_effect(**facts), now=now, bounds=WIDE)


def test_keys_of_different_parts_differ():
    assert key_of("ab", "c") != key_of("a", "bc") != key_of("abc") != key_of("abc", "")
    assert key_of("key:dev", "x") == key_of("key:dev", "x")


@with_store
async def test_what_was_done_is_answered_from_the_record_whoever_asks_again(store):
    epoch = await reserved(store)
    await store.effects.settle("k1", epoch, b"answer", tokens=7, now=NOW + 5, bounds=WIDE)
    judgment = await asked(store, now=NOW + 10, call="c2")
    assert isinstance(judgment, Replay)
    assert judgment.effect.call == "c1"
    assert judgment.effect.tokens == 7
    effect, answer = await store.effects.look("k1")
    assert (effect.state, answer) == (Mark.SETTLED, b"answer")


@with_store
async def test_a_call_under_way_is_joined_and_never_sent_again(store):
    await reserved(store)
    assert isinstance(await asked(store, now=NOW + MINUTE - 1), Join)


@with_store
async def test_other_arguments_under_the_same_key_are_a_conflict_in_every_state(store):
    epoch = await reserved(store)
    assert isinstance(await asked(store, digest="d2"), Conflict)
    await store.effects.settle("k1", epoch, b"x", tokens=0, now=NOW, bounds=WIDE)
    assert isinstance(await asked(store, digest="d2"), Conflict)
    await reserved(store, "k2")
    await store.effects.abandoned(before=NOW + 1)
    assert isinstance(await asked(store, key="k2", digest="d2"), Conflict)


@with_store
async def test_an_irreversible_effect_in_doubt_is_never_sent_again(store):
    await reserved(store)
    [left] = await store.effects.abandoned(before=NOW + 1)
    assert left.key == "k1"
    assert isinstance(await asked(store, now=NOW + 400 * HOUR), Doubt)
    assert await store.effects.prune(now=NOW + 10_000 * HOUR, limit=10) == 0
    [doubt] = await store.effects.doubts(limit=10)
    assert doubt.note == "the gateway ended while it was under way"


@pytest.mark.parametrize("kind", [Class.READ, Class.IDEMPOTENT])
def test_what_may_be_repeated_is_repeated_after_a_crash(kind):
    @with_store
    async def scenario(store):
        await reserved(store, kind=kind)
        assert len(await store.effects.abandoned(before=NOW + 1)) == 1
        assert isinstance(await asked(store, kind=kind), Go)

    scenario()


@with_store
async def test_policy_of_today_makes_no_effect_of_yesterday_harmless(store):
    await reserved(store)
    judgment = await asked(store, kind=Class.READ, now=NOW + 2 * MINUTE)
    assert isinstance(judgment, Doubt)


@with_store
async def test_past_its_patience_a_reservation_counts_as_in_doubt_even_before_the_sweep(store):
    await reserved(store)
    assert isinstance(await asked(store, now=NOW + MINUTE), Doubt)
    [overdue] = await store.effects.overdue(now=NOW + MINUTE, limit=10)
    assert overdue.key == "k1"
    assert await store.effects.overdue(now=NOW + MINUTE, limit=10) == []


@with_store
async def test_an_answer_that_comes_after_all_ends_the_doubt(store):
    epoch = await reserved(store)
    await store.effects.abandoned(before=NOW + 1)
    await store.effects.settle("k1", epoch, b"late", tokens=0, now=NOW, bounds=WIDE)
    assert isinstance(await asked(store), Replay)


@with_store
async def test_a_definite_refusal_frees_the_key(store):
    epoch = await reserved(store)
    await store.effects.release("k1", epoch)
    assert isinstance(await asked(store, digest="d2"), Go)


@with_store
async def test_who_holds_an_older_reservation_cannot_settle_release_or_doubt(store):
    epoch = await reserved(store, kind=Class.IDEMPOTENT)
    judgment = await asked(store, kind=Class.IDEMPOTENT, now=NOW + MINUTE)
    assert judgment == Go(epoch + 1, repeats=True)
    for attempt in (
        store.effects.settle("k1", epoch, b"x", tokens=0, now=NOW, bounds=WIDE),
        store.effects.release("k1", epoch),
        store.effects.doubt("k1", epoch, "why"),
        store.effects.extend("k1", epoch, deadline=NOW + HOUR),
    ):
        with pytest.raises(StaleEpoch):
            await attempt


@with_store
async def test_a_further_attempt_keeps_the_reservation_and_renews_its_patience(store):
    epoch = await reserved(store)
    await store.effects.extend("k1", epoch, deadline=NOW + HOUR)
    assert isinstance(await asked(store, now=NOW + HOUR - 1), Join)


@with_store
async def test_after_its_window_the_same_call_is_a_new_one(store):
    epoch = await reserved(store, keep=MINUTE)
    await store.effects.settle("k1", epoch, b"x", tokens=0, now=NOW, bounds=WIDE)
    assert isinstance(await asked(store, now=NOW + MINUTE - 1), Replay)
    assert await asked(store, now=NOW + MINUTE, digest="d2") == Go(epoch + 1)


@with_store
async def test_retention_erases_settled_effects_alone(store):
    epoch = await reserved(store, keep=MINUTE)
    await store.effects.settle("k1", epoch, b"x", tokens=0, now=NOW, bounds=WIDE)
    await reserved(store, "k2")
    assert await store.effects.prune(now=NOW + MINUTE, limit=10) == 1
    assert await store.effects.counts() == {Mark.RESERVED: 1}


@pytest.mark.parametrize("done", [True, False])
def test_a_human_resolves_a_doubt(done):
    @with_store
    async def scenario(store):
        await reserved(store)
        with pytest.raises(IllegalTransition):
            await store.effects.resolve("k1", done=done, note="ann", now=NOW)
        await store.effects.abandoned(before=NOW + 1)
        await store.effects.resolve("k1", done=done, note="ann: the bank says so", now=NOW)
        judgment = await asked(store)
        if done:
            assert isinstance(judgment, Replay)
            assert not judgment.effect.kept
            assert judgment.effect.note == "ann: the bank says so"
        else:
            assert isinstance(judgment, Go)

    scenario()


@with_store
async def test_an_unknown_key_cannot_be_resolved(store):
    with pytest.raises(UnknownEffect):
        await store.effects.resolve("k9", done=True, note="", now=NOW)


@with_store
async def test_an_answer_beyond_the_bound_is_known_as_done_without_its_bytes(store):
    epoch = await reserved(store)
    tight = Bounds(result=3)
    effect = await store.effects.settle("k1", epoch, b"xxxx", tokens=0, now=NOW, bounds=tight)
    assert not effect.kept
    assert effect.note == "its answer was too large to keep"
    assert isinstance(await asked(store), Replay)


@with_store
async def test_a_full_ledger_reserves_nothing_new_and_still_answers_what_it_knows(store):
    epoch = await reserved(store)
    await store.effects.settle("k1", epoch, b"xx", tokens=0, now=NOW, bounds=WIDE)
    for bounds, name in ((Bounds(rows=1), "rows"), (Bounds(bytes=2), "bytes")):
        with pytest.raises(LedgerFull) as refused:
            await store.effects.reserve(new_effect("k2"), now=NOW, bounds=bounds)
        assert refused.value.bound == name
        judgment = await store.effects.reserve(new_effect("k1"), now=NOW, bounds=bounds)
        assert isinstance(judgment, Replay)
    await store.effects.prune(now=NOW + 2 * HOUR, limit=10)
    assert isinstance(
        await store.effects.reserve(new_effect("k2"), now=NOW, bounds=Bounds(rows=1)), Go
    )


@with_store
async def test_of_many_that_ask_at_once_one_goes(store):
    judgments = await asyncio.gather(*(asked(store, call=f"c{n}") for n in range(50)))
    assert sum(isinstance(one, Go) for one in judgments) == 1
    assert sum(isinstance(one, Join) for one in judgments) == 49


def test_nothing_known_may_go():
    assert judge(None, new_effect(), now=NOW) == Go(1)
