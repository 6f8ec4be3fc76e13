"""Repeated meaning is warned of, then refused.

`resilience/loops.py` is asked with what `wire/turns.py` reads, before anything is queued or spent:
a runaway must not wait in a line. A refusal cuts the call, never the session: it names the repeated
call and the way out, and a user turn passes whatever was before. Nothing that a person or a model
wrote leaves this file except to the caller who sent it.

A conversation is found by the mark of one of its last turns, within its principal and session, so
that parallel agents which share a session, or a first message, never add up; what it costs is kept
by session, else by first message. A repeated request (an SDK's retry, a replayed idempotency key)
brings no new turn and so counts nothing. Weakness: turns that only the provider remembers
(`previous_response_id`) are not seen; runs without a session that begin with the same words share
the amounts, not the repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING

import orjson

from gateway.call import VerdictNote
from gateway.errors import LoopDetected
from gateway.resilience.loops import Memory, Rule, Spending, Stretch, Verdict, harder
from gateway.units import MICRO, Mode
from gateway.wire import content, turns

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gateway.call import Call, End, Reply, Service
    from gateway.resilience.loops import LoopRules, Sketching, Turn
    from gateway.wire.turns import Said

MOST_FOLDED = 32
"""Turns fingerprinted where nothing is remembered; older ones count as iterations only."""

MOST_WALKED = 4_096
"""Turns that are walked at all."""

LOOK_BACK = 4
"""Turns before the newest that are asked for a remembered conversation."""

SHOWN = 80
"""Characters of a repeated call's arguments that its refusal quotes."""

WAY_OUT = (
    "This call was cut, the session goes on: use other arguments or another tool, answer with what "
    "is known, or ask the user. A new user message starts the count anew"
)

REFUSED, WARNED, SHADOWED = "refused", "warned", "shadowed"


