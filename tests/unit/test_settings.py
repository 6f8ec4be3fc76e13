"""What a process is told by its environment."""

from __future__ import annotations

import asyncio

import pytest

from gateway.clock import LoopClock
from gateway.machine import transport_of
from gateway.settings import TRANSPORTS, from_environment


def test_our_own_client_carries_requests_unless_another_is_named():
    assert from_environment({}).transport == "http1"
    assert from_environment({"TIDEGATE_TRANSPORT": "aiohttp"}).transport == "aiohttp"


def test_an_unknown_transport_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(ValueError, match="TIDEGATE_TRANSPORT='httpx': one of http1, aiohttp"):
        from_environment({"TIDEGATE_TRANSPORT": "httpx"})


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_name_of_a_transport_makes_one(name):
    async def main():
        transport = transport_of(name, LoopClock())
        assert transport.in_flight() == {}
        await transport.close()

    asyncio.run(main())
