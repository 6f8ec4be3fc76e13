"""What an upstream's refusal means: by the body's own code first, by status second.

The kinds are those of `admission.md` §2.3 and their difference is the point: a spent account
retried for minutes (429 `insufficient_quota`), a healthy pool shrunk because a model was overloaded
and a credential blamed for a caller's mistake are the commonest public faults of gateways. A body
speaks before a status because providers reuse 429 and 400 for everything.

Trap: Gemini words every quota refusal "You exceeded your current quota, please check your plan and
billing details", so those words alone mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.call import Kind

if TYPE_CHECKING:
    from gateway.units import Micros
    from gateway.wire.stream import Failure

MAX_WORDS = 4_000
"""Characters of a message that are searched."""

MONEY = (
    "insufficient_quota",
    "credit_balance_exhausted",
    "organization_spend_limit_exceeded",
    "project_spend_limit_exceeded",
    "organization_usage_limit_exceeded",
    "enforced_spend_limit_reached",
    "billing_hard_limit_reached",
    "billing_not_active",
    "billing_error",
    "exceeded_current_quota_error",
    "insufficient_balance",
    "insufficient_credits",
    "credits_exhausted",
    "budget_exceeded",
    "payment_required",
    "usage_not_included",
    "arrearage",
)
"""Codes of an account without money; they reopen on an operator's or the owner's act alone."""

FAR: Micros = 300 * 1_000_000
"""A quota whose stated reset is further ahead than this is a period's, if its words say so too."""

