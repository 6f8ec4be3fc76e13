"""How generated examples are drawn: the same ones in every run, however slow the machine is.

What decides over a change must say the same of the same tree. `make explore` draws others.

Files that take long begin first: the one that ends last is what everybody waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import pytest

SLOW_IS_NO_FAULT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("same", derandomize=True, **SLOW_IS_NO_FAULT)
settings.register_profile("explore", print_blob=True, **SLOW_IS_NO_FAULT)
settings.load_profile("same")

LONG = (
    "test_holds", "test_twin", "test_process", "test_cases_plain", "test_runtime_moves",
    "test_cases_policies", "test_workers", "test_tool_gate", "test_partition", "test_client_tools",
    "test_mcp_clients", "test_simulate_parity", "test_conformance", "test_locust",
    "test_transport_faults", "test_edge_raw", "test_store", "test_runtime_worker",
)  # fmt: skip
"""Files of `make integration` of more than twenty seconds, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order within each is its own."""
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
