from __future__ import annotations

from random import Random

import pytest

from gateway.call import Bytes, Call, Dialect, End, Family, Fields, Reply, Usage
from gateway.errors import QueueFull
from gateway.layers.trace import Tracing
from gateway.snapshot import Snapshot
from gateway.telemetry import traces
from tests.sim.loop import run

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    def __init__(self) -> None:
        self.seen: list[traces.Span] = []

    def ended(self, span):
        self.seen.append(span)

    def close(self):
        pass


class Clock:
    def now(self):
        return 5_000_000


def call(headers=(), dialect=Dialect.CHAT):
    made = Call(
        id="c1",
        dialect=dialect,
        family=Family.OPENAI,
        method="POST",
        path="/v1/chat/completions",
        target=b"/v1/chat/completions",
        headers=list(headers),
        snapshot=Snapshot(revision=1, digest=""),
        received=1_000_000,
    )
    made.fields = Fields(model="gpt-4o", stream=True, cap=7)
    return made


def served(one: Call, *, ratio: float = 1.0, outcome=None):
    spans = Spans()

    async def inner(seen):
        if isinstance(outcome, Exception):
            raise outcome
        seen.usage = Usage(input=3, output=4)
        return outcome or Reply(status=200, headers=[], source=Bytes(b""))

    async def main():
        layer = Tracing(spans, ratio=ratio, clock=Clock(), rng=Random(1))
        reply = await layer(inner)(one)
        await reply.close(End.COMPLETE)

    if isinstance(outcome, Exception):
        with pytest.raises(type(outcome)):
            run(main())
    else:
        run(main())
    return spans.seen


def test_a_received_trace_is_continued_and_passed_on_as_our_own_span():
    one = call([(b"traceparent", PARENT), (b"x-other", b"1")])
    (span,) = served(one)
    assert span.context.trace == 0x0AF7651916CD43DD8448EB211C80319C
    assert span.parent == 0xB7AD6B7169203331
    assert one.headers == [(b"x-other", b"1"), (b"traceparent", span.context.traceparent)]


def test_the_span_tells_model_and_tokens_and_no_text():
    (span,) = served(call())
    told = traces.attributes_of(span)
    assert span.name == "chat gpt-4o"
    assert (told[traces.INPUT_TOKENS], told[traces.OUTPUT_TOKENS]) == (3, 4)
    assert told[traces.REQUEST_MAX_TOKENS] == 7


def test_a_refusal_is_an_error_of_the_span():
    (span,) = served(call(), outcome=QueueFull("full"))
    assert span.error == "rate_limit_exceeded"


def test_what_is_not_sampled_is_passed_on_and_not_exported():
    one = call()
    assert served(one, ratio=0.0) == []
    assert one.headers[0][1].endswith(b"-00")


def test_a_broken_traceparent_begins_a_new_trace():
    (span,) = served(call([(b"traceparent", b"nonsense")]))
    assert span.parent == 0


def test_routes_without_a_model_have_no_span():
    assert served(call(dialect=Dialect.MODELS)) == []
