"""A client that leaves, at every stage of its call: what it held is given back within a second.

Each call holds the only permit of a pool of its own, and another call stands behind it. The proof
that the permit is back is that the other call is served; that the upstream was let go is seen on
the wire between gateway and provider.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fixtures.waiting import Turns
from tests.integration.gateway import (
    Stage,
    Wire,
    World,
    ask,
    emulation,
    fetch,
    policy,
    request,
    staged,
    until,
)

pytestmark = pytest.mark.acceptance

SOON = 1.0
MESSAGES = [{"role": "user", "content": "Say something long about the weather."}]


@dataclass(frozen=True)
class Moment:
    """A stage of a call.

    Attributes:
        name: Of its pool, and of its models.
        fault: What the provider does with the first call, so that it stays at this stage.
        stream: Whether the call asks for a stream.
        reached: Text after whose arrival the client leaves; b"" leaves by time.
        upstream: Requests of the first call that reach the provider.
        outcome: What the gateway's log says of it.
        tokens: Whether it is charged input, output.
        holds: Whether it holds its permit while it is at this stage.
    """

    name: str
    fault: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    reached: bytes = b""
    upstream: int = 1
    outcome: str = "cancelled"
    tokens: tuple[bool, bool] = (True, False)
    holds: bool = True


MOMENTS = [
    Moment("unanswered", {"action": "slow_first_byte", "seconds": 60}),
    Moment("unanswered-stream", {"action": "slow_first_byte", "seconds": 60}, stream=True),
    Moment(
        "streaming",
        {"action": "stall", "after_events": 6, "seconds": 60},
        stream=True,
        reached=b'"content":"',
        tokens=(True, True),
    ),
    Moment("plain-body", {"action": "stall", "after_bytes": 80, "seconds": 60}, reached=b'{"id"',
           tokens=(True, True)),
    Moment("backing-off", {"action": "status", "status": 500, "retry_after": ["30"]},
           tokens=(False, False), holds=False),
]  # fmt: skip
POLICY = policy(
    pools={
        one.name: {"provider": "emulator", "limits": {"concurrency": 1}}
        for one in [*MOMENTS, Moment("queue"), Moment("alive"), Moment("upload"), Moment("ended")]
    },
    models={
        f"{kind}-{one}": {"provider": "emulator", "pool": one}
        for one in [*(moment.name for moment in MOMENTS), "queue", "alive", "upload", "ended"]
        for kind in ("first", "next")
    },
    tiers={"interactive": {"number": 1, "keepalive": {"after": "100ms", "every": "100ms"}}},
    agents={"awake": {"keys": [{"key": "${AWAKE_KEY}"}], "tier": "interactive"}},
    breakers={"mode": "off"},
)


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Stage, World]]:
    faults = [{**one.fault, "models": [f"first-{one.name}"]} for one in MOMENTS]
    faults += [
        {"action": "stall", "after_events": 4, "seconds": 60, "models": [f"first-{name}"]}
        for name in ("queue", "alive")
    ]
    provider = emulation(faults=faults, answers={"median": 120, "longest": 200})
    with staged(POLICY, provider=provider, keys={"AWAKE_KEY": "tg-awake-0123456789"}) as made:
        yield made


def call(world: World, model: str, *, stream: bool = False, mark: str = "", key: str = "") -> bytes:
    body = {"model": model, "messages": MESSAGES, "stream": stream, "user": mark or model}
    return request("/v1/chat/completions", body, key=key or world.gateway.key)


async def permits(world: World, pool: str) -> tuple[int, int]:
    """Permits out, calls waiting."""
    for one in (await world.gateway.status())["pools"]:
        if one["name"] == f"pool:{pool}":
            return one["in_flight"], sum(one["waiting"])
    return 0, 0


async def standing(world: World, pool: str, want: tuple[int, int]) -> None:
    async def seen() -> bool:
        return await permits(world, pool) == want

    await until(seen)


def reset(wire: Wire) -> None:
    """The connection ends by RST, as when a process is killed."""
    sock = wire.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.drop()


async def record(world: World, mark: str) -> dict[str, Any]:
    """The log line of the call that asked for this model."""

    def found() -> Any:
        lines = [one for one in world.gateway.events("call") if one["model"] == mark]
        return lines[-1] if lines else None

    return await until(found)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name)
def test_leaving_frees_upstream_and_permit_within_a_second(scene, moment):
    stage, world = scene
    name = moment.name

    async def scenario(first: Wire) -> None:
        await first.send(call(world, f"first-{name}", stream=moment.stream))
        if moment.reached:
            await first.wait_for(moment.reached)
        [theirs] = await until(lambda: world.upstream.exchanges(f'"first-{name}"'))
        if not moment.holds:  # its refusal has come; until then it held the permit, a moment only
            await until(lambda: world.upstream.exchanges(f'"first-{name}"')[0].answer)
        await standing(world, name, (int(moment.holds), 0))
        following = asyncio.create_task(ask(world.gateway.port, call(world, f"next-{name}")))
        if moment.holds:
            await standing(world, name, (1, 1))
        async with Turns() as since:
            reset(first)
            assert (await following).status == 200
            if moment.holds:
                await until(lambda: theirs.line.client_left)
            assert since.seconds < SOON
        line = await record(world, f"first-{name}")
        assert line["outcome"] == moment.outcome
        usage = line["usage"] or {"input": 0, "output": 0}
        assert (usage["input"] > 0, usage["output"] > 0) == moment.tokens, usage
        await world.gateway.idle()
        assert len(world.upstream.exchanges(f'"first-{name}"')) == moment.upstream

    async def alone() -> None:
        first = await Wire.open(world.gateway.port)
        try:
            await scenario(first)
        finally:
            first.drop()  # where this fails, the call shall not disturb the tests that follow

    stage.run(alone())


@pytest.mark.parametrize("name", ["queue", "alive"])
def test_leaving_the_queue_disturbs_nobody_behind(scene, name):
    """Silent, and after keep-alive bytes have committed the answer's head."""
    stage, world = scene
    awake = world.gateway.keys["AWAKE_KEY"] if name == "alive" else ""

    async def scenario() -> None:
        first = await Wire.open(world.gateway.port)
        await first.send(call(world, f"first-{name}", stream=True))
        await first.wait_for(b'"content":"')
        waiting = []
        for number in range(4):
            wire = await Wire.open(world.gateway.port)
            mark = f"{name}-waiter-{number}"
            await wire.send(call(world, f"next-{name}", stream=True, mark=mark, key=awake))
            await standing(world, name, (1, number + 1))
            if awake:
                await wire.wait_for(b": queued\n")
            waiting.append(wire)
        for gone in (2, 0):
            reset(waiting[gone])
        async with Turns() as since:
            await standing(world, name, (1, 2))
            assert since.seconds < SOON
        reset(first)
        for number in (1, 3):
            assert (await waiting[number].answer()).status == 200
            await waiting[number].close()
        seen = [
            number for number in range(4) if world.upstream.exchanges(f'"{name}-waiter-{number}"')
        ]
        assert seen == [1, 3], "who left was never sent on; the others kept their order"
        one, three = (world.upstream.exchanges(f'"{name}-waiter-{number}"')[0] for number in seen)
        assert one.answer is not None
        assert three.answer is not None
        await world.gateway.idle()

    stage.run(scenario())


