"""Quantities with units."""

from __future__ import annotations

import pytest

from gateway.policy import quantity
from gateway.policy.quantity import Unreadable


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("500ms", 500_000),
        ("0.1s", 100_000),
        ("30s", 30_000_000),
        ("1h30m", 5_400_000_000),
        ("2d", 172_800_000_000),
        ("0s", 0),
        ("7us", 7),
    ],
)
def test_a_duration_is_exact_in_microseconds(text, micros):
    assert quantity.duration(text) == micros


@pytest.mark.parametrize(
    "value",
    [
        30,
        1.5,
        True,
        None,
        "",
        "30",
        "30 s",
        "-1s",
        "1e3s",
        "s",
        "1w",
        "400d",
        "0.5us",
        "٣s",
        "1s\n",
    ],
)
def test_a_duration_without_a_sound_unit_is_refused_and_says_what_is_allowed(value):
    with pytest.raises(Unreadable) as wrong:
        quantity.duration(value)
    assert wrong.value.allowed


def test_a_deadline_of_zero_is_refused():
    with pytest.raises(Unreadable, match="no time at all"):
        quantity.positive_duration("0s")


@pytest.mark.parametrize(
    ("text", "size"), [("1B", 1), ("40MiB", 40 << 20), ("1.5KiB", 1536), ("2 GB", 2 * 10**9)]
)
def test_a_size_counts_bytes(text, size):
    assert quantity.size(text) == size


@pytest.mark.parametrize("value", [40, "40", "40M", "0.1B", "2000GiB", True, None])
def test_a_size_without_unit_or_out_of_range_is_refused(value):
    with pytest.raises(Unreadable):
        quantity.size(value)


@pytest.mark.parametrize(
    ("value", "number"), [(500, 500), ("30_000", 30_000), ("2M", 2_000_000), ("1.5k", 1500)]
)
def test_a_count_may_be_abbreviated(value, number):
    assert quantity.count(value) == number


@pytest.mark.parametrize("value", [0, "0k", -1, 1.5, "1.0005k", "10G", True, None, "many", "²"])
def test_a_count_that_would_stop_everything_or_lose_exactness_is_refused(value):
    with pytest.raises(Unreadable):
        quantity.count(value)


def test_a_share_is_above_nothing_and_at_most_all():
    assert quantity.share("0.5%") == 5_000
    assert quantity.share("100%") == 1_000_000
    assert quantity.percent("110%") == 1_100_000
    for value in ("0%", "100.1%", 85, "85"):
        with pytest.raises(Unreadable):
            quantity.share(value)


def test_money_and_prices_are_exact_in_micro_dollars():
    assert quantity.money("0.25 USD") == 250_000
    assert quantity.price(0.075) == 75_000
    assert quantity.price(3) == 3_000_000
    for value in ("5 EUR", "5", 5, "0 USD", "20000000 USD"):
        with pytest.raises(Unreadable):
            quantity.money(value)
    for value in ("2.5", -1, True, 0.0000001, 10**7):
        with pytest.raises(Unreadable):
            quantity.price(value)


def test_a_bare_date_is_its_first_moment_in_utc_and_a_time_needs_a_zone():
    assert quantity.instant("1970-01-02") == 86_400.0
    assert quantity.instant("1970-01-01T01:00:00+01:00") == 0.0
    for value in ("2027-01-31T12:00:00", "31.1.2027", 20270131, "2027-13-01"):
        with pytest.raises(Unreadable):
            quantity.instant(value)


def test_an_offset_is_signed():
    assert quantity.offset("-08:00") == -8 * 3_600_000_000
    assert quantity.offset("+05:30") == 19_800_000_000
    for value in ("5", "+5:00", "+24:00", 1):
        with pytest.raises(Unreadable):
            quantity.offset(value)


def test_an_address_holds_host_and_port():
    assert quantity.address("127.0.0.1:8484") == ("127.0.0.1", 8484)
    assert quantity.address("[::1]:0") == ("::1", 0)
    for value in ("8484", ":8484", "::1:8484", "h:99999", "h:", 8484, "[]:1", "h:\uff11"):
        with pytest.raises(Unreadable):
            quantity.address(value)


def test_a_long_value_is_shortened_in_an_error():
    with pytest.raises(Unreadable) as wrong:
        quantity.duration("x" * 1000)
    assert len(wrong.value.what) < 100
