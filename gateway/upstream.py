"""How bytes reach a provider: what is sent, what comes back, what every Transport promises.

`http1` is the default, our own client; `upstream_aiohttp` its alternative on aiohttp's pool and
`upstream_httpx` an extension. They share this file: the request's head is written here, so target
and header bytes leave as they came whoever carries them, and the bounds of an answer are the same.

The only deadline armed by a transport is the one for a connection (`performance.md` §8): first
byte, idle and total time belong to the caller, who cancels `send` or calls `Incoming.abort`.
"""

from __future__ import annotations

import re
import select
from collections.abc import AsyncIterator
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from gateway.units import MICRO, maker, valueclass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gateway.call import HeaderList
    from gateway.units import Micros

Sent: TypeAlias = Literal["nothing", "unknown", "all"]
"""How much of a failed request may have reached the upstream; only "nothing" may be repeated.

"nothing": no byte was taken by a connection, provably. "unknown": a part was handed over. "all":
the whole request was handed over; it may have run.
"""

Probe: TypeAlias = "Callable[[int], bool]"
"""Asked with a socket's descriptor before a pooled connection is used again."""

Take: TypeAlias = "Callable[[bytes], bool]"
"""Given each chunk as it arrives, never across a wait; False asks for a pause after this one."""

READ = 64 * 1024
BUFFERED = 32 * 1024
"""Bytes read from a socket at once; reading pauses above twice `BUFFERED` and resumes below it."""

INLINE = 64 * 1024
"""A body up to this size leaves in one write with its head; a larger one in slices, read beside."""

LONGEST_HEADER = 64 * 1024
MOST_HEADERS = 256
MOST_INTERIM = 32
"""Bounds of an answer: bytes of one header line (8 KB fail on long policies), lines, 1xx before."""

IDLE: Micros = 15 * MICRO
"""How long a pooled connection is kept. Must stay below the upstream's own limit."""

_OWN_HEADERS = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"}
)
"""Written by the transport alone; dropped should one slip through: two framings smuggle a call."""

_UNFRAMED = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods whose empty body needs no content-length."""

_COLON = 0x3A
_NAME = itemgetter(0)
_TEXT = bytes(code for code in range(256) if code not in b"\r\n\0")
"""What the lines of a head are made of; between them stand line ends and nothing else."""

_KNOWN = frozenset({"GET", "POST"})
_METHOD = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"/[!-~\x80-\xff]*")


@valueclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A request to an upstream.

    Attributes:
        method: As sent.
        base_url: Scheme, host, port and prefix of the provider.
        target: Raw path and query, beginning with "/"; it follows the prefix.
        headers: Byte pairs, order and repeats kept, hop-by-hop removed, Host and framing absent.
        body: Whole body, or b"" while `upload` streams it.
        upload: Pieces of the body; the caller closes it. What it raises, `send` raises.
        length: Bytes `upload` will give, if known; else it leaves chunked.
        connect: Deadline for a connection.
    """

    method: str
    base_url: str
    target: bytes
    headers: HeaderList
    body: bytes = b""
    upload: AsyncIterator[bytes] | None = None
    length: int | None = None
    connect: Micros = 5_000_000


make_outgoing = maker(Outgoing)


class Incoming(Protocol):
    """A response whose head has arrived and whose body is unread."""

    status: int
    headers: HeaderList

    @property
    def whole(self) -> bool:
        """Every byte of the body is here: reading it waits for nothing."""

    def at_once(self) -> bytes | None:
        """The rest of the body if every byte of it is here, else None."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes exactly as they arrive (content coding untouched). Raises TransportFault."""

    async def pass_to(self, take: Take) -> bool:
        """The rest of the body was given to `take`: True at its end, False once `take` had enough.

        Whatever `take` was given before it said so is out of our hands; a later call goes on.

        Raises:
            TransportFault: The body broke; all that came before was given.
        """

    def abort(self, kind: str) -> None:
        """The connection is closed now; a pending or later read raises TransportFault(kind)."""

    async def close(self, *, reuse: bool) -> None:
        """The connection is in its pool (body fully read and `reuse`) or closed. Callable twice."""


