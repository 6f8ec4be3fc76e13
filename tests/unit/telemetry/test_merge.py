"""Metrics of several processes on one page."""

from __future__ import annotations

from gateway.telemetry.merge import merged

PAGE = b"""# HELP calls_total Calls
# TYPE calls_total counter
calls_total{model="m"} 2.0
# HELP up Up
# TYPE up gauge
up 1.0
"""


def test_each_sample_names_its_worker_and_each_family_stands_once():
    page = merged({"0": PAGE, "1": PAGE}).decode().splitlines()
    assert page == [
        "# HELP calls_total Calls",
        "# TYPE calls_total counter",
        'calls_total{worker="0",model="m"} 2.0',
        'calls_total{worker="1",model="m"} 2.0',
        "# HELP up Up",
        "# TYPE up gauge",
        'up{worker="0"} 1.0',
        'up{worker="1"} 1.0',
    ]


def test_a_page_that_was_cut_takes_no_other_with_it():
    page = merged({"0": b"# HELP calls_total Ca", "1": PAGE}).decode()
    assert 'calls_total{worker="1",model="m"} 2.0' in page


def test_the_sum_of_no_pages_is_an_empty_page():
    assert merged({}) == b""
