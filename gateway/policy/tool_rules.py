"""Rules of tools: mistakes between their entries, and the compiled form. Pure."""

from __future__ import annotations

import base64
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gateway import toolrules as made
from gateway.admission.profiles import Profile, Shape, pool_spec
from gateway.contracts import conditions
from gateway.contracts.screen import Action, Screen, ScreenRule
from gateway.contracts.validators import Pattern
from gateway.policy.lookups import Check, given

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.policy import models as file
    from gateway.policy.problems import Path
    from gateway.units import Mode

    Weaken = Callable[[str], Mode]

TESTS = (
    "type", "min", "max", "above", "below", "min_length", "max_length", "pattern", "one_of",
    "none_of", "money", "at_least", "at_most", "equals", "differs", "required",
)  # fmt: skip
BOUNDS = (("min", "max"), ("min_length", "max_length"))


class ToolRules(Check):
    """Rules of tools that can act, and questions that somebody can answer."""

    def all(self) -> None:
        """Every mistake of the rules of tools is in the report."""
        asked = False
        for name, server in self.rules.servers.items():
            for pattern, rule in server.tools.items():
                path: Path = ("servers", name, "tools", pattern)
                asked = self._rule(path, rule) or asked
                self._reconcile(path, rule, server.tools)
        approvers = self.rules.approvals.approvers
        if approvers and not asked:
            self.report.warn(("approvals", "approvers"), "no rule of a tool asks for an approval")

    def _rule(self, path: Path, rule: file.ToolRule) -> bool:
        """Whether it asks for approvals."""
        for part, listed in (("arguments", rule.arguments), ("results", rule.results)):
            for index, condition in enumerate(listed):
                self._condition((*path, part, index), condition)
        self._limits(path, rule.limits)
        asked = self._approve((*path, "approve"), rule.approve)
        for name, case in rule.cases.items():
            where = (*path, "cases", name)
            for index, condition in enumerate(case.when):
                self._condition((*where, "when", index), condition)
            self._limits(where, case.limits)
            asked = self._approve((*where, "approve"), case.approve) or asked
            if not (case.deny or case.limits or case.approve):
                self.report.error(where, "says nothing", allowed="deny, limits or approve")
        if rule.duplicates and rule.effect == "read":
            self.report.error(
                (*path, "duplicates"), "never acts: what only reads leaves no effect", at_key=True
            )
        return asked

    def _reconcile(
        self, path: Path, rule: file.ToolRule, tools: Mapping[str, file.ToolRule]
    ) -> None:
        """A queryable tool names one that only reads, and nobody else does."""
        said = rule.reconcile
        if (said is not None) is not (rule.effect == "queryable"):
            self.report.error(
                path, "effect: queryable and reconcile go together", at_key=True,
                allowed="both or neither",
            )  # fmt: skip
        if said is None:
            return
        for part, listed in (("done", said.done), ("absent", said.absent)):
            for index, condition in enumerate(listed):
                self._condition((*path, "reconcile", part, index), condition)
        fitting = (one for name, one in tools.items() if fnmatchcase(said.tool, name))
        reader = tools.get(said.tool) or next(fitting, None)
        if reader is None or reader.effect != "read":
            self.report.error(
                (*path, "reconcile", "tool"),
                f"{said.tool!r} is not declared to read only",
                allowed="a tool of this server with effect: read",
            )

    def _condition(self, path: Path, condition: file.Condition) -> None:
        if not any(name in condition.model_fields_set for name in TESTS):
            self.report.error(path, "says nothing of its values", allowed=", ".join(TESTS))
        for low, high in BOUNDS:
            least, most = getattr(condition, low), getattr(condition, high)
            if least is not None and most is not None and least > most:
                self.report.error((*path, low), f"above {high}: nothing could meet both")
        if not condition.money:
            for name in ("digits", "currency"):
                if name in condition.model_fields_set:
                    self.report.error((*path, name), "never used without money", at_key=True)

    def _limits(self, path: Path, listed: tuple[file.ToolLimits, ...]) -> None:
        for index, limits in enumerate(listed):
            self.limits((*path, "limits", index), limits)

    def _approve(self, path: Path, approve: file.Approve | None) -> bool:
        if approve is None:
            return False
        known = self.rules.approvals.approvers
        if not known:
            self.report.error(
                path, "nobody could agree: approvals.approvers is empty",
                allowed="a key of `tidegate approvals key`", at_key=True,
            )  # fmt: skip
        for index, name in enumerate(approve.approvers):
            if known and name not in known:
                where = (*path, "approvers", index)
                self.report.error(
                    where if where in self.report.spots else where[:-1],
                    f"{name!r} is no approver",
                    allowed=", ".join(known),
                )
        able = len(set(approve.approvers or known))
        if known and approve.signatures > able:
            self.report.error(
                (*path, "signatures"),
                f"{approve.signatures} must agree, and {able} may",
                allowed=f"at most {able}",
            )
        return True


