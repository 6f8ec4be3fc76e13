"""Real Redis and Valkey servers for tests: on a free port of loopback, in memory, ended with us."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import redis

from gateway import private_store
from tests.fixtures.ports import free_port


@dataclass
class Server:
    """One running server."""

    name: str
    port: int
    process: subprocess.Popen
    folder: Path

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)


def binaries() -> dict[str, Path]:
    """Every server that this machine has, by kind."""
    found = {}
    redis7 = shutil.which("redis-server")
    if redis7 is not None:
        found["redis"] = Path(redis7)
    valkey = private_store.bundled()
    if valkey is not None:
        found["valkey"] = valkey
    return found


@contextlib.contextmanager
def running(name: str, *options: str, port: int = 0):
    """A server of that kind until the block ends."""
    port = port or free_port()
    folder = Path(tempfile.mkdtemp(prefix="tidegate-redis-"))
    command = [
        str(binaries()[name]), "--port", str(port), "--bind", "127.0.0.1", "--save", "",
        "--appendonly", "no", "--dir", str(folder), "--loglevel", "warning", *options,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = Server(name, port, process, folder)
    try:
        _await_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _await_ready(server: Server) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with server.client() as client:
                client.ping()
                return
        except redis.exceptions.AuthenticationError:
            return  # it listens, and wants a password
        except redis.exceptions.RedisError:
            if time.monotonic() > deadline or server.process.poll() is not None:
                raise
            time.sleep(0.02)


@contextlib.contextmanager
def sentinel(primary: int):
    """A sentinel that calls the server on that port `tide`, and needs nobody's consent."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-sentinel-"))
    config = folder / "sentinel.conf"
    config.write_text(
        f"sentinel monitor tide 127.0.0.1 {primary} 1\n"
        "sentinel down-after-milliseconds tide 500\n"
        "sentinel failover-timeout tide 3000\n"
    )
    port = free_port()
    process = subprocess.Popen(
        [str(binaries()["redis"]), str(config), "--sentinel", "--port", str(port),
         "--bind", "127.0.0.1", "--dir", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    server = Server("sentinel", port, process, folder)
    try:
        _await_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
