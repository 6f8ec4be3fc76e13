"""The report: self-contained, escaped, and true to the figures."""

from __future__ import annotations

import re

import pytest

from gateway.simulate import page, report
from gateway.simulate.scenario import Strategy
from gateway.simulation import _curves
from gateway.units import MICRO
from tests.unit.simulate.ground import play, population, scenario

FOUND = {
    "name": "<b>small</b>", "scenarios": ["a&b.yaml"], "scenario_digest": "0123456789abcdef",
    "policies": [("p.yaml", "fedcba9876543210")], "seed": 1, "version": "0", "digest": "d" * 32,
    "command": "tidegate simulate", "strategies": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    said = scenario(population(agents=10), duration=90 * MICRO)
    return [play(said, strategy=one) for one in (Strategy.FULL_JITTER, Strategy.TIDEGATE)]


def made(runs, **more) -> str:
    rows = [report.figures(run) for run in runs]
    curves = [_curves(run) for run in runs]
    return page.page({**FOUND, **more, "strategies": rows}, curves)


@pytest.mark.slow
def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing(runs):
    text = made(runs)
    assert not re.search(r"(?:src|href|@import|url\()\s*=?\s*[\"']?(?:https?:|//|data:)", text)
    assert "<script" not in text
    assert text.count("<svg") == 3 * len(runs)
    assert text.endswith("</html>\n")


@pytest.mark.slow
def test_what_comes_from_files_is_escaped(runs):
    trace = {
        "file": "t<.jsonl", "calls": 1, "span_s": 3.0, "answered_429": 2, "cost_usd": 1.5,
        "wait_p50_s": dict.fromkeys("123"), "wait_p99_s": dict.fromkeys("123"),
        "bad_lines": 1, "bad_lines_shown": [{"line": 7, "why": "<script>x</script>"}],
    }  # fmt: skip
    text = made(runs, trace=trace)
    assert "<b>small" not in text
    assert "&lt;script&gt;x" in text
    assert "1 line could not be played" in text


@pytest.mark.slow
def test_the_table_has_a_line_per_run_and_the_figures_of_the_json(runs):
    rows = [report.figures(run) for run in runs]
    lines = report.table(rows).splitlines()
    assert len(lines) == 2 + len(runs)
    assert f"{rows[1]['ops']:,}" in lines[3]
    assert "tidegate" in lines[3]


def test_percentiles_and_fairness_of_known_figures():
    seconds = [n * MICRO for n in range(1, 101)]
    assert report.percentile(seconds, 0.5) == 51
    assert report.percentile(seconds, 1.0) == 100
    assert report.percentile([], 0.5) is None
    assert report.jain([3, 3, 3]) == pytest.approx(1)
    assert report.jain([1, 0, 0]) == pytest.approx(1 / 3)
    assert report.jain([]) is None
