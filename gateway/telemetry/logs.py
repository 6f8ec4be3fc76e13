"""JSON lines: events of the process and one line per call, written by a thread, without secrets.

A line is one snake_case event with fields. The loop serializes and appends to a bounded buffer; a
thread redacts and writes, so a full pipe or a slow disk never stops a call. What does not fit is
dropped and counted, never waited for. Redaction works by value (every secret the process was given)
and by name or shape (authorization, x-api-key, cookie, `key=`, bearer tokens, JWTs), on the
finished line: neither a foreign logger nor an exception text can leak. Prompts are never passed in.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from contextvars import ContextVar
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CAPACITY = 8 * 1024 * 1024
"""Bytes of lines waiting for the writer. At 1 KB a line some seconds of a busy gateway."""

LINGER = 0.02
"""Seconds the writer lets lines gather: a thread woken per line would fight for the interpreter."""

LONGEST = 32 * 1024
"""Bytes of one line; a longer one is replaced by its event name and its length."""

LONGEST_TEXT = 2_000
"""Characters of one text field of an event; an exception's text may quote a body."""

MOST_SECRETS = 4_096
SHORTEST_SECRET = 6
"""Shorter values are no secrets, and replacing them would tear lines apart."""

_MILLIS = tuple(f"{part:03d}Z" for part in range(1000))
"""How stamps end: to write a number with leading zeros costs twenty times a look-up."""

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
HIDDEN = b"***"

CALL_ID: ContextVar[str] = ContextVar("tidegate_call_id", default="")
"""The call this task works for; every event written meanwhile carries it."""

# Between name and value: as in JSON or a Python dict (also within a JSON string), or bare, as in a
# header or a query. A JSON number is left alone, or the line would be JSON no more.
_SEP = rb"""(\\*["']\s*:\s*\\*["']|\s*[:=]\s*)"""
_WHOLE = re.compile(
    rb"(?i)((?:proxy-)?authorization|(?:set-)?cookie)" + _SEP + rb"""([^"'\\\r\n]+)"""
)
_WORD = re.compile(
    rb"(?i)(x-(?:goog-)?api[-_]key|api[-_]?key|client[-_]secret|(?:access|refresh|id)[-_]token"
    rb"|password|passwd|[?&](?:key|token|sig|signature|code))"
    + _SEP
    + rb"""([^\s"'\\,;&<>)}\]]+)"""
)
_SHAPES = re.compile(
    rb"(?i:\bbearer\s+)[\w.~+/=-]{6,}"
    rb"|\b(?:sk|rk|pk|gsk|xai)-[\w-]{12,}"
    rb"|\btg_[0-9A-Za-z-]+_[\w-]{6,}"
    rb"|\beyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*"
    rb"|(?<=://)[^\s/\"'@:]+:[^\s/\"'@]+(?=@)"
)


# Matching a pattern costs hundreds of microseconds a line: look for a word that starts one first.
_PATTERNS = (
    (_WHOLE, rb"\1\2" + HIDDEN, (b"authorization", b"cookie")),
    (
        _WORD,
        rb"\1\2" + HIDDEN,
        (b"api-key", b"api_key", b"apikey", b"client-secret", b"client_secret", b"s-token",
         b"s_token", b"h-token", b"h_token", b"id-token", b"id_token", b"passw", b"?key", b"&key",
         b"?token", b"&token", b"?sig", b"&sig", b"?code", b"&code"),
    ),
    (_SHAPES, HIDDEN, (b"bearer", b"sk-", b"rk-", b"pk-", b"xai-", b"tg_", b"eyj", b"://")),
)  # fmt: skip
_STARTS = ("sk-", "rk-", "pk-", "xai-", "tg_", "eyJ", "://", "earer")


def looks_secret(text: str) -> bool:
    """A name chosen by a caller may hold a key: the patterns must see it."""
    return any(start in text for start in _STARTS)


