"""Gateways of one fleet, each with its breakers and its news, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import random
from types import SimpleNamespace

from gateway.admission.remote import FailMode
from gateway.clock import LoopClock
from gateway.layers.trip import Breakers
from gateway.resilience.breaker import BreakerRules, State
from gateway.sharing import Sharing
from tests.fixtures.waiting import Turns, until

RULES = BreakerRules()
SECOND = 1_000_000


@contextlib.asynccontextmanager
async def member(url: str, prefix: str, name: str, rules: BreakerRules = RULES):
    """A gateway until the block ends."""
    clock = LoopClock(precise=True)
    sharing = Sharing(
        url, clock=clock, rng=random.Random(1), gateway=name, prefix=prefix, mode=FailMode.LOCAL,
        cold=False, stamp=int, on_mode=lambda _mode: None,
    )  # fmt: skip
    seen = SimpleNamespace(
        sharing=sharing, clock=clock, policy=0, changes=[], loops=[], sessions=[], used=[]
    )

    def changed(scope, breaker):
        seen.changes.append((scope, breaker.state))
        sharing.breaker_changed(scope, breaker)

    def policy():
        seen.policy += 1

    seen.breakers = Breakers(on_change=changed, on_failure=sharing.breaker_failed)
    sharing.connect(seen.breakers, lambda: rules, policy, seen.loops.append)
    seen.breakers.probes = sharing.probes
    sharing.on_session = seen.sessions.append
    sharing.on_session_used = seen.used.append
    running = asyncio.create_task(sharing.run())
    await asyncio.sleep(0.2)
    try:
        yield seen
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await sharing.store.close()


async def soon(fact) -> float:
    """Seconds until the fact held, at most a second as promised."""
    async with Turns() as turns:
        await until(fact)
        return turns.seconds


def tell(
    one, scope: str, state: State, *, sick: bool = True, left: int = 20 * SECOND, rules=RULES
) -> None:
    """That gateway's breaker is in that state, as if it had decided so."""
    breaker = one.breakers.of(scope, rules)
    breaker.told(state, until=one.clock.now() + left, reason="five faults in a row")
    breaker.sick = sick
    one.breakers.changed(scope)
