"""Two gateways that share what loops are judged by, over a store that is a dictionary."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from types import SimpleNamespace

import orjson

from gateway.admission.estimate import Learned
from gateway.call import Bytes, Call, Dialect, End, Estimate, Family, Fields, Principal, Reply
from gateway.chains import MOST_ASKED, MOST_STRETCH, Chains
from gateway.clock import LoopClock
from gateway.errors import LoopDetected
from gateway.gathering import FRESH
from gateway.layers.estimate import Estimating, estimate
from gateway.layers.guard_loops import LoopGuard
from gateway.loop_books import LoopBooks
from gateway.loop_lists import LoopLists
from gateway.resilience.loops import LoopRules
from gateway.snapshot import AgentRule, Provider, Snapshot
from gateway.tokens import Counter
from gateway.units import Mode
from gateway.wire.chained import Makers, name_of
from tests.fixtures.fake_transport import Tokenizer
from tests.fixtures.waiting import until
from tests.unit.layers.ground import answering, deployment, made, reply

AGENT = AgentRule(id="ada", tenant="t")
RULES = LoopRules(mode=Mode.ENFORCE, task_tokens=1_000)


class Store:
    """What stands under each key; `away`: it answers nobody."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[bytes, bytes]] = defaultdict(dict)
        self.lists: dict[str, list[bytes]] = defaultdict(list)
        self.values: dict[str, bytes] = {}
        self.away = False

    def _answers(self) -> None:
        if self.away:
            raise OSError("gone")

    async def enter(self, entries):
        self._answers()
        found = []
        for one in entries:
            book = self.hashes[one.key]
            book.update({field.encode(): value for field, value in one.own.items()})
            for field, value in one.missing.items():
                book.setdefault(field.encode(), value)
            found.append(dict(book))
        return found

    async def extend(self, listings):
        self._answers()
        for one in listings:
            kept = [] if one.anew else self.lists[one.key]
            self.lists[one.key] = [*kept, *one.items][-one.most :]
        return [list(self.lists[one.key]) for one in listings]

    async def remember(self, kept, read):
        self._answers()
        for one in kept:
            self.values[one.key] = one.value
        return [self.values.get(key, b"") for key in read]


class Member:
    """One gateway of the fleet."""

    def __init__(self, store: Store, name: str) -> None:
        self.clock = LoopClock(precise=True)
        more = {"prefix": "", "faults": (OSError,), "away": lambda: False}
        self.books = LoopBooks(store, self.clock, gateway=name, **more)
        self.lists = LoopLists(store, self.clock, **more)
        self.chains = Chains(store, self.clock, **more)
        self.guard = LoopGuard()
        self.guard.fleet = SimpleNamespace(
            clock=self.clock, books=self.books, lists=self.lists, chains=self.chains
        )
        self.books.known = self.guard.books
        self.serve = self.guard(self.inner)
        self.answer = b"{}"

    async def inner(self, _call: Call) -> Reply:
        return Reply(status=200, headers=[], source=Bytes(self.answer))

    async def ask(self, body, *, dialect=Dialect.CHAT, workflow="", who="ada", tokens=0) -> bool:
        """Whether the call passes, asked a second after the one before."""
        for each in (*self.guard.books(), *self.guard._workflows):
            each.heard_at -= FRESH + 1
        headers = [(b"baggage", f"workflow.id={workflow}".encode())] if workflow else []
        call = Call(
            id="c", dialect=dialect, family=Family.OPENAI, method="POST", path="/", target=b"/",
            headers=headers, snapshot=Snapshot(revision=1, digest="", loops=RULES),
            received=self.clock.now(),
        )  # fmt: skip
        call.parsed, call.fields = body, Fields(model="m", has_tools=True)
        call.principal = Principal(id=f"key:{who}", agent=who, tenant="t", rule=AGENT)
        call.session = "s"
        call.estimate = Estimate(input=tokens, output=0, money=0)
        try:
            reply = await self.serve(call)
        except LoopDetected:
            return False
        for tap in reply.taps:
            tap(self.answer)
        await reply.close(End.COMPLETE)
        return True


@contextlib.asynccontextmanager
async def fleet(store: Store, *names: str):
    """Gateways that run until the block ends."""
    members = [Member(store, name) for name in names]
    running = [
        asyncio.create_task(part.run())
        for each in members
        for part in (each.books, each.lists, each.chains)
    ]
    try:
        yield members
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def told(*members: Member) -> None:
    """Whatever they had to tell is told."""
    parts = [part for each in members for part in (each.books, each.lists, each.chains)]
    while any(map(len, parts)):
        await asyncio.sleep(0)
        for part in parts:
            part.hurry()
    for _ in range(3):
        await asyncio.sleep(0)


def said(text: str):
    return {"messages": [{"role": "user", "content": text}]}


async def rally(ada: Member, bob: Member) -> list[bool]:
    passed = []
    for _ in range(4):
        for each, who, text in ((ada, "ada", "please check"), (bob, "bob", "done")):
            passed.append(await each.ask(said(text), who=who, workflow="w"))
            await told(ada, bob)
    return passed


