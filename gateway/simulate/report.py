"""Books to figures: what a run shows, as one mapping per strategy. Pure.

Keys are the contract of `tidegate simulate --json` (docs/simulation.md). Waits are seconds, money
dollars, shares parts of one unless the key says percent. A figure that a strategy cannot have is
null.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from gateway.simulate.scenario import Strategy
from gateway.units import MICRO, MINUTE

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from gateway.simulate.books import Books
    from gateway.simulate.meters import Quota
    from gateway.simulate.run import Run
    from gateway.simulate.trace import Trace
    from gateway.units import Micros

MEASURED = ("tokens", "input", "output", "requests")
POINTS = 240
"""Points of a curve in the report."""

MOST_RULES = 50


def percentile(values: Sequence[int], share: float) -> float | None:
    """That share of the sorted values is at most so much, in seconds; None without any."""
    if not values:
        return None
    return values[min(len(values) - 1, int(share * len(values)))] / MICRO


def jain(shares: Sequence[float]) -> float | None:
    """Jain's index: 1 where all have alike, 1/n where one has all."""
    total, squares = sum(shares), sum(share * share for share in shares)
    return total * total / (len(shares) * squares) if squares else None


def figures(run: Run) -> dict[str, Any]:
    """The figures of one run."""
    books, ours = run.books, run.strategy is Strategy.TIDEGATE
    made, done = sum(books.made), sum(books.done)
    waits = [sorted(series) for series in books.waits]
    return {
        "name": run.strategy.value,
        "policy": run.policy,
        "meter": run.meter,
        "ops": done,
        "asked": made,
        "provider_429": sum(books.provider_429.values()),
        "provider_429_by_kind": dict(books.provider_429),
        "provider_faults": books.sick,
        "completion": round(100 * done / made, 4) if made else None,
        "refused": sum(books.failed),
        "left": sum(books.gone),
        "use_in_surge": _mean(_uses(run)),
        "use_worst_surge": min(_uses(run), default=None),
        "use_mean": _use(run, 0, run.scenario.duration),
        "use_peak_minute": _peak(run),
        "wait_p50_s": _by_tier(waits, 0.50),
        "wait_p99_s": _by_tier(waits, 0.99),
        "wait_max_s": _by_tier(waits, 1.0),
        "jain": _fairness(run),
        "overtakes": books.overtakes,
        "hints": books.hints if ours else None,
        "hints_early_pct": _percent(books.hints_early, books.hints) if ours else None,
        "places_lost": books.places_lost if ours else None,
        "downgraded": books.downgraded if ours else None,
        "cost_usd": round(books.money / MICRO, 6) if ours else None,
        "script_calls_per_op": round(books.script_calls / done, 3) if ours and done else None,
        "foreign_429": books.foreign_refused if run.scenario.foreign else None,
        "refused_by": refusals(books),
        "digest": books.digest(),
    }


def refusals(books: Books) -> list[dict[str, Any]]:
    """Who was refused by which rule, the busiest rule first."""
    rules = sorted(books.rules.items(), key=lambda entry: -entry[1].count)
    return [
        {
            "rule": because,
            "code": code,
            "count": said.count,
            "agents": dict(said.who.most_common(10)),
            "calls": [
                {"call": number, "at_s": round(at / MICRO, 3), "agent": agent}
                for number, at, agent in said.examples[:5]
            ],
        }
        for (because, code), said in rules[:MOST_RULES]
    ]


def _by_tier(waits: list[list[int]], share: float) -> dict[str, float | None]:
    return {str(tier): _rounded(percentile(series, share)) for tier, series in enumerate(waits, 1)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 2) if whole else None


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None


def _fairness(run: Run) -> float | None:
    """Jain's index of served tokens per weight; None for fewer than two who share."""
    weights = {
        (rule.tenant if rule.fair_by == "tenant" else rule.id): rule.weight
        for rule in run.snapshot.agents.values()
    }
    served = [tokens / weights.get(who, 1) for who, tokens in run.books.tokens.items()]
    found = jain(served) if len(served) > 1 else None
    return None if found is None else round(found, 5)


# --- use of the quota


def _limits(quota: Quota) -> dict[str, int]:
    return {name: limit for name in MEASURED if (limit := getattr(quota, name)) is not None}


def _use(run: Run, start: Micros, end: Micros) -> float | None:
    """Percent of the scarcest quota that was charged in a span."""
    found = [
        100 * charges.total(name, start, end) * MINUTE / (limit * (end - start))
        for pool, charges, quota in _pools(run)
        for name, limit in _limits(quota).items()
        if pool and end > start
    ]
    return round(max(found), 3) if found else None


def _pools(run: Run) -> list[tuple[str, Any, Quota]]:
    quotas = {
        scope.pool: scope.meter.quota
        for target in run.world.targets.values()
        for scope in target.scopes
    }
    return [(pool, charges, quotas[pool]) for pool, charges in run.books.charges.items()]


