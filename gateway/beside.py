"""The provider emulator beside the gateway: a child process, started only where a policy names it.

A process of its own, so that its CPU time is never taken for the gateway's, and so that a busy
emulator cannot delay a call. It dies with its parent: the child watches its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from gateway.clock import Expiry
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from gateway.clock import Clock

START: Micros = 15 * MICRO
STOP: Micros = 3 * MICRO
READY = b"emulator ready "


class EmulatorFailed(OSError):
    """The emulator did not start; the message says what it said."""


class Emulator:
    """A running emulator.

    Attributes:
        url: Its base URL, "" before `start`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self) -> str:
        """The base URL, once it answers there.

        Raises:
            EmulatorFailed: It ended, or said nothing in time.
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "emulate", "--port", "0", "--with-parent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us: it serves the calls that we still drain
        )  # fmt: skip
        assert self._process.stdout is not None  # noqa: S101 - asked for above
        try:
            with Expiry(self._clock, START):
                async for line in self._process.stdout:
                    if line.startswith(READY):
                        self.url = line[len(READY) :].decode().strip()
                        return self.url
        except TimeoutError as error:
            raise EmulatorFailed("the provider emulator did not start in time") from error
        raise EmulatorFailed("the provider emulator ended at its start; see its message above")

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None  # noqa: S101 - start came first
        return await self._process.wait()

    async def stop(self) -> None:
        """It has ended; asked first, killed if it does not listen."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            with Expiry(self._clock, STOP):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
