"""The gateway as it is measured: everything on, and a probe that says what truly is.

The policy is written for the run: 100 agents with a hashed key and limits of their own, one pool
with the provider's limits, tiers, retries, breakers, loop rules, metrics, access log. Limits are
so high that nothing ever waits: what is measured is the deciding, not the waiting."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests import generator, measure

if TYPE_CHECKING:
    from loadtests.measure import Server

KEYS = 100
MODEL = "bench-1"
PATH = "/v1/chat/completions"


def key(number: int) -> str:
    """The key of one of the agents; a constant of the bench, no secret."""
    return f"tg_bench{number % KEYS}_0123456789abcdef0123456789abcdef"


def stored(text: str) -> str:
    """The key as the policy holds it."""
    salt = hashlib.sha256(b"bench" + text.encode()).digest()[:8]
    return f"sha256:{salt.hex()}:{hashlib.sha256(salt + text.encode()).hexdigest()}"


def policy() -> str:
    """The policy of a measured gateway."""
    agents = "".join(
        f"  agent-{number}:\n"
        f"    tenant: tenant-{number % 10}\n"
        f'    keys: [{{id: bench{number}, hash: "{stored(key(number))}"}}]\n'
        f"    limits: {{rpm: 100M, tpm: 1G}}\n"
        for number in range(KEYS)
    )
    tenants = "".join(f"  tenant-{number}: {{weight: {number % 3 + 1}}}\n" for number in range(10))
    return f"""version: 1
providers:
  origin:
    kind: openai
    base_url: ${{ORIGIN_URL}}
    keys: [{{id: bench, value: "${{ORIGIN_KEY}}"}}]
pools:
  quota:
    provider: origin
    limits: {{rpm: 100M, tpm: 8G, concurrency: 20000}}
models:
  {MODEL}:
    provider: origin
    pool: quota
    context_window: 200k
tenants:
{tenants}agents:
{agents}retry:
  attempts: 3
loops:
  mode: shadow
logging:
  access: true
"""


@dataclass(slots=True)
class Governed:
    """A started gateway."""

    server: Server
    folder: Path

    def stop(self) -> None:
        """End it and remove its files."""
        self.server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


async def start(
    origin: Server, *, text: str | None = None, settings: dict[str, str] | None = None
) -> Governed:
    """The gateway in front of that upstream, ready; `start_s` is the time to readiness.

    Args:
        origin: The upstream.
        text: Its policy; None for the one of this file.
        settings: Further variables of its environment.

    Raises:
        RuntimeError: It did not become ready.
    """
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
    (folder / "policy.yaml").write_text(text or policy())
    port, admin = measure.free_port(), measure.free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    for name in ("TIDEGATE_VOCABULARY_DIR",):
        if name in os.environ:
            env[name] = os.environ[name]
    env |= {
        "TIDEGATE_POLICY": str(folder / "policy.yaml"),
        "TIDEGATE_HOST": "127.0.0.1",
        "TIDEGATE_PORT": str(port),
        "TIDEGATE_ADMIN_HOST": "127.0.0.1",
        "TIDEGATE_ADMIN_PORT": str(admin),
        "TIDEGATE_STATE_DIR": str(folder / "state"),
        "ORIGIN_URL": f"http://127.0.0.1:{origin.port}",
        "ORIGIN_KEY": "sk-bench",
        **(settings or {}),
    }
    began = time.monotonic()
    try:
        server = await measure.start(
            "gateway", [sys.executable, "-m", "gateway", "serve"], port=port, env=env,
            output=folder / "log",
        )  # fmt: skip
        server.admin_port = admin
        await _ready(server, admin)
    except RuntimeError as error:
        log = folder / "log"
        tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"{error}\n{tail}") from error
    server.start_s = time.monotonic() - began
    return Governed(server, folder)


async def _ready(server: Server, admin: int) -> None:
    await measure.until_open(admin, server.process)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            client = await generator.connect(admin)
            status = await client.exchange(b"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            client.close()
        except (ConnectionError, OSError):
            status = 0
        if status == 200:
            return
    server.stop()
    raise RuntimeError("gateway: never ready")


async def features(gateway: Governed) -> list[str]:
    """What is truly on, found out from outside by calls and by the metrics page."""
    found = []
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]}
    ).encode()
    head: list[bytes] = []

    async def status(secret: str, content: bytes = body) -> int:
        client = await generator.connect(gateway.server.port)
        client.on_head = head.append
        try:
            return await client.exchange(generator.post(PATH, content, key=secret))
        finally:
            client.close()

    if await status("tg_bench0_wrong") == 401:
        found.append(f"identity:{KEYS}-hashed-keys")
    if await status(key(1), body.replace(MODEL.encode(), b"no-such-model")) in (403, 404):
        found.append("policy")
    before = await generator.fetch(gateway.server.admin_port, "/metrics")
    head.clear()
    good = await status(key(2))
    headers = b"\n".join(head).lower()
    if good == 200 and b"tidegate-tokens-reserved:" in headers:
        value = headers.partition(b"tidegate-tokens-reserved:")[2].split(b"\n")[0].strip()
        if value.isdigit() and int(value) > 0:
            found.append("count")
            found.append("admission:local")
    if b"tidegate-call-id:" in headers:
        found.append("response-headers")
    await asyncio.sleep(1.1)  # a page is rendered at most once a second
    page = await generator.fetch(gateway.server.admin_port, "/metrics")
    if b"tidegate_" in page and page != before:
        found.append("metrics")
    if b"tidegate_breaker_failures" in page:
        found.append("breaker")
    if b"tidegate_tokenizer_exact 1" in page:
        found.append("tokenizer:exact")
    if b"loop" in page:
        found.append("loops:shadow")
    if b'"' in (gateway.folder / "log").read_bytes():
        found.append("log")
    return found
