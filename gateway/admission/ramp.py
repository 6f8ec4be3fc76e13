"""Slope limit, where a provider punishes sudden growth (`admission.md` §6). Pure value.

OpenAI: above 1 M input tokens per minute, use may grow by at most 50 % per 15 minutes. So one more
limit holds, recomputed each minute from the input of the last 15:

    limit = min(L, (1 + slope) * max(1 M, mean input per minute over the last 15 minutes))

A ramp refusal halves the slope; it recovers over 15 minutes without one.

Open: the limiter is not wired to a pool yet; it becomes one more dimension whose limit changes each
minute. It was designed, not simulated, and the provider's own floor and slope are from its help
pages, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gateway.units import MINUTE

if TYPE_CHECKING:
    from gateway.units import Micros, Tokens

MINUTES = 15
FLOOR: Tokens = 1_000_000
SLOPE_PPM = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Input of the last minutes and the slope now allowed.

    Attributes:
        minute: Number of the minute that `inputs[-1]` counts.
        inputs: Whole input tokens per minute, oldest first, the present one last.
        slope_ppm: Growth allowed, parts per million.
    """

    minute: int
    inputs: tuple[Tokens, ...] = (0,) * (MINUTES + 1)
    slope_ppm: int = SLOPE_PPM

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
        slope = min(SLOPE_PPM, self.slope_ppm + passed * (SLOPE_PPM // MINUTES))
        if passed >= MINUTES:
            slope = SLOPE_PPM
        return Ramp(minute=self.minute + passed, inputs=inputs, slope_ppm=slope)

    def used(self, now: Micros, tokens: Tokens) -> Ramp:
        """So many input tokens were sent."""
        ramp = self.advance(now)
        return replace(ramp, inputs=(*ramp.inputs[:-1], ramp.inputs[-1] + tokens))

    def refused(self, now: Micros) -> Ramp:
        """The provider refused because use grew too fast."""
        ramp = self.advance(now)
        return replace(ramp, slope_ppm=ramp.slope_ppm // 2)

    def limit(self, most: Tokens) -> Tokens:
        """Input tokens allowed per minute, `most` at most. Whole minutes only: not the present."""
        mean = sum(self.inputs[:-1]) // MINUTES
        return min(most, max(FLOOR, mean) * (1_000_000 + self.slope_ppm) // 1_000_000)
