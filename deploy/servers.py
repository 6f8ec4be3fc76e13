"""Servers that the tests of the shared store compare with: `python deploy/servers.py`.

Valkey comes in a wheel of the development environment. Redis 7 comes from the system: where it
is absent and this user may install Debian packages, it is installed; else Valkey alone is tested
and this says so. Never fails: everything is tested on Valkey all the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def main() -> None:
    """Redis is on PATH, or its absence is said."""
    if shutil.which("redis-server") is not None:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        sys.stderr.write("no redis-server here: the shared store is tested on Valkey alone\n")
        return
    # A package's own service must not start: the tests run their servers on ports of their own.
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (
        ["apt-get", "-qq", "update"],
        ["apt-get", "-qq", "install", "-y", "--no-install-recommends", "redis-server"],
    ):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(f"{' '.join(command)}: {done.stderr.strip()[-300:]}\n")
    if shutil.which("redis-server") is None:
        sys.stderr.write("redis-server could not be installed: Valkey alone is tested\n")


if __name__ == "__main__":
    main()
