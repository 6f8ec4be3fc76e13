"""LocalStore: the pool core in this process, the embedded default (`admission.md` §5).

One alarm per pool, armed at the core's wake and only while somebody waits: an idle pool costs
nothing, a waiting one does not poll. Settlements, cancellations and verdicts take effect at once,
in the caller's own step; only waiting needs the loop.

A wait is a future with two additions. Cancelling it withdraws the ask *synchronously*, so a caller
that left holds no place when the loop goes on. And cancelling it after the grant has come but
before its task has run again gives the grant back in full: in that gap the task dies with the grant
in its hands, and nobody else knows of it.

Pools are bounded: each new one looks at a few old ones and forgets those that are quiet, so any
number of keys in turn leaves memory flat.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from gateway.admission import forecast
from gateway.admission.core import Admit, Adopt, Caller, PoolCore, Settle, Shed
from gateway.admission.periods import period
from gateway.admission.store import DimensionView, LaneView, PoolView
from gateway.admission.values import LANES
from gateway.units import MICRO, MINUTE, Mode, new_tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from gateway.admission.core import Ask, Dimension, Outcome, PoolSpec, Reply, Verdict
    from gateway.clock import Clock, Timer
    from gateway.units import Micros

    Period = tuple[int, Micros, Micros, int]
    """Of one dimension: its index, where its period begins and ends, what is used."""

logger = logging.getLogger("tidegate.admission")

GATEWAY = "local"
"""The only gateway of an embedded pool."""

MAX_POOLS = 100_000
"""Pools alive at most; beyond it a call that needs a new one is refused."""

STANDING_AGE: Micros = 100_000
"""What is told of a pool's use may be so old: every answer tells it, and hardly ever has it changed
since the call was admitted."""

LOOKED_AT = 4
"""Old pools looked at for each new one; more than one, so that quiet pools go faster than they
come."""

SLACK: Micros = 1_000
"""An alarm that rings early, or at most this much late, stays: a saturated pool would otherwise
re-arm it for every arrival. An early one costs one tick, which arms the next where it belongs."""

RESTART: Micros = 2 * MICRO
"""What waiters are told when the process stops: come back when another one listens."""


class WaitOwner(Protocol):
    """The store that a wait belongs to; `pool` is its own affair."""

    def withdraw(self, pool: Any, wait: Wait) -> None:  # noqa: ANN401 - the owner's own type
        """The wait was cancelled: its ask leaves the pool, or its grant is given back."""
        ...

    def overdue(self, pool: Any, rid: str) -> None:  # noqa: ANN401 - the owner's own type
        """The deadline passed in line."""
        ...


class Wait(asyncio.Future["Verdict"]):
    """A verdict to come. Cancel it to withdraw, before and after it has come; see the module."""

    __slots__ = ("_pool", "_store", "_taken", "_withdrawn", "ask", "timer")

    def __init__(
        self,
        store: WaitOwner,
        pool: Any,  # noqa: ANN401 - the owner's own type
        ask: Ask,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(loop=loop)
        self.ask = ask
        self.timer: Timer | None = None
        self._store = store
        self._pool = pool
        self._taken = False
        self._withdrawn = False

    def cancel(self, msg: object | None = None) -> bool:
        """The ask is withdrawn, or the grant that nobody took yet is given back."""
        if super().cancel(msg):
            self._store.withdraw(self._pool, self)
            return True
        if not self._taken and not self._withdrawn and not self.cancelled():
            self._withdrawn = True
            if isinstance(super().result(), Admit):
                self._store.withdraw(self._pool, self)
        return False

    def overdue(self) -> None:
        """The deadline passed in line."""
        self._store.overdue(self._pool, self.ask.rid)

    def result(self) -> Verdict:
        """The verdict; from now on the grant is the caller's to settle or cancel.

        Raises:
            CancelledError: Cancelled, or given back before it was taken.
        """
        if self._withdrawn:
            raise asyncio.CancelledError
        verdict = super().result()
        self._taken = True
        return verdict

    def __await__(self) -> Generator[Any, None, Verdict]:
        """The verdict. The base class would fetch it without asking `result`."""
        if not self.done():
            yield from super().__await__()
        return self.result()

    __iter__ = __await__


class _Pool:
    """One core with its waits and its alarm."""

    __slots__ = ("caller", "conflict", "core", "timer", "told", "waits")

    def __init__(self, core: PoolCore) -> None:
        self.core = core
        self.caller = Caller(GATEWAY)
        self.conflict = False
        self.timer: Timer | None = None
        self.told: list[Period] = []
        self.waits: dict[str, Wait] = {}


class LocalStore:
    """`PoolStore` over cores in this process. Used from one thread, the loop's.

    Attributes:
        past: What a new pool's calendar dimensions had used before, by index; None knows nothing.
    """

    def __init__(self, clock: Clock, *, max_pools: int = MAX_POOLS, cold: bool = False) -> None:
        """A store without pools.

        Args:
            clock: The pools' clock and alarms.
            max_pools: Pools alive at most.
            cold: Pools that queue start as if their window were full, for processes that restart
                under load: a mirror that forgot its last minute would be refused by the provider.
        """
        self._clock = clock
        self._max_pools = max_pools
        self._cold = cold
        self._pools: OrderedDict[str, _Pool] = OrderedDict()
        self._closed = False
        self.past: Callable[[PoolSpec, list[Period]], dict[int, int]] | None = None

    # --- the protocol

    def acquire(self, spec: PoolSpec, ask: Ask) -> Verdict | asyncio.Future[Verdict]:
        """A verdict at once where the pool can say so, else a future of it; see `PoolStore`."""
        pool = self._pools.get(spec.name)
        if pool is None or self._closed:
            if self._closed:
                return Shed(rid=ask.rid, eta=RESTART, tag=0, because=spec.because)
            if spec.mode is Mode.OFF:
                return Admit(rid=ask.rid, meter=(0,) * len(spec.dimensions), tag=0)
            pool = self._open(spec)
            if pool is None:
                return Shed(rid=ask.rid, eta=MINUTE, tag=0, because=spec.because, full=True)
        now = self._clock.now()
        shape = None
        if spec is pool.core.spec:
            verdict: Verdict | None = pool.core.grant(now, ask)
            if verdict is not None:
                return verdict  # nobody waits, nothing to arm or to tell
        else:
            shape = self._follow(pool, spec, now)
        reply = pool.core.tick(now, pool.caller, acquires=(ask,), shape=shape)
        verdict = next((event for event in reply.events if event.rid == ask.rid), None)
        self._after(pool, reply)
        if verdict is not None:
            return verdict
        wait = pool.waits.get(ask.rid)
        if wait is None:
            wait = self._wait(pool, ask)
        return wait

    def grant(self, spec: PoolSpec, ask: Ask, now: Micros) -> Admit | None:
        """The short way: granted, where nobody waits, no place is kept and it fits; else None.

        None says nothing and has changed nothing: `acquire` must answer. So the ask needs no key of
        a place, which costs a hash of the body.

        Args:
            spec: The pool.
            ask: The call.
            now: By this store's clock, read in the very step that asks.
        """
        pool = self._pools.get(spec.name)
        if pool is None or spec is not pool.core.spec or self._closed or pool.core.line.places:
            return None
        return pool.core.grant(now, ask)

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
        if held is None:
            return
        # NamedTuple's own constructor is a Python function: three times as slow.
        done: Settle = new_tuple(Settle, (rid, outcome, actual, retry_after))
        core, now = held.core, self._clock.now()
        if core.line.waiting:
            self._after(held, core.tick(now, held.caller, settles=(done,)))
        else:
            core.settle(now, done)

    def cancel(self, pool: str, rid: str) -> None:
        """The ask is withdrawn; if granted and never sent, everything is given back."""
        held = self._pools.get(pool)
        if held is None:
            return
        wait = held.waits.get(rid)
        if wait is not None:
            wait.cancel()
            return
        reply = held.core.tick(self._clock.now(), held.caller, cancels=(rid,))
        self._after(held, reply)

    def renew(self, pool: str, rid: str) -> None:
        """The lease of a grant in flight starts anew."""
        held = self._pools.get(pool)
        if held is not None:
            reply = held.core.tick(self._clock.now(), held.caller, adopts=(Adopt(rid),))
            self._after(held, reply)

    def signal(self, pool: str, foreign: tuple[int, ...]) -> None:
        """Others use at least this much; ignored where the pool has got other dimensions since."""
        held = self._pools.get(pool)
        if held is not None and len(foreign) == len(held.core.spec.dimensions):
            reply = held.core.tick(self._clock.now(), held.caller, signals=(foreign,))
            self._after(held, reply)

    def follow(self, spec: PoolSpec) -> None:
        """A newer policy's rules hold for a pool that is alive, and free whom they free.

        The next caller would bring them; without one, those who wait would wait by the old rules.
        """
        pool = self._pools.get(spec.name)
        if pool is None or spec.revision <= pool.core.spec.revision:
            return
        now = self._clock.now()
        pool.core.reconfigure(now, spec)
        self._after(pool, pool.core.tick(now, pool.caller))

    def view(self, pool: str) -> PoolView | None:
        """A look at one pool as of now, or None if it is not alive."""
        held = self._pools.get(pool)
        if held is None:
            return None
        core = held.core
        core.advance(self._clock.now())
        return _view(core)

    def standing(self, pool: str) -> Sequence[tuple[Dimension, int]]:
        """Each dimension of a pool with what of it is used, `STANDING_AGE` old at most."""
        held = self._pools.get(pool)
        if held is None:
            return ()
        core, now = held.core, self._clock.now()
        if now - core.meter.now > STANDING_AGE or now < core.meter.now:
            core.advance(now)
        used = core.meter.read()
        return [(rule, used[at]) for at, rule in enumerate(core.spec.dimensions)]

    def pools(self) -> tuple[str, ...]:
        """Names of all pools alive."""
        return tuple(self._pools)

    def waiting(self) -> int:
        """Calls waiting in all pools."""
        return sum(len(pool.waits) for pool in self._pools.values())

    def ticks(self) -> int:
        """Ticks of all pools alive; an idle store makes none."""
        return sum(pool.core.version for pool in self._pools.values())

    def spent(self) -> Iterator[tuple[PoolSpec, list[Period]]]:
        """The calendar dimensions of every pool in which something was used since last asked."""
        for pool in self._pools.values():
            periods = periods_of(pool.core)
            if periods and periods != pool.told:
                pool.told = periods
                yield pool.core.spec, periods

    def tell_again(self) -> None:
        """What `spent` said last was lost."""
        for pool in self._pools.values():
            pool.told = []

    async def close(self) -> None:
        """Waiters get a soft `Shed`; timers are gone. Settlements are still taken."""
        self._closed = True
        for pool in self._pools.values():
            if pool.timer is not None:
                pool.timer.cancel()
                pool.timer = None
            waits = list(pool.waits.values())
            pool.core.tick(self._clock.now(), pool.caller, cancels=[wait.ask.rid for wait in waits])
            because = pool.core.spec.because
            for wait in waits:
                self._answer(pool, Shed(rid=wait.ask.rid, eta=RESTART, tag=0, because=because))

    # --- pools

    def _open(self, spec: PoolSpec) -> _Pool | None:
        """A new pool; None if there are too many that still hold something."""
        now = self._clock.now()
        for _ in range(LOOKED_AT):
            self._forget_first(now)
        if len(self._pools) >= self._max_pools:
            return None
        core = PoolCore(spec, now, cold=self._cold and spec.queue)
        periods = periods_of(core)
        if periods and self.past is not None:
            for i, used in self.past(spec, periods).items():
                core.meter.level[i] = max(core.meter.level[i], used)
        pool = self._pools[spec.name] = _Pool(core)
        return pool

    def _forget_first(self, now: Micros) -> None:
        """The first pool is forgotten if it is quiet, else looked at again after all others."""
        name = next(iter(self._pools), None)
        if name is None:
            return
        pool = self._pools[name]
        if not pool.waits:
            pool.core.advance(now)
            if pool.core.blank:
                del self._pools[name]
                return
        self._pools.move_to_end(name)

    def _follow(self, pool: _Pool, spec: PoolSpec, now: Micros) -> tuple[Dimension, ...] | None:
        """A higher revision replaces the rules; returns the caller's order of dimensions."""
        core = pool.core
        if spec.revision > core.spec.revision:
            core.reconfigure(now, spec)
            return None
        if spec.revision == core.spec.revision:
            if spec == core.spec:
                core.spec = spec  # the next comparison is by identity
                return None
            if not pool.conflict:
                pool.conflict = True
                logger.error(
                    "pool_conflict",
                    extra={"pool": spec.name, "revision": spec.revision, "because": spec.because},
                )
        return spec.dimensions

    # --- waiting

    def _wait(self, pool: _Pool, ask: Ask) -> Wait:
        """A future of the verdict, with its deadline watched."""
        wait = Wait(self, pool, ask, asyncio.get_running_loop())
        pool.waits[ask.rid] = wait
        wait.timer = self._clock.after(ask.deadline_in, wait.overdue)
        return wait

    def overdue(self, pool: _Pool, rid: str) -> None:
        """The deadline passed in line."""
        if rid in pool.waits:
            reply = pool.core.tick(self._clock.now(), pool.caller, lates=(rid,))
            self._after(pool, reply)

    def withdraw(self, pool: _Pool, wait: Wait) -> None:
        """The wait was cancelled: its ask leaves the pool, or its grant is given back."""
        rid = wait.ask.rid
        if pool.waits.get(rid) is wait:
            self._drop(pool, wait)
        self._after(pool, pool.core.tick(self._clock.now(), pool.caller, cancels=(rid,)))

    def _drop(self, pool: _Pool, wait: Wait) -> None:
        """Nobody waits for that verdict any more."""
        del pool.waits[wait.ask.rid]
        if wait.timer is not None:
            wait.timer.cancel()

    def _ring(self, pool: _Pool) -> None:
        """The alarm: somebody may fit now."""
        pool.timer = None
        self._after(pool, pool.core.tick(self._clock.now(), pool.caller))

    def _after(self, pool: _Pool, reply: Reply) -> None:
        """Verdicts reach their waits; the alarm stands at the next wake."""
        if reply.mail_seq != pool.caller.mail_ack:
            pool.caller = Caller(GATEWAY, mail_ack=reply.mail_seq)
        for event in reply.events:
            self._answer(pool, event)
        if self._closed:
            return
        timer, wake = pool.timer, reply.wake
        if timer is not None and timer.live:
            if wake and timer.at <= wake + SLACK:
                return
            timer.cancel()
        pool.timer = self._clock.alarm(wake, lambda: self._ring(pool)) if wake else None

    def _answer(self, pool: _Pool, event: Verdict) -> None:
        """The event's wait has its verdict."""
        wait = pool.waits.get(event.rid)
        if wait is not None:
            self._drop(pool, wait)
            if not wait.done():
                wait.set_result(event)


