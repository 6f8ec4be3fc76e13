"""Stored Responses, as the gateways of a fleet know them together.

A call that goes on from one (`previous_response_id`), or asks for it, may come by way of another
gateway than the one that served it. Which provider made it, and what the loop rules know of the
stretch that it ends, stand in the shared store beside the process's own memory. They are told as
soon as an answer has ended, without holding it up, and asked for only where this process does not
know. While the store is away every process knows what it has served itself.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from gateway.admission.fleet import Kept
from gateway.gathering import FRESH, Gathering, Pending, hear
from gateway.resilience.memory import IDLE
from gateway.units import MICRO, MINUTE, Micros

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Sequence

    from gateway.clock import Clock

MADE_LASTS: Micros = 1_440 * MINUTE
"""How long the maker of a response is known whose gateway is gone; a living one has the store
forget what it forgets itself."""

MOST_STRETCH = 2_048
"""Bytes of a stretch; the longest is half of that."""

MOST_ASKED = 1_000
"""Answers of the store that are remembered for as long as they are fresh."""

AGAIN_S = 0.03
"""Who is faster than the gateway before looks twice: a call at the wrong provider is an error."""


class Link(Protocol):
    """The shared store, as far as chains need it."""

    async def remember(self, kept: Sequence[Kept], read: Sequence[str]) -> list[bytes]:
        """What stands under the keys read. Raises one of `faults` where that cannot be known."""
        ...


class Known:
    """What the store says of one response.

    Attributes:
        maker: Its provider; "" where nobody knows, or before an answer.
        stretch: What loop rules know of it, packed; b"" as above.
        answered: The store has said so.
        asked_at: Instant of the question.
        waiter: Done once it is answered, or never will be; None: nobody was asked.
    """

    __slots__ = ("answered", "asked_at", "maker", "stretch", "waiter")

    def __init__(self, asked_at: Micros) -> None:
        self.maker = ""
        self.stretch = b""
        self.answered = False
        self.asked_at = asked_at
        self.waiter: Future[None] | None = None


class _Said(Pending):
    """What is to be told of one response, and what is asked; None: nothing, empty: forget it."""

    __slots__ = ("asked", "maker", "name", "stretch")

    def __init__(self, name: int) -> None:
        super().__init__()
        self.name = name
        self.maker: str | None = None
        self.stretch: bytes | None = None
        self.asked: Known | None = None


class Chains(Gathering[_Said]):
    """The responses of a fleet. A `name` is `chained.name_of`."""

    def __init__(
        self, link: Link, clock: Clock, *, prefix: str, faults: tuple[type[Exception], ...],
        away: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Nothing is sent before `run`; for the rest see `Gathering`."""
        super().__init__(clock, faults=faults, away=away)
        self._link = link
        self._prefix = prefix
        self._known: OrderedDict[int, Known] = OrderedDict()

    def made(self, name: int, provider: str) -> None:
        """That provider made it; "": the process forgets who did."""
        said = self._of(name)
        if said is not None:
            said.maker = provider

    def keep(self, name: int, stretch: bytes) -> None:
        """So far has its chain come; b"": it went on under another name, or ended."""
        said = self._of(name) if len(stretch) <= MOST_STRETCH else None
        if said is not None:
            said.stretch = stretch

    def ask(self, name: int, now: Micros) -> Known:
        """What others know of it, as of a second ago at most; wait for its `waiter`."""
        known = self._known.get(name)
        if known is not None and now - known.asked_at <= FRESH:
            return known
        known = self._known[name] = Known(now)
        self._known.move_to_end(name)
        if len(self._known) > MOST_ASKED:
            self._known.popitem(last=False)
        said = self._of(name)
        if said is not None:
            said.asked = known
            known.waiter = self.hurried(said)
        return known

    def ask_anew(self) -> None:
        """What was heard lately may be void: the operator's reset."""
        self._known.clear()

    async def maker(self, name: int, known: Known) -> str:
        """The provider that made it, "" where nobody knows; `known` was just asked for."""
        if known.waiter is None:
            return ""
        await hear((known.waiter,), self.clock)
        if known.answered and not known.maker:
            await self.clock.sleep(AGAIN_S)
            self._known.pop(name, None)
            known = self.ask(name, self.clock.now())
            if known.waiter is not None:
                await hear((known.waiter,), self.clock)
        return known.maker

    def _of(self, name: int) -> _Said | None:
        """What waits to be told of that response; it leaves at once."""
        said = self.waiting(name)
        if said is None:
            said = _Said(name)
            if not self.put(name, said):
                return None
        self.hurry()
        return said

    async def exchange(self, taken: list[_Said]) -> None:
        """Tell, and hear what was asked."""
        kept: list[Kept] = []
        for one in taken:
            makers, stretches = self._keys(one.name)
            if one.maker is not None:
                kept.append(Kept(makers, one.maker.encode(), MADE_LASTS // MICRO))
            if one.stretch is not None:
                kept.append(Kept(stretches, one.stretch, IDLE // MICRO))
        asked = [one for one in taken if one.asked is not None]
        found = iter(
            await self._link.remember(kept, [key for one in asked for key in self._keys(one.name)])
        )
        for one in asked:
            maker, stretch = next(found), next(found)
            if one.asked is not None:
                one.asked.maker, one.asked.stretch = maker.decode("utf-8", "replace"), stretch
                one.asked.answered = True

    def _keys(self, name: int) -> tuple[str, str]:
        return f"{self._prefix}maker:{name:016x}", f"{self._prefix}chain:{name:016x}"