class Redactor:
    """Replaces secrets in finished lines. Shared with `explain`, which shows stored lines."""

    __slots__ = ("_needles",)

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._needles: dict[bytes, list[bytes]] = {}
        self.replace(secrets)

    def replace(self, secrets: Iterable[str]) -> None:
        """From now on exactly these values are hidden; safe while the writer runs."""
        needles: set[bytes] = set()
        for secret in secrets:
            if len(secret) >= SHORTEST_SECRET and len(needles) < 2 * MOST_SECRETS:
                needles.add(secret.encode("utf-8", "surrogatepass"))
                needles.add(orjson.dumps(secret.encode("utf-8", "replace").decode())[1:-1])
        # By their beginning, which keys of one provider share: one search for all of them.
        # Longest first: a secret may begin with another one.
        groups: dict[bytes, list[bytes]] = {}
        for needle in sorted(needles, key=len, reverse=True):
            groups.setdefault(needle[:SHORTEST_SECRET], []).append(needle)
        self._needles = groups

    def values(self, lines: bytes) -> bytes:
        """The lines without the values given."""
        for start, needles in self._needles.items():
            if start in lines:
                for needle in needles:
                    lines = lines.replace(needle, HIDDEN)
        return lines

    def __call__(self, lines: bytes) -> bytes:
        """The lines without secrets by value, name or shape; JSON stays JSON."""
        lines = self.values(lines)
        lowered = lines.lower()
        for pattern, replacement, triggers in _PATTERNS:
            if any(trigger in lowered for trigger in triggers):
                lines = pattern.sub(replacement, lines)
        return lines


class Sink(Protocol):
    """Where lines go; blocking is allowed, the writer is a thread of its own."""

    def write(self, data: bytes, /) -> object:
        """Take these bytes."""
        ...

    def flush(self) -> object:
        """They are on their way."""
        ...


