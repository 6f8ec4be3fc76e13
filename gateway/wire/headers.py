"""Which headers pass (`protocols.md` §1.3): towards the upstream, and back to the client.

Order and multiplicity are kept, names are lower case. Hop-by-hop headers, and every header that
`Connection` names, stop here in both directions (RFC 9110 §7.6.1).
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from gateway.call import Lines

if TYPE_CHECKING:
    from gateway.call import HeaderList

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
CALLERS = frozenset({
    b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie", b"host",
    b"content-length", b"baggage", b"prefer", b"expect",
})  # fmt: skip
"""Read here, then removed: credentials first of all."""

LIMITS = (b"x-ratelimit-", b"anthropic-ratelimit-", b"ratelimit")
ADVICE = frozenset({b"retry-after", b"retry-after-ms", b"x-should-retry"})
"""The upstream's word on waiting is for us; the client gets ours."""


_NAME = itemgetter(0)
_JSON = b"application/json"
_OURS = b"tidegate-"
_PLAIN = (b"accept-encoding", b"identity")

_KEPT_HERE = {
    (governed, idempotency): HOP_BY_HOP
    | CALLERS
    | ({b"accept-encoding"} if governed else set())
    | (set() if idempotency else {b"idempotency-key"})
    for governed in (True, False)
    for idempotency in (True, False)
}
_KEPT_FROM_CLIENT = HOP_BY_HOP | ADVICE


def named_by_connection(headers: HeaderList) -> frozenset[bytes]:
    """Lower-case names that `Connection` declares hop-by-hop."""
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return frozenset()
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def to_upstream(headers: HeaderList, *, governed: bool, idempotency: bool) -> HeaderList:
    """The caller's headers without credentials, framing, hop-by-hop and our own.

    Args:
        headers: As the client sent them.
        governed: Routes whose answers we read: the upstream is asked not to compress.
        idempotency: Whether the upstream understands `Idempotency-Key`.
    """
    told = governed, idempotency
    if isinstance(headers, Lines):
        known = headers.onward.get(told)
        if known is not None:
            return known.copy()
    stays = _KEPT_HERE[told]
    out = [pair for pair in headers if pair[0] not in stays and pair[0][:9] != _OURS]
    if b"connection" in map(_NAME, headers) and (named := named_by_connection(headers)):
        out = [pair for pair in out if pair[0] not in named]
    if governed:
        out.append(_PLAIN)
    if isinstance(headers, Lines):
        headers.onward[told] = out.copy()
    return out


def to_client(headers: HeaderList) -> HeaderList:
    """The upstream's headers without hop-by-hop, its limits and its advice on waiting."""
    out = [
        pair
        for pair in headers
        if pair[0] not in _KEPT_FROM_CLIENT and not pair[0].startswith(LIMITS)
    ]
    if b"connection" in map(_NAME, headers) and (named := named_by_connection(headers)):
        out = [pair for pair in out if pair[0] not in named]
    return out


def is_event_stream(headers: HeaderList) -> bool:
    """Whether a content type says server-sent events."""
    for name, value in headers:
        if name != b"content-type" or value == _JSON:
            continue
        if value.lower().lstrip().startswith(b"text/event-stream"):
            return True
    return False


def coding_of(headers: HeaderList) -> str:
    """The content coding, lower case; "" for none or identity."""
    for name, value in headers:
        if name == b"content-encoding":
            coding = value.strip().lower().decode("latin-1")
            return "" if coding == "identity" else coding
    return ""
