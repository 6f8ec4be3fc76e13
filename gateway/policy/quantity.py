"""Quantities as operators write them: text with a unit in, integers of our own units out. Pure.

A bare number is refused wherever a unit is possible: `max_wait: 30` has meant seconds,
milliseconds and minutes in three gateways, and nobody notices until the night it matters.
Arithmetic goes through `Decimal`, so that `0.1s` is 100,000 microseconds and not one less.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation

from gateway.units import MICRO, Micros, MicroUsd, Tokens

MAX_DURATION: Micros = 366 * 86_400 * MICRO
"""No rule waits, keeps or counts for longer than a year."""

MAX_COUNT: Tokens = 9_000_000_000
"""Levels are micro-units and must stay exact as doubles in Lua: 9e9 units per window at most."""

MAX_SIZE = 1 << 40
MAX_MONEY: MicroUsd = 10_000_000 * MICRO
"""Ten million dollars: a budget beyond it is a slip of the finger."""

_TIME: dict[str, int] = {
    "us": 1,
    "ms": 1_000,
    "s": MICRO,
    "m": 60 * MICRO,
    "h": 3_600 * MICRO,
    "d": 86_400 * MICRO,
}
_SIZE: dict[str, int] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
_COUNT: dict[str, int] = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}

_DURATION_FORM = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:us|ms|s|m|h|d)){1,6}", re.ASCII)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|m|h|d)", re.ASCII)
_SIZE_FORM = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(B|kB|KB|MB|GB|KiB|MiB|GiB)", re.ASCII)
_COUNT_FORM = re.compile(r"([0-9][0-9_]{0,14}(?:\.[0-9]{1,9})?)([kKMG]?)", re.ASCII)
_PERCENT_FORM = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,4})?) ?%", re.ASCII)
_NUMBER_FORM = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:e[+-]?[0-9]{1,2})?", re.ASCII)
_MONEY_FORM = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) USD", re.ASCII)
_OFFSET_FORM = re.compile(r"([+-])([01][0-9]):([0-5][0-9])", re.ASCII)

DURATION_ALLOWED = "a number with a unit: 500ms, 30s, 5m, 2h, 1d, 1h30m"
SIZE_ALLOWED = "a number with a unit: 512KiB, 40MiB, 1GiB, 40MB"
COUNT_ALLOWED = "a whole number above 0: 500, 30_000, 150k, 2M"
PERCENT_ALLOWED = "a percentage: 85%, 1.5%"
MONEY_ALLOWED = "an amount in dollars: 50 USD, 0.25 USD"
PRICE_ALLOWED = "US dollars per million tokens as a number: 2.50"
NUMBER_ALLOWED = "a number, or one in quotes: 0, 50000, '0.01'"
TIME_ALLOWED = "a date or an RFC 3339 time: 2027-01-31, 2027-01-31T12:00:00+00:00"
OFFSET_ALLOWED = "an offset from UTC: +00:00, -08:00"


class Unreadable(ValueError):
    """The text is no such quantity.

    Attributes:
        what: What is wrong, without the value where it might be a secret.
        allowed: What would do.
        options: Names among which the nearest may be meant.
    """

    def __init__(self, what: str, *, allowed: str = "", options: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.allowed = allowed
        self.options = options


def shown(value: object) -> str:
    """The value as an error may show it: short, on one line."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 48 else text[:45] + "..."


