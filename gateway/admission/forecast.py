"""How long a call would wait in a pool, which rule holds it back, and whether it may wait. Pure.

Nothing here changes a pool but the note of the last reason (`Meter.reason`) and, where lane 0
refuses, what its counter held for the refused.
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING

from gateway.admission.meter import BLOCKED, CONCURRENCY, FULL
from gateway.admission.values import Shed

if TYPE_CHECKING:
    from gateway.admission.core import PoolCore
    from gateway.admission.line import Waiter
    from gateway.units import Micros, RuleId


def wait(core: PoolCore, lane: int, cost: tuple[int, ...]) -> Micros:
    """0 if the cost fits now, else micros; the meter's `reason` says why."""
    meter, held = core.meter, core.leases.held
    span = meter.fit(lane, cost)
    limit = core.spec.concurrency
    if limit and len(held) >= limit:
        # No timer polls for a free permit: a settlement pumps by itself, or a lease ends.
        full = max(1, core.leases.next_end(meter.now) - meter.now)
        if full > span:
            meter.reason = CONCURRENCY
            return full
    return span


def reason(core: PoolCore) -> RuleId:
    """The rule behind the last wait."""
    index, spec = core.meter.reason, core.spec
    if index == CONCURRENCY:
        return spec.concurrency_because or spec.because
    return spec.because if index == BLOCKED else spec.dimensions[index].because


def held_by(core: PoolCore, lane: int, cost: tuple[int, ...]) -> RuleId:
    """The rule that holds a call back: what its own cost meets, else its largest share."""
    if not wait(core, lane, cost):
        core.meter.reason = core.meter.dominant(cost)
    return reason(core)


def refusal(core: PoolCore, waiter: Waiter, fitting: Micros) -> Shed | None:
    """Why it may not wait: the line is full, or its turn comes after its deadline.

    Args:
        core: The pool.
        waiter: The call where it would stand.
        fitting: What `wait` said of it, 0 where others stand ahead.
    """
    meter, line, ask, lane = core.meter, core.line, waiter.ask, waiter.lane
    eta = max(eta_of(core, waiter), meter.hard_wait(ask.cost))
    if ask.deadline_in <= 0 or not (core.leases.held or meter.growing):
        # Nothing is out that could be given back early, so this wait is exact.
        eta = max(eta, fitting)
    full = len(line.waiting) >= core.spec.max_waiting
    if not full and eta <= ask.deadline_in:
        return None
    if lane == 0:
        line.zero_refunds(waiter.span)
    because = core.spec.because if full else held_by(core, lane, ask.cost)
    return Shed(rid=ask.rid, eta=eta, tag=waiter.tag, because=because, full=full)


def eta_of(core: PoolCore, waiter: Waiter) -> Micros:
    """Predicted wait of a call at that place in line, whether it stands there or may yet."""
    line, lane, ask, limit = core.line, waiter.lane, waiter.ask, core.spec.concurrency
    known = ask.rid in line.waiting
    span = eta(core, lane)
    if known or span > ask.deadline_in:
        # The lane's whole backlog would let a hog's thousand calls shed everybody else's first.
        span = _stretched(core, line.ahead_of(lane, waiter.tag, waiter.seq))
    if limit and core.hold and len(core.leases.held) >= limit:
        before = sum(line.count[: lane + 1]) - known
        span = max(span, core.hold * before // limit)
    return span


def eta(core: PoolCore, lane: int) -> Micros:
    """Predicted wait of a small call that arrives in that lane now."""
    return _stretched(core, core.line.ahead(lane))


def _stretched(core: PoolCore, ahead: Micros) -> Micros:
    """Work ahead takes longer while the factor is cut."""
    factor = core.meter.factor
    return ahead if factor == FULL else floor(ahead / (factor / 1e6))
