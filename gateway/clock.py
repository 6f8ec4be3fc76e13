"""The only time source and the only timers of the gateway.

`now()` is in microseconds since the Unix epoch but *monotonic*: anchored to the wall clock once, at
construction, then driven by the loop's monotonic clock, so that calendars and windows share one
axis and a stepping wall clock moves neither. `wall()` is the true wall clock, for logs and dates.

Two kinds of timers exist. `deadlines` is a heap with a granularity of 50 ms behind ONE loop timer:
it serves every deadline and keep-alive of every call (`performance.md` §8.4). `alarm` is precise,
one per pool, for admission. Nothing else in the gateway may call `call_later` or `call_at`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import TYPE_CHECKING, Protocol

from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Callable

GRANULARITY: Micros = 50_000
"""Deadlines fire at most this much late; one timer serves them all."""


class Timer:
    """A pending callback. `cancel()` is idempotent and O(1); a fired timer ignores it."""

    __slots__ = ("_callback", "at")

    def __init__(self, at: Micros, callback: Callable[[], None]) -> None:
        self.at = at
        self._callback: Callable[[], None] | None = callback

    @property
    def live(self) -> bool:
        """True until fired or cancelled."""
        return self._callback is not None

    def cancel(self) -> None:
        """Never fire."""
        self._callback = None

    def fire(self) -> None:
        """Run the callback once, unless cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class Clock(Protocol):
    """Time as the gateway sees it; tests and simulations bring their own."""

    def now(self) -> Micros:
        """Monotonic microseconds on the epoch's axis."""
        ...

    def wall(self) -> float:
        """Wall-clock seconds since the epoch; may step."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return once that much time has passed."""
        ...

    def after(self, delay: Micros, callback: Callable[[], None]) -> Timer:
        """Run the callback `delay` from now, up to `GRANULARITY` late. It must not raise."""
        ...

    def alarm(self, at: Micros, callback: Callable[[], None]) -> Timer:
        """Run the callback at that instant of `now()`, as precisely as the loop can."""
        ...


