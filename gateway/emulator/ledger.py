"""What the emulator saw, counted exactly: the other side's books.

`charged` is what the meters took; `reported` is the usage that went out to the client, complete;
the two differ by profile, by cuts and by lying faults, and that difference is what tests look for.
All figures are since start or the last reset.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from gateway.emulator.prompt_cache import Counted
from gateway.units import MICRO, Micros

MAX_ROWS = 10_000
"""Pairs of key and model with a row of their own; later ones share the row "(rest)"."""

MAX_SECONDS = 3_600
"""Seconds kept in the timeline."""

CELL: Micros = 100_000
"""The span of `peak_requests_per_100ms`."""

CLASSES = ("input", "output", "cache_read", "cache_write")


@dataclass(slots=True)
class Row:
    """The account of one key and model."""

    key: str
    model: str
    requests: int = 0
    admitted: int = 0
    completed: int = 0
    abandoned: int = 0
    faulted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    charged_tokens: int = 0
    charged: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    reported: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    usages_reported: int = 0
    begun: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))
    produced: int = 0

    def as_json(self) -> dict[str, Any]:
        """The row as the endpoint shows it."""
        return {
            "key": self.key, "model": self.model, "requests": self.requests,
            "admitted": self.admitted, "completed": self.completed, "abandoned": self.abandoned,
            "faulted": self.faulted, "refused": self.refused,
            "charged": {"tokens": self.charged_tokens, **self.charged},
            "reported": {"usages": self.usages_reported, **self.reported},
            "reported_before_a_cut": self.begun, "produced": self.produced,
        }  # fmt: skip


class Ledger:
    """Counters. A reset makes a new one; calls under way finish in the one they began in."""

    __slots__ = (
        "_cell", "_cell_admitted", "_cell_requests", "_rows", "_seconds", "in_flight", "other",
        "peak_admitted_per_cell", "peak_in_flight", "peak_requests_per_cell", "since",
    )  # fmt: skip

    def __init__(self, since: Micros) -> None:
        self.since = since
        self.in_flight = 0
        self.other: dict[str, int] = {}
        self.peak_in_flight = 0
        self.peak_requests_per_cell = 0
        self.peak_admitted_per_cell = 0
        self._cell = -1
        self._cell_requests = 0
        self._cell_admitted = 0
        self._rows: OrderedDict[tuple[str, str], Row] = OrderedDict()
        self._seconds: deque[list[int]] = deque(maxlen=MAX_SECONDS)

    # --- writing --------------------------------------------------------------------------------

    def arrived(self, now: Micros, key: str, model: str) -> Row:
        """A request was read; its row."""
        row = self._rows.get((key, model))
        if row is None:
            if len(self._rows) >= MAX_ROWS:
                key = model = "(rest)"
            row = self._rows.setdefault((key, model), Row(key, model))
        row.requests += 1
        cell = now // CELL
        if cell != self._cell:
            self._cell = cell
            self._cell_requests = 0
            self._cell_admitted = 0
        self._cell_requests += 1
        self.peak_requests_per_cell = max(self.peak_requests_per_cell, self._cell_requests)
        self._second(now)[1] += 1
        return row

    def admitted(self, row: Row) -> None:
        """The call is under way."""
        row.admitted += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self._cell_admitted += 1
        self.peak_admitted_per_cell = max(self.peak_admitted_per_cell, self._cell_admitted)

    def refused(self, now: Micros, row: Row, kind: str) -> None:
        """Turned away: `kind` is a dimension of a quota, or "fault" or a status."""
        row.refused[kind] = row.refused.get(kind, 0) + 1
        self._second(now)[2] += 1

    def charge(self, now: Micros, row: Row, tokens: int, **classes: int) -> None:
        """The meters took so much; negative gives back."""
        row.charged_tokens += tokens
        for name, amount in classes.items():
            row.charged[name] += amount
        self._second(now)[3] += tokens

    def report(self, row: Row, counted: Counted) -> None:
        """That usage went out, and the answer was complete."""
        row.usages_reported += 1
        _add(row.reported, counted)

    def report_begun(self, row: Row, counted: Counted) -> None:
        """That usage went out at the start of a stream that did not end well (`message_start`)."""
        _add(row.begun, counted)

    def aside(self, what: str) -> None:
        """A request that no quota governs: `count_tokens`, `models`."""
        self.other[what] = self.other.get(what, 0) + 1

    def over(self, row: Row, how: str) -> None:
        """The call ended: "completed", "abandoned" (the client left) or "faulted"."""
        self.in_flight -= 1
        if how == "completed":
            row.completed += 1
        elif how == "abandoned":
            row.abandoned += 1
        else:
            row.faulted += 1

    def _second(self, now: Micros) -> list[int]:
        second = now // MICRO
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0, 0])
        return self._seconds[-1]

    # --- reading --------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """All rows, in order of their first request."""
        return list(self._rows.values())

    def as_json(self, *, timeline: bool = False) -> dict[str, Any]:
        """The whole ledger; the timeline is [second, requests, refused, charged tokens]."""
        total = Row("*", "*")
        for row in self._rows.values():
            for name in ("requests", "admitted", "completed", "abandoned", "faulted",
                         "charged_tokens", "usages_reported", "produced"):  # fmt: skip
                setattr(total, name, getattr(total, name) + getattr(row, name))
            for kind, count in row.refused.items():
                total.refused[kind] = total.refused.get(kind, 0) + count
            for name in CLASSES:
                total.charged[name] += row.charged[name]
                total.reported[name] += row.reported[name]
                total.begun[name] += row.begun[name]
        seen = total.as_json()
        del seen["key"], seen["model"]
        seen.update(
            in_flight=self.in_flight,
            peak_in_flight=self.peak_in_flight,
            peak_requests_per_100ms=self.peak_requests_per_cell,
            peak_admitted_per_100ms=self.peak_admitted_per_cell,
            other=self.other,
            since=self.since / MICRO,
            rows=[row.as_json() for row in self._rows.values()],
        )
        if timeline:
            seen["timeline"] = [list(cell) for cell in self._seconds]
        return seen


def _add(account: dict[str, int], counted: Counted) -> None:
    for name in CLASSES:
        account[name] += getattr(counted, name)
