"""What conversations use, added up over all gateways of a fleet.

A book of `resilience.books.Spending` belongs to one process and is judged there, at once. In a
fleet its share also stands in the fleet's own book in the shared store, beside those of others,
and they count here too: a task that calls by way of four gateways has one budget, not four. A call
whose book has not heard for a second waits for that (`gathering.py`). While the store is away every
process decides by what it has heard. A store that comes back with less than it was told is told
again, by everybody who knows.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from gateway.admission.fleet import Entry
from gateway.gathering import FRESH, MOST_AT_ONCE, Gathering, Pending
from gateway.resilience.books import Share
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gateway.call import Call, End, Reply, Service
    from gateway.clock import Clock
    from gateway.resilience.books import Spending

REST_S = 0.02
"""Between looks whether more books can be told anew."""


class Books(Protocol):
    """Where the gateways of a fleet add up what conversations use."""

    def tell(self, book: Spending) -> None:
        """Its share has changed, or a new stretch began; the book will hear what others used."""
        ...

    def ask(self, books: Sequence[Spending], now: Micros) -> list[Future[None]]:
        """What to wait for until each has heard of the fleet; nothing where all have lately."""
        ...


class Link(Protocol):
    """The shared store, as far as books need it."""

    async def enter(self, entries: Sequence[Entry]) -> list[dict[bytes, bytes]]:
        """All that stands under each key then. Raises one of `faults` if that cannot be known."""
        ...


class _Telling(Pending):
    """A book of ours that is to be told, and shares of others that the store has lost."""

    __slots__ = ("book", "lost")

    def __init__(self, book: Spending) -> None:
        super().__init__()
        self.book = book
        self.lost: Mapping[str, Share] = {}


class LoopBooks(Gathering[_Telling]):
    """`Books` over the shared store.

    Attributes:
        on_loss: Called where the store has less than it was told.
        known: All books of this process, for when they must be told anew.
    """

    def __init__(
        self, link: Link, clock: Clock, *, prefix: str, faults: tuple[type[Exception], ...],
        away: Callable[[], bool], gateway: str,
    ) -> None:  # fmt: skip
        """Nothing is sent before `run`; for the rest see `Gathering`."""
        super().__init__(clock, faults=faults, away=away)
        self._link = link
        self._prefix = f"{prefix}used:"
        self._gateway = gateway
        self._numbers = itertools.count()
        self._retelling = False
        self.on_loss: Callable[[], None] | None = None
        self.known: Callable[[], Iterable[Spending]] = lambda: ()

    def tell(self, book: Spending) -> None:
        """Its share has changed, or a new stretch began; the book will hear what others used."""
        self._of(book)

    def ask(self, books: Sequence[Spending], now: Micros) -> list[Future[None]]:
        """What to wait for until each has heard of the fleet; nothing where all have lately."""
        stale = [self._of(book) for book in books if now - book.heard_at > FRESH]
        return [self.hurried(one) for one in stale if one is not None]

    async def retell(self) -> None:
        """All books are told anew, a batch at a time: the store may have lost any of them."""
        if self._retelling:
            return
        self._retelling = True
        try:
            for book in list(self.known()):
                while len(self) >= MOST_AT_ONCE:
                    await self.clock.sleep(REST_S)
                book.told = None
                if book.owner:
                    self._of(book)
        finally:
            self._retelling = False

    def _of(self, book: Spending) -> _Telling | None:
        """What waits to be told of that book; None where it is not shared, or cannot be."""
        telling = self.waiting(book.name)
        if telling is not None and telling.book is book:
            return telling
        telling = _Telling(book)
        return telling if book.name and self.put(book.name, telling) else None

    async def exchange(self, taken: list[_Telling]) -> None:
        """Tell the shares that changed, and each book what stands in the fleet's."""
        told = [self._share(one.book) for one in taken]
        entries = [
            Entry(
                key=f"{self._prefix}{one.book.name:016x}",
                own={} if share == one.book.told else {one.book.owner: packed(share)},
                missing={who: packed(lost) for who, lost in one.lost.items()},
                ttl_s=max(1, one.book.lasts // MICRO),
            )
            for one, share in zip(taken, told, strict=True)
        ]
        found = await self._link.enter(entries)
        now = self.clock.now()
        bare = False
        for one, share, held in zip(taken, told, found, strict=True):
            book, was = one.book, one.book.told
            shares = {
                who.decode("ascii", "replace"): known
                for who, raw in held.items()
                if (known := unpacked(raw)) is not None
            }
            lost = book.heard(now, shares, told=share)
            bare = bare or bool(lost) or (was == share and book.told is None)
            if lost or (book.told != book.share):
                again = self._of(book)
                if again is not None:
                    again.lost = lost
        if bare and self.on_loss is not None:
            self.on_loss()

    def _share(self, book: Spending) -> Share:
        """Its share, which has an owner's name from now on.

        Of the book, not of the process: a book that was forgotten and opened again adds to what
        the former one has used.
        """
        if not book.owner:
            book.owner = f"{self._gateway[:16]}.{next(self._numbers)}"
        return book.share


def packed(share: Share) -> bytes:
    """The share for the store."""
    return b"%d %d %d" % share


def unpacked(raw: bytes) -> Share | None:
    """The share; None for what another release wrote."""
    try:
        turn, tokens, money = map(int, raw.split())
    except ValueError:
        return None
    return Share(turn, tokens, money)


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
                books.tell(spending)

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
