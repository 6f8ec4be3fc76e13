"""What a stream said: usage, its end, its failure, and how much text flowed; in every dialect.

A `Reader` folds the events of one answer. For each event the caller asks `skim` first: a search
over the raw bytes that notes streamed text and end marks, and says whether the event must be
decoded at all (most need not be). Only then is it decoded, by the caller, and given to `feed`. A
malformed event is skipped and counted; no reader ever raises.

Usage is folded by the dialect's rule and is a value, never a sum. A reported zero is zero, None is
missing. Where a stream ends without usage, `streamed` estimates its output from the text that went
by, so leaving just before the usage event is not free (BerriAI/litellm PR#33736).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gateway.call import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.units import Tokens
    from gateway.wire.sse import Event, Events

BYTES_PER_TOKEN = 4
"""Of streamed text, for the estimate: English prose has about 4.5, code fewer."""

MOST_TOKENS = 10**15
"""A count above it is a broken report."""

MAX_REASONS = 128
"""Finish reasons kept; one per answer of a call."""

MAX_WORDS = 1_000
"""Characters kept of an error's message."""

SHORT = 64 * 1024
"""Bytes up to which a chunk may be taken for an event like the last one."""

USEFUL = 4
MOST_VAIN = 16
"""What events have in common is looked for until it was of use for fewer than `USEFUL` events so
many times in a row: in some streams every event carries a number or a padding of its own."""

_LF, _CR, _BACKSLASH = 0x0A, 0x0D, 0x5C

_LINES = ([b"data:", b"", b""], [b"event:", b"data:", b"", b""])
"""The lines of an event that is one line of data, with a name or without."""

