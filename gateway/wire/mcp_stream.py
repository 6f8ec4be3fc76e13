"""Events of an MCP stream, one raw block at a time: read, renamed, given other data. Pure.

Model streams pass untouched beside a parser; here the gateway stands between two protocols, so an
event may change its id (it names stream and upstream), or its data (a result that is gated). All
else of a block (comments, `retry`, an empty event that only seeds an id) is kept as it came, since
clients of the session era resume by them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINES = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a stream.

    Attributes:
        lines: Its lines without their ends, blank ones dropped.
        data: Its data lines joined with LF; None where it has none.
        id: Its id; None where it names none.
    """

    lines: tuple[bytes, ...]
    data: bytes | None
    id: bytes | None

    @property
    def is_message(self) -> bool:
        """Whether it carries a JSON-RPC message: an empty event only seeds a client's place."""
        return bool(self.data)


def block(raw: bytes) -> Block:
    """The block that these bytes are; a byte-order mark in front is none of it."""
    lines = tuple(line for line in _LINES.split(raw.removeprefix(b"\xef\xbb\xbf")) if line)
    data: list[bytes] = []
    ident = None
    for line in lines:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"id" and b"\0" not in value:
            ident = value
    return Block(lines, b"\n".join(data) if data else None, ident)


def event(body: bytes) -> bytes:
    """A message that came as a body, as the one event of a stream."""
    data = b"".join(b"data: " + line + b"\n" for line in _LINES.split(body) if line)
    return b"event: message\n" + data + b"\n"


def written(event: Block, *, ident: bytes | None = None, data: bytes | None = None) -> bytes:
    """The block as bytes again.

    Args:
        event: As read.
        ident: Stands in place of its id.
        data: Stands in place of its data; one line, as encoders write it.
    """
    if ident is None and data is None:
        return b"\n".join(event.lines) + b"\n\n"
    out: list[bytes] = []
    said = False
    for line in event.lines:
        field = line.partition(b":")[0]
        if field == b"id" and ident is not None:
            out.append(b"id: " + ident)
        elif field == b"data" and data is not None:
            if not said:
                out.append(b"data: " + data)
            said = True
        else:
            out.append(line)
    return b"\n".join(out) + b"\n\n"
