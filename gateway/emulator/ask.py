"""A request in the emulator's own terms, and the answer it gets: the same for every dialect.

The codecs (`chat.py`, `responses.py`, `messages.py`) read a body into an `Ask`; `Planner.plan`
decides what is said, how long, and whether a tool is called; the codecs write it down. The answer
depends on the seed, the model and the prompt, never on `stream`, the clock or what came before: two
runs agree, and so do the streamed and the plain form of one call.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.emulator.config import Answers
from gateway.emulator.text import Draw, Instance, Reel, Tokenizer, as_json, in_pieces
from gateway.units import MICRO, Micros, Tokens

CACHE_LIFE: Micros = 300 * MICRO
"""A cached prefix is forgotten so long after its last use."""

CACHE_ENTRIES = 20_000
"""Cached prefixes remembered; the least recently used goes first."""

CACHE_LEAST = 1_024
"""Shorter prefixes are not cached."""

MEDIA_SAMPLE = 64
"""Characters at each end of a media payload that tell it from another: megabytes cost too much."""

MAX_CHOICES = 128


class Rejected(Exception):
    """The request is at fault; the dialect's error body is made of these.

    Attributes:
        status: HTTP status.
        kind: `error.type`.
        param, code: OpenAI's other two fields.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code


class Prompt:
    """Counts a prompt and fingerprints every prefix of it that ends with a message.

    Attributes:
        tokens: Counted so far.
        prefixes: (fingerprint, tokens) at each boundary.
        breakpoints: Indexes of boundaries that the caller marked for caching.
    """

    __slots__ = ("_count", "_hash", "breakpoints", "prefixes", "tokens")

    def __init__(self, count: Tokenizer) -> None:
        self._count = count
        self._hash = hashlib.blake2b(digest_size=12)
        self.tokens: Tokens = 0
        self.prefixes: list[tuple[bytes, Tokens]] = []
        self.breakpoints: list[int] = []

    def text(self, text: str) -> None:
        """A piece of text."""
        self.tokens += self._count(text)
        self._hash.update(text.encode("utf-8", "surrogatepass"))
        self._hash.update(b"\0")

    def ids(self, ids: list[int]) -> None:
        """Token ids count one each."""
        self.tokens += len(ids)
        self._hash.update(repr(ids).encode())

    def json(self, value: object) -> None:
        """Anything else, counted as its JSON."""
        self.text(as_json(value).decode())

    def media(self, payload: str, tokens: Tokens) -> None:
        """An image, a sound or a file: a flat price, never its payload counted as text."""
        self.tokens += tokens
        sample = payload[:MEDIA_SAMPLE] + payload[-MEDIA_SAMPLE:]
        self._hash.update(f"{len(payload)}:{sample}".encode("utf-8", "surrogatepass"))

    def end(self, label: str, *, overhead: Tokens = 3, mark: bool = False) -> None:
        """A message (or block) is complete."""
        self.tokens += overhead
        self._hash.update(label.encode("utf-8", "surrogatepass") + b"\1")
        self.prefixes.append((self._hash.copy().digest(), self.tokens))
        if mark:
            self.breakpoints.append(len(self.prefixes) - 1)

    def digest(self) -> bytes:
        """Fingerprint of the whole prompt."""
        return self._hash.copy().digest()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called."""

    name: str
    schema: object
    namespace: str | None = None


@dataclass(slots=True, kw_only=True)
class Ask:
    """What one call asks for.

    Attributes:
        model: As asked.
        prompt: Counted.
        stream, include_usage: How to answer.
        cap: Output tokens at most, per choice; None where none is named.
        n: Choices.
        tools: Those that can be called.
        tool_choice: "auto", "none", "required", or a tool's name.
        parallel: Whether several calls may come at once.
        last_text: The last user text, where tools may be named.
        after_tool: The prompt ends with a tool's result.
        schema: A JSON answer is wanted that fits this; {} fits anything; None wants prose.
        stops: Stop sequences.
        thinking: Budget of a visible thinking block; 0 for none.
        explicit_cache: Only marked prefixes are cached (Messages).
        body: The request, for the fields a dialect echoes.
    """

    model: str
    prompt: Prompt
    stream: bool = False
    include_usage: bool = False
    cap: Tokens | None = None
    n: int = 1
    tools: list[Tool] = field(default_factory=list)
    tool_choice: str = "auto"
    parallel: bool = True
    last_text: str = ""
    after_tool: bool = False
    schema: object = None
    stops: tuple[str, ...] = ()
    thinking: Tokens = 0
    explicit_cache: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Usage in neutral classes: `input` is fresh input, cached parts apart."""

    input: Tokens
    cache_read: Tokens = 0
    cache_write: Tokens = 0
    output: Tokens = 0
    reasoning: Tokens = 0

    @property
    def prompt(self) -> Tokens:
        """All input."""
        return self.input + self.cache_read + self.cache_write

    def times(self, factor: float) -> Counted:
        """Every figure multiplied: what a lying provider reports."""
        return Counted(
            input=round(self.input * factor), cache_read=round(self.cache_read * factor),
            cache_write=round(self.cache_write * factor), output=round(self.output * factor),
            reasoning=round(self.reasoning * factor),
        )  # fmt: skip


