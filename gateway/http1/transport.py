"""The default `Transport`: a pool per upstream over our own channels.

Nothing is added to a request and nothing is done on an answer's behalf: no cookies, redirects,
proxies from the environment, decompression or repeats. One exception: a request of which no byte
left, because a kept connection had ended unseen, goes out once more on a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.http1.dial import Trust, origin_of
from gateway.http1.exchange import Exchange
from gateway.http1.pool import Pool
from gateway.upstream import (
    IDLE,
    READ,
    TransportFault,
    kernel_probe,
    request_head,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Collection

    from gateway.clock import Clock
    from gateway.units import Micros
    from gateway.upstream import Incoming, Outgoing, Probe


class Http1Transport:
    """One pool per upstream, HTTP/1.1 only; the number in flight is admission's say."""

    def __init__(
        self,
        clock: Clock,
        *,
        idle: Micros = IDLE,
        tls: ssl.SSLContext | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Nothing is opened until the first `send`, which must run in the loop of all others.

        Args:
            clock: For the deadline of a connection and the age of idle ones.
            idle: How long a connection may rest in the pool.
            tls: Own trust roots or client certificates; None means the system's roots.
            probe: Whether the kernel knows that a connection has ended; None asks the kernel.
        """
        self._clock = clock
        self._idle = idle
        self._trust = Trust(tls)
        self._probe = probe or kernel_probe()
        self._buffer = memoryview(bytearray(READ))
        self._pools: dict[str, Pool] = {}
        self._closed = False

    async def send(self, out: Outgoing) -> Incoming:
        """As `Transport`; a dead pooled connection is replaced, what left is never repeated."""
        pool = self._pools.get(out.base_url)
        if pool is None:
            pool = self._open(out.base_url)
        head = request_head(out, prefix=pool.origin.prefix, host=pool.origin.authority)
        channel = pool.idle()
        if channel is not None:
            exchange = Exchange(pool, channel)
            try:
                await exchange.run(out, head)
            except TransportFault as fault:
                if fault.sent != "nothing":
                    raise
            else:
                return exchange
        exchange = Exchange(pool, await pool.dial(out))
        await exchange.run(out, head)
        return exchange

    async def keep(self, base_urls: Collection[str]) -> None:
        """Pools of other upstreams are closed, each when its last exchange has ended."""
        for base_url in [known for known in self._pools if known not in base_urls]:
            self._pools.pop(base_url).retire()

    async def close(self) -> None:
        """All connections are closed; exchanges under way break."""
        self._closed = True
        for pool in self._pools.values():
            pool.shut()
        self._pools.clear()

    def in_flight(self) -> dict[str, int]:
        """Connections in use by upstream; a quiet gateway shows zeros."""
        return {base_url: pool.in_use for base_url, pool in self._pools.items()}

    def _open(self, base_url: str) -> Pool:
        if self._closed:
            raise TransportFault("connect", sent="nothing", detail="the transport is closed")
        try:
            origin = origin_of(base_url)
        except ValueError as error:
            raise TransportFault("connect", sent="nothing", detail=str(error)) from None
        pool = Pool(
            origin,
            clock=self._clock,
            idle_for=self._idle,
            trust=self._trust,
            probe=self._probe,
            buffer=self._buffer,
        )
        return self._pools.setdefault(base_url, pool)
