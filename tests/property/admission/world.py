"""A random history against one pool core, with the books a provider would keep.

The world never trusts the core: it remembers what was asked, granted, settled and when, and the
laws compare. Vectors are in micro-units, `U` is one unit.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import dataclass, field, replace

from gateway.admission.core import (
    Admit,
    Ask,
    Caller,
    Dimension,
    Outcome,
    PoolCore,
    PoolSpec,
    Settle,
    translate,
)
from gateway.admission.profiles import Profile, Reserve, Shape, pool_spec
from gateway.units import MINUTE

U = 1_000_000
SECOND = 1_000_000
START = 1_000_000_000 * SECOND


def random_spec(rng: random.Random, **changes) -> PoolSpec:
    """A pool of any shape: one window or several, buckets, calendars, concurrency."""
    limits = {"rpm": rng.choice([60, 600]), "tpm": 100_000}
    if rng.random() < 0.3:
        limits["rps"] = 10
    if rng.random() < 0.2:
        limits["otpm"] = 60_000
    if rng.random() < 0.2:
        limits["tpd"] = 20_000_000
    spec = pool_spec(
        name="pool:p",
        limits=limits,
        shape=rng.choice([Shape.WINDOW, Shape.WINDOW, Shape.OWN, Shape.BUCKET]),
        profile=rng.choice([Profile.REALTIME, Profile.UPFRONT_MAX]),
        reserve=rng.choice(list(Reserve)),
        concurrency=rng.choice([0, 0, 20]),
        because="pools.p",
    )
    return replace(spec, **{"max_grants": rng.choice([2, 256]), **changes})


def cost_for(spec: PoolSpec, tokens: int) -> tuple[int, ...]:
    """One request of so many tokens, a fifth of them output."""
    units = {"requests": 1, "tokens": tokens, "input": tokens - tokens // 5, "output": tokens // 5}
    return tuple(units[dim.name] * U for dim in spec.dimensions)


@dataclass
class Charge:
    at: int
    cost: tuple[int, ...]
    lane: int


@dataclass
class World:
    """One core, several gateways, and the provider's books."""

    rng: random.Random
    spec: PoolSpec
    core: PoolCore = None
    now: int = START
    number: int = 0
    asks: dict[str, Ask] = field(default_factory=dict)
    open: dict[str, Charge] = field(default_factory=dict)
    charges: list[Charge] = field(default_factory=list)
    granted: set[str] = field(default_factory=set)
    acks: dict[str, int] = field(default_factory=dict)
    gateways: int = 3

    def __post_init__(self):
        if self.core is None:
            self.core = PoolCore(self.spec, self.now)

    def ask(self, **changes) -> Ask:
        rng = self.rng
        self.number += 1
        tokens = int(min(40_000, rng.lognormvariate(6.5, 1.3)))
        fields = {
            "rid": f"r{self.number}",
            "lane": rng.randrange(4),
            "tenant": f"t{rng.randrange(6)}",
            "weight": rng.choice([1, 2, 8]),
            "deadline_in": 10**12,
            "cost": cost_for(self.spec, tokens),
        }
        ask = Ask(**{**fields, **changes})
        self.asks[ask.rid] = ask
        return ask

    def caller(self, gateway: str) -> Caller:
        return Caller(gateway, mail_ack=self.acks.get(gateway, 0))

    def tick(self, gateway: str = "g0", **batch):
        """One tick; the world's books follow the grants of all gateways."""
        self.seen_waiting = set(self.core.line.waiting)
        reply = self.core.tick(self.now, self.caller(gateway), **batch)
        self.acks[gateway] = reply.mail_seq
        self.last = self.fresh_grants(reply.events)
        return reply

    def fresh_grants(self, events) -> list[str]:
        """Request ids granted by the last tick, to whichever gateway."""
        found = []
        mail = [event for seat in self.core.seats.by_name.values() for _, event in seat.mail]
        for event in (*events, *mail):
            if isinstance(event, Admit) and event.rid not in self.granted:
                grant = self.core.leases.held.get(event.rid)
                self.granted.add(event.rid)
                found.append(event.rid)
                if grant is not None:
                    charge = Charge(self.now, grant.cost, grant.lane)
                    self.open[event.rid] = charge
                    self.charges.append(charge)
        return found

    def settle(self, rid: str, *, more: bool = False) -> Settle:
        """A settlement at or below the reservation, or (`more`) anywhere up to twice of it."""
        charge = self.open.pop(rid)
        if self.rng.random() < 0.2 or rid not in self.core.leases.held:
            return Settle(rid, Outcome.SERVED)
        share = self.rng.random() * (2 if more else 1)
        requests = self.spec.dimensions[0].name == "requests"
        actual = tuple(
            c if requests and i == 0 else int(c * share) for i, c in enumerate(charge.cost)
        )
        charge.cost = actual
        shape = self.core.leases.held[rid].shape
        return Settle(rid, Outcome.SERVED, translate(actual, self.spec.dimensions, shape))

    def used(self, i: int, dim: Dimension) -> int:
        """What the provider's sliding window over the dimension holds now."""
        return sum(c.cost[i] for c in self.charges if c.at > self.now - dim.window)

    def random_step(self, *, more: bool = False, refusals: bool = False):
        """Time passes, one gateway ticks with a random batch."""
        rng = self.rng
        self.now += int(rng.expovariate(1) * rng.choice([5_000, 200_000, 2_000_000]))
        acquires = tuple(self.ask() for _ in range(rng.choice([0, 0, 1, 1, 2, 5])))
        settles = []
        if self.open and rng.random() < 0.4:
            settles.append(self.settle(rng.choice(list(self.open)), more=more))
        if refusals and self.open and rng.random() < 0.05:
            rid = rng.choice(list(self.open))
            charge = self.open.pop(rid)
            charge.cost = tuple(
                c if d.name == "requests" else 0
                for c, d in zip(charge.cost, self.spec.dimensions, strict=True)
            )
            outcome = rng.choice([Outcome.QUOTA, Outcome.RAMP])
            settles.append(Settle(rid, outcome, None, rng.randrange(3 * SECOND)))
        cancels = []
        if self.core.line.waiting and rng.random() < 0.15:
            cancels.append(rng.choice(list(self.core.line.waiting)))
        if self.open and rng.random() < 0.05:
            rid = rng.choice(list(self.open))
            self.charges.remove(self.open.pop(rid))
            cancels.append(rid)
        gateway = f"g{rng.randrange(self.gateways)}"
        return self.tick(gateway, acquires=acquires, settles=settles, cancels=cancels)

    def drain(self, most: int = 200_000):
        """Only time passes, by the wakes, until nobody waits; returns rids in order of granting."""
        order = []
        for _ in range(most):
            if not self.core.line.waiting:
                return order
            replies = []
            for i in range(self.gateways):
                replies.append(self.tick(f"g{i}"))
                order += self.last
            wakes = [reply.wake for reply in replies if reply.wake]
            if not self.core.line.waiting:
                continue
            assert wakes, "waiters without a wake"
            self.now = max(self.now + 1, min(wakes))
        raise AssertionError("no progress")


