"""The Python core and the script decide the same, on every server this machine has."""

from __future__ import annotations

import contextlib

import pytest

from tests.integration.fleet.servers import binaries, running
from tests.integration.fleet.twin import compare_histories

pytestmark = pytest.mark.integration

STEPS = 20_000
HALVES = 2
"""Two tests, so that two workers share them."""


def test_this_machine_has_a_server_to_compare_with():
    assert "valkey" in binaries(), "the development environment brings one"


@pytest.mark.parametrize("half", range(HALVES))
def test_random_histories_are_equal_in_every_bit(half):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(name)) for name in binaries()]
        clients = [stack.enter_context(server.client()) for server in servers]
        done = compare_histories(clients, seed=half * 1_000_000, steps=STEPS // HALVES)
    assert done == STEPS // HALVES
