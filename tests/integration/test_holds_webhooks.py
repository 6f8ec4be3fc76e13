"""Deliveries on a real socket: the checked address is the one connected to, and nothing is read."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from gateway import webhooks
from gateway.clock import LoopClock
from gateway.snapshot import Secret, WebhookRules
from gateway.units import MICRO
from gateway.webhooks import Delivered, Undelivered, Webhooks, target

pytestmark = pytest.mark.integration

RULES = WebhookRules(
    secret=Secret("a signing key of 24 or more"), hosts=("hooks.test:*",), networks=("127.0.0.0/8",)
)


class Server:
    """Answers with these bytes; None never answers."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            if self.answer is None:
                await reader.read()
            else:
                writer.write(self.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def server(answer: bytes | None):
    made = Server(answer)
    running = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = running.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        running.close()
        await running.wait_closed()


def deliver(answer: bytes | None, *, scheme: str = "http") -> tuple[object, Server]:
    """What became of one delivery to `hooks.test`, which resolves to this machine once."""

    async def main() -> tuple[object, Server]:
        asked: list[str] = []

        async def resolve(host: str, _port: int) -> list[str]:
            asked.append(host)
            # A name that is rebound after the check: it must not be asked a second time.
            return ["127.0.0.1"] if len(asked) == 1 else ["10.255.255.1"]

        async with server(answer) as made:
            hooks = Webhooks(LoopClock(), resolve)
            try:
                one = target(f"{scheme}://hooks.test:{made.port}/path?q=1")
                outcome = await hooks.send(one, b'{"a":1}', id="d1", rules=RULES)
            finally:
                await hooks.close()
            assert asked == ["hooks.test"]
            return outcome, made

    return asyncio.run(main())


def head(status: str, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "content-length: 0", *lines, "", ""]).encode()


def test_the_checked_address_is_connected_to_under_the_name_of_the_url():
    outcome, made = deliver(head("200 OK"))
    assert outcome == Delivered(200)
    [sent] = made.heads
    lines = sent.decode().lower().split("\r\n")
    assert lines[0] == "post /path?q=1 http/1.1"
    assert f"host: hooks.test:{made.port}" in lines
    assert "webhook-id: d1" in lines
    assert any(line.startswith("webhook-signature: v1,") for line in lines)
    assert not [line for line in lines if line.startswith(("cookie", "authorization"))]


def test_a_redirect_is_not_followed_and_is_no_delivery():
    outcome, made = deliver(head("302 Found", "location: http://127.0.0.1:1/"))
    assert outcome == Undelivered("hooks.test answered 302", again=True)
    assert len(made.heads) == 1


@pytest.mark.parametrize(
    ("answer", "again", "wait"),
    [
        (head("410 Gone"), False, 0),
        (head("429 Too Many", "retry-after: 7"), True, 7 * MICRO),
        (head("503 Away", "retry-after: soon"), True, 0),
        (b"not http\r\n\r\n", True, 0),
        (b"", True, 0),
    ],
)
def test_what_the_receiver_says_decides_whether_to_come_back(answer, again, wait):
    outcome, _ = deliver(answer)
    assert isinstance(outcome, Undelivered)
    assert (outcome.again, outcome.retry_after) == (again, wait)


def test_an_endless_answer_is_not_read():
    endless = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n" + b"x" * 100_000
    assert deliver(endless)[0] == Delivered(200)


def test_a_receiver_that_never_answers_is_left(monkeypatch):
    monkeypatch.setattr(webhooks, "TOTAL", MICRO // 5)
    outcome, _ = deliver(None)
    assert outcome == Undelivered("hooks.test did not answer in time", again=True)


def test_a_receiver_that_speaks_no_tls_is_not_spoken_to():
    outcome, made = deliver(b"HTTP/1.1 200 OK\r\n\r\n", scheme="https")
    assert isinstance(outcome, Undelivered)
    assert not [one for one in made.heads if one.startswith(b"POST")]
