"""The real Redis or Valkey that load tests of the shared store run on."""

from __future__ import annotations

import asyncio
import contextlib
import os

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
