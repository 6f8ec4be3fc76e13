"""The pool core, decision by decision. The defects of its prototype each have a test here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.admission.core import (
    Admit,
    Adopt,
    Ask,
    Caller,
    Late,
    Mode,
    Never,
    Outcome,
    PoolCore,
    Settle,
    Shed,
)  # fmt: skip
from gateway.admission.line import Place
from gateway.admission.profiles import Overrides, Profile, Reserve, Shape, pool_spec
from gateway.units import MICRO, MINUTE

U = MICRO
SECOND = MICRO
NOW = 1_800_000_000 * SECOND
ME = Caller("me")
YOU = Caller("you")


def own(tpm=1_000, **options):
    """A limit of ours: all of it usable at once."""
    return pool_spec(name="p", limits={"tpm": tpm}, shape=Shape.OWN, because="p", **options)


def mirror(tpm=60_000, **options):
    """A mirror of a provider's sliding minute: 1,000 tokens per second."""
    return pool_spec(name="p", limits={"tpm": tpm}, because="p", **options)


def ask(rid, tokens, lane=2, **changes):
    fields = {"tenant": "t", "weight": 1, "deadline_in": 10**12, "cost": (tokens * U,)}
    return Ask(rid=rid, lane=lane, **{**fields, **changes})


def rids(events, kind=Admit):
    return [event.rid for event in events if isinstance(event, kind)]


def used(core):
    return core.meter.read()[0] // U


# --- the prototype's known defects, in the order of admission.md §4


def test_defect_a_lost_reply_does_not_lose_a_grant_given_at_once():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 400)])  # this reply is lost
    again = core.tick(NOW + 1, ME, acquires=[ask("a", 400)])
    assert rids(again.events) == ["a"]
    assert used(core) == 400


def test_defect_a_lost_reply_does_not_lose_a_grant_by_mail():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1_000), ask("b", 400)])
    lost = core.tick(NOW + 1, ME, settles=[Settle("a", Outcome.SERVED, (0,))])
    assert rids(lost.events) == ["b"]
    again = core.tick(NOW + 2, ME)
    assert rids(again.events) == ["b"]
    told = core.tick(NOW + 3, Caller("me", mail_ack=again.mail_seq))
    assert told.events == []
    assert used(core) == 400


def test_defect_after_a_stall_of_the_store_nobody_counts_as_silent():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("big", 1_000)])
    core.tick(NOW, YOU, acquires=[ask("yours", 500)])
    for step in range(1, 4):
        core.tick(NOW + 6 * SECOND * step, ME)  # 6 s each: nobody could tick
        assert "yours" in core.line.waiting
    core.tick(NOW + MINUTE + SECOND, ME)
    assert rids(core.tick(NOW + MINUTE + 2 * SECOND, YOU).events) == ["yours"]


def test_a_gateway_that_stays_silent_while_others_tick_loses_its_waiters():
    core = PoolCore(own(), NOW)
    core.tick(NOW, YOU, acquires=[ask("big", 1_000), ask("yours", 500)])
    core.tick(NOW, ME, acquires=[ask("mine", 500)])
    for step in range(1, 70):
        core.tick(NOW + step * SECOND, ME)
    assert "yours" not in core.line.waiting
    assert "mine" in core.leases.held
    assert core.tick(NOW + 70 * SECOND, YOU).rejoin


def test_grants_that_a_dead_gateway_never_fetched_are_given_back_in_full():
    core = PoolCore(own(), NOW)
    core.tick(NOW, YOU, acquires=[ask("big", 1_000), ask("yours", 500)])
    reply = core.tick(NOW + SECOND, ME)
    core.tick(NOW + SECOND, ME, settles=[Settle("big", Outcome.SERVED, (0,))])
    assert "yours" in core.leases.held
    for step in range(2, 14):
        reply = core.tick(NOW + step * SECOND, ME)
    assert "yours" not in core.leases.held
    assert used(core) == 0
    assert not reply.nudged


def test_defect_flow_tags_of_three_thousand_tenants_are_gone_after_a_quiet_quarter_hour():
    core = PoolCore(mirror(6_000_000), NOW)
    for i in range(3_001):
        core.tick(NOW + i, ME, acquires=[ask(str(i), 10, tenant=f"t{i}")])
        core.tick(NOW + i, ME, settles=[Settle(str(i), Outcome.SERVED)])
    core.tick(NOW + 15 * MINUTE, ME)
    assert [core.line.tenants(lane) for lane in range(4)] == [0, 0, 0, 0]


def test_the_tenant_map_stays_small_while_a_pool_is_never_quiet():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 1_000), ask("waits", 900, tenant="big")])
    for i in range(3_000):
        core.tick(NOW + i, ME, acquires=[ask(str(i), 1, lane=1, tenant=f"t{i}")])
        core.tick(NOW + i, ME, cancels=[str(i)])
        assert core.line.tenants(1) <= 130


