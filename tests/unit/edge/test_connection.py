"""A connection that is gone leaves nothing for the collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from gateway.clock import LoopClock
from gateway.connection import Connection
from gateway.link import LINK
from tests.sim.loop import run

REQUEST = b"GET /v1/models HTTP/1.1\r\nhost: here\r\n\r\n"


class Transport(asyncio.Transport):
    """A client's end: takes everything."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.closing = False
        self.reading = True

    def write(self, data: Any) -> None:
        pass

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def connected(app: Any) -> Connection:
    config = uvicorn.Config(app, interface="asgi3", lifespan="off", log_config=None)
    config.load()
    made = Connection(
        LoopClock(), {}, config=config, server_state=ServerState(), app_state={}, _loop=None
    )
    made.connection_made(Transport())
    return made


def left_after(app: Any, *, wait: float) -> bool:
    """Whether the connection is there after its client has left, without any collection."""

    async def main() -> bool:
        connection = connected(app)
        connection.data_received(REQUEST)
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        connection.connection_lost(None)
        seen = weakref.ref(connection)
        del connection
        await asyncio.sleep(wait)
        return seen() is not None

    gc.collect()
    gc.disable()
    try:
        return run(main())
    finally:
        gc.enable()


async def answering(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


async def waiting(_scope: Any, receive: Any, _send: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def test_an_idle_connection_is_gone_with_its_client():
    assert not left_after(answering, wait=0)


def test_a_connection_left_during_its_call_is_gone_once_nobody_looks_for_it():
    assert not left_after(waiting, wait=0.01)


def test_an_answered_exchange_is_gone_with_the_next_one():
    async def main() -> bool:
        connection = connected(answering)
        connection.data_received(REQUEST)
        await asyncio.sleep(0.01)
        seen = weakref.ref(connection.cycle)
        connection.data_received(REQUEST)
        await asyncio.sleep(0.01)
        return seen() is not None

    gc.collect()
    gc.disable()
    try:
        assert not run(main())
    finally:
        gc.enable()


def test_a_client_whose_large_body_is_here_is_heard_when_it_leaves():
    """Its body pauses the reading, and only a connection that is read learns of its end."""
    told: list[str] = []

    async def taking(scope: Any, _receive: Any, _send: Any) -> None:
        link = scope["extensions"][LINK]
        assert link.take() == b"x" * 100_000
        link.on_gone = lambda: told.append("gone")
        await asyncio.sleep(1)

    async def main() -> None:
        connection = connected(taking)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 100000\r\n\r\n"
        connection.data_received(head + b"x" * 100_000)
        assert not connection.transport.reading
        await asyncio.sleep(0.01)
        assert connection.transport.reading
        connection.connection_lost(None)

    run(main())
    assert told == ["gone"]
