"""Server-sent events by the book (the HTML standard's rules), for the player only.

Written apart from the gateway's own parser on purpose: a judge that shares the accused's code
agrees with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One dispatched event: its name ("message" where none is given), joined data, last id."""

    name: str
    data: str
    id: str | None

    def json(self) -> Any:
        """The data as JSON, or None where it is none."""
        try:
            return json.loads(self.data)
        except ValueError:
            return None


def lines(body: bytes) -> list[bytes]:
    """The finished lines: CRLF, LF and CR each end one; an unfinished last line is left out."""
    found = []
    start = at = 0
    while at < len(body):
        byte = body[at]
        if byte in b"\r\n":
            found.append(body[start:at])
            if byte == 13 and body[at + 1 : at + 2] == b"\n":
                at += 1
            start = at + 1
        at += 1
    return found


def parse(body: bytes) -> list[Event]:
    """The events a client would be given."""
    events: list[Event] = []
    name, data, last_id = "", [], None
    for raw in lines(body.removeprefix(b"\xef\xbb\xbf")):
        if not raw:
            if data:
                events.append(Event(name or "message", "\n".join(data), last_id))
            name, data = "", []
            continue
        if raw.startswith(b":"):
            continue
        field, _, value = raw.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            last_id = value
    return events


def is_error(event: Event) -> bool:
    """The event says in some dialect that the call failed."""
    if event.name in ("error", "response.failed"):
        return True
    value = event.json()
    if not isinstance(value, dict):
        return False
    return value.get("type") in ("error", "response.failed") or isinstance(value.get("error"), dict)


def _insertion(body: bytes, at: int, kind: str) -> int:
    """Where an insertion of that kind that starts at `at` ends; `at` itself where none does."""
    if kind == "comments":
        if body[at : at + 1] != b":":
            return at
        end = body.find(b"\n", at)
        return len(body) if end < 0 else end + 1
    end = body.find(b"\n\n", at)
    if end < 0:
        return at
    events = parse(body[at : end + 2])
    names = {"pings": {"ping"}, "keepalives": {"keepalive", "response.keepalive"}}[kind]
    return end + 2 if len(events) == 1 and events[0].name in names else at


def only_added(body: bytes, upstream: bytes, kind: str) -> str:
    """Why `body` is not upstream's bytes plus such insertions at event boundaries; "" if it is."""
    if kind == "nothing":
        return "" if body == upstream else difference(body, upstream)
    at = taken = 0
    while at < len(body):
        boundary = taken == 0 or upstream[:taken].endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))
        if boundary:
            end = _insertion(body, at, kind)
            if end > at and upstream[taken : taken + end - at] != body[at:end]:
                at = end
                continue
        if upstream[taken : taken + 1] != body[at : at + 1]:
            return difference(body[at:], upstream[taken:])
        at += 1
        taken += 1
    return (
        ""
        if taken == len(upstream)
        else f"upstream's last {len(upstream) - taken} bytes are missing"
    )


def without_comments(body: bytes) -> list[bytes]:
    """The lines that are no comments."""
    return [line for line in lines(body) if not line.startswith(b":")]


def difference(seen: bytes, wanted: bytes) -> str:
    """Where two byte strings part, in words."""
    at = next(
        (i for i, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b),
        min(len(seen), len(wanted)),
    )
    return (
        f"{len(seen)} bytes against {len(wanted)}, first different at {at}: "
        f"{seen[at : at + 40]!r} instead of {wanted[at : at + 40]!r}"
    )
