"""Every way in which a request is refused before the pipeline sees it."""

from __future__ import annotations

import gzip
import zlib

import brotli
import pytest
import zstandard

from gateway import intake
from gateway.call import End
from gateway.errors import MalformedCall, Unauthenticated
from gateway.snapshot import Provider, Snapshot
from tests.fixtures.asgi import CHAT, Stage
from tests.fixtures.fake_service import Answer, FakeService
from tests.sim.loop import run


def refused(*args, rules=None, snapshot=None, **kwargs):
    """The exchange of one request that must not reach the pipeline."""
    service = FakeService()

    async def main():
        async with Stage(service, snapshot=snapshot, **(rules or {})) as stage:
            one = await stage.ask(*args, **kwargs)
            assert one.complete
            await stage.nothing_left()
            return one

    one = run(main())
    assert not service.calls
    return one


H = b"host"
AMBIGUOUS = {
    "length and chunked": [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")],
    "gzip, chunked": [(b"transfer-encoding", b"gzip, chunked")],
    "chunked twice": [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")],
    "identity coding": [(b"transfer-encoding", b"identity")],
    "two hosts": [(H, b"localhost"), (H, b"localhost")],
    "no host": [(H, b"")],
    "two lengths": [(b"content-length", b"57"), (b"content-length", b"57")],
    "length with plus": [(b"content-length", b"+57")],
    "length of words": [(b"content-length", b"many")],
    "two credentials of one kind": [(b"authorization", b"a"), (b"authorization", b"a")],
    "two origins": [(b"origin", b"https://a"), (b"origin", b"https://a")],
    "two mcp names": [(b"mcp-name", b"a"), (b"mcp-name", b"b")],
    "two tiers": [(b"tidegate-tier", b"1"), (b"tidegate-tier", b"3")],
    "connection names a credential": [(b"connection", b"close, Authorization")],
    "unknown expectation": [(b"expect", b"200-maybe")],
    "too many headers": [(b"x-h%d" % n, b"v") for n in range(300)],
}


@pytest.mark.parametrize("headers", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_head_that_two_parsers_could_read_in_two_ways_is_refused(headers):
    one = refused(headers=headers)
    assert one.status == 400
    assert one.json["error"]["type"] == "invalid_request_error"
    assert one.header(b"connection") == b"close"


def test_a_refused_head_speaks_the_dialect_of_its_path():
    one = refused(path="/v1/messages", headers=[(H, b"localhost"), (H, b"localhost")])
    assert one.json["type"] == "error"


@pytest.mark.parametrize(
    "host",
    [b"localhost", b"LOCALHOST:9", b"127.0.0.1:8484", b"[::1]:8484", b"localhost.", b"127.0.0.1"],
)
def test_loopback_names_are_hosts_of_ours(host):
    service = FakeService()

    async def main():
        async with Stage(service) as stage:
            assert (await stage.ask(headers=[(H, host)])).status == 200

    run(main())


@pytest.mark.parametrize(
    "host",
    [b"127.0.0.1.evil.test", b"evil.test", b"user@localhost", b"localhost:99999", b"a b", b"\xff"],
)
def test_any_other_host_is_refused(host):
    one = refused(headers=[(H, host)])
    assert one.status == 400
    assert "allowed_hosts" in one.json["error"]["message"]


def test_hosts_come_from_policy_with_patterns_and_the_listeners_own_address():
    service = FakeService()

    async def main():
        async with Stage(service, allowed_hosts=("gw.example", "*.svc")) as stage:
            for host, status in [
                (b"gw.example:80", 200), (b"a.svc", 200), (b"localhost", 200), (b"svc", 400),
            ]:  # fmt: skip
                assert (await stage.ask(headers=[(H, host)])).status == status, host
        async with Stage(service) as stage:
            one = await stage.ask(headers=[(H, b"10.1.2.3:8484")], server=("10.1.2.3", 8484))
            assert one.status == 200
        async with Stage(service, allowed_hosts=("*",)) as stage:
            assert (await stage.ask(headers=[(H, b"whatever")])).status == 200

    run(main())


@pytest.mark.parametrize(
    "query", ["key=abc", "a=1&api_key=x", "%6bey=abc", "access_token=t", "x=sk-123", "KEY=v"]
)
def test_a_credential_in_the_query_is_refused_and_not_repeated(query):
    one = refused(path=f"/v1/chat/completions?{query}")
    assert one.status == 400
    assert one.json["error"]["code"] == "credential_in_query"
    assert b"abc" not in one.body
    assert b"sk-123" not in one.body


ROUTES = [
    ("GET", "/", 404), ("GET", "/v1", 404), ("POST", "/v1/chat/completions/", 404),
    ("POST", "/v1//chat/completions", 404), ("POST", "/V1/Chat/Completions", 404),
    ("POST", "/v1/%63hat/completions", 404), ("POST", "/v1/files/../chat/completions", 404),
    ("POST", "/v1/files/%2e%2e/chat/completions", 404), ("GET", "/mcp", 404),
    ("POST", "/mcp/server", 404), ("POST", "/v1/tasks", 404), ("GET", "/v1/holds/7", 404),
    ("GET", "/v1/dead-letters", 404), ("GET", "/v1/%74asks", 404), ("GET", "/v1/files;x", 404),
    ("GET", "/v1/responses", 426), ("GET", "/v1/chat/completions", 405),
    ("HEAD", "/v1/messages", 405), ("PUT", "/v1/embeddings", 405), ("DELETE", "/v1/models", 405),
    ("TRACE", "/v1/files/a", 405), ("POST", "/api/hello", 405), ("GET", "/health", 404),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "status"), ROUTES)
def test_what_is_no_route_of_ours_never_goes_upstream(method, path, status):
    wide = Snapshot(
        revision=1,
        digest="d",
        providers={
            "up": Provider(name="up", dialects=frozenset(), base_url="", passthrough=("/v1/*",))
        },
    )
    one = refused(method, path, body=[], snapshot=wide)
    assert one.status == status
    if status == 405:
        assert one.header(b"allow")


def test_reserved_paths_speak_their_own_shape_and_messages_theirs():
    assert refused("POST", "/v1/tasks", body=b"{}").json["status"] == 404
    assert refused("POST", "/mcp", body=b"{}").json["jsonrpc"] == "2.0"
    assert refused("POST", "/v1/messages/nope", body=b"{}").json["type"] == "error"


def test_the_warm_up_of_claude_code_is_answered():
    one = refused("HEAD", "/api/hello", body=[])
    assert (one.status, one.body) == (204, b"")


def test_a_body_above_the_limit_is_refused_from_its_head_alone():
    one = refused(
        path="/v1/messages", body=[b'{"model"'], headers=[(b"content-length", b"10000000000")]
    )
    assert one.status == 413
    assert b"Tidegate" in one.body
    assert one.header(b"connection") == b"close"


def test_a_chunked_body_is_refused_once_the_limit_is_passed():
    service = FakeService()

    async def main():
        async with Stage(service, max_body=100_000) as stage:
            one = stage.request(
                headers=[(b"transfer-encoding", b"chunked")], body=[b"x" * 10_000] * 30
            )
            await one.done()
            assert one.status == 413
            # The rest is read for a while, so that the sender comes to see why.
            assert one.received == 300_000
            assert one.complete
            await stage.nothing_left()

    run(main())


def test_an_endless_body_is_not_read_for_ever_after_its_refusal():
    async def main():
        async with Stage(FakeService(), max_body=1000) as stage:
            one = stage.request(
                headers=[(b"transfer-encoding", b"chunked")], body=[b"x" * 2000, b""]
            )
            one.parts[-1] = (b"", True)
            await one.done()
            assert one.status == 413
            assert one.complete
            await stage.nothing_left()

    run(main())


def test_a_client_that_waits_for_100_continue_is_refused_without_reading():
    one = refused(
        body=[b""],
        headers=[(b"content-length", b"999999999"), (b"expect", b"100-continue")],
    )
    assert one.status == 413
    assert one.received == 0


@pytest.mark.parametrize("later", [False, True], ids=["key", "token whose key set is fetched"])
def test_a_strangers_body_is_not_read(later):
    def stranger(_call):
        raise Unauthenticated("nobody knows this key")

    async def after_a_fetch(call):
        stranger(call)

    async def main():
        async with Stage(FakeService()) as stage:
            stage.recognize = after_a_fetch if later else stranger
            length = [(b"content-length", b"30000000"), (b"expect", b"100-continue")]
            one = await stage.ask(body=[b""], headers=length)
            return one, stage.refused

    one, refusals = run(main())
    assert (one.status, one.received) == (401, 0)
    assert [type(error) for error in refusals] == [Unauthenticated]


def test_expectation_and_hop_by_hop_headers_stop_here():
    service = FakeService()

    async def main():
        async with Stage(service) as stage:
            await stage.ask(
                headers=[
                    (b"expect", b"100-continue"),
                    (b"connection", b"keep-alive, X-Secret"),
                    (b"x-secret", b"1"),
                    (b"x-kept", b"2"),
                    (b"te", b"trailers"),
                    (b"upgrade", b"h2c"),
                    (b"keep-alive", b"timeout=5"),
                    (b"proxy-authorization", b"Basic eDp5"),
                    (b"trailer", b"x-sum"),
                ]
            )

    run(main())
    names = {name for name, _ in service.calls[0].headers}
    assert names == {b"host", b"x-kept"}


def test_a_slow_body_is_given_up():
    async def main():
        async with Stage(FakeService()) as stage:
            one = stage.request(body=[b'{"model"', b""])
            one.parts.pop()
            one.parts[0] = (b'{"model"', True)
            await one.done()
            assert one.status == 400
            assert one.json["error"]["code"] == "request_timeout"
            assert stage.clock.now() / 1e6 - one.task.get_loop().time() * 0 > 29
            await stage.nothing_left()

    run(main())


def test_a_dripping_body_ends_at_the_total_deadline():
    async def main():
        async with Stage(FakeService()) as stage:
            one = stage.request(headers=[(b"transfer-encoding", b"chunked")], body=[b" "])
            one.parts[0] = (b" ", True)
            loop = one.task.get_loop()

            def drip():
                if not one.task.done():
                    one.feed(b" ")
                    loop.call_later(10, drip)

            drip()
            await one.done()
            assert one.status == 400
            assert 600 <= loop.time() < 700
            await stage.nothing_left()

    run(main())


def test_a_client_that_leaves_while_sending_hears_nothing_and_leaves_nothing():
    service = FakeService()

    async def main():
        import asyncio

        async with Stage(service) as stage:
            one = stage.request(body=[b'{"model"', b""])
            one.parts.pop()
            one.parts[0] = (b'{"model"', True)
            await asyncio.sleep(0.01)
            one.leave()
            await one.done()
            assert not one.status
            await stage.nothing_left()

    run(main())
    assert not service.calls


JSON_FAULTS = {
    "empty": b"",
    "blank": b"  ",
    "half": b'{"model":"m","mess',
    "list": b"[1,2]",
    "text": b'"x"',
    "null": b"null",
    "not utf-8": b'{"model":"\xff\xfe"}',
    "nested": b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "single quotes": b"{'model':'m'}",
    "nan without object": b"NaN",
    "huge integer": b'{"model":"m","messages":[' + b"9" * 5000 + b"NaN]}",
    "model twice": b'{"model":"a","model":"b","messages":[]}',
    "model twice, escaped": b'{"model":"a","mod\\u0065l":"b","messages":[]}',
    "stream twice": b'{"model":"a","stream":false,"messages":[],"stream":true}',
    "max_tokens twice": b'{"model":"a","max_tokens":1,"messages":[],"max_tokens":99999}',
    "messages of text": b'{"model":"m","messages":"hi"}',
    "model of numbers": b'{"model":7,"messages":[]}',
    "no model": b'{"messages":[]}',
    "utf-16": '{"model":"m","messages":[]}'.encode("utf-16"),
}


@pytest.mark.parametrize("body", JSON_FAULTS.values(), ids=JSON_FAULTS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_body_that_policy_cannot_read_is_a_400_of_the_dialect(path, body):
    one = refused(path=path, body=body)
    assert one.status == 400
    assert "error" in one.json
    assert one.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"model":"m","temperature":NaN,"messages":[]}',
        b'{"model":"m","seed":123456789012345678901234567890,"messages":[]}',
        b'{"model":"m","messages":[{"role":"user","content":null}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"hologram"}]}]}',
        b'{"model":"m","x":{"model":1,"a":{"model":2}},"messages":[]}',
        b'{"model":"m","\\udc00":"\\udfff","messages":[]}',
        b'\xef\xbb\xbf{"model":"m","messages":[]}',
        b'\n\t{"model" : "m" , "messages" : [ ] }\n',
    ],
)
def test_odd_bodies_that_upstreams_read_pass_untouched(body):
    service = FakeService()

    async def main():
        async with Stage(service) as stage:
            assert (await stage.ask(body=body)).status == 200

    run(main())
    assert service.calls[0].body == body
    import orjson

    orjson.dumps(service.calls[0].parsed)  # nothing in it can break a tokenizer or a log


