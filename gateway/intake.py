"""From the bytes of a request to what policy needs of it, within every bound.

The bytes as sent stay in the call; what is decoded here is a copy. Bounds: one body, its unpacked
form, the time it may take to arrive, and all bodies of the process together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from gateway import bodies
from gateway.call import Dialect
from gateway.errors import MalformedCall, QueueFull
from gateway.units import MICRO, Micros
from gateway.wire import mcp
from gateway.wire.codec import CODECS
from gateway.wire.splice import MODEL_KEYS, duplicate_keys

if TYPE_CHECKING:
    from gateway.clock import Clock
    from gateway.flight import Flight

Offload: TypeAlias = Callable[[Callable[[], None]], Awaitable[None]]

# To ask an enumeration for a member costs ten times what a name does.
_MCP = Dialect.MCP

BODY_IDLE: Micros = 30 * MICRO
"""A client that sends nothing of its body for so long is refused (slow loris)."""

BODY_TOTAL: Micros = 600 * MICRO
"""Time in which a whole body must arrive: 40 MiB at half a megabit per second."""

MAX_HELD = 1024 * 1024 * 1024
"""Bytes of all request bodies held at once; beyond it calls are told to come back."""

SOFT: Micros = MICRO
"""Wait advised when the process itself is full."""


class Intake:
    """Reads bodies; knows how many bytes of them the process holds."""

    __slots__ = ("_clock", "_offload", "held")

    def __init__(self, clock: Clock, offload: Offload) -> None:
        self._clock = clock
        self._offload = offload
        self.held = 0

    def stream(self, flight: Flight) -> None:
        """The body will be passed on as it arrives, counted."""
        limit = flight.call.snapshot.edge.max_body
        if flight.head.length is not None and flight.head.length > limit:
            raise bodies.too_large(limit)
        if flight.head.has_body:
            flight.upload = bodies.Upload(limit, asyncio.Event)
            flight.call.upload = aiter(flight.upload)
            flight.call.upload_length = flight.head.length

    def take(self, flight: Flight) -> Awaitable[None] | None:
        """The body is read, and policy's view of it is in the call; or what is left of that.

        The usual body is all here when its call begins: no deadline needs to be armed for it.
        """
        call, head = flight.call, flight.head
        limit = call.snapshot.edge.max_body
        if head.length is not None and head.length > limit:
            raise bodies.too_large(limit)
        link = flight.outlet.link
        body = link.take() if link is not None else None
        if body is None:
            self._hold(flight, head.length or 0)
            return self._arriving(flight, limit)
        if len(body) > limit:
            raise bodies.too_large(limit)
        self._hold(flight, len(body))
        call.body = body
        flight.unread = False
        if call.coding:
            return self._coded(flight, limit)
        self._read(flight, body)
        return None

    async def _arriving(self, flight: Flight, limit: int) -> None:
        reading = bodies.Reading(flight.receive, self._clock, idle=BODY_IDLE, total=BODY_TOTAL)
        body = await reading.read(limit)
        flight.call.body = body
        flight.unread = False
        self._hold(flight, len(body))
        if flight.call.coding:
            await self._coded(flight, limit)
        else:
            self._read(flight, body)

    async def _coded(self, flight: Flight, limit: int) -> None:
        call = flight.call
        self._read(flight, await self._unpacked(call.body, call.coding, limit))

    def _read(self, flight: Flight, body: bytes) -> None:
        """What policy needs of the plain body is in the call."""
        call = flight.call
        if call.dialect is _MCP:
            self._messages(flight, body)
            return
        parsed = bodies.decode(body)
        twice = duplicate_keys(body, MODEL_KEYS)
        if twice is not None:
            raise MalformedCall(
                f"The key {twice!r} stands twice; gateway and provider might read different ones.",
                param=twice,
            )
        call.fields = CODECS[call.dialect].fields(parsed)
        call.parsed = parsed
        flight.outlet.model = call.fields.model

    def _messages(self, flight: Flight, body: bytes) -> None:
        """The JSON-RPC messages are in the call; what is wrong with them is said under their id."""
        call = flight.call
        try:
            parsed = bodies.decode_any(body)
        except MalformedCall as error:
            raise mcp.fault(mcp.PARSE_ERROR, error.message) from error
        ident = mcp.id_of(parsed, body)
        if ident:
            flight.outlet.rpc_id = ident
        call.rpc = mcp.read(parsed, body, call.headers)
        call.body = body  # an upstream that speaks JSON-RPC is sent messages, never a coding

    def _hold(self, flight: Flight, size: int) -> None:
        """The bytes count as held by this call."""
        self.held += size - flight.held
        flight.held = size
        if self.held > MAX_HELD:
            raise QueueFull(
                "The gateway holds as many bytes of requests as it may", retry_after=SOFT
            )

    async def _unpacked(self, body: bytes, coding: str, limit: int) -> bytes:
        unpacking = bodies.Unpacking(body, coding, limit=limit)
        if not unpacking.run(bodies.INLINE):
            await self._offload(unpacking.run_to_end)
        return unpacking.result()

    def give_back(self, flight: Flight) -> None:
        """The call's bytes are held no more."""
        self.held -= flight.held
        flight.held = 0
