"""The locust users, headless for a few seconds before a gateway of their own; and the guard."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def locust(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py,loadtests/shapes.py",
         "--headless", "--only-summary", *arguments],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
    )  # fmt: skip


def test_a_short_run_answers_everybody_and_reports_what_we_add(tmp_path):
    page = tmp_path / "r.html"
    done = locust(
        "--shape", "slow", "--seconds", "15", "--html", str(page), "--csv", str(tmp_path / "r")
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    with (tmp_path / "r_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    failed = {
        name: row["Failure Count"] for name, row in rows.items() if row["Failure Count"] != "0"
    }
    assert failed == {}
    served = {name for kind, name in rows if kind == "POST"}
    wanted = {
        "tier 1 /v1/chat/completions stream", "tier 2 /v1/messages plain",
        "tier 2 /v1/messages stream", "tier 3 /v1/responses plain",
        "tier 3 /v1/chat/completions plain", "tier 2 /v1/chat/completions stream",
        "tier 2 MCP initialize session", "tier 2 MCP initialized", "tier 2 MCP tools/call session",
        "tier 2 MCP tools/call stateless",
    }  # fmt: skip
    assert served == wanted
    kinds = {kind for kind, _ in rows}
    assert {"FIRST TOKEN", "QUEUE", "LEDGER"} <= kinds
    assert rows["LEDGER", "provider 429 for quota"]["Request Count"] == "0"
    assert "FIRST TOKEN" in page.read_text()


@pytest.mark.parametrize("host", ["https://gateway.example.com", "http://10.0.0.7:8484"])
def test_a_host_that_is_not_this_machine_is_refused_before_anything_is_sent(host):
    done = locust("--host", host, "--seconds", "1")
    assert done.returncode == 2
    assert "--i-own-this-host" in done.stderr
    assert "Nothing was sent" in done.stderr


def test_an_unknown_shape_is_said():
    done = locust("--shape", "tsunami")
    assert done.returncode == 2
    assert "herd" in done.stderr
