"""Expectations (FORM.md §4) against what happened: each that does not hold becomes one sentence.

Pure: exchanges, records and counter changes in, problems out. Every word of the form has its check
here; a word without one is an error, not a success.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.cases import items, rawjson, sse
from tests.cases.client import Exchange, Headers, first
from tests.cases.upstream import Script, Seen, listed

if TYPE_CHECKING:
    from tests.cases.form import Variant

Problems = list[str]


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All that is known of one played variant.

    Attributes:
        exchanges: Per call name, one exchange per copy; in order of the calls.
        changes: Changes of counters and values of gauges; None where nobody asked.
        unreadable: Why the counters could not be read, or "".
        log: The gateway's log since the variant began; None where it cannot be read.
    """

    variant: Variant
    script: Script
    names: items.Names
    exchanges: dict[str, list[Exchange]] = field(default_factory=dict)
    changes: Mapping[str, float] | None = None
    unreadable: str = ""
    log: str | None = None

    def wire(self, value: Any) -> bytes:
        """The bytes of byte items."""
        return items.content(value, self.names.fill)

    def text(self, value: Any) -> str:
        """A text with its variables replaced."""
        return self.names.fill(str(value))

    @property
    def last(self) -> Exchange | None:
        """The exchange `expect.client` speaks of."""
        calls = [
            name for call in self.variant.calls if "wait" not in call for name in [call["name"]]
        ]
        found = self.exchanges.get(calls[-1], []) if calls else []
        return found[-1] if found else None

    @property
    def left_at(self) -> float | None:
        """When the client left on purpose."""
        times = [one.left_at for all_ in self.exchanges.values() for one in all_ if one.left_at]
        return max(times) if times else None


def within(value: float, wanted: Any) -> bool:
    """The number is the wanted one, or lies in `{min, max}`."""
    if isinstance(wanted, dict):
        return wanted.get("min", float("-inf")) <= value <= wanted.get("max", float("inf"))
    return value == wanted


def shown(value: Any, limit: int = 160) -> str:
    """A value for a message, cut short."""
    text = repr(bytes(value)) if isinstance(value, bytes | bytearray) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(value)} in all)"


# --- the client ---------------------------------------------------------------------------------


