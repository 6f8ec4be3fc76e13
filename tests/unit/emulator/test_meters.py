"""Headers and refusals as each provider writes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.emulator.config import LimitRule
from gateway.emulator.meters import go_duration, http_date, rfc3339
from gateway.simulate.meters import Quota
from gateway.units import MICRO
from tests.unit.emulator.driving import PLAIN, Driver, Got


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (0, "0ms"), (1, "1ms"), (9_000, "9ms"), (999_999, "1s"), (7_660_000, "7.66s"),
        (179_560_000, "2m59.56s"), (360 * MICRO, "6m0s"), (85_676_648_000, "23h47m56.648s"),
        (-5, "0ms"),
    ],
)  # fmt: skip
def test_durations_are_gos(span, text):
    assert go_duration(span) == text


@given(st.integers(0, 90_000 * MICRO))
def test_a_duration_never_tells_less_than_the_truth(span):
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    text = go_duration(span)
    if text.endswith("ms"):
        told = float(text[:-2]) / 1000
    else:
        told, number = 0.0, ""
        for character in text:
            if character in units:
                told += float(number) * units[character]
                number = ""
            else:
                number += character
    assert span / MICRO <= told + 1e-9 < span / MICRO + 0.0011


def test_dates_are_utc_in_english():
    assert rfc3339(1_790_000_000) == "2026-09-21T14:13:20Z"
    assert http_date(1_790_000_000) == "Mon, 21 Sep 2026 14:13:20 GMT"


def told(got: Got, prefix: str) -> dict[str, str]:
    return {k: v for k, v in got.headers if k.startswith(prefix)}


def driver(headers: str, quota: Quota, **more: bool) -> Driver:
    return Driver(
        replace(PLAIN, limits=(LimitRule(name="l", quota=quota, headers=headers, **more),))
    )


QUOTA = Quota(
    requests=100, tokens=40_000, input=30_000, output=8_000, requests_per_day=1_000, concurrency=9
)


def test_openai_tells_requests_and_tokens_with_go_durations():
    assert told(driver("auto", QUOTA).chat(max_tokens=10), "x-ratelimit") == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "99",
        "x-ratelimit-reset-requests": "1m0.001s",
        "x-ratelimit-limit-tokens": "40000",
        "x-ratelimit-remaining-tokens": "39982",
        "x-ratelimit-reset-tokens": "1m0.001s",
    }


def test_anthropic_tells_four_limits_rounded_with_dates():
    got = told(driver("auto", QUOTA).messages(), "anthropic-ratelimit")
    assert got["anthropic-ratelimit-requests-remaining"] == "99"
    assert got["anthropic-ratelimit-input-tokens-limit"] == "30000"
    assert got["anthropic-ratelimit-input-tokens-remaining"] == "29000"
    assert 7_900 <= int(got["anthropic-ratelimit-output-tokens-remaining"]) < 8_000
    assert got["anthropic-ratelimit-tokens-limit"] == "40000"
    assert got["anthropic-ratelimit-tokens-reset"] == "2026-09-21T14:14:21Z"


def test_anthropics_tokens_family_shows_the_closest_limit_where_there_is_no_total():
    got = driver("auto", Quota(input=30_000, output=200)).messages(max_tokens=90)
    assert got.header("anthropic-ratelimit-tokens-limit") == "200"


def test_groq_tells_requests_of_the_day():
    got = driver("groq", QUOTA).chat()
    assert got.header("x-ratelimit-limit-requests") == "1000"
    assert (got.header("x-ratelimit-reset-requests") or "").startswith("9h")


def test_azure_tells_bare_seconds_and_nonsense_on_responses():
    azure = driver("azure", QUOTA)
    assert azure.chat().header("x-ratelimit-reset-tokens") == "61"
    got = azure.call("/v1/responses", {"model": "m", "input": "x"})
    assert told(got, "x-ratelimit") == {
        "x-ratelimit-limit-requests": "-1", "x-ratelimit-remaining-requests": "-1",
        "x-ratelimit-reset-requests": "0", "x-ratelimit-limit-tokens": "-1",
        "x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "0",
    }  # fmt: skip


def test_a_provider_may_be_silent():
    silent = driver("none", Quota(requests=1))
    assert told(silent.chat(), "x-ratelimit") == {}
    refused = silent.chat()
    assert refused.status == 429
    assert refused.header("retry-after") is None
    quiet = driver("auto", Quota(requests=1), announce=False)
    assert told(quiet.chat(), "x-ratelimit") == {}
    assert told(quiet.chat(), "x-ratelimit") != {}


def refusal(headers: str, quota: Quota, *, anthropic: bool = False) -> Got:
    target = driver(headers, quota)
    call = target.messages if anthropic else target.chat
    while (got := call("word " * 20)).status == 200:
        pass
    return got


@pytest.mark.parametrize(
    ("quota", "kind", "words"),
    [
        (Quota(requests=2), "requests", "requests per min (RPM): Limit 2, Used 2, Requested 1"),
        (Quota(tokens=90), "tokens", "tokens per min (TPM): Limit 90, Used"),
        (Quota(input=90), "tokens", "input tokens per min (ITPM): Limit 90"),
        (Quota(output=90), "tokens", "output tokens per min (OTPM): Limit 90"),
        (Quota(requests_per_day=1), "requests", "requests per day (RPD): Limit 1"),
        (Quota(tokens_per_day=90), "tokens", "tokens per day (TPD): Limit 90"),
    ],
)
def test_openai_names_limit_used_requested_and_when_to_come_back(quota, kind, words):
    got = refusal("auto", quota)
    error = got.json["error"]
    assert (got.status, error["type"], error["code"]) == (429, kind, "rate_limit_exceeded")
    assert words in error["message"]
    assert "Please try again in" in error["message"]
    seconds, millis = got.header("retry-after"), got.header("retry-after-ms")
    assert seconds is not None
    assert millis is not None
    assert (int(seconds) - 1) * 1000 <= int(millis) <= int(seconds) * 1000


def test_anthropic_names_the_limit_per_minute():
    got = refusal("auto", Quota(input=90), anthropic=True)
    assert got.status == 429
    assert got.json["error"]["type"] == "rate_limit_error"
    assert "rate limit of 90 input tokens per minute" in got.json["error"]["message"]
    assert int(got.header("retry-after") or "0") > 0


def test_azure_has_a_body_of_its_own():
    got = refusal("azure", Quota(tokens=90))
    assert got.json["error"]["code"] == "429"
    assert "exceeded token rate limit" in got.json["error"]["message"]
    assert set(got.json["error"]) == {"code", "message"}
    assert got.header("retry-after-ms") is not None


def test_groq_sends_retry_after_only_when_it_refuses():
    good = driver("groq", QUOTA).chat()
    assert good.header("retry-after") is None
    got = refusal("groq", Quota(tokens=90))
    assert got.header("retry-after") is not None
    assert got.header("retry-after-ms") is None
