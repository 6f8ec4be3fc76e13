"""Semantic breaker over call fingerprints (`admission.md` §13.1): a pure fold."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.units import Mode, RuleId, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRules:
    """Semantic loop breaker (`admission.md` §13.1)."""

    same_call: int = 4
    same_masked: int = 4
    alike_turns: int = 4
    alike_ppm: int = 850_000
    ping_pong: int = 4
    max_iterations: int = 0
    tokens_per_minute: Tokens = 0
    polling_tools: tuple[str, ...] = ()
    mode: Mode = Mode.SHADOW
    because: RuleId = "loops"
