"""Preferences are wishes: read leniently, never refused."""

from __future__ import annotations

import pytest

from gateway.units import MICRO
from gateway.wire.prefer import MAX_PREFERENCES, preferences, respond_async, wait


def prefer(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"x", b"respond-async"), *((b"prefer", value) for value in values)]


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ((b"respond-async",), True),
        ((b"Respond-Async",), True),
        ((b'wait=10, respond-async; foo="bar"',), True),
        ((b"wait=10", b" respond-async "), True),
        ((b"respond-async=1",), True),
        ((b"respond-asynchronously",), False),
        ((b"handling=respond-async",), False),
        ((b"", b",,,", b"="), False),
        ((), False),
    ],
)
def test_respond_async_is_found_in_every_form_the_rfc_allows(values, asked):
    assert respond_async(prefer(*values)) is asked


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"wait=7", 7), (b'wait="7"', 7), (b"WAIT = 7", 7), (b"wait=7;x=1", 7), (b"wait=700", 60),
        (b"wait=7, wait=9", 7), (b"wait", 0), (b"wait=-1", 0), (b"wait=1.5", 0),
        (b"wait=9999999999999", 0), ("wait=٣".encode(), 0), (b"respond-async", 0),
    ],
)  # fmt: skip
def test_a_wait_is_whole_seconds_within_a_bound(value, seconds):
    assert wait(prefer(value), most=60 * MICRO) == seconds * MICRO


def test_a_flood_of_preferences_is_read_up_to_a_bound():
    flood = b",".join(b"p%d" % number for number in range(10_000))
    assert len(preferences(prefer(flood))) == MAX_PREFERENCES
    assert not respond_async(prefer(flood + b",respond-async"))
