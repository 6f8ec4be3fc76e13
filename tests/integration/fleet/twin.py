"""Random histories driven through the Python core and the script at once, compared at every step.

`python -m tests.integration.fleet.twin --steps 1000000` is the nightly run (`make twin-nightly`).
What the script remembers between calls must not decide anything: in some histories it forgets now
and then (a failover, a library loaded again), in some its bounds are so small that everything it
holds in memory spills into keys all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import time
from dataclasses import dataclass, field, replace

import redis

from gateway.admission.core import Adopt, Ask, Caller, Outcome, PoolCore, PoolSpec, Settle
from gateway.admission.packing import NEEDS_RULES, OK, Batch, pack_batch, pack_rules, unpack_answer
from gateway.admission.profiles import Profile, Reserve, Shape, pool_spec
from gateway.admission.script import library
from gateway.units import Mode
from tests.integration.fleet.servers import binaries, running

SECOND = 1_000_000
START = 1_790_000_000 * SECOND
NAME, SOURCE = library()
BOUNDS = ("MOST_HELD", "MOST_YOUNG", "MOST_CELLS", "PAD", "CHECK")
VARIANTS = (
    (2000, 40, 256, 64, 0), (2000, 40, 256, 64, 1), (6, 40, 256, 64, 1), (2000, 4, 2, 4096, 1),
    (4, 2, 0, 0, 1),
)  # fmt: skip
"""What the script may hold in memory, how it writes, and whether it checks itself.

The first is the one that ships. A checking one fails where a number that few ticks change has
changed and nobody said so.
"""


def variant(bounds: tuple[int, ...]) -> tuple[str, bytes]:
    """The library with other bounds, under a name of its own."""
    source = SOURCE
    for name, most in zip(BOUNDS, bounds, strict=True):
        source, found = re.subn(
            rf"local {name} = \d+".encode(), f"local {name} = {most}".encode(), source
        )
        assert found == 1
    if source == SOURCE:
        return NAME, SOURCE
    name = NAME + "_" + "_".join(map(str, bounds))
    return name, source.replace(NAME.encode(), name.encode())


def some_spec(rng: random.Random, revision: int) -> PoolSpec:
    """Any pool at all."""
    limits = {"rpm": rng.choice([60, 600])}
    if rng.random() < 0.9:
        limits["tpm"] = rng.choice([40_000, 100_000, 3_333_333])
    if rng.random() < 0.3:
        limits["rps"] = 10
    if rng.random() < 0.2:
        limits["otpm"] = 60_000
    calendar = rng.choice([None, None, None, "tpd", "tokens_day", "tokens_month"])
    if calendar is not None:
        limits[calendar] = 3_000_000
    spec = pool_spec(
        name="pool:p",
        limits=limits,
        shape=rng.choice([Shape.WINDOW, Shape.WINDOW, Shape.OWN, Shape.BUCKET]),
        profile=rng.choice([Profile.REALTIME, Profile.UPFRONT_MAX]),
        reserve=rng.choice(list(Reserve)),
        concurrency=rng.choice([0, 0, 8, 20]),
        because="pools.p",
    )
    return replace(
        spec,
        max_grants=rng.choice([1, 3, 3, 256]),
        max_waiting=rng.choice([5, 20_000, 20_000]),
        queue=rng.random() < 0.9,
        mode=rng.choice([Mode.ENFORCE] * 12 + [Mode.SHADOW, Mode.OFF]),
        lease=rng.choice([20 * SECOND, 120 * SECOND]),
        spread=rng.choice([spec.spread, spec.spread, 2 * SECOND]),
        concurrency_because=rng.choice(["", "pools.p.concurrency"]),
        revision=revision,
    )


def changed(rng: random.Random, spec: PoolSpec, revision: int) -> PoolSpec:
    """Other rules for the pool: in place, or another list of dimensions."""
    if rng.random() < 0.4:
        return some_spec(rng, revision)
    dims = tuple(
        replace(
            dim,
            limit=max(1, dim.limit * 3 // 4),
            cap=tuple(c * 3 // 4 for c in dim.cap),
            depth=tuple(max(1, d * 3 // 4) for d in dim.depth),
        )
        for dim in spec.dimensions
    )
    spread = rng.choice([spec.spread, 4 * SECOND, 100_000])
    return replace(
        spec, dimensions=dims, spread=spread, concurrency=rng.choice([0, 5]), revision=revision
    )


@dataclass
class Gateway:
    """One process's view of the pool."""

    name: str
    spec: PoolSpec
    epoch: int = 0
    version: int = 0
    ack: int = 0


