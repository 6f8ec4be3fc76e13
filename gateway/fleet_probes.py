"""One probe of an open breaker under way in the whole fleet: its place is a lease in the store.

A gateway asks for the lease before it probes, one round trip, and only where its breaker is not
closed. The store says no while another gateway has it; then whoever waits here waits on, until the
holder's news, the lease's end, or `LOOK`. With the place goes the count of good probes in a row, so
that the last one closes the breaker whichever gateway made it; that it opened or closed is told by
`sharing.py`. A place whose probe settled its breaker rests until everybody has heard of it.

Every exchange is a task of its own. A call that leaves while its lease is asked for leaves nothing
behind: the answer is awaited here, and what it brings is given back. While the store is away, or
does not answer twice, a gateway probes by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from gateway.admission import script
from gateway.clock import Expiry
from gateway.resilience.probes import LOOK, Elsewhere, Lent
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gateway.clock import Clock
    from gateway.resilience.probes import Handed

logger = logging.getLogger("tidegate.fleet")

PATIENCE: Micros = MICRO
"""How long a call waits for the store; then it probes without a lease."""

LEAST: Micros = 50_000
"""Nobody asks again sooner than that, unless there is news."""

LAST_WORDS_S = 1.0
"""At the end of the process what is under way has so long; a lease left behind ends by its time."""

MILLI: Micros = 1_000


class Link(Protocol):
    """The shared store, as far as leases need it."""

    async def run(
        self, library: tuple[str, bytes], key: str, *words: str | int | bytes
    ) -> list[int]:
        """What the function says of the key. Raises one of `faults` where that is not known."""
        ...


class _Lease:
    """The place of one probe, asked for, had, or given back.

    Attributes:
        token: Names the holder in the store: nobody else can free the place.
        task: The exchange that asks; None: nobody was asked.
        held: The store may think that the place is ours.
        stale: The place was freed since the store was asked.
        over: It was freed here.
    """

    __slots__ = (
        "_answer", "_clock", "_free", "_waiter", "held", "lasts", "over", "probe", "scope", "stale",
        "task", "token",
    )  # fmt: skip

    def __init__(
        self, scope: str, probe: int, lasts: Micros, *, token: str, clock: Clock,
        free: Callable[[_Lease, Handed | None], None],
    ) -> None:  # fmt: skip
        self.scope = scope
        self.probe = probe
        self.lasts = lasts
        self.token = token
        self.task: asyncio.Task[None] | None = None
        self.held = False
        self.stale = False
        self.over = False
        self._answer: Lent | Elsewhere | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._clock = clock
        self._free = free

    async def answered(self) -> Lent | Elsewhere:
        """Whether the probe may go; yes, if the store does not say within `PATIENCE`."""
        if self._answer is None:
            self._waiter = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError), Expiry(self._clock, PATIENCE):
                await self._waiter
        return self._answer or Lent()

    def tell(self, answer: Lent | Elsewhere) -> None:
        """That is the answer."""
        self._answer = answer
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def free(self, handed: Handed | None) -> None:
        """The place is free, or will be as soon as the store hears of it."""
        if not self.over:
            self.over = True
            self._free(self, handed)


class FleetProbes:
    """`Probes` over the shared store."""

    def __init__(  # noqa: PLR0913 - of the fleet, each once
        self, link: Link, clock: Clock, *, prefix: str, gateway: str, channel: str,
        faults: tuple[type[Exception], ...], away: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Nobody is asked before `run`.

        Args:
            link: The shared store.
            clock: For patience.
            prefix: Of the fleet's keys.
            gateway: This process's name, new at every start.
            channel: Where the fleet hears that a place is free.
            faults: What a store that does not answer looks like.
            away: Whether the store is known to be away: then nobody is asked.
        """
        self._link = link
        self._clock = clock
        self._prefix = f"{prefix}probe:"
        self._gateway = gateway
        self._channel = channel
        self._faults = faults
        self._away = away
        self._library = script.library("probe")
        self._numbers = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._asking: set[_Lease] = set()
        self._freeing: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Exchanges under way."""
        return len(self._under_way)

    async def run(self) -> None:
        """Leases are asked for until cancelled; then what is under way has a moment to end."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None
                if self._under_way:
                    await asyncio.wait(self._under_way, timeout=LAST_WORDS_S)

    def ask(self, scope: str, probe: int, lasts: Micros) -> _Lease:
        """The lease of that breaker's place is asked for; see `Probes`."""
        self._numbers += 1
        lease = _Lease(
            scope, probe, lasts, token=f"{self._gateway}:{self._numbers}", clock=self._clock,
            free=self._freed,
        )  # fmt: skip
        if self._tasks is None or self._away():
            lease.tell(Lent())
        else:
            self._asking.add(lease)
            lease.task = self._spawn(self._tasks, self._take(lease))
        return lease

    def heard(self, scope: str) -> None:
        """That breaker's place was freed: a refusal that is on its way is out of date."""
        for lease in self._asking:
            if lease.scope == scope:
                lease.stale = True

    def void(self, scope: str) -> None:
        """That breaker changed its state: good probes before that count no more."""
        if self._tasks is not None and not self._away():
            self._spawn(self._tasks, self._void(scope))

    # --- exchanges -------------------------------------------------------------------------------

    def _spawn(
        self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        task = tasks.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _take(self, lease: _Lease) -> None:
        """The lease has its answer."""
        answer: Lent | Elsewhere = Lent()
        try:
            before = self._freeing.get(lease.scope)
            if before is not None:  # or we might be refused for our own sake
                await asyncio.wait([before])
            if not lease.over:
                answer = await self._taken(lease)
        except self._faults as error:
            logger.warning(
                "probe_alone", extra={"scope": lease.scope, "error": type(error).__name__}
            )
        finally:
            self._asking.discard(lease)
            lease.tell(answer)

    async def _taken(self, lease: _Lease) -> Lent | Elsewhere:
        lease.held = True
        while True:
            lease.stale = False
            lasts = lease.lasts // MILLI
            granted, figure = await self._said(lease.scope, "take", lease.token, lasts, 2 * lasts)
            if granted:
                return Lent(good=figure)
            if lease.over or not lease.stale:
                lease.held = False
                return Elsewhere(left=min(LOOK, max(LEAST, figure * MILLI)))

    def _freed(self, lease: _Lease, handed: Handed | None) -> None:
        if lease.task is None or self._tasks is None:
            return  # nobody was asked, or it ends by its time
        scope = lease.scope
        task = self._freeing[scope] = self._spawn(self._tasks, self._free(lease, handed))

        def over(_task: asyncio.Task[None]) -> None:
            if self._freeing.get(scope) is task:
                del self._freeing[scope]

        task.add_done_callback(over)

    async def _free(self, lease: _Lease, handed: Handed | None) -> None:
        """The store has heard that the place is free, unless it was not ours."""
        assert lease.task is not None  # noqa: S101 - the caller looked
        await asyncio.wait([lease.task])
        if not lease.held:
            return
        good = "" if handed is None else str(handed.good)
        rest = 0 if handed is None else handed.rest // MILLI
        kept = 2 * max(rest, lease.lasts // MILLI)
        news = orjson.dumps({
            "kind": "probe", "name": lease.scope, "by": self._gateway,
            "at": round(self._clock.wall() * MICRO),
        })  # fmt: skip
        try:
            await self._said(
                lease.scope, "free", lease.token, good, rest, kept, self._channel, news
            )
        except self._faults as error:
            logger.warning(
                "probe_not_freed", extra={"scope": lease.scope, "error": type(error).__name__}
            )

    async def _void(self, scope: str) -> None:
        with contextlib.suppress(*self._faults):
            await self._said(scope, "void")

    async def _said(self, scope: str, *words: str | int | bytes) -> list[int]:
        """The function's answer; asked twice, because all it does may be done twice."""
        key = f"{self._prefix}{scope}"
        try:
            return await self._link.run(self._library, key, *words)
        except self._faults:
            return await self._link.run(self._library, key, *words)
