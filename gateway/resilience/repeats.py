"""Loops on the tool plane: the same calls again and again, as the gateway sees them arrive. Pure.

The model plane folds a conversation that its client sends along (`loops.py`); here calls come one
by one, from an agent that may hold no session, so what counts is time: calls of one agent within a
window. The rules and their figures are those of the policy's section `loops`:

* same call: canonical arguments, so that order of keys, white space and `1.0` for `1` are no
  escape;
* same call but for numbers and dates, with the same result each time: paging gets something new;
* two agents of a tenant that alternate the same two calls.

A refusal cuts that call alone: any other call passes, and so does the same one once the window has
passed, a person has spoken to the agent on the model plane, the operator has reset it, or the agent
has changed something in between (then reading again is no repetition). Polling tools are not seen.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gateway.resilience.lately import Lately
from gateway.resilience.loops import Rule, Verdict, harder, repeated
from gateway.units import MICRO, Micros

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.resilience.alternation import Step
    from gateway.resilience.loops import LoopRules

KEPT = 32
"""Distinct calls of one agent that are counted; the oldest make room."""
EVENTS = 64
"""Calls of one agent, and their results, that gateways keep together."""
RECENT = 64
"""Calls of one tenant among which alternation is looked for."""
BEYOND: Micros = 5 * MICRO
"""How much longer than they count gateways keep events together: clocks may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """One call in hashes.

    Attributes:
        exact: Tool and canonical arguments.
        masked: The same but for numbers and dates.
        changes: Its tool may change something.
    """

    exact: int
    masked: int
    changes: bool


class Event(NamedTuple):
    """A call that was made, or with a `result` its result that came."""

    at: Micros
    print: Print
    result: int | None = None


class Tally(Lately):
    """What one agent called lately.

    Attributes:
        kind: What such lists are called in the fleet's store.
        session: Hash of the agent's name.
    """

    __slots__ = ("_calls", "_has_read", "_results")

    kind = "called"

    def kept(self, rules: LoopRules) -> int:  # noqa: ARG002 - the same under all rules
        """How many events a fleet keeps of it."""
        return EVENTS

    def lasts(self, rules: LoopRules) -> Micros:
        """How long a fleet keeps them."""
        return rules.window + BEYOND

    def retold(self, events: Iterable[Event], rules: LoopRules, now: Micros) -> None:
        """All that happened, here and elsewhere, was this; known at `now`."""
        self._forget()
        self.heard_at = now
        for at, call, result in events:
            if result is None:
                self.made(call, rules, at)
            else:
                self.returned(call, result, at)

    def _forget(self) -> None:
        self._calls: OrderedDict[int, _Times] = OrderedDict()
        self._results: OrderedDict[int, _Same] = OrderedDict()
        self._has_read = False

    def judge(self, call: Print, rules: LoopRules, now: Micros) -> Verdict | None:
        """What the rules say of this call, were it made now; it is counted by `made`."""
        found: Verdict | None = None
        times = self._calls.get(call.exact)
        if times is not None:
            seen = times.within(now - rules.window) + 1
            found = repeated(Rule.SAME_CALL, seen, rules.same_call, -1)
        same = self._results.get(call.masked)
        if same is not None and now - same.last < rules.window:
            found = harder(found, repeated(Rule.SAME_MASKED, same.count + 1, rules.same_masked, -1))
        return found

    def made(self, call: Print, rules: LoopRules, now: Micros) -> None:
        """The call goes on."""
        times = self._calls.get(call.exact)
        if times is None:
            if not call.changes:
                self._has_read = True
            elif self._has_read:
                self._forget_readings()
            times = self._calls[call.exact] = _Times(changes=call.changes)
            if len(self._calls) > KEPT:
                self._calls.popitem(last=False)
        else:
            self._calls.move_to_end(call.exact)
        times.add(now, most=rules.same_call)

    def _forget_readings(self) -> None:
        self._has_read = False
        for exact in [key for key, times in self._calls.items() if not times.changes]:
            del self._calls[exact]
        for masked in [key for key, same in self._results.items() if not same.changes]:
            del self._results[masked]

    def returned(self, call: Print, result: int, now: Micros) -> None:
        """Its result has come.

        Args:
            call: A call that was `made`.
            result: Hash of the result.
            now: The instant.
        """
        self._has_read = self._has_read or not call.changes
        same = self._results.get(call.masked)
        if same is None or same.result != result:
            same = self._results[call.masked] = _Same(result, changes=call.changes)
        same.count += 1
        same.last = now
        self._results.move_to_end(call.masked)
        if len(self._results) > KEPT:
            self._results.popitem(last=False)


