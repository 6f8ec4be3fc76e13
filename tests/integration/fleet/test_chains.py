"""Responses that go on from a stored one by way of another gateway."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from gateway.admission.estimate import Learned
from gateway.call import Dialect
from gateway.chains import MOST_STRETCH
from gateway.layers.estimate import Estimating, estimate
from gateway.snapshot import Provider, Snapshot
from gateway.tokens import Counter
from gateway.wire.chained import Makers
from tests.fixtures.fake_transport import Tokenizer
from tests.fixtures.ports import free_port
from tests.fixtures.waiting import until
from tests.integration.fleet.member import member
from tests.unit.layers.ground import answering, deployment, made, reply

pytestmark = pytest.mark.integration


async def told(*members) -> None:
    """Whatever they had to tell stands in the store."""
    await until(lambda: not any(len(each.sharing.chains) for each in members))
    await asyncio.sleep(0.02)


class Agent:
    """It sends results only; the provider remembers what it answered."""

    def __init__(self) -> None:
        self.number = 0
        self.calls = True

    async def send(self, each, items, **more) -> str:
        """What the rules say; the answer asks for the same tool once more."""
        body = {"model": "m", "input": items}
        if self.number:
            body["previous_response_id"] = f"resp_{self.number}"
        following = self.number + 1
        call = {"type": "function_call", "call_id": f"c{following}", "name": "search",
                "arguments": '{"q":"tides"}'}  # fmt: skip
        each.answer = orjson.dumps({
            "id": f"resp_{following}", "status": "completed", "output": [call] * self.calls,
        })  # fmt: skip
        said = await each.ask(body, session="s", dialect=Dialect.RESPONSES, **more)
        if not said.startswith("refused"):
            self.number = following
        return said

    async def speak(self, each) -> str:
        return await self.send(each, [{"role": "user", "content": "When is high water?"}])

    async def answer(self, each, **more) -> str:
        output = {"type": "function_call_output", "call_id": f"c{self.number}", "output": "none"}
        return await self.send(each, [output], **more)


async def repeat(*members) -> list[str]:
    """The same call again and again, by way of each in turn; what the rules say."""
    agent = Agent()
    said = [await agent.speak(members[-1])]
    for number in range(5):
        await told(*members)
        said.append(await agent.answer(members[number % len(members)]))
    return said


ALONE = ["", "", "", "warned loops.same_call", "refused loops.same_call", "refused loops.same_call"]


def test_a_loop_in_a_chain_is_seen_by_gateways_in_turn_as_by_one(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            both = await repeat(one, two)
        async with member(valkey.url, prefix + "alone", "alone") as alone:
            return both, await repeat(alone)

    both, alone = asyncio.run(run())
    assert both == alone == ALONE


def test_while_the_store_is_away_each_gateway_knows_what_it_has_served(prefix):
    async def run():
        url = f"redis://127.0.0.1:{free_port()}"
        async with member(url, prefix, "one") as one, member(url, prefix, "two") as two:
            return await repeat(one, two), await repeat(one)

    apart, together = asyncio.run(run())
    assert apart == [""] * 6
    assert together == ALONE


def test_another_agent_of_the_tenant_that_names_the_response_is_not_blamed(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            agent = Agent()
            await agent.speak(one)
            for _ in range(2):
                await agent.answer(one)
            await told(one)
            return await agent.answer(two, who="bob"), await agent.answer(two)

    assert asyncio.run(run())[0] == ""


def test_the_operators_reset_reaches_a_chain_that_goes_on_elsewhere(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            agent = Agent()
            await agent.speak(one)
            for _ in range(3):
                await agent.answer(one)
            await told(one)
            two.sharing.loops_reset("s")
            two.guard.reset("s")
            with valkey.client() as client:
                await until(lambda: client.keys(f"{prefix}chain:*") == [])
            return await agent.answer(two)

    assert asyncio.run(run()) == ""


def test_what_is_kept_of_a_chain_is_small_and_goes_with_its_end(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "one") as one:
            agent = Agent()
            await agent.speak(one)
            for _ in range(2):
                await agent.answer(one)
            await told(one)
            with valkey.client() as client:
                [key] = client.keys(f"{prefix}chain:*")
                assert client.strlen(key) <= MOST_STRETCH
                assert 0 < client.ttl(key) <= 30 * 60
                agent.calls = False
                await agent.answer(one)
                await told(one)
                assert client.keys(f"{prefix}chain:*") == []

    asyncio.run(run())


# --- which provider made it -----------------------------------------------------------------------

FIRST, SECOND = (
    Provider(name=name, dialects=frozenset({"openai"}), base_url=f"http://{name}")
    for name in ("first", "second")
)
RULES = Snapshot(revision=1, digest="", providers={"first": FIRST, "second": SECOND})
RUNGS = tuple(deployment(f"{one.name}/m", provider=one) for one in (FIRST, SECOND))


class Door:
    """Where a member decides which provider a call goes to."""

    def __init__(self, each) -> None:
        counter = Counter(lambda _name: Tokenizer(), clock=each.clock, inline=True)
        self.estimating = Estimating(counter, Learned(), decode=lambda call: call.parsed or {})
        self.estimating.chains = each.sharing.chains
        self.layer = estimate(self.estimating)(answering(reply()))
        self.clock = each.clock

    def answered(self, response: str, *, by: int = 1) -> None:
        """A provider made that response, by way of this gateway."""
        call = made({"input": "x"}, dialect=Dialect.RESPONSES, rungs=RUNGS, snapshot=RULES)
        call.deployment = RUNGS[by]
        self.estimating.made(call, response)

    async def continues(self, response: str) -> str:
        """The provider of a call that goes on from it."""
        body = {"input": "x", "previous_response_id": response}
        call = made(body, dialect=Dialect.RESPONSES, rungs=RUNGS, snapshot=RULES)
        return await self._served(call)

    async def looks(self, path: str) -> str:
        """The provider that is asked for it."""
        call = made(dialect=Dialect.PASSTHROUGH, snapshot=RULES)
        call.path = f"/v1/responses/{path}"
        return await self._served(call)

    async def _served(self, call) -> str:
        call.received = self.clock.now()
        await self.layer(call)
        return call.deployment.provider.name


def test_a_response_is_asked_of_its_maker_by_way_of_any_gateway(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            here, there = Door(one), Door(two)
            here.answered("resp_1")
            here.answered("resp_2")
            await told(one)
            assert await there.continues("resp_1") == "second"
            assert await there.looks("resp_2") == "second"
            assert await there.looks("resp_2/cancel") == "second"
            assert await there.continues("resp_9") == "first"
            with valkey.client() as client:
                client.flushall()
            assert await there.continues("resp_1") == "second", "what was heard is remembered"

    asyncio.run(run())


def test_a_call_that_overtakes_the_news_of_its_response_still_finds_its_maker(valkey, prefix):
    async def run():
        async with (
            member(valkey.url, prefix, "one") as one,
            member(valkey.url, prefix, "two") as two,
        ):
            here, there = Door(one), Door(two)
            going = asyncio.create_task(there.continues("resp_1"))
            await asyncio.sleep(0.01)
            here.answered("resp_1")
            return await going

    assert asyncio.run(run()) == "second"


def test_without_the_store_a_gateway_knows_the_makers_it_has_seen(prefix):
    async def run():
        url = f"redis://127.0.0.1:{free_port()}"
        async with member(url, prefix, "one") as one, member(url, prefix, "two") as two:
            here, there = Door(one), Door(two)
            here.answered("resp_1")
            return await here.continues("resp_1"), await there.continues("resp_1")

    assert asyncio.run(run()) == ("second", "first")


def test_the_store_forgets_the_makers_that_a_gateway_forgets(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "one") as one:
            door = Door(one)
            door.estimating.makers = Makers(limit=3)
            for number in range(9):
                door.answered(f"resp_{number}")
            await told(one)
            with valkey.client() as client:
                keys = client.keys(f"{prefix}maker:*")
                assert len(keys) == 3
                assert all(0 < client.ttl(key) <= 86_400 for key in keys)

    asyncio.run(run())


def test_where_one_provider_could_have_made_it_nobody_is_asked_or_told(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "one") as one:
            door = Door(one)
            alone = Snapshot(revision=1, digest="", providers={"second": SECOND})
            call = made({"input": "x"}, dialect=Dialect.RESPONSES, rungs=RUNGS, snapshot=alone)
            door.estimating.made(call, "resp_1")
            body = {"input": "x", "previous_response_id": "resp_2"}
            other = made(body, dialect=Dialect.RESPONSES, rungs=RUNGS[1:], snapshot=alone)
            assert door.estimating.ask(other) is None
            assert len(one.sharing.chains) == 0

    asyncio.run(run())
