"""Results of held calls and alerts, pushed out: signed, and guarded against SSRF.

Callers name URLs, so a webhook is a way to make this process send requests from inside a network.
The law, in the order in which it is applied:

1. Only hosts that policy lists, on ports that it lists (443, or 80 into a listed network).
2. The name is resolved here, *every* address it has must be public or in a listed network, and the
   connection goes to the very address that was checked: a name that resolves otherwise a moment
   later (DNS rebinding) gains nothing. TLS still verifies the name.
3. Plain http only into listed networks. Redirects are not followed, proxies not used, connections
   not shared, answers not read.

Deliveries are signed as Standard Webhooks has it: `webhook-id`, `webhook-timestamp`,
`webhook-signature: v1,` HMAC-SHA256 over "id.timestamp.body". A delivery may come twice;
its id says that it is the same. Messages name hosts, never paths or queries: those may hold
secrets.
Source: standard-webhooks specification 1.0; OWASP SSRF prevention; RFC 6890.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from base64 import b64decode, b64encode
from binascii import Error as BadBase64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

import httpx

from gateway.clock import Expiry
from gateway.errors import Forbidden, MalformedCall
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from gateway.clock import Clock
    from gateway.snapshot import WebhookRules

Address: TypeAlias = IPv4Address | IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host, as text. Raises OSError."""

RESOLVE: Micros = 5 * MICRO
TOTAL: Micros = 15 * MICRO
"""Time for a whole delivery, resolution included in `RESOLVE` apart."""
MAX_URL = 2_048
MAX_TRIES = 12
PAUSES: tuple[Micros, ...] = tuple(
    seconds * MICRO for seconds in (5, 30, 120, 300, 900, 1_800, 3_600, 3_600, 7_200, 14_400)
)
"""Waits after the first, second, … failure; the last repeats."""
NAT64 = ip_network("64:ff9b::/96")
UNSAFE_PORTS = frozenset((0, 22, 25, 465, 587, 6379, 11211))
"""Never, even under `host:*`: these speak protocols in which an HTTP request can be a command."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL taken apart."""

    url: str
    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        plain = (self.scheme, self.port) in (("https", 443), ("http", 80))
        return shown if plain else f"{shown}:{self.port}"


class Blocked(Exception):
    """The address may not be called, now or later; says why, without path or query."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver took it."""

    status: int


@dataclass(frozen=True, slots=True)
class Undelivered:
    """It did not; `again` says whether trying once more makes sense."""

    why: str
    again: bool
    retry_after: Micros = 0


def target(url: str) -> Target:
    """The URL, if it is one that could be called at all.

    Raises:
        MalformedCall: It is not; the URL is not repeated.
    """
    plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        plain, parts, port = False, urlsplit(""), None
    scheme, host = parts.scheme, parts.hostname or ""
    if not plain or len(url) > MAX_URL or scheme not in ("http", "https") or not host:
        raise _malformed("must be an http or https URL of visible ASCII")
    if "@" in parts.netloc or parts.fragment or port == 0:
        raise _malformed("must not hold credentials, a fragment or port 0")
    if _odd_number(host):
        raise _malformed("must write an IP address in its usual form")
    path = parts.path or "/"
    return Target(
        url=url,
        scheme=scheme,
        host=host.rstrip(".").lower(),
        port=port or (443 if scheme == "https" else 80),
        path=f"{path}?{parts.query}" if parts.query else path,
    )


def _malformed(what: str) -> MalformedCall:
    return MalformedCall(f"tidegate-webhook {what}.", param="tidegate-webhook")


def _odd_number(host: str) -> bool:
    """Whether a resolver would read the host as an address that we do not (0x7f.1, 2130706433)."""
    last = host.rstrip(".").rpartition(".")[2]
    if not last or not (last.isdigit() or last.lower().startswith("0x")):
        return False
    try:
        ip_address(host)
    except ValueError:
        return True
    return False


def listed(one: Target, hosts: tuple[str, ...]) -> bool:
    """Whether policy lists the host on that port."""
    for entry in hosts:
        name, port = _entry(entry)
        fits = one.host == name or (name.startswith("*.") and one.host.endswith(name[1:]))
        if fits and one.port not in UNSAFE_PORTS and (
            port == "*" or one.port == int(port or (443 if one.scheme == "https" else 80))
        ):  # fmt: skip
            return True
    return False


def _entry(entry: str) -> tuple[str, str]:
    """Host without brackets, and port as text, "" where none is given."""
    if entry.startswith("["):
        host, _, port = entry[1:].partition("]")
        return host, port.removeprefix(":")
    host, _, port = entry.partition(":")
    return host, port


def check(url: str, rules: WebhookRules) -> Target:
    """The target a caller named, allowed as far as its name goes.

    Raises:
        MalformedCall: It is no URL that could be called.
        Forbidden: Policy does not list it.
    """
    one = target(url)
    if rules.secret is None or not listed(one, rules.hosts):
        raise Forbidden(
            f"Webhooks to {one.host[:100]!r} port {one.port} are not allowed "
            f"({rules.because}.hosts).",
            because=f"{rules.because}.hosts",
            code="webhook_not_allowed",
            param="tidegate-webhook",
        )
    return one


def unwrapped(address: Address) -> Address:
    """The address that a packet would really go to: IPv4 inside IPv6 forms is IPv4."""
    if isinstance(address, IPv4Address):
        return address
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address.teredo is not None:
        inner = address.teredo[1]
    if inner is None and address in NAT64:
        inner = IPv4Address(int(address) & 0xFFFFFFFF)
    return inner if inner is not None else address


