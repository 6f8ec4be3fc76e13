"""Scenario files: strict, with the place of every mistake; what they say of a policy is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import PolicyError
from gateway.policy import scenario
from gateway.policy.check import load_without_secrets
from gateway.policy.compile import compile as compiled
from gateway.simulate.scenario import Strategy
from gateway.units import MICRO, MINUTE

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "scenarios").glob("*.yaml"))

GOOD = """version: 1
name: small
policy: p.yaml
duration: 2h
traffic:
  all:
    agents: 3
    principals: lab
    model: m
    tiers: { "1": 25%, "3": 75% }
    load: { 10m: 600%, 0s: 80% }
    every: 1h
"""


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "s.yaml"
        path.write_text(text)
        return path

    return write


def problems(path: Path) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        scenario.read(path)
    return [str(problem).removeprefix(f"{path}:") for problem in caught.value.problems]


def test_a_load_that_begins_anew_is_unfolded_and_its_surges_found(written):
    found, _ = scenario.read(written(GOOD))
    (group,) = found.traffic
    assert group.load[:3] == ((0, 800_000), (10 * MINUTE, 6_000_000), (60 * MINUTE, 800_000))
    assert found.surges() == ((11 * MINUTE, 60 * MINUTE), (71 * MINUTE, 120 * MINUTE))
    assert (found.strategies, found.seed) == ((Strategy.TIDEGATE,), 1)
    assert group.tiers == (250_000, 0, 750_000)
    assert group.patience == 540 * MICRO


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("agents: 3", "agent: 3", "7:5: traffic.all.agent: unknown key 'agent'"),
        ("duration: 2h", "duration: 2", "4:11: duration: 2 has no unit"),
        ("600%", "600", "600 has no unit"),
        ("10m:", "ten:", "traffic.all.load.ten: 'ten' is no duration"),
        ("10m:", "90m:", "begins after the load begins anew"),
        ("75%", "70%", "10:12: traffic.all.tiers: the shares are not 100% together"),
        ('"3"', '"4"', "traffic.all.tiers.4"),
        ("every: 1h", "every: 1ms", "too short for such a long run"),
        ("traffic:", "strategies: [tidegate, tidegate]\ntraffic:", "one stands twice"),
        ("traffic:", "fleet: {gateways: 2}\ntraffic:", "share pools only through a store"),
        ("traffic:", "fleet: {store: [5ms, 1ms]}\ntraffic:", "is shorter than the least"),
        ("traffic:", "outages: [{at: 3h, lasts: 1s}]\ntraffic:", "begins after the run has ended"),
        (
            "traffic:",
            "provider: {meters: {q: {shape: sliding, limits: {}}}}\ntraffic:",
            "states no limit",
        ),
        ("version: 1", "version: 1\nversion: 1", "stands here twice"),
        ("name: small", "name: [", "not YAML"),
    ],
)
def test_every_mistake_has_its_place(written, before, after, said):
    assert before in GOOD
    found = problems(written(GOOD.replace(before, after, 1)))
    assert any(said in line for line in found), found


def test_all_mistakes_are_told_at_once(written):
    text = GOOD.replace("duration: 2h", "duration: 2").replace("agents: 3", "agents: 0")
    assert len(problems(written(text))) == 2


def test_a_file_that_is_not_there_is_said(tmp_path):
    assert "cannot be read" in problems(tmp_path / "absent.yaml")[0]


def test_names_that_the_policy_lacks_stand_at_their_place(written, tmp_path):
    policy = load_without_secrets(ROOT / "scenarios/policies/minute.yaml", {})
    path = written(
        GOOD.replace(
            "traffic:", "foreign: [{pool: quotta, at: 0s, lasts: 1s, share: 1%}]\ntraffic:"
        )
    )
    with pytest.raises(PolicyError) as caught:
        scenario.against(path, compiled(policy, revision=1), "minute.yaml")
    said = [str(problem) for problem in caught.value.problems]
    assert any("s.yaml:5:18: foreign[0].pool: no pool 'quotta'" in line for line in said), said
    assert any("did you mean" in line and "quota" in line for line in said), said
    assert any("no agent 'lab' in minute.yaml" in line for line in said), said
    assert any("no model 'm' in minute.yaml" in line for line in said), said


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_scenario_fits_its_policies(path):
    found, _ = scenario.read(path)
    assert found.policies
    for name in found.policies:
        policy = load_without_secrets(path.parent / name, {})
        scenario.against(path, compiled(policy, revision=1), name)
