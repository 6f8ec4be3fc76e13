"""The span of a tool call: names of the MCP conventions, one trace with the model call."""

from __future__ import annotations

import random

import orjson

from gateway.layers.trace import Tracing
from gateway.pipeline import pipeline
from tests.fixtures.tool_ground import Ground
from tests.sim.loop import run

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736


class Kept:
    def __init__(self):
        self.spans = []

    def ended(self, span):
        self.spans.append(span)

    def close(self):
        return None


def test_model_call_and_tool_call_of_one_turn_share_a_trace():
    kept = Kept()

    async def main():
        async with Ground() as ground:
            world = ground.world
            world.parts = type(world.parts)(**{
                **{name: getattr(world.parts, name) for name in world.parts.__slots__},
                "tracing": Tracing(kept, ratio=1.0, clock=world.clock, rng=random.Random(1)),
            })  # fmt: skip
            ground.stage.edge._service = pipeline(world.parts)
            await world.ready()
            parent = b"00-%032x-00f067aa0ba902b7-01" % TRACE
            message = ground.message("tools/call", {"name": "echo", "arguments": {"secret": 1}})
            headers = [*ground.headers(message), (b"traceparent", parent)]
            await ground.post(message, headers)
            body = {"model": "m", "messages": [{"role": "user", "content": "t:5"}]}
            await ground.stage.ask(
                "POST", "/v1/chat/completions",
                [(b"authorization", b"Bearer tool-1"), (b"traceparent", parent)],
                orjson.dumps(body),
            )  # fmt: skip

    run(main())
    tool, model = kept.spans
    assert tool.context.trace == model.context.trace == TRACE
    assert tool.name == "tools/call echo"
    assert not tool.outgoing
    said = tool.attributes
    assert said["mcp.method.name"] == "tools/call"
    assert said["gen_ai.tool.name"] == "echo"
    assert said["mcp.protocol.version"] == "2026-07-28"
    assert said["jsonrpc.request.id"] == "1"
    assert "secret" not in repr(said)