class Log:
    """The log of one process.

    Attributes:
        level: Events below it are not made: "debug", "info", "warning", "error".
        dropped: Lines lost so far.
    """

    __slots__ = (
        "_closing", "_lines", "_lock", "_on_drop", "_redact", "_room", "_second", "_shown", "_sink",
        "_thread", "_wake",
        "_wall", "dropped", "level",
    )  # fmt: skip

    def __init__(
        self,
        sink: Sink,
        *,
        wall: Callable[[], float],
        redact: Redactor,
        level: str = "info",
        capacity: int = CAPACITY,
        on_drop: Callable[[int], None] | None = None,
    ) -> None:
        """The writer starts with the first line.

        Args:
            sink: Usually the binary buffer of standard output.
            wall: `Clock.wall`.
            redact: Applied to every line, in the writer.
            level: See class.
            capacity: Bytes waiting at most.
            on_drop: Told how many lines were lost, for metrics; runs where the line was made.
        """
        if level not in LEVELS:
            raise ValueError(f"log level {level!r}: one of {', '.join(LEVELS)} is allowed")
        self.level = level
        self.dropped = 0
        self._sink = sink
        self._wall = wall
        self._second = -1
        self._shown = ""
        self._redact = redact
        self._room = capacity
        self._on_drop = on_drop
        self._lines: deque[tuple[bytes, bool]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    # --- making lines

    def debug(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """For whoever looks for a fault."""
        if LEVELS[self.level] <= LEVELS["debug"]:
            self._event("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Something an operator may want to know."""
        if LEVELS[self.level] <= LEVELS["info"]:
            self._event("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Something an operator should look at."""
        if LEVELS[self.level] <= LEVELS["warning"]:
            self._event("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Something is broken."""
        self._event("error", event, fields)

    def _event(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        record: dict[str, Any] = {"ts": self.stamp(), "level": level, "event": event}
        call_id = CALL_ID.get()
        if call_id:
            record["call"] = call_id
        for name, value in fields.items():
            long = isinstance(value, str) and len(value) > LONGEST_TEXT
            record[name] = value[:LONGEST_TEXT] + "…" if long else value
        self.write(serialized(record))

    def stamp(self) -> str:
        """The wall clock as RFC 3339 with milliseconds."""
        wall = self._wall()
        second = int(wall)
        if second != self._second:  # formatted once a second
            self._shown = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
            self._second = second
        return self._shown + _MILLIS[int((wall - second) * 1000)]

    def write(self, line: bytes, *, plain: bool = False) -> None:
        """The line, without its end, is in the buffer, or dropped and counted.

        Args:
            line: JSON.
            plain: No text in it was chosen by a caller or a library, so values are hidden but names
                and shapes not searched for. For access lines: `Record.plain` says so.
        """
        if len(line) > LONGEST:
            line = serialized({"ts": self.stamp(), "event": "line_too_long", "bytes": len(line)})
        with self._lock:
            if self._closing.is_set() or self._room < len(line):
                self.dropped += 1
                lost = True
            else:
                lost = False
                self._room -= len(line)
                self._lines.append((line, plain))
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="tidegate-log", daemon=True
                    )
                    self._thread.start()
                if len(self._lines) == 1:
                    self._wake.notify()
        if lost and self._on_drop is not None:
            self._on_drop(1)

    # --- writing them

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closing.is_set():
                    self._wake.wait()
                if not self._lines:
                    return
            self._closing.wait(LINGER)
            with self._lock:
                batch = list(self._lines)
                self._lines.clear()
            try:
                self._put(batch)
            except (OSError, ValueError):
                # The reader has gone; there is nowhere left to say so but the count.
                with self._lock:
                    self.dropped += len(batch)
            with self._lock:
                self._room += sum(len(line) for line, _ in batch)

    def _put(self, batch: list[tuple[bytes, bool]]) -> None:
        # Runs of one kind are redacted and written at once.
        for plain, run in groupby(batch, key=itemgetter(1)):
            lines = b"\n".join([line for line, _ in run]) + b"\n"
            self._sink.write(self._redact.values(lines) if plain else self._redact(lines))
        self._sink.flush()

    def close(self, *, patience: float = 2.0) -> bool:
        """No further line is taken. True if all were written within `patience` seconds."""
        with self._wake:
            self._closing.set()
            self._wake.notify()
        thread = self._thread
        if thread is None:
            return True
        thread.join(patience)
        return not thread.is_alive()


class Foreign(logging.Handler):
    """Brings the loggers of libraries (uvicorn, aiohttp, asyncio) into this log.

    Attach to the root logger at the start. Their texts are bounded and redacted like any line.
    """

    def __init__(self, log: Log, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """The record as event `library_log`."""
        try:
            fields: dict[str, Any] = {"logger": record.name, "text": record.getMessage()}
            if record.exc_info and record.exc_info[1] is not None:
                fields["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        except (TypeError, ValueError, KeyError, IndexError) as error:  # a wrong format string
            fields = {"logger": record.name, "text": str(record.msg), "error": repr(error)}
        if record.levelno >= logging.ERROR:
            self._log.error("library_log", **fields)
        elif record.levelno >= logging.WARNING:
            self._log.warning("library_log", **fields)
        else:
            self._log.info("library_log", **fields)


def serialized(record: Mapping[str, Any]) -> bytes:
    """The record as JSON; what is no JSON (bytes, exceptions, lone surrogates) as its text."""
    try:
        return orjson.dumps(record, default=str, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:
        return orjson.dumps(_plain(record, depth=8))


def _plain(value: Any, *, depth: int) -> Any:  # noqa: ANN401 - JSON
    """The value as orjson takes it, bounded in depth."""
    if isinstance(value, dict) and depth:
        return {str(_plain(k, depth=0)): _plain(v, depth=depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [_plain(item, depth=depth - 1) for item in value]
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()
