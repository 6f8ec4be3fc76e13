"""One process's side of a shared pool: what to send when, and what an answer means. Pure.

Somebody else moves the bytes (`fleet.py` over Redis, the simulator in virtual time). He asks `next`
for a batch whenever something happened or `alarm` has come, and brings back what became of it:
`answered` or `failed`. The laws of this file:

- One batch is in flight at a time; what arrives meanwhile rides on the next one. A call that wants
  in is sent at once, unless the line it joins is long; settlements wait a moment for company, since
  nobody waits for them.
- Waiters live here. Whatever is lost out there (a reply, the state, our seat), they are sent again;
  every input is idempotent by request id, so sending twice is never wrong.
- Nobody polls. With waiters the pool's wake and a heartbeat are the only clocks; without, none.
- When two batches in a row have failed, or half of the last twenty took too long, the declared fail
  mode holds until twenty have gone well: `local` shares (`outage.py`), `closed` or `open`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from gateway.admission.known import Held, Wait
from gateway.admission.outage import UNTOLD_PPM, Stopgap, fits_whole
from gateway.admission.outbox import Outbox
from gateway.admission.packing import Batch
from gateway.admission.values import (
    Admit,
    Adopt,
    Ask,
    Caller,
    Late,
    Never,
    Outcome,
    Settle,
    Shed,
    Verdict,
    same_meters,
    translate,
)
from gateway.units import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.admission.packing import Answer, Standing
    from gateway.admission.values import Dimension, PoolSpec, Reply
    from gateway.units import Micros

LINGER: Micros = 200_000
PROMPT: Micros = 20_000
"""How long a settlement waits for something to ride with: what it corrects is a three-hundredth of
a window old by then. Where permits are limited somebody waits for that very permit: then less."""

LONG_LINE: Micros = 2_000_000
"""With so much work ahead, as of the last answer, a call's own batch cannot be worth its while: it
lingers as well. What it loses in line is what arrived elsewhere in that moment."""

TOLD_LATELY: Micros = 1_000_000
"""How old that answer may be."""

TIMEOUT: Micros = 250_000
"""A batch without an answer for so long has failed."""

TOO_SLOW: Micros = 100_000
JUDGED = 20
"""Half of so many batches slower than that: the store is as good as away."""

HEARTBEATS = 3
"""With waiters, so many ticks while the pool would take us for dead. Two would not do: a pool that
nobody ticked for half of that time thinks that it stood still, and then takes nobody for dead."""

FAILURES = 2
PROBE: Micros = 250_000
"""While the store is away it is asked so often; after `JUDGED` good answers it is back."""

RETRY: Micros = 20_000
"""After a single failure the same batch goes again so soon."""

OVERDUE: Micros = 500_000
"""A waiter past its deadline that the pool does not answer for so long is answered here."""


class FailMode(StrEnum):
    """What a pool does while its shared store is away."""

    LOCAL = "local"
    CLOSED = "closed"
    OPEN = "open"


class RemotePool:
    """A shared pool as one process sees it. Used from one thread.

    Attributes:
        spec: The newest rules we know; batches speak their dimensions.
        waits, held: Calls that want in, calls in flight, by request id.
        standing, told: The pool's numbers, and when they came (our clock).
        away: The store does not answer; the fail mode holds.
        calls, failures: Batches sent; batches without an answer.
        orphans: Grants that came for nobody, and went back.
    """

    __slots__ = (
        "_bad", "_busy", "_cold", "_epoch", "_good", "_linger", "_mail_ack", "_mode", "_next_probe",
        "_nudged", "_offset", "_out", "_overdue", "_paces", "_ready", "_sent", "_sent_at",
        "_share", "_slow", "_stopgap", "_stopgap_wake", "_version", "_wake", "away", "calls",
        "failures", "gateway", "held", "orphans", "spec", "standing", "told", "waits",
    )  # fmt: skip

    def __init__(
        self, spec: PoolSpec, gateway: str, *, mode: FailMode = FailMode.LOCAL, cold: bool = True
    ) -> None:
        """A pool that nobody has asked yet.

        Args:
            spec: Its rules.
            gateway: Name of this process, new at every start.
            mode: What holds while the store is away.
            cold: Whether a store without this pool must be thought to have lost it. A process that
                has seen the pool always thinks so.
        """
        self.spec = spec
        self.gateway = gateway
        self.waits: dict[str, Wait] = {}
        self.held: dict[str, Held] = {}
        self.standing: Standing | None = None
        self.told: Micros = 0
        self.away = False
        self.calls = self.failures = self.orphans = 0
        self._mode = mode
        self._cold = cold
        self._out = Outbox()
        self._overdue: dict[str, Micros] = {}
        self._sent: Batch | None = None
        self._sent_at: Micros = 0
        self._linger: Micros = 0
        self._nudged = False
        self._wake: Micros = 0
        self._offset: Micros = 0
        self._epoch = self._version = self._mail_ack = 0
        self._share = UNTOLD_PPM
        self._ready: list[Verdict] = []
        self._bad = self._good = 0
        self._paces: deque[bool] = deque()
        self._slow = 0  # how many of them are
        self._busy = False  # somebody waited there, as of the last answer
        self._next_probe: Micros = 0
        self._stopgap: Stopgap | None = None
        self._stopgap_wake: Micros = 0

    # --- what the process wants

    def acquire(self, now: Micros, ask: Ask, dims: tuple[Dimension, ...]) -> Verdict | None:
        """The call wants in; its verdict, or None: it comes from `verdicts` later.

        Args:
            now: Our clock.
            ask: Its cost follows `dims`.
            dims: Of the rules that the caller is pinned to.
        """
        if ask.rid in self.held:
            return Admit(ask.rid, (), self.held[ask.rid].ask.tag or 0)
        if ask.rid in self.waits:
            return None
        self.waits[ask.rid] = Wait(ask, dims, now + self._offset)
        if not self.away:
            self._out.acquires[ask.rid] = None
            if self._busy and self._line_is_long(now, ask.lane):
                self._out.patient.add(ask.rid)
                self._linger_for(now)
            return None
        self._ask_stopgap(now, [ask.rid])
        return self._take_ready(ask.rid)

    def settle(
        self,
        now: Micros,
        rid: str,
        outcome: Outcome,
        actual: tuple[int, ...] | None,
        retry_after: Micros,
    ) -> bool:
        """The attempt is over; unknown or repeated request ids change nothing.

        Returns:
            Whether `alarm` may say something new.
        """
        held = self.held.pop(rid, None)
        if held is None:
            return False
        if actual is not None and held.dims is not held.spoken:
            actual = translate(actual, held.dims, held.spoken)
        done = Settle(rid, outcome, actual, retry_after)
        if held.here:
            self._settle_here(now, held, done)
            return True
        self._out.owe(done)
        if self._linger and not self.spec.concurrency:
            return False  # it waits with others
        self._linger_for(now)
        return True

    def _linger_for(self, now: Micros) -> None:
        """Something is to be sent that can wait a moment for company."""
        due = now + (PROMPT if self.spec.concurrency else LINGER)
        self._linger = min(self._linger, due) if self._linger else due

    def _line_is_long(self, now: Micros, lane: int) -> bool:
        """Whoever asks in that lane now waits much longer than a moment."""
        stands = self.standing
        if stands is None or now - self.told > TOLD_LATELY:
            return False
        return self.spec.queue and sum(stands.backlog[: lane + 1]) >= LONG_LINE

    def cancel(self, now: Micros, rid: str) -> None:
        """Withdrawn: the waiter leaves, or the unsent grant goes back in full."""
        held = self.held.pop(rid, None)
        wait = self.waits.pop(rid, None)
        if held is None and wait is None:
            return
        if self._stopgap is not None:
            if held is not None and held.here:
                self._stopgap.correct(
                    self._cost(held.ask, held.dims), (0,) * len(self._stopgap.spent)
                )
            self._tick_stopgap(now, cancels=[rid])
            if held is not None and held.here:
                return
        self._out.adopts.pop(rid, None)
        self._out.unask(rid)
        if wait is None or wait.sent:
            self._out.cancels[rid] = None

    def late(self, now: Micros, rid: str) -> None:
        """Its deadline has come; the pool says what would still have been ahead of it."""
        wait = self.waits.get(rid)
        if wait is None:
            return
        if self.away:
            if self._stopgap is not None:
                self._tick_stopgap(now, lates=[rid])
            if rid in self.waits:
                self._answer_late(rid, wait)
            return
        self._out.lates[rid] = None
        self._overdue.setdefault(rid, now + OVERDUE)

    def renew(self, now: Micros, rid: str) -> None:
        """The lease of a call in flight starts anew."""
        held = self.held.get(rid)
        if held is None:
            return
        if held.here:
            self._tick_stopgap(now, adopts=[Adopt(rid)])
        else:
            self._out.adopts[rid] = Adopt(rid)
            self._linger_for(now)

    def signal(self, now: Micros, foreign: tuple[int, ...]) -> None:
        """Others use at least this much."""
        if len(foreign) != len(self.spec.dimensions):
            return
        self._out.heard(foreign)
        self._linger_for(now)

    def nudge(self) -> None:
        """There is mail."""
        self._nudged = True

    def follow(self, spec: PoolSpec) -> None:
        """Newer rules hold from the next batch on."""
        if spec is not self.spec and spec.revision >= self.spec.revision:
            if self._out.signal is not None and len(self._out.signal) != len(spec.dimensions):
                self._out.signal = None
            self.spec = spec
            self._nudged = self._nudged or bool(self.waits)

    def verdicts(self) -> list[Verdict]:
        """What became known since; each is told once."""
        ready = self._ready
        if ready:
            self._ready = []
        return ready

    def server_now(self, now: Micros) -> Micros:
        """The pool's clock at that instant of ours."""
        return now + self._offset

    @property
    def quiet(self) -> bool:
        """Nothing is wanted, held or owed: the pool may be forgotten."""
        return not (self.waits or self.held or self._out or self._sent or self._ready or self.away)

    # --- when and what to send

    def next(self, now: Micros) -> Batch | None:
        """The batch to send now, if there is a reason; it counts as in flight until it is told."""
        due = self.alarm(now)
        return None if due is None or due > now else self.take(now)

    def take(self, now: Micros) -> Batch | None:
        """The batch to send now that `alarm` has come; as `next`."""
        if self._sent is not None:
            return None
        while self._overdue:
            rid, last = next(iter(self._overdue.items()))
            if last > now:
                break
            del self._overdue[rid]
            if rid in self.waits:
                self._answer_late(rid, self.waits[rid])
                self._out.cancels[rid] = None
        if self._stopgap is not None and self._stopgap_wake and self._stopgap_wake <= now:
            self._tick_stopgap(now)
        if self.away and self._next_probe > now:
            return None
        self._sent, self._sent_at = self._collect(now), now
        self.calls += 1
        return self._sent

    def alarm(self, now: Micros) -> Micros | None:
        """When `next` has something to do if nothing happens before; None: never."""
        if self.away:
            if self._stopgap_wake:
                return min(self._stopgap_wake, self._next_probe)
            return self._next_probe
        if self._next_probe > now:
            return self._next_probe  # after a failure
        if self._nudged or self._out.hasty:
            return now
        due = self._linger
        if self.waits:
            beat = self._sent_at + self.spec.dead // HEARTBEATS
            if not due or beat < due:
                due = beat
            if 0 < self._wake < due:
                due = self._wake
            if self._overdue:
                due = min(due, next(iter(self._overdue.values())))  # the oldest is the first
        return due or None

    def _collect(self, now: Micros) -> Batch:
        """Everything that is due, within the bound; nobody who wants in while the store is away."""
        out = self._out
        load = out.load(asking=not self.away)
        acquires: list[Ask] = []
        asked_after, ours = now + self._offset - PROMPT, self.spec.dimensions
        for rid in load.acquires:
            wait = self.waits[rid]
            wait.sent = True
            plain = wait.dims is ours and wait.asked > asked_after
            acquires.append(wait.ask if plain else self._spoken(wait, now))
        self._nudged = False
        self._wake = self._linger = 0
        return Batch(
            caller=Caller(self.gateway, self._epoch, self._version, self._mail_ack),
            signals=(out.signal,) if out.signal is not None else (),
            settles=load.settles, cancels=load.cancels, lates=load.lates, adopts=load.adopts,
            acquires=acquires, cold=self._cold or self._epoch > 0,
        )  # fmt: skip

    def _cost(self, ask: Ask, dims: tuple[Dimension, ...]) -> tuple[int, ...]:
        """Its cost in our dimensions."""
        ours = self.spec.dimensions
        if dims is ours or same_meters(dims, ours):
            return ask.cost
        return translate(ask.cost, dims, ours)

    def _spoken(self, wait: Wait, now: Micros) -> Ask:
        """The ask as the pool shall read it: what is left of its patience, in our dimensions."""
        ask = wait.ask
        waited = max(0, now + self._offset - wait.asked)
        cost = self._cost(ask, wait.dims)
        if cost is ask.cost and waited < PROMPT:
            return ask
        return replace(ask, cost=cost, deadline_in=max(0, ask.deadline_in - waited))

    # --- what came back

    def answered(self, now: Micros, answer: Answer) -> None:
        """The batch in flight has this answer; it was done, once."""
        batch, reply = self._sent, answer.reply
        assert batch is not None  # noqa: S101 - the caller brings back what `next` gave
        assert reply is not None  # noqa: S101 - an answer without one has failed
        self._sent = None
        slow = now - self._sent_at > TOO_SLOW
        self._out.forget(batch)
        known = self._epoch > 0
        lost = known and reply.epoch != self._epoch
        self._epoch, self._version, self._mail_ack = reply.epoch, reply.version, reply.mail_seq
        self._offset = reply.now - now
        self._share = reply.demand_share_ppm
        self.standing, self.told = answer.standing, now
        self._busy = answer.standing is not None and any(answer.standing.waiting)
        if answer.letters:
            self._linger_for(now)  # acknowledge soon, with what comes by
        for event in reply.events:
            self._arrived(now, event)
        self._wake = now + max(1, reply.wake - reply.now) if reply.wake else 0
        if lost or (reply.rejoin and known):
            self._again()
        self._judge(now, slow=slow, lost=lost)
        if not self._linger and self._out.lingering:
            self._linger = now  # more than one batch can carry

    def failed(self, now: Micros) -> None:
        """The batch in flight has no answer: whether it was done is not known, so it goes again."""
        batch, self._sent = self._sent, None
        assert batch is not None  # noqa: S101 - the caller brings back what `next` gave
        self.failures += 1
        self._bad += 1
        self._good = 0
        self._nudged = True
        if not self.away and self._bad >= FAILURES:
            self._go_away(now)
        self._next_probe = now + (PROBE if self.away else RETRY)

    def _arrived(self, now: Micros, event: Verdict) -> None:
        """A verdict from the pool reaches its waiter; a grant for nobody goes back."""
        wait = self.waits.pop(event.rid, None)
        if isinstance(event, Admit):
            if wait is None:
                if event.rid not in self.held:
                    self.orphans += 1
                    self._out.cancels[event.rid] = None
                return
            if self._stopgap is not None:
                self._tick_stopgap(now, cancels=[event.rid])
            dims = self.spec.dimensions
            self.held[event.rid] = Held(wait.ask, wait.dims, dims, here=False)
        elif wait is None:
            return
        out, rid = self._out, event.rid
        if rid in out.acquires:
            out.unask(rid)
        if rid in out.lates:
            del out.lates[rid]
        self._ready.append(event)

    def _again(self) -> None:
        """The pool lost us: who waits is sent with the place it had, who is in flight is adopted.

        Nothing is charged again: a pool that starts anew counts its whole window as spent.
        """
        for rid, wait in self.waits.items():
            if wait.ask.tag is None:
                wait.ask = replace(wait.ask, tag=wait.asked, ticket=False)
            self._out.acquires[rid] = None
        for rid, held in self.held.items():
            if not held.here:
                self._out.adopts[rid] = self._adoption(held)

    def _adoption(self, held: Held) -> Adopt:
        ask = held.ask
        cost = self._cost(ask, held.dims)
        held.spoken = self.spec.dimensions
        return Adopt(
            ask.rid, cost, charge=False, lane=ask.lane, tenant=ask.tenant, weight=ask.weight
        )

    def _answer_late(self, rid: str, wait: Wait) -> None:
        """The deadline passed and the pool says nothing."""
        del self.waits[rid]
        self._out.unask(rid)
        self._out.lates.pop(rid, None)
        self._ready.append(Late(rid=rid, because=self.spec.because, tag=wait.asked))

    def _take_ready(self, rid: str) -> Verdict | None:
        """The verdict of that call, if it is there already."""
        for i, verdict in enumerate(self._ready):
            if verdict.rid == rid:
                return self._ready.pop(i)
        return None

    # --- away and back

    def _judge(self, now: Micros, *, slow: bool, lost: bool) -> None:
        """Whether the store is well enough, after a batch that it answered."""
        self._bad = 0
        paces = self._paces
        paces.append(slow)
        self._slow += slow
        if len(paces) > JUDGED:
            self._slow -= paces.popleft()
        if not self.away:
            self._next_probe = 0
            if len(paces) == JUDGED and self._slow * 2 >= JUDGED:
                self._go_away(now)
            return
        self._good = 0 if slow else self._good + 1
        self._next_probe = now + PROBE
        if self._good >= JUDGED:
            self._come_back(now)
        elif lost and self._stopgap is not None:
            self._stopgap.spent = [0] * len(self._stopgap.spent)  # a cold start counts it already

    def _go_away(self, now: Micros) -> None:
        """The fail mode holds; who waits is asked there."""
        self.away = True
        self._good = 0
        self._next_probe = now + PROBE
        if self._mode is FailMode.CLOSED:
            return
        used = self.standing.used if self.standing is not None else ()
        spec = self.spec
        if self._mode is FailMode.OPEN:
            spec = replace(spec, mode=Mode.OFF)
        self._stopgap = Stopgap(spec, now, self._share, used)
        self._ask_stopgap(now, list(self.waits))

    def _come_back(self, now: Micros) -> None:
        """The store decides again. What was spent without it is told first, then who waits."""
        self.away = False
        self._next_probe = 0
        self._paces.clear()
        self._slow = 0
        stopgap, self._stopgap, self._stopgap_wake = self._stopgap, None, 0
        if stopgap is not None and any(stopgap.spent):
            rid = f"{self.gateway}.outage.{now}"
            self._out.adopts[rid] = Adopt(rid, tuple(stopgap.spent), charge=True)
        for held in self.held.values():
            held.here = False
        self._again()
        self._nudged = True

    def _ask_stopgap(self, now: Micros, rids: list[str]) -> None:
        """Those calls want in, and the store is away."""
        if self._stopgap is None:
            return  # closed: they wait for the store, or for their deadline
        self._tick_stopgap(now, acquires=[self._spoken(self.waits[rid], now) for rid in rids])

    def _tick_stopgap(self, now: Micros, **batch: Iterable[object]) -> None:
        """Our own core takes the inputs and says who may go."""
        stopgap = self._stopgap
        if stopgap is None:
            return
        core = stopgap.core
        reply: Reply = core.tick(now, stopgap.caller, **batch)  # type: ignore[arg-type]
        self._stopgap_wake = reply.wake
        for event in reply.events:
            wait = self.waits.get(event.rid)
            if wait is None:
                continue
            verdict = self._of_the_whole(event, wait)
            if verdict is None:
                continue
            del self.waits[event.rid]
            if isinstance(verdict, Admit):
                dims = core.spec.dimensions
                self.held[event.rid] = Held(wait.ask, wait.dims, dims, here=True)
                stopgap.granted(self._cost(wait.ask, wait.dims))
                if wait.sent:
                    self._out.cancels[event.rid] = None  # it may stand in the pool's line
            self._out.unask(event.rid)
            self._ready.append(verdict)

    def _of_the_whole(self, event: Verdict, wait: Wait) -> Verdict | None:
        """The verdict of our share, but never "never" for what only the whole pool can carry.

        Such a call waits for the store, or is told to come back where calls do not wait.
        """
        cost = self._cost(wait.ask, wait.dims)
        if not isinstance(event, Never) or not fits_whole(self.spec, wait.ask.lane, cost):
            return event
        if self.spec.queue:
            return None
        return Shed(rid=event.rid, eta=JUDGED * PROBE, tag=0, because=event.because)

    def _settle_here(self, now: Micros, held: Held, done: Settle) -> None:
        """A call that our own core had granted is over."""
        stopgap = self._stopgap
        if stopgap is None:
            return
        if done.actual is not None:
            stopgap.correct(self._cost(held.ask, held.dims), done.actual)
        self._tick_stopgap(now, settles=[done])

    def close(self, now: Micros, eta: Micros) -> None:
        """The process ends: who waits is told to come back, and leaves the line."""
        for rid in list(self.waits):
            self.cancel(now, rid)
            self._ready.append(Shed(rid=rid, eta=eta, tag=0, because=self.spec.because))
        self._nudged = bool(self._out.settles or self._out.cancels)
