"""What conversations use, added up over all gateways of a fleet.

A book of `resilience.loops.Spending` belongs to one process and is judged there, at once. In a
fleet its amounts are also added to the fleet's own book in the shared store, and what the store
says back, minus what is ours, was used elsewhere and counts here too: a task that calls by way of
four gateways has one budget, not four. A call whose book has not heard for `FRESH` waits for that,
`PATIENCE` at most. While the store is away every process decides by what it has heard, and what it
could not tell is not told later: a lost answer may have been added, and nothing is to be counted
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gateway.admission.fleet import Addition
from gateway.clock import Expiry
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.call import Call, End, Reply, Service
    from gateway.clock import Clock
    from gateway.resilience.loops import Spending
    from gateway.units import MicroUsd, Tokens

logger = logging.getLogger("tidegate.fleet")

GATHER: Micros = 100_000
"""What is poured within that time is told together, unless somebody waits to hear."""

FRESH: Micros = MICRO
"""How old what was heard may be when a call is judged."""

PATIENCE: Micros = 300_000
"""How long a call waits to hear; then it is judged by what is known."""

AWAY_S = 1.0
"""After a store that did not answer."""

MOST_PENDING = 5_000
"""Books that wait to be told; what is poured into more of them stays here."""

MOST_AT_ONCE = 500


class Books(Protocol):
    """Where the gateways of a fleet add up what conversations use."""

    def pour(self, book: Spending, tokens: Tokens, money: MicroUsd) -> None:
        """So much more was used here; the book will hear what others used."""
        ...

    def clear(self, book: Spending) -> None:
        """A new stretch begins, in the whole fleet."""
        ...

    async def refresh(self, books: Sequence[Spending], now: Micros) -> None:
        """Each has heard of the fleet within `FRESH`, or the store does not answer."""
        ...


class Link(Protocol):
    """The shared store, as far as books need it."""

    async def add(self, additions: Sequence[Addition]) -> list[tuple[int, ...]]:
        """The sums after each addition. Raises one of `faults` where that cannot be known."""
        ...


@dataclass(slots=True)
class _Pending:
    book: Spending
    turn: int
    anew: bool = False
    tokens: Tokens = 0
    money: MicroUsd = 0
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def wake(self) -> None:
        """Who waits to hear goes on."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class LoopBooks:
    """`Books` over the shared store; one pipeline under way at a time."""

    def __init__(
        self, link: Link, clock: Clock, *, prefix: str, faults: tuple[type[Exception], ...],
        away: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Nothing is sent before `run`.

        Args:
            link: The shared store.
            clock: For rests.
            prefix: Of the fleet's keys.
            faults: What a store that does not answer looks like.
            away: Whether the store is known to be away: then nothing is told.
        """
        self._link = link
        self._clock = clock
        self._prefix = f"{prefix}spent:"
        self._faults = faults
        self._away = away
        self._pending: dict[int, _Pending] = {}
        self._some = asyncio.Event()
        self._hurry = asyncio.Event()

    def __len__(self) -> int:
        """Books that wait to be told."""
        return len(self._pending)

    def pour(self, book: Spending, tokens: Tokens, money: MicroUsd) -> None:
        """So much more was used here; the book will hear what others used."""
        pending = self._of(book)
        if pending is not None:
            pending.tokens += tokens
            pending.money += money

    def clear(self, book: Spending) -> None:
        """A new stretch begins, in the whole fleet. Call it after the book's own `clear`."""
        former = self._pending.pop(book.name, None)
        pending = self._of(book)
        if pending is not None:
            pending.anew = True
        if former is not None:
            former.wake()

    async def refresh(self, books: Sequence[Spending], now: Micros) -> None:
        """Each has heard of the fleet within `FRESH`, or the store does not answer."""
        waiters: list[asyncio.Future[None]] = []
        for book in books:
            if now - book.heard_at > FRESH:
                pending = self._of(book)
                if pending is not None:
                    waiter = asyncio.get_running_loop().create_future()
                    pending.waiters.append(waiter)
                    waiters.append(waiter)
        if not waiters:
            return
        self._hurry.set()
        with contextlib.suppress(TimeoutError), Expiry(self._clock, PATIENCE):
            for waiter in waiters:
                await waiter

    def _of(self, book: Spending) -> _Pending | None:
        """What waits to be told of that book; None where it is not shared, or too much waits."""
        pending = self._pending.get(book.name)
        if pending is not None and pending.book is book and pending.turn == book.turn:
            return pending
        if not book.name or self._away():
            return None
        if pending is None and len(self._pending) >= MOST_PENDING:
            return None
        pending = self._pending[book.name] = _Pending(book, book.turn)
        self._some.set()
        return pending

    async def run(self) -> None:
        """Tell and hear until cancelled."""
        while True:
            await self._some.wait()
            gathering = self._clock.after(GATHER, self._hurry.set)
            await self._hurry.wait()
            gathering.cancel()
            self._some.clear()
            self._hurry.clear()
            names = list(self._pending)[:MOST_AT_ONCE]
            taken = [self._pending.pop(name) for name in names]
            if self._pending:
                self._some.set()
                self._hurry.set()
            if taken and not await self._told(taken):
                taken, self._pending = list(self._pending.values()), {}
                for one in taken:
                    one.wake()
                await self._clock.sleep(AWAY_S)

    async def _told(self, taken: list[_Pending]) -> bool:
        additions = [
            Addition(
                key=f"{self._prefix}{one.book.name:016x}", anew=one.anew,
                amounts=(one.tokens, one.money), ttl_s=max(1, one.book.lasts // MICRO),
            )
            for one in taken
        ]  # fmt: skip
        try:
            totals = await self._link.add(additions)
        except self._faults as error:
            logger.warning("loops_not_told", extra={"error": type(error).__name__})
            return False
        finally:
            for one in taken:
                one.wake()
        now = self._clock.now()
        for one, (tokens, money) in zip(taken, totals, strict=True):
            one.book.heard(now, tokens, money, told=(one.tokens, one.money), turn=one.turn)
        return True


async def metered(
    call: Call, spendings: tuple[Spending, ...], inner: Service, books: Books | None = None
) -> Reply:
    """The reply; what the call costs is in the books, an estimate until it ends."""
    estimate = call.estimate
    tokens = estimate.input + estimate.output if estimate is not None else 0
    money = estimate.money if estimate is not None else 0

    def pour(tokens: int, money: int) -> None:
        for spending in spendings:
            spending.pour(tokens, money)
            if books is not None:
                books.pour(spending, tokens, money)

    pour(tokens, money)
    try:
        reply = await inner(call)
    except BaseException:
        pour(-tokens, -money)
        raise

    def closed(_end: End) -> None:
        usage = call.usage
        if usage is not None:
            parts = (usage.input, usage.output, usage.cache_read, usage.cache_write)
            used = sum(part or 0 for part in parts)
            pour(used - tokens, usage.money - money)
        elif reply.kind is not None:
            pour(-tokens, -money)

    reply.on_close(closed)
    return reply
