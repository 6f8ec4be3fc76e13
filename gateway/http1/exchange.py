"""One request and its answer on one channel.

A small request is one write and one wait; a large or streamed one leaves in pieces while the answer
is awaited, because a head that comes first ends the upload. What had left when something broke is
told exactly: `sent` is "nothing" only where the kernel took no byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from gateway.http1.channel import HEAD, OVER
from gateway.upstream import INLINE, TransportFault, slices

if TYPE_CHECKING:
    from gateway.call import HeaderList
    from gateway.http1.channel import Channel
    from gateway.http1.pool import Pool
    from gateway.upstream import Outgoing, Sent, Take


class Exchange:
    """Implements `Incoming` once `run` has returned."""

    __slots__ = ("_channel", "_fault", "_pool", "_sent", "headers", "status")

    def __init__(self, pool: Pool, channel: Channel) -> None:
        self.status = 0
        self.headers: HeaderList = []
        self._pool = pool
        self._channel: Channel | None = channel
        self._sent: Sent = "nothing"
        self._fault: TransportFault | None = None

    async def run(self, out: Outgoing, head: bytes) -> None:
        """The request has left and the head of the answer is here, or the channel is gone.

        Raises:
            TransportFault: Before the head was complete.
        """
        channel = self._channel
        assert channel is not None  # noqa: S101 - called once, first of all
        channel.begin(bodiless=out.method == "HEAD")
        try:
            if out.upload is None and len(out.body) <= INLINE:
                self._write(channel, head + out.body)
                self._sent = "all"
                await self._read_head(channel)
            else:
                self._write(channel, head)
                await self._converse(channel, out)
        except BaseException:
            self._leave(reuse=False)
            raise
        self.status = channel.status
        self.headers = channel.headers

    def _write(self, channel: Channel, data: bytes) -> None:
        if not channel.write(data):
            raise TransportFault("reset", sent="nothing", detail="closed before the first byte")
        self._sent = "unknown"

    async def _read_head(self, channel: Channel) -> None:
        while channel.phase == HEAD:
            if channel.broke is not None:
                raise self._broken(channel)
            await channel.changed()

    async def _converse(self, channel: Channel, out: Outgoing) -> None:
        """Body out, head in, at the same time; a head that comes first ends the upload."""
        try:
            async with asyncio.TaskGroup() as both:
                upload = both.create_task(self._upload(channel, out))
                await self._read_head(channel)
                upload.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        if self._sent != "all":
            channel.reusable = False  # half a request is in it

    async def _upload(self, channel: Channel, out: Outgoing) -> None:
        chunked = out.upload is not None and out.length is None
        length = len(out.body) if out.upload is None else out.length
        count = 0
        async for piece in slices(out.body) if out.upload is None else out.upload:
            if not piece:
                continue
            count += len(piece)
            if length is not None and count > length:
                break
            if not channel.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece):
                return  # the reader of the head meets the same end, and knows more
            if channel.full:
                await channel.drained()
        if length is not None and count != length:
            raise TransportFault(
                "cut", sent=self._sent, detail="the upload broke its promised length"
            )
        if not channel.closing and (not chunked or channel.write(b"0\r\n\r\n")):
            self._sent = "all"

    def _broken(self, channel: Channel) -> TransportFault:
        if self._fault is None:
            kind, detail = channel.broke or ("cut", "")
            return TransportFault(kind, sent=self._sent, detail=detail)
        return self._fault

    # --- the answer ----------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """The body's end has been read from the socket."""
        return self._channel is not None and self._channel.phase == OVER

    def at_once(self) -> bytes | None:
        """The rest of the body if every byte of it is here, else None."""
        channel = self._channel
        if channel is None or channel.phase != OVER or self._fault is not None:
            return None
        return channel.taken()

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes exactly as they arrive."""
        return self

    def __aiter__(self) -> Exchange:
        """Itself: one coroutine per chunk, no generator around it."""
        return self

    async def __anext__(self) -> bytes:
        """The bytes that are here, or the next that come."""
        channel = self._channel
        while True:
            if self._fault is not None:
                raise self._fault
            if channel is None:
                raise StopAsyncIteration
            data = channel.taken()
            if data:
                return data
            if channel.phase == OVER:
                raise StopAsyncIteration
            if channel.broke is not None:
                raise self._broken(channel)
            await channel.changed()

    async def pass_to(self, take: Take) -> bool:
        """The rest of the body was given to `take`, unless it had enough."""
        channel = self._channel
        if self._fault is not None:
            raise self._fault
        if channel is None:
            return True
        over = await channel.pass_to(take)
        if not over and (self._fault is not None or channel.broke is not None):
            raise self._broken(channel)
        return over

    def abort(self, kind: str) -> None:
        """The connection is closed now; a pending or later read raises TransportFault(kind)."""
        if self._fault is None:
            self._fault = TransportFault(kind, sent=self._sent)
        self._leave(reuse=False)

    async def close(self, *, reuse: bool) -> None:
        """The connection is back in its pool (body fully read and `reuse`) or closed."""
        self._leave(reuse=reuse)

    def _leave(self, *, reuse: bool) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            self._pool.release(channel, reuse=reuse)
