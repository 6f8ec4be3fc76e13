"""Usage beside the stream; charge or refund exactly once (`protocols.md` §2.2, `admission.md` §10).

Inside admit: the cost is known before the permit goes. Reported usage counts, field by field; where
a field is missing the prompt's estimate or what streamed stands in, and the settlement says so. A
reported zero is zero. Leaving just before the usage event is not free. The tap parses a copy, per
event and never per network chunk; the client's bytes are untouched, but for the usage-only chunk
that we asked for in its stead.
"""

from __future__ import annotations

from asyncio import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from gateway.bodies import Unpacking, read_answer
from gateway.call import COMPLETE, Call, Dialect, End, Estimate, Kind, Reply, Service, Usage
from gateway.errors import GatewayError, StreamCut, UpstreamTimeout
from gateway.inflating import Inflating
from gateway.snapshot import Price
from gateway.wire import headers as wire_headers
from gateway.wire import refusals
from gateway.wire.codec import CODECS
from gateway.wire.openai_chat import WithoutUsage
from gateway.wire.sse import Events, frame
from gateway.wire.stream import Tap
from gateway.wire.upstream_refusals import classify, said_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.wire.stream import Failure, Reader

MAX_ANSWER = 8 * 1024 * 1024
"""Bytes of a plain answer kept for reading its usage; beyond it the estimate stands."""
BYTES_PER_TOKEN = 4
EMBEDDINGS, RESPONSES = Dialect.EMBEDDINGS, Dialect.RESPONSES


def completed(reported: Usage | None, estimate: Estimate, streamed: int, price: Price) -> Usage:
    """The usage to settle by: as reported, else the prompt's estimate and what streamed."""
    if reported is None:
        usage = Usage(input=estimate.input, output=streamed, estimated=True)
    elif reported.input is None or reported.output is None:
        usage = Usage(
            input=estimate.input if reported.input is None else reported.input,
            output=streamed if reported.output is None else reported.output,
            cache_read=reported.cache_read,
            cache_write=reported.cache_write,
            reasoning=reported.reasoning,
            estimated=True,
        )
    else:
        usage = reported
    money = price.of(usage)
    return usage if money == usage.money else replace(usage, money=money)


class PlainTap:
    """Keeps a copy of a plain answer, up to a bound, to read its usage at the end.

    Attributes:
        size: Bytes seen.
    """

    __slots__ = ("_kept", "size")

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self.size = 0

    def __call__(self, chunk: bytes) -> None:
        """Keep the chunk, or nothing once the answer is too large."""
        self.size += len(chunk)
        if self.size <= MAX_ANSWER:
            self._kept.append(chunk)
        else:
            self._kept.clear()

    def decoded(self, coding: str) -> dict[str, Any] | None:
        """The answer as an object; None where it is none, or too large to have been kept."""
        try:
            body = b"".join(self._kept)
            parsed = read_answer(unpacked(coding, body) if coding else body)
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None


def unpacked(coding: str, body: bytes) -> bytes:
    """The plain bytes of a copy; b"" where the label is false or the content too large."""
    if not coding:
        return body
    try:
        unpacking = Unpacking(body, coding, limit=MAX_ANSWER)
        unpacking.run_to_end()
    except GatewayError:
        return b""
    return unpacking.result()


