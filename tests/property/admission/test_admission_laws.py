"""The laws of `admission.md` §15 over random histories; hypothesis reports the seed that fails."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import forecast
from gateway.admission.core import Admit, Ask, Caller, Late, Never, Outcome, PoolCore, Settle, Shed
from gateway.admission.profiles import Shape, pool_spec
from tests.property.admission.world import (
    MINUTE,
    SECOND,
    START,
    U,
    World,
    check_books,
    cost_for,
    jain,
    minute_spec,
    random_spec,
    state,
)  # fmt: skip

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=25, deadline=None)


def world_of(seed: int, **changes) -> World:
    rng = random.Random(seed)
    return World(rng=rng, spec=random_spec(rng, dead=10**12, lease=10**12, **changes))


@given(seeds)
@few
def test_books_balance_and_nothing_is_negative(seed):
    world = world_of(seed)
    for _ in range(120):
        world.random_step(more=True, refusals=True)
        check_books(world.core)


@given(seeds)
@few
def test_no_true_sliding_window_ever_exceeds_its_cap(seed):
    world = world_of(seed)
    for _ in range(120):
        world.random_step(refusals=True)
        for i, dim in enumerate(world.spec.dimensions):
            if dim.cap[0]:
                assert world.used(i, dim) <= dim.cap[0], dim.name


@given(seeds)
@few
def test_no_calendar_day_ever_exceeds_its_limit(seed):
    rng = random.Random(seed)
    spec = pool_spec(name="p", limits={"tokens_day": 50_000}, queue=False, because="b")
    world = World(rng=rng, spec=spec)
    for _ in range(100):
        world.now += int(rng.expovariate(1) * 3600 * SECOND)
        world.random_step()
        day = 86_400 * SECOND
        today = sum(c.cost[0] for c in world.charges if c.at // day == world.now // day)
        assert today <= spec.dimensions[0].limit


@given(seeds)
@few
def test_nobody_overtakes_a_higher_lane_or_an_older_tag(seed):
    world = world_of(seed)
    for _ in range(150):
        world.random_step(refusals=True)
        for rid in world.last:
            grant = world.core.leases.held.get(rid)
            if grant is None:
                continue
            for waiter in world.core.line.waiting.values():
                new = waiter.ask.rid not in world.seen_waiting
                if new and waiter.lane == 0 and world.asks[rid].lane == 0:
                    continue  # both asked for lane 0 at once; the first overflowed into lane 1
                assert waiter.lane >= grant.lane, "a more urgent lane still waits"
                if waiter.lane == grant.lane:
                    assert waiter.tag >= grant.tag, "an older tag still waits"


@given(seeds)
@few
def test_a_tenants_calls_in_one_lane_are_granted_in_order_of_arrival(seed):
    world = world_of(seed)
    world.gateways = 1  # so that events come in the order of granting
    last = {}
    for step in range(200):
        if step < 150:
            world.random_step(more=True, refusals=True)
        else:
            world.now += SECOND
            world.tick()
        for rid in world.last:
            ask = world.asks[rid]
            key = (ask.lane, ask.tenant)
            if ask.lane:  # lane 0 may overflow into lane 1, behind what it already sent there
                assert last.get(key, 0) < int(rid[1:])
                last[key] = int(rid[1:])


@given(seeds)
@few
def test_the_head_that_waits_really_does_not_fit(seed):
    world = world_of(seed, max_grants=10**6)
    for _ in range(120):
        reply = world.random_step()
        heads = [head for lane in range(4) if (head := world.core.line.head(lane))]
        if heads:
            assert forecast.wait(world.core, heads[0].lane, heads[0].ask.cost) > 0
            assert reply.blocked_by


@given(seeds)
@few
def test_every_waiter_has_a_wake_and_the_line_drains_in_bounded_time(seed):
    world = world_of(seed)
    for _ in range(100):
        reply = world.random_step()
        assert bool(reply.wake) == bool(world.core.line.waiting)
        if world.spec.concurrency:  # whoever is in flight leaves, else only leases end
            for rid in list(world.open):
                world.tick(settles=[world.settle(rid)])
    waiting = list(world.core.line.waiting.values())
    if world.spec.concurrency:
        world.core.reconfigure(world.now, replace(world.spec, concurrency=0, revision=1))
    work = max(
        (
            sum(w.ask.cost[i] for w in waiting) * d.window // min(d.cap[3] or d.limit, d.limit)
            for i, d in enumerate(world.spec.dimensions)
            if not d.calendar
        ),
        default=0,
    )
    began = world.now
    world.drain()
    # Work over the slowest rate the shape allows, one window of debt, and slot rounding.
    assert world.now - began <= work * 1.3 + 2 * MINUTE


@given(seeds)
@few
def test_a_quiet_window_returns_everything_to_exactly_nothing(seed):
    world = world_of(seed)
    for _ in range(100):
        world.random_step(more=True, refusals=True)
    for rid in list(world.core.line.waiting):
        world.tick(cancels=[rid])
    for rid in list(world.open):
        world.tick(settles=[Settle(rid, Outcome.SERVED)])
    world.now += 86_400 * SECOND * 2
    world.tick()
    core = world.core
    assert core.blank
    assert core.meter.level == [0] * len(world.spec.dimensions)
    assert core.meter.sums == [0] * len(world.spec.dimensions)
    assert core.line.backlog == [0] * 4
    assert not any(log.slots for log in core.meter.logs)
    assert [core.line.tenants(lane) for lane in range(4)] == [0] * 4


@given(seeds)
@few
def test_any_batch_sent_twice_changes_nothing(seed):
    world = world_of(seed, max_grants=10**6)
    rng = world.rng
    twice = PoolCore(world.spec, world.now)
    for _ in range(80):
        world.now += int(rng.expovariate(1) * 200_000)
        batch = {
            "acquires": tuple(world.ask() for _ in range(rng.choice([0, 1, 3]))),
            "cancels": list(world.core.line.waiting)[3:4],
        }
        if world.open and rng.random() < 0.5:
            rid = rng.choice(list(world.open))
            world.open.pop(rid)
            batch["settles"] = [Settle(rid, rng.choice(list(Outcome)), None, 10_000)]
        gateway = f"g{rng.randrange(3)}"
        caller = world.caller(gateway)
        first = world.tick(gateway, **batch)
        world.core.tick(world.now, caller)
        lost = twice.tick(world.now, caller, **batch)
        again = twice.tick(world.now, caller, **batch)
        assert lost.events == first.events
        assert state(world.core) == state(twice)
        granted = {event.rid for event in first.events if isinstance(event, Admit)}
        assert granted <= {event.rid for event in again.events if isinstance(event, Admit)}


@given(seeds)
@few
def test_the_short_ways_decide_as_a_tick_decides(seed):
    world = world_of(seed)
    short, rng, ack = PoolCore(world.spec, world.now), world.rng, 0
    for _ in range(200):
        world.now += int(rng.expovariate(1) * rng.choice([5_000, 200_000, 2_000_000]))
        if world.open and rng.random() < 0.4:
            done = world.settle(rng.choice(list(world.open)), more=True)
            world.tick(settles=[done])
            if short.line.waiting:
                ack = short.tick(world.now, Caller("g0", mail_ack=ack), settles=[done]).mail_seq
            else:
                short.settle(world.now, done)
        else:
            ask = world.ask(lane=rng.randrange(1, 4))
            reply = world.tick(acquires=(ask,))
            admit = short.grant(world.now, ask)
            if admit is None:
                other = short.tick(world.now, Caller("g0", mail_ack=ack), acquires=(ask,))
                ack = other.mail_seq
                assert other.events == reply.events
                assert (other.wake, other.blocked_by) == (reply.wake, reply.blocked_by)
            else:
                assert reply.events == [admit]
        assert state(world.core) == state(short)


@given(seeds)
@few
def test_cancelling_random_waiters_keeps_the_order_of_the_rest(seed):
    world = world_of(seed)
    world.spec = replace(world.spec, concurrency=0)
    world.core = PoolCore(world.spec, world.now)
    world.gateways = 1  # so that events come in the order of granting
    for _ in range(6):
        world.tick(acquires=tuple(world.ask() for _ in range(10)))
    waiting = list(world.core.line.waiting)
    gone = set(world.rng.sample(waiting, k=len(waiting) // 3))
    other = copy.deepcopy(world)
    other.tick(cancels=sorted(gone))
    rest = [rid for rid in world.drain() if rid not in gone]
    assert [rid for rid in other.last + other.drain() if rid in set(rest)][-len(rest) :] == rest


@given(seeds)
@few
def test_concurrency_is_never_exceeded_and_heals_when_leases_end(seed):
    rng = random.Random(seed)
    lease = 5 * SECOND
    spec = pool_spec(name="p", limits={}, concurrency=4, because="p")
    world = World(rng=rng, spec=replace(spec, lease=lease, dead=10**12))
    for _ in range(100):
        world.now += int(rng.expovariate(1) * SECOND)
        settles = []
        for rid in [rid for rid in world.open if rid not in world.core.leases.held]:
            world.open.pop(rid)
        if world.open and rng.random() < 0.5:
            settles = [Settle(rng.choice(list(world.open)), Outcome.SERVED)]
        world.tick(
            acquires=tuple(world.ask(cost=()) for _ in range(rng.randrange(3))), settles=settles
        )
        assert len(world.core.leases.held) <= 4
    began, waiting = world.now, len(world.core.line.waiting)
    world.drain()
    assert world.now - began <= (waiting // 4 + 1) * lease


@pytest.mark.parametrize("weights", [range(1, 9), (1, 1, 1, 1), (1, 8)])
def test_tenants_share_by_weight_under_saturation(weights):
    spec = minute_spec(tpm=600_000)
    core, now, number = PoolCore(spec, START), START, 0
    rng = random.Random(7)
    served = dict.fromkeys(weights, 0)
    weights = list(weights)
    pending = {i: 0 for i, _ in enumerate(weights)}
    owner = {}
    share = [0] * len(weights)
    ack = 0
    while now < START + 4 * MINUTE:
        acquires = []
        for i, weight in enumerate(weights):
            while pending[i] < 4 * weight:
                number += 1
                pending[i] += 1
                owner[str(number)] = i
                tokens = rng.randrange(100, 2_000)
                acquires.append(
                    Ask(rid=str(number), lane=2, tenant=f"t{i}", weight=weight, deadline_in=10**12,
                        cost=cost_for(spec, tokens))
                )  # fmt: skip
        reply = core.tick(now, Caller("g", mail_ack=ack), acquires=acquires)
        ack = reply.mail_seq
        done = []
        for event in reply.events:
            assert isinstance(event, Admit)
            i = owner.pop(event.rid, None)
            if i is not None:
                pending[i] -= 1
                share[i] += core.leases.held[event.rid].cost[0]
                done.append(Settle(event.rid, Outcome.SERVED))
        core.tick(now, Caller("g", mail_ack=ack), settles=done)
        now = max(now + 1, reply.wake) if not done else now + 1
    assert served
    assert jain(got / weight for got, weight in zip(share, weights, strict=True)) >= 0.999


@given(seeds)
@few
def test_a_hog_gets_no_more_than_its_share_while_others_wait(seed):
    rng = random.Random(seed)
    spec = minute_spec(tpm=600_000)
    world = World(rng=rng, spec=spec)
    hog = [
        world.ask(lane=1, tenant="hog", weight=1, cost=cost_for(spec, 1_000)) for _ in range(150)
    ]
    world.tick(acquires=tuple(hog))
    calm = [
        world.ask(lane=1, tenant="calm", weight=1, cost=cost_for(spec, 1_000)) for _ in range(50)
    ]
    world.tick(acquires=tuple(calm))
    order = [rid for rid in world.drain() if rid in {a.rid for a in calm} | {a.rid for a in hog}]
    last = max(order.index(a.rid) for a in calm if a.rid in order)
    between = order[: last + 1]
    hogged = sum(rid in {a.rid for a in hog} for rid in between)
    assert hogged <= len(between) - hogged + 2


@given(seeds)
@few
def test_lost_replies_and_resends_grant_everybody_exactly_once(seed):
    rng = random.Random(seed)
    spec = replace(minute_spec(tpm=2_000_000), dead=10**12)
    world = World(rng=rng, spec=spec)
    core, got, acks = world.core, {}, {}
    unheard = {f"g{i}": {} for i in range(3)}
    for _ in range(60):
        world.now += int(rng.expovariate(1) * 300_000)
        name = f"g{rng.randrange(3)}"
        for _ in range(rng.choice([0, 1, 3])):
            ask = world.ask(cost=cost_for(spec, rng.randrange(1, 40_000)))
            unheard[name][ask.rid] = ask
        reply = core.tick(world.now, Caller(name, mail_ack=acks.get(name, 0)),
                          acquires=list(unheard[name].values()))  # fmt: skip
        if rng.random() < 0.5:
            continue  # the reply is lost, the same is sent again
        acks[name] = reply.mail_seq
        for event in reply.events:
            assert isinstance(event, Admit)
            got.setdefault(event.rid, 0)
            unheard[name].pop(event.rid, None)
    for _ in range(10_000):
        if not any(unheard.values()):
            break
        wakes = []
        for name, asks in unheard.items():
            reply = core.tick(world.now, Caller(name, mail_ack=acks.get(name, 0)),
                              acquires=list(asks.values()))  # fmt: skip
            acks[name] = reply.mail_seq
            wakes.append(reply.wake)
            for event in reply.events:
                got.setdefault(event.rid, 0)
                asks.pop(event.rid, None)
        world.now = max([world.now + 1, *[min(w, world.now + SECOND) for w in wakes if w]])
    assert set(got) == set(world.asks)
    assert set(core.leases.held) == set(world.asks)
    charged = sum(a.cost[0] for a in world.asks.values())
    assert sum(g.cost[0] for g in core.leases.held.values()) == charged


@given(seeds)
@few
def test_requeue_and_kept_places_stand_before_everybody_who_came_later(seed):
    rng = random.Random(seed)
    spec = replace(minute_spec(), dead=10**12)
    world = World(rng=rng, spec=spec)
    big = cost_for(spec, 4_000)
    first = world.ask(lane=2, cost=big, tenant="a")
    reply = world.tick(acquires=(first,))
    assert isinstance(reply.events[0], Admit)
    shed = world.ask(lane=2, cost=big, tenant="b", deadline_in=1, place_key="k")
    later = [world.ask(lane=2, cost=big, tenant=f"c{i}") for i in range(rng.randrange(1, 8))]
    world.tick(acquires=(later[0],))
    world.now += 1
    refusal = world.tick(acquires=(shed,)).events[0]
    assert isinstance(refusal, Shed)
    assert refusal.eta > 0
    world.tick(acquires=tuple(later[1:]))
    # The provider refuses the first: settled and asked again in one batch, at its old tag.
    again = replace(first, rid="again", tag=reply.events[0].tag)
    back = replace(shed, rid="back", deadline_in=10**12)
    world.tick(settles=[Settle(first.rid, Outcome.QUOTA)], acquires=(again,))
    world.now += min(refusal.eta, 119 * SECOND)
    world.tick(acquires=(back,))
    order = world.last + world.drain()
    waited = [rid for rid in order if rid in {a.rid for a in later[1:]}]
    if "again" in order and waited:
        assert order.index("again") < order.index(waited[0])
    if "back" in order and waited:
        still = [rid for rid in waited if order.index(rid) > order.index("back")]
        assert len(still) == len(waited)


@given(seeds)
@few
def test_reloads_lose_no_waiter_and_no_grant(seed):
    world = world_of(seed)
    revision = 0
    for step in range(80):
        world.random_step()
        if step % 10 == 9:
            revision += 1
            before = set(world.core.line.waiting) | set(world.core.leases.held)
            options = {"revision": revision, "lease": 10**12, "dead": 10**12}
            world.spec = replace(random_spec(world.rng), **options)
            world.core.reconfigure(world.now, world.spec)
            mail = [letter for seat in world.core.seats.by_name.values() for letter in seat.mail]
            never = {event.rid for _, event in mail if isinstance(event, Never)}
            after = set(world.core.line.waiting) | set(world.core.leases.held)
            assert before - after == never & before
            check_books(world.core)
            for rid, charge in world.open.items():
                charge.cost = world.core.leases.held[rid].cost
            world.charges = list(world.open.values())


@given(seeds)
@few
def test_a_tag_may_be_late_but_a_deadline_never_is(seed):
    world = world_of(seed)
    for _ in range(100):
        world.now += int(world.rng.expovariate(1) * 500_000)
        patience = world.rng.choice([0, 100_000, 5 * SECOND, MINUTE])
        reply = world.tick(acquires=(world.ask(deadline_in=patience),))
        for event in reply.events:
            assert isinstance(event, Admit | Shed | Late)
            if isinstance(event, Admit):
                assert event.waited <= world.asks[event.rid].deadline_in
            elif isinstance(event, Shed):
                assert event.eta > world.asks[event.rid].deadline_in or event.full
            assert not isinstance(event, Late) or event.because


def test_the_shapes_used_here_cover_every_kind_of_meter():
    kinds = set()
    for seed in range(60):
        spec = random_spec(random.Random(seed))
        kinds |= {
            "calendar" if d.calendar else "log" if d.cap[0] else "bucket" for d in spec.dimensions
        }
        kinds |= {f"{len({d.window for d in spec.dimensions if d.cap[0]})} windows"}
    assert {"calendar", "log", "bucket", "1 windows", "2 windows"} <= kinds
    assert Shape.OWN
    assert U