def _uses(run: Run) -> list[float]:
    spans = run.scenario.surges()
    return [use for start, end in spans if (use := _use(run, start, end)) is not None]


def _peak(run: Run) -> float | None:
    """Percent of the scarcest quota that its busiest minute was charged."""
    most = 0.0
    for _, charges, quota in _pools(run):
        for name, limit in _limits(quota).items():
            series = charges.by_name.get(name)
            most = max(most, 100 * _busiest(series) / limit if series is not None else 0.0)
    return round(most, 3) if most else None


def _busiest(series: array[int]) -> int:
    held = most = 0
    for second, amount in enumerate(series):
        held += amount - (series[second - 60] if second >= 60 else 0)
        most = max(most, held)
    return most


# --- curves of the page


def curve_of_use(run: Run) -> list[tuple[float, float]]:
    """Percent of the scarcest quota that each minute before an instant was charged, over time."""
    best: tuple[float, Any, int] | None = None
    for _, charges, quota in _pools(run):
        for name, limit in _limits(quota).items():
            series = charges.by_name.get(name)
            if series is not None:
                share = _busiest(series) / limit
                if best is None or share > best[0]:
                    best = (share, series, limit)
    if best is None:
        return []
    _, series, limit = best
    end = max(len(series), run.scenario.duration // MICRO)
    step = max(1, end // POINTS)
    return [
        (second, 100 * sum(series[max(0, second - 60) : second]) / limit)
        for second in range(step, end + 1, step)
    ]


def curve_of_line(run: Run) -> list[tuple[float, tuple[int, int, int]]]:
    """Calls unsent, by tier, over time."""
    return [(at / MICRO, waiting) for at, waiting in run.books.line]


def curve_of_refusals(run: Run) -> list[tuple[float, int]]:
    """Provider refusals per stretch of time."""
    seconds = sorted(run.books.refused_at)
    end = max([run.scenario.duration // MICRO, *seconds[-1:]])
    step = max(1, end // POINTS)
    counts: list[tuple[float, int]] = []
    for start in range(0, end + 1, step):
        among = seconds[bisect_left(seconds, start) : bisect_left(seconds, start + step)]
        counts.append((start, sum(run.books.refused_at[second] for second in among)))
    return counts


# --- the trace as it was recorded


def recorded(trace: Trace) -> dict[str, Any]:
    """What the recorded calls themselves went through."""
    by_tier: list[list[int]] = [[], [], []]
    for call in trace.calls:
        by_tier[(call.tier or 2) - 1].append(call.waited)
    waits = [sorted(series) for series in by_tier]
    refused = sum(call.status == 429 for call in trace.calls)
    return {
        "calls": len(trace.calls),
        "bad_lines": trace.bad,
        "bad_lines_shown": [{"line": number, "why": why} for number, why in trace.shown],
        "lines_passed_over": trace.passed_over,
        "span_s": round(trace.span / MICRO, 3),
        "answered_429": refused,
        "cost_usd": round(sum(call.cost for call in trace.calls) / MICRO, 6),
        "wait_p50_s": _by_tier(waits, 0.50),
        "wait_p99_s": _by_tier(waits, 0.99),
    }


def digest_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """One digest over the runs."""
    joined = hashlib.blake2b(digest_size=16)
    for row in rows:
        joined.update(str(row["digest"]).encode())
    return joined.hexdigest()


# --- for a terminal

COLUMNS = (
    ("strategy", 18), ("meter", 24), ("calls", 10), ("429", 8), ("done %", 8), ("use %", 7),
    ("worst", 7), ("p99 t1", 9), ("p99 t2", 9), ("p99 t3", 9), ("Jain", 7),
)  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The comparison, one line per run."""
    head = "  ".join(name.ljust(width) if i < 2 else name.rjust(width)
                     for i, (name, width) in enumerate(COLUMNS))  # fmt: skip
    lines = [head, "-" * len(head)]
    for row in rows:
        waits = row["wait_p99_s"]
        use = row["use_in_surge"] if row["use_in_surge"] is not None else row["use_mean"]
        cells = [
            label(row), row["meter"], f"{row['ops']:,}", f"{row['provider_429']:,}",
            _cell(row["completion"], 2), _cell(use, 2), _cell(row["use_worst_surge"], 2),
            *(_cell(waits[tier], 2) for tier in ("1", "2", "3")), _cell(row["jain"], 3),
        ]  # fmt: skip
        lines.append("  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True))
        ))  # fmt: skip
    return "\n".join(lines) + "\n"


def label(row: Mapping[str, Any]) -> str:
    """The strategy, with its policy where several are compared."""
    return f"{row['name']} ({row['policy']})" if row.get("several") else str(row["name"])


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