class _Stream:
    """Reads one stream of a governed dialect."""

    __slots__ = ("call", "inflating", "reader", "reply", "settling", "size", "tap")

    def __init__(self, settling: Settling, call: Call, reply: Reply, reader: Reader) -> None:
        self.settling = settling
        self.call = call
        self.reply = reply
        self.reader = reader
        self.size = 0  # bytes of a compressed stream
        self.inflating: Inflating | None = None
        self.tap: Tap | None = Tap(Events(), reader, read_answer, self._marked)
        if coding := wire_headers.coding_of(reply.headers):
            # Compressed although we asked for identity: bytes pass with their label.
            self.inflating = Inflating(coding)
            reply.taps.append(self._unpack)
        else:
            reply.taps.append(self.tap)
            if call.usage_injected:
                reply.edit = WithoutUsage()  # the chunk that the client did not ask for
        reply.finishing.append(self.finishing)
        reply.on_close(self.closed)

    def _marked(self) -> None:
        self.reply.terminal = True

    def _unpack(self, chunk: bytes) -> None:
        """A tap of a compressed stream."""
        self.size += len(chunk)
        assert self.inflating is not None  # noqa: S101 - else this is no tap
        plain = self.inflating.feed(chunk)
        if plain and self.tap is not None:
            self.tap(plain)

    @property
    def _unreadable(self) -> bool:
        return self.inflating is not None and not self.inflating.readable

    def finishing(self, end: End) -> bytes:
        """A final error event where the stream ended without its mark; b"" where all is well."""
        if end is End.COMPLETE and self.tap is not None:
            self.tap.finish()
        reader = self.reader
        if reader.terminal or reader.failure is not None or self._unreadable:
            return b""
        call = self.call
        if end is not End.COMPLETE and call.dialect is not Dialect.RESPONSES:
            return b""  # the outlet has its own words
        # Responses: only here is known which response failed, and SDKs hold events to its id.
        error = _BROKEN.get(end, StreamCut)(_WHY.get(end, _UNMARKED))
        name, body = refusals.in_band(
            error,
            dialect=call.dialect,
            request_id=call.id,
            response_id=reader.response_id,
            model=reader.model,
            sequence=reader.events,
            now=call.first_byte,
        )
        return frame(orjson.dumps(body), name)

    def closed(self, end: End) -> None:
        """Settle: usage, end and, for an error inside the stream, its kind."""
        reader, call, reply = self.reader, self.call, self.reply
        if self.tap is not None:  # it knows the reply: a cycle would wait for the collector
            reply.taps.remove(self.tap if self.inflating is None else self._unpack)
            self.tap = None
        failure: Failure | None = reader.failure
        if failure is not None:
            _judge(reply, failure)
        if reader.terminal and failure is None and end is not End.COMPLETE:
            end = End.COMPLETE
        self.settling.answered(call, reader.response_id)
        if reader.malformed and self.settling.on_malformed is not None:
            self.settling.on_malformed(call.dialect.value, reader.malformed)
        reported, streamed = reader.usage, reader.streamed
        if self._unreadable:
            streamed = max(streamed, self.size // BYTES_PER_TOKEN)
        if not reader.terminal and reported is not None and (reported.output or 0) < streamed:
            reported = Usage(
                input=reported.input,
                output=streamed,
                cache_read=reported.cache_read,
                cache_write=reported.cache_write,
                reasoning=reported.reasoning,
                estimated=True,
            )
        self.settling.record(call, reported, streamed, end)


class Settling:
    """The layer.

    Attributes:
        learn: Called with the call and its reported usage, to teach the estimators.
        on_malformed: Called with dialect and number of malformed events.
        on_response: Called with a call and the id of the response that its provider made.
    """

    __slots__ = ("learn", "on_malformed", "on_response")

    def __init__(
        self,
        *,
        learn: Callable[[Call, Usage], None] | None = None,
        on_malformed: Callable[[str, int], None] | None = None,
        on_response: Callable[[Call, str], None] | None = None,
    ) -> None:
        self.learn = learn
        self.on_malformed = on_malformed
        self.on_response = on_response

    def __call__(self, inner: Service) -> Service:
        """The service with its settlement."""

        async def serve(call: Call) -> Reply:
            call.usage = None
            try:
                reply = await inner(call)
            except CancelledError:
                if call.sent:  # its client left before a byte came: the prompt was spent
                    self.record(call, None, 0, End.CLIENT_GONE)
                raise
            codec = CODECS.get(call.dialect)
            if reply.kind is not None:
                reply.on_close(lambda end: self._refused(call, reply, end))
            elif codec is None:
                reply.on_close(lambda end: self.record(call, _read_by_model(call), 0, end))
            elif codec.reader is not None and wire_headers.is_event_stream(reply.headers):
                _Stream(self, call, reply, codec.reader())
            else:
                self._plain(call, reply)
            return reply

        return serve

    def _plain(self, call: Call, reply: Reply) -> None:
        tap = PlainTap()
        reply.taps.append(tap)
        codec = CODECS[call.dialect]

        embeds = call.dialect is EMBEDDINGS  # its numbers are no tokens
        responds = call.dialect is RESPONSES

        def closed(end: End) -> None:
            body = tap.decoded(wire_headers.coding_of(reply.headers))
            reported = codec.usage_of(body) if body is not None else None
            if body is not None and responds:
                self.answered(call, body.get("id"))
            if reported is not None and embeds:
                reported = completed(reported, _NO_OUTPUT, 0, _FREE)
            failure = codec.error_of(body) if body is not None else None
            if failure is not None:  # a 200 that says it failed is no success
                _judge(reply, failure)
                reported = reported or Usage(input=0, output=0)
            if end is not COMPLETE and body is not None and end is End.CLIENT_GONE:
                end = End.COMPLETE  # the whole answer had arrived
                reply.terminal = True
            estimate = call.estimate
            output = 0 if embeds else tap.size // BYTES_PER_TOKEN
            if body is None and tap.size > MAX_ANSWER and estimate is not None:
                output = estimate.output
            self.record(call, reported, output, end)

        reply.on_close(closed)

    def answered(self, call: Call, response: object) -> None:
        """A provider made that response: whoever asks for it, or goes on from it, goes there."""
        known = call.dialect is RESPONSES and self.on_response is not None
        if known and isinstance(response, str) and response and call.deployment is not None:
            assert self.on_response is not None  # noqa: S101 - looked at above
            self.on_response(call, response)

    def _refused(self, call: Call, reply: Reply, end: End) -> None:
        """A bad answer cost no tokens, unless it was an error after a stream had begun."""
        call.usage = Usage(input=0, output=0)
        call.end = end if reply.kind is Kind.CALLER else End.FAILED

    def record(self, call: Call, reported: Usage | None, streamed: int, end: End) -> None:
        """Write the settlement into the call and teach the estimators."""
        estimate, deployment = call.estimate, call.deployment
        if estimate is None or deployment is None:
            return
        call.usage = completed(reported, estimate, streamed, deployment.price)
        call.end = end
        if self.learn is not None and reported is not None and not call.usage.estimated:
            self.learn(call, call.usage)


def _judge(reply: Reply, failure: Failure) -> None:
    """An answer that began well has turned out to be an error: its kind, for the layers outside."""
    if reply.kind is None:
        reply.kind = classify(failure.status or 500, said_by(failure))
        reply.code = failure.code or failure.type


def _read_by_model(call: Call) -> Usage:
    """What an answer without a meter cost: a tool's result is what a model will read of it."""
    return Usage(input=0, output=call.tool.result_tokens if call.tool is not None else 0)


_UNMARKED = "The upstream's stream ended without its terminal mark."
_WHY = {
    End.CUT: "The upstream broke the answer off before its end.",
    End.STALLED: "The upstream sent nothing more in time.",
}
_BROKEN: dict[End, type[GatewayError]] = {End.STALLED: UpstreamTimeout}
_NO_OUTPUT = Estimate(input=0, output=0)
_FREE = Price()
