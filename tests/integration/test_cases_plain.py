"""The fault cases that need no special policy, against `tidegate serve` with the plain set-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cases import under_pytest

if TYPE_CHECKING:
    from tests.cases.form import Variant
    from tests.cases.player import Outcome

pytestmark = pytest.mark.integration

PLAIN = under_pytest.parameters(lambda variant: variant.policy == "plain")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Everything that was collected here, played on gateways started for it.

    Six of them, because what looks at the shared books is played alone on its gateway and waits
    for seconds until their page is a new one.
    """
    return under_pytest.play(under_pytest.collected(request.session, __name__), lanes=6, jobs=12)


@pytest.mark.parametrize("variant", PLAIN)
def test_plain_gateway_stands_the_fault(variant: Variant, outcomes: dict[str, Outcome]) -> None:
    under_pytest.check(outcomes, variant)
