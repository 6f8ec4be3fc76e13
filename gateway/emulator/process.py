"""`tidegate emulate`: the emulator as a process of its own, until a signal or its parent's end."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.emulator.config import ConfigError, EmulatorConfig, Pacing, from_mapping
from gateway.emulator.server import serve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

READY = "emulator ready "
"""Printed with the URL once calls are served; `gateway/beside.py` waits for it."""


def configured(
    mapping: Mapping[str, Any] | None, *, seed: int | None, fast: bool
) -> EmulatorConfig:
    """The configuration of the command line.

    Raises:
        ConfigError: The mapping is not one.
    """
    config = EmulatorConfig() if mapping is None else from_mapping(mapping)
    if seed is not None:
        config = replace(config, seed=seed)
    if fast:
        config = replace(config, pacing=Pacing())
    return config


def run(config: EmulatorConfig, *, host: str, port: int, with_parent: bool = False) -> int:
    """Serve until SIGINT, SIGTERM or, if asked, the end of standard input. The exit status."""
    failed = False
    try:
        asyncio.run(_main(config, host, port, with_parent=with_parent))
    except* OSError as errors:  # out of a task group
        error = errors.exceptions[0]
        why = getattr(error, "strerror", None) or error
        sys.stderr.write(f"tidegate: the emulator cannot listen on {host}:{port}: {why}\n")
        failed = True
    return 1 if failed else 0


async def _main(config: EmulatorConfig, host: str, port: int, *, with_parent: bool) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def ready(listening: int) -> None:
        sys.stdout.write(f"{READY}http://{host}:{listening}\n")
        sys.stdout.flush()

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(_parent_gone(stop)) if with_parent else None
        await serve(config, host=host, port=port, ready=ready, stop=stop)
        if watcher is not None:
            watcher.cancel()


async def _parent_gone(stop: asyncio.Event) -> None:
    """Set `stop` at the end of standard input: the parent is gone, however it went."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while await reader.read(4096):
        pass
    stop.set()


__all__ = ["READY", "ConfigError", "configured", "run"]