def reachable(address: Address, networks: tuple[str, ...]) -> bool:
    """Whether that address may be connected to: public, or listed."""
    real = unwrapped(address)
    if real.is_global and not real.is_multicast and not real.is_reserved:
        return True
    return any(real in ip_network(network) for network in networks)


def public(address: Address) -> bool:
    """Whether it is reachable without being listed."""
    return reachable(address, ())


def signing_key(secret: str) -> bytes:
    """The bytes of a signing key: base64 after `whsec_`, else the text itself."""
    if secret.startswith("whsec_"):
        try:
            return b64decode(secret[6:], validate=True)
        except BadBase64:
            pass
    return secret.encode()


def signature(key: bytes, *, id: str, timestamp: int, body: bytes) -> str:  # noqa: A002 - the specification's word
    """The `webhook-signature` of one delivery."""
    signed = f"{id}.{timestamp}.".encode() + body
    return "v1," + b64encode(hmac.digest(key, signed, "sha256")).decode()


def next_try(tries: int, *, share: float, retry_after: Micros = 0) -> Micros | None:
    """How long to wait after so many failures; None to give up.

    Args:
        tries: Failures so far, from 1.
        share: A number in [0, 1) that spreads deliveries, up to a fifth more.
        retry_after: The receiver's word, at most an hour of it.
    """
    if tries >= MAX_TRIES:
        return None
    wait = PAUSES[min(tries, len(PAUSES)) - 1]
    return max(round(wait * (1 + share / 5)), min(retry_after, 3_600 * MICRO))


async def system_resolve(host: str, port: int) -> list[str]:
    """All addresses of the host, as the system resolves it."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class Webhooks:
    """Sends deliveries. One per process; `close` it.

    Args:
        clock: Bounds each delivery, stamps it.
        resolve: How names become addresses.
    """

    def __init__(self, clock: Clock, resolve: Resolve = system_resolve) -> None:
        self._clock = clock
        self._resolve = resolve
        self._client: httpx.AsyncClient | None = None

    async def send(
        self, one: Target, body: bytes, *, id: str, rules: WebhookRules  # noqa: A002
    ) -> Delivered | Undelivered:  # fmt: skip
        """What became of one delivery.

        Args:
            one: Where to; its name was allowed by `check`, or stands in policy.
            body: JSON.
            id: The same for every try of one delivery.
            rules: Signing key and networks.
        """
        if rules.secret is None:
            return Undelivered("no signing key", again=False)
        try:
            with Expiry(self._clock, RESOLVE):
                address = await self._address(one, rules)
        except TimeoutError:
            return Undelivered(f"{one.host} was not resolved in time", again=True)
        except OSError as error:
            return Undelivered(f"{one.host} was not resolved ({error.strerror})", again=True)
        except Blocked as error:
            return Undelivered(str(error), again=False)
        try:
            with Expiry(self._clock, TOTAL):
                return await self._post(one, address, body, id, signing_key(rules.secret.reveal()))
        except TimeoutError:
            return Undelivered(f"{one.host} did not answer in time", again=True)

    async def _address(self, one: Target, rules: WebhookRules) -> Address:
        """The address to connect to; every one the name has is allowed. Raises Blocked, OSError."""
        texts = await self._resolve(one.host, one.port)
        addresses = [ip_address(text.partition("%")[0]) for text in texts]
        if not addresses:
            raise OSError(0, "no address")
        for address in addresses:
            if not reachable(address, rules.networks):
                raise Blocked(f"{one.host} resolves to an address that is not public")
            if one.scheme == "http" and public(address):
                raise Blocked(f"{one.host} is public: plain http is not sent there")
        return addresses[0]

    async def _post(
        self, one: Target, address: Address, body: bytes, id: str, key: bytes  # noqa: A002
    ) -> Delivered | Undelivered:  # fmt: skip
        timestamp = int(self._clock.wall())
        headers = {
            "host": one.authority,
            "content-type": "application/json",
            "user-agent": "tidegate-webhooks/1",
            "webhook-id": id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(key, id=id, timestamp=timestamp, body=body),
        }
        shown = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        if self._client is None:
            # In a thread, because it reads the machine's certificates.
            self._client = await asyncio.to_thread(_client)
        request = self._client.build_request(
            "POST",
            f"{one.scheme}://{shown}:{one.port}{one.path}",
            content=body,
            headers=headers,
            extensions={"sni_hostname": one.host},
        )
        try:
            answer = await self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Undelivered(f"{one.host}: {type(error).__name__}", again=True)
        await answer.aclose()
        return _judged(one, answer)

    async def close(self) -> None:
        """No connection is left."""
        if self._client is not None:
            await self._client.aclose()


def _judged(one: Target, answer: httpx.Response) -> Delivered | Undelivered:
    status = answer.status_code
    if 200 <= status < 300:
        return Delivered(status)
    word = answer.headers.get("retry-after", "")
    wait = int(word) * MICRO if word.isascii() and word.isdigit() and len(word) < 9 else 0
    # 410: the receiver is gone for good (Standard Webhooks). A redirect is no delivery.
    return Undelivered(f"{one.host} answered {status}", again=status != 410, retry_after=wait)


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=10.0,
        trust_env=False,
        follow_redirects=False,
        limits=httpx.Limits(max_keepalive_connections=0, max_connections=32),
    )
