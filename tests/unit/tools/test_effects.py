"""Effects run once: the ledger over a store in memory, in front of a service by script."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from gateway.call import Bytes, End, Kind, Reply
from gateway.clock import LoopClock
from gateway.contracts.conditions import Condition
from gateway.errors import (
    Draining,
    EffectUnderWay,
    GatewayError,
    KeyConflict,
    MalformedCall,
    StoreUnavailable,
    UpstreamFault,
    UpstreamTimeout,
)
from gateway.snapshot import Provider, Server, Snapshot
from gateway.toolcall import ToolCall
from gateway.toolrules import EffectRules, Reconcile, ToolRule
from gateway.tools.effects import Ledger, client_key
from gateway.tools.reconcile import Reconciling, Word, word
from gateway.wire.mcp import Era, Message
from scheduler.api import StoreFault
from scheduler.effects import Mark
from tests.fixtures.held import memory_store
from tests.fixtures.waiting import until

SERVER = Server(name="bank", provider=Provider(name="bank", dialects=frozenset(), base_url="x"))
SNAPSHOT = Snapshot(revision=1, digest="d")


class Scene:
    """A ledger, and calls for it."""

    def __init__(self, store, snapshot: Snapshot = SNAPSHOT) -> None:
        self.store = store
        self.snapshot = snapshot
        self.ran: list[Any] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.told: list[str] = []
        self.ledger = Ledger(store.effects, LoopClock(), self.spawn)
        self.ledger.on_effect = self.told.append
        self._serial = 0

    def spawn(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.append(task)
        return task

    def call(self, arguments: Any, *, key: str | None = "k", rule: ToolRule | None = None):
        self._serial += 1
        ident = b"%d" % self._serial
        parsed = {"method": "tools/call", "params": {"name": "pay", "arguments": arguments}}
        message = Message(raw=b"", parsed=parsed, method="tools/call", id=ident, era=Era.STATELESS)
        tool = ToolCall(server=SERVER, message=message, tool="pay", public="pay", rule=rule)
        headers = [] if key is None else [(b"idempotency-key", key.encode())]
        call = SimpleNamespace(
            id=f"c{self._serial}", principal=SimpleNamespace(
                id="key:dev", agent="dev", tenant="default", session=""),
            session="", snapshot=self.snapshot, received=0, notes=[], extra_headers=[], usage=None,
            sent=False, deployment=None, deadline=LoopClock().now() + 60_000_000,
            header=lambda name: dict(headers).get(name),
        )  # fmt: skip
        return call, tool

    async def ask(self, arguments: Any, inner=None, **facts: Any) -> Reply | None:
        """The gate's part: known, else run."""
        call, tool = self.call(arguments, **facts)
        new = self.ledger.effect(call, tool)
        if new is None:
            return None
        reply = await self.ledger.known(call, tool, new)
        if reply is not None:
            return reply
        return await self.ledger.run(call, tool, new, inner or self.service(new, tool))

    def service(self, new, tool, *, after: asyncio.Event | None = None, reply=None, raises=None):
        """Commits, is sent, answers: at once, or when it may."""

        async def serve(call):
            for step in tool.sending:
                await step()
            call.sent = True
            self.ran.append(tool.arguments)
            if after is not None:
                await after.wait()
            if raises is not None:
                raise raises
            value = reply or answer(len(self.ran), tool.message.id)
            if value.kind is None:
                self.ledger.answered(new, b'{"n":%d}' % len(self.ran))
            return value

        return serve

    async def scripted(self, arguments: Any, **how: Any) -> Reply:
        call, tool = self.call(arguments, rule=how.pop("rule", None))
        new = self.ledger.effect(call, tool)
        assert new is not None
        reply = await self.ledger.known(call, tool, new)
        if reply is not None:
            return reply
        return await self.ledger.run(call, tool, new, self.service(new, tool, **how))

    async def counts(self):
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return await self.store.effects.counts()


