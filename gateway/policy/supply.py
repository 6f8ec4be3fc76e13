"""The supply side of a policy: providers, their quotas, models, ladders, prices. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.policy import globs
from gateway.policy.kinds import KINDS
from gateway.policy.lookups import PER_MODEL, Check, deployments_of, dialects_of, usable

if TYPE_CHECKING:
    from gateway.policy import models as file
    from gateway.policy.problems import Path


class Supply(Check):
    """Names that exist, quotas that are spent, models that are reached, ladders that end."""

    def all(self) -> None:
        """Every mistake of this side is in the report."""
        self.providers()
        self.pools()
        self.models()
        self.ladders()
        self.prices()

    def providers(self) -> None:
        """Each serves something, with keys that may be used for it."""
        for name, provider in self.rules.providers.items():
            path: Path = ("providers", name)
            served = [
                model
                for model, entry in self.rules.models.items()
                if any(rung.provider == name for rung in deployments_of(entry))
            ]
            passes = provider.passthrough and provider.passthrough_pool
            if not served and not passes:
                self.report.error(
                    path,
                    "no model is served by this provider",
                    allowed="a model that names it, or passthrough with a passthrough_pool",
                    at_key=True,
                    unless=name,
                )
            self._provider_keys(path, provider, served)
            for key in ("count_tokens_pool", "passthrough_pool"):
                self.pools_of((*path, key), getattr(provider, key) or (), name)
            if provider.count_tokens_pool and (
                (provider.count_tokens or KINDS[provider.kind].count_tokens) != "relay"
            ):
                self.report.error(
                    (*path, "count_tokens_pool"),
                    "never used: count_tokens is answered here",
                    allowed="count_tokens: relay",
                    of=(),
                )

    def _provider_keys(self, path: Path, provider: file.Provider, served: list[str]) -> None:
        seen: set[str] = set()
        for index, key in enumerate(provider.keys):
            where = (*path, "keys", index)
            if key.id in seen:
                self.report.error((*where, "id"), "another key of this provider has this id", of=())
            seen.add(key.id)
            self.matching((*where, "models"), key.models, served)
        if provider.keys and not any(key.weight for key in provider.keys):
            self.report.error(
                (*path, "keys"),
                "every key is a standby",
                allowed="a weight above 0 for one",
                of=(),
            )
        patterns = [pattern for key in provider.keys for pattern in key.models]
        open_to = usable(patterns, served)
        locked = [model for model in served if provider.keys and model not in open_to]
        if locked:
            self.report.error(
                (*path, "keys"), f"no key may be used for {', '.join(locked[:10])}", at_key=True
            )

    def pools_of(self, path: Path, names: tuple[str, ...], provider: str | None) -> None:
        """Each pool exists and is a quota of this provider, where that is known."""
        for name in names:
            if name == PER_MODEL:
                if len(names) > 1:
                    self.report.error(path, f"{PER_MODEL} stands alone", of=())
                continue
            if not self.known(path, name, self.rules.pools, "pool"):
                continue
            owner = self.rules.pools[name].provider
            if owner not in self.rules.providers:
                continue  # said once, at the pool
            if provider is not None and owner != provider:
                self.report.error(
                    path,
                    f"the pool {name!r} is a quota of the provider {owner!r}",
                    allowed=", ".join(
                        pool
                        for pool, entry in self.rules.pools.items()
                        if entry.provider == provider
                    )
                    or f"a pool of {provider!r}, or {PER_MODEL}",
                )

    def pools(self) -> None:
        """Each is a quota of its provider and is spent by somebody."""
        used = {
            pool
            for model in self.rules.models.values()
            for rung in deployments_of(model)
            for pool in rung.pool
        }
        for provider in self.rules.providers.values():
            used.update(provider.count_tokens_pool or (), provider.passthrough_pool or ())
        for name, pool in self.rules.pools.items():
            path: Path = ("pools", name)
            if name == PER_MODEL:
                self.report.error(path, f"{PER_MODEL} is a word of ours", at_key=True, of=())
            self.known((*path, "provider"), pool.provider, self.rules.providers, "provider")
            if name not in used:
                self.report.error(
                    path,
                    "no model spends this pool",
                    allowed=f"pool: {name} in a model",
                    at_key=True,
                    unless=name,
                )
            self.limits((*path, "limits"), pool.limits)
            if "ramp" in pool.model_fields_set:
                self._ramp((*path, "ramp"), pool)
            if pool.ceilings is not None:
                self._ceilings((*path, "ceilings"), pool)

    def _ramp(self, path: Path, pool: file.Pool) -> None:
        most = pool.limits.itpm or pool.limits.tpm
        if pool.ramp.mode == "off" or (most and most > pool.ramp.floor):
            return
        what = f"the pool admits {most} tokens per minute" if most else "the pool meters no tokens"
        self.report.error(
            path, f"can never bind: {what}", allowed="a floor below the pool's tpm or itpm", of=()
        )

    def _ceilings(self, path: Path, pool: file.Pool) -> None:
        by_number: dict[int, int] = {}
        for tier, share in (pool.ceilings or {}).items():
            if self.known((*path, tier), tier, self.tiers, "tier"):
                by_number[self.tiers[tier]] = share
        if not pool.ceilings:
            self.report.error(path, "names no tier", allowed=", ".join(self.tiers), of=())
        if pool.reserve != "none":
            self.report.error(path, "reserve and ceilings say the same thing", allowed="one", of=())
        falling = [by_number.get(number, 1_000_000) for number in (1, 2, 3)]
        if sorted(falling, reverse=True) != falling:
            self.report.error(
                path,
                "a less urgent tier may fill more than a more urgent one",
                at_key=True,
                of=(("tiers",),),
            )

    def models(self) -> None:
        """Each can be reached, and its rungs have providers and quotas."""
        names = list(self.rules.models)
        spent: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {}
        for position, (name, model) in enumerate(self.rules.models.items()):
            path: Path = ("models", name)
            for earlier in names[:position]:
                if globs.is_pattern(name) and globs.covers(earlier, name):
                    self.report.error(
                        path, f"never reached: {earlier!r} stands before it", at_key=True, of=()
                    )
                    break
            for index, rung in enumerate(deployments_of(model)):
                where = path if index == 0 else (*path, "also", index - 1)
                self._deployment(where, rung)
                target = (rung.provider, rung.upstream or name)
                before = spent.setdefault(target, (rung.pool, name))
                if before[0] != rung.pool:
                    self.report.error(
                        (*where, "pool"),
                        f"{target[1]!r} at {target[0]!r} spends {', '.join(before[0])} as "
                        f"{before[1]!r} and another pool here",
                        allowed="one quota for one upstream model",
                    )

    def _deployment(self, path: Path, rung: file.Deployment) -> None:
        known = self.known((*path, "provider"), rung.provider, self.rules.providers, "provider")
        self.pools_of((*path, "pool"), rung.pool, rung.provider if known else None)
        accounts = {
            repr(self.rules.pools[pool].accounting)
            for pool in rung.pool
            if pool in self.rules.pools
        }
        if len(accounts) > 1:
            self.report.error(
                (*path, "pool"), "these pools differ in accounting", allowed="one accounting"
            )
        if (
            rung.max_output is not None
            and rung.context_window is not None
            and rung.max_output > rung.context_window
        ):
            self.report.error((*path, "max_output"), "larger than the context window", of=())

    def ladders(self) -> None:
        """Each rung can be taken, and no ladder leads back."""
        for name, model in self.rules.models.items():
            path: Path = ("models", name, "ladder")
            if model.downgrade == "never" and model.ladder is not None:
                self.report.error(path, "never taken: downgrade is never", at_key=True, of=())
            for index, rung in enumerate(model.ladder or ()):
                where = (*path, index) if (*path, index) in self.report.spots else path
                self._rung(where, name, rung)
        self._cycles()

    def _rung(self, path: Path, name: str, rung: str) -> None:
        if not self.known(path, rung, self.rules.models, "model"):
            return
        asked = dialects_of(self.rules, self.rules.models[name].provider)
        if not any(
            set(asked) & set(dialects_of(self.rules, entry.provider))
            for entry in deployments_of(self.rules.models[rung])
        ):
            self.report.error(
                path,
                f"never taken: {rung!r} does not speak {' or '.join(asked)}",
                allowed="a model of the same dialect; nothing is translated",
            )

    def _cycles(self) -> None:
        """A ladder that leads back is an error at the rung that closes the circle."""
        done: set[str] = set()
        for start in self.rules.models:
            trail: list[str] = []
            stack: list[tuple[str, int]] = [(start, 0)]
            while stack:
                name, next_rung = stack.pop()
                if next_rung == 0:
                    trail.append(name)
                ladder = self.rules.models[name].ladder or ()
                if next_rung >= len(ladder):
                    done.add(name)
                    trail.pop()
                    continue
                stack.append((name, next_rung + 1))
                rung = ladder[next_rung]
                if rung in trail:
                    circle = " -> ".join([*trail[trail.index(rung) :], rung])
                    self.report.error(
                        ("models", name, "ladder"),
                        f"the ladder is a circle: {circle}",
                        of=tuple([("models", one) for one in trail]),
                    )
                elif rung in self.rules.models and rung not in done:
                    stack.append((rung, 0))

    def prices(self) -> None:
        """Each is the price of something."""
        names = list(self.rules.prices)
        for position, name in enumerate(names):
            path: Path = ("prices", name)
            if not usable((name,), self.rules.models):
                self.report.error(
                    path,
                    f"{name!r} matches no model",
                    allowed=", ".join(list(self.rules.models)[:20]),
                    near=(name, self.rules.models),
                    at_key=True,
                )
            for earlier in names[:position]:
                if globs.is_pattern(name) and globs.covers(earlier, name):
                    self.report.error(
                        path, f"never reached: {earlier!r} stands before it", at_key=True, of=()
                    )
                    break
