"""Prompt caching as providers do it, and the usage it reports."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from gateway.emulator.ask import Ask
from gateway.units import MICRO, Micros, Tokens

CACHE_LIFE: Micros = 300 * MICRO
"""A cached prefix is forgotten so long after its last use."""

CACHE_ENTRIES = 20_000
"""Cached prefixes remembered; the least recently used goes first."""

CACHE_LEAST = 1_024
"""Shorter prefixes are not cached."""


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