def test_a_rally_is_seen_by_way_of_two_gateways_and_begins_anew_for_both():
    async def main():
        async with fleet(Store(), "one", "two") as (one, two):
            first = await rally(one, two)
            one.guard.reset("w")
            two.guard.reset("w")
            await told(one, two)
            return first, await rally(one, two)

    assert asyncio.run(main()) == ([True] * 7 + [False],) * 2


def test_a_task_has_one_budget_by_way_of_two_gateways_whatever_the_store_forgets():
    async def main():
        store = Store()
        async with fleet(store, "one", "two") as (one, two):
            assert await one.ask(said("a"), workflow="w", tokens=600)
            await told(one)
            assert await two.ask(said("b"), workflow="w", tokens=500)
            await told(two)
            assert not await one.ask(said("c"), workflow="w")
            losses = []
            one.books.on_loss = lambda: losses.append(1)
            store.hashes.clear()
            assert not await one.ask(said("c"), workflow="w"), "it remembers what it has heard"
            await told(one)
            assert losses
            assert len(store.hashes[next(iter(store.hashes))]) == 2, "and has told it again"
            store.hashes.clear()
            await two.books.retell()
            await told(two)
            assert sum(map(len, store.hashes.values())) >= 1

    asyncio.run(main())


class Agent:
    """It sends results only; its calls are the same each time."""

    def __init__(self) -> None:
        self.number = 0

    async def turn(self, each: Member) -> bool:
        body = {"input": [{"role": "user", "content": "find it"}]}
        if self.number:
            output = {"type": "function_call_output", "call_id": f"c{self.number}", "output": "-"}
            body = {"input": [output], "previous_response_id": f"r{self.number}"}
        call = {"type": "function_call", "call_id": f"c{self.number + 1}", "name": "f"}
        each.answer = orjson.dumps(
            {"id": f"r{self.number + 1}", "status": "completed", "output": [call]}
        )
        passed = await each.ask(body, dialect=Dialect.RESPONSES)
        self.number += passed
        return passed


def test_a_chain_goes_on_by_way_of_another_gateway_and_forgets_by_the_operators_word():
    async def main():
        store, agent = Store(), Agent()
        async with fleet(store, "one", "two") as (one, two):
            passed = []
            for number in range(5):
                passed.append(await agent.turn((one, two)[number % 2]))
                await told(one, two)
            assert passed == [True] * 4 + [False]
            for each in (one, two):
                each.guard.reset("s")
            await told(one, two)
            assert not any(store.values.values())
            return await agent.turn(one)

    assert asyncio.run(main())


def test_a_store_that_does_not_answer_holds_nobody_up():
    async def main():
        store, agent = Store(), Agent()
        async with fleet(store, "one") as (one,):
            store.away = True
            passed = [await agent.turn(one) for _ in range(5)]
            one.chains.made(name_of("t", "here"), "second")
            await until(lambda: one.chains._resting)
            known = one.chains.ask(name_of("t", "elsewhere"), one.clock.now())
            assert known.waiter is not None
            assert known.waiter.done(), "who failed a moment ago is not waited for"
            return passed, await one.chains.maker(name_of("t", "elsewhere"), known)

    assert asyncio.run(main()) == ([True] * 4 + [False], "")


def test_what_was_asked_is_bounded_and_a_stretch_too_long_stays_here():
    async def main():
        async with fleet(Store(), "one") as (one,):
            for number in range(MOST_ASKED + 9):
                one.chains.ask(number, one.clock.now())
            assert len(one.chains._known) == MOST_ASKED
            await told(one)
            one.chains.keep(1, b"x" * (MOST_STRETCH + 1))
            assert len(one.chains) == 0

    asyncio.run(main())


FIRST, SECOND = (
    Provider(name=name, dialects=frozenset({"openai"}), base_url=f"http://{name}")
    for name in ("first", "second")
)
PROVIDERS = Snapshot(revision=1, digest="", providers={"first": FIRST, "second": SECOND})


def door(each: Member) -> Estimating:
    counter = Counter(lambda _name: Tokenizer(), clock=each.clock, inline=True)
    estimating = Estimating(counter, Learned(), decode=lambda call: call.parsed or {})
    estimating.chains = each.chains
    return estimating


def test_the_maker_of_a_response_is_known_to_another_gateway_until_it_is_forgotten():
    async def main():
        async with fleet(Store(), "one", "two") as (one, two):
            here, there = door(one), door(two)
            here.makers = Makers(limit=1)
            rung = deployment("second/m", provider=SECOND)
            for response in ("gone", "there"):
                call = made({"input": "x"}, dialect=Dialect.RESPONSES, snapshot=PROVIDERS)
                call.deployment = rung
                here.made(call, response)
            await told(one)
            served = []
            for response in ("there", "there/cancel", "gone", ""):
                call = made(dialect=Dialect.PASSTHROUGH, snapshot=PROVIDERS)
                call.path, call.received = f"/v1/responses/{response}", two.clock.now()
                await estimate(there)(answering(reply()))(call)
                served.append(call.deployment.provider.name)
            return served

    assert asyncio.run(main()) == ["second", "second", "first", "first"]


def test_makers_that_were_heard_of_are_bounded_too():
    makers = Makers(limit=2)
    for name in range(4):
        makers.heard(name, "second")
    assert [makers.of(name) for name in range(4)] == ["", "", "second", "second"]
