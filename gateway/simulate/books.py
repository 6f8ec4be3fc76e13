"""What happened in a run, written down as it happens; `report.py` makes figures of it.

Waits are counted from asking to the sending of the attempt that was served: what the gateway's own
`tidegate-queue-ms` says, the network's share left out. Use is what the provider's meter was charged
in a span over what its limit allows in it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from typing import TYPE_CHECKING

from gateway.units import MICRO, Micros, Tokens

if TYPE_CHECKING:
    from gateway.resilience.attempts import Kind
    from gateway.simulate.meters import Ticket
    from gateway.simulate.scopes import Scope
    from gateway.simulate.workload import Op

DIMENSIONS = ("requests", "tokens", "input", "output")
MOST_EXAMPLES = 20
"""Refused calls that are told one by one, per rule."""

DIGESTED = 1 << 16
"""Bytes gathered before they are hashed."""


class Charges:
    """What one pool was charged, per second and dimension."""

    __slots__ = ("by_name",)

    def __init__(self) -> None:
        self.by_name: dict[str, array[int]] = {}

    def add(self, name: str, second: int, amount: Tokens) -> None:
        """So much more, or less, in that second."""
        series = self.by_name.get(name)
        if series is None:
            series = self.by_name[name] = array("q")
        if second >= len(series):
            series.extend([0] * (second + 1 - len(series)))
        series[second] += amount

    def total(self, name: str, start: Micros, end: Micros) -> Tokens:
        """Charged between two instants, whole seconds."""
        series = self.by_name.get(name)
        return sum(series[start // MICRO : end // MICRO]) if series is not None else 0


class Refused:
    """Calls that one rule refused."""

    __slots__ = ("code", "count", "examples", "who")

    def __init__(self, code: str) -> None:
        self.code = code
        self.count = 0
        self.who: Counter[str] = Counter()
        self.examples: list[tuple[int, Micros, str]] = []


class Books:
    """The account of one run.

    Attributes:
        made, done, gone: Calls asked, answered, and given up by their clients, per tier 1 to 3.
        waits: Micros per answered call, per tier.
        lasts: Micros from asking to the answer's end, per tier.
        provider_429: Quota refusals of the provider, by kind; `sick`: faults and overloads.
        sent: Attempts that arrived at the provider.
        charges: By pool.
        rules: Refusals by (rule, code).
        tokens: Served tokens by tenant.
        overtakes: Grants past an older waiter, where a strategy can say so.
        hints, hints_early, places_lost: Advised returns, those that were refused again, and those
            that came back to a worse place than they had left.
        script_calls: Calls to the shared store.
    """

    def __init__(self) -> None:
        self.made = [0, 0, 0]
        self.done = [0, 0, 0]
        self.gone = [0, 0, 0]
        self.failed = [0, 0, 0]
        self.waits = [array("q") for _ in range(3)]
        self.lasts = [array("q") for _ in range(3)]
        self.provider_429: Counter[str] = Counter()
        self.refused_at: Counter[int] = Counter()
        self.sick = 0
        self.sent = 0
        self.charges: dict[str, Charges] = {}
        self.rules: dict[tuple[str, str], Refused] = {}
        self.tokens: Counter[str] = Counter()
        self.money = 0
        self.downgraded = 0
        self.foreign_refused = 0
        self.foreign_charged = 0
        self.overtakes: int | None = None
        self.hints = 0
        self.hints_early = 0
        self.places_lost = 0
        self.script_calls = 0
        self.line: list[tuple[Micros, tuple[int, int, int]]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._pending: list[str] = []

    # --- calls

    def asked(self, op: Op) -> None:
        """One more call."""
        self.made[op.tier - 1] += 1

    def retiered(self, before: int, after: int) -> None:
        """Policy gave the call just asked another tier than it wished for."""
        self.made[before - 1] -= 1
        self.made[after - 1] += 1

    def ended(self, op: Op, now: Micros, *, complete: bool) -> None:
        """An answer is over."""
        tier = op.tier - 1
        (self.done if complete else self.gone)[tier] += 1
        self.waits[tier].append(op.sent - op.asked)
        self.lasts[tier].append(now - op.asked)
        self.tokens[op.tenant] += op.input + op.produced
        self._note(op.number, op.sent, now)

    def left(self, op: Op, now: Micros) -> None:
        """The client hung up before its answer began."""
        self.gone[op.tier - 1] += 1
        self._note(op.number, -1, now)

    def refused(self, op: Op, now: Micros, *, because: str, code: str, hint: Micros | None) -> None:
        """The call ended in a refusal."""
        self.failed[op.tier - 1] += 1
        rule = self.rules.get((because, code))
        if rule is None:
            rule = self.rules[because, code] = Refused(code)
        rule.count += 1
        rule.who[op.agent] += 1
        if len(rule.examples) < MOST_EXAMPLES:
            rule.examples.append((op.number, op.asked, op.agent))
        self._note(op.number, -2 if hint is None else hint, now)

    # --- the provider

    def turned_away(self, op: Op, kind: Kind, now: Micros) -> None:
        """The provider did not serve an attempt."""
        self.sent += 1
        if kind.value in ("quota", "ramp", "period"):
            self.provider_429[kind.value] += 1
            self.refused_at[now // MICRO] += 1
        else:
            self.sick += 1
        self._note(op.number, -3, now)

    def arrived(
        self, op: Op, scopes: tuple[Scope, ...], tickets: list[Ticket], now: Micros
    ) -> None:
        """The provider's meters took an attempt."""
        del op
        self.sent += 1
        second = now // MICRO
        for scope, ticket in zip(scopes, tickets, strict=True):
            charges = self.charges.get(scope.pool)
            if charges is None:
                charges = self.charges[scope.pool] = Charges()
            for name, amount in ticket.reserved.items():
                if amount and name in DIMENSIONS:
                    charges.add(name, second, amount)

    def produced(self, scope: Scope, output: Tokens, now: Micros) -> None:
        """A realtime meter was charged for output."""
        charges, second, quota = self.charges[scope.pool], now // MICRO, scope.meter.quota
        if quota.tokens is not None:
            charges.add("tokens", second, output * quota.accounting.output_weight)
        if quota.output is not None:
            charges.add("output", second, output)

    def returned(self, scope: Scope, ticket: Ticket, before: Tokens) -> None:
        """A settling meter gave unused output back, where it was charged."""
        unused, charges, second = (
            before - ticket.output,
            self.charges[scope.pool],
            ticket.at // MICRO,
        )
        quota = scope.meter.quota
        if quota.tokens is not None:
            charges.add("tokens", second, -unused * quota.accounting.output_weight)
        if quota.output is not None:
            charges.add("output", second, -unused)

    # --- the digest

    def _note(self, number: int, sent: Micros, ended: Micros) -> None:
        self._pending.append(f"{number} {sent} {ended}\n")
        if len(self._pending) >= DIGESTED // 16:
            self._flush()

    def _flush(self) -> None:
        self._hash.update("".join(self._pending).encode())
        self._pending.clear()

    def digest(self) -> str:
        """The same for equal runs, another one for any other order or instant of what happened."""
        self._flush()
        return self._hash.hexdigest()
