"""What conversations use, added up over all gateways of a fleet.

A book of `resilience.loops.Spending` belongs to one process and is judged there, at once. In a
fleet its amounts are also added to the fleet's own book in the shared store, and what the store
says back, minus what is ours, was used elsewhere and counts here too: a task that calls by way of
four gateways has one budget, not four. A call whose book has not heard for a second waits for that
(`gathering.py`). While the store is away every process decides by what it has heard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gateway.admission.fleet import Addition
from gateway.gathering import FRESH, Gathering, Pending
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Sequence

    from gateway.call import Call, End, Reply, Service
    from gateway.clock import Clock
    from gateway.resilience.loops import Spending
    from gateway.units import MicroUsd, Tokens


class Books(Protocol):
    """Where the gateways of a fleet add up what conversations use."""

    def pour(self, book: Spending, tokens: Tokens, money: MicroUsd) -> None:
        """So much more was used here; the book will hear what others used."""
        ...

    def clear(self, book: Spending) -> None:
        """A new stretch begins, in the whole fleet."""
        ...

    def ask(self, books: Sequence[Spending], now: Micros) -> list[Future[None]]:
        """What to wait for until each has heard of the fleet; nothing where all have lately."""
        ...


class Link(Protocol):
    """The shared store, as far as books need it."""

    async def add(self, additions: Sequence[Addition]) -> list[tuple[int, ...]]:
        """The sums after each addition. Raises one of `faults` where that cannot be known."""
        ...


class _Poured(Pending):
    """What is to be added to the fleet's book of one of ours."""

    __slots__ = ("anew", "book", "money", "tokens", "turn")

    def __init__(self, book: Spending) -> None:
        super().__init__()
        self.book = book
        self.turn = book.turn
        self.anew = False
        self.tokens: Tokens = 0
        self.money: MicroUsd = 0


class LoopBooks(Gathering[_Poured]):
    """`Books` over the shared store."""

    def __init__(
        self, link: Link, clock: Clock, *, prefix: str, faults: tuple[type[Exception], ...],
        away: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Nothing is sent before `run`; for the rest see `Gathering`."""
        super().__init__(clock, faults=faults, away=away)
        self._link = link
        self._prefix = f"{prefix}spent:"

    def pour(self, book: Spending, tokens: Tokens, money: MicroUsd) -> None:
        """So much more was used here; the book will hear what others used."""
        poured = self._of(book)
        if poured is not None:
            poured.tokens += tokens
            poured.money += money

    def clear(self, book: Spending) -> None:
        """A new stretch begins, in the whole fleet. Call it after the book's own `clear`."""
        poured = self._of(book)
        if poured is not None:
            poured.anew = True

    def ask(self, books: Sequence[Spending], now: Micros) -> list[Future[None]]:
        """What to wait for until each has heard of the fleet; nothing where all have lately."""
        stale = [self._of(book) for book in books if now - book.heard_at > FRESH]
        return [self.hurried(one) for one in stale if one is not None]

    def _of(self, book: Spending) -> _Poured | None:
        """What waits to be told of that book; None where it is not shared, or cannot be."""
        poured = self.waiting(book.name)
        if poured is not None and poured.book is book and poured.turn == book.turn:
            return poured
        poured = _Poured(book)
        return poured if book.name and self.put(book.name, poured) else None

    async def exchange(self, taken: list[_Poured]) -> None:
        """Add up, and tell each book where the fleet's stands."""
        additions = [
            Addition(
                key=f"{self._prefix}{one.book.name:016x}", anew=one.anew,
                amounts=(one.tokens, one.money), ttl_s=max(1, one.book.lasts // MICRO),
            )
            for one in taken
        ]  # fmt: skip
        totals = await self._link.add(additions)
        now = self.clock.now()
        for one, (tokens, money) in zip(taken, totals, strict=True):
            one.book.heard(now, tokens, money, told=(one.tokens, one.money), turn=one.turn)


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
