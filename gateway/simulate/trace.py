"""Recorded calls: a gateway's access log, or a plain JSONL of one call per line.

Two forms, told apart line by line:

    the log        as `tidegate serve` writes it: {"event": "call", "received": …, "usage": {…}, …};
                   its other lines are passed over
    plain          {"at": 12.5, "agent": "lab", "model": "m", "input": 900, "output": 120}
                   at: seconds from any zero, or an RFC 3339 time
                   also, all optional: tier (1 to 3), cap, cached, seconds (the answer's own time),
                   waited (seconds), status, cost (dollars)

What a log line lacks is taken from its estimate. A line that is no call of either form is bad: it
is counted and named by its number, and the rest is played.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import orjson

from gateway.simulate.scenario import WHOLE
from gateway.simulate.workload import Op, Source
from gateway.units import MICRO, Micros, MicroUsd, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gateway.simulate.scenario import Fleet, Upstream
    from gateway.snapshot import Snapshot

MAX_LINE = 256 * 1024
"""Bytes of one line; the gateway's own are far below."""

MAX_CALLS = 5_000_000
"""Calls of one trace."""

MAX_TOKENS = 100_000_000
"""Tokens of one call; beyond it a line is nonsense."""

SHOWN = 20
"""Bad lines that are told one by one."""

_ESTIMATE = re.compile(r"input (\d+) output (\d+) cap (\d+|None)")


class Recorded(NamedTuple):
    """One call of a trace.

    Attributes:
        at: Micros, on the trace's own axis.
        takes: Micros of the answer, 0 where unknown.
        waited: Micros it waited when it was recorded.
        counted: Input as the gateway counted it then; the log's own figure, else `input`.
        status: As its client saw it, 0 where unknown.
        cost: Micro-dollars it cost.
    """

    at: Micros
    agent: str
    tenant: str
    model: str
    tier: int
    input: Tokens
    output: Tokens
    cap: Tokens
    cached: Tokens
    takes: Micros
    waited: Micros
    status: int
    cost: MicroUsd
    counted: Tokens


@dataclass(slots=True)
class Trace:
    """What a file held.

    Attributes:
        calls: In the order of their instants, the first at 0.
        bad: Number of bad lines; `shown` the first of them with their reason.
        passed_over: Lines of a log that are no calls.
    """

    calls: list[Recorded] = field(default_factory=list)
    bad: int = 0
    shown: list[tuple[int, str]] = field(default_factory=list)
    passed_over: int = 0

    @property
    def span(self) -> Micros:
        """From the first call to the last."""
        return self.calls[-1].at if self.calls else 0


class Unusable(ValueError):
    """A line that is no call; says why."""


def read(lines: Iterable[bytes]) -> Trace:
    """The calls of these lines. Lines may come in any order; logs are written as calls end."""
    trace = Trace()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            call = _call(line)
        except Unusable as wrong:
            trace.bad += 1
            if len(trace.shown) < SHOWN:
                trace.shown.append((number, str(wrong)))
            continue
        if call is None:
            trace.passed_over += 1
        elif len(trace.calls) >= MAX_CALLS:
            trace.bad += 1
            trace.shown.append((number, f"beyond the {MAX_CALLS} calls that are played"))
            break
        else:
            trace.calls.append(call)
    trace.calls.sort(key=lambda call: call.at)
    if trace.calls:
        first = trace.calls[0].at
        trace.calls = [call._replace(at=call.at - first) for call in trace.calls]
    return trace


def _call(line: bytes) -> Recorded | None:
    """The call of that line; None for a log's line that is none."""
    if len(line) > MAX_LINE:
        raise Unusable(f"longer than {MAX_LINE} bytes")
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError as wrong:
        raise Unusable(f"not JSON: {wrong}") from None
    if not isinstance(said, dict):
        raise Unusable("not an object")
    if "event" in said:
        return _logged(said) if said["event"] == "call" else None
    return _plain(said)


def _logged(said: dict[str, Any]) -> Recorded | None:
    """A line of the gateway's own log; None for calls that cost nothing, such as model lists."""
    usage = said.get("usage")
    predicted = _estimated(said.get("notes"))
    if not isinstance(usage, dict):
        usage = {}
    if not usage and predicted is None:
        if said.get("outcome") == "refused" or said.get("dialect") in ("models", "count_tokens"):
            return None
        raise Unusable("a call with neither usage nor estimate")
    expected = predicted or (0, 0, 0)
    failed = said.get("outcome") != "ok"
    cached = _whole(usage, "cache_read", 0)
    fresh = _whole(usage, "input", 0) + _whole(usage, "cache_write", 0) + cached
    output = _whole(usage, "output", 0)
    if failed and predicted is not None and not output:
        fresh, output = expected[0], expected[1]  # what it would have been
    total, waited = _whole(said, "total_us", 0), _whole(said, "waited_us", 0)
    return Recorded(
        at=_whole(said, "received"),
        agent=_text(said, "agent"),
        tenant=_text(said, "tenant", ""),
        model=_text(said, "model"),
        tier=_tier(said),
        input=max(1, fresh),
        output=output,
        cap=expected[2],
        cached=min(cached, fresh),
        takes=0 if failed else max(0, total - waited),
        waited=waited,
        status=_whole(said, "status", 0),
        cost=_whole(said, "cost", 0),
        counted=expected[0] or max(1, fresh),
    )


