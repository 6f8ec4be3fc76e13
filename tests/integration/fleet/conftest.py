"""One server of each kind for the tests of a module; each test has keys of its own."""

from __future__ import annotations

import itertools

import pytest

from tests.integration.fleet.servers import binaries, running

_prefixes = itertools.count()


@pytest.fixture(scope="module")
def valkey():
    with running("valkey") as server:
        yield server


@pytest.fixture(scope="module", params=["valkey", "redis"])
def server(request):
    if request.param not in binaries():
        pytest.skip("no redis-server on this machine; deploy/servers.py says why")
    with running(request.param) as started:
        yield started


@pytest.fixture
def prefix():
    return f"t{next(_prefixes)}:"
