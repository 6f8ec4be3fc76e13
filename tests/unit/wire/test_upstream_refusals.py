"""What an upstream's refusal means: codes before statuses, in every provider's shape."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.call import Kind
from gateway.wire.stream import Failure, failure_of
from gateway.wire.upstream_refusals import MONEY, Said, classify, said, said_by


def openai(code: Any = None, kind: Any = None, message: str = "x") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def anthropic(kind: str, message: str = "x") -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def google(status: str, reason: str = "", quota: str = "", message: str = "x") -> dict[str, Any]:
    details: list[Any] = [{"reason": reason}, {"violations": [{"quotaId": quota}]}]
    return {"error": {"code": 429, "status": status, "message": message, "details": details}}


GEMINI = "You exceeded your current quota, please check your plan and billing details."
RPD = "Rate limit reached for gpt-4o on requests per day (RPD): Limit 200, Used 200"
DEMAND = "The system is currently experiencing high demand and cannot process your request."
CREDIT = "Your credit balance is too low to access the Anthropic API."


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, openai("rate_limit_exceeded", "rate_limit_error"), Kind.QUOTA),
        (429, openai(None, "rate_limit_error"), Kind.QUOTA),
        (429, openai("rate_limit_exceeded", "tokens"), Kind.QUOTA),
        (429, anthropic("rate_limit_error"), Kind.QUOTA),
        (429, {"__type": "com.amazonaws#ThrottlingException", "message": "Rate exceeded"},
         Kind.QUOTA),
        (400, {"__type": "ThrottlingException"}, Kind.QUOTA),
        (429, google("RESOURCE_EXHAUSTED", quota="GenerateRequestsPerMinutePerProject",
                     message=GEMINI), Kind.QUOTA),
        (429, {"errors": [{"code": "insufficient_quota", "message": "x"}]}, Kind.MONEY),
        (429, {"error": {"code": 429, "message": "Provider returned error", "metadata": {
            "raw": '{"error":{"code":"insufficient_quota"}}'}}}, Kind.MONEY),
        (429, {"error": {"code": 429, "message": "Provider returned error", "metadata": {
            "raw": '{"error":{"code":"rate_limit_exceeded"}}'}}}, Kind.QUOTA),
        (429, openai("rate_limit_reached_error"), Kind.QUOTA),
        (429, {}, Kind.QUOTA),
        (429, "Too Many Requests", Kind.QUOTA),
        (429, openai(None, "invalid_request_error"), Kind.QUOTA),
        (503, openai("slow_down", "server_error"), Kind.RAMP),
        (429, openai("slow_down"), Kind.RAMP),
        (503, openai(None, "server_error", "Slow down"), Kind.RAMP),
        (429, anthropic("rate_limit_error", "You hit the acceleration limits"), Kind.RAMP),
        (529, anthropic("overloaded_error"), Kind.CAPACITY),
        (529, {}, Kind.CAPACITY),
        (503, openai(None, "server_error", "busy"), Kind.CAPACITY),
        (503, None, Kind.CAPACITY),
        (429, openai("429", None, DEMAND), Kind.CAPACITY),
        (429, openai("too_many_requests", None, DEMAND), Kind.CAPACITY),
        (503, google("UNAVAILABLE"), Kind.CAPACITY),
        (500, openai(None, "server_error", "The engine is overloaded"), Kind.CAPACITY),
        (498, {}, Kind.CAPACITY),
        (429, google("RESOURCE_EXHAUSTED", "QUOTA_EXHAUSTED",
                     message="quota exhausted, resets after 142h40m7s"), Kind.PERIOD),
        (429, [google("RESOURCE_EXHAUSTED", quota="GenerateRequestsPerDayPerProject")],
         Kind.PERIOD),
        (429, openai("rate_limit_exceeded", "requests", RPD), Kind.PERIOD),
        (429, openai("insufficient_quota", "insufficient_quota"), Kind.MONEY),
        (429, anthropic("rate_limit_error", "enforced_spend_limit_reached: monthly limit"),
         Kind.MONEY),
        (400, anthropic("invalid_request_error", CREDIT), Kind.MONEY),
        (402, {"error": "Payment required"}, Kind.MONEY),
        (401, openai("invalid_api_key", "invalid_request_error"), Kind.AUTH),
        (401, anthropic("authentication_error"), Kind.AUTH),
        (401, "nope", Kind.AUTH),
        (403, anthropic("permission_error"), Kind.AUTH),
        (403, openai("unsupported_country", "invalid_request_error"), Kind.AUTH),
        (400, {"error": {"code": 400, "status": "INVALID_ARGUMENT",
                         "details": [{"reason": "API_KEY_INVALID"}]}}, Kind.AUTH),
        (400, openai(None, "invalid_request_error", "too slow a model"), Kind.CALLER),
        (400, openai("context_length_exceeded", "invalid_request_error"), Kind.CALLER),
        (404, openai("model_not_found", "invalid_request_error"), Kind.CALLER),
        (404, anthropic("not_found_error"), Kind.CALLER),
        (413, anthropic("request_too_large"), Kind.CALLER),
        (422, {"detail": "bad"}, Kind.CALLER),
        (409, {}, Kind.CALLER),
        (500, openai(None, "server_error", "slow disk"), Kind.FAULT),
        (500, anthropic("api_error"), Kind.FAULT),
        (502, "<html>", Kind.FAULT),
        (504, None, Kind.FAULT),
        (408, None, Kind.FAULT),
        (301, None, Kind.FAULT),
    ],
)  # fmt: skip
def test_a_refusal_means_what_its_body_says_before_its_status(
    status: int, body: Any, kind: Kind
) -> None:
    assert classify(status, said(body)) is kind


@pytest.mark.parametrize("code", MONEY)
@pytest.mark.parametrize("status", [400, 402, 403, 429])
def test_every_money_code_is_money_whatever_its_status_and_wait(code: str, status: int) -> None:
    assert classify(status, said(openai(code)), wait=1_000_000) is Kind.MONEY
    assert classify(status, said(anthropic(code))) is Kind.MONEY
    if status == 429:
        assert classify(status, said(openai(None, None, f"{code}: x"))) is Kind.MONEY


def test_a_shared_pools_429_is_capacity() -> None:
    body = said(google("RESOURCE_EXHAUSTED"))
    assert classify(429, body, family="vertex") is Kind.CAPACITY
    assert classify(429, body, family="gemini") is Kind.QUOTA


def test_a_daily_limit_that_opens_within_minutes_is_waited_for() -> None:
    body = said(openai("rate_limit_exceeded", "requests", RPD))
    assert classify(429, body, wait=60_000_000) is Kind.QUOTA
    assert classify(429, body, wait=3_600_000_000) is Kind.PERIOD
    spent = said(google("RESOURCE_EXHAUSTED", "QUOTA_EXHAUSTED"))
    assert classify(429, spent, wait=60_000_000) is Kind.QUOTA


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "Overloaded", "type": "server_error", "code": 503}, Kind.CAPACITY),
        ({"type": "overloaded_error", "message": "Overloaded"}, Kind.CAPACITY),
        ({"code": "server_error", "message": "boom"}, Kind.FAULT),
        ({"code": "rate_limit_exceeded", "message": "x"}, Kind.QUOTA),
        ({"code": "insufficient_quota"}, Kind.MONEY),
        ({"code": 429}, Kind.QUOTA),
        ({"code": "invalid_prompt", "type": "invalid_request_error"}, Kind.CALLER),
        ("plain words", Kind.FAULT),
        ({}, Kind.FAULT),
        (None, Kind.FAULT),
    ],
)
def test_an_error_inside_an_answer_is_classified_too(error: Any, kind: Kind) -> None:
    assert classify(200, said_by(failure_of(error))) is kind


@pytest.mark.parametrize(
    "body",
    [None, 7, True, [], [7], {}, {"error": None}, {"error": []},
     {"error": {"code": {}, "type": [], "details": {"x": 1}}}],
)  # fmt: skip
def test_a_body_of_any_shape_says_nothing_and_breaks_nothing(body: Any) -> None:
    assert said(body) == Said()
    assert said(body).code == ""


def test_what_is_kept_of_a_body_is_bounded() -> None:
    heard = said(openai("c" * 9999, None, "m" * 99_999))
    assert len(heard.code) <= 128
    assert len(heard.message) <= 4000
    assert said("m" * 99_999).message == "m" * 4000


def test_the_first_word_is_the_code() -> None:
    assert said(openai("rate_limit_exceeded", "tokens")).code == "rate_limit_exceeded"
    assert said(anthropic("overloaded_error")).code == "overloaded_error"
    assert said({"error": {"innererror": {"code": "ContentFilter"}}}).code == "contentfilter"
    assert said_by(Failure(type="t")).code == "t"
