"""Which rungs a call may take: never another model for a dialect, each rung once, all said."""

from __future__ import annotations

import pytest

from gateway.call import Call, Dialect, Estimate, Family, Fields, Principal
from gateway.errors import NoSuchRoute
from gateway.layers.downgrade import rungs_for
from gateway.layers.estimate import first_of
from gateway.layers.models import visible
from gateway.snapshot import AgentRule
from tests.unit.policy.sample import snapshot

POLICY = """\
version: 1
providers:
  an: {kind: anthropic, base_url: "http://127.0.0.1:9", keys: [{id: a, value: none}]}
  oa: {kind: openai, base_url: "http://127.0.0.1:9", keys: [{id: a, value: none}]}
  both:
    kind: other
    dialects: [openai, anthropic]
    base_url: http://127.0.0.1:9
    keys: [{id: a, value: none}]
models:
  big: {provider: an, pool: per_model, ladder: [small]}
  twin: {provider: an, pool: per_model, also: [{provider: oa, pool: per_model}], ladder: [small]}
  small: {provider: both, pool: per_model}
agents:
  dev:
    keys: [{key: "${DEV_KEY}"}]
"""
SNAPSHOT = snapshot(POLICY)


def call(model: str, family: Family, *headers: tuple[bytes, bytes]) -> Call:
    dialect = Dialect.CHAT if family is Family.OPENAI else Dialect.MESSAGES
    made = Call(
        id="c1", dialect=dialect, family=family, method="POST", path="/", target=b"/",
        headers=list(headers), snapshot=SNAPSHOT, received=7,
    )  # fmt: skip
    made.fields = Fields(model=model)
    made.model = SNAPSHOT.model(model)
    rule = AgentRule(id="dev", tenant="t")
    made.principal = Principal(id="key:dev", agent="dev", tenant="t", rule=rule)
    made.estimate = Estimate(input=10, output=10)
    return made


def rungs(made: Call) -> list[str]:
    made.deployment = first_of(made)
    return [rung.id for rung in rungs_for(made)]


@pytest.mark.parametrize("wish", [(), ((b"tidegate-downgrade", b"never"),)])
def test_a_dialect_that_a_model_does_not_speak_is_refused_and_not_served_by_another(wish):
    with pytest.raises(NoSuchRoute, match="'big' is not served in the openai dialect"):
        first_of(call("big", Family.OPENAI, *wish))


def test_the_list_of_models_names_those_only_that_would_be_served():
    assert [one.name for one in visible(call("small", Family.OPENAI))] == ["twin", "small"]
    assert [one.name for one in visible(call("small", Family.ANTHROPIC))] == [
        "big", "twin", "small",
    ]  # fmt: skip


def test_a_ladder_begins_at_the_rung_that_speaks_the_dialect_and_tries_each_once():
    assert rungs(call("twin", Family.ANTHROPIC)) == ["an/twin", "both/small"]
    assert rungs(call("twin", Family.OPENAI)) == ["oa/twin", "both/small"]


def test_a_rung_that_is_passed_over_is_told_with_a_time_within_the_call():
    made = call("twin", Family.OPENAI)
    rungs(made)
    assert [(note.verdict, note.at) for note in made.notes] == [("skip", 7)]
    assert "an/twin does not speak the openai dialect" in made.notes[0].detail


def test_a_caller_that_wants_no_other_model_gets_its_own_rung():
    assert rungs(call("twin", Family.OPENAI, (b"tidegate-downgrade", b"never"))) == ["oa/twin"]
