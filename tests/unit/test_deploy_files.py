"""deploy/ names only what exists: metrics, commands, variables, paths; no engine is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from gateway.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SUFFIXES = ("_bucket", "_sum", "_count")


def known() -> set[str]:
    names = set(Metrics().catalogue)
    return names | {name + suffix for name in names for suffix in SUFFIXES}


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\btidegate_[a-z_]+", text))


def test_every_metric_of_the_dashboard_exists():
    board = json.loads((DEPLOY / "grafana/tidegate.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    assert metrics_in(" ".join(queries)) <= known()


def test_every_metric_of_the_alerts_exists():
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert metrics_in(" ".join(rule["expr"] for rule in rules)) <= known()
    assert all(rule["annotations"]["summary"] for rule in rules)


def test_the_dashboard_has_no_two_panels_on_one_place():
    board = json.loads((DEPLOY / "grafana/tidegate.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(places) == len(set(places))


def test_compose_mounts_files_that_exist_and_publishes_admin_on_loopback_only():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), f"{name}: {source}"
            else:
                assert source in compose["volumes"], f"{name}: {source}"
    ports = compose["services"]["gateway"]["ports"]
    assert [port for port in ports if "8485" in port] == ["127.0.0.1:8485:8485"]


def test_the_shared_store_of_compose_never_evicts():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    command = compose["services"]["valkey"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


@pytest.mark.parametrize("file", ["Dockerfile", "compose.yaml", "systemd/tidegate.service"])
def test_every_variable_named_is_one_that_settings_read(file):
    text = (DEPLOY / file).read_text()
    settings = (ROOT / "gateway/settings.py").read_text()
    named = set(re.findall(r"\bTIDEGATE_[A-Z_]+", text))
    assert named
    assert all(f'"{variable}"' in settings for variable in named)


def test_the_image_copies_only_what_is_there():
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source


def test_the_unit_reloads_by_sighup_and_drains_by_sigterm():
    unit = (DEPLOY / "systemd/tidegate.service").read_text()
    assert "ExecReload=/bin/kill -HUP $MAINPID" in unit
    assert "KillSignal=SIGTERM" in unit
    assert "tidegate check" in unit
