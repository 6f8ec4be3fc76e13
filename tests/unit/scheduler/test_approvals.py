"""Consent: what is signed, and its table in memory."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from scheduler.api import ApprovalsFull, Caps, IllegalTransition, Stand, StoreFault, UnknownApproval
from scheduler.approvals import PREFIX, TRANSITIONS, Move, Signed, move
from tests.fixtures.effects import document
from tests.fixtures.held import HOUR, NOW
from tests.unit.scheduler.test_store import with_store

CAPS = Caps()


async def ask(store, number=1, *, now=NOW, caps=CAPS, **facts):
    return await store.approvals.ask(
        document(number, **facts), reason="large", call=f"c{number}", now=now, caps=caps
    )


async def decide(store, event, *, approval="a001", now=NOW, by="ann", needed=1):
    signed = Signed(approver=by, signature=by.encode() * 16, note="ok", at=now)
    return await store.approvals.decide(approval, event, signed, needed=needed)


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"amount": 60_001, "to": "x"}}, {"tool": "bank/wipe"}, {"policy": "p2"},
        {"expires": NOW + HOUR + 1}, {"nonce": "other"}, {"owner": "key:eve"}, {"tenant": "t"},
        {"agent": "eve"}, {"rule": "tools.other"}, {"id": "a999"},
    ],
)  # fmt: skip
def test_every_fact_is_in_what_is_signed(change):
    assert document().signed(Move.GRANT) != document(**change).signed(Move.GRANT)


def test_a_denial_is_no_grant_and_order_of_arguments_is_nothing():
    one = document()
    assert one.signed(Move.GRANT) != one.signed(Move.DENY)
    other = document(arguments={"to": "x", "amount": 60_000.0})
    assert one.signed(Move.GRANT) == other.signed(Move.GRANT)
    assert one.signed(Move.GRANT).startswith(PREFIX)
    assert len(one.signed(Move.GRANT)) == len(PREFIX) + 32


def test_only_the_pairs_of_the_table_exist():
    for stand in Stand:
        for event in Move:
            if (stand, event) in TRANSITIONS:
                assert move(stand, event) is TRANSITIONS[stand, event]
            else:
                with pytest.raises(IllegalTransition):
                    move(stand, event)


@with_store
async def test_the_same_question_is_asked_once_and_other_arguments_are_another(store):
    first = await ask(store, 1)
    assert first.state is Stand.PENDING
    assert first.document == document(1)
    assert (await ask(store, 2)).document.id == first.document.id
    for number, change in enumerate(
        ({"arguments": {"amount": 1}}, {"policy": "p2"}, {"owner": "key:eve"}, {"tool": "b/x"}), 3
    ):
        assert (await ask(store, number, **change)).document.id == f"a{number:03d}"


@with_store
async def test_a_grant_serves_one_call(store):
    await ask(store)
    await decide(store, Move.GRANT)
    used = await store.approvals.use("a001", "c5", now=NOW)
    assert (used.state, used.call, used.used) == (Stand.USED, "c5", NOW)
    assert (await store.approvals.use("a001", "c5", now=NOW)).state is Stand.USED
    with pytest.raises(IllegalTransition):
        await store.approvals.use("a001", "c6", now=NOW)
    assert (await ask(store, 2)).document.id == "a002"


@with_store
async def test_of_many_calls_that_use_a_grant_at_once_one_does(store):
    await ask(store)
    await decide(store, Move.GRANT)
    results = await asyncio.gather(
        *(store.approvals.use("a001", f"c{n}", now=NOW) for n in range(20)), return_exceptions=True
    )
    assert sum(not isinstance(one, Exception) for one in results) == 1


@with_store
async def test_nothing_undecided_denied_or_expired_can_be_used(store):
    await ask(store)
    with pytest.raises(IllegalTransition):
        await store.approvals.use("a001", "c1", now=NOW)
    await decide(store, Move.GRANT)
    with pytest.raises(IllegalTransition, match="expired"):
        await store.approvals.use("a001", "c1", now=NOW + HOUR)
    await ask(store, 2, arguments={"n": 2})
    await decide(store, Move.DENY, approval="a002")
    with pytest.raises(IllegalTransition):
        await store.approvals.use("a002", "c1", now=NOW)


@with_store
async def test_a_denial_stands_until_its_expiry(store):
    await ask(store)
    await decide(store, Move.DENY)
    assert (await ask(store, 2)).state is Stand.DENIED
    assert (await ask(store, 3, now=NOW + HOUR, expires=NOW + 2 * HOUR)).state is Stand.PENDING


@with_store
async def test_expiry_ends_what_is_open_and_no_decision_comes_after_it(store):
    await ask(store)
    with pytest.raises(IllegalTransition, match="expired"):
        await decide(store, Move.GRANT, now=NOW + HOUR)
    assert await store.approvals.expire(now=NOW + HOUR - 1, limit=9) == []
    [expired] = await store.approvals.expire(now=NOW + HOUR, limit=9)
    assert expired.state is Stand.EXPIRED
    with pytest.raises(IllegalTransition):
        await decide(store, Move.GRANT)


@with_store
async def test_it_is_decided_once(store):
    await ask(store)
    granted = await decide(store, Move.GRANT)
    assert (granted.approver, granted.signature, granted.note) == ("ann", b"ann" * 16, "ok")
    for event in (Move.GRANT, Move.DENY):
        with pytest.raises(IllegalTransition):
            await decide(store, event)


@with_store
async def test_a_void_grant_is_worth_nothing(store):
    await ask(store)
    await decide(store, Move.GRANT)
    voided = await store.approvals.void("a001", "other arguments", now=NOW)
    assert (voided.state, voided.note) == (Stand.VOID, "other arguments")
    with pytest.raises(IllegalTransition):
        await store.approvals.use("a001", "c1", now=NOW)


@with_store
async def test_what_was_signed_cannot_be_changed_in_the_table(store):
    await ask(store)
    for column in ("arguments", "expires", "tool", "owner", "nonce", "policy", "binding"):
        with pytest.raises(StoreFault, match="signed"):
            await store._writer.ask(
                lambda db, column=column: db.execute(f"UPDATE approval SET {column} = 'x'")
            )
    await decide(store, Move.DENY)
    with pytest.raises(StoreFault, match="final"):
        await store._writer.ask(lambda db: db.execute("UPDATE approval SET state = 'granted'"))
    assert sqlite3.sqlite_version


@with_store
async def test_there_is_a_bound_on_all_and_on_one_owner(store):
    tight = Caps(rows=3, open_of_owner=2)
    await ask(store, 1, arguments={"n": 1}, caps=tight)
    await ask(store, 2, arguments={"n": 2}, caps=tight)
    with pytest.raises(ApprovalsFull) as refused:
        await ask(store, 3, arguments={"n": 3}, caps=tight)
    assert refused.value.bound == "open_of_owner"
    await ask(store, 4, owner="key:eve", caps=tight)
    with pytest.raises(ApprovalsFull) as refused:
        await ask(store, 5, owner="key:bob", caps=tight)
    assert refused.value.bound == "rows"


@with_store
async def test_they_are_listed_by_age_and_state_found_and_forgotten(store):
    for number in (1, 2, 3):
        await ask(store, number, arguments={"n": number})
    await decide(store, Move.DENY, approval="a002")
    everything = await store.approvals.listing(state=None, after=0, limit=2)
    assert [one.document.id for one in everything] == ["a001", "a002"]
    rest = await store.approvals.listing(state=None, after=everything[-1].seq, limit=9)
    assert [one.document.id for one in rest] == ["a003"]
    pending = await store.approvals.listing(state=Stand.PENDING, after=0, limit=9)
    assert [one.document.id for one in pending] == ["a001", "a003"]
    assert await store.approvals.counts() == {Stand.PENDING: 2, Stand.DENIED: 1}
    assert await store.approvals.prune(before=NOW + 1, limit=9) == 1
    with pytest.raises(UnknownApproval):
        await store.approvals.find("a002")


@with_store
async def test_several_must_grant_each_once_and_one_denies(store):
    await ask(store)
    one = await decide(store, Move.GRANT, by="ann", needed=2)
    assert (one.state, [grant.approver for grant in one.grants]) == (Stand.PENDING, ["ann"])
    with pytest.raises(IllegalTransition, match="already"):
        await decide(store, Move.GRANT, by="ann", needed=2)
    with pytest.raises(IllegalTransition, match="pending"):
        await store.approvals.use("a001", "c1", now=NOW)
    two = await decide(store, Move.GRANT, by="bob", needed=2, now=NOW + 1)
    assert (two.state, two.decided) == (Stand.GRANTED, NOW + 1)
    assert [(one.approver, one.signature) for one in two.grants] == [
        ("ann", b"ann" * 16), ("bob", b"bob" * 16),
    ]  # fmt: skip
    await ask(store, 2, arguments={"other": 2})
    await decide(store, Move.GRANT, by="ann", needed=3, approval="a002")
    denied = await decide(store, Move.DENY, by="bob", needed=3, approval="a002")
    assert (denied.state, denied.approver) == (Stand.DENIED, "bob")
    await store.approvals.prune(before=NOW + HOUR, limit=10)
    left = await store._reader.ask(
        lambda db: db.execute("SELECT DISTINCT approval FROM approval_grant").fetchall()
    )
    assert [row[0] for row in left] == ["a001"]


@with_store
async def test_a_grant_of_an_earlier_release_is_one_grant(store):
    await ask(store)
    await decide(store, Move.GRANT)
    await store._writer.ask(lambda db: db.execute("DELETE FROM approval_grant"))
    (grant,) = (await store.approvals.find("a001")).grants
    assert (grant.approver, grant.signature, grant.note) == ("ann", b"ann" * 16, "ok")
