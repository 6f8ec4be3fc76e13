"""Dashboards and alerts name our metrics: a rename is a change for users, never an accident.

Adding a line here is cheap; removing or changing one needs an entry in CHANGELOG.md.
"""

from __future__ import annotations

import pytest

from gateway.telemetry.metrics import Metrics

PINNED = {
    "tidegate_admission_blocked_seconds": ("gauge", ("pool",)),
    "tidegate_admission_factor": ("gauge", ("pool",)),
    "tidegate_admission_foreign_ratio": ("gauge", ("pool", "dimension")),
    "tidegate_admission_in_flight": ("gauge", ("pool",)),
    "tidegate_admission_mode": ("gauge", ("mode",)),
    "tidegate_admission_shed_total": ("counter", ("pool",)),
    "tidegate_admission_use_ratio": ("gauge", ("pool", "dimension")),
    "tidegate_admission_wait_seconds": ("histogram", ("pool", "tier")),
    "tidegate_breaker_changes_total": ("counter", ("state",)),
    "tidegate_breaker_failures_total": ("counter", ("scope",)),
    "tidegate_breaker_open": ("gauge", ("scope",)),
    "tidegate_build_info": ("gauge", ("version",)),
    "tidegate_calls_total": ("counter", ("dialect", "model", "status", "outcome")),
    "tidegate_cost_microusd_total": ("counter", ("model",)),
    "tidegate_downgrades_total": ("counter", ("reason",)),
    "tidegate_first_byte_seconds": ("histogram", ("provider",)),
    "tidegate_holds_total": ("counter", ("event",)),
    "tidegate_holds_waiting": ("gauge", ("tier",)),
    "tidegate_in_flight": ("gauge", ()),
    "tidegate_input_estimated_total": ("counter", ("reason",)),
    "tidegate_keepalives_total": ("counter", ("dialect",)),
    "tidegate_log_dropped_total": ("counter", ()),
    "tidegate_loops_total": ("counter", ("rule", "stage")),
    "tidegate_malformed_events_total": ("counter", ("dialect",)),
    "tidegate_overhead_seconds": ("histogram", ()),
    "tidegate_policy_reload_errors_total": ("counter", ()),
    "tidegate_policy_revision": ("gauge", ()),
    "tidegate_provider_refusals_total": ("counter", ("kind",)),
    "tidegate_refusals_total": ("counter", ("reason",)),
    "tidegate_retries_total": ("counter", ("reason",)),
    "tidegate_settlement_failures_total": ("counter", ()),
    "tidegate_shadowed_total": ("counter", ("verdict",)),
    "tidegate_timers_armed": ("gauge", ()),
    "tidegate_tool_gate_total": ("counter", ("what", "verdict")),
    "tidegate_tokenizer_exact": ("gauge", ("encoding",)),
    "tidegate_tool_seconds": ("histogram", ("server", "outcome")),
    "tidegate_tool_sessions": ("gauge", ("kind",)),
    "tidegate_tokens_reserved_total": ("counter", ("model",)),
    "tidegate_tokens_used_total": ("counter", ("model", "kind")),
    "tidegate_transport_faults_total": ("counter", ("provider", "kind")),
    "tidegate_upstream_answers_total": ("counter", ("provider", "status")),
    "tidegate_upstream_connections": ("gauge", ()),
    "tidegate_usage_estimated_total": ("counter", ("model",)),
    "tidegate_waiting": ("gauge", ("pool", "tier")),
    "tidegate_webhooks_total": ("counter", ("outcome",)),
}


def test_names_kinds_and_labels_are_as_pinned():
    assert Metrics().catalogue == PINNED


def test_the_page_declares_exactly_the_catalogue():
    declared = [
        line.split()[2:4]
        for line in Metrics().render().decode().splitlines()
        if line.startswith("# TYPE")
    ]
    assert dict(declared) == {name: kind for name, (kind, _) in PINNED.items()}


@pytest.mark.parametrize("forbidden", ["agent", "key", "session", "call", "principal", "tenant"])
def test_nobody_is_a_label(forbidden):
    assert not [name for name, (_, labels) in PINNED.items() if forbidden in labels]


def test_every_name_is_ours():
    assert all(name.startswith("tidegate_") for name in PINNED)
