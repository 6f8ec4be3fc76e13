"""Whether a failed attempt is made again, and when: one pure decision (`admission.md` §2.3, §12).

Quota and ramp refusals never sleep: they requeue with their place, and the pool waits. Another key
is tried where one is spent; backoff is for what is sick. Everything else is final.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gateway.resilience.backoff import next_delay, wait_for
from gateway.units import Micros, Mode, Rng

if TYPE_CHECKING:
    from gateway.resilience.backoff import BackoffRules


class Kind(StrEnum):
    """What an upstream's bad answer means (`admission.md` §2.3)."""

    QUOTA = "quota"
    RAMP = "ramp"
    CAPACITY = "capacity"
    PERIOD = "period"
    MONEY = "money"
    AUTH = "auth"
    CALLER = "caller"
    FAULT = "fault"


REQUEUED = frozenset({Kind.QUOTA, Kind.RAMP})
BACKED_OFF = frozenset({Kind.CAPACITY, Kind.FAULT})
OTHER_KEY = frozenset({Kind.AUTH, Kind.MONEY, Kind.PERIOD})
MOST_KEYS = 8
"""Credentials one call may try."""


@dataclass(slots=True)
class Attempts:
    """How often one call has tried."""

    backoffs: int = 0
    requeues: int = 0
    keys: int = 0
    delay: Micros = 0

    def count(self, ruling: Again) -> None:
        """One more attempt of that kind."""
        if ruling.why == "backoff":
            self.backoffs += 1
        elif ruling.why == "requeue":
            self.requeues += 1
        else:
            self.keys += 1


@dataclass(frozen=True, slots=True)
class Again:
    """Try again after that long; `why` goes into the chain of verdicts."""

    wait: Micros
    why: str


def decide(  # noqa: PLR0913 - one decision, every fact of it named
    *,
    kind: Kind,
    retry_after: Micros | None,
    rules: BackoffRules,
    tried: Attempts,
    remaining: Micros,
    other_key: bool,
    rng: Rng,
) -> Again | str:
    """Whether to try again, and when; a string says why not.

    Args:
        kind: What the failed attempt means.
        retry_after: The provider's word, or None.
        rules: Of the policy in force.
        tried: So far; the caller counts up.
        remaining: Micros until the call's deadline.
        other_key: Whether a healthy credential other than the refused one exists.
        rng: Draws the jitter.
    """
    if rules.mode is not Mode.ENFORCE:
        return "retry is off"
    if kind in OTHER_KEY:
        spare = other_key and tried.keys < MOST_KEYS
        return Again(0, "other credential") if spare else f"{kind.value} is never retried"
    if kind in REQUEUED:
        return requeue(retry_after, rules, tried, remaining, other_key=other_key)
    if kind not in BACKED_OFF:
        return f"{kind.value} is never retried"
    if tried.backoffs + 1 >= rules.attempts:
        return f"{rules.attempts} attempts used"
    if retry_after is not None and retry_after > rules.max_retry_after:
        return "the stated wait is longer than policy waits"
    delay = next_delay(rules, previous=tried.delay, attempt=tried.backoffs + 1, rng=rng)
    wait = wait_for(rules, delay=delay, retry_after=retry_after, rng=rng)
    if wait > remaining:
        return "the wait lies beyond the deadline"
    tried.delay = delay
    return Again(wait, "backoff")


def requeue(
    retry_after: Micros | None,
    rules: BackoffRules,
    tried: Attempts,
    remaining: Micros,
    *,
    other_key: bool,
) -> Again | str:
    """A quota or ramp refusal: back into the pool with the original place, as far as allowed."""
    if other_key and tried.keys < MOST_KEYS:
        return Again(0, "other credential")
    if tried.requeues >= rules.requeues:
        return f"{rules.requeues} requeues used"
    if retry_after is not None and retry_after > min(remaining, rules.max_retry_after):
        return "the stated reset lies beyond what may be waited"
    return Again(0, "requeue")
