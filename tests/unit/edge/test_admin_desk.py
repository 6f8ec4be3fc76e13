"""Approvals and effects on the admin listener: what operators may do, and what they are told."""

from __future__ import annotations

import asyncio
import base64

import httpx
import pytest

from gateway.admin import AdminView, admin
from gateway.approvers import KeyProblem, document_of, make_key, plain, read_key
from gateway.clock import LoopClock
from gateway.desk import Desk
from gateway.policy.compile import compile as compiled
from gateway.policy.load import load_texts
from gateway.tools.approvals import Consent, wall
from scheduler.api import Bounds, Caps
from scheduler.approvals import Move
from tests.fixtures.effects import document, new_effect
from tests.fixtures.held import memory_store
from tests.unit.tools.test_approvals import ANN, BOB, PUBLIC

POLICY = """
version: 1
providers: {p: {kind: other, base_url: http://p.test}}
models: {"*": {provider: p, pool: per_model}}
agents: {a: {keys: [{key: k-0123456789}]}}
servers:
  bank:
    url: http://bank.test/mcp
    tools: {pay: {approve: {approvers: [ann]}}, wire: {approve: {signatures: 2}}}
approvals: {approvers: {ann: "ed25519:%s", bob: "ed25519:%s"}}
"""
KEYS = tuple(base64.b64encode(PUBLIC[name]).decode() for name in ("ann", "bob"))
SNAPSHOT = compiled(load_texts({"p.yaml": (POLICY % KEYS).encode()}, env={}), revision=1)
RULE = "servers.bank.tools.pay.approve"


class Scene:
    def __init__(self, store) -> None:
        clock = LoopClock()
        self.store, self.now = store, wall(clock)
        self.consent = Consent(store.approvals, clock, bytes)
        desk = Desk(store, self.consent, snapshot=lambda: SNAPSHOT, clock=clock)
        others = dict.fromkeys(AdminView.__dataclass_fields__)
        app = admin(AdminView(**{**others, "desk": desk}))
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://admin", timeout=5
        )

    async def ask(self, number: int = 1, **facts):
        expires = self.now + 3_600_000_000
        facts = {"policy": SNAPSHOT.digest, "rule": RULE, "expires": expires, **facts}
        made = document(number, **facts)
        return await self.store.approvals.ask(
            made, reason="why", call="c", now=self.now, caps=Caps()
        )

    async def decide(self, approval: str, decision: str = "grant", *, key=ANN, signs=None, **more):
        shown = (await self.http.get(f"/approvals/{approval}")).json()
        event = {"grant": Move.GRANT, "deny": Move.DENY}[signs or decision]
        signature = base64.b64encode(key.sign(document_of(shown["document"]).signed(event)))
        body = {"decision": decision, "signature": signature.decode(), **more}
        return await self.http.post(f"/approvals/{approval}/decision", json=body)


def with_scene(scenario):
    def test():
        async def main(store):
            scene = Scene(store)
            async with scene.http:
                await scenario(scene)

        with memory_store() as store:
            asyncio.run(main(store))

    test.__name__ = scenario.__name__
    return test


@with_scene
async def test_a_question_is_listed_shown_with_every_digit_and_decided_once(scene):
    await scene.ask(arguments={"amount": 90071992547409931234567})
    listed = (await scene.http.get("/approvals?state=pending")).json()["approvals"]
    assert [one["id"] for one in listed] == ["a001"]
    assert "document" not in listed[0]
    shown = (await scene.http.get("/approvals/a001")).json()
    assert shown["document"]["arguments"] == '{"amount":90071992547409931234567}'
    done = await scene.decide("a001", note="fine")
    assert (done.status_code, done.json()["state"], done.json()["approver"]) == (
        200, "granted", "ann",
    )  # fmt: skip
    again = await scene.decide("a001", "deny")
    assert again.status_code == 409


@pytest.mark.parametrize(
    ("how", "status"),
    [({"key": BOB}, 403), ({"signs": "deny"}, 403), ({"signature": "no base64!"}, 400),
     ({"decision": "perhaps"}, 400), ({"note": "x" * 501}, 400), ({"note": 7}, 400)],
)  # fmt: skip
def test_a_decision_that_is_not_an_approvers_changes_nothing(how, status):
    @with_scene
    async def scenario(scene):
        await scene.ask()
        if "key" in how or "signs" in how:
            answer = await scene.decide("a001", **how)
        else:
            body = {"decision": "grant", "signature": "", **how}
            answer = await scene.http.post("/approvals/a001/decision", json=body)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"

    scenario()