def test_too_many_elements_are_refused_before_they_become_memory():
    one = refused(body=b'{"model":"m","messages":[' + b"{}," * 1_000_001 + b"{}]}")
    assert one.status == 400
    assert "elements" in one.json["error"]["message"]


CODINGS = {
    "zstd": zstandard.ZstdCompressor().compress,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "br": brotli.compress,
    "deflate": zlib.compress,
    "GZIP": gzip.compress,
}


@pytest.mark.parametrize("coding", CODINGS)
def test_a_compressed_body_is_read_and_its_bytes_are_kept(coding):
    service = FakeService()
    long = CHAT[:-1] + b',"x":"' + b"y" * 600_000 + b'"}'
    bodies = [CODINGS[coding](CHAT), CODINGS[coding](long)]

    async def main():
        async with Stage(service) as stage:
            for body in bodies:
                headers = [(b"content-encoding", coding.encode())]
                assert (await stage.ask(headers=headers, body=body)).status == 200

    run(main())
    assert [call.body for call in service.calls] == bodies
    assert all(call.fields.model == "m" for call in service.calls)
    assert service.calls[0].coding == coding.lower()


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("cut", [0, 1, 9, -1])
def test_a_false_or_cut_label_is_a_400(coding, cut):
    body = CODINGS[coding](CHAT * 50)[:cut] if cut else CHAT
    one = refused(headers=[(b"content-encoding", coding.encode())], body=body)
    assert one.status == 400


