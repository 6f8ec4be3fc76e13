"""What the head of a request may look like, read in one pass; what stops at the gateway both ways.

Two parsers that disagree about one request are how requests are smuggled, so whatever is ambiguous
is refused with 400 here, whichever HTTP server stands in front. Measured with uvicorn 0.54: h11
lets Content-Length beside Transfer-Encoding through; httptools lets two `Host`, no `Host` and
`gzip, chunked` through. Source: `protocols.md` §1.3, §1.4, §5.6; RFC 9112 §6, RFC 9110 §7.6.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gateway.call import ClientKind, Lines
from gateway.errors import MalformedCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gateway.call import HeaderList
    from gateway.snapshot import EdgeRules

MAX_HEADERS = 256
"""Header lines of one request. Real clients send 10 to 40; every line costs a look-up."""

PER_LINE = 150
"""Bytes that a remembered line takes beside its own."""

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate",
     b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
     b"http2-settings")
)  # fmt: skip
"""Headers about one connection only; never forwarded in either direction."""

_SINGLETONS = frozenset(
    (b"host", b"content-length", b"content-type", b"transfer-encoding", b"authorization",
     b"x-api-key", b"origin", b"expect", b"idempotency-key")
)  # fmt: skip
_SINGLETON_PREFIXES = (b"mcp-", b"tidegate-")

_NOT_A_HOP = frozenset(
    (b"host", b"content-length", b"content-type", b"content-encoding", b"authorization",
     b"x-api-key", b"cookie", b"origin", b"idempotency-key")
)  # fmt: skip
"""Naming one of these in `Connection` would have it vanish after we decided by it."""

_LENGTH = b"content-length"
_NO_LINES = Lines()
_new = object.__new__

_NOT_ANSWERED = HOP_BY_HOP | {b"date", b"content-length"}

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_ANY_ADDRESS = ("0.0.0.0", "::", "")  # noqa: S104 - compared with, never bound to

_SECRET_PARAMETERS = frozenset(
    (b"key", b"api_key", b"api-key", b"apikey", b"x-api-key", b"access_token", b"token", b"auth",
     b"authorization", b"bearer", b"secret", b"client_secret", b"password", b"subscription-key",
     b"x-goog-api-key")
)  # fmt: skip

_HOST = re.compile(r"^(\[[0-9a-fA-F:.%a-zA-Z0-9]+\]|[A-Za-z0-9._~-]+)(?::([0-9]{1,5}))?$")
_TEXT = bytes(code for code in range(256) if code == ord("\t") or (code >= 32 and code != 127))
"""What the value of a header is made of."""

_VALUE = re.compile(rb"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")


@dataclass(slots=True)
class Head:
    """What the edge needs of a request head.

    Attributes:
        kept: End-to-end headers but the length: order, case of values and repeats as sent. Never
            changed: equal heads share them (`Heads`).
        length: Declared body bytes; None where none is declared.
        chunked: The body comes in chunks of unknown total.
        coding: Content coding in lower case, "" for none.
    """

    kept: Lines = field(default_factory=lambda: _NO_LINES)
    host: bytes = b""
    length: int | None = None
    chunked: bool = False
    coding: str = ""
    origin: bytes | None = None
    client: ClientKind = ClientKind.SDK
    anthropic: bool = False
    expects: bool = False

    @property
    def has_body(self) -> bool:
        """Whether bytes follow the head."""
        return self.chunked or bool(self.length)


def read(headers: Iterable[tuple[bytes, bytes]]) -> Head:
    """The head, checked.

    Raises:
        MalformedCall: Two parsers could read this head in two ways; the message says where.
    """
    head = Head()
    seen: set[bytes] = set()
    kept: HeaderList = []
    connection: list[bytes] = []
    for pair in headers:
        name = pair[0]
        rule = _RULES.get(name)
        if rule is None:
            kept.append(pair)
            if not name.startswith(_SINGLETON_PREFIXES):
                continue
            rule = _PLAIN_SINGLETON
        once, forwarded, reader = rule
        if once:
            if name in seen:
                raise MalformedCall(f"The header {_show(name)} is repeated; it may come once only.")
            seen.add(name)
        if reader is not None:
            reader(head, pair[1])
        if forwarded:
            kept.append(pair)
        elif name == b"connection":
            connection += [token.strip().lower() for token in pair[1].split(b",")]
    _check(head, kept)
    head.kept = Lines(_without(kept, connection) if connection else kept)
    return head


class Heads:
    """Heads seen before: a client repeats its own, call by call, but for the body's length.

    A head equal to one of them in every other byte was checked already, and what was found out of
    its lines holds again (`call.Lines`). Bounded in number and bytes: all go when there are too
    many, and the edge begins anew with every policy, so that a removed key's lines go with it.
    """

    MOST = 4_096
    MOST_BYTES = 8 << 20
    LONGEST = 8_192
    """Bytes of a head that is worth keeping, `PER_LINE` for each line among them."""

    __slots__ = ("_at", "_bytes", "_seen")

    def __init__(self) -> None:
        self._seen: dict[tuple[tuple[bytes, bytes], ...], Head] = {}
        self._bytes = 0
        self._at: dict[int, int] = {}  # where the length stood in the last head of so many lines

    def read(self, headers: HeaderList) -> Head:
        """As the function `read`; sooner, where such a head was read before."""
        at = self._at.get(len(headers), 0)
        if not headers or headers[at][0] != _LENGTH:
            at = next((i for i, pair in enumerate(headers) if pair[0] == _LENGTH), -1)
            if at < 0:
                return read(headers)
            if len(headers) <= MAX_HEADERS:
                self._at[len(headers)] = at
        rest = (*headers[:at], *headers[at + 1 :])
        last = self._seen.get(rest)
        if last is None:
            head = read(headers)
            self._keep(rest, head)
            return head
        head = _new(Head)
        head.kept, head.host, head.coding = last.kept, last.host, last.coding
        head.origin, head.client, head.anthropic = last.origin, last.client, last.anthropic
        head.chunked = head.expects = False
        _length(head, headers[at][1])
        return head

    def _keep(self, rest: tuple[tuple[bytes, bytes], ...], head: Head) -> None:
        if head.expects:
            return
        size = sum(len(name) + len(value) + PER_LINE for name, value in rest)
        if size > self.LONGEST:
            return
        if len(self._seen) >= self.MOST or self._bytes + size > self.MOST_BYTES:
            self._seen.clear()
            self._bytes = 0
        self._seen[rest] = head
        self._bytes += size


def _check(head: Head, kept: HeaderList) -> None:
    if not head.host:
        raise MalformedCall("The request needs exactly one Host header.")
    if head.chunked and head.length is not None:
        raise MalformedCall("Content-Length and Transfer-Encoding exclude each other.")
    if len(kept) > MAX_HEADERS:
        raise MalformedCall(f"More than {MAX_HEADERS} header lines.")


def _without(kept: HeaderList, named: list[bytes]) -> HeaderList:
    """The headers less those that Connection names."""
    names = {token for token in named if token and token not in {b"close", b"keep-alive"}}
    if not names:
        return kept
    wrong = names & _NOT_A_HOP
    if wrong:
        raise MalformedCall(f"Connection may not name {_show(min(wrong))}, an end-to-end header.")
    return [pair for pair in kept if pair[0] not in names]


def _length(head: Head, value: bytes) -> None:
    if not value.isdigit() or len(value) > 18:
        raise MalformedCall("Content-Length must be a whole number of bytes.")
    head.length = int(value)


def _transfer(head: Head, value: bytes) -> None:
    if value.strip().lower() != b"chunked":
        raise MalformedCall("The only transfer coding accepted is exactly 'chunked'.")
    head.chunked = True


def _host(head: Head, value: bytes) -> None:
    head.host = value.strip()


def _coding(head: Head, value: bytes) -> None:
    text = value.strip().lower().decode("latin-1")
    if text in {"", "identity"}:
        return
    head.coding = f"{head.coding}, {text}" if head.coding else text


def _origin(head: Head, value: bytes) -> None:
    head.origin = value


def _codex(head: Head, _value: bytes) -> None:
    head.client = ClientKind.CODEX


def _originator(head: Head, value: bytes) -> None:
    if value.lower().startswith(b"codex"):
        head.client = ClientKind.CODEX


def _claude_code(head: Head, _value: bytes) -> None:
    if head.client is ClientKind.SDK:
        head.client = ClientKind.CLAUDE_CODE


def _anthropic(head: Head, _value: bytes) -> None:
    head.anthropic = True


def _expect(head: Head, value: bytes) -> None:
    if value.strip().lower() != b"100-continue":
        raise MalformedCall("The only expectation known is 'Expect: 100-continue'.")
    head.expects = True


_READERS: dict[bytes, Callable[[Head, bytes], None]] = {
    b"content-length": _length,
    b"transfer-encoding": _transfer,
    b"host": _host,
    b"content-encoding": _coding,
    b"origin": _origin,
    b"x-codex-turn-metadata": _codex,
    b"originator": _originator,
    b"x-claude-code-session-id": _claude_code,
    b"anthropic-version": _anthropic,
    b"expect": _expect,
}

_ENDS_HERE = HOP_BY_HOP | {b"expect", _LENGTH}
"""What goes no further: the length is the head's (`Head.length`); it differs where lines do not."""

