"""Gateway and MCP servers as an operator runs them: real processes, real clients."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.integration.gateway import Gateway, Process, environment, policy, scratch

KEY = "tg-tester-0123456789"
SILENT = 9
"""A port where no provider answers: tools need none."""


class Fixture(Process):
    """`tests/fixtures/mcp_server.py` over HTTP."""

    port = 0

    async def serve(self) -> Fixture:
        arguments = [sys.executable, "-m", "tests.fixtures.mcp_server", "--port", "0"]
        line = await self.start(arguments, environment(), "mcp ready ")
        self.port = int(line.rpartition(" ")[2])
        return self


@dataclass
class ToolWorld:
    """Gateway and fixture server.

    Attributes:
        gateway, fixture: The processes.
    """

    folder: Path
    gateway: Gateway
    fixture: Fixture

    def url(self, mount: str = "/fixture") -> str:
        """Where a client is pointed."""
        return f"http://127.0.0.1:{self.gateway.port}/mcp{mount}"


def piped(*arguments: str, **more: Any) -> dict[str, Any]:
    """A server that this interpreter runs over pipes."""
    return {"command": [sys.executable, *arguments], **more}


@contextlib.asynccontextmanager
async def tool_world(
    servers: Mapping[str, Any] | None = None, **sections: Any
) -> AsyncIterator[ToolWorld]:
    """Everything runs for the time of the block; `fixture` is always among the servers."""
    with scratch() as folder:
        fixture = await Fixture(folder, "fixture").serve()
        gateway = Gateway(folder)
        named = {"fixture": {"url": f"http://127.0.0.1:{fixture.port}/mcp"}, **(servers or {})}
        try:
            await gateway.serve(policy(servers=named, **sections), upstream=SILENT)
            yield ToolWorld(folder, gateway, fixture)
            await gateway.stop()
        finally:
            await gateway.kill()
            await fixture.kill()


@contextlib.asynccontextmanager
async def client(url: str, *, key: str = KEY, **more: Any) -> AsyncIterator[Client]:
    """The official client at that mount."""
    headers = {"authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http), **more) as made,
    ):
        yield made


def words(result: Any) -> str:
    """The text of a tool's result."""
    return "".join(part.text for part in result.content if part.type == "text")
