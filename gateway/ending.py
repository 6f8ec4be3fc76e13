"""What an answer ends with, read beside it: plain or streamed, bounded either way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.wire import chained
from gateway.wire.sse import Events
from gateway.wire.stream import Tap

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gateway.call import HeaderList

MOST_READ = 2 * 1024 * 1024
"""Bytes of an answer, or of its terminal event, that are read for its calls."""


class Ending:
    """A tap that reads the response at the end of an answer, plain or streamed."""

    __slots__ = ("_kept", "_reader", "_size", "_tap")

    def __init__(self, headers: HeaderList) -> None:
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        self._kept: list[bytes] = []
        self._size = 0
        self._reader = chained.EndReader()
        self._tap: Tap | None = None
        if kind.startswith(b"text/event-stream"):
            self._tap = Tap(Events(MOST_READ), self._reader, orjson.loads)

    def __call__(self, chunk: bytes) -> None:
        """Note the chunk; nothing is kept of an answer that is too long."""
        if self._tap is not None:
            self._tap(chunk)
            return
        self._size += len(chunk)
        if self._size <= MOST_READ:
            self._kept.append(chunk)
        else:
            self._kept.clear()

    def response(self) -> Mapping[str, Any]:
        """The response; empty where the answer holds none, or is compressed."""
        if self._tap is not None:
            return self._reader.response
        try:
            value = orjson.loads(b"".join(self._kept))
        except orjson.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}
