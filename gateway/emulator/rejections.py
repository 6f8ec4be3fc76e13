"""What the emulator answers to requests at fault, before any meter is asked: pure constructors."""

from __future__ import annotations

import json
from typing import Any

import orjson

from gateway.emulator.ask import Rejected
from gateway.emulator.config import ModelSpec
from gateway.emulator.meters import ANTHROPIC


def decode(raw: bytes) -> Any:  # noqa: ANN401 - JSON is what it is
    """JSON, also what orjson refuses: lone surrogates, NaN.

    Raises:
        ValueError: It is no JSON, or nested too deeply.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            return json.loads(raw)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def json_object(raw: bytes, dialect: str) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        Rejected: It is none.
    """
    try:
        body = decode(raw)
    except ValueError:
        if dialect == ANTHROPIC:
            raise Rejected("The request body is not valid JSON.") from None
        raise Rejected(
            "We could not parse the JSON body of your request. (HINT: This likely means you aren't "
            "using your HTTP library correctly. The OpenAI API expects a JSON payload, but what "
            "was sent was not valid JSON.)"
        ) from None
    if not isinstance(body, dict):
        if dialect == ANTHROPIC:
            raise Rejected("Input should be a valid dictionary")
        raise Rejected("Invalid request body: expected a JSON object.")
    return body


def unauthenticated(dialect: str, *, given: bool) -> Rejected:
    """401, for a missing key or a wrong one; the key itself is never repeated."""
    if dialect == ANTHROPIC:
        message = "invalid x-api-key" if given else "x-api-key header is required"
        return Rejected(message, status=401, kind="authentication_error")
    if given:
        return Rejected(
            "Incorrect API key provided. You can find your API key at "
            "https://platform.openai.com/account/api-keys.",
            status=401, code="invalid_api_key",
        )  # fmt: skip
    return Rejected(
        "You didn't provide an API key. You need to provide your API key in an Authorization "
        "header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY).",
        status=401,
    )


def unknown_model(model: str, dialect: str) -> Rejected:
    """404."""
    if dialect == ANTHROPIC:
        return Rejected(f"model: {model}", status=404, kind="not_found_error")
    return Rejected(
        f"The model `{model}` does not exist or you do not have access to it.",
        status=404, code="model_not_found",
    )  # fmt: skip


def cap_too_large(spec: ModelSpec, cap: int, dialect: str) -> Rejected:
    """400: the model cannot write so much."""
    if dialect == ANTHROPIC:
        return Rejected(
            f"max_tokens: {cap} > {spec.max_output}, which is the maximum allowed number of output "
            f"tokens for {spec.name}"
        )
    return Rejected(
        f"max_tokens is too large: {cap}. This model supports at most {spec.max_output} completion "
        f"tokens, whereas you provided {cap}.",
        param="max_tokens", code="invalid_value",
    )  # fmt: skip


def context_exceeded(spec: ModelSpec, tokens: int, cap: int, dialect: str) -> Rejected:
    """400: the model cannot read so much."""
    if dialect == ANTHROPIC:
        if tokens > spec.context:
            return Rejected(f"prompt is too long: {tokens} tokens > {spec.context} maximum")
        return Rejected(
            f"input length and `max_tokens` exceed context limit: {tokens} + {cap} > "
            f"{spec.context}, decrease input length or `max_tokens` and try again"
        )
    return Rejected(
        f"This model's maximum context length is {spec.context} tokens. However, you requested "
        f"{tokens + cap} tokens ({tokens} in the messages, {cap} in the completion). Please reduce "
        "the length of the messages or completion.",
        param="messages", code="context_length_exceeded",
    )  # fmt: skip
