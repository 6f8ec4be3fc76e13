"""A shared pool as its last answer told it, for status and headers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admission.store import DimensionView, LaneView, PoolView

if TYPE_CHECKING:
    from gateway.admission.core import Dimension
    from gateway.admission.remote import RemotePool
    from gateway.units import Micros


def used_of(remote: RemotePool, now: Micros) -> list[tuple[Dimension, int]]:
    """Each dimension with what of it is used; what was used counts until its window has passed."""
    stands, dims = remote.standing, remote.spec.dimensions
    if stands is None or len(stands.used) != len(dims):
        return []
    passed = now - remote.told if now > remote.told else 0
    out = []
    for i, dim in enumerate(dims):
        if dim.cap[0] or any(dim.cap):
            used = stands.used[i] if passed < dim.window else 0
        else:
            used = _level(stands.level[i], dim, passed)
        out.append((dim, used))
    return out


def _level(units: int, dim: Dimension, passed: Micros) -> int:
    """What stands in a bucket by now."""
    return units if dim.calendar else max(0, units - dim.limit * passed // dim.window)


def view_of(remote: RemotePool, now: Micros) -> PoolView:
    """The pool as status shows it; it has answered at least once.

    Args:
        remote: Its client.
        now: Our clock.
    """
    spec, stands = remote.spec, remote.standing
    assert stands is not None  # noqa: S101 - the caller looked
    passed = max(0, now - remote.told)
    fits = len(stands.used) == len(spec.dimensions)
    used = [units for _, units in used_of(remote, now)]

    return PoolView(
        name=spec.name,
        now=now,
        in_flight=stands.in_flight,
        concurrency=spec.concurrency,
        factor_ppm=stands.factor_ppm,
        blocked_for=max(0, stands.blocked_until - (remote.server_now(now))),
        lanes=tuple(
            LaneView(waiting=count, backlog=work)
            for count, work in zip(stands.waiting, stands.backlog, strict=True)
        ),
        dimensions=tuple(
            DimensionView(
                name=dim.name,
                limit=dim.limit,
                level=_level(stands.level[i], dim, passed) if fits else 0,
                used=used[i] if fits else 0,
                foreign=stands.foreign[i] if fits else 0,
                because=dim.because,
                window=dim.window,
                calendar=dim.calendar,
                resets_in=max(0, dim.window - passed),
            )
            for i, dim in enumerate(spec.dimensions)
        ),
        eta=tuple(sum(stands.backlog[: lane + 1]) for lane in range(len(stands.backlog))),
        would_have_waited=stands.would_have_waited,
    )
