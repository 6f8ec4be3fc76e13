"""Foreign use read from response headers; the slope of sudden growth."""

from __future__ import annotations

from dataclasses import replace

from gateway.admission.drift import Reading, foreign_use
from gateway.admission.profiles import pool_spec
from gateway.admission.ramp import Ramp, RampRules
from gateway.units import MICRO, MINUTE

U = MICRO
RULES = RampRules(most=10**9)
SPEC = pool_spec(name="p", limits={"rpm": 100, "tpm": 100_000, "tpd": 10**6}, because="p")


def tokens(remaining, limit=100_000, **changes):
    return Reading(name="tokens", limit=limit, remaining=remaining, **changes)


def test_what_others_used_is_signalled_with_half_a_percent_on_top():
    meter = (5 * U, 30_000 * U, 0)
    signal = foreign_use(SPEC, meter, [tokens(50_000)])
    assert signal == (0, 20_500 * U, 0)


def test_jitter_up_to_one_percent_is_no_drift():
    meter = (5 * U, 30_000 * U, 0)
    assert foreign_use(SPEC, meter, [tokens(69_000)]) is None
    assert foreign_use(SPEC, meter, [tokens(68_900)]) is not None


def test_half_of_the_outputs_still_streaming_is_taken_off_our_meter():
    meter = (5 * U, 40_000 * U, 0)
    assert foreign_use(SPEC, meter, [tokens(60_000)]) is None
    assert foreign_use(SPEC, meter, [tokens(60_000)], streaming=20_000)[1] == 10_500 * U
    assert foreign_use(SPEC, meter, [tokens(99_000)], streaming=10**9) is None


def test_a_stated_limit_below_ours_is_foreign_use_too():
    assert foreign_use(SPEC, (0, 0, 0), [tokens(80_000, limit=80_000)]) == (0, 20_500 * U, 0)
    assert foreign_use(SPEC, (0, 0, 0), [tokens(200_000, limit=200_000)]) is None


def test_headers_of_other_windows_days_or_shapes_are_not_compared():
    meter = (0, 0, 0)
    assert foreign_use(SPEC, meter, [tokens(0, window=86_400 * U)]) is None
    assert foreign_use(SPEC, meter, [Reading(name="output", limit=5, remaining=0)]) is None
    assert foreign_use(SPEC, meter, [tokens(0, limit=0)]) is None
    assert foreign_use(SPEC, (0,), [tokens(0)]) is None
    assert foreign_use(SPEC, meter, []) is None


def test_absurd_readings_are_bounded():
    assert foreign_use(SPEC, (0, 0, 0), [tokens(-(10**12))]) == (0, 100_000 * U, 0)
    assert foreign_use(SPEC, (0, 0, 0), [tokens(10**12)]) is None


def test_growth_is_limited_to_half_again_of_the_last_quarter_hour():
    ramp = Ramp.at(0)
    assert ramp.limit(RULES) == 1_500_000
    assert ramp.limit(replace(RULES, most=400_000)) == 400_000
    for minute in range(15):
        ramp = ramp.used(minute * MINUTE, 2_000_000)
    assert ramp.advance(15 * MINUTE).limit(RULES) == 3_000_000


def test_the_present_minute_does_not_raise_its_own_limit():
    assert Ramp.at(0).used(1, 10**9).limit(RULES) == 1_500_000


def test_a_refusal_halves_the_slope_and_fifteen_clean_minutes_restore_it():
    ramp = Ramp.at(0).refused(1).refused(2)
    assert ramp.limit(RULES) == 1_125_000
    assert 1_125_000 < ramp.advance(5 * MINUTE).limit(RULES) < 1_500_000
    assert ramp.advance(15 * MINUTE).limit(RULES) == 1_500_000


def test_a_long_silence_forgets_all_and_time_never_runs_back():
    ramp = Ramp.at(0).used(0, 10**9).advance(1_000 * MINUTE)
    assert ramp.inputs == (0,) * 16
    assert ramp.advance(0) is ramp


def test_floor_and_growth_are_the_rules_own():
    rules = RampRules(most=10**9, floor=10_000, growth_ppm=200_000)
    ramp = Ramp.at(0)
    assert ramp.limit(rules) == 12_000
    assert ramp.refused(1).limit(rules) == 11_000