class Deadlines:
    """A heap of coarse timers behind one loop timer.

    Cancelled entries stay in the heap until due or until they outnumber the live ones two to one;
    so memory is at most three entries per live deadline plus a constant.
    """

    __slots__ = ("_armed_for", "_handle", "_heap", "_loop", "_now", "_seq")

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], Micros]) -> None:
        self._loop = loop
        self._now = now
        self._heap: list[tuple[Micros, int, Timer]] = []
        self._seq = 0
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for: Micros = 0

    def __len__(self) -> int:
        """Entries held, cancelled ones included."""
        return len(self._heap)

    def after(self, delay: Micros, callback: Callable[[], None]) -> Timer:
        """A timer that fires `delay` from now, rounded up to the granularity."""
        at = self._now() + (delay if delay > 0 else 0)  # noqa: FURB136 - every call
        timer = Timer(at, callback)
        self._seq += 1
        heap = self._heap
        heapq.heappush(heap, (at, self._seq, timer))
        if len(heap) >= 1024 and self._seq % 1024 == 0:
            self._compact()
        if self._handle is None or at + GRANULARITY < self._armed_for:
            self._arm()
        return timer

    def _compact(self) -> None:
        live = [entry for entry in self._heap if entry[2].live]
        if len(live) * 3 < len(self._heap):
            heapq.heapify(live)
            self._heap = live

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        first = self._heap[0][0]
        self._armed_for = first + GRANULARITY
        delay = max(GRANULARITY, first - self._now() + GRANULARITY // 2)
        self._handle = self._loop.call_later(delay / MICRO, self._run)

    def _run(self) -> None:
        self._handle = None
        now = self._now()
        heap = self._heap
        while heap and (heap[0][0] <= now or not heap[0][2].live):
            heapq.heappop(heap)[2].fire()
        # A callback may have armed the timer already, and may have compacted the heap.
        if self._handle is None and self._heap:
            self._arm()


class Expiry:
    """`with Expiry(clock, delay):` raises TimeoutError where the block awaits longer than `delay`.

    The reason is recorded before the task is cancelled, so that a deadline never looks like a
    client hanging up. Coarse, like everything on `Deadlines`. Must be used inside a task.
    """

    __slots__ = ("_clock", "_delay", "_fired", "_task", "_timer")

    def __init__(
        self, clock: Clock, delay: Micros, task: asyncio.Task[object] | None = None
    ) -> None:
        """`task` is the one that enters the block, where the caller knows it."""
        self._clock = clock
        self._delay = delay
        self._fired = False
        self._timer: Timer | None = None
        self._task = task

    def __enter__(self) -> Expiry:
        """Arm the deadline."""
        if self._task is None:
            self._task = asyncio.current_task()
        self._timer = self._clock.after(self._delay, self._fire)
        return self

    def _fire(self) -> None:
        self._fired = True
        if self._task is not None:
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Disarm; turn our own cancellation, and only ours, into TimeoutError."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._fired or self._task is None:
            return
        # Somebody else may have cancelled as well: then the task stays cancelled.
        if (
            self._task.uncancel() == 0
            and kind is not None
            and issubclass(kind, asyncio.CancelledError)
        ):
            raise TimeoutError from error


def _reading(anchor: Micros) -> Callable[[], Micros]:
    read = time.monotonic_ns
    return lambda: anchor + read() // 1_000


class LoopClock:
    """The clock of a running event loop.

    Args:
        loop: The running one by default.
        precise: Read the system's monotonic clock. uvloop's own `time()` is a millisecond coarse
            and stands still within one turn of the loop, which would hide what a call costs; a loop
            in virtual time has no other clock than its own.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, *, precise: bool = False
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._precise = precise
        self._anchor = 0
        self._anchor = round(time.time() * MICRO) - self.now()
        if precise:  # read a dozen times in a call: by functions that look nothing up
            self.now = _reading(self._anchor)  # type: ignore[method-assign]
            self.wall = time.time  # type: ignore[method-assign]
        self.deadlines = Deadlines(self._loop, self.now)
        if precise:
            self.after = self.deadlines.after  # type: ignore[method-assign]
        self.alarms_armed = 0

    def now(self) -> Micros:
        """Monotonic microseconds on the epoch's axis."""
        if self._precise:
            return self._anchor + time.monotonic_ns() // 1_000
        return self._anchor + int(self._loop.time() * MICRO)

    def wall(self) -> float:
        """Wall-clock seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Return once that much time has passed."""
        await asyncio.sleep(seconds)

    def after(self, delay: Micros, callback: Callable[[], None]) -> Timer:
        """A coarse timer; see `Deadlines`."""
        return self.deadlines.after(delay, callback)

    def alarm(self, at: Micros, callback: Callable[[], None]) -> Timer:
        """A precise timer of its own."""
        timer = _Alarm(self, at, callback)
        delay = max(0, at - self.now())
        if self._precise:
            # uvloop rounds to milliseconds; rounded down, the alarm would come early and again.
            delay = -(-delay // 1_000) * 1_000
        timer.handle = self._loop.call_later(delay / MICRO, timer.fire)
        self.alarms_armed += 1
        return timer


class _Alarm(Timer):
    """A precise timer: cancelling also releases the loop's handle."""

    __slots__ = ("_clock", "handle")

    def __init__(self, clock: LoopClock, at: Micros, callback: Callable[[], None]) -> None:
        super().__init__(at, callback)
        self._clock = clock
        self.handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Never fire; the loop forgets the timer at once."""
        if self.live:
            self._clock.alarms_armed -= 1
            if self.handle is not None:
                self.handle.cancel()
        super().cancel()

    def fire(self) -> None:
        """Run the callback once."""
        if self.live:
            self._clock.alarms_armed -= 1
        super().fire()


def pause(seconds: float) -> None:
    """Block this thread: for terminal programs, never on an event loop."""
    time.sleep(seconds)
