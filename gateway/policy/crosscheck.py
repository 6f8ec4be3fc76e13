"""What entries of a policy must be to each other: names that exist, rules that can act. Pure.

Three questions are asked of every entry. Does each name it holds match something? Is it itself
used by something? Can it ever decide anything? A "no" is an error, because the commonest public
fault of gateways is the limit that silently does nothing (apache/apisix-website PR#2028,
envoyproxy/ai-gateway #1754, #1866). Where "never" cannot be proved it is a warning: ADR 11 lists
which is which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.policy.demand import Demand
from gateway.policy.servers import ToolServers
from gateway.policy.supply import Supply
from gateway.policy.tool_rules import ToolRules

SHORTEST_SIGNING_KEY = 24
"""Characters: 24 bytes are the least of the Standard Webhooks specification."""

if TYPE_CHECKING:
    from collections.abc import Collection

    from gateway.policy import models as file
    from gateway.policy.problems import Path, Report


def crosscheck(rules: file.PolicyFile, report: Report, *, literals: Collection[Path]) -> None:
    """Every mistake between entries is in the report.

    Args:
        rules: Valid entry by entry.
        report: Takes problems and warnings.
        literals: Paths of secrets that were written in plain.
    """
    Supply(rules, report).all()
    Demand(rules, report).all()
    ToolServers(rules, report).all()
    ToolRules(rules, report).all()
    _process(rules, report)
    _plain_secrets(rules, report, literals)


def _process(rules: file.PolicyFile, report: Report) -> None:
    retry, breakers = rules.retry, rules.breakers
    if retry.base > retry.cap:
        report.error(("retry", "base"), "longer than cap")
    if breakers.base > breakers.cap:
        report.error(("breakers", "base"), "longer than cap")
    if breakers.fast.window >= breakers.slow.window:
        report.error(("breakers", "fast", "window"), "not shorter than slow.window")
    _webhooks(rules, report)
    for name, provider in rules.providers.items():
        deadlines = provider.timeouts
        for part in ("first_byte", "idle", "connect"):
            if part in deadlines.model_fields_set and getattr(deadlines, part) > deadlines.total:
                report.error(
                    ("providers", name, "timeouts", part), "can never pass: total is shorter"
                )


def _webhooks(rules: file.PolicyFile, report: Report) -> None:
    hooks = rules.holds.webhooks
    path: Path = ("holds", "webhooks")
    if (hooks.hosts or hooks.alerts) and hooks.signing_key is None:
        report.error((*path, "signing_key"), "is missing: deliveries are never sent unsigned")
    if hooks.signing_key is not None and len(hooks.signing_key.reveal()) < SHORTEST_SIGNING_KEY:
        report.error(
            (*path, "signing_key"), f"is too short: at least {SHORTEST_SIGNING_KEY} characters"
        )
    if (hooks.signing_key or hooks.networks) and not (hooks.hosts or hooks.alerts):
        report.error(path, "can never act: neither hosts nor alerts name a target")


def _plain_secrets(rules: file.PolicyFile, report: Report, literals: Collection[Path]) -> None:
    for path in literals:
        if path[0] == "providers" and (path[2] != "keys" or _local(rules, str(path[1]))):
            continue
        report.warn(
            path,
            "a secret in plain text",
            allowed="${NAME} or ${file:/path}",
        )


def _local(rules: file.PolicyFile, provider: str) -> bool:
    url = rules.providers[provider].base_url
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    return host.startswith(("127.", "localhost", "[::1]"))
