"""SharedStore: `PoolStore` over pools that many processes share (`admission.md` §5).

`remote.py` decides, this file moves: one alarm per pool while something is due, futures for who
waits, one watch over everything under way. No task stands between: a batch leaves when the loop has
done what it is at, and its answer is taken in where it arrives. An idle store has no timers; what
arrives in one turn of the loop leaves in one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from gateway.admission.core import Admit, Shed
from gateway.admission.local import LOOKED_AT, MAX_POOLS, RESTART, Wait
from gateway.admission.packing import (
    NEEDS_RULES,
    NEWER_LAYOUT,
    pack_batch,
    pack_rules,
    unpack_answer,
)
from gateway.admission.remote import TIMEOUT, FailMode, RemotePool
from gateway.admission.view import used_of, view_of
from gateway.clock import Expiry
from gateway.units import MINUTE, Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from gateway.admission.core import Ask, Dimension, Outcome, PoolSpec, Verdict
    from gateway.admission.packing import Answer, Batch
    from gateway.admission.store import PoolView
    from gateway.clock import Clock, Timer
    from gateway.units import Micros

logger = logging.getLogger("tidegate.admission")

SOON: Micros = 1_000_000
"""A patience shorter than that is watched from the beginning; a longer one only if the first answer
of the pool brings no verdict, since nearly all do."""

LISTEN_AGAIN_S = 0.5
"""After the connection for nudges broke; meanwhile the pool's backup wake finds the mail."""

LAST_WORDS: Micros = 1_000_000
"""At the end of the process, settlements have so long to reach the store; leases heal the rest."""


class Link(Protocol):
    """What the store needs of the network; `fleet.RedisLink` is the one that ships."""

    def start(self, spawn: Callable[[Coroutine[Any, Any, None]], object] | None) -> None:
        """Who owns the link's tasks; None: it has none any more."""
        ...

    def send(
        self,
        base: str,
        batch: bytes,
        rules: bytes,
        channel: str,
        told: Callable[[bytes | Exception], None],
    ) -> None:
        """One run of the pool's function; `told` is called once, and never before this returns."""
        ...

    def give_up(self, error: Exception) -> None:
        """Whatever is under way has failed with that error."""
        ...

    async def listen(
        self,
        channels: tuple[str, ...],
        heard: Callable[[str, bytes], None],
        ready: Callable[[], None],
    ) -> None:
        """Everything published there is heard."""
        ...

    async def close(self) -> None:
        """Nothing is left open."""
        ...


class _Pool:
    """One shared pool: its client, who waits, what is under way."""

    __slots__ = (
        "base",
        "busy",
        "fresh",
        "remote",
        "rules",
        "send_rules",
        "spec",
        "timer",
        "waits",
        "warned",
    )

    def __init__(self, remote: RemotePool, base: str, revision: int) -> None:
        self.remote = remote
        self.base = base
        self.spec = remote.spec
        self.rules = pack_rules(remote.spec, revision)
        self.send_rules = True
        self.waits: dict[str, Wait] = {}
        self.fresh: list[tuple[Micros, Wait]] = []  # asked then; their deadlines are not watched
        self.timer: Timer | None = None
        self.busy = False
        self.warned = ""


class _Exchange:
    """A batch under way."""

    __slots__ = ("batch", "body", "over", "pool", "rules", "sent", "store")

    def __init__(self, store: SharedStore, pool: _Pool, batch: Batch, sent: Micros) -> None:
        self.store = store
        self.pool = pool
        self.batch = batch
        self.sent = sent
        self.rules = pool.rules
        self.body = pool.rules.body if pool.send_rules else b""
        self.over: Callable[[], None] | None = None

    def told(self, reply: bytes | Exception) -> None:
        """Its answer has come, or the reason why there is none."""
        self.store.told(self, reply)


