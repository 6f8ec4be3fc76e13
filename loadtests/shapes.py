"""Load shapes for locust: how many agents of which kind call at which time.

Chosen by `--shape` (or TIDEGATE_LOAD_SHAPE); all end by themselves.

    steady    a fleet at work
    surge     Black Friday: quiet, six times as many, quiet again
    herd      everybody waits and calls in the same instant, again and again
    slow      agents that read their streams slowly beside agents that do not
    steps     a staircase, to find where waiting begins
"""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape

Stage = tuple[float, int, float]
"""Until that second: so many users, spawned at that rate."""

SHAPES: dict[str, tuple[Stage, ...]] = {
    "steady": ((60, 40, 20),),
    "surge": ((15, 20, 10), (60, 120, 40), (80, 20, 40)),
    "herd": ((60, 80, 80),),
    "slow": ((60, 60, 30),),
    "steps": tuple((15 * step, 20 * step, 20) for step in range(1, 7)),
}

HERD_EVERY = 10.0
"""Seconds between two stampedes."""


def stage_at(stages: tuple[Stage, ...], seconds: float) -> tuple[int, float] | None:
    """Users and spawn rate at that time; None when the run is over."""
    for until, users, rate in stages:
        if seconds < until:
            return users, rate
    return None


def until_next(seconds: float, every: float) -> float:
    """Seconds until the next multiple of `every`."""
    return every - seconds % every


class Shape(LoadTestShape):  # type: ignore[misc]
    """The shape that the command line names."""

    def tick(self) -> tuple[int, float] | tuple[int, float, list[Any]] | None:
        """Asked every second."""
        options = self.runner.environment.parsed_options
        limit = getattr(options, "seconds", 0)
        if limit and self.get_run_time() >= limit:
            return None
        stage = stage_at(SHAPES[options.shape], self.get_run_time())
        if stage is None:
            return None
        kinds = self.runner.environment.user_classes
        slow, tools = options.shape == "slow", bool(getattr(options, "tools", ""))
        wanted = [
            kind
            for kind in kinds
            if (slow or not getattr(kind, "only_slow", False))
            and (tools or not getattr(kind, "only_tools", False))
        ]
        return (*stage, wanted)
