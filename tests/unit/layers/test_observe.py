from __future__ import annotations

import asyncio

import pytest

from gateway.call import End, Kind, Usage
from gateway.errors import QueueFull, UpstreamTimeout
from gateway.layers.observe import Observing, outcome_of
from gateway.telemetry.metrics import Metrics
from gateway.units import MICRO
from gateway.wire.ratelimit_headers import OwnLimit
from tests.sim.loop import run
from tests.unit.layers.ground import answering, made, reply, the_clock


def observed(inner, *, limits=()):
    ends: list[tuple[int, str, str]] = []
    metrics = Metrics()
    layer = Observing(
        clock=the_clock(), metrics=metrics, own_limits=lambda _call: list(limits),
        on_end=lambda _call, status, outcome, error: ends.append(
            (status, outcome, type(error).__name__ if error else "")
        ),
    )  # fmt: skip
    return layer(inner), ends, metrics


def headers(call) -> dict[bytes, bytes]:
    return dict(call.extra_headers)


def test_each_call_ends_once_however_often_it_is_closed():
    async def main():
        service, ends, _ = observed(answering(reply()))
        answer = await service(made())
        assert not ends
        await answer.close(End.COMPLETE)
        await answer.close(End.FAILED)
        assert ends == [(200, "ok", "")]

    run(main())


@pytest.mark.parametrize(
    ("kind", "end", "terminal", "outcome"),
    [
        (None, End.COMPLETE, False, "ok"),
        (None, End.CLIENT_GONE, False, "cancelled"),
        (None, End.CLIENT_GONE, True, "ok"),
        (None, End.CUT, False, "failed"),
        (None, End.DRAINED, False, "cancelled"),
        (Kind.CALLER, End.COMPLETE, False, "refused"),
        (Kind.FAULT, End.COMPLETE, False, "failed"),
    ],
)
def test_how_a_call_ended_is_one_word(kind, end, terminal, outcome):
    answer = reply(kind=kind)
    answer.terminal = terminal
    assert outcome_of(answer, end) == outcome


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (QueueFull("full"), (429, "refused", "QueueFull")),
        (UpstreamTimeout("slow"), (504, "failed", "UpstreamTimeout")),
        (ZeroDivisionError(), (500, "failed", "")),
        (asyncio.CancelledError(), (0, "cancelled", "")),
    ],
)
def test_every_refusal_and_every_escape_is_seen_and_passed_on(error, end):
    async def main():
        service, ends, _ = observed(answering(error))
        with pytest.raises(type(error)):
            await service(made())
        assert ends == [end]

    run(main())


def test_the_answer_names_its_facts():
    async def main():
        async def slow(call):
            await asyncio.sleep(3)
            call.queue_us, call.upstream_us, call.reserved = MICRO, 2 * MICRO - 1_500, 150
            return reply()

        service, _, _ = observed(slow)
        call = made()
        await service(call)
        told = headers(call)
        assert told[b"tidegate-tier"] == b"standard"
        assert told[b"tidegate-queue-ms"] == b"1000"
        assert told[b"tidegate-tokens-reserved"] == b"150"
        assert told[b"tidegate-model-served"] == b"m"
        assert told[b"tidegate-overhead-ms"] == b"1.500"

    run(main())


def test_an_upstreams_refusal_is_not_to_be_repeated_by_the_sdk():
    async def main():
        refused = reply(429, kind=Kind.QUOTA)
        refused.retry_after = 5 * MICRO
        call = made()
        service, _, _ = observed(answering(refused))
        await service(call)
        assert headers(call)[b"x-should-retry"] == b"false"

    run(main())


def test_the_callers_own_limits_are_told_in_its_dialect():
    async def main():
        limit = OwnLimit(name="tokens", limit=1_000, remaining=400, reset=6 * MICRO)
        call = made()
        service, _, _ = observed(answering(reply()), limits=[limit])
        await service(call)
        told = headers(call)
        assert told[b"x-ratelimit-limit-tokens"] == b"1000"
        assert told[b"x-ratelimit-remaining-tokens"] == b"400"

    run(main())


def test_tokens_are_counted_at_the_end_and_once():
    async def main():
        service, _, metrics = observed(answering(reply()))
        call = made()
        answer = await service(call)
        call.usage = Usage(input=30, output=12)
        await answer.close(End.COMPLETE)
        await answer.close(End.COMPLETE)
        page = metrics.render().decode()
        assert 'tidegate_tokens_used_total{kind="input",model="m"} 30.0' in page
        assert 'tidegate_tokens_used_total{kind="output",model="m"} 12.0' in page

    run(main())


@pytest.mark.parametrize(
    ("span", "told"),
    [(0, b"0"), (7, b"0.007"), (1_000, b"1"), (1_050, b"1.050"), (61_000_999, b"61000.999")],
)
def test_spans_are_told_in_milliseconds_to_the_microsecond(span, told):
    async def main():
        call = made()
        call.queue_us = span
        service, _, _ = observed(answering(reply()))
        await service(call)
        assert headers(call)[b"tidegate-queue-ms"] == told

    run(main())
