"""Probes of a breaker that a fleet shares: one under way, one count, whoever makes them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
from collections import Counter
from random import Random

import pytest

from gateway.admission import script
from gateway.app import DEV_KEY_VARIABLE, EMULATOR_VARIABLE
from gateway.call import Bytes, Call, Dialect, End, Family, Fields, Reply
from gateway.clock import LoopClock
from gateway.errors import UpstreamUnreachable
from gateway.layers.trip import Tripping
from gateway.machine import Machine
from gateway.policy.watch import Files, PolicyWatch
from gateway.resilience.breaker import BreakerRules, State
from gateway.resilience.probes import LOOK, Elsewhere, Handed, Lent
from gateway.settings import default_policy, from_environment
from gateway.snapshot import Deployment, Provider, Snapshot, Tier
from gateway.telemetry.logs import Log, Redactor
from gateway.telemetry.metrics import Metrics
from gateway.units import MICRO
from tests.fixtures.waiting import until
from tests.integration.fleet import servers
from tests.integration.fleet.members import SECOND, member, soon, tell
from tests.integration.fleet.wire import Wire

pytestmark = pytest.mark.integration

SCOPE = "p/m"
RUNG = Deployment(
    id=SCOPE, provider=Provider(name="p", dialects=frozenset({"openai"}), base_url="http://up")
)
RULES = BreakerRules(base=50_000, cap=SECOND // 5)
_numbers = itertools.count()


class Upstream:
    """What all gateways call.

    Attributes:
        gate: Set: answers come at once.
        sick: Nobody gets a good one.
        probed: Whether the next call is a probe.
        under_way, most: Calls that it has now; probes that it had at most at a time.
        good, bad: How many probes came to a good end or a bad one.
        by: Calls it has had, by gateway.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.sick = False
        self.pause_s = 0.0
        self.probed = lambda: True
        self.under_way = self.most = self.good = self.bad = 0
        self.by: Counter[str] = Counter()

    async def serve(self, name: str, one: Call) -> Reply:
        self.by[name] += 1
        self.under_way += 1
        probe = self.probed()
        if probe:
            self.most = max(self.most, self.under_way)
        one.sent = True
        try:
            await asyncio.sleep(self.pause_s)
            await self.gate.wait()
        except BaseException:
            self.under_way -= 1
            raise
        self.good += probe and not self.sick
        if self.sick:
            self.bad += probe
            self.under_way -= 1
            raise UpstreamUnreachable("away", code="connect_failed")
        return Reply(status=200, headers=[], source=Bytes(b""))


async def ask(one, name: str, up: Upstream, rules: BreakerRules = RULES) -> None:
    """A call by way of that gateway, from its beginning to its end."""
    made = Call(
        id=f"c{next(_numbers)}", dialect=Dialect.CHAT, family=Family.OPENAI, method="POST",
        path="/", target=b"/", headers=[], received=0,
        snapshot=Snapshot(revision=1, digest="", breaker=rules),
    )  # fmt: skip
    made.fields = Fields(model="m")
    made.deployment = RUNG
    made.tier = Tier(name="t", number=2)
    made.deadline = one.clock.now() + 120 * MICRO
    service = Tripping(breakers=one.breakers, clock=one.clock, rng=Random(next(_numbers)))
    reply = await service(lambda call: up.serve(name, call))(made)
    up.under_way -= 1
    await reply.close(End.COMPLETE)


def states(members) -> list[State]:
    return [one.breakers.of(SCOPE, RULES).state for one in members]


def opened(members) -> list[State]:
    """What each has last heard of, as far as it is open; its time may be over by now."""
    return [state for one in members for scope, state in one.changes[-1:] if state is State.OPEN]


