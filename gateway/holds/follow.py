"""Those who follow a held call: they see the bytes of its answer as they come.

What followers are shown and what is stored are the same bytes, read once. Waiting is by one future
per follower, bounded in number; a change that another process makes is found by looking again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway import framing
from gateway.call import End
from gateway.errors import GatewayError
from gateway.upstream import TransportFault
from scheduler.api import Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.call import Reply
    from gateway.clock import Clock
    from gateway.units import Micros
    from scheduler.api import Held

MAX_REPLY = 32 * 1024 * 1024
"""Bytes of a reply that are stored."""
MAX_KEPT = 512 * 1024 * 1024
"""Bytes of all replies that are being received."""
MAX_FOLLOWERS = 1_000


@dataclass(frozen=True, slots=True)
class Broken:
    """Why an answer is none."""

    code: str
    message: str


@dataclass(slots=True)
class Run:
    """One execution under way.

    Attributes:
        held: Under its claim.
        head: Status and headers, once they are known to be the answer's.
        chunks: Bytes of the answer so far.
        size: Bytes read for it.
        over: Nothing more will come; the store says how it ended.
        task: Who executes it.
    """

    held: Held
    head: tuple[int, list[tuple[bytes, bytes]]] | None = None
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    over: bool = False
    task: asyncio.Task[None] | None = None


class Followers:
    """Who waits for news of which hold.

    Attributes:
        leaving: The process stops; followers are sent away.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, list[asyncio.Future[bool]]] = {}
        self._kept = 0
        self.leaving = False

    @property
    def crowded(self) -> bool:
        """Whether nobody else may wait now."""
        return sum(map(len, self._waiting.values())) >= MAX_FOLLOWERS

    def leave(self) -> None:
        """Everybody who waits is sent away, and whoever comes."""
        self.leaving = True
        for hold in list(self._waiting):
            self.changed(hold)

    def over(self, run: Run) -> None:
        """The execution has ended, and its row says how."""
        self._kept -= run.size
        run.over = True
        self.changed(run.held.id)

    def changed(self, hold: str) -> None:
        """Whoever waits for news of this hold looks again."""
        for future in self._waiting.pop(hold, ()):
            if not future.done():
                future.set_result(True)

    async def news(self, hold: str, most: Micros) -> bool:
        """Whether this process has changed the hold, within that time."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(hold, []).append(future)

        def due() -> None:
            if not future.done():
                future.set_result(False)

        timer = self._clock.after(most, due)
        try:
            return await future
        finally:
            timer.cancel()
            rest = self._waiting.get(hold)
            if rest is not None and future in rest:
                rest.remove(future)
                if not rest:
                    del self._waiting[hold]

    async def bytes_of(self, run: Run, most: Micros) -> AsyncIterator[bytes]:
        """The answer's bytes as they come; b"" after a silence of `most`."""
        seen = 0
        while True:
            if seen < len(run.chunks):
                seen += 1
                if run.chunks[seen - 1]:  # an empty one would sound like silence
                    yield run.chunks[seen - 1]
            elif run.over or self.leaving:
                return
            elif not await self.news(run.held.id, most):
                yield b""

    async def read(self, run: Run, reply: Reply) -> tuple[Message, Broken | None]:
        """The whole reply, shown to followers as it comes; with it, why it is no answer, if so.

        The reply is closed, however this ends.
        """
        headers, length = framing.end_to_end(reply.headers)
        run.head = (reply.status, headers)
        end = End.DRAINED
        try:
            broken = await self._chunks(run, reply)
            body = b"".join(run.chunks)
            if broken is None and length is not None and len(body) != length:
                broken = Broken("stream_cut", "The provider sent another length than it declared.")
            end = End.COMPLETE if broken is None else End.CUT
            # Told of a bad end, a hook only words it; told of a good one, it may know better.
            unmarked = [hook for hook in reply.finishing if hook(end)]
            if unmarked and broken is None:
                broken = Broken("stream_cut", "The stream ended without its final event.")
                end = End.CUT
        finally:
            await reply.close(end)
        return Message(headers=headers, body=body, status=reply.status), broken

    def _weighed(self, run: Run, size: int) -> Broken | None:
        """The bytes are counted; why there are too many, if so."""
        run.size += size
        self._kept += size
        if run.size > MAX_REPLY:
            return Broken("reply_too_large", f"The reply is larger than {MAX_REPLY} bytes.")
        if self._kept > MAX_KEPT:
            return Broken("replies_too_large", "Replies of held calls fill their memory.")
        return None

    async def _chunks(self, run: Run, reply: Reply) -> Broken | None:
        """The body is in `run.chunks` as far as it came; why it broke off."""
        edit = reply.edit
        try:
            async for chunk in reply.source.chunks():
                for tap in reply.taps:
                    tap(chunk)
                broken = self._weighed(run, len(chunk))
                if broken is not None:
                    return broken
                kept = chunk if edit is None else edit.feed(chunk)
                if kept:
                    run.chunks.append(kept)
                    self.changed(run.held.id)
            if edit is not None:
                run.chunks.append(edit.rest())
        except TransportFault as fault:
            if not reply.terminal:
                return Broken("stream_cut", f"The provider broke the answer off ({fault.kind}).")
        except GatewayError as error:
            if not reply.terminal:
                return Broken(error.code, error.message)
        return None
