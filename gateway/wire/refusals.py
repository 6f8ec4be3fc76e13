"""Every error in every dialect's own shape: status, headers and body of a refusal.

The table is `protocols.md` §4, which was measured with real clients; a status here is chosen for
what its client *does* next. The rules:

* *Soft* (coming back helps): whole `Retry-After` of 1 to 60 s, the same instant in
  `retry-after-ms`, `x-should-retry: true`. *Hard* (it does not, or only after more than 60 s):
  `x-should-retry: false` and no wait at all; the true reset stands in the text. An error without
  `retry_after` is hard.
* Codex answers one 429 with thirty requests and ignores `x-should-retry`, but stops at 400: on
  Responses it gets 400 for every refusal of ours that would make it come back.
* Claude Code answers a 400 with six requests, whatever `x-should-retry` says (measured with
  2.1.332), and one hard 429 with none: it gets that for a call that can never fit.
* Messages knows 529 `overloaded_error` where others know 503.
* A text is signed "Tidegate", because Claude Code blames images for any 413, and names the rule.
* After an early 200 the error stands in the stream (`in_band`), in a form SDKs do not retry.

Bodies are mappings; whoever sends them encodes them. No text here holds a secret or a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.call import ClientKind, Dialect, Family
from gateway.errors import (
    ApprovalPending,
    BodyTooLarge,
    BreakerOpen,
    BudgetSpent,
    CallerFault,
    ContractBreach,
    Draining,
    EffectUnderWay,
    Forbidden,
    GatewayError,
    KeyConflict,
    LoopDetected,
    MalformedCall,
    MethodNotAllowed,
    NeverFits,
    NoSuchRoute,
    ProtocolFault,
    Saturated,
    StoreConflict,
    StoreFault,
    StoreUnavailable,
    Unauthenticated,
    UnknownCoding,
    UpgradeRefused,
    UpstreamFault,
    UpstreamTimeout,
)
from gateway.units import MICRO
from gateway.wire.keepalive import response
from gateway.wire.ratelimit_headers import is_hard, retry_headers, whole_seconds

if TYPE_CHECKING:
    from gateway.call import HeaderList
    from gateway.units import Micros

MAX_TEXT = 4_000
"""Characters of a text or header: a caller's own words may stand in them."""