def _text(value: object, *, allowed: str, noun: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Unreadable(f"a {noun} is expected", allowed=allowed)
    if not isinstance(value, str):
        raise Unreadable(f"{shown(value)} has no unit", allowed=allowed)
    return value


def duration(value: object) -> Micros:
    """The span in microseconds, 0 to a year.

    Raises:
        Unreadable: No unit, another unit, or too long.
    """
    text = _text(value, allowed=DURATION_ALLOWED, noun="duration")
    if not _DURATION_FORM.fullmatch(text):
        raise Unreadable(f"{shown(text)} is no duration", allowed=DURATION_ALLOWED)
    total = sum(Decimal(number) * _TIME[unit] for number, unit in _DURATION_PART.findall(text))
    if total > MAX_DURATION:
        raise Unreadable(f"{shown(text)} is longer than a year", allowed="at most 366d")
    if total != int(total):
        raise Unreadable(f"{shown(text)} is finer than a microsecond", allowed=DURATION_ALLOWED)
    return int(total)


def positive_duration(value: object) -> Micros:
    """Like `duration`, and above 0."""
    span = duration(value)
    if span == 0:
        raise Unreadable("0 leaves no time at all", allowed="a duration above 0, such as 5s")
    return span


def size(value: object) -> int:
    """Bytes, 1 to a TiB."""
    text = _text(value, allowed=SIZE_ALLOWED, noun="size")
    form = _SIZE_FORM.fullmatch(text)
    if form is None:
        raise Unreadable(f"{shown(text)} is no size", allowed=SIZE_ALLOWED)
    total = int(Decimal(form[1]) * _SIZE[form[2]])
    if not 1 <= total <= MAX_SIZE:
        raise Unreadable(f"{shown(text)} is out of range", allowed="1B to 1024GiB")
    return total


def count(value: object) -> Tokens:
    """A whole number of requests or tokens, 1 to 9e9.

    0 is refused: as a limit it would stop everything, and people write it to mean "no limit".
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Unreadable("a number is expected", allowed=COUNT_ALLOWED)
    form = _COUNT_FORM.fullmatch(str(value))
    if form is None:
        raise Unreadable(f"{shown(value)} is no such number", allowed=COUNT_ALLOWED)
    total = Decimal(form[1].replace("_", "")) * _COUNT[form[2]]
    if total != int(total):
        raise Unreadable(f"{shown(value)} is not whole", allowed=COUNT_ALLOWED)
    if total == 0:
        raise Unreadable("0 would refuse everything", allowed="leave the key out for no limit")
    if total > MAX_COUNT:
        raise Unreadable(f"{shown(value)} is too large", allowed=f"at most {MAX_COUNT}")
    return int(total)


def percent(value: object) -> int:
    """Parts per million; 0 to 10,000 %."""
    text = _text(value, allowed=PERCENT_ALLOWED, noun="percentage")
    form = _PERCENT_FORM.fullmatch(text)
    if form is None:
        raise Unreadable(f"{shown(text)} is no percentage", allowed=PERCENT_ALLOWED)
    return int(Decimal(form[1]) * 10_000)


def share(value: object) -> int:
    """Parts per million; above 0 and at most 100 %."""
    ppm = percent(value)
    if not 0 < ppm <= MICRO:
        raise Unreadable(f"{shown(value)} is out of range", allowed="above 0% and at most 100%")
    return ppm


def money(value: object) -> MicroUsd:
    """An amount in micro-dollars, above 0."""
    text = _text(value, allowed=MONEY_ALLOWED, noun="sum of money")
    form = _MONEY_FORM.fullmatch(text)
    if form is None:
        raise Unreadable(f"{shown(text)} is no sum of money", allowed=MONEY_ALLOWED)
    amount = int(Decimal(form[1]) * MICRO)
    if amount == 0:
        raise Unreadable("0 would refuse everything", allowed="leave the budget out for no limit")
    if amount > MAX_MONEY:
        raise Unreadable(f"{shown(text)} is too large", allowed=f"at most {MAX_MONEY // MICRO} USD")
    return amount


def number(value: object) -> Decimal:
    """A plain number; text keeps its digits exactly."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Unreadable(f"{shown(value)} is no number", allowed=NUMBER_ALLOWED)
    text = value if isinstance(value, str) else repr(value)
    if not _NUMBER_FORM.fullmatch(text):
        raise Unreadable(f"{shown(value)} is no number", allowed=NUMBER_ALLOWED)
    return Decimal(text)


def price(value: object) -> MicroUsd:
    """Micro-dollars per million tokens, 0 to 1e6 dollars."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unreadable("a price is expected", allowed=PRICE_ALLOWED)
    try:
        amount = Decimal(repr(value)) * MICRO
    except InvalidOperation:  # pragma: no cover - the YAML reader lets no nan or inf through
        raise Unreadable("a price is expected", allowed=PRICE_ALLOWED) from None
    if not 0 <= amount <= MICRO * MICRO or amount != int(amount):
        raise Unreadable(f"{shown(value)} is no price", allowed=PRICE_ALLOWED)
    return int(amount)


def instant(value: object) -> float:
    """Wall-clock seconds since the epoch; a bare date is its first moment in UTC."""
    if not isinstance(value, str):
        raise Unreadable("a time is expected", allowed=TIME_ALLOWED)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise Unreadable(f"{shown(value)} is no time", allowed=TIME_ALLOWED) from None
    if moment.tzinfo is None:
        if len(value) > len("2027-01-31"):
            raise Unreadable(f"{shown(value)} has no time zone", allowed=TIME_ALLOWED)
        moment = moment.replace(tzinfo=UTC)
    try:
        return moment.timestamp()
    except (OverflowError, ValueError):
        raise Unreadable(f"{shown(value)} is out of range", allowed=TIME_ALLOWED) from None


def offset(value: object) -> int:
    """Microseconds east of UTC, within a day."""
    form = _OFFSET_FORM.fullmatch(value) if isinstance(value, str) else None
    if form is None:
        raise Unreadable(f"{shown(value)} is no offset", allowed=OFFSET_ALLOWED)
    span = (int(form[2]) * 60 + int(form[3])) * _TIME["m"]
    return -span if form[1] == "-" else span


def address(value: object) -> tuple[str, int]:
    """Host and port: `127.0.0.1:8484`, `[::1]:8484`."""
    allowed = "host:port, such as 127.0.0.1:8484 or [::1]:8484"
    if not isinstance(value, str):
        raise Unreadable("an address is expected", allowed=allowed)
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or (":" in host and not bracketed):
        raise Unreadable(f"{shown(value)} is no address", allowed=allowed)
    if len(port) > 5 or int(port) > 65_535 or not host.strip("[]"):
        raise Unreadable(f"{shown(value)} is no address", allowed=allowed)
    return host.strip("[]"), int(port)
