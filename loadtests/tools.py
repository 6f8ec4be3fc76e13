"""The tool plane under load: CPU of a call, memory of sessions, what churn leaves behind.

* **calls**: `tools/call` of the stateless era at 64 in flight, 1 kB of arguments, identity, limits,
  log and metrics on; CPU time of the gateway's tree per call, in rounds that alternate with the
  control, a pass-through without any of it.
* **sessions**: 2,000 sessions of the older era, each with its standing stream open at gateway and
  server: what the gateway's tree holds then, in all.
* **churn**: 10,000 times initialize, one call, DELETE; afterwards the server must have no session,
  no stream and the gateway none either.
* `schema_gate_cpu_us`: CPU of checking a 2 kB call against its tool's schema, in process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from loadtests import generator, governed, measure
from loadtests.measure import say
from loadtests.schema_gate import schema_gate_cpu_us

if TYPE_CHECKING:
    from loadtests.measure import Server

SESSIONS = 2_000
CHURN = 10_000
CONCURRENT = 64
ROUNDS = 3
CPU_S = 1.0
AGENTS = 100
PATH = "/mcp/load"
VERSION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
}
ARGUMENTS = {"query": "seven quiet rivers " * 40, "limit": 20, "filters": {"year": [2024, 2025]}}
DISCOVERED = {
    "supportedVersions": [VERSION], "capabilities": {"tools": {}}, "resultType": "complete",
    "ttlMs": 0, "cacheScope": "public",
}  # fmt: skip
RESULT = {"content": [{"type": "text", "text": "x" * 200}], "resultType": "complete"}
POLICY = """version: 1
providers:
  origin:
    kind: openai
    base_url: ${ORIGIN_URL}
    keys: [{id: main, value: "${ORIGIN_KEY}"}]
models:
  m: {provider: origin, pool: per_model}
servers:
  load:
    url: ${ORIGIN_URL}
    limits: {rpm: 100M, concurrency: 20000}
agents:
  load: {keys: [{pattern: "load-*"}], limits: {rpm: 100M}, loopback_only: true}
"""


def key(number: int) -> str:
    """The key of one of the agents."""
    return f"load-{number % AGENTS:03d}-0123456789abcdef"


def message(number: int, method: str, params: dict[str, Any]) -> bytes:
    """A JSON-RPC request."""
    body = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    return json.dumps(body).encode()


def answer(ident: bytes, result: dict[str, Any]) -> bytes:
    """A response of the tool server; `ident` is JSON text."""
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (ident, json.dumps(result).encode())


def named_one(number: int) -> bytes:
    """A call of the stateless era whose JSON-RPC id is 1: its answer can be made beforehand."""
    return stateless(number, ident=1)


def stateless(number: int, *, ident: int | None = None) -> bytes:
    """A call of the stateless era."""
    params = {"name": "search", "arguments": ARGUMENTS, "_meta": META}
    headers = {
        "accept": "application/json, text/event-stream", "mcp-protocol-version": VERSION,
        "mcp-method": "tools/call", "mcp-name": "search",
    }  # fmt: skip
    body = message(number if ident is None else ident, "tools/call", params)
    return generator.post(PATH, body, key=key(number), headers=headers)


def older(body: bytes, agent: int, session: str = "") -> bytes:
    """A message of the session era."""
    headers = {"accept": "application/json, text/event-stream"}
    if session:
        headers |= {"mcp-session-id": session, "mcp-protocol-version": "2025-11-25"}
    return generator.post(PATH, body, key=key(agent), headers=headers)


def bare(method: str, agent: int, session: str) -> bytes:
    """GET or DELETE of a session."""
    lines = [f"{method} {PATH} HTTP/1.1", "host: 127.0.0.1", f"authorization: Bearer {key(agent)}",
             "accept: text/event-stream", f"mcp-session-id: {session}"]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


CLIENT = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "load", "version": "1"},
}
INITIALIZE = message(1, "initialize", CLIENT)
CALL = message(2, "tools/call", {"name": "search", "arguments": {"q": 1}})


async def begun(client: generator.Client, agent: int) -> str:
    """A session's id."""
    found: list[bytes] = []
    client.on_head = found.append
    status = await client.exchange(older(INITIALIZE, agent))
    client.on_head = None
    for line in found:
        name, _, value = line.partition(b": ")
        if name.lower() == b"mcp-session-id":
            return value.decode()
    raise RuntimeError(f"no session: status {status}")


