"""The provider emulator as an upstream of load tests, and both sides' books.

The emulator runs as a process of its own on the generator's core. Its ledger is one side; the other
is what the gateway itself says: its access log (a line per call), its metrics and its status. No
figure of a proof is taken from the clients where one of the books knows it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtests import generator, governed, measure

if TYPE_CHECKING:
    from loadtests.governed import Governed
    from loadtests.measure import Server

QUOTA_KINDS = ("requests", "tokens", "input", "output", "concurrency")


async def start(config: dict[str, Any], *, folder: Path | None = None) -> Server:
    """The emulator with that configuration, listening."""
    folder = folder or Path(tempfile.mkdtemp(prefix="tidegate-emulator-"))
    path = folder / "emulator.json"
    path.write_text(json.dumps(config))
    port = measure.free_port()
    return await measure.start(
        "emulator",
        [sys.executable, "-m", "gateway", "emulate", "--port", str(port), "--config", str(path)],
        port=port, core=1, output=folder / "log",
    )  # fmt: skip


async def ledger(emulator: Server, *, timeline: bool = False) -> dict[str, Any]:
    """The emulator's books."""
    path = "/emulator/ledger" + ("?timeline=1" if timeline else "")
    found: dict[str, Any] = json.loads(await generator.fetch(emulator.port, path))
    return found


def quota_refusals(books: dict[str, Any]) -> int:
    """Calls that the emulator's meters turned away."""
    return sum(count for kind, count in books["refused"].items() if kind in QUOTA_KINDS)


async def status(gateway: Governed) -> dict[str, Any]:
    """What the admin listener shows."""
    found: dict[str, Any] = json.loads(await generator.fetch(gateway.server.admin_port, "/status"))
    return found


async def metrics(gateway: Governed) -> dict[str, float]:
    """Every sample of the metrics page, by its name with labels; waits for a fresh page."""
    await asyncio.sleep(1.1)  # a page is rendered at most once a second
    page = (await generator.fetch(gateway.server.admin_port, "/metrics")).decode()
    samples = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    """The sum of a counter's samples with those labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for sample, value in samples.items()
        if (sample == name or sample.startswith(name + "{")) and all(w in sample for w in wanted)
    )


def calls(gateway: Governed) -> list[dict[str, Any]]:
    """The access log: one entry per call that ended."""
    found = []
    for line in (gateway.folder / "log").read_bytes().splitlines():
        if line.startswith(b"{"):
            entry = json.loads(line)
            if "call" in entry and "outcome" in entry:
                found.append(entry)
    return found


async def quiet(gateway: Governed, *, limit: float = 10.0) -> dict[str, Any]:
    """The status once nothing is under way, or as it stands after `limit` seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit
    while True:
        seen = await status(gateway)
        pools = seen["pools"]
        busy = seen["in_flight"] + sum(p["in_flight"] + sum(p["waiting"]) for p in pools)
        if not busy or loop.time() > end:
            return seen
        await asyncio.sleep(0.05)


async def tool_server(folder: Path) -> measure.Server:
    """The tool server of the load tests, on a port of its own."""
    port = measure.free_port()
    command = [sys.executable, "-m", "loadtests.tool_origin", "--port", str(port)]
    return await measure.start("tools", command, port=port, core=1, output=folder / "tools.log")


async def stand(config: dict[str, Any], policy: str) -> None:
    """An emulator, a tool server and a gateway before both, until standard input ends.

    The gateway's URL and the emulator's stand on one line of standard output; the policy finds the
    tool server at `${TOOLS_URL}`.

    For programs that cannot start them themselves, such as locust, whose gevent owns processes.
    """
    with tempfile.TemporaryDirectory(prefix="tidegate-emulator-") as folder:
        emulator = await start(config, folder=Path(folder))
        tools = None
        try:
            tools = await tool_server(Path(folder))
            settings = {"TOOLS_URL": f"http://127.0.0.1:{tools.port}"}
            gateway = await governed.start(emulator, text=policy, settings=settings)
            try:
                urls = [f"http://127.0.0.1:{port}" for port in (gateway.server.port, emulator.port)]
                print(*urls, flush=True)
                await asyncio.to_thread(sys.stdin.read)
            finally:
                gateway.stop()
        finally:
            emulator.stop()
            if tools is not None:
                tools.stop()
