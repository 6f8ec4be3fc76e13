"""Mutated requests against the whole running process, by fixed seeds, over raw sockets.

Whatever arrives is either passed on as it is and answered, or refused in the words of its own
dialect; it never becomes a 500, a hang, or something that is still held afterwards.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.fixtures.waiting import Turns
from tests.integration.gateway import (
    Answer,
    Stage,
    Wire,
    World,
    ask,
    parse,
    policy,
    request,
    staged,
)

pytestmark = pytest.mark.integration

ROUNDS = 1_000
SEED = 20261129
PATIENCE = 1.0
"""Seconds a request may wait for the rest of itself before its sender hangs up."""

HANG = 8.0
ALLOWED = {200, 204, 400, 401, 403, 404, 405, 408, 411, 413, 415, 417, 422, 426, 429, 431, 501}
MIB = 2**20


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    with staged(policy(retry={"attempts": 1}, breakers={"mode": "off"})) as made:
        yield made


# --- what is mutated -----------------------------------------------------------------------------

TEXT = "Tell me: 天気 👋 <|endoftext|>"
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {
        "model": "gpt-x", "stream": True, "max_tokens": 20, "stream_options": {},
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [
            {"type": "text", "text": TEXT},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL}}]}),
    ("/v1/chat/completions", {
        "model": "gpt-x", "n": 1, "temperature": 0.5, "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"}]}),
    ("/v1/completions", {"model": "gpt-x", "prompt": ["a", "b"], "max_tokens": 9}),
    ("/v1/responses", {
        "model": "gpt-x", "stream": True, "max_output_tokens": 40, "instructions": "be brief",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]}),
    ("/v1/embeddings", {"model": "text-embedding-x", "input": [[1, 2, 3], [4]]}),
    ("/v1/messages?beta=true", {
        "model": "claude-x", "max_tokens": 20, "stream": True, "system": [
            {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
        "tools": [{"name": "f", "input_schema": TOOL}], "thinking": {"type": "disabled"}}),
    ("/v1/messages/count_tokens", {
        "model": "claude-x", "messages": [{"role": "user", "content": TEXT}]}),
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**63, -(2**70), 1e308, "", "x", "\ud83d", "a" * 5_000, [], {},
    [[]], {"a": {"b": []}}, [None], "NaN", "tg_x_y", [1, 2], ["x"], [[1, "a"]], {"type": "text"},
]  # fmt: skip
HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-length", b"0"), (b"content-length", b"-1"), (b"content-length", b"+5"),
    (b"content-length", b"0x10"), (b"content-length", b"5, 5"), (b"content-length", b"9" * 30),
    (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"gzip, chunked"),
    (b"transfer-encoding", b"identity"), (b"Transfer-Encoding ", b"chunked"),
    (b"content-encoding", b"gzip"), (b"content-encoding", b"zstd"),
    (b"content-encoding", b"snappy"),
    (b"content-encoding", b"gzip, gzip"), (b"content-type", b"text/plain"),
    (b"content-type", b"multipart/form-data; boundary=x"), (b"host", b"evil.test"),
    (b"host", b"127.0.0.1:1"), (b"host", b"a b"), (b"authorization", b"Bearer "),
    (b"authorization", b"Basic eDp5"), (b"authorization", b"Bearer tg-nobody"),
    (b"x-api-key", b"other"), (b"x-api-key", b"\xff\xfe"), (b"expect", b"100-continue"),
    (b"expect", b"nonsense"), (b"connection", b"close, authorization, host"),
    (b"connection", b"upgrade"), (b"upgrade", b"websocket"), (b"te", b"trailers"),
    (b"priority", b"u=99"), (b"tidegate-tier", b"emperor"), (b"tidegate-place", b"forged.x.y"),
    (b"baggage", b"agent.id=" + b"x" * 9_000), (b"x-stainless-timeout", b"NaN"),
    (b"x-stainless-read-timeout", b"-5"), (b"origin", b"null"), (b"origin", b"https://evil.test"),
    (b"traceparent", b"00-zz"), (b"idempotency-key", b"k" * 3_000), (b"cookie", b"a=b"),
    (b"prefer", b"respond-async"), (b"range", b"bytes=0-1"), (b"x-forwarded-for", b"127.0.0.1"),
    (b"anthropic-version", b"1066-10-14"), (b"anthropic-beta", b"a,b,,c"), (b"", b"empty"),
    (b"bad name", b"x"), (b"bad\x00name", b"x"), (b"x-nul", b"a\x00b"), (b"x-cr", b"a\rb"),
    (b"x-latin", "é".encode("latin-1")), (b"x-long", b"y" * 30_000), (b"x-huge", b"z" * 80_000),
    (b"accept-encoding", b"br, gzip, zstd"), (b"accept", b"text/event-stream"),
]  # fmt: skip
LINES = [
    b"POST {} HTTP/1.0", b"POST {} HTTP/2.0", b"post {} HTTP/1.1", b"PUT {} HTTP/1.1",
    b"DELETE {} HTTP/1.1", b"OPTIONS {} HTTP/1.1", b"HEAD {} HTTP/1.1", b"GET {} HTTP/1.1",
    b"PATCH {} HTTP/1.1", b"BREW {} HTTP/1.1", b"POST  {} HTTP/1.1", b"POST {}", b"{}",
    b"POST http://evil.test{} HTTP/1.1", b"POST //{} HTTP/1.1", b"POST {}/ HTTP/1.1",
    b"POST {}?api_key=x HTTP/1.1", b"POST {}%00 HTTP/1.1", b"POST /v1/../v1{} HTTP/1.1",
    b"POST {}#frag HTTP/1.1", b"POST /%2e%2e{} HTTP/1.1", b"POST {}\xc3\xa9 HTTP/1.1",
    b"POST {}?" + b"q" * 9_000 + b" HTTP/1.1", b"CONNECT 127.0.0.1:80 HTTP/1.1",
    b"TRACE {} HTTP/1.1", b"GET /v1/models/{} HTTP/1.1", b"POST /v1/files{} HTTP/1.1",
    b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0",
]  # fmt: skip


def paths_into(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every node of a JSON value."""
    yield prefix
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from paths_into(inner, (*prefix, key))


