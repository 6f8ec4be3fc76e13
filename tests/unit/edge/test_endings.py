"""How exchanges end: well, cut, stalled, abandoned, drained; and that nothing is left of them."""

from __future__ import annotations

import asyncio

import pytest

from gateway.call import End
from gateway.errors import MalformedCall, QueueFull, StreamCut, UpstreamTimeout
from gateway.snapshot import Deployment, EdgeRules, Provider, Snapshot, Tier
from tests.fixtures.asgi import (
    CHAT,
    CHAT_STREAM,
    MESSAGES_STREAM,
    RESPONSES_STREAM,
    Stage,
)
from tests.fixtures.fake_service import CUT, JSON, SSE, STALLED, Answer, FakeService
from tests.sim.loop import run

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def play(script, *answers, **rules):
    """Run a script on a stage; fails unless everything is given back at its end."""
    service = FakeService(*answers)

    async def main():
        async with Stage(service, **rules) as stage:
            await script(stage)
            await stage.nothing_left()

    run(main())
    return service


# --- broken upstreams ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "end"),
    [
        (CUT, End.CUT),
        (STALLED, End.STALLED),
        (StreamCut("x"), End.CUT),
        (UpstreamTimeout("x"), End.STALLED),
    ],
)
def test_a_stream_that_breaks_off_gets_an_error_event_and_an_unfinished_connection(fault, end):
    async def script(stage):
        one = await stage.ask(body=CHAT_STREAM)
        assert one.broken
        assert one.aborted
        assert one.body.startswith(EVENT + b'data: {"error":')
        assert one.body.endswith(b"}\n\n")

    service = play(script, Answer(headers=list(SSE), body=[EVENT, fault]))
    assert service.ends == [end]
    assert service.replies[0][1].closed == [False]


def test_a_cut_inside_a_line_is_not_completed_by_an_error_event():
    async def script(stage):
        one = await stage.ask(body=CHAT_STREAM)
        assert one.broken
        assert one.body == EVENT + b'data: {"id":'

    play(script, Answer(headers=list(SSE), body=[EVENT, b'data: {"id":', CUT]))


def test_a_cut_after_a_line_ends_the_pending_event_first():
    async def script(stage):
        one = await stage.ask(body=CHAT_STREAM)
        assert one.broken
        assert one.body.startswith(b': c\n\ndata: {"error"')

    play(script, Answer(headers=list(SSE), body=[b": c\n", CUT]))


def test_a_cut_after_the_terminal_mark_is_a_good_end():
    async def script(stage):
        one = await stage.ask(body=CHAT_STREAM)
        assert one.complete
        assert one.body == EVENT + DONE

    service = play(script, Answer(headers=list(SSE), body=[EVENT, DONE, CUT], terminal=True))
    assert service.ends == [End.COMPLETE]


def test_a_clean_end_without_terminal_mark_is_broken_by_the_finishing_hook():
    seen = []

    def finishing(end):
        seen.append(end)
        return b'data: {"error":{"message":"no end mark"}}\n\n'

    async def script(stage):
        one = await stage.ask(body=CHAT_STREAM)
        assert one.broken
        assert one.body.endswith(b'{"message":"no end mark"}}\n\n')
        assert one.body.count(b"error") == 1

    service = play(script, Answer(headers=list(SSE), body=[EVENT], finishing=finishing))
    assert seen == [End.COMPLETE]
    assert service.ends == [End.CUT]


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/messages", MESSAGES_STREAM, b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", RESPONSES_STREAM, b"event: response.failed\n"),
    ],
)
def test_the_error_event_speaks_the_dialect(path, body, event):
    async def script(stage):
        one = await stage.ask(path=path, body=body)
        assert one.broken
        assert event in one.body

    play(script, Answer(headers=list(SSE), body=[b"event: ping\ndata: {}\n\n", CUT]))


def test_an_answer_shorter_than_declared_is_broken():
    async def script(stage):
        one = await stage.ask()
        assert one.broken
        assert one.body == b"abc"

    length = [*JSON, (b"content-length", b"5")]
    assert play(script, Answer(headers=length, body=[b"abc"])).ends == [End.CUT]
    assert play(script, Answer(headers=length, body=[b"abc", CUT])).ends == [End.CUT]


