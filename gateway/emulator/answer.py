"""What is answered: how long, what is said, whether a tool is called.

The answer depends on the seed, the model and the prompt, never on `stream`, the clock or what came
before: two runs agree, and so do the streamed and the plain form of one call.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.emulator.ask import Ask, Tool
from gateway.emulator.config import Answers
from gateway.emulator.text import Draw, Instance, Reel, as_json, in_pieces
from gateway.units import Tokens


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool; `pieces` joined are the arguments as JSON."""

    id: str
    tool: Tool
    pieces: tuple[str, ...]

    @property
    def arguments(self) -> str:
        """The arguments as JSON, unless the cap cut them."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers.

    Attributes:
        thinking, pieces: Visible thinking and text; a piece is one token.
        calls: Tool calls.
        finish: "stop", "length", "tools" or "sequence".
        sequence: The stop sequence that was met.
        reasoning: Hidden tokens.
        tokens: Everything produced.
    """

    thinking: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    sequence: str | None = None
    reasoning: Tokens = 0
    tokens: Tokens = 0

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is answered. `id` names it: equal prompts share its first 16 digits, no two all."""

    id: str
    created: int
    choices: tuple[Choice, ...]

    @property
    def tokens(self) -> Tokens:
        """Output tokens of all choices."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def reasoning(self) -> Tokens:
        """Hidden tokens of all choices."""
        return sum(choice.reasoning for choice in self.choices)


class Planner:
    """Decides what is answered."""

    __slots__ = ("_answers", "_reel", "_seed")

    def __init__(self, seed: int, answers: Answers) -> None:
        self._seed = seed
        self._answers = answers
        self._reel = Reel(seed, answers.script)

    def plan(self, ask: Ask, *, serial: int, created: int) -> Answer:
        """The answer to that call; `serial` makes its id unique."""
        draw = Draw(self._seed, ask.model, ask.prompt.digest())
        name = draw.hex(16)
        wanted = self._tools_wanted(ask, draw)
        choices = tuple(self._choice(ask, draw, wanted) for _ in range(ask.n))
        return Answer(id=f"{name}{serial:08x}", created=created, choices=choices)

    def _tools_wanted(self, ask: Ask, draw: Draw) -> list[Tool]:
        """The tools to call now: forced, named by the user, or by the deterministic rule."""
        if not ask.tools or ask.tool_choice == "none":
            return []
        chosen = draw.below(len(ask.tools))
        by_rule = draw.unit() < self._answers.tool_probability
        if ask.tool_choice not in ("auto", "required"):
            named = [tool for tool in ask.tools if tool.name == ask.tool_choice]
            return named[:1]
        if ask.after_tool and ask.tool_choice == "auto":
            return []
        text = ask.last_text.lower()
        mentioned = [tool for tool in ask.tools if tool.name.lower() in text]
        if not mentioned and (ask.tool_choice == "required" or by_rule or "tool" in text.split()):
            mentioned = [ask.tools[chosen]]
        if mentioned and ask.parallel and "in parallel" in text and len(mentioned) == 1:
            mentioned *= 2
        return mentioned if ask.parallel else mentioned[:1]

    def _choice(self, ask: Ask, draw: Draw, wanted: list[Tool]) -> Choice:
        cap = self._answers.longest if ask.cap is None else min(ask.cap, self._answers.longest)
        thinking: tuple[str, ...] = ()
        if ask.thinking:
            length = min(int(draw.lognormal(60, 0.5)), ask.thinking, max(0, cap - 1))
            thinking = self._reel.stretch(draw, length)[: max(1, length)]
        room = cap - len(thinking)
        if wanted:
            return self._calling(draw, wanted, thinking, room)
        pieces, sequence = self._text(ask, draw)
        hidden = 0
        if self._answers.reasoning:
            share = self._answers.reasoning
            hidden = min(room, int(len(pieces) * share / (1 - share)))
            room -= hidden
        finish = "sequence" if sequence is not None else "stop"
        if len(pieces) > room:
            pieces, finish, sequence = pieces[:room], "length", None
        return Choice(
            thinking=thinking, pieces=pieces, finish=finish, sequence=sequence, reasoning=hidden,
            tokens=len(thinking) + hidden + len(pieces),
        )  # fmt: skip

    def _text(self, ask: Ask, draw: Draw) -> tuple[tuple[str, ...], str | None]:
        if ask.schema is not None:
            value = Instance(draw, ask.schema).make() if ask.schema else {"answer": draw.hex(6)}
            return in_pieces(as_json(value).decode()), None
        length = int(draw.lognormal(self._answers.median, self._answers.sigma))
        pieces = self._reel.stretch(draw, min(max(1, length), self._answers.longest))
        if not ask.stops:
            return pieces, None
        text = "".join(pieces)
        found = [(at, stop) for stop in ask.stops if (at := text.find(stop)) >= 0]
        if not found:
            return pieces, None
        at, stop = min(found)
        kept: list[str] = []
        for piece in pieces:
            if at <= 0:
                break
            kept.append(piece[:at])
            at -= len(piece)
        return tuple(kept), stop

    @staticmethod
    def _calling(draw: Draw, wanted: list[Tool], thinking: tuple[str, ...], room: Tokens) -> Choice:
        calls: list[ToolCall] = []
        finish = "tools"
        spent = 0
        for tool in wanted:
            arguments = as_json(Instance(draw, tool.schema).make()).decode()
            pieces = in_pieces(arguments)
            name = len(in_pieces(tool.name))
            if spent + name + len(pieces) > room:
                pieces, finish = pieces[: max(0, room - spent - name)], "length"
            calls.append(ToolCall(draw.hex(24), tool, pieces))
            spent += name + len(pieces)
            if finish == "length":
                break
        # The name of a call cut at once may not fit either: nothing exceeds the cap.
        tokens = len(thinking) + min(spent, max(room, 0))
        return Choice(thinking=thinking, calls=tuple(calls), finish=finish, tokens=tokens)