def test_defect_a_full_concurrency_limit_wakes_at_the_next_lease_end_not_every_20_ms():
    core = PoolCore(pool_spec(name="p", limits={}, concurrency=1, because="p"), NOW)
    core.tick(
        NOW, ME, acquires=[Ask(rid="a", lane=1, tenant="t", weight=1, deadline_in=10**12, cost=())]
    )
    reply = core.tick(
        NOW + SECOND, ME,
        acquires=[Ask(rid="b", lane=1, tenant="t", weight=1, deadline_in=10**12, cost=())],
    )  # fmt: skip
    assert reply.wake == NOW + 120 * SECOND
    assert reply.blocked_by == "p.concurrency"
    settled = core.tick(NOW + 2 * SECOND, ME, settles=[Settle("a", Outcome.SERVED)])
    assert rids(settled.events) == ["b"]


def test_defect_never_is_judged_by_the_ceiling_of_the_calls_own_tier():
    spec = mirror(reserve=Reserve.CEILINGS)
    core = PoolCore(spec, NOW)
    cost = spec.dimensions[0].cap[3] // U + 1
    reply = core.tick(NOW, ME, acquires=[ask("low", cost, lane=3), ask("high", cost, lane=1)])
    assert rids(reply.events) == ["high"]
    assert rids(reply.events, Never) == ["low"]


def test_never_is_judged_by_the_static_ceiling_whatever_is_cut_or_foreign():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1), ask("x", 1)])
    reply = core.tick(
        NOW + 1, ME, signals=[(900 * U,)], settles=[Settle("a", Outcome.QUOTA)],
        acquires=[ask("b", 1_000)],
    )  # fmt: skip
    assert not rids(reply.events, Never)
    assert "b" in core.line.waiting


def test_defect_deadlines_are_kept_by_the_pools_clock():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1_000)])
    core.tick(NOW + SECOND, ME, acquires=[ask("b", 500, deadline_in=30 * SECOND)])
    assert core.line.waiting["b"].deadline == NOW + 31 * SECOND
    reply = core.tick(NOW + 32 * SECOND, ME)
    assert rids(reply.events, Late) == ["b"]
    assert reply.events[0].because == "p.limits.tpm"


def test_defect_each_window_has_a_log_of_its_own():
    spec = pool_spec(name="p", limits={"rps": 5, "tpm": 1_000}, shape=Shape.OWN, because="p")
    core = PoolCore(spec, NOW)
    assert len(core.meter.logs) == 2
    costs = (U, 10 * U)
    for i in range(5):
        core.tick(NOW, ME, acquires=[ask(str(i), 0, cost=costs)])
    reply = core.tick(NOW, ME, acquires=[ask("sixth", 0, cost=costs)])
    # The short window frees it after a second (and a slot), not after a minute.
    assert SECOND <= reply.wake - NOW <= SECOND + 40_000
    assert rids(core.tick(reply.wake, ME).events) == ["sixth"]


def test_defect_a_requeue_after_a_quota_refusal_keeps_its_original_tag():
    core = PoolCore(mirror(), NOW)
    first = core.tick(NOW, ME, acquires=[ask("a", 2_000, tenant="a")]).events[0]
    core.tick(NOW + 1, ME, acquires=[ask(str(i), 2_000, tenant=f"t{i}") for i in range(5)])
    reply = core.tick(
        NOW + SECOND, ME,
        settles=[Settle("a", Outcome.QUOTA, None, 3 * SECOND)],
        acquires=[ask("a2", 2_000, tenant="a", tag=first.tag)],
    )  # fmt: skip
    assert reply.wake == NOW + 4 * SECOND or reply.wake == NOW + 2 * SECOND
    assert core.line.head(2).ask.rid == "a2"
    order = []
    now, ack = NOW + SECOND, reply.mail_seq
    while core.line.waiting:
        now = max(now + 1, reply.wake)
        reply = core.tick(now, Caller("me", mail_ack=ack))
        ack = reply.mail_seq
        order += rids(reply.events)
    assert order[0] == "a2"


def test_defect_cancelled_and_overestimated_work_does_not_count_against_its_tenant():
    core = PoolCore(own(100_000), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 100_000, tenant="x")])
    core.tick(NOW, ME, acquires=[ask(f"h{i}", 5_000, tenant="honest") for i in range(4)])
    core.tick(NOW, ME, cancels=[f"h{i}" for i in range(4)])
    core.tick(NOW, ME, acquires=[ask("other", 5_000, tenant="other")])
    core.tick(NOW, ME, acquires=[ask("h", 5_000, tenant="honest")])
    assert core.line.waiting["h"].tag == core.line.waiting["other"].tag

    estimated = PoolCore(own(100_000), NOW)
    estimated.tick(
        NOW, ME, acquires=[ask("a", 50_000, tenant="over"), ask("b", 50_000, tenant="x")]
    )
    estimated.tick(NOW, ME, settles=[Settle("a", Outcome.SERVED, (0,))])
    estimated.tick(NOW, ME, acquires=[ask("fill", 50_000, tenant="y")])
    reply = estimated.tick(
        NOW, ME, acquires=[ask("c", 100, tenant="over"), ask("d", 100, tenant="z")]
    )
    assert not reply.events
    assert estimated.line.waiting["c"].tag == estimated.line.waiting["d"].tag