class PromptCache:
    """Prefixes seen lately, per key and model. Bounded; time is a parameter."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str, bytes], Micros] = OrderedDict()

    def look(self, now: Micros, key: str, ask: Ask) -> Counted:
        """The prompt's input by class, as an admitted call would find it.

        Without marks the longest prefix of at least 1,024 tokens is read in steps of 128 (OpenAI).
        With marks (Messages) only prefixes up to the last mark are written or read.
        """
        prompt = ask.prompt
        if ask.explicit_cache:
            return self._marked(now, key, ask)
        # The cheapest question first: most prompts are too short to be cached.
        if prompt.tokens < CACHE_LEAST:
            return Counted(input=prompt.tokens)
        read = self._longest(now, key, ask, len(prompt.prefixes) - 1) // 128 * 128
        # The last token is always read anew: a wholly cached prompt leaves something to compute.
        read = min(read, prompt.tokens - 1)
        return Counted(input=prompt.tokens - read, cache_read=read)

    def remember(self, now: Micros, key: str, ask: Ask) -> None:
        """An admitted call leaves its prefixes behind."""
        prompt = ask.prompt
        if prompt.tokens < CACHE_LEAST:
            return
        for index in prompt.breakpoints if ask.explicit_cache else range(len(prompt.prefixes)):
            self._remember(now, key, ask, index)

    def _marked(self, now: Micros, key: str, ask: Ask) -> Counted:
        prompt = ask.prompt
        if not prompt.breakpoints:
            return Counted(input=prompt.tokens)
        last = prompt.breakpoints[-1]
        through = prompt.prefixes[last][1]
        if through < CACHE_LEAST:
            return Counted(input=prompt.tokens)
        read = self._longest(now, key, ask, last)
        return Counted(input=prompt.tokens - through, cache_read=read, cache_write=through - read)

    def _longest(self, now: Micros, key: str, ask: Ask, last: int) -> Tokens:
        for fingerprint, tokens in reversed(ask.prompt.prefixes[: last + 1]):
            if tokens < CACHE_LEAST:
                return 0
            seen = self._seen.get((key, ask.model, fingerprint))
            if seen is not None and now - seen < CACHE_LIFE:
                return tokens
        return 0

    def _remember(self, now: Micros, key: str, ask: Ask, index: int) -> None:
        fingerprint, tokens = ask.prompt.prefixes[index]
        if tokens < CACHE_LEAST:
            return
        entry = (key, ask.model, fingerprint)
        self._seen[entry] = now
        self._seen.move_to_end(entry)
        if len(self._seen) > CACHE_ENTRIES:
            self._seen.popitem(last=False)


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