class SharedStore:
    """`PoolStore` over a link. Used from one thread, the loop's.

    Attributes:
        gateway: This process's name at the pools, new at every start.
    """

    def __init__(  # noqa: PLR0913 - what the process owns, each once
        self,
        link: Link,
        clock: Clock,
        *,
        gateway: str,
        faults: tuple[type[Exception], ...],
        prefix: str = "tidegate:",
        mode: FailMode = FailMode.LOCAL,
        cold: bool = True,
        stamp: Callable[[int], int] = int,
        on_mode: Callable[[str], None] | None = None,
        on_news: Callable[[bytes], None] | None = None,
        max_pools: int = MAX_POOLS,
    ) -> None:
        """A store that sends nothing until `run`.

        Args:
            link: To the shared store.
            clock: Of this process.
            gateway: See above.
            faults: What the link raises when the store does not answer.
            prefix: Of every key and channel.
            mode: What holds while the store is away.
            cold: See `RemotePool`.
            stamp: The fleet-wide revision of one of ours: the later policy has the higher.
            on_mode: Told "shared", or the fail mode, whenever it changes.
            on_news: Told whatever is published on the channel `news`.
            max_pools: Pools alive at most.
        """
        self.gateway = gateway
        self._link = link
        self._clock = clock
        self._faults: tuple[type[Exception], ...] = (*faults, ValueError)
        self._prefix = prefix
        self._mode = mode
        self._cold = cold
        self._stamp = stamp
        self._on_mode = on_mode
        self._on_news = on_news
        self._max_pools = max_pools
        self._pools: OrderedDict[str, _Pool] = OrderedDict()
        self._by_base: dict[str, _Pool] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._closed = False
        self._away = 0
        self._forgotten_calls = 0
        self._channel = f"{prefix}nudge:"
        self._under_way: dict[_Exchange, None] = {}
        self._watch: Timer | None = None

    # --- the protocol

    def acquire(self, spec: PoolSpec, ask: Ask) -> Verdict | asyncio.Future[Verdict]:
        """A future of the verdict, as a rule; see `PoolStore`."""
        if self._closed:
            return Shed(rid=ask.rid, eta=RESTART, tag=0, because=spec.because)
        if spec.mode is Mode.OFF:
            return Admit(ask.rid, (0,) * len(spec.dimensions), 0)
        if len(ask.cost) != len(spec.dimensions) or (ask.cost and min(ask.cost) < 0):
            raise ValueError(f"pool {spec.name!r} needs {len(spec.dimensions)} amounts >= 0")
        pool = self._pools.get(spec.name) or self._open(spec)
        if pool is None:
            return Shed(rid=ask.rid, eta=MINUTE, tag=0, because=spec.because, full=True)
        if spec is not pool.spec:
            self._follow(pool, spec)
        wait = pool.waits.get(ask.rid)
        if wait is not None:
            return wait
        now = self._clock.now()
        verdict = pool.remote.acquire(now, ask, spec.dimensions)
        if verdict is None:
            wait = pool.waits[ask.rid] = Wait(self, pool, ask, asyncio.get_running_loop())
            if ask.deadline_in < SOON or pool.remote.away or self._tasks is None:
                wait.timer = self._clock.after(ask.deadline_in, wait.overdue)
            else:
                pool.fresh.append((now, wait))
            self._stir(pool, now)
            return wait
        self._stir(pool, now)
        return verdict

    def settle(
        self,
        pool: str,
        rid: str,
        *,
        outcome: Outcome,
        actual: tuple[int, ...] | None,
        retry_after: Micros = 0,
    ) -> None:
        """The attempt is over; unknown or repeated ids change nothing."""
        held = self._pools.get(pool)
        if held is not None:
            now = self._clock.now()
            if held.remote.settle(now, rid, outcome, actual, retry_after):
                self._stir(held, now)

    def cancel(self, pool: str, rid: str) -> None:
        """The ask is withdrawn; if granted and never sent, everything is given back."""
        held = self._pools.get(pool)
        if held is None:
            return
        wait = held.waits.get(rid)
        if wait is not None:
            wait.cancel()
            return
        held.remote.cancel(self._clock.now(), rid)
        self._stir(held)

    def renew(self, pool: str, rid: str) -> None:
        """The lease of a grant in flight starts anew."""
        held = self._pools.get(pool)
        if held is not None:
            held.remote.renew(self._clock.now(), rid)
            self._stir(held)

    def signal(self, pool: str, foreign: tuple[int, ...]) -> None:
        """Others use at least this much."""
        held = self._pools.get(pool)
        if held is not None:
            held.remote.signal(self._clock.now(), foreign)
            self._stir(held)

    def follow(self, spec: PoolSpec) -> None:
        """A newer policy's rules hold for a pool that is alive."""
        pool = self._pools.get(spec.name)
        if pool is not None:
            self._follow(pool, spec)
            self._stir(pool)

    def view(self, pool: str) -> PoolView | None:
        """The pool as its last answer told it: what was used counts until its window has passed."""
        held = self._pools.get(pool)
        if held is None or held.remote.standing is None:
            return None
        return view_of(held.remote, self._clock.now())

    def standing(self, pool: str) -> Sequence[tuple[Dimension, int]]:
        """Each dimension of a pool with what of it is used; see `view`."""
        held = self._pools.get(pool)
        return () if held is None else used_of(held.remote, self._clock.now())

    def pools(self) -> tuple[str, ...]:
        """Names of all pools alive here."""
        return tuple(self._pools)

    def waiting(self) -> int:
        """Calls of this process that wait in all pools."""
        return sum(len(pool.waits) for pool in self._pools.values())

    def calls(self) -> int:
        """Batches sent so far."""
        return self._forgotten_calls + sum(pool.remote.calls for pool in self._pools.values())

    @property
    def away(self) -> bool:
        """Some pool is without its store, and the fail mode holds there."""
        return self._away > 0

    # --- life

    async def run(self, on_ready: Callable[[], None] | None = None) -> None:
        """Send and hear, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._link.start(tasks.create_task)
            try:
                for pool in self._pools.values():
                    self._stir(pool)
                while True:
                    try:
                        await self._link.listen(
                            (f"{self._channel}{self.gateway}", self.news), self._heard,
                            on_ready or (lambda: None),
                        )  # fmt: skip
                    except self._faults as error:
                        logger.warning("nudges_lost", extra={"error": type(error).__name__})
                    await self._clock.sleep(LISTEN_AGAIN_S)
            finally:
                self._tasks = None
                self._link.start(None)

    async def close(self) -> None:
        """Waiters get a soft `Shed`; settlements have a moment to reach the store."""
        self._closed = True
        now = self._clock.now()
        for pool in self._pools.values():
            if pool.timer is not None:
                pool.timer.cancel()
            pool.remote.close(now, RESTART)
            self._tell(pool)
        try:
            with Expiry(self._clock, LAST_WORDS):
                await asyncio.gather(*(self._last(pool) for pool in self._pools.values()))
        except TimeoutError:
            logger.warning("settlements_left", extra={"pools": len(self._pools)})
        await self._link.close()

    async def _last(self, pool: _Pool) -> None:
        batch = None if pool.busy else pool.remote.next(self._clock.now())
        if batch is not None:
            over = asyncio.Event()
            self._send(pool, batch, self._clock.now(), over.set)
            await over.wait()

    # --- pools

    def _open(self, spec: PoolSpec) -> _Pool | None:
        for _ in range(LOOKED_AT):
            self._forget_first()
        if len(self._pools) >= self._max_pools:
            return None
        remote = RemotePool(spec, self.gateway, mode=self._mode, cold=self._cold)
        pool = _Pool(remote, self._base(spec.name), self._stamp(spec.revision))
        self._pools[spec.name] = pool
        self._by_base[pool.base] = pool
        return pool

    def _base(self, name: str) -> str:
        """Base of the pool's keys: one hash tag, so one slot of a cluster."""
        safe = name.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        return f"{self._prefix}adm:{{{safe}}}"

    def _forget_first(self) -> None:
        """The first pool is forgotten if it is quiet, else looked at again after all others."""
        name = next(iter(self._pools), None)
        if name is None:
            return
        pool = self._pools[name]
        old = self._clock.now() - pool.remote.told > MINUTE
        if old and not pool.busy and not pool.waits and pool.remote.quiet:
            self._forgotten_calls += pool.remote.calls
            del self._pools[name]
            del self._by_base[pool.base]
            return
        self._pools.move_to_end(name)

    def _follow(self, pool: _Pool, spec: PoolSpec) -> None:
        """The newer rules are sent with the next batch; an older caller's are left alone."""
        if spec.revision < pool.spec.revision:
            return
        same = spec == pool.spec
        pool.spec = spec
        pool.remote.follow(spec)
        if not same:
            pool.rules = pack_rules(spec, self._stamp(spec.revision))
            pool.send_rules = True

    # --- moving

    @property
    def news(self) -> str:
        """The channel that every gateway of the fleet hears."""
        return f"{self._prefix}news"

    def _heard(self, channel: str, news: bytes) -> None:
        """Somebody's tick left mail for us, or there is news for everybody."""
        if channel == self.news:
            if self._on_news is not None:
                self._on_news(news)
            return
        pool = self._by_base.get(news.decode("utf-8", "replace"))
        if pool is not None:
            pool.remote.nudge()
            self._stir(pool)

    def _stir(self, pool: _Pool, now: Micros | None = None) -> None:
        """Something happened: a batch leaves if one is due, else an alarm stands for the next."""
        if pool.busy or self._tasks is None or self._closed:
            return
        if now is None:
            now = self._clock.now()
        due = pool.remote.alarm(now)
        if due is not None and due <= now:
            pool.busy = True
            asyncio.get_running_loop().call_soon(self._leave, pool)
        else:
            self._arm(pool, due)

    def _arm(self, pool: _Pool, due: Micros | None) -> None:
        """The pool is looked at then, or earlier: an alarm that comes too soon looks again.

        With every call something is due a moment later; an alarm for each would be set and taken
        back a thousand times for one that rings.
        """
        timer = pool.timer
        if timer is not None and timer.live:
            if due is None or timer.at <= due:
                return
            timer.cancel()
        pool.timer = None if due is None else self._clock.alarm(due, lambda: self._ring(pool))

    def _ring(self, pool: _Pool) -> None:
        pool.timer = None
        self._stir(pool)

    def _leave(self, pool: _Pool) -> None:
        """The next batch goes if one is due; else the pool rests until its alarm."""
        now, remote = self._clock.now(), pool.remote
        running = self._tasks is not None and not self._closed
        due = remote.alarm(now) if running else None
        batch = None
        if due is not None and due <= now:
            batch = remote.take(now)
            due = remote.alarm(now)
        self._tell(pool)
        if batch is not None:
            self._send(pool, batch, now)
            return
        pool.busy = False
        if running:
            self._arm(pool, None if due is None else max(due, now + 1))

    def _send(
        self, pool: _Pool, batch: Batch, now: Micros, over: Callable[[], None] | None = None
    ) -> None:
        """The batch is under way; `over` is called when it is no more."""
        exchange = _Exchange(self, pool, batch, now)
        exchange.over = over
        self._under_way[exchange] = None
        if self._watch is None:
            self._watch = self._clock.after(TIMEOUT, self._look)
        self._pass_on(exchange)

    def _pass_on(self, exchange: _Exchange) -> None:
        """The exchange's batch is with the link."""
        try:
            raw = pack_batch(exchange.batch, exchange.rules)
        except ValueError as error:
            asyncio.get_running_loop().call_soon(exchange.told, error)
            return
        base = exchange.pool.base
        self._link.send(base, raw, exchange.body, self._channel, exchange.told)

    def _look(self) -> None:
        """What has no answer in time has failed."""
        self._watch = None
        late = self._clock.now() - TIMEOUT
        if any(exchange.sent <= late for exchange in self._under_way):
            error = TimeoutError(f"no answer within {TIMEOUT // 1000} ms")
            self._link.give_up(error)
            for exchange in [one for one in self._under_way if one.sent <= late]:
                self.told(exchange, error)
        first = next(iter(self._under_way), None)
        if first is not None and self._watch is None:
            self._watch = self._clock.after(first.sent - late, self._look)

    def told(self, exchange: _Exchange, reply: bytes | Exception) -> None:
        """What came back of an exchange. Only the first word counts."""
        if exchange not in self._under_way:
            return
        pool = exchange.pool
        remote, was_away, now = pool.remote, pool.remote.away, self._clock.now()
        try:
            answer = self._read(exchange, reply)
        except self._faults as error:
            self._warn(pool, f"{type(error).__name__}: {error}")
            remote.failed(now)
        else:
            if answer is None:
                return
            remote.answered(now, answer)
            if not remote.away:
                pool.warned = ""
        del self._under_way[exchange]
        self._count_away(was_away, remote.away)
        self._tell(pool)
        if pool.fresh:
            self._watch_deadlines(pool, exchange.sent, now)
        if exchange.over is not None:
            exchange.over()
        else:
            self._leave(pool)

    def _watch_deadlines(self, pool: _Pool, sent: Micros, now: Micros) -> None:
        """Who asked before that batch left and still waits, may wait long."""
        fresh, pool.fresh = pool.fresh, []
        for asked, wait in fresh:
            if asked > sent:
                pool.fresh.append((asked, wait))
            elif not wait.done():
                left = max(0, asked + wait.ask.deadline_in - now)
                wait.timer = self._clock.after(left, wait.overdue)

    def _read(self, exchange: _Exchange, reply: bytes | Exception) -> Answer | None:
        """The answer; None if the same batch had to be sent again, with its rules."""
        if isinstance(reply, Exception):
            raise reply
        pool, rules = exchange.pool, exchange.rules
        answer = unpack_answer(reply)
        if answer.status == NEEDS_RULES:
            if exchange.body:
                raise ValueError("the pool asks for rules that it was given")
            exchange.body = rules.body
            self._pass_on(exchange)
            return None
        if answer.status == NEWER_LAYOUT:
            raise ValueError("a newer release of Tidegate owns this pool's state: upgrade this one")
        if answer.conflict:
            self._warn(pool, "this policy revision is in force with other rules than ours")
        if rules is pool.rules:
            pool.send_rules = answer.rules is not None and answer.rules.digest != rules.digest
        return answer

    def _warn(self, pool: _Pool, what: str) -> None:
        """Said once until it changes."""
        if pool.warned != what:
            pool.warned = what
            logger.warning("shared_pool", extra={"pool": pool.spec.name, "what": what})

    def _count_away(self, was: bool, now: bool) -> None:  # noqa: FBT001 - before and after
        if was == now:
            return
        self._away += 1 if now else -1
        if self._on_mode is not None and self._away == now:
            self._on_mode(self._mode.value if now else "shared")

    # --- waiting

    def _tell(self, pool: _Pool) -> None:
        """Verdicts reach their waits."""
        for verdict in pool.remote.verdicts():
            wait = pool.waits.pop(verdict.rid, None)
            if wait is None:
                continue
            if wait.timer is not None:
                wait.timer.cancel()
            if not wait.done():
                wait.set_result(verdict)

    def overdue(self, pool: _Pool, rid: str) -> None:
        """The deadline passed in line."""
        if rid in pool.waits:
            pool.remote.late(self._clock.now(), rid)
            self._tell(pool)
            self._stir(pool)

    def withdraw(self, pool: _Pool, wait: Wait) -> None:
        """The wait was cancelled: its ask leaves the pool, or its grant is given back."""
        rid = wait.ask.rid
        if pool.waits.get(rid) is wait:
            del pool.waits[rid]
            if wait.timer is not None:
                wait.timer.cancel()
        pool.remote.cancel(self._clock.now(), rid)
        self._stir(pool)