def test_work_beyond_the_estimate_counts_against_its_tenant():
    core = PoolCore(own(100_000), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 10_000, tenant="over")])
    core.tick(NOW, ME, settles=[Settle("a", Outcome.SERVED, (100_000 * U,))])
    core.tick(NOW, ME, acquires=[ask("b", 100, tenant="over"), ask("c", 100, tenant="calm")])
    assert core.line.waiting["b"].tag > core.line.waiting["c"].tag
    assert core.line.head(2).ask.rid == "c"


def test_defect_equal_tags_stand_in_order_of_arrival_whatever_their_ids():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 1_000, tenant="f")])
    for rid in ("9", "10", "z", "a"):
        core.tick(NOW, ME, acquires=[ask(rid, 1, tenant=rid)])
    reply = core.tick(NOW + 1, ME, settles=[Settle("full", Outcome.SERVED, (0,))])
    assert rids(reply.events) == ["9", "10", "z", "a"]


# --- granting


def test_an_empty_bucket_may_go_into_debt_but_a_nearly_empty_one_may_not():
    core = PoolCore(mirror(), NOW)  # depth of lane 2: 2 % of 60,000
    assert rids(core.tick(NOW, ME, acquires=[ask("big", 20_000)]).events) == ["big"]
    nearly = core.meter._rate(0)
    until_empty = int(20_000 * U / nearly)
    waits = core.tick(NOW + until_empty - 10_000, ME, acquires=[ask("big2", 20_000)])
    assert not waits.events
    assert waits.wake - (NOW + until_empty) in range(-1, 3)
    assert rids(core.tick(waits.wake, ME).events) == ["big2"]


def test_nobody_passes_a_head_that_does_not_fit():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 600)])
    core.tick(NOW, ME, acquires=[ask("big", 700, lane=1)])
    reply = core.tick(NOW, ME, acquires=[ask("small", 1, lane=1), ask("low", 1, lane=3)])
    assert not reply.events
    assert set(core.line.waiting) == {"big", "small", "low"}


def test_a_more_urgent_lane_goes_first_in_one_batch():
    core = PoolCore(own(), NOW)
    reply = core.tick(NOW, ME, acquires=[ask("low", 600, lane=3), ask("high", 600, lane=1)])
    assert rids(reply.events) == ["high"]


def test_lane_zero_carries_thirty_percent_and_the_excess_enters_lane_one():
    core = PoolCore(own(60_000), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 60_000, lane=1)])
    for i in range(40):
        core.tick(NOW + 1, ME, acquires=[ask(str(i), 1_000, lane=0)])
    assert core.line.count[0] == 18
    assert core.line.count[1] == 22
    core.tick(NOW + 11 * SECOND, ME, acquires=[ask(f"l{i}", 1_000, lane=0) for i in range(5)])
    assert core.line.count[0] == 21  # three tenths of eleven seconds
    core.tick(NOW + 11 * SECOND, ME, cancels=["0"])
    core.tick(NOW + 11 * SECOND, ME, acquires=[ask("again", 1_000, lane=0)])
    assert core.line.count[0] == 21


def test_a_tick_grants_at_most_k_and_wakes_at_once_for_the_rest():
    core = PoolCore(replace(own(), max_grants=3), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 1_000)])
    core.tick(NOW, ME, acquires=[ask(str(i), 1) for i in range(8)])
    reply = core.tick(NOW + 1, ME, settles=[Settle("full", Outcome.SERVED, (0,))])
    assert len(rids(reply.events)) == 3
    assert (reply.wake, reply.owner) == (NOW + 2, "me")


def test_only_the_owner_of_the_head_wakes_on_time_the_others_are_its_backup():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 1_000), ask("mine", 500)])
    mine, yours = core.tick(NOW, ME), core.tick(NOW, YOU)
    assert mine.owner == yours.owner == "me"
    assert yours.wake == mine.wake + 50_000


def test_a_grant_for_another_gateway_lies_in_its_mail_and_nudges_it():
    core = PoolCore(own(), NOW)
    core.tick(NOW, YOU, acquires=[ask("full", 1_000), ask("yours", 500)])
    reply = core.tick(NOW + 1, ME, settles=[Settle("full", Outcome.SERVED, (0,))])
    assert reply.events == []
    assert reply.nudged == ["you"]
    assert rids(core.tick(NOW + 2, YOU).events) == ["yours"]


def test_demand_is_shared_out_by_what_gateways_lately_asked_for():
    core = PoolCore(own(10_000), NOW)
    core.tick(NOW, ME)
    core.tick(NOW, YOU, acquires=[ask("y", 900)])
    assert core.tick(NOW, ME, acquires=[ask("m", 300)]).demand_share_ppm == 250_000
    assert core.tick(NOW + 90 * MINUTE, ME).demand_share_ppm == 0


def test_a_waiter_that_moves_to_another_gateway_is_granted_there():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 1_000), ask("b", 500)])
    core.tick(NOW, YOU, acquires=[ask("b", 500)])
    core.tick(NOW + 1, ME, settles=[Settle("full", Outcome.SERVED, (0,))])
    assert rids(core.tick(NOW + 2, YOU).events) == ["b"]
    assert used(core) == 500


