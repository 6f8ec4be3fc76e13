"""What each provider meters, in which shape: call -> reserved vector, usage -> actual vector.

The accounting profiles of `admission.md` §2.1. A *vector* holds one cost per dimension of a pool, in
micro-units (`units.MICRO` is one request, one token or one micro-dollar).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.units import MicroUsd, Tokens


class Profile(StrEnum):
    """When a provider charges what."""

    UPFRONT_MAX = "upfront_max"
    RESERVE_SETTLE = "reserve_settle"
    REALTIME = "realtime"
    INPUT_ONLY = "input_only"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """A profile with its parameters.

    Attributes:
        profile: When the provider charges.
        cached_input_counts: Whether cache reads count against the limits.
        output_weight: What one output token burns, in input tokens (Bedrock, Claude 4 class: 5).
        refused_counts: Whether a refused request counts against the request limit.
        missing_cap: Output reserved where the call names no cap; None means the learned p99.
    """

    profile: Profile = Profile.REALTIME
    cached_input_counts: bool = True
    output_weight: int = 1
    refused_counts: bool = True
    missing_cap: Tokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a call is expected to cost, in whole tokens.

    Attributes:
        input: Input tokens, cached share included, bias applied.
        cached: The share of `input` expected to be read from the provider's cache.
        output: Predicted output, never above `cap`.
        cap: Effective output cap of the request times n; None where the request names none.
        money: Predicted price of the call.
        exact: False where a fallback counted.
    """

    input: Tokens
    output: Tokens
    cap: Tokens | None = None
    cached: Tokens = 0
    money: MicroUsd = 0
    exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a call really cost, in whole tokens; None is missing, zero is a reported zero.

    Attributes:
        input: Fresh input tokens, cached parts apart.
        output: Output tokens, reasoning included.
        cache_read: Input tokens read from the provider's cache.
        cache_write: Input tokens written to the provider's cache.
        reasoning: The share of `output` that was reasoning.
        estimated: True where we counted, because the provider did not say.
        money: Price of the call.
    """

    input: Tokens | None = None
    output: Tokens | None = None
    cache_read: Tokens | None = None
    cache_write: Tokens | None = None
    reasoning: Tokens | None = None
    estimated: bool = False
    money: MicroUsd = 0
