"""Limits of the emulator: which quota governs a call, what headers say, what a refusal looks like.

The meters themselves are `simulate/meters.py`. Headers and bodies are written from what providers
send, not with `wire/`: an error there must not find itself confirmed here.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from gateway.emulator.config import EmulatorConfig, LimitRule
from gateway.emulator.text import Draw
from gateway.simulate.meters import Kind, Provider, Refusal, Standing
from gateway.units import MICRO, MINUTE, Micros

HeaderPairs = list[tuple[bytes, bytes]]

MAX_SCOPES = 10_000
"""Quotas instantiated per key or model; whoever comes later shares one."""

ANTHROPIC = "anthropic"
OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class Scope:
    """One quota at work: the rule it came from and its meters."""

    name: str
    rule: LimitRule
    provider: Provider


class Limiter:
    """All quotas of an emulator."""

    __slots__ = ("_rules", "_scopes", "_seed", "_started", "_unlimited")

    def __init__(self, config: EmulatorConfig, started: Micros) -> None:
        self._rules = config.limits
        self._seed = config.seed
        self._started = started
        self._scopes: dict[tuple[str, str, str], Scope] = {}
        free = LimitRule(name="unlimited", headers="none")
        self._unlimited = Scope(free.name, free, Provider(free.quota))

    def scope(self, key: str, model: str) -> Scope:
        """The quota that governs this key and model; unlimited where no rule matches."""
        for index, rule in enumerate(self._rules):
            if any(fnmatchcase(model, p) for p in rule.models) and any(
                fnmatchcase(key, p) for p in rule.keys
            ):
                who = key if rule.per in ("key", "key_model") else ""
                what = model if rule.per in ("model", "key_model") else ""
                return self._instance((f"{index}", who, what), rule)
        return self._unlimited

    def _instance(self, at: tuple[str, str, str], rule: LimitRule) -> Scope:
        scope = self._scopes.get(at)
        if scope is None:
            if len(self._scopes) >= MAX_SCOPES:
                at = (at[0], "(rest)", "(rest)")
                if at in self._scopes:
                    return self._scopes[at]
            name = ":".join(part for part in (rule.name, at[1], at[2]) if part)
            scope = self._scopes[at] = Scope(name, rule, self._provider(at, rule))
        return scope

    def _provider(self, at: tuple[str, str, str], rule: LimitRule) -> Provider:
        phase = rule.phase
        if phase is None:
            phase = Draw(self._seed, "phase", *at).below(MINUTE)
        capacity = rule.quota.capacity
        if capacity is not None:
            dips = tuple(
                replace(dip, start=dip.start + self._started, end=dip.end + self._started)
                for dip in capacity.dips
            )
            capacity = replace(capacity, dips=dips)
        return Provider(replace(rule.quota, phase=phase, capacity=capacity))

    def scopes(self) -> list[Scope]:
        """All quotas that were ever asked."""
        return list(self._scopes.values())


# --- times as providers write them --------------------------------------------------------------


def go_duration(span: Micros) -> str:
    """Go's notation, rounded up to milliseconds: `9ms`, `7.66s`, `6m0s`, `23h47m36.648s`."""
    millis = -(-max(0, span) // 1_000)
    if millis < 1_000:
        return f"{millis}ms"
    hours, rest = divmod(millis, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    seconds = f"{rest / 1_000:.3f}".rstrip("0").rstrip(".")
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def rfc3339(at: float) -> str:
    """UTC, whole seconds."""
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def http_date(at: float) -> str:
    """IMF-fixdate, with English names whatever the locale is."""
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    day = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")[moment.weekday()]
    month = (
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    )[moment.month - 1]  # fmt: skip
    return f"{day}, {moment.day:02d} {month} {moment:%Y %H:%M:%S} GMT"


def whole_seconds(span: Micros) -> int:
    """Rounded up: coming back then is never too early."""
    return -(-max(0, span) // MICRO)


# --- limit headers ------------------------------------------------------------------------------


def family_of(scope: Scope, dialect: str) -> str:
    """The header family of an answer; `dialect` is "openai" or "anthropic"."""
    return dialect if scope.rule.headers == "auto" else scope.rule.headers


def limit_headers(scope: Scope, dialect: str, route: str, now: Micros, wall: float) -> HeaderPairs:
    """What the provider tells about its limits, on good answers and on refusals.

    Args:
        scope: The quota.
        dialect: "openai" or "anthropic".
        route: Azure tells nonsense on "responses".
        now: Of the meters.
        wall: Seconds since the epoch, for dates.
    """
    provider = scope.provider
    match family_of(scope, dialect):
        case "openai":
            return _counted(provider, now, "requests", "requests", go_duration) + _counted(
                provider, now, "tokens", "tokens", go_duration
            )
        case "groq":
            return _counted(provider, now, "requests_per_day", "requests", go_duration) + _counted(
                provider, now, "tokens", "tokens", go_duration
            )
        case "azure":
            if route == "responses":
                # Seen at Azure: the Responses API tells -1, -1 and 0 (Q&A 5625878).
                return [
                    (f"x-ratelimit-{kind}-{name}".encode(), b"0" if kind == "reset" else b"-1")
                    for name in ("requests", "tokens")
                    for kind in ("limit", "remaining", "reset")
                ]
            return _counted(provider, now, "requests", "requests", _bare) + _counted(
                provider, now, "tokens", "tokens", _bare
            )
        case "anthropic":
            return _anthropic(provider, now, wall)
        case _:
            return []


def _bare(span: Micros) -> str:
    return str(whole_seconds(span))


def _counted(
    provider: Provider,
    now: Micros,
    dimension: str,
    shown: str,
    reset: Callable[[Micros], str],
) -> HeaderPairs:
    standing = provider.standing(now, dimension)
    if standing is None:
        return []
    return [
        (f"x-ratelimit-limit-{shown}".encode(), b"%d" % standing.limit),
        (f"x-ratelimit-remaining-{shown}".encode(), b"%d" % standing.remaining),
        (f"x-ratelimit-reset-{shown}".encode(), reset(standing.full_in).encode()),
    ]


def _anthropic(provider: Provider, now: Micros, wall: float) -> HeaderPairs:
    pairs: HeaderPairs = []
    token_limits: list[Standing] = []
    for dimension, shown in (
        ("requests", "requests"), ("input", "input-tokens"), ("output", "output-tokens"),
    ):  # fmt: skip
        standing = provider.standing(now, dimension)
        if standing is not None:
            pairs += _anthropic_triple(shown, standing, wall)
            if dimension != "requests":
                token_limits.append(standing)
    total = provider.standing(now, "tokens")
    if total is not None:
        token_limits = [total]
    if token_limits:
        # The family's `tokens` shows whichever limit is closest.
        closest = min(token_limits, key=lambda s: s.remaining / s.limit)
        pairs += _anthropic_triple("tokens", closest, wall)
    return pairs


def _anthropic_triple(shown: str, standing: Standing, wall: float) -> HeaderPairs:
    remaining = standing.remaining
    if shown != "requests" and standing.limit >= 10_000:
        remaining = remaining // 1_000 * 1_000
    name = f"anthropic-ratelimit-{shown}"
    return [
        (f"{name}-limit".encode(), b"%d" % standing.limit),
        (f"{name}-remaining".encode(), b"%d" % remaining),
        (f"{name}-reset".encode(), rfc3339(wall + whole_seconds(standing.full_in)).encode()),
    ]


# --- refusals -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """A refusal as it goes out, but for the dialect's envelope.

    Attributes:
        status: HTTP status.
        kind, code, message: Of the body.
        headers: Retry-After and its kin.
    """

    status: int
    kind: str
    message: str
    code: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


_ABBREVIATION = {
    "requests": "requests per min (RPM)", "tokens": "tokens per min (TPM)",
    "input": "input tokens per min (ITPM)", "output": "output tokens per min (OTPM)",
    "requests_per_day": "requests per day (RPD)", "tokens_per_day": "tokens per day (TPD)",
}  # fmt: skip

_ANTHROPIC_LIMIT = {
    "requests": "requests per minute", "tokens": "tokens per minute",
    "input": "input tokens per minute", "output": "output tokens per minute",
    "requests_per_day": "requests per day", "tokens_per_day": "tokens per day",
}  # fmt: skip


def denial(refusal: Refusal, scope: Scope, dialect: str, model: str) -> Denial:
    """The refusal as the provider of that family words it."""
    family = family_of(scope, dialect)
    headers = retry_headers(refusal, family, dialect)
    if dialect == ANTHROPIC:
        return _anthropic_denial(refusal, model, headers)
    return _openai_denial(refusal, family, model, headers)


def retry_headers(refusal: Refusal, family: str, dialect: str) -> tuple[tuple[bytes, bytes], ...]:
    """Retry-After as that family sends it."""
    if refusal.retry_in is None or family == "none":
        return ()
    pairs = [(b"retry-after", b"%d" % max(1, whole_seconds(refusal.retry_in)))]
    if dialect == OPENAI and family in ("openai", "azure"):
        pairs.append((b"retry-after-ms", b"%d" % -(-refusal.retry_in // 1_000)))
    return tuple(pairs)


def _anthropic_denial(
    refusal: Refusal, model: str, headers: tuple[tuple[bytes, bytes], ...]
) -> Denial:
    if refusal.kind is Kind.CAPACITY:
        return Denial(status=529, kind="overloaded_error", message="Overloaded")
    if refusal.kind is Kind.RAMP:
        message = (
            "This request would exceed the acceleration limit of your organization. Please scale "
            "up your traffic more gradually and maintain a more consistent usage pattern."
        )
    elif refusal.dimension == "concurrency":
        message = (
            "Number of concurrent connections has exceeded your rate limit. Please try again later."
        )
    else:
        what = _ANTHROPIC_LIMIT[refusal.dimension]
        message = (
            f"This request would exceed your organization's rate limit of {refusal.limit:,} {what} "
            f"(org: emulator, model: {model}). For details, refer to: "
            "https://docs.claude.com/en/api/rate-limits. You can see the response headers for "
            "current usage. Please reduce the prompt length or the maximum tokens requested, or "
            "try again later."
        )
    return Denial(status=429, kind="rate_limit_error", message=message, headers=headers)


def _openai_denial(
    refusal: Refusal, family: str, model: str, headers: tuple[tuple[bytes, bytes], ...]
) -> Denial:
    if refusal.kind is Kind.CAPACITY:
        return Denial(
            status=503, kind="server_error", code="service_unavailable", headers=headers,
            message="The engine is currently overloaded, please try again later.",
        )  # fmt: skip
    if refusal.kind is Kind.RAMP:
        return Denial(
            status=503, kind="server_error", code="slow_down", headers=headers,
            message="Slow down: your request rate increased too quickly. Reduce your request rate "
            "to its original level, keep it for at least 15 minutes, then increase it gradually.",
        )  # fmt: skip
    if family == "azure":
        seconds = max(1, whole_seconds(refusal.retry_in or MINUTE))
        what = "call" if refusal.dimension.startswith("requests") else "token"
        return Denial(
            status=429, kind="", code="429", headers=headers,
            message="Requests to the ChatCompletions_Create Operation under Azure OpenAI API have "
            f"exceeded {what} rate limit of your current OpenAI S0 pricing tier. "
            f"Please retry after {seconds} seconds.",
        )  # fmt: skip
    kind = "requests" if refusal.dimension.startswith("requests") else "tokens"
    if refusal.dimension == "concurrency":
        return Denial(
            status=429, kind="requests", code="rate_limit_exceeded", headers=headers,
            message=f"Too many concurrent requests for {model}: Limit {refusal.limit}.",
        )  # fmt: skip
    where = f"for {model} in organization org-emulator on {_ABBREVIATION[refusal.dimension]}"
    if refusal.retry_in is None:
        message = (
            f"Request too large {where}: Limit {refusal.limit}, Requested {refusal.asked}. The "
            "input or output tokens must be reduced in order to run successfully."
        )
    else:
        message = (
            f"Rate limit reached {where}: Limit {refusal.limit}, Used {refusal.used}, Requested "
            f"{refusal.asked}. Please try again in {go_duration(refusal.retry_in)}."
        )
    return Denial(
        status=429, kind=kind, code="rate_limit_exceeded", message=message, headers=headers
    )


def error_body(
    dialect: str, message: str, *, kind: str, param: str | None = None, code: str | None = None,
    request_id: str = "",
) -> Mapping[str, Any]:  # fmt: skip
    """An error in the dialect's envelope."""
    if dialect == ANTHROPIC:
        error = {"type": kind, "message": message}
        return {"type": "error", "error": error, "request_id": request_id}
    if not kind:  # Azure
        return {"error": {"code": code, "message": message}}
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