# --- settling


def test_a_refund_goes_into_the_slot_of_the_grant():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 900)])
    core.tick(NOW + 30 * SECOND, ME, settles=[Settle("a", Outcome.SERVED, (100 * U,))])
    assert used(core) == 100
    core.tick(NOW + MINUTE + SECOND, ME)
    assert used(core) == 0  # in a later slot the 800 would have gone below zero, or outlived it
    assert core.meter.level == [0]


def test_a_refund_after_the_slot_is_gone_changes_no_later_charge():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 900)])
    core.tick(NOW + 61 * SECOND, ME, acquires=[ask("b", 500)])
    core.tick(NOW + 62 * SECOND, ME, settles=[Settle("a", Outcome.SERVED, (0,))])
    assert used(core) == 500


def test_more_than_reserved_is_charged_where_it_becomes_known():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 100)])
    core.tick(NOW + 30 * SECOND, ME, settles=[Settle("a", Outcome.SERVED, (400 * U,))])
    core.tick(NOW + 61 * SECOND, ME)
    assert used(core) == 300


def test_settling_twice_changes_nothing_refusals_included():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 100), ask("b", 100)])
    refusal = Settle("a", Outcome.QUOTA, None, 10 * SECOND)
    core.tick(NOW, ME, settles=[refusal])
    first = (core.meter.factor, core.meter.blocked_until, used(core))
    assert first == (980_000, NOW + 10 * SECOND, 100)
    core.tick(NOW + 900_000, ME, settles=[refusal])
    assert (core.meter.factor, core.meter.blocked_until, used(core)) == first
    core.tick(NOW + 2 * SECOND, ME, settles=[refusal])
    assert core.meter.factor == 982_000  # risen, not cut again


def test_a_refused_call_keeps_its_request_and_gets_its_tokens_back():
    spec = pool_spec(name="p", limits={"rpm": 10, "tpm": 1_000}, shape=Shape.OWN, because="p")
    core = PoolCore(spec, NOW)
    core.tick(NOW, ME, acquires=[ask("a", 0, cost=(U, 900 * U))])
    core.tick(NOW, ME, settles=[Settle("a", Outcome.RAMP)])
    assert core.meter.read() == (U, 0)
    assert core.meter.factor == 1_000_000  # a ramp refusal never cuts the ceiling


def test_the_factor_falls_at_most_once_a_second_and_rises_by_a_thousandth_per_second():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask(str(i), 1) for i in range(100)])
    for i in range(5):
        core.tick(NOW + i, ME, settles=[Settle(str(i), Outcome.QUOTA)])
    assert core.meter.factor == 980_000
    core.tick(NOW + 3 * SECOND, ME)
    assert core.meter.factor == 983_000
    core.tick(NOW + 3 * SECOND, ME, settles=[Settle("9", Outcome.QUOTA)])
    assert core.meter.factor == 963_340
    for i in range(10, 60):
        core.tick(NOW + i * SECOND, ME, settles=[Settle(str(i), Outcome.QUOTA)])
    assert core.meter.factor == 500_000
    core.tick(NOW + 60 * MINUTE, ME)
    assert core.meter.factor == 1_000_000


def test_one_bad_retry_after_blocks_a_pool_for_five_minutes_at_most():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1), ask("b", 1)])
    core.tick(NOW, ME, settles=[Settle("a", Outcome.QUOTA, None, 86_400 * SECOND)])
    assert core.meter.blocked_until == NOW + 300 * SECOND
    core.tick(NOW, ME, settles=[Settle("b", Outcome.QUOTA, None, SECOND)])
    assert core.meter.blocked_until == NOW + 300 * SECOND  # max(old, new)


def test_cancelling_an_unsent_grant_gives_everything_back_requests_included():
    spec = pool_spec(name="p", limits={"rpm": 10, "tpm": 1_000}, shape=Shape.OWN, because="p")
    core = PoolCore(spec, NOW)
    core.tick(NOW, ME, acquires=[ask("a", 0, cost=(U, 900 * U))])
    core.tick(NOW, ME, cancels=["a"])
    assert core.blank


def test_an_ended_lease_frees_the_permit_but_not_the_tokens():
    core = PoolCore(own(concurrency=1), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 10)])
    core.tick(NOW + 50 * SECOND, ME, adopts=[Adopt("a")])
    core.tick(NOW + 119 * SECOND, ME)
    assert "a" in core.leases.held
    core.tick(NOW + 160 * SECOND, ME, acquires=[ask("b", 500)])
    core.tick(NOW + 171 * SECOND, ME)
    assert "a" not in core.leases.held
    core.tick(NOW + 172 * SECOND, ME, settles=[Settle("a", Outcome.SERVED, (0,))])
    assert used(core) == 500


# --- refusing


