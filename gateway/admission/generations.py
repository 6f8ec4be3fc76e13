"""Other rules for a pool that is at work: what survives a reload. Pure.

Limits, caps, weights and concurrency change in place. Another list of dimensions is a new
generation, and no call pays for the edit:

- a dimension that meters the same (unit, window, calendar) keeps its level and its log;
- a new calendar counts from now: an edited budget never charges what was spent before it;
- a new rolling meter starts full where calls can wait for it (the provider may have charged what we
  did not count), and empty where they would be refused;
- waiters keep their place and grants their lease, costs translated by unit;
- a waiter that can never fit any more hears so with the next tick, which also grants what fits now.

A budget that is raised frees its holder at once, because its level stays and its limit grows; one
that is lowered below what the present period has spent blocks until the next period, as asked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.admission.meter import Meter
from gateway.admission.values import meter_of, never_fits, same_meters, translate
from gateway.units import Mode

if TYPE_CHECKING:
    from gateway.admission.core import PoolCore
    from gateway.admission.values import PoolSpec


def change_rules(core: PoolCore, spec: PoolSpec) -> None:
    """The pool, already at the present instant, follows `spec`."""
    old, core.spec = core.spec, spec
    if same_meters(old.dimensions, spec.dimensions):
        core.meter.respec(spec)
    else:
        _regenerate(core, old, spec)
    if old.spread != spec.spread:
        core.meter.respread(spec.spread)
    if spec.mode is Mode.ENFORCE:
        _weed(core)


def _weed(core: PoolCore) -> None:
    """Waiters that can never fit under the new rules leave, and are told so."""
    for waiter in sorted(core.line.waiting.values(), key=lambda held: (held.lane, *held[:2])):
        never = core.meter.never(waiter.lane, waiter.ask.cost)
        if never is not None:
            core.line.give_back(waiter)
            core.seats.post(waiter.gateway, never_fits(core.spec, waiter.ask, *never))


def _regenerate(core: PoolCore, old: PoolSpec, spec: PoolSpec) -> None:
    """What can be carried over into another list of dimensions is."""
    before, after = old.dimensions, spec.dimensions
    there = {meter_of(dim): j for j, dim in enumerate(before)}
    known = {i: there[meter_of(dim)] for i, dim in enumerate(after) if meter_of(dim) in there}
    meter = Meter(spec, core.now)
    meter.carry(core.meter, list(known.items()))
    if spec.queue:
        meter.fill([i for i, dim in enumerate(after) if i not in known and not dim.calendar])
    core.meter = meter
    for rid, waiter in core.line.waiting.items():
        ask = replace(waiter.ask, cost=translate(waiter.ask.cost, before, after))
        core.line.waiting[rid] = waiter._replace(ask=ask)
    core.leases.translate(before, after)