SOON: Micros = MICRO
"""When to come back where a refusal is soft by nature and names no instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refusal as the client shall see it. `body` is to be encoded as JSON."""

    status: int
    headers: HeaderList
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One row of the table.

    Attributes:
        messages: Status of the Messages dialect, where it differs.
        rpc_status: HTTP status towards MCP clients, where it differs.
        rpc: JSON-RPC code.
        openai, anthropic: The dialects' own types.
        codex: Whether Codex would come back and so gets 400.
        claude: Whether Claude Code would come back and so gets 429.
    """

    status: int
    openai: str
    anthropic: str
    rpc: int
    messages: int = 0
    rpc_status: int = 0
    codex: bool = False
    claude: bool = False


_TABLE: tuple[tuple[type[GatewayError], _Row], ...] = (
    # The first row whose class matches: subclasses before their bases.
    (Unauthenticated, _Row(
        status=401, openai="invalid_request_error", anthropic="authentication_error", rpc=-31401)),
    (Forbidden, _Row(
        status=403, openai="permission_error", anthropic="permission_error", rpc=-31403,
        codex=True)),
    (NoSuchRoute, _Row(
        status=404, openai="invalid_request_error", anthropic="not_found_error", rpc=-31404)),
    (MethodNotAllowed, _Row(
        status=405, openai="invalid_request_error", anthropic="invalid_request_error", rpc=-31405)),
    (BodyTooLarge, _Row(
        status=413, openai="invalid_request_error", anthropic="request_too_large", rpc=-31413)),
    (UnknownCoding, _Row(
        status=415, openai="invalid_request_error", anthropic="invalid_request_error", rpc=-32600)),
    (UpgradeRefused, _Row(
        status=426, openai="invalid_request_error", anthropic="invalid_request_error", rpc=-31426)),
    (NeverFits, _Row(
        status=400, openai="invalid_request_error", anthropic="invalid_request_error", rpc=-31413,
        rpc_status=413, claude=True)),
    (ContractBreach, _Row(
        status=400, openai="invalid_request_error", anthropic="invalid_request_error", rpc=-32602)),
    (KeyConflict, _Row(
        status=409, openai="invalid_request_error", anthropic="invalid_request_error", rpc=-31409,
        codex=True)),
    (LoopDetected, _Row(
        status=429, openai="rate_limit_error", anthropic="rate_limit_error", rpc=-31429,
        codex=True)),
    (ProtocolFault, _Row(
        status=400, openai="invalid_request_error", anthropic="invalid_request_error", rpc=-32600)),
    (CallerFault, _Row(
        status=400, openai="invalid_request_error", anthropic="invalid_request_error", rpc=-32600)),
    (Saturated, _Row(
        status=429, openai="rate_limit_error", anthropic="rate_limit_error", rpc=-31429,
        codex=True)),
    (UpstreamTimeout, _Row(
        status=504, openai="server_error", anthropic="api_error", rpc=-31504)),
    (BreakerOpen, _Row(
        status=503, openai="server_error", anthropic="overloaded_error", rpc=-31503, messages=529,
        codex=True)),
    (UpstreamFault, _Row(
        status=502, openai="server_error", anthropic="api_error", rpc=-31502)),
    (StoreConflict, _Row(
        status=409, openai="server_error", anthropic="api_error", rpc=-31409, codex=True)),
    (StoreFault, _Row(
        status=503, openai="server_error", anthropic="overloaded_error", rpc=-31503, messages=529,
        codex=True)),
    (Draining, _Row(
        status=503, openai="server_error", anthropic="overloaded_error", rpc=-31503, messages=529,
        codex=True)),
    (GatewayError, _Row(
        status=500, openai="server_error", anthropic="api_error", rpc=-31500)),
)  # fmt: skip

_SOFT_BY_NATURE = (Draining, StoreUnavailable, ApprovalPending, EffectUnderWay)
"""Another process, or this one in a moment, serves the same call; or a human is still asked."""

_HARD_BY_NATURE = (
    CallerFault,
    BudgetSpent,
)
"""Whatever instant they name: the call itself must change, or a day must pass."""


def refusal(  # noqa: PLR0913 - the answer depends on each of these, and they have one caller
    error: GatewayError,
    *,
    dialect: Dialect,
    family: Family,
    client: ClientKind = ClientKind.SDK,
    request_id: str = "",
    rpc_id: object = None,
    resource_metadata: str = "",
) -> Refusal:
    """The error as an HTTP answer in the caller's own shape.

    Args:
        error: Final; its message and rule are shown.
        dialect: Of the route.
        family: Whose shape the route speaks.
        client: Self-reported; chooses a status, never a right.
        request_id: Shown in headers and body; "" where none exists yet.
        rpc_id: MCP: the request's id, exactly as decoded; None where it is unknown.
        resource_metadata: MCP: address named in `WWW-Authenticate`, if any.
    """
    row = _row(error)
    hard, wait = _retry(error)
    headers: HeaderList = [(b"content-type", _content_type(family))]
    headers += retry_headers(wait, hard=hard)
    if error.place and not hard:
        headers.append((b"tidegate-place", _header(error.place)))
    if row.status == 401:
        headers.append((b"www-authenticate", _challenge(family, resource_metadata)))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", _header(error.allow)))
    if request_id:
        name = b"request-id" if family is Family.ANTHROPIC else b"x-request-id"
        headers.append((name, _header(request_id)))
    return Refusal(
        status=_status(error, row, dialect=dialect, family=family, client=client),
        headers=headers,
        body=_body(error, row, family=family, request_id=request_id, rpc_id=rpc_id),
    )


def in_band(  # noqa: PLR0913 - the opening's facts come from whoever sent it
    error: GatewayError,
    *,
    dialect: Dialect,
    request_id: str = "",
    response_id: str = "",
    model: str = "",
    sequence: int = 0,
    now: Micros = 0,
    rpc_id: object = None,
) -> tuple[str, Mapping[str, Any]]:
    """The error as the last event of a stream that began with 200: its name and its body.

    Args:
        error: Final.
        dialect: Of the stream.
        request_id: Shown by Messages.
        response_id: Responses: of the opening that was sent.
        model: Responses: as asked.
        sequence: Responses: the number of this event.
        now: Responses: micros since the epoch.
        rpc_id: MCP: the request's id.

    Returns:
        The event's name, "" where the dialect names none, and the body to encode.
    """
    row = _row(error)
    if dialect is Dialect.MESSAGES:
        kind = row.anthropic
        if kind == "rate_limit_error" and not _retry(error)[0]:
            kind = "overloaded_error"  # the one type clients know inside a stream
        return "error", _anthropic(error, kind, request_id)
    if dialect is Dialect.RESPONSES:
        return "response.failed", {
            "type": "response.failed",
            "sequence_number": sequence,
            "response": response(
                response_id or "resp_tidegate",
                status="failed",
                model=model,
                at=now,
                error={"code": error.code, "message": text(error)},
            ),
        }
    if dialect is Dialect.MCP:
        return "message", _rpc(error, row, rpc_id)
    return "", _openai(error, row)


def text(error: GatewayError) -> str:
    """The message for people: signed, with the rule and when to come back."""
    hard, wait = _retry(error)
    sentences = [f"Tidegate: {error.message.strip().rstrip('.')}."]
    if error.because and error.because not in error.message:
        sentences.append(f"Rule: {error.because}.")
    if not hard:
        # Codex reads this very wording, as OpenAI's own messages have it.
        sentences.append(f"Please try again in {whole_seconds(wait or 0)}s.")
    elif error.retry_after is not None and error.retry_after > 0:
        sentences.append(f"It resets in {span(error.retry_after)}.")
    return _clean(" ".join(sentences))


def span(wait: Micros) -> str:
    """A wait for people: `45 s`, `12 min`, `3 h 5 min`, `2 d 4 h`; rounded up."""
    seconds = -(-wait // MICRO)
    if seconds < 120:
        return f"{seconds} s"
    minutes = -(-seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _clean(words: str) -> str:
    """The words without lone surrogates, which encoders refuse, and of bounded length."""
    return words[:MAX_TEXT].encode("utf-8", "replace").decode()


def _header(words: str) -> bytes:
    """A header value: printable ASCII, so that no caller's word can end the line."""
    return "".join(mark for mark in words[:MAX_TEXT] if " " <= mark <= "~").encode()