class RuleCompiler:
    """Rules of one server's tools.

    Args:
        server: Its name.
        weaken: A rule's mode, weakened by the file's.
        revision: Of the snapshot.
    """

    def __init__(self, server: str, *, weaken: Weaken, revision: int) -> None:
        self._server = server
        self._weaken = weaken
        self._revision = revision

    def rule(self, pattern: str, said: file.ToolRule) -> made.ToolRule:
        """The rule of that pattern."""
        because = f"servers.{self._server}.tools.{pattern}"
        return made.ToolRule(
            pattern=pattern,
            deny=said.deny,
            effect=said.effect,
            polling=said.polling,
            duplicates=said.duplicates or 0,
            contract=self._weaken(said.contract),
            pass_unusable=said.unusable_schema == "pass",
            arguments=tuple(map(condition, said.arguments)),
            results=tuple(map(condition, said.results)),
            limits=self._limits(said.limits, because),
            approve=_approve(said.approve, because),
            cases=tuple(self._case(because, *item) for item in said.cases.items()),
            reconcile=_reconcile(said.reconcile, because),
            denial=made.Denial(said.denial) if said.denial else None,
            because=because,
        )

    def _case(self, rule: str, name: str, said: file.ToolCase) -> made.ToolCase:
        because = f"{rule}.cases.{name}"
        return made.ToolCase(
            name=name,
            when=tuple(map(condition, said.when)),
            deny=said.deny,
            limits=self._limits(said.limits, because),
            approve=_approve(said.approve, because),
            because=because,
        )

    def _limits(
        self, listed: tuple[file.ToolLimits, ...], because: str
    ) -> tuple[made.ToolLimit, ...]:
        return tuple(
            self._limit(said, f"{because}.limits[{index}]") for index, said in enumerate(listed)
        )

    def _limit(self, said: file.ToolLimits, because: str) -> made.ToolLimit:
        limits = given(said)
        spec = pool_spec(
            name=f"tool:{because.removeprefix('servers.')}",
            limits={key: limit for key, limit in limits.items() if key != "concurrency"},
            shape=Shape.OWN,
            profile=Profile.RESERVE_SETTLE,
            concurrency=limits.get("concurrency", 0),
            queue=said.max_wait != 0,
            mode=self._weaken(said.mode),
            because=because,
            reasons={key: f"{because}.{key}" for key in limits},
            revision=self._revision,
        )
        spec = replace(spec, concurrency_because=f"{because}.concurrency")
        return made.ToolLimit(spec=spec, per=said.per, wait=said.max_wait)


def condition(said: file.Condition) -> conditions.Condition:
    """The condition with its paths and its expression read."""

    def at(path: str | None) -> tuple[str | int, ...]:
        return conditions.steps(path) if path else ()

    return conditions.Condition(
        path=said.path,
        at=at(said.path),
        kind=said.type or "",
        min=said.min,
        max=said.max,
        above=said.above,
        below=said.below,
        shortest=said.min_length,
        longest=said.max_length,
        matches=Pattern(said.pattern).found if said.pattern is not None else None,
        form=said.pattern or "",
        one_of=said.one_of,
        none_of=said.none_of,
        money=said.money,
        digits=said.digits,
        currency=at(said.currency),
        at_least=at(said.at_least),
        at_most=at(said.at_most),
        equals=at(said.equals),
        differs=at(said.differs),
        required=said.required,
    )


def _reconcile(said: file.Reconcile | None, because: str) -> made.Reconcile | None:
    if said is None:
        return None
    return made.Reconcile(
        tool=said.tool,
        arguments=tuple((name, conditions.steps(path)) for name, path in said.arguments.items()),
        done=tuple(map(condition, said.done)),
        absent=tuple(map(condition, said.absent)),
        because=f"{because}.reconcile",
    )


def _approve(said: file.Approve | None, because: str) -> made.Approve | None:
    if said is None:
        return None
    return made.Approve(
        reason=said.reason,
        expires=said.expires,
        approvers=said.approvers,
        signatures=said.signatures,
        because=f"{because}.approve",
    )


def approval_rules(said: file.Approvals) -> made.ApprovalRules:
    """Who may consent."""
    return made.ApprovalRules(
        approvers={
            name: base64.b64decode(key.partition(":")[2]) for name, key in said.approvers.items()
        },
        wait=said.wait,
        keep=said.keep,
        max_open=said.max_open,
        max_kept=said.max_kept,
    )


def effect_rules(said: file.Effects) -> made.EffectRules:
    """What the record keeps."""
    return made.EffectRules(
        keep=said.keep,
        max_kept=said.max_kept,
        max_bytes=said.max_bytes,
        max_answer=said.max_answer,
    )


def screen(said: file.Screen, *, weaken: Weaken) -> Screen:
    """What results are looked through for."""
    return Screen(
        mode=weaken(said.mode),
        rules=tuple(
            ScreenRule(
                name=name,
                pattern=Pattern(rule.pattern),
                action=Action(rule.action),
                because=f"screen.rules.{name}",
            )
            for name, rule in said.rules.items()
        ),
    )
