"""Repeated tool calls are warned of, then refused: the tool plane's half of the loop breaker.

Fingerprints are those of the model plane (`wire/turns.py`), so a call has the same one whichever
way it is seen. A refusal cuts the call, never the session, and names the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gateway.bodies import canonical
from gateway.call import VerdictNote
from gateway.errors import LoopDetected
from gateway.gathering import hear
from gateway.resilience.alternation import Step
from gateway.resilience.loops import LoopRules, Rule, Verdict, harder
from gateway.resilience.memory import Memory
from gateway.resilience.repeats import Event, Exchanges, Print, Tally
from gateway.units import MICRO, Mode
from gateway.wire import turns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from gateway.call import Call, ToolCall
    from gateway.loop_lists import LoopLists
    from gateway.units import Micros

MOST_AGENTS = 20_000
MOST_TENANTS = 2_000
SHOWN = 80
"""Characters of the arguments that a refusal quotes."""
WAY_OUT = (
    "This call was cut, the session goes on: use other arguments or another tool, answer with what "
    "is known, or ask the user"
)


@dataclass(frozen=True, slots=True)
class Made:
    """A call that was counted, until its result comes."""

    tally: Tally
    print: Print
    rules: LoopRules


class Repeats:
    """What agents called lately, and what the rules say.

    Attributes:
        on_loop: Called with rule and stage (refused, warned, shadowed), for metrics.
        fleet: Where the other gateways' calls are known; None: this process is alone.
    """

    __slots__ = ("_agents", "_rules", "_tenants", "fleet", "on_loop")

    def __init__(self, *, on_loop: Callable[[str, str], None] | None = None) -> None:
        self._agents: Memory[Tally] = Memory(MOST_AGENTS)
        self._tenants: Memory[Exchanges] = Memory(MOST_TENANTS)
        self._rules = LoopRules()
        self.on_loop = on_loop
        self.fleet: LoopLists | None = None

    def __len__(self) -> int:
        """Agents remembered."""
        return len(self._agents)

    def reset(self, session: str = "") -> int:
        """The operator's word: agents of a session or name ("" means all) begin anew; how many."""
        if not session:
            self._tenants.reset()
        chosen = hash(session) if session else None
        count = self._agents.reset(chosen)
        if self.fleet is not None:
            for tally in self._agents:
                if chosen is None or tally.session == chosen:
                    self.fleet.clear(tally, self._rules)
            for exchanges in self._tenants if not session else ():
                self.fleet.clear(exchanges, self._rules)
        return count

    def spoken(self, call: Call) -> None:
        """A person spoke to this agent on the model plane: it begins anew.

        That is its session, where both planes know the same name of one, and what it called
        without any. An MCP session has a name of its own; there the window alone forgets.
        """
        principal = call.principal
        if principal is None:
            return
        for session in {principal.session or call.session, ""}:
            tally = self._agents.get(hash((principal.id, session)), call.received)
            if tally is not None:
                tally.clear()
                if self.fleet is not None:
                    self.fleet.clear(tally, call.snapshot.loops)

    async def hear(self, call: Call, tool: ToolCall) -> None:
        """What other gateways saw of it and its tenant is known, as of a second ago at most."""
        rules = call.snapshot.loops
        if self.fleet is None or rules.mode is Mode.OFF or self._exempt(tool, rules):
            return
        waiters = self.fleet.ask(self._tally(call, tool), rules, call.received)
        waiters += self.fleet.ask(self._others(call), rules, call.received)
        if waiters:
            await hear(waiters, self.fleet.clock)

    def look(self, call: Call, tool: ToolCall) -> Made | None:
        """The call is counted; None where the rules do not look at it.

        Raises:
            LoopDetected: A rule in enforce mode refuses; the call is not counted.
        """
        rules = call.snapshot.loops
        if rules.mode is Mode.OFF or self._exempt(tool, rules):
            return None
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        now = call.received
        tally = self._tally(call, tool)
        others = self._others(call)
        printed = self._print(tool)
        agent = turns.hash64(principal.id)
        verdict = harder(
            tally.judge(printed, rules, now), others.judge(agent, printed.exact, rules, now)
        )
        # Refused or not: two agents that go on alternating are still at it.
        others.made(agent, printed.exact, now)
        if self.fleet is not None:
            self.fleet.note(others, Step(now, agent, printed.exact), rules)
        if verdict is not None:
            self._act(call, tool, rules, verdict)
        tally.made(printed, rules, now)
        if self.fleet is not None:
            self.fleet.note(tally, Event(now, printed), rules)
        return Made(tally, printed, rules)

    def _tally(self, call: Call, tool: ToolCall) -> Tally:
        """Of the agent, in its session."""
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        session = principal.session or tool.session or call.session
        key = hash((principal.id, session))
        tally = self._agents.get(key, call.received)
        if tally is None:
            name = turns.hash64(f"{principal.id}\0{session}") if self.fleet is not None else 0
            tally = Tally(session=hash(session or principal.agent), name=name)
        self._agents.put(key, tally, call.received)
        return tally

    def _others(self, call: Call) -> Exchanges:
        """Of its tenant's agents."""
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        key = hash(principal.tenant)
        others = self._tenants.get(key, call.received)
        if others is None:
            name = turns.hash64(f"tenant\0{principal.tenant}") if self.fleet is not None else 0
            others = Exchanges(name=name)
        self._tenants.put(key, others, call.received)
        return others

    def returned(self, made: Made, result: Mapping[str, Any], now: Micros) -> None:
        """The result of a counted call has come."""
        text = turns.result_text(result.get("structuredContent") or result.get("content"))
        digest = turns.hash64(text)
        made.tally.returned(made.print, digest, now)
        if self.fleet is not None:
            self.fleet.note(made.tally, Event(now, made.print, digest), made.rules)

    @staticmethod
    def _exempt(tool: ToolCall, rules: LoopRules) -> bool:
        """A polling tool, or a further round of a call that the server itself asked for."""
        if tool.rule is not None and tool.rule.polling:
            return True
        if tool.rounds:
            return True
        names = (tool.tool, tool.public)
        return any(fnmatchcase(name, one) for one in rules.polling_tools for name in names)

    @staticmethod
    def _print(tool: ToolCall) -> Print:
        name = f"{tool.server.name}/{tool.tool}"
        arguments = turns.folded(tool.canonical(canonical))
        exact, masked = turns.printed(name, arguments)
        changes = tool.rule is None or tool.rule.effect != "read"
        return Print(exact=exact, masked=masked, changes=changes)

    def _act(self, call: Call, tool: ToolCall, rules: LoopRules, verdict: Verdict) -> None:
        shadow = rules.mode is Mode.SHADOW
        if shadow and not verdict.refuse:
            return
        stage = "shadowed" if shadow else "refused" if verdict.refuse else "warned"
        if self.on_loop is not None:
            self.on_loop(verdict.rule.value, stage)
        because = f"{rules.because}.{verdict.rule.value}"
        detail = f"{verdict.count} of {verdict.limit}"
        call.notes.append(VerdictNote("guard_loops", stage, because, call.received, detail))
        if shadow:
            return
        told = sentence(verdict, tool.public, window=rules.window)
        if verdict.refuse:
            quoted = turns.folded(tool.canonical(canonical))[:SHOWN]
            raise LoopDetected(f"{told}: {quoted}. {WAY_OUT}.", because=because)
        text = f"{because}: {told}; at {verdict.limit} it is refused"
        value = "".join(mark if " " <= mark <= "~" else "?" for mark in text).encode()
        call.extra_headers.append((b"tidegate-warning", value))


def sentence(verdict: Verdict, name: str, *, window: Micros) -> str:
    """What happened, for the agent and its developer."""
    within = f"within {window // MICRO} s"
    if verdict.rule is Rule.PING_PONG:
        return (
            f"Two agents alternate the same two calls for {verdict.count} rounds {within}, one of "
            f"them {name[:64]}"
        )
    alike = ", differing in numbers or dates only, with the same result"
    return (
        f"The tool call {name[:64]} was made {verdict.count} times {within}"
        f"{alike if verdict.rule is Rule.SAME_MASKED else ', with the same meaning'}"
    )
