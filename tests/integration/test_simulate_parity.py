"""The simulator tells what the gateway does: its log, replayed, gives the same order and use.

A real gateway before the emulator's ten-second meter: a queue of batch calls, into which standard
and then interactive calls come. What its access log says is played in virtual time under the same
policy file.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.policy.check import load_without_secrets
from gateway.policy.compile import compile as compiled
from gateway.simulate import trace
from gateway.simulate.run import simulate
from gateway.simulate.scenario import Fleet, Scenario, Strategy, Upstream
from gateway.units import MICRO
from tests.integration.gateway import Stage, World, ask, emulation, policy, request, scratch

pytestmark = pytest.mark.integration

CAP = 200
LIMIT = 30_000
"""Tokens per minute, enforced as 5,000 in ten seconds."""

OURS = 28_500
"""Less than the provider has: it counts by characters what we count by tokens."""

PROMPT = "one two ten red sky " * 60
KEYS = {f"KEY_{tier}": f"tg-tier-{tier}-0123456789" for tier in (1, 2, 3)}
TIERS = {1: "interactive", 2: "standard", 3: "batch"}

ASKED = [
    *((0.05 * i, 3) for i in range(20)),
    *((2.25 + 0.02 * i, 2) for i in range(5)),
    *((4.25 + 0.02 * i, 1) for i in range(5)),
]  # fmt: skip


def governed() -> dict[str, Any]:
    return policy(
        pools={"wide": {"provider": "emulator", "limits": {"rpm": 6_000, "tpm": OURS},
                        "shape": "window_10s", "accounting": "upfront_max"}},
        tiers={name: {"number": tier, "max_wait": "60s"} for tier, name in TIERS.items()},
        fairness="agent",
        agents={f"agent-{tier}": {"keys": [{"key": f"${{KEY_{tier}}}"}], "tier": name}
                for tier, name in TIERS.items()},
    )  # fmt: skip


async def played(world: World) -> None:
    async def call(at: float, tier: int) -> None:
        await asyncio.sleep(at)
        body = {"model": "gpt-4o", "max_tokens": CAP,
                "messages": [{"role": "user", "content": f"{at:.2f} {PROMPT}"}]}  # fmt: skip
        answer = await ask(
            world.gateway.port,
            request("/v1/chat/completions", body, key=KEYS[f"KEY_{tier}"]),
        )
        assert answer.status == 200, answer.body

    async with asyncio.TaskGroup() as group:
        for at, tier in ASKED:
            group.create_task(call(at, tier))


def test_the_log_of_a_real_gateway_replays_to_the_same_order_and_use():
    limits = [{"name": "q", "shape": "sub_minute", "rpm": 6_000, "tpm": LIMIT,
               "accounting": "upfront_max"}]  # fmt: skip
    with Stage() as stage, scratch() as folder:
        made = World(folder)
        try:
            stage.run(made.start(governed(), provider=emulation(limits=limits), keys=KEYS))
            stage.run(played(made))
            stage.run(made.gateway.idle())
            ledger = stage.run(made.emulator.ledger())
            snapshot = compiled(load_without_secrets(made.gateway.policy, {}), revision=1)
        finally:
            stage.run(made.stop())
        log = made.gateway.events("call")
    assert ledger["refused"].get("tokens", 0) == 0
    assert len(log) == len(ASKED)

    recorded = trace.read(json.dumps(entry).encode() for entry in log)
    assert (recorded.bad, len(recorded.calls)) == (0, len(ASKED))
    fleet, upstream = Fleet(), Upstream(network=1_000, jitter=1_000, first_token=1_000)
    ops = list(trace.Player(recorded, snapshot, fleet, upstream)())
    said = Scenario(name="replay", duration=recorded.span + 1, fleet=fleet, upstream=upstream)
    run = simulate(
        said, snapshot, Strategy.TIDEGATE, recorded=lambda: iter(ops), models=["gpt-4o"]
    )  # fmt: skip
    assert sum(run.books.provider_429.values()) == 0

    # The order of grants, by what was asked when: unique in this workload.
    first = min(entry["received"] for entry in log)
    real = sorted((e["received"] - first + e["waited_us"], e["received"] - first) for e in log)
    simulated = sorted((op.sent, op.asked) for op in ops)
    assert [asked for _, asked in real] == [asked for _, asked in simulated]

    # Use of the quota from the first grant to the last, while calls waited: within a point.
    tokens = sum(call.input + CAP for call in recorded.calls)
    use = [100 * tokens / (LIMIT * grants[-1][0] / (60 * MICRO)) for grants in (real, simulated)]
    assert abs(use[0] - use[1]) <= 1, use
