"""Two sides' books: what the emulator says it reported is what the gateway says was used.

A mixed run, with streams and plain answers in every dialect, answers that break, refuse, stall and
lie about usage, and clients that leave. Figures are compared per model, exactly wherever usage was
reported; where it was not, the gateway must say that it estimated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.gateway import (
    Stage,
    Wire,
    World,
    emulation,
    policy,
    request,
    staged,
    total,
    until,
)

pytestmark = pytest.mark.acceptance

FAULTS = {
    "even": [],
    "wrong": [{"action": "usage", "usage": "wrong", "factor": 3.0}],
    "zero": [{"action": "usage", "usage": "zero"}],
    "shaky": [
        {"action": "status", "status": 503, "every": 4},
        {"action": "status", "status": 429, "code": "rate_limit", "retry_after": ["ms:50"],
         "every": 5},
    ],
    "odd": [{"action": "fragment", "size": 17}],
    "silent": [{"action": "usage", "usage": "missing"}],
    "null": [{"action": "usage", "usage": "null"}],
    "cut": [{"action": "cut", "after_bytes": 700}],
    "reset": [{"action": "reset", "after_events": 3}],
    "failing": [{"action": "error_event", "after_events": 3}],
    "broken": [{"action": "malformed", "after_events": 2}],
    "long": [{"action": "stall", "after_events": 4, "seconds": 60}],
}  # fmt: skip
REPORTED = ("even", "wrong", "zero", "shaky", "odd")
"""Names of which every complete answer carries its usage: here the books must be equal."""
FAMILIES = ("gpt", "claude", "text-embedding")
LEFT_OUT = {"claude": ("odd", "null", "broken")}
EMBEDDED = ("even", "silent")
"""Together fewer models than metrics keep apart (24)."""

PATHS = {
    "chat": ("/v1/chat/completions", "gpt"),
    "responses": ("/v1/responses", "gpt"),
    "messages": ("/v1/messages", "claude"),
    "embeddings": ("/v1/embeddings", "text-embedding"),
}
KINDS = ("input", "output", "cache_read", "cache_write")


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    faults = [
        {**rule, "models": [f"{family}-{name}" for family in FAMILIES]}
        for name, rules in FAULTS.items()
        for rule in rules
    ]
    chosen = policy(
        breakers={"mode": "off"},
        retry={"base": "20ms", "cap": "100ms", "budget": {"ratio": "100%", "min_per_second": 100}},
    )
    with staged(chosen, provider=emulation(faults=faults)) as made:
        yield made


def body_of(dialect: str, model: str, number: int, *, stream: bool) -> dict[str, Any]:
    text = "lorem ipsum dolor sit amet " * (1 + number % 40)
    body: dict[str, Any] = {"model": model}
    if dialect == "embeddings":
        return {**body, "input": [text, str(number)]}
    body["stream"] = stream
    if dialect == "responses":
        return {**body, "input": text}
    body["messages"] = [{"role": "user", "content": text}]
    if dialect == "messages":
        body["max_tokens"] = 100
    elif stream and number % 2:
        body["stream_options"] = {"include_usage": True}
    return body


async def one(world: World, rng: random.Random, name: str, number: int) -> None:
    dialect = rng.choice(
        [
            dialect
            for dialect, (_, family) in PATHS.items()
            if name not in LEFT_OUT.get(family, ())
            and (name in EMBEDDED or dialect != "embeddings")
        ]
    )
    path, family = PATHS[dialect]
    stream = rng.random() < 0.6
    body = body_of(dialect, f"{family}-{name}", number, stream=stream)
    headers = {"anthropic-version": "2023-06-01", "connection": "close"}
    wire = await Wire.open(world.gateway.port)
    await wire.send(request(path, body, key=world.gateway.key, headers=headers))
    if name == "long":
        await asyncio.wait({asyncio.create_task(wire.more())}, timeout=rng.random())
        wire.drop()
    else:
        answer = await wire.answer()
        assert answer.status in (200, 429, 500, 502, 503, 529), (name, answer)
        await wire.close()


def test_both_sides_books_are_equal_after_a_mixed_run(scene):
    stage, world = scene
    rng = random.Random(20261129)
    names = [name for name in FAULTS for _ in range(40)]
    rng.shuffle(names)
    plan = iter(enumerate(names))

    async def worker() -> None:
        for number, name in plan:
            await one(world, rng, name, number)

    async def scenario() -> tuple[dict[str, Any], dict[str, float]]:
        await asyncio.gather(*(worker() for _ in range(24)))
        await world.gateway.idle()

        async def over() -> bool:
            return (await world.emulator.ledger())["in_flight"] == 0

        await until(over)
        await world.gateway.total("tidegate_calls_total")  # a fresh page
        return await world.emulator.ledger(), await world.gateway.metrics()

    ledger, metrics = stage.run(scenario())
    assert total(metrics, "tidegate_calls_total") == len(names)
    answers = total(metrics, "tidegate_upstream_answers_total")
    headless = total(metrics, "tidegate_calls_total", outcome="cancelled", status="none")
    assert answers <= ledger["requests"] <= answers + headless
    by_model = {row["model"]: row for row in ledger["rows"]}
    for model, row in by_model.items():
        used = {
            kind: total(metrics, "tidegate_tokens_used_total", model=model, kind=kind)
            for kind in KINDS
        }
        reported = {kind: row["reported"][kind] for kind in KINDS}
        estimated = total(metrics, "tidegate_usage_estimated_total", model=model)
        if model.rpartition("-")[2] in REPORTED:
            assert used == reported, model
            assert estimated == 0, model
            assert row["completed"] == total(
                metrics, "tidegate_calls_total", model=model, status="200", outcome="ok"
            )
            continue
        assert used["input"] > 0, model
        assert all(used[kind] >= row["reported_before_a_cut"][kind] for kind in KINDS), model
        if model.rpartition("-")[2] in ("silent", "null"):
            assert estimated == row["admitted"], model
    assert total(metrics, "tidegate_settlement_failures_total") == 0
    assert {row["key"] for row in ledger["rows"]} == {ledger["rows"][0]["key"]}
