"""Place-in-line tickets (`admission.md` §8): what a refused call takes home to lose nothing.

A ticket is (pool, principal, lane, tag, expiry) under HMAC-SHA256. It works for its principal only,
never in a higher lane, not after its expiry. Forged or expired tickets are ignored, never an error:
whoever sends one simply queues like everybody else. Single use is the pool's business: a tag that
was granted lies in its lane's past and gains nothing.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import sha256

from gateway.units import MICRO, Micros

MAX_TICKET = 512
SOFT: Micros = 60 * MICRO
"""Coming back within a minute is worth saying; SDKs treat longer waits wildly differently."""
SLACK: Micros = 2 * MICRO
"""A limit per minute frees its first unit after a minute and its log's spread: still a minute."""
SIGNATURE = 16


def come_back(eta: Micros, patience: Micros) -> Micros | None:
    """When a refused call shall return: ETA minus half of what it may wait; None says never.

    Args:
        eta: Predicted wait of the call.
        patience: What it may wait in that pool. A limit of the caller's own may allow no wait at
            all: who came back early would be refused again, so there it is the whole ETA.
    """
    wait = max(MICRO, eta - patience // 2)
    return None if wait > SOFT + SLACK else min(wait, SOFT)


class Tickets:
    """Signs and reads tickets with one key, which a fleet shares."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    def _sign(self, payload: bytes, pool: str, principal: str) -> bytes:
        text = b"\0".join((payload, pool.encode(), principal.encode()))
        return hmac.new(self._key, text, sha256).digest()[:SIGNATURE]

    def issue(self, *, pool: str, principal: str, lane: int, tag: int, expires: Micros) -> str:
        """A ticket for this place, URL-safe text."""
        payload = f"{lane}.{tag}.{expires}".encode()
        signature = self._sign(payload, pool, principal)
        return urlsafe_b64encode(signature + payload).rstrip(b"=").decode()

    def redeem(
        self, ticket: bytes, *, pool: str, principal: str, lane: int, now: Micros
    ) -> int | None:
        """The tag of a valid ticket of this principal and pool; None for anything else."""
        if not ticket or len(ticket) > MAX_TICKET:
            return None
        try:
            raw = urlsafe_b64decode(ticket + b"=" * (-len(ticket) % 4))
        except ValueError:
            return None
        signature, payload = raw[:SIGNATURE], raw[SIGNATURE:]
        if not hmac.compare_digest(signature, self._sign(payload, pool, principal)):
            return None
        issued_lane, tag, expires = (int(part) for part in payload.split(b"."))
        if expires < now or lane < issued_lane:
            return None
        return tag
