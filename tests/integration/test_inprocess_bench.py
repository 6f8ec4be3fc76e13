"""The bench without sockets serves what it counts: its fakes follow their protocols."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtests import inprocess


@pytest.mark.parametrize("kind", inprocess.KINDS)
def test_the_bench_without_sockets_serves_every_kind_of_call(kind: str, tmp_path: Path) -> None:
    bench = asyncio.run(inprocess.serving(tmp_path, inprocess.requests(kind, seed=1), 3))
    assert bench.client.written == 3