def _row(error: GatewayError) -> _Row:
    return next(row for kind, row in _TABLE if isinstance(error, kind))  # GatewayError is last


def _retry(error: GatewayError) -> tuple[bool, Micros | None]:
    """Whether the refusal is hard, and else the wait."""
    wait = error.retry_after
    soft = isinstance(error, _SOFT_BY_NATURE)
    if wait is None and soft:
        wait = SOON
    return (isinstance(error, _HARD_BY_NATURE) and not soft) or is_hard(wait), wait


def _status(
    error: GatewayError, row: _Row, *, dialect: Dialect, family: Family, client: ClientKind
) -> int:
    if family is Family.MCP:
        if isinstance(error, ProtocolFault):
            return error.http
        return row.rpc_status or row.status
    if family is Family.ANTHROPIC:
        if client is ClientKind.CLAUDE_CODE and row.claude:
            return 429
        return row.messages or row.status
    if client is ClientKind.CODEX and dialect is Dialect.RESPONSES and row.codex:
        return 400
    return row.status


def _content_type(family: Family) -> bytes:
    return b"application/problem+json" if family is Family.TIDEGATE else b"application/json"


def _challenge(family: Family, resource_metadata: str) -> bytes:
    if family is Family.MCP and resource_metadata:
        return b'Bearer resource_metadata="%b"' % _header(resource_metadata)
    return b'Bearer realm="Tidegate"'


def _body(
    error: GatewayError, row: _Row, *, family: Family, request_id: str, rpc_id: object
) -> Mapping[str, Any]:
    match family:
        case Family.ANTHROPIC:
            return _anthropic(error, row.anthropic, request_id)
        case Family.MCP:
            return _rpc(error, row, rpc_id)
        case Family.TIDEGATE:
            return _problem(error, row, request_id)
        case Family.OPENAI:
            return _openai(error, row)


def _openai(error: GatewayError, row: _Row) -> Mapping[str, Any]:
    return {
        "error": {
            "message": text(error),
            "type": row.openai,
            "param": None if error.param is None else _clean(error.param),
            "code": error.code,
        }
    }


def _anthropic(error: GatewayError, kind: str, request_id: str) -> Mapping[str, Any]:
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": text(error)}}
    if request_id:
        body["request_id"] = request_id
    return body


def _rpc(error: GatewayError, row: _Row, rpc_id: object) -> Mapping[str, Any]:
    hard, wait = _retry(error)
    code = row.rpc
    more: Mapping[str, Any] = {}
    if isinstance(error, MalformedCall) and (error.param or "").startswith("params"):
        code = -32602
    elif isinstance(error, ProtocolFault):
        code, more = error.rpc, error.data
    return {
        "jsonrpc": "2.0",
        "id": rpc_id,
        "error": {
            "code": code,
            "message": text(error),
            "data": {
                "reason": error.code,
                "rule": error.because or None,
                "param": error.param,
                "retryAfterMs": None if hard else whole_seconds(wait or 0) * 1000,
                **error.details,
                **more,
            },
        },
    }


def _problem(error: GatewayError, row: _Row, request_id: str) -> Mapping[str, Any]:
    """RFC 9457, for our own routes only: MCP clients lose it."""
    return {
        "type": "about:blank",
        "title": error.code,
        "status": row.status,
        "detail": text(error),
        "rule": error.because or None,
        "param": error.param,
        "instance": request_id or None,
    }