def test_what_the_provider_forbids_beyond_the_deadline_is_refused_at_once():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1), ask("waits", 1_000, deadline_in=60 * SECOND)])
    reply = core.tick(
        NOW, ME, settles=[Settle("a", Outcome.QUOTA, None, 200 * SECOND)],
        acquires=[ask("b", 1, deadline_in=60 * SECOND), ask("c", 1, deadline_in=300 * SECOND)],
    )  # fmt: skip
    assert rids(reply.events, Shed) == ["b", "waits"]
    assert [event.eta for event in reply.events] == [200 * SECOND] * 2
    assert set(core.line.waiting) == {"c"}


def test_a_wait_beyond_the_deadline_is_told_at_once_when_nothing_can_be_given_back():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1_000)])
    waits = core.tick(NOW, ME, acquires=[ask("b", 500, deadline_in=5 * SECOND)])
    assert not waits.events  # "a" may still be settled to less
    core.tick(NOW, ME, cancels=["b"], settles=[Settle("a", Outcome.SERVED)])
    reply = core.tick(NOW, ME, acquires=[ask("c", 500, deadline_in=5 * SECOND)])
    assert rids(reply.events, Shed) == ["c"]
    assert MINUTE <= reply.events[0].eta <= MINUTE + 200_000


def test_a_backlog_beyond_the_deadline_sheds_by_the_work_ahead():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 20_000)])
    core.tick(NOW, ME, acquires=[ask(str(i), 5_000) for i in range(4)])
    reply = core.tick(NOW, ME, acquires=[ask("late", 100, deadline_in=19 * SECOND)])
    shed = reply.events[0]
    assert isinstance(shed, Shed)
    assert shed.eta == 20 * SECOND
    assert shed.because == "p.limits.tpm"
    urgent = core.tick(NOW, ME, acquires=[ask("urgent", 100, lane=1, deadline_in=19 * SECOND)])
    assert not rids(urgent.events, Shed)


def test_a_hogs_backlog_does_not_shed_the_calls_of_others():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 20_000, tenant="x")])
    core.tick(NOW, ME, acquires=[ask(str(i), 5_000, tenant="hog") for i in range(50)])
    reply = core.tick(
        NOW, ME,
        acquires=[ask("calm", 100, tenant="calm", deadline_in=30 * SECOND),
                  ask("greedy", 100, tenant="hog", deadline_in=30 * SECOND)],
    )  # fmt: skip
    assert rids(reply.events, Shed) == ["greedy"]
    assert "calm" in core.line.waiting


def test_a_full_line_sheds_and_says_so():
    core = PoolCore(replace(own(), max_waiting=2), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 1_000)])
    reply = core.tick(NOW, ME, acquires=[ask(str(i), 1) for i in range(3)])
    assert rids(reply.events, Shed) == ["2"]
    assert reply.events[0].full
    assert reply.events[0].because == "p"


def test_a_mean_hold_time_predicts_the_wait_for_a_permit():
    core = PoolCore(pool_spec(name="p", limits={}, concurrency=1, because="p"), NOW)

    def free(rid, **changes):
        return ask(rid, 0, cost=(), **changes)

    core.tick(NOW, ME, acquires=[free("a")])
    core.tick(NOW + 10 * SECOND, ME, settles=[Settle("a", Outcome.SERVED)])
    core.tick(NOW + 10 * SECOND, ME, acquires=[free(str(i)) for i in range(4)])
    reply = core.tick(NOW + 10 * SECOND, ME, acquires=[free("late", deadline_in=20 * SECOND)])
    assert rids(reply.events, Shed) == ["late"]
    assert reply.events[0].eta == 30 * SECOND
    assert reply.events[0].because == "p.concurrency"


@pytest.mark.parametrize("cost", [(), (1, 2), (-1,)])
def test_a_cost_of_another_shape_is_a_clear_error(cost):
    core = PoolCore(own(), NOW)
    with pytest.raises(ValueError, match="pool 'p' needs 1 amounts"):
        core.tick(NOW, ME, acquires=[ask("a", 0, cost=cost)])


# --- places


def test_a_kept_place_works_once_and_never_in_a_higher_lane():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 20_000)])
    core.tick(NOW, ME, acquires=[ask("b", 5_000, tenant="b")])
    shed = core.tick(NOW, ME, acquires=[ask("s", 5_000, deadline_in=1, place_key="k")]).events[0]
    assert isinstance(shed, Shed)
    core.tick(NOW, ME, acquires=[ask("c", 5_000, tenant="c")])
    core.tick(NOW + SECOND, ME, acquires=[ask("higher", 5_000, lane=1, place_key="k")])
    assert core.line.places  # ignored, and not used up
    core.tick(NOW + SECOND, ME, acquires=[ask("back", 5_000, place_key="k")])
    assert core.line.waiting["back"].tag == shed.tag
    assert not core.line.places
    core.tick(NOW + SECOND, ME, acquires=[ask("replay", 5_000, place_key="k")])
    assert core.line.waiting["replay"].tag > shed.tag