_TEXT = re.compile(
    rb'"(?:content|text|arguments|reasoning_content|reasoning|refusal|delta|partial_json|thinking|'
    rb'transcript|input)"\s*+:\s*+"((?:[^"\\]++|\\.)*+)"',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that came inside an answer.

    Attributes:
        code: The body's own code ("rate_limit_exceeded"), else its type; "" where it has neither.
        type: The body's own type ("overloaded_error"); "" without one.
        message: Its text, cut; may quote what the upstream was sent.
        status: A status named in the body, else 0.
    """

    code: str = ""
    type: str = ""
    message: str = ""
    status: int = 0


class Reader:
    """The fold of one answer's events; dialects fill in `skim` and `feed`.

    Attributes:
        usage: As reported so far; None until anything was.
        terminal: The dialect's end mark has been seen.
        failure: The error that came in the stream, or None.
        finish_reasons: As reported, in order.
        response_id, model: As the upstream names them.
        text_bytes: Bytes of JSON text content that streamed.
        deltas: Events that carried some.
        events: Events seen, malformed ones included.
        malformed: Events that could not be read.
        text_key: What stands before the text of an ordinary delta; b"" where none is.
    """

    text_key = b""

    __slots__ = (
        "deltas", "events", "failure", "finish_reasons", "malformed", "model", "response_id",
        "terminal", "text_bytes", "usage",
    )  # fmt: skip

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.terminal = False
        self.failure: Failure | None = None
        self.finish_reasons: list[str] = []
        self.response_id = ""
        self.model = ""
        self.text_bytes = 0
        self.deltas = 0
        self.events = 0
        self.malformed = 0

    @property
    def ok(self) -> bool:
        """The answer ended as it should: an end mark came and no error."""
        return self.terminal and self.failure is None

    @property
    def started(self) -> bool:
        """An event that is no error has come: the commit point, after which no other may answer."""
        return self.events > (1 if self.failure is not None else 0)

    @property
    def streamed(self) -> Tokens:
        """Estimated output tokens of the text that streamed; at least one per delta with text."""
        return max(self.deltas, -(-self.text_bytes // BYTES_PER_TOKEN))

    @property
    def final(self) -> bool:
        """Whether the reported output is a last word, not a count under way."""
        return self.usage is not None and self.usage.output is not None

    def settled(self, prompt: Tokens) -> Usage:
        """What the answer is to be charged, whenever it ends.

        Args:
            prompt: Estimated input tokens, for a stream that never reports them.

        Returns:
            The reported usage where it is final; else each missing count estimated: the input by
            the prompt, the output by what streamed, and `estimated` set.
        """
        usage = self.usage or Usage()
        if self.final and usage.input is not None:
            return usage
        output = usage.output if self.final else max(usage.output or 0, self.streamed)
        return replace(
            usage,
            input=prompt if usage.input is None else usage.input,
            output=output,
            estimated=True,
        )

    def skim(self, event: Event) -> bool:
        """Note what the raw bytes tell; True if the event must be decoded and fed."""
        raise NotImplementedError

    def feed(self, name: bytes, body: Mapping[str, Any]) -> None:
        """Fold one decoded event."""
        raise NotImplementedError

    def spoil(self) -> None:
        """An event could not be decoded: skip it, count it."""
        self.malformed += 1

    def note_text(self, data: bytes, key: bytes) -> None:
        """Count the text of a delta; `key` is where the dialect usually keeps it."""
        start = data.find(key)
        if start >= 0:
            start += len(key)
            end = data.find(b'"', start)
            if end > start and data[end - 1] != 0x5C:
                self.text_bytes += end - start
                self.deltas += 1
                return
        size = sum(len(match[1]) for match in _TEXT.finditer(data))
        if size:
            self.text_bytes += size
            self.deltas += 1

    def note_reason(self, reason: object) -> None:
        """Keep a finish reason, within the bound."""
        if isinstance(reason, str) and len(self.finish_reasons) < MAX_REASONS:
            self.finish_reasons.append(reason[:64])

    def note_identity(self, body: Mapping[str, Any]) -> None:
        """Keep the answer's id and model, the first that are named."""
        for key, value in (("response_id", body.get("id")), ("model", body.get("model"))):
            if isinstance(value, str) and value and not getattr(self, key):
                setattr(self, key, value[:256])


class Tap:
    """An observer of raw chunks: parser, reader and the caller's decoder in one callable.

    It never raises, so it may stand among `Reply.taps`.

    Nearly all chunks of a stream are one event that differs from the one before in its text alone.
    Once such an event was read and held nothing but text, the bytes before and after the text are
    remembered. A chunk with the same bytes around another text, in which nothing ends the string or
    the line, is the same JSON with another string: three comparisons instead of seven searches.
    """

    __slots__ = (
        "_after", "_before", "_decode", "_learned", "_on_end", "_vain", "events", "reader",
    )  # fmt: skip

    def __init__(
        self,
        events: Events,
        reader: Reader,
        decode: Callable[[bytes], object],
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Watch a stream.

        Args:
            events: A parser of its own.
            reader: The dialect's fold.
            decode: JSON text to a value; raises ValueError on what is none.
            on_end: Called once, when the reader has seen the end mark.
        """
        self.events = events
        self.reader = reader
        self._decode = decode
        self._on_end = on_end
        self._before = self._after = b""  # around the text of an event; b"" where none is known
        self._learned = 0  # the event they were taken from
        self._vain = 0  # how often they were taken and soon of no use

    def __call__(self, chunk: bytes) -> None:
        """Fold every event that ends in this chunk."""
        reader, before, after = self.reader, self._before, self._after
        if before and chunk.startswith(before) and chunk.endswith(after):
            start, end = len(before), len(chunk) - len(after)
            if start < end < SHORT and chunk.find(b'"', start) == end:
                text = chunk[start:end]
                if text[-1] != _BACKSLASH and _LF not in text and _CR not in text:
                    self.events.total += 1
                    reader.events += 1
                    reader.deltas += 1
                    reader.text_bytes += end - start
                    return
        size = reader.text_bytes
        quiet = self.events.at_rest  # else a part of this event came before
        events = self.events.feed(chunk)
        for event in events:
            if reader.skim(event):
                quiet = False
                self._decoded(event)
        if reader.terminal and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end()
        self._before = b""
        if quiet and len(events) == 1 and self._vain < MOST_VAIN:
            self._learn(chunk, reader.text_bytes - size)

    def finish(self) -> None:
        """The stream is over: an event that lacks its blank line counts as one.

        Servers leave it out behind their last event, which holds the usage or the end mark.
        """
        if self.events.holding:
            self(b"\n\n")

    def _learn(self, chunk: bytes, size: int) -> None:
        """Remember what is around the text of this event, if that is all it holds."""
        reader, key = self.reader, self.reader.text_key
        at = chunk.find(key)
        start = at + len(key)
        end = chunk.find(b'"', start)
        lines = chunk.split(b"\n")
        plain = (
            key
            and at >= 0
            and end - start == size > 0
            and chunk[end - 1] != _BACKSLASH
            and chunk[end + 1 : end + 2] in (b"}", b",", b"]")  # a value, and no name of one
            and [line.partition(b" ")[0] for line in lines] in _LINES
            and _CR not in chunk
        )
        if not plain:
            return
        self._before, self._after = chunk[:start], chunk[end:]
        self._vain = self._vain + 1 if reader.events - self._learned < USEFUL else 0
        self._learned = reader.events

    def _decoded(self, event: Event) -> None:
        try:
            body = self._decode(event.data)
        except (ValueError, RecursionError):
            self.reader.spoil()
            return
        if isinstance(body, dict):
            self.reader.feed(event.name, body)
        else:
            self.reader.spoil()


def tokens(value: object) -> Tokens | None:
    """A reported count; None where it is missing or is no count (a text, a negative number)."""
    if type(value) is int:
        return value if 0 <= value <= MOST_TOKENS else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if value != value or value < 0 or value > MOST_TOKENS or value != int(value):  # noqa: PLR0124 - NaN
        return None
    return int(value)


def any_of(usage: Usage) -> Usage | None:
    """The usage if it says anything, else None."""
    if usage.input is not None or usage.output is not None:
        return usage
    said = (usage.cache_read, usage.cache_write, usage.reasoning)
    return None if said == (None, None, None) else usage


def failure_of(error: object) -> Failure:
    """The failure an error object describes, in any dialect's shape; a bare text is a message."""
    if isinstance(error, str):
        return Failure(message=error[:MAX_WORDS])
    if not isinstance(error, dict):
        return Failure()
    code, kind, message = error.get("code"), error.get("type"), error.get("message")
    word = code if isinstance(code, str) and not code.isdecimal() else kind
    return Failure(
        code=word[:64] if isinstance(word, str) else "",
        type=kind[:64] if isinstance(kind, str) else "",
        message=message[:MAX_WORDS] if isinstance(message, str) else "",
        status=_status(code) or _status(error.get("status")),
    )


def _status(value: object) -> int:
    """An HTTP status given as number or text; 0 if it is none."""
    if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and 100 <= value <= 599 else 0