async def all_open(members, rules: BreakerRules = RULES) -> None:
    """The breaker is open everywhere, and its time is over."""
    tell(members[0], SCOPE, State.OPEN, left=SECOND // 4, rules=rules)
    await until(lambda: states(members) == [State.OPEN] * len(members))
    await until(lambda: all(passed(one) for one in members))


def passed(one) -> bool:
    return one.clock.now() >= one.breakers.of(SCOPE, RULES).until


@contextlib.asynccontextmanager
async def fleet(url: str, prefix: str, count: int, rules: BreakerRules = RULES):
    async with contextlib.AsyncExitStack() as stack:
        entering = [
            stack.enter_async_context(member(url, prefix, f"g{n}", rules)) for n in range(count)
        ]
        yield [await one for one in entering]


def held_by(server, prefix: str) -> bytes:
    with server.client() as client:
        return client.hget(f"{prefix}probe:{SCOPE}", "by") or b""


def test_at_most_one_probe_is_under_way_however_many_wait_at_however_many_gateways(valkey, prefix):
    async def run():
        up = Upstream()
        up.pause_s = 0.01
        async with fleet(valkey.url, prefix, 4) as members, asyncio.TaskGroup() as group:
            await all_open(members)
            up.probed = lambda: State.CLOSED not in states(members)
            up.sick = True
            for n, one in enumerate(members):
                for _ in range(25):
                    group.create_task(quietly(one, f"g{n}", up))
            await until(lambda: up.bad >= 3)  # each opens it for all
            up.sick = False
            await until(lambda: State.CLOSED in states(members))
            assert await soon(lambda: states(members) == [State.CLOSED] * 4) < 1
        assert (up.most, up.good) == (1, RULES.probes)
        assert up.by.total() == 100

    asyncio.run(run())


async def quietly(one, name: str, up: Upstream) -> None:
    with contextlib.suppress(UpstreamUnreachable):
        await ask(one, name, up)


def test_the_third_good_probe_closes_it_everywhere_whoever_made_the_other_two(valkey, prefix):
    async def run():
        up = Upstream()
        async with fleet(valkey.url, prefix, 4) as members:
            await all_open(members)
            for n in (0, 1):
                await ask(members[n], f"g{n}", up)
                assert State.CLOSED not in states(members)
            await ask(members[2], "g2", up)
            assert members[2].breakers.of(SCOPE, RULES).state is State.CLOSED
            assert await soon(lambda: states(members) == [State.CLOSED] * 4) < 1
            assert up.by == {"g0": 1, "g1": 1, "g2": 1}
            for one in members:  # nobody's crowd is let in at once, also where nobody probed
                breaker = one.breakers.of(SCOPE, RULES)
                assert breaker.easing == RULES.probes
                assert not one.breakers.well(SCOPE, one.clock.now())

    asyncio.run(run())


def test_a_bad_probe_opens_it_for_all_and_the_good_ones_before_it_count_no_more(valkey, prefix):
    async def run():
        up = Upstream()
        async with fleet(valkey.url, prefix, 3) as members:
            await all_open(members)
            for n in (0, 1):
                await ask(members[n], f"g{n}", up)
            up.sick = True
            await quietly(members[2], "g2", up)
            assert await soon(lambda: opened(members) == [State.OPEN] * 3) < 1
            delays = {one.breakers.of(SCOPE, RULES).delay for one in members}
            assert len(delays) == 1, "the next bad probe's delay continues from this one's"
            up.sick = False
            for n in (0, 1):
                await ask(members[n], f"g{n}", up)
                assert State.CLOSED not in states(members)
            await ask(members[2], "g2", up)
            assert await soon(lambda: states(members) == [State.CLOSED] * 3) < 1

    asyncio.run(run())


def test_good_probes_before_it_opened_again_for_another_reason_count_no_more(valkey, prefix):
    async def run():
        up = Upstream()
        async with fleet(valkey.url, prefix, 3) as members:
            await all_open(members)
            for n in (0, 1):
                await ask(members[n], f"g{n}", up)
            await all_open(members[::-1])  # the last of them says so
            for n in (0, 1):
                await ask(members[n], f"g{n}", up)
                assert State.CLOSED not in states(members)

    asyncio.run(run())


def test_a_probe_without_verdict_lets_the_next_go_at_once(valkey, prefix):
    async def run():
        up = Upstream()
        async with fleet(valkey.url, prefix, 2) as members:
            await all_open(members)
            up.gate.clear()
            first = asyncio.create_task(ask(members[0], "g0", up))
            await until(lambda: up.under_way)
            second = asyncio.create_task(ask(members[1], "g1", up))
            await until(lambda: waits(members[1]))
            assert up.by == {"g0": 1}
            first.cancel()
            assert await soon(lambda: up.by["g1"] == 1) < 1  # not after LOOK, not after the lease
            up.gate.set()
            await second

    asyncio.run(run())


def waits(one) -> bool:
    """Whether somebody there waits behind another gateway's probe."""
    breaker = one.breakers.of(SCOPE, RULES)
    return breaker._probe < 0 and SCOPE in one.breakers._waiting


def test_the_lease_of_a_killed_gateway_ends_by_its_time(valkey, prefix):
    rules = BreakerRules(base=50_000, cap=SECOND // 5, probe_lease=2 * SECOND)

    async def run():
        up = Upstream()
        async with member(valkey.url, prefix, "two", rules) as two:
            async with member(valkey.url, prefix, "one", rules) as one:
                await all_open([one, two], rules)
                up.gate.clear()
                first = asyncio.create_task(ask(one, "one", up, rules))
                await until(lambda: up.under_way)
            with valkey.client() as client:
                ends = int(client.hget(f"{prefix}probe:{SCOPE}", "ends"))
                second = asyncio.create_task(ask(two, "two", up, rules))
                await until(lambda: waits(two))
                await until(lambda: up.by["two"])
                seconds, micros = client.time()
                assert seconds * 1_000 + micros // 1_000 >= ends
            up.gate.set()
            await second
            first.cancel()
            await asyncio.wait([first])

    asyncio.run(run())


def test_without_the_store_whoever_waited_for_another_gateway_probes_by_himself(prefix):
    async def run():
        up = Upstream()
        with servers.running("valkey") as server:
            async with fleet(server.url, prefix, 2) as members:
                await all_open(members)
                up.gate.clear()
                first = asyncio.create_task(ask(members[0], "g0", up))
                await until(lambda: up.under_way)
                second = asyncio.create_task(ask(members[1], "g1", up))
                await until(lambda: waits(members[1]))
                server.process.kill()
                server.process.wait()
                assert await soon(lambda: up.by["g1"] == 1) < LOOK / MICRO + 2
                up.gate.set()
                await asyncio.gather(first, second)
                for n, one in enumerate(members):
                    for _ in range(2):
                        await ask(one, f"g{n}", up)
                assert states(members) == [State.CLOSED] * 2

    asyncio.run(run())


def test_a_store_that_answers_too_late_is_not_waited_for(valkey, prefix):
    async def run():
        up = Upstream()
        async with Wire(valkey.port) as wire, fleet(wire.url, prefix, 2) as members:
            await all_open(members)
            wire.delay_s = 20.0
            async with asyncio.timeout(10):
                for _ in range(RULES.probes):
                    await ask(members[0], "g0", up)
            assert states(members)[0] is State.CLOSED

    asyncio.run(run())


def test_a_call_that_leaves_while_its_lease_is_asked_for_leaves_nothing_behind(valkey, prefix):
    async def run():
        up = Upstream()
        async with Wire(valkey.port) as wire, member(wire.url, prefix, "g0", RULES) as one:
            await all_open([one])
            wire.delay_s = 0.1
            for _ in range(5):
                leaving = asyncio.create_task(ask(one, "g0", up))
                await until(lambda: held_by(valkey, prefix))
                leaving.cancel()
                await asyncio.wait([leaving])
                assert up.by == {}
                await until(lambda: not held_by(valkey, prefix))
            await until(lambda: not len(one.sharing.probes))
            wire.delay_s = 0.0
            for _ in range(RULES.probes):
                await ask(one, "g0", up)
            assert states([one]) == [State.CLOSED]

    asyncio.run(run())


def test_only_its_holder_frees_a_place_and_a_place_that_rests_is_nobodys(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "a") as a, member(valkey.url, prefix, "b") as b:
            late = a.sharing.probes.ask(SCOPE, 1, SECOND // 20)
            assert await late.answered() == Lent(good=0)
            there = None

            async def lent() -> bool:
                nonlocal there
                there = b.sharing.probes.ask(SCOPE, 1, 30 * SECOND)
                if isinstance(await there.answered(), Lent):
                    return True
                there.free(None)
                return False

            await until(lent)
            holder = held_by(valkey, prefix)
            late.free(Handed(good=2))
            await until(lambda: not len(a.sharing.probes))
            assert held_by(valkey, prefix) == holder
            there.free(Handed(good=1))
            await until(lambda: not held_by(valkey, prefix))

            again = a.sharing.probes.ask(SCOPE, 2, SECOND)
            assert await again.answered() == Lent(good=1)
            again.free(Handed(good=0, rest=600 * SECOND))
            await until(lambda: not held_by(valkey, prefix))
            refused = b.sharing.probes.ask(SCOPE, 2, SECOND)
            assert await refused.answered() == Elsewhere(left=LOOK)

    asyncio.run(run())


def test_a_store_that_lost_the_function_is_taught_it_again(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "a") as one:
            for good in (0, 1):
                with valkey.client() as client:
                    client.function_flush()
                lease = one.sharing.probes.ask(SCOPE, 1, SECOND)
                assert await lease.answered() == Lent(good=good)
                lease.free(Handed(good=good + 1))
                await until(lambda: not held_by(valkey, prefix))

    asyncio.run(run())


def test_a_lease_may_be_asked_for_twice_by_its_holder(valkey, prefix):
    """An exchange that brought no answer is repeated, and may have arrived."""

    async def run():
        async with member(valkey.url, prefix, "a") as one:
            library, key = script.library("probe"), f"{prefix}probe:{SCOPE}"
            for token, granted in (("a:1", 1), ("a:1", 1), ("a:2", 0)):
                said = await one.sharing.link.run(library, key, "take", token, 30_000, 60_000)
                assert said[0] == granted

    asyncio.run(run())


def test_news_that_a_place_is_free_reaches_whoever_is_being_refused(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "a") as one:
            lease = one.sharing.probes.ask(SCOPE, 1, SECOND)
            one.sharing._heard(b'{"kind":"probe","name":"%b","by":"b","at":1}' % SCOPE.encode())
            assert lease.stale
            await lease.answered()
            lease.free(None)

    asyncio.run(run())


def test_the_breakers_of_a_process_ask_the_fleet_that_its_settings_name(valkey, tmp_path):
    async def run():
        clock = LoopClock(precise=True)
        named = {DEV_KEY_VARIABLE: "k" * 40, EMULATOR_VARIABLE: "http://127.0.0.1:9"}
        chosen = from_environment(
            {"TIDEGATE_REDIS_URL": valkey.url, "TIDEGATE_STATE_DIR": str(tmp_path)}
        )
        redact = Redactor()
        async with Machine(
            settings=chosen, clock=clock, rng=Random(1), metrics=Metrics(version=""),
            log=Log(io.BytesIO(), wall=clock.wall, redact=redact), redact=redact,
            watch=PolicyWatch(Files(default_policy(), env=named), clock=clock),
        ) as machine:  # fmt: skip
            assert machine.breakers.probes is machine.sharing.probes

    asyncio.run(run())


def test_a_gateway_that_stops_in_peace_gives_its_lease_back(valkey, prefix):
    async def run():
        async with member(valkey.url, prefix, "a") as one:
            lease = one.sharing.probes.ask(SCOPE, 1, 30 * SECOND)
            await lease.answered()
            assert held_by(valkey, prefix)
            lease.free(Handed(good=1))
        assert not held_by(valkey, prefix)

    asyncio.run(run())
