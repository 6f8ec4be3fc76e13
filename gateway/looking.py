"""One call as the loop rules look at it, and what they say of it in words.

Nothing that a person or a model wrote leaves this file except to the caller who sent it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gateway.bodies import canonical
from gateway.identity.hints import Baggage, baggage
from gateway.resilience.loops import Rule
from gateway.units import MICRO
from gateway.wire import turns

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gateway.call import Call
    from gateway.resilience.loops import LoopRules, Turn, Verdict
    from gateway.wire.turns import Said

SHOWN = 80
"""Characters of a repeated call's arguments that its refusal quotes."""

SINCE = "since the last user message"

UNNAMED = Baggage()


class Looking:
    """One call as the rules look at it; what costs something is made when asked for.

    Attributes:
        scope: Hash of principal and session: what is remembered of others never meets.
        session: Hash of the session's name; 0 without one.
        tenant: Of the principal.
        autonomous: No person spoke last.
        repeating: The calls of the newest turn, for who must be told which one repeats.
    """

    __slots__ = (
        "_opening", "autonomous", "call", "length", "parsed", "repeating", "rules", "scope",
        "session", "tenant",
    )  # fmt: skip

    def __init__(self, call: Call, parsed: Mapping[str, Any], rules: LoopRules) -> None:
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        self.call = call
        self.parsed = parsed
        self.rules = rules
        name = principal.session or call.session
        self.session = hash(name) if name else 0
        self.scope = hash((principal.id, name))
        self.tenant = principal.tenant
        self._opening: str | None = None
        self.length = turns.length(call.dialect, parsed)
        self.autonomous = False
        self.repeating: tuple[turns.ToolCall, ...] = ()

    def owner(self) -> str:
        """Principal and session in words: what `scope` is a hash of."""
        principal = self.call.principal
        assert principal is not None  # noqa: S101 - identify ran
        return f"{principal.id}\0{principal.session or self.call.session}"

    def exempt(self, tool: str) -> bool:
        """Whether a tool of that name may repeat."""
        return matches(self.rules.polling_tools, tool)

    def mark(self, said: Said) -> int:
        """The name under which the conversation is remembered after this turn."""
        return turns.mark(said, self.scope, self.opening)

    def turn(self, said: Said) -> Turn:
        """The turn in hashes."""
        return turns.turn_of(said, canonical, self.exempt)

    def fingerprint(self, newest: Said | None) -> int:
        """What the call is made with: the newest tool calls, else what was last said; 0: nothing.

        Numbers and dates in it do not matter.
        """
        if newest is None:
            text = turns.latest(self.call.dialect, self.parsed)
        else:
            text = "\0".join(
                [f"{one.name}\0{turns.folded(canonical(one.arguments))}" for one in newest.calls]
                or [newest.text]
            )
        return turns.hash64(turns.masked(" ".join(text.split()))) if text else 0

    def opening(self) -> str:
        """The first user message's beginning."""
        if self._opening is None:
            self._opening = turns.opening(self.call.dialect, self.parsed)
        return self._opening

    def key_of_amounts(self) -> int:
        """Whose tokens add up: the session's, else those of runs with the same first message."""
        return self.scope if self.session else hash((self.scope, self.opening()))

    def name_of_amounts(self) -> tuple[str, ...]:
        """The same in words, that another process would find as well."""
        principal = self.call.principal
        assert principal is not None  # noqa: S101 - identify ran
        name = principal.session or self.call.session
        return (principal.id, "session", name) if name else (principal.id, "", self.opening())

    def repeated(self, verdict: Verdict) -> turns.ToolCall | None:
        """The call that a verdict is about."""
        if verdict.call < 0:
            return None
        return [one for one in self.repeating if not self.exempt(one.name)][verdict.call]


def within(call: Call) -> tuple[Baggage, str]:
    """What the call says of itself in `baggage`, and its workflow: a claim's before that."""
    named = baggage(call.said) if call.said else UNNAMED
    principal = call.principal
    return named, (principal.workflow if principal is not None else "") or named.workflow


def matches(patterns: tuple[str, ...], tool: str) -> bool:
    """Whether a tool of that name is meant."""
    return bool(patterns) and any(fnmatchcase(tool, pattern) for pattern in patterns)


def sentence(verdict: Verdict, name: str) -> str:
    """What happened, for the agent's developer and for the agent."""
    count = verdict.count
    match verdict.rule:
        case Rule.SAME_CALL:
            return f"The tool call {name} was made {count} times {SINCE}, with the same meaning"
        case Rule.SAME_MASKED:
            return (
                f"The tool call {name} was made {count} times {SINCE}, differing in numbers or "
                "dates only, with the same result"
            )
        case Rule.PING_PONG:
            if not name:
                return f"Two agents of the workflow say the same to each other for {count} rounds"
            return f"The same two calls, one of them {name}, alternate for {count} rounds"
        case Rule.ALIKE_TURNS:
            call = f", with the tool call {name}," if name else ""
            return f"The last {count} turns{call} are nearly the same"
        case _:
            return amount(verdict)


def amount(verdict: Verdict) -> str:
    """What was used too much of."""
    count, limit = verdict.count, verdict.limit
    dollars = f"{count / MICRO:.2f} USD", f"{limit / MICRO:.2f} USD"
    return {
        Rule.MAX_ITERATIONS: f"This is call {count} {SINCE}, of {limit} allowed",
        Rule.TOKENS_PER_MINUTE: (
            f"The conversation used {count} tokens within a minute, of {limit} allowed"
        ),
        Rule.MAX_TOKENS: f"The conversation used {count} tokens {SINCE}, of {limit} allowed",
        Rule.MAX_MONEY: f"The conversation cost {dollars[0]} {SINCE}, of {dollars[1]} allowed",
        Rule.TASK_TOKENS: f"The task used {count} tokens, of {limit} allowed in all",
        Rule.TASK_MONEY: f"The task cost {dollars[0]}, of {dollars[1]} allowed in all",
    }[verdict.rule]


def label(call: turns.ToolCall | None, *, quoting: bool) -> str:
    """The name of a call, and the beginning of its arguments where its caller alone will see it."""
    if call is None:
        return ""
    name = call.name[:64] or "without a name"
    if not quoting or call.arguments is None:
        return name
    text = turns.folded(canonical(call.arguments))
    return f"{name}({text[:SHOWN]}{'…' if len(text) > SHOWN else ''})"


def printable(text: str) -> bytes:
    """A header value: printable ASCII, so that no tool's name can end the line."""
    return "".join(mark if " " <= mark <= "~" else "?" for mark in text).encode()