_RULES = {
    name: (name in _SINGLETONS, name not in _ENDS_HERE, _READERS.get(name))
    for name in _SINGLETONS | HOP_BY_HOP | _READERS.keys()
}
"""Per header: whether it may come once only, whether it goes further, and who reads it."""

_PLAIN_SINGLETON = (True, False, None)
"""A header kept already, that may come once only."""


class HostRule:
    """Which `Host` values this listener answers to: DNS rebinding stops here.

    Loopback names and the address the connection came in on always are ours (a page that rebinds
    its own name cannot send them); the allow-list adds names and patterns, "*" is any. Answers are
    remembered for `MAX_REMEMBERED` spellings.
    """

    MAX_REMEMBERED = 256

    __slots__ = ("_names", "_patterns", "_remembered", "rules")

    def __init__(self, rules: EdgeRules) -> None:
        self.rules = rules
        names = [*_LOCAL_NAMES, *(name.lower() for name in rules.allowed_hosts)]
        self._names = frozenset(name for name in names if "*" not in name)
        self._patterns = tuple(name for name in names if "*" in name)
        self._remembered: dict[tuple[bytes, str], bool] = {}

    def allows(self, host: bytes, listener: str) -> bool:
        """Whether a request for this host is ours.

        Args:
            host: The Host header.
            listener: Address the connection was accepted on, without port; "" if unknown.
        """
        key = (host, listener)
        known = self._remembered.get(key)
        if known is None:
            known = self._decide(host, listener)
            if len(self._remembered) < self.MAX_REMEMBERED:
                self._remembered[key] = known
        return known

    def _decide(self, host: bytes, listener: str) -> bool:
        match = _HOST.match(host.decode("latin-1"))
        if match is None or int(match[2] or 0) > 65535:
            return False
        name = match[1].lower()
        bare = name.removesuffix(".")
        if bare in self._names or name in self._names or match[0].lower() in self._names:
            return True
        if any(fnmatchcase(bare, pattern) for pattern in self._patterns):
            return True
        return listener not in _ANY_ADDRESS and bare in {listener.lower(), f"[{listener.lower()}]"}


