from __future__ import annotations

import asyncio
from typing import Any

import orjson

from gateway.admission.local import LocalStore
from gateway.admission.profiles import pool_spec
from gateway.call import Bytes, Call, Dialect, End, Family, Fields, Principal, Reply
from gateway.clock import LoopClock
from gateway.errors import UpstreamUnreachable
from gateway.layers.count import CountTokens
from gateway.snapshot import AgentRule, Deployment, Model, Provider, Snapshot, Tier
from gateway.tokens import Counter, Missing
from tests.sim.loop import run

LIMIT = pool_spec(name="pool:count", limits={"rpm": 1})
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}


def provider(how: str = "relay", pools=(LIMIT,)) -> Provider:
    return Provider(
        name="p", dialects=frozenset({"anthropic"}), base_url="http://up", count_tokens=how,
        count_tokens_pools=pools,
    )  # fmt: skip


def call(number: int, one: Provider) -> Call:
    made = Call(
        id=f"c{number}", dialect=Dialect.COUNT_TOKENS, family=Family.ANTHROPIC, method="POST",
        path="/v1/messages/count_tokens", target=b"/v1/messages/count_tokens", headers=[],
        snapshot=Snapshot(revision=1, digest=""), received=0,
    )  # fmt: skip
    made.fields = Fields(model="m")
    made.parsed = BODY
    made.tier = Tier(name="standard", number=2)
    rule = AgentRule(id="a", tenant="t")
    made.principal = Principal(id="key:a", agent="a", tenant="t", rule=rule)
    made.model = Model(name="m", deployments=(Deployment(id="p/m", provider=one),))
    return made


async def body_of(reply: Reply) -> dict[str, Any]:
    body = b"".join([chunk async for chunk in reply.source.chunks()])
    await reply.close(End.COMPLETE)
    return orjson.loads(body)


def answers(calls: int, one: Provider, relay) -> list[dict[str, Any]]:
    async def main():
        clock = LoopClock()
        store = LocalStore(clock)
        counter = Counter(lambda _name: Missing("none here"), clock=clock, inline=True)
        service = CountTokens(relay, counter, lambda _call: BODY, clock, store)
        out = [await body_of(await service(call(number, one))) for number in range(calls)]
        view = store.view(LIMIT.name)
        assert view is None or view.in_flight == 0
        return out

    return run(main())


async def upstream(_call: Call) -> Reply:
    return Reply(status=200, headers=[], source=Bytes(b'{"input_tokens":14}'))


def test_the_upstream_is_asked_within_the_endpoints_own_quota_and_then_we_count():
    first, second = answers(2, provider(), upstream)
    assert first == {"input_tokens": 14}
    assert second["input_tokens"] != 14


def test_a_provider_that_counts_here_is_never_asked():
    async def never(_call):
        raise AssertionError("asked")

    (only,) = answers(1, provider("local"), never)
    assert only["input_tokens"] > 0


def test_an_upstream_without_the_route_or_out_of_reach_is_replaced_by_our_count():
    async def unknown(_call):
        return Reply(status=404, headers=[], source=Bytes(b"{}"))

    async def away(_call):
        raise UpstreamUnreachable("away")

    for relay in (unknown, away):
        (only,) = answers(1, provider(), relay)
        assert only["input_tokens"] > 0


def test_a_slow_upstream_is_not_waited_for_longer_than_ten_seconds():
    async def slow(_call):
        await LoopClock().sleep(3600)
        raise AssertionError("never")

    (only,) = answers(1, provider(), slow)
    assert only["input_tokens"] > 0


def test_a_client_that_leaves_while_the_upstream_counts_leaves_nothing_in_flight():
    async def main():
        clock = LoopClock()
        store = LocalStore(clock)
        counter = Counter(lambda _name: Missing("none here"), clock=clock, inline=True)

        async def silent(_call: Call) -> Reply:
            await clock.sleep(5.0)
            raise AssertionError("nobody waits for this")

        service = CountTokens(silent, counter, lambda _call: BODY, clock, store)
        asking = asyncio.get_running_loop().create_task(service(call(1, provider())))
        await clock.sleep(0.1)
        view = store.view(LIMIT.name)
        assert view is not None
        assert view.in_flight == 1
        asking.cancel()
        await asyncio.wait([asking])
        view = store.view(LIMIT.name)
        assert view is not None
        assert view.in_flight == 0
        assert service.relaying == 0

    run(main())
