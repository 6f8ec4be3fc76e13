"""A wire between a gateway and its store that can be cut, or made slow, without ending it."""

from __future__ import annotations

import asyncio
import contextlib


class Wire:
    """A relay on loopback.

    Attributes:
        cut: Bytes vanish, in both directions; connections stand, as behind a dead switch.
        delay_s: What answers of the store take longer.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut = False
        self.delay_s = 0.0
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # the loop closes the sockets in steps of its own

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        pumps = (
            asyncio.create_task(self._pump(reader, back, slow=False)),
            asyncio.create_task(self._pump(there, writer, slow=True)),
        )
        for pump in pumps:
            self._tasks.add(pump)
            pump.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, slow: bool
    ) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65_536):
                    if slow and self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    if self.cut:
                        continue
                    sink.write(data)
                    await sink.drain()
        finally:
            sink.transport.abort()
