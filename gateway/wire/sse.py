"""Server-sent events: bytes to events at any chunk boundary, bounded; and events back to bytes.

The bytes of a stream go to the client untouched; this parser reads a copy. Its law:

* Chunk boundaries never matter: any cutting of the same bytes gives the same events.
* Lines end with LF, CRLF or CR. A CR at the end of a chunk swallows an LF that opens the next one.
* Nothing is decoded: an event's data are bytes of whole lines, so a cut inside a UTF-8 sequence
  cannot harm, and whoever decodes them decodes a whole event.
* A leading byte-order mark and comments are no data. Fields other than `event`, `data`, `id` are
  ignored; an event without a `data` line is none.
* One event holds at most `MAX_EVENT` bytes. What is larger is counted and forgotten up to its end:
  it comes out as an event with `overflow`, its name kept where it stands near the front.

Source: WHATWG HTML, "Server-sent events", §9.2.6. Bugs this prevents: api7/aisix#111 (split UTF-8),
rexxars/eventsource-parser#17 (split CRLF), mnfst/llm-gateway#2053 (comments taken for data).
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_EVENT = 8 * 1024 * 1024
"""Bytes of one event that are kept; without a bound one endless line fills the memory."""

# Byte values, because `bytes in bytes` first tries the needle as a number, and raises inside.
_LF, _CR = 0x0A, 0x0D

_BOM = b"\xef\xbb\xbf"
_NAME_WINDOW = 1024
"""Bytes at the front of an oversized event in which its name is looked for."""

_GATHERED = 16 * 1024
"""Smaller pieces of an unfinished event are gathered up to here."""

_LINE_END = rb"(?>\r\n|\n|\r)"
_BLOCK_END = re.compile(_LINE_END + _LINE_END)


class Event(NamedTuple):
    """One dispatched event.

    Attributes:
        name: The `event` field; b"" where the stream names none.
        data: The `data` lines joined with LF; b"" if `overflow`.
        id: The `id` field; None where the event has none.
        size: Bytes of the event with its blank line, each line end counted as one.
        overflow: The event was larger than the bound and its data are lost to us.
    """

    name: bytes
    data: bytes
    id: bytes | None = None
    size: int = 0
    overflow: bool = False


_new = tuple.__new__


class Events:
    """An incremental parser. Feed it every chunk of one stream, in order.

    Attributes:
        total: Events dispatched so far.
        overflows: How many of them were larger than the bound.
    """

    __slots__ = (
        "_begun", "_dropped", "_fresh", "_head", "_last_lf", "_limit", "_pending", "_size",
        "_swallow_lf", "overflows", "total",
    )  # fmt: skip

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self._limit = limit
        self._pending: list[bytes | bytearray] = []  # of an event whose end has not come, in LF
        self._size = 0  # bytes pending
        self._fresh = True  # nothing but a part of a byte-order mark has come
        self._begun = b""  # that part
        self._swallow_lf = False
        self._dropped = 0  # bytes of an oversized event already forgotten; 0 while none is
        self._head = b""  # its first bytes, for the name
        self._last_lf = False  # its last byte was a line end
        self.total = 0
        self.overflows = 0

    @property
    def at_boundary(self) -> bool:
        """Whether an event inserted now would stand between events, not inside one."""
        if self._dropped:
            return False
        if not self._pending:
            return not self._begun
        return self._pending[-1].endswith(b"\n") and all(
            not line or line.startswith(b":") for line in b"".join(self._pending).split(b"\n")
        )

    @property
    def at_rest(self) -> bool:
        """Whether the next chunk begins anew: nothing is held and nothing is to be skipped."""
        return not (self._pending or self._dropped or self._fresh or self._swallow_lf)

    @property
    def holding(self) -> bool:
        """Whether the next chunk continues something: an event, or the stream's very start."""
        return bool(self._pending or self._dropped or self._fresh)

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that end within this chunk, in order."""
        if (  # nearly every chunk of a model's stream: one event of one line, nothing pending
            (size := len(chunk)) > 8
            and chunk.find(b"\n") == size - 2
            and chunk[-1] == _LF
            and chunk[:6] == b"data: "
            and not (self._pending or self._fresh or self._dropped)
            and _CR not in chunk
            and size <= self._limit
        ):
            self.total += 1
            self._swallow_lf = False
            return [_new(Event, (b"", chunk[6:-2], None, size, False))]
        if self._fresh or self._swallow_lf or _CR in chunk:
            chunk = self._normal(chunk)
        if not chunk:
            return []
        if self._dropped:
            chunk, events = self._skip(chunk)
        else:
            events = []
        if self._pending:
            seam = chunk[0] == _LF and self._pending[-1].endswith(b"\n")
            if not seam and chunk.find(b"\n\n") < 0:
                return self._hold(chunk, events)
            self._pending.append(chunk)
            chunk = b"".join(self._pending)
            self._pending = []
            self._size = 0
        blocks = chunk.split(b"\n\n")
        rest = blocks.pop()
        for block in blocks:
            event = self._event(block)
            if event is not None:
                events.append(event)
        if rest and rest != b"\n":
            return self._hold(rest.removeprefix(b"\n"), events)
        return events

    def _normal(self, chunk: bytes) -> bytes:
        """The chunk without byte-order mark, its line ends all LF."""
        if self._fresh:
            chunk = self._begun + chunk
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._begun = chunk
                return b""
            self._fresh = False
            self._begun = b""
            chunk = chunk.removeprefix(_BOM)
        if self._swallow_lf and chunk:
            self._swallow_lf = False
            chunk = chunk.removeprefix(b"\n")
        if _CR in chunk:
            self._swallow_lf = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return chunk

    def _hold(self, more: bytes, events: list[Event]) -> list[Event]:
        """Keep more of an unfinished event, or begin to forget it where it passes the bound.

        Large chunks are kept as they are: several taps of a stream hold the same bytes once, and
        nothing large grows in place, which would leave holes in the heap for every stream. Small
        ones are gathered, so that a byte does not cost an object.
        """
        pending = self._pending
        self._size += len(more)
        if self._size - more.endswith(b"\n") > self._limit:
            self._head = b"".join((*pending[:2], more))[: min(_NAME_WINDOW, self._limit)]
            self._dropped = self._size
            self._last_lf = more.endswith(b"\n")
            self._pending = []
            self._size = 0
        elif len(more) >= _GATHERED:
            pending.append(more)
        elif pending and isinstance(pending[-1], bytearray) and len(pending[-1]) < _GATHERED:
            pending[-1] += more
        else:
            pending.append(bytearray(more))
        return events

    def _skip(self, chunk: bytes) -> tuple[bytes, list[Event]]:
        """What follows the oversized event, and that event if it ends in this chunk."""
        if self._last_lf and chunk.startswith(b"\n"):
            size, rest = self._dropped + 1, chunk[1:]
        else:
            end = chunk.find(b"\n\n")
            if end < 0:
                self._dropped += len(chunk)
                self._last_lf = chunk.endswith(b"\n")
                return b"", []
            size, rest = self._dropped + end + 2, chunk[end + 2 :]
        self._dropped = 0
        return rest.lstrip(b"\n"), [self._overflow(self._head, size)]

    def _overflow(self, head: bytes, size: int) -> Event:
        self.total += 1
        self.overflows += 1
        name = b""
        for line in head.split(b"\n")[:-1]:
            if line.startswith(b"event:"):
                name = line[6:].removeprefix(b" ")
        return Event(name, b"", None, size, True)  # noqa: FBT003 - a named field of a tuple

    def _event(self, block: bytes) -> Event | None:
        """The event of one block (no blank line within), or None if it holds no data line."""
        if block.startswith(b"data: ") and b"\n" not in block and len(block) <= self._limit:
            self.total += 1
            return Event(b"", block[6:], None, len(block) + 2)
        block = block.removeprefix(b"\n")  # three line ends in a row: a blank line without an event
        size = len(block) + 2
        if size - 2 > self._limit:
            return self._overflow(block[: min(_NAME_WINDOW, self._limit)], size)
        name, ident = b"", None
        lines: list[bytes] = []
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                lines.append(value)
            elif field == b"event":
                name = value
            elif field == b"id" and b"\0" not in value:
                ident = value
        if not lines:
            return None
        self.total += 1
        return Event(name, lines[0] if len(lines) == 1 else b"\n".join(lines), ident, size)


class Scan:
    """A parser for taps that want few events: only those holding one of the needles come out.

    A chunk of whole events without any needle is counted and never split, so watching a stream
    costs a search per chunk. A needle is matched against the raw lines of an event, its name too.
    """

    __slots__ = ("_events", "_limit", "_needles", "skipped")

    def __init__(self, *needles: bytes, limit: int = MAX_EVENT) -> None:
        self._events = Events(limit)
        self._limit = limit
        self._needles = needles
        self.skipped = 0

    @property
    def at_boundary(self) -> bool:
        """As `Events.at_boundary`."""
        return self._events.at_boundary

    @property
    def total(self) -> int:
        """Blocks seen so far, at least as many as events."""
        return self._events.total + self.skipped

    def feed(self, chunk: bytes) -> list[Event]:
        """Those events ending in this chunk that hold a needle, or were too large to look into."""
        parser = self._events
        if (
            chunk.endswith(b"\n\n")
            and not parser.holding
            and b"\r" not in chunk
            and len(chunk) <= self._limit
            and not self._hit(chunk)
        ):
            self.skipped += chunk.count(b"\n\n")
            return []
        return [
            event
            for event in parser.feed(chunk)
            if event.overflow or self._hit(event.name) or self._hit(event.data)
        ]

    def _hit(self, text: bytes) -> bool:
        for needle in self._needles:  # noqa: SIM110 - a generator costs more than the search
            if needle in text:
                return True
        return False


class Blocks:
    """Raw blocks of a stream, each with its own line ends: for filters that drop whole events.

    Joined, the blocks and the rest are the stream, byte for byte. An unfinished block is held back;
    beyond the bound everything passes at once and `feed` cuts no more.
    """

    __slots__ = ("_limit", "_pending", "open")

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self._limit = limit
        self._pending = bytearray()
        self.open = False  # the bound was passed: bytes flow uncut

    def feed(self, chunk: bytes) -> list[bytes]:
        """The blocks that are complete now."""
        if self.open:
            return [chunk] if chunk else []
        seam = max(0, len(self._pending) - 3)
        self._pending += chunk
        blocks = []
        start = 0
        for match in _BLOCK_END.finditer(self._pending, seam):
            if match.end() == len(self._pending) and match[0] == b"\r\n\r":
                break  # the LF of a CRLF is on its way; alone it would become a line of its own
            blocks.append(bytes(self._pending[start : match.end()]))
            start = match.end()
        if start:
            del self._pending[:start]
        if len(self._pending) > self._limit:
            self.open = True
            blocks.append(self.rest())
        return blocks

    def rest(self) -> bytes:
        """What is still held; afterwards nothing is."""
        rest = bytes(self._pending)
        self._pending = bytearray()
        return rest


def event_of(block: bytes) -> Event | None:
    """The event of one raw block, or None if it is a comment or blank."""
    events = Events(max(len(block), 1)).feed(block)
    return events[0] if events else None


def frame(data: bytes, name: str = "") -> bytes:
    """One event as bytes. `data` is JSON text of one line, as encoders write it."""
    head = b"event: %b\n" % name.encode() if name else b""
    return b"%bdata: %b\n\n" % (head, data)