def answer(number: int, ident: bytes, *, kind: Kind | None = None, status: int = 200) -> Reply:
    body = b'{"jsonrpc":"2.0","id":%b,"result":{"n":%d}}' % (ident, number)
    reply = Reply(status=status, headers=[(b"content-type", b"application/json")],
                  source=Bytes(body))  # fmt: skip
    reply.kind = kind
    return reply


async def body(reply: Reply) -> Any:
    raw = b"".join([chunk async for chunk in reply.source.chunks()])
    await reply.close(End.COMPLETE)
    return orjson.loads(raw)


def with_scene(scenario, **facts):
    def test():
        async def main(store):
            await scenario(Scene(store, **facts))

        with memory_store() as store:
            asyncio.run(main(store))

    test.__name__ = scenario.__name__
    return test


@with_scene
async def test_the_second_call_is_answered_under_its_own_id_and_nothing_runs(scene):
    first, again = await body(await scene.ask({"a": 1})), await body(await scene.ask({"a": 1.0}))
    assert (first["id"], again["id"]) == (1, 2)
    assert first["result"] == again["result"] == {"n": 1}
    assert scene.ran == [{"a": 1}]
    assert scene.told == ["run", "replayed"]


@with_scene
async def test_without_a_key_or_a_window_a_call_is_no_effect(scene):
    assert await scene.ask({"a": 1}, key=None) is None


@with_scene
async def test_within_its_window_the_same_call_of_a_session_needs_no_key(scene):
    rule = ToolRule(pattern="pay", duplicates=60_000_000)
    for arguments in ({"a": 1}, {"a": 1}, {"a": 2}):
        await body(await scene.ask(arguments, key=None, rule=rule))
    assert scene.ran == [{"a": 1}, {"a": 2}]


@with_scene
async def test_a_caller_that_is_cancelled_takes_nothing_with_it(scene):
    answered = asyncio.Event()
    task = asyncio.ensure_future(scene.scripted({"a": 1}, after=answered))
    await until(lambda: scene.ran)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = asyncio.ensure_future(scene.scripted({"a": 1}))
    await until(lambda: "joined" in scene.told)
    answered.set()
    assert (await body(await again))["result"] == {"n": 1}
    assert scene.told == ["run", "joined"]
    assert len(scene.ran) == 1


@with_scene
async def test_other_arguments_under_a_running_key_are_a_conflict(scene):
    answered = asyncio.Event()
    running = asyncio.ensure_future(scene.scripted({"a": 1}, after=answered))
    await until(lambda: scene.ran)
    with pytest.raises(KeyConflict):
        await scene.scripted({"a": 2})
    answered.set()
    await running
    assert len(scene.ran) == 1


REFUSED = [
    (answer(0, b"1", kind=Kind.CALLER, status=400), {}), (answer(0, b"1", kind=Kind.QUOTA), {}),
    (answer(0, b"1", kind=Kind.FAULT, status=500), {Mark.IN_DOUBT: 1}),
    (answer(0, b"1", kind=Kind.CAPACITY, status=503), {Mark.IN_DOUBT: 1}),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "left"), REFUSED)
def test_a_definite_refusal_frees_the_key_and_a_failure_leaves_a_doubt(reply, left):
    @with_scene
    async def scenario(scene):
        found = await scene.scripted({"a": 1}, reply=reply)
        assert found.kind is reply.kind
        assert await scene.counts() == left

    scenario()


@with_scene
async def test_a_timeout_after_sending_leaves_a_doubt_that_is_told_and_not_repeated(scene):
    with pytest.raises(UpstreamTimeout):
        await scene.scripted({"a": 1}, raises=UpstreamTimeout("late"))
    assert await scene.counts() == {Mark.IN_DOUBT: 1}
    with pytest.raises(KeyConflict) as refused:
        await scene.scripted({"a": 1})
    assert refused.value.code == "effect_in_doubt"
    assert len(scene.ran) == 1


