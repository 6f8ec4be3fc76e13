"""Request bodies: read with a bound, unpacked with a bound, decoded into what policy reads.

The bytes as sent are what goes upstream; everything decoded here is a copy for policy only. Three
bounds hold at once: bytes as sent and bytes unpacked (both `EdgeRules.max_body`) and elements of
the decoded JSON (`MAX_ELEMENTS`: forty megabytes of `{},` would become a gigabyte of dictionaries).
Source: `protocols.md` §1.5; measured: orjson refuses lone surrogates and NaN that upstreams accept.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import brotli
import orjson
import zstandard

from gateway.clock import Expiry
from gateway.errors import BodyTooLarge, MalformedCall, UnknownCoding
from gateway.wire import content

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping

    from gateway.clock import Clock
    from gateway.units import Micros

    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

PIECE = 64 * 1024
"""Unpacked bytes asked of a decoder at once, so that no bomb grows beyond the bound by more."""

INLINE = 256 * 1024
"""Unpacked bytes worth doing on the event loop (about a millisecond); the rest goes to a thread."""

MAX_WINDOW = 32 * 1024 * 1024
"""Largest zstd window: what a decoder allocates before the first byte comes out."""

MAX_ELEMENTS = 1_000_000
"""Elements of one JSON body, counted by its commas; about 80 MB decoded in the worst case."""

MAX_REPAIRED = 100_000
"""Elements up to which the slow decoder may repair lone surrogates and NaN (about 30 ms)."""

MAX_ODD = 1024 * 1024
"""Bytes of an answer up to which the same is done beside a stream."""

_ODD_JSON = re.compile(rb"\\u[dD][89a-fA-F]|NaN|Infinity")
_LONE = re.compile("[\ud800-\udfff]")


class ClientGone(Exception):
    """The client left before its request was complete."""


def too_large(limit: int) -> BodyTooLarge:
    """The refusal that names Tidegate: clients blame images or the provider for any other 413."""
    return BodyTooLarge(
        f"The request body is larger than the {limit} bytes that this gateway accepts. The limit "
        "is the gateway's own (edge.max_body), not the provider's",
        because="edge.max_body",
    )


class Reading:
    """Reads one whole body, counted as it arrives and within a time."""

    __slots__ = ("_clock", "_idle", "_receive", "_until")

    def __init__(self, receive: Receive, clock: Clock, *, idle: Micros, total: Micros) -> None:
        self._receive = receive
        self._clock = clock
        self._idle = idle
        self._until = clock.now() + total

    async def read(self, limit: int) -> bytes:
        """The body.

        Raises:
            BodyTooLarge: As soon as one byte beyond the limit has come.
            ClientGone: The client left first.
            MalformedCall: It fell silent, or took too long in all.
        """
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(part)
            if size > limit:
                raise too_large(limit)
            if part:
                parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _next(self) -> MutableMapping[str, Any]:
        left = self._until - self._clock.now()
        try:
            with Expiry(self._clock, min(self._idle, left)):
                return await self._receive()
        except TimeoutError as error:
            raise MalformedCall(
                "The request body did not arrive in time.", code="request_timeout"
            ) from error


class Upload:
    """A body passed on while it arrives: one consumer, one producer, at most one part held.

    The producer is the call's watcher, the only reader of the connection: so a client that leaves
    is noticed while its body is being sent upstream. A part waiting to be taken stops the reading.
    """

    __slots__ = (
        "_arrived",
        "_dropped",
        "_fault",
        "_finished",
        "_limit",
        "_parts",
        "_room",
        "_size",
    )

    def __init__(self, limit: int, event: Callable[[], asyncio.Event]) -> None:
        self._limit = limit
        self._size = 0
        self._parts: deque[bytes] = deque()
        self._arrived = event()
        self._room = event()
        self._finished = False
        self._dropped = False
        self._fault: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether the last part has arrived."""
        return self._finished

    async def put(self, part: bytes, *, more: bool) -> None:
        """The part is held for the consumer; returns once there is room for another."""
        self._size += len(part)
        if self._size > self._limit and self._fault is None:
            self._fault = too_large(self._limit)
        if part and not self._dropped and self._fault is None:
            self._parts.append(part)
        self._finished = self._finished or not more
        self._arrived.set()
        while self._parts and more and not self._dropped:
            self._room.clear()
            await self._room.wait()

    def drop(self) -> None:
        """Nobody will read further: later parts are thrown away, so that reading goes on."""
        self._dropped = True
        self._parts.clear()
        self._room.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The parts as they come. Raises BodyTooLarge beyond the limit."""
        while True:
            while self._parts:
                yield self._parts.popleft()
                self._room.set()
            if self._fault is not None:
                raise self._fault
            if self._finished:
                return
            self._arrived.clear()
            await self._arrived.wait()


class Decoder(Protocol):
    """One content coding, unpacked piece by piece."""

    def read(self) -> bytes:
        """Up to about `PIECE` bytes more; b"" at the end. Raises `_BROKEN` on a false label."""
        ...


class _Zstd:
    def __init__(self, body: bytes) -> None:
        self._reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(
            body, read_across_frames=True
        )
        if not body.startswith((b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")):
            raise zstandard.ZstdError("no zstd frame")
        self._left = zstandard.frame_content_size(body)
        self._read = 0

    def read(self) -> bytes:
        piece = self._reader.read(PIECE)
        self._read += len(piece)
        # The reader is silent about a frame that ends early; the declared size is not.
        if not piece and 0 <= self._read < self._left:
            raise zstandard.ZstdError("truncated")
        return piece


class _Zlib:
    """gzip with any number of members, or deflate with or without its zlib wrapper."""

    def __init__(self, body: bytes, *, bits: int) -> None:
        self._rest = body
        self._bits = bits
        self._inner = zlib.decompressobj(wbits=bits)

    def read(self) -> bytes:
        while True:
            if self._inner.eof:
                self._rest = self._inner.unused_data
                if not self._rest:
                    return b""
                self._inner = zlib.decompressobj(wbits=self._bits)
            piece = self._inner.decompress(self._rest, PIECE)
            self._rest = self._inner.unconsumed_tail
            if piece:
                return piece
            if not self._inner.eof:
                raise zlib.error("truncated")


class _Brotli:
    def __init__(self, body: bytes) -> None:
        self._rest = body
        self._inner = brotli.Decompressor()

    def read(self) -> bytes:
        while not self._inner.is_finished():
            body, self._rest = self._rest, b""
            piece: bytes = self._inner.process(body, output_buffer_limit=PIECE)
            if piece:
                return piece
            if self._inner.can_accept_more_data() and not self._inner.is_finished():
                raise brotli.error("truncated")
        return b""


def _deflate(body: bytes) -> Decoder:
    # RFC 9110 means zlib's format; some senders mean the bare one.
    wrapped = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] * 256 + body[1]) % 31 == 0
    return _Zlib(body, bits=15 if wrapped else -15)


def _gzip(body: bytes) -> Decoder:
    return _Zlib(body, bits=31)


_CODINGS: Mapping[str, Callable[[bytes], Decoder]] = {
    "zstd": _Zstd,
    "gzip": _gzip,
    "x-gzip": _gzip,
    "br": _Brotli,
    "deflate": _deflate,
}
_BROKEN = (zlib.error, zstandard.ZstdError, brotli.error)


class Unpacking:
    """A compressed body on its way to being read: run in steps, here or in a thread."""

    __slots__ = ("_coding", "_decoder", "_limit", "_parts", "size")

    def __init__(self, body: bytes, coding: str, *, limit: int) -> None:
        """Prepare.

        Raises:
            UnknownCoding: No such coding, or several on top of each other.
            MalformedCall: The label is false.
        """
        make = _CODINGS.get(coding)
        if make is None:
            raise UnknownCoding(
                f"The gateway cannot read the content coding {coding[:64]!r}; it reads "
                f"{', '.join(_CODINGS)} (one at a time) and bodies without a coding."
            )
        self._coding = coding
        self._limit = limit
        self._parts: list[bytes] = []
        self.size = 0
        try:
            self._decoder = make(body)
        except _BROKEN as error:
            raise self._false_label() from error

    def run(self, budget: int) -> bool:
        """True once everything is unpacked; False when about `budget` bytes more were.

        Raises:
            BodyTooLarge: Unpacked, the body exceeds the limit.
            MalformedCall: The label is false, or the body is cut short.
        """
        goal = self.size + budget
        try:
            while self.size < goal:
                piece = self._decoder.read()
                if not piece:
                    return True
                self.size += len(piece)
                if self.size > self._limit:
                    self._parts.clear()
                    raise BodyTooLarge(
                        f"Unpacked, this {self._coding} body exceeds {self._limit} bytes, "
                        "the gateway's own limit (edge.max_body)",
                        because="edge.max_body",
                    )
                self._parts.append(piece)
        except _BROKEN as error:
            raise self._false_label() from error
        return False

    def run_to_end(self) -> None:
        """Everything is unpacked; for a thread. Raises as `run`."""
        self.run(self._limit + 1)

    def result(self) -> bytes:
        """The unpacked bytes; only once `run` said True."""
        return b"".join(self._parts)

    def _false_label(self) -> MalformedCall:
        return MalformedCall(
            f"The body is labelled Content-Encoding: {self._coding} but is not (or is cut short)."
        )


def decode(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, as policy may read it.

    Raises:
        MalformedCall: Not JSON, not an object, or more elements than policy may spend memory on.
    """
    value = decode_any(body)
    if not isinstance(value, dict):
        raise MalformedCall("The body must be a JSON object.")
    return value


