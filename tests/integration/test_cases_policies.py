"""The fault cases that need a policy of their own, each against gateways that run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cases import under_pytest

if TYPE_CHECKING:
    from tests.cases.form import Variant
    from tests.cases.player import Outcome

pytestmark = pytest.mark.integration

SPECIAL = under_pytest.parameters(lambda variant: variant.policy != "plain")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Everything that was collected here; three set-ups at a time, since most of it is waiting."""
    return under_pytest.play(under_pytest.collected(request.session, __name__), jobs=6, beside=3)


@pytest.mark.parametrize("variant", SPECIAL)
def test_gateway_with_the_policy_stands_the_fault(
    variant: Variant, outcomes: dict[str, Outcome]
) -> None:
    under_pytest.check(outcomes, variant)