@pytest.mark.parametrize("effect", ["read", "idempotent"])
def test_what_may_be_repeated_is_repeated_after_a_failure(effect):
    @with_scene
    async def scenario(scene):
        rule = ToolRule(pattern="pay", effect=effect)
        with pytest.raises(UpstreamTimeout):
            await scene.scripted({"a": 1}, raises=UpstreamTimeout("late"), rule=rule)
        assert await scene.counts() == {}
        await body(await scene.scripted({"a": 1}, rule=rule))
        assert len(scene.ran) == 2

    scenario()


@with_scene
async def test_what_was_refused_before_it_was_sent_left_no_trace(scene):
    async def refuse(_call):
        raise StoreUnavailable("no")

    with pytest.raises(StoreUnavailable):
        await scene.ask({"a": 1}, refuse)
    assert await scene.counts() == {}
    assert len(scene.ledger) == 0


@with_scene
async def test_an_answer_that_breaks_off_leaves_a_doubt_and_its_reader_is_told(scene):
    class Broken(Bytes):
        async def chunks(self):
            yield b'{"json'
            raise UpstreamFault("broke", code="stream_cut")

    reply = Reply(status=200, headers=[(b"content-type", b"text/event-stream")], source=Broken(b""))
    call, tool = scene.call({"a": 1})
    new = scene.ledger.effect(call, tool)

    async def serve(call):
        for step in tool.sending:
            await step()
        call.sent = True
        return reply

    streamed = await scene.ledger.run(call, tool, new, serve)
    with pytest.raises(UpstreamFault):
        await body(streamed)
    assert await scene.counts() == {Mark.IN_DOUBT: 1}


@with_scene
async def test_a_store_that_fails_stops_the_call_before_anything_is_sent(scene):
    async def broken(*_args, **_kw):
        raise StoreFault("disk full")

    scene.store.effects.reserve = broken
    with pytest.raises(StoreUnavailable):
        await scene.scripted({"a": 1})
    assert scene.ran == []


@with_scene
async def test_an_outcome_that_cannot_be_written_is_said_aloud_and_its_caller_is_answered(scene):
    async def broken(*_args, **_kw):
        raise StoreFault("disk full")

    faults: list[str] = []
    scene.ledger.on_fault = faults.append
    scene.store.effects.settle = broken
    assert (await body(await scene.scripted({"a": 1})))["result"] == {"n": 1}
    assert "disk full" in faults[0]
    assert await scene.counts() == {Mark.RESERVED: 1}


def test_a_full_record_refuses_new_effects_and_sends_nothing():
    tight = Snapshot(revision=1, digest="d", effects=EffectRules(max_kept=1))

    async def scenario(scene):
        await body(await scene.scripted({"a": 1}))
        call, tool = scene.call({"a": 2}, key="other")
        new = scene.ledger.effect(call, tool)
        with pytest.raises(StoreUnavailable, match="full"):
            await scene.ledger.run(call, tool, new, scene.service(new, tool))
        assert len(scene.ran) == 1

    with_scene(scenario, snapshot=tight)()


@with_scene
async def test_a_stopping_process_waits_for_effects_then_leaves_them_in_doubt(scene):
    running = asyncio.ensure_future(scene.scripted({"a": 1}, after=asyncio.Event()))
    await until(lambda: scene.ran)
    assert await scene.ledger.drain(10_000) == 1
    with pytest.raises(GatewayError):
        await running
    assert await scene.counts() == {Mark.IN_DOUBT: 1}
    call, tool = scene.call({"b": 1}, key="next")
    new = scene.ledger.effect(call, tool)
    with pytest.raises(Draining):
        await scene.ledger.run(call, tool, new, scene.service(new, tool))


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb", "\u00ff\u0001"])
def test_a_key_that_is_none_is_refused(key):
    call = SimpleNamespace(header=lambda _name: key.encode("latin-1"))
    with pytest.raises(MalformedCall):
        client_key(call, SimpleNamespace(meta={}))


@pytest.mark.parametrize(("meta", "key"), [({}, None), ({"tidegate/idempotency-key": "k"}, "k")])
def test_a_key_may_stand_in_meta(meta, key):
    call = SimpleNamespace(header=lambda _name: None)
    assert client_key(call, SimpleNamespace(meta=meta)) == key


