"""The mirror of a provider's meter, and its sliding log, by themselves."""

from __future__ import annotations

import pytest

from gateway.admission.meter import Meter
from gateway.admission.profiles import Shape, pool_spec
from gateway.admission.slots import SlotLog
from gateway.units import MICRO, MINUTE

U = MICRO
SECOND = MICRO
NOW = 1_800_000_000 * SECOND


def meter_of(limits, **options):
    return Meter(pool_spec(name="p", limits=limits, because="p", **options), NOW)


def test_a_bucket_looked_at_every_hundred_micros_drains_as_fast_as_one_left_alone():
    often = meter_of({"rpm": 10}, shape=Shape.BUCKET)
    seldom = meter_of({"rpm": 10}, shape=Shape.BUCKET)
    for meter in (often, seldom):
        meter.charge((9 * U,))
    for step in range(1, 10_001):
        often.advance(NOW + step * 100)
    seldom.advance(NOW + SECOND)
    assert often.level[0] == pytest.approx(seldom.level[0], abs=1)
    assert seldom.level[0] < 9 * U


def test_a_refund_of_one_window_leaves_the_other_windows_log_right():
    meter = meter_of({"rps": 10, "tpm": 1_000}, shape=Shape.OWN)
    meter.charge((U, 600 * U))
    meter.advance(NOW + 500_000)
    meter.charge((U, 300 * U))
    meter.correct((U, 600 * U), (0, 100 * U), NOW)
    assert meter.read() == (U, 400 * U)
    meter.advance(NOW + 2 * SECOND)
    assert meter.read() == (0, 400 * U)
    meter.advance(NOW + MINUTE + 300_000)
    assert meter.read() == (0, 300 * U)
    meter.advance(NOW + MINUTE + SECOND)
    assert meter.read() == (0, 0)
    assert meter.blank


def test_a_charge_that_is_lost_is_refunded_in_calendars_only():
    meter = meter_of({"tpm": 1_000, "tokens_day": 5_000}, shape=Shape.OWN)
    meter.charge((500 * U, 500 * U))
    meter.correct((500 * U, 500 * U), (100 * U, 100 * U), NOW, lost=True)
    assert meter.read() == (500 * U, 100 * U)
    assert meter.level == [500 * U, 100 * U]


def test_a_meter_without_logs_reads_its_levels():
    meter = meter_of({"tpm": 1_000}, shape=Shape.BUCKET)
    meter.charge((70 * U,))
    assert meter.read() == (70 * U,)
    assert meter.resets_in(0) == pytest.approx(70 * 60_000 / 0.995, abs=2)


def test_a_pool_without_dimensions_always_fits():
    meter = meter_of({})
    meter.charge(())
    assert meter.fit(1, ()) == 0
    assert meter.span(()) == 100  # weights of 1 to 100 divide it
    assert meter.dominant(()) == -1


def test_a_span_is_never_floored_to_nothing():
    meter = meter_of({"tpm": 9_000_000_000})
    assert meter.span((1,)) == 1


def test_zero_cost_in_a_full_dimension_fits():
    meter = meter_of({"rpm": 10, "tpm": 1_000}, shape=Shape.OWN)
    meter.charge((U, 1_000 * U))
    assert meter.fit(1, (U, 0)) == 0
    assert meter.take(1, (U, U)) == 0
    assert meter.fit(1, (U, U)) > 0
    assert meter.take(1, (U, 0)) > 0


def test_foreign_use_of_the_whole_limit_looks_again_each_second():
    meter = meter_of({"tpm": 1_000}, shape=Shape.BUCKET)
    meter.charge((1_000 * U,))
    meter.signal((1_000 * U,))
    assert meter.fit(1, (U,)) == SECOND
    assert meter.growing


def test_the_walk_over_the_log_finds_the_moment_when_enough_has_left():
    log, sums = SlotLog(window=MINUTE, spread=0, dims=(0,), size=1, now=NOW), [0]
    for second in range(10):
        log.charge(NOW + second * SECOND, (10,), sums)
    now = NOW + 10 * SECOND
    for over, second in ((1, 0), (10, 0), (11, 1), (100, 9), (10**9, 9)):
        leaves = log.until(now, 0, over)
        assert leaves == MINUTE + 100_000 + second * SECOND - 10 * SECOND
    log.forget(now + log.until(now, 0, 25) - 1, sums)
    assert sums == [80]
    log.forget(now + log.until(now, 0, 5), sums)
    assert sums == [70]


def test_a_long_idle_log_is_cleared_without_counting_through_the_gap():
    log, sums = SlotLog(window=MINUTE, spread=0, dims=(0,), size=1, now=NOW), [0]
    log.charge(NOW, (10,), sums)
    log.forget(NOW + 10**15, sums)
    assert (sums, log.slots) == ([0], {})


def test_a_cold_fill_stands_evenly_over_the_window_and_replaces_what_was_there():
    log, sums = SlotLog(window=MINUTE, spread=0, dims=(0,), size=1, now=NOW), [0]
    log.charge(NOW, (10,), sums)
    log.fill(NOW, 0, 60_007, sums)
    assert sums == [60_007]
    assert sum(cell[0] for cell in log.slots.values()) == 60_007
    log.forget(NOW + 30 * SECOND, sums)
    assert sums[0] == pytest.approx(30_000, rel=0.01)
