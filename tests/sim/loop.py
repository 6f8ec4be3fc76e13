"""An asyncio loop whose time is virtual: its selector jumps to the next timer instead of waiting.

For the whole gateway with fake upstreams (`house.md` §7). Integer microseconds inside, equal
deadlines in first-in-first-out order, a deadlock is an error instead of a hang, threads do not
exist. The private hooks of asyncio stand in this file only; `test_loop.py` fails loudly where a
Python release moves them.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """No timer is due and no IO exists: whoever waits, waits for ever."""


class _Selector(selectors.BaseSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._map: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj, events, data=None):
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._map[fileobj] = key
        return key

    def unregister(self, fileobj):
        return self._map.pop(fileobj)

    def select(self, timeout=None):
        if timeout is None:
            raise Deadlock("no timer is due and no IO exists in virtual time")
        if timeout > 0:
            self._loop.jump()
        return []

    def close(self):
        self._map.clear()

    def get_map(self):
        return self._map


class _Ordered(asyncio.TimerHandle):
    """A timer that keeps the order of equal deadlines."""

    __slots__ = ("sequence",)

    def __lt__(self, other):
        return (self._when, self.sequence) < (other._when, other.sequence)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only when nobody can run."""

    def __init__(self) -> None:
        self.micros = 0
        self._sequence = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.micros / 1e6

    def jump(self) -> None:
        """To the next timer."""
        self.micros = max(self.micros, round(self._scheduled[0]._when * 1e6))

    def call_at(self, when, callback, *args, context=None):
        # Rounded to whole microseconds, so that sums of floats cannot order what integers tie.
        timer = _Ordered(round(when * 1e6) / 1e6, callback, args, self, context)
        self._sequence += 1
        timer.sequence = self._sequence
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def _make_self_pipe(self):
        self._ssock = self._csock = None
        self._internal_fds = 0

    def _close_self_pipe(self):
        pass

    def _process_self_data(self, data):
        pass

    def call_soon_threadsafe(self, callback, *args, context=None):
        return self.call_soon(callback, *args, context=context)


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of the coroutine, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
