from __future__ import annotations

import zlib

import brotli
import orjson
import pytest
import zstandard

from gateway.call import Dialect, End, Estimate, Kind, Usage
from gateway.layers.settle import MAX_ANSWER, PlainTap, Settling, completed
from gateway.snapshot import Price
from tests.sim.loop import run
from tests.unit.layers.ground import Pieces, answering, deployment, made, read, reply

SSE = [(b"content-type", b"text/event-stream")]
PRICE = Price(input=2_000_000, output=10_000_000)
ESTIMATE = Estimate(input=100, output=50)


def event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def delta(text: str) -> bytes:
    return event({"id": "x", "choices": [{"index": 0, "delta": {"content": text}}]})


STOP = event({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
USAGE = event({"id": "x", "choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 7}})
DONE = b"data: [DONE]\n\n"


def compressed(coding: str, *pieces: bytes) -> list[bytes]:
    """Each piece as a server sends it that flushes behind every event."""
    if coding == "br":
        brotli_ = brotli.Compressor()
        return [brotli_.process(piece) + brotli_.flush() for piece in pieces]
    if coding == "zstd":
        zstd = zstandard.ZstdCompressor().compressobj()
        block = zstandard.COMPRESSOBJ_FLUSH_BLOCK
        return [zstd.compress(piece) + zstd.flush(block) for piece in pieces]
    flate = zlib.compressobj(wbits=31 if coding == "gzip" else -15)
    return [flate.compress(piece) + flate.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]


async def settled(answer, *, end=End.COMPLETE, call=None, learned=None, finish=True):
    """The call after its answer was read and closed, and what the client got."""
    call = call or made()
    settling = Settling(
        learn=lambda _call, usage: learned.append(usage) if learned is not None else 0
    )
    final = await settling(answering(answer))(call)
    body = await read(final)
    if finish:
        body += b"".join(step(end) for step in final.finishing)
    await final.close(end)
    return call, body


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        (Usage(input=10, output=4), (10, 4, False)),
        (Usage(input=0, output=0), (0, 0, False)),  # a reported zero is zero
        (Usage(input=None, output=4), (100, 4, True)),
        (Usage(input=10, output=None), (10, 9, True)),
        (None, (100, 9, True)),
    ],
)
def test_what_is_not_reported_is_estimated_field_by_field(reported, usage):
    found = completed(reported, ESTIMATE, 9, PRICE)
    assert (found.input, found.output, found.estimated) == usage
    assert found.money == 2 * usage[0] + 10 * usage[1]


def test_a_plain_answer_is_settled_by_its_own_usage_and_teaches():
    async def main():
        body = b'{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":7}}'
        learned: list[Usage] = []
        call, seen = await settled(reply(body=body), learned=learned)
        assert seen == body
        assert (call.usage.input, call.usage.output, call.usage.estimated) == (40, 7, False)
        assert [usage.output for usage in learned] == [7]
        assert call.end is End.COMPLETE

    run(main())


@pytest.mark.parametrize("body", [b"not json", b"[]", b'{"usage":null}', b'{"usage":"much"}'])
def test_an_answer_without_readable_usage_is_estimated_and_teaches_nothing(body):
    async def main():
        learned: list[Usage] = []
        call, _ = await settled(reply(body=body), learned=learned)
        assert call.usage.estimated
        assert call.usage.input == 100
        assert not learned

    run(main())


def test_a_stream_is_settled_by_its_last_usage_whatever_the_pieces():
    async def main():
        whole = delta("a") + delta("b") + STOP + USAGE + DONE
        for size in (1, 7, 100, len(whole)):
            pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
            answer = reply(headers=SSE)
            answer.source = Pieces(*pieces)
            call, seen = await settled(answer, call=made({"stream": True}))
            assert seen == whole
            assert (call.usage.input, call.usage.output) == (40, 7)
            assert not call.usage.estimated

    run(main())


def test_usage_that_we_asked_for_in_its_stead_never_reaches_the_client():
    async def main():
        answer = reply(headers=SSE)
        answer.source = Pieces(delta("a"), STOP + USAGE, DONE)
        call = made({"stream": True})
        call.usage_injected = True
        call, seen = await settled(answer, call=call)
        assert b'"usage"' not in seen
        assert seen.endswith(DONE)
        assert call.usage.output == 7

    run(main())


def test_leaving_just_before_the_usage_is_not_free():
    async def main():
        answer = reply(headers=SSE)
        answer.source = Pieces(*(delta("some words of it ") for _ in range(10)))
        call, _ = await settled(answer, end=End.CLIENT_GONE, call=made({"stream": True}))
        assert call.end is End.CLIENT_GONE
        assert call.usage.estimated
        assert call.usage.input == 100
        assert call.usage.output > 5

    run(main())


def test_a_socket_that_closes_after_the_end_was_seen_is_a_success():
    async def main():
        answer = reply(headers=SSE)
        answer.source = Pieces(delta("a"), STOP, USAGE, DONE)
        call, _ = await settled(answer, end=End.CLIENT_GONE, call=made({"stream": True}))
        assert call.end is End.COMPLETE
        assert not call.usage.estimated

    run(main())


def test_a_stream_that_ends_without_its_mark_gets_an_error_event():
    async def main():
        answer = reply(headers=SSE)
        answer.source = Pieces(delta("a"))
        call, seen = await settled(answer, call=made({"stream": True}))
        assert b'"error"' in seen[len(delta("a")) :]
        assert call.usage.estimated

    run(main())


def test_an_error_inside_a_stream_gives_the_reply_its_kind():
    async def main():
        answer = reply(headers=SSE)
        error = {"error": {"message": "overloaded", "type": "overloaded_error", "code": None}}
        answer.source = Pieces(delta("a"), event(error))
        await settled(answer, call=made({"stream": True}))
        assert answer.kind in (Kind.CAPACITY, Kind.FAULT)

    run(main())


@pytest.mark.parametrize(
    ("dialect", "body", "kind", "tokens"),
    [
        (Dialect.CHAT, {"error": {"message": "x", "code": 503}}, Kind.CAPACITY, (0, 0)),
        (Dialect.MESSAGES, {"type": "error", "error": {"type": "overloaded_error"}},
         Kind.CAPACITY, (0, 0)),
        (Dialect.RESPONSES, {"status": "failed", "usage": {"input_tokens": 5, "output_tokens": 2}},
         Kind.FAULT, (5, 2)),
    ],
)  # fmt: skip
def test_a_plain_answer_that_says_it_failed_is_no_success(dialect, body, kind, tokens):
    async def main():
        answer = reply(body=orjson.dumps(body))
        call, _ = await settled(answer, call=made({"input": "x"}, dialect=dialect))
        assert answer.kind is kind
        assert (call.usage.input, call.usage.output) == tokens

    run(main())


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_a_compressed_stream_that_breaks_off_costs_what_streamed(coding):
    async def main():
        answer = reply(headers=[*SSE, (b"content-encoding", coding.encode())])
        words = [delta("some words of it ") for _ in range(10)]
        answer.source = Pieces(*compressed(coding, *words))
        call, _ = await settled(answer, end=End.CUT, call=made({"stream": True}))
        assert call.end is End.CUT
        assert call.usage.estimated
        assert call.usage.output > 30
        assert answer.taps == []

    run(main())


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd"])
def test_a_compressed_stream_is_read_to_its_mark_and_broken_off_without_one(coding):
    async def main():
        for last, mark in ((DONE, True), (b"", False)):
            answer = reply(headers=[*SSE, (b"content-encoding", coding.encode())])
            sent = compressed(coding, delta("a"), *((STOP, USAGE, last) if mark else ()))
            answer.source = Pieces(*sent)
            call, seen = await settled(answer, call=made({"stream": True}))
            assert answer.terminal is mark
            assert seen.startswith(b"".join(sent))
            assert (len(seen) > len(b"".join(sent))) is not mark
            assert call.usage.estimated is not mark

    run(main())


@pytest.mark.parametrize("coding", ["gzip", "lzma"])
def test_a_stream_whose_label_cannot_be_read_is_charged_by_its_bytes(coding):
    async def main():
        answer = reply(headers=[*SSE, (b"content-encoding", coding.encode())])
        answer.source = Pieces(b"x" * 4_000)
        call, seen = await settled(answer, call=made({"stream": True}))
        assert seen == b"x" * 4_000  # nothing can be said of its end
        assert call.usage.output == 1_000

    run(main())


@pytest.mark.parametrize(
    "odd",
    [b'"x\\ud800"', b"NaN", b"-Infinity", b'"caf\xe9"'],
    ids=["surrogate", "nan", "inf", "latin"],
)
def test_what_strict_decoders_refuse_does_not_hide_the_usage_beside_it(odd):
    async def main():
        usage = b'{"odd":%b,"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":7}}' % odd
        for body, headers in ((usage, None), (STOP + b"data: " + usage + b"\n\n" + DONE, SSE)):
            call, _ = await settled(
                reply(body=body, headers=headers), call=made({"stream": headers is not None})
            )
            assert (call.usage.input, call.usage.output) == (40, 7)
            assert not call.usage.estimated

    run(main())


def test_a_refusal_costs_no_tokens():
    async def main():
        call, _ = await settled(reply(429, b'{"error":{}}', kind=Kind.QUOTA))
        assert (call.usage.input, call.usage.output, call.usage.money) == (0, 0, 0)
        assert call.end is End.FAILED

    run(main())


def test_embeddings_have_no_output():
    async def main():
        body = b'{"data":[],"usage":{"prompt_tokens":12,"total_tokens":12}}'
        call = made({"input": "x"}, dialect=Dialect.EMBEDDINGS)
        call, _ = await settled(reply(body=body), call=call)
        assert (call.usage.input, call.usage.output) == (12, 0)

    run(main())


def test_a_huge_answer_is_not_kept_and_its_estimate_stands():
    tap = PlainTap()
    tap(b"x" * MAX_ANSWER)
    tap(b"y")
    assert tap.decoded("") is None
    assert tap.size == MAX_ANSWER + 1


def test_each_kind_of_money_goes_into_the_price():
    async def main():
        body = b'{"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":7}}'
        call = made(rungs=(deployment(price=PRICE),))
        call, _ = await settled(reply(body=body), call=call)
        assert call.usage.money == 40 * 2 + 7 * 10

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_who_made_a_response_is_told(stream):
    async def main():
        told = []
        settling = Settling(
            on_response=lambda call, name: told.append((name, call.deployment.provider.name))
        )
        whole = {"id": "resp_1", "object": "response", "status": "completed", "output": []}
        body = orjson.dumps(whole)
        if stream:
            body = b"event: response.completed\n" + event(
                {"type": "response.completed", "sequence_number": 1, "response": whole}
            )
        answer = reply(body=body, headers=SSE if stream else None)
        final = await settling(answering(answer))(made({"input": "x"}, dialect=Dialect.RESPONSES))
        await read(final)
        await final.close(End.COMPLETE)
        return told

    assert run(main()) == [("resp_1", "up")]
