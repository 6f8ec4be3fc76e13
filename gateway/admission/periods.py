"""Calendar periods on the gateway's time axis: where a day or a month begins and ends.

Integers only, so that the Lua twin agrees; a leap second does not exist on this axis. The zone is a
fixed offset: a budget's day has 24 hours also on the day the clocks change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.units import MICRO

if TYPE_CHECKING:
    from gateway.units import Micros

DAY: Micros = 86_400 * MICRO


def period(calendar: str, offset: Micros, now: Micros) -> tuple[Micros, Micros]:
    """Start and end of the period that holds `now`: start <= now < end.

    Args:
        calendar: "day" or "month".
        offset: Micros east of UTC, within a day.
        now: Micros since the Unix epoch, not negative after the offset is applied.

    Raises:
        ValueError: Another calendar.
    """
    today = (now + offset) // DAY
    match calendar:
        case "day":
            first, after = today, today + 1
        case "month":
            year, month = _year_and_month(today)
            first = _first_day(year, month)
            after = _first_day(year + month // 12, month % 12 + 1)
        case _:
            raise ValueError(f"calendar must be 'day' or 'month', is {calendar!r}")
    return first * DAY - offset, after * DAY - offset


def _year_and_month(day: int) -> tuple[int, int]:
    """Year and month of a day counted from 1970-01-01.

    Source: Howard Hinnant, "chrono-compatible low-level date algorithms", civil_from_days.
    """
    shifted = day + 719_468
    era, of_era = divmod(shifted, 146_097)
    year_of_era = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    march_month = (5 * of_year + 2) // 153
    month = march_month + 3 if march_month < 10 else march_month - 9
    return year_of_era + era * 400 + (month <= 2), month


def _first_day(year: int, month: int) -> int:
    """The first of that month, in days from 1970-01-01. Source: as above, days_from_civil."""
    year -= month <= 2
    era, year_of_era = divmod(year, 400)
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5
    return (
        era * 146_097
        + year_of_era * 365
        + year_of_era // 4
        - year_of_era // 100
        + of_year
        - 719_468
    )
