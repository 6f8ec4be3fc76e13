"""The demand side of a policy: tiers, agents, tenants, their limits and budgets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.policy import globs
from gateway.policy.lookups import (
    DEFAULT_TENANT,
    DEFAULT_TIERS,
    Check,
    deployments_of,
    given,
    price_of,
    usable,
)
from gateway.policy.problems import dotted

if TYPE_CHECKING:
    from gateway.policy import models as file
    from gateway.policy.problems import Path

DAYS_PER_MONTH = 31


class Demand(Check):
    """Agents that somebody can be, rights that hold, limits and budgets that can bind."""

    def all(self) -> None:
        """Every mistake of this side is in the report."""
        self.tier_set()
        self.agents()
        self.tenants()
        self.issuers()
        self.anonymous()
        for key in ("max_money", "task_money"):
            if getattr(self.rules.loops, key) is not None:
                self._priced(("loops", key), ("*",))

    def tier_set(self) -> None:
        """Numbers and names are distinct."""
        numbers: dict[int, str] = {}
        for name, tier in self.rules.tiers.items():
            path: Path = ("tiers", name)
            if tier.number in numbers:
                self.report.error(
                    (*path, "number"),
                    f"the tier {numbers[tier.number]!r} has this number",
                    of=(("tiers", numbers[tier.number]),),
                )
            numbers[tier.number] = name
        taken = [name for number, name in DEFAULT_TIERS if number not in numbers]
        for name in taken:
            if name in self.rules.tiers:
                self.report.error(
                    ("tiers", name, "number"),
                    f"{name!r} is the shipped name of another number",
                    allowed="the three tiers written out, or another name",
                )

    def agents(self) -> None:
        """Somebody can be each of them, and its rights and limits can act."""
        rules = self.rules
        for name, agent in rules.agents.items():
            path: Path = ("agents", name)
            if agent.tenant is not None and agent.tenant != DEFAULT_TENANT:
                self.known((*path, "tenant"), agent.tenant, rules.tenants, "tenant")
            self._way_in(path, name, agent)
            self._tier_of(path, agent)
            self.matching((*path, "models"), agent.models, rules.models)
            if agent.limits is not None:
                self.limits((*path, "limits"), agent.limits)
                self._binding(path, agent)
            self._budgets((*path, "budgets"), agent.budgets, agent.models)
            if agent.weight != 1 and not self._by_agent():
                self.report.error(
                    (*path, "weight"),
                    "never used: fairness is by tenant",
                    allowed="fairness: agent",
                )
        self._key_ids()
        self._reached()

    def _by_agent(self) -> bool:
        if self.rules.fairness is not None:
            return self.rules.fairness == "agent"
        return not self.rules.tenants

    def _way_in(self, path: Path, name: str, agent: file.Agent) -> None:
        anonymous = self.rules.edge.anonymous == name
        if not agent.keys and agent.jwt is None and not anonymous:
            self.report.error(
                path,
                "nobody can be this agent",
                allowed="keys, jwt, or edge.anonymous",
                at_key=True,
                of=(("edge",),),
            )
        for index, key in enumerate(agent.keys):
            where = (*path, "keys", index)
            ways = [way for way in (key.hash, key.key, key.pattern) if way is not None]
            if len(ways) != 1:
                self.report.error(
                    where, "holds one way in", allowed="one of hash, key, pattern", of=()
                )
            if key.pattern is not None and (key.id is not None or key.expires is not None):
                self.report.error(where, "a pattern has neither id nor expires", of=())
            if key.pattern is not None and len(key.pattern.rstrip("*?")) < 4:
                self.report.error(
                    (*where, "pattern"),
                    "accepts too much",
                    allowed="at least 4 characters before the first * at its end: soak-*",
                    of=(),
                )
        patterned = [key.pattern for key in agent.keys if key.pattern is not None]
        if patterned and (len(patterned) < len(agent.keys) or agent.jwt is not None):
            self.report.error(
                (*path, "keys"),
                "mixes patterns with other ways in",
                allowed="an agent of its own for patterns: its limits hold for each key",
                at_key=True,
                of=(),
            )
        if agent.jwt is None:
            return
        self.known((*path, "jwt", "issuer"), agent.jwt.issuer, self.rules.issuers, "issuer")
        many = not agent.jwt.match or any(map(globs.is_pattern, agent.jwt.match.values()))
        if many and agent.keys and not patterned:
            self.report.error(
                (*path, "jwt"),
                "stands for many agents, and the keys for one",
                allowed="an agent of its own for the keys",
                at_key=True,
                of=(),
            )

    def _reached(self) -> None:
        """Of agents that the same token or key would fit, the first in the file is taken."""
        tokens: list[tuple[str, str, dict[str, str]]] = []
        patterns: list[tuple[str, str]] = []
        for name, agent in self.rules.agents.items():
            for index, key in enumerate(agent.keys):
                if key.pattern is None:
                    continue
                for other, wide in patterns:
                    if globs.covers(wide, key.pattern):
                        self.report.error(
                            ("agents", name, "keys", index, "pattern"),
                            f"never reached: the agent {other!r} takes all of its keys",
                        )
                patterns.append((name, key.pattern))
            if agent.jwt is None:
                continue
            for other, issuer, match in tokens:
                if issuer == agent.jwt.issuer and all(
                    claim in agent.jwt.match and globs.covers(wide, agent.jwt.match[claim])
                    for claim, wide in match.items()
                ):
                    self.report.error(
                        ("agents", name, "jwt"),
                        f"never reached: the agent {other!r} takes all of its tokens",
                        allowed="the narrower agent first",
                        at_key=True,
                    )
                    break
            tokens.append((name, agent.jwt.issuer, agent.jwt.match))

    def _key_ids(self) -> None:
        seen: dict[str, str] = {}
        values: dict[str, str] = {}
        for name, agent in self.rules.agents.items():
            for index, key in enumerate(agent.keys):
                where: Path = ("agents", name, "keys", index)
                if key.id is not None:
                    if key.id in seen:
                        self.report.error(
                            (*where, "id"),
                            "another key has this id",
                            of=(("agents", seen[key.id]),),
                        )
                    seen[key.id] = name
                value = key.key.reveal() if key.key is not None else key.hash
                if value is not None and values.setdefault(value, name) != name:
                    self.report.error(
                        where,
                        f"the agent {values[value]!r} has the same key",
                        at_key=True,
                        of=(("agents", values[value]),),
                    )

    def _tier_of(self, path: Path, agent: file.Agent) -> None:
        name = agent.tenant or DEFAULT_TENANT
        tenant = self.rules.tenants.get(name)
        caps: list[tuple[Path, str | None]] = [(path, agent.tier_cap)]
        if tenant is not None:
            caps.append((("tenants", name), tenant.tier_cap))
        if agent.tier_cap is not None:
            self.known((*path, "tier_cap"), agent.tier_cap, self.tiers, "tier")
        if agent.tier is None:
            return
        if not self.known((*path, "tier"), agent.tier, self.tiers, "tier"):
            return
        for owner, cap in caps:
            if cap in self.tiers and self.tiers[agent.tier] < self.tiers[cap]:
                self.report.error(
                    (*path, "tier"),
                    f"its calls would start above {dotted(owner)}.tier_cap, which is {cap}",
                    allowed="a tier no more urgent than the cap",
                    of=(owner, ("tiers",)),
                )

    def tenants(self) -> None:
        """Each has agents, and its limits and budgets can act."""
        used = {agent.tenant or DEFAULT_TENANT for agent in self.rules.agents.values()}
        for name, tenant in self.rules.tenants.items():
            path: Path = ("tenants", name)
            if name not in used:
                self.report.error(path, "no agent belongs to this tenant", at_key=True, unless=name)
            if tenant.tier_cap is not None:
                self.known((*path, "tier_cap"), tenant.tier_cap, self.tiers, "tier")
            if tenant.limits is not None:
                self.limits((*path, "limits"), tenant.limits)
            models = [
                pattern
                for agent in self.rules.agents.values()
                if (agent.tenant or DEFAULT_TENANT) == name
                for pattern in agent.models
            ]
            self._budgets((*path, "budgets"), tenant.budgets, tuple(models))
            if tenant.weight != 1 and self._by_agent():
                self.report.error(
                    (*path, "weight"),
                    "never used: fairness is by agent",
                    allowed="fairness: tenant",
                )

    def _binding(self, path: Path, agent: file.Agent) -> None:
        """An agent's limit above all the quota it can reach, or above its tenant's."""
        said = given(agent.limits) if agent.limits is not None else {}
        tenant = self.rules.tenants.get(agent.tenant or DEFAULT_TENANT)
        shared = given(tenant.limits) if tenant is not None and tenant.limits is not None else {}
        for key, limit in said.items():
            if key in shared and limit > shared[key]:
                self.report.error(
                    (*path, "limits", key),
                    f"can never bind: the tenant's {key} is {shared[key]}",
                    allowed=f"at most {shared[key]}",
                    of=(("tenants", agent.tenant or DEFAULT_TENANT),),
                )
                continue
            reach = self._reachable(agent.models, key)
            if reach is None or limit <= reach:
                continue
            what = f"can never bind: all pools it can spend hold {reach} together"
            if key in ("rps", "rpm", "rph", "rpd", "concurrency"):
                self.report.error((*path, "limits", key), what, allowed=f"at most {reach}")
            else:
                self.report.warn(
                    (*path, "limits", key), what.replace("can never", "will hardly"), at_key=True
                )

    def _reachable(self, patterns: tuple[str, ...], key: str) -> int | None:
        """The sum of this limit over all pools of these models; None if one has no such limit."""
        pools: dict[str, int] = {}
        for name in usable(patterns, self.rules.models):
            for rung in deployments_of(self.rules.models[name]):
                limits = [
                    (found[key], pool)
                    for pool in rung.pool
                    if pool in self.rules.pools
                    and key in (found := given(self.rules.pools[pool].limits))
                ]
                if not limits:
                    return None
                least, pool = min(limits)
                pools[pool] = least
        return sum(pools.values()) if pools else None

    def _budgets(
        self, path: Path, budgets: tuple[file.Budget, ...], patterns: tuple[str, ...]
    ) -> None:
        seen: dict[tuple[str, str], int] = {}
        for index, budget in enumerate(budgets):
            where = (*path, index)
            if (budget.tokens is None) == (budget.money is None):
                self.report.error(where, "one thing is counted", allowed="tokens or money", of=())
                continue
            kind = "tokens" if budget.money is None else "money"
            amount = budget.tokens if budget.money is None else budget.money
            if (kind, budget.per) in seen:
                self.report.error(where, f"a second budget of {kind} per {budget.per}", of=())
            seen[kind, budget.per] = amount or 0
            if kind == "money":
                self._priced(where, patterns)
        for kind in ("tokens", "money"):
            day, month = seen.get((kind, "day")), seen.get((kind, "month"))
            if day and month and (day > month or month > day * DAYS_PER_MONTH):
                self.report.error(
                    path,
                    f"of the two budgets of {kind} one can never bind",
                    allowed="a month of more than a day's and at most 31 days' budget",
                    of=(),
                )

    def _priced(self, path: Path, patterns: tuple[str, ...]) -> None:
        """A money budget sees only what has a price."""
        reach = usable(patterns, self.rules.models)
        free = [name for name in reach if price_of(self.rules, name) is None]
        if reach and len(free) == len(reach):
            self.report.error(
                path,
                "can never bind: none of the models has a price",
                allowed="an entry under prices",
            )
        elif free:
            self.report.warn(path, f"these models cost it nothing: {', '.join(free[:10])}")

    def issuers(self) -> None:
        """Each signs for somebody and has one source of keys."""
        used = {agent.jwt.issuer for agent in self.rules.agents.values() if agent.jwt is not None}
        for name, issuer in self.rules.issuers.items():
            path: Path = ("issuers", name)
            if name not in used:
                self.report.error(
                    path, "no agent is signed by this issuer", at_key=True, unless=name
                )
            if (issuer.jwks_url is None) == (issuer.jwks_file is None):
                self.report.error(
                    path, "one source of keys is needed", allowed="jwks_url or jwks_file", of=()
                )
            if issuer.issuer is None and not issuer.spiffe:
                self.report.error(
                    path, "issuer is missing", allowed="issuer, or spiffe: true", of=()
                )

    def anonymous(self) -> None:
        """Calls without a credential come from this machine only."""
        name = self.rules.edge.anonymous
        if name is None or not self.known(("edge", "anonymous"), name, self.rules.agents, "agent"):
            return
        agent = self.rules.agents[name]
        if not agent.loopback_only:
            self.report.error(
                ("edge", "anonymous"),
                f"the agent {name!r} may be called from anywhere",
                allowed="loopback_only: true in that agent",
            )
        if any(key.pattern for key in agent.keys):
            self.report.error(("edge", "anonymous"), "an agent of key patterns needs a key")
