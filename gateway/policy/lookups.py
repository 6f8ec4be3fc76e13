"""What both sides of a policy share: its names, tiers, prices and limits, looked up. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admission.ramp import RampRules
from gateway.policy import globs
from gateway.policy.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from gateway.policy import models as file
    from gateway.policy.problems import Path, Report
    from gateway.units import Mode

PER_MODEL = "per_model"
"""In place of a pool: each concrete model name is a pool of its own, without quota."""

DEFAULT_TENANT = "default"
DEFAULT_TIERS = ((1, "interactive"), (2, "standard"), (3, "batch"))

MINUTES_PER_DAY = 1_440


def dialects_of(rules: file.PolicyFile, provider: str) -> tuple[str, ...]:
    """Dialects that the provider speaks; () if there is none of this name."""
    found = rules.providers.get(provider)
    if found is None:
        return ()
    return found.dialects or KINDS[found.kind].dialects


def deployments_of(model: file.Model) -> tuple[file.Deployment, ...]:
    """The model's own rungs, first choice first."""
    return (model, *model.also)


def tier_numbers(rules: file.PolicyFile) -> dict[str, int]:
    """Tier names to numbers, shipped tiers filling the numbers left free."""
    numbers: dict[str, int] = {name: tier.number for name, tier in rules.tiers.items()}
    for number, name in DEFAULT_TIERS:
        if number not in numbers.values():
            numbers.setdefault(name, number)
    return numbers


def usable(patterns: Iterable[str], models: Iterable[str]) -> list[str]:
    """The public models (or families) that some pattern can match."""
    wanted = tuple(patterns)
    return [model for model in models if any(globs.overlap(want, model) for want in wanted)]


def ramps_of(rules: file.PolicyFile, mode: Callable[[str], Mode]) -> dict[str, RampRules]:
    """The slope limits of pools, without those that could never be below the pool's own limit.

    Args:
        rules: The policy.
        mode: A rule's mode, weakened by the file's.
    """
    found = {}
    for name, pool in rules.pools.items():
        most, ramp = pool.limits.itpm or pool.limits.tpm or 0, pool.ramp
        if most > ramp.floor and ramp.mode != "off":
            found[f"pool:{name}"] = RampRules(
                always=ramp.when == "always",
                floor=ramp.floor,
                growth_ppm=ramp.growth,
                most=most,
                mode=mode(ramp.mode),
                because=f"pools.{name}.ramp",
            )
    return found


class Check:
    """What both sides of a policy ask of names, patterns and limits."""

    def __init__(self, rules: file.PolicyFile, report: Report) -> None:
        self.rules = rules
        self.report = report
        self.tiers = tier_numbers(rules)

    def known(self, path: Path, name: str, names: Collection[str], noun: str) -> bool:
        """Whether the name is one of them; else a problem says so."""
        if name in names:
            return True
        self.report.error(
            path,
            f"no {noun} is named {name!r}",
            allowed=", ".join(list(names)[:20]) or f"none is defined: add it under {noun}s",
            near=(name, names),
        )
        return False

    def matching(self, path: Path, patterns: tuple[str, ...], names: Collection[str]) -> None:
        """Each pattern matches some public model; a repetition is a warning."""
        for index, pattern in enumerate(patterns):
            where = (*path, index) if (*path, index) in self.report.spots else path
            if not usable((pattern,), names):
                self.report.error(
                    where,
                    f"{pattern!r} matches no model",
                    allowed=", ".join(list(names)[:20]),
                    near=(pattern, names),
                )
            for earlier in patterns[:index]:
                if globs.covers(earlier, pattern):
                    self.report.warn(where, f"{pattern!r} is contained in {earlier!r}")
                    break

    def limits(self, path: Path, limits: file.Limits) -> None:
        """The limits of one entry, beside each other."""
        said = given(limits)
        if not said:
            self.report.error(
                path, "limits nothing", allowed="rpm, tpm, itpm, otpm, rpd, tpd, concurrency, …"
            )
        for key, other, factor in _WIDER:
            if key in said and other in said and said[key] > said[other] * factor:
                self.report.error(
                    (*path, key),
                    f"can never bind: {other} {said[other]} lets through less",
                    allowed=f"at most {said[other] * factor}",
                )


def price_of(rules: file.PolicyFile, name: str) -> file.Price | None:
    """The price of a public model or family: exact names first, then patterns in order."""
    exact = rules.prices.get(name)
    if exact is not None:
        return exact
    for pattern, price in rules.prices.items():
        if globs.covers(pattern, name):
            return price
    return None


_WIDER = (
    ("rpm", "rps", 61),
    ("rph", "rpm", 61),
    ("rpd", "rph", 25),
    ("rpd", "rpm", MINUTES_PER_DAY + 1),
    ("tph", "tpm", 61),
    ("tpd", "tph", 25),
    ("tpd", "tpm", MINUTES_PER_DAY + 1),
    ("itpd", "itpm", MINUTES_PER_DAY + 1),
    ("otpd", "otpm", MINUTES_PER_DAY + 1),
    ("itpm", "tpm", 1),
    ("otpm", "tpm", 1),
    ("itpd", "tpd", 1),
    ("otpd", "tpd", 1),
)
"""A limit, a narrower one, and the most of the first that the second can let through: a meter that
is usable all at once lets one burst through on top of its rate, hence one more."""


def given(limits: file.Limits) -> dict[str, int]:
    """The limits that were written."""
    return {
        key: value
        for key in (
            "rps", "rpm", "rph", "rpd", "tpm", "tph", "tpd", "itpm", "itpd", "otpm", "otpd",
            "concurrency",
        )
        if (value := getattr(limits, key)) is not None
    }  # fmt: skip
