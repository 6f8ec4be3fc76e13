"""Runs of a few hundred calls: what Tidegate promises holds, and what others do is told truly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.simulate import meters
from gateway.simulate.report import figures
from gateway.simulate.run import Unsimulated, quota_of
from gateway.simulate.scenario import (
    Fault,
    Fleet,
    Foreign,
    Leaving,
    Outage,
    Stated,
    StoreOutage,
    Strategy,
    Upstream,
)
from gateway.units import MICRO, MINUTE
from tests.unit.simulate.ground import play, population, scenario, snapshot


def nothing_left(run) -> None:
    """Fails unless every permit and place was given back."""
    deciders = run.world.strategy
    for gateway in deciders._gateways:
        for client in gateway.clients.values():
            assert client.idle
        assert not any(gateway.producing.values())
        for scope in gateway.scopes.values():
            assert (scope.undecided, scope.inside, scope.waiting) == (0, {}, {})
    assert deciders.waiting() == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["bucket", "window_60s"])
@pytest.mark.parametrize("accounting", ["realtime", "upfront_max", "reserve_settle"])
def test_a_surge_is_waited_out_without_a_refusal_and_without_an_overtake(shape, accounting):
    run = play(policy=snapshot(shape=shape, accounting=accounting))
    found = figures(run)
    assert found["ops"] > 150
    assert (found["provider_429"], found["completion"], found["overtakes"]) == (0, 100.0, 0)
    assert found["use_in_surge"] > 90
    waits = found["wait_p99_s"]
    assert waits["1"] < waits["2"] < waits["3"]
    nothing_left(run)


@pytest.mark.slow
def test_one_process_without_a_store_decides_alike():
    run = play(scenario(fleet=Fleet()))
    found = figures(run)
    assert (found["provider_429"], found["completion"], found["overtakes"]) == (0, 100.0, 0)
    assert found["script_calls_per_op"] == 0
    nothing_left(run)


@pytest.mark.slow
def test_equal_seeds_give_equal_runs_and_others_do_not():
    one, again = play().books.digest(), play().books.digest()
    other = play(scenario(seed=2)).books.digest()
    assert one == again
    assert one != other


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [one for one in Strategy if one not in (Strategy.TIDEGATE, Strategy.STATIC)]
)
def test_who_does_not_wait_is_refused(strategy):
    found = figures(play(strategy=strategy))
    assert found["provider_429"] > 20
    assert found["overtakes"] is None


@pytest.mark.slow
def test_fixed_shares_refuse_nothing_and_leave_the_quota_unused():
    found = figures(play(strategy=Strategy.STATIC))
    assert found["provider_429"] == 0
    assert found["use_in_surge"] < 90


@pytest.mark.slow
def test_coming_back_exactly_as_told_never_recovers_where_refused_requests_count():
    low = Stated(
        pool="q", limits=True, accounting=False,
        quota=meters.Quota(shape=meters.Shape.SLIDING, requests=300, tokens=200_000),
    )  # fmt: skip
    said = scenario(duration=6 * MINUTE, upstream=Upstream(meters=(low,)))
    told = figures(play(said, strategy=Strategy.RETRY_AFTER))
    drawn = figures(play(said, strategy=Strategy.FULL_JITTER))
    assert told["use_in_surge"] < 5
    assert drawn["use_in_surge"] > 50


@pytest.mark.slow
def test_what_the_provider_really_meters_may_differ_from_the_policy():
    half = Stated(
        pool="q", limits=True, accounting=False,
        quota=meters.Quota(shape=meters.Shape.SLIDING, requests=1_000, tokens=100_000),
    )  # fmt: skip
    found = figures(play(scenario(upstream=Upstream(meters=(half,)))))
    assert found["provider_429"] > 0


@pytest.mark.slow
def test_an_outage_opens_the_breaker_and_calls_wait_it_out():
    outage = Outage(start=MINUTE, end=2 * MINUTE, provider="up", fault=Fault.FAILS)
    run = play(scenario(outages=(outage,)))
    found = figures(run)
    calm = figures(play())
    assert found["provider_faults"] > 0
    assert found["provider_faults"] < 200  # without a breaker every waiting call would try
    assert found["ops"] < calm["ops"]
    nothing_left(run)


@pytest.mark.slow
@pytest.mark.parametrize("empty", [True, False])
def test_a_store_that_goes_away_costs_little_and_loses_nobody(empty):
    away = StoreOutage(start=2 * MINUTE, end=2 * MINUTE + 30 * MICRO, empty=empty)
    four = Fleet(gateways=4, shares=(250_000,) * 4, store=(1_000, 5_000), outages=(away,))
    run = play(scenario(fleet=four, duration=5 * MINUTE))
    found = figures(run)
    assert found["provider_429"] <= 2
    assert found["completion"] == 100.0
    # What comes back intact over-holds for a window: both books hold the outage.
    assert found["use_in_surge"] > (85 if empty else 75)
    nothing_left(run)


@pytest.mark.slow
def test_a_ladder_serves_while_the_first_choice_is_down():
    outage = Outage(start=MINUTE, end=3 * MINUTE, provider="up", fault=Fault.OVERLOADED)
    run = play(scenario(outages=(outage,)), snapshot(model=", ladder: [other]"))
    found = figures(run)
    assert found["downgraded"] > 20
    assert found["completion"] > 95
    nothing_left(run)


@pytest.mark.slow
def test_clients_that_hang_up_leave_nothing_behind():
    gone = population(leaving=Leaving(share=300_000, after=3 * MICRO))
    run = play(scenario(gone))
    found = figures(run)
    assert found["left"] > 30
    assert found["ops"] + found["left"] == found["asked"]
    nothing_left(run)


@pytest.mark.slow
def test_a_wrong_count_is_learned():
    run = play(scenario(population(counted=700_000)))
    assert figures(run)["provider_429"] <= 3


@pytest.mark.slow
def test_headers_make_room_for_somebody_else_on_the_quota():
    foreign = Foreign(pool="q", start=30 * MICRO, end=3 * MINUTE, share=200_000)
    said = scenario(foreign=(foreign,))
    blind = figures(play(said, snapshot()))
    seeing = figures(play(said, snapshot(provider=", headers: openai")))
    blind_429 = blind["provider_429"] + blind["foreign_429"]
    assert seeing["provider_429"] + seeing["foreign_429"] < blind_429 / 3


@pytest.mark.slow
def test_refused_callers_come_back_as_told_to_the_place_they_had():
    patient = population(returns=8, patience=8 * MICRO)
    run = play(scenario(patient))
    found = figures(run)
    assert found["hints"] > 20
    assert found["places_lost"] == 0
    nothing_left(run)


@pytest.mark.slow
def test_a_limit_of_the_callers_own_refuses_and_names_its_rule():
    policy = snapshot(lab=", limits: {rpm: 2, max_wait: 0s}")
    run = play(policy=policy)
    rules = {entry["rule"]: entry for entry in figures(run)["refused_by"]}
    assert rules["agents.lab.limits.rpm"]["count"] > 20
    assert rules["agents.lab.limits.rpm"]["agents"]
    nothing_left(run)


def test_strangers_and_unknown_models_are_refused_by_name():
    shop = population(name="s", agents=2, principals=("shop", "nobody"), tiers=(0, 0, 0))
    run = play(scenario(shop, duration=20 * MICRO))
    rules = {(entry["rule"], entry["code"]) for entry in figures(run)["refused_by"]}
    assert ("agents", "unauthorized") in rules


def test_a_period_that_no_meter_has_is_said_and_not_left_out():
    model = snapshot().model("m")
    assert model is not None
    spec = model.deployments[0].pools[0]
    hourly = replace(spec, dimensions=(replace(spec.dimensions[0], window=60 * MINUTE),))
    with pytest.raises(Unsimulated, match="no meter of that period"):
        quota_of(hourly, model.deployments[0].accounting)
