"""Compressed answers, unpacked as they come, so that what a stream says is known while it flows.

An upstream may compress a stream although it was asked not to. The client gets its bytes with
their label; a copy is unpacked here, piece by piece, for the first event, the usage, the end mark.
Waiting for the end instead would hold the first byte back, and a stream that breaks off would cost
nothing.

Nothing here raises: a false label, an unknown coding or a piece that swells beyond `MOST_SWOLLEN`
makes the copy unreadable from there on, which the reader is told.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

import brotli
import zstandard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST_SWOLLEN = 8 * 1024 * 1024
"""Plain bytes that one piece of a stream may become; no event is larger."""

MAX_WINDOW = 32 * 1024 * 1024
"""Largest zstd window: what a decoder allocates before the first byte comes out."""

PIECE = 64 * 1024
_SLICE = 256
"""Bytes given to the zstd decoder at once: it has no bound of its own, and a block of four bytes
may become 128 KiB."""

BROKEN = (zlib.error, zstandard.ZstdError, brotli.error)


class _Unpacker(Protocol):
    def feed(self, piece: bytes, most: int) -> bytes:
        """The plain bytes that are known now, about `most` of them; raises one of `BROKEN`."""
        ...


class _Zlib:
    """gzip of any number of members, or deflate with or without its wrapper."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._inner = zlib.decompressobj(wbits=bits) if bits else None
        self._begun = b""

    def feed(self, piece: bytes, most: int) -> bytes:
        inner = self._inner
        if inner is None:  # deflate: its first two bytes tell which of the two it is
            piece = self._begun = self._begun + piece
            if len(piece) < 2:
                return b""
            wrapped = piece[0] & 0x0F == 8 and (piece[0] * 256 + piece[1]) % 31 == 0
            self._bits = 15 if wrapped else -15
            inner = self._inner = zlib.decompressobj(wbits=self._bits)
        out = b""
        while piece and len(out) <= most:
            if inner.eof:
                inner = self._inner = zlib.decompressobj(wbits=self._bits)
            out += inner.decompress(piece, most + 1 - len(out))
            piece = inner.unused_data or inner.unconsumed_tail
        return out


class _Brotli:
    def __init__(self) -> None:
        self._inner = brotli.Decompressor()

    def feed(self, piece: bytes, most: int) -> bytes:
        inner = self._inner
        out: bytes = inner.process(piece, output_buffer_limit=PIECE)
        while len(out) <= most and not inner.can_accept_more_data() and not inner.is_finished():
            out += inner.process(b"", output_buffer_limit=PIECE)
        return out


class _Zstd:
    def __init__(self) -> None:
        whole = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        self._inner = whole.decompressobj(read_across_frames=True)

    def feed(self, piece: bytes, most: int) -> bytes:
        out = b""
        for at in range(0, len(piece), _SLICE):
            out += self._inner.decompress(piece[at : at + _SLICE])
            if len(out) > most:
                break
        return out


_CODINGS: Mapping[str, Callable[[], _Unpacker]] = {
    "gzip": lambda: _Zlib(31),
    "x-gzip": lambda: _Zlib(31),
    "deflate": lambda: _Zlib(0),
    "br": _Brotli,
    "zstd": _Zstd,
}


class Inflating:
    """One compressed stream; feed it every piece, in order.

    Attributes:
        readable: False once what the stream says can no longer be known.
    """

    __slots__ = ("_inner", "readable")

    def __init__(self, coding: str) -> None:
        """Prepare; an unknown coding is unreadable from the start."""
        make = _CODINGS.get(coding)
        self._inner = make() if make is not None else None
        self.readable = make is not None

    def feed(self, piece: bytes) -> bytes:
        """The plain bytes that are known now; b"" where none are, or none can be."""
        if not self.readable or self._inner is None:
            return b""
        try:
            plain = self._inner.feed(piece, MOST_SWOLLEN)
        except BROKEN:
            self.readable = False
            return b""
        if len(plain) > MOST_SWOLLEN:
            self.readable = False
            return b""
        return plain
