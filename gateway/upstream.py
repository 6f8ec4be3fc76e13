"""The Transport protocol; one aiohttp pool per upstream (`performance.md` §1 and §8)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from gateway.call import HeaderList
    from gateway.units import Micros

Sent: TypeAlias = Literal["nothing", "unknown", "all"]
"""How much of a failed request may have reached the upstream; only "nothing" may be repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A request to an upstream.

    Attributes:
        method: As sent.
        base_url: Scheme, host, port and prefix of the provider.
        target: Raw path and query, beginning with "/".
        headers: Byte pairs, order and repeats kept, hop-by-hop removed, Host and framing absent.
        body: Whole body, or None while `upload` streams it.
        connect: Deadline for a connection.
    """

    method: str
    base_url: str
    target: bytes
    headers: HeaderList
    body: bytes = b""
    upload: AsyncIterator[bytes] | None = None
    connect: Micros = 5_000_000


class Incoming(Protocol):
    """A response whose head has arrived and whose body is unread."""

    status: int
    headers: HeaderList

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes exactly as they arrive (content coding untouched). Raises TransportFault."""
        ...

    def abort(self, kind: str) -> None:
        """The connection is closed now; a pending or later read raises TransportFault(kind)."""
        ...

    async def close(self, *, reuse: bool) -> None:
        """The connection is back in its pool (body fully read and `reuse`) or closed. Callable twice."""
        ...


class TransportFault(Exception):
    """The exchange broke.

    Attributes:
        kind: connect, connect_timeout, tls, resolve, reset, cut, malformed, pool_timeout.
        sent: How much may have reached the upstream.
    """

    def __init__(self, kind: str, *, sent: Sent, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.sent: Sent = sent
        self.detail = detail


class Transport(Protocol):
    """How bytes reach a provider."""

    async def send(self, out: Outgoing) -> Incoming:
        """True after: the head has arrived, the body is unread. Raises TransportFault."""
        ...

    async def close(self) -> None:
        """All connections are closed."""
        ...
