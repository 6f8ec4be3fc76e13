"""Lists that servers let others remember: for as long as they say, and for one identity each.

A client asks for lists by itself after each call. A server of the stateless era says with each
page how long it stays true (`ttlMs`); for so long it is answered from here, with the time that is
left. Whatever a server's `cacheScope` says, nobody gets what was listed for another: it may name a
tool that only one identity has. Filters of policy are applied to each answer, never remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.tools.lines import lifetime, place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.snapshot import Server
    from gateway.units import Micros

MOST_BYTES = 64 * 1024 * 1024
"""Bytes of JSON text remembered in all; the list unused for longest is forgotten first."""
LARGEST = 4 * 1024 * 1024
"""Bytes of the largest page that is remembered."""
KIND = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resources",
}
"""What changes where a method would answer otherwise."""


class _Kept(NamedTuple):
    """One page."""

    result: Mapping[str, Any]
    until: Micros
    size: int


class Lists:
    """Pages that may be answered without asking. `now` is the clock's."""

    __slots__ = ("_bytes", "_kept", "_now")

    def __init__(self, now: Callable[[], Micros]) -> None:
        self._now = now
        self._kept: OrderedDict[tuple[object, ...], _Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Pages remembered."""
        return len(self._kept)

    def find(
        self, server: Server, principal: str, method: str, cursor: object
    ) -> Mapping[str, Any] | None:
        """The page as its server gave it, with the time that is left; None where it is unknown."""
        key = _key(server, principal, method, cursor)
        kept = self._kept.get(key)
        if kept is None:
            return None
        left = (kept.until - self._now()) // 1_000
        if left <= 0:
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return {**kept.result, "ttlMs": left}

    def keep(
        self, server: Server, principal: str, method: str, cursor: object,
        result: Mapping[str, Any], *, size: int,
    ) -> None:  # fmt: skip
        """The page was given just now.

        Args:
            server: Who gave it.
            principal: For whom.
            method: That asked for it.
            cursor: Of the page; None for the first.
            result: As it was given.
            size: Bytes of its JSON text.
        """
        key = _key(server, principal, method, cursor)
        self._drop(key)
        told = lifetime(result)
        if not told or size > LARGEST:
            return
        self._kept[key] = _Kept(result, self._now() + told, size)
        self._bytes += size
        while self._bytes > MOST_BYTES:
            self._drop(next(iter(self._kept)))

    def forget(self, server: str, kind: str) -> None:
        """The lists of that kind have changed at that server."""
        for key in [
            key for key in self._kept if key[0] == server and KIND.get(str(key[2])) == kind
        ]:
            self._drop(key)

    def _drop(self, key: tuple[object, ...]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= kept.size


def _key(server: Server, principal: str, method: str, cursor: object) -> tuple[object, ...]:
    text = cursor if isinstance(cursor, str) else None
    return server.name, principal, method, text, place(server)