@pytest.mark.parametrize("coding", ["snappy", "gzip, zstd", "compress", "gzip,gzip", "\xff"])
def test_an_unknown_coding_is_a_415(coding):
    one = refused(headers=[(b"content-encoding", coding.encode("latin-1"))])
    assert one.status == 415


@pytest.mark.slow
@pytest.mark.parametrize("coding", ["zstd", "gzip", "br", "deflate"])
def test_a_bomb_is_a_413(coding):
    body = CODINGS[coding](b" " * 5_000_000)
    one = refused(
        headers=[(b"content-encoding", coding.encode())], body=body, rules={"max_body": 1_000_000}
    )
    assert one.status == 413
    assert b"Tidegate" in one.body


ALLOWED = {"cors_origins": ("https://app.example",)}
PREFLIGHT = [
    (b"access-control-request-method", b"POST"),
    (b"access-control-request-headers", b"x-api-key,anthropic-version"),
]


def test_a_preflight_needs_no_credential_and_echoes_what_was_asked():
    one = refused(
        "OPTIONS", "/v1/messages", [(b"origin", b"https://app.example"), *PREFLIGHT], [],
        rules=ALLOWED,
    )  # fmt: skip
    assert one.status == 204
    assert one.header(b"access-control-allow-origin") == b"https://app.example"
    assert one.header(b"access-control-allow-headers") == b"x-api-key,anthropic-version"
    assert b"POST" in (one.header(b"access-control-allow-methods") or b"")


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"https://app.example.evil"])
def test_an_unknown_origin_gets_nothing(origin):
    one = refused("OPTIONS", "/v1/messages", [(b"origin", origin), *PREFLIGHT], [], rules=ALLOWED)
    assert one.status == 204
    assert not [name for name, _ in one.headers if name.startswith(b"access-control-")]