@with_scene
async def test_two_that_waited_for_the_same_consent_run_once_and_both_are_answered(scene):
    """Between looking at the record and running lies the wait for an approver."""
    calls = [scene.call({"amount": 1}) for _ in range(2)]
    news = [scene.ledger.effect(call, tool) for call, tool in calls]
    for (call, tool), new in zip(calls, news, strict=True):
        assert await scene.ledger.known(call, tool, new) is None
    answered = asyncio.Event()
    running = asyncio.gather(*(
        scene.ledger.run(call, tool, new, scene.service(new, tool, after=answered))
        for (call, tool), new in zip(calls, news, strict=True)
    ))  # fmt: skip
    await until(lambda: "joined" in scene.told)
    answered.set()
    replies = await running
    said = [await body(reply) for reply in replies]
    assert [one["result"] for one in said] == [{"n": 1}, {"n": 1}]
    assert [one["id"] for one in said] == [1, 2]
    assert len(scene.ran) == 1
    await asyncio.gather(*scene.tasks)  # a task that fails would end the process
    assert len(scene.ledger) == 0


@with_scene
async def test_of_two_that_waited_the_second_runs_where_the_first_did_nothing(scene):
    calls = [scene.call({"amount": 1}) for _ in range(2)]
    news = [scene.ledger.effect(call, tool) for call, tool in calls]
    for (call, tool), new in zip(calls, news, strict=True):
        assert await scene.ledger.known(call, tool, new) is None
    refused = answer(0, b"1", kind=Kind.CALLER, status=400)
    answered = asyncio.Event()
    ways = [{"reply": refused, "after": answered}, {}]
    running = asyncio.gather(*(
        scene.ledger.run(call, tool, new, scene.service(new, tool, **way))
        for (call, tool), new, way in zip(calls, news, ways, strict=True)
    ))  # fmt: skip
    await until(lambda: "joined" in scene.told)
    answered.set()
    first, second = await running
    assert (first.status, second.status) == (400, 200)
    assert (await body(second))["result"] == {"n": 2}
    await asyncio.gather(*scene.tasks)


# --- asking the server ----------------------------------------------------------------------------

LOOKED_UP = Reconcile(
    tool="find",
    arguments=(("ref", ("ref",)),),
    done=(Condition(path="state", at=("state",), one_of=("booked", "settled")),),
    absent=(Condition(path="state", at=("state",), one_of=("unknown",)),),
    because="servers.bank.tools.pay.reconcile",
)
QUERYABLE = ToolRule(pattern="pay", effect="queryable", reconcile=LOOKED_UP)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"structuredContent": {"state": "booked"}}, Word.DONE),
        ({"structuredContent": {"state": "unknown"}}, Word.ABSENT),
        ({"structuredContent": {"state": "pending"}}, Word.UNKNOWN),
        ({"structuredContent": {}}, Word.UNKNOWN),
        ({"structuredContent": {"state": "unknown"}, "isError": True}, Word.UNKNOWN),
        ({"content": [{"type": "text", "text": '{"state":"settled"}'}]}, Word.DONE),
        ({"content": [{"type": "text", "text": "no such payment"}]}, Word.UNKNOWN),
        ({"content": [{"type": "image", "data": "x"}]}, Word.UNKNOWN),
        ({"content": []}, Word.UNKNOWN),
        (None, Word.UNKNOWN),
    ],
)
def test_only_what_policy_names_counts_as_done_or_absent(result, said):
    assert word(LOOKED_UP, result) is said


def test_an_answer_that_is_both_says_nothing():
    both = replace(LOOKED_UP, absent=LOOKED_UP.done)
    assert word(both, {"structuredContent": {"state": "booked"}}) is Word.UNKNOWN


