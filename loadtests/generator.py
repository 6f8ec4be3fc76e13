"""The load generator: a closed loop of asyncio connections over httptools.

N connections, kept alive; each sends the next request when its answer is complete. Errors and
reconnects are counted, never hidden: a run with one is no measurement. Times are the loop's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Tally:
    """What a run saw.

    Attributes:
        calls: Complete answers of status 200.
        errors: Anything else, by kind.
        reconnects: Connections opened after the first of each slot.
        events: Server-sent events read.
        latencies, first_bytes: Seconds from sending to the end, to the first byte of the body.
    """

    calls: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    reconnects: int = 0
    events: int = 0
    latencies: list[float] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)

    def error(self, kind: str) -> None:
        """Count one."""
        self.errors[kind] = self.errors.get(kind, 0) + 1

    @property
    def failures(self) -> int:
        """Errors of all kinds."""
        return sum(self.errors.values())


def percentile(values: list[float], share: float) -> float | None:
    """The nearest-rank percentile; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


def post(
    path: str,
    body: bytes,
    *,
    key: str = "",
    host: str = "127.0.0.1",
    headers: dict[str, str] | None = None,
) -> bytes:
    """A POST as bytes."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
    if key:
        lines.append(f"authorization: Bearer {key}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines.append(f"content-length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Client(asyncio.Protocol):
    """One kept-alive connection; `exchange` sends a request and waits for the whole answer."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._done: asyncio.Future[int] | None = None
        self._sent_at = 0.0
        self._open_end = False
        self.status = 0
        self.first_at: float | None = None
        self.size = 0
        self.events = 0
        self.on_data: Callable[[bytes], None] | None = None
        self.on_head: Callable[[bytes], None] | None = None
        self.lost = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("closed within an answer"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._done is not None and not self._done.done():
                self._done.set_exception(ConnectionError(f"no HTTP: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.on_head is not None:
            self.on_head(name + b": " + value)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.size += len(body)
        self.events += body.count(b"\n\n")
        if self.on_data is not None:
            self.on_data(body)

    def on_message_complete(self) -> None:
        if self.status >= 200 and self._done is not None and not self._done.done():
            self._done.set_result(self.status)

    def exchange(self, request: bytes) -> asyncio.Future[int]:
        """Send; the future holds the status once the answer is complete."""
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.status = self.size = self.events = 0
        self.first_at = None
        self._sent_at = time.perf_counter()
        self._transport.write(request)
        return self._done

    @property
    def sent_at(self) -> float:
        """When the last request was written."""
        return self._sent_at

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


async def connect(port: int) -> Client:
    """A connection to that port of this machine."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(Client, "127.0.0.1", port)
    return client


async def closed_loop(
    port: int,
    requests: Callable[[int], bytes],
    *,
    concurrency: int,
    until: Callable[[Tally], bool],
    limit: float = 30.0,
) -> Tally:
    """Keep that many calls in flight until `until` says enough.

    Args:
        port: Where the server listens.
        requests: The n-th request of the run.
        concurrency: Connections, each with one call in flight.
        until: Asked after each call.
        limit: Seconds after which a call counts as hung.
    """
    tally = Tally()
    number = iter(range(1 << 60))

    async def slot() -> None:
        client: Client | None = None
        first = True
        try:
            while not until(tally):
                if client is None or client.lost:
                    client = await connect(port)
                    tally.reconnects += not first
                    first = False
                await one(client)
        finally:
            if client is not None:
                client.close()

    async def one(client: Client) -> None:
        try:
            async with asyncio.timeout(limit):
                status = await client.exchange(requests(next(number)))
        except (ConnectionError, OSError) as error:
            tally.error(type(error).__name__)
            client.close()
            client.lost = True
            return
        except TimeoutError:
            tally.error("hung")
            client.close()
            client.lost = True
            return
        now = time.perf_counter()
        if status != 200:
            tally.error(f"status {status}")
            return
        tally.calls += 1
        tally.events += client.events
        tally.latencies.append(now - client.sent_at)
        if client.first_at is not None:
            tally.first_bytes.append(client.first_at - client.sent_at)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(slot())
    return tally


async def paced(
    port: int, requests: Callable[[int], bytes], *, rate: float, seconds: float, limit: float = 30.0
) -> Tally:
    """Start calls at a fixed rate, whatever the answers do; idle connections are reused.

    An open loop: latencies of a slow server are not hidden by the client waiting for it.
    """
    tally = Tally()
    idle: list[Client] = []

    async def one(request: bytes) -> None:
        client = None
        while idle and client is None:
            client = idle.pop()
            if client.lost:
                client = None
        try:
            if client is None:
                client = await connect(port)
            async with asyncio.timeout(limit):
                status = await client.exchange(request)
        except (ConnectionError, OSError, TimeoutError) as error:
            tally.error(type(error).__name__)
            if client is not None:
                client.close()
            return
        now = time.perf_counter()
        if status != 200:
            tally.error(f"status {status}")
        else:
            tally.calls += 1
            tally.events += client.events
            tally.latencies.append(now - client.sent_at)
            if client.first_at is not None:
                tally.first_bytes.append(client.first_at - client.sent_at)
        idle.append(client)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            wait = began + number / rate - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(one(requests(number)))
    for client in idle:
        client.close()
    return tally


async def fetch(port: int, path: str) -> bytes:
    """The body of a GET; for counters and metrics beside a run.

    Raises:
        ConnectionError: No complete answer.
    """
    parts: list[bytes] = []
    client = await connect(port)
    client.on_data = parts.append
    try:
        async with asyncio.timeout(10):
            await client.exchange(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
    except TimeoutError as error:
        raise ConnectionError(f"{path}: no answer") from error
    finally:
        with contextlib.suppress(Exception):
            client.close()
    return b"".join(parts)
