"""Two agents of a workflow that answer each other, as hashes."""

from __future__ import annotations

from gateway.resilience.alternation import KEPT, MOST_KEPT, Alternation, Step
from gateway.resilience.loops import LoopRules
from gateway.resilience.memory import IDLE
from gateway.resilience.repeats import Exchanges

RULES = LoopRules()


def test_what_is_retold_counts_as_if_it_had_happened_here():
    steps = [Step(at, at % 2 + 1, at % 2 + 5) for at in range(7)]
    here, retold = Alternation(session=1), Alternation(session=1)
    rounds = [here.step(who, what) for _, who, what in steps]
    assert rounds == [0, 1, 1, 2, 2, 3, 3]
    for _ in range(2):
        retold.retold(steps, RULES, 9)
        assert retold.step(2, 6) == 4
    assert (retold.heard_at, retold.turn) == (9, 0)


def test_a_fleet_keeps_as_many_calls_as_the_rule_needs_within_bounds():
    kept = [Alternation(session=1).kept(LoopRules(ping_pong=rounds)) for rounds in (4, 40, 1_000)]
    assert kept == [KEPT, 82, MOST_KEPT]
    assert Alternation(session=1).lasts(RULES) == IDLE


def test_tool_calls_of_a_tenants_agents_alternate_wherever_they_were_made():
    others = Exchanges(name=1)
    others.retold([Step(at, at % 2 + 1, at % 2 + 5) for at in range(7)], RULES, 9)
    verdict = others.judge(2, 6, RULES, 7)
    assert verdict is not None
    assert (verdict.count, verdict.refuse) == (4, True)
    others.retold([], RULES, 10)
    assert others.judge(2, 6, RULES, 7) is None