def test_coming_back_in_a_lower_lane_gives_the_place_up():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 20_000, tenant="x"), ask("b", 5_000, tenant="b")])
    core.tick(NOW, ME, acquires=[ask("s", 5_000, deadline_in=1, place_key="k")])
    assert core.line.places
    core.tick(NOW, ME, acquires=[ask("low", 5_000, lane=3, place_key="k")])
    assert not core.line.places
    core.tick(NOW, ME, acquires=[ask("n", 5_000)])
    assert core.line.waiting["n"].tag == core.line.v[2]


def test_a_replayed_ticket_whose_place_was_used_gains_nothing():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 20_000, tenant="x"), ask("b", 5_000)])
    shed = core.tick(NOW, ME, acquires=[ask("s", 5_000, deadline_in=1, place_key="k")]).events[0]
    core.tick(NOW, ME, acquires=[ask("r1", 100, tag=shed.tag, ticket=True, place_key="k")])
    core.tick(NOW, ME, acquires=[ask("r2", 100, tag=shed.tag, ticket=True, place_key="k")])
    assert core.line.waiting["r1"].tag == shed.tag
    assert core.line.waiting["r2"].tag > shed.tag


def test_an_unused_place_gives_its_span_back_when_it_expires():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 20_000, tenant="x"), ask("big", 59_000, tenant="b")])
    shed = core.tick(NOW, ME, acquires=[ask("s", 5_000, deadline_in=1, place_key="k")]).events[0]
    assert core.line._finish[2]["t"] > core.line.v[2]
    assert core.line.places["k"].expires == NOW + shed.eta + 120 * SECOND
    core.line.expire_places(NOW + shed.eta + 120 * SECOND)
    assert not core.line.places
    assert "t" not in core.line._finish[2]


def test_a_late_waiter_with_a_key_keeps_its_place():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 1_000)])
    core.tick(
        NOW, ME, acquires=[ask("b", 500, place_key="k", tenant="b"), ask("c", 500, tenant="c")]
    )
    tag = core.line.waiting["b"].tag
    late = core.tick(NOW + SECOND, ME, lates=["b", "unknown"]).events
    assert rids(late, Late) == ["b"]
    core.tick(NOW + 2 * SECOND, ME, acquires=[ask("back", 500, place_key="k", tenant="b")])
    assert core.line.waiting["back"].tag == tag
    assert core.line.head(2).ask.rid == "back"


def test_places_are_bounded_and_the_first_to_expire_makes_room():
    core = PoolCore(mirror(), NOW)
    for i in range(10_010):
        core.line.keep(f"k{i}", Place(NOW, i, 2, "t", 1, NOW + i + 1))
    assert len(core.line.places) == 10_000
    assert "k9" not in core.line.places
    assert "k10" in core.line.places
    for i in range(1_000):  # one key again and again: the order of expiry is bounded too
        core.line.keep("k10", Place(NOW, i, 2, "t", 1, NOW + 10**9 + i))
    assert len(core.line._place_ends) <= 30_000


# --- budgets and pools without a line


def budget(limit, **options):
    return pool_spec(
        name="b", limits={"tokens_day": limit}, queue=False, because="agents.a.budget", **options
    )


DAY = 86_400 * SECOND
MIDNIGHT = NOW - NOW % DAY


def test_a_pool_without_a_line_refuses_at_once_with_the_true_wait():
    core = PoolCore(own(queue=False), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 800)])
    shed = core.tick(NOW + 10 * SECOND, ME, acquires=[ask("b", 300)]).events[0]
    assert isinstance(shed, Shed)
    assert shed.because == "p.limits.tpm"
    early = NOW + 10 * SECOND + shed.eta - 1
    assert rids(core.tick(early, ME, acquires=[ask("c", 300)]).events, Shed) == ["c"]
    assert rids(core.tick(early + 1, ME, acquires=[ask("d", 300)]).events) == ["d"]


def test_a_budget_is_spent_until_its_own_midnight():
    offset = 2 * 3_600 * SECOND
    core = PoolCore(budget(100, calendar_offset=offset), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 80)])
    shed = core.tick(NOW, ME, acquires=[ask("b", 30)]).events[0]
    midnight = (NOW + offset) // DAY * DAY + DAY - offset
    assert shed.eta == midnight - NOW
    assert rids(core.tick(midnight - 1, ME, acquires=[ask("c", 30)]).events, Shed) == ["c"]
    assert rids(core.tick(midnight, ME, acquires=[ask("d", 30)]).events) == ["d"]
    assert core.meter.level == [30 * U]


def test_yesterdays_refund_does_not_reach_todays_budget():
    core = PoolCore(budget(100), MIDNIGHT + DAY - SECOND)
    core.tick(MIDNIGHT + DAY - SECOND, ME, acquires=[ask("a", 80)])
    core.tick(MIDNIGHT + DAY, ME, acquires=[ask("b", 90)])
    core.tick(MIDNIGHT + DAY + 1, ME, settles=[Settle("a", Outcome.SERVED, (10 * U,))])
    assert core.meter.level == [90 * U]


