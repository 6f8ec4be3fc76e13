"""Starts gateways with the policies of `policies/` and plays what needs them (FORM.md §5).

Each lane is a gateway of its own: free ports, a state folder of its own, its own scripted
upstream. The gateway is started as an operator would start it, `python -m gateway serve`, and told
everything by TIDEGATE_* variables; nothing of it is imported."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cases import skips
from tests.cases.accounts import Accounts
from tests.cases.client import Request, call
from tests.cases.player import Lane, NoHooks, Outcome, play_all, solitary
from tests.cases.store import Store
from tests.cases.upstream import Upstream
from tests.fixtures.ports import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from tests.cases.form import Variant

POLICIES = Path(__file__).parent / "policies"
ROOT = Path(__file__).parents[2]
KEY = "tg-test"
"""The client key without limits in every policy of `policies/`. A test's constant, no secret."""

FLEETS = {"fleet": 2, "ten-per-minute-fleet": 3, "redis": 1}
"""Set-ups whose gateways share a store, and how many they are."""

APPROVER = b"tidegate fault cases approver"
"""The approver's private key is this text's SHA-256; policy holds the public half."""
DECISIONS = {"approve": "grant", "reject": "deny"}
START_LIMIT = 60.0
STOP_LIMIT = 10.0
SCRAPE_AGE = 1.1


class NotStarted(Exception):
    """The gateway did not become ready; holds the end of its log."""


def log_reader(path: Path) -> Callable[[int], tuple[str, int]]:
    """Reads a growing log from a position; -1 is its end."""

    def read(position: int) -> tuple[str, int]:
        size = path.stat().st_size if path.exists() else 0
        if position < 0 or not path.exists():
            return "", size
        with path.open("rb") as file:
            file.seek(position)
            return file.read().decode("utf-8", "replace"), size

    return read


