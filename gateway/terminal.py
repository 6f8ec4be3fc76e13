"""`tidegate status` and `tidegate explain`: what the admin listener knows, for a terminal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import httpx

from gateway.clock import pause

if TYPE_CHECKING:
    from collections.abc import Iterable

EVERY_S = 1.0
BAR = 20
CLEAR = "\x1b[H\x1b[2J"


class Unanswered(Exception):
    """The admin listener did not answer; the message says what to do."""


def fetch(url: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an admin path."""
    return _asked("GET", url)


def send(
    url: str, body: dict[str, Any] | None = None, *, params: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of what is posted to an admin path, as a body or in the query."""
    return _asked("POST", url, body, params)


def _asked(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    params: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    try:
        answer = httpx.request(method, url, json=body, params=params, timeout=5.0, trust_env=False)
    except httpx.HTTPError as error:
        kind = type(error).__name__
        text = f"no answer from {url} ({kind}); is `tidegate serve` running, is --admin right?"
        raise Unanswered(text) from error
    try:
        value = answer.json()
    except json.JSONDecodeError as error:
        raise Unanswered(f"{url} is no admin listener of Tidegate") from error
    return answer.status_code, value


def reset_loops(admin: str, name: str) -> int:
    """Reset the conversations and tasks of that session or workflow; all of them for "".

    The exit status: 1 where none goes by that name.
    """
    url = f"{admin.rstrip('/')}/loops/reset"
    asked = {"session": name} if name else {"all": "1"}
    try:
        code, value = send(url, params=asked)
    except Unanswered as error:
        return complain(error)
    count = value.get("reset", 0)
    if code != 200 or not (count or not name):
        what = value.get("detail", f"nothing is remembered of {name[:128]!r}")
        sys.stderr.write(f"tidegate: {what}\n")
        return 1
    sys.stdout.write(f"reset: {count}\n")
    return 0


def complain(error: Unanswered) -> int:
    """Say it on standard error."""
    sys.stderr.write(f"tidegate: {error}\n")
    return 1


def status(admin: str, *, once: bool, as_json: bool) -> int:
    """Show the state, again every second unless `once`. The exit status."""
    url = f"{admin.rstrip('/')}/status"
    try:
        while True:
            _, value = fetch(url)
            if as_json:
                sys.stdout.write(json.dumps(value, indent=2) + "\n")
                return 0
            text = "\n".join(status_lines(value, width=shutil.get_terminal_size().columns))
            if once or not sys.stdout.isatty():
                sys.stdout.write(text + "\n")
                return 0
            sys.stdout.write(CLEAR + text + "\n")
            sys.stdout.flush()
            pause(EVERY_S)
    except Unanswered as error:
        return complain(error)
    except KeyboardInterrupt:
        return 0


def explain(admin: str, call_id: str, *, as_json: bool) -> int:
    """Show one call's chain of verdicts. The exit status."""
    try:
        code, value = fetch(f"{admin.rstrip('/')}/explain/{call_id}")
    except Unanswered as error:
        return complain(error)
    if code != 200:
        sys.stderr.write(f"tidegate: {value.get('detail', 'unknown call')}\n")
        return 1
    lines = [json.dumps(value, indent=2)] if as_json else explain_lines(value)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def span(micros: int) -> str:
    """A span for people."""
    if micros < 1_000:
        return f"{micros} µs" if micros else "0"
    if micros < 1_000_000:
        return f"{micros / 1_000:.0f} ms"
    if micros < 120_000_000:
        return f"{micros / 1_000_000:.1f} s"
    if micros < 7_200_000_000:
        return f"{micros / 60_000_000:.0f} min"
    return f"{micros / 3_600_000_000:.1f} h"


def amount(units: float) -> str:
    """A number of tokens or requests for people."""
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if units >= size:
            return f"{units / size:.3g}{sign}"
    return f"{units:.0f}"


def bar(share: float) -> str:
    """A share of 1 as a bar; above 1 it is full."""
    filled = min(BAR, max(0, round(share * BAR)))
    return "█" * filled + "·" * (BAR - filled)


def status_lines(value: dict[str, Any], *, width: int = 100) -> list[str]:
    """The screen of `tidegate status`."""
    policy = value.get("policy", {})
    lines = [
        f"Tidegate {value.get('version', '?')}  up {span(int(value.get('uptime_us', 0)))}  "
        f"in flight {value.get('in_flight', 0)}  waiting {value.get('waiting', 0)}"
        + ("  DRAINING" if value.get("draining") else ""),
        f"policy revision {policy.get('revision', '?')} ({policy.get('digest', '')[:12]}) "
        f"from {', '.join(policy.get('files', []))}",
    ]
    if policy.get("last_error"):
        lines.append("the newest file was REFUSED, the revision above stays in force:")
        for problem in str(policy["last_error"]).splitlines()[:5]:
            lines += textwrap.wrap(
                problem, max(width, 40), initial_indent="  ", subsequent_indent="      "
            )
    lines += store_lines(value)
    if not value.get("tokenizer_exact", True):
        lines.append("tokenizer: ESTIMATES only (see /readyz or `tidegate doctor`)")
    lines += [
        "",
        *pool_lines(value.get("pools", [])),
        "",
        *breaker_lines(value.get("breakers", [])),
    ]
    return [line[: max(width, 40)] for line in lines]


def store_lines(value: dict[str, Any]) -> list[str]:
    """What limits are shared through, and by how many workers; nothing for a process alone."""
    store, workers = value.get("store") or {}, value.get("workers") or {}
    mode = store.get("mode", "embedded")
    if mode == "embedded":
        return []
    lines = [f"limits shared through {store.get('server') or 'a store that never answered'}"]
    if workers:
        silent = [number for number, state in workers.items() if state is None]
        lines[0] += f" by {len(workers)} workers"
        if silent:
            lines.append(f"no answer from worker {', '.join(silent)}")
    if mode != "shared":
        lines.append(f"the store is AWAY: {mode} holds (policy: fleet.when_away)")
    return lines


def pool_lines(pools: Iterable[dict[str, Any]]) -> list[str]:
    """One block a pool: fill of each dimension, waiting by tier, expected wait."""
    lines: list[str] = []
    for pool in pools:
        waiting = pool.get("waiting", [0, 0, 0, 0])
        eta = pool.get("eta_us", [0, 0, 0, 0])
        head = f"{pool['name']}  in flight {pool['in_flight']}"
        if pool.get("concurrency"):
            head += f"/{pool['concurrency']}"
        if pool.get("factor", 1) < 1:
            head += f"  factor {pool['factor']:.2f}"
        if pool.get("blocked_us"):
            head += f"  blocked {span(pool['blocked_us'])}"
        if pool.get("would_have_waited"):
            head += f"  in shadow: {pool['would_have_waited']} would have waited"
        lines.append(head)
        for dimension in pool.get("dimensions", []):
            limit = dimension["limit"] or 1
            share = dimension["used"] / limit
            lines.append(
                f"  {dimension['name']:<9}{bar(share)} {share:6.1%} of {amount(limit)}"
                + (f"  others {amount(dimension['foreign'])}" if dimension.get("foreign") else "")
            )
        if any(waiting):
            tiers = "  ".join(
                f"tier {lane}: {waiting[lane]} (≈ {span(eta[lane])})" for lane in (1, 2, 3)
            )
            lines.append(f"  waiting  {tiers}")
    return lines or ["no pool has been used yet"]


def breaker_lines(breakers: Iterable[dict[str, Any]]) -> list[str]:
    """Breakers that are not closed."""
    lines = [
        f"breaker {one['scope']}: {one['state']} ({one['reason']}), "
        f"next try in {span(one.get('in_us', 0))}"
        for one in breakers
        if one["state"] != "closed"
    ]
    return lines or ["all breakers are closed"]


FACTS = (
    "agent", "tenant", "tier", "session", "model", "served", "deployment", "dialect", "status",
    "outcome", "end", "code", "error", "because", "attempts", "upstream_status", "waited_ms",
    "overhead_ms", "first_byte_ms", "total_ms", "reserved",
)  # fmt: skip
"""What `Decisions.explain` says of a call as a whole, in the order of the page."""


def explain_lines(value: dict[str, Any]) -> list[str]:
    """The page of `tidegate explain`."""
    lines = [f"call {value.get('call', '?')}  {value.get('ts', '')}"]
    for name in FACTS:
        said = value.get(name)
        if said in (None, ""):
            continue
        if name.endswith("_ms"):
            said = span(round(said * 1_000))
        where = rule_place(value) if name == "because" else ""
        lines.append(f"  {name.removesuffix('_ms'):<16}{said}{where}")
    usage = {name: said for name, said in value.get("usage", {}).items() if name != "money"}
    if usage:
        said = ", ".join(f"{name} {amount}" for name, amount in usage.items() if amount)
        lines.append(f"  {'usage':<16}{said or 'none'}")
    if value.get("cost"):
        lines.append(f"  {'cost':<16}{value['cost'] / 1_000_000:.6f} USD")
    lines.append("")
    for note in value.get("notes", []):
        offset = span(max(0, round(note.get("at_ms", 0) * 1_000)))
        text = f"  {'+' + offset:>10}  {note['layer']:<10}{note['verdict']:<10}"
        text += note.get("detail", "")
        if note.get("because"):
            text = f"{text.rstrip()}  [{note['because']}{rule_place(note)}]"
        lines.append(text.rstrip())
    return lines


def rule_place(judged: dict[str, Any]) -> str:
    """Where the rule stands, as editors and terminals open it."""
    return f" {judged['file']}:{judged['line']}" if judged.get("file") else ""
