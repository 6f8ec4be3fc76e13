"""The terminal's pages, made from what the admin listener really answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gateway.admission.profiles import Usage
from gateway.call import VerdictNote
from gateway.cli import admin_address, parser
from gateway.snapshot import Place
from gateway.telemetry.decisions import Decisions, Quotes, Record, Who
from gateway.terminal import explain_lines, status_lines

if TYPE_CHECKING:
    from typing import Any

PLACES = {
    "agents.lab.limits.rpm": Place(file="tidegate.yaml", line=12, column=5),
    "agents.lab": Place(file="tidegate.yaml", line=7, column=3),
}
START = 1_795_974_596_738_537


def explained(**facts: Any) -> str:
    record = Record(
        ts="2026-11-29T17:49:57.806Z", call="c1", received=START,
        names=Quotes().names(Who("chat", "POST", "/v1/chat/completions", agent="lab")), **facts,
    )  # fmt: skip
    decisions = Decisions(lambda data: data)
    decisions.add("c1", record.line(), PLACES)
    value = decisions.explain("c1")
    assert value is not None
    return "\n".join(explain_lines(value))


def test_explain_says_when_each_verdict_fell_and_by_which_line_of_which_file() -> None:
    page = explained(
        status=200,
        outcome="ok",
        notes=[
            VerdictNote("identify", "known", "agents.lab", START, "lab tier 2"),
            VerdictNote("admit", "waited", "agents.lab.limits.rpm", START + 2_500_000, "2500 ms"),
        ],
    )
    assert "+0  identify" in page
    assert "+2.5 s  admit     waited    2500 ms  [agents.lab.limits.rpm tidegate.yaml:12]" in page


def test_explain_says_how_long_a_call_waited_and_took() -> None:
    page = explained(status=200, outcome="ok", waited_us=2_500_000, total_us=3_100_000)
    assert [line.split() for line in page.splitlines() if "waited" in line] == [
        ["waited", "2.5", "s"]
    ]
    assert [line.split() for line in page.splitlines() if "total" in line] == [
        ["total", "3.1", "s"]
    ]


def test_explain_of_a_refusal_names_code_rule_and_line() -> None:
    page = explained(
        status=429, outcome="refused", code="rate_limit_exceeded", because="agents.lab.limits.rpm"
    )
    assert "rate_limit_exceeded" in page
    assert "agents.lab.limits.rpm tidegate.yaml:12" in page


def test_explain_shows_usage_and_cost_for_people() -> None:
    page = explained(
        status=200, outcome="ok", usage=Usage(input=9, output=58, money=1_500), cost=1_500
    )
    assert "input 9, output 58" in page
    assert "0.001500 USD" in page
    assert "{" not in page


def test_a_refused_policy_is_shown_whole_on_a_narrow_terminal() -> None:
    problem = (
        "my.yaml:199:15: agents.lab.limits.rmp: unknown key 'rmp'; allowed: rps, rpm, rph, rpd, "
        "tpm, tph, tpd; did you mean 'rpm'?"
    )
    lines = status_lines({"policy": {"revision": 1, "last_error": problem}}, width=60)
    assert all(len(line) <= 60 for line in lines)
    assert "did you mean 'rpm'?" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, "http://127.0.0.1:8485"),
        ({"TIDEGATE_ADMIN_PORT": "9000"}, "http://127.0.0.1:9000"),
        ({"TIDEGATE_ADMIN_HOST": "10.0.0.7"}, "http://10.0.0.7:8485"),
        ({"TIDEGATE_ADMIN_HOST": "0.0.0.0"}, "http://127.0.0.1:8485"),
        ({"TIDEGATE_ADMIN_HOST": "::1"}, "http://[::1]:8485"),
        ({"TIDEGATE_ADMIN_HOST": "::"}, "http://[::1]:8485"),
    ],
)
def test_status_asks_the_admin_listener_that_serve_would_open_here(
    environ: dict[str, str], address: str
) -> None:
    assert admin_address(environ) == address


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_cannot_be_is_refused_by_the_command_line(
    port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", f"--port={port}"])
    assert "from 0 to 65535" in capsys.readouterr().err


def test_a_pool_in_shadow_says_whom_it_would_have_held_back() -> None:
    pool = {"name": "agent:lab", "in_flight": 0, "would_have_waited": 7}
    assert "agent:lab  in flight 0  in shadow: 7 would have waited" in status_lines(
        {"pools": [pool]}
    )


def test_status_says_through_what_limits_are_shared_and_who_does_not_answer():
    store = {"mode": "shared", "server": "Valkey 9.1.2"}
    assert status_lines({})[2] == ""
    lines = status_lines({"store": store, "workers": {"0": {}, "1": None}})
    assert "limits shared through Valkey 9.1.2 by 2 workers" in lines
    assert "no answer from worker 1" in lines
    away = status_lines({"store": {"mode": "local", "server": ""}})
    assert "limits shared through a store that never answered" in away
    assert "the store is AWAY: local holds (policy: fleet.when_away)" in away
