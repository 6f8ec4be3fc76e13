"""Retry-After and limit headers: every form in, clamped forms out."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.call import Family
from gateway.units import MICRO
from gateway.wire import ratelimit_headers as rl

NOW = round(datetime(2031, 1, 1, tzinfo=UTC).timestamp()) * MICRO


def after(*values: str, ms: str | None = None, date: str | None = None) -> int | None:
    headers = [(b"retry-after", value.encode("latin-1")) for value in values]
    if ms is not None:
        headers.append((b"retry-after-ms", ms.encode()))
    if date is not None:
        headers.append((b"date", date.encode()))
    return rl.retry_after(headers, now=NOW)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("1", 1), ("0.5", 0.5), (".5", 0.5), ("2.", 2), (" 3 ", 3), ("0", 0), ("86400", 86400),
     ("9999999999", None), ("9" * 19, None), ("9" * 40, None), ("9" * 20 + "s", None),
     ("30s", 30), ("1m30s", 90), ("500ms", 0.5)],
)  # fmt: skip
def test_seconds_of_every_form_are_obeyed(value: str, seconds: float | None) -> None:
    expected = rl.FARTHEST_WAIT if seconds is None else round(seconds * MICRO)
    assert after(value) == expected


@pytest.mark.parametrize(
    "value",
    ["-1", "NaN", "nan", "inf", "Infinity", "", " ", "soon", "1_000", "+5", "1e3", "0x10", "٣",
     "9" * 400, "1; 2", "Wed, 99 Oct 2037 07:28:00 GMT", "Wed, 21 Foo 2037 07:28:00 GMT",
     "Wed, 21 Oct 2037 99:28:00 GMT", "-", "\xff"],
)  # fmt: skip
def test_what_cannot_be_read_counts_as_absent(value: str) -> None:
    assert rl.retry_after([(b"retry-after", value.encode("utf-8"))], now=NOW) is None


@pytest.mark.parametrize(
    "date",
    ["Wed, 01 Jan 2031 00:00:30 GMT", "Wednesday, 01-Jan-31 00:00:30 GMT",
     "Wed Jan  1 00:00:30 2031", "2031-01-01T00:00:30Z", "2031-01-01T02:00:30+02:00"],
)  # fmt: skip
def test_dates_of_every_form_count_from_now(date: str) -> None:
    assert after(date) == 30 * MICRO


def test_a_date_counts_from_the_response_own_clock_where_it_has_one() -> None:
    wait = after("Wed, 01 Jan 2031 00:00:30 GMT", date="Wed, 01 Jan 2031 00:00:20 GMT")
    assert wait == 10 * MICRO
    assert after("Wed, 01 Jan 2031 00:00:30 GMT", date="junk") == 30 * MICRO


def test_a_past_date_is_zero_and_a_far_one_far() -> None:
    assert after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    far = after("Wed, 21 Oct 2037 07:28:00 GMT")
    assert far is not None
    assert far > 6 * 365 * 86_400 * MICRO


def test_milliseconds_win_over_seconds_unless_they_are_junk() -> None:
    assert after("3", ms="800") == 800_000
    assert after(ms="20") == 20_000
    assert after("3", ms="-1") == 3 * MICRO
    assert after(ms="7200000") == 7200 * MICRO


def test_of_two_headers_the_larger_valid_one_holds() -> None:
    assert after("1", "2") == 2 * MICRO
    assert after("2", "junk") == 2 * MICRO
    assert after("1, 4, junk") == 4 * MICRO


def test_no_header_is_no_word() -> None:
    assert rl.retry_after([(b"content-type", b"x")], now=NOW) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("6m0s", 360), ("17ms", 0.017), ("23h47m36.648s", 85656.648), ("2m59.56s", 179.56), ("1s", 1),
     ("510.79ms", 0.51079), ("60", 60), ("0.5", 0.5), ("1924992030", 30), ("1924992030000", 30),
     ("2031-01-01T00:00:30Z", 30), ("2031-01-01T02:00:30+02:00", 30),
     ("2031-01-01T00:00:30.5Z", 30.5), ("2031-01-01t00:00:30z", 30),
     ("2031-01-01T00:00:30.5+02:00", None), ("2031-01-01T00:00:30", 30), ("0", None), ("-1", None),
     ("soon", None), ("unlimited", None), ("", None), ("1_000", None), ("25h1s", None),
     ("25h", 90000), ("90001", None), ("5", 5), ("500µs", 0.0005), ("1h1h", 7200), ("5d", None),
     ("1m2", None),
     ("2031-99-01T00:00:30Z", None), ("1ns", None)],
)  # fmt: skip
def test_resets_of_every_form_are_told_apart(value: str, seconds: float | None) -> None:
    expected = None if seconds is None else round(seconds * MICRO)
    assert rl.reset_in(value, now=NOW) == expected


def limits(**headers: str) -> rl.UpstreamLimits:
    return rl.limits_in(
        [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        now=NOW,
    )


def test_the_openai_family_is_read_by_dimension() -> None:
    read = limits(
        x_ratelimit_limit_tokens="160000",
        x_ratelimit_remaining_tokens="159976",
        x_ratelimit_reset_tokens="9ms",
        x_ratelimit_remaining_requests="99",
        x_request_id="x",
    )
    tokens = read.of("tokens")
    assert tokens is not None
    assert (tokens.limit, tokens.remaining, tokens.reset) == (160_000, 159_976, 9_000)
    requests = read.of("requests")
    assert requests is not None
    assert (requests.limit, requests.remaining, requests.reset) == (None, 99, None)
    assert read.of("images") is None
    assert read.unread == 0


def test_the_anthropic_family_is_read_by_dimension() -> None:
    read = limits(
        anthropic_ratelimit_input_tokens_limit="50",
        anthropic_ratelimit_input_tokens_remaining="0",
        anthropic_ratelimit_input_tokens_reset="2031-01-01T00:00:30Z",
        anthropic_ratelimit_output_tokens_remaining="7",
    )
    assert read.of("input") == rl.DimensionLimit(
        name="input", limit=50, remaining=0, reset=30 * MICRO
    )
    assert read.of("output") == rl.DimensionLimit(name="output", remaining=7)


def test_fractions_and_unknown_words_of_the_family_are_no_trouble() -> None:
    read = limits(
        x_ratelimit_remaining_tokens="7.9", x_ratelimit_policy="x", x_ratelimit_limit_="1"
    )
    assert read == rl.UpstreamLimits(
        dimensions=(rl.DimensionLimit(name="tokens", remaining=7),), unread=0
    )


def test_periods_named_in_headers_are_kept_apart() -> None:
    read = limits(x_ratelimit_remaining_tokens_minute="1", x_ratelimit_remaining_tokens_day="2")
    minute, day = read.of("tokens", "minute"), read.of("tokens", "day")
    assert minute is not None
    assert day is not None
    assert (minute.remaining, day.remaining) == (1, 2)


@pytest.mark.parametrize("junk", ["unlimited", "-1", "1_000", "", "1e9", "\x00"])
def test_an_unreadable_header_is_counted_and_ignored(junk: str) -> None:
    read = limits(x_ratelimit_remaining_requests=junk, x_ratelimit_limit_requests="5")
    requests = read.of("requests")
    assert requests is not None
    assert (requests.limit, requests.remaining) == (5, None)
    assert read.unread == 1


def test_azure_saying_nothing_says_nothing() -> None:
    read = limits(
        x_ratelimit_limit_tokens="-1",
        x_ratelimit_remaining_tokens="-1",
        x_ratelimit_reset_tokens="0",
    )
    tokens = read.of("tokens")
    assert tokens is not None
    assert (tokens.limit, tokens.remaining, tokens.reset) == (None, None, None)
    assert read.exhausted_for is None


def test_only_exhausted_dimensions_mean_a_wait_and_the_latest_of_them() -> None:
    assert (
        limits(
            x_ratelimit_remaining_requests="99", x_ratelimit_reset_requests="2m59.56s"
        ).exhausted_for
        is None
    )
    read = limits(
        x_ratelimit_remaining_requests="0",
        x_ratelimit_reset_requests="2s",
        x_ratelimit_remaining_tokens="0",
        x_ratelimit_reset_tokens="5s",
        x_ratelimit_remaining_images="3",
        x_ratelimit_reset_images="1h",
    )
    assert read.exhausted_for == 5 * MICRO


@pytest.mark.parametrize("prefix", ["x_ratelimit", "ratelimit"])
def test_a_limit_without_a_dimension_means_a_wait_where_it_is_exhausted(prefix: str) -> None:
    read = limits(**{f"{prefix}_limit": "20", f"{prefix}_remaining": "0", f"{prefix}_reset": "30"})
    assert read.exhausted_for == 30 * MICRO
    assert read.of("requests") is None  # nobody's meter is corrected by it


def test_a_remainder_beyond_reason_is_not_read() -> None:
    read = limits(x_ratelimit_remaining_requests="9" * 40)
    assert (read.unread, read.of("requests")) == (1, rl.DimensionLimit(name="requests"))


def test_dimensions_without_end_are_bounded() -> None:
    headers = [(f"x-ratelimit-limit-{'a' * n}".encode(), b"1") for n in range(1, 61)]
    assert len(rl.limits_in(headers, now=NOW).dimensions) == rl.MAX_DIMENSIONS


GOOGLE = {"error": {"code": 429, "details": [{"reason": "X"}, "y", {"retryDelay": "30s"}]}}


@pytest.mark.parametrize(
    ("body", "wait"),
    [
        (GOOGLE, 30 * MICRO),
        ([GOOGLE], 30 * MICRO),
        ({"error": {"details": [{"retryDelay": "1.5s"}]}}, 1_500_000),
        ({"error": {"details": [{"retryDelay": "soon"}]}}, None),
        ({"error": {"details": [{"retryDelay": 30}]}}, None),
        ({"error": {"details": {}}}, None),
        ({"error": "x"}, None),
        ([], None),
        (None, None),
        ("x", None),
    ],
)
def test_a_body_may_tell_the_wait(body: object, wait: int | None) -> None:
    assert rl.retry_delay(body) == wait


def test_headers_speak_before_bodies_and_bodies_before_exhausted_dimensions() -> None:
    spent = limits(x_ratelimit_remaining_requests="0", x_ratelimit_reset_requests="23h")
    header = [(b"retry-after", b"1")]
    assert rl.wait_told(header, GOOGLE, now=NOW, limits=spent) == MICRO
    assert rl.wait_told([], GOOGLE, now=NOW, limits=spent) == 30 * MICRO
    assert rl.wait_told([], None, now=NOW, limits=spent) == 60 * MICRO
    assert rl.wait_told([], None, now=NOW) is None


@pytest.mark.parametrize(
    ("wait", "seconds"),
    [(0, 1), (1, 1), (700_000, 1), (1_000_001, 2), (59_000_001, 60), (60_000_000, 60), (-5, 1)],
)
def test_a_soft_wait_is_whole_seconds_and_the_same_instant_in_both_forms(
    wait: int, seconds: int
) -> None:
    assert rl.retry_headers(wait) == [
        (b"retry-after", b"%d" % seconds),
        (b"retry-after-ms", b"%d" % (seconds * 1000)),
        (b"x-should-retry", b"true"),
    ]


@pytest.mark.parametrize(("wait", "hard"), [(None, False), (60_000_001, False), (5, True)])
def test_a_hard_refusal_says_stop_and_no_wait(wait: int | None, hard: bool) -> None:
    assert rl.retry_headers(wait, hard=hard) == [(b"x-should-retry", b"false")]


OWN = [
    rl.OwnLimit(name="requests", limit=100, remaining=40, reset=17_000),
    rl.OwnLimit(name="requests", limit=9, remaining=-3, reset=6 * 60 * MICRO),
    rl.OwnLimit(name="tokens", limit=1000, remaining=2000, reset=0),
    rl.OwnLimit(name="input", limit=5, remaining=1, reset=1),
    rl.OwnLimit(name="money", limit=5, remaining=1, reset=1),
]


def test_own_limits_are_shown_as_openai_shows_them() -> None:
    assert rl.limits_out(Family.OPENAI, OWN, now=NOW) == [
        (b"x-ratelimit-limit-requests", b"9"),
        (b"x-ratelimit-remaining-requests", b"0"),
        (b"x-ratelimit-reset-requests", b"6m0s"),
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"1000"),
        (b"x-ratelimit-reset-tokens", b"0s"),
    ]


def test_own_limits_are_shown_as_anthropic_shows_them() -> None:
    shown = rl.limits_out(Family.ANTHROPIC, OWN, now=NOW)
    assert (b"anthropic-ratelimit-requests-reset", b"2031-01-01T00:06:00Z") in shown
    assert (b"anthropic-ratelimit-input-tokens-limit", b"5") in shown
    assert (b"anthropic-ratelimit-input-tokens-reset", b"2031-01-01T00:00:01Z") in shown
    assert len(shown) == 9


def test_the_tightest_limit_of_a_dimension_is_shown_whatever_the_order() -> None:
    assert rl.limits_out(Family.OPENAI, OWN[:2], now=NOW) == rl.limits_out(
        Family.OPENAI, OWN[1::-1], now=NOW
    )


def test_other_families_are_shown_nothing() -> None:
    assert rl.limits_out(Family.MCP, OWN, now=NOW) == []


@pytest.mark.parametrize(
    ("wait", "text"),
    [(0, "0s"), (17_000, "17ms"), (1_500_000, "1.5s"), (360 * MICRO, "6m0s"), (1, "1ms"),
     (85_656_648_000, "23h47m36.648s"), (3600 * MICRO, "1h0m0s"), (-5, "0s"), (60 * MICRO, "1m0s")],
)  # fmt: skip
def test_a_go_duration_is_written_as_openai_writes_it_and_reads_back(wait: int, text: str) -> None:
    assert rl.go_duration(wait) == text
    assert rl.duration(text) == -(-max(0, wait) // 1000) * 1000
