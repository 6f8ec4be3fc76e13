"""Consent: who may sign, what a signature is worth later, and how a call waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.clock import LoopClock
from gateway.errors import ApprovalPending, Forbidden, MalformedCall, QueueFull, StoreUnavailable
from gateway.snapshot import Provider, Server, Snapshot
from gateway.toolcall import ToolCall
from gateway.toolrules import ApprovalRules, Approve
from gateway.tools.approvals import Consent, wall
from gateway.tools.guards import Upkeep
from gateway.wire.mcp import Era, Message
from scheduler.api import Bounds, Stand, StoreFault
from scheduler.approvals import Move, Signed
from scheduler.effects import Mark
from tests.fixtures.effects import new_effect
from tests.fixtures.held import memory_store
from tests.fixtures.waiting import until

ANN = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
BOB = Ed25519PrivateKey.from_private_bytes(b"b" * 32)
PUBLIC = {
    "ann": ANN.public_key().public_bytes_raw(),
    "bob": BOB.public_key().public_bytes_raw(),
}
SERVER = Server(name="bank", provider=Provider(name="bank", dialects=frozenset(), base_url="x"))
ASK = Approve(reason="large", because="servers.bank.tools.pay.approve")


def snapshot(approvers=("ann", "bob"), digest: str = "d", **facts: Any) -> Snapshot:
    keys = {name: PUBLIC[name] for name in approvers}
    rules = ApprovalRules(approvers=keys, wait=facts.pop("wait", 0), **facts)
    return Snapshot(revision=1, digest=digest, approvals=rules)


class Scene:
    def __init__(self, store) -> None:
        self.store = store
        self.clock = LoopClock()
        self.consent = Consent(store.approvals, self.clock, lambda count: self.chance(count))
        self.ended: list[str] = []
        self.consent.on_ended = self.ended.append
        self._serial = 0

    def chance(self, count: int) -> bytes:
        self._serial += 1
        return self._serial.to_bytes(count, "big")

    def call(self, arguments: Any, policy: Snapshot, named: str = "", owner: str = "key:dev"):
        parsed = {"params": {"name": "pay", "arguments": arguments}}
        message = Message(raw=b"", parsed=parsed, method="tools/call", id=b"1", era=Era.STATELESS)
        tool = ToolCall(server=SERVER, message=message, tool="pay", public="pay")
        call = SimpleNamespace(
            id="c1", principal=SimpleNamespace(id=owner, agent="dev", tenant="t"),
            snapshot=policy, received=0, notes=[], extra_headers=[], deadline=100, queue_us=0,
            header=lambda _name: named.encode() if named else None,
        )  # fmt: skip
        return call, tool

    async def obtain(self, arguments, policy=None, *, approve=ASK, **facts):
        call, tool = self.call(arguments, policy or snapshot(), **facts)
        return await self.consent.obtain(call, tool, approve)

    async def pending(self, arguments, policy=None, **facts) -> str:
        with pytest.raises(ApprovalPending) as refused:
            await self.obtain(arguments, policy, **facts)
        return refused.value.details["approval"]

    async def decide(
        self, approval: str, event: Move = Move.GRANT, key=ANN, name: str = "ann", needed: int = 1
    ):
        document = (await self.store.approvals.find(approval)).document
        signature = key.sign(document.signed(event))
        signed = Signed(approver=name, signature=signature, note="n", at=wall(self.clock))
        await self.store.approvals.decide(approval, event, signed, needed=needed)
        self.consent.decided(approval)

    async def refused(self, arguments, policy=None, **facts) -> str:
        with pytest.raises(Forbidden) as refused:
            await self.obtain(arguments, policy, **facts)
        return refused.value.code


def with_scene(scenario):
    def test():
        async def main(store):
            await scenario(Scene(store))

        with memory_store() as store:
            asyncio.run(main(store))

    test.__name__ = scenario.__name__
    return test


@with_scene
async def test_a_granted_call_passes_and_is_used_once(scene):
    approval = await scene.pending({"a": 1})
    assert await scene.pending({"a": 1.0}) == approval
    await scene.decide(approval)
    assert await scene.obtain({"a": 1}) == approval
    call, _ = scene.call({"a": 1}, snapshot())
    await scene.consent.use(approval, call, ASK)
    await scene.consent.use(approval, call, ASK)  # a further attempt of the same call
    other = SimpleNamespace(id="c2")
    with pytest.raises(Forbidden):
        await scene.consent.use(approval, other, ASK)
    assert await scene.pending({"a": 1}) != approval


@with_scene
async def test_a_waiting_call_goes_on_when_it_is_decided_and_its_clock_stood_still(scene):
    policy = snapshot(wait=60_000_000)
    call, tool = scene.call({"a": 1}, policy)
    task = asyncio.ensure_future(scene.consent.obtain(call, tool, ASK))
    asked = asyncio.get_running_loop().create_future()
    scene.consent.on_asked = asked.set_result
    approval = (await asked).document.id
    await scene.decide(approval)
    assert await task == approval
    assert call.deadline > 100
    assert call.deadline - 100 == call.queue_us
    assert scene.consent.waiting == 0
    assert (b"tidegate-approval", approval.encode()) in call.extra_headers


@with_scene
async def test_a_caller_that_leaves_decides_nothing(scene):
    policy = snapshot(wait=60_000_000)
    task = asyncio.ensure_future(scene.obtain({"a": 1}, policy))
    await until(lambda: scene.consent.waiting)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [approval] = await scene.store.approvals.listing(state=None, after=0, limit=2)
    assert approval.state is Stand.PENDING
    assert scene.consent.waiting == 0


@with_scene
async def test_another_policy_is_another_question(scene):
    approval = await scene.pending({"a": 1})
    await scene.decide(approval)
    assert await scene.pending({"a": 1}, snapshot(digest="e")) != approval


@with_scene
async def test_an_approver_who_may_no_more_has_given_nothing(scene):
    approval = await scene.pending({"a": 1})
    await scene.decide(approval)
    assert await scene.refused({"a": 1}, snapshot(approvers=["bob"])) == "approval_void"
    assert (await scene.store.approvals.find(approval)).state is Stand.VOID


@with_scene
async def test_a_rule_may_admit_some_approvers_only(scene):
    bobs = Approve(approvers=("bob",), because=ASK.because)
    approval = await scene.pending({"a": 1}, approve=bobs)
    await scene.decide(approval)
    assert await scene.refused({"a": 1}, approve=bobs) == "approval_void"
    second = await scene.pending({"a": 1}, approve=bobs)
    await scene.decide(second, key=BOB, name="bob")
    assert await scene.obtain({"a": 1}, approve=bobs) == second


@pytest.mark.parametrize(
    ("key", "name", "event"), [(BOB, "ann", Move.GRANT), (ANN, "bob", Move.GRANT)]
)
def test_a_grant_that_its_approver_did_not_sign_is_worth_nothing(key, name, event):
    @with_scene
    async def scenario(scene):
        approval = await scene.pending({"a": 1})
        await scene.decide(approval, event, key=key, name=name)
        assert await scene.refused({"a": 1}) == "approval_void"

    scenario()


@with_scene
async def test_the_signature_of_a_denial_is_no_grant(scene):
    approval = await scene.pending({"a": 1})
    document = (await scene.store.approvals.find(approval)).document
    signed = Signed(
        approver="ann", signature=ANN.sign(document.signed(Move.DENY)), note="",
        at=wall(scene.clock),
    )  # fmt: skip
    await scene.store.approvals.decide(approval, Move.GRANT, signed)
    assert await scene.refused({"a": 1}) == "approval_void"


@with_scene
async def test_named_with_other_arguments_it_is_void(scene):
    approval = await scene.pending({"a": 1})
    await scene.decide(approval)
    assert await scene.refused({"a": 2}, named=approval) == "approval_void"
    assert (await scene.store.approvals.find(approval)).state is Stand.VOID


@with_scene
async def test_nobody_names_an_approval_of_somebody_else(scene):
    approval = await scene.pending({"a": 1})
    await scene.decide(approval)
    assert await scene.refused({"a": 1}, named=approval, owner="key:eve") == "approval_unknown"
    assert (await scene.store.approvals.find(approval)).state is Stand.GRANTED
    assert await scene.refused({"a": 1}, named="ap_none") == "approval_unknown"


@with_scene
async def test_a_denial_and_an_expiry_are_told(scene):
    approval = await scene.pending({"a": 1})
    await scene.decide(approval, Move.DENY)
    assert await scene.refused({"a": 1}) == "approval_denied"
    brief = Approve(expires=1, because=ASK.because)
    await asyncio.sleep(0.001)
    assert await scene.refused({"a": 2}, approve=brief) == "approval_expired"
    assert scene.ended[-2:] == ["denied", "expired"]


@with_scene
async def test_too_many_questions_are_refused_softly(scene):
    policy = snapshot(max_open=1)
    await scene.pending({"a": 1}, policy)
    with pytest.raises(QueueFull):
        await scene.obtain({"a": 2}, policy)


@with_scene
async def test_what_cannot_be_signed_and_a_store_that_is_away_call_nothing(scene):
    with pytest.raises(MalformedCall):
        await scene.obtain({"a": "\ud800"})

    async def broken(*_args, **_kw):
        raise StoreFault("away")

    scene.store.approvals.ask = broken
    with pytest.raises(StoreUnavailable):
        await scene.obtain({"a": 1})


def test_upkeep_makes_doubts_of_what_the_dead_left_and_ends_what_is_over():
    async def scenario(store):
        clock = LoopClock()
        now = wall(clock)
        reserve = store.effects.reserve
        await reserve(new_effect("dead"), now=now - 10_000_000, bounds=Bounds())
        upkeep = Upkeep(effects=store.effects, approvals=store.approvals, own=lambda: True,
                        clock=clock, snapshot=snapshot)  # fmt: skip
        doubted: list[str] = []
        upkeep.on_doubt = lambda effect: doubted.append(effect.key)
        scene = Scene(store)
        brief = Approve(expires=1, because=ASK.because)
        with pytest.raises(Forbidden):
            await scene.obtain({"a": 1}, approve=brief)
        await upkeep.turn()
        assert doubted == ["dead"]
        assert await store.approvals.counts() == {Stand.EXPIRED: 1}
        await reserve(new_effect("ours"), now=now, bounds=Bounds())
        await reserve(new_effect("late", patience=1), now=now - 1_000, bounds=Bounds())
        await upkeep.turn()
        assert doubted == ["dead", "late"]
        assert await store.effects.counts() == {Mark.IN_DOUBT: 2, Mark.RESERVED: 1}

    with memory_store() as store:
        asyncio.run(scenario(store))


def test_upkeep_is_the_owners_and_says_a_failing_store_once():
    async def scenario(store):
        faults: list[str] = []
        facts = {"effects": store.effects, "approvals": store.approvals, "clock": LoopClock(),
                 "snapshot": snapshot}  # fmt: skip
        stranger = Upkeep(own=lambda: False, **facts)
        await store.effects.reserve(new_effect(), now=0, bounds=Bounds())
        await stranger.turn()
        assert await store.effects.counts() == {Mark.RESERVED: 1}

        async def broken(**_kw):
            raise StoreFault("away")

        store.effects.abandoned = broken
        upkeep = Upkeep(own=lambda: True, **facts)
        upkeep.on_fault = faults.append
        await upkeep.turn()
        await upkeep.turn()
        assert faults == ["away"]

    with memory_store() as store:
        asyncio.run(scenario(store))


TWO = replace(ASK, signatures=2)


@with_scene
async def test_a_rule_of_two_wants_two_different_approvers(scene):
    approval = await scene.pending({"a": 1}, approve=TWO)
    await scene.decide(approval, needed=2)
    with pytest.raises(ApprovalPending, match="1 more of 2 humans"):
        await scene.obtain({"a": 1}, approve=TWO)
    await scene.decide(approval, key=BOB, name="bob", needed=2)
    assert await scene.obtain({"a": 1}, approve=TWO) == approval


@with_scene
async def test_of_two_grants_one_that_counts_no_more_is_too_few(scene):
    approval = await scene.pending({"a": 1}, approve=TWO)
    await scene.decide(approval, needed=2)
    await scene.decide(approval, key=BOB, name="bob", needed=2)
    without_bob = snapshot(approvers=("ann",))
    assert await scene.refused({"a": 1}, without_bob, approve=TWO) == "approval_void"


@with_scene
async def test_one_approver_under_two_names_is_one_signature(scene):
    approval = await scene.pending({"a": 1}, approve=TWO)
    await scene.decide(approval, needed=2)
    await scene.decide(approval, key=ANN, name="bob", needed=2)
    assert await scene.refused({"a": 1}, approve=TWO) == "approval_void"
