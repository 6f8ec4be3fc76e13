"""The report as one page: tables, inline SVG, no script, nothing fetched. Pure.

For people who decide: what was played, what each strategy made of it, who would have been refused
and by which rule. Everything that comes from files is escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from gateway.simulate.chart import area, bars, lines
from gateway.simulate.report import label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NONE = "\N{EN DASH}"
"""Stands where there is no figure."""

STYLE = """
:root { --ink: #16202c; --soft: #5b6877; --line: #d8dee6; --paper: #fff; --tint: #f5f7fa;
  --t1: #0b6e99; --t2: #4fa3c7; --t3: #b9d7e6; --bad: #b3261e; --good: #1d6f42; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --soft: #9aa7b5; --line: #33404d;
  --paper: #12181f; --tint: #1a222b; --t1: #58b7df; --t2: #2f7fa3; --t3: #23495c; --bad: #ff8a80;
  --good: #6fcf97; } }
@media print { :root { --paper: #fff; } section { break-inside: avoid; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 2rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.55rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
p, dd { color: var(--soft); margin: .2rem 0 .6rem; } p.lead { color: var(--ink); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .6rem 0; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .55rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { font-weight: 600; font-size: .82rem; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child, td.text, th.text, td.name { text-align: left; }
td.text { white-space: normal; overflow-wrap: anywhere; }
tr.ours td { background: var(--tint); font-weight: 600; }
.bad { color: var(--bad); } .good { color: var(--good); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .6rem .7rem .4rem; }
figcaption { font-size: .85rem; font-weight: 600; }
svg { width: 100%; height: auto; display: block; font: 10px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .axis { stroke: var(--line); stroke-width: 1; }
svg .full { stroke: var(--bad); stroke-dasharray: 3 3; stroke-width: 1; }
svg .use { fill: none; stroke: var(--t1); stroke-width: 1.4; }
svg .t1 { fill: var(--t1); } svg .t2 { fill: var(--t2); } svg .t3 { fill: var(--t3); }
svg .refused { fill: var(--bad); }
.key span { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em;
  vertical-align: -1px; }
footer { margin-top: 3rem; font-size: .82rem; }
"""  # noqa: E501


def page(result: Mapping[str, Any], curves: Sequence[Mapping[str, Any]]) -> str:
    """The page of these figures.

    Args:
        result: As `--json` prints it.
        curves: Per run in the same order: use, line, refusals.
    """
    rows = result["strategies"]
    parts = [
        _head(result),
        _summary(rows),
        _comparison(rows),
        _recorded(result.get("trace"), rows),
        _charts(rows, curves),
        _refused(rows),
        _reading(),
        _foot(result),
    ]
    title = escape(str(result["name"]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Tidegate simulation: {title}</title>\n<style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _head(result: Mapping[str, Any]) -> str:
    scenario = ", ".join(result["scenarios"])
    facts = [
        ("Scenario", f"{scenario} (content {str(result['scenario_digest'])[:12]})"),
        ("Policies", ", ".join(f"{name} ({digest[:12]})" for name, digest in result["policies"])),
        ("Seed", result["seed"]),
        ("Tidegate", f"{result['version']}, digest of the runs {result['digest'][:12]}"),
    ]
    trace = result.get("trace")
    if trace:
        facts.insert(
            1, ("Trace", f"{trace['file']}: {trace['calls']:,} calls in {_span(trace['span_s'])}")
        )
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts)
    return f"<header><h1>{escape(str(result['name']))}</h1><dl>{items}</dl></header>"


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """What an operator wants to know first, in sentences."""
    said = []
    for row in rows:
        if row["name"] != "tidegate":
            continue
        waits = row["wait_p99_s"]
        urgent = "" if waits["1"] is None else f"; tier 1 waited {_seconds(waits['1'])} at p99"
        said.append(
            f"<p class=lead><strong>{escape(label(row))}</strong> on {escape(row['meter'])}: "
            f"{_count(row['provider_429'], 'refusal')} by the provider, "
            f"{_number(row['completion'], 2)} % of {row['asked']:,} calls answered, "
            f"{_count(row['refused'], 'call')} refused by policy{urgent}.</p>"
        )
    return "<section>" + "".join(said) + "</section>" if said else ""


def _comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "<tr><th>Strategy</th><th class=text>Meter</th><th>Calls answered</th>"
        "<th>Provider<br>refusals</th><th>Answered<br>%</th><th>Refused<br>by rules</th>"
        "<th>Quota<br>used %</th><th>Worst<br>surge %</th><th>p99 wait<br>tier 1</th>"
        "<th>tier 2</th><th>tier 3</th><th>Jain</th></tr>"
    )
    body = "".join(_row(row) for row in rows)
    return (
        f"<section><h2>Comparison</h2><div class=wide><table>{head}{body}</table></div></section>"
    )


def _row(row: Mapping[str, Any]) -> str:
    ours = row["name"] == "tidegate"
    use = row["use_in_surge"] if row["use_in_surge"] is not None else row["use_mean"]
    refused = row["provider_429"]
    cells = [
        escape(label(row)),
        f"{row['ops']:,}",
        f"<span class={'bad' if refused else 'good'}>{refused:,}</span>",
        _number(row["completion"], 2),
        f"{row['refused']:,}",
        _number(use, 2),
        _number(row["use_worst_surge"], 2),
        *(_wait(row["wait_p99_s"][tier]) for tier in "123"),
        _number(row["jain"], 3),
    ]
    first, *rest = (f"<td>{cell}</td>" for cell in cells)
    mark = " class=ours" if ours else ""
    return f"<tr{mark}>{first}<td class=name>{escape(row['meter'])}</td>{''.join(rest)}</tr>"


def _recorded(trace: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> str:
    """The recorded calls as they went, beside what each policy would have made of them."""
    if not trace:
        return ""
    head = (
        "<tr><th></th><th>429</th><th>Refused by rules</th><th>p50 wait tier 1/2/3</th>"
        "<th>p99 wait tier 1/2/3</th><th>Quota, busiest minute %</th><th>Cost</th></tr>"
    )
    body = (
        f"<tr><td>as recorded</td><td>{trace['answered_429']:,}</td><td>{NONE}</td>"
        f"<td>{_three(trace['wait_p50_s'])}</td><td>{_three(trace['wait_p99_s'])}</td><td>{NONE}</td>"
        f"<td>${trace['cost_usd']:,.2f}</td></tr>"
    )
    for row in rows:
        cost = NONE if row["cost_usd"] is None else f"${row['cost_usd']:,.2f}"
        mark = " class=ours" if row["name"] == "tidegate" else ""
        body += (
            f"<tr{mark}><td>{escape(label(row))}</td><td>{row['provider_429']:,}</td>"
            f"<td>{row['refused']:,}</td><td>{_three(row['wait_p50_s'])}</td>"
            f"<td>{_three(row['wait_p99_s'])}</td><td>{_number(row['use_peak_minute'], 1)}</td>"
            f"<td>{cost}</td></tr>"
        )
    bad = ""
    if trace["bad_lines"]:
        shown = "".join(
            f"<tr><td>{one['line']:,}</td><td class=text>{escape(one['why'])}</td></tr>"
            for one in trace["bad_lines_shown"]
        )
        bad = (
            f"<h3 class=bad>{_count(trace['bad_lines'], 'line')} could not be played</h3>"
            f"<table><tr><th>Line</th><th class=text>Why</th></tr>{shown}</table>"
        )
    return (
        "<section><h2>The recorded calls under each policy</h2>"
        f"<div class=wide><table>{head}{body}</table></div>{bad}</section>"
    )


def _charts(rows: Sequence[Mapping[str, Any]], curves: Sequence[Mapping[str, Any]]) -> str:
    key = (
        '<p class=key><span style="background:var(--t1)"></span>tier 1'
        '<span style="background:var(--t2)"></span>tier 2'
        '<span style="background:var(--t3)"></span>tier 3</p>'
    )
    most = max((sum(at[1]) for curve in curves for at in curve["line"]), default=0)
    used = max((value for curve in curves for _, value in curve["use"]), default=0.0)
    refused = max((value for curve in curves for _, value in curve["refusals"]), default=0)
    grids = []
    kinds: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
        ("Quota used", "Percent of the quota that each minute was charged; dashed: the quota.",
         lambda curve: lines(curve["use"], most=max(110.0, used * 1.05), mark=100.0)),
        ("Calls that wait", "Asked and not sent, by tier; the same scale everywhere.",
         lambda curve: area(curve["line"], most=max(1, most))),
        ("Refused by the provider", "Refusals over time; the same scale everywhere.",
         lambda curve: bars(curve["refusals"], most=max(1, refused))),
    )  # fmt: skip
    for title, why, draw in kinds:
        figures = "".join(
            f"<figure><figcaption>{escape(label(row))} <small>{escape(row['meter'])}</small>"
            f"</figcaption>{draw(curve)}</figure>"
            for row, curve in zip(rows, curves, strict=True)
        )
        grids.append(
            f"<section><h2>{title}</h2><p>{why}</p>{key if 'wait' in title else ''}"
            f"<div class=grid>{figures}</div></section>"
        )
    return "".join(grids)


def _refused(rows: Sequence[Mapping[str, Any]]) -> str:
    """Who is refused, by which rule."""
    body = ""
    for row in rows:
        for rule in row["refused_by"]:
            who = ", ".join(f"{agent} ({count:,})" for agent, count in rule["agents"].items())
            body += (
                f"<tr><td>{escape(label(row))}</td>"
                f"<td class=text><code>{escape(rule['rule'])}</code></td>"
                f"<td class=name>{escape(rule['code'])}</td><td>{rule['count']:,}</td>"
                f"<td class=text>{escape(who)}</td></tr>"
            )
    if not body:
        return "<section><h2>Refused calls</h2><p>None, under any strategy.</p></section>"
    return (
        "<section><h2>Refused calls</h2><p>By rule, as the policy file names it, and the agents "
        "it refused most.</p><div class=wide><table><tr><th>Strategy</th><th class=text>Rule</th>"
        "<th class=text>Code</th><th>Calls</th><th class=text>Agents</th></tr>"
        f"{body}</table></div></section>"
    )


def _reading() -> str:
    return (
        "<section><h2>How to read this</h2><dl>"
        "<dt>Wait</dt><dd>Seconds from asking to the sending of the attempt that was served; the "
        "network and the model's own time are not in it.</dd>"
        "<dt>Quota used</dt><dd>What the provider's meter was charged over what its limit allows. "
        "Above 100 % on a bucket or a fixed window is stored credit, or a meter overrun by output "
        "that it charges as it is produced; it is no gain.</dd>"
        "<dt>In surges</dt><dd>Use is that of surges, if there are any: while more is asked for "
        "than the quota holds, from a minute after its beginning, when stored credit is gone. Else "
        "it is that of the whole run.</dd>"
        "<dt>Jain</dt><dd>1 where tokens served follow the weights of those who share exactly.</dd>"
        "</dl></section>"
    )


def _foot(result: Mapping[str, Any]) -> str:
    return (
        f"<footer><p>Made by <code>{escape(str(result['command']))}</code>. Virtual time: the "
        "admission, retry, breaker and policy code of the gateway, a simulated provider. The same "
        f"files and seed give the same digest, {escape(result['digest'])}.</p></footer>"
    )


# --- words and numbers


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:,.1f} s"


def _three(waits: Mapping[str, float | None]) -> str:
    return " / ".join(_wait(waits[tier]) for tier in "123")


def _wait(seconds: float | None) -> str:
    return NONE if seconds is None else _seconds(seconds)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 7_200 else f"{seconds / 60:.1f} min"