def test_an_answer_longer_than_declared_never_overflows_its_frame():
    async def script(stage):
        one = await stage.ask()
        assert one.broken
        assert one.body == b"abc"

    length = [*JSON, (b"content-length", b"4")]
    assert play(script, Answer(headers=length, body=[b"abc", b"def"])).ends == [End.CUT]


@pytest.mark.parametrize("value", [b"abc", b"-1", b"5, 6", b""])
def test_a_senseless_length_is_dropped(value):
    async def script(stage):
        one = await stage.ask()
        assert one.complete
        assert one.header(b"content-length") is None

    play(script, Answer(headers=[*JSON, (b"content-length", value)]))


@pytest.mark.parametrize("status", [100, 101, 199, 600, 999, 0])
def test_a_status_that_is_none_is_a_502(status):
    async def script(stage):
        assert (await stage.ask()).status == 502

    assert play(script, Answer(status=status)).ends == [End.FAILED]


# --- the unexpected ------------------------------------------------------------------------------


def test_whatever_escapes_is_a_500_of_the_dialect_with_the_call_id():
    service = FakeService(Answer(error=ZeroDivisionError("secret prompt")))

    async def main():
        async with Stage(service) as stage:
            one = await stage.ask(path="/v1/messages", body=MESSAGES_STREAM)
            assert one.status == 500
            assert one.json["type"] == "error"
            assert service.calls[0].id in one.body.decode()
            assert b"secret" not in one.body
            assert [type(error) for error in stage.crashed] == [ZeroDivisionError]
            stage.crashed.clear()
            await stage.nothing_left()

    run(main())


@pytest.mark.parametrize("where", ["tap", "finishing", "source"])
def test_an_escape_after_the_head_breaks_the_answer_and_gives_everything_back(where):
    def fail(_value):
        raise ZeroDivisionError

    answer = Answer(headers=list(SSE), body=[EVENT])
    if where == "tap":
        answer.tap = fail
    elif where == "finishing":
        answer.finishing = fail
    else:
        answer.body.append(ZeroDivisionError())
    service = FakeService(answer)

    async def main():
        async with Stage(service) as stage:
            one = await stage.ask(body=CHAT_STREAM)
            assert one.broken
            assert b"failed inside" in one.body or where == "tap"
            assert [type(error) for error in stage.crashed] == [ZeroDivisionError]
            stage.crashed.clear()
            await stage.nothing_left()

    run(main())
    assert service.ends == [End.FAILED]


def test_a_refusal_of_the_pipeline_is_not_reported_twice():
    service = FakeService(Answer(error=QueueFull("full", retry_after=1_000_000)))

    async def main():
        async with Stage(service) as stage:
            await stage.ask()
            assert not stage.refused
            await stage.ask(body=b"{")
            assert [type(error) for error in stage.refused] == [MalformedCall]

    run(main())


# --- clients that leave --------------------------------------------------------------------------


def test_a_client_that_leaves_while_waiting_ends_its_call_at_once():
    async def script(stage):
        one = stage.request()
        await asyncio.sleep(1)
        one.leave()
        await one.done()
        assert asyncio.get_running_loop().time() < 1.1
        assert not one.status

    service = play(script, Answer(wait=500))
    assert service.cancelled == 1
    assert not service.replies


@pytest.mark.parametrize("reading", [True, False])
def test_a_client_that_leaves_while_streaming_has_its_permit_back_at_once(reading):
    async def script(stage):
        one = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(3.5)
        if not reading:
            one.stop_reading()
            await asyncio.sleep(3)
        _, _, ends = stage.service.replies[0]
        assert not ends
        one.leave()
        await asyncio.sleep(0.001)
        assert ends == [End.CLIENT_GONE]
        await one.done()

    service = play(script, Answer(headers=list(SSE), body=[EVENT, 1.0] * 100))
    assert service.ends == [End.CLIENT_GONE]
    assert service.replies[0][1].closed == [False]


