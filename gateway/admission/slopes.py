"""Pools beside pools: the slope limit of `ramp.py` as one more pool that is taken first.

While a slope holds, calls of a provider's pool ask `<pool>:ramp` as well, in their lanes and with
their fairness: a pool of input tokens per minute whose limit follows the ramp each minute. It holds
always where the rules say so, else for 15 minutes after a refusal because of growth. In front of
the provider's pool, because what that one grants must be sent at once.

Weakness: each process counts its own input only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admission.profiles import Shape, pool_spec
from gateway.admission.ramp import MINUTES, Ramp
from gateway.admission.values import Ask, Outcome
from gateway.units import MICRO, MINUTE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.admission.ramp import RampRules
    from gateway.admission.store import PoolStore
    from gateway.admission.values import PoolSpec
    from gateway.units import Micros, Tokens

SUFFIX = ":ramp"


class _Slope:
    """One pool's growth. `fresh` are tokens of this minute that `ramp` does not hold yet."""

    __slots__ = ("fresh", "minute", "ramp", "spec", "until")

    def __init__(self, now: Micros) -> None:
        self.ramp = Ramp.at(now)
        self.minute = self.ramp.minute
        self.fresh: Tokens = 0
        self.until: Micros = 0
        self.spec: PoolSpec | None = None

    def fold(self, now: Micros) -> None:
        """The ramp knows everything that was sent, and which minute it is."""
        if self.fresh:
            self.ramp = self.ramp.used(self.minute * MINUTE, self.fresh)
            self.fresh = 0
        self.ramp = self.ramp.advance(now)
        self.minute = self.ramp.minute


class Slopes:
    """The slopes of this process, by pool. Bounded: pools of policies, not of callers."""

    __slots__ = ("_by_pool", "_store")

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._by_pool: dict[str, _Slope] = {}

    def beside(
        self, pools: tuple[PoolSpec, ...], rules: Mapping[str, RampRules], now: Micros
    ) -> tuple[PoolSpec, ...]:
        """The pools to take: these, and those of the slopes that hold now, first."""
        first: list[PoolSpec] = []
        for pool in pools:
            rule = rules.get(pool.name)
            if rule is not None:
                spec = self._spec(pool, rule, now)
                if spec is not None:
                    first.append(spec)
        return (*first, *pools) if first else pools

    def sent(
        self, pools: tuple[PoolSpec, ...], rules: Mapping[str, RampRules], tokens: Tokens,
        now: Micros,
    ) -> None:  # fmt: skip
        """So many input tokens were granted by these pools."""
        for pool in pools:
            if pool.name in rules:
                slope = self._of(pool.name, now)
                if now // MINUTE != slope.minute:
                    slope.fold(now)
                slope.fresh += tokens

    def refused(
        self, pools: tuple[PoolSpec, ...], rules: Mapping[str, RampRules], now: Micros
    ) -> None:
        """The provider refused because use grew too fast: growth is limited from now on."""
        for pool in pools:
            rule = rules.get(pool.name)
            if rule is not None:
                slope = self._of(pool.name, now)
                slope.fold(now)
                slope.ramp = slope.ramp.refused(now)
                slope.until = now + MINUTES * MINUTE
                slope.spec = None

    def _of(self, pool: str, now: Micros) -> _Slope:
        slope = self._by_pool.get(pool)
        if slope is None:
            slope = self._by_pool[pool] = _Slope(now)
        return slope

    def _spec(self, pool: PoolSpec, rule: RampRules, now: Micros) -> PoolSpec | None:
        """The slope's pool as it stands in this minute; None where none holds."""
        slope = self._by_pool.get(pool.name)
        if slope is None:
            if not rule.always:
                return None
            slope = self._of(pool.name, now)
        if not rule.always and now >= slope.until:
            slope.spec = None
            return None
        if slope.spec is None or slope.minute != now // MINUTE:
            began = slope.spec is None
            slope.fold(now)
            slope.spec = _made(pool, rule, slope.ramp.limit(rule), now)
            if began:
                self._charge(slope.spec, slope.ramp.inputs[-1], now)
        return slope.spec

    def _charge(self, spec: PoolSpec, tokens: Tokens, now: Micros) -> None:
        """The pool begins with what this minute has sent already, unless it is there from before.

        The charge is a call of nobody's, granted and served at once: an empty pool admits anything
        up to its ceiling.
        """
        if self._store.view(spec.name) is not None:
            return
        rid, cost = f"{spec.name}.{now}", min(tokens * MICRO, spec.dimensions[0].cap[1])
        ask = Ask(rid=rid, lane=1, tenant="", weight=1, deadline_in=MICRO, cost=(cost,))
        self._store.acquire(spec, ask)
        self._store.settle(spec.name, rid, outcome=Outcome.SERVED, actual=None)


def _made(pool: PoolSpec, rule: RampRules, limit: Tokens, now: Micros) -> PoolSpec:
    return pool_spec(
        name=pool.name + SUFFIX,
        limits={"itpm": limit},
        shape=Shape.WINDOW,
        mode=rule.mode,
        because=rule.because,
        reasons={"itpm": rule.because},
        revision=now,  # grows with every change, whatever the policy's own revision
    )
