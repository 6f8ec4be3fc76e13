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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.units import Micros

MAX_TICKET = 512
SIGNATURE = 16


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