def canonical(arguments: object) -> str:
    """Arguments as JSON with sorted keys; text that is no JSON as it is."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return str(arguments)
    try:
        return orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # nested deeper than it writes, or integers that it cannot
        return content.render(arguments)


class LoopGuard:
    """The layer, with what it remembers of conversations.

    Attributes:
        on_loop: Called with rule and stage (refused, warned, shadowed), for metrics.
    """

    __slots__ = ("_spendings", "_stretches", "on_loop")

    def __init__(self, *, on_loop: Callable[[str, str], None] | None = None) -> None:
        self._stretches: Memory[Stretch] = Memory()
        self._spendings: Memory[Spending] = Memory()
        self.on_loop = on_loop

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._stretches)

    def reset(self, session: str = "") -> int:
        """The operator's word: a session ("" means all) begins anew; how many conversations."""
        chosen = hash(session) if session else None
        self._spendings.reset(chosen)
        return self._stretches.reset(chosen)

    def __call__(self, inner: Service) -> Service:
        """The service, guarded."""

        async def serve(call: Call) -> Reply:
            rules, parsed = call.snapshot.loops, call.parsed
            if rules.mode is Mode.OFF or parsed is None or call.dialect not in turns.READERS:
                return await inner(call)
            said = turns.of(call.dialect, parsed)
            newest = next(said, None)
            if newest is None and not rules.meters:
                return await inner(call)  # a person spoke last
            looking = _Looking(call, parsed, rules)
            verdict = None
            if newest is not None:
                verdict = self._repeated(looking, newest, said)
            if not rules.meters:
                self._act(looking, newest, verdict)
                return await inner(call)
            spending = self._spending(looking)
            if newest is not None:
                verdict = harder(verdict, spending.judge(rules))
            elif turns.answered(call.dialect, parsed):
                spending.clear()
            self._act(looking, newest, verdict)
            return await metered(call, spending, inner)

        return serve

    def _repeated(self, looking: _Looking, newest: Said, older: Iterator[Said]) -> Verdict | None:
        """What the rules of repetition say; the conversation is remembered with its newest turn."""
        memory, now = self._stretches, looking.call.received
        key = looking.mark(newest)
        stretch = memory.get(key, now) if key else None
        turn = looking.turn(newest)
        if stretch is None or self._is_another(looking, key, stretch, older):
            if stretch is None:
                stretch = self._folded(looking, key, turn, older)
            else:
                stretch.fold(turn, rules=looking.rules)
            stretch.length = looking.length
        if key:
            memory.put(key, stretch, now)
        return stretch.judge(turn, looking.rules)

    @staticmethod
    def _is_another(looking: _Looking, key: int, known: Stretch, older: Iterator[Said]) -> bool:
        """Whether a turn whose mark is known is a new one all the same: its ids repeat."""
        if looking.length == known.length:
            return False  # the very same request once more
        before = next(older, None)
        return before is not None and looking.mark(before) == key

    def _folded(self, looking: _Looking, key: int, newest: Turn, older: Iterator[Said]) -> Stretch:
        """The stretch up to the newest turn: continued where it is known, else from the history."""
        memory, now = self._stretches, looking.call.received
        pending: list[Said] = []
        for said in islice(older, LOOK_BACK):
            at = looking.mark(said) if key else 0
            known = memory.get(at, now) if at else None
            if known is not None:
                memory.pop(at)
                return self._continued(known, said, pending, newest, looking)
            pending.append(said)
        pending += islice(older, MOST_FOLDED - 1 - len(pending))
        stretch = Stretch(session=looking.session)
        stretch.iterations = sum(1 for _ in islice(older, MOST_WALKED))
        return self._continued(stretch, None, pending, newest, looking)

    @staticmethod
    def _continued(
        stretch: Stretch, last: Said | None, pending: list[Said], newest: Turn, looking: _Looking
    ) -> Stretch:
        """The stretch with the pending turns (newest first) and the newest one folded in."""
        previous: Sketching | None = None
        if last is not None:
            before = last
            previous = lambda: looking.turn(before).sketch()  # noqa: E731 - made only if asked for
        for said in reversed(pending):
            turn = looking.turn(said)
            stretch.fold(turn, previous=previous, rules=looking.rules)
            previous = turn.sketch
        stretch.fold(newest, previous=previous, rules=looking.rules)
        return stretch

    def _spending(self, looking: _Looking) -> Spending:
        call, memory = looking.call, self._spendings
        key = looking.key_of_amounts()
        spending = memory.get(key, call.received) or Spending(session=looking.session)
        spending.drain(call.received, looking.rules)
        memory.put(key, spending, call.received)
        return spending

    def _act(self, looking: _Looking, newest: Said | None, verdict: Verdict | None) -> None:
        """Warn or refuse as the mode says.

        Raises:
            LoopDetected: A rule in enforce mode refuses.
        """
        if verdict is None or newest is None:
            return
        call, rules = looking.call, looking.rules
        shadow = rules.mode is Mode.SHADOW
        if shadow and not verdict.refuse:
            return
        stage = SHADOWED if shadow else REFUSED if verdict.refuse else WARNED
        if self.on_loop is not None:
            self.on_loop(verdict.rule.value, stage)
        because = f"{rules.because}.{verdict.rule.value}"
        detail = f"{verdict.count} of {verdict.limit}"
        call.notes.append(VerdictNote("guard_loops", stage, because, call.received, detail))
        if shadow:
            return
        repeated = looking.repeating(newest, verdict)
        if verdict.refuse:
            told = sentence(verdict, label(repeated, quoting=True))
            raise LoopDetected(f"{told}. {WAY_OUT}", because=because)
        told = sentence(verdict, label(repeated, quoting=False))
        text = f"{because}: {told}; at {verdict.limit} it is refused"
        call.extra_headers.append((b"tidegate-warning", printable(text)))


