"""The client's end of one exchange: heads, bodies, keep-alive bytes, refusals, and broken ends.

An `Outlet` knows how much the client has seen. From that follows what may still be said: a real
status before the head, an event of the dialect after it, and nothing after the last byte. A body that
did not end well never ends cleanly: its framing stays unfinished and the connection is dropped, so
that no client takes half an answer for a whole one (`protocols.md` §2.4; Portkey#1797).

Bytes pass chunk by chunk; taps see each before it is sent. Awaiting `send` is the back pressure.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

from gateway import framing
from gateway.bodies import MAX_WINDOW, PIECE
from gateway.call import Call, End, Reply
from gateway.errors import (
    GatewayError,
    StreamCut,
    UpstreamFault,
    UpstreamMalformed,
    UpstreamTimeout,
)
from gateway.units import MICRO, Micros
from gateway.upstream import TransportFault

if TYPE_CHECKING:
    from gateway.call import HeaderList
    from gateway.clock import Clock, Timer

Scope: TypeAlias = "MutableMapping[str, Any]"
Message: TypeAlias = "MutableMapping[str, Any]"
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

CLIENT_STALL: Micros = 60 * MICRO
"""A client that takes no byte for so long is gone; below every upstream's idle deadline."""

MAX_ERROR_TEXT = 64 * 1024
"""Bytes read of an upstream's refusal that must be said in-band."""

MAX_HELD = 1024 * 1024
"""Bytes held back while looking for the end of a first event to swallow."""

ABORT = "tidegate.abort"
"""ASGI extension of `connection.py`: ends the connection with the framing unfinished."""

_BOUNDARY = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_CREATED = re.compile(
    rb"^event:[ ]?response\.created[\r\n]|\"type\":\s*\"response\.created\"", re.M
)