def test_answers_and_refusals_carry_the_headers_a_page_needs():
    service = FakeService()
    origin = [(b"origin", b"https://app.example")]

    async def main():
        async with Stage(service, **ALLOWED) as stage:
            for one in (
                await stage.ask(headers=origin),
                await stage.ask(path="/x", headers=origin),
            ):
                assert one.header(b"access-control-allow-origin") == b"https://app.example"
                assert b"retry-after" in (one.header(b"access-control-expose-headers") or b"")
            plain = await stage.ask()
            assert plain.header(b"access-control-allow-origin") is None
            assert plain.header(b"vary") == b"Origin"

    run(main())


@pytest.mark.parametrize("credential", [[], [(b"x-api-key", b"k")]])
@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://localhost:1"])
def test_a_page_of_an_unnamed_origin_is_refused_whatever_it_holds(origin, credential):
    one = refused(headers=[(b"origin", origin), *credential], rules=ALLOWED)
    assert one.status == 403
    assert one.header(b"access-control-allow-origin") is None


def test_a_web_socket_is_closed_before_it_opens():
    async def main():
        async with Stage(FakeService()) as stage:
            said = []

            async def receive():
                return {"type": "websocket.connect"}

            async def send(message):
                said.append(message["type"])

            await stage.edge({"type": "websocket"}, receive, send)
            assert said == ["websocket.close"]
            with pytest.raises(RuntimeError):
                await stage.edge({"type": "gopher"}, receive, send)

    run(main())


