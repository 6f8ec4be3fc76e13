"""The edge behind real uvicorn, spoken to in raw bytes, on both of its HTTP protocols.

httptools runs with `gateway.connection` in front, as it is served; h11 runs as it is. The two
parsers let different malformed heads through, so every case is sent to both.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import logging
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import uvicorn

from gateway import connection
from gateway.call import End
from gateway.clock import LoopClock
from gateway.edge import Edge, Hooks
from gateway.snapshot import EdgeRules, Provider, Snapshot, Tier
from tests.fixtures.asgi import CHAT, CHAT_STREAM
from tests.fixtures.fake_service import CUT, JSON, SSE, Answer, FakeService
from tests.fixtures.waiting import PATIENCE_S, Turns, until

pytestmark = pytest.mark.integration

SERVERS = ["httptools", "h11"]
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
FAST = Tier(name="t", number=1, keepalive_after=200_000, keepalive_every=200_000)


@dataclass
class Served:
    edge: Edge
    service: FakeService
    port: int
    crashed: list[BaseException]
    tasks: set[asyncio.Task[None]]
    server: uvicorn.Server

    async def settled(self) -> None:
        """Fails unless within two seconds nothing is left of any call."""
        calls = self.server.server_state.tasks  # a call that is over may still close its source
        for _ in range(200):
            if not self.edge.in_flight and not self.tasks and not calls:
                break
            await asyncio.sleep(0.01)
        assert self.edge.in_flight == 0
        assert self.edge.held == 0
        assert not self.tasks
        assert not calls
        assert not self.crashed, self.crashed


@contextlib.asynccontextmanager
async def serve(http: str, *answers: Answer, **rules: object) -> AsyncIterator[Served]:
    clock = LoopClock()
    service = FakeService(*answers)
    providers = {
        "up": Provider(name="up", dialects=frozenset(), base_url="", passthrough=("/v1/files*",))
    }
    snapshot = Snapshot(
        revision=1, digest="d", edge=EdgeRules(**rules), providers=providers, tiers=(FAST,) * 3
    )
    crashed: list[BaseException] = []
    tasks: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:

        def spawn(work):
            task = group.create_task(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return task

        edge = Edge(
            service=service,
            snapshot=lambda: snapshot,
            clock=clock,
            spawn=spawn,
            rng=random.Random(1),
            hooks=Hooks(crashed=lambda _id, error: crashed.append(error)),
        )
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(256)
        server = uvicorn.Server(
            uvicorn.Config(
                edge,
                http=connection.protocol(lambda: clock) if http == "httptools" else http,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=75,
            )
        )
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        running = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started:  # noqa: ASYNC110 - uvicorn offers no event
            await asyncio.sleep(0.01)
        served = Served(edge, service, sock.getsockname()[1], crashed, tasks, server)
        try:
            yield served
        finally:
            server.should_exit = True
            server.force_exit = True
            await running
            sock.close()


@dataclass
class Got:
    """What came back: head, body as framed, and how the connection ended."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    end: str  # clean, open, broken, reset
    raw: bytes

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, values
        return values[0] if values else None


def parse(raw: bytes, end: str) -> Got:
    while raw.startswith(b"HTTP/1.1 1"):
        raw = raw.partition(b"\r\n\r\n")[2]
    head, separator, rest = raw.partition(b"\r\n\r\n")
    if not separator:
        return Got(0, [], b"", end, raw)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = [(k.lower(), v.strip()) for k, _, v in (line.partition(":") for line in lines)]
    named = dict(headers)
    body, whole = rest, True
    if named.get("transfer-encoding") == "chunked":
        body, whole = b"", False
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size, 16)
            if count == 0:
                whole = True
                break
            body += rest[:count]
            rest = rest[count + 2 :]
    elif "content-length" in named:
        whole = len(rest) >= int(named["content-length"])
    if not whole and end in {"closed", "open"}:
        end = "broken"
    return Got(int(first.split()[1]), headers, body, end, raw)


