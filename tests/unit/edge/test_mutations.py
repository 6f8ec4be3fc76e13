"""A thousand mangled requests: each gets a refusal of its dialect or passes; nothing is left.

Fixed seeds, so that a failure is found again; the number of the request is in the message.
"""

from __future__ import annotations

import asyncio
import json
import random

import orjson
import pytest

from gateway.call import Family
from tests.fixtures.asgi import CHAT, Stage
from tests.fixtures.fake_service import SSE, Answer, FakeService
from tests.sim.loop import run

PATHS = {
    "/v1/chat/completions": b'{"model":"m","stream":true,"n":2,"max_tokens":5,"tools":[{"type":'
    b'"function","function":{"name":"f","parameters":{}}}],"messages":[{"role":"user","content":'
    b'[{"type":"text","text":"h\\u00e9"},{"type":"image_url","image_url":{"url":"data:image/png;'
    b'base64,iVBORw0KGgo="}}]},{"role":"assistant","tool_calls":[{"id":"1","function":{"name":'
    b'"f","arguments":"{}"}}]}],"stream_options":{"include_usage":true},"metadata":{"a":"b"}}',
    "/v1/completions": b'{"model":"m","prompt":["a","b"],"best_of":2,"suffix":null}',
    "/v1/embeddings": b'{"model":"m","input":[[1,2,3],[4]],"dimensions":8}',
    "/v1/responses": b'{"model":"m","input":[{"role":"user","content":[{"type":"input_text","text":'
    b'"x"}]}],"tools":[{"type":"namespace","tools":[]}],"previous_response_id":"r","stream":true}',
    "/v1/messages": b'{"model":"m","max_tokens":64,"system":[{"type":"text","text":"s",'
    b'"cache_control":{"type":"ephemeral"}}],"thinking":{"type":"enabled","budget_tokens":1024},'
    b'"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"document",'
    b'"source":{"type":"base64","data":"AAAA"}}]}]},{"role":"assistant","content":[{"type":'
    b'"thinking","thinking":"t","signature":"AAA="}]}]}',
    "/v1/messages/count_tokens": b'{"model":"m","messages":[{"role":"user","content":"x"}]}',
}
HEADERS = [
    (b"host", b"localhost:8484"),
    (b"authorization", b"Bearer k"),
    (b"content-type", b"application/json"),
    (b"accept", b"*/*"),
    (b"x-stainless-read-timeout", b"600"),
    (b"priority", b"u=3"),
    (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    (b"connection", b"keep-alive"),
]
NAMES = [
    b"host", b"content-length", b"transfer-encoding", b"content-encoding", b"connection", b"origin",
    b"expect", b"te", b"upgrade", b"authorization", b"x-api-key", b"mcp-name", b"tidegate-tier",
    b"anthropic-version", b"originator", b"x-codex-turn-metadata", b"baggage", b"prefer", b"x", b"",
]  # fmt: skip
VALUES = [
    b"", b" ", b"chunked", b"gzip", b"zstd", b"br", b"identity", b"0", b"-1", b"99999999999999",
    b"1e9", b"null", b"localhost", b"close, host", b"keep-alive, x, ,", b"\xff\xfe", b"a" * 9000,
    b"u=9", b"codex", b"100-continue", b'"', b"=?base64?AA==?=", b"\x00", b"*",
]  # fmt: skip
LEAVES = [
    None, True, False, 0, -1, 1e308, 10**30, "", "\ud800", "x" * 5000, [], {}, [[]], [None],
    {"a": []},
    "model", ["x", 1], {"type": "text"}, {"type": 5, "text": {}},
]  # fmt: skip


def mutate_tree(value: object, rng: random.Random) -> object:
    """The value with one place replaced, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: mutate_tree(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_tree(value[at], rng), *value[at + 1 :]]
    return rng.choice(LEAVES)


def encode(value: object) -> bytes:
    return json.dumps(value).encode()


def mutate_body(body: bytes, rng: random.Random) -> bytes:
    match rng.randrange(7):
        case 0:
            at = rng.randrange(len(body))
            return body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
        case 1:
            return body[: rng.randrange(len(body))]
        case 2:
            at, to = sorted(rng.randrange(len(body)) for _ in range(2))
            return body[:at] + body[to:] + body[at:to]
        case 3:
            key = rng.choice([b"model", b"stream", b"n", b"messages"])
            return b'{"%b":1,' % key + body[1:]
        case 4:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        case _:
            value: object = orjson.loads(body)
            for _ in range(rng.randint(1, 4)):
                value = mutate_tree(value, rng)
            return encode(value)


def mutate_headers(rng: random.Random) -> list[tuple[bytes, bytes]]:
    headers = list(HEADERS)
    for _ in range(rng.randrange(4)):
        match rng.randrange(4):
            case 0:
                headers.append((rng.choice(NAMES), rng.choice(VALUES)))
            case 1:
                at = rng.randrange(len(headers))
                headers[at] = (headers[at][0], rng.choice(VALUES))
            case 2:
                headers.append(rng.choice(headers))
            case _:
                del headers[rng.randrange(len(headers))]
    return headers


def well_shaped(family: Family, body: object) -> bool:
    assert isinstance(body, dict)
    error = body["error"]
    if family is Family.ANTHROPIC:
        return body["type"] == "error" and isinstance(error["message"], str)
    return isinstance(error["message"], str) and "type" in error and "code" in error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_mangled_requests_are_refused_in_their_dialect_or_pass(seed):
    rng = random.Random(seed)
    service = FakeService(Answer(), Answer(headers=list(SSE), body=[b"data: [DONE]\n\n"]))

    async def one(stage, number):
        path = rng.choice(list(PATHS))
        body = PATHS[path] if rng.random() < 0.3 else mutate_body(PATHS[path], rng)
        headers = mutate_headers(rng)
        size = rng.choice([1, 7, 64, 10_000])
        parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        if rng.random() < 0.15:
            path = rng.choice(
                [path + "/", path.upper(), path + "?key=1", "//" + path, path + "%00"]
            )
        exchange = stage.request("POST", path, headers, parts)
        if rng.random() < 0.1:
            await asyncio.sleep(0)
            exchange.leave()
        await exchange.done()
        if exchange.status >= 400:
            family = Family.ANTHROPIC if path.startswith("/v1/messages") else Family.OPENAI
            shaped = {name for name, _ in headers}
            if not (exchange.status == 404 and b"anthropic-version" in shaped):
                assert well_shaped(family, exchange.json), (number, exchange.body)
        return exchange.status

    async def main():
        async with Stage(service) as stage:
            statuses = [await one(stage, number) for number in range(100)]
            assert not [status for status in statuses if status >= 500], statuses
            assert {200, 400} <= set(statuses)
            await stage.nothing_left()
            assert (await stage.ask(body=CHAT)).status == 200

    run(main())
    assert len(service.ends) == len(service.replies)
