"""Key sets of issuers: fetched when due, one fetch at a time, the last one kept for a day.

A fetch is due when a token names a key that is not there or when the set is old, and never more
often than every 30 seconds, whatever key ids callers send. A call whose key is there does not wait
for another call's fetch. Time is a parameter, the fetch comes from outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from gateway.identity.claims import VerifyingKey, parse_jwks
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.clock import Clock
    from gateway.snapshot import JwtIssuer

JWKS_EVERY = 600.0
"""Seconds after which a key set is fetched anew: an issuer that drops a key wants it gone."""

JWKS_PAUSE = 30.0
"""Seconds between two fetches of one set, whatever key ids callers send."""

JWKS_FIRST_PAUSE = 5.0
"""The same while there is no set at all."""

JWKS_KEPT = 24 * 3600.0
"""Seconds that the last set serves while its source is away."""

JWKS_TIMEOUT: Micros = 5 * MICRO

Fetch: TypeAlias = Callable[["JwtIssuer"], Awaitable[bytes]]
"""Gives the body of an issuer's key set, or raises OSError or ValueError."""


@dataclass(slots=True)
class KeySet:
    """One source's keys. Times are wall-clock seconds; 0 is never."""

    keys: tuple[VerifyingKey, ...] = ()
    fetched: float = 0.0
    tried: float = 0.0
    flight: asyncio.Event | None = None
    fault: str = ""

    def knows(self, kid: str) -> bool:
        """Whether a key of that id is there; a token without an id may be any key's."""
        return bool(self.keys) and (not kid or any(key.kid == kid for key in self.keys))

    def due(self, kid: str, now: float) -> bool:
        """Whether the set should be fetched, and may be, before such a token is judged."""
        if self.knows(kid) and (self.flight is not None or now - self.fetched < JWKS_EVERY):
            return False
        if self.flight is not None:
            return True
        pause = JWKS_PAUSE if self.keys else JWKS_FIRST_PAUSE
        return not 0 <= now - self.tried < pause


class KeySets:
    """The key sets of all issuers: one fetch at a time for each, the last one kept for a day."""

    def __init__(self, fetch: Fetch, clock: Clock) -> None:
        self._fetch = fetch
        self._clock = clock
        self._sets: dict[str, KeySet] = {}

    def of(self, issuer: JwtIssuer) -> KeySet:
        """The issuer's set, perhaps still empty."""
        return self._sets.setdefault(_source(issuer), KeySet())

    def keep(self, issuers: Iterable[JwtIssuer]) -> None:
        """Sets of other issuers are forgotten, so that reloads do not pile them up."""
        kept = {_source(issuer) for issuer in issuers}
        self._sets = {source: keys for source, keys in self._sets.items() if source in kept}

    async def fetch(self, issuer: JwtIssuer, now: float) -> None:
        """The set is fetched anew, by this caller or the one already on the way; see `fault`."""
        keys = self.of(issuer)
        if keys.flight is not None:
            await keys.flight.wait()
            return
        keys.flight, tried, keys.tried = asyncio.Event(), keys.tried, now
        try:
            keys.keys = parse_jwks(await self._in_time(issuer))
            keys.fetched, keys.fault = now, ""
        except (OSError, ValueError) as error:
            keys.fault = str(error)
            if now - keys.fetched > JWKS_KEPT:
                keys.keys = ()
        except asyncio.CancelledError:
            # This caller hung up: the next one tries at once.
            keys.tried = tried
            raise
        finally:
            flight, keys.flight = keys.flight, None
            flight.set()

    async def _in_time(self, issuer: JwtIssuer) -> bytes:
        """The body, or OSError once `JWKS_TIMEOUT` has passed: a source may send byte by byte."""
        task = asyncio.current_task()
        late = False

        def expire() -> None:
            nonlocal late
            if task is not None:
                late = True
                task.cancel()

        timer = self._clock.after(JWKS_TIMEOUT, expire)
        try:
            return await self._fetch(issuer)
        except asyncio.CancelledError:
            if late and task is not None and task.uncancel() == 0:
                raise TimeoutError("no key set in time") from None
            raise
        finally:
            timer.cancel()


def _source(issuer: JwtIssuer) -> str:
    return issuer.jwks_url or issuer.jwks_file