class Asked(Scene):
    """Effects of a server that can be asked; `says` is its state, None for no answer."""

    def __init__(self, store) -> None:
        super().__init__(store)
        self.says: str | None = "booked"
        self.questions = 0
        self.screen: Any = None
        self.ledger.reconciling = Reconciling(
            self.answers, lambda _call, _own, result: self.screen and self.screen(result),
            store.effects, LoopClock(),
        )  # fmt: skip

    async def answers(self, _call, _tool, _rule):
        self.questions += 1
        if self.says is None:
            return None
        return SimpleNamespace(result={"structuredContent": {"state": self.says}})

    async def lost(self):
        """A call whose answer was lost."""
        fault = UpstreamTimeout("no answer")
        with pytest.raises(UpstreamTimeout):
            await self.scripted({"ref": "r"}, rule=QUERYABLE, raises=fault)
        assert await self.counts() == {Mark.IN_DOUBT: 1}

    async def again(self):
        return await self.scripted({"ref": "r"}, rule=QUERYABLE)


def with_asked(scenario):
    def test():
        async def main(store):
            await scenario(Asked(store))

        with memory_store() as store:
            asyncio.run(main(store))

    test.__name__ = scenario.__name__
    return test


@with_asked
async def test_done_is_put_on_record_and_answered_without_running_again(scene):
    await scene.lost()
    first, second = await body(await scene.again()), await body(await scene.again())
    assert first["result"]["_meta"] == {"tidegate/reconciled": "find"}
    assert second["result"] == first["result"]
    assert (scene.questions, len(scene.ran)) == (1, 1)
    assert await scene.counts() == {Mark.SETTLED: 1}
    assert "reconciled_done" in scene.told


@with_asked
async def test_absent_is_believed_only_when_the_first_request_must_be_over(scene):
    await scene.lost()
    scene.says = "unknown"
    with pytest.raises(EffectUnderWay) as refused:
        await scene.again()
    assert refused.value.retry_after > 0
    assert len(scene.ran) == 1
    await scene.store._writer.ask(lambda db: db.execute("UPDATE effect SET deadline = 1"))
    assert (await body(await scene.again()))["result"] == {"n": 2}
    assert "reconciled_absent" in scene.told
    assert await scene.counts() == {Mark.SETTLED: 1}


@with_asked
async def test_of_many_that_hear_absent_one_runs_again(scene):
    await scene.lost()
    scene.says = "unknown"
    await scene.store._writer.ask(lambda db: db.execute("UPDATE effect SET deadline = 1"))
    replies = await asyncio.gather(*(scene.again() for _ in range(5)))
    assert {(await body(reply))["result"]["n"] for reply in replies} == {2}
    assert len(scene.ran) == 2
    await asyncio.gather(*scene.tasks, return_exceptions=True)


@pytest.mark.parametrize("says", ["pending", None])
def test_whatever_else_the_server_says_leaves_the_doubt(says):
    @with_asked
    async def scenario(scene):
        await scene.lost()
        scene.says = says
        with pytest.raises(KeyConflict) as refused:
            await scene.again()
        assert refused.value.code == "effect_in_doubt"
        assert await scene.counts() == {Mark.IN_DOUBT: 1}

    scenario()


@with_asked
async def test_what_the_server_says_of_it_is_looked_through_like_any_result(scene):
    await scene.lost()
    scene.screen = lambda result: orjson.dumps({**result, "_meta": {"tidegate/untrusted": ["x"]}})
    said = await body(await scene.again())
    assert said["result"]["_meta"] == {
        "tidegate/untrusted": ["x"], "tidegate/reconciled": "find",
    }  # fmt: skip


@with_asked
async def test_a_word_that_is_withheld_is_on_record_as_done_all_the_same(scene):
    def refuse(_result):
        raise UpstreamFault("it speaks to the model", code="result_screened")

    await scene.lost()
    scene.screen = refuse
    first, again = await body(await scene.again()), await body(await scene.again())
    assert first["result"]["isError"]
    assert again["result"] == first["result"]
    assert len(scene.ran) == 1
    assert await scene.counts() == {Mark.SETTLED: 1}
