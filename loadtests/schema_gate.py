"""CPU time of the contract gate: one tools/call of about 2 kB, judged on the way in and out.

What a call pays: the search for keys that stand twice, the server's schema over the arguments, six
conditions of policy, one case, the output schema over the result and five screening rules. The
parts are those of the running gateway, fed as it feeds them; nothing is sent. `control_us` is one
`orjson.loads` of the same message, so that two machines can be compared.

    python -m loadtests.schema_gate --json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from types import SimpleNamespace
from typing import Any

import orjson

from gateway.call import ToolCall
from gateway.contracts import conditions
from gateway.policy.compile import compile as compiled
from gateway.policy.load import load_texts
from gateway.snapshot import Snapshot
from gateway.tools.definitions import Definitions
from gateway.tools.schemas import Contracts
from gateway.wire.mcp import Era, Message
from loadtests.measure import finish

GOAL_US = 100.0
POLICY = """
version: 1
providers: {p: {kind: other, base_url: http://p.test}}
models: {"*": {provider: p, pool: per_model}}
agents: {a: {keys: [{key: k-0123456789}]}}
servers:
  bank:
    url: http://bank.test/mcp
    tools:
      order:
        arguments:
        - {path: account, pattern: "^[A-Z]{2}[0-9]{2}[A-Z0-9]{4,30}$", required: true}
        - {path: currency, one_of: [USD, EUR, GBP]}
        - {path: "lines[*].price", money: true, max: 100000}
        - {path: "lines[*].quantity", type: integer, min: 1, max: 1000}
        - {path: total, at_least: minimum}
        - {path: account, differs: memo}
        cases: {large: {when: [{path: total, above: 1000000}], deny: true}}
        results: [{path: order, required: true}]
screen:
  mode: enforce
  rules:
    a: {pattern: "(?i)ignore (all )?previous instructions"}
    b: {pattern: "(?i)you are now (a|an|the) "}
    c: {pattern: "BEGIN SYSTEM PROMPT"}
    d: {pattern: "(?i)disregard (the )?above"}
    e: {pattern: '[\\u200b\\u2060\\ufeff]{4,}'}
"""
LINE = {
    "type": "object",
    "required": ["sku", "quantity", "price"],
    "additionalProperties": False,
    "properties": {
        "sku": {"type": "string", "minLength": 3, "maxLength": 40},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 1000},
        "price": {"type": "number", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}
DEFINITION = {
    "name": "order",
    "inputSchema": {
        "type": "object",
        "required": ["account", "lines", "currency"],
        "additionalProperties": False,
        "properties": {
            "account": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}[A-Z0-9]{4,30}$"},
            "currency": {"enum": ["USD", "EUR", "GBP"]},
            "memo": {"type": "string", "maxLength": 2000},
            "total": {"type": "number"},
            "minimum": {"type": "number"},
            "lines": {"type": "array", "maxItems": 200, "items": LINE},
        },
    },
    "outputSchema": {
        "type": "object",
        "required": ["order"],
        "properties": {"order": {"type": "string"}, "lines": {"type": "array", "items": LINE}},
    },
}


def arguments() -> dict[str, Any]:
    """About 1.9 kB of an order."""
    lines = [
        {"sku": f"SKU-{n:05}", "quantity": n + 1, "price": 9.5 + n, "tags": ["a", "b"]}
        for n in range(22)
    ]
    return {
        "account": "DE44500105175407324931", "currency": "EUR", "memo": "m" * 300, "lines": lines,
        "total": 4_000, "minimum": 10,
    }  # fmt: skip


def made(snapshot: Snapshot) -> tuple[Any, ToolCall]:
    """A call as the layers before the gate leave it."""
    parsed = {
        "jsonrpc": "2.0", "id": 7, "method": "tools/call",
        "params": {"name": "order", "arguments": arguments()},
    }  # fmt: skip
    message = Message(
        raw=orjson.dumps(parsed), parsed=parsed, method="tools/call", id=b"7", era=Era.STATELESS
    )
    server = snapshot.servers["bank"]
    tool = ToolCall(
        server=server, message=message, tool="order", public="order", rule=server.rule("order")
    )
    return SimpleNamespace(snapshot=snapshot, notes=[], received=0), tool


async def schema_gate_cpu_us(rounds: int = 7, calls: int = 2_000) -> dict[str, Any]:
    """CPU microseconds of the gate per call: smallest, median and largest round."""
    text = POLICY.encode()
    snapshot = compiled(load_texts({"bench.yaml": text}, env={}), revision=1)
    call, tool = made(snapshot)
    clock = SimpleNamespace(now=lambda: 0)

    async def fetch(_call: Any, _server: Any) -> list[Any]:
        return [DEFINITION]

    contracts = Contracts(Definitions(fetch, clock))  # type: ignore[arg-type]
    rule = tool.rule
    assert rule is not None
    value = {
        "content": [{"type": "text", "text": "order placed " * 20}],
        "structuredContent": {"order": "o-1", "lines": arguments()["lines"]},
        "resultType": "complete",
    }
    size = len(orjson.dumps(value))

    async def gate() -> None:
        tool.returned(value, size)
        definition = await contracts.look(call, tool, rule)
        for case in rule.cases:
            conditions.met(case.when, tool.arguments)
        assert contracts.result(call, tool, rule, definition, value) is None

    await gate()
    found, control = [], []
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(calls):
            await gate()
        found.append((time.process_time() - began) / calls * 1e6)
        began = time.process_time()
        for _ in range(calls):
            orjson.loads(tool.message.raw)
        control.append((time.process_time() - began) / calls * 1e6)
    return {
        "schema_gate_cpu_us": round(statistics.median(found), 1),
        "schema_gate_cpu_us_range": [round(min(found), 1), round(max(found), 1)],
        "control_us": round(statistics.median(control), 2),
        "bytes": len(tool.message.raw),
        "goal_us": GOAL_US,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; JSON is always printed")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    began = time.monotonic()
    result = asyncio.run(schema_gate_cpu_us(max(3, options.rounds)))
    finish(result, began=began, seed=0)


if __name__ == "__main__":
    main()
