"""Pure pool: what may be sent now, who is next, what was spent (`admission.md` §3, §4).

One call changes a pool, `tick`; everything that needs no pool time (whose clock, whose timer, which
process) is outside. A tick does, in this order:

    advance    levels drain, logs forget, leases and places end, acknowledged mail goes
    signal     others use at least this much
    settle     the attempt is over: charge the difference, free its permit
    cancel     withdrawn: a waiter leaves, an unsent grant is given back in full
    late       its deadline passed: it leaves, its place is kept
    adopt      a lease is renewed, or taken up again after the state was lost
    acquire    grant at once if nobody waits ahead and it fits; else wait, or a refusal with reasons
    pump       grant from the heads of the lanes, most urgent lane first, never passing a head

Every input is idempotent by request id: any batch may be sent twice. Each waiter and each grant has
its span counted exactly once against its tenant. The state lives in `meter.py` (how much fits),
`line.py` (who is next), `leases.py` (what is in flight) and `seats.py` (who else shares the pool);
`forecast.py` says how long a call would wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.admission import forecast
from gateway.admission.generations import change_rules
from gateway.admission.leases import Grant, Leases
from gateway.admission.line import PLACE_KEPT, Line, Place, Waiter, step
from gateway.admission.meter import REFRESH, Meter
from gateway.admission.seats import Seats
from gateway.admission.values import (
    LANES,
    Admit,
    Adopt,
    Ask,
    Caller,
    Dimension,
    Late,
    Never,
    Outcome,
    PoolSpec,
    Reply,
    Settle,
    Shed,
    Verdict,
    make_ask,
    never_fits,
    requests_only,
    same_meters,
    translate,
)  # fmt: skip
from gateway.units import MICRO, Micros, Mode, new_tuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "LANES", "Admit", "Adopt", "Ask", "Caller", "Dimension", "Late", "Mode", "Never", "Outcome",
    "PoolCore", "PoolSpec", "Reply", "Settle", "Shed", "Verdict", "make_ask", "same_meters",
    "translate",
]  # fmt: skip

STEP_BACK: Micros = MICRO
"""A clock that stepped back by more makes the state worthless; by less it is ignored."""

BACKUP: Micros = 50_000
"""Gateways that do not own the head wake so much later, in case the owner died."""

# To ask an enumeration for a member costs ten times what a name does.
_ENFORCE, _QUOTA, _RAMP = Mode.ENFORCE, Outcome.QUOTA, Outcome.RAMP

HOLD_SHIFT = 4
"""The mean time in flight moves by 1/16 per settlement."""


class PoolCore:
    """One pool.

    Attributes:
        spec: The rules in force.
        meter, line, leases, seats: The state that decides.
        epoch: Grows with every cold start.
        version: Grows with every tick.
        hold: Mean time in flight; 0 while unknown, or where permits are not limited.
        would_have_waited: Calls that shadow mode let pass.
    """

    __slots__ = (
        "_chores_at", "epoch", "hold", "leases", "line", "meter", "seats", "spec", "version",
        "would_have_waited",
    )  # fmt: skip

    def __init__(self, spec: PoolSpec, now: Micros, *, cold: bool = False, epoch: int = 1) -> None:
        """A pool that starts at `now`.

        Args:
            spec: The rules.
            now: Micros since the epoch, by the pool's clock.
            cold: The provider may hold charges we do not know of: start as if the window were full.
            epoch: Above every epoch that clients may have seen.
        """
        self.spec = spec
        self.meter = Meter(spec, now)
        self.line = Line(now)
        self.seats = Seats(spec.dead, now)
        self.epoch = epoch
        self.version = 0
        self.leases = Leases()
        self.would_have_waited = 0
        self.hold: Micros = 0
        self._chores_at: Micros = 0
        if cold:
            self.meter.fill()

    @property
    def now(self) -> Micros:
        """The pool's clock as of the last tick."""
        return self.meter.now

    @property
    def blank(self) -> bool:
        """True if a new pool would decide the same: this one may be forgotten."""
        return not self.leases.held and self.line.blank and self.meter.blank

    def tick(  # noqa: PLR0913 - the one door: each kind of input once, by keyword
        self,
        now: Micros,
        caller: Caller,
        *,
        signals: Sequence[tuple[int, ...]] = (),
        settles: Sequence[Settle] = (),
        cancels: Sequence[str] = (),
        lates: Sequence[str] = (),
        adopts: Sequence[Adopt] = (),
        acquires: Sequence[Ask] = (),
        shape: tuple[Dimension, ...] | None = None,
    ) -> Reply:
        """All inputs have taken effect, every waiter that fits is granted.

        Args:
            now: By the pool's clock. Earlier than the last: ignored up to `STEP_BACK`, beyond it
                the state moves with the clock and starts cold.
            caller: Who ticks.
            signals: Foreign use per dimension, micro-units.
            settles: Attempts that are over; unknown request ids change nothing.
            cancels: Request ids withdrawn before anything was sent.
            lates: Request ids whose deadline passed in line, by the caller's own watch.
            adopts: Grants in flight to renew, or to take up again.
            acquires: Calls that want in; the order given matters within a lane only.
            shape: Dimensions in whose order the vectors of signals, adopts and acquires stand,
                where the caller is pinned to other rules than `spec`; None: this pool's own.

        Returns:
            Verdicts and when to tick again.

        Raises:
            ValueError: A cost vector of another length than the dimensions, or a negative cost.
        """
        lost = caller.seen_version > self.version and caller.seen_epoch == self.epoch
        self.advance(now, lost=lost)
        now = self.meter.now
        seat, fresh = self.seats.sit(caller, now)
        reply = Reply(now, self.epoch, [], rejoin=fresh)
        spoken = self.spec.dimensions
        if shape is not None and not same_meters(shape, spoken):
            spoken = shape
        for foreign in signals:
            self.meter.signal(self._own(foreign, spoken))
        for done in settles:
            self._settle(done)
        if cancels or lates:
            self._withdraw(cancels, lates, reply)
        for lease in adopts:
            self._adopt(lease, spoken)
        if acquires:
            self._acquire_all(acquires, spoken, caller.gateway, reply)
        if self.line.waiting:
            self._pump(caller.gateway, reply)
        if seat.mail:
            reply.events.extend(event for _, event in seat.mail)
        reply.mail_seq = seat.mail_seq
        if len(self.seats) > 1:
            asked = sum(self.meter.span(self._own(a.cost, spoken)) for a in acquires)
            reply.demand_share_ppm = self.seats.asked(seat, asked, now)
        self.version += 1
        reply.version = self.version
        return reply

    # --- advance

    def advance(self, now: Micros, *, lost: bool = False) -> None:
        """The pool stands at `now`; nothing is granted.

        Args:
            now: By the pool's clock.
            lost: Writes were lost (a failover): what clients spent meanwhile is not in the books.
        """
        if self.meter.now <= now < self._chores_at and not lost:
            self.meter.advance(now)  # nearly always: the clock is well and no chore is due
            return
        elapsed = now - self.meter.now
        if elapsed < -STEP_BACK:
            self._restart(elapsed)
            return
        if lost:
            self._restart(0)
        self.meter.advance(now)
        if now >= self._chores_at:
            self._chores(self.meter.now, elapsed)

    def _chores(self, now: Micros, elapsed: Micros) -> None:
        """What ends by itself has ended: leases, places, seats; and when to look again."""
        # The sweep is due every half `dead`, so a longer silence cannot have missed this.
        if elapsed > self.spec.dead // 2:
            self.seats.stalled(now)
        self.leases.expire(now)
        self.line.expire_places(now)
        self.line.rest(now)
        self.seats.sweep(now, self._cancel)
        self._chores_at = min(
            self.leases.next_end(now + self.spec.lease), self.line.next_expiry(now), self.seats.due
        )

    def _restart(self, by: Micros) -> None:
        """A cold start that keeps queue and grants; all instants move by `by`."""
        self.epoch += 1
        self.version = 0
        if by:
            self.meter.shift(by)
            self.line.shift(by)
            self.seats.shift(by)
            self.leases.shift(by)
        self.meter.fill()
        self.seats.stalled(self.now)
        self._chores_at = 0

    # --- settle, cancel, late, adopt

    def _own(self, vector: tuple[int, ...], spoken: tuple[Dimension, ...]) -> tuple[int, ...]:
        """The vector in the order of this pool's dimensions; a wrong one is a ValueError."""
        if len(vector) != len(spoken) or (vector and min(vector) < 0):
            raise ValueError(
                f"pool {self.spec.name!r} needs {len(spoken)} amounts >= 0, got {vector}"
            )
        if spoken is self.spec.dimensions:
            return vector
        return translate(vector, spoken, self.spec.dimensions)

    # --- the short ways: one call of a process that has the pool to itself

    def grant(self, now: Micros, ask: Ask) -> Admit | None:
        """Granted in one pass if nobody waits, nothing is special and it fits at `now`.

        The same decision as a tick's, and a property test holds it to that. None says nothing, and
        nothing has changed but the time: a tick must answer. Vectors follow `spec`.
        """
        spec, meter, lane, cost = self.spec, self.meter, ask.lane, ask.cost
        if meter.now <= now < self._chores_at:
            meter.advance(now)  # as `advance`, whose call costs as much as what it decides
        else:
            self.advance(now)
        held, now = self.leases.held, meter.now
        if (
            self.line.waiting
            or not lane
            or ask.tag is not None
            or ask.place_key in self.line.places
            or ask.rid in held
            or spec.mode is not _ENFORCE
            or (spec.concurrency and len(held) >= spec.concurrency)
            or len(cost) != len(spec.dimensions)
        ):
            return None
        span = meter.take(lane, cost)
        if not span:
            return None
        tag = 0
        if spec.queue:
            tag = self.line.serve(lane, ask.tenant, span // ask.weight or 1, now)
        else:
            span = 0
        held[ask.rid] = new_tuple(
            Grant,
            (now + spec.lease, now, cost, lane, ask.tenant, ask.weight, span, tag, spec.dimensions,
             self.epoch),
        )  # fmt: skip
        return new_tuple(Admit, (ask.rid, meter.read(), tag, 0))

    def settle(self, now: Micros, done: Settle) -> None:
        """At `now`, what a tick with this settlement does while nobody waits; no reply is made."""
        meter = self.meter
        if meter.now <= now < self._chores_at:
            meter.advance(now)  # as in `grant`
        else:
            self.advance(now)
        self._settle(done)

    def _settle(self, done: Settle) -> None:
        """The grant is over. An unknown id changes nothing: neither meter nor factor nor block."""
        # Taken apart at once: a field of a named tuple costs three times a name.
        rid, outcome, actual, retry_after = done
        grant = self.leases.held.pop(rid, None)
        if grant is None:
            return
        spec = self.spec
        _, at, cost, _, _, _, _, _, shape, _ = grant
        refused = outcome is _QUOTA or outcome is _RAMP
        if actual is None:
            actual = requests_only(spec, cost) if refused else cost
        elif shape is not spec.dimensions:
            actual = translate(actual, shape, spec.dimensions, cost)
        if actual != cost:
            self._recharge(grant, actual)
        if refused:
            self.meter.refused(retry_after, quota=outcome is _QUOTA)
        elif spec.concurrency:
            held = self.meter.now - at
            self.hold += ((held - self.hold) >> HOLD_SHIFT) if self.hold else held

    def _recharge(self, grant: Grant, actual: tuple[int, ...]) -> None:
        """Meter and fairness hold what was really used."""
        _, at, cost, lane, tenant, weight, span, _, _, epoch = grant
        self.meter.correct(cost, actual, at, lost=epoch != self.epoch)
        if span:
            used = step(self.meter.span(actual), weight) if any(actual) else 0
            self.line.rebook(lane, tenant, used - step(span, weight))

    def _withdraw(self, cancels: Sequence[str], lates: Sequence[str], reply: Reply) -> None:
        for rid in cancels:
            self._cancel(rid)
        for rid in lates:
            waiter = self.line.waiting.get(rid)
            if waiter is not None:
                reply.events.append(self._late(waiter))

    def _cancel(self, rid: str) -> None:
        """Withdrawn before anything was sent: as if it had never asked, requests included."""
        waiter = self.line.waiting.get(rid)
        if waiter is not None:
            self.line.give_back(waiter)
            return
        grant = self.leases.held.pop(rid, None)
        if grant is not None:
            self._recharge(grant, (0,) * len(grant.cost))

    def _late(self, waiter: Waiter) -> Late:
        """The waiter leaves the line, its place kept."""
        because = forecast.held_by(self, waiter.lane, waiter.ask.cost)
        eta = forecast.eta_of(self, waiter)
        self._step_aside(waiter, eta)
        return Late(rid=waiter.ask.rid, because=because, eta=eta, tag=waiter.tag)

    def _step_aside(self, waiter: Waiter, eta: Micros) -> None:
        """The waiter leaves; with a key its place stays kept, else its span is given back."""
        if waiter.ask.place_key is None:
            self.line.give_back(waiter)
        else:
            self.line.leave(waiter)
            self._keep(waiter, eta)

    def _adopt(self, lease: Adopt, spoken: tuple[Dimension, ...]) -> None:
        """A known lease starts anew; an unknown one is taken up without queueing."""
        end = self.now + self.spec.lease
        if self.leases.renew(lease.rid, end) or lease.cost is None:
            return
        cost = self._own(lease.cost, spoken)
        waiter = self.line.waiting.get(lease.rid)
        if waiter is not None:
            self.line.give_back(waiter)
        # What was not charged here cannot be given back here: an epoch that never was.
        epoch = self.epoch if lease.charge else 0
        if lease.charge:
            self.meter.charge(cost)
        span = self.meter.span(cost)
        self.line.rebook(lease.lane, lease.tenant, step(span, lease.weight))
        tag = self.line.v[lease.lane]
        grant = Grant(
            end, self.now, cost, lease.lane, lease.tenant, lease.weight, span, tag, spoken, epoch
        )
        self.leases.held[lease.rid] = grant

    # --- acquire

    def _acquire_all(
        self, acquires: Sequence[Ask], spoken: tuple[Dimension, ...], gateway: str, reply: Reply
    ) -> None:
        """Every ask has its verdict or waits, in lane order: unsorted, lane 3 would pass lane 1."""
        if len(acquires) > 1:
            acquires = sorted(acquires, key=lambda ask: ask.lane)
        room, held, waiting = self.spec.max_grants, self.leases.held, self.line.waiting
        for ask in acquires:
            if ask.rid in held or ask.rid in waiting:
                verdict = self._known(ask.rid, gateway)
            else:
                cost = self._own(ask.cost, spoken)
                asked = ask if cost is ask.cost else replace(ask, cost=cost)
                verdict = self._acquire(asked, spoken, gateway, room)
                room -= type(verdict) is Admit
            if verdict is not None:
                reply.events.append(verdict)

    def _known(self, rid: str, gateway: str) -> Verdict | None:
        """The answer to an ask that the pool has already: its reply was lost, or it moved house."""
        grant = self.leases.held.get(rid)
        if grant is not None:
            # Without this repeated answer the waiter would hang; nothing is charged again.
            return Admit(rid=rid, meter=self.meter.read(), tag=grant.tag)
        waiter = self.line.waiting[rid]
        if waiter.gateway != gateway:
            self.line.waiting[rid] = waiter._replace(gateway=gateway)
        return None

    def _acquire(
        self, ask: Ask, spoken: tuple[Dimension, ...], gateway: str, room: int
    ) -> Verdict | None:
        """The verdict on a new ask; None if it waits."""
        spec, meter, cost = self.spec, self.meter, ask.cost
        if spec.mode is not Mode.ENFORCE:
            return self._pass(ask, spoken)
        never = meter.never(ask.lane, cost)
        if never is not None:
            return never_fits(spec, ask, *never)
        if not spec.queue:
            wait = forecast.wait(self, ask.lane, cost)
            if not wait:
                return self._grant(ask, ask.lane, 0, 0, spoken)
            return Shed(rid=ask.rid, eta=wait, tag=0, because=forecast.reason(self))
        return self._enter(ask, spoken, gateway, room)

    def _enter(
        self, ask: Ask, spoken: tuple[Dimension, ...], gateway: str, room: int
    ) -> Verdict | None:
        """Granted if nobody waits ahead and it fits, else waiting or refused."""
        line, meter, lane = self.line, self.meter, ask.lane
        span = meter.span(ask.cost)
        if lane == 0 and not line.zero_carries(span, meter.now):
            lane = 1
        tag, seq, kept = self._place(ask, lane)
        wait = 0
        if room > 0 and not line.ahead(lane):
            wait = forecast.wait(self, lane, ask.cost)
            if not wait:
                if not kept:
                    line.rebook(lane, ask.tenant, step(span, ask.weight))
                line.reach(lane, tag)
                return self._grant(ask, lane, span, tag, spoken)
        deadline = meter.now + ask.deadline_in
        waiter = Waiter(tag, seq, ask, lane, span, deadline, gateway, spoken)
        refusal = forecast.refusal(self, waiter, wait)
        if not kept and (refusal is None or ask.place_key is not None):
            line.rebook(lane, ask.tenant, step(span, ask.weight))
        if refusal is not None:
            self._keep(waiter, refusal.eta)
            return refusal
        line.join(waiter)
        return None

    def _place(self, ask: Ask, lane: int) -> tuple[int, int, bool]:
        """Tag, sequence number, and whether its span is still counted against the tenant.

        A kept place comes first. A tag of ours is a requeue: its settlement gave the span back. A
        ticket whose place is no longer kept was used, or has expired: a new place.
        """
        line = self.line
        place = line.take_place(ask.place_key, lane) if ask.place_key is not None else None
        if place is not None:
            if place.lane == lane:
                return place.tag, place.seq, True
            line.rebook(place.lane, place.tenant, -place.step)
        elif ask.tag is not None and lane == ask.lane and not ask.ticket:
            return ask.tag, line.number(before=True), False
        return line.start(lane, ask.tenant, self.meter.now), line.number(), False

    def _pass(self, ask: Ask, spoken: tuple[Dimension, ...]) -> Admit:
        """Shadow and off: granted whatever the meter says; shadow counts what would have waited."""
        if self.spec.mode is Mode.OFF:
            return Admit(rid=ask.rid, meter=self.meter.read(), tag=0)
        lane, cost = ask.lane, ask.cost
        if self.meter.never(lane, cost) is not None or forecast.wait(self, lane, cost):
            self.would_have_waited += 1
        return self._grant(ask, lane, 0, 0, spoken)

    def _grant(
        self, ask: Ask, lane: int, span: Micros, tag: int, spoken: tuple[Dimension, ...]
    ) -> Admit:
        """The call is in flight and charged."""
        spec, meter = self.spec, self.meter
        now = meter.now
        meter.charge(ask.cost, most=spec.mode is Mode.SHADOW)
        self.leases.held[ask.rid] = Grant(
            now + spec.lease, now, ask.cost, lane, ask.tenant, ask.weight, span, tag, spoken,
            self.epoch,
        )  # fmt: skip
        return Admit(rid=ask.rid, meter=meter.read(), tag=tag)

    def _keep(self, waiter: Waiter, eta: Micros) -> None:
        """The place of a refused call stays until well after the advised return."""
        ask = waiter.ask
        if ask.place_key is not None:
            counted = step(waiter.span, ask.weight)
            expires = self.now + eta + PLACE_KEPT
            place = Place(waiter.tag, waiter.seq, waiter.lane, ask.tenant, counted, expires)
            self.line.keep(ask.place_key, place)

    # --- pump

    def _pump(self, caller: str, reply: Reply) -> None:
        """Grant from the heads, most urgent lane first; a head that waits stops all below."""
        line, left = self.line, self.spec.max_grants
        for lane in range(LANES):
            while (head := line.head(lane)) is not None:
                if head.deadline < self.now:
                    self._mail(head.gateway, self._late(head), caller, reply)
                elif head.gateway != caller and self.seats.silent(head.gateway, self.now):
                    line.give_back(head)
                elif not left:
                    reply.wake, reply.owner = self.now + 1, caller
                    return
                elif self._served(head, caller, reply):
                    left -= 1
                else:
                    if head.gateway != caller:
                        reply.wake += BACKUP
                    return

    def _served(self, head: Waiter, caller: str, reply: Reply) -> bool:
        """True if the head has left the line, granted or refused; else the reply says when."""
        ask, meter, lane = head.ask, self.meter, head.lane
        wait = forecast.wait(self, lane, ask.cost) if self.spec.mode is Mode.ENFORCE else 0
        if not wait:
            self.line.leave(head)
            self.line.reach(lane, head.tag)
            waited = meter.now - (head.deadline - ask.deadline_in)
            admit = self._grant(ask, lane, head.span, head.tag, head.shape)
            self._mail(head.gateway, admit._replace(waited=waited), caller, reply)
            return True
        because = forecast.reason(self)
        hard = meter.hard_wait(ask.cost)
        if meter.now + hard > head.deadline:
            # What cannot come in time must not hold up those behind.
            self._step_aside(head, hard)
            shed = Shed(rid=ask.rid, eta=hard, tag=head.tag, because=because)
            self._mail(head.gateway, shed, caller, reply)
            return True
        reply.blocked_by = because
        reply.wake = meter.now + (min(wait, REFRESH) if meter.growing else wait)
        reply.owner = head.gateway
        return False

    def _mail(self, gateway: str, event: Verdict, caller: str, reply: Reply) -> None:
        """The event lies in the gateway's mail until acknowledged; the reply may be lost."""
        if self.seats.post(gateway, event) and gateway != caller and gateway not in reply.nudged:
            reply.nudged.append(gateway)

    # --- rules

    def reconfigure(self, now: Micros, spec: PoolSpec) -> None:
        """These rules hold from `now` on (`generations.py`); tick at once to grant what fits."""
        self.advance(now)
        change_rules(self, spec)
        self._chores_at = 0
