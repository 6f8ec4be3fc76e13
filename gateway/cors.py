"""Which browser pages may read our answers.

A preflight needs no credential. Headers for an allowed origin go on every answer, refusals
included, so that a page can read *why* it was refused; an unknown origin gets none at all. An
upstream's own CORS headers never pass (`framing.end_to_end`). Source: Fetch standard;
`protocols.md` §1.3.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.call import HeaderList

MAX_AGE_S = 600
"""How long a browser may remember a preflight; a policy reload takes effect within it."""

EXPOSED = (
    b"retry-after, retry-after-ms, x-should-retry, x-request-id, request-id, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, "
    b"anthropic-ratelimit-requests-limit, anthropic-ratelimit-requests-remaining, "
    b"anthropic-ratelimit-requests-reset, anthropic-ratelimit-tokens-limit, "
    b"anthropic-ratelimit-tokens-remaining, anthropic-ratelimit-tokens-reset, "
    b"tidegate-call-id, tidegate-tier, tidegate-queue-ms, tidegate-overhead-ms, "
    b"tidegate-tokens-reserved, tidegate-cost, tidegate-place, tidegate-max-tokens, "
    b"tidegate-model-requested, tidegate-model-served, tidegate-downgrade-reason, "
    b"tidegate-replayed, tidegate-warning"
)

_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
_NAMES = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+(?:[ \t]*,[ \t]*[!#$%&'*+\-.^_`|~0-9A-Za-z]+)*")


def allowed(origin: bytes | None, origins: tuple[str, ...]) -> bool:
    """Whether pages of this origin may read answers. `null` never may, not even under "*"."""
    if origin is None or not origins or origin == b"null":
        return False
    return "*" in origins or origin.decode("latin-1") in origins


def answer_headers(origin: bytes | None, origins: tuple[str, ...]) -> HeaderList:
    """The CORS headers of an answer; none where CORS is not configured.

    `Vary` is there for every caller once it is, so that no cache serves one origin's answer to all.
    """
    if not origins:
        return []
    headers: HeaderList = [(b"vary", b"Origin")]
    if origin is not None and allowed(origin, origins):
        headers.append((b"access-control-allow-origin", origin))
        headers.append((b"access-control-expose-headers", EXPOSED))
    return headers


def preflight_headers(
    origin: bytes | None, origins: tuple[str, ...], *, requested: bytes | None
) -> HeaderList:
    """The headers of a 204 to a preflight; an unknown origin gets nothing it could use.

    Args:
        origin: The Origin header.
        origins: Allow-list; "*" is any.
        requested: Access-Control-Request-Headers, echoed if it is a list of names.
    """
    headers = answer_headers(origin, origins)
    if allowed(origin, origins):
        headers.append((b"access-control-allow-methods", _METHODS))
        headers.append((b"access-control-max-age", b"%d" % MAX_AGE_S))
        if requested and _NAMES.fullmatch(requested.strip()):
            headers.append((b"access-control-allow-headers", requested.strip()))
    return headers
