from __future__ import annotations

import pytest

from gateway.admission.estimate import FIRST_GUESS, Learned
from gateway.call import Dialect, Family, Usage
from gateway.errors import NoSuchRoute
from gateway.layers.estimate import NOTHING, Estimating, estimate
from gateway.snapshot import Price, Provider, Snapshot
from gateway.tokens import Counter
from gateway.wire.chained import name_of
from tests.fixtures.fake_transport import Tokenizer, prompt
from tests.sim.loop import run
from tests.unit.layers.ground import answering, deployment, made, reply, the_clock

OVERHEAD = 7
"""What the roles of one message count for, in this dialect."""


async def counting(**more) -> tuple[Estimating, Learned]:
    learned = Learned()
    counter = Counter(lambda _name: Tokenizer(), clock=the_clock(), inline=True)
    await counter.preload(["o200k_base"])
    return Estimating(counter, learned, decode=lambda call: call.parsed or {}, **more), learned


def asking(tokens: int, **body):
    return {"messages": [{"role": "user", "content": prompt(tokens)}], **body}


async def estimated(call, estimating):
    await estimate(estimating)(answering(reply()))(call)
    return call.estimate


def test_the_input_is_counted_and_the_output_guessed_below_the_cap():
    async def main():
        estimating, _ = await counting()
        found = await estimated(made(asking(300)), estimating)
        assert found.input == 300 + OVERHEAD
        assert found.output == FIRST_GUESS
        assert found.cap is None
        assert (await estimated(made(asking(300, max_tokens=40)), estimating)).output == 40

    run(main())


def test_settled_usage_teaches_both_sides():
    async def main():
        estimating, _ = await counting()
        for _ in range(50):
            call = made(asking(300))
            await estimated(call, estimating)
            estimating.learn(call, Usage(input=600, output=80))
        found = await estimated(made(asking(300)), estimating)
        assert abs(found.output - 80) <= 1
        assert 560 <= found.input <= 640  # the provider counts twice as much as we do

    run(main())


def test_a_price_is_predicted_from_both():
    async def main():
        estimating, _ = await counting()
        price = Price(input=2_000_000, output=10_000_000)
        call = made(asking(93, max_tokens=10), rungs=(deployment(price=price),))
        assert (await estimated(call, estimating)).money == 100 * 2 + 10 * 10

    run(main())


def test_embeddings_expect_no_output():
    async def main():
        estimating, _ = await counting()
        call = made({"input": prompt(50)}, dialect=Dialect.EMBEDDINGS)
        found = await estimated(call, estimating)
        assert (found.output, found.cap) == (0, 0)

    run(main())


def test_a_relayed_path_costs_a_request_and_no_tokens():
    async def main():
        where = Provider(
            name="up", dialects=frozenset({"openai"}), base_url="http://up", passthrough=("/v1/f*",)
        )
        estimating, _ = await counting()
        policy = Snapshot(revision=1, digest="d", providers={"up": where})
        call = made(dialect=Dialect.PASSTHROUGH, snapshot=policy)
        assert await estimated(call, estimating) is NOTHING
        assert call.deployment.provider is where

    run(main())


def test_a_path_that_nobody_serves_is_named():
    async def main():
        estimating, _ = await counting()
        with pytest.raises(NoSuchRoute, match="/v1/files"):
            await estimated(made(dialect=Dialect.PASSTHROUGH), estimating)

    run(main())


def test_a_model_is_served_in_its_own_dialect_only():
    async def main():
        estimating, _ = await counting()
        call = made()
        call.family = Family.ANTHROPIC
        with pytest.raises(NoSuchRoute, match="anthropic dialect"):
            await estimated(call, estimating)

    run(main())


def test_calls_counted_before_anything_was_learned_do_not_correct_each_other():
    async def main():
        estimating, _ = await counting()
        calls = [made(asking(300)) for _ in range(20)]
        for call in calls:
            await estimated(call, estimating)
        for call in calls:
            estimating.learn(call, Usage(input=614, output=1))
        return (await estimated(made(asking(300)), estimating)).input

    assert run(main()) == 614


def test_a_stored_response_belongs_to_the_provider_that_made_it():
    async def main():
        first = Provider(name="first", dialects=frozenset({"openai"}), base_url="http://1")
        second = Provider(name="second", dialects=frozenset({"openai"}), base_url="http://2")
        rules = Snapshot(revision=1, digest="", providers={"first": first, "second": second})
        estimating, _ = await counting()
        estimating.makers.note(name_of("acme", "resp_2"), "second")
        layer = estimate(estimating)(answering(reply()))
        served = []
        for path in ("resp_2", "resp_2/cancel", "resp_9"):
            call = made(dialect=Dialect.PASSTHROUGH, snapshot=rules)
            call.path = f"/v1/responses/{path}"
            await layer(call)
            served.append(call.deployment.provider.name)
        rungs = tuple(deployment(f"{one.name}/m", provider=one) for one in (first, second))
        for previous in ("resp_2", "resp_9", None):
            body = {"previous_response_id": previous} if previous else {}
            call = made({"input": "go on", **body}, dialect=Dialect.RESPONSES, rungs=rungs)
            await layer(call)
            served.append(call.deployment.provider.name)
        return served

    assert run(main()) == ["second", "second", "first", "second", "first", "first"]
