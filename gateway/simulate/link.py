"""How simulated gateways reach a pool: in their own process, or over a store that takes time.

The pool is the production `PoolCore`; what is simulated is the way to it. `Near` is `LocalStore`
without its event loop: verdicts at once where the core has one, one alarm per pool. `Far` follows
`admission.md` §5: one call in flight per pool and gateway, whatever arrives meanwhile rides on the
next, grants for others lie in their mail and a nudge tells them, one timer at the wake.

Weakness: the store neither fails nor forgets here, and no call to it is lost.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

from gateway.admission.core import Admit, Caller, PoolCore, Settle
from gateway.units import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.admission.core import Ask, PoolSpec, Reply, Verdict
    from gateway.simulate.engine import Engine
    from gateway.simulate.workload import Op
    from gateway.units import Micros, Rng

    Told = Callable[[Op, Verdict], None]


class Watch:
    """Looks at a pool after each of its ticks for grants that passed somebody.

    Strict priority: nothing is granted in a lane while a more urgent one waits. Order: a tenant's
    calls of one lane are granted as they came, those that return to an old place apart.

    Attributes:
        overtakes: How many grants passed an older or more urgent waiter.
    """

    __slots__ = ("_asked", "_last", "_serial", "overtakes")

    def __init__(self) -> None:
        self.overtakes = 0
        self._serial = 0
        self._asked: dict[str, int] = {}
        self._last: dict[tuple[int, str], int] = {}

    def asked(self, ask: Ask) -> None:
        """The pool is about to hear of that call."""
        if ask.tag is None and ask.place_key is None:
            self._serial += 1
            self._asked[ask.rid] = self._serial

    def ticked(self, core: PoolCore) -> None:
        """The pool has ticked: its newest grants stand last among its leases."""
        now, count, held = core.now, core.line.count, core.leases.held
        fresh: list[tuple[int, int, str]] = []
        for rid in reversed(held):
            grant = held[rid]
            if grant.at < now:
                break
            serial = self._asked.pop(rid, 0)
            if serial:
                fresh.append((serial, grant.lane, grant.tenant))
        for serial, lane, tenant in reversed(fresh):
            last = self._last.get((lane, tenant), 0)
            if serial < last or (lane > 1 and count[1]) or (lane > 2 and count[2]):
                self.overtakes += 1
            else:
                self._last[lane, tenant] = serial

    def gone(self, rid: str) -> None:
        """The call was withdrawn or refused."""
        self._asked.pop(rid, None)


class Client(Protocol):
    """A pool as one gateway uses it."""

    core: PoolCore

    def acquire(self, ask: Ask, op: Op) -> Verdict | None:
        """A verdict now, or None: it is told later."""
        ...

    def settle(self, done: Settle) -> None:
        """The attempt is over."""
        ...

    def cancel(self, rid: str) -> None:
        """The ask is withdrawn; if granted and never sent, everything is given back."""
        ...

    def signal(self, foreign: tuple[int, ...]) -> None:
        """Others use at least this much."""
        ...


class Near:
    """A pool in the gateway's own process."""

    __slots__ = ("_ack", "_alarm", "_engine", "_told", "_waits", "core", "watch")

    def __init__(self, engine: Engine, spec: PoolSpec, told: Told) -> None:
        self.core = PoolCore(spec, engine.now)
        self.watch = Watch()
        self._engine = engine
        self._told = told
        self._waits: dict[str, Op] = {}
        self._ack = 0
        self._alarm: Micros = 0

    def acquire(self, ask: Ask, op: Op) -> Verdict | None:
        """As `LocalStore.acquire`."""
        core, now = self.core, self._engine.now
        self.watch.asked(ask)
        verdict: Verdict | None = core.grant(now, ask)
        if verdict is None:
            reply = core.tick(now, Caller("near", mail_ack=self._ack), acquires=(ask,))
            verdict = next((event for event in reply.events if event.rid == ask.rid), None)
            if verdict is None:
                self._waits[ask.rid] = op
                self._engine.after(ask.deadline_in, self._overdue, ask.rid)
            self._after(reply)
        else:
            self.watch.ticked(core)
        return verdict

    def settle(self, done: Settle) -> None:
        """As `LocalStore.settle`."""
        core, now = self.core, self._engine.now
        if core.line.waiting:
            self._after(core.tick(now, Caller("near", mail_ack=self._ack), settles=(done,)))
        else:
            core.settle(now, done)

    def cancel(self, rid: str) -> None:
        """As `LocalStore.cancel`."""
        self._waits.pop(rid, None)
        self.watch.gone(rid)
        self._tick(cancel=rid)

    def signal(self, foreign: tuple[int, ...]) -> None:
        """As `LocalStore.signal`."""
        caller = Caller("near", mail_ack=self._ack)
        self._after(self.core.tick(self._engine.now, caller, signals=(foreign,)))

    def _overdue(self, rid: str) -> None:
        if rid in self._waits:
            caller = Caller("near", mail_ack=self._ack)
            self._after(self.core.tick(self._engine.now, caller, lates=(rid,)))

    def _tick(self, cancel: str = "") -> None:
        caller = Caller("near", mail_ack=self._ack)
        cancels = (cancel,) if cancel else ()
        self._after(self.core.tick(self._engine.now, caller, cancels=cancels))

    def _ring(self, at: Micros) -> None:
        if at == self._alarm:
            self._alarm = 0
            self._tick()

    def _after(self, reply: Reply) -> None:
        self._ack = reply.mail_seq
        self.watch.ticked(self.core)
        wake = reply.wake
        if wake != self._alarm:
            self._alarm = wake
            if wake:
                self._engine.at(wake, self._ring, wake)
        for event in reply.events:
            op = self._waits.pop(event.rid, None)
            if op is not None:
                self._told(op, event)


