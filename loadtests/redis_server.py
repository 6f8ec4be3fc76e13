"""The real Redis or Valkey that load tests of the shared store run on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct

import redis

from gateway import private_store
from loadtests import measure


class Store:
    """A real server on a free port, in memory, that can be killed and brought back."""

    def __init__(self, *, core: int | None = None) -> None:
        """Nothing runs yet; on that core, where one is given."""
        self.core = core
        self.port = measure.free_port()
        found = private_store.find()
        if found is None:
            raise SystemExit(f"no server to share: {private_store.HINT}")
        self.binary = found
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            str(self.binary), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--loglevel", "warning", stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        if self.core is not None and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._process.pid, {self.core})
        for _ in range(500):
            with contextlib.suppress(redis.RedisError), self.client() as client:
                client.ping()
                return
            await asyncio.sleep(0.02)
        raise RuntimeError("the store did not start")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def cpu_s(self) -> float:
        with self.client() as client:
            found = client.info("cpu")
        return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


NUMBERS, LANES_OF_NUMBERS = 28, 20
"""Single numbers of a pool's state, and those of its lanes; see `admit.lua`."""


def leases(client: redis.Redis, base: str) -> dict[str, float]:
    """Ids of the calls in flight of a pool, each with the instant at which its lease ends.

    Older grants lie in a hash, young ones and those that ended lately in the state itself.
    """
    state, rules = client.get(f"{base}:st"), client.get(f"{base}:cf")
    if state is None or rules is None:
        return {}
    held = {
        rid: struct.unpack_from("<dd", raw)[1] for rid, raw in client.hgetall(f"{base}:if").items()
    }
    dims = rules[24]
    numbers = struct.unpack_from(f"<{10 + 12 * dims}d", rules, 25)
    each = [numbers[10 + 12 * i : 22 + 12 * i] for i in range(dims)]
    logs = {one[1] for one in each if one[6] and not one[10]}
    at = 8 * NUMBERS + 24 + 8 * (LANES_OF_NUMBERS + 5 * dims + 3 * len(logs))
    while at < len(state) and state[at] in {1, 2}:  # they come first
        size = struct.unpack_from("<H", state, at + 1)[0]
        rid = state[at + 3 : at + 3 + size]
        if state[at] == 2:
            held.pop(rid, None)
            at += 3 + size
        else:
            more = struct.unpack_from("<H", state, at + 3 + size)[0]
            held[rid] = struct.unpack_from("<dd", state, at + 5 + size)[1]
            at += 5 + size + more
    return {rid.decode(): end for rid, end in held.items()}
