"""Trace context by the book, spans by our names, and nothing at all without OpenTelemetry."""

from __future__ import annotations

import importlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.telemetry import traces
from gateway.telemetry.traces import (
    NoSpans,
    OtelSpans,
    Span,
    TraceContext,
    attributes_of,
    begin,
    open_spans,
    parse_traceparent,
)

GOOD = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_traceparent_is_read_and_written_back():
    context = parse_traceparent(GOOD, b"vendor=x")
    assert context == TraceContext(
        0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, sampled=True, state=b"vendor=x"
    )
    assert context.traceparent == GOOD


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (b" " + GOOD + b"\t", True),
        (GOOD[:-1] + b"0", False),
        (GOOD[:-2] + b"03", True),
        (b"01" + GOOD[2:], True),
        (b"cc" + GOOD[2:] + b"-what-the-future-brings", True),
    ],
)
def test_a_valid_variant_is_accepted(value, sampled):
    context = parse_traceparent(value)
    assert context is not None
    assert context.sampled is sampled
    assert context.traceparent.startswith(b"00-")


@pytest.mark.parametrize(
    "value",
    [
        b"", b"00", GOOD[:-1], GOOD + b"0", GOOD + b"-x", b"ff" + GOOD[2:], GOOD.upper(),
        GOOD.replace(b"4bf92f3577b34da6a3ce929d0e0e4736", b"0" * 32),
        GOOD.replace(b"00f067aa0ba902b7", b"0" * 16), GOOD.replace(b"-", b"_"), GOOD + b"\n",
        b"0x" + GOOD[2:], b"01" + GOOD[2:] + b"x", b"\xff" * 55,
    ],
)  # fmt: skip
def test_an_invalid_traceparent_starts_a_new_trace(value):
    assert parse_traceparent(value) is None


@given(st.binary(max_size=80))
@settings(max_examples=60)
def test_no_bytes_break_the_parser(value):
    context = parse_traceparent(value)
    assert context is None or parse_traceparent(context.traceparent) == context


def test_an_overlong_tracestate_is_dropped():
    assert parse_traceparent(GOOD, b"x" * 513).state == b""


def test_a_child_keeps_trace_decision_and_state():
    parent = parse_traceparent(GOOD, b"v=1")
    child = begin(parent, ratio=0.0, rng=random.Random(1))
    assert (child.trace, child.sampled, child.state) == (parent.trace, True, b"v=1")
    assert child.span != parent.span


def test_new_traces_are_sampled_by_their_share():
    rng = random.Random(7)
    sampled = sum(begin(None, ratio=0.25, rng=rng).sampled for _ in range(2_000))
    assert 420 <= sampled <= 580
    assert not begin(None, ratio=0.0, rng=rng).sampled
    assert begin(None, ratio=1.0, rng=rng).sampled


class Zeros:
    def getrandbits(self, k):
        return 0


def test_ids_are_never_zero():
    context = begin(None, ratio=0.0, rng=Zeros())
    assert parse_traceparent(context.traceparent) is not None


def span(**changes):
    fields = {
        "name": "chat gpt-4o",
        "context": parse_traceparent(GOOD),
        "start": 1_795_000_000_000_000,
        "end": 1_795_000_001_500_000,
        "attributes": {traces.OPERATION: "chat", traces.INPUT_TOKENS: 9},
    }
    return Span(**fields | changes)


def exported(*spans):
    exporter = InMemorySpanExporter()
    bridge = OtelSpans(SimpleSpanProcessor(exporter), version="1.2.3")
    for one in spans:
        bridge.ended(one)
    bridge.close()
    return exporter.get_finished_spans()


def test_a_span_is_exported_with_our_ids_times_and_names():
    (got,) = exported(
        span(
            parent=0xABC,
            attributes={
                traces.OPERATION: "chat",
                traces.REQUEST_MODEL: "gpt-4o",
                traces.FINISH_REASONS: ["stop"],
                traces.REQUEST_STREAM: True,
                traces.TIME_TO_FIRST_CHUNK: 0.25,
                traces.RESPONSE_ID: None,
            },
        )
    )
    assert got.name == "chat gpt-4o"
    assert got.context.trace_id == 0x4BF92F3577B34DA6A3CE929D0E0E4736
    assert got.context.span_id == 0x00F067AA0BA902B7
    assert got.parent.span_id == 0xABC
    assert got.parent.is_remote
    assert got.end_time - got.start_time == 1_500_000_000
    assert got.kind is SpanKind.CLIENT
    assert got.status.status_code is StatusCode.UNSET
    assert dict(got.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 0.25,
    }
    assert got.resource.attributes["service.name"] == "tidegate"
    assert got.resource.attributes["service.version"] == "1.2.3"
    assert got.instrumentation_scope.schema_url == traces.SCHEMA_URL


def test_a_root_has_no_parent_and_an_error_has_its_type():
    (got,) = exported(span(error="UpstreamTimeout", outgoing=False))
    assert got.parent is None
    assert got.status.status_code is StatusCode.ERROR
    assert got.attributes["error.type"] == "UpstreamTimeout"
    assert got.kind is SpanKind.SERVER


def test_an_unsampled_span_is_not_exported():
    assert exported(span(context=parse_traceparent(GOOD[:-1] + b"0"))) == ()


def test_a_tracestate_travels_with_the_span():
    (got,) = exported(span(context=parse_traceparent(GOOD, b"vendor=x,other=y")))
    assert got.context.trace_state.to_header() == "vendor=x,other=y"


def test_a_name_that_is_none_of_ours_is_refused():
    with pytest.raises(ValueError, match=r"gen_ai\.prompt"):
        attributes_of(span(attributes={"gen_ai.prompt": "secret plans"}))


def test_attributes_are_bounded():
    made = attributes_of(
        span(attributes={traces.AGENT_ID: "a" * 999, traces.FINISH_REASONS: ["stop"] * 99})
    )
    assert len(made[traces.AGENT_ID]) == 256
    assert len(made[traces.FINISH_REASONS]) == 16


def test_the_names_are_those_of_the_pinned_conventions():
    assert set(traces.MODEL_NAMES) == {
        "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model",
        "gen_ai.request.max_tokens", "gen_ai.request.stream", "gen_ai.response.id",
        "gen_ai.response.model", "gen_ai.response.finish_reasons",
        "gen_ai.response.time_to_first_chunk", "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.reasoning.output_tokens",
        "gen_ai.conversation.id", "gen_ai.agent.id", "error.type", "tidegate.call.id",
        "tidegate.tier", "tidegate.queue.seconds", "tidegate.tokens.reserved",
        "tidegate.downgrade.reason", "tidegate.rule",
    }  # fmt: skip


def test_without_an_endpoint_nothing_is_kept():
    spans = open_spans("", version="1")
    assert isinstance(spans, NoSpans)
    spans.ended(span())
    spans.close()


def test_an_endpoint_without_the_extra_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"opentelemetry.*install tidegate\[otel\]"):
        open_spans("http://127.0.0.1:1/v1/traces", version="1")