async def talk(port: int, *parts: bytes | float, wait: float = 30.0, stop: bytes = b"") -> Got:
    """Send the parts (numbers are pauses) and read until the end, the answer's end or `stop`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = b""
    end = "open"

    async def read() -> None:
        nonlocal raw, end
        try:
            while data := await reader.read(65536):
                raw += data
                if stop and stop in raw:
                    return
                got = parse(raw, "open")
                if not stop and got.status and got.end == "open":
                    return
            end = "closed"
        except ConnectionError:
            end = "reset"

    reading = asyncio.create_task(read())
    try:
        for part in parts:
            if isinstance(part, bytes):
                with contextlib.suppress(ConnectionError):
                    writer.write(part)
                    await writer.drain()
            else:
                await asyncio.sleep(part)
        await asyncio.wait({reading}, timeout=wait)
    finally:
        reading.cancel()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return parse(raw, end)


def post(body: bytes = CHAT, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *lines]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


def on_both(test):
    return pytest.mark.parametrize("http", SERVERS)(test)


def run(main) -> None:
    asyncio.run(main)


AMBIGUOUS = {
    "length and chunked": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "gzip, chunked": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "xchunked": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two hosts": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.test\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\naccept: */*\r\n\r\n",
    "no host, old": b"GET /v1/models HTTP/1.0\r\naccept: */*\r\n\r\n",
    "two lengths": b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "two credentials": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n",
    "space before colon": b"GET /v1/models HTTP/1.1\r\nhost : localhost\r\n\r\n",
    "folded header": b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-a: 1\r\n  2\r\n"
    b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
    "not http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "garbage": b"hello there\r\n\r\n",
}


@on_both
@pytest.mark.parametrize("raw", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_an_ambiguous_head_is_refused_and_its_connection_closed(http, raw):
    async def main():
        async with serve(http) as served:
            got = await talk(served.port, raw, stop=b"never")
            assert got.status == 400
            assert got.end == "closed"
            assert not served.service.calls
            await served.settled()

    run(main())


@on_both
def test_a_call_passes_and_the_connection_is_used_again(http):
    body = b'{"model":"m", "messages" : [ ],"x":"\\u00e9"}'
    answer = b'{"id":"c1","usage":{"prompt_tokens":9}}'
    length = [*JSON, (b"content-length", b"%d" % len(answer)), (b"set-cookie", b"a"),
              (b"set-cookie", b"b"), (b"date", b"Sun, 29 Nov 2026 16:00:00 GMT")]  # fmt: skip

    async def main():
        async with serve(http, Answer(headers=length, body=[answer])) as served:
            got = await talk(served.port, post(body), post(body), wait=2, stop=b"never")
            assert got.raw.count(b"HTTP/1.1 200 OK") == 2
            assert got.raw.count(b"date:") + got.raw.count(b"Date:") == 2
            assert [v for k, v in got.headers if k == "set-cookie"] == ["a", "b"]
            assert [call.body for call in served.service.calls] == [body, body]
            assert served.service.ends == [End.COMPLETE, End.COMPLETE]
            await served.settled()

    run(main())


@on_both
def test_bodies_arrive_whole_in_one_byte_parts_and_in_odd_chunks(http):
    one_byte = [post()[i : i + 1] for i in range(len(post()))]
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    chunked = head + b"".join(b"1;ext=1\r\n%c\r\n" % byte for byte in CHAT) + b"0\r\n\r\n"

    async def main():
        async with serve(http) as served:
            assert (await talk(served.port, *one_byte)).status == 200
            assert (await talk(served.port, chunked)).status == 200
            assert [call.body for call in served.service.calls] == [CHAT, CHAT]
            await served.settled()

    run(main())


@on_both
def test_trailers_never_become_headers(http):
    raw = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n"
        b"authorization: Bearer smuggled\r\ntidegate-tier: 1\r\n\r\n" % (len(CHAT), CHAT)
    )

    async def main():
        async with serve(http) as served:
            assert (await talk(served.port, raw)).status == 200
            (call,) = served.service.calls
            assert call.header(b"authorization") is None
            assert call.header(b"tidegate-tier") is None

    run(main())


@on_both
def test_thirty_three_megabytes_pass_byte_identical(http):
    body = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"%b"}]}' % (
        b"AbCd" * 8_250_000
    )

    async def main():
        async with serve(http) as served:
            got = await talk(served.port, post(body, path="/v1/messages"))
            assert got.status == 200
            sent = hashlib.sha256(served.service.calls[0].body).digest()
            assert sent == hashlib.sha256(body).digest()
            await served.settled()

    run(main())


@on_both
def test_expect_100_continue_is_answered_and_the_body_read(http):
    head, _, body = post(CHAT, "expect: 100-continue").partition(b"\r\n\r\n")

    async def main():
        async with serve(http) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head + b"\r\n\r\n")
            assert b"100" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            writer.write(body)
            assert b"200" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            writer.close()
            await served.settled()

    run(main())


@on_both
def test_ten_declared_gigabytes_are_refused_from_the_head(http):
    raw = (
        b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nx-api-key: k\r\n"
        b"content-length: 10000000000\r\n\r\n" + b'{"model":"m-1"'
    )

    async def main():
        async with serve(http) as served:
            got = await talk(served.port, raw)
            assert got.status == 413
            assert b"Tidegate" in got.body
            assert got.header("connection") == "close"

    run(main())


@on_both
def test_a_sender_of_too_much_comes_to_read_why(http):
    """Without lingering, closing with unread bytes resets the connection before the 413 is read."""
    body = b'{"model":"' + b"x" * 3_000_000

    async def main():
        async with serve(http, max_body=100_000) as served:
            for framing in (
                b"content-length: 3000010\r\n\r\n",
                b"transfer-encoding: chunked\r\n\r\n",
            ):
                raw = b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\n" + framing
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(raw)
                if b"chunked" in framing:
                    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
                else:
                    writer.write(body)
                await writer.drain()  # everything was sent before anything is read
                answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
                assert answer.startswith(b"HTTP/1.1 413")
                assert b"Tidegate" in answer
                writer.close()
            await served.settled()

    run(main())


@on_both
def test_a_bomb_is_a_413_and_the_process_stays_small(http):
    bomb = gzip.compress(b'{"model":"m","messages":["' + b" " * 60_000_000 + b'"]}')

    async def main():
        async with serve(http) as served:
            got = await talk(served.port, post(bomb, "content-encoding: gzip"))
            assert got.status == 413
            await served.settled()

    run(main())


@on_both
def test_websocket_upgrades_are_told_426(http):
    raw = (
        b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\n"
        b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )

    async def main():
        async with serve(http) as served:
            assert (await talk(served.port, raw)).status == 426

    run(main())


@on_both
def test_head_options_and_hello_have_no_body(http):
    async def main():
        async with serve(http, cors_origins=("https://a.example",)) as served:
            hello = b"HEAD /api/hello HTTP/1.1\r\nhost: localhost\r\n\r\n"
            assert (await talk(served.port, hello)).status == 204
            got = await talk(
                served.port, b"HEAD /v1/messages HTTP/1.1\r\nhost: localhost\r\n\r\n",
                stop=b"\r\n\r\n",
            )  # fmt: skip
            assert (got.status, got.header("allow"), got.body) == (405, "POST", b"")
            got = await talk(
                served.port,
                b"OPTIONS /v1/messages HTTP/1.1\r\nhost: localhost\r\norigin: https://a.example\r\n"
                b"access-control-request-headers: x-api-key\r\n\r\n",
            )
            assert got.status == 204
            assert got.header("access-control-allow-headers") == "x-api-key"

    run(main())


@on_both
@pytest.mark.parametrize("fault", ["cut", "short", "escape"])
def test_a_broken_body_never_ends_cleanly(http, fault, caplog):
    caplog.set_level(logging.CRITICAL)
    answer = {
        "cut": Answer(headers=list(SSE), body=[EVENT, 0.05, CUT]),
        "short": Answer(headers=[*JSON, (b"content-length", b"50")], body=[b"abc"]),
        "escape": Answer(headers=list(SSE), body=[EVENT, 0.05, ZeroDivisionError()]),
    }[fault]

    async def main():
        async with serve(http, answer) as served:
            got = await talk(served.port, post(CHAT_STREAM))
            assert got.status == 200
            assert got.end in {"broken", "reset"}
            assert (b'{"error":' in got.body) == (fault != "short")
            served.crashed.clear()
            await served.settled()
            assert not served.server.server_state.connections

    run(main())


def test_breaking_off_is_no_error_of_the_servers_log(caplog):
    async def main():
        async with serve("httptools", Answer(headers=list(SSE), body=[EVENT, CUT])) as served:
            assert (await talk(served.port, post(CHAT_STREAM))).end == "broken"

    run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@on_both
def test_the_first_event_arrives_alone(http):
    async def main():
        async with serve(http, Answer(headers=list(SSE), body=[EVENT, 3.0, EVENT])) as served:
            async with Turns() as since:
                got = await talk(served.port, post(CHAT_STREAM), stop=EVENT)
                assert since.seconds < 1.5
            assert EVENT in got.raw
            await served.settled()

    run(main())


@on_both
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("stage", ["body", "waiting", "kept alive", "streaming"])
def test_a_client_that_leaves_is_noticed_within_a_second(http, stage, reset):
    async def identify(call):
        call.tier = FAST

    answer = Answer(before=identify, wait=30, headers=list(SSE), body=[EVENT] * 3)
    if stage == "streaming":
        answer = Answer(headers=list(SSE), body=[EVENT, 30.0])

    async def main():
        async with serve(http, answer) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            raw = post(CHAT_STREAM)
            writer.write(raw[:-5] if stage == "body" else raw)
            await writer.drain()
            if stage in {"kept alive", "streaming"}:
                await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            elif stage == "waiting":
                await until(lambda: served.service.inside)
            else:
                await until(lambda: served.edge.in_flight)
            assert served.edge.in_flight == 1
            if reset:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
            async with Turns() as since:
                await until(lambda: not served.edge.in_flight)
                assert since.seconds < 1.0
            await served.settled()
            assert set(served.service.ends) <= {End.CLIENT_GONE}
            assert served.service.cancelled == (stage in {"waiting", "kept alive"})

    run(main())


@on_both
def test_a_thousand_aborts_leave_nothing(http):
    generator = random.Random(11)
    answers = Answer(wait=0.02, headers=list(SSE), body=[EVENT, 0.02, EVENT, 0.02, EVENT])

    async def abort(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post(CHAT_STREAM))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1 << 20), generator.random() * 0.08)
        if generator.random() < 0.5:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async def main():
        async with serve(http, answers) as served:
            for _ in range(20):
                await asyncio.gather(*(abort(served) for _ in range(50)))
            await served.settled()
            assert len(served.service.ends) + served.service.cancelled <= 1000
            assert (await talk(served.port, post(CHAT_STREAM))).status == 200
            assert len(served.edge._clock.deadlines) < 3100  # type: ignore[attr-defined]

    run(main())


@on_both
def test_a_pass_through_upload_streams_and_leaving_it_is_noticed(http):
    seen: list[bytes] = []

    async def upload(call):
        seen.extend([part async for part in call.upload])

    async def main():
        async with serve(http, Answer(before=upload)) as served:
            body = b"x" * 300_000
            got = await talk(served.port, post(body, path="/v1/files"))
            assert got.status == 200
            assert b"".join(seen) == body
            assert len(seen) > 1
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(post(body, path="/v1/files")[:-9])
            await until(lambda: served.service.inside)
            assert served.edge.in_flight == 1
            writer.close()
            await served.settled()
            assert served.service.cancelled == 1

    run(main())


def test_an_endless_head_is_cut_off():
    async def main():
        async with serve("httptools") as served:
            parts = [b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"]
            parts += [b"x-%d: %b\r\n" % (n, b"y" * 8000) for n in range(50)]
            got = await talk(served.port, *parts, stop=b"never")
            assert got.status in {431, 0}
            assert got.end in {"closed", "reset"}
            await served.settled()

    run(main())


def test_a_slow_head_is_given_up(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIME", 300_000)

    async def main():
        async with serve("httptools") as served:
            for opening in (b"", b"GET /v1/mo", post() + b"GET /v1/mo"):
                got = await talk(served.port, opening, stop=b"never")
                assert got.end == "closed", opening
            await served.settled()
            # What is idle between two requests is not slow.
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(post())
            await reader.read(65536)
            await asyncio.sleep(1)
            writer.write(post())
            assert b"200 OK" in await asyncio.wait_for(reader.read(65536), PATIENCE_S)
            writer.close()

    run(main())


def test_a_client_that_pipelined_and_left_ends_the_call_it_waits_for():
    async def main():
        async with serve(
            "httptools", Answer(wait=0.5, headers=list(SSE), body=[EVENT, 0.2] * 200)
        ) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(post(CHAT_STREAM) + post(CHAT_STREAM))
            await until(lambda: served.service.replies)
            assert served.edge.in_flight == 1
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
            async with Turns() as since:
                await until(lambda: not served.edge.in_flight)
                assert since.seconds < 1.5
            assert len(served.service.calls) == 1
            await served.settled()

    run(main())


@pytest.mark.parametrize("ahead", [1, connection.MOST_AHEAD - 1])
def test_a_client_that_pipelines_while_its_call_waits_is_heard_when_it_leaves(ahead):
    async def main():
        async with serve("httptools", Answer(wait=2 * PATIENCE_S)) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(post(CHAT_STREAM))
            await until(lambda: served.service.inside)
            [client] = served.server.server_state.connections
            writer.write(post(CHAT_STREAM) * ahead)
            await until(lambda: len(client.pipeline) == ahead)  # type: ignore[attr-defined]
            writer.close()
            async with Turns() as since:
                await until(lambda: not served.edge.in_flight)
                assert since.seconds < 1.5
            assert served.service.cancelled == len(served.service.calls) == 1
            await served.settled()

    run(main())


def test_what_is_pipelined_is_read_to_a_bound_and_all_of_it_answered():
    many = 3 * connection.MOST_AHEAD

    async def main():
        async with serve("httptools", Answer(wait=0.5), Answer()) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            for _ in range(many):
                writer.write(post())
                await asyncio.sleep(0.002)  # each is read by itself
            [client] = served.server.server_state.connections
            await until(lambda: client.flow.read_paused)  # type: ignore[attr-defined]
            assert len(client.pipeline) <= connection.MOST_AHEAD  # type: ignore[attr-defined]
            raw = b""
            while raw.count(b"HTTP/1.1 200 OK") < many:
                raw += await asyncio.wait_for(reader.read(65536), PATIENCE_S)
            writer.close()
            await served.settled()
            assert len(served.service.calls) == many

    run(main())


@on_both
def test_a_client_that_stops_reading_holds_the_upstream_back(http):
    async def main():
        body: list[object] = [b"x" * 65536] * 400
        async with serve(http, Answer(headers=list(SSE), body=body)) as served:  # type: ignore[arg-type]
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            sock.connect(("127.0.0.1", served.port))
            sock.sendall(post(CHAT_STREAM))
            await until(lambda: served.service.replies)
            await asyncio.sleep(1)
            _, source, _ = served.service.replies[0]
            assert source.read < 120  # the kernel's buffers and ours, not 26 MB
            sock.close()
            await served.settled()

    run(main())


@on_both
def test_random_bytes_never_hang_or_crash_the_edge(http, caplog):
    caplog.set_level(logging.CRITICAL)
    generator = random.Random(5)
    base = post(CHAT, "authorization: Bearer k", "x-a: 1")

    def mutated() -> bytes:
        raw = bytearray(base)
        for _ in range(generator.randint(1, 6)):
            at = generator.randrange(len(raw))
            match generator.randrange(4):
                case 0:
                    raw[at] = generator.randrange(256)
                case 1:
                    del raw[at]
                case 2:
                    raw[at:at] = generator.choice(
                        [b"\r\n", b"\x00", b"chunked", b": ", b"content-length: 3\r\n", b"\xff"]
                    )
                case _:
                    raw[at:at] = raw[at : at + 20]
        return bytes(raw)

    async def one(served: Served) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(mutated())
        writer.write_eof()
        raw = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            raw = await asyncio.wait_for(reader.read(4096), 0.5)
        writer.close()
        return parse(raw, "open").status

    async def main():
        async with serve(http) as served:
            statuses: set[int] = set()
            for _ in range(8):
                statuses |= set(await asyncio.gather(*(one(served) for _ in range(40))))
            assert not [status for status in statuses if status >= 500], statuses
            assert 400 in statuses
            await served.settled()
            assert (await talk(served.port, post())).status == 200

    run(main())
