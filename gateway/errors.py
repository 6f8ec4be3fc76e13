"""The exception tree of the gateway. The first branch answers "whose fault".

    GatewayError                 abstract: code, status, retry_after, because
    ├─ CallerFault    MalformedCall 400, Unauthenticated 401, Forbidden 403, NoSuchRoute 404,
    │                 MethodNotAllowed 405, BodyTooLarge 413, UnknownCoding 415, UpgradeRefused 426,
    │                 NeverFits 400, ContractBreach 400, KeyConflict 409, LoopDetected 429,
    │                 ApprovalPending 403 (a Forbidden), EffectUnderWay 409 (a KeyConflict),
    │                 ProtocolFault (MCP's own codes)
    ├─ Saturated      QueueFull 429, DeadlinePassed 429, BudgetSpent 429
    ├─ UpstreamFault  UpstreamTimeout 504, UpstreamUnreachable 502, UpstreamMalformed 502,
    │                 StreamCut, BreakerOpen 503
    ├─ StoreFault     StoreUnavailable 503, StoreConflict 409
    ├─ Draining 503   the process is stopping
    └─ PolicyError    while loading only: file, line, column, path, what, allowed

Expected outcomes are values; these exceptions carry a *final* refusal to the edge. Statuses are
defaults: `wire/refusals.py` owns the real one per dialect and client (`protocols.md` §4).
A message is written for the agent's developer: rule, scope, limit, reset. It never holds a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gateway.units import Micros, RuleId


class GatewayError(Exception):
    """A refusal that ends the call.

    Attributes:
        message: One or two sentences for people, without secrets.
        because: The rule that decided, as a policy path; "" where no rule did.
        retry_after: Micros until coming back helps; None where it does not help (a *hard* refusal).
        place: A signed place-in-line ticket to send along, or None.
        param: The request field at fault ("messages[2].content"), or None.
        code: Machine word of the refusal; class default unless given.
        details: Further facts for programs, without secrets: limit, scope, approval.
        quotes: Whether the message may repeat what the caller's body holds: it is for the caller
            alone then, never for the log.
    """

    status: ClassVar[int] = 500
    quotes: ClassVar[bool] = False
    default_code: ClassVar[str] = "internal_error"

    def __init__(  # noqa: PLR0913 - what a refusal may say, each once
        self,
        message: str,
        *,
        because: RuleId = "",
        retry_after: Micros | None = None,
        place: str | None = None,
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details = details or {}
        self.because = because
        self.retry_after = retry_after
        self.place = place
        self.param = param
        self.code = code or self.default_code


class CallerFault(GatewayError):
    """The caller must change the call."""

    status = 400
    default_code = "invalid_request"


class MalformedCall(CallerFault):
    """The request cannot be read as what its route promises."""


class Unauthenticated(CallerFault):
    """No credential, an unknown one, or an expired one."""

    status = 401
    default_code = "invalid_api_key"


class Forbidden(CallerFault):
    """The identity is known and may not do this."""

    status = 403
    default_code = "not_allowed"


class ApprovalPending(Forbidden):
    """A human must agree and has not yet: the same call again waits on."""

    default_code = "approval_pending"


class NoSuchRoute(CallerFault):
    """No such path on this listener."""

    status = 404
    default_code = "not_found"


class MethodNotAllowed(CallerFault):
    """The path exists, the method does not. `allow` lists the methods for the Allow header."""

    status = 405
    default_code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLarge(CallerFault):
    """The body, or its decoded form, is larger than the gateway's limit."""

    status = 413
    default_code = "request_too_large"


class UnknownCoding(CallerFault):
    """A content coding the gateway cannot read."""

    status = 415
    default_code = "unsupported_content_encoding"


class UpgradeRefused(CallerFault):
    """A WebSocket upgrade: clients fall back to plain HTTP."""

    status = 426
    default_code = "upgrade_required"


class NeverFits(CallerFault):
    """The cost exceeds what the pool can ever admit: waiting would be for nothing."""

    default_code = "context_length_exceeded"


class ContractBreach(CallerFault):
    """Arguments that break a schema or a policy assertion."""

    quotes = True
    default_code = "contract_breach"


class KeyConflict(CallerFault):
    """An idempotency key seen before with other arguments."""

    status = 409
    default_code = "determinism_violation"


class EffectUnderWay(KeyConflict):
    """The same call runs elsewhere and its outcome is not known yet."""

    default_code = "effect_under_way"


class LoopDetected(CallerFault):
    """The agent repeats itself; this branch is cut, the session lives."""

    quotes = True
    status = 429
    default_code = "loop_detected"


class ProtocolFault(CallerFault):
    """A broken rule of MCP, said in the code that MCP has for it.

    Attributes:
        rpc: JSON-RPC code.
        http: Status towards the client.
        data: Members of the error's data that the code prescribes.
    """

    default_code = "protocol_violation"

    def __init__(
        self,
        message: str,
        *,
        rpc: int = -32600,
        http: int = 400,
        data: Mapping[str, Any] | None = None,
        **more: Any,  # noqa: ANN401 - as `GatewayError`
    ) -> None:
        super().__init__(message, **more)
        self.rpc = rpc
        self.http = http
        self.data = data or {}


class Saturated(GatewayError):
    """A limit is full; nothing is broken."""

    status = 429
    default_code = "rate_limit_exceeded"


class QueueFull(Saturated):
    """The queue is full, or the predicted wait exceeds the call's deadline."""


class DeadlinePassed(Saturated):
    """The call waited as long as it may."""


class BudgetSpent(Saturated):
    """A token or money budget of the caller is used up: hard, with the reset in the text."""

    default_code = "budget_spent"


class UpstreamFault(GatewayError):
    """The provider's side failed."""

    status = 502
    default_code = "upstream_error"


class UpstreamTimeout(UpstreamFault):
    """Connect, first byte, idle or total deadline of the upstream passed."""

    status = 504
    default_code = "upstream_timeout"


class UpstreamUnreachable(UpstreamFault):
    """No connection, or it broke before the response."""

    default_code = "upstream_unreachable"


class UpstreamMalformed(UpstreamFault):
    """The upstream's answer is not HTTP, or not what its head promised."""

    default_code = "upstream_malformed"


class StreamCut(UpstreamFault):
    """The stream ended without its terminal mark, after bytes had reached the client."""

    default_code = "stream_cut"


class BreakerOpen(UpstreamFault):
    """The circuit breaker of this deployment is open and no rung of the ladder is left."""

    status = 503
    default_code = "upstream_unavailable"


class StoreFault(GatewayError):
    """Our own shared state failed."""

    status = 503
    default_code = "store_unavailable"


class StoreUnavailable(StoreFault):
    """The shared store is away and the declared mode is `closed`."""


class StoreConflict(StoreFault):
    """The shared store holds something else than this process believes."""

    status = 409
    default_code = "store_conflict"


class Draining(GatewayError):
    """The process is stopping; another one, or this one restarted, will serve the call."""

    status = 503
    default_code = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProblem:
    """One mistake in a policy file, with its place."""

    file: str
    line: int
    column: int
    path: str
    what: str
    allowed: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        """`file:line:column: path: what is wrong; allowed: …; did you mean …?`."""
        text = f"{self.file}:{self.line}:{self.column}: {self.path}: {self.what}"
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.nearest:
            text += f"; did you mean {self.nearest!r}?"
        return text


class PolicyError(GatewayError):
    """Loading failed; carries every problem found, never only the first."""

    default_code = "policy_error"

    def __init__(self, problems: tuple[PolicyProblem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems
