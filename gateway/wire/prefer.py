"""`Prefer` (RFC 7240): what a client would like, in one header or several. Pure.

Preferences are wishes: one that cannot be read is ignored, never refused. Of a repeated preference
the first counts (§2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from gateway.call import HeaderList

MAX_PREFERENCES = 32
"""Preferences looked at in one request."""


def preferences(headers: HeaderList) -> dict[str, str]:
    """Names in lower case to values without quotes; "" for a preference without value."""
    found: dict[str, str] = {}
    seen = 0
    for name, value in headers:
        if name != b"prefer":
            continue
        for member in value.decode("latin-1").split(","):
            seen += 1
            if seen > MAX_PREFERENCES:
                return found
            key, _, rest = member.partition(";")[0].partition("=")
            if key.strip():
                found.setdefault(key.strip().lower(), rest.strip().strip('"'))
    return found


def respond_async(headers: HeaderList) -> bool:
    """Whether the client would rather be answered later than wait (§4.1)."""
    return "respond-async" in preferences(headers)


def wait(headers: HeaderList, *, most: Micros) -> Micros:
    """How long the client would wait for an answer (§4.3), within a bound; 0 where it says none."""
    text = preferences(headers).get("wait", "")
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        return 0
    return min(most, int(text) * MICRO)
