"""The short way of a pool of requests and tokens is the long way."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.core import Outcome
from gateway.admission.profiles import (
    Accounting,
    Estimate,
    Profile,
    Usage,
    pool_spec,
    reserve,
    settle,
)

PLAIN = pool_spec(name="p", limits={"rpm": 60, "tpm": 90_000}, because="pools.p")
LONG = replace(PLAIN, plain=False)
UNITS = st.integers(0, 200_000)
SOME = st.none() | UNITS
ACCOUNTINGS = st.builds(
    Accounting,
    profile=st.sampled_from(Profile), cached_input_counts=st.booleans(),
    output_weight=st.integers(1, 5), refused_counts=st.booleans(), missing_cap=SOME,
)  # fmt: skip
ESTIMATES = st.builds(Estimate, input=UNITS, output=UNITS, cap=SOME, cached=UNITS, high=SOME)
USAGES = st.none() | st.builds(Usage, input=SOME, output=SOME, cache_read=SOME, cache_write=SOME)


@given(accounting=ACCOUNTINGS, estimate=ESTIMATES)
def test_reserving(accounting, estimate):
    assert reserve(accounting, estimate, PLAIN) == reserve(accounting, estimate, LONG)


@given(
    accounting=ACCOUNTINGS, estimate=ESTIMATES, usage=USAGES, outcome=st.sampled_from(Outcome)
)  # fmt: skip
def test_settling(accounting, estimate, usage, outcome):
    reserved = reserve(accounting, estimate, LONG)
    short, long = (settle(accounting, usage, reserved, spec, outcome) for spec in (PLAIN, LONG))
    assert short == long


def test_only_requests_then_tokens_are_plain():
    limits = {"rpm": 60, "tpm": 90_000}
    assert PLAIN.plain
    for other in ({"rpm": 60}, {"tpm": 9}, {"rpm": 60, "itpm": 9}, {**limits, "requests_day": 9}):
        assert not pool_spec(name="p", limits=other, because="p").plain
