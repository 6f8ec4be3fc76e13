"""`tidegate simulate` as a command: files, exit status, JSON, HTML, jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "scenarios/policies/minute.yaml"

SCENARIO = """version: 1
name: a small surge
policy: {policy}
duration: 3m
strategies: [full_jitter, tidegate]
fleet: {{ gateways: 2, store: [1ms, 5ms] }}
traffic:
  agents:
    agents: 200
    principals: [team-0-agents, team-1-agents]
    model: large
    tiers: {{ "1": 10%, "2": 40%, "3": 50% }}
    load: {{ 0s: 80%, 1m: 500% }}
"""

LINES = [
    {"at": second / 4, "agent": f"team-{second % 3}-x", "model": "large", "input": 4_000,
     "output": 300, "tier": 1 + second % 3, "status": 429 if second % 50 == 0 else 200,
     "waited": 0.1}
    for second in range(600)
]  # fmt: skip


def simulate(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", "simulate", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.format(policy=POLICY))
    return path


def test_a_scenario_gives_figures_and_a_page_and_the_same_ones_with_more_jobs(small, tmp_path):
    page = tmp_path / "r.html"
    done = simulate(small, "--json", "--html", page)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout.splitlines()[-1])
    names = [row["name"] for row in found["strategies"]]
    assert names == ["full_jitter", "tidegate"]
    naive, ours = found["strategies"]
    assert naive["provider_429"] > 0
    assert (ours["provider_429"], ours["completion"], ours["overtakes"]) == (0, 100.0, 0)
    wanted = {
        "name", "meter", "ops", "provider_429", "completion", "use_in_surge", "use_worst_surge",
        "wait_p50_s", "wait_p99_s", "jain", "overtakes", "hints_early_pct", "places_lost",
    }  # fmt: skip
    assert wanted <= ours.keys()
    assert found["ops_per_cpu_s"] > 0
    text = page.read_text()
    assert "a small surge" in text
    assert found["digest"] in text
    again = json.loads(simulate(small, "--json", "--jobs", "2").stdout.splitlines()[-1])
    assert again["digest"] == found["digest"]
    other = json.loads(simulate(small, "--json", "--seed", "7").stdout.splitlines()[-1])
    assert other["digest"] != found["digest"]


def test_a_trace_is_replayed_under_two_policies_side_by_side(small, tmp_path):
    tight = tmp_path / "tight.yaml"
    tight.write_text(
        POLICY.read_text().replace(
            "  team-0-agents: { tenant: team-0,",
            "  team-0-agents: { limits: { rpm: 5, max_wait: 0s }, tenant: team-0,",
        )
    )
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join([*map(json.dumps, LINES), "{oops", ""]))
    done = simulate(
        small, "--policy", POLICY, "--policy", tight, "--trace", trace, "--json",
        "--html", tmp_path / "r.html",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    said = found["trace"]
    assert (said["calls"], said["answered_429"], said["bad_lines"]) == (600, 12, 1)
    assert said["bad_lines_shown"][0]["line"] == 601
    ours = {row["policy"]: row for row in found["strategies"] if row["name"] == "tidegate"}
    assert ours["minute"]["refused"] == 0
    rules = {entry["rule"]: entry for entry in ours["tight"]["refused_by"]}
    refused = rules["agents.team-0-agents.limits.rpm"]
    assert refused["count"] > 50
    assert list(refused["agents"]) == ["team-0-x"]
    assert "line 601" not in done.stderr
    page = (tmp_path / "r.html").read_text()
    assert "agents.team-0-agents.limits.rpm" in page
    assert "as recorded" in page


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("duration: 3m", "duration: 3"), "s.yaml:4:11: duration: 3 has no unit"),
        (("model: large", "model: largo"), "traffic.agents.model: no model 'largo'"),
        (("policy: ", "policy: nowhere/"), "cannot be read"),
        (("traffic:\n", "traffic: {}\nx:\n"), "unknown key 'x'"),
    ],
)
def test_what_does_not_hold_is_said_with_its_place_and_status_1(small, change, said):
    small.write_text(small.read_text().replace(*change, 1))
    done = simulate(small)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_without_a_call_is_no_crash(small, tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(b"\xff\xfe\n{}\n")
    done = simulate(small, "--trace", trace)
    assert done.returncode == 1
    assert "holds no call that can be played; line 1: not JSON" in done.stderr


def test_a_file_that_cannot_be_written_is_said(small):
    done = simulate(small, "--html", "/nowhere/r.html")
    assert done.returncode == 1
    assert "/nowhere/r.html: cannot be written" in done.stderr