@dataclass(slots=True, kw_only=True)
class Gateway:
    """One started process."""

    process: asyncio.subprocess.Process
    folder: Path
    port: int
    admin_port: int
    policy: Path
    environment: dict[str, str]

    @property
    def log(self) -> Path:
        """Standard output and error of the process."""
        return self.folder / "log"

    def ended(self) -> str:
        """That it ended by itself, with the end of its log; "" while it runs."""
        status = self.process.returncode
        if status is None:
            return ""
        return f"the gateway ended by itself, exit {status}; the end of its log:\n{self.tail()}"

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not listen."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_LIMIT):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def environment(
    folder: Path, policy: Path, port: int, admin: int, upstream: Upstream
) -> dict[str, str]:
    """What the gateway is told: all it needs, and nothing of the developer's own TIDEGATE_*."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    if "TIDEGATE_VOCABULARY_DIR" in os.environ:
        kept["TIDEGATE_VOCABULARY_DIR"] = os.environ["TIDEGATE_VOCABULARY_DIR"]
    return kept | {
        "TIDEGATE_POLICY": str(policy),
        "TIDEGATE_HOST": "127.0.0.1",
        "TIDEGATE_PORT": str(port),
        "TIDEGATE_ADMIN_HOST": "127.0.0.1",
        "TIDEGATE_ADMIN_PORT": str(admin),
        "TIDEGATE_STATE_DIR": str(folder / "state"),
        "UPSTREAM_URL": f"http://{upstream.host}:{upstream.ports[0]}",
        "UPSTREAM_1_URL": f"http://{upstream.host}:{upstream.ports[1]}",
    }


async def _ready(gateway: Gateway, limit: float = START_LIMIT) -> None:
    """Wait until the gateway serves.

    Raises:
        NotStarted: It ended or was not ready in time.
    """
    end = time.monotonic() + limit
    head = f"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1:{gateway.admin_port}\r\n\r\n".encode()
    while time.monotonic() < end:
        if gateway.process.returncode is not None:
            break
        done = await call(
            ("127.0.0.1", gateway.admin_port), Request(method="GET", head=head), limit=2
        )
        if done.status == 200:
            return
        await asyncio.sleep(0.05)
    tail = gateway.tail()
    await gateway.stop()
    raise NotStarted(f"exit {gateway.process.returncode}; the end of its log:\n{tail}")


async def start(policy: str, upstream: Upstream, *, store: Store | None = None) -> Gateway:
    """A gateway that runs that set-up and is ready, one of a fleet where there is a store.

    Raises:
        NotStarted: It did not become ready.
    """
    folder = Path(tempfile.mkdtemp(prefix="tidegate-cases-"))
    copy = folder / "policy.yaml"
    shutil.copy(POLICIES / f"{policy}.yaml", copy)
    port, admin = free_port(), free_port()
    env = environment(folder, copy, port, admin, upstream)
    if store is not None:
        env["TIDEGATE_REDIS_URL"] = store.url
        env["TIDEGATE_SECRET_FILE"] = str(store.secret)
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "serve",
            cwd=ROOT, env=env, stdout=log, stderr=asyncio.subprocess.STDOUT,
            stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    gateway = Gateway(
        process=process, folder=folder, port=port, admin_port=admin, policy=copy, environment=env
    )
    await _ready(gateway)
    return gateway


class Operator:
    """The hooks: other policy files, SIGHUP, the policy check, an approver's decisions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def run(self, name: str) -> tuple[int, str]:
        """`policy-NAME` swaps the policy and sends SIGHUP; `check-NAME` runs `tidegate check`."""
        if name in DECISIONS:
            return await self._decide(DECISIONS[name])
        kind, _, _ = name.partition("-")
        file = POLICIES / f"{name}.yaml"
        if not file.exists():
            return 127, f"no file {file.name} for the hook {name}"
        if kind == "check":
            return await self._check(file)
        if kind == "policy":
            shutil.copy(file, self._gateway.policy.with_suffix(".new"))
            self._gateway.policy.with_suffix(".new").replace(self._gateway.policy)
            self._gateway.process.send_signal(signal.SIGHUP)
            return 0, ""
        return 127, f"no hook {name}"

    async def _check(self, file: Path) -> tuple[int, str]:
        return await self._tidegate("check", str(file))

    async def _decide(self, decision: str) -> tuple[int, str]:
        """The newest pending call is granted or denied, as an approver does it."""
        code, text = await self._tidegate("approvals", "list", "--json")
        pending = json.loads(text)["approvals"] if code == 0 else []
        if not pending:
            return 1, f"nothing waits for a decision: {text[:300]}"
        newest = max(pending, key=lambda one: (one["requested"], one["id"]))["id"]
        key = self._gateway.folder / "approver.key"
        key.write_bytes(base64.b64encode(hashlib.sha256(APPROVER).digest()))
        key.chmod(0o600)
        return await self._tidegate("approvals", decision, newest, "--key", str(key), "--yes")

    async def _tidegate(self, *arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", *arguments,
            cwd=ROOT, env=self._gateway.environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode("utf-8", "replace")


@contextlib.asynccontextmanager
async def lanes_of(policy: str, count: int) -> AsyncIterator[list[Lane]]:
    """That many gateways with that policy, each with its own upstream; stopped at the end."""
    file = "plain" if policy == "check-command" else policy
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            upstream = Upstream()
            await upstream.start()
            stack.push_async_callback(upstream.stop)
            store = None
            if policy in FLEETS:
                store = Store()
                await store.start()
                stack.push_async_callback(store.stop)
            fleet = []
            for _ in range(FLEETS.get(policy, 1)):
                fleet.append(await start(file, upstream, store=store))
                stack.push_async_callback(fleet[-1].stop)
            first = fleet[0]
            made.append(
                Lane(
                    policy=policy,
                    gateways=tuple(("127.0.0.1", gateway.port) for gateway in fleet),
                    upstream=upstream,
                    key=KEY,
                    books=Accounts(
                        admins=tuple(("127.0.0.1", gateway.admin_port) for gateway in fleet),
                        pids=tuple(gateway.process.pid for gateway in fleet),
                        stale=SCRAPE_AGE,
                    ),
                    hooks=store or (Operator(first) if policy != "plain" else NoHooks()),
                    log=log_reader(first.log),
                    ended=functools.partial(_ended, fleet),
                )
            )
        yield made


def _ended(fleet: Iterable[Gateway]) -> str:
    return "\n".join(why for gateway in fleet if (why := gateway.ended()))


async def play_setups(
    variants: Iterable[Variant],
    *,
    only: Sequence[str] = (),
    lanes: int = 2,
    jobs: int = 8,
    beside: int = 1,
    everything: bool = False,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Play each variant in the set-up it needs.

    So many set-ups are there at a time (`beside`); one with a variant that nobody may disturb comes
    after all others, alone.
    """
    outcomes: list[Outcome] = []
    todo: dict[str, list[Variant]] = {}
    for variant in variants:
        why = "" if everything else skips.reason(variant)
        if not why and only and variant.policy not in only:
            why = f"needs the set-up {variant.policy}"
        if why:
            outcomes.append(Outcome(variant=variant, skipped=why))
        else:
            todo.setdefault(variant.policy, []).append(variant)
    room = asyncio.Semaphore(beside)

    async def play_one(policy: str, chosen: list[Variant]) -> None:
        async with room:
            outcomes.extend(await _play_setup(policy, chosen, lanes=lanes, jobs=jobs, tell=tell))

    alone = {policy for policy, chosen in todo.items() if any(solitary(one) for one in chosen)}
    async with asyncio.TaskGroup() as group:
        for policy, chosen in todo.items():
            if policy not in alone:
                group.create_task(play_one(policy, chosen))
    for policy in sorted(alone):
        await play_one(policy, todo[policy])
    return outcomes


async def _play_setup(
    policy: str,
    chosen: list[Variant],
    *,
    lanes: int,
    jobs: int,
    tell: Callable[[Outcome], None],
) -> list[Outcome]:
    try:
        async with lanes_of(policy, min(lanes, 1 + len(chosen) // 12)) as made:
            played = await play_all(chosen, made, jobs=jobs, tell=tell)
            ends = tuple(why for lane in made if (why := lane.ended()))
        return [replace(one, problems=(*one.problems, *ends)) for one in played]
    except (NotStarted, OSError) as error:
        failed = [
            Outcome(variant=variant, problems=(f"set-up {policy}: {error}",)) for variant in chosen
        ]
        for one in failed:
            tell(one)
        return failed