async def stats(origin: Server) -> dict[str, int]:
    """The server's own books."""
    said: dict[str, int] = json.loads(await generator.fetch(origin.port, "/stats"))
    return said


async def calls(gateway: Server, control: Server, origin: Server) -> dict[str, Any]:
    """CPU of a call, interleaved with the control."""
    figures: dict[str, list[float]] = {"gateway": [], "control": []}
    errors = 0
    validity = measure.Validity()
    for _ in range(ROUNDS):
        for name, server in (("gateway", gateway), ("control", control)):
            one = await measure.sample(
                server, origin,
                lambda enough, server=server: generator.closed_loop(
                    server.port, stateless, concurrency=CONCURRENT, until=enough
                ),
                cpu_s=CPU_S,
            )  # fmt: skip
            figures[name].append(one.ms_per_call)
            errors += one.tally.failures
            validity.look(name, one, saturating=True)
    ratios = [
        ours / theirs for ours, theirs in zip(figures["gateway"], figures["control"], strict=True)
    ]
    say(f"c64: {figures}")
    return {
        **measure.summary("cpu_ms_per_call_c64", figures["gateway"]),
        **measure.summary("control_cpu_ms_per_call_c64", figures["control"]),
        "ratio_c64": round(statistics.median(ratios), 3),
        "errors": errors,
        "invalid": validity.reasons,
    }


async def many_sessions(gateway: Server, origin: Server) -> dict[str, Any]:
    """Sessions with their streams, and what they weigh."""
    idle = measure.pss_mb(gateway.pid)
    clients: list[generator.Client] = []
    client = await generator.connect(gateway.port)
    for number in range(SESSIONS):
        session = await begun(client, number)
        stream = await generator.connect(gateway.port)
        stream.exchange(bare("GET", number, session)).cancel()
        clients.append(stream)
    await asyncio.sleep(2)
    held = measure.pss_mb(gateway.pid)
    seen = await stats(origin)
    for stream in clients:
        stream.close()
    client.close()
    say(f"{seen['sessions']} sessions, {seen['streams']} streams: {held:.0f} MB, idle {idle:.0f}")
    return {
        "sessions": seen["sessions"], "streams": seen["streams"],
        "mb_sessions": round(held, 1), "mb_idle": round(idle, 1),
    }  # fmt: skip


async def churn(gateway: Server, origin: Server) -> dict[str, Any]:
    """Sessions that come and go."""
    before = await stats(origin)
    numbers = iter(range(CHURN))
    errors = 0

    async def slot() -> None:
        nonlocal errors
        client = await generator.connect(gateway.port)
        for number in numbers:
            session = await begun(client, number)
            errors += await client.exchange(older(CALL, number, session)) != 200
            errors += await client.exchange(bare("DELETE", number, session)) != 200
        client.close()

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENT):
            group.create_task(slot())
    took = time.monotonic() - began
    await asyncio.sleep(1)
    after = await stats(origin)
    page = (await generator.fetch(gateway.admin_port, "/metrics")).decode()
    ours = [line for line in page.splitlines() if line.startswith("tidegate_tool_sessions{")]
    say(f"churn: {CHURN} in {took:.1f} s, at the server {before} -> {after}, at the gateway {ours}")
    left = sum(float(line.rpartition(" ")[2]) for line in ours if 'kind="client"' in line)
    return {
        "leaked_sessions": after["sessions"] - before["sessions"] + max(0, round(left) - SESSIONS),
        "leaked_streams": after["streams"], "churned": CHURN, "churn_errors": errors,
        "churn_s": round(took, 1),
    }  # fmt: skip


async def measure_all() -> dict[str, Any]:
    measure.raise_files()
    measure.pin_self(1)
    port = measure.free_port()
    command = [sys.executable, "-m", "loadtests.tool_origin", "--port", str(port)]
    origin = await measure.start("tool origin", command, port=port, core=1)
    with contextlib.ExitStack() as stack:
        stack.callback(origin.stop)
        control = await measure.start_control(origin)
        stack.callback(control.stop)
        gateway = await governed.start(origin, text=POLICY)
        stack.callback(gateway.stop)
        result = await calls(gateway.server, control, origin)
        result |= await many_sessions(gateway.server, origin)
        result |= await churn(gateway.server, origin)
    gate = await schema_gate_cpu_us(rounds=3, calls=1_000)
    return result | {"schema_gate_cpu_us": gate["schema_gate_cpu_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON (always done)"
    )
    parser.parse_args()
    began = time.monotonic()
    measure.finish(asyncio.run(measure_all()), began=began)


if __name__ == "__main__":
    main()
