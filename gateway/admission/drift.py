"""Response headers -> how much of the quota others use (`admission.md` §6). Pure.

Read when the response *starts*: measured with a foreign consumer at 20 % of a sliding window,
reading at the end left 305-394 refusals, at the start none. What the provider says is used is
compared with what our meter held at the grant; what streams at that moment is charged by a realtime
meter about halfway, so half of it is taken off ours.

    drift = (limit - remaining) - (our meter at grant - half of the outputs then streaming)

Above 1 % of L the pool is told `drift + 0.5 % of L`. A stated limit below ours counts as foreign
use too: the difference is not ours to spend.

Weakness: `remaining` includes what arrived, not what is on the wire, and some providers round it to
thousands, hence the threshold; drift of bucket-shaped meters was designed, not simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.units import MICRO, MINUTE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.admission.values import Dimension, PoolSpec
    from gateway.units import Micros, Tokens

IGNORED_PPM = 10_000
"""Drift up to 1 % of L is jitter."""

MARGIN_PPM = 5_000
"""What is signalled on top, as a share of L."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One rate limit as response headers state it.

    Attributes:
        name: `requests`, `tokens`, `input` or `output`, as in `Dimension.name`.
        limit: Whole units per window.
        remaining: Whole units left; may be below 0 or above the limit where a provider errs.
        window: Over which the limit holds; a dimension of another window is not compared.
    """

    name: str
    limit: Tokens
    remaining: Tokens
    window: Micros = MINUTE


def foreign_use(
    spec: PoolSpec,
    meter: tuple[int, ...],
    readings: Sequence[Reading],
    *,
    streaming: Tokens = 0,
) -> tuple[int, ...] | None:
    """What to `signal` to the pool, micro-units per dimension; None if nothing is remarkable.

    Args:
        spec: The pool as it was asked.
        meter: `Admit.meter` of the call whose response has started.
        readings: What its headers say.
        streaming: Whole output tokens predicted for the calls that were streaming then, where the
            provider charges output as it is produced; else 0.
    """
    if len(meter) != len(spec.dimensions):
        return None  # the pool has got other dimensions since
    signal = tuple(
        _foreign(dim, held, readings, streaming)
        for dim, held in zip(spec.dimensions, meter, strict=True)
    )
    return signal if any(signal) else None


def _foreign(dim: Dimension, held: int, readings: Sequence[Reading], streaming: Tokens) -> int:
    """Micro-units of one dimension, 0 if in order."""
    if dim.calendar:
        return 0
    for reading in readings:
        if reading.name == dim.name and reading.window == dim.window and reading.limit > 0:
            used = (reading.limit - min(reading.remaining, reading.limit)) * MICRO
            halfway = streaming * MICRO // 2 if dim.name in {"tokens", "output"} else 0
            missing = max(0, dim.limit - reading.limit * MICRO)
            drift = used - max(0, held - halfway) + missing
            if drift * 1_000_000 > dim.limit * IGNORED_PPM:
                return min(dim.limit, drift + dim.limit * MARGIN_PPM // 1_000_000)
    return 0
