"""What the real SDKs make of a provider that fails: repaired unseen, passed on, or an exception.

Never a shorter answer that looks whole, and never more requests than the fault deserves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.integration.gateway import Stage, World, emulation, policy, staged
from tests.integration.test_sdk_calls import (
    Case,
    Clients,
    chat,
    chat_stream,
    embeddings,
    mark_of,
    messages,
    messages_stream,
    on_the_wire,
    responses,
    responses_stream,
)

pytestmark = pytest.mark.integration

PLAIN: tuple[Case, ...] = (chat, responses, embeddings, messages)
STREAMS: tuple[Case, ...] = (chat_stream, responses_stream, messages_stream)
BROKEN = (openai.APIError, anthropic.APIError, httpx2.RemoteProtocolError)


def models(name: str) -> list[str]:
    return [f"gpt-{name}", f"claude-{name}", f"text-embedding-{name}"]


FAULTS = {
    "hiccup": {"action": "status", "status": 503, "times": 1},
    "reset": {"action": "reset", "after_events": 3},
    "cut": {"action": "cut", "after_events": 3},
    "error": {"action": "error_event", "after_events": 3, "code": "overloaded"},
    "poor": {"action": "status", "status": 429, "code": "insufficient_quota"},
    "wrong": {"action": "status", "status": 400},
    "sick": {"action": "status", "status": 503},
}


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    faults = [
        {**fault, "models": [model]}  # a rule per model: each counts for itself
        for name, fault in FAULTS.items()
        for model in models(name)
    ]
    chosen = policy(
        retry={"base": "50ms", "cap": "100ms"}, breakers={"mode": "off"},
    )  # fmt: skip
    with staged(chosen, provider=emulation(faults=faults)) as made:
        yield made


async def each(world: World, cases: tuple[Case, ...], name: str) -> list[Any]:
    """What each case ended with: None, or its exception."""
    async with Clients(world) as use:
        return await asyncio.gather(
            *(case(use, name, mark_of(case, name)) for case in cases), return_exceptions=True
        )


@pytest.mark.parametrize("case", [chat, messages_stream, embeddings])
def test_a_providers_hiccup_is_repaired_inside(scene, case):
    stage, world = scene
    [error] = stage.run(each(world, (case,), "hiccup"))
    assert error is None
    edge, upstream = on_the_wire(world, case, "hiccup")
    assert (len(edge), len(upstream)) == (1, 2)


@pytest.mark.parametrize("name", ["cut", "reset"])
def test_a_stream_that_breaks_off_is_an_exception_in_every_sdk(scene, name):
    stage, world = scene
    for case, error in zip(STREAMS, stage.run(each(world, STREAMS, name)), strict=True):
        edge, upstream = on_the_wire(world, case, name)
        assert (len(edge), len(upstream)) == (1, 1), "after the first byte nobody repeats"
        assert edge[0].answer is not None
        assert not edge[0].answer.whole
        if case is responses_stream:
            # Its failure is an event, which the case's own assertions then miss.
            assert isinstance(error, (AssertionError, *BROKEN)), error
            assert b'"type":"response.failed"' in edge[0].answer.body
            continue
        assert isinstance(error, BROKEN), (case.__name__, error)
        assert "Tidegate" in str(error) or isinstance(error, httpx2.RemoteProtocolError)
    stage.run(world.gateway.idle())


def test_an_error_inside_a_stream_passes_as_it_came(scene):
    stage, world = scene
    for case, error in zip(STREAMS, stage.run(each(world, STREAMS, "error")), strict=True):
        assert error is not None, case.__name__
        edge, upstream = on_the_wire(world, case, "error")
        assert (len(edge), len(upstream)) == (1, 1)
        assert edge[0].answer is not None
        assert upstream[0].answer is not None
        assert edge[0].answer.body.startswith(upstream[0].answer.body)


def test_spent_credit_is_surfaced_at_once_and_repeated_by_nobody(scene):
    stage, world = scene
    for case, error in zip(PLAIN, stage.run(each(world, PLAIN, "poor")), strict=True):
        assert isinstance(error, openai.APIStatusError | anthropic.APIStatusError)
        edge, upstream = on_the_wire(world, case, "poor")
        assert (len(edge), len(upstream)) == (1, 1), case.__name__
        assert edge[0].answer is not None
        assert edge[0].answer.header("x-should-retry") == "false"


def test_a_providers_400_passes_unchanged_with_one_request(scene):
    stage, world = scene
    cases = (*PLAIN, *STREAMS)
    for case, error in zip(cases, stage.run(each(world, cases, "wrong")), strict=True):
        assert isinstance(error, openai.BadRequestError | anthropic.BadRequestError)
        edge, upstream = on_the_wire(world, case, "wrong")
        assert (len(edge), len(upstream)) == (1, 1), case.__name__
        assert edge[0].answer is not None
        assert upstream[0].answer is not None
        assert edge[0].answer.body == upstream[0].answer.body


def test_once_the_gateway_has_tried_enough_the_sdk_does_not_try_again(scene):
    stage, world = scene
    for case, error in zip(PLAIN, stage.run(each(world, PLAIN, "sick")), strict=True):
        assert isinstance(error, openai.InternalServerError | anthropic.InternalServerError)
        edge, upstream = on_the_wire(world, case, "sick")
        assert len(edge) == 1, case.__name__
        assert len(upstream) == 3, case.__name__