def decode_any(body: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON of a body, as policy may read it.

    Lone surrogates become U+FFFD and NaN becomes null: in this copy only, the bytes sent upstream
    keep them.

    Raises:
        MalformedCall: Not JSON, or more elements than policy may spend memory on.
    """
    if body.startswith(b"\xef\xbb\xbf"):
        body = body[3:]
    if len(body) > MAX_ELEMENTS and body.count(b",") > MAX_ELEMENTS:
        raise MalformedCall(f"The body has more than {MAX_ELEMENTS} JSON elements.")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return _repaired(body, error)


def read_answer(body: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON of an answer or of one event of it, as upstreams write it.

    NaN, lone surrogates and bytes that are no UTF-8 (a text cut inside a character) spoil neither
    the usage nor the end mark beside them.

    Raises:
        ValueError: It is no JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        if len(body) > MAX_ODD or body.count(b",") > MAX_REPAIRED:
            raise
        text = body.decode("utf-8", "replace")
        if not _ODD_JSON.search(body) and "\ufffd" not in text:
            raise
        try:
            return _clean(json.loads(text, parse_constant=lambda _name: None))
        except RecursionError as error:
            raise ValueError("nested too deep") from error


def _repaired(body: bytes, first: orjson.JSONDecodeError) -> Any:  # noqa: ANN401 - any JSON value
    """What Python's own decoder reads where orjson is stricter than upstreams are."""
    if not body.strip():
        raise MalformedCall("The body is empty; a JSON object was expected.") from first
    if _ODD_JSON.search(body) and body.count(b",") <= MAX_REPAIRED:
        try:
            return _clean(json.loads(body.decode(), parse_constant=lambda _name: None))
        except (ValueError, RecursionError):
            pass  # the message of the stricter decoder is the better one
    raise MalformedCall(f"The body is not valid JSON: {_at(first)}.") from first


def _at(error: orjson.JSONDecodeError) -> str:
    """Reason and place, without the text itself: it may be anybody's prompt."""
    return f"{error.msg} (line {error.lineno}, column {error.colno})"


def _clean(root: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The value without lone surrogates, in keys and strings at every depth."""
    top = [root]
    todo: list[Any] = [top]
    while todo:
        node = todo.pop()
        keys = range(len(node)) if isinstance(node, list) else list(node)
        for key in keys:
            value = node[key]
            if isinstance(value, str):
                node[key] = _LONE.sub("\ufffd", value)
            elif isinstance(value, dict | list):
                todo.append(value)
            if isinstance(key, str) and _LONE.search(key):
                node[_LONE.sub("\ufffd", key)] = node.pop(key)
    return top[0]


def canonical(arguments: object) -> str:
    """Arguments of a tool as JSON with sorted keys; text that is no JSON as it is.

    For fingerprints of loops, not for signatures: `1.0` becomes `1` wherever it ends a member, in
    a text as well.
    """
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return str(arguments)
    try:
        text = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # nested deeper than it writes, or integers that it cannot
        return content.render(arguments)
    if ".0" not in text:
        return text
    return text.replace(".0,", ",").replace(".0}", "}").replace(".0]", "]")