def test_all_bodies_together_are_bounded(monkeypatch):
    monkeypatch.setattr(intake, "MAX_HELD", 3 * len(CHAT))

    async def main():
        async with Stage(FakeService(Answer(wait=5))) as stage:
            ones = [stage.request() for _ in range(4)]
            statuses = [(await one.done()).status for one in ones]
            assert sorted(statuses) == [200, 200, 200, 429]
            assert (await stage.ask()).status == 200
            await stage.nothing_left()

    run(main())


def test_a_pass_through_body_declared_too_large_is_refused_from_its_head():
    one = refused(path="/v1/responses/r/cancel", headers=[(b"content-length", b"9" * 12)], body=b"")
    assert one.status == 413


def test_a_refusal_may_quote_what_no_encoder_likes():
    service = FakeService(Answer(error=MalformedCall("no model '\ud800'", param="\udfff")))

    async def main():
        async with Stage(service) as stage:
            one = await stage.ask()
            assert one.status == 400
            assert b"no model" in one.body

    run(main())


def test_a_full_process_refuses_softly():
    service = FakeService(Answer(wait=5))

    async def main():
        async with Stage(service, max_in_flight=2) as stage:
            begun = [stage.request() for _ in range(3)]
            last = await begun[2].done()
            assert last.status == 429
            assert last.header(b"retry-after") == b"1"
            for one in begun[:2]:
                assert (await one.done()).status == 200
            await stage.nothing_left()

    run(main())


def test_a_pass_through_body_streams_and_is_counted():
    seen: list[bytes] = []

    async def upload(call):
        assert call.upload is not None
        seen.extend([part async for part in call.upload])

    service = FakeService(Answer(before=upload))
    wide = Snapshot(
        revision=1,
        digest="d",
        providers={
            "up": Provider(
                name="up", dialects=frozenset(), base_url="", passthrough=("/v1/files*",)
            )
        },
    )

    async def main():
        async with Stage(service, snapshot=wide) as stage:
            one = await stage.ask(path="/v1/files", body=[b"a" * 9, b"b" * 9, b"c"])
            assert one.status == 200
            bare = await stage.ask("GET", "/v1/responses/r_1?stream=true", body=[])
            assert bare.status == 500  # nothing to upload there: the script insists
            stage.crashed.clear()
            await stage.nothing_left()

    run(main())
    assert seen == [b"a" * 9, b"b" * 9, b"c"]
    assert service.calls[0].body == b""
    assert service.calls[0].parsed is None
    assert service.ends == [End.COMPLETE]


def test_a_pass_through_body_above_the_limit_is_refused_while_it_streams():
    async def upload(call):
        async for _ in call.upload:
            pass

    service = FakeService(Answer(before=upload))

    async def main():
        async with Stage(service, max_body=50) as stage:
            one = await stage.ask(
                path="/v1/responses/r/cancel",
                headers=[(b"transfer-encoding", b"chunked")],
                body=[b"a" * 20] * 5,
            )
            assert one.status == 413
            await stage.nothing_left()

    run(main())
