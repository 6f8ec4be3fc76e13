"""How simulated gateways reach a pool: in their own process, or over a store that takes time.

The pool is the production `PoolCore`; what is simulated is the way to it. `Near` is `LocalStore`
without its event loop: verdicts at once where the core has one, one alarm per pool. `Far` moves the
batches of the production client, `RemotePool`, whose twin over Redis is `shared.py`: one in flight,
mailbox and nudge, one alarm, and its own share of the quota while the store is away.

Weakness: the core stands in for its Lua twin, which equivalence tests hold to it; a store that is
down loses every call to it and no reply.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

from gateway.admission.core import Admit, Caller, PoolCore, Settle
from gateway.admission.local import SLACK
from gateway.admission.packing import OK, Answer, Standing
from gateway.admission.remote import TIMEOUT, RemotePool
from gateway.units import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.admission.core import Ask, PoolSpec, Reply, Verdict
    from gateway.admission.packing import Batch
    from gateway.simulate.engine import Engine
    from gateway.simulate.scenario import Fleet
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

    @property
    def idle(self) -> bool:
        """Nothing is wanted, held or owed."""
        ...

    def used(self) -> tuple[int, ...] | None:
        """The pool's meter as far as this gateway knows it."""
        ...

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

    def used(self) -> tuple[int, ...] | None:
        """The pool's meter now."""
        return self.core.meter.read()

    @property
    def idle(self) -> bool:
        """Nothing is wanted or held."""
        return not (self._waits or self.core.leases.held or self.core.line.waiting)

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
        if not (wake and 0 < self._alarm <= wake + SLACK):
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
        calls: Script calls that arrived.
    """

    __slots__ = ("_emptied", "calls", "clients", "core", "engine", "fleet", "rng", "spec", "watch")

    def __init__(self, engine: Engine, spec: PoolSpec, fleet: Fleet, rng: Rng) -> None:
        self.core = PoolCore(spec, engine.now)
        self.watch = Watch()
        self.spec = spec
        self.engine = engine
        self.fleet = fleet
        self.rng = rng
        self.calls = 0
        self.clients: dict[str, Far] = {}
        self._emptied: Micros = -1

    def one_way(self) -> Micros:
        """Half a round trip."""
        least, most = self.fleet.store or (0, 0)
        return (least + int((most - least) * self.rng.random())) // 2

    @property
    def down(self) -> bool:
        """Whether the store answers nobody now; after an outage it may have lost everything."""
        now = self.engine.now
        for outage in self.fleet.outages:
            if outage.start <= now < outage.end:
                return True
            if outage.empty and self._emptied < outage.end <= now:  # told once
                self._emptied = outage.end
                self.core = PoolCore(self.spec, now, cold=True, epoch=self.core.epoch + 1)
        return False

    def tick(self, batch: Batch) -> Answer:
        """What the script does with a batch."""
        self.calls += 1
        core, watch = self.core, self.watch
        for ask in batch.acquires:
            watch.asked(ask)
        reply = core.tick(
            self.engine.now, batch.caller, signals=batch.signals, settles=batch.settles,
            cancels=batch.cancels, lates=batch.lates, adopts=batch.adopts,
            acquires=batch.acquires,
        )  # fmt: skip
        watch.ticked(core)
        meter, line = core.meter, core.line
        standing = Standing(
            in_flight=len(core.leases.held), factor_ppm=meter.factor,
            blocked_until=meter.blocked_until, would_have_waited=core.would_have_waited,
            waiting=tuple(line.count), backlog=tuple(line.backlog), level=tuple(meter.level),
            used=meter.read(), foreign=tuple(meter.foreign),
        )  # fmt: skip
        letters = len(core.seats.by_name[batch.caller.gateway].mail)
        return Answer(status=OK, reply=reply, standing=standing, letters=letters)


class Far:
    """A pool in the store as one gateway uses it: the production client, moved by events."""

    __slots__ = (
        "_alarm", "_busy", "_deadlines", "_hearing", "_remote", "_shared", "_told", "_waits",
    )  # fmt: skip

    def __init__(self, shared: Shared, name: str, told: Told) -> None:
        self._shared = shared
        self._told = told
        self._remote = RemotePool(shared.spec, name, mode=shared.fleet.mode, cold=False)
        self._busy = False
        self._hearing = False
        self._alarm: Micros = 0
        self._waits: dict[str, Op] = {}
        self._deadlines: list[tuple[Micros, str]] = []
        shared.clients[name] = self

    def acquire(self, ask: Ask, op: Op) -> Verdict | None:
        """Asked with the next call to the store; or at once of our own share while it is away."""
        spec, engine = self._shared.spec, self._shared.engine
        if spec.mode is Mode.OFF:
            return Admit(rid=ask.rid, meter=(0,) * len(spec.dimensions), tag=0)
        verdict = self._remote.acquire(engine.now, ask, spec.dimensions)
        if verdict is None:
            self._waits[ask.rid] = op
            deadline = engine.now + ask.deadline_in
            heappush(self._deadlines, (deadline, ask.rid))
            if self._deadlines[0][0] == deadline:
                engine.at(deadline, self._overdue, deadline)
        self._go()
        return verdict

    def settle(self, done: Settle) -> None:
        """Rides on the next call, or leaves after a moment."""
        now = self._shared.engine.now
        self._remote.settle(now, done.rid, done.outcome, done.actual, done.retry_after)
        self._go()

    def cancel(self, rid: str) -> None:
        """Rides on the next call."""
        self._waits.pop(rid, None)
        self._shared.watch.gone(rid)
        self._remote.cancel(self._shared.engine.now, rid)
        self._go()

    def signal(self, foreign: tuple[int, ...]) -> None:
        """Rides on the next call."""
        self._remote.signal(self._shared.engine.now, foreign)
        self._go()

    def used(self) -> tuple[int, ...] | None:
        """The pool's meter as last told."""
        standing = self._remote.standing
        return None if standing is None else standing.used

    @property
    def idle(self) -> bool:
        """Nothing is wanted, held or owed."""
        return self._remote.quiet

    def _overdue(self, at: Micros) -> None:
        """Deadlines up to now have passed for those who still wait; watch the next one."""
        heap, waits, engine = self._deadlines, self._waits, self._shared.engine
        while heap and (heap[0][0] <= at or heap[0][1] not in waits):
            _, rid = heappop(heap)
            if rid in waits:
                self._remote.late(engine.now, rid)
        if heap:
            engine.at(heap[0][0], self._overdue, heap[0][0])
        self._go()

    def _tell(self) -> None:
        """Verdicts reach their calls."""
        for verdict in self._remote.verdicts():
            op = self._waits.pop(verdict.rid, None)
            if op is not None:
                self._told(op, verdict)

    def _go(self) -> None:
        """Whatever is due leaves.

        Verdicts of the gateway's own share may be there: they are told by an event of their own,
        not from within a call of the strategy's.
        """
        remote, engine = self._remote, self._shared.engine
        if remote.away and not self._hearing:
            self._hearing = True
            engine.after(0, self._hear, None)
        if self._busy:
            return
        due = remote.alarm(engine.now)
        if due is None:
            return
        batch = remote.next(engine.now) if due <= engine.now else None
        if batch is not None:
            self._busy = True
            engine.after(self._shared.one_way(), self._call, batch)
        elif due != self._alarm:
            self._alarm = due
            engine.at(due, self._ring, due)

    def _ring(self, at: Micros) -> None:
        if at == self._alarm:
            self._alarm = 0
            self._step()

    def _hear(self, _: None) -> None:
        self._hearing = False
        self._tell()

    def _step(self) -> None:
        """Something happened out there: what is due leaves, then calls hear of it."""
        self._go()
        self._tell()

    def _call(self, batch: Batch) -> None:
        """The batch arrives at the store, or at nobody."""
        shared, engine = self._shared, self._shared.engine
        if shared.down:
            engine.after(TIMEOUT, self._failed, None)
            return
        answer = shared.tick(batch)
        engine.after(shared.one_way(), self._answered, answer)
        assert answer.reply is not None  # noqa: S101 - `tick` has made it
        for name in answer.reply.nudged:
            other = shared.clients.get(name)
            if other is not None:
                engine.after(shared.one_way(), other.nudged, None)

    def _answered(self, answer: Answer) -> None:
        self._busy = False
        self._remote.answered(self._shared.engine.now, answer)
        self._step()

    def _failed(self, _: None) -> None:
        self._busy = False
        self._remote.failed(self._shared.engine.now)
        self._step()

    def nudged(self, _: None) -> None:
        """There is mail."""
        self._remote.nudge()
        self._go()
