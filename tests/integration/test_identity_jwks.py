"""Key sets fetched over real sockets and from real files: bounded, kept, shared."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from dataclasses import replace

import pytest

from gateway.call import Principal
from gateway.clock import LoopClock
from gateway.errors import StoreUnavailable
from gateway.identity import Identities, JwksSource, keysets
from tests.fixtures.waiting import Turns
from tests.unit.identity.ground import ISSUER, NOW, bearer, jwk, jwks, snapshot, token

pytestmark = pytest.mark.integration

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"


def framed(body: bytes) -> bytes:
    return OK + b"content-length: %d\r\n\r\n" % len(body) + body


class Server:
    """An identity provider that answers with raw bytes; counts requests."""

    def __init__(self) -> None:
        self.answer = framed(jwks(jwk("ES256", "a")))
        self.drip = 0.0
        self.requests = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader, writer) -> None:
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            if self.drip:
                for at in range(len(self.answer)):
                    writer.write(self.answer[at : at + 1])
                    await writer.drain()
                    await asyncio.sleep(self.drip)
            writer.write(self.answer)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def world(server: Server):
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    source = JwksSource()
    who = Identities(clock=LoopClock(), fetch=source)
    issuer = replace(ISSUER, jwks_url=f"http://127.0.0.1:{port}/jwks")
    try:
        yield who, snapshot(jwt=(issuer,))
    finally:
        await source.close()
        listener.close()
        for writer in server.writers:
            writer.transport.abort()
        await listener.wait_closed()
        await asyncio.sleep(0.1)  # the connections' tasks see it


async def ask(who: Identities, snap, text: str, now: float = NOW) -> Principal:
    found = who.principal(snap, bearer(text), "192.0.2.1", now)
    return await found if inspect.isawaitable(found) else found


def test_a_key_set_is_fetched_once_for_a_crowd_and_again_for_a_new_key():
    async def run():
        server = Server()
        async with world(server) as (who, snap):
            crowd = [ask(who, snap, token(kid="a", n=n)) for n in range(50)]
            assert {principal.agent for principal in await asyncio.gather(*crowd)} == {"worker"}
            assert server.requests == 1
            server.answer = framed(jwks(jwk("ES256", "b", number=1)))
            later = NOW + 31
            assert await ask(who, snap, token(kid="b", number=1), later)
            assert server.requests == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not http\r\n\r\n",
        b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
        framed(b"<html>"),
        framed(b'{"keys":[]}'),
        OK + b"content-length: 100\r\n\r\n{",
        OK + b"content-encoding: gzip\r\ncontent-length: 5\r\n\r\nnogzi",
    ],
)
def test_a_bad_answer_is_our_fault_and_later_keeps_the_good_set(answer):
    async def run():
        server = Server()
        good, server.answer = server.answer, answer
        async with world(server) as (who, snap):
            with pytest.raises(StoreUnavailable):
                await ask(who, snap, token(kid="a"))
            assert who.key_set_faults(snap)
            server.answer = good
            assert (await ask(who, snap, token(kid="a"), NOW + 6)).agent == "worker"
            server.answer = answer
            old = NOW + 1000
            assert (await ask(who, snap, token(kid="a", exp=old + 9), old)).agent == "worker"
            assert server.requests == 3

    asyncio.run(run())


def test_an_endless_answer_is_cut():
    async def run():
        server = Server()
        server.answer = OK + b"\r\n" + b" " * 4_000_000
        async with world(server) as (who, snap):
            with pytest.raises(StoreUnavailable):
                await ask(who, snap, token(kid="a"))
            assert "too large" in who.key_set_faults(snap)["corp"]

    asyncio.run(run())


def test_a_bomb_is_cut_while_it_unpacks():
    import gzip

    async def run():
        server = Server()
        bomb = gzip.compress(b" " * 50_000_000)
        server.answer = (
            OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb
        )
        async with world(server) as (who, snap):
            with pytest.raises(StoreUnavailable):
                await ask(who, snap, token(kid="a"))
            assert "too large" in who.key_set_faults(snap)["corp"]

    asyncio.run(run())


def test_a_source_that_sends_byte_by_byte_is_given_up(monkeypatch):
    monkeypatch.setattr(keysets, "JWKS_TIMEOUT", 300_000)

    async def run():
        server = Server()
        server.drip = 0.05
        async with world(server) as (who, snap):
            async with Turns() as since:
                with pytest.raises(StoreUnavailable):
                    await ask(who, snap, token(kid="a"))
                assert since.seconds < 3
            assert "in time" in who.key_set_faults(snap)["corp"]

    asyncio.run(run())


def test_nobody_listening_is_our_fault():
    async def run():
        source = JwksSource()
        who = Identities(clock=LoopClock(), fetch=source)
        issuer = replace(ISSUER, jwks_url="http://127.0.0.1:1/jwks")
        with pytest.raises(StoreUnavailable):
            await ask(who, snapshot(jwt=(issuer,)), token(kid="a"))
        await source.close()

    asyncio.run(run())


def test_this_machine_is_never_asked_through_a_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def run():
        async with world(Server()) as (who, snap):
            assert (await ask(who, snap, token(kid="a"))).agent == "worker"

    asyncio.run(run())


def test_a_key_set_file_is_read_and_read_again_for_a_new_key(tmp_path):
    path = tmp_path / "jwks.json"
    issuer = replace(ISSUER, jwks_url="", jwks_file=str(path))

    async def run():
        who, snap = Identities(clock=LoopClock(), fetch=JwksSource()), snapshot(jwt=(issuer,))
        with pytest.raises(StoreUnavailable):
            await ask(who, snap, token(kid="a"))
        path.write_bytes(jwks(jwk("ES256", "a")))
        assert (await ask(who, snap, token(kid="a"), NOW + 6)).agent == "worker"
        path.write_bytes(b" " * 1_000_000)
        old = NOW + 1000
        assert (await ask(who, snap, token(kid="a", exp=old + 9), old)).agent == "worker"
        assert "too large" in who.key_set_faults(snap)["corp"]

    asyncio.run(run())
