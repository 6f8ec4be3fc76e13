"""Load shapes for locust: how many agents call at which time.

Chosen by TIDEGATE_LOAD_SHAPE: `surge` (default: quiet, six times the quota, quiet again), `steps`
(a staircase, to find where waiting begins) or `steady`. All end by themselves.
"""

from __future__ import annotations

import os
from typing import ClassVar

from locust import LoadTestShape

Stage = tuple[float, int, float]
"""Until that second: so many users, spawned at that rate."""

SHAPES: dict[str, tuple[Stage, ...]] = {
    "surge": ((15, 20, 10), (60, 120, 40), (80, 20, 40)),
    "steps": tuple((15 * step, 20 * step, 20) for step in range(1, 7)),
    "steady": ((60, 40, 20),),
}


def stage_at(stages: tuple[Stage, ...], seconds: float) -> tuple[int, float] | None:
    """Users and spawn rate at that time; None when the run is over."""
    for until, users, rate in stages:
        if seconds < until:
            return users, rate
    return None


def chosen(name: str) -> tuple[Stage, ...]:
    """The stages of that name.

    Raises:
        SystemExit: There is no such shape.
    """
    if name not in SHAPES:
        raise SystemExit(f"TIDEGATE_LOAD_SHAPE={name!r}: one of {', '.join(SHAPES)} is allowed")
    return SHAPES[name]


class Shape(LoadTestShape):  # type: ignore[misc]
    """The shape that the environment names."""

    stages: ClassVar[tuple[Stage, ...]] = chosen(os.environ.get("TIDEGATE_LOAD_SHAPE", "surge"))

    def tick(self) -> tuple[int, float] | None:
        """Asked every second."""
        return stage_at(self.stages, self.get_run_time())