def _status(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    allowed = listed(wanted)
    seen = "none" if done.status is None else done.status
    if seen in allowed:
        return []
    return [f"status: expected {' or '.join(map(str, allowed))}, seen {seen} {why(done)}"]


def why(done: Exchange) -> str:
    """What helps to understand an unexpected end."""
    parts = [done.broken] if done.broken else []
    if done.body:
        parts.append(f"body {shown(done.body)}")
    return f"({'; '.join(parts)})" if parts else ""


def _status_not(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    bad = done.status in listed(wanted)
    return [f"status: expected none of {wanted}, seen {done.status} {why(done)}"] if bad else []


def _headers(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    return header_pairs(done.headers, wanted, evidence)


def header_pairs(headers: Headers, wanted: Mapping[str, Any], evidence: Evidence) -> Problems:
    """A header of each name with that value exists."""
    problems = []
    for name, value in wanted.items():
        seen = [v for n, v in headers if n == name]
        if evidence.text(value) not in seen:
            problems.append(f"header {name}: expected {value!r}, seen {seen}")
    return problems


def absent(headers: Headers, wanted: Any) -> Problems:
    """No header of these names."""
    return [
        f"header {name}: expected none, seen {first(headers, name)!r}"
        for name in listed(wanted)
        if first(headers, name) is not None
    ]


def values(headers: Headers, wanted: Mapping[str, Any], evidence: Evidence) -> Problems:
    """Exactly these values of each name, in order."""
    problems = []
    for name, value in wanted.items():
        expected = [evidence.text(one) for one in listed(value)]
        seen = [v for n, v in headers if n == name]
        if seen != expected:
            problems.append(f"header {name}: expected {expected}, seen {seen}")
    return problems


def _header_matches(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    problems = []
    for name, pattern in wanted.items():
        seen = [v for n, v in done.headers if n == name]
        if not any(re.search(pattern, value) for value in seen):
            problems.append(f"header {name}: expected one like {pattern!r}, seen {seen}")
    return problems


def _header_present(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    return [
        f"header {name}: expected one, seen none"
        for name in listed(wanted)
        if first(done.headers, name) is None
    ]


def _retry_after(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    if wanted.get("or_told_to_stop") and first(done.headers, "x-should-retry") == "false":
        return []
    value = first(done.headers, "retry-after")
    if value is None:
        return [] if wanted.get("optional") else ["retry-after: expected one, seen none"]
    if not value.isdigit():
        return [f"retry-after: expected whole seconds, seen {value!r}"]
    limits = {key: wanted[key] for key in ("min", "max") if key in wanted}
    return [] if within(int(value), limits) else [f"retry-after: expected {limits}, seen {value}"]


def _body(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    return same(done.body, evidence.wire(wanted), "body")


def same(seen: bytes, expected: bytes, what: str) -> Problems:
    """Two byte strings are equal."""
    return [] if seen == expected else [f"{what}: {sse.difference(seen, expected)}"]


def _same_as_upstream(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    return same(done.body, evidence.script.sent, "body") if wanted else []


def _same_but_comments(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    if not wanted:
        return []
    seen, expected = sse.without_comments(done.body), sse.without_comments(evidence.script.sent)
    if [line for line in seen if line] == [line for line in expected if line]:
        return []
    return [f"body without comments: {sse.difference(b'|'.join(seen), b'|'.join(expected))}"]


def contains(body: bytes, wanted: Any, evidence: Evidence, what: str = "body") -> Problems:
    """Each of these occurs."""
    return [
        f"{what}: expected {shown(one)} in it, seen {shown(body)}"
        for one in listed(wanted)
        if evidence.wire(one) not in body
    ]


def lacks(body: bytes, wanted: Any, evidence: Evidence, what: str = "body") -> Problems:
    """None of these occurs."""
    return [
        f"{what}: expected no {shown(one)} in it, seen {shown(body)}"
        for one in listed(wanted)
        if evidence.wire(one) in body
    ]


def _once(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    return [
        f"body: expected {one!r} once, seen {count} times in {shown(done.body)}"
        for one in listed(wanted)
        if (count := done.body.count(evidence.wire(one))) != 1
    ]


def json_paths(body: bytes, wanted: Mapping[str, Any], evidence: Evidence) -> Problems:
    """Values at dotted paths of a JSON body."""
    try:
        value = json.loads(body)
    except ValueError:
        return [f"body: expected JSON, seen {shown(body)}"]
    problems = []
    for path, expected in wanted.items():
        at: Any = value
        for step in path.split("."):
            if isinstance(at, list) and step.isdigit() and int(step) < len(at):
                at = at[int(step)]
            else:
                at = at.get(step) if isinstance(at, dict) else None
        expected = evidence.text(expected) if isinstance(expected, str) else expected
        if at != expected or isinstance(at, bool) != isinstance(expected, bool):
            problems.append(f"body at {path}: expected {expected!r}, seen {at!r}")
    return problems


def shapes(body: bytes) -> set[str]:
    """In which dialects the body is a well-formed error."""
    try:
        value = json.loads(body)
    except ValueError:
        return set()
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return set()
    found = set()
    if value.get("jsonrpc") == "2.0" and isinstance(error.get("code"), int) and "id" in value:
        found.add("jsonrpc")
    if isinstance(error.get("type"), str):
        found.add("anthropic" if value.get("type") == "error" else "openai")
    return found


def _error_shape(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    seen = shapes(done.body)
    if (wanted == "any" and seen) or wanted in seen:
        return []
    return [f"error shape: expected {wanted}, seen {shown(done.body)}"]


def _sse_data(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    seen = [event.data for event in done.events]
    expected = [evidence.text(one) for one in wanted]
    if len(seen) == len(expected) and all(
        e in (s, "...") for s, e in zip(seen, expected, strict=True)
    ):
        return []
    return [f"events: expected {shown(expected)}, seen {shown(seen)}"]


def _sse_count(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    seen = len(done.events)
    return [] if within(seen, wanted) else [f"number of events: expected {wanted}, seen {seen}"]


def _sse_names(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    seen = [event.name for event in done.events]
    return [] if seen == list(wanted) else [f"names of events: expected {wanted}, seen {seen}"]


def _sse_first(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    event = done.events[0] if done.events else None
    if event is not None and wanted in (event.name, (event.json() or {}).get("type")):
        return []
    return [f"first event: expected {wanted}, seen {event}"]


def _sse_all_json(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    if not wanted:
        return []
    events = done.events
    bad = [event.data for event in events if event.data != "[DONE]" and event.json() is None]
    if not events:
        return [f"events: expected some, seen none in {shown(done.body)}"]
    return [f"events: expected JSON in each, seen {shown(bad)}"] if bad else []


def _added_only(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    difference = sse.only_added(done.body, evidence.script.sent, wanted)
    return (
        [f"body: expected upstream's bytes and only {wanted} added: {difference}"]
        if difference
        else []
    )


def coherent(
    headers: Headers, body: bytes, wanted: Mapping[str, Any], evidence: Evidence
) -> Problems:
    """These encoded bytes under their label, or their plain form without one."""
    encoded, label = (
        evidence.wire(wanted["encoded"]),
        first(headers, "content-encoding") or "identity",
    )
    if label == wanted["coding"] and body == encoded:
        return []
    if label == "identity" and body == items.unpack(wanted["coding"], encoded):
        return []
    return [
        f"coding: expected {wanted['coding']} or plain bytes, seen {label!r} with {shown(body)}"
    ]


def _coherent(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    return coherent(done.headers, done.body, wanted, evidence)


def _end(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    if done.ends & set(listed(wanted)):
        return []
    return [
        f"end: expected {' or '.join(listed(wanted))}, seen {' and '.join(done.ends)} {why(done)}"
    ]


def _within(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    if done.seconds <= wanted and not done.gave_up:
        return []
    return [f"time: expected at most {wanted} s, seen {done.seconds:.2f} s {why(done)}"]


def _not_before(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    bad = done.seconds < wanted
    return [f"time: expected at least {wanted} s, seen {done.seconds:.2f} s"] if bad else []


def _first_byte(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    at = done.body_at
    if at is not None and at - done.sent_at <= wanted:
        return []
    return [
        f"first byte: expected within {wanted} s, seen {None if at is None else at - done.sent_at}"
    ]


def _ratio(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    other = evidence.exchanges.get(wanted["call"], [])
    if not other:
        return [f"time: call {wanted['call']!r} was not made"]
    limit = other[0].seconds * wanted["ratio"] + wanted.get("plus", 0)
    if done.seconds <= limit:
        return []
    return [f"time: expected at most {limit:.2f} s, seen {done.seconds:.2f} s"]


def replies(done: Exchange) -> list[str]:
    """The exact texts of the JSON-RPC replies in an answer, plain or streamed, batched or not."""
    texts = (
        [event.data for event in done.events]
        if done.is_sse
        else [done.body.decode("utf-8", "replace")]
    )
    found = [element for text in texts for element in rawjson.elements(text)]
    return [text for text in found if {"result", "error"} & rawjson.members(text).keys()]


def _rpc(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    texts = replies(done)
    members = [rawjson.members(text) for text in texts]
    ids = [one.get("id", "absent") for one in members]
    errors = [json.loads(one["error"]) for one in members if "error" in one]
    results = [json.loads(one["result"]) for one in members if "result" in one]
    failed = bool(errors) or any(isinstance(r, dict) and r.get("isError") for r in results)
    tools = sum(len(r.get("tools", [])) for r in results if isinstance(r, dict))
    codes = [error.get("code") for error in errors if isinstance(error, dict)]
    joined = "\n".join(texts).encode()
    checks: dict[str, Callable[[Any], bool]] = {
        "count": lambda want: within(len(texts), want),
        "id_raw": lambda want: ids == [str(want)],
        "ids_raw": lambda want: sorted(ids) == sorted(map(str, want)),
        "error": lambda want: bool(errors) == want and bool(texts),
        "error_or_is_error": lambda want: failed == want and bool(texts),
        "code": lambda want: bool(codes) and all(code in listed(want) for code in codes),
        "code_not": lambda want: not any(code in listed(want) for code in codes),
        "contains": lambda want: not contains(joined, want, evidence),
        "lacks": lambda want: not lacks(joined, want, evidence),
        "min_tools": lambda want: tools >= want,
    }
    return [
        f"rpc {word}: expected {want!r}, seen {shown(texts)} {why(done) if not texts else ''}"
        for word, want in wanted.items()
        if not checks[word](want)
    ]


def _exit(done: Exchange, wanted: Any, _: Evidence) -> Problems:
    good = done.code is not None and (
        (done.code != 0)
        if wanted == "nonzero"
        else done.code == (0 if wanted == "zero" else wanted)
    )
    return [] if good else [f"exit: expected {wanted}, seen {done.code} ({done.output[-200:]!r})"]


def _output(done: Exchange, wanted: Any, evidence: Evidence) -> Problems:
    return contains(done.output.encode(), wanted, evidence, "output")


CLIENT: dict[str, Callable[[Exchange, Any, Evidence], Problems]] = {
    "status": _status,
    "status_not": _status_not,
    "headers": _headers,
    "header_absent": lambda done, wanted, _: absent(done.headers, wanted),
    "header_present": _header_present,
    "header_values": lambda done, wanted, evidence: values(done.headers, wanted, evidence),
    "header_matches": _header_matches,
    "retry_after": _retry_after,
    "body": _body,
    "body_same_as_upstream": _same_as_upstream,
    "body_same_but_comments": _same_but_comments,
    "body_contains": lambda done, wanted, evidence: contains(done.body, wanted, evidence),
    "body_lacks": lambda done, wanted, evidence: lacks(done.body, wanted, evidence),
    "body_contains_once": _once,
    "body_json": lambda done, wanted, evidence: json_paths(done.body, wanted, evidence),
    "error_shape": _error_shape,
    "sse_data": _sse_data,
    "sse_count": _sse_count,
    "sse_names": _sse_names,
    "sse_first": _sse_first,
    "sse_all_json": _sse_all_json,
    "added_only": _added_only,
    "coherent": _coherent,
    "end": _end,
    "within": _within,
    "not_before": _not_before,
    "first_byte_within": _first_byte,
    "within_ratio_of": _ratio,
    "rpc": _rpc,
    "exit": _exit,
    "output_contains": _output,
}


def judge_client(done: Exchange | None, wanted: Mapping[str, Any], evidence: Evidence) -> Problems:
    """What does not hold of one exchange."""
    if not wanted:
        return []
    if done is None:
        return ["client: no call was made"]
    problems = []
    for word, value in wanted.items():
        if word != "statuses":
            problems += CLIENT[word](done, value, evidence)
    return problems


def judge_statuses(exchanges: list[Exchange], wanted: Mapping[str, Any]) -> Problems:
    """How often each status came, against `{"200": 1, "200|429": n, other: 0}`."""
    seen = Counter("none" if one.status is None else str(one.status) for one in exchanges)
    named = {status for group in wanted for status in str(group).split("|")}
    problems = []
    for group, count in wanted.items():
        if group == "other":
            number = sum(n for status, n in seen.items() if status not in named)
        else:
            number = sum(seen.get(status, 0) for status in str(group).split("|"))
        if not within(number, count):
            problems.append(f"statuses: expected {group} {count} times, seen {dict(seen)}")
    return problems


# --- the upstream -------------------------------------------------------------------------------


def _each(seen: Seen, wanted: Mapping[str, Any], sent: list[bytes], evidence: Evidence) -> Problems:
    def header_not(want: Mapping[str, Any]) -> Problems:
        return [
            f"header {name}: expected anything but {value!r}, seen it"
            for name, value in want.items()
            if evidence.text(value) in [v for n, v in seen.headers if n == name]
        ]

    def single(want: Any) -> Problems:
        counts = {name: sum(n == name for n, _ in seen.headers) for name in listed(want)}
        return [
            f"header {n}: expected once, seen {count} times"
            for n, count in counts.items()
            if count != 1
        ]

    def as_sent(want: Any) -> Problems:
        if not want or seen.body in sent:
            return []
        return same(seen.body, sent[0] if sent else b"", "body against the client's")

    checks: dict[str, Callable[[Any], Problems]] = {
        "body_same_as_client": as_sent,
        "body": lambda want: same(seen.body, evidence.wire(want), "body"),
        "body_contains": lambda want: contains(seen.body, want, evidence),
        "body_lacks": lambda want: lacks(seen.body, want, evidence),
        "body_json": lambda want: json_paths(seen.body, want, evidence),
        "headers": lambda want: header_pairs(seen.headers, want, evidence),
        "header_values": lambda want: values(seen.headers, want, evidence),
        "header_absent": lambda want: absent(seen.headers, want),
        "header_not": header_not,
        "header_single": single,
        "coherent": lambda want: coherent(seen.headers, seen.body, want, evidence),
        "path_ends": lambda want: (
            [] if seen.target.endswith(want) else [f"path: {seen.target}, not …{want}"]
        ),
        "method": lambda want: (
            [] if seen.method == want else [f"method: {seen.method}, not {want}"]
        ),
    }
    return [problem for word, want in wanted.items() for problem in checks[word](want)]


def _gap(counted: list[Seen], wanted: Any) -> Problems:
    if len(counted) < 2 or counted[0].told_at is None:
        return [f"gap: expected two requests, seen {len(counted)}"]
    gap = counted[1].at - counted[0].told_at
    return [] if within(gap, wanted) else [f"gap: expected {wanted} s, seen {gap:.3f} s"]


def _closed_within(counted: list[Seen], wanted: float, left_at: float | None) -> Problems:
    if left_at is None:
        return ["closed within: the client never left, the answer was over before"]
    problems = []
    for number, seen in enumerate(counted):
        if seen.closed_at is None:
            state = "was over" if seen.answered_at else "is open"
            problems.append(f"closed within: expected {wanted} s, but connection {number} {state}")
        elif seen.closed_at - left_at > wanted:
            problems.append(
                f"closed within: expected {wanted} s, seen {seen.closed_at - left_at:.2f} s"
            )
    return problems


def judge_upstream(wanted: Mapping[str, Any], evidence: Evidence) -> Problems:
    """What does not hold of the requests that arrived."""
    script = evidence.script
    chosen = script.counted(int(wanted.get("of_port", 0)))
    everything = script.counted(0) + script.counted(1)
    sent = [one.sent_body for all_ in evidence.exchanges.values() for one in all_]
    rpc = Counter(seen.rpc["method"] for seen in everything if seen.rpc)

    def number(want: Any, port: int) -> Problems:
        count = len(script.counted(port))
        where = f" on port {port}" if port else ""
        return [] if within(count, want) else [f"requests{where}: expected {want}, seen {count}"]

    def never(texts: Any, of: Callable[[Seen], bytes], what: str) -> Problems:
        return [
            f"{what}: expected no {text!r} upstream, seen it"
            for text in listed(texts)
            if any(evidence.wire(text) in of(seen) for seen in script.seen)
        ]

    checks: dict[str, Callable[[Any], Problems]] = {
        "requests": lambda want: number(want, 0),
        "requests_on": lambda want: [p for port, n in want.items() for p in number(n, int(port))],
        "rpc_counts": lambda want: [
            f"requests of {method}: expected {n}, seen {rpc[method]}"
            for method, n in want.items()
            if not within(rpc[method], n)
        ],
        "gap": lambda want: _gap(script.counted(0), want),
        "closed_within": lambda want: _closed_within(script.counted(0), want, evidence.left_at),
        "writes_max": lambda want: [
            f"writes: expected at most {want}, seen {seen.writes}"
            for seen in script.counted(0)
            if seen.writes > want
        ],
        "trap": lambda want: (
            [] if within(script.trap, want) else [f"trap: {script.trap}, not {want}"]
        ),
        "never_paths": lambda want: never(want, lambda seen: seen.target.encode(), "paths"),
        "never_body": lambda want: never(want, lambda seen: seen.body, "bodies"),
        "every": lambda want: [
            f"request {n}: {problem}"
            for n, seen in enumerate(chosen)
            for problem in _each(seen, want, sent, evidence)
        ],
        "nth": lambda want: [
            f"request {n}: {problem}"
            for n, each in want.items()
            for problem in (
                _each(chosen[int(n)], each, sent, evidence)
                if int(n) < len(chosen)
                else ["seen none"]
            )
        ],
        "of_port": lambda _: [],
    }
    return [f"upstream {p}" for word, want in wanted.items() for p in checks[word](want)]


# --- all ----------------------------------------------------------------------------------------


def _accounting(wanted: Mapping[str, Any], evidence: Evidence) -> Problems:
    if evidence.changes is None:
        return [f"accounting: not readable: {evidence.unreadable}"]
    return [
        f"accounting {name}: expected {want}, seen {evidence.changes.get(name, 0):g}"
        for name, want in wanted.items()
        if not within(evidence.changes.get(name, 0), want)
    ]


def _log(wanted: Mapping[str, Any], evidence: Evidence) -> Problems:
    if evidence.log is None:
        return ["log: cannot be read"]
    return [
        f"log: expected no {text!r}, seen it"
        for text in wanted.get("lacks", [])
        if text in evidence.log
    ]


def _calls(wanted: Mapping[str, Any], evidence: Evidence) -> Problems:
    problems = []
    for name, want in wanted.items():
        exchanges = evidence.exchanges.get(name, [])
        if not exchanges:
            problems.append(f"{name}: no such call was made")
        for number, done in enumerate(exchanges):
            label = f"{name}[{number}]" if len(exchanges) > 1 else name
            problems += [f"{label}: {p}" for p in judge_client(done, want, evidence)]
        if "statuses" in want:
            problems += [f"{name}: {p}" for p in judge_statuses(exchanges, want["statuses"])]
    return problems


def judge(expect: Mapping[str, Any], evidence: Evidence) -> Problems:
    """All that does not hold, in sentences with what was expected and what was seen."""
    problems = judge_client(evidence.last, expect.get("client", {}), evidence)
    problems += _calls(expect.get("calls", {}), evidence)
    if "statuses" in expect:
        everything = [one for all_ in evidence.exchanges.values() for one in all_]
        problems += judge_statuses(everything, expect["statuses"])
    if "upstream" in expect:
        problems += judge_upstream(expect["upstream"], evidence)
    if "accounting" in expect:
        problems += _accounting(expect["accounting"], evidence)
    if "log" in expect:
        problems += _log(expect["log"], evidence)
    if "any_of" in expect:
        problems += _any_of(expect["any_of"], evidence)
    return problems


def _any_of(alternatives: list[Mapping[str, Any]], evidence: Evidence) -> Problems:
    missed = []
    for one in alternatives:
        problems = judge(one, evidence)
        if not problems:
            return []
        missed.append(f"{one.get('name', '?')}: {'; '.join(problems)}")
    return [f"none of {len(missed)} outcomes: " + " | ".join(missed)]


def judge_all(evidence: Evidence) -> Problems:
    """The variant's own expectations and those of its calls."""
    own = {
        call["name"]: call["expect"]
        for call in evidence.variant.calls
        if call.get("expect") and "wait" not in call
    }
    return _calls(own, evidence) + judge(evidence.variant.expect, evidence)


def speaks_of(expect: Mapping[str, Any], word: str) -> bool:
    """The expectation, or one of its alternatives, uses that word."""
    return word in expect or any(speaks_of(one, word) for one in expect.get("any_of", []))
