"""Durable holds through the front door: real processes, a real file, `kill -9`, a real receiver.

What the provider saw is counted by the tap between gateway and emulator, never by the gateway.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import sqlite3
import time
from base64 import b64decode, b64encode
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fixtures.waiting import Turns
from tests.integration.gateway import (
    PATIENCE,
    Answer,
    Gateway,
    Wire,
    World,
    ask,
    policy,
    request,
    staged,
    until,
    world,
)

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
BASE_S = 0.3
"""Least time between two probes of a breaker."""
ASYNC = {"prefer": "respond-async"}
DOWN = {"action": "status", "status": 503, "paths": ["*chat*", "*messages*"]}
WEBHOOK_KEY = "whsec_" + b64encode(b"a test's own key of 32 characters").decode()
OTHER_KEY = "tg-other-0123456789"
KEYS = {"OTHER_KEY": OTHER_KEY, "WEBHOOK_KEY": WEBHOOK_KEY}


def rules(**changes: Any) -> dict[str, Any]:
    return policy(
        agents={"other": {"keys": [{"key": "${OTHER_KEY}"}], "tier_cap": "interactive"},
                "tester": {"keys": [{"key": "${TESTER_KEY}"}], "tier_cap": "interactive"}},
        retry={"attempts": 1},
        breakers={"in_a_row": 2, "base": f"{BASE_S}s", "cap": "600ms", "probes": 1},
        tiers={"interactive": {"number": 1, "max_wait": "20s"},
               "standard": {"number": 2, "max_wait": "20s"},
               "batch": {"number": 3, "max_wait": "20s", "hold": True}},
        edge={"drain": "2s"},
        **changes,
    )  # fmt: skip


def chat(text: str, *, stream: bool = False, model: str = "gpt-4o") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 40}
    return {**body, "stream": True} if stream else body


async def call(
    place: World, text: str, *, key: str = "", stream: bool = False, model: str = "gpt-4o",
    headers: dict[str, str] | None = None,
) -> Answer:  # fmt: skip
    chosen = ASYNC if headers is None else headers
    data = request(CHAT, chat(text, stream=stream, model=model), key=key or place.gateway.key,
                   headers={**chosen, "connection": "close"})  # fmt: skip
    return await ask(place.gateway.port, data)


async def get(
    place: World, path: str, *, key: str = "", method: str = "GET",
    headers: dict[str, str] | None = None,
) -> Answer:  # fmt: skip
    data = request(path, key=key or place.gateway.key, method=method,
                   headers={"connection": "close", **(headers or {})})  # fmt: skip
    return await ask(place.gateway.port, data, method=method)


async def trip(place: World, *, model: str = "gpt-4o") -> None:
    """The provider is down and the breaker has noticed."""
    await place.emulator.faults(DOWN)
    for _ in range(2):
        answer = await call(place, "trip", model=model, headers={"tidegate-hold": "never"})
        assert answer.status >= 500


async def held(place: World, text: str, **wish: Any) -> str:
    """A call is held; the path of its hold."""
    answer = await call(place, text, **wish)
    assert answer.status == 202, (answer.status, answer.body)
    location = answer.header("location")
    assert location == f"/v1/holds/{answer.json()['id']}"
    return location


async def ended(place: World, path: str, *, limit: float = PATIENCE, key: str = "") -> Answer:
    async def look() -> Answer | None:
        answer = await get(place, path, key=key)
        return (
            answer
            if answer.header("tidegate-hold-state") not in ("open", "claimed", "sending")
            else None
        )

    return await until(look, limit=limit, every=0.05)


def seen(place: World, needle: str) -> int:
    return len(place.upstream.exchanges(needle))


def answered(place: World, needle: str) -> int:
    """Requests that the provider served."""
    found = place.upstream.exchanges(needle)
    return sum(one.answer is not None and one.answer.status == 200 for one in found)


@pytest.fixture(scope="module")
def scene():
    chosen = rules(holds={"longest": "1h"})
    with staged(chosen, keys=KEYS) as (stage, place):
        yield stage, place


async def calm(place: World) -> None:
    """The provider is well, every breaker closed, nothing held, and nothing remembered."""

    async def quiet() -> bool:
        await place.emulator.faults()
        status = await place.gateway.status()
        if any(one["state"] != "closed" for one in status["breakers"]):
            await call(place, "heal", headers={})
            return False
        return status["holds"]["waiting"] == 0 and status["holds"]["running"] == 0

    await until(quiet)
    place.upstream.forget()


@pytest.fixture
def healthy(scene):
    stage, place = scene
    stage.run(calm(place))
    return stage, place


@pytest.fixture(scope="module")
def mortal_scene():
    with staged(rules(holds={"at_once": 4}), keys=KEYS) as (stage, place):
        yield stage, place


@pytest.fixture
def mortal(mortal_scene):
    """A world whose gateway is killed and started again, test after test."""
    stage, place = mortal_scene
    stage.run(calm(place))
    return stage, place


# --- asking, waiting, fetching -------------------------------------------------------------------


def test_a_held_call_is_answered_202_and_served_once_when_the_breaker_closes(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        answer = await call(place, "needle-once")
        assert answer.status == 202
        assert answer.header("preference-applied") == "respond-async"
        assert 1 <= int(answer.header("retry-after")) <= 60
        path = answer.header("location")
        waiting = await get(place, path)
        assert waiting.status == 202
        assert waiting.json()["state"] in ("open", "claimed", "sending")
        await place.emulator.faults()
        done = await ended(place, path)
        assert done.status == 200
        assert done.json()["object"] == "chat.completion"
        assert done.header("content-type").startswith("application/json")
        again = await get(place, path)
        assert again.body == done.body
        assert answered(place, "needle-once") == 1
        # The caller's key went nowhere, and the provider's own was set.
        one = place.upstream.exchanges("needle-once")[-1]
        assert place.gateway.key.encode() not in one.request.raw
        assert b"prefer:" not in one.request.raw.lower()
        [line] = await until(  # the log is written by a thread
            lambda: [e for e in place.gateway.events("hold_ended") if path.endswith(e["call"])]
        )
        assert (line["state"], line["status"]) == ("done", 200)
        assert place.gateway.events("holds_begun")

    stage.run(scenario())


def test_nobody_who_did_not_ask_is_held_and_a_tier_may_ask_for_all_of_its_calls(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        assert (await call(place, "a", headers={"tidegate-tier": "batch"})).status == 202
        never = {
            "tidegate-tier": "batch",
            "tidegate-hold": "never",
            "x-stainless-read-timeout": "1",
        }
        assert (await call(place, "b", headers=never)).status == 503
        asked = await call(place, "c", headers={"x-stainless-read-timeout": "1"})
        assert asked.status == 503

    stage.run(scenario())


def test_others_are_told_that_there_is_no_such_hold(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "mine")
        for method in ("GET", "DELETE"):
            answer = await get(place, path, key=OTHER_KEY, method=method)
            assert answer.status == 404
            assert answer.header("content-type") == "application/problem+json"
            assert answer.json()["code"] == "unknown_hold"
        assert (await get(place, path + "/status", key=OTHER_KEY)).status == 404
        stranger = await get(place, path, key="tg-nobody")
        assert (stranger.status, stranger.json()["code"]) == (401, "invalid_api_key")
        ids = {one["id"] for one in (await get(place, "/v1/holds?limit=100")).json()["data"]}
        assert path.rpartition("/")[2] in ids
        others = await get(place, "/v1/holds", key=OTHER_KEY)
        assert others.json() == {"object": "list", "data": []}

    stage.run(scenario())


def test_a_cancelled_hold_is_never_sent_and_says_so_until_it_is_erased(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "needle-cancelled")
        gone = await get(place, path, method="DELETE")
        assert (gone.status, gone.json()["state"]) == (200, "cancelled")
        place.upstream.forget()
        await place.emulator.faults()
        other = await held_or_served(place, "other")
        assert other
        answer = await get(place, path)
        assert (answer.status, answer.json()["code"]) == (410, "hold_cancelled")
        assert seen(place, "needle-cancelled") == 0
        assert (await get(place, path, method="DELETE")).status == 204
        assert (await get(place, path)).status == 404

    async def held_or_served(place: World, text: str) -> bool:
        answer = await call(place, text)
        return answer.status == 200 or (await ended(place, answer.header("location"))).status == 200

    stage.run(scenario())


def test_a_hold_expires_at_the_time_its_caller_named(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "short", headers={**ASYNC, "tidegate-hold-for": "1"})
        answer = await ended(place, path)
        assert (answer.status, answer.json()["code"]) == (504, "hold_expired")
        bad = await call(place, "bad", headers={**ASYNC, "tidegate-hold-for": "soon"})
        assert (bad.status, bad.json()["error"]["param"]) == (400, "tidegate-hold-for")

    stage.run(scenario())


def test_the_same_idempotency_key_is_the_same_hold_and_another_request_under_it_a_conflict(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        headers = {**ASYNC, "idempotency-key": "k-1"}
        first = await held(place, "needle-key", headers=headers)
        assert await held(place, "needle-key", headers=headers) == first
        assert (await call(place, "else", headers=headers)).status == 409
        other = await held(place, "needle-key", headers=headers, key=OTHER_KEY)
        assert other != first
        await place.emulator.faults()
        await ended(place, first)
        await ended(place, other, key=OTHER_KEY)
        assert answered(place, "needle-key") == 2  # one for each caller

    stage.run(scenario())


def test_calls_of_every_dialect_are_held_and_answered_in_it(healthy):
    stage, place = healthy
    said = [{"role": "user", "content": "needle-dialect"}]
    asked = {
        "/v1/messages": {"model": "gpt-4o", "max_tokens": 20, "messages": said},
        "/v1/responses": {"model": "gpt-4o", "input": "needle-dialect", "max_output_tokens": 20},
        "/v1/completions": {"model": "gpt-4o", "prompt": "needle-dialect", "max_tokens": 20},
        "/v1/embeddings": {"model": "gpt-4o", "input": "needle-dialect"},
    }
    shapes = {"/v1/messages": "type", "/v1/responses": "object", "/v1/completions": "object",
              "/v1/embeddings": "object"}  # fmt: skip

    async def scenario() -> None:
        await place.emulator.faults({**DOWN, "paths": ["*"]})
        for _ in range(2):
            await call(place, "trip", headers={"tidegate-hold": "never"})
        paths = {}
        for path, body in asked.items():
            # As the SDK of that family sends its key.
            key = {"x-api-key": place.gateway.key} if "messages" in path else {
                "authorization": f"Bearer {place.gateway.key}"}  # fmt: skip
            head = {**ASYNC, **key, "connection": "close", "anthropic-version": "2023-06-01"}
            answer = await ask(place.gateway.port, request(path, body, headers=head))
            assert answer.status == 202, (path, answer.body)
            paths[path] = answer.header("location")
        await place.emulator.faults()
        for path, hold in paths.items():
            answer = await ended(place, hold)
            assert answer.status == 200, (path, answer.body)
            assert answer.json()[shapes[path]]
            assert place.gateway.key.encode() not in answer.body
        assert answered(place, "needle-dialect") == len(asked)
        assert not place.upstream.exchanges(place.gateway.key)

    stage.run(scenario())


def test_a_wait_that_was_preferred_ends_with_the_answer(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "patient")
        waiting = asyncio.create_task(get(place, path, headers={"prefer": "wait=30"}))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await place.emulator.faults()
        assert (await waiting).status == 200

    stage.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_a_follower_hears_comments_and_then_the_answer(healthy, stream):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "followed", stream=stream)
        wire = await Wire.open(place.gateway.port)
        await wire.send(request(path, key=place.gateway.key, headers={
            "accept": "text/event-stream", "connection": "close"}))  # fmt: skip
        await wire.wait_for(b": held\n\n")
        await place.emulator.faults()
        answer = await wire.answer("GET")
        await wire.close()
        assert answer.whole
        assert answer.body.startswith(b": held\n\n")
        stored = await ended(place, path)
        assert stored.status == 200
        if stream:
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert stored.body in answer.body.replace(b": waiting\n", b"")
            assert stored.header("content-type").startswith("text/event-stream")
        else:
            event = answer.body.rpartition(b"event: result\ndata: ")[2]
            assert json.loads(event)["response"]["body"] == stored.json()

    stage.run(scenario())


def test_a_follower_of_a_slow_stream_sees_its_bytes_before_it_is_done(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "slow", stream=True)
        wire = await Wire.open(place.gateway.port)
        await wire.send(request(path, key=place.gateway.key,
                                headers={"accept": "text/event-stream"}))  # fmt: skip
        await place.emulator.faults({"action": "stall", "after_events": 2, "seconds": 5})
        await wire.wait_for(b"chat.completion.chunk")
        assert (await get(place, path)).status == 202
        await wire.wait_for(b"[DONE]")
        await wire.close()
        assert (await ended(place, path)).status == 200

    stage.run(scenario())


def test_a_provider_that_still_refuses_gets_single_probes_and_nothing_is_lost(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        paths = [await held(place, f"needle-wait-{n:02d}") for n in range(6)]
        began, before = time.monotonic(), seen(place, "needle-wait-")
        await asyncio.sleep(2.5)  # several half-open probes, each refused
        await until(lambda: seen(place, "needle-wait-") > before)
        most = (time.monotonic() - began) / BASE_S + 1
        assert seen(place, "needle-wait-") - before <= most
        assert {(await get(place, path)).status for path in paths} == {202}
        await place.emulator.faults()
        answers = [await ended(place, path) for path in paths]
        assert {one.status for one in answers} == {200}
        assert [answered(place, f"needle-wait-{n:02d}") for n in range(6)] == [1] * 6

    stage.run(scenario())


def test_a_stream_that_is_cut_is_in_doubt_and_never_sent_again(healthy):
    stage, place = healthy

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "needle-cut", stream=True)
        place.upstream.forget()
        await place.emulator.faults({"action": "reset", "after_events": 2, "models": ["gpt-4o"]})
        answer = await ended(place, path)
        assert answer.status == 502
        assert answer.header("tidegate-hold-state") == "in_doubt"
        assert "not sent again" in answer.json()["detail"]
        await place.emulator.faults()
        await asyncio.sleep(1.0)
        assert seen(place, "needle-cut") == 1

    stage.run(scenario())


def test_holds_are_served_with_get_and_delete_and_every_error_is_a_problem(healthy):
    stage, place = healthy

    async def scenario() -> None:
        for path, method, status in (
            ("/v1/holds/none", "GET", 404), ("/v1/holds/a/b", "GET", 404),
            ("/v1/holds/", "GET", 404), ("/v1/holds", "POST", 405),
            ("/v1/holds/none", "PUT", 405), ("/v1/holds?limit=x", "GET", 400),
            ("/v1/holds/" + "a" * 5000, "GET", 404), ("/v1/holds?key=sk-1", "GET", 400),
        ):  # fmt: skip
            answer = await get(place, path, method=method)
            assert answer.status == status, (path, answer.status, answer.body)
            assert answer.header("content-type") == "application/problem+json"
            assert answer.json()["status"] == status
        foreign = await ask(place.gateway.port, request("/v1/holds", key=place.gateway.key,
                                                        host="evil.example"))  # fmt: skip
        assert foreign.status == 400
        page = await get(place, "/v1/holds", headers={"origin": "https://evil.example"})
        assert page.status == 403

    stage.run(scenario())


# --- order and pace ------------------------------------------------------------------------------


def test_calls_go_on_by_tier_and_age_one_first_and_never_all_at_once():
    async def scenario() -> None:
        chosen = rules(holds={"at_once": 8, "rate": 1000})
        async with world(chosen, keys=KEYS) as place:
            await trip(place)
            tiers = ["batch", "standard", "interactive"]
            for number in range(30):
                await held(place, f"seq-{number:02d}", headers={
                    **ASYNC, "tidegate-tier": tiers[number % 3]})  # fmt: skip
            place.upstream.forget()
            await place.emulator.faults({"action": "slow_first_byte", "seconds": 0.1})
            listed = (await get(place, "/v1/holds?limit=100")).json()["data"]
            assert len(listed) == 30
            for one in listed:
                assert (await ended(place, one["location"])).status == 200
            assert len(place.upstream.exchanges("seq-")) == 30
            with sqlite3.connect(place.gateway.state / "tasks.db") as db:
                rows = db.execute("SELECT tier, sent_at FROM held_call ORDER BY sent_at, seq")
                order = [tier for tier, _ in rows]
                times = [row[0] for row in db.execute(
                    "SELECT sent_at FROM held_call ORDER BY tier, seq")]  # fmt: skip
            assert order == sorted(order)
            # The oldest of the most urgent tier is the probe: alone, until it was answered.
            assert times[0] == min(times)
            assert sorted(times)[1] - times[0] > 90_000
            # Inside a tier nobody is overtaken by more than those claimed in the same batch.
            places = {at: place for place, at in enumerate(sorted(times))}
            assert all(abs(places[at] - number) < 8 for number, at in enumerate(times))
            assert times[-1] - times[0] > 300_000  # never all at once

    asyncio.run(scenario())


def test_bounds_refuse_with_their_name_and_keep_nothing():
    async def scenario() -> None:
        chosen = rules(holds={"max_per_agent": 2, "max_bytes": "20KiB"})
        async with world(chosen, keys=KEYS) as place:
            await trip(place)
            for number in range(2):
                await held(place, f"n{number}")
            full = await call(place, "one too many")
            assert full.status == 503
            assert "holds.max_per_agent" in full.json()["error"]["message"]
            large = await call(place, "x" * 30_000, key=OTHER_KEY)
            assert "holds.max_bytes" in large.json()["error"]["message"]
            assert len((await get(place, "/v1/holds")).json()["data"]) == 2
            assert await place.gateway.total("tidegate_holds_total", event="full") == 2
            assert await place.gateway.total("tidegate_holds_waiting", tier="2") == 2

    asyncio.run(scenario())


# --- kill -9 -------------------------------------------------------------------------------------


def test_holds_survive_kill_9_and_a_restart_and_are_served_exactly_once(mortal):
    stage, place = mortal

    async def scenario() -> None:
        await trip(place)
        paths = [await held(place, f"needle-{n:02d}") for n in range(10)]
        await place.gateway.kill()
        for file in place.gateway.state.glob("tasks.db*"):
            assert b"needle-" not in file.read_bytes(), f"a prompt lies readable in {file.name}"
        await place.gateway.again()
        place.upstream.forget()
        await place.emulator.faults()
        answers = [await ended(place, path) for path in paths]
        assert {one.status for one in answers} == {200}
        assert [answered(place, f"needle-{n:02d}") for n in range(10)] == [1] * 10
        # Nor does another restart send any of them again.
        await place.gateway.kill()
        await place.gateway.again()
        await asyncio.sleep(1.5)
        assert [(await get(place, path)).body for path in paths] == [a.body for a in answers]
        assert [answered(place, f"needle-{n:02d}") for n in range(10)] == [1] * 10

    stage.run(scenario(), 240)


def test_a_kill_between_send_and_answer_leaves_a_doubt_that_is_said_and_not_sent_again(mortal):
    stage, place = mortal

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "needle-doubt")
        second = await held(place, "needle-safe")
        place.upstream.forget()
        await place.emulator.faults({"action": "slow_first_byte", "seconds": 30})
        await until(lambda: seen(place, "needle-doubt"))
        await place.gateway.kill()
        await place.emulator.faults()
        await place.gateway.again()
        answer = await ended(place, path)
        assert (answer.status, answer.json()["code"]) == (502, "hold_in_doubt")
        assert (await ended(place, second)).status == 200
        assert seen(place, "needle-doubt") == 1
        assert answered(place, "needle-safe") == 1
        assert place.gateway.events("holds_recovered")

    stage.run(scenario(), 240)


def test_kills_at_random_moments_lose_no_call_and_send_none_twice(mortal):
    stage, place = mortal

    async def scenario() -> None:
        await trip(place)
        paths = [await held(place, f"needle-{n:03d}") for n in range(40)]
        place.upstream.forget()
        await place.emulator.faults({"action": "slow_first_byte", "seconds": 0.05})
        for number in range(3):
            await asyncio.sleep(0.15 + 0.11 * number)
            await place.gateway.kill()
            await place.gateway.again()
        answers = [await ended(place, path) for path in paths]
        states = [one.header("tidegate-hold-state") for one in answers]
        assert set(states) <= {"done", "in_doubt"}, states
        assert states.count("done") >= 20
        for number, state in enumerate(states):
            sent = seen(place, f"needle-{number:03d}")
            assert sent == 1 or (state == "in_doubt" and sent == 0), (number, state, sent)

    stage.run(scenario(), 240)


def test_of_two_gateways_on_one_store_one_executes_and_the_other_takes_over(mortal):
    stage, place = mortal

    async def scenario() -> None:
        second = Gateway(place.folder, "second")
        assert second.state == place.gateway.state
        await second.serve(rules(), upstream=place.upstream.port, keys=KEYS)
        twin = World(place.folder)
        twin.gateway, twin.emulator, twin.upstream = second, place.emulator, place.upstream
        try:
            assert (await place.gateway.status())["holds"]["executes"]
            assert not (await second.status())["holds"]["executes"]
            await trip(place)
            await trip(twin)
            path = await held(twin, "needle-twin")  # kept by one, executed by the other
            await place.emulator.faults()
            assert (await ended(twin, path)).status == 200
            assert (await get(place, path)).status == 200
            await trip(place)
            path = await held(place, "needle-heir")
            await place.gateway.kill()
            await place.emulator.faults()
            assert (await ended(twin, path)).status == 200
            assert (await second.status())["holds"]["executes"]
            assert answered(place, "needle-twin") == answered(place, "needle-heir") == 1
            assert await second.stop() == 0
            assert second.crashes() == []
        finally:
            await second.kill()
            await place.gateway.again()

    stage.run(scenario(), 240)


def test_sigterm_gives_back_what_was_not_sent_and_keeps_it_for_the_next_process(mortal):
    stage, place = mortal

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "needle-term")
        async with Turns() as since:
            assert await place.gateway.stop() == 0
            assert since.seconds < 8
        await place.emulator.faults()
        await place.gateway.again()
        assert (await ended(place, path)).status == 200
        assert answered(place, "needle-term") == 1

    stage.run(scenario(), 240)


def test_the_disk_holds_no_credential_and_is_the_owners_alone(mortal):
    stage, place = mortal

    async def scenario() -> None:
        await trip(place)
        path = await held(place, "x", headers={**ASYNC, "x-auth-token": "hunter2-secret",
                                               "cookie": "session=hunter2-secret"})  # fmt: skip
        files = sorted(place.gateway.state.glob("tasks.db*"))
        assert files
        for file in files:
            content = file.read_bytes()
            assert place.gateway.key.encode() not in content
            assert b"hunter2-secret" not in content
            assert file.stat().st_mode & 0o077 == 0, file
        assert await place.gateway.stop() == 0
        with sqlite3.connect(place.gateway.state / "tasks.db") as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            query = "SELECT state FROM held_call WHERE id = ?"
            assert db.execute(query, [path.rpartition("/")[2]]).fetchone() == ("open",)
        await place.gateway.again()

    stage.run(scenario(), 240)


def test_a_caller_that_policy_no_longer_knows_is_refused_when_its_call_goes_on():
    async def scenario() -> None:
        async with world(rules(), keys=KEYS) as place:
            await trip(place)
            path = await held(place, "needle-revoked", key=OTHER_KEY)
            chosen = rules()
            chosen["agents"]["other"] = {"keys": [{"key": "${OTHER_KEY}", "expires": "2020-01-01"}]}
            chosen["agents"]["late"] = {"keys": [{"key": "tg-late-0123456789"}]}
            place.gateway.write(chosen)
            await until(lambda: len(place.gateway.events("policy_loaded")) >= 1)
            place.upstream.forget()
            await place.emulator.faults()

            async def over() -> bool:
                return bool(place.gateway.events("hold_ended"))

            await until(over)
            [line] = place.gateway.events("hold_ended")
            assert (line["state"], line["code"]) == ("refused", "identity_revoked")
            assert path.endswith(line["call"])
            assert seen(place, "needle-revoked") == 0

    asyncio.run(scenario())


# --- webhooks ------------------------------------------------------------------------------------


class Receiver:
    """A webhook's receiver: remembers, and answers as told."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.port = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        headers = {}
        for line in head.decode().split("\r\n")[1:-2]:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((headers, body))
        status = self.answers.pop(0) if self.answers else 204
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def running(self):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    def of(self, kind: str) -> list[tuple[dict[str, str], dict[str, Any]]]:
        found = [(headers, json.loads(body)) for headers, body in self.got]
        return [(headers, value) for headers, value in found if value["type"] == kind]