class _Looking:
    """One call as the rules look at it; what costs something is made when asked for."""

    __slots__ = ("_opening", "_scope", "call", "exempt", "length", "parsed", "rules", "session")

    def __init__(self, call: Call, parsed: Mapping[str, Any], rules: LoopRules) -> None:
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        self.call = call
        self.parsed = parsed
        self.rules = rules
        name = principal.session or call.session
        self.session = hash(name) if name else 0
        self._scope = hash((principal.id, name))
        self._opening: str | None = None
        self.length = turns.length(call.dialect, parsed)
        patterns = rules.polling_tools
        self.exempt: Callable[[str], bool] = lambda tool: any(
            fnmatchcase(tool, pattern) for pattern in patterns
        )

    def mark(self, said: Said) -> int:
        """The name under which the conversation is remembered after this turn."""
        return turns.mark(said, self._scope, self.opening)

    def turn(self, said: Said) -> Turn:
        """The turn in hashes."""
        return turns.turn_of(said, canonical, self.exempt)

    def opening(self) -> str:
        """The first user message's beginning."""
        if self._opening is None:
            self._opening = turns.opening(self.call.dialect, self.parsed)
        return self._opening

    def key_of_amounts(self) -> int:
        """Whose tokens add up: the session's, else those of runs with the same first message."""
        return self._scope if self.session else hash((self._scope, self.opening()))

    def repeating(self, newest: Said, verdict: Verdict) -> turns.ToolCall | None:
        """The call that a verdict is about."""
        if verdict.call < 0:
            return None
        counted = [one for one in newest.calls if not self.exempt(one.name)]
        return counted[verdict.call]


async def metered(call: Call, spending: Spending, inner: Service) -> Reply:
    """The reply; what the call costs is in the books, an estimate until it ends."""
    estimate = call.estimate
    tokens = estimate.input + estimate.output if estimate is not None else 0
    money = estimate.money if estimate is not None else 0
    spending.pour(tokens, money)
    try:
        reply = await inner(call)
    except BaseException:
        spending.pour(-tokens, -money)
        raise

    def closed(_end: End) -> None:
        usage = call.usage
        if usage is not None:
            parts = (usage.input, usage.output, usage.cache_read, usage.cache_write)
            used = sum(part or 0 for part in parts)
            spending.pour(used - tokens, usage.money - money)
        elif reply.kind is not None:
            spending.pour(-tokens, -money)

    reply.on_close(closed)
    return reply


def sentence(verdict: Verdict, name: str) -> str:
    """What happened, for the agent's developer and for the agent."""
    count, limit = verdict.count, verdict.limit
    since = "since the last user message"
    match verdict.rule:
        case Rule.SAME_CALL:
            return f"The tool call {name} was made {count} times {since}, with the same meaning"
        case Rule.SAME_MASKED:
            return (
                f"The tool call {name} was made {count} times {since}, differing in numbers or "
                "dates only, with the same result"
            )
        case Rule.PING_PONG:
            return f"The same two calls, one of them {name}, alternate for {count} rounds"
        case Rule.ALIKE_TURNS:
            call = f", with the tool call {name}," if name else ""
            return f"The last {count} turns{call} are nearly the same"
        case Rule.MAX_ITERATIONS:
            return f"This is call {count} {since}, of {limit} allowed"
        case Rule.TOKENS_PER_MINUTE:
            return f"The conversation used {count} tokens within a minute, of {limit} allowed"
        case Rule.MAX_TOKENS:
            return f"The conversation used {count} tokens {since}, of {limit} allowed"
        case Rule.MAX_MONEY:
            used, most = count / MICRO, limit / MICRO
            return f"The conversation cost {used:.2f} USD {since}, of {most:.2f} USD allowed"


def label(call: turns.ToolCall | None, *, quoting: bool) -> str:
    """The name of a call, and the beginning of its arguments where its caller alone will see it."""
    if call is None:
        return ""
    name = call.name[:64] or "without a name"
    if not quoting:
        return name
    text = turns.folded(canonical(call.arguments))
    return f"{name}({text[:SHOWN]}{'…' if len(text) > SHOWN else ''})"


def printable(text: str) -> bytes:
    """A header value: printable ASCII, so that no tool's name can end the line."""
    return "".join(mark if " " <= mark <= "~" else "?" for mark in text).encode()
