"""What this process shares with the other gateways of its fleet, and how it stands without them.

Limits, queues and budgets are pools (`admission/shared.py`). In the store what loops and tasks use
is added up (`loop_books.py`), what agents did lately listed (`loop_lists.py`), stored Responses are
known (`chains.py`), failures of deployments counted (`fleet_results.py`), and leases of their
probes kept (`fleet_probes.py`). Everything else is *news*: a breaker that opened, a probe that is
over, a credential that was revoked, a policy that was edited, loops that may begin anew, a tool
session that is used or was ended. News is published, and kept for those who were away; it arrives
within a second and is decided upon by each process alone while the store is away. Nothing here is
needed for a right decision, only for an early one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import orjson

from gateway.admission.fleet import FAULTS, RedisLink
from gateway.admission.remote import TIMEOUT, FailMode
from gateway.admission.shared import SharedStore
from gateway.chains import Chains
from gateway.fleet_probes import FleetProbes
from gateway.fleet_results import FleetResults
from gateway.loop_books import LoopBooks
from gateway.loop_lists import LoopLists
from gateway.resilience.breaker import FOREVER, State
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gateway.clock import LoopClock
    from gateway.layers.trip import Breakers
    from gateway.resilience.breaker import Breaker, BreakerRules
    from gateway.units import Rng

logger = logging.getLogger("tidegate.fleet")

START_TRIES = 6
START_PAUSE_S = 0.5
"""A store that starts together with us has three seconds; then we start without it."""

KEPT_S = {"breaker": 3_600, "revoked": 365 * 86_400}
"""How long news is kept for those who were away. A revocation ends with an edited policy, not with
time; a year is for those who forget to edit it."""

TELLING_S = 1.0
"""How long a client that ends its session waits for the fleet to be told."""
LOSS_PAUSE: Micros = 500_000
"""Between two calls to tell anew what the store has lost, and between two times of doing so."""

MOST_REVOKED = 100_000
MOST_SHOWN = 100
TOLD = frozenset({State.CLOSED, State.OPEN, State.SHUT})
"""States that one process tells the others; who probes is agreed upon by leases."""


class Sharing:
    """The shared store of one process, and the news of its fleet.

    Attributes:
        store: For admission.
        books: For what loops and tasks use.
        lists: For what agents did lately.
        chains: For stored Responses.
        results: For failures of deployments.
        probes: For probes of open breakers.
        revoked: Ids of principals that are refused, whatever policy says.
        clock: Of this process.
        server: Name and version of the store, "" while it has never answered.
        on_session: Called with the id of a tool session that was ended at another gateway.
        on_session_used: Called with the id of one that another gateway serves.
    """

    def __init__(  # noqa: PLR0913 - what the process owns, each once
        self,
        url: str,
        *,
        clock: LoopClock,
        rng: Rng,
        gateway: str,
        prefix: str,
        mode: FailMode,
        cold: bool,
        stamp: Callable[[int], int],
        on_mode: Callable[[str], None],
    ) -> None:
        """Nothing is connected yet. For the arguments see `SharedStore`."""
        self.link = RedisLink(url, timeout=TIMEOUT)
        self.store = SharedStore(
            self.link, clock, gateway=gateway, faults=FAULTS, prefix=prefix, mode=mode, cold=cold,
            stamp=stamp, on_mode=on_mode, on_news=self._heard,
        )  # fmt: skip
        self.books = LoopBooks(
            self.link, clock, prefix=prefix, faults=FAULTS, away=lambda: self.store.away,
            gateway=gateway,
        )  # fmt: skip
        self.books.on_loss = self._books_lost
        self.lists = LoopLists(
            self.link, clock, prefix=prefix, faults=FAULTS, away=lambda: self.store.away
        )
        self.chains = Chains(
            self.link, clock, prefix=prefix, faults=FAULTS, away=lambda: self.store.away
        )
        self.results = FleetResults(
            self.link, clock, prefix=prefix, faults=FAULTS, away=lambda: self.store.away,
            judge=self._judge,
        )  # fmt: skip
        self.probes = FleetProbes(
            self.link, clock, prefix=prefix, gateway=gateway, channel=self.store.news,
            faults=FAULTS, away=lambda: self.store.away,
        )  # fmt: skip
        self.revoked: set[str] = set()
        self.server = ""
        self.clock = clock
        self._rng = rng
        self._prefix = prefix
        self._mode = mode
        self._tasks: asyncio.TaskGroup | None = None
        self._breakers: Breakers | None = None
        self._rules: Callable[[], BreakerRules] | None = None
        self._on_policy: Callable[[], None] | None = None
        self._on_loops: Callable[[str], object] | None = None
        self.on_session: Callable[[str], None] | None = None
        self.on_session_used: Callable[[str], None] | None = None
        self._hearing = ""
        self._changed: dict[str, int] = {}
        self._told_of_loss: Micros = 0
        self._heard_of_loss: Micros = 0

    @property
    def closed(self) -> bool:
        """The store is away, and nobody is let in without it."""
        return self.store.away and self._mode is FailMode.CLOSED

    def status(self) -> dict[str, Any]:
        """For the operator."""
        store = self.store
        return {
            "gateway": store.gateway,
            "server": self.server,
            "mode": self._mode.value if store.away else "shared",
            "calls": store.calls(),
            "revoked": sorted(self.revoked)[:MOST_SHOWN],
        }

    def connect(
        self,
        breakers: Breakers,
        rules: Callable[[], BreakerRules],
        on_policy: Callable[[], None],
        on_loops: Callable[[str], object],
    ) -> None:
        """What news is about.

        Args:
            breakers: Ours.
            rules: Of a breaker that is made because of news.
            on_policy: Looks at the policy again.
            on_loops: Lets a session ("" means all) begin anew.
        """
        self._breakers, self._rules = breakers, rules
        self._on_policy, self._on_loops = on_policy, on_loops

    async def check(self) -> None:
        """The store is fit, or away: then we start by the fail mode.

        Raises:
            StoreUnavailable: It would lose what it must keep; says what to change.
        """
        why = ""
        for _ in range(START_TRIES):
            try:
                self.server = await self.link.check()
            except FAULTS as error:
                why = f"{type(error).__name__}: {error}"
                await self.clock.sleep(START_PAUSE_S)
            else:
                logger.info("shared_store", extra={"server": self.server})
                return
        logger.error("shared_store_away", extra={"at": self.link.address.shown, "why": why})

    async def run(self) -> None:
        """Send and hear until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            beside = [
                tasks.create_task(one.run())
                for one in (self.books, self.lists, self.chains, self.results, self.probes)
            ]
            try:
                await self.store.run(lambda: self._spawn(self._catch_up()))
            finally:
                for task in beside:
                    task.cancel()
                self._tasks = None

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        if self._tasks is None:
            work.close()
        else:
            self._tasks.create_task(work)

    # --- telling

    def breaker_changed(self, scope: str, breaker: Breaker) -> None:
        """One of our breakers has changed its state: the others hear of it."""
        if scope == self._hearing or breaker.state not in TOLD:
            return
        at = self._wall()
        self._changed[scope] = at
        left = breaker.until - self.clock.now()
        item = {
            "state": breaker.state.value, "sick": breaker.sick, "reason": breaker.reason,
            "for": -1 if breaker.until >= FOREVER else max(0, left), "delay": breaker.delay,
            "at": at,
        }  # fmt: skip
        self._tell("breaker", scope, item)
        self.probes.void(scope)

    def breaker_failed(self, scope: str, breaker: Breaker) -> None:
        """One of our attempts failed: the fleet counts it."""
        if self._rules is not None:
            self.results.failed(scope, breaker, self._rules().slow_window)

    def _judge(self, scope: str, breaker: Breaker) -> None:
        """Others have failed as well: together it may be enough."""
        breakers = self._breakers
        if breakers is None:
            return
        undecided = breakers.undecided(scope)
        if breaker.together(now=self.clock.now(), rng=self._rng, undecided=undecided):
            breakers.changed(scope)

    def revoke(self, principal: str) -> None:
        """That principal is refused from now on, here and in the whole fleet."""
        self._revoke(principal)
        self._tell("revoked", principal, {"at": self._wall()})

    def policy_changed(self) -> None:
        """Our policy was edited: whoever reads the same files need not wait for his own look."""
        self._tell("policy", "", {"at": self._wall()}, keep=False)

    def loops_reset(self, session: str) -> None:
        """The operator let a session begin anew, here and in the whole fleet."""
        self._tell("loops", session, {"at": self._wall()}, keep=False)

    def _books_lost(self) -> None:
        """The store has less than it was told: everybody tells it what he knows."""
        now = self.clock.now()
        if now - self._told_of_loss >= LOSS_PAUSE:
            self._told_of_loss = now
            self._tell("lost", "", {"at": self._wall()}, keep=False)

    def _retell(self) -> None:
        """Somebody found that the store has lost what it was told; many may find it at once."""
        now = self.clock.now()
        if now - self._heard_of_loss >= LOSS_PAUSE:
            self._heard_of_loss = now
            self._spawn(self.books.retell())

    async def session_deleted(self, session: str) -> None:
        """A client ended its tool session here, so nobody in the fleet honors it.

        Returns once that is told, if it can be told soon: the client's next request may go to
        another gateway, and should not overtake the news.
        """
        if self._tasks is None:
            return
        raw = self._news("session", session, {"at": self._wall()})
        told = self._tasks.create_task(self._send("session", session, raw, keep=False))
        await asyncio.wait({told}, timeout=TELLING_S)

    def session_used(self, session: str) -> None:
        """A tool session is served here: nobody ends it for being idle elsewhere."""
        self._tell("session_used", session, {"at": self._wall()}, keep=False)

    def _tell(self, kind: str, name: str, item: dict[str, Any], *, keep: bool = True) -> None:
        self._spawn(self._send(kind, name, self._news(kind, name, item), keep=keep))

    def _news(self, kind: str, name: str, item: dict[str, Any]) -> bytes:
        return orjson.dumps({"kind": kind, "name": name, "by": self.store.gateway, **item})

    async def _send(self, kind: str, name: str, raw: bytes, *, keep: bool) -> None:
        try:
            if keep:
                await self.link.save(f"{self._prefix}{kind}", name, raw, ttl_s=KEPT_S[kind])
            await self.link.publish(self.store.news, raw)
        except FAULTS as error:
            logger.warning("news_not_told", extra={"kind": kind, "error": type(error).__name__})

    # --- hearing

    async def _catch_up(self) -> None:
        """What was told while nobody of us listened, and what the store may have lost."""
        self._spawn(self.books.retell())
        try:
            for kind in ("breaker", "revoked"):
                for raw in (await self.link.load(f"{self._prefix}{kind}")).values():
                    self._heard(raw)
        except FAULTS as error:
            logger.warning("news_missed", extra={"error": type(error).__name__})

    def _heard(self, raw: bytes) -> None:
        """News of the fleet, our own included; what cannot be read is another release's."""
        try:
            news = orjson.loads(raw)
            kind, name, by, at = news["kind"], str(news["name"]), news["by"], int(news["at"])
            if kind == "revoked":
                self._revoke(name)
            elif kind == "probe":
                self._vacated(name)
            elif by != self.store.gateway and kind == "breaker":
                self._apply(name, news, at)
            elif by != self.store.gateway and kind == "policy" and self._on_policy is not None:
                self._on_policy()
            elif kind == "lost":
                self._retell()
            elif by != self.store.gateway and kind == "loops" and self._on_loops is not None:
                self._on_loops(name)
            elif by != self.store.gateway and kind == "session" and self.on_session is not None:
                self.on_session(name)
            elif by != self.store.gateway and kind == "session_used" and self.on_session_used:
                self.on_session_used(name)
        except (ValueError, KeyError, TypeError):
            logger.warning("news_unreadable", extra={"bytes": len(raw)})

    def _revoke(self, principal: str) -> None:
        if principal not in self.revoked and len(self.revoked) < MOST_REVOKED:
            self.revoked.add(principal)
            logger.warning("revoked", extra={"principal": principal})

    def _vacated(self, scope: str) -> None:
        """A probe is over, and whoever waits may be the next; our own waiters as well."""
        self.probes.heard(scope)
        if self._breakers is not None:
            self._breakers.vacated(scope)

    def _apply(self, scope: str, news: dict[str, Any], at: int) -> None:
        """Another process's breaker is in that state: so is ours, unless ours changed later."""
        if self._breakers is None or self._rules is None or at <= self._changed.get(scope, 0):
            return
        state, left = State(news["state"]), int(news["for"])
        gone = max(0, self._wall() - at)
        until: Micros = FOREVER if left < 0 else self.clock.now() + left - gone
        breaker = self._breakers.of(scope, self._rules())
        if state is breaker.state or (state is not State.CLOSED and left >= 0 and left <= gone):
            return
        self._changed[scope] = at
        sick = bool(news["sick"])
        if state is State.CLOSED and sick:
            breaker.resumed(now=self.clock.now())
        else:
            until = 0 if state is State.CLOSED else until
            delay = int(news["delay"]) if "delay" in news else None  # older releases say none
            breaker.told(state, until=until, reason=str(news["reason"]), delay=delay)
        breaker.sick = sick
        self._hearing = scope
        try:
            self._breakers.changed(scope)
        finally:
            self._hearing = ""

    def _wall(self) -> int:
        return round(self.clock.wall() * MICRO)
