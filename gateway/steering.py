"""What response headers say of the quota, turned to our meter; what our meter says, to headers.

In: at the response *head* the provider's `remaining` is compared with our own meter at the grant; what
it shows beyond ours is used by others and is signalled to the pool (`admission.md` §6). Out: the
caller's own limits as they stand, for the rate-limit headers its SDK knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admission import drift
from gateway.units import MICRO
from gateway.wire import ratelimit_headers
from gateway.wire.ratelimit_headers import OwnLimit

if TYPE_CHECKING:
    from gateway.admission.core import PoolSpec
    from gateway.admission.store import PoolStore
    from gateway.call import Call, HeaderList
    from gateway.clock import Clock
    from gateway.wire.ratelimit_headers import UpstreamLimits

SHOWN = frozenset({"requests", "tokens", "input", "output"})


class Steering:
    """Corrects pools by response headers."""

    __slots__ = ("_clock", "_store")

    def __init__(self, store: PoolStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def head(self, call: Call, headers: HeaderList) -> None:
        """The head of an answer arrived; never fails a paid answer."""
        deployment = call.deployment
        if deployment is None or not deployment.pools or call.meters is None:
            return
        if not any(b"ratelimit" in name for name, _ in headers):
            return
        limits = ratelimit_headers.limits_in(headers, now=round(self._clock.wall() * MICRO))
        for spec in deployment.pools:
            meter = call.meters.get(spec.name)
            if meter is not None and spec.dimensions:
                self._correct(spec, meter, limits)

    def _correct(self, spec: PoolSpec, meter: tuple[int, ...], limits: UpstreamLimits) -> None:
        foreign = drift.foreign(spec, meter, stated(spec, limits))
        if foreign is not None:
            self._store.signal(spec.name, foreign)


def stated(spec: PoolSpec, limits: UpstreamLimits) -> list[tuple[int, int] | None]:
    """(limit, remaining) per dimension of the pool in whole units, None where nothing is said."""
    out: list[tuple[int, int] | None] = []
    for dimension in spec.dimensions:
        said = limits.of(dimension.name)
        if said is None or said.limit is None or said.remaining is None:
            out.append(None)
        else:
            out.append((said.limit, said.remaining))
    return out


class OwnLimits:
    """The caller's own limits, as they stand."""

    __slots__ = ("_store",)

    def __init__(self, store: PoolStore) -> None:
        self._store = store

    def __call__(self, call: Call) -> list[OwnLimit]:
        """One entry per dimension of the caller's own pools; nothing for callers without limits."""
        principal = call.principal
        if principal is None or not principal.pools:
            return []
        out: list[OwnLimit] = []
        for spec in principal.pools:
            view = self._store.view(spec.name)
            if view is None:
                continue
            for rule, state in zip(spec.dimensions, view.dimensions, strict=False):
                if rule.name not in SHOWN or rule.calendar or not state.limit:
                    continue
                left = max(0, state.limit - state.used)
                out.append(
                    OwnLimit(
                        name=rule.name,
                        limit=state.limit // MICRO,
                        remaining=left // MICRO,
                        reset=state.used * rule.window // state.limit,
                    )
                )
        return out
