"""Retry-After and rate-limit headers, in and out; waits told in bodies.

In: every form the field has seen (`admission.md` §2.2, §12) becomes micros from now; what cannot be
read counts as absent, because telemetry must never fail a paid answer. Seconds may be decimal;
`retry-after-ms` beats `retry-after`; a date (HTTP's or RFC 3339's) counts from the response's own
Date, in the past as zero; of two valid values the larger holds. Resets are Go durations, RFC 3339
dates, seconds, or epochs in seconds or milliseconds; what is not positive or further than 25 hours
ahead is dropped. A reset says when a limit is *full* again, so only those of exhausted dimensions
mean a wait, the latest of them.

Out: `Retry-After` is a whole number of seconds from 1 to 60 and `retry-after-ms` the same instant:
SDKs give up above 60 or 120 seconds or sleep for ever, and an upstream's value is never relayed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple

from gateway.call import Family
from gateway.units import MICRO

if TYPE_CHECKING:
    from gateway.call import HeaderList
    from gateway.units import Micros, Tokens

FARTHEST_RESET: Micros = 25 * 3600 * MICRO
"""A reset further ahead is a mistake: the longest windows are days."""

FARTHEST_WAIT: Micros = 10 * 366 * 24 * 3600 * MICRO
"""Longer waits are cut to it, so that no arithmetic meets a thousand digits."""

LONGEST_RETRY: Micros = 60 * MICRO
"""Above it a refusal is hard: openai-js ignores such values, anthropic-py sleeps them."""

MAX_DIMENSIONS = 32
"""Dimensions read of one response; providers name up to six."""

MOST_COUNTED = 1e18
"""A limit or remainder above it is a broken header."""

LONGEST_INFERRED: Micros = 60 * MICRO
"""A wait inferred from exhausted dimensions, where a 429 names none, is at most this long."""

_NUMBER = re.compile(r"\d{1,40}(?:\.\d*)?|\.\d+", re.ASCII)
_DURATION = re.compile(r"(?:\d{1,30}(?:\.\d{1,12})?(?:ns|us|µs|μs|ms|h|m|s))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|μs|ms|h|m|s)", re.ASCII)
_SCALES = {
    "ns": 0.001, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6,
}  # fmt: skip
_DATE_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d")
_HTTP_DATE = re.compile(r"(?:[A-Za-z]{3,9},? )?[A-Za-z0-9 \-]{4,12}.*\d\d:\d\d:\d\d.*")
_HEADER = re.compile(
    r"(?:x-ratelimit-(?P<what>limit|remaining|reset)-(?P<dimension>[a-z-]{1,40})"
    r"|anthropic-ratelimit-(?P<dimension2>[a-z-]{1,40})-(?P<what2>limit|remaining|reset)"
    r"|(?:x-)?ratelimit-(?P<what3>limit|remaining|reset))"
)
_PREFIXES = (b"x-ratelimit-", b"anthropic-ratelimit-", b"ratelimit-")
_PERIODS = ("minute", "hour", "day")
_NAMES = {"input-tokens": "input", "output-tokens": "output"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DimensionLimit:
    """What an upstream says of one of its limits; None is what it does not say.

    Attributes:
        name: "requests", "tokens", "input", "output", or the header's own word; "" where it has
            none (OpenRouter, the IETF draft), which no pool of ours is corrected by.
        period: "minute", "hour" or "day" where the header names it, else "".
        limit, remaining: In units of the dimension.
        reset: Micros from now until it is full again.
    """

    name: str
    period: str = ""
    limit: Tokens | None = None
    remaining: Tokens | None = None
    reset: Micros | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLimits:
    """All rate-limit headers of one response; `unread` counts those that could not be read."""

    dimensions: tuple[DimensionLimit, ...] = ()
    unread: int = 0

    def of(self, name: str, period: str = "") -> DimensionLimit | None:
        """One dimension, or None where nothing was said of it."""
        for dimension in self.dimensions:
            if dimension.name == name and dimension.period == period:
                return dimension
        return None

    @property
    def exhausted_for(self) -> Micros | None:
        """The latest reset among exhausted dimensions; None where none is exhausted, or tells."""
        resets = [d.reset for d in self.dimensions if d.remaining == 0 and d.reset is not None]
        return max(resets, default=None)


class OwnLimit(NamedTuple):
    """One of the caller's own limits, to be shown in its answer.

    Attributes:
        name: "requests", "tokens", "input" or "output".
        limit, remaining: In whole units.
        reset: Micros until it is full again.
    """

    name: str
    limit: Tokens
    remaining: Tokens
    reset: Micros


# --- in -------------------------------------------------------------------------------------------


def retry_after(headers: HeaderList, *, now: Micros) -> Micros | None:
    """How long the response tells to wait; None where it does not, or not legibly.

    Args:
        headers: Of the response, names in lower case.
        now: Micros since the epoch, for dates where the response has no Date of its own.
    """
    millis = [
        amount * 1e3
        for name, value in headers
        if name == b"retry-after-ms" and (amount := _number(_text(value))) is not None
    ]
    if millis:
        return _bounded(max(millis))
    clock = next((instant for name, value in headers if name == b"date"
                  and (instant := _http_date(_text(value))) is not None), now)  # fmt: skip
    waits = [
        wait
        for name, value in headers
        if name == b"retry-after"
        for wait in _retry_values(_text(value), clock)
    ]
    return max(waits, default=None)


def _retry_values(value: str, clock: Micros) -> list[Micros]:
    """The waits of one header line: seconds, a date, a duration, or seconds joined by commas."""
    date = _rfc3339(value) if _DATE_TIME.match(value) else _http_date(value)
    if date is not None:
        return [min(max(0, date - clock), FARTHEST_WAIT)]
    whole = duration(value)
    if whole is not None:
        return [whole]
    amounts = [_number(entry.strip()) for entry in value.split(",")]
    return [_bounded(amount * MICRO) for amount in amounts if amount is not None]


def retry_delay(body: object) -> Micros | None:
    """The wait in a Google-style error body (`RetryInfo.retryDelay`); None without one."""
    if isinstance(body, list):
        body = body[0] if body else None
    error = body.get("error") if isinstance(body, Mapping) else None
    details = error.get("details") if isinstance(error, Mapping) else None
    delays = [
        delay
        for detail in (details if isinstance(details, list) else ())
        if isinstance(detail, Mapping)
        and isinstance(told := detail.get("retryDelay"), str)
        and (delay := duration(told)) is not None
    ]
    return max(delays, default=None)


def wait_told(
    headers: HeaderList, body: object, *, now: Micros, limits: UpstreamLimits | None = None
) -> Micros | None:
    """The wait a refusal asks for: its headers', else its body's, else its exhausted dimensions'.

    The last is inferred and so at most a minute. None where the upstream says nothing.
    """
    told = retry_after(headers, now=now)
    if told is None:
        told = retry_delay(body)
    if told is None and limits is not None and limits.exhausted_for is not None:
        told = min(limits.exhausted_for, LONGEST_INFERRED)
    return told


def duration(value: str) -> Micros | None:
    """Micros of a Go duration with decimals (`6m0s`, `17ms`, `2m59.56s`); None if it is none."""
    if not _DURATION.fullmatch(value):
        return None
    total = sum(float(amount) * _SCALES[unit] for amount, unit in _DURATION_PART.findall(value))
    return _bounded(total)


def reset_in(value: str, *, now: Micros) -> Micros | None:
    """Micros from now to a reset in any of its forms; None for the illegible, past or too far.

    Plain numbers from 10⁹ are epoch seconds, from 10¹² epoch milliseconds, smaller ones seconds
    from now. `500ms` is not 500.
    """
    value = value.strip()
    wait: float | None
    amount = _number(value)
    if amount is not None:
        if amount >= 1e12:
            wait = amount * 1e3 - now
        elif amount >= 1e9:
            wait = amount * MICRO - now
        else:
            wait = amount * MICRO
    elif _DATE_TIME.match(value):
        instant = _rfc3339(value)
        wait = None if instant is None else instant - now
    else:
        wait = duration(value)
    if wait is None or not 0 < wait <= FARTHEST_RESET:
        return None
    return round(wait) or None


def limits_in(headers: HeaderList, *, now: Micros) -> UpstreamLimits:
    """Every rate-limit header of a response, in whatever family it speaks.

    Source: OpenAI, Azure, Groq (`x-ratelimit-WHAT-DIMENSION`), Cerebras (the same with a period),
        Anthropic (`anthropic-ratelimit-DIMENSION-WHAT`).
    Weakness: Groq's request limit is per day, which its headers do not say; its profile must.
    """
    found: dict[tuple[str, str], dict[str, int | None]] = {}
    unread = 0
    for raw_name, raw_value in headers:
        if not raw_name.startswith(_PREFIXES):
            continue
        if len(found) >= MAX_DIMENSIONS:
            break
        match = _HEADER.fullmatch(_text(raw_name))
        if match is None:
            continue
        what = match["what"] or match["what2"] or match["what3"]
        value = _text(raw_value)
        amount = reset_in(value, now=now) if what == "reset" else _count(value)
        if amount is None and not (what == "reset" and _is_nothing(value)):
            unread += 1
        name = match["dimension"] or match["dimension2"] or ""
        found.setdefault(_dimension(name), {})[what] = amount
    return UpstreamLimits(
        dimensions=tuple(
            DimensionLimit(
                name=name,
                period=period,
                limit=said.get("limit") or None,  # a limit of zero is Azure's way to say nothing
                remaining=said.get("remaining"),
                reset=said.get("reset"),
            )
            for (name, period), said in found.items()
        ),
        unread=unread,
    )


def _dimension(name: str) -> tuple[str, str]:
    """A header's dimension and period: `tokens-minute` is ("tokens", "minute")."""
    for period in _PERIODS:
        if name.endswith("-" + period):
            name = name[: -len(period) - 1]
            return _NAMES.get(name, name), period
    return _NAMES.get(name, name), ""


