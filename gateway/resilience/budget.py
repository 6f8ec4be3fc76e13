"""Retries allowed per success (`admission.md` §12): what keeps retries from multiplying an outage.

Source: retry budgets of Finagle and linkerd2-proxy (`retry/budget.rs`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from gateway.resilience.backoff import BackoffRules


class RetryBudget:
    """A balance in millionths of a retry: successes and time deposit, retries withdraw."""

    __slots__ = ("_at", "_balance", "_rules")

    def __init__(self, rules: BackoffRules, *, now: Micros) -> None:
        self._rules = rules
        self._at = now
        self._balance = min(rules.budget_max, 10) * MICRO

    @property
    def balance(self) -> int:
        """Whole retries that could be taken now, before refill."""
        return self._balance // MICRO

    def replace_rules(self, rules: BackoffRules) -> None:
        """A newer policy's rules from now on; the balance is kept as far as they allow."""
        if rules is not self._rules:
            self._rules = rules
            self._add(0)

    def _add(self, amount: int) -> None:
        balance, most = self._balance + amount, self._rules.budget_max * MICRO
        self._balance = min(balance, most)

    def succeeded(self) -> None:
        """A call ended well: it earns a fraction of a retry."""
        rules = self._rules
        balance, most = self._balance + rules.budget_ratio_ppm, rules.budget_max * MICRO
        self._balance = balance if balance < most else most  # noqa: FURB136 - every call

    def take(self, *, now: Micros) -> bool:
        """Whether one retry may be made; if so it is taken."""
        elapsed = max(0, now - self._at)
        self._at = max(self._at, now)
        self._add(min(elapsed, 3_600 * MICRO) * self._rules.budget_min_per_second)
        if self._balance < MICRO:
            return False
        self._balance -= MICRO
        return True