def at_a_node(body: Any, rng: random.Random) -> Any:
    """The body with one node replaced, removed or repeated."""
    copy = json.loads(json.dumps(body))
    path = rng.choice(list(paths_into(copy)))
    if not path:
        return deepcopy(rng.choice(VALUES))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    match rng.randrange(4):
        case 0 if isinstance(inner, dict):
            del inner[path[-1]]
        case 1 if isinstance(inner, list):
            inner.extend([inner[path[-1]]] * rng.randrange(1, 50))
        case _:
            inner[path[-1]] = deepcopy(rng.choice(VALUES))
    return copy


def at_a_byte(raw: bytes, rng: random.Random) -> bytes:
    """The bytes with something cut, inserted, flipped or repeated."""
    at = rng.randrange(len(raw) + 1)
    to = min(len(raw), at + rng.randrange(1, 40))
    noise = rng.randbytes(rng.randrange(1, 30))
    twice = b'{"model":"gpt-y",' + raw[1:]
    return rng.choice(
        [
            raw[:at], raw[:at] + raw[to:], raw[:at] + noise + raw[at:], raw[:at] + noise + raw[to:],
            raw + raw[at:], b"\xef\xbb\xbf" + raw, raw.decode("latin-1").encode("utf-16"), b"",
            b"   ", b"[" * 5_000, b'{"a":' * 2_000 + b"1" + b"}" * 2_000, twice, gzip.compress(raw),
            raw.replace(b":", b": NaN,", 1), raw[:-1] + b',"model":"other"}', b"null", b"[1,2]",
            raw.replace(b"true", b"1e999").replace(b"20", b"-0"), raw[:-1], noise,
        ]
    )  # fmt: skip