@dataclass
class Twins:
    """The same pool twice."""

    clients: list
    rng: random.Random
    base: str
    cold: bool = True
    now: int = START
    numbers: int = 0
    core: PoolCore | None = None
    stored: PoolSpec | None = None
    revision: int = 1
    gateways: list[Gateway] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    shapes: dict[str, PoolSpec] = field(default_factory=dict)
    library: tuple[str, bytes] = (NAME, SOURCE)
    forgets: float = 0.0

    def __post_init__(self):
        self.now += self.rng.randrange(10**12)
        spec = some_spec(self.rng, 1)
        self.gateways = [Gateway(f"g{i}", spec) for i in range(self.rng.choice([1, 2, 4]))]

    # --- inputs

    def cost(self, spec: PoolSpec) -> tuple[int, ...]:
        rng = self.rng
        tokens = int(min(60_000, rng.lognormvariate(7, 1.4)))
        units = {"requests": 1, "tokens": tokens, "input": tokens * 4 // 5, "output": tokens // 5}
        return tuple(
            units.get(dim.name, 1) * SECOND + (rng.randrange(3) if dim.name != "requests" else 0)
            for dim in spec.dimensions
        )

    def rid(self) -> str:
        rng = self.rng
        if self.known and rng.random() < 0.05:
            return rng.choice(self.known[-30:])
        self.numbers += 1
        self.known.append(f"r{self.numbers}")
        return self.known[-1]

    def ask(self, gateway: Gateway) -> Ask:
        rng = self.rng
        key = f"k{rng.randrange(40)}" if rng.random() < 0.4 else None
        tag = self.now - rng.randrange(5 * SECOND) if rng.random() < 0.15 else None
        rid = self.rid()
        self.shapes[rid] = gateway.spec
        return Ask(
            rid=rid,
            lane=rng.randrange(4),
            tenant=f"t{rng.randrange(6)}",
            weight=rng.choice([1, 2, 8]),
            deadline_in=rng.choice([0, 300_000, 5 * SECOND, 60 * SECOND, 10**12]),
            cost=self.cost(gateway.spec),
            tag=tag,
            place_key=key,
            ticket=tag is not None and rng.random() < 0.5,
        )

    def settle(self, rid: str) -> Settle:
        rng = self.rng
        outcome = rng.choice([Outcome.SERVED] * 14 + list(Outcome))
        grant = self.core.leases.held.get(rid) if self.core else None
        actual = None
        if grant is not None and rng.random() < 0.7:
            count = len(grant.shape)
            base = grant.cost if len(grant.cost) == count else (SECOND,) * count
            actual = tuple(int(units * rng.random() * 2) for units in base)
        return Settle(rid, outcome, actual, rng.randrange(3 * SECOND))

    def adopt(self, gateway: Gateway) -> Adopt:
        rng = self.rng
        held = list(self.core.leases.held) if self.core else []
        if held and rng.random() < 0.6:
            return Adopt(rng.choice(held))
        rid = self.rid()
        self.shapes[rid] = gateway.spec
        return Adopt(
            rid, self.cost(gateway.spec), charge=rng.random() < 0.5, lane=rng.randrange(4),
            tenant=f"t{rng.randrange(6)}", weight=rng.choice([1, 3]),
        )  # fmt: skip

    def some(self, of: list[str], most: int) -> list[str]:
        return self.rng.sample(of, min(len(of), self.rng.randrange(most + 1)))

    def pass_time(self) -> None:
        rng = self.rng
        kind = rng.random()
        if kind < 0.9:
            self.now += int(rng.expovariate(1) * rng.choice([200, 5_000, 200_000, 2_000_000]))
        elif kind < 0.97:
            self.now += rng.randrange(20 * SECOND)
        elif kind < 0.985:
            self.now -= rng.randrange(SECOND)
        elif kind < 0.99:
            self.now -= SECOND + rng.randrange(30 * SECOND)
        else:
            self.now += rng.randrange(2 * 86_400 * SECOND)

    def batch(self, gateway: Gateway) -> Batch:
        rng = self.rng
        held = list(self.core.leases.held) if self.core else []
        waiting = list(self.core.line.waiting) if self.core else []
        signals = ()
        if rng.random() < 0.04:
            signals = (tuple(int(d.limit * rng.random() * 0.3) for d in gateway.spec.dimensions),)
        version = gateway.version + (1_000_000 if rng.random() < 0.004 else 0)
        ack = gateway.ack if rng.random() < 0.8 else max(0, gateway.ack - rng.randrange(4))
        return Batch(
            caller=Caller(gateway.name, gateway.epoch, version, ack),
            signals=signals,
            settles=[self.settle(rid) for rid in self.some(held, 3)],
            cancels=self.some(waiting, 1) + self.some(held, 1) * (rng.random() < 0.3),
            lates=self.some(waiting, 1) * (rng.random() < 0.3),
            adopts=[self.adopt(gateway) for _ in range(rng.random() < 0.1)],
            acquires=[self.ask(gateway) for _ in range(rng.choice([0, 1, 1, 2, 6]))],
            cold=self.cold,
        )

    # --- both

    def by_core(self, gateway: Gateway, batch: Batch):
        """What a tick of this caller means to a core that keeps rules like the script."""
        spec, shape = gateway.spec, None
        if self.core is None:
            cold = batch.cold and spec.queue
            self.core = PoolCore(spec, self.now, cold=cold, epoch=self.now)
            self.stored = spec
        elif spec.revision > self.stored.revision:
            if pack_rules(spec).digest != pack_rules(self.stored).digest:
                self.core.reconfigure(self.now, spec)
            self.stored = spec
        if pack_rules(spec).digest != pack_rules(self.stored).digest:
            shape = spec.dimensions
        return self.core.tick(
            self.now, batch.caller, signals=batch.signals, settles=batch.settles,
            cancels=batch.cancels, lates=batch.lates, adopts=batch.adopts,
            acquires=batch.acquires, shape=shape,
        )  # fmt: skip

    def by_script(self, client, gateway: Gateway, batch: Batch):
        rules = pack_rules(gateway.spec)
        raw = pack_batch(batch, rules, now=self.now)
        answer = unpack_answer(run(client, self.library, self.base, raw, b""))
        if answer.status == NEEDS_RULES:
            answer = unpack_answer(run(client, self.library, self.base, raw, rules.body))
        assert answer.status == OK
        return answer

    def step(self) -> None:
        rng = self.rng
        self.pass_time()
        if rng.random() < 0.01:
            self.revision += 1
            fresh = changed(rng, self.stored or self.gateways[0].spec, self.revision)
            for gateway in self.gateways:
                if rng.random() < 0.6:
                    gateway.spec = fresh
        if rng.random() < 0.003:  # a process that loaded something else under the same number
            odd = rng.choice(self.gateways)
            odd.spec = changed(rng, odd.spec, odd.spec.revision)
        gateway = rng.choice(self.gateways)
        batch = self.batch(gateway)
        if rng.random() < self.forgets:
            for client in self.clients:
                client.function_load(self.library[1], replace=True)
        theirs = [self.by_script(client, gateway, batch) for client in self.clients]
        ours = self.by_core(gateway, batch)
        odd = gateway.spec.revision == self.stored.revision
        odd = odd and pack_rules(gateway.spec).digest != pack_rules(self.stored).digest
        for answer in theirs:
            self.compare(ours, answer)
            assert answer.conflict == odd
        gateway.epoch, gateway.version = ours.epoch, ours.version
        gateway.ack = ours.mail_seq if rng.random() < 0.9 else gateway.ack

    def compare(self, ours, answer) -> None:
        theirs = answer.reply
        for name in (
            "now", "epoch", "version", "events", "mail_seq", "wake", "owner", "blocked_by",
            "nudged", "rejoin", "demand_share_ppm",
        ):  # fmt: skip
            mine, other = getattr(ours, name), getattr(theirs, name)
            assert mine == other, f"{name}: core {mine!r}, script {other!r}"
        meter, line, stands = self.core.meter, self.core.line, answer.standing
        pairs = {
            "level": (tuple(meter.level), stands.level),
            "used": (meter.read(), stands.used),
            "foreign": (tuple(meter.foreign), stands.foreign),
            "backlog": (tuple(line.backlog), stands.backlog),
            "count": (tuple(line.count), stands.waiting),
            "in flight": (len(self.core.leases.held), stands.in_flight),
            "factor": (meter.factor, stands.factor_ppm),
            "blocked": (meter.blocked_until, stands.blocked_until),
            "shadow": (self.core.would_have_waited, stands.would_have_waited),
        }
        for name, (mine, other) in pairs.items():
            assert mine == other, f"{name}: core {mine!r}, script {other!r}"


def run(client, library: tuple[str, bytes], base: str, raw: bytes, rules: bytes) -> bytes:
    """One call of the function, loaded if need be."""
    name, source = library
    try:
        return client.fcall(name, 1, base, raw, rules, b"n:")
    except redis.exceptions.ResponseError as error:
        if "Function not found" not in str(error):
            raise
        client.function_load(source)
        return client.fcall(name, 1, base, raw, rules, b"n:")


def compare_histories(clients, *, seed: int, steps: int, length: int = 250) -> int:
    """That many steps in histories of that length; an AssertionError names seed and step."""
    done = 0
    while done < steps:
        for client in clients:
            client.flushdb()
        twins = Twins(clients, random.Random(seed), f"tidegate:adm:{{p{seed}}}")
        twins.cold = twins.rng.random() < 0.7
        twins.library = variant(twins.rng.choice(VARIANTS))
        twins.forgets = twins.rng.choice([0.0, 0.0, 0.05, 0.5])
        for number in range(min(length, steps - done)):
            try:
                twins.step()
            except Exception as error:
                raise AssertionError(f"seed {seed}, step {number}: {error}") from error
            done += 1
        seed += 1
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(running(name)) for name in binaries()}
        clients = [stack.enter_context(server.client()) for server in servers.values()]
        began = time.monotonic()
        done = compare_histories(clients, seed=chosen.seed, steps=chosen.steps)
        out = {"steps": done, "s": round(time.monotonic() - began)}
        for name, client in zip(servers, clients, strict=True):
            found = client.info("server")
            out[name] = found.get("valkey_version") or found["redis_version"]
    sys.stdout.write(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
