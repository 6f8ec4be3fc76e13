"""What `/status` shows: the whole state as plain values, without secrets, within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.admin import AdminView
from gateway.telemetry.metrics import Page
from gateway.units import MICRO

if TYPE_CHECKING:
    from gateway.admission.store import PoolStore, PoolView
    from gateway.edge import Edge
    from gateway.holds.resume import Resuming
    from gateway.layers.trip import Breakers
    from gateway.machine import Machine
    from gateway.policy.watch import PolicyWatch
    from gateway.snapshot import Snapshot
    from gateway.units import Micros

MOST_POOLS = 500
"""Pools shown: the provider's first, then those with somebody waiting, then the fullest."""


def pool_status(view: PoolView) -> dict[str, Any]:
    """One pool; amounts in whole units."""
    return {
        "name": view.name,
        "in_flight": view.in_flight,
        "concurrency": view.concurrency,
        "factor": view.factor_ppm / MICRO,
        "blocked_us": view.blocked_for,
        "waiting": [lane.waiting for lane in view.lanes],
        "eta_us": list(view.eta),
        "would_have_waited": view.would_have_waited,
        "dimensions": [
            {
                "name": dimension.name,
                "limit": dimension.limit / MICRO,
                "level": dimension.level / MICRO,
                "used": dimension.used / MICRO,
                "foreign": dimension.foreign / MICRO,
                "rule": dimension.because,
            }
            for dimension in view.dimensions
        ],
    }


def weight(view: PoolView) -> tuple[bool, int, float]:
    """Order of importance, largest first."""
    fullest = max((one.used / max(1, one.limit) for one in view.dimensions), default=0.0)
    waiting = sum(lane.waiting for lane in view.lanes)
    return view.name.startswith("pool:"), waiting, fullest


def pools_status(store: PoolStore) -> list[dict[str, Any]]:
    """The pools worth showing, in order of importance."""
    views = [view for name in store.pools() if (view := store.view(name)) is not None]
    views.sort(key=lambda view: view.name)
    views.sort(key=weight, reverse=True)
    return [pool_status(view) for view in views[:MOST_POOLS]]


def breakers_status(breakers: Breakers, now: Micros) -> list[dict[str, Any]]:
    """Every breaker that is not simply closed comes first."""
    found = [
        {
            "scope": scope,
            "state": breaker.state.value,
            "reason": breaker.reason,
            "in_us": max(0, breaker.until - now) if breaker.until < 1 << 61 else None,
        }
        for scope, breaker in breakers
    ]
    found.sort(key=lambda one: one["state"] == "closed")
    return found[:MOST_POOLS]


def holds_status(resuming: Resuming, now: Micros) -> dict[str, Any]:
    """Calls held, as the loop last counted them."""
    counted = resuming.counted
    models = sorted(counted.by_model.items(), key=lambda one: -one[1])
    return {
        "executes": resuming.owner,
        "waiting": counted.waiting,
        "oldest_us": max(0, now - counted.oldest) if counted.waiting else 0,
        "running": resuming.running,
        "models": dict(models[:MOST_POOLS]),
    }


def policy_status(watch: PolicyWatch) -> dict[str, Any]:
    """Which policy is in force, and why a newer one is not."""
    status = watch.status
    return {
        "revision": status.revision,
        "digest": status.digest,
        "files": [str(path) for path in status.files],
        "loaded_at": status.loaded_at,
        "refused": status.refused,
        "last_error": status.last_error,
        "warnings": list(status.warnings),
    }


def models_status(snapshot: Snapshot) -> list[str]:
    """Public names and patterns, in policy order."""
    return [*snapshot.models, *(pattern.pattern for pattern in snapshot.patterns)][:MOST_POOLS]


class View:
    """What the admin listener asks, answered from the machine."""

    def __init__(self, *, machine: Machine, edge: Edge, version: str) -> None:
        self._machine = machine
        self._edge = edge
        self._version = version
        self._since = machine.clock.now()
        self._page = Page(machine.metrics, machine.clock, machine.refresh)

    def admin(self) -> AdminView:
        """For `admin.admin`."""
        return AdminView(
            status=self.status,
            ready=self.ready,
            metrics=self._page,
            explain=self.explain,
            reload=self.reload,
            reset_loops=self._machine.reset_loops,
            revoke=self._machine.revoke,
            desk=self._machine.desk,
        )

    def status(self) -> dict[str, Any]:
        """The whole state."""
        machine = self._machine
        now = machine.clock.now()
        snapshot, sharing = machine.watch.current, machine.sharing
        return {
            "version": self._version,
            "uptime_us": now - self._since,
            "draining": self._edge.draining,
            "in_flight": self._edge.in_flight,
            "waiting": self._edge.waiting,
            "tokenizer_exact": machine.loaded and not machine.counter.warnings,
            "policy": policy_status(machine.watch),
            "models": models_status(snapshot),
            "store": {"mode": "embedded"} if sharing is None else sharing.status(),
            "pools": pools_status(machine.store),
            "breakers": breakers_status(machine.breakers, now),
            "conversations": len(machine.loops),
            "holds": holds_status(machine.resuming, now),
            "tools": {
                "effects_under_way": len(machine.guards.ledger),
                "waiting_for_approval": machine.guards.consent.waiting,
                "agents_watched": len(machine.guards.repeats),
            },
            "not_ready": self.ready(),
        }

    def ready(self) -> list[str]:
        """What readiness misses."""
        return ["draining"] if self._edge.draining else self._machine.lacking()

    def explain(self, call_id: str) -> dict[str, Any] | None:
        """The record of a call, with file and line of each rule."""
        machine = self._machine
        return machine.decisions.explain(call_id) or machine.refused.explain(call_id)

    async def reload(self) -> str:
        """Load the policy anew; the errors, "" on success."""
        watch = self._machine.watch
        return "" if await watch.reload() else watch.status.last_error
