"""Bodies of held calls at rest."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from gateway.sealing import AesSeal
from scheduler.api import Limits, State, Unreadable
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