def _text(value: bytes) -> str:
    return value[:200].decode("latin-1").strip()


def _number(value: str) -> float | None:
    """A plain decimal number; None for signs, exponents, underscores, NaN and the like."""
    return float(value) if _NUMBER.fullmatch(value) else None


def _count(value: str) -> int | None:
    if value.isascii() and value.isdecimal() and len(value) <= 18:
        return int(value)
    amount = _number(value)
    return int(amount) if amount is not None and amount <= MOST_COUNTED else None


def _is_nothing(value: str) -> bool:
    """Whether a reset is legible and says zero: full already."""
    return _number(value) == 0 or duration(value) == 0


def _bounded(wait: float) -> Micros:
    return round(min(wait, FARTHEST_WAIT))


def _http_date(value: str) -> Micros | None:
    """Micros since the epoch of an IMF-fixdate, RFC 850 or asctime date; None if it is none."""
    if not _HTTP_DATE.fullmatch(value):
        return None
    try:
        instant = parsedate_to_datetime(value)
        return _epoch(instant)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _rfc3339(value: str) -> Micros | None:
    try:
        return _epoch(datetime.fromisoformat(value.upper()))
    except (ValueError, OverflowError):
        return None


def _epoch(instant: datetime) -> Micros:
    if instant.tzinfo is None:  # asctime has no zone, and some servers forget theirs: all mean UTC
        instant = instant.replace(tzinfo=UTC)
    return round(instant.timestamp() * MICRO)