def test_a_client_that_leaves_after_the_last_byte_ended_well():
    async def script(stage):
        one = await stage.ask()
        one.leave()

    assert play(script).ends == [End.COMPLETE]


def test_a_client_that_does_not_read_is_dropped():
    async def script(stage):
        one = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(0.5)
        one.stop_reading()
        await one.done()
        assert one.hard or not stage.link
        assert 60 <= asyncio.get_running_loop().time() <= 125

    service = play(script, Answer(headers=list(SSE), body=[EVENT, 1.0] * 1000))
    assert service.ends == [End.CLIENT_GONE]


def test_a_slow_reader_is_not_taken_for_a_stalled_one():
    async def script(stage):
        one = stage.request(body=CHAT_STREAM)
        for _ in range(20):
            one.stop_reading()
            await asyncio.sleep(40)
            one._reading.set()
            await asyncio.sleep(0)
        await one.done()
        assert one.complete

    assert play(script, Answer(headers=list(SSE), body=[EVENT] * 15)).ends == [End.COMPLETE]


def test_a_provider_that_is_to_be_heard_out_is():
    deployment = Deployment(
        id="d",
        provider=Provider(name="p", dialects=frozenset(), base_url="", on_disconnect="drain"),
    )

    async def choose(call):
        call.deployment = deployment

    async def script(stage):
        one = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(1)
        one.leave()
        await asyncio.sleep(0)
        assert not one.task.done()
        await one.done()

    service = play(
        script,
        Answer(headers=list(SSE), body=[EVENT, 3.0, EVENT], before=choose, marks_sent=True),
    )
    assert service.ends == [End.COMPLETE]
    assert len(service.tapped) == 2


def test_leaving_at_any_moment_closes_everything_exactly_once():
    moments = [0.05 * n for n in range(140)]

    async def script(stage):
        for moment in moments:
            one = stage.request(body=[CHAT_STREAM[:9], CHAT_STREAM[9:]])
            await asyncio.sleep(moment)
            one.leave()
            await one.done()

    service = play(script, Answer(wait=2, headers=list(SSE), body=[EVENT, 1.0] * 4))
    assert set(service.ends) == {End.CLIENT_GONE, End.COMPLETE}
    assert service.cancelled > 10


def test_many_clients_hang_up_together():
    async def script(stage):
        ones = [stage.request() for _ in range(300)]
        await asyncio.sleep(1)
        assert stage.edge.waiting == 300
        assert stage.edge.held == 300 * len(CHAT)
        for one in ones:
            one.leave()
        await asyncio.gather(*(one.done() for one in ones))

    assert play(script, Answer(wait=60)).cancelled == 300


def test_a_server_that_cancels_the_exchange_leaves_nothing_either():
    async def script(stage):
        for moment in (0.5, 3.0):
            one = stage.request(body=CHAT_STREAM)
            await asyncio.sleep(moment)
            one.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one.done()
            await asyncio.sleep(0.01)

    service = play(script, Answer(wait=2, headers=list(SSE), body=[EVENT, 9.0]))
    assert len(service.ends) == 1
    assert service.cancelled == 1


# --- waiting -------------------------------------------------------------------------------------


def test_a_plain_call_waits_in_silence_and_may_still_be_refused():
    async def script(stage):
        one = stage.request()
        await asyncio.sleep(99)
        assert not one.status
        assert (await one.done()).status == 429

    play(script, Answer(wait=100, error=QueueFull("full", retry_after=3_000_000)))


def test_a_stream_is_silent_for_twelve_seconds_so_that_a_real_status_stays_possible():
    async def script(stage):
        one = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(11.9)
        assert not one.status
        one = await one.done()
        assert one.status == 429

    play(script, Answer(wait=11.95, error=QueueFull("full", retry_after=3_000_000)))


def test_a_chat_stream_is_kept_alive_by_comments_and_then_relayed_untouched():
    async def script(stage):
        one = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(12.2)
        assert one.status == 200
        assert one.header(b"content-type") == b"text/event-stream; charset=utf-8"
        assert one.body == b": queued\n"
        await one.done()
        assert one.complete
        assert one.body == b": queued\n" * 3 + EVENT + DONE

    service = play(script, Answer(wait=40, headers=list(SSE), body=[EVENT, 30.0, DONE]))
    assert service.tapped == [EVENT, DONE]


