"""The API of held calls as an ASGI application, with a real store in memory behind it."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from gateway.clock import LoopClock
from gateway.holds.follow import MAX_FOLLOWERS, Run
from gateway.identity import Identities
from gateway.snapshot import AgentRule, ApiKey, EdgeRules, Snapshot, hash_key
from gateway.tasks import MAX_SERVING, Holds, beside, is_ours
from scheduler.api import Limits, Refusal, State, StoreFault
from tests.fixtures.held import NOW, memory_store, new_hold, reply
from tests.fixtures.waiting import until
from tests.unit.holds.test_resume import World

KEY = "tg_dev_0123456789"
DEV = AgentRule(id="dev", tenant="t", because="agents.dev")
SNAPSHOT = Snapshot(
    revision=1, digest="d", edge=EdgeRules(cors_origins=("https://app.example",)),
    keys=(ApiKey(id="dev", salt=b"s", digest=hash_key(b"s", KEY), agent=DEV),),
)  # fmt: skip


class Client(httpx.AsyncClient):
    """A client of the API, and what stands behind it."""

    world: World
    holds: Holds

    async def keep(self, number: int = 1, **facts):
        return await self.world.store.keep(new_hold(number, **facts), limits=Limits())

    def followers(self, hold: str) -> int:
        return len(self.world.resuming.followers._waiting.get(hold, ()))

    async def done(self, number: int = 1, body: bytes = b'{"a":1}', **facts):
        await self.keep(number, **facts)
        [(held, _)] = await self.world.store.claim("m", limit=1, now=NOW)
        await self.world.store.sending(held.id, held.epoch, to="p", now=NOW)
        return await self.world.store.complete(held.id, held.epoch, reply(body), now=NOW)


@asynccontextmanager
async def client():
    with memory_store() as store:
        world = World(store)
        holds = Holds(
            resuming=world.resuming,
            identities=Identities(clock=world.clock, fetch=_no_keys),
            snapshot=lambda: SNAPSHOT,
            clock=LoopClock(),
        )

        async def edge(_scope, _receive, send) -> None:
            await send({"type": "http.response.start", "status": 299, "headers": []})
            await send({"type": "http.response.body", "body": b"edge"})

        made = Client(
            transport=httpx.ASGITransport(beside(edge, holds.app())),  # type: ignore[arg-type]
            base_url="http://localhost",
            headers={"authorization": f"Bearer {KEY}"},
        )
        made.world, made.holds = world, holds
        async with made:
            yield made


async def _no_keys(_issuer):
    raise AssertionError("no issuer is named here")


def asks(scenario):
    """The scenario, run with a client of its own."""

    def test():
        async def main() -> None:
            async with client() as made:
                await scenario(made)

        asyncio.run(main())

    test.__name__ = scenario.__name__
    return test


def word(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    value = answer.json()
    assert value["status"] == answer.status_code
    assert value["type"] == "about:blank"
    assert value["detail"]
    return answer.status_code, value["code"]


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/v1/holds", True), ("/v1/holds/", True), ("/v1/holds/x/status", True),
        ("/v1/holdsx", False), ("/v1/hold", False), ("/v1/chat/completions", False),
        ("/V1/holds", False), ("//v1/holds", False),
    ],
)  # fmt: skip
def test_only_its_own_paths_are_taken_from_the_edge(path, ours):
    assert is_ours(path) is ours


@asks
async def test_everything_else_is_the_edges_preflights_of_our_paths_too(made):
    assert (await made.get("/v1/models")).status_code == 299
    assert (await made.options("/v1/holds/x")).status_code == 299


@asks
async def test_a_reply_is_given_as_the_provider_sent_it(made):
    held = await made.done()
    answer = await made.get(f"/v1/holds/{held.id}")
    assert (answer.status_code, answer.content) == (200, b'{"a":1}')
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["tidegate-hold-state"] == "done"
    assert answer.headers["cache-control"] == "no-store"
    assert (await made.head(f"/v1/holds/{held.id}")).status_code == 200


@asks
async def test_a_waiting_hold_says_202_and_when_to_come_back(made):
    held = await made.keep()
    answer = await made.get(f"/v1/holds/{held.id}")
    assert answer.status_code == 202
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["location"] == f"/v1/holds/{held.id}"
    assert answer.json()["state"] == "open"
    assert (await made.get(f"/v1/holds/{held.id}/status")).status_code == 200


@asks
async def test_whoever_has_no_credential_or_a_foreign_origin_is_refused_before_anything_is_read(
    made,
):
    path = "/v1/holds/h001"
    assert word(await made.get(path, headers={"authorization": "Bearer x"})) == (
        401,
        "invalid_api_key",
    )
    answer = await made.get(path, headers={"authorization": "Bearer x"})
    assert answer.headers["www-authenticate"] == "Bearer"
    assert word(await made.get(path, headers={"origin": "https://evil.example"}))[0] == 403
    assert word(await made.get(path, headers={"host": "evil.example"})) == (400, "host_not_allowed")
    assert word(await made.get(path + "?api_key=x")) == (400, "credential_in_query")


@asks
async def test_an_allowed_page_may_read_its_answer(made):
    held = await made.done()
    answer = await made.get(f"/v1/holds/{held.id}", headers={"origin": "https://app.example"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


@asks
async def test_pages_of_a_list_follow_each_other(made):
    for number in range(5):
        await made.keep(number)
    await made.keep(9, owner="key:other")
    seen, path = [], "/v1/holds?limit=2"
    while path:
        value = (await made.get(path)).json()
        seen += [one["id"] for one in value["data"]]
        path = value.get("next")
    assert seen == [f"h{number:03d}" for number in range(5)]


@asks
async def test_a_store_that_fails_is_said_without_its_words(made):
    async def fails(*_args, **_facts):
        raise StoreFault("disk full at /var/lib/x")

    made.world.store.find = fails
    answer = await made.get("/v1/holds/h001")
    assert word(answer) == (503, "store_unavailable")
    assert "/var/lib" not in answer.text
    followed = await made.get("/v1/holds/h001", headers={"accept": "text/event-stream"})
    assert followed.status_code == 503


@asks
async def test_results_are_served_within_a_bound_of_bytes(made):
    held = await made.done()
    made.holds._books.bytes = MAX_SERVING
    answer = await made.get(f"/v1/holds/{held.id}")
    assert word(answer) == (429, "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "2"
    made.holds._books.bytes = 0
    await made.get(f"/v1/holds/{held.id}")
    assert made.holds._books.bytes == 0


@asks
async def test_no_more_than_a_bound_may_wait_at_once(made):
    held = await made.keep()
    futures = [asyncio.get_running_loop().create_future() for _ in range(MAX_FOLLOWERS)]
    made.world.resuming.followers._waiting["x"] = futures
    for headers in ({"prefer": "wait=5"}, {"accept": "text/event-stream"}):
        assert word(await made.get(f"/v1/holds/{held.id}", headers=headers))[0] == 429
    assert (await made.get(f"/v1/holds/{held.id}")).status_code == 202


@asks
async def test_a_stopping_process_lets_nobody_wait_and_tells_its_followers(made):
    held = await made.keep()
    path = f"/v1/holds/{held.id}"
    following = asyncio.ensure_future(made.get(path, headers={"accept": "text/event-stream"}))
    await until(lambda: made.followers(held.id))
    made.world.resuming.followers.leave()
    assert (await following).text.endswith(": the gateway is stopping; ask again\n\n")
    assert word(await made.get(path, headers={"prefer": "wait=5"})) == (503, "draining")


@asks
async def test_a_stream_that_broke_after_its_first_bytes_ends_with_an_error(made):
    held = await made.keep(streams=True)
    store = made.world.store
    [(claimed, _)] = await store.claim("m", limit=1, now=NOW)
    await store.sending(held.id, claimed.epoch, to="p", now=NOW)
    run = Run(claimed, head=(200, [(b"content-type", b"text/event-stream")]))
    run.chunks.append(b"data: 1\n")
    made.world.resuming._runs[held.id] = run
    following = asyncio.ensure_future(
        made.get(f"/v1/holds/{held.id}", headers={"accept": "text/event-stream"})
    )
    await until(lambda: made.followers(held.id))
    said = Refusal(status=502, code="stream_cut", message="cut")
    await store.doubt(held.id, claimed.epoch, said, now=NOW)
    del made.world.resuming._runs[held.id]
    made.world.resuming.followers.over(run)
    text = (await following).text
    assert text.startswith(": held\n\ndata: 1\n\n\nevent: error\n")
    value = json.loads(text.rpartition("data: ")[2])
    assert (value["error"]["code"], value["hold"]["state"]) == ("stream_cut", "in_doubt")


@asks
async def test_a_hold_that_moved_between_two_looks_is_a_conflict(made):
    held = await made.keep()
    find = made.world.store.find

    async def stale(*args):
        found = await find(*args)
        if found.state is State.OPEN:
            await made.world.store.expire(now=held.deadline, limit=9)
        return found

    made.world.store.find = stale
    assert word(await made.delete(f"/v1/holds/{held.id}")) == (409, "hold_moved")
