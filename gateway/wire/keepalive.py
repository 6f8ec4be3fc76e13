"""What may be sent to a waiting client, per dialect, and how long it may wait. A pure table.

A client waits silently first, so that a real 429 or 503 stays possible. Then streams get a form
their client is known to ignore, and nothing else ever does (`protocols.md` §3, measured with real
clients):

* Chat: a comment line *without* a blank line. A blank line after an event with an id dispatches an
  empty event in some versions (openai-python#2722); a `ping` event surfaces with `choices=None`.
* Messages: a `ping` event.
* Responses: a comment. openai-py refuses any event before `response.created`, and since 3.57 also
  later ones whose response has another id, which no opening of ours could foresee.
* Responses of Codex, which counts silence and hears no comments: an own `response.created`, then
  `keepalive` events; the upstream's `response.created` is swallowed, for it would be another one.
* MCP: a comment, or a progress notification where the client gave a token for it, since some
  clients count their patience anew with each. Its numbers rise and stay below zero, so that the
  tool's own go on from there. Gemini, and every answer that is plain JSON: silence.

After the first upstream byte nothing is sent but a final error event.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from gateway.call import ClientKind, Dialect
from gateway.units import MICRO
from gateway.wire import sse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.call import HeaderList
    from gateway.units import Micros

SILENT_CAP: Micros = 170 * MICRO
"""Longest wait without a byte: Claude Code gives up at 180 s by its code."""

ALIVE_CAP: Micros = 540 * MICRO
"""Longest wait while keep-alives flow: SDKs read for 600 s."""

MCP_CAP: Micros = 120 * MICRO
"""Longest wait of a tool call: the tool's own run shares the client's 300 s."""

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
COMMENT = b": queued\n"


_CREATED = re.compile(rb'"type"\s*+:\s*+"response\.created"')


class Form(StrEnum):
    """How a waiting client is kept."""

    SILENCE = "silence"
    COMMENT = "comment"
    PING = "ping"
    OPENING = "opening"
    PROGRESS = "progress"


_STREAMED = {
    Dialect.CHAT: Form.COMMENT,
    Dialect.COMPLETIONS: Form.COMMENT,
    Dialect.MESSAGES: Form.PING,
    Dialect.RESPONSES: Form.COMMENT,
    Dialect.MCP: Form.COMMENT,
}


def form(
    dialect: Dialect, *, stream: bool, client: ClientKind = ClientKind.SDK, token: bytes = b""
) -> Form:
    """The form of keep-alive this answer allows.

    Args:
        dialect: Of the route.
        stream: The client takes a stream.
        client: What it says it is.
        token: JSON text of the progress token of an MCP request; b"" where it gave none.
    """
    if stream and dialect is Dialect.MCP and token:
        return Form.PROGRESS
    if stream and dialect is Dialect.RESPONSES and client is ClientKind.CODEX:
        return Form.OPENING
    return _STREAMED.get(dialect, Form.SILENCE) if stream else Form.SILENCE


def beat(kind: Form, opening: ResponsesOpening | None = None) -> bytes:
    """The bytes of one keep-alive; b"" for silence and for progress, which is counted.

    Responses need their stream's `opening`.
    """
    match kind:
        case Form.COMMENT:
            return COMMENT
        case Form.PING:
            return PING
        case Form.OPENING:
            return opening.keepalive() if opening is not None else b""
        case Form.SILENCE | Form.PROGRESS:
            return b""


def progress(token: bytes, number: int) -> bytes:
    """The n-th progress notification of a call that waits, counted from 1; `token` is JSON text."""
    return (
        b'event: message\ndata: {"jsonrpc":"2.0","method":"notifications/progress","params":'
        b'{"progressToken":%b,"progress":%b,"message":"waiting"}}\n\n'
        % (token, repr(-1 / number).encode())
    )


def hold_cap(dialect: Dialect, *, stream: bool) -> Micros:
    """The longest wait this dialect's clients bear."""
    if dialect is Dialect.MCP:
        return MCP_CAP
    return SILENT_CAP if form(dialect, stream=stream) is Form.SILENCE else ALIVE_CAP


def queue_deadline(policy: Micros, cap: Micros, client_timeout: Micros | None) -> Micros:
    """The longest a call may queue: the least of policy, cap and 0.9 of the client's timeout."""
    deadline = min(policy, cap)
    if client_timeout is not None:
        deadline = min(deadline, client_timeout * 9 // 10)
    return max(0, deadline)


TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")


def client_timeout(headers: HeaderList) -> Micros | None:
    """The client's own timeout as its SDK tells it; None where it tells none, or not legibly.

    `x-stainless-read-timeout` comes before `x-stainless-timeout`, both in seconds.
    """
    for wanted in TIMEOUTS:
        for name, value in headers:
            if name == wanted and (seconds := _seconds(value)):
                return seconds
    return None


def _seconds(value: bytes) -> Micros | None:
    text = value.strip()
    whole, _, part = text.partition(b".")
    if len(text) > 20 or not whole.isdigit() or (part and not part.isdigit()):
        return None
    return round(float(text) * MICRO) or None


class ResponsesOpening:
    """The opening of a Responses stream that began before its upstream answered.

    Once we have sent an own `response.created`, the upstream's is dropped from the bytes and all
    else passes as it came. If the upstream's first event is another one, nothing is dropped.

    Attributes:
        sequence: The next sequence number of ours.
        swallowed: The upstream's `response.created` has been dropped.
    """

    __slots__ = ("_blocks", "_passing", "response_id", "sequence", "swallowed")

    def __init__(self, response_id: str) -> None:
        self.response_id = response_id
        self.sequence = 0
        self.swallowed = False
        self._passing = False
        self._blocks = sse.Blocks()

    def created(self, *, model: str, at: Micros) -> tuple[str, Mapping[str, object]]:
        """Name and body of our own opening event; the caller encodes it. To be sent first."""
        return "response.created", {
            "type": "response.created",
            "sequence_number": self.next(),
            "response": response(self.response_id, status="queued", model=model, at=at),
        }

    def keepalive(self) -> bytes:
        """The next keep-alive event."""
        return (
            b'event: keepalive\ndata: {"type":"keepalive","sequence_number":%d}\n\n' % self.next()
        )

    def next(self) -> int:
        """A sequence number, used up."""
        self.sequence += 1
        return self.sequence - 1

    def feed(self, chunk: bytes) -> bytes:
        """The upstream's bytes without its `response.created`."""
        if self._passing:
            return chunk
        kept = []
        for block in self._blocks.feed(chunk):
            event = None if self._passing else sse.event_of(block)
            if event is None:  # a comment, or all is decided
                kept.append(block)
                continue
            self._passing = True
            if _is_created(event):
                self.swallowed = True
            else:
                kept.append(block)
        if self._passing or self._blocks.open:
            self._passing = True
            kept.append(self._blocks.rest())
        return b"".join(kept)

    def rest(self) -> bytes:
        """What is still held back, for the end of the stream."""
        return self._blocks.rest()


def response(
    response_id: str, *, status: str, model: str, at: Micros, error: Mapping[str, str] | None = None
) -> dict[str, object]:
    """A response object with every field that SDKs read without asking whether it is there."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": at // MICRO,
        "status": status,
        "error": dict(error) if error else None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _is_created(event: sse.Event) -> bool:
    if event.name:
        return event.name == b"response.created"
    return _CREATED.search(event.data) is not None
