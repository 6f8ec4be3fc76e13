"""The emulator on a socket: uvicorn, with a door to the transport that can break connections.

RST is what a peer sees when a socket is closed while SO_LINGER is (on, 0 s): the kernel drops what
is unsent and resets. Both asyncio's and uvloop's transports give out the socket for that. FIN in
the middle of a body is an ordinary close of the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.clock import LoopClock
from gateway.emulator.app import Emulator
from gateway.emulator.exchange import EXTENSION
from gateway.emulator.text import Tokenizer, approximate

if TYPE_CHECKING:
    from gateway.emulator.config import EmulatorConfig

BACKLOG = 4_096
KEEP_ALIVE = 75
"""Seconds: longer than any client keeps an idle connection, so that none dies under a request."""

STOP_GRACE = 1
"""Seconds that calls under way get when the emulator stops."""


class _Connection:
    """The transport as the exchange sees it; one per connection."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol

    @property
    def gone(self) -> bool:
        transport = self._protocol.transport
        return transport.is_closing()

    def pending(self) -> int:
        transport: Any = self._protocol.transport
        return int(transport.get_write_buffer_size())

    def close(self) -> None:
        self._protocol.transport.close()

    def reset(self) -> None:
        transport = self._protocol.transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, whose scopes carry the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio sets it, uvloop too; a fault that writes single bytes depends on it.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._extensions = {EXTENSION: _Connection(self)}

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]


class _Server(uvicorn.Server):
    """A server that leaves the process's signals to whoever runs it."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listening, and the caller knows."""
        await super().startup(sockets)
        if self.started:
            self._tell()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket.

    Raises:
        OSError: The address is not ours or is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


async def serve(
    config: EmulatorConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ready: Callable[[int], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    tokenizer: Tokenizer = approximate,
) -> None:
    """Serve until `stop` is set or the task is cancelled; `ready` is told the port.

    Signals are not touched. Cancelling closes the listener and every connection.

    Raises:
        OSError: The address is not ours or is in use.
    """
    app = Emulator(config, LoopClock(), tokenizer=tokenizer)
    await _serve(app, bind(host, port), ready, stop or asyncio.Event())


async def _serve(
    app: Emulator, sock: socket.socket, ready: Callable[[int], None], stop: asyncio.Event
) -> None:
    listening = sock.getsockname()[1]
    settings = uvicorn.Config(
        app, http=_Protocol, ws="none", lifespan="off", log_config=None, log_level="critical",
        access_log=False, server_header=False, proxy_headers=False, backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=STOP_GRACE,
    )  # fmt: skip
    server = _Server(settings, lambda: ready(listening))

    async def watch() -> None:
        await stop.wait()
        server.should_exit = True

    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch())
            try:
                await server.serve([sock])
            finally:
                watcher.cancel()
    finally:
        if not server.should_exit:
            # Cancelled: uvicorn's own shutdown did not run.
            for listener in getattr(server, "servers", []):
                listener.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            for task in list(server.server_state.tasks):
                task.cancel()
        sock.close()


@dataclass(frozen=True, slots=True)
class Running:
    """A served emulator.

    Attributes:
        app: For its controls.
        port, url: Where; the OpenAI base URL is `url + "/v1"`, the Anthropic one `url`.
    """

    app: Emulator
    port: int

    @property
    def url(self) -> str:
        """Scheme, host and port."""
        return f"http://127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def running(
    config: EmulatorConfig, *, port: int = 0, tokenizer: Tokenizer = approximate
) -> AsyncIterator[Running]:
    """An emulator on loopback for the time of the block."""
    app = Emulator(config, LoopClock(), tokenizer=tokenizer)
    sock = bind("127.0.0.1", port)
    up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    def ready(listening: int) -> None:
        if not up.done():
            up.set_result(listening)

    failure: BaseException | None = None
    async with asyncio.TaskGroup() as group:
        group.create_task(_serve(app, sock, ready, stop))
        try:
            yield Running(app, await up)
        except Exception as error:  # noqa: BLE001 - raised below, outside the group that would wrap it
            failure = error
        finally:
            stop.set()
    if failure is not None:
        raise failure