def chunks(raw: bytes, rng: random.Random) -> bytes:
    """The body in chunks, right or subtly wrong."""
    cut = rng.randrange(len(raw) + 1)
    parts = [part for part in (raw[:cut], raw[cut:]) if part]
    good = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return rng.choice(
        [
            good + b"0\r\n\r\n", good + b"0\r\nx-trailer: y\r\n\r\n", good,
            good + b"0;ext=" + b"e" * 3_000 + b"\r\n\r\n", b"-5\r\n" + raw, b"zz\r\n" + raw,
            good.replace(b"\r\n", b"\n") + b"0\n\n", b"F" * 20 + b"\r\n" + raw,
            good + b"0\r\ncontent-length: 5\r\nhost: evil\r\n\r\n",
            b"%x\r\n%sXX" % (len(raw), raw) + b"0\r\n\r\n",
        ]
    )  # fmt: skip


class Mutant:
    """A request made from a good one.

    Attributes:
        path: Of the good one; chooses the dialect of a refusal.
    """

    def __init__(self, key: str, seed: int) -> None:
        rng = random.Random(seed)
        self.path, body = rng.choice(BODIES)
        self.headers = [
            (b"host", b"127.0.0.1"), (b"content-type", b"application/json"),
            (b"authorization", b"Bearer " + key.encode()),
        ]  # fmt: skip
        if self.path.startswith("/v1/messages"):
            self.headers.append((b"anthropic-version", b"2023-06-01"))
        self.line = b"POST " + self.path.encode() + b" HTTP/1.1"
        self.raw = json.dumps(body).encode()
        self.length: bytes | None = None
        self.chunked = False
        self.kinds: list[str] = []
        kinds: dict[str, Callable[[random.Random], None]] = {
            "node": lambda rng: self._node(body, rng),
            "bytes": self._bytes,
            "header": self._header,
            "line": self._line,
            "length": self._length,
            "chunks": self._chunks,
            "head": lambda _: None,
        }
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            kind = rng.choice([*kinds, "node", "node", "bytes", "header"])
            self.kinds.append(kind)
            kinds[kind](rng)
        self.data = self._assembled()
        if "head" in self.kinds:
            end = self.data.find(b"\r\n\r\n")
            self.data = at_a_byte_of_head(self.data[:end], rng) + self.data[end:]

    def _node(self, body: Any, rng: random.Random) -> None:
        self.raw = json.dumps(at_a_node(body, rng)).encode()

    def _bytes(self, rng: random.Random) -> None:
        self.raw = at_a_byte(self.raw, rng)

    def _header(self, rng: random.Random) -> None:
        name, value = rng.choice(HEADERS)
        if rng.random() < 0.5:
            self.headers = [pair for pair in self.headers if pair[0] != name]
        self.headers.insert(rng.randrange(len(self.headers) + 1), (name, value))

    def _line(self, rng: random.Random) -> None:
        self.line = rng.choice(LINES).replace(b"{}", self.path.encode())

    def _length(self, rng: random.Random) -> None:
        size = len(self.raw)
        wrong = [0, size - 1, size + 1, size * 2, 41 * MIB, 2**64]
        self.length = b"%d" % rng.choice(wrong)

    def _chunks(self, rng: random.Random) -> None:
        self.chunked = True
        self.raw = chunks(self.raw, rng)

    def _assembled(self) -> bytes:
        headers = list(self.headers)
        if self.chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        elif not any(name == b"content-length" for name, _ in headers):
            headers.append((b"content-length", self.length or b"%d" % len(self.raw)))
        lines = [self.line, *(name + b": " + value for name, value in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.raw


def at_a_byte_of_head(head: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(head) + 1)
    noise = rng.choice([b"\x00", b"\n", b"\r", b"\r\n ", b"\r\n\t", b" ", b":", b"\xff",
                        b"\r\n\r\n", rng.randbytes(4)])  # fmt: skip
    return rng.choice([head[:at] + noise + head[at:], head[:at] + head[at + 1 :],
                       head.replace(b"\r\n", b"\n"), head.replace(b": ", b" : ", 1)])  # fmt: skip


# --- what must hold ------------------------------------------------------------------------------


async def outcome(port: int, mutant: Mutant) -> tuple[bytes, float]:
    """All bytes that came back until the connection ended, and how long that took."""
    began = time.monotonic()
    wire = await Wire.open(port)
    await wire.send(mutant.data)
    with_patience = asyncio.create_task(whole(wire))
    done, _ = await asyncio.wait({with_patience}, timeout=PATIENCE)
    if not done and wire.writer.can_write_eof():
        wire.writer.write_eof()  # nothing more will come; whoever waits for it must let go
        done, _ = await asyncio.wait({with_patience}, timeout=HANG)
        assert done, f"still open: {mutant.data[:300]!r} answered {wire.seen[:300]!r}"
    await with_patience
    wire.drop()
    return wire.seen, time.monotonic() - began


async def whole(wire: Wire) -> None:
    """An answer is whole, or the connection has ended."""
    while await wire.more():
        try:
            parse(wire.seen, answer_to="POST", closed=False)
        except Exception:  # noqa: BLE001 - not whole yet
            continue
        return


def check(mutant: Mutant, seen: bytes) -> str:
    """The answer's status, or what came instead; fails where that is not allowed."""
    seen = seen.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    if not seen:
        assert not set(mutant.kinds) <= {"node", "bytes"}, (
            f"a whole request met silence: {mutant.data[:600]!r}"
        )
        return "closed"
    method = mutant.line.split(b" ")[0].decode("latin-1")
    answer, _ = parse(seen, answer_to=method, closed=True)
    told = f"{mutant.kinds} {mutant.data[:600]!r}\nanswered {seen[:600]!r}"
    assert answer.status in ALLOWED, told
    if answer.status >= 400 and method != "HEAD":
        assert answer.whole, told
        check_words(mutant, answer, told)
    return str(answer.status)


def check_words(mutant: Mutant, answer: Answer, told: str) -> None:
    """An error says so in the dialect of its path, and never shows a key or our own insides."""
    assert "json" in answer.header("content-type"), told
    body = answer.json()
    error = body["error"]
    assert isinstance(error["message"], str), told
    assert isinstance(error["type"], str), told
    straight = not {"line", "head"} & set(mutant.kinds)  # its path is what it was
    upstreams = answer.header("tidegate-model-served")  # whose words pass as they are
    if straight and not upstreams:
        claude = mutant.path.startswith("/v1/messages")
        assert (body.get("type") == "error") == claude, told
    for word in (b"Traceback", b"sk-upstream", b"tg-tester", b".py"):
        assert word not in answer.raw, told


def test_a_thousand_mutated_requests_are_answered_in_their_dialect_and_leave_nothing(scene):
    stage, world = scene
    counts: Counter[str] = Counter()
    slowest = [0.0]

    async def worker(seeds: Iterator[int]) -> None:
        for seed in seeds:
            mutant = Mutant(world.gateway.key, seed)
            seen, took = await outcome(world.gateway.port, mutant)
            counts[check(mutant, seen)] += 1
            slowest[0] = max(slowest[0], took)

    async def scenario() -> None:
        seeds = iter(range(SEED, SEED + ROUNDS))
        before = world.gateway.rss_mib()
        await asyncio.gather(*(worker(seeds) for _ in range(32)))
        await world.gateway.idle()
        assert world.gateway.crashes() == []
        assert world.gateway.rss_mib() - before < 64
        good = await ask(
            world.gateway.port,
            request(*BODIES[1], key=world.gateway.key),
        )
        assert good.status == 200
        assert (await world.emulator.ledger())["in_flight"] == 0

    stage.run(scenario(), 240)
    assert sum(counts.values()) == ROUNDS
    assert counts["200"] > ROUNDS // 20, counts
    assert counts["400"] > ROUNDS // 10, counts
    assert len(counts) > 5, counts
    assert slowest[0] < PATIENCE + HANG


# --- sizes ---------------------------------------------------------------------------------------


def picture(size: int) -> dict[str, Any]:
    """What Claude Code sends: a body that is one large picture."""
    data = base64.b64encode(b"\x89PNG" + b"\x00" * (size * 3 // 4 - 200)).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "what is this?"}]
    return {
        "model": "claude-x", "max_tokens": 10, "messages": [{"role": "user", "content": content}],
    }  # fmt: skip


def test_a_body_of_thirty_three_megabytes_passes_unchanged(scene):
    stage, world = scene
    body = json.dumps(picture(33 * 10**6)).encode()
    assert 32.9e6 < len(body) < 33.1e6

    async def scenario() -> None:
        world.upstream.forget()
        headers = {"anthropic-version": "2023-06-01"}
        data = request("/v1/messages", body, key=world.gateway.key, headers=headers)
        answer = await ask(world.gateway.port, data)
        assert answer.status == 200, answer.body
        [seen] = world.upstream.exchanges('"media_type": "image/png"')
        assert seen.request.body == body
        world.upstream.lines.remove(seen.line)
        await world.gateway.idle()

    stage.run(scenario())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_past_the_limit_is_refused_by_name_even_to_who_still_sends(scene, path, chunked):
    stage, world = scene

    async def scenario() -> None:
        wire = await Wire.open(world.gateway.port)
        head = request(path, key=world.gateway.key, method="POST")[:-2]
        if chunked:
            await wire.send(head + b"transfer-encoding: chunked\r\n\r\n")
            await drip(wire, b"100000\r\n" + b" " * MIB + b"\r\n", most=200)
        else:
            await wire.send(head + b"content-length: 52428800\r\n\r\n")
            await drip(wire, b" " * MIB, most=50)
        answer = await wire.answer()
        assert answer.status == 413
        assert "Tidegate" in answer.json()["error"]["message"]
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")
        assert answer.header("x-should-retry") == "false"
        wire.drop()
        await world.gateway.idle()

    stage.run(scenario())


async def drip(wire: Wire, part: bytes, *, most: int) -> None:
    """The part is sent again and again, until an answer comes or it was sent so often."""
    listening = asyncio.create_task(wire.more())
    for _ in range(most):
        if listening.done():
            break
        await wire.send(part)
        await asyncio.sleep(0)
    await listening


def test_a_text_too_long_for_any_quota_is_refused_and_stalls_nobody(scene):
    stage, world = scene

    async def scenario() -> None:
        text = "antidisestablishmentarianism " * (1_100_000)
        body = {"model": "gpt-x", "messages": [{"role": "user", "content": text}]}
        long = asyncio.create_task(
            ask(world.gateway.port, request("/v1/chat/completions", body, key=world.gateway.key))
        )
        small = request(*BODIES[1], key=world.gateway.key)
        waits = []
        while not long.done():
            async with Turns() as since:
                assert (await ask(world.gateway.port, small)).status == 200
                waits.append(since.seconds)
        assert (await long).status in (200, 400, 413, 429)
        assert max(waits, default=0) < 2.5
        await world.gateway.idle()
        world.upstream.forget()

    stage.run(scenario())


def test_truncated_bodies_never_reach_the_provider(scene):
    stage, world = scene

    async def scenario() -> None:
        whole = request(*BODIES[1], key=world.gateway.key, headers={"x-mark": "truncated"})
        before = (await world.emulator.ledger())["requests"]
        for size in (len(whole) - 1, len(whole) - 50, len(whole) // 2, 30):
            for close in (True, False):
                wire = await Wire.open(world.gateway.port)
                await wire.send(whole[:size])
                if close:
                    wire.writer.write_eof()
                    await wire.more()
                wire.drop()
        await world.gateway.idle()
        assert world.upstream.exchanges("x-mark: truncated") == []
        assert (await world.emulator.ledger())["requests"] == before

    stage.run(scenario())
