"""Schemas, approvals, effect ledger: what is certain about a tool call before anything is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.call import Call, Reply, Service


def gate(inner: Service) -> Service:
    """The layer; it lets every call pass."""

    async def serve(call: Call) -> Reply:
        return await inner(call)

    return serve
