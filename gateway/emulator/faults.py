"""Faults by rule: which one strikes a call, and what it says. Depends on seed and arrival order.

`app.py` carries them out. A fault that answers by itself (`status`) comes before the meters and
spends no quota; all others happen to a call that was admitted, so that both sides' books still
balance.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from gateway.emulator.config import Fault
from gateway.emulator.meters import ANTHROPIC, http_date
from gateway.emulator.text import Draw


class Faults:
    """The rules in force, with their counters."""

    __slots__ = ("_draws", "_fired", "_seen", "rules")

    def __init__(self, rules: tuple[Fault, ...], seed: int) -> None:
        self.rules = rules
        self._seen = [0] * len(rules)
        self._fired = [0] * len(rules)
        self._draws = [Draw(seed, "fault", i, rule.name) for i, rule in enumerate(rules)]

    def strike(self, path: str, model: str, key: str) -> Fault | None:
        """The first rule that fires for this call. Every matching rule counts the call."""
        struck: Fault | None = None
        for index, rule in enumerate(self.rules):
            if not (
                _fits(path, rule.paths) and _fits(model, rule.models) and _fits(key, rule.keys)
            ):
                continue
            self._seen[index] += 1
            if struck is None and self._fires(index, rule):
                self._fired[index] += 1
                struck = rule
        return struck

    def _fires(self, index: int, rule: Fault) -> bool:
        count = self._seen[index]
        if rule.times and self._fired[index] >= rule.times:
            return False
        if rule.nth and count not in rule.nth:
            return False
        if rule.every and count % rule.every:
            return False
        return rule.probability >= 1 or self._draws[index].unit() < rule.probability

    def counts(self) -> list[dict[str, object]]:
        """Per rule: name, action, calls it matched, times it fired."""
        return [
            {"name": rule.name, "action": rule.action, "matched": seen, "fired": fired}
            for rule, seen, fired in zip(self.rules, self._seen, self._fired, strict=True)
        ]


def _fits(text: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Scripted:
    """An error a fault may answer with: status, `error.type`, code and message per dialect."""

    status: int
    kind: str
    code: str | None
    message: str


_OPENAI = {
    "rate_limit": Scripted(
        429, "requests", "rate_limit_exceeded", "Rate limit reached. Please try again later."
    ),
    "insufficient_quota": Scripted(
        429, "insufficient_quota", "insufficient_quota",
        "You exceeded your current quota, please check your plan and billing details.",
    ),
    "credit_balance": Scripted(
        429, "insufficient_quota", "credit_balance_exhausted", "Your credit balance is exhausted."
    ),
    "overloaded": Scripted(
        503, "server_error", None,
        "That model is currently overloaded with other requests. You can retry your request.",
    ),
    "slow_down": Scripted(
        503, "server_error", "slow_down",
        "Slow Down: reduce your request rate to its original level, keep it for at least 15 "
        "minutes, then increase it gradually.",
    ),
    "capacity": Scripted(
        503, "server_error", "service_unavailable",
        "The engine is currently overloaded, please try again later.",
    ),
    "server_error": Scripted(
        500, "server_error", None, "The server had an error while processing your request. Sorry!"
    ),
    "bad_gateway": Scripted(502, "server_error", None, "Bad gateway."),
    "gateway_timeout": Scripted(504, "server_error", None, "Gateway timeout."),
    "timeout": Scripted(408, "server_error", "timeout", "Request timed out."),
    "invalid_key": Scripted(
        401, "invalid_request_error", "invalid_api_key", "Incorrect API key provided."
    ),
    "permission": Scripted(
        403, "invalid_request_error", "model_not_found",
        "Project does not have access to this model.",
    ),
}  # fmt: skip

_ANTHROPIC = {
    "rate_limit": Scripted(
        429, "rate_limit_error", None,
        "This request would exceed your organization's rate limit. Please try again later.",
    ),
    "insufficient_quota": Scripted(
        400, "invalid_request_error", None,
        "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing "
        "to upgrade or purchase credits.",
    ),
    "overloaded": Scripted(529, "overloaded_error", None, "Overloaded"),
    "slow_down": Scripted(
        429, "rate_limit_error", None,
        "This request would exceed the acceleration limit of your organization. Please scale up "
        "your traffic more gradually.",
    ),
    "server_error": Scripted(500, "api_error", None, "Internal server error"),
    "bad_gateway": Scripted(502, "api_error", None, "Bad gateway"),
    "gateway_timeout": Scripted(504, "timeout_error", None, "Request timed out"),
    "timeout": Scripted(504, "timeout_error", None, "Request timed out"),
    "invalid_key": Scripted(401, "authentication_error", None, "invalid x-api-key"),
    "permission": Scripted(
        403, "permission_error", None, "Your API key does not have permission to use this model."
    ),
}  # fmt: skip
_ALIASES = {"credit_balance": "insufficient_quota", "capacity": "overloaded"}

_BY_STATUS = {
    401: "invalid_key", 403: "permission", 408: "timeout", 429: "rate_limit", 502: "bad_gateway",
    503: "overloaded", 504: "gateway_timeout", 529: "overloaded",
}  # fmt: skip


def scripted(fault: Fault, dialect: str) -> Scripted:
    """What a `status` or `error_event` fault answers in that dialect."""
    code = fault.code or _BY_STATUS.get(fault.status, "server_error")
    base = _ANTHROPIC[_ALIASES.get(code, code)] if dialect == ANTHROPIC else _OPENAI[code]
    return Scripted(fault.status or base.status, base.kind, base.code, base.message)


def retry_after_headers(fault: Fault, wall: float) -> list[tuple[bytes, bytes]]:
    """Each form of `retry_after`: "2s" is a date, "ms:700" is retry-after-ms, the rest verbatim."""
    pairs = []
    for form in fault.retry_after:
        if form.startswith("ms:"):
            pairs.append((b"retry-after-ms", form[3:].encode()))
        elif form.endswith("s") and form[:-1].lstrip("-").isdigit():
            pairs.append((b"retry-after", http_date(wall + int(form[:-1])).encode()))
        else:
            pairs.append((b"retry-after", form.encode("latin-1", "replace")))
    return pairs
