from __future__ import annotations

import asyncio
from random import Random

import orjson
import pytest

from gateway.call import Dialect, Kind
from gateway.errors import BreakerOpen, UpstreamMalformed, UpstreamTimeout, UpstreamUnreachable
from gateway.layers.dispatch import Credentials, Dispatch
from gateway.layers.settle import unpacked
from gateway.snapshot import Credential, Provider, Secret, Timeouts
from gateway.units import MICRO
from gateway.upstream import TransportFault
from tests.sim.loop import run
from tests.unit.layers.ground import Pieces, deployment, made, read, the_clock

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream")]


class Answer(Pieces):
    """An `Incoming` of these pieces."""

    whole = False

    def __init__(self, status: int, *pieces: bytes, headers=JSON) -> None:
        super().__init__(*pieces)
        self.status = status
        self.headers = list(headers)
        self.aborted: list[str] = []

    def at_once(self) -> bytes | None:
        return None

    def abort(self, kind: str) -> None:
        self.aborted.append(kind)


class FakeTransport:
    """Gives these in turn, the last for ever; keeps what was sent."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.sent = []

    async def send(self, out):
        self.sent.append(out)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, float):
            await asyncio.sleep(answer)  # longer than anybody waits
        if isinstance(answer, BaseException):
            raise answer
        return answer


def key(name: str, **more) -> Credential:
    return Credential(id=name, secret=Secret(f"secret-of-{name}"), **more)


def provider(*keys: Credential, **more) -> Provider:
    return Provider(
        name="up", dialects=frozenset({"openai"}), base_url="http://up.test",
        credentials=keys or (key("main"),), **more,
    )  # fmt: skip


def dispatch(*answers, **more) -> Dispatch:
    clock = the_clock()
    return Dispatch(
        FakeTransport(*answers), clock, Credentials(clock, Random(1)), decode=unpacked, **more
    )


def of(service: Dispatch) -> FakeTransport:
    return service._transport


def call_to(where: Provider, body=None, **more):
    rung = more.pop("rung", {})
    return made(body, rungs=(deployment(provider=where, **rung),), **more)


def test_the_callers_credential_ends_here_and_the_upstreams_own_is_set():
    async def main():
        service = dispatch(Answer(200, b"{}"))
        headers = [
            (b"authorization", b"Bearer tg_mine"), (b"x-api-key", b"mine"), (b"cookie", b"c=1"),
            (b"tidegate-tier", b"1"), (b"x-mine", b"kept"), (b"x-mine", b"twice"),
        ]  # fmt: skip
        await service(call_to(provider(), headers=headers))
        sent = of(service).sent[0].headers
        assert (b"authorization", b"Bearer secret-of-main") in sent
        assert [value for name, value in sent if name == b"x-mine"] == [b"kept", b"twice"]
        assert not any(b"mine" in value and name != b"x-mine" for name, value in sent)
        assert not any(name in (b"cookie", b"tidegate-tier") for name, _ in sent)

    run(main())


def test_an_unchanged_body_leaves_byte_for_byte():
    async def main():
        service = dispatch(Answer(200, b"{}"))
        call = call_to(provider())
        call.body = b'{ "model" : "m" , "messages":[ ] , "odd": 1.0e0 }'
        await service(call)
        assert of(service).sent[0].body is call.body

    run(main())


def test_only_the_model_and_the_usage_option_are_edited():
    async def main():
        service = dispatch(Answer(200, b"data: x\n\n", headers=SSE))
        call = call_to(provider(), {"stream": True}, rung={"upstream_model": "small"})
        await service(call)
        sent = orjson.loads(of(service).sent[0].body)
        assert sent.pop("model") == "small"
        assert sent.pop("stream_options") == {"include_usage": True}
        assert sent == {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        assert call.usage_injected

    run(main())


def test_a_client_that_says_whether_it_wants_usage_is_obeyed():
    async def main():
        service = dispatch(Answer(200, b"data: x\n\n", headers=SSE))
        options = {"stream": True, "stream_options": {"include_usage": False}}
        call = call_to(provider(), options)
        await service(call)
        assert of(service).sent[0].body == call.body
        assert not call.usage_injected

    run(main())


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, {"error": {"code": "rate_limit_exceeded", "type": "requests"}}, Kind.QUOTA),
        (429, {"error": {"code": "insufficient_quota"}}, Kind.MONEY),
        (529, {"type": "error", "error": {"type": "overloaded_error"}}, Kind.CAPACITY),
        (503, {"error": {"message": "unavailable"}}, Kind.CAPACITY),
        (500, {"error": {"message": "boom"}}, Kind.FAULT),
        (401, {"error": {"code": "invalid_api_key"}}, Kind.AUTH),
        (400, {"error": {"type": "invalid_request_error"}}, Kind.CALLER),
        (302, {}, Kind.FAULT),  # nothing was served: neither a success nor a charge
    ],
)
def test_a_bad_answer_is_named_and_still_there_to_be_relayed(status, body, kind):
    async def main():
        told = []
        raw = orjson.dumps(body)
        service = dispatch(
            Answer(status, raw[:5], raw[5:]), on_status=lambda *what: told.append(what)
        )
        answer = await service(call_to(provider()))
        assert (answer.status, answer.kind) == (status, kind)
        assert await read(answer) == raw
        assert told == [("up", status, kind)]

    run(main())


def test_a_refusal_inside_a_good_stream_is_heard_before_its_first_byte_leaves():
    async def main():
        error = b'data: {"error":{"message":"busy","type":"overloaded_error"}}\n\n'
        service = dispatch(Answer(200, error[:9], error[9:], headers=SSE))
        answer = await service(call_to(provider(), {"stream": True}))
        assert answer.kind is not None
        assert await read(answer) == error

    run(main())


def test_an_upstream_that_says_nothing_is_given_up_and_named():
    async def main():
        where = provider(timeouts=Timeouts(first_byte=3 * MICRO, total_plain=7 * MICRO))
        loop = asyncio.get_running_loop()
        for body, limit in (({"stream": True}, 3), ({}, 7)):
            began = loop.time()
            with pytest.raises(UpstreamTimeout, match=f"within {limit} s"):
                await dispatch(1e6)(call_to(where, body))
            assert limit <= loop.time() - began <= limit + 0.2

    run(main())


@pytest.mark.parametrize(
    ("fault", "error", "sent"),
    [
        (TransportFault("connect", sent="nothing"), UpstreamUnreachable, False),
        (TransportFault("connect_timeout", sent="nothing"), UpstreamTimeout, False),
        (TransportFault("reset", sent="unknown"), UpstreamUnreachable, True),
        (TransportFault("malformed", sent="all"), UpstreamMalformed, True),
    ],
)
def test_a_broken_exchange_says_whether_anything_may_have_arrived(fault, error, sent):
    async def main():
        call = call_to(provider())
        with pytest.raises(error):
            await dispatch(fault)(call)
        assert call.sent is sent

    run(main())


def test_a_client_that_leaves_before_the_head_breaks_the_connection():
    async def main():
        class Silent(Answer):
            async def chunks(self):
                await asyncio.sleep(1e6)
                yield b""

        answer = Silent(200, headers=SSE)
        task = asyncio.ensure_future(dispatch(answer)(call_to(provider(), {"stream": True})))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert answer.aborted
        assert answer.closed == [False]

    run(main())


def test_a_refused_credential_rests_and_another_serves():
    async def main():
        refused = orjson.dumps({"error": {"code": "invalid_api_key"}})
        service = dispatch(Answer(401, refused), Answer(200, b"{}"))
        where = provider(key("a"), key("b"))
        used = set()
        for _ in range(8):
            call = call_to(where)
            answer = await service(call)
            if answer.kind is None:
                used.add(call.credential)
            else:
                out = call.credential
        assert used == {"a", "b"} - {out}

    run(main())


def refusing(status: int, code: str, *, retry_after: bytes = b""):
    headers = [*JSON, (b"retry-after", retry_after)] if retry_after else JSON
    return Answer(status, orjson.dumps({"error": {"code": code}}), headers=headers)


def test_a_credential_without_money_is_looked_at_again_after_a_quarter_of_an_hour():
    async def main():
        where = provider(key("a", weight=1), key("b", weight=0))
        service = dispatch(refusing(429, "insufficient_quota"), Answer(200, b"{}"))
        used = []
        for wait in (0, 1, 898, 2):
            await asyncio.sleep(wait)
            call = call_to(where)
            await service(call)
            used.append(call.credential)
        return used

    assert run(main()) == ["a", "b", "b", "a"]


def test_where_every_credential_cools_the_caller_learns_when_the_first_is_back():
    async def main():
        where = provider(key("a", weight=1), key("b", weight=0))
        service = dispatch(
            refusing(429, "rate_limit_exceeded", retry_after=b"30"),
            refusing(429, "rate_limit_exceeded", retry_after=b"20"),
        )
        await service(call_to(where))
        await service(call_to(where))
        call = call_to(where)
        with pytest.raises(BreakerOpen) as refused:
            await service(call)
        assert not call.sent
        return refused.value

    refused = run(main())
    assert refused.code == "no_credential"
    assert refused.retry_after is not None
    assert 19 * MICRO < refused.retry_after <= 20 * MICRO


def test_where_every_credential_is_refused_coming_back_does_not_help():
    async def main():
        where = provider(key("a"), key("b"))
        service = dispatch(refusing(401, "invalid_api_key"))
        await service(call_to(where))
        await service(call_to(where))
        with pytest.raises(BreakerOpen) as refused:
            await service(call_to(where))
        return refused.value.retry_after

    assert run(main()) is None


def test_the_secret_never_comes_back_in_a_refusal():
    async def main():
        body = b'{"error":{"message":"Incorrect API key provided: secret-of-main"}}'
        headers = [*JSON, (b"content-length", b"%d" % len(body))]
        answer = await dispatch(Answer(401, body, headers=headers))(call_to(provider()))
        assert b"secret-of-main" not in await read(answer)

    run(main())


@pytest.mark.parametrize("status", [302, 401])
def test_the_secret_never_comes_back_in_the_headers_of_a_refusal(status):
    async def main():
        headers = [*JSON, (b"location", b"http://x/?key=secret-of-main"), (b"x-kept", b"1")]
        answer = await dispatch(Answer(status, b"{}", headers=headers))(call_to(provider()))
        assert (b"location", b"http://x/?key=***") in answer.headers
        assert (b"x-kept", b"1") in answer.headers

    run(main())


def test_passed_through_bytes_are_not_judged_by_what_they_say():
    async def main():
        body = b'data: {"error":{"message":"a tale of errors"}}\n\n'
        call = made(dialect=Dialect.PASSTHROUGH, rungs=(deployment(provider=provider()),))
        answer = await dispatch(Answer(200, body, headers=SSE))(call)
        assert answer.kind is None
        assert await read(answer) == body

    run(main())
