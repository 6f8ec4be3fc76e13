"""Recorded calls: both forms, bad lines named by number, nothing played twice or out of order."""

from __future__ import annotations

import json

import pytest

from gateway.simulate import trace
from gateway.simulate.report import figures
from gateway.simulate.scenario import Fleet, Upstream
from gateway.units import MICRO
from tests.unit.simulate.ground import play, scenario, snapshot

PLAIN = {"at": 3, "agent": "lab-1", "model": "m", "input": 100, "output": 20}
LOGGED = {
    "event": "call", "received": 7_000_000, "agent": "lab-2", "tenant": "default", "model": "m",
    "tier": 1, "outcome": "ok", "status": 200, "waited_us": 500_000, "total_us": 2_500_000,
    "cost": 42, "usage": {"input": 90, "output": 30, "cache_read": 10, "cache_write": None},
    "notes": [{"layer": "estimate", "detail": "input 101 output 25 cap 1024"}],
}  # fmt: skip


def read(*lines) -> trace.Trace:
    return trace.read(
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    )


def test_both_forms_are_calls_of_one_trace_in_the_order_of_their_instants():
    found = read(LOGGED, PLAIN)
    assert [call.agent for call in found.calls] == ["lab-1", "lab-2"]
    first, second = found.calls
    assert (first.at, second.at) == (0, 4 * MICRO)
    assert (second.input, second.cached, second.output, second.cap) == (100, 10, 30, 1_024)
    assert (second.takes, second.waited, second.cost, second.tier) == (2 * MICRO, 500_000, 42, 1)
    assert (first.counted, second.counted) == (100, 101)


def test_times_may_be_dates():
    early = {**PLAIN, "at": "2026-11-29T20:00:00+01:00"}
    late = {**PLAIN, "at": "2026-11-29T19:00:05Z"}
    assert [call.at for call in read(late, early).calls] == [0, 5 * MICRO]


def test_a_refused_call_of_the_log_is_played_as_it_would_have_been():
    refused = {**LOGGED, "outcome": "refused", "status": 429, "usage": None}
    (call,) = read(refused).calls
    assert (call.input, call.output, call.status, call.takes) == (101, 25, 429, 0)


def test_other_lines_of_a_log_are_passed_over():
    found = read(
        {"event": "reload", "revision": 2},
        LOGGED,
        {**LOGGED, "dialect": "models", "usage": None, "notes": []},
    )
    assert (len(found.calls), found.bad, found.passed_over) == (1, 0, 2)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not an object"),
        ({**PLAIN, "input": -1}, "input: a whole number of at least 0 is expected"),
        ({**PLAIN, "input": True}, "input: a whole number"),
        ({**PLAIN, "output": 1 << 40}, "output: more than"),
        ({**PLAIN, "at": "yesterday"}, "neither seconds nor an RFC 3339 time"),
        ({**PLAIN, "at": "2026-11-29T20:00:00"}, "no time zone"),
        ({**PLAIN, "at": -3}, "at: a number of at least 0"),
        ({**PLAIN, "at": None}, "at: a number"),
        ({**PLAIN, "tier": 4}, "tier: 1, 2 or 3"),
        ({**PLAIN, "agent": ""}, "agent: a text is expected"),
        ({**PLAIN, "promt": "x"}, "unknown key 'promt'"),
        ({key: value for key, value in PLAIN.items() if key != "model"}, "model is missing"),
        ({**LOGGED, "usage": {"input": "x"}}, "input: a whole number"),
        ({**LOGGED, "usage": None, "notes": None}, "neither usage nor estimate"),
        (b"{" + b" " * trace.MAX_LINE + b"}", "longer than"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_and_the_rest_is_played(line, why):
    found = read(PLAIN, b"", line, PLAIN)
    assert len(found.calls) == 2
    ((number, said),) = found.shown
    assert number == 3
    assert why in said


def test_more_bad_lines_are_counted_than_shown():
    found = read(*[b"no"] * 50)
    assert (found.bad, len(found.shown)) == (50, trace.SHOWN)


def test_agents_of_a_log_are_found_by_name_by_key_pattern_and_else_not():
    policy = snapshot()
    names = ("lab", "lab-7", "stranger")
    found = [trace.principal_of(policy, name, "") for name in names]
    assert found == ["lab", "lab", "stranger"]


def test_a_replay_asks_every_call_at_its_instant_and_says_who_would_be_refused():
    calls = [{**PLAIN, "at": second, "agent": f"lab-{second % 3}"} for second in range(60)]
    calls.append({**PLAIN, "at": 5, "agent": "stranger"})
    calls.append({**PLAIN, "at": 6, "model": "nonsense"})
    found = read(*calls)
    policy = snapshot()
    player = trace.Player(found, policy, Fleet(), Upstream())
    said = scenario(traffic=(), duration=found.span + 1, fleet=Fleet())
    run = play(said, policy, recorded=player, models=["m", "nonsense"])
    told = figures(run)
    assert (told["asked"], told["ops"], told["refused"]) == (62, 60, 2)
    rules = {entry["rule"]: entry["agents"] for entry in told["refused_by"]}
    assert rules == {"agents": {"stranger": 1}, "models": {"lab-1": 1}}
    again = play(said, policy, recorded=player, models=["m", "nonsense"])
    assert again.books.digest() == run.books.digest()
