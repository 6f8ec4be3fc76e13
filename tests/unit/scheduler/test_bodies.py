"""Bodies of held calls at rest."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

import pytest

from gateway.sealing import AesSeal
from scheduler.api import (
    Bounds,
    Caps,
    Document,
    Limits,
    NewEffect,
    Stand,
    State,
    Unreadable,
    effects,
)
from scheduler.stores.sqlite import MEMORY, SqliteStore
from tests.fixtures.held import BODY, NOW, new_hold, reply

KEY, OTHER = bytes(range(32)), bytes(32)
WIDE = Limits(max_calls=100, max_bytes=1 << 20, max_per_owner=100)


def seal(key: bytes = KEY) -> AesSeal:
    return AesSeal(key, secrets.token_bytes)


def with_store(scenario, sealed=True):
    store = SqliteStore(MEMORY, seal=seal() if sealed else None)
    try:
        asyncio.run(scenario(store))
    finally:
        store._end()


async def rows(store):
    return await store._reader.ask(
        lambda db: [tuple(row) for row in db.execute("SELECT headers, body FROM held_body")]
    )


def test_what_was_sealed_opens_under_the_same_key_and_words_only():
    sealed = seal().wrap(b"prompt", b"h1/request")
    assert b"prompt" not in sealed
    assert seal().wrap(b"prompt", b"h1/request") != sealed
    assert seal().unwrap(sealed, b"h1/request") == b"prompt"
    assert seal(OTHER).unwrap(sealed, b"h1/request") is None
    assert seal().unwrap(sealed, b"h2/request") is None
    assert seal().unwrap(sealed[:-1] + bytes([sealed[-1] ^ 1]), b"h1/request") is None
    assert seal().unwrap(b"short", b"h1/request") is None


def test_neither_prompt_nor_answer_lies_in_the_table_and_both_come_back():
    async def scenario(store):
        await store.keep(new_hold(1), limits=WIDE)
        [(held, request)] = await store.claim("m", limit=1, now=NOW)
        assert (request.body, request.headers) == (BODY, [(b"x-a", b"\xff")])
        [(headers, body)] = await rows(store)
        assert headers == ""
        assert b"content" not in body
        await store.sending(held.id, held.epoch, to="p", now=NOW)
        await store.complete(held.id, held.epoch, reply(b'{"secret":1}'), now=NOW)
        [(_, body)] = await rows(store)
        assert b"secret" not in body
        assert (await store.reply(held.id)) == reply(b'{"secret":1}')

    with_store(scenario)


def test_what_was_written_in_plain_stays_readable():
    async def scenario(store):
        await store.keep(new_hold(1), limits=WIDE)
        store._bodies._seal = seal()
        [(_, request)] = await store.claim("m", limit=1, now=NOW)
        assert request.body == BODY

    with_store(scenario, sealed=False)


def test_a_call_held_under_another_secret_is_refused_and_the_others_go_on():
    async def scenario(store):
        await store.keep(new_hold(1), limits=WIDE)
        store._bodies._seal = seal(OTHER)
        await store.keep(new_hold(2), limits=WIDE)
        claimed = await store.claim("m", limit=9, now=NOW)
        assert [held.id for held, _ in claimed] == ["h002"]
        lost = await store.find("h001", "key:dev")
        assert (lost.state, lost.code, lost.status) == (State.REFUSED, "hold_unreadable", 500)

    with_store(scenario)


def test_an_answer_sealed_under_another_secret_is_a_fault_that_says_so():
    async def scenario(store):
        await store.keep(new_hold(1), limits=WIDE)
        [(held, _)] = await store.claim("m", limit=1, now=NOW)
        await store.sending(held.id, held.epoch, to="p", now=NOW)
        await store.complete(held.id, held.epoch, reply(), now=NOW)
        store._bodies._seal = seal(OTHER)
        with pytest.raises(Unreadable, match="another secret"):
            await store.reply(held.id)

    with_store(scenario)


NEW = NewEffect(
    key="k1", owner="key:a", agent="a", tenant="t", tool="up/pay", kind=effects.Class.IRREVERSIBLE,
    digest="d", call="c1", keep=3_600_000_000, patience=1_000_000,
)  # fmt: skip
DOCUMENT = Document(
    id="ap_1", owner="key:a", agent="a", tenant="t", tool="up/pay",
    arguments={"amount": "secret-amount"}, policy="p", rule="r", expires=NOW + 10**9, nonce="n",
)  # fmt: skip
ANSWER = b'{"content":[{"type":"text","text":"secret-answer"}]}'


async def everything(store):
    """Every cell of the two tables, as bytes."""

    def cells(db):
        rows = [*db.execute("SELECT * FROM effect"), *db.execute("SELECT * FROM approval")]
        return b"".join(
            cell if isinstance(cell, bytes) else str(cell).encode() for row in rows for cell in row
        )

    return await store._reader.ask(cells)


async def filled(store):
    await store.effects.reserve(NEW, now=NOW, bounds=Bounds())
    await store.effects.settle("k1", 1, ANSWER, tokens=1, now=NOW, bounds=Bounds())
    await store.approvals.ask(DOCUMENT, reason="", call="c1", now=NOW, caps=Caps())


@pytest.mark.parametrize("sealed", [True, False])
def test_answers_of_effects_and_arguments_of_approvals_are_sealed_with_the_bodies(sealed):
    async def scenario(store):
        await filled(store)
        assert (b"secret" in await everything(store)) is not sealed
        _, answer = await store.effects.look("k1")
        assert answer == ANSWER
        assert (await store.approvals.find("ap_1")).document == DOCUMENT
        again = await store.approvals.ask(DOCUMENT, reason="", call="c2", now=NOW, caps=Caps())
        assert again.call == "c1"

    with_store(scenario, sealed=sealed)


def test_what_was_written_without_a_seal_stays_readable_and_what_another_sealed_does_not(tmp_path):
    def with_key(key, scenario):
        store = SqliteStore(tmp_path / "tasks.db", seal=seal(key) if key is not None else None)
        try:
            asyncio.run(scenario(store))
        finally:
            store._end()

    async def readable(store):
        assert (await store.effects.look("k1"))[1] == ANSWER
        assert (await store.approvals.find("ap_1")).document == DOCUMENT
        await store._writer.ask(lambda db: [db.execute(f"DELETE FROM {t}") for t in TABLES])
        await filled(store)

    async def unreadable(store):
        effect, answer = await store.effects.look("k1")
        assert answer is None
        assert "another secret" in effect.note
        assert effect.state is effects.Mark.SETTLED  # done, and so never done again
        approval = await store.approvals.find("ap_1")
        assert (approval.state, approval.document.arguments) == (Stand.VOID, {})
        fresh = replace(DOCUMENT, id="ap_2")
        asked = await store.approvals.ask(fresh, reason="", call="c3", now=NOW, caps=Caps())
        assert asked.document.id == "ap_2"  # the void one does not answer for it
        ended = await store.approvals.expire(now=DOCUMENT.expires, limit=10)
        assert len(ended) == 2

    with_key(None, filled)
    with_key(KEY, readable)
    with_key(OTHER, unreadable)


TABLES = ("effect", "approval")


def test_an_answer_cannot_be_put_in_anothers_place():
    async def scenario(store):
        await filled(store)
        await store.effects.reserve(replace(NEW, key="k2"), now=NOW, bounds=Bounds())
        await store.effects.settle("k2", 1, b"{}", tokens=1, now=NOW, bounds=Bounds())
        await store._writer.ask(
            lambda db: db.execute(
                "UPDATE effect SET result = (SELECT result FROM effect WHERE key = 'k1') "
                "WHERE key = 'k2'"
            )
        )
        assert (await store.effects.look("k2"))[1] is None

    with_store(scenario)
