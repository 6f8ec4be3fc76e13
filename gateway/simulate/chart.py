"""Three small charts as inline SVG: a line, a stacked area of three tiers, bars. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 360, 130
LEFT, RIGHT, TOP, BOTTOM = 38, 6, 8, 18


def _x(at: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at / end if end else LEFT


def _y(value: float, most: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most)


def _frame(end: float, most: float, inner: str, alt: str) -> str:
    """Axes, labels and what is drawn between them."""
    base = _y(0, most)
    labels = "".join(
        f'<text x="{LEFT - 4}" y="{_y(value, most) + 3:.1f}" text-anchor="end">'
        f"{_short(value)}</text>"
        for value in (0, most / 2, most)
    )
    times = "".join(
        f'<text x="{_x(at, end):.1f}" y="{HEIGHT - 4}" text-anchor="{anchor}">{clock(at)}</text>'
        for at, anchor in ((0, "start"), (end / 2, "middle"), (end, "end"))
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alt}">{inner}'
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base:.1f}" y2="{base:.1f}"/>'
        f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{base:.1f}"/>'
        f"{labels}{times}</svg>"
    )


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1_000:.0f}k"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def clock(seconds: float) -> str:
    """A time in a run as people say it."""
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:.1f} d"
    if seconds >= 7_200:
        return f"{seconds / 3_600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"


def lines(points: Sequence[tuple[float, float]], *, most: float, mark: float) -> str:
    """One line over time, and a dashed one at `mark`."""
    end = points[-1][0] if points else 1.0
    path = " ".join(f"{_x(at, end):.1f},{_y(min(value, most), most):.1f}" for at, value in points)
    level = _y(mark, most)
    inner = (
        f'<line class="full" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
        f'<polyline class="use" points="{path}"/>'
    )
    return _frame(end, most, inner, "share of the quota over time")


def area(points: Sequence[tuple[float, tuple[int, int, int]]], *, most: int) -> str:
    """Three layers over time, the most urgent tier at the bottom."""
    end = points[-1][0] if points else 1.0
    inner = ""
    for tier in (2, 1, 0):
        top = [(at, sum(counts[: tier + 1])) for at, counts in points]
        path = " ".join(f"{_x(at, end):.1f},{_y(value, most):.1f}" for at, value in top)
        base = f"{_y(0, most):.1f}"
        inner += (
            f'<polygon class="t{tier + 1}" '
            f'points="{LEFT},{base} {path} {_x(end, end):.1f},{base}"/>'
        )
    return _frame(end, most, inner, "calls that wait, by tier, over time")


def bars(points: Sequence[tuple[float, int]], *, most: int) -> str:
    """A bar per stretch of time."""
    end = points[-1][0] if points else 1.0
    width = (WIDTH - LEFT - RIGHT) / max(1, len(points))
    inner = "".join(
        f'<rect class="refused" x="{_x(at, end):.1f}" y="{_y(value, most):.1f}" '
        f'width="{max(0.8, width):.1f}" height="{_y(0, most) - _y(value, most):.1f}"/>'
        for at, value in points
        if value
    )
    return _frame(end, most, inner, "refusals by the provider over time")
