"""Circuit breaker: closed, open, half-open, shut as a transition table (`admission.md` §13).

One breaker per (provider, deployment, model). Pure: `now` and `rng` are parameters. Failures count
over two rolling windows, a fast one for outages and a slow one for trickles. *Sick* states keep
callers away; a pool cut by quota is not sick, its breaker only starts the ladder.

    closed ──fault ratio, faults in a row, 3 identical quota refusals──▶ open
    open ──until passed──▶ half_open ──3 good probes in a row──▶ closed      (sick)
    open ──until passed──▶ closed; one more identical refusal opens again    (quota)
    half_open ──bad probe──▶ open (delay continues, decorrelated, at most `cap`)
    half_open ──probe without verdict, or silent for `probe_lease`──▶ half_open, next probe
    any ──period, money, last credential out──▶ shut ──reset time, new credential──▶ half_open

A sick breaker that has closed lets calls in slowly: whoever waited for it would otherwise arrive at
once and make a provider that is just back fall over again. As many may be under way without a head
as probes were good, one more with every good head, and any number after `EASE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from gateway.resilience.probes import Handed
from gateway.units import MICRO, Micros, Mode, Rng, RuleId

FAST_CELLS = 20
SLOW_CELLS = 30
MOST_CELLS = 256
"""Cells of time of which results of other gateways are kept."""
MOST_UNDECIDED = 100
"""Attempts without a head that speak for the upstream at most: where failures are slow as well, a
hundred calls a second must still open the breaker within a second of the first."""

SPENT_LOOK: Micros = 900 * MICRO
"""How long a spent account is left alone where the provider names no reset: then one call looks
again, because nobody tells us that a bill was paid. A new policy looks at once (docs/adr/0015)."""
LONGEST_SHUT: Micros = 25 * 3_600 * MICRO
EASE: Micros = 10 * MICRO
EASED = 64
"""How long a breaker that has just closed lets calls in slowly, and up to how many at once."""
SETTLES: Micros = MICRO
"""How long after a probe closed or shut it nobody in a fleet is to probe: news takes no longer."""
ELSEWHERE = -1
"""Stands for the number of a probe that another gateway has under way."""
FOREVER: Micros = 1 << 62
"""Until an operator or a new configuration says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """When a breaker trips and how it comes back.

    Attributes:
        fast_window, fast_volume, fast_ratio_ppm: Outage: share of failures among at least so many.
        slow_window, slow_volume, slow_ratio_ppm: Trickle of failures.
        in_a_row, in_a_row_within: Consecutive failures that trip at once.
        identical_quota: Identical quota refusals in a row that start the ladder.
        probes: Good probes in a row that close it; one is under way at a time, in a whole fleet.
        probe_lease: A probe silent for so long frees its place without a verdict.
        base, cap: Smallest and largest time open.
    """

    fast_window: Micros = 10 * MICRO
    fast_volume: int = 10
    fast_ratio_ppm: int = 500_000
    slow_window: Micros = 300 * MICRO
    slow_volume: int = 20
    slow_ratio_ppm: int = 300_000
    in_a_row: int = 5
    in_a_row_within: Micros = 60 * MICRO
    identical_quota: int = 3
    probes: int = 3
    probe_lease: Micros = 30 * MICRO
    base: Micros = 500_000
    cap: Micros = 60 * MICRO
    mode: Mode = Mode.ENFORCE
    because: RuleId = "breakers"


def spent_for(stated: Micros | None) -> Micros:
    """How long an account whose money or period is spent is left alone.

    Args:
        stated: The provider's word until the reset, or None.
    """
    return min(stated or SPENT_LOOK, LONGEST_SHUT)


class State(StrEnum):
    """States of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    SHUT = "shut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """Go ahead; `probe` numbers the probe this call is, 0 for an ordinary one."""

    probe: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Stay away until then. `sick` is False where only quota is spent: the ladder may serve."""

    until: Micros
    reason: str
    because: RuleId
    sick: bool = True


