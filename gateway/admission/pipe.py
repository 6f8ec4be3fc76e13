"""One connection to the store for every pool at once: commands leave, replies come in that order.

redis-py opens it (addresses, passwords, TLS, sentinels) and hands it over. From then on the bytes
are ours, because what a client in general must do for a command (look at a pooled connection,
encode arguments of any kind, wait in a coroutine with a timeout of its own) costs more than all
that admission does in this process. Commands that are sent in one turn of the loop leave in one
write, and the store reads them at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Told = Callable[[bytes | Exception], None]

CLOSED = "the connection to the store is closed"


class StoreError(OSError):
    """The store answered a command with an error; its text begins with a code in capitals."""


def command(*words: bytes) -> bytes:
    """The command as the store reads it (RESP 2)."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(w), w) for w in words])


class Pipe(asyncio.Protocol):
    """Commands in flight on one connection, oldest first. Used from one thread, the loop's."""

    __slots__ = ("_rest", "_transport", "_waiting", "_writer")

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        """The connection is ours from now on; nothing is in flight on it."""
        self._writer = writer  # closes what it writes to when nobody holds it any more
        self._transport = writer.transport
        self._transport.set_protocol(self)
        self._rest = b""
        self._waiting: deque[Told] = deque()

    @property
    def open(self) -> bool:
        """Commands may be sent."""
        return not self._transport.is_closing()

    def send(self, raw: bytes, told: Told) -> None:
        """The command leaves; `told` hears its answer, or the error that there is none.

        Args:
            raw: From `command`.
            told: Called once, never before this returns. An answer of the store that is an error
                comes as `StoreError`.
        """
        self._waiting.append(told)
        self._transport.write(raw)

    def close(self, error: Exception) -> None:
        """The connection is gone; everything in flight on it has failed with that error."""
        self._transport.abort()
        waiting, self._waiting = self._waiting, deque()
        for told in waiting:
            told(error)

    # --- asyncio's side

    def data_received(self, data: bytes) -> None:
        """Every reply that is whole is told."""
        rest = self._rest + data if self._rest else data
        at = 0
        while at < len(rest) and self._waiting:
            try:
                found = _reply(rest, at)
            except ValueError as error:
                self.close(ConnectionError(f"not a reply: {error}"))
                return
            if found is None:
                break
            reply, at = found
            self._waiting.popleft()(reply)
        self._rest = rest[at:] if at else rest

    def connection_lost(self, error: Exception | None) -> None:
        """The other end is gone."""
        self.close(error or ConnectionError(CLOSED))


def _reply(raw: bytes, at: int) -> tuple[bytes | Exception, int] | None:
    """The reply that begins there and where the next one does; None while it is not whole.

    Raises:
        ValueError: No reply that the commands of this file's users have.
    """
    end = raw.find(b"\r\n", at)
    if end < 0:
        return None
    kind, line = raw[at], raw[at + 1 : end]
    if kind == 0x24:  # "$": so many bytes
        size = int(line)
        start = end + 2
        if size < 0:
            return b"", start
        if len(raw) < start + size + 2:
            return None
        return raw[start : start + size], start + size + 2
    if kind == 0x2D:  # "-"
        return StoreError(line.decode("utf-8", "replace")), end + 2
    if kind in {0x2B, 0x3A}:  # "+", ":"
        return line, end + 2
    raise ValueError(repr(raw[at : at + 40]))
