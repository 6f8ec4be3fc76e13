"""Results of held calls and alerts go out as webhooks.

A result is pushed until it was taken or tried often enough; the next try stands in the store, so it
survives a restart. An alert is tried a few times and then forgotten: the log and the metrics are
what operators can rely on. Neither ever raises into the loop that asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway import webhooks
from gateway.errors import CallerFault
from gateway.holds.rows import reply_value, shown
from scheduler.api import SchedulerError, State, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.clock import Clock
    from gateway.snapshot import Snapshot, WebhookRules
    from gateway.telemetry.logs import Log
    from gateway.telemetry.metrics import Metrics
    from gateway.units import Rng
    from gateway.webhooks import Target, Webhooks
    from scheduler.api import Held, TaskStore

ALERT_TRIES = 3
MAX_PUSHING = 32
"""Deliveries under way at once; the others wait in the store."""
MAX_ALERTS = 16


class Pushing:
    """Delivers; one per process.

    Attributes:
        busy: Holds whose result is being delivered now.
    """

    def __init__(  # noqa: PLR0913 - the composition root hands over each dependency once
        self,
        *,
        store: TaskStore,
        hooks: Webhooks,
        snapshot: Callable[[], Snapshot],
        clock: Clock,
        rng: Rng,
        metrics: Metrics,
        log: Log,
    ) -> None:
        self._store = store
        self._hooks = hooks
        self._snapshot = snapshot
        self._clock = clock
        self._rng = rng
        self._metrics = metrics
        self._log = log
        self._alerts = 0
        self.busy: set[str] = set()

    def wants(self, held: Held) -> bool:
        """Whether a delivery is due and may begin; whoever asks then calls `push`."""
        free = len(self.busy) < MAX_PUSHING and held.id not in self.busy
        return free and 0 < held.push_at <= self._clock.now()

    async def push(self, held: Held) -> None:
        """The result was delivered, or the next try is on disk."""
        self.busy.add(held.id)
        try:
            await self._deliver(held)
        except SchedulerError as fault:
            self._log.error("hold_store", call=held.id, error=str(fault))
        except Exception as error:  # noqa: BLE001 - it would end every execution with it
            self._log.error("webhook_crashed", call=held.id, error=type(error).__name__)
        finally:
            self.busy.discard(held.id)

    async def _deliver(self, held: Held) -> None:
        outcome = await self._tried(held, self._snapshot().holds.webhooks)
        if isinstance(outcome, webhooks.Delivered):
            await self._store.pushed(held.id, state="delivered", next_at=0)
            self._metrics.webhook("delivered")
            return
        wait = webhooks.next_try(
            held.push_tries + 1, share=self._rng.random(), retry_after=outcome.retry_after
        )
        again = wait if outcome.again else None
        self._metrics.webhook("failed" if again is None else "retried")
        self._log.warning("webhook", call=held.id, why=outcome.why, again_us=again or 0)
        await self._store.pushed(
            held.id,
            state="failed" if again is None else "pending",
            next_at=0 if again is None else self._clock.now() + again,
        )

    async def _tried(
        self, held: Held, rules: WebhookRules
    ) -> webhooks.Delivered | webhooks.Undelivered:
        try:
            one = webhooks.check(held.webhook, rules)
        except CallerFault as error:  # policy has changed since it was held
            return webhooks.Undelivered(error.message, again=False)
        try:
            body = await self._payload(held)
        except Unreadable as fault:  # it will not become readable by asking again
            return webhooks.Undelivered(str(fault), again=False)
        return await self._hooks.send(one, body, id=f"{held.id}.result", rules=rules)

    async def _payload(self, held: Held) -> bytes:
        value: dict[str, Any] = {"type": "hold.ended", "hold": shown(held)}
        reply = await self._store.reply(held.id) if held.state is State.DONE else None
        if reply is not None:
            value["response"] = reply_value(reply)
        return orjson.dumps(value)

    async def alert(self, value: dict[str, Any]) -> None:
        """Operators were told, or a few tries were made."""
        url = self._snapshot().holds.webhooks.alerts
        if not url or self._alerts >= MAX_ALERTS:
            return
        self._alerts += 1
        try:
            why = await self._told(webhooks.target(url), value)
        except Exception as error:  # noqa: BLE001 - it would end every execution with it
            why = type(error).__name__
        finally:
            self._alerts -= 1
        self._metrics.webhook("failed" if why else "delivered")
        if why:
            self._log.warning("webhook", alert=value.get("type"), why=why, again_us=0)

    async def _told(self, one: Target, value: dict[str, Any]) -> str:
        """Why it was not taken; nothing once it was."""
        alert = f"alert_{self._rng.getrandbits(64):016x}"
        body = orjson.dumps({**value, "at": self._clock.wall()})
        number = 1
        while True:
            rules = self._snapshot().holds.webhooks
            outcome = await self._hooks.send(one, body, id=alert, rules=rules)
            if isinstance(outcome, webhooks.Delivered):
                return ""
            if not outcome.again or number >= ALERT_TRIES:
                return outcome.why
            self._metrics.webhook("retried")
            await self._clock.sleep(2 ** (number - 1))
            number += 1
