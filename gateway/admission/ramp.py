"""Slope limit, where a provider punishes sudden growth (`admission.md` §6). Pure value.

OpenAI: above 1 M input tokens per minute, use may grow by at most 50 % per 15 minutes. So one more
limit holds, recomputed each minute from the input of the last 15:

    limit = min(L, (1 + slope) * max(floor, mean input per minute over the last 15 minutes))

A ramp refusal halves the slope; it recovers over 15 minutes without one. `slopes.py` makes a pool
of the limit.

Weakness: after a restart the 15 minutes are empty, so growth begins at the floor again; floor and
slope are from the provider's help pages, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.units import MICRO, MINUTE, Mode

if TYPE_CHECKING:
    from gateway.units import Micros, RuleId, Tokens

MINUTES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class RampRules:
    """When a pool's growth is limited, and how.

    Attributes:
        always: Not only for 15 minutes after the provider has refused because of growth.
        floor: Whole input tokens per minute that count as used in any case.
        growth_ppm: Growth allowed in 15 minutes, parts per million.
        most: L, the pool's own limit of tokens per minute.
    """

    always: bool = False
    floor: Tokens = 1_000_000
    growth_ppm: int = 500_000
    most: Tokens
    mode: Mode = Mode.ENFORCE
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Input of the last minutes and the slope now allowed.

    Attributes:
        minute: Number of the minute that `inputs[-1]` counts.
        inputs: Whole input tokens per minute, oldest first, the present one last.
        share_ppm: Share of the rules' growth that is allowed now, parts per million.
    """

    minute: int
    inputs: tuple[Tokens, ...] = (0,) * (MINUTES + 1)
    share_ppm: int = MICRO

    @classmethod
    def at(cls, now: Micros) -> Ramp:
        """Nothing was used before `now`."""
        return cls(minute=now // MINUTE)

    def advance(self, now: Micros) -> Ramp:
        """The minutes up to `now` have passed; each clean one gives a fifteenth of slope back."""
        passed = now // MINUTE - self.minute
        if passed <= 0:
            return self
        inputs = (self.inputs + (0,) * min(passed, MINUTES + 1))[-(MINUTES + 1) :]
        share = min(MICRO, self.share_ppm + passed * -(-MICRO // MINUTES))
        return Ramp(minute=self.minute + passed, inputs=inputs, share_ppm=share)

    def used(self, now: Micros, tokens: Tokens) -> Ramp:
        """So many input tokens were sent."""
        ramp = self.advance(now)
        return replace(ramp, inputs=(*ramp.inputs[:-1], ramp.inputs[-1] + tokens))

    def refused(self, now: Micros) -> Ramp:
        """The provider refused because use grew too fast."""
        ramp = self.advance(now)
        return replace(ramp, share_ppm=ramp.share_ppm // 2)

    def limit(self, rules: RampRules) -> Tokens:
        """Input tokens allowed per minute. Whole minutes only: not the present one."""
        mean = sum(self.inputs[:-1]) // MINUTES
        growth = rules.growth_ppm * self.share_ppm // MICRO
        return min(rules.most, max(rules.floor, mean) * (MICRO + growth) // MICRO)
