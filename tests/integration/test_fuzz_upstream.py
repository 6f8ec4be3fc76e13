"""Mutated answers of a provider, through the whole running process, by fixed seeds.

A provider may say anything: broken HTTP, broken events, usage of any type, headers that no parser
likes. The client gets what was said as far as it is an answer, or an error of its dialect; nothing
crashes, hangs or stays held, and the books stay sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.integration.gateway import (
    Answer,
    Gateway,
    Stage,
    Wire,
    parse,
    policy,
    request,
    scratch,
    total,
)

pytestmark = pytest.mark.integration

ROUNDS = 500
SEED = 1_000
PATIENCE = 6.0

# --- good answers --------------------------------------------------------------------------------

CHAT_USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
              "prompt_tokens_details": {"cached_tokens": 3}}  # fmt: skip
CLAUDE_USAGE = {"input_tokens": 9, "output_tokens": 4, "cache_read_input_tokens": 2}
RESPONSE_USAGE = {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13,
                  "input_tokens_details": {"cached_tokens": 1}}  # fmt: skip
RESPONSE = {
    "id": "resp_1", "object": "response", "status": "completed", "model": "m", "error": None,
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "ok"}]}],
    "usage": RESPONSE_USAGE,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "/v1/chat/completions": {
        "id": "c", "object": "chat.completion", "model": "m", "usage": CHAT_USAGE,
        "choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}]},
    "/v1/responses": RESPONSE,
    "/v1/messages": {
        "id": "m", "type": "message", "model": "m", "content": [{"type": "text", "text": "ok"}],
        "stop_reason": "end_turn", "usage": CLAUDE_USAGE},
    "/v1/embeddings": {
        "object": "list", "model": "m", "data": [{"index": 0, "embedding": [0.5]}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3}},
}  # fmt: skip
EVENTS: dict[str, list[tuple[str, Any]]] = {
    "/v1/chat/completions": [
        ("", {"id": "c", "choices": [{"index": 0, "delta": {"content": "天気"}}]}),
        ("", {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        ("", {"id": "c", "choices": [], "usage": CHAT_USAGE}),
        ("", "[DONE]"),
    ],
    "/v1/responses": [
        ("response.created", {"type": "response.created", "response": {"id": "resp_1"}}),
        ("response.output_text.delta", {"type": "response.output_text.delta", "delta": "ok"}),
        ("response.completed", {"type": "response.completed", "response": RESPONSE}),
    ],
    "/v1/messages": [
        ("message_start", {"type": "message_start", "message": {"usage": CLAUDE_USAGE}}),
        ("content_block_delta", {"type": "content_block_delta", "index": 0,
                                 "delta": {"type": "text_delta", "text": "ok"}}),
        ("message_delta", {"type": "message_delta", "delta": {"stop_reason": "end_turn"},
                           "usage": {"output_tokens": 7}}),
        ("message_stop", {"type": "message_stop"}),
    ],
}  # fmt: skip
ERRORS: list[Any] = [
    {"error": {"message": "slow down", "type": "rate_limit_error", "code": "rate_limit_exceeded"}},
    {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, {"error": None},
    {"error": "text"}, {"error": {"message": ["x"], "code": 5, "type": {}}}, [], "x", None, 5,
    {"error": {"code": "insufficient_quota"}}, {"error": {"details": [{"retryDelay": "NaNs"}]}},
]  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, -(2**40), 0, 1.5, 1e300, 2**80, "", "7", "\ud83d", [], {}, [None], {"a": []},
    "x" * 2_000, [[1]], {"usage": {}}, "[DONE]",
]  # fmt: skip
HEADERS: list[tuple[bytes, bytes]] = [
    (b"retry-after", b"NaN"), (b"retry-after", b"-5"), (b"retry-after", b"9" * 40),
    (b"retry-after", b"Mon, 99 Foo 2026 00:00:00 GMT"), (b"retry-after-ms", b"inf"),
    (b"x-ratelimit-remaining-tokens", b"unlimited"), (b"x-ratelimit-reset-tokens", b"6m0s1"),
    (b"x-ratelimit-limit-requests", b"-3"), (b"x-ratelimit-remaining-requests", b"0"),
    (b"x-ratelimit-reset-requests", b"1d99h"), (b"anthropic-ratelimit-tokens-reset", b"never"),
    (b"anthropic-ratelimit-tokens-remaining", b"1e9"), (b"content-encoding", b"gzip"),
    (b"content-encoding", b"br"), (b"content-type", b"text/html"), (b"content-type", b"\xff"),
    (b"set-cookie", b"a=1"), (b"connection", b"close, x-secret"), (b"x-secret", b"s"),
    (b"transfer-encoding", b"gzip, chunked"), (b"content-length", b"7"), (b"content-length", b"x"),
    (b"content-length", b"999999"), (b"tidegate-call-id", b"forged"), (b"date", b"yesterday"),
    (b"x-request-id", b"r" * 9_000), (b"x-long", b"y" * 70_000), (b"bad name", b"v"),
    (b"x-nul", b"a\x00b"), (b"x-latin", b"\xe9"), (b"location", b"http://evil.test/"),
    (b"x-should-retry", b"maybe"), (b"trailer", b"x"), (b"upgrade", b"h2c"),
]  # fmt: skip
STATUSES = [
    b"200 OK", b"200", b"201 Created", b"204 No Content", b"206 Partial Content", b"301 Moved",
    b"304 Not Modified", b"400 Bad", b"401 No", b"403 No", b"404 None", b"408 Late", b"413 Big",
    b"429 Slow", b"500 Oops", b"502 Bad", b"503 Busy", b"504 Late", b"529 Over", b"599 Odd",
    b"600 Beyond", b"99 Under", b"000 Zero", b"abc Words", b"-1 Minus", b"2000 Long", b"101 Switch",
]  # fmt: skip


def nodes(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield prefix
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from nodes(inner, (*prefix, key))


def elsewhere(value: Any, rng: random.Random) -> Any:
    """The value with some nodes replaced or removed."""
    copy = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 2, 4])):
        path = rng.choice(list(nodes(copy)))
        if not path:
            return deepcopy(rng.choice(VALUES))
        inner = copy
        for key in path[:-1]:
            inner = inner[key]
        if rng.random() < 0.2 and isinstance(inner, dict):
            del inner[path[-1]]
        else:
            inner[path[-1]] = deepcopy(rng.choice(VALUES))
    return copy


def framed(name: str, body: Any, end: bytes) -> bytes:
    data = body if isinstance(body, str) else json.dumps(body)
    head = b"event: " + name.encode() + end if name else b""
    return head + b"data: " + data.encode("utf-8", "surrogatepass") + end + end


def noisy(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw) + 1)
    noise = rng.choice([b"\x00", b"\r", b"\n\n", b"\xff\xfe", b": c\n", b"data", rng.randbytes(9)])
    return rng.choice([raw[:at], raw[:at] + noise + raw[at:], raw[:at] + raw[at + 3 :], noise])


class Said:
    """One answer of the provider, made from a good one: pieces of bytes, and how it ends."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.path = rng.choice(list(PLAIN))
        self.stream = self.path in EVENTS and rng.random() < 0.6
        self.kinds: list[str] = []
        self.status = b"200 OK"
        self.headers = [(b"content-type", b"application/json")]
        self.chunked = self.stream or rng.random() < 0.3
        if self.stream:
            self.headers = [(b"content-type", b"text/event-stream")]
        self.body = self._body(rng)
        self.raw_frame = ""
        for _ in range(rng.choice([1, 1, 2])):
            self._mutate(rng)
        self.pieces = self._pieces(rng)
        self.end = rng.choice(["keep", "keep", "close", "reset", "stall"])

    def _body(self, rng: random.Random) -> bytes:
        if not self.stream:
            return json.dumps(PLAIN[self.path]).encode()
        end = rng.choice([b"\n", b"\r\n", b"\r"])
        return b"".join(framed(name, body, end) for name, body in EVENTS[self.path])

    def _mutate(self, rng: random.Random) -> None:
        kind = rng.choice(["node", "node", "node", "bytes", "header", "status", "frame", "events"])
        self.kinds.append(kind)
        if kind == "node" and self.stream:
            events = [(n, elsewhere(b, rng) if rng.random() < 0.5 else b)
                      for n, b in EVENTS[self.path]]  # fmt: skip
            self.body = b"".join(framed(name, body, b"\n") for name, body in events)
        elif kind == "node":
            self.body = json.dumps(elsewhere(PLAIN[self.path], rng)).encode()
        elif kind == "bytes":
            self.body = noisy(self.body, rng)
        elif kind == "header":
            self.headers.insert(rng.randrange(2), rng.choice(HEADERS))
        elif kind == "status":
            self.status = rng.choice(STATUSES)
            if rng.random() < 0.7:
                self.body = json.dumps(rng.choice(ERRORS)).encode()
        elif kind == "frame":
            self.raw_frame = rng.choice(["short", "long", "badchunk", "nohead", "twice", "1xx"])
        elif self.stream:
            events = rng.choices(EVENTS[self.path], k=rng.randrange(12))
            error = rng.choice(ERRORS)
            if rng.random() < 0.4:
                events.insert(rng.randrange(len(events) + 1), ("error", error))
            self.body = b"".join(framed(name, body, b"\n") for name, body in events)

    def _pieces(self, rng: random.Random) -> list[bytes]:
        head = b"HTTP/1.1 " + self.status + b"\r\n"
        head += b"".join(name + b": " + value + b"\r\n" for name, value in self.headers)
        size = max(1, rng.choice([1, 7, 50, 10_000]))
        parts = [self.body[at : at + size] for at in range(0, len(self.body), size)][:400]
        if self.chunked:
            head += b"transfer-encoding: chunked\r\n"
            parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]
        else:
            length = len(self.body) + {"short": 5, "long": -5}.get(self.raw_frame, 0)
            head += b"content-length: %d\r\n" % max(0, length)
        if self.raw_frame == "badchunk" and self.chunked:
            parts[len(parts) // 2] = b"zz\r\nnonsense"
        elif self.raw_frame == "short" and self.chunked:
            parts = parts[:-1]
        elif self.raw_frame == "nohead":
            return [rng.randbytes(rng.randrange(200))]
        elif self.raw_frame == "twice":
            parts += [head + b"\r\n", *parts]
        elif self.raw_frame == "1xx":
            head = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * rng.randrange(1, 60) + head
        return [head + b"\r\n", *parts]


class Provider:
    """Answers by the seed that a request's body names."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Provider:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                said = Said(int(body["user"]))
                for piece in said.pieces:
                    writer.write(piece)
                    await writer.drain()
                if said.end == "stall":
                    await asyncio.sleep(30)
                if said.end == "reset":
                    writer.transport.abort()
                if said.end != "keep":
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)


POLICY = policy(
    providers={
        "emulator": {
            **policy()["providers"]["emulator"],
            "timeouts": {
                "connect": "1s",
                "first_byte": "1s",
                "idle": "1s",
                "total": "4s",
                "total_plain": "4s",
            },
        }
    },
    retry={"attempts": 1, "requeues": 0},
    breakers={"mode": "off"},
    tiers={"standard": {"number": 2, "max_wait": "1s"}},
)
# Per model, so that one answer's word about the quota does not block the next call.
POLICY = {**POLICY, "pools": {}, "models": {"m-*": {"provider": "emulator", "pool": "per_model"}}}


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, Gateway]]:
    with Stage() as stage, scratch() as folder:
        provider = stage.run(Provider().start())
        gateway = Gateway(folder)
        try:
            stage.run(gateway.serve(POLICY, upstream=provider.port), 90)
            yield stage, gateway
            assert stage.run(gateway.stop()) == 0
            assert gateway.crashes() == []
        finally:
            stage.run(gateway.kill())
            stage.run(provider.stop())


def asked(gateway: Gateway, seed: int, said: Said) -> bytes:
    body: dict[str, Any] = {"model": f"m-{seed}", "user": str(seed), "stream": said.stream}
    talk = [{"role": "user", "content": "hello"}]
    body |= {
        "/v1/embeddings": {"input": "hello"},
        "/v1/responses": {"input": "hello"},
        "/v1/messages": {"messages": talk, "max_tokens": 9},
        "/v1/chat/completions": {"messages": talk},
    }[said.path]
    headers = {"anthropic-version": "2023-06-01"} if said.path == "/v1/messages" else {}
    return request(said.path, body, key=gateway.key, headers={**headers, "connection": "close"})


def error_of(answer: Answer) -> dict[str, Any]:
    """Our error in the form the answer's label promises.

    A 5xx that the provider labelled as a stream and then cut is relayed as one, and so ends in our
    event; whether the cut comes before or after the head went out is the network's choice.
    """
    if not answer.header("content-type").startswith("text/event-stream"):
        return answer.json()
    lines = answer.body.splitlines()
    data = [one for one in lines if one.startswith(b"data:") and b"Tidegate" in one]
    found: dict[str, Any] = json.loads(data[-1].partition(b":")[2])
    return found


async def one(gateway: Gateway, seed: int, counts: Counter[str]) -> None:
    said = Said(seed)
    told = f"seed {seed}: {said.kinds} {b''.join(said.pieces)[:700]!r} then {said.end}"
    wire = await Wire.open(gateway.port)
    await wire.send(asked(gateway, seed, said))
    try:
        async with asyncio.timeout(PATIENCE):
            while await wire.more():
                pass
    except TimeoutError:
        pytest.fail(f"the client still waits: {told}\nseen {wire.seen[:400]!r}")
    wire.drop()
    assert wire.seen, told
    answer, _ = parse(wire.seen, answer_to="POST", closed=True)
    counts[f"{answer.status}{'' if answer.whole else ' cut'}"] += 1
    told += f"\nanswered {wire.seen[:500]!r}"
    assert 200 <= answer.status < 600, told
    ours = answer.header("tidegate-model-served") == "" or answer.status in (502, 504)
    if answer.status >= 500 and ours and b"Tidegate" in answer.body:
        error = error_of(answer)
        assert (error.get("type") == "error") == (said.path == "/v1/messages"), told
    assert b"sk-upstream" not in wire.seen, told
    assert answer.header("x-secret") == "" or "connection" not in str(said.headers), told
    with contextlib.suppress(ValueError):
        assert 0 <= int(answer.header("retry-after") or 1) <= 60, told


def test_whatever_a_provider_answers_the_gateway_stays_whole(scene):
    stage, gateway = scene
    counts: Counter[str] = Counter()

    async def worker(seeds: Iterator[int]) -> None:
        for seed in seeds:
            await one(gateway, seed, counts)

    async def scenario() -> None:
        seeds = iter(range(SEED, SEED + ROUNDS))
        await asyncio.gather(*(worker(seeds) for _ in range(32)))
        await gateway.idle()
        await gateway.total("tidegate_calls_total")
        metrics = await gateway.metrics()
        assert total(metrics, "tidegate_calls_total") == ROUNDS
        assert total(metrics, "tidegate_settlement_failures_total") == 0
        assert all(value >= 0 for value in metrics.values())

    stage.run(scenario(), 240)
    assert gateway.crashes() == []
    assert counts["200"] > ROUNDS // 4, counts
    assert counts["502"] > ROUNDS // 50, counts
    assert counts["200 cut"] > ROUNDS // 50, counts
