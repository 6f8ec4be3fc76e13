"""Bytes in, a call out; a reply in, bytes out."""

from __future__ import annotations

import asyncio
import hashlib

from gateway.call import ClientKind, Dialect, End, Family
from tests.fixtures.asgi import CHAT, CHAT_STREAM, Stage
from tests.fixtures.fake_service import SSE, Answer, FakeService
from tests.sim.loop import run


def test_a_call_carries_what_the_client_sent():
    service = FakeService()

    async def main():
        async with Stage(service) as stage:
            one = await stage.ask(
                path="/v1/chat/completions?beta=true",
                headers=[
                    (b"host", b"localhost"),
                    (b"x-stainless-lang", b"python"),
                    (b"cookie", b"a=1"),
                    (b"cookie", b"b=2"),
                    (b"authorization", b"Bearer k"),
                ],
            )
            assert one.status == 200
            assert one.body == b"{}"
            await stage.nothing_left()

    run(main())
    (call,) = service.calls
    assert call.dialect is Dialect.CHAT
    assert call.family is Family.OPENAI
    assert call.target == b"/v1/chat/completions?beta=true"
    assert call.body == CHAT
    assert call.parsed == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert call.fields is not None
    assert call.fields.model == "m"
    assert [value for name, value in call.headers if name == b"cookie"] == [b"a=1", b"b=2"]
    assert call.header(b"authorization") == b"Bearer k"
    assert call.peer == "127.0.0.1"
    assert service.ends == [End.COMPLETE]


def test_every_answer_names_its_call():
    service = FakeService()

    async def main():
        async with Stage(service) as stage:
            good = await stage.ask()
            bad = await stage.ask(path="/nowhere")
            assert good.header(b"tidegate-call-id") == service.calls[0].id.encode()
            assert good.header(b"x-request-id") == service.calls[0].id.encode()
            assert bad.status == 404
            assert bad.header(b"tidegate-call-id") != good.header(b"tidegate-call-id")

    run(main())


def test_bytes_pass_untouched_in_both_directions_whatever_the_chunks():
    sent = bytes(range(256)) * 9
    events = [b'data: {"a":"\xe5', b"\x8c", b'\x97"}\r', b"\n\r\n: c\n", b"data: [DONE]\n\n"]
    service = FakeService(Answer(headers=list(SSE), body=list(events)))
    body = b'{"model":"m", "x": "\\ud83d", "messages":[{"role":"user","content":"\xc3\xa9"}]}'

    async def main():
        async with Stage(service) as stage:
            one = await stage.ask(body=[body[i : i + 1] for i in range(len(body))])
            assert hashlib.sha256(one.body).digest() == hashlib.sha256(b"".join(events)).digest()
            assert one.chunks[:-1] == events
            await stage.nothing_left()

    run(main())
    assert service.calls[0].body == body
    assert service.tapped == events
    assert service.calls[0].parsed["x"] == "\ufffd"
    assert sent


def test_upstream_headers_keep_their_multiplicity_and_lose_what_is_hop_by_hop():
    headers = [
        (b"content-type", b"application/json"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"connection", b"X-Internal, close"),
        (b"x-internal", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"proxy-authenticate", b"Basic"),
        (b"access-control-allow-origin", b"*"),
        (b"tidegate-tier", b"forged"),
        (b"date", b"Sun, 29 Nov 2026 16:00:00 GMT"),
        (b"x-request-id", b"up-1"),
        (b"x-bad", b"a\x00b"),
        (b"x-spaced", b" v "),
        (b"content-length", b"2"),
    ]
    service = FakeService(Answer(headers=headers))

    async def main():
        async with Stage(service) as stage:
            one = await stage.ask()
            assert [v for n, v in one.headers if n == b"set-cookie"] == [b"a=1", b"b=2"]
            names = {name for name, _ in one.headers}
            assert not names & {
                b"connection", b"x-internal", b"keep-alive", b"proxy-authenticate",
                b"access-control-allow-origin", b"tidegate-tier", b"x-bad", b"date",
            }  # fmt: skip
            assert one.header(b"x-request-id") == b"up-1"
            assert one.header(b"x-spaced") == b"v"
            assert one.header(b"content-length") == b"2"

    run(main())


