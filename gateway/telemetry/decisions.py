"""Chains of because: what each layer decided about a call, kept for `tidegate explain CALL_ID`.

A call's record is serialized once, at its end: the same bytes are its access line in the log and
its entry here. Entries are bounded in number and in bytes; the oldest goes first. Files and lines
of the rules are looked up when somebody asks, in the policy the call was pinned to.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from gateway.telemetry.logs import LONGEST, looks_secret, serialized

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gateway.admission.profiles import Usage
    from gateway.units import Micros, MicroUsd, RuleId, Tokens

MOST_CALLS = 10_000
MOST_BYTES = 16 * 1024 * 1024
"""Calls remembered, and their bytes: about 1 KB each."""

MOST_NOTES = 64
"""Links of one chain. A call that tries many rungs shows its first and its last ones."""

LONGEST_DETAIL = 300

MOST_QUOTES = 4_096
LONGEST_QUOTE = 128
"""Texts remembered as JSON, and their characters."""

MOST_GROUPS = 1_024
LONGEST_GROUP = 1_024
"""The same for all names of a record together."""


class Note(Protocol):
    """One link of a chain: `call.VerdictNote`."""

    @property
    def layer(self) -> str:
        """Who decided."""
        ...

    @property
    def verdict(self) -> str:
        """What."""
        ...

    @property
    def because(self) -> RuleId:
        """By which rule."""
        ...

    @property
    def at(self) -> Micros:
        """When, on the clock's axis."""
        ...

    @property
    def detail(self) -> str:
        """With which figures."""
        ...


class Where(Protocol):
    """Where a rule stands: `snapshot.Place`."""

    @property
    def file(self) -> str:
        """The policy file."""
        ...

    @property
    def line(self) -> int:
        """Its line."""
        ...


@dataclass(slots=True, kw_only=True)
class Record:
    """What one call was and cost. Never changed once made; plain, because a frozen one costs 5 us.

    Attributes:
        ts: `Log.stamp()` of the end.
        call: The call's id.
        received: Instant of its arrival; notes are told on the same axis.
        status: As the client saw it; 0 where it left before the head.
        outcome: ok, failed, cancelled or refused.
        end: How the reply ended.
        path: Without query, which may hold a secret.
        model, served, deployment: As asked, as answered, and by which rung.
        code, because: Of a refusal.
        waited_us, overhead_us, first_byte_us, total_us: Spans; `first_byte_us` from send to head.
        cost: Micro-dollars.
        error: What a refused caller was told, cut to `LONGEST_DETAIL`; left out where it may quote
            the prompt.
        notes: The chain of verdicts, in order; its details are written by layers, not by callers.
    """

    ts: str
    level: str = "info"
    event: str = "call"
    call: str
    received: Micros
    dialect: str
    method: str
    path: str
    status: int
    outcome: str
    end: str = ""
    model: str = ""
    served: str = ""
    deployment: str = ""
    credential: str = ""
    principal: str = ""
    agent: str = ""
    tenant: str = ""
    session: str = ""
    tier: int = 0
    client: str = ""
    peer: str = ""
    revision: int = 0
    attempts: int = 0
    upstream_status: int = 0
    code: str = ""
    because: RuleId = ""
    waited_us: Micros = 0
    overhead_us: Micros = 0
    first_byte_us: Micros = 0
    total_us: Micros = 0
    reserved: Tokens = 0
    usage: Usage | None = None
    cost: MicroUsd = 0
    trace: str = ""
    error: str = ""
    notes: Sequence[Note] = ()

    @property
    def plain(self) -> bool:
        """No name that a caller chose looks like a key; see `Log.write`."""
        return not looks_secret(f"{self.path} {self.model} {self.session} {self.peer} {self.error}")

    def line(self, quote: Quotes | None = None) -> bytes:
        """The record as one JSON object of bounded size.

        Args:
            quote: Remembers the names that come again and again. Filling in a text that is nearly
                constant costs a third of what an encoder takes.
        """
        quote = quote or Quotes()
        try:
            values = [quote(one) if type(one) is str else one for one in _PLAIN(self)]
            usage = b"null" if self.usage is None else orjson.dumps(self.usage)
            notes = b",".join([_noted(note, quote) for note in self.notes])
            line = _LINE % (*values, quote.names(_WHO(self)), usage, notes)
        except orjson.JSONEncodeError:  # a lone surrogate in a name
            line = serialized(asdict(self))
        if len(line) > LONGEST:
            line = serialized(asdict(replace(self, notes=shortened(self.notes))))
        return line