def test_a_messages_stream_is_kept_alive_by_pings():
    async def script(stage):
        one = await stage.ask(path="/v1/messages", body=MESSAGES_STREAM)
        assert one.body == b'event: ping\ndata: {"type":"ping"}\n\n' + EVENT

    play(script, Answer(wait=15, headers=list(SSE), body=[EVENT]))


def test_a_responses_stream_of_an_sdk_is_kept_alive_by_comments_and_then_relayed_untouched():
    # openai-py holds every later event to the id of the response that was opened first.
    created = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'

    async def script(stage):
        one = await stage.ask(path="/v1/responses", body=RESPONSES_STREAM)
        assert one.body == b": queued\n" * 2 + created

    play(script, Answer(wait=30, headers=list(SSE), body=[created]))


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_a_responses_stream_of_codex_has_one_response_created(cut):
    created = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
    delta = b'event: response.output_text.delta\ndata: {"type":"x","delta":"ok"}\n\n'
    whole = b": hi\n\n" + created + delta
    parts = [whole[i : i + cut] for i in range(0, len(whole), cut)]

    async def script(stage):
        codex = [(b"originator", b"codex_exec")]
        one = await stage.ask(path="/v1/responses", headers=codex, body=RESPONSES_STREAM)
        assert one.complete
        assert one.body.count(b"event: response.created") == 1
        assert one.body.index(b"response.created") < one.body.index(b"event: keepalive")
        assert one.body.endswith(delta)
        assert b": hi\n\n" in one.body

    service = play(script, Answer(wait=30, headers=list(SSE), body=list(parts)))
    assert b"".join(service.tapped) == whole


def test_the_tier_decides_when_keep_alive_begins():
    tier = Tier(name="t", number=1, keepalive_after=1_000_000, keepalive_every=1_000_000)
    snapshot = Snapshot(
        revision=1, digest="d", tiers=(tier, Tier(name="s", number=2), Tier(name="b", number=3))
    )

    async def choose(call):
        await asyncio.sleep(0.5)
        call.tier = tier

    service = FakeService(Answer(before=choose, wait=3, headers=list(SSE), body=[EVENT]))

    async def main():
        async with Stage(service, snapshot=snapshot) as stage:
            one = await stage.ask(body=CHAT_STREAM)
            assert one.body.count(b": queued\n") == 3
            assert one.body.endswith(EVENT)

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", CHAT_STREAM, b'data: {"error":'),
        ("/v1/messages", MESSAGES_STREAM, b'event: error\ndata: {"type":"error"'),
        ("/v1/responses", RESPONSES_STREAM, b"event: response.failed\n"),
    ],
)
def test_after_keep_alive_a_refusal_is_an_event(path, body, said):
    async def script(stage):
        one = await stage.ask(path=path, body=body)
        assert one.status == 200
        assert one.complete
        assert said in one.body
        assert b"full" in one.body

    play(script, Answer(wait=20, error=QueueFull("full", retry_after=3_000_000)))


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (Answer(status=503, body=[b'{"error":{"message":"too busy"}}']), b"too busy"),
        (Answer(status=503, body=[b"<html>so", b"rry</html>", CUT]), b"sorry"),
        (Answer(body=[b'{"choices":[]}']), b"did not answer with the stream"),
        (
            Answer(headers=[*SSE, (b"content-encoding", b"gzip")], body=[b"\x1f\x8b"]),
            b"did not answer with the stream",
        ),
    ],
)
def test_after_keep_alive_an_answer_that_is_no_stream_is_an_event(answer, word):
    answer.wait = 20

    async def script(stage):
        one = await stage.ask(body=CHAT_STREAM)
        assert one.complete
        assert word in one.body
        assert b'data: {"error":' in one.body

    assert play(script, answer).ends == [End.COMPLETE]


