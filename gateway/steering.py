"""What response headers say of the quota, turned to our meter; what our meter says, to headers.

In: at the response *head* the provider's `remaining` is compared with our own meter at the grant;
what it shows beyond ours is used by others and is signalled to the pool (`admission.md` §6). Out:
the caller's own limits as they stand, for the rate-limit headers its SDK knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admission.drift import Reading, foreign_use
from gateway.admission.profiles import Profile
from gateway.units import MICRO, MINUTE, Mode, new_tuple
from gateway.wire import ratelimit_headers
from gateway.wire.ratelimit_headers import OwnLimit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.admission.core import PoolSpec
    from gateway.admission.store import PoolStore
    from gateway.call import Call, HeaderList
    from gateway.clock import Clock
    from gateway.units import Tokens
    from gateway.wire.ratelimit_headers import UpstreamLimits

ENFORCE = Mode.ENFORCE
SHOWN = frozenset({"requests", "tokens", "input", "output"})


PERIODS = {"second": MICRO, "minute": MINUTE, "hour": 60 * MINUTE, "day": 1_440 * MINUTE}
"""Windows that header names state; the families that name none mean a minute."""


class Steering:
    """Corrects pools by response headers.

    Attributes:
        producing: Output tokens expected of the calls in flight, by pool: what a realtime meter has
            charged only in part.
    """

    __slots__ = ("_clock", "_store", "producing")

    def __init__(self, store: PoolStore, clock: Clock, producing: Mapping[str, Tokens]) -> None:
        self._store = store
        self._clock = clock
        self.producing = producing

    def head(self, call: Call, headers: HeaderList) -> None:
        """The head of an answer arrived; never fails a paid answer."""
        deployment = call.deployment
        if deployment is None or not deployment.pools or call.meters is None:
            return
        for name, _ in headers:
            if name.find(b"ratelimit") >= 0:
                break
        else:
            return
        limits = ratelimit_headers.limits_in(headers, now=round(self._clock.wall() * MICRO))
        said = readings(limits)
        realtime = deployment.accounting.profile is Profile.REALTIME
        for spec in deployment.pools:
            meter = call.meters.get(spec.name)
            if meter is None or not spec.dimensions:
                continue
            streaming = self.producing.get(spec.name, 0) if realtime else 0
            foreign = foreign_use(spec, meter, said, streaming=streaming)
            if foreign is not None:
                foreign = foreign_use(spec, self._risen(spec, meter), said, streaming=streaming)
            if foreign is not None:
                self._store.signal(spec.name, foreign)

    def _risen(self, spec: PoolSpec, meter: tuple[int, ...]) -> tuple[int, ...]:
        """Our meter at the grant or, where it has risen since, as it stands now.

        Providers count `remaining` anywhere between arrival and head. While a window fills, what we
        ourselves sent in that time would otherwise look like foreign use: a false alarm keeps
        quota unused for half a minute.
        """
        view = self._store.view(spec.name)
        if view is None or len(view.dimensions) != len(meter):
            return meter
        return tuple(max(then, now.used) for then, now in zip(meter, view.dimensions, strict=True))


def readings(limits: UpstreamLimits) -> list[Reading]:
    """What the headers state completely: limit and remaining of one dimension over a window."""
    return [
        Reading(
            name=said.name,
            limit=said.limit,
            remaining=said.remaining,
            window=PERIODS.get(said.period, MINUTE),
        )
        for said in limits.dimensions
        if said.limit is not None and said.remaining is not None
    ]


class OwnLimits:
    """The caller's own limits, as they stand."""

    __slots__ = ("_store",)

    def __init__(self, store: PoolStore) -> None:
        self._store = store

    def __call__(self, call: Call) -> list[OwnLimit]:
        """One entry per dimension of the caller's own pools; nothing for callers without limits.

        A limit in shadow holds nobody back, so it is none of the caller's business either.
        """
        principal = call.principal
        if principal is None or not principal.pools:
            return []
        out: list[OwnLimit] = []
        for spec in principal.pools:
            if spec.mode is not ENFORCE:
                continue
            for rule, used in self._store.standing(spec.name):
                name, limit = rule.name, rule.limit
                if name not in SHOWN or rule.calendar or not limit:
                    continue
                left = limit - used if limit > used else 0
                reset = used * rule.window // limit
                # NamedTuple's own constructor is a Python function: three times as slow.
                facts = (name, limit // MICRO, left // MICRO, reset)
                out.append(new_tuple(OwnLimit, facts))
        return out
