"""What the compiled policy says of a caller's own pools."""

from __future__ import annotations

import pytest

from gateway.admission.profiles import Accounting, Profile
from gateway.snapshot import AgentRule

CAP = Accounting(profile=Profile.RESERVE_SETTLE, cached_input_counts=False)
RULE = AgentRule(id="a", tenant="t", accounting=CAP, tenant_accounting=Accounting())


@pytest.mark.parametrize("kind", ["tokens", "money"])
@pytest.mark.parametrize("per", ["day", "month"])
def test_a_budget_reserves_what_a_call_is_expected_to_use_never_its_cap(kind, per):
    accounting = RULE.accounting_for(f"agent:a:{kind}:{per}")
    assert accounting.profile is Profile.REALTIME
    assert not accounting.cached_input_counts, "the rest is as for the limits"


def test_limits_are_charged_as_policy_says():
    assert RULE.accounting_for("agent:a") is CAP
    assert RULE.accounting_for("tenant:t") is RULE.tenant_accounting