# --- out ------------------------------------------------------------------------------------------


def retry_headers(wait: Micros | None, *, hard: bool = False) -> HeaderList:
    """What a refusal tells SDKs about coming back.

    Args:
        wait: Micros until coming back helps; None where it does not help.
        hard: Never come back, whatever `wait` says; a wait above a minute is hard by itself.
    """
    if hard or is_hard(wait):
        return [(b"x-should-retry", b"false")]
    seconds = whole_seconds(wait or 0)
    return [
        (b"retry-after", b"%d" % seconds),
        (b"retry-after-ms", b"%d" % (seconds * 1000)),
        (b"x-should-retry", b"true"),
    ]


def is_hard(wait: Micros | None) -> bool:
    """Whether a wait is such that SDKs must be told not to retry."""
    return wait is None or wait > LONGEST_RETRY


def whole_seconds(wait: Micros) -> int:
    """A wait in whole seconds, rounded up, 1 to 60."""
    return min(max(1, -(-wait // MICRO)), LONGEST_RETRY // MICRO)


def limits_out(family: Family, limits: Sequence[OwnLimit], *, now: Micros) -> HeaderList:
    """The caller's own limits as headers of the family its SDK knows; nothing for other families.

    Args:
        family: Of the route.
        limits: Where a dimension stands twice, the one with less remaining is shown.
        now: Micros since the epoch, for Anthropic's dates.
    """
    known = _NAMES_OUT.get(family)
    if known is None:
        return []
    out: HeaderList = []
    told: dict[str, Tokens] = {}
    for name, most, remaining, wait in limits:
        names = known.get(name)
        if names is None:
            continue
        if name in told:
            if told[name] <= remaining:
                continue
            out = [pair for pair in out if pair[0] not in names]
        told[name] = remaining
        reset = go_duration(wait) if family is _OPENAI else _date_out(now + max(0, wait))
        left = remaining if remaining < most else most  # noqa: FURB136 - on every answer
        out += (
            (names[0], b"%d" % most),
            (names[1], b"%d" % left if left > 0 else b"0"),
            (names[2], reset.encode()),
        )
    return out


def _names_out(family: Family, unit: str) -> tuple[bytes, bytes, bytes]:
    """The three headers of a dimension: limit, remaining, reset."""
    if family is Family.OPENAI:
        one, two, three = (f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset"))
    else:
        name = unit + ("-tokens" if unit in ("input", "output") else "")
        one, two, three = (
            f"anthropic-ratelimit-{name}-{what}" for what in ("limit", "remaining", "reset")
        )
    return one.encode(), two.encode(), three.encode()


_OPENAI = Family.OPENAI

_NAMES_OUT = {
    family: {unit: _names_out(family, unit) for unit in units}
    for family, units in (
        (Family.OPENAI, ("requests", "tokens")),
        (Family.ANTHROPIC, ("requests", "tokens", "input", "output")),
    )
}
"""Made once: six headers on every answer of a caller with limits."""


def go_duration(wait: Micros) -> str:
    """A wait as OpenAI writes it: `17ms`, `1.5s`, `6m0s`, `23h47m36.648s`; whole milliseconds."""
    millis = -(-wait // 1000)
    if millis < 1000:
        return f"{millis}ms" if millis > 0 else "0s"
    minutes, rest = divmod(millis, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + seconds


def _date_out(instant: Micros) -> str:
    """An RFC 3339 date in whole seconds, rounded up: never earlier than it is true."""
    seconds = min(-(-instant // MICRO), 253_402_300_799)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
