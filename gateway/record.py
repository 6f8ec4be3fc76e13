"""The end of a call, written once: one JSON line for the log, the same line for `explain`.

No prompt text and no secret comes near: only names, numbers and the chain of verdicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.call import Lines
from gateway.telemetry.decisions import LONGEST_DETAIL, Quotes, make_record, make_who
from gateway.telemetry.logs import serialized
from gateway.telemetry.traces import parse_traceparent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.call import Call, HeaderList
    from gateway.clock import Clock
    from gateway.errors import GatewayError
    from gateway.telemetry.decisions import Decisions, Record, Where
    from gateway.telemetry.logs import Log
    from gateway.units import RuleId

LONGEST_NAME = 128
"""Characters of a caller's own text (path, model) that a line keeps."""


def trace_of(headers: HeaderList) -> str:
    """The trace a call belongs to, which all lines of one turn have in common; "" for none."""
    if not isinstance(headers, Lines):
        return _trace(headers)
    if headers.trace is None:
        headers.trace = _trace(headers)
    return headers.trace


def _trace(headers: HeaderList) -> str:
    for name, value in headers:
        if name == b"traceparent":
            context = parse_traceparent(value)
            return f"{context.trace:032x}" if context is not None else ""
    return ""


class Recorder:
    """Called once at the end of each call."""

    __slots__ = ("_clock", "_decisions", "_log", "_quote")

    def __init__(self, log: Log, decisions: Decisions, clock: Clock) -> None:
        self._log = log
        self._decisions = decisions
        self._clock = clock
        self._quote = Quotes()

    def __call__(self, call: Call, status: int, outcome: str, error: GatewayError | None) -> None:
        """Log line and decision record."""
        record = self._record(call, status, outcome, error)
        line = record.line(self._quote)
        self._decisions.add(call.id, line, call.snapshot.places)
        if call.snapshot.logs.access:
            self._log.write(line, plain=record.plain)

    def _record(self, call: Call, status: int, outcome: str, error: GatewayError | None) -> Record:
        principal, deployment, tier = call.principal, call.deployment, call.tier
        model = call.fields.model[:LONGEST_NAME] if call.fields is not None else ""
        usage, tool = call.usage, call.tool
        who = make_who(
            dialect=call.dialect,
            method=call.method,
            path=call.path[:LONGEST_NAME],
            model=model,
            served=(deployment.upstream_model or model) if deployment is not None else "",
            deployment=deployment.id if deployment is not None else "",
            credential=call.credential,
            principal=principal.id if principal is not None else "",
            agent=principal.agent if principal is not None else "",
            tenant=principal.tenant if principal is not None else "",
            session=call.session,
            client=call.client,
            peer=call.peer,
            rpc=call.rpc.first.method[:LONGEST_NAME] if call.rpc is not None else "",
            server=tool.server.name if tool is not None else "",
            tool=tool.tool[:LONGEST_NAME] if tool is not None else "",
        )
        return make_record(
            ts=self._log.stamp(),
            call=call.id,
            names=self._quote.names(who),
            received=call.received,
            status=status,
            outcome=outcome,
            end=call.end if call.end is not None else "",
            tier=tier.number if tier is not None else 0,
            revision=call.snapshot.revision,
            attempts=call.attempt,
            upstream_status=call.upstream_status,
            code=error.code if error is not None else "",
            because=error.because if error is not None else "",
            error=error.message[:LONGEST_DETAIL] if error is not None and not error.quotes else "",
            waited_us=call.queue_us,
            overhead_us=call.overhead_us,
            first_byte_us=call.upstream_us,
            total_us=self._clock.now() - call.received,
            reserved=call.reserved,
            usage=usage,
            cost=usage.money if usage is not None else 0,
            trace=trace_of(call.headers),
            notes=call.notes,
        )


MOST_REFUSALS = 1_000
MOST_REFUSED_BYTES = 1024 * 1024
"""Requests refused before the pipeline that `explain` remembers: in a memory of their own, since a
stranger who makes thousands must not push the calls of others out."""


class Refusals:
    """Requests that were refused before the pipeline saw them: for the log, and for `explain`."""

    __slots__ = ("_decisions", "_log", "_places")

    def __init__(
        self, log: Log, decisions: Decisions, places: Callable[[], Mapping[RuleId, Where]]
    ) -> None:
        self._log = log
        self._decisions = decisions
        self._places = places

    def __call__(self, call_id: str, error: GatewayError) -> None:
        """Log line and record; the caller holds nothing but the id of its answer."""
        self._log.info(
            "refused_early",
            call=call_id,
            code=error.code,
            because=error.because,
            error=error.message,
        )
        record = {
            "ts": self._log.stamp(),
            "call": call_id,
            "status": type(error).status,
            "outcome": "refused",
            "code": error.code,
            "because": error.because,
            "error": error.message[:LONGEST_DETAIL],
        }
        self._decisions.add(call_id, serialized(record), self._places())
