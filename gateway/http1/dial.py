"""From a base URL to a connection: addresses, the race between them, TLS, one deadline for all.

Every failure here is a fault with `sent="nothing"`. Addresses are remembered for a while, and a
burst of new connections asks the resolver once; where a host has several, they take turns, and IPv6
and IPv4 race as in RFC 8305 (`aiohappyeyeballs`), so that a dead one costs a quarter of a second.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

from gateway.clock import Expiry
from gateway.units import MICRO, Micros, valueclass
from gateway.upstream import TransportFault, readable_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.clock import Clock
    from gateway.http1.channel import Channel

FRESH: Micros = 10 * MICRO
"""How long addresses are used again: providers move hosts with TTLs from 30 s up."""

FAILED: Micros = 1 * MICRO
"""How long a name that did not resolve is not asked for again."""

HEAD_START_S = 0.25
"""Advantage of one address over the next (RFC 8305, "Connection Attempt Delay")."""


@valueclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an upstream is.

    Attributes:
        secure: Over TLS.
        host, port: As dialed; the host in ASCII, IPv6 without brackets.
        authority: As in the Host header: the default port is left out.
        prefix: Path before every target, without a slash at its end.
    """

    secure: bool
    host: str
    port: int
    authority: bytes
    prefix: bytes


def origin_of(base_url: str) -> Origin:
    """The parts of a provider's base URL.

    Raises:
        ValueError: It is none; the text names the rule and nothing of the URL.
    """
    shape = "a base URL is http(s)://host[:port][/prefix]"
    if any(character <= " " or character == "\x7f" for character in base_url):
        raise ValueError(shape)
    try:
        parts = urlsplit(base_url)
        port, name = parts.port, parts.hostname
        host = name.encode("idna").decode("ascii") if name and not name.isascii() else name
    except ValueError:  # its text quotes the URL, which may hold a secret
        raise ValueError(shape) from None
    if parts.scheme not in {"http", "https"} or not host:
        raise ValueError(shape)
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("a base URL holds no credentials, query or fragment")
    prefix = parts.path.rstrip("/").encode()
    if prefix and not readable_target(prefix):
        raise ValueError("the prefix of a base URL is visible ASCII without blanks")
    secure = parts.scheme == "https"
    default = 443 if secure else 80
    authority = f"[{host}]" if ":" in host else host
    if port is not None and port != default:
        authority += f":{port}"
    return Origin(
        secure=secure,
        host=host,
        port=default if port is None else port,
        authority=authority.encode(),
        prefix=prefix,
    )


class Trust:
    """The TLS context of a transport; the system's roots are read off the loop, when first needed.

    Attributes:
        context: As given, or as read; None before that.
    """

    __slots__ = ("context",)

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self.context = context

    async def ready(self) -> ssl.SSLContext:
        """The context."""
        if self.context is None:
            self.context = await asyncio.to_thread(_system_roots)
        return self.context


def _system_roots() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Addresses:
    """Where an origin's name leads."""

    __slots__ = ("_clock", "_failure", "_found", "_lock", "_origin", "_turn", "_until")

    def __init__(self, origin: Origin, clock: Clock) -> None:
        self._origin = origin
        self._clock = clock
        self._lock = asyncio.Lock()
        self._found: list[Any] = []
        self._failure: OSError | None = None
        self._until: Micros = 0
        self._turn = 0

    async def next(self) -> list[Any]:
        """All addresses, beginning with another one each time.

        Raises:
            OSError: The name does not resolve.
        """
        if self._clock.now() >= self._until:
            async with self._lock:  # whoever waited here finds the answer of the one before
                if self._clock.now() >= self._until:
                    await self._ask()
        if self._failure is not None:
            raise self._failure
        self._turn += 1
        at = self._turn % len(self._found)
        return self._found[at:] + self._found[:at]

    async def _ask(self) -> None:
        loop, origin = asyncio.get_running_loop(), self._origin
        failure: OSError | None = None
        try:
            self._found = await loop.getaddrinfo(
                origin.host, origin.port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
        except UnicodeError:  # a label that no name may have
            failure = socket.gaierror(socket.EAI_NONAME, "not a host name")
        except OSError as error:
            failure = error
        self._failure = failure
        self._until = self._clock.now() + (FRESH if failure is None else FAILED)


async def connect(
    origin: Origin,
    addresses: Addresses,
    make: Callable[[], Channel],
    *,
    trust: Trust,
    clock: Clock,
    limit: Micros,
) -> Channel:
    """A channel, connected, its TLS handshake done.

    Raises:
        TransportFault: resolve, connect, tls or connect_timeout; nothing was sent.
    """
    try:
        with Expiry(clock, limit):
            return await _connect(origin, addresses, make, trust)
    except TimeoutError as error:
        raise _fault("connect_timeout", error) from error
    except socket.gaierror as error:
        raise _fault("resolve", error) from error
    except ssl.SSLError as error:  # a certificate that does not match is one as well
        raise _fault("tls", error) from error
    except (OSError, RuntimeError) as error:  # uvloop says RuntimeError to a socket that is closed
        raise _fault("connect", error) from error


async def _connect(
    origin: Origin, addresses: Addresses, make: Callable[[], Channel], trust: Trust
) -> Channel:
    loop = asyncio.get_running_loop()
    context = await trust.ready() if origin.secure else None
    sock = await start_connection(
        await addresses.next(), happy_eyeballs_delay=HEAD_START_S, loop=loop
    )
    # Small writes must not wait for the acknowledgment of the ones before (`performance.md` §8.7).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    name = origin.host.rstrip(".") if origin.secure else None
    _, channel = await loop.create_connection(make, sock=sock, ssl=context, server_hostname=name)
    return channel


def _fault(kind: str, error: Exception) -> TransportFault:
    detail = f"{type(error).__name__}: {str(error)[:200]}"
    return TransportFault(kind, sent="nothing", detail=detail)