def test_a_client_that_leaves_during_keep_alive_ends_its_call():
    async def script(stage):
        for blocked in (False, True):
            one = stage.request(body=CHAT_STREAM)
            await asyncio.sleep(13)
            if blocked:
                one.stop_reading()
                await asyncio.sleep(20)
            one.leave()
            await one.done()

    assert play(script, Answer(wait=500)).cancelled == 2


def test_a_client_that_reads_no_keep_alive_is_dropped():
    async def script(stage):
        one = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(13)
        one.stop_reading()
        await one.done()
        assert one.hard or not stage.link

    assert play(script, Answer(wait=1000)).cancelled == 1


def test_a_thousand_waiting_calls_arm_one_loop_timer():
    async def script(stage):
        ones = [stage.request(body=CHAT_STREAM) for _ in range(1000)]
        await asyncio.sleep(30)
        loop = asyncio.get_running_loop()
        armed = [timer for timer in loop._scheduled if not timer._cancelled]
        own = 1000 + 1  # the scripts' own sleeps
        assert len(armed) <= own + 2
        for one in ones:
            one.leave()
        await asyncio.gather(*(one.done() for one in ones))

    play(script, Answer(wait=100))


# --- stopping ------------------------------------------------------------------------------------


def test_a_stopping_process_refuses_new_calls_and_finishes_streams():
    async def script(stage):
        streaming = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(0.5)
        drain = asyncio.create_task(stage.edge.drain(30_000_000))
        await asyncio.sleep(0.1)
        late = await stage.ask()
        assert late.status == 503
        assert late.header(b"retry-after") == b"1"
        assert late.header(b"connection") == b"close"
        assert await drain == 0
        assert streaming.complete

    assert play(script, Answer(headers=list(SSE), body=[EVENT, 8.0, DONE])).ends == [End.COMPLETE]


def test_waiting_calls_get_a_soft_refusal_within_five_seconds():
    async def script(stage):
        plain = stage.request()
        kept = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(13)
        began = asyncio.get_running_loop().time()
        assert await stage.edge.drain(30_000_000) == 0
        assert asyncio.get_running_loop().time() - began < 5
        assert plain.status == 503
        assert plain.header(b"retry-after") == b"1"
        assert kept.complete
        assert b"stopping" in kept.body

    assert play(script, Answer(wait=500)).cancelled == 2


def test_a_call_that_went_upstream_is_not_refused_as_waiting():
    async def script(stage):
        one = stage.request()
        await asyncio.sleep(1)
        assert await stage.edge.drain(30_000_000) == 0
        assert one.status == 200

    play(script, Answer(wait=15, marks_sent=True))


def test_at_the_limit_the_rest_is_cut_visibly():
    async def script(stage):
        stream = stage.request(body=CHAT_STREAM)
        deaf = stage.request(body=CHAT_STREAM)
        await asyncio.sleep(1)
        deaf.stop_reading()
        assert await stage.edge.drain(10_000_000) == 2
        assert stream.broken
        assert b"stopping" in stream.body
        await deaf.done()
        assert deaf.hard or not stage.link

    service = play(script, Answer(headers=list(SSE), body=[EVENT, 1.0] * 100))
    assert service.ends == [End.DRAINED, End.DRAINED]


def test_draining_an_idle_edge_takes_no_time():
    async def script(stage):
        assert await stage.edge.drain(30_000_000) == 0
        assert asyncio.get_running_loop().time() == 0

    play(script)


def test_the_policy_of_the_moment_is_pinned():
    service = FakeService(Answer(wait=5))

    async def main():
        async with Stage(service) as stage:
            one = stage.request()
            await asyncio.sleep(1)
            stage.snapshot = Snapshot(
                revision=2, digest="e", edge=EdgeRules(allowed_hosts=("new.example",))
            )
            new = [(b"host", b"new.example")]
            assert (await stage.ask(headers=new)).status == 200
            stage.snapshot = Snapshot(revision=3, digest="f")
            assert (await stage.ask(headers=new)).status == 400
            await one.done()

    run(main())
    assert [call.snapshot.revision for call in service.calls] == [1, 2]
    assert CHAT
