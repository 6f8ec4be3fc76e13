"""The end of a call, written once: one JSON line for the log, one record for `explain`.

No prompt text and no secret comes near: only names, numbers and the chain of verdicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.units import MICRO

if TYPE_CHECKING:
    from gateway.call import Call
    from gateway.clock import Clock
    from gateway.errors import GatewayError
    from gateway.telemetry.decisions import Decisions
    from gateway.telemetry.logs import Logs


def facts(call: Call, status: int, outcome: str, error: GatewayError | None) -> dict[str, Any]:
    """What is known of the call, by the names that log and `explain` share."""
    principal, usage, estimate = call.principal, call.usage, call.estimate
    out: dict[str, Any] = {
        "call_id": call.id,
        "dialect": call.dialect.value,
        "path": call.path[:200],
        "status": status,
        "outcome": outcome,
        "agent": principal.agent if principal is not None else "",
        "tenant": principal.tenant if principal is not None else "",
        "session": call.session,
        "tier": call.tier.name if call.tier is not None else "",
        "model": call.fields.model[:100] if call.fields is not None else "",
        "stream": call.fields is not None and call.fields.stream,
        "deployment": call.deployment.id if call.deployment is not None else "",
        "attempts": call.attempt,
        "upstream_status": call.upstream_status,
        "queue_us": call.queue_us,
        "revision": call.snapshot.revision,
    }
    if estimate is not None:
        out["estimated"] = {
            "input": estimate.input, "output": estimate.output, "cap": estimate.cap,
            "exact": estimate.exact,
        }  # fmt: skip
    if usage is not None:
        out["usage"] = {
            "input": usage.input, "output": usage.output, "cache_read": usage.cache_read,
            "cache_write": usage.cache_write, "estimated": usage.estimated,
            "microusd": usage.money,
        }  # fmt: skip
    if error is not None:
        out["code"] = error.code
        out["rule"] = error.because
        out["error"] = error.message[:500]
    return out


class Recorder:
    """Called once at the end of each call."""

    __slots__ = ("_clock", "_decisions", "_logs")

    def __init__(self, logs: Logs, decisions: Decisions, clock: Clock) -> None:
        self._logs = logs
        self._decisions = decisions
        self._clock = clock

    def __call__(self, call: Call, status: int, outcome: str, error: GatewayError | None) -> None:
        """Log line and decision record."""
        record = facts(call, status, outcome, error)
        record["took_us"] = self._clock.now() - call.received
        record["received"] = call.received / MICRO
        record["chain"] = [
            {
                "layer": note.layer,
                "verdict": note.verdict,
                "because": note.because,
                "at": note.at,
                "detail": note.detail,
            }
            for note in call.notes
        ]
        self._decisions.keep(call.id, record)
        if call.snapshot.logs.access:
            self._logs.access(record)