class Shared:
    """One pool in the store, with those who use it.

    Attributes:
        calls: Script calls made.
    """

    __slots__ = ("calls", "clients", "core", "engine", "latency", "rng", "watch")

    def __init__(
        self, engine: Engine, spec: PoolSpec, latency: tuple[Micros, Micros], rng: Rng
    ) -> None:
        self.core = PoolCore(spec, engine.now)
        self.engine = engine
        self.latency = latency
        self.rng = rng
        self.watch = Watch()
        self.calls = 0
        self.clients: dict[str, Far] = {}

    def one_way(self) -> Micros:
        """Half a round trip."""
        least, most = self.latency
        return (least + int((most - least) * self.rng.random())) // 2


class Far:
    """A pool in the shared store, as one gateway uses it."""

    __slots__ = (
        "_acquires", "_alarm", "_batch", "_busy", "_cancels", "_deadlines", "_lates", "_mail_ack",
        "_name", "_settles", "_shared", "_signals", "_told", "_waits", "core",
    )  # fmt: skip

    def __init__(self, shared: Shared, name: str, told: Told, batch: Micros) -> None:
        self.core = shared.core
        self._shared = shared
        self._name = name
        self._told = told
        self._batch = batch
        self._busy = False
        self._mail_ack = 0
        self._alarm: Micros = 0
        self._waits: dict[str, Op] = {}
        self._deadlines: list[tuple[Micros, str]] = []
        self._clear()
        shared.clients[name] = self

    def _clear(self) -> None:
        self._acquires: list[Ask] = []
        self._settles: list[Settle] = []
        self._cancels: list[str] = []
        self._lates: list[str] = []
        self._signals: list[tuple[int, ...]] = []

    def acquire(self, ask: Ask, op: Op) -> Verdict | None:
        """Asked with the next call to the store; the verdict comes with a reply."""
        if self.core.spec.mode is Mode.OFF:
            return Admit(rid=ask.rid, meter=self.core.meter.read(), tag=0)
        self._waits[ask.rid] = op
        self._acquires.append(ask)
        deadline = self._shared.engine.now + ask.deadline_in
        heappush(self._deadlines, (deadline, ask.rid))
        if self._deadlines[0][0] == deadline:
            self._shared.engine.at(deadline, self._overdue, deadline)
        if not self._busy:
            self._kick(None)
        return None

    def settle(self, done: Settle) -> None:
        """Rides on the next call."""
        self._settles.append(done)
        if not self._busy:
            self._kick(None)

    def cancel(self, rid: str) -> None:
        """Rides on the next call."""
        self._waits.pop(rid, None)
        self._shared.watch.gone(rid)
        self._cancels.append(rid)
        if not self._busy:
            self._kick(None)

    def signal(self, foreign: tuple[int, ...]) -> None:
        """Rides on the next call."""
        self._signals.append(foreign)
        if not self._busy:
            self._kick(None)

    def _overdue(self, at: Micros) -> None:
        """Deadlines up to now have passed for those who still wait; watch the next one."""
        heap, waits = self._deadlines, self._waits
        while heap and (heap[0][0] <= at or heap[0][1] not in waits):
            _, rid = heappop(heap)
            if rid in waits:
                self._lates.append(rid)
        if heap:
            self._shared.engine.at(heap[0][0], self._overdue, heap[0][0])
        if self._lates and not self._busy:
            self._kick(None)

    def _aboard(self) -> bool:
        """Whether something waits for the next call."""
        return bool(
            self._acquires or self._settles or self._cancels or self._lates or self._signals
        )

    def _kick(self, _: None) -> None:
        """A call leaves as soon as those that come within the batch are aboard."""
        if not self._busy:
            self._busy = True
            shared = self._shared
            shared.engine.after(self._batch + shared.one_way(), self._call, None)

    def _call(self, _: None) -> None:
        """The script runs."""
        shared = self._shared
        core, watch, engine = shared.core, shared.watch, shared.engine
        shared.calls += 1
        caller = Caller(self._name, core.epoch, 0, self._mail_ack)
        if self._aboard():
            acquires, settles = self._acquires, self._settles
            cancels, lates, signals = self._cancels, self._lates, self._signals
            self._clear()
            for ask in acquires:
                watch.asked(ask)
            reply = core.tick(
                engine.now, caller, signals=signals, settles=settles, cancels=cancels,
                lates=lates, acquires=acquires,
            )  # fmt: skip
        else:
            reply = core.tick(engine.now, caller)
        watch.ticked(core)
        engine.after(shared.one_way(), self._replied, reply)
        for name in reply.nudged:
            other = shared.clients.get(name)
            if other is not None and not other._busy:  # noqa: SLF001 - one class
                engine.after(shared.one_way(), other._kick, None)  # noqa: SLF001

    def _replied(self, reply: Reply) -> None:
        """Verdicts reach their calls."""
        self._busy = False
        self._mail_ack = reply.mail_seq
        for event in reply.events:
            op = self._waits.pop(event.rid, None)
            if op is not None:
                self._told(op, event)
        engine, wake = self._shared.engine, reply.wake
        if wake:
            wake = max(wake, engine.now + 1_000)
            engine.at(wake, self._ring, wake)
        self._alarm = wake
        if not self._busy and self._aboard():
            self._kick(None)

    def _ring(self, at: Micros) -> None:
        if at == self._alarm:
            self._alarm = 0
            if not self._busy:
                self._kick(None)
