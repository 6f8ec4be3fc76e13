"""Tool servers of a policy: mistakes between entries, and the compiled form. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway import snapshot as made
from gateway.admission.profiles import Accounting, Profile, Shape, pool_spec
from gateway.policy import globs
from gateway.policy.lookups import Check, given
from gateway.policy.tool_rules import RuleCompiler

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.admission.core import PoolSpec
    from gateway.policy import models as file
    from gateway.policy.problems import Path
    from gateway.snapshot import Mode

SEPARATOR = "__"
"""Between a server's name and its tool's, where several servers stand in one list."""
OWN = Accounting(profile=Profile.RESERVE_SETTLE, refused_counts=False)
"""Limits towards a server are ours: what a call is expected to cost, corrected at its end."""


class ToolServers(Check):
    """Servers that can be reached, by somebody, under rules that can act."""

    def all(self) -> None:
        """Every mistake of the tool servers is in the report."""
        for name, server in self.rules.servers.items():
            path: Path = ("servers", name)
            self._way(path, server)
            if server.limits is not None:
                self.limits((*path, "limits"), server.limits)
            self._callers(path, server)
            self._tools(path, server)
        self._agents()

    def _way(self, path: Path, server: file.Server) -> None:
        if (server.url is None) == (server.command is None):
            self.report.error(path, "is reached one way", allowed="url or command", at_key=True)
        for key in ("key", "headers") if server.command is not None else ("env", "cwd", "process"):
            if key in server.model_fields_set:
                other = "url" if server.command is not None else "command"
                self.report.error((*path, key), f"never used without {other}", at_key=True)

    def _callers(self, path: Path, server: file.Server) -> None:
        tenants = [*self.rules.tenants, "default"]
        for key, patterns, names in (
            ("agents", server.agents, list(self.rules.agents)),
            ("tenants", server.tenants, tenants),
        ):
            for index, pattern in enumerate(patterns):
                if pattern != "*" and not any(globs.overlap(pattern, name) for name in names):
                    where = (*path, key, index)
                    self.report.warn(
                        where if where in self.report.spots else (*path, key),
                        f"{pattern!r} matches no name of the section {key}",
                    )

    def _tools(self, path: Path, server: file.Server) -> None:
        earlier: list[str] = []
        for pattern in server.tools:
            for wide in earlier:
                if globs.is_pattern(pattern) and globs.covers(wide, pattern):
                    self.report.error(
                        (*path, "tools", pattern),
                        f"never reached: {wide!r} stands before it",
                        at_key=True,
                    )
                    break
            if globs.is_pattern(pattern):
                earlier.append(pattern)

    def _agents(self) -> None:
        """Each pattern of tools can fit a tool of some server."""
        if not self.rules.servers:
            return
        families = [f"{name}{SEPARATOR}*" for name in self.rules.servers]
        for name, agent in self.rules.agents.items():
            for index, pattern in enumerate(agent.tools):
                if not any(globs.overlap(pattern, family) for family in families):
                    where = ("agents", name, "tools", index)
                    self.report.error(
                        where if where in self.report.spots else where[:-1],
                        f"{pattern!r} fits no tool of any server",
                        allowed=f"SERVER{SEPARATOR}TOOL: {families[0]}",
                    )


def compile_servers(
    rules: file.PolicyFile, *, mode: Callable[[str], Mode], revision: int
) -> dict[str, made.Server]:
    """The servers of this policy.

    Args:
        rules: Checked.
        mode: A rule's mode, weakened by the file's.
        revision: Of the snapshot.
    """
    return {
        name: _server(
            name,
            said,
            _pools(name, said, mode=mode, revision=revision),
            RuleCompiler(name, weaken=mode, revision=revision),
        )
        for name, said in rules.servers.items()
    }


def _server(
    name: str, said: file.Server, pools: tuple[PoolSpec, ...], compiler: RuleCompiler
) -> made.Server:
    base, target = _split(said.url or "")
    times = said.timeouts
    exact = {pattern: rule for pattern, rule in said.tools.items() if not globs.is_pattern(pattern)}
    ordered = {**exact, **said.tools}
    because = f"servers.{name}"
    provider = made.Provider(
        name=name,
        dialects=frozenset({"mcp"}),
        base_url=base,
        extra_headers=tuple(said.headers.items()),
        credentials=(made.Credential(id="key", secret=said.key),) if said.key else (),
        timeouts=made.Timeouts(
            connect=times.connect,
            first_byte=times.first_byte,
            idle=times.idle,
            total=times.total,
            total_plain=times.total_plain,
        ),
        accounting=OWN,
        header_family="none",
        because=because,
    )
    return made.Server(
        name=name,
        provider=provider,
        target=target,
        command=said.command or (),
        env=tuple(said.env.items()),
        cwd=said.cwd or "",
        child=made.ChildLimits(
            memory=said.process.memory,
            open_files=said.process.open_files,
            cpu=said.process.cpu or 0,
        ),
        era=said.era,
        max_result=said.max_result,
        agents=said.agents,
        tenants=said.tenants,
        pools=pools,
        wait=said.limits.max_wait if said.limits else None,
        tools=tuple(compiler.rule(pattern, rule) for pattern, rule in ordered.items()),
        because=because,
    )


def _split(url: str) -> tuple[str, bytes]:
    """Base URL and path of an endpoint."""
    if not url:
        return "", b"/"
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", (parts.path or "/").encode()


def _pools(
    name: str, said: file.Server, *, mode: Callable[[str], Mode], revision: int
) -> tuple[PoolSpec, ...]:
    if said.limits is None:
        return ()
    limits = given(said.limits)
    because = f"servers.{name}"
    spec = pool_spec(
        name=f"server:{name}",
        limits={key: limit for key, limit in limits.items() if key != "concurrency"},
        shape=Shape.OWN,
        profile=OWN.profile,
        concurrency=limits.get("concurrency", 0),
        queue=said.limits.max_wait != 0,
        mode=mode(said.limits.mode),
        because=because,
        revision=revision,
    )
    return (replace(spec, concurrency_because=f"{because}.limits.concurrency"),)
