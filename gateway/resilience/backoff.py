"""Decorrelated jitter merged with Retry-After (`admission.md` §12)."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.units import MICRO, Micros, Mode, RuleId


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffRules:
    """Retry and backoff (`admission.md` §12)."""

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