_MONEY_WORDS = re.compile(
    r"credit balance|out of credits|insufficient (?:credits|balance|funds)|spend(?:ing)? limit",
    re.IGNORECASE,
)
_PERIOD_WORDS = re.compile(
    r"requests per day|tokens per day|images per day|\bRPD\b|\bTPD\b|daily (?:limit|quota)"
    r"|quota exhausted, resets after|monthly (?:limit|quota)|usage limit",
    re.IGNORECASE,
)
_PERIOD_CODES = frozenset({"quota_exhausted", "daily_limit_exceeded", "usage_limit_reached"})
_RAMP_CODES = frozenset({"slow_down"})
_RAMP_WORDS = re.compile(
    r"slow.down|acceleration limit|sharp increase in usage|ramp(?:ing)?[ -]?up", re.IGNORECASE
)
_CAPACITY_CODES = frozenset(
    {
        "overloaded_error",
        "overloaded",
        "engine_overloaded",
        "engine_overloaded_error",
        "model_overloaded",
        "server_overloaded",
        "service_unavailable",
        "service_unavailable_error",
        "serviceunavailableexception",
        "modelnotreadyexception",
        "capacity_exceeded",
        "no_capacity",
        "unavailable",
    }
)
_CAPACITY_WORDS = re.compile(
    r"high demand|overloaded|at capacity|capacity exceeded|insufficient capacity", re.IGNORECASE
)
_QUOTA_CODES = frozenset(
    {
        "rate_limit_exceeded",
        "rate_limit_error",
        "rate_limit_reached",
        "rate_limit_reached_error",
        "rate_limited",
        "ratelimitreached",
        "too_many_requests",
        "too_many_requests_error",
        "toomanyrequestsexception",
        "throttlingexception",
        "throttling",
        "throttled",
        "requests",
        "tokens",
        "request_quota_exceeded",
        "token_quota_exceeded",
        "resource_exhausted",
    }
)
_AUTH_CODES = frozenset(
    {
        "invalid_api_key",
        "api_key_invalid",
        "authentication_error",
        "permission_error",
        "unauthenticated",
        "permission_denied",
        "account_deactivated",
        "expiredtokenexception",
        "unrecognizedclientexception",
        "accessdeniedexception",
    }
)
_CALLER_CODES = frozenset(
    {
        "invalid_request_error",
        "not_found_error",
        "request_too_large",
        "context_length_exceeded",
        "model_not_found",
        "invalid_argument",
        "failed_precondition",
        "validationexception",
        "content_policy_violation",
        "content_filter",
    }
)
_FAULT_CODES = frozenset(
    {
        "server_error",
        "internal_error",
        "internal_server_error",
        "api_error",
        "timeout_error",
        "internal",
        "internalserverexception",
    }
)
_NONE: frozenset[str] = frozenset()
_CALLER_STATUSES = range(400, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a refusal's body says, in any provider's shape.

    Attributes:
        words: Its codes, types, statuses and reasons, in lower case, the most telling first.
        message: Its text, cut.
        status: A status named in the body, else 0.
    """

    words: tuple[str, ...] = ()
    message: str = ""
    status: int = 0

    @property
    def code(self) -> str:
        """The most telling word; "" where the body has none."""
        return self.words[0] if self.words else ""


def said(body: object) -> Said:
    """Read an error body of OpenAI, Anthropic, Azure, Google (also in a list), AWS, or a text.

    Args:
        body: Decoded JSON of any type, or a text; what is unknown says nothing.
    """
    if isinstance(body, list):
        body = body[0] if body else None
    if isinstance(body, str):
        return Said(message=body[:MAX_WORDS])
    if not isinstance(body, Mapping):
        return Said()
    error = body.get("error") or next(iter(_mappings(body.get("errors"))), None)
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, Mapping):
        error = body
    found = [error.get("code"), error.get("type"), error.get("status"), error.get("__type")]
    found += _reasons(error)
    texts = (error.get(key) for key in ("message", "Message", "detail"))
    message = next((text for text in texts if isinstance(text, str)), "")
    inner = error.get("metadata")
    if isinstance(inner, Mapping) and isinstance(inner.get("raw"), str):
        message = f"{message} {inner['raw']}"  # OpenRouter: what the provider behind it said
    words = dict.fromkeys(
        word.rpartition("#")[2][:128].lower()
        for word in found
        if isinstance(word, str) and word and not word.isdecimal()
    )
    words.pop("error", None)
    return Said(
        words=tuple(words),
        message=message[:MAX_WORDS],
        status=next((number for word in found if (number := _status(word))), 0),
    )


def _reasons(error: Mapping[str, Any]) -> list[object]:
    """Azure's inner code, Google's reasons and quota ids."""
    inner = error.get("innererror")
    found: list[object] = [inner.get("code")] if isinstance(inner, Mapping) else []
    for detail in _mappings(error.get("details")):
        found += [detail.get("reason"), detail.get("quotaId")]
        found += [violation.get("quotaId") for violation in _mappings(detail.get("violations"))]
    return found


def _mappings(value: object) -> list[Mapping[str, Any]]:
    entries = value[:16] if isinstance(value, list) else []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def said_by(failure: Failure) -> Said:
    """The same of an error that came inside a stream."""
    words = dict.fromkeys(word.lower() for word in (failure.code, failure.type) if word)
    return Said(words=tuple(words), message=failure.message, status=failure.status)


def classify(
    status: int, heard: Said, *, family: str = "openai", wait: Micros | None = None
) -> Kind:
    """What the refusal means.

    Args:
        status: Of the response; 200 for an error inside an answer.
        heard: What its body says.
        family: The provider's header family ("openai", "anthropic", "azure", "vertex", …).
        wait: What it told us to wait, or None.
    """
    status = heard.status if status < 400 and heard.status else status
    kind = _by_code(heard, status, wait)
    if kind is None:
        kind = _by_message(heard, status, wait)
    if kind is Kind.QUOTA and family == "vertex":
        return Kind.CAPACITY  # a shared pool without a published limit: its 429 means the model
    return kind or _by_status(status)


def _by_code(heard: Said, status: int, wait: Micros | None) -> Kind | None:
    words = heard.words
    for table, kind in (
        (MONEY, Kind.MONEY),
        (_PERIOD_CODES if wait is None or wait > FAR else _NONE, Kind.PERIOD),
        (_RAMP_CODES, Kind.RAMP),
        (_CAPACITY_CODES, Kind.CAPACITY),
    ):
        if any(word in table for word in words):
            return kind
    if any("perday" in word for word in words):
        return Kind.PERIOD
    if any(word in _QUOTA_CODES or word in _PERIOD_CODES for word in words):
        return _of_quota(heard, wait)
    if status in (400, 402) and _MONEY_WORDS.search(heard.message):
        return Kind.MONEY
    for table, kind in (
        (_AUTH_CODES, Kind.AUTH),
        (_CALLER_CODES if status != 429 else _NONE, Kind.CALLER),
        (_FAULT_CODES if status in (0, 200) else _NONE, Kind.FAULT),
    ):
        if any(word in table for word in words):
            # Anthropic and OpenAI label a bad key's 401 and a lack of rights' 403 as they like.
            return Kind.AUTH if status in (401, 403) else kind
    return None


def _of_quota(heard: Said, wait: Micros | None) -> Kind:
    """A quota's code may still cover money, a period, a ramp or capacity: its message tells."""
    message = heard.message
    if any(code in message for code in MONEY) or _MONEY_WORDS.search(message):
        return Kind.MONEY
    if _PERIOD_WORDS.search(message) and (wait is None or wait > FAR):
        return Kind.PERIOD
    if _RAMP_WORDS.search(message):
        return Kind.RAMP
    if _CAPACITY_WORDS.search(message):
        return Kind.CAPACITY
    return Kind.QUOTA


def _by_message(heard: Said, status: int, wait: Micros | None) -> Kind | None:
    """For bodies without a code we know: what the text says, where the status allows it."""
    if status == 429:
        return _of_quota(heard, wait)
    if status == 503 and _RAMP_WORDS.search(heard.message):
        return Kind.RAMP
    if status in (0, 200, 500, 503) and _CAPACITY_WORDS.search(heard.message):
        return Kind.CAPACITY
    return None


def _by_status(status: int) -> Kind:
    if status in (503, 529, 498):  # 498: Groq's flex tier at capacity
        return Kind.CAPACITY
    if status == 402:
        return Kind.MONEY
    if status in (401, 403):
        return Kind.AUTH
    if status in (408, 425):
        return Kind.FAULT
    return Kind.CALLER if status in _CALLER_STATUSES else Kind.FAULT


def _status(value: object) -> int:
    if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return value if 400 <= value <= 599 else 0