def _estimated(notes: object) -> tuple[int, int, int] | None:
    """Input, output and cap of the estimate layer's note."""
    for note in notes if isinstance(notes, list) else ():
        if isinstance(note, dict) and note.get("layer") == "estimate":
            found = _ESTIMATE.fullmatch(str(note.get("detail", "")))
            if found is not None:
                cap = 0 if found[3] == "None" else int(found[3])
                return int(found[1]), int(found[2]), cap
    return None


def _plain(said: dict[str, Any]) -> Recorded:
    known = {
        "at", "agent", "tenant", "model", "tier", "input", "output", "cap", "cached", "seconds",
        "waited", "status", "cost",
    }  # fmt: skip
    unknown = sorted(said.keys() - known)
    if unknown:
        raise Unusable(f"unknown key {unknown[0][:40]!r}; allowed: {', '.join(sorted(known))}")
    tokens = _whole(said, "input")
    return Recorded(
        at=_instant(said),
        agent=_text(said, "agent"),
        tenant=_text(said, "tenant", ""),
        model=_text(said, "model"),
        tier=_tier(said),
        input=max(1, tokens),
        output=_whole(said, "output"),
        cap=_whole(said, "cap", 0),
        cached=min(tokens, _whole(said, "cached", 0)),
        takes=_seconds(said, "seconds"),
        waited=_seconds(said, "waited"),
        status=_whole(said, "status", 0),
        cost=_seconds(said, "cost"),
        counted=max(1, tokens),
    )


def _instant(said: dict[str, Any]) -> Micros:
    at = said.get("at")
    if isinstance(at, str):
        try:
            moment = datetime.fromisoformat(at)
            if moment.tzinfo is None:
                raise Unusable(f"at: {at[:40]!r} has no time zone")
            return round(moment.timestamp() * MICRO)
        except (ValueError, OverflowError) as wrong:
            if isinstance(wrong, Unusable):
                raise
            raise Unusable(f"at: {at[:40]!r} is neither seconds nor an RFC 3339 time") from None
    if "at" not in said:
        raise Unusable("at is missing")
    return _seconds(said, "at")


def _seconds(said: dict[str, Any], key: str) -> int:
    """A number of seconds, or of dollars, in millionths; 0 where it is absent."""
    value = said.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise Unusable(f"{key}: a number of at least 0 is expected")
    return round(value * MICRO)


def _whole(said: dict[str, Any], key: str, default: int | None = None) -> int:
    value = said.get(key, default)
    if value is None:
        if default is not None:
            return default
        raise Unusable(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unusable(f"{key}: a whole number of at least 0 is expected")
    if key in ("input", "output", "cap", "cached") and value > MAX_TOKENS:
        raise Unusable(f"{key}: more than {MAX_TOKENS} tokens")
    return value


def _text(said: dict[str, Any], key: str, default: str | None = None) -> str:
    value = said.get(key, default)
    if not isinstance(value, str) or (not value and default is None):
        raise Unusable(f"{key} is missing" if key not in said else f"{key}: a text is expected")
    return value[:200]


def _tier(said: dict[str, Any]) -> int:
    tier = _whole(said, "tier", 0)
    if tier > 3:
        raise Unusable("tier: 1, 2 or 3 is expected")
    return tier


def principal_of(snapshot: Snapshot, agent: str, tenant: str) -> str:
    """The policy's agent whose call that was; the name itself where policy knows none."""
    if agent in snapshot.agents:
        return agent
    for key in snapshot.key_patterns:
        if fnmatchcase(agent, key.pattern):
            return key.agent.id
    for name, rule in snapshot.agents.items():
        if rule.many and tenant and rule.tenant == tenant:
            return name
    return agent


class Player:
    """Makes calls of a trace anew for every run."""

    def __init__(self, trace: Trace, snapshot: Snapshot, fleet: Fleet, upstream: Upstream) -> None:
        self._trace = trace
        self._snapshot = snapshot
        self._fleet = fleet
        self._upstream = upstream

    def __call__(self) -> Iterator[Op]:
        """The calls, in order."""
        sources: dict[tuple[str, str, int], Source] = {}
        for number, call in enumerate(self._trace.calls, 1):
            key = (call.agent, call.model, call.tier)
            source = sources.get(key)
            if source is None:
                principal = principal_of(self._snapshot, call.agent, call.tenant)
                gateway = self._gateway(call.agent)
                source = sources[key] = Source(
                    call.agent, principal, call.model, call.tier, gateway
                )
            op = Op(number, source, call.at)
            op.input, op.output, op.cap = call.input, call.output, call.cap
            op.counted, op.cached = call.counted, call.cached
            op.session = call.agent if call.cached else ""
            op.takes = call.takes or (
                self._upstream.first_token + call.output * MICRO // self._upstream.rate
            )
            yield op

    def _gateway(self, agent: str) -> int:
        """The gateway that this agent calls, by its share."""
        at = crc32(agent.encode("utf-8", "surrogatepass")) % WHOLE
        total = sum(self._fleet.shares)
        for index, share in enumerate(self._fleet.shares):
            at -= share * WHOLE // total
            if at < 0:
                return index
        return len(self._fleet.shares) - 1
