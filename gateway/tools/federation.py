"""Many servers behind `/mcp`: their names in one list.

A tool is `<server>__<tool>`; a server's name holds no underscore, so the first `__` splits. Model
APIs bear about 64 letters and clients add a prefix of their own, so a name above `LONGEST` ends in
a hash of the whole, and is found again among the names that its server has listed.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from gateway.tools.access import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST = 50
"""Characters of a public name."""
HASHED = 8
"""Hexadecimal digits that end a shortened one."""


def public(server: str, name: str) -> str:
    """The name by which callers of the federation know a server's tool or prompt."""
    whole = f"{server}{SEPARATOR}{name}"
    if len(whole) <= LONGEST:
        return whole
    mark = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=HASHED // 2).hexdigest()
    return f"{whole[: LONGEST - HASHED - 1]}_{mark}"


def split(name: str) -> tuple[str, str]:
    """Server and the rest of a public name; server "" where there is none."""
    server, mark, rest = name.partition(SEPARATOR)
    return (server, rest) if mark else ("", name)


def original(server: str, name: str, listed: Iterable[str]) -> str:
    """The server's own name for what callers know as `name`.

    Args:
        server: Its name.
        name: The public name.
        listed: Names that the server is known to have; asked for shortened names only.
    """
    rest = split(name)[1]
    if len(name) < LONGEST:
        return rest
    for own in listed:
        if public(server, own) == name:
            return own
    return rest
