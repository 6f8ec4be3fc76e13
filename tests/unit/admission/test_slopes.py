"""The slope's pool beside a provider's pool."""

from __future__ import annotations

from gateway.admission.local import LocalStore
from gateway.admission.profiles import pool_spec
from gateway.admission.ramp import RampRules
from gateway.admission.slopes import Slopes
from gateway.clock import LoopClock
from gateway.units import MICRO, MINUTE
from tests.sim.loop import run

POOL = pool_spec(name="pool:quota", limits={"tpm": 10_000_000}, because="pools.quota")
OTHER = pool_spec(name="pool:other", limits={"rpm": 10}, because="pools.other")
RULE = RampRules(floor=100_000, growth_ppm=500_000, most=10_000_000, because="pools.quota.ramp")
RULES = {POOL.name: RULE}
ALWAYS = {POOL.name: RampRules(always=True, floor=100_000, most=10_000_000)}
POOLS = (OTHER, POOL)
START = 1_000 * MINUTE


def limits(pools) -> list[int]:
    return [pool.dimensions[0].limit // MICRO for pool in pools if pool.name.endswith(":ramp")]


def made() -> tuple[Slopes, LocalStore]:
    store = LocalStore(LoopClock())
    return Slopes(store), store


def test_without_a_refusal_nothing_is_added():
    async def main():
        slopes, _ = made()
        slopes.sent(POOLS, RULES, 5_000_000, START)
        assert slopes.beside(POOLS, RULES, START) is POOLS

    run(main())


def test_after_a_refusal_a_slope_holds_for_a_quarter_of_an_hour():
    async def main():
        slopes, _ = made()
        for minute in range(15):
            slopes.sent(POOLS, RULES, 300_000, START + minute * MINUTE)
        now = START + 15 * MINUTE
        slopes.refused(POOLS, RULES, now)
        pools = slopes.beside(POOLS, RULES, now)
        assert [pool.name for pool in pools] == ["pool:quota:ramp", "pool:other", "pool:quota"]
        assert limits(pools) == [375_000]  # 300,000 and half of the slope
        assert slopes.beside(POOLS, RULES, now + 30 * MICRO) == pools
        assert slopes.beside(POOLS, RULES, now + 15 * MINUTE) is POOLS

    run(main())


def test_the_limit_follows_what_is_used_minute_by_minute():
    async def main():
        slopes, _ = made()
        seen = []
        for minute in range(4):
            now = START + minute * MINUTE
            seen += limits(slopes.beside(POOLS, ALWAYS, now))
            slopes.sent(POOLS, ALWAYS, 1_500_000, now)
        assert seen == [150_000, 150_000, 300_000, 450_000]

    run(main())


def test_every_newer_limit_wins_over_the_older_one():
    async def main():
        slopes, _ = made()
        revisions = [
            slopes.beside(POOLS, ALWAYS, START + minute * MINUTE)[0].revision for minute in range(3)
        ]
        assert revisions == sorted(set(revisions))

    run(main())


def test_a_slope_begins_with_what_its_minute_has_used_already():
    async def main():
        clock = LoopClock()
        store = LocalStore(clock)
        slopes, now = Slopes(store), clock.now()
        slopes.sent(POOLS, RULES, 90_000, now)
        slopes.refused(POOLS, RULES, now)
        slopes.beside(POOLS, RULES, now)
        view = store.view("pool:quota:ramp")
        assert view is not None
        assert (view.dimensions[0].used, view.in_flight) == (90_000 * MICRO, 0)
        slopes.refused(POOLS, RULES, now)  # a second one does not charge it again
        slopes.beside(POOLS, RULES, now)
        assert store.view("pool:quota:ramp").dimensions[0].used == 90_000 * MICRO

    run(main())