class _Times:
    """When one call was made, as often as its rule cares."""

    __slots__ = ("_at", "changes")

    def __init__(self, *, changes: bool) -> None:
        self._at: deque[Micros] = deque()
        self.changes = changes

    def add(self, now: Micros, *, most: int) -> None:
        """Once more; only the last `most` are kept."""
        self._at.append(now)
        while len(self._at) > most:
            self._at.popleft()

    def within(self, since: Micros) -> int:
        """How often after that instant."""
        return sum(at > since for at in self._at)


class _Same:
    """The result that calls alike got in succession."""

    __slots__ = ("changes", "count", "last", "result")

    def __init__(self, result: int, *, changes: bool) -> None:
        self.result = result
        self.changes = changes
        self.count = 0
        self.last: Micros = 0


class Exchanges(Lately):
    """The last calls of one tenant's agents.

    Attributes:
        kind: What such lists are called in the fleet's store.
        session: 0: nobody resets a tenant by a session's name.
    """

    __slots__ = ("_of", "_recent", "_serial")

    kind = "exchanged"

    def kept(self, rules: LoopRules) -> int:  # noqa: ARG002 - the same under all rules
        """How many calls a fleet keeps of it."""
        return RECENT

    def lasts(self, rules: LoopRules) -> Micros:
        """How long a fleet keeps them."""
        return rules.window + BEYOND

    def retold(self, steps: Iterable[Step], rules: LoopRules, now: Micros) -> None:  # noqa: ARG002
        """All that was called, here and elsewhere, was this; known at `now`."""
        self._forget()
        self.heard_at = now
        for at, who, what in steps:
            self.made(who, what, at)

    def _forget(self) -> None:
        self._recent: deque[int] = deque()
        self._of: dict[int, deque[_Made]] = {}
        self._serial = 0

    def judge(self, agent: int, exact: int, rules: LoopRules, now: Micros) -> Verdict | None:
        """Whether this call, were it made now, goes on alternating with another agent's."""
        own = self._of.get(agent)
        if own is None or own[-1].call != exact:
            return None
        # Whoever made too few calls to be warned of is not looked at: of many agents most are so.
        rounds = rules.ping_pong - 1
        if len(own) < rounds - 1:
            return None
        since = now - rules.window
        longest = 0
        for who, theirs in self._of.items():
            if len(theirs) >= rounds and who != agent:
                longest = max(longest, _alternating(own, theirs, exact, since))
        return repeated(Rule.PING_PONG, longest // 2, rules.ping_pong, -1)

    def made(self, agent: int, exact: int, now: Micros) -> None:
        """The call goes on."""
        self._serial += 1
        own = self._of.get(agent)
        if own is None:
            own = self._of[agent] = deque()
        own.append(_Made(self._serial, exact, now))
        self._recent.append(agent)
        if len(self._recent) > RECENT:
            oldest = self._recent.popleft()
            calls = self._of[oldest]
            calls.popleft()
            if not calls:
                del self._of[oldest]


class _Made(NamedTuple):
    """One call of an agent: its place among all of its tenant's, its print, its instant."""

    serial: int
    call: int
    at: Micros


def _alternating(own: deque[_Made], other: deque[_Made], exact: int, since: Micros) -> int:
    """Calls at the end that are ours and the other's in turn, always the same two."""
    count, mine = 1, False
    ours, theirs = len(own) - 1, len(other) - 1
    same = other[-1].call
    while True:
        ours_next = ours >= 0 and (theirs < 0 or own[ours].serial > other[theirs].serial)
        if ours_next is not mine or (not mine and theirs < 0):
            return count
        last = own[ours] if mine else other[theirs]
        if last.at <= since or last.call != (exact if mine else same):
            return count
        if mine:
            ours -= 1
        else:
            theirs -= 1
        count, mine = count + 1, not mine