@with_scene
async def test_a_question_of_another_policy_or_rule_cannot_be_decided(scene):
    for number, facts in ((1, {"policy": "older"}), (2, {"rule": "servers.gone"})):
        made = document(number, expires=scene.now + 10**9, **{
            "policy": SNAPSHOT.digest, "rule": RULE, "arguments": {"n": number}, **facts,
        })  # fmt: skip
        await scene.store.approvals.ask(made, reason="", call="c", now=scene.now, caps=Caps())
        answer = await scene.decide(f"a{number:03d}")
        assert answer.status_code == 409
        assert "ask anew" in answer.json()["detail"]


@with_scene
async def test_what_is_not_there_is_said_so(scene):
    assert (await scene.http.get("/approvals/none")).status_code == 404
    assert (await scene.http.get("/approvals?state=maybe")).status_code == 400
    assert (await scene.http.get("/approvals?after=x")).status_code == 400
    body = {"outcome": "done", "by": "ann"}
    assert (await scene.http.post("/effects/none/resolve", json=body)).status_code == 404


@with_scene
async def test_posts_are_json_of_a_bounded_size_so_that_no_web_page_sends_them(scene):
    await scene.ask()
    url = "/approvals/a001/decision"
    plain_text = await scene.http.post(url, content="{}", headers={"content-type": "text/plain"})
    large = await scene.http.post(url, json={"note": "x" * 20_000})
    broken = await scene.http.post(url, content="{", headers={"content-type": "application/json"})
    listed = await scene.http.post(url, json=[1])
    assert [one.status_code for one in (plain_text, large, broken, listed)] == [415, 413, 400, 400]


@with_scene
async def test_a_doubt_is_listed_and_resolved_by_who_says_how_it_is_known(scene):
    await scene.store.effects.reserve(new_effect("k1"), now=1, bounds=Bounds())
    assert (await scene.http.get("/effects")).json() == {"effects": []}
    await scene.store.effects.abandoned(before=2)
    [doubt] = (await scene.http.get("/effects")).json()["effects"]
    assert (doubt["key"], doubt["tool"]) == ("k1", "bank/pay")
    for body in ({"outcome": "done"}, {"outcome": "perhaps", "by": "ann"}):
        assert (await scene.http.post("/effects/k1/resolve", json=body)).status_code == 400
    body = {"outcome": "not_done", "by": "ann"}
    assert (await scene.http.post("/effects/k1/resolve", json=body)).status_code == 200
    assert await scene.store.effects.look("k1") is None


def test_a_key_is_made_once_for_its_owner_alone_and_read_only_so(tmp_path):
    path = tmp_path / "keys" / "ann.key"
    public = make_key(path)
    assert public.startswith("ed25519:")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path).public_key().public_bytes_raw() == base64.b64decode(public[8:])
    with pytest.raises(KeyProblem, match="exists"):
        make_key(path)
    path.chmod(0o640)
    with pytest.raises(KeyProblem, match="chmod"):
        read_key(path)
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(KeyProblem, match="no approver"):
        read_key(path)
    with pytest.raises(KeyProblem, match="tidegate approvals key"):
        read_key(tmp_path / "none")


def test_what_an_agent_wrote_cannot_move_an_operators_cursor():
    assert plain("pay\x1b[2J\u202eevil\n") == "pay?[2J?evil?"


@with_scene
async def test_a_rule_of_two_shows_who_has_granted_and_how_many_it_wants(scene):
    await scene.ask(rule="servers.bank.tools.wire.approve")
    first = (await scene.decide("a001")).json()
    assert (first["state"], first["granted_by"], first["needed"]) == ("pending", ["ann"], 2)
    assert (await scene.decide("a001")).status_code == 409
    shown = (await scene.http.get("/approvals/a001")).json()
    assert (shown["granted_by"], shown["needed"]) == (["ann"], 2)
    last = (await scene.decide("a001", key=BOB)).json()
    assert (last["state"], last["granted_by"]) == ("granted", ["ann", "bob"])