class TransportFault(Exception):
    """The exchange broke.

    Attributes:
        kind: Before the head: connect, connect_timeout, tls, resolve, pool_timeout, reset (the
            connection ended). Later: cut (the body ended before its framing said so). At any time:
            malformed (not HTTP), or the kind given to `Incoming.abort`.
        sent: How much may have reached the upstream.
        detail: For the log; never a header or body byte of the request.
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

    async def close(self) -> None:
        """All connections are closed."""


@runtime_checkable
class PooledTransport(Transport, Protocol):
    """A transport with a pool per upstream, as the process owns one."""

    async def keep(self, base_urls: Collection[str]) -> None:
        """Pools of other upstreams are closed, each when its last exchange has ended."""

    def in_flight(self) -> dict[str, int]:
        """Connections in use by upstream; a quiet gateway shows zeros."""


def framing(out: Outgoing) -> HeaderList:
    """The header that says how long the body is: none, content-length or chunked."""
    if out.upload is not None:
        if out.length is None:
            return [(b"transfer-encoding", b"chunked")]
        return [(b"content-length", b"%d" % out.length)]
    if out.body or out.method not in _UNFRAMED:
        return [(b"content-length", b"%d" % len(out.body))]
    return []


def forwarded(headers: HeaderList) -> HeaderList:
    """The headers without those that belong to a connection."""
    return [pair for pair in headers if pair[0] not in _OWN_HEADERS]


def readable_target(target: bytes) -> bool:
    """Whether this is one word of a request line, beginning with a slash."""
    return _TARGET.fullmatch(target) is not None


def request_head(out: Outgoing, *, prefix: bytes, host: bytes) -> bytes:
    """The head of the request as it leaves: headers keep order, repeats and bytes.

    Raises:
        TransportFault: A method, target or header holds a byte that ends a line or a word, so that
            an upstream might read two requests.
    """
    method = out.method
    if method not in _KNOWN and _METHOD.fullmatch(method) is None:
        raise _unreadable("the method is not a token")
    if not readable_target(out.target):
        raise _unreadable("a forbidden byte in the target")
    pairs = [pair for pair in out.headers if pair[0] not in _OWN_HEADERS]
    names = list(map(_NAME, pairs))
    pairs += framing(out)
    # Joined and not formatted, which costs three times as much.
    lines = b"\r\n".join(map(b": ".join, [(b"host", host), *pairs]))
    if (
        lines.translate(None, _TEXT) != b"\r\n" * len(pairs)
        or _COLON in b"".join(names)
        or b"" in names
    ):
        raise _unreadable("a header ends its own line")
    return b"%b %b%b HTTP/1.1\r\n%b\r\n\r\n" % (method.encode(), prefix, out.target, lines)


def _unreadable(why: str) -> TransportFault:
    return TransportFault("malformed", sent="nothing", detail=why)


async def slices(body: bytes) -> AsyncIterator[bytes]:
    """A large body in pieces that are written one after another."""
    for start in range(0, len(body), INLINE):
        yield body[start : start + INLINE]


async def pass_on(chunks: AsyncIterator[bytes], take: Take) -> bool:
    """As `Incoming.pass_to`, chunk by chunk: for answers that can only be awaited."""
    async for chunk in chunks:
        if not take(chunk):
            return False
    return True


def kernel_probe() -> Probe:
    """Whether an end of stream, a reset or bytes nobody asked for wait at an idle descriptor."""
    poll = select.poll()

    def probe(descriptor: int) -> bool:
        poll.register(descriptor, select.POLLIN)
        try:
            return bool(poll.poll(0))
        finally:
            poll.unregister(descriptor)

    return probe
