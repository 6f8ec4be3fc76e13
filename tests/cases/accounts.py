"""Neutral names of accounting (FORM.md §4) → metrics of `gateway/telemetry/metrics.py`, scraped.

`TABLE` is the one place to change when a metric is renamed. Values are summed over all labels that
a binding does not name. Counters are judged by their change during the variant, gauges by their
value."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cases.client import Request, call

if TYPE_CHECKING:
    from collections.abc import Mapping

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)(?: [0-9]+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Metric:
    """Samples of one name whose labels have one of these values."""

    name: str
    labels: Mapping[str, frozenset[str]] = field(default_factory=dict)


def _where(**labels: str) -> dict[str, frozenset[str]]:
    return {name: frozenset(values.split("|")) for name, values in labels.items()}


TABLE: dict[str, Metric] = {
    "input_tokens": Metric("tidegate_tokens_used_total", _where(kind="input")),
    "output_tokens": Metric("tidegate_tokens_used_total", _where(kind="output")),
    "cache_read_tokens": Metric("tidegate_tokens_used_total", _where(kind="cache_read")),
    "cache_write_tokens": Metric("tidegate_tokens_used_total", _where(kind="cache_write")),
    "calls_ok": Metric("tidegate_calls_total", _where(outcome="ok")),
    "calls_failed": Metric("tidegate_calls_total", _where(outcome="failed")),
    "calls_cancelled": Metric("tidegate_calls_total", _where(outcome="cancelled")),
    "breaker_failures": Metric("tidegate_breaker_failures_total"),
    "estimated_settlements": Metric("tidegate_usage_estimated_total"),
    "in_flight": Metric("tidegate_in_flight"),
    "waiting": Metric("tidegate_waiting"),
}

GAUGES = frozenset({"in_flight", "waiting"})
MEMORY = frozenset({"resident_bytes", "resident_bytes_peak"})


class NoAccounts(Exception):
    """The admin listener cannot be scraped; says where and why."""


def parse(text: str) -> list[tuple[str, dict[str, str], float]]:
    """The samples of a Prometheus text page."""
    samples = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match:
            labels = dict(_LABEL.findall(match[2] or ""))
            with contextlib.suppress(ValueError):
                samples.append((match[1], labels, float(match[3])))
    return samples


def read(text: str) -> dict[str, float]:
    """The neutral values of a page. A counter that has no sample yet counts as zero."""
    values = dict.fromkeys(TABLE, 0.0)
    for name, labels, value in parse(text):
        for neutral, metric in TABLE.items():
            if name == metric.name and all(
                labels.get(label) in allowed for label, allowed in metric.labels.items()
            ):
                values[neutral] += value
    return values


def families(text: str) -> set[str]:
    """The metric names a page declares, as its samples are called (`…_total` for counters)."""
    found = {name for name, _, _ in parse(text)}
    for line in text.splitlines():
        words = line.split()
        if line.startswith("# TYPE") and len(words) >= 4:
            found.add(words[2])
            if words[3] == "counter" and not words[2].endswith("_total"):
                found.add(f"{words[2]}_total")
    return found


@dataclass(slots=True)
class Accounts:
    """The books of one gateway process (or of several of a fleet, summed).

    Attributes:
        admins: Addresses of the admin listeners.
        pids: Processes whose memory counts; empty where they are not known.
        stale: Seconds that a page may be old, since the gateway renders it at most so often.
    """

    admins: tuple[tuple[str, int], ...]
    pids: tuple[int, ...] = ()
    stale: float = 0.0

    async def page(self, admin: tuple[str, int]) -> str:
        """The text of `/metrics`.

        Raises:
            NoAccounts: It cannot be had.
        """
        host, port = admin
        head = (
            f"GET /metrics HTTP/1.1\r\nhost: {host}:{port}\r\naccept: text/plain\r\n\r\n".encode()
        )
        done = await call(admin, Request(method="GET", head=head), limit=10)
        if done.status != 200 or not done.complete:
            raise NoAccounts(f"http://{host}:{port}/metrics: {done.status or done.broken}")
        return done.body.decode("utf-8", "replace")

    async def values(self) -> dict[str, float]:
        """The neutral values now, summed over processes, with memory.

        Raises:
            NoAccounts: A page cannot be had, or declares none of the metrics of `TABLE`.
        """
        totals = dict.fromkeys(TABLE, 0.0)
        for admin in self.admins:
            text = await self.page(admin)
            missing = {metric.name for metric in TABLE.values()} - families(text)
            if missing:
                raise NoAccounts(
                    f"http://{admin[0]}:{admin[1]}/metrics lacks {', '.join(sorted(missing))}"
                )
            for name, value in read(text).items():
                totals[name] += value
        totals["resident_bytes"] = float(resident(self.pids))
        return totals

    async def fresh(self) -> dict[str, float]:
        """The values, certainly not older than this call."""
        await asyncio.sleep(self.stale)
        return await self.values()


def resident(pids: tuple[int, ...]) -> int:
    """Resident bytes of those processes and their descendants."""
    total = 0
    for pid in family(pids):
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            total += pages * 4096
    return total


def family(pids: tuple[int, ...]) -> set[int]:
    """Those processes with all their descendants."""
    found, todo = set(pids), list(pids)
    while todo:
        pid = todo.pop()
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                for child in (task / "children").read_text().split():
                    if int(child) not in found:
                        found.add(int(child))
                        todo.append(int(child))
    return found


__all__ = [
    "GAUGES",
    "MEMORY",
    "TABLE",
    "Accounts",
    "Metric",
    "NoAccounts",
    "parse",
    "read",
    "resident",
]
