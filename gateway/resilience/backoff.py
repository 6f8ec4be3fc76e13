"""Decorrelated jitter merged with Retry-After (`admission.md` §12).

Quota and ramp refusals never come here: they requeue, and the pool waits. Backoff is for sick
upstreams, before the first byte has reached the client. A provider's word always sets the minimum;
jitter is added on top, never subtracted, because coming early is what makes a herd.

Source: decorrelated jitter after M. Brooker, "Exponential Backoff And Jitter" (AWS, 2015).
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.units import MICRO, Micros, Mode, Rng, RuleId


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffRules:
    """Retry and backoff as the policy sets them.

    Attributes:
        kind: "decorrelated" or "full" jitter.
        base, cap: Micros; the first and the largest delay.
        attempts: Attempts of one call by backoff, the first included.
        requeues: Times one call may re-enter its pool after a quota refusal.
        max_retry_after: Longest stated wait that is obeyed; above it the call falls back or fails.
        budget_ratio_ppm: Retries earned per success, parts per million.
        budget_min_per_second: Retries allowed per second without any success.
        budget_max: Retries saved up at most.
    """

    kind: str = "decorrelated"
    base: Micros = 500_000
    cap: Micros = 20 * MICRO
    attempts: int = 3
    requeues: int = 8
    max_retry_after: Micros = 60 * MICRO
    budget_ratio_ppm: int = 100_000
    budget_min_per_second: int = 1
    budget_max: int = 100
    mode: Mode = Mode.ENFORCE
    because: RuleId = "retry"


def next_delay(rules: BackoffRules, *, previous: Micros, attempt: int, rng: Rng) -> Micros:
    """The delay before the next attempt, between 0 and `rules.cap`.

    Args:
        rules: Of the policy in force.
        previous: The delay before this one; 0 before the first.
        attempt: Number of the attempt that failed, from 1.
        rng: Any generator; equal draws give equal delays.
    """
    if rules.kind == "full":
        ceiling = min(rules.cap, rules.base << min(attempt, 40))
        return round(rng.uniform(0, ceiling))
    return min(rules.cap, round(rng.uniform(rules.base, 3 * max(previous, rules.base))))


def wait_for(rules: BackoffRules, *, delay: Micros, retry_after: Micros | None, rng: Rng) -> Micros:
    """The whole wait: never shorter than the provider's word, spread against herds."""
    if retry_after is None:
        return delay
    spread = min(MICRO, rules.base + retry_after // 10)
    return max(delay, retry_after + round(rng.uniform(0, spread)))