def test_a_raised_budget_frees_its_holder_at_once_and_a_lowered_one_keeps_what_was_spent():
    core = PoolCore(budget(100, revision=1), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 90)])
    assert rids(core.tick(NOW, ME, acquires=[ask("b", 80)]).events, Shed) == ["b"]
    core.reconfigure(NOW, budget(300, revision=2))
    assert rids(core.tick(NOW, ME, acquires=[ask("c", 80)]).events) == ["c"]
    core.reconfigure(NOW, budget(150, revision=3))
    assert rids(core.tick(NOW, ME, acquires=[ask("d", 10)]).events, Shed) == ["d"]


def test_a_budget_added_later_counts_from_its_own_start():
    core = PoolCore(own(10_000, queue=False), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 5_000)])
    both = pool_spec(
        name="p", limits={"tpm": 10_000, "tokens_day": 100}, shape=Shape.OWN, queue=False,
        because="p", revision=1,
    )  # fmt: skip
    core.reconfigure(NOW + 1, both)
    assert rids(core.tick(NOW + 1, ME, acquires=[ask("b", 0, cost=(90 * U, 90 * U))]).events) == [
        "b"
    ]
    assert core.meter.read() == (5_090 * U, 90 * U)


def test_a_budget_cut_into_a_daily_from_a_monthly_one_forgets_the_month():
    core = PoolCore(
        pool_spec(name="b", limits={"tokens_month": 1_000}, queue=False, because="b"), NOW
    )
    core.tick(NOW, ME, acquires=[ask("a", 900)])
    core.reconfigure(NOW, budget(500, revision=1))
    assert rids(core.tick(NOW, ME, acquires=[ask("b", 400)]).events) == ["b"]


# --- modes


def test_shadow_grants_all_and_counts_what_would_have_waited():
    core = PoolCore(replace(own(), mode=Mode.SHADOW), NOW)
    reply = core.tick(NOW, ME, acquires=[ask(str(i), 600) for i in range(4)])
    assert len(rids(reply.events)) == 4
    assert core.would_have_waited == 3
    assert core.meter.level == [1_000 * U]  # a surge's debt does not outlive its window
    core.tick(NOW, ME, acquires=[ask("huge", 5_000)])
    assert core.would_have_waited == 4
    core.tick(NOW + 2 * MINUTE, ME, acquires=[ask("calm", 1)])
    assert core.would_have_waited == 4


def test_switching_a_pool_off_lets_its_waiters_go():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1_000), ask("b", 1_000)])
    core.reconfigure(NOW, replace(own(), mode=Mode.OFF, revision=1))
    assert rids(core.tick(NOW, ME).events) == ["b"]
    assert "c" in rids(core.tick(NOW, ME, acquires=[ask("c", 10**6)]).events)
    assert "c" not in core.leases.held


# --- reloads


def test_lowering_a_limit_tells_waiters_that_can_never_fit_any_more():
    core = PoolCore(own(1_000), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1_000), ask("big", 900), ask("small", 100)])
    core.reconfigure(NOW, own(500, revision=1))
    reply = core.tick(NOW, ME)
    assert rids(reply.events, Never) == ["big"]
    assert set(core.line.waiting) == {"small"}


def test_a_new_rolling_meter_starts_full_where_calls_can_wait_for_it():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 10)])
    spec = pool_spec(name="p", limits={"rpm": 60, "tpm": 60_000}, because="p", revision=1)
    core.reconfigure(NOW, spec)
    assert core.meter.read() == (60 * U, 10 * U)
    reply = core.tick(NOW, ME, acquires=[ask("b", 0, cost=(U, 10 * U))])
    assert not reply.events
    assert reply.wake - NOW <= 3 * SECOND


def test_other_leases_and_spreads_take_effect_on_a_reload():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 10)])
    shorter = mirror(revision=1, overrides=Overrides(lease=10 * SECOND, spread=0))
    core.reconfigure(NOW + SECOND, shorter)
    core.tick(NOW + 2 * SECOND, ME, acquires=[ask("b", 10)])
    core.tick(NOW + 3 * SECOND, ME, settles=[Settle("a", Outcome.SERVED)])
    core.tick(NOW + 13 * SECOND, ME)
    assert not core.leases.held
    assert core.meter.logs[0].keep == MINUTE


# --- lost state


def test_a_cold_start_holds_back_what_the_provider_may_still_count():
    core = PoolCore(mirror(), NOW, cold=True)
    spec = core.spec.dimensions[0]
    assert core.meter.read() == (spec.cap[1],)
    reply = core.tick(NOW, ME, acquires=[ask("a", 1_000)])
    assert not reply.events
    now, granted, ack = NOW, 0, 0
    while now < NOW + MINUTE:
        now = max(now + 1, reply.wake) if reply.wake else now + SECOND
        number = str(now)
        reply = core.tick(now, Caller("me", mail_ack=ack), acquires=[ask(number, 1_000)])
        ack = reply.mail_seq
        granted += len(rids(reply.events))
    assert granted <= 60  # never more than the limit in any window, the unknown past included