Ruling: TypeAlias = Allow | Trip


class Results(NamedTuple):
    """How many attempts went well, and how many failed."""

    good: int
    bad: int


class Cells:
    """Successes and failures over a rolling window of equal cells."""

    __slots__ = ("_bad", "_good", "_index", "_width")

    def __init__(self, window: Micros, cells: int) -> None:
        self._width = max(1, window // cells)
        self._good = [0] * cells
        self._bad = [0] * cells
        self._index = 0

    def _advance(self, now: Micros) -> int:
        index = now // self._width
        count = len(self._good)
        for step in range(min(count, max(0, index - self._index))):
            place = (index - step) % count
            self._good[place] = self._bad[place] = 0
        self._index = max(self._index, index)
        return self._index % count

    def add(self, *, good: bool, now: Micros) -> None:
        """Count one result."""
        if good:
            self.add_good(now)
        else:
            self._bad[self._advance(now)] += 1

    def add_good(self, now: Micros) -> None:
        """Count one good result: nearly every call does, and most in the same cell as the last."""
        index = now // self._width
        if index == self._index:
            self._good[index % len(self._good)] += 1
        else:
            self._good[self._advance(now)] += 1

    def held(self, now: Micros) -> Results:
        """What the window holds."""
        self._advance(now)
        return Results(sum(self._good), sum(self._bad))

    def trips(
        self,
        *,
        volume: int,
        ratio_ppm: int,
        now: Micros,
        undecided: int = 0,
        others: Results | None = None,
    ) -> bool:
        """Whether enough of enough results failed; undecided attempts count as not failed."""
        good, bad = self.held(now)
        if others is not None:
            good, bad = good + others.good, bad + others.bad
        total = good + bad
        return total >= volume and bad * MICRO >= ratio_ppm * (total + undecided)

    def clear(self) -> None:
        """Forget everything."""
        count = len(self._good)
        self._good = [0] * count
        self._bad = [0] * count


class Breaker:
    """The state of one scope.

    Attributes:
        state, until, reason: As status shows them; `until` counts in open and shut.
        closed_at: When it was last opened no more; 0 if it never was.
        delay: How long it last opened for, from which the next time continues; 0 once it closed.
        easing: How many calls may be under way without a head; 0 is any number.
        goods: Good results in all.
        version: Rises with every change of state.
    """

    __slots__ = (
        "_fast", "_good_probes", "_others", "_probe", "_probe_ends", "_quota", "_quota_run",
        "_row", "_row_since", "_rules", "_seq", "_slow", "closed_at", "delay", "easing", "goods",
        "reason", "sick", "state", "until", "version",
    )  # fmt: skip

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._fast = Cells(rules.fast_window, FAST_CELLS)
        self._slow = Cells(rules.slow_window, SLOW_CELLS)
        self._row = 0
        self._row_since: Micros = 0
        self._quota = ""
        self._quota_run = 0
        self.delay: Micros = 0
        self._probe = 0
        self._probe_ends: Micros = 0
        self._good_probes = 0
        self._seq = 0
        self._others: dict[int, tuple[Micros, Results]] = {}
        self.goods = 0
        self.state = State.CLOSED
        self.until: Micros = 0
        self.reason = ""
        self.sick = True
        self.closed_at: Micros = 0
        self.easing = 0
        self.version = 0

    def __repr__(self) -> str:
        """State and reason: the test interface."""
        return f"<Breaker {self.state.value} {self.reason or '-'} v{self.version}>"

    def replace_rules(self, rules: BreakerRules) -> None:
        """Another policy is in force; the state stays."""
        if rules is self._rules:
            return
        if rules == self._rules:
            self._rules = rules  # the next comparison is by identity
        else:
            self._rules = rules
            self._fast = Cells(rules.fast_window, FAST_CELLS)
            self._slow = Cells(rules.slow_window, SLOW_CELLS)

    # --- asking ----------------------------------------------------------------------------------

    def ask(self, *, now: Micros) -> Ruling:
        """Whether a call may go. A granted probe must end in `succeeded`, `failed` or `aborted`."""
        if self.state is State.CLOSED:
            return Allow()
        if self.state in (State.OPEN, State.SHUT):
            if now < self.until:
                return self._trip()
            if self.state is State.OPEN and not self.sick:
                # Quota, and its time is over. The pool has kept the queue and lets in what fits; a
                # probe would stand in that queue and keep the most urgent out of it. One more
                # identical refusal opens again.
                self._quota_run = max(0, self._rules.identical_quota - 1)
                self._become(State.CLOSED, until=0, reason="")
                self.closed_at = now
                return Allow()
            self._become(State.HALF_OPEN, until=0, reason=self.reason)
            self._good_probes = 0
        if self._probe and now < self._probe_ends:
            return Trip(
                until=self._probe_ends,
                reason=f"{self.reason}; a probe is under way",
                because=self._rules.because,
                sick=self.sick,
            )
        self._seq += 1
        self._probe = self._seq
        self._probe_ends = now + self._rules.probe_lease
        return Allow(probe=self._probe)

    def crowded(self, under_way: int, *, now: Micros) -> Trip | None:
        """Whom a breaker that has just closed does not let in yet; None lets in.

        Args:
            under_way: Calls that it has let in and that have no head.
            now: The instant.
        """
        if not self.easing or self.state is not State.CLOSED:
            return None
        until = self.closed_at + EASE
        if now >= until:
            self.easing = 0
            return None
        if under_way < self.easing:
            return None
        return Trip(until=until, reason="it is just back", because=self._rules.because)

    def peek(self, *, now: Micros) -> Ruling:
        """As `ask`, but nothing is granted: for the ladder and for status."""
        if self.state is State.CLOSED:
            return Allow()
        if self.state in (State.OPEN, State.SHUT) and now < self.until:
            return self._trip()
        if self._probe and now < self._probe_ends:
            return Trip(
                until=self._probe_ends,
                reason=self.reason,
                because=self._rules.because,
                sick=self.sick,
            )
        return Allow()

    def _trip(self) -> Trip:
        return Trip(
            until=self.until, reason=self.reason, because=self._rules.because, sick=self.sick
        )

    # --- the probe's place in a fleet ------------------------------------------------------------

    def kept(self, probe: int, *, until: Micros, good: int | None = None) -> bool:
        """The probe has its place until then; False where it is not the one any more.

        Args:
            probe: As `ask` numbered it.
            until: When the place is free in any case.
            good: Good probes in a row before it, as the fleet counts; None: as counted here.
        """
        if self.state is not State.HALF_OPEN or probe != self._probe:
            return False
        self._probe_ends = until
        if good is not None:
            self._good_probes = good
        return True

    def yielded(self, probe: int, *, until: Micros) -> None:
        """Another gateway's probe is under way: nobody goes before then, or before `vacated`."""
        if probe == self._probe:
            self._probe, self._probe_ends = ELSEWHERE, until

    def vacated(self) -> bool:
        """Another gateway's probe is over. Whether it was waited for here."""
        if self._probe != ELSEWHERE:
            return False
        self._probe = 0
        return True

    def handed_on(self, *, now: Micros) -> Handed:
        """What a probe leaves to the next, once its verdict, or that there is none, was told."""
        if self.state is State.HALF_OPEN:
            return Handed(good=self._good_probes)
        rest = self.until - now if self.state is State.OPEN else SETTLES
        return Handed(good=0, rest=max(0, rest))

    # --- telling ---------------------------------------------------------------------------------

    def started(self, *, now: Micros | None = None) -> None:
        """A 2xx head arrived: enough to end a run of identical quota refusals.

        With `now` it counts as good at once. A stream's end comes half a minute after its head and
        a refusal after ten milliseconds: were only ends counted, one refusal in a hundred would
        open the breaker whenever streams begin anew. Should it fail later, that counts as well.
        """
        self._quota_run = 0  # as `ended`, without the call: this is every call's head
        self._quota = ""
        if now is not None:
            self._good(now)

    def ended(self) -> None:
        """A good answer is over that was no probe: its head has counted, this adds nothing."""
        self._quota_run = 0
        self._quota = ""

    def _good(self, now: Micros) -> None:
        self.goods += 1
        self._fast.add_good(now)
        self._slow.add_good(now)
        self._row = 0
        if self.easing:
            self.easing = 0 if self.easing >= EASED else self.easing + 1

    def succeeded(self, *, now: Micros, probe: int = 0, begun: bool = False) -> bool:
        """A 2xx reached its terminal event. Whether the breaker closed by it.

        Args:
            now: The instant.
            probe: The probe this call was, 0 for none.
            begun: Its head was counted as good already.
        """
        if not begun:
            self._good(now)
        if probe:
            return self.probed(now=now, probe=probe)
        self.ended()
        return False

    def probed(self, *, now: Micros, probe: int) -> bool:
        """A probe whose head was good reached its terminal event. Whether it closed the breaker."""
        self.ended()
        if self.state is not State.HALF_OPEN or probe != self._probe:
            return False
        self._probe = 0
        self._good_probes += 1
        if self._good_probes < self._rules.probes:
            return False
        self._close(now)
        return True

    def failed(
        self,
        *,
        now: Micros,
        rng: Rng,
        reason: str,
        hint: Micros | None = None,
        probe: int = 0,
        undecided: int = 0,
    ) -> bool:
        """A fault or a capacity refusal. Whether the breaker opened by it.

        Args:
            now: The instant.
            rng: Draws the time it stays open.
            reason: For status and for the refusal's text; no secret.
            hint: The provider's own word to wait, or None.
            probe: The probe this call was, 0 for none.
            undecided: Attempts under way without a head. Failures are faster than successes: of
                four hundred calls that start at once, twenty may fail before the first head comes,
                and the breaker that has just closed would open again, for ever.
        """
        self._fast.add(good=False, now=now)
        self._slow.add(good=False, now=now)
        if self._row == 0 or now - self._row_since > self._rules.in_a_row_within:
            self._row, self._row_since = 0, now
        self._row += 1
        if self.state in (State.OPEN, State.SHUT):
            if hint is not None and self.state is State.OPEN:
                self.until = max(self.until, now + min(hint, self._rules.cap))
            return False
        if self.state is State.HALF_OPEN:
            if not probe or probe != self._probe:
                return False
            return self._open(now=now, rng=rng, reason=reason, hint=hint)
        undecided = min(undecided, MOST_UNDECIDED)
        tripped = self._row >= max(self._rules.in_a_row, undecided // 2) or self._failed_often(
            now, undecided
        )
        return tripped and self._open(now=now, rng=rng, reason=reason, hint=hint)

    def refused_for_quota(self, *, key: str, blocked_until: Micros, probe: int = 0) -> bool:
        """A quota refusal: not a failure, but identical ones in a row start the ladder."""
        if self.state is State.HALF_OPEN and probe and probe == self._probe:
            self.aborted(probe=probe)
        if self.state is not State.CLOSED:
            return False
        self._quota_run = self._quota_run + 1 if key == self._quota else 1
        self._quota = key
        if self._quota_run < self._rules.identical_quota:
            return False
        self._probe = 0
        self.sick = False
        self._become(State.OPEN, until=blocked_until, reason=f"quota: {key}")
        return True

    def shut(self, *, until: Micros | None, reason: str) -> None:
        """A period, the money or the last credential is spent: nothing to probe before then."""
        wanted = FOREVER if until is None else until
        if self.state is State.SHUT:
            self.until = max(self.until, wanted)
            return
        self._probe = 0
        self.sick = False
        self._become(State.SHUT, until=wanted, reason=reason)

    def aborted(self, *, probe: int) -> None:
        """The probe ended without a verdict (client gone, caller's fault): its place is free."""
        if probe and probe == self._probe:
            self._probe = 0

    def told(
        self, state: State, *, until: Micros, reason: str, delay: Micros | None = None
    ) -> None:
        """An operator, or the fleet, says so.

        Args:
            state: From now on.
            until: In open and shut.
            reason: For status and for the refusal's text.
            delay: How long it opened for elsewhere: the next bad probe may be ours.
        """
        self._probe = 0
        self._good_probes = 0
        if delay is not None:
            self.delay = delay
        self._become(state, until=until, reason=reason)
        if state is State.CLOSED:
            self._forgive()

    def resumed(self, *, now: Micros) -> None:
        """The last good probe of the fleet closed it, elsewhere: as if it had been our own."""
        self._probe = 0
        self._good_probes = 0
        self._close(now)

    def _forgive(self) -> None:
        """Nothing that was counted before speaks against it."""
        self.delay = 0
        self._row = 0
        self.ended()
        self._forget()

    def _forget(self) -> None:
        self._fast.clear()
        self._slow.clear()
        self._others = {}

    # --- a fleet ---------------------------------------------------------------------------------

    def lately(self, now: Micros) -> Results:
        """Our own results within the fast window."""
        return self._fast.held(now)

    def heard(self, now: Micros, cell: int, others: Results) -> None:
        """In that cell of time other gateways had these results, as far as is known now.

        Args:
            now: The instant.
            cell: Its number, the same in the whole fleet.
            others: In place of what was heard of that cell before.
        """
        first = self._others[cell][0] if cell in self._others else now
        self._others[cell] = (first, others)
        edge = now - self._rules.slow_window
        while len(self._others) > MOST_CELLS or next(iter(self._others.values()))[0] <= edge:
            del self._others[next(iter(self._others))]

    def together(self, *, now: Micros, rng: Rng, undecided: int = 0) -> bool:
        """Whether it opened by what the fleet saw; nothing happens unless it is closed."""
        if self.state is not State.CLOSED or not self._failed_often(now, undecided):
            return False
        return self._open(now=now, rng=rng, reason="failures seen by the fleet", hint=None)

    def _since(self, edge: Micros) -> Results | None:
        if not self._others:
            return None
        found = [results for at, results in self._others.values() if at > edge]
        return Results(sum(one.good for one in found), sum(one.bad for one in found))

    def _failed_often(self, now: Micros, undecided: int) -> bool:
        """Whether one of the two windows holds too many failures."""
        rules = self._rules
        return self._fast.trips(
            volume=rules.fast_volume, ratio_ppm=rules.fast_ratio_ppm, now=now,
            undecided=undecided, others=self._since(now - rules.fast_window),
        ) or self._slow.trips(
            volume=rules.slow_volume, ratio_ppm=rules.slow_ratio_ppm, now=now,
            undecided=undecided, others=self._since(now - rules.slow_window),
        )  # fmt: skip

    # --- changes ---------------------------------------------------------------------------------

    def _open(self, *, now: Micros, rng: Rng, reason: str, hint: Micros | None) -> bool:
        rules = self._rules
        previous = max(self.delay, rules.base)
        self.delay = min(rules.cap, round(rng.uniform(rules.base, 3 * previous)))
        self._probe = 0
        self.sick = True
        wait = max(self.delay, min(hint or 0, rules.cap))
        self._become(State.OPEN, until=now + wait, reason=reason)
        return True

    def _close(self, now: Micros) -> None:
        """By good probes: calls are let in slowly."""
        self._forgive()
        self._become(State.CLOSED, until=0, reason="")
        self.closed_at = now
        self.easing = self._rules.probes

    def _become(self, state: State, *, until: Micros, reason: str) -> None:
        self.state, self.until, self.reason = state, until, reason
        self.easing = 0
        self.version += 1
