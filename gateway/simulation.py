"""`tidegate simulate`: files in, runs side by side, figures out.

Each combination of scenario, policy and strategy is one run; naive strategies know no policy and
run once per scenario. Runs are independent, so `--jobs` spreads them over processes without
changing a figure. Progress goes to standard error, and only to a terminal.
"""

from __future__ import annotations

import gc
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from gateway import __version__
from gateway.errors import PolicyError
from gateway.policy import scenario as scenario_files
from gateway.policy.check import load_without_secrets
from gateway.policy.compile import compile as compiled
from gateway.settings import from_environment
from gateway.simulate import page, report, trace
from gateway.simulate.run import Unsimulated, simulate
from gateway.simulate.scenario import Strategy
from gateway.units import MICRO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gateway.policy.load import Policy
    from gateway.simulate.run import Run
    from gateway.simulate.scenario import Scenario
    from gateway.units import Micros

MAX_TRACE = 8 << 30
"""Bytes of a trace; read line by line, but its calls are kept."""

BAR = 30
YOUNG = 100_000
"""Objects made before the collector looks: a run makes few cycles and many values."""


class Failed(Exception):
    """The command cannot do as asked; says why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The command line."""

    scenarios: tuple[Path, ...]
    policies: tuple[Path, ...] = ()
    trace: Path | None = None
    seeds: tuple[int, ...] = ()
    jobs: int = 1
    html: Path | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run to be made."""

    scenario: Path
    policy: Path
    strategy: Strategy
    trace: Path | None
    seed: int
    several: bool


def play(wish: Wish) -> str:
    """What the command prints.

    Raises:
        Failed: A file that does not hold, or a policy that no run can show.
    """
    jobs = [job for path in wish.scenarios for job in _jobs(path, wish)]
    played = _read_trace(wish.trace) if wish.trace is not None else None
    done = _run_all(jobs, played, wish.jobs)
    rows = [row for row, _ in done]
    result = _result(wish, jobs, rows, played)
    if wish.html is not None:
        try:
            wish.html.write_text(page.page(result, [curves for _, curves in done]))
        except OSError as wrong:
            raise Failed(f"{wish.html}: cannot be written: {wrong.strerror}") from None
    if wish.as_json:
        return orjson.dumps(result).decode() + "\n"
    return _text(result, rows)


def _text(result: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [f"{result['name']} (seed {result['seed']})", report.table(rows)]
    said = result.get("trace")
    if said:
        lines.append(
            f"{said['calls']:,} calls of {said['file']}, {said['answered_429']:,} answered 429 then"
        )
        lines += [f"line {one['line']}: {one['why']}" for one in said["bad_lines_shown"]]
        if said["bad_lines"]:
            lines.append(f"{said['bad_lines']:,} bad lines were left out")
    for row in rows:
        for rule in row["refused_by"]:
            who = ", ".join(f"{agent} ({count})" for agent, count in rule["agents"].items())
            lines.append(
                f"{report.label(row)}: {rule['count']:,} calls refused, {rule['code']}, by "
                f"{rule['rule']}: {who}"
            )
    lines.append(f"{result['ops_per_cpu_s']:,} calls per CPU-second, digest {result['digest']}")
    return "\n".join(lines) + "\n"


def _result(
    wish: Wish, jobs: list[Job], rows: list[dict[str, Any]], played: trace.Trace | None
) -> dict[str, Any]:
    """The object that `--json` prints."""
    cpu = sum(row["cpu_s"] for row in rows)
    ops = sum(row["ops"] for row in rows)
    first, digest = _scenario(wish.scenarios[0])
    names = list(dict.fromkeys(str(job.policy) for job in jobs))
    paths = {str(job.policy): job.policy for job in jobs}
    result: dict[str, Any] = {
        "name": first.name if len(wish.scenarios) == 1 else "Comparison",
        "scenarios": [str(path) for path in wish.scenarios],
        "scenario_digest": digest,
        "policies": [(name, _policy(paths[name]).digest) for name in names],
        "seed": wish.seeds[0] if wish.seeds else first.seed,
        "version": __version__,
        "command": shlex.join(["tidegate", *sys.argv[1:]]),
        "strategies": rows,
        "ops": ops,
        "cpu_s": round(cpu, 3),
        "ops_per_cpu_s": round(ops / cpu) if cpu else 0,
        "digest": report.digest_of(rows),
    }
    if played is not None:
        result["trace"] = {"file": str(wish.trace), **report.recorded(played)}
    return result


# --- files


def _scenario(path: Path) -> tuple[Scenario, str]:
    try:
        return scenario_files.read(path)
    except PolicyError as wrong:
        raise Failed(_problems(wrong)) from None


def _policy(path: Path) -> Policy:
    try:
        return load_without_secrets(path, from_environment().environment)
    except PolicyError as wrong:
        raise Failed(_problems(wrong)) from None


def _problems(wrong: PolicyError) -> str:
    return "\n".join(str(problem) for problem in wrong.problems)


def _jobs(path: Path, wish: Wish) -> list[Job]:
    """The runs of one scenario, its names checked against every policy."""
    scenario, _ = _scenario(path)
    policies = wish.policies or tuple(path.parent / name for name in scenario.policies)
    if not policies:
        raise Failed(f"{path}: names no policy; add `policy:` to it, or give --policy")
    if not scenario.traffic and wish.trace is None:
        raise Failed(f"{path}: nobody calls; add `traffic:` to it, or give --trace")
    for policy in policies:
        snapshot = compiled(_policy(policy), revision=1)
        try:
            scenario_files.against(path, snapshot, str(policy))
        except PolicyError as wrong:
            raise Failed(_problems(wrong)) from None
    found = []
    for strategy in scenario.strategies:
        ours = strategy is Strategy.TIDEGATE
        found += [
            Job(
                scenario=path, policy=policy, strategy=strategy, trace=wish.trace, seed=seed,
                several=ours and len(policies) > 1,
            )
            for policy in (policies if ours else policies[:1])
            for seed in wish.seeds or (scenario.seed,)
        ]  # fmt: skip
    return found


def _read_trace(path: Path) -> trace.Trace:
    """The calls of a trace.

    Raises:
        Failed: It cannot be read, or holds no call.
    """
    try:
        if not path.is_file():
            raise Failed(f"{path}: is no file")
        if path.stat().st_size > MAX_TRACE:
            raise Failed(f"{path}: is larger than {MAX_TRACE} bytes")
        with path.open("rb") as file:
            found = trace.read(iter(lambda: file.readline(trace.MAX_LINE + 1), b""))
    except OSError as wrong:
        raise Failed(f"{path}: cannot be read: {wrong.strerror}") from None
    if not found.calls:
        why = "; ".join(f"line {number}: {why}" for number, why in found.shown[:5])
        raise Failed(f"{path}: holds no call that can be played{'; ' + why if why else ''}")
    return found


# --- runs


def _run_all(
    jobs: list[Job], played: trace.Trace | None, processes: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Figures and curves of every job, in their order."""
    progress = Progress(len(jobs))
    if processes == 1 or len(jobs) == 1:
        done = []
        for job in jobs:
            done.append(run_job(job, played, progress.within))
            progress.finished()
    else:
        with ProcessPoolExecutor(min(processes, len(jobs))) as pool:
            pending = [pool.submit(run_job, job, None) for job in jobs]
            done = []
            for future in pending:
                done.append(future.result())
                progress.finished()
    progress.clear()
    return done


