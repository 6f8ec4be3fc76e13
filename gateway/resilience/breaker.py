"""Circuit breaker: closed, open, half-open, shut as a transition table (`admission.md` §13)."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.units import MICRO, Micros, Mode, RuleId


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """Circuit breaker (`admission.md` §13)."""

    fast_window: Micros = 10 * MICRO
    fast_volume: int = 10
    fast_ratio_ppm: int = 500_000
    slow_window: Micros = 300 * MICRO
    slow_volume: int = 20
    slow_ratio_ppm: int = 300_000
    in_a_row: int = 5
    in_a_row_within: Micros = 60 * MICRO
    identical_quota: int = 3
    probes: int = 3
    probe_lease: Micros = 30 * MICRO
    cap: Micros = 60 * MICRO
    mode: Mode = Mode.ENFORCE
    because: RuleId = "breakers"