_PARTS = ("usage", "notes")
_NAMED = (
    "dialect", "method", "path", "model", "served", "deployment", "credential", "principal",
    "agent", "tenant", "session", "client", "peer",
)  # fmt: skip
"""Texts that are the same in most calls of one caller: remembered together."""
_PLAINS = [one for one in fields(Record) if one.name not in (*_NAMED, *_PARTS)]
_PLAIN = attrgetter(*[one.name for one in _PLAINS])
_WHO = attrgetter(*_NAMED)
_NUMBERS = ("int", "Micros", "MicroUsd", "Tokens")
_LINE = b'{%b,%%b,"usage":%%b,"notes":[%%b]}' % b",".join(
    b'"%b":%b' % (one.name.encode(), b"%d" if one.type in _NUMBERS else b"%b") for one in _PLAINS
)
_NOTE = b'{"layer":%b,"verdict":%b,"because":%b,"at":%d,"detail":%b}'


def _noted(note: Note, quote: Quotes) -> bytes:
    return _NOTE % (
        quote(note.layer), quote(note.verdict), quote(note.because), note.at,
        orjson.dumps(note.detail),
    )  # fmt: skip


class Quotes:
    """Texts as JSON, the last ones remembered; half of what records hold are names from policy."""

    __slots__ = ("_groups", "_known")

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._groups: dict[tuple[str, ...], bytes] = {}

    def __call__(self, text: str) -> bytes:
        """The text as JSON. Raises JSONEncodeError for one that is no Unicode."""
        quoted = self._known.get(text)
        if quoted is None:
            quoted = orjson.dumps(text)
            if len(text) <= LONGEST_QUOTE:
                if len(self._known) >= MOST_QUOTES:
                    self._known.clear()
                self._known[text] = quoted
        return quoted

    def names(self, values: tuple[str, ...]) -> bytes:
        """The texts of `_NAMED`, in order, as members of an object."""
        group = self._groups.get(values)
        if group is None:
            pairs = zip(_NAMED, values, strict=True)
            group = b",".join([b'"%b":%b' % (name.encode(), self(text)) for name, text in pairs])
            if len(group) <= LONGEST_GROUP:
                if len(self._groups) >= MOST_GROUPS:
                    self._groups.clear()
                self._groups[values] = group
        return group


def shortened(notes: Sequence[Note]) -> list[Any]:
    """At most `MOST_NOTES` links with short details: the first and the last of a longer chain."""
    half = MOST_NOTES // 2
    kept = notes if len(notes) <= MOST_NOTES else [*notes[:half], *notes[-half:]]
    return [
        {
            "layer": note.layer,
            "verdict": note.verdict,
            "because": note.because[:LONGEST_DETAIL],
            "at": note.at,
            "detail": note.detail[:LONGEST_DETAIL],
        }
        for note in kept
    ]


class Decisions:
    """Records of the last calls by id."""

    __slots__ = ("_bytes", "_most_bytes", "_most_calls", "_records", "_redact")

    def __init__(
        self,
        redact: Callable[[bytes], bytes],
        *,
        most_calls: int = MOST_CALLS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._redact = redact
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._bytes = 0
        self._records: OrderedDict[str, tuple[bytes, Mapping[RuleId, Where]]] = OrderedDict()

    def __len__(self) -> int:
        """Calls remembered."""
        return len(self._records)

    def add(self, call: str, line: bytes, places: Mapping[RuleId, Where]) -> None:
        """The call's line is remembered, with the places of the rules it was judged by."""
        former = self._records.pop(call, None)
        if former is not None:
            self._bytes -= len(former[0])
        self._records[call] = (line, places)
        self._bytes += len(line)
        while self._records and (
            len(self._records) > self._most_calls or self._bytes > self._most_bytes
        ):
            _, (dropped, _) = self._records.popitem(last=False)
            self._bytes -= len(dropped)

    def explain(self, call: str) -> dict[str, Any] | None:
        """The record as people read it; None if unknown or forgotten.

        Empty fields are left out, spans are in milliseconds, notes count from the arrival, each
        rule has its file and line, and secrets are hidden.
        """
        found = self._records.get(call)
        if found is None:
            return None
        line, places = found
        try:
            stored: dict[str, Any] = orjson.loads(self._redact(line))
        except orjson.JSONDecodeError:  # a secret of digits within a number
            return {"call": call, "error": "the record held a secret and cannot be shown"}
        shown = {key: value for key, value in stored.items() if value or key == "status"}
        for name in ("waited", "overhead", "first_byte", "total"):
            if f"{name}_us" in shown:
                shown[f"{name}_ms"] = shown.pop(f"{name}_us") / 1000
        if "usage" in shown:
            shown["usage"] = {k: v for k, v in shown["usage"].items() if v is not None}
        for note in shown.setdefault("notes", []):
            note["at_ms"] = (note.pop("at") - stored.get("received", 0)) / 1000
        for judged in (shown, *shown["notes"]):
            where = place_of(judged.get("because", ""), places)
            if where is not None:
                judged["file"], judged["line"] = where.file, where.line
        return shown


def place_of(rule: RuleId, places: Mapping[RuleId, Where]) -> Where | None:
    """Where the rule stands, or its nearest parent that was written down."""
    while rule:
        where = places.get(rule)
        if where is not None:
            return where
        rule = rule.rpartition(".")[0]
    return None
