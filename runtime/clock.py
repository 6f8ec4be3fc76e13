"""The clock of this room: host time and CPU time. Guests never see it: their time is logical."""

from __future__ import annotations

import time


def monotonic() -> float:
    """Seconds that never go back."""
    return time.monotonic()


def wall_ns() -> int:
    """Nanoseconds since the epoch: a task's logical time begins here."""
    return time.time_ns()


def cpu_us() -> int:
    """CPU microseconds of this thread: a quantum is compute time, not waiting for a core."""
    return time.thread_time_ns() // 1_000


def thread_cpu_clock(thread: int) -> int:
    """The clock of another thread's CPU time, by its `threading.get_ident()`."""
    return time.pthread_getcpuclockid(thread)


def read(clock: int) -> float:
    """Seconds on such a clock; 0.0 once its thread has ended."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def sleep(seconds: float) -> None:
    """For tickers: this thread does nothing else."""
    time.sleep(seconds)


async def pause(seconds: float) -> None:
    """For coroutines."""
    import asyncio  # noqa: PLC0415  (half of what a bounded child would import)

    await asyncio.sleep(seconds)