def test_a_clock_that_stepped_back_is_a_cold_start_that_keeps_order_and_leases():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 20_000), ask("b", 5_000, tenant="b"),
                                 ask("c", 5_000, tenant="c", deadline_in=MINUTE)])  # fmt: skip
    core.tick(NOW, ME, acquires=[ask("s", 9, deadline_in=1, place_key="k", tenant="d")])
    reply = core.tick(NOW - 10 * MINUTE, ME)
    assert reply.epoch == 2
    assert core.now == NOW - 10 * MINUTE
    assert list(core.leases.held) == ["a"]
    assert core.line.waiting["c"].deadline == NOW - 9 * MINUTE
    assert core.meter.read() == (core.spec.dimensions[0].cap[1],)
    core.tick(NOW - 10 * MINUTE, ME, settles=[Settle("a", Outcome.SERVED, (0,))])
    assert core.meter.read() == (core.spec.dimensions[0].cap[1],)  # its charge is not in the books
    core.tick(NOW - 10 * MINUTE, ME, acquires=[ask("new", 100, tenant="new")])
    assert core.line.head(2).ask.rid == "b"


def test_a_small_step_back_is_ignored():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME)
    assert core.tick(NOW - 900_000, ME).epoch == 1
    assert core.now == NOW


def test_a_version_that_jumped_back_is_a_failover_and_starts_cold():
    core = PoolCore(mirror(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 10)])
    reply = core.tick(NOW + 1, Caller("me", seen_epoch=1, seen_version=500))
    assert reply.epoch == 2
    assert core.meter.read() == (core.spec.dimensions[0].cap[1],)


def test_adopted_work_is_charged_once_and_settled_like_any_other():
    core = PoolCore(own(), NOW)
    lease = Adopt("old", cost=(300 * U,), charge=True, lane=2, tenant="t")
    core.tick(NOW, ME, adopts=[lease])
    core.tick(NOW + 1, ME, adopts=[lease])
    assert used(core) == 300
    core.tick(NOW + 2, ME, settles=[Settle("old", Outcome.SERVED, (100 * U,))])
    assert used(core) == 100


def test_adopting_without_a_charge_holds_a_permit_and_refunds_nothing():
    core = PoolCore(own(concurrency=1), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 500)])
    core.tick(NOW, ME, settles=[Settle("a", Outcome.SERVED)], adopts=[Adopt("x", cost=(400 * U,))])
    assert list(core.leases.held) == ["x"]
    core.tick(NOW, ME, settles=[Settle("x", Outcome.SERVED, (0,))])
    assert used(core) == 500


def test_adopting_a_waiter_takes_it_out_of_the_line():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 1_000), ask("b", 10)])
    core.tick(NOW, ME, adopts=[Adopt("b", cost=(10 * U,), charge=True), Adopt("nobody")])
    assert not core.line.waiting
    assert set(core.leases.held) == {"a", "b"}


# --- foreign use


def test_foreign_use_narrows_the_window_and_fades_to_nothing():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, acquires=[ask("a", 100)], signals=[(500 * U,)])
    reply = core.tick(NOW, ME, acquires=[ask("b", 500)])
    assert not reply.events
    assert reply.wake <= NOW + SECOND  # room grows by itself: look again
    core.tick(NOW + 30 * SECOND, ME)
    assert core.meter.foreign[0] == pytest.approx(250 * U, rel=0.01)
    core.tick(NOW + 20 * MINUTE, ME)
    assert core.meter.foreign == [0]


def test_a_smaller_signal_does_not_undo_a_larger_one():
    core = PoolCore(own(), NOW)
    core.tick(NOW, ME, signals=[(500 * U,)])
    core.tick(NOW, ME, signals=[(100 * U,)])
    assert core.meter.foreign == [500 * U]


def test_profiles_and_shapes_of_the_table_reach_the_core():
    bucket = pool_spec(name="p", limits={"tpm": 1_000}, shape=Shape.BUCKET, because="p")
    core = PoolCore(bucket, NOW)
    reply = core.tick(
        NOW, ME, acquires=[ask("a", 600, lane=2), ask("b", 300, lane=1), ask("c", 1, lane=3)]
    )
    assert rids(reply.events) == ["b"]  # 60 % depth of tier 2 does not hold 600 more
    upfront = pool_spec(name="p", limits={"tpm": 1_000}, profile=Profile.UPFRONT_MAX, because="p")
    assert PoolCore(upfront, NOW).spec.dimensions[0].cap[1] == 1_000 * U


def test_defect_a_place_taken_up_again_beside_its_former_holder_stops_nobody():
    # The former holder lies in the heap until it comes to its top: equal tag, equal number.
    core = PoolCore(own(1_000), NOW)
    core.tick(NOW, ME, acquires=[ask("full", 1_000)])
    kept = ask("first", 100, tenant="t")
    again = ask("second", 100, tenant="t")
    core.tick(NOW, ME, acquires=[replace(kept, place_key="k"), ask("other", 50, tenant="t")])
    core.tick(NOW + 10, ME, lates=["first"])
    core.tick(NOW + 20, ME, acquires=[replace(again, place_key="k")])
    reply = core.tick(NOW + 30, ME, settles=[Settle("full", Outcome.SERVED, (0,))])
    assert rids(reply.events) == ["second", "other"]
