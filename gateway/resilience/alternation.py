"""Two agents of a workflow that answer each other for ever: calls of a workflow in a row. Pure.

Each of them is a new user turn to the other, so no stretch of one conversation shows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gateway.resilience.lately import Lately
from gateway.resilience.memory import IDLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.resilience.loops import LoopRules
    from gateway.units import Micros

KEPT = 64
MOST_KEPT = 512
"""Calls of a workflow that gateways keep together: as many as the rule needs, from `KEPT` to
`MOST_KEPT`. Where a policy allows more rounds than those hold, gateways do not see them together.
"""


class Step(NamedTuple):
    """One call.

    Attributes:
        at: The instant.
        who: Hash of the agent, the same in every process.
        what: Fingerprint of what it calls with; 0 where it says nothing.
    """

    at: Micros
    who: int
    what: int


class Alternation(Lately):
    """The last two calls of a workflow, and for how many calls two agents have alternated.

    Attributes:
        kind: What such lists are called in the fleet's store.
        session: Hash of the workflow's name.
    """

    __slots__ = ("_earlier", "_last", "_run")

    kind = "said"

    def _forget(self) -> None:
        self._last = self._earlier = (0, 0)
        self._run = 0

    def kept(self, rules: LoopRules) -> int:
        """How many calls a fleet keeps of it."""
        return min(MOST_KEPT, max(KEPT, 2 * rules.ping_pong + 2))

    def lasts(self, rules: LoopRules) -> Micros:  # noqa: ARG002 - the same under all rules
        """How long a fleet keeps them."""
        return IDLE

    def retold(self, steps: Iterable[Step], rules: LoopRules, now: Micros) -> None:  # noqa: ARG002
        """All that was called, here and elsewhere, was this; known at `now`."""
        self._forget()
        self.heard_at = now
        for _, who, what in steps:
            self.step(who, what)

    def step(self, who: int, what: int) -> int:
        """One more call; the rounds in which two agents have said the same to each other.

        The same agent with the same call again is a repeated request, and counts nothing.

        Args:
            who: Hash of the agent.
            what: Fingerprint of what it calls with; 0 where it says nothing, which ends a run.
        """
        call = (who, what)
        if call == self._last:
            return self._run // 2
        if call == self._earlier and what:
            self._run += 1
        else:
            self._run = 2 if what and self._last[1] and self._last[0] != who else 1
        if self._last[0] == who:
            self._run = 1
        self._earlier, self._last = self._last, call
        return self._run // 2