def verified(headers: dict[str, str], body: bytes) -> bool:
    """As a receiver checks it, by the words of the specification."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    wanted = b64encode(hmac.digest(b64decode(WEBHOOK_KEY[6:]), signed, "sha256")).decode()
    fresh = abs(time.time() - int(headers["webhook-timestamp"])) < 30
    return fresh and f"v1,{wanted}" in headers["webhook-signature"].split(" ")


def test_results_and_alerts_are_pushed_signed_and_only_where_policy_allows():
    async def scenario() -> None:
        async with Receiver().running() as receiver:
            hooks = {"signing_key": "${WEBHOOK_KEY}", "networks": ["127.0.0.1"],
                     "hosts": ["127.0.0.1:*"],
                     "alerts": f"http://127.0.0.1:{receiver.port}/alerts"}  # fmt: skip
            async with world(rules(holds={"webhooks": hooks}), keys=KEYS) as place:
                await trip(place)
                url = f"http://127.0.0.1:{receiver.port}/hook?x=1"
                path = await held(place, "pushed", headers={**ASYNC, "tidegate-webhook": url})
                await until(lambda: receiver.of("hold.begun"))
                for bad, status in (
                    ("http://169.254.169.254/latest/meta-data", 403), ("http://[::1]:1/", 403),
                    ("http://127.0.0.1:22/", 403), ("http://user:pw@127.0.0.1/", 400),
                    ("file:///etc/passwd", 400), ("http://0x7f.1:80/", 400),
                    ("http://2130706433/", 400), ("gopher://127.0.0.1/", 400),
                ):  # fmt: skip
                    answer = await call(place, "bad", headers={**ASYNC, "tidegate-webhook": bad})
                    assert answer.status == status, (bad, answer.body)
                receiver.answers = [500]
                await place.emulator.faults()
                done = await ended(place, path)
                await until(lambda: len(receiver.of("hold.ended")) >= 2)
                tries = receiver.of("hold.ended")
                assert tries[0][0]["webhook-id"] == tries[1][0]["webhook-id"]
                value = tries[1][1]
                assert value["hold"]["id"] == path.rpartition("/")[2]
                assert value["response"]["status"] == 200
                assert value["response"]["body"] == done.json()
                assert all(verified(headers, body) for headers, body in receiver.got)
                await until(lambda: receiver.of("hold.over"))

                async def delivered() -> bool:
                    status = (await get(place, path + "/status")).json()
                    return status["webhook"] == "delivered"

                await until(delivered)
                # The provider never hears of our webhook.
                one = place.upstream.exchanges("pushed")[-1]
                assert b"tidegate-webhook" not in one.request.raw

    asyncio.run(scenario())


def test_a_push_that_a_kill_interrupted_is_made_after_the_restart():
    async def scenario() -> None:
        async with Receiver().running() as receiver:
            hooks = {"signing_key": "${WEBHOOK_KEY}", "networks": ["127.0.0.1"],
                     "hosts": ["127.0.0.1:*"]}  # fmt: skip
            async with world(rules(holds={"webhooks": hooks}), keys=KEYS) as place:
                await trip(place)
                url = f"http://127.0.0.1:{receiver.port}/"
                path = await held(place, "pushed", headers={**ASYNC, "tidegate-webhook": url})
                receiver.answers = [503]
                await place.emulator.faults()
                await until(lambda: receiver.got)
                await until(lambda: place.gateway.events("webhook"))
                await place.gateway.kill()
                await place.gateway.again()
                await until(lambda: len(receiver.got) >= 2)
                assert receiver.got[0][0]["webhook-id"] == receiver.got[1][0]["webhook-id"]
                assert answered(place, "pushed") == 1
                assert (await get(place, path)).status == 200

    asyncio.run(scenario())