def periods_of(core: PoolCore) -> list[Period]:
    """The present period of each calendar dimension, with what is used of it."""
    meter = core.meter
    return [
        (i, *period(dim.calendar, dim.calendar_offset, meter.now), meter.level[i])
        for i, dim in enumerate(meter.dims)
        if dim.calendar
    ]


def _view(core: PoolCore) -> PoolView:
    """The pool as status shows it."""
    meter, line, spec = core.meter, core.line, core.spec
    used = meter.read()
    return PoolView(
        name=spec.name,
        now=core.now,
        in_flight=len(core.leases.held),
        concurrency=spec.concurrency,
        factor_ppm=meter.factor,
        blocked_for=max(0, meter.blocked_until - core.now),
        lanes=tuple(
            LaneView(waiting=line.count[lane], backlog=line.backlog[lane]) for lane in range(LANES)
        ),
        dimensions=tuple(
            DimensionView(
                name=dim.name,
                limit=dim.limit,
                level=meter.level[i],
                used=used[i],
                foreign=meter.foreign[i],
                because=dim.because,
                window=dim.window,
                calendar=dim.calendar,
                resets_in=meter.resets_in(i),
            )
            for i, dim in enumerate(spec.dimensions)
        ),
        eta=tuple(forecast.eta(core, lane) for lane in range(LANES)),
        would_have_waited=core.would_have_waited,
    )
