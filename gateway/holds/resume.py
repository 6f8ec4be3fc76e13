"""Held calls go on: written down when no provider can serve them, executed once one can.

The law of this file:

1. A call is executed only by the process that owns the store, only under a claim, and through the
   whole pipeline: limits, retry, downgrade, admission by tier. Its identity is asked of policy
   again.
2. Models are resumed in order of tier and age, one call first, then 2, 4 … at once (`Ramp`); a
   breaker that is not closed gets single calls, its probes.
3. One loop (`run`) does all this; what it starts are tasks of its own group, and they never raise.

Nothing here is lost with the process: rows that a dead holder left are opened again or in doubt.
Source: `execution.md` §15, `admission.md` §14.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway import webhooks
from gateway.errors import BreakerOpen, KeyConflict
from gateway.holds import rows
from gateway.holds.execute import Executing
from gateway.holds.follow import Followers, Run
from gateway.layers.hold import PATH
from gateway.resilience.breaker import Allow
from gateway.resilience.breaker import State as Breaks
from gateway.units import MICRO, Micros
from scheduler.api import (
    Held,
    HoldsFull,
    KeyReused,
    Limits,
    Message,
    Ramp,
    SchedulerError,
    State,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from gateway.call import Call, Service
    from gateway.clock import Clock
    from gateway.holds.push import Pushing
    from gateway.layers.trip import Breakers
    from gateway.snapshot import Snapshot
    from gateway.telemetry.logs import Log
    from gateway.telemetry.metrics import Metrics
    from scheduler.api import TaskStore, Waiting

BUSY_TICK: Micros = 100_000
"""Between two looks while calls are kept; of a breaker that changes, the loop is told at once."""
IDLE_TICK: Micros = MICRO
SWEEP: Micros = 2 * MICRO
"""Between two looks for what has expired, is to be pushed, or may be forgotten; idle, it is longer:
a process without holds shall not ask its store more than about once a second."""
IDLE_SWEEP: Micros = 10 * MICRO
BATCH = 200
"""Rows of one sweep."""
MAX_RUNNING = 256
"""Executions under way in all."""
MAX_RUNNING_BYTES = 256 * 1024 * 1024
"""Bytes of their requests."""


@dataclass(slots=True)
class Counted:
    """What status shows; refreshed by the loop."""

    waiting: int = 0
    oldest: Micros = 0
    by_model: dict[str, int] = field(default_factory=dict)


class Resuming:
    """Keeps calls and executes them. One per process.

    Attributes:
        store: Where they are.
        followers: Who waits for which.
        owner: Whether this process executes held calls.
        counted: For status.
    """

    def __init__(  # noqa: PLR0913 - the composition root hands over each dependency once
        self,
        *,
        store: TaskStore,
        snapshot: Callable[[], Snapshot],
        breakers: Breakers,
        clock: Clock,
        metrics: Metrics,
        log: Log,
        pushing: Pushing,
        decode: Callable[[Call], Mapping[str, Any]],
    ) -> None:
        self.store = store
        self.followers = Followers(clock)
        self.owner = False
        self.counted = Counted()
        self._executing = Executing(
            store=store, snapshot=snapshot, clock=clock, followers=self.followers, decode=decode,
            ended=self._ended, returned=self._returned,
        )  # fmt: skip
        self._snapshot = snapshot
        self._breakers = breakers
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._pushing = pushing
        self._tasks: asyncio.TaskGroup | None = None
        self._wake = asyncio.Event()
        self._ramps: dict[str, Ramp] = {}
        self._runs: dict[str, Run] = {}
        self._running_bytes = 0
        self._begun: set[str] = set()
        self._swept: Micros = 0
        self._stopping = False
        self._faulty = False

    def serve_by(self, service: Service) -> None:
        """This is the pipeline of held calls; to be said before `run`."""
        self._executing.service = service

    # --- keeping ---------------------------------------------------------------------------------

    async def keep(self, call: Call, error: BreakerOpen) -> Held:
        """The call is on disk.

        Raises:
            BreakerOpen: It could not be kept; the message says why.
            MalformedCall, Forbidden: Its webhook or its time is not allowed.
            KeyConflict: Its idempotency key stands for another request.
        """
        rules = call.snapshot.holds
        wish = call.header(b"tidegate-webhook")
        webhook = ""
        if wish is not None:
            webhook = webhooks.check(wish.decode("latin-1"), rules.webhooks).url
        new = rows.new_hold(call, error, now=self._clock.now(), webhook=webhook)
        limits = Limits(
            max_calls=rules.max_calls,
            max_bytes=rules.max_bytes,
            max_per_owner=rules.max_per_agent,
        )
        try:
            held = await self.store.keep(new, limits=limits)
        except asyncio.CancelledError:
            # The client left before it heard of the hold: nobody will ever fetch it.
            self.store.abandon(new.id, new.owner, self._clock.now())
            raise
        except KeyReused as reused:
            text = f"The idempotency key was used for another request, held as {PATH}{reused.id}."
            raise KeyConflict(text) from reused
        except SchedulerError as fault:
            raise self._unkept(error, fault) from fault
        if held.id == new.id:
            self._metrics.held("held")
            self._log.info("hold", call=held.id, model=held.model, tier=held.tier,
                           agent=held.agent, reason=held.reason)  # fmt: skip
            self._begin(held)
        self._wake.set()
        return held

    def _unkept(self, error: BreakerOpen, fault: SchedulerError) -> BreakerOpen:
        """The refusal of a call that asked to be held and could not be."""
        because, why = error.because, "the call could not be held"
        if isinstance(fault, HoldsFull):
            because = f"holds.{fault.bound}"
            why = f"no further call is held ({because})"
        else:
            self._log.error("hold_store", error=str(fault))
        self._metrics.held("full" if isinstance(fault, HoldsFull) else "store_failed")
        text = f"{error.message} Besides, {why}."
        return BreakerOpen(text, because=because, retry_after=error.retry_after)

    def _begin(self, held: Held) -> None:
        """The first call of a model is held: operators are told."""
        if held.model in self._begun:
            return
        self._begun.add(held.model)
        self._log.warning("holds_begun", model=held.model, reason=held.reason)
        told = {"type": "hold.begun", "model": held.model, "reason": held.reason,
                "because": held.because}  # fmt: skip
        self._spawn(self._pushing.alert(told))

    # --- the loop --------------------------------------------------------------------------------

    def poke(self) -> None:
        """Look at once: a breaker has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Execute what may be executed, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                while True:
                    busy = await self._guarded_turn()
                    await self._rest(BUSY_TICK if busy else IDLE_TICK)
            finally:
                self._tasks = None

    async def _rest(self, most: Micros) -> None:
        """Returns when poked, or after that time."""
        timer = self._clock.after(most, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
            self._wake.clear()

    async def _guarded_turn(self) -> bool:
        """One turn; a store that fails is said once, and asked again."""
        try:
            busy = await self._turn()
        except SchedulerError as fault:
            if not self._faulty:
                self._log.error("hold_store", error=str(fault))
            self._faulty = True
            return False
        self._faulty = False
        return busy

    async def _turn(self) -> bool:
        """What can be done now is begun. Whether calls are kept."""
        now = self._clock.now()
        if not self.owner:
            if not self.store.own():
                return False
            self.owner = True
        idle = not self.counted.waiting and not self._runs
        if now - self._swept >= (IDLE_SWEEP if idle else SWEEP):
            self._swept = now
            await self._sweep(now)
        waiting = await self.store.waiting()
        self._count(waiting)
        if not self._stopping:
            for model in dict.fromkeys(one.model for one in waiting):
                await self._resume(model)
        return bool(waiting or self._runs)

    async def _sweep(self, now: Micros) -> None:
        if not self._runs:
            await self._recover(now)
        for held in await self.store.expire(now=now, limit=BATCH):
            self._ended(held)
        await self.store.prune(before=now - self._snapshot().holds.keep, limit=BATCH)
        for held in await self.store.due_pushes(now=now, limit=BATCH):
            self._push(held)

    async def _recover(self, now: Micros) -> None:
        """What nobody executes is open again, or in doubt: its holder is gone."""
        left = await self.store.recover(now=now)
        if left.opened or left.doubted:
            self._log.warning("holds_recovered", opened=left.opened, in_doubt=len(left.doubted))
        for held in left.doubted:
            self._ended(held)

    def _count(self, waiting: list[Waiting]) -> None:
        tiers = {1: 0, 2: 0, 3: 0}
        models: dict[str, int] = {}
        for one in waiting:
            tiers[one.tier] += one.count
            models[one.model] = models.get(one.model, 0) + one.count
        self._metrics.holds_waiting(tiers)
        self.counted = Counted(
            waiting=sum(models.values()),
            oldest=min((one.oldest for one in waiting), default=0),
            by_model=models,
        )
        live = set(models) | {run.held.model for run in self._runs.values()}
        for model in self._begun - live:
            self._begun.discard(model)
            self._log.info("holds_over", model=model)
            self._spawn(self._pushing.alert({"type": "hold.over", "model": model}))
        for model in set(self._ramps) - live:
            del self._ramps[model]
        self._begun |= set(models)

    # --- releasing -------------------------------------------------------------------------------

    def width(self, model: str) -> int:
        """How many calls of the model its breakers would let through: 0, 1 (a probe), or any."""
        snapshot = self._snapshot()
        found = snapshot.model(model)
        if found is None:
            return MAX_RUNNING  # the pipeline's refusal is their answer
        width = 0
        for deployment in found.deployments:
            breaker = self._breakers.of(deployment.id, snapshot.breaker)
            spent = breaker.state is Breaks.OPEN and not breaker.sick
            if breaker.state is Breaks.CLOSED or spent:  # the pool holds a spent quota's queue
                return MAX_RUNNING
            if isinstance(breaker.peek(now=self._clock.now()), Allow):
                width = 1
        return width

    async def _resume(self, model: str) -> None:
        """As many of the model's calls as may go on now are under way."""
        now = self._clock.now()
        rules = self._snapshot().holds
        ramp = self._ramps.setdefault(model, Ramp(now))
        room = ramp.room(now=now, rate=rules.rate, widest=rules.at_once)
        room = min(room, self.width(model) - ramp.running, MAX_RUNNING - len(self._runs))
        left = MAX_RUNNING_BYTES - self._running_bytes
        if room <= 0 or left <= 0:
            return
        found = await self.store.claim(model, limit=room, now=now, most_bytes=left)
        for held, request in found:
            run = self._runs[held.id] = Run(held)
            ramp.started()
            self._running_bytes += held.bytes
            run.task = self._spawn(self._execute(run, request, ramp))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """A task of the loop's group; None where the loop does not run."""
        if self._tasks is None:
            work.close()
            return None
        return self._tasks.create_task(work)

    async def _execute(self, run: Run, request: Message, ramp: Ramp) -> None:
        """The call was executed. Never raises but when the process stops."""
        held = run.held
        served: bool | None = None
        try:
            served = await self._executing(run, request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopping or task is None:
                raise
            task.uncancel()  # its owner cancelled it: the row is final already
        except SchedulerError as fault:
            # The row stands as it was; the next sweep without executions finds it.
            self._log.error("hold_store", call=held.id, error=str(fault))
        except Exception as error:  # noqa: BLE001 - it would end every other execution with it
            self._log.error("hold_crashed", call=held.id, error=type(error).__name__)
            await self._executing.crashed(held)
        finally:
            self._running_bytes -= held.bytes
            self._runs.pop(held.id, None)
            self.followers.over(run)
            self._learn(ramp, served)
            self._wake.set()

    def _learn(self, ramp: Ramp, served: bool | None) -> None:  # noqa: FBT001 - private
        if served is None:
            ramp.ended()
        elif served:
            ramp.served(widest=self._snapshot().holds.at_once)
        else:
            ramp.refused()

    # --- ends ------------------------------------------------------------------------------------

    def _ended(self, held: Held) -> None:
        """A hold is final: log, metric, followers, webhook."""
        self._metrics.held(held.state.value)
        level = self._log.warning if held.state is State.IN_DOUBT else self._log.info
        level("hold_ended", call=held.id, model=held.model, state=held.state.value,
              status=held.status, code=held.code, attempts=held.attempt,
              held_us=held.finished - held.received)  # fmt: skip
        self.followers.changed(held.id)
        self._push(held)

    def _push(self, held: Held) -> None:
        if self._pushing.wants(held):
            self._spawn(self._pushing.push(held))

    def _returned(self, held: Held) -> None:
        self._metrics.held("given_back")
        self._log.info("hold_given_back", call=held.id, model=held.model, tries=held.tries)

    async def cancel(self, hold: str, owner: str) -> Held:
        """The hold is cancelled, and so is its execution.

        Raises:
            UnknownHold, IllegalTransition, StoreFault: As the store says.
        """
        held = await self.store.cancel(hold, owner, now=self._clock.now())
        run = self._runs.get(hold)
        if run is not None and run.task is not None:
            run.task.cancel()
        self._ended(held)
        return held

    @property
    def running(self) -> int:
        """Executions under way."""
        return len(self._runs)

    def run_of(self, hold: str) -> Run | None:
        """The execution under way in this process."""
        return self._runs.get(hold)

    async def drain(self, limit: Micros) -> None:
        """No execution is under way: what was not sent is open again.

        What was sent has until `limit` to be answered; then it is cut off, and in doubt.
        """
        self._stopping = True
        self.followers.leave()
        until = self._clock.now() + limit
        while self._runs and self._clock.now() < until:
            await self._clock.sleep(0.05)
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