def run_job(
    job: Job, played: trace.Trace | None, told: Callable[[float], None] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and curves of one run.

    Args:
        job: What to run.
        played: Its trace, where this process has read it already.
        told: Called with the share of the run that is done.

    Raises:
        Failed: Something that no run can show.
    """
    scenario, _ = _scenario(job.scenario)
    scenario = replace(scenario, seed=job.seed)
    snapshot = compiled(_policy(job.policy), revision=1)
    if job.trace is not None and played is None:
        played = _read_trace(job.trace)
    player, models = None, []
    if played is not None:
        scenario = replace(scenario, traffic=(), duration=max(MICRO, played.span + 1))
        player = trace.Player(played, snapshot, scenario.fleet, scenario.upstream)
        models = list(dict.fromkeys(call.model for call in played.calls))
    span = scenario.duration

    def passed(now: Micros) -> None:
        if told is not None:
            told(min(1.0, now / span))

    gc.collect()
    gc.freeze()
    kept = gc.get_threshold()
    gc.set_threshold(YOUNG)
    began = time.process_time()
    try:
        run = simulate(
            scenario, snapshot, job.strategy, policy=job.policy.stem, recorded=player,
            models=models, told=passed,
        )  # fmt: skip
    except Unsimulated as wrong:
        raise Failed(f"{job.scenario} under {job.policy}: {wrong}") from None
    finally:
        gc.set_threshold(*kept)
        gc.unfreeze()
    cpu = time.process_time() - began
    return _row(run, job, cpu), _curves(run)


def _row(run: Run, job: Job, cpu: float) -> dict[str, Any]:
    row = report.figures(run)
    row["several"] = job.several
    row["scenario"] = job.scenario.stem
    row["seed"] = run.scenario.seed
    row["virtual_s"] = round(run.span / MICRO, 3)
    row["cpu_s"] = round(cpu, 3)
    row["ops_per_cpu_s"] = round(row["ops"] / cpu) if cpu else 0
    return row


def _curves(run: Run) -> dict[str, Any]:
    return {
        "use": report.curve_of_use(run),
        "line": report.curve_of_line(run),
        "refusals": report.curve_of_refusals(run),
    }


class Progress:
    """A bar on standard error, if that is a terminal."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._done = 0
        self._shown = ""
        self._live = sys.stderr.isatty()

    def within(self, share: float) -> None:
        """So much of the present run is done."""
        self._show(self._done + share)

    def finished(self) -> None:
        """One more run is over."""
        self._done += 1
        self._show(self._done)

    def _show(self, done: float) -> None:
        if not self._live:
            return
        share = done / self._runs
        full = round(BAR * share)
        bar = f"[{'#' * full}{'.' * (BAR - full)}]"
        text = f"\r{bar} {share:4.0%}  run {min(self._runs, int(done) + 1)} of {self._runs}"
        if text != self._shown:
            self._shown = text
            sys.stderr.write(text)
            sys.stderr.flush()

    def clear(self) -> None:
        """The line is free again."""
        if self._shown:
            sys.stderr.write("\r" + " " * len(self._shown) + "\r")
            sys.stderr.flush()