def test_leaving_in_the_middle_of_an_upload_leaves_nothing(scene):
    stage, world = scene

    async def scenario() -> None:
        whole = call(world, "first-upload")
        for part in (20, 150, len(whole) - 1):
            wire = await Wire.open(world.gateway.port)
            await wire.send(whole[:part])
            await asyncio.sleep(0.05)
            reset(wire)
        await world.gateway.idle()
        assert world.upstream.exchanges('"first-upload"') == []
        assert (await ask(world.gateway.port, call(world, "next-upload"))).status == 200

    stage.run(scenario())


def test_leaving_after_the_terminal_event_is_success_at_the_reported_price(scene):
    stage, world = scene

    async def scenario() -> None:
        wire = await Wire.open(world.gateway.port)
        await wire.send(call(world, "first-ended", stream=True))
        await wire.wait_for(b"data: [DONE]\n\n")
        reset(wire)
        line = await record(world, "first-ended")
        assert (line["outcome"], line["status"]) == ("ok", 200)
        assert line["usage"]["estimated"] is False
        ledger = await world.emulator.ledger()
        [row] = [row for row in ledger["rows"] if row["model"] == "first-ended"]
        assert line["usage"]["output"] == row["reported"]["output"] > 0
        await world.gateway.idle()

    stage.run(scenario())


def test_a_thousand_aborted_streams_leave_nothing_behind(scene):
    """Some leave before the head, some in the middle, some without a word."""
    stage, world = scene
    rss: list[float] = []

    async def one(number: int) -> None:
        wire = await Wire.open(world.gateway.port)
        await wire.send(call(world, "gpt-paced" if number % 2 else "gpt-stalling", stream=True))
        if number % 4:
            await wire.wait_for(b'"content":"')
        reset(wire) if number % 3 else await wire.close()

    async def many(count: int) -> None:
        numbers = iter(range(count))

        async def some() -> None:
            for number in numbers:
                await one(number)

        await asyncio.gather(*(some() for _ in range(40)))

    async def scenario() -> None:
        await world.emulator.faults(
            {"action": "stall", "after_events": 3, "seconds": 60, "models": ["gpt-stalling"]},
            {"action": "stall", "after_events": 20, "seconds": 60, "models": ["gpt-paced"]},
        )
        world.upstream.forget()
        await many(200)
        await world.gateway.idle()
        rss.append(world.gateway.rss_mib())
        await many(1_000)
        await world.gateway.idle()
        rss.append(world.gateway.rss_mib())
        world.upstream.forget()
        metrics = await fetch(world.gateway.admin, "/metrics")
        assert metrics.status == 200
        assert await world.gateway.total("tidegate_in_flight") == 0
        assert await world.gateway.total("tidegate_waiting") == 0
        assert await world.gateway.total("tidegate_admission_in_flight") == 0
        assert await world.gateway.total("tidegate_upstream_connections") == 0
        await until(lambda: world.upstream.open <= 2)  # idle ones of earlier tests

        async def forgotten() -> bool:
            return (await world.emulator.ledger())["in_flight"] == 0

        await until(forgotten)

    stage.run(scenario())
    assert rss[1] - rss[0] < 16, rss