def test_what_layers_write_is_on_the_answer_and_on_the_refusal():
    from gateway.errors import QueueFull

    async def mark(call):
        call.extra_headers.append((b"tidegate-tier", b"2"))

    service = FakeService(
        Answer(before=mark), Answer(before=mark, error=QueueFull("full", retry_after=2_000_000))
    )

    async def main():
        async with Stage(service) as stage:
            good = await stage.ask()
            bad = await stage.ask()
            assert good.header(b"tidegate-tier") == b"2"
            assert bad.header(b"tidegate-tier") == b"2"
            assert bad.status == 429
            assert bad.header(b"retry-after") == b"2"
            assert bad.json["error"]["code"] == "rate_limit_exceeded"

    run(main())


def test_the_path_chooses_the_dialect_and_headers_the_client():
    service = FakeService()
    message = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}]}'
    cases = [
        ("/v1/chat/completions", CHAT, Dialect.CHAT, Family.OPENAI),
        ("/v1/completions", b'{"model":"m","prompt":"x"}', Dialect.COMPLETIONS, Family.OPENAI),
        ("/v1/responses", b'{"model":"m","input":"x"}', Dialect.RESPONSES, Family.OPENAI),
        ("/v1/embeddings", b'{"model":"m","input":[[1,2]]}', Dialect.EMBEDDINGS, Family.OPENAI),
        ("/v1/messages", message, Dialect.MESSAGES, Family.ANTHROPIC),
        ("/v1/messages/count_tokens", message, Dialect.COUNT_TOKENS, Family.ANTHROPIC),
    ]
    clients = [
        ([(b"originator", b"codex_exec")], ClientKind.CODEX),
        ([(b"x-codex-turn-metadata", b"{}")], ClientKind.CODEX),
        ([(b"x-claude-code-session-id", b"s")], ClientKind.CLAUDE_CODE),
        ([(b"originator", b"vim")], ClientKind.SDK),
    ]

    async def main():
        async with Stage(service) as stage:
            for path, body, *_ in cases:
                assert (await stage.ask(path=path, body=body)).status == 200, path
            for headers, _ in clients:
                await stage.ask(headers=headers)

    run(main())
    for call, (_, _, dialect, family) in zip(service.calls, cases, strict=False):
        assert (call.dialect, call.family) == (dialect, family)
    seen = [call.client for call in service.calls[len(cases) :]]
    assert seen == [kind for _, kind in clients]


def test_models_are_asked_of_the_pipeline_in_the_callers_family():
    service = FakeService()

    async def main():
        async with Stage(service) as stage:
            await stage.ask("GET", "/v1/models", body=[])
            await stage.ask("GET", "/v1/models/org/m-1", [(b"anthropic-version", b"x")], body=[])
            head = await stage.ask("HEAD", "/v1/models", body=[])
            assert head.status == 200
            assert head.body == b""

    run(main())
    assert [call.family for call in service.calls] == [
        Family.OPENAI, Family.ANTHROPIC, Family.OPENAI,
    ]  # fmt: skip
    assert all(call.dialect is Dialect.MODELS for call in service.calls)


def test_an_answer_without_body_has_none():
    service = FakeService(
        Answer(status=204, headers=[(b"content-length", b"5")], body=[b"wrong"]),
    )

    async def main():
        async with Stage(service) as stage:
            one = await stage.ask()
            assert (one.status, one.body, one.complete) == (204, b"", True)
            assert one.header(b"content-length") is None

    run(main())
    assert service.ends == [End.COMPLETE]


def test_a_stream_asks_for_nothing_until_the_client_has_read():
    service = FakeService(Answer(headers=list(SSE), body=[b"x" * 1000] * 50))

    async def main():
        async with Stage(service) as stage:
            one = stage.request(body=CHAT_STREAM)
            one.stop_reading()
            await asyncio.sleep(1)
            _, source, _ = service.replies[0]
            assert source.read <= len(one.chunks) + 1
            one._reading.set()
            await one.done()
            assert len(one.body) == 50_000

    run(main())