def secret_in_query(query: bytes) -> str | None:
    """The name of a query parameter that carries a credential; None if there is none.

    Credentials in a URL end in every access log between here and the client.
    """
    for pair in query.lower().split(b"&"):
        name, separator, value = pair.partition(b"=")
        if not separator or not value:
            continue
        if b"%" in name:
            name = _unescape(name)
        if name in _SECRET_PARAMETERS or value.startswith((b"sk-", b"tg_", b"bearer")):
            return _show(name)
    return None


def _unescape(name: bytes) -> bytes:
    return re.sub(rb"%([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), name).lower()


def end_to_end(headers: HeaderList) -> tuple[HeaderList, int | None]:
    """The headers of an upstream's answer that may reach the client, and its declared length.

    Hop-by-hop ones and those `Connection` names are gone; so are `access-control-*` (an upstream
    does not decide who may read our answers), `tidegate-*` (it does not speak for us), Date (the
    server in front adds its own) and Content-Length, which is returned: None where there is no
    valid one, or several disagree. Headers that no HTTP server would send are dropped rather than
    spoil a good answer.
    """
    named: list[bytes] = []
    kept: HeaderList = []
    lengths: list[bytes] = []
    for pair in headers:
        name = pair[0]
        if name in _NOT_ANSWERED:
            if name == b"connection":
                named += [token.strip().lower() for token in pair[1].split(b",")]
            elif name == b"content-length":
                lengths.append(pair[1])
        elif not name.startswith((b"access-control-", b"tidegate-")):
            value = pair[1]
            # As `_VALUE`, for a quarter: nothing but text, no white space at either end.
            if not value.translate(None, _TEXT) and value.strip() == value:
                kept.append(pair)
            elif (mended := _mended(pair)) is not None:
                kept.append(mended)
    if named:
        names = set(named)
        kept = [pair for pair in kept if pair[0] not in names]
    if not lengths:
        return kept, None
    value = lengths[0]
    valid = value.isdigit() and len(value) <= 18 and lengths.count(value) == len(lengths)
    return kept, int(value) if valid else None


def _mended(pair: tuple[bytes, bytes]) -> tuple[bytes, bytes] | None:
    """The header as any HTTP server sends it; None where none would.

    Weakness: white space around a value is lost, because h11 refuses to send it.
    """
    name, value = pair
    value = value.strip()
    return (name, value) if _VALUE.fullmatch(value) else None


def _show(name: bytes) -> str:
    return name.decode("latin-1")[:64]
