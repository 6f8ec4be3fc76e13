"""`tidegate check` and `tidegate schema`: the loader itself, and the models as JSON Schema."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from gateway.errors import PolicyError, PolicyProblem
from gateway.policy.compile import compile as compiled
from gateway.policy.load import load
from gateway.policy.models import PolicyFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gateway.policy.load import Policy

PROVIDED: Final[Mapping[str, str]] = {
    "TIDEGATE_DEV_KEY": "tg_dev_0123456789abcdef0123456789abcdef",
    "TIDEGATE_EMULATOR_URL": "http://127.0.0.1:9",
}
"""Variables that `tidegate serve` sets itself before it loads; a check stands in for it."""

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a check found.

    Attributes:
        ok: Whether a gateway would take this policy.
        digest: Of the files' content; "" where they do not hold.
        counts: Entries per section.
    """

    ok: bool
    path: str
    digest: str = ""
    files: tuple[str, ...] = ()
    problems: tuple[PolicyProblem, ...] = ()
    warnings: tuple[PolicyProblem, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        """For people: one line per problem and warning, and a last line that sums up."""
        lines = [str(problem) for problem in self.problems]
        lines += [f"{warning} (warning)" for warning in self.warnings]
        if self.ok:
            counts = ", ".join(f"{number} {section}" for section, number in self.counts)
            lines.append(f"{self.path}: policy holds: {counts}")
        else:
            number = len(self.problems)
            lines.append(f"{self.path}: {number} problem{'s' if number != 1 else ''}")
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """For programs: one object."""
        found: dict[str, Any] = asdict(self)
        found["counts"] = dict(self.counts)
        return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def check(path: Path, env: Mapping[str, str], *, secrets: bool = True) -> CheckResult:
    """Whether a gateway started with this environment would take the policy; changes nothing.

    Args:
        path: File or folder.
        env: Variables it may refer to.
        secrets: False where secrets are absent, as in CI: references are checked in form only.
    """
    known = {**PROVIDED, **env}
    try:
        policy = load(path, env=known) if secrets else load_without_secrets(path, known)
        compiled(policy, revision=1)
    except PolicyError as wrong:
        return CheckResult(ok=False, path=str(path), problems=wrong.problems)
    rules = policy.rules
    sections = ("providers", "pools", "models", "tiers", "tenants", "agents", "issuers", "prices")
    return CheckResult(
        ok=True,
        path=str(path),
        digest=policy.digest,
        files=policy.files,
        warnings=policy.warnings,
        counts=tuple(
            (name, len(getattr(rules, name))) for name in sections if getattr(rules, name)
        ),
    )


def load_without_secrets(path: Path, env: Mapping[str, str]) -> Policy:
    """The policy, for those who will not serve it: absent secrets have placeholders.

    Raises:
        PolicyError: With every problem found; references are checked in form only.
    """
    return load(path, env=_Placeholders({**PROVIDED, **env}), read_secret=_placeholder)


def _placeholder(name: str) -> str:
    """Distinct for each name, and a URL, because base URLs may be references too."""
    return "http://placeholder.invalid/" + "".join(c if c.isalnum() else "-" for c in name)


class _Placeholders(dict[str, str]):
    """An environment in which every variable has a value."""

    def get(self, key: str, default: object = None, /) -> str:  # noqa: ARG002
        return super().get(key) or _placeholder(key)


def json_schema() -> str:
    """The JSON Schema of a policy file, the same on every machine, for editors and CI."""
    schema = _for_editors(PolicyFile.model_json_schema())
    whole = {
        "$schema": SCHEMA_ID,
        "title": "Tidegate policy",
        "description": PolicyFile.__doc__,
        **{key: value for key, value in schema.items() if key not in ("title", "description")},
    }
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _for_editors(node: Any) -> Any:  # noqa: ANN401 - JSON
    """Without `null`, which the loader refuses, and without defaults in units of ours."""
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {key: _for_editors(value) for key, value in node.items()}
    branches = found.get("anyOf")
    if isinstance(branches, list) and {"type": "null"} in branches:
        rest = [branch for branch in branches if branch != {"type": "null"}]
        found.pop("anyOf")
        found = {**(rest[0] if len(rest) == 1 else {"anyOf": rest}), **found}
    default = found.get("default")
    numeric = found.get("type") in ("integer", "number")
    if (
        default is None
        or isinstance(default, (dict, list))
        or (isinstance(default, (int, float)) and not isinstance(default, bool) and not numeric)
    ):
        found.pop("default", None)
    return found
