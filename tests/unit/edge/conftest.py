"""Every test of the edge runs on two servers: ours, and one that knows no more than ASGI."""

from __future__ import annotations

import pytest

from tests.fixtures.asgi import Stage


@pytest.fixture(autouse=True, params=["ours", "plain"])
def server(request, monkeypatch):
    monkeypatch.setattr(Stage, "link", request.param == "ours")
    return request.param
