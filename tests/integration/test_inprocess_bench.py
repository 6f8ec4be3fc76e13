"""The bench without sockets serves what it counts: its fakes follow their protocols."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtests import inprocess


@pytest.mark.parametrize("kind", inprocess.KINDS)
def test_the_bench_without_sockets_serves_every_kind_of_call(kind: str, tmp_path: Path) -> None:
    async def served() -> bytes:
        make, bench = inprocess.requests(kind, seed=1), inprocess.Bench(tmp_path)
        await bench.machine.preload()
        for number in range(3):
            await bench.exchange(make(number))
        assert bench.client.written == 3
        return bench.client.last

    assert asyncio.run(served()).startswith(b"HTTP/1.1 200")
