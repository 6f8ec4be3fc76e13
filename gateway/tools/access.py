"""Who may use which server and which tool. Pure; lists and calls ask the same questions.

An agent's patterns (`agents.*.tools`) are of public names, `<server>__<tool>`: a bare name would
grant the same word on every server.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gateway.policy import globs

if TYPE_CHECKING:
    from gateway.call import Principal
    from gateway.snapshot import Server, Snapshot

SEPARATOR = "__"
ANY = ("*",)


def may_use(principal: Principal, server: Server) -> bool:
    """Whether the identity may use anything of this server."""
    if server.agents != ANY and not _fits(principal.agent, server.agents):
        return False
    if server.tenants != ANY and not _fits(principal.tenant, server.tenants):
        return False
    own = principal.rule.tools
    if own == ANY:
        return True
    family = f"{server.name}{SEPARATOR}*"
    return any(globs.overlap(pattern, family) for pattern in own)


def may_call(principal: Principal, server: Server, tool: str) -> bool:
    """Whether the identity may see and call this tool of a server that it may use."""
    rule = server.rule(tool)
    if rule is not None and rule.deny:
        return False
    own = principal.rule.tools
    return own == ANY or _fits(f"{server.name}{SEPARATOR}{tool}", own)


def usable(principal: Principal, snapshot: Snapshot) -> list[Server]:
    """The servers this identity may use, in policy order."""
    return [server for server in snapshot.servers.values() if may_use(principal, server)]


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
