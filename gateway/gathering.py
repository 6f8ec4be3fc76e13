"""What several gateways keep together, told in batches and heard back; one exchange under way.

Whatever a process has to tell within `GATHER` leaves together, or at once where somebody waits to
hear. While the store is away nothing is told, and what a failed exchange carried is not told again:
it may have arrived, and nothing is to be counted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

from gateway.clock import Expiry
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.clock import Clock

logger = logging.getLogger("tidegate.fleet")

GATHER: Micros = 100_000

FRESH: Micros = MICRO
"""How old what was heard may be when a call is judged."""

PATIENCE: Micros = 300_000
"""How long a call waits to hear; then it is judged by what is known."""

AWAY_S = 1.0
"""After a store that did not answer; meanwhile nobody waits for it."""

MOST_PENDING = 5_000
"""Names that wait to be told; what concerns more of them stays here."""

MOST_AT_ONCE = 500


class Pending:
    """What waits to be told of one name, and who waits to hear of it."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[asyncio.Future[None]] = []

    def wake(self) -> None:
        """Who waits goes on."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


def end_if_cancelled() -> None:
    """Whoever wants this task to end gets his will, though what it awaited has swallowed that.

    The store's client does where its answer comes at the same moment: `asyncio.wait_for` of Python
    3.11, https://github.com/python/cpython/issues/86296.

    Raises:
        CancelledError: The task has been cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def hear(waiters: Sequence[asyncio.Future[None]], clock: Clock) -> None:
    """All of these are done, or `PATIENCE` is over."""
    with contextlib.suppress(TimeoutError), Expiry(clock, PATIENCE):
        for waiter in waiters:
            await waiter


P = TypeVar("P", bound=Pending)


class Gathering(ABC, Generic[P]):
    """Collects by name, tells in batches."""

    def __init__(
        self, clock: Clock, *, faults: tuple[type[Exception], ...], away: Callable[[], bool]
    ) -> None:
        """Nothing is told before `run`.

        Args:
            clock: For rests.
            faults: What a store that does not answer looks like.
            away: Whether the store is known to be away: then nothing is told.
        """
        self.clock = clock
        self._faults = faults
        self._away = away
        self._pending: dict[int, P] = {}
        self._some = asyncio.Event()
        self._hurry = asyncio.Event()
        self._resting = False

    def __len__(self) -> int:
        """Names that wait to be told."""
        return len(self._pending)

    @abstractmethod
    async def exchange(self, taken: list[P]) -> None:
        """Tell these and take in what comes back. Raises one of `faults`."""

    def waiting(self, name: int) -> P | None:
        """What waits to be told of that name."""
        return self._pending.get(name)

    def put(self, name: int, pending: P) -> bool:
        """That shall be told of the name, in place of what waited; False if it cannot be."""
        former = self._pending.get(name)
        if self._away() or (former is None and len(self._pending) >= MOST_PENDING):
            return False
        self._pending[name] = pending
        if former is not None:
            pending.waiters += former.waiters
        self._some.set()
        return True

    def hurried(self, pending: P) -> asyncio.Future[None]:
        """Done once that has been told and heard of, or the store does not answer."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._resting:
            waiter.set_result(None)
            return waiter
        pending.waiters.append(waiter)
        self._hurry.set()
        return waiter

    def hurry(self) -> None:
        """What waits to be told leaves at once."""
        self._hurry.set()

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        while True:
            await self._some.wait()
            gathering = self.clock.after(GATHER, self._hurry.set)
            await self._hurry.wait()
            gathering.cancel()
            self._some.clear()
            self._hurry.clear()
            names = list(self._pending)[:MOST_AT_ONCE]
            taken = [self._pending.pop(name) for name in names]
            if self._pending:
                self._some.set()
                self._hurry.set()
            told = not taken or await self._exchanged(taken)
            end_if_cancelled()
            if not told:
                left, self._pending = list(self._pending.values()), {}
                for one in left:
                    one.wake()
                self._resting = True
                await self.clock.sleep(AWAY_S)
                self._resting = False

    async def _exchanged(self, taken: list[P]) -> bool:
        try:
            await self.exchange(taken)
        except self._faults as error:
            what = type(self).__name__
            logger.warning("not_told", extra={"what": what, "error": type(error).__name__})
            return False
        finally:
            for one in taken:
                one.wake()
        return True
