"""Chains of because: what each layer decided about a call, kept for `tidegate explain CALL_ID`.

A call's record is serialized once, at its end: the same bytes are its access line in the log and
its entry here. Entries are bounded in number and in bytes; the oldest goes first. Files and lines
of the rules are looked up when somebody asks, in the policy the call was pinned to.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import orjson

from gateway.telemetry.logs import LONGEST, looks_secret, serialized
from gateway.units import maker

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


Link: TypeAlias = "tuple[str, str, RuleId, Micros, str]"
"""One link of a chain, a `call.VerdictNote`: who decided what, by which rule, when on the clock's
axis, with which figures. Taken apart at once: a field of a named tuple costs as much as a call."""


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


class Who(NamedTuple):
    """Texts that are the same in most calls of one caller: quoted together, and remembered.

    Attributes:
        path: Without query, which may hold a secret.
        model, served, deployment: As asked, as answered, and by which rung.
        rpc, server, tool: Of an MCP message: its method, whose tool it meant, and which.
    """

    dialect: str
    method: str
    path: str
    model: str = ""
    served: str = ""
    deployment: str = ""
    credential: str = ""
    principal: str = ""
    agent: str = ""
    tenant: str = ""
    session: str = ""
    client: str = ""
    peer: str = ""
    rpc: str = ""
    server: str = ""
    tool: str = ""


make_who = maker(Who)


@dataclass(slots=True)
class Names:
    """A `Who` as members of a JSON object.

    Attributes:
        plain: No name that a caller chose looks like a key; see `Log.write`.
    """

    members: bytes
    plain: bool


@dataclass(slots=True, kw_only=True)
class Record:
    """What one call was and cost. Never changed once made; plain, because a frozen one costs 5 us.

    Attributes:
        ts: `Log.stamp()` of the end.
        call: The call's id.
        names: `Quotes.names` of who called what.
        received: Instant of its arrival; notes are told on the same axis.
        status: As the client saw it; 0 where it left before the head.
        outcome: ok, failed, cancelled or refused.
        end: How the reply ended.
        code, because: Of a refusal.
        waited_us, overhead_us, first_byte_us, total_us: Spans; `first_byte_us` from send to head.
        cost: Micro-dollars.
        error: What a refused caller was told, cut to `LONGEST_DETAIL`; left out where it may quote
            the prompt.
        notes: The chain of verdicts, in order; its details are written by layers, not by callers.
    """

    ts: str
    call: str
    names: Names
    received: Micros
    status: int
    outcome: str
    end: str = ""
    tier: int = 0
    revision: int = 0
    attempts: int = 0
    upstream_status: int = 0
    code: str = ""
    because: RuleId = ""
    error: str = ""
    waited_us: Micros = 0
    overhead_us: Micros = 0
    first_byte_us: Micros = 0
    total_us: Micros = 0
    reserved: Tokens = 0
    usage: Usage | None = None
    cost: MicroUsd = 0
    trace: str = ""
    notes: Sequence[Link] = ()

    @property
    def plain(self) -> bool:
        """No text that a caller chose looks like a key; see `Log.write`."""
        return self.names.plain and not (self.error and looks_secret(self.error))

    def line(self, quote: Quotes | None = None) -> bytes:
        """The record as one JSON object of bounded size.

        Args:
            quote: Remembers the texts that come again and again. Filling in one that is nearly
                constant costs a third of what an encoder takes.
        """
        quote = quote or Quotes()
        line = self._line(quote, quote.notes(self.notes))
        if len(line) > LONGEST:
            line = self._line(quote, b",".join(map(serialized, shortened(self.notes))))
        return line

    def _line(self, quote: Quotes, notes: bytes) -> bytes:
        refusal = _NO_REFUSAL
        if self.code or self.because or self.error:
            refusal = _REFUSAL % (quote(self.code), quote(self.because), quoted(self.error))
        return _LINE % (
            self.ts.encode(), self.call.encode(), self.received, self.names.members, self.status,
            quote(self.outcome), quote(self.end), self.tier, self.revision, self.attempts,
            self.upstream_status, refusal, self.waited_us, self.overhead_us, self.first_byte_us,
            self.total_us, self.reserved, self.cost, self.trace.encode(),
            b"null" if self.usage is None else spent(self.usage), notes,
        )  # fmt: skip


make_record = maker(Record)

_LINE = (
    b'{"ts":"%b","level":"info","event":"call","call":"%b","received":%d,%b,"status":%d,'
    b'"outcome":%b,"end":%b,"tier":%d,"revision":%d,"attempts":%d,"upstream_status":%d,%b,'
    b'"waited_us":%d,"overhead_us":%d,"first_byte_us":%d,"total_us":%d,"reserved":%d,"cost":%d,'
    b'"trace":"%b",'
    b'"usage":%b,"notes":[%b]}'
)
_LINK = b'%b"at":%d,"detail":%b}'
_REFUSAL = b'"code":%b,"because":%b,"error":%b'
_NO_REFUSAL = _REFUSAL % (b'""', b'""', b'""')


def spent(usage: Usage) -> bytes:
    """The usage as JSON: an encoder takes twice as long over a value as over a dictionary."""
    return orjson.dumps({
        "input": usage.input, "output": usage.output, "cache_read": usage.cache_read,
        "cache_write": usage.cache_write, "reasoning": usage.reasoning,
        "estimated": usage.estimated, "money": usage.money,
    })  # fmt: skip


def quoted(text: str) -> bytes:
    """The text as JSON, a lone surrogate in it as its escape."""
    try:
        return orjson.dumps(text)
    except orjson.JSONEncodeError:
        return orjson.dumps(text.encode("utf-8", "backslashreplace").decode())


class Quotes:
    """Texts as JSON, the last ones remembered; half of what records hold are names from policy."""

    __slots__ = ("_groups", "_known", "_links")

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._groups: dict[Who, Names] = {}
        self._links: dict[tuple[str, str, str], bytes] = {}

    def __call__(self, text: str) -> bytes:
        """The text as JSON."""
        known = self._known.get(text)
        if known is None:
            known = quoted(text)
            if len(text) <= LONGEST_QUOTE:
                if len(self._known) >= MOST_QUOTES:
                    self._known.clear()
                self._known[text] = known
        return known

    def names(self, who: Who) -> Names:
        """The texts, in order, as members of an object."""
        found = self._groups.get(who)
        if found is None:
            pairs = zip(Who._fields, who, strict=True)
            members = b",".join([b'"%b":%b' % (key.encode(), self(text)) for key, text in pairs])
            chosen = f"{who.path} {who.model} {who.tool} {who.session} {who.peer}"
            found = Names(members, not looks_secret(chosen))
            if len(members) <= LONGEST_GROUP:
                if len(self._groups) >= MOST_GROUPS:
                    self._groups.clear()
                self._groups[who] = found
        return found

    def notes(self, notes: Sequence[Link]) -> bytes:
        """The links of a chain as objects, with commas between: filled in all at once."""
        links, known = self._links, self._known
        facts: list[bytes | int] = []
        for layer, verdict, because, at, detail in notes:
            key = (layer, verdict, because)
            facts += (links.get(key) or self._link(key), at, known.get(detail) or self(detail))
        return b",".join([_LINK] * len(notes)) % tuple(facts)

    def _link(self, key: tuple[str, str, str]) -> bytes:
        """What links of that layer, verdict and rule begin with."""
        link = b'{"layer":%b,"verdict":%b,"because":%b,' % tuple(map(self, key))
        if len(link) <= LONGEST_GROUP:
            if len(self._links) >= MOST_GROUPS:
                self._links.clear()
            self._links[key] = link
        return link


def shortened(notes: Sequence[Link]) -> list[dict[str, Any]]:
    """At most `MOST_NOTES` links with short details: the first and the last of a longer chain."""
    half = MOST_NOTES // 2
    kept = notes if len(notes) <= MOST_NOTES else [*notes[:half], *notes[-half:]]
    return [
        {
            "layer": layer,
            "verdict": verdict,
            "because": because[:LONGEST_DETAIL],
            "at": at,
            "detail": detail[:LONGEST_DETAIL],
        }
        for layer, verdict, because, at, detail in kept
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