def check_books(core: PoolCore) -> None:
    """Conservation: every sum is the sum of its parts, and nothing is negative."""
    meter, line = core.meter, core.line
    for i in range(len(core.spec.dimensions)):
        held = sum(cell[i] for log in meter.logs if i in log.dims for cell in log.slots.values())
        assert meter.sums[i] == held
        assert meter.level[i] >= 0
        assert meter.foreign[i] >= 0
    for log in meter.logs:
        assert all(units >= 0 for cell in log.slots.values() for units in cell)
        assert list(log.slots) == sorted(log.slots)
        assert len(log.slots) <= log.keep // log.width + 2
    for lane in range(4):
        waiters = [w for w in line.waiting.values() if w.lane == lane]
        assert line.backlog[lane] == sum(w.span for w in waiters)
        assert line.count[lane] == len(waiters)
    ends = [grant.end for grant in core.leases.held.values()]
    assert ends == sorted(ends)
    assert not set(core.leases.held) & set(line.waiting)


def state(core: PoolCore):
    """All that a later decision could depend on, comparable; versions and mail apart."""
    meter, line = core.meter, core.line
    return (
        meter.now, list(meter.level), list(meter.sums), list(meter.foreign), meter.factor,
        meter.blocked_until, [dict(log.slots) for log in meter.logs], list(line.v),
        {rid: (w.tag, w.lane, w.span, w.ask) for rid, w in line.waiting.items()},
        list(core.leases.held), dict(line.places), copy.deepcopy(line._finish),
    )  # fmt: skip


def jain(values) -> float:
    """Jain's index of fairness: 1 is equal shares."""
    values = list(values)
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


def minute_spec(*, tpm=100_000, **options) -> PoolSpec:
    """A plain 60 s pool."""
    return pool_spec(name="pool:p", limits={"tpm": tpm}, because="pools.p", **options)


__all__ = [
    "MINUTE", "SECOND", "START", "U", "World", "check_books", "cost_for", "deque", "jain",
    "minute_spec", "random_spec", "state",
]  # fmt: skip
