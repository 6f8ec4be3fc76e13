"""Texts of tools and peers, looked through for words that give orders to a model.

What a tool returns is read by a model as if somebody had said it, so whoever can write into a page,
a ticket or a file name can speak to the agent. No list of phrases finds all of it: the screen finds
what is known, marks it, and by policy refuses it. It reads the texts of a result as the model will
see them, not its JSON.
Source: OWASP LLM01 (prompt injection).
Weakness: phrases; a paraphrase passes. Results are marked untrusted whatever the screen says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gateway.units import Mode, RuleId

if TYPE_CHECKING:
    from gateway.contracts.validators import Pattern

MOST_TEXT = 1 << 20
"""Characters looked at in one result; of a longer one its beginning and its end."""
MOST_PIECES = 100_000
MEDIA = frozenset({"data", "blob"})


class Action(StrEnum):
    """What a hit does in enforce mode."""

    MARK = "mark"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenRule:
    """One thing to look for."""

    name: str
    pattern: Pattern
    action: Action = Action.MARK
    because: RuleId = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """All of them, and whether they act."""

    rules: tuple[ScreenRule, ...] = ()
    mode: Mode = Mode.SHADOW

    @property
    def looks(self) -> bool:
        """Whether anything is looked for."""
        return self.mode is not Mode.OFF and bool(self.rules)

    def hits(self, said: list[str]) -> tuple[ScreenRule, ...]:
        """The rules that match one of the texts."""
        text = joined(said)
        return tuple([rule for rule in self.rules if rule.pattern.found(text)])


def joined(said: list[str]) -> str:
    """The texts, a line each; of very many their beginning and their end."""
    text = "\n".join(said)
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()  # lone surrogates are no text
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[: MOST_TEXT // 2]}\n{text[-(MOST_TEXT // 2) :]}"


def texts(value: object) -> list[str]:
    """Texts anywhere in a value, those of one object together; base64 of media is none."""
    found: list[str] = []
    left: list[Any] = [[value]]
    while left and len(found) < MOST_PIECES:
        one = left.pop()
        if type(one) is dict:
            plain = MEDIA.isdisjoint(one)
            one = one.values() if plain else [one[key] for key in one if key not in MEDIA]
        for item in one:
            kind = type(item)
            if kind is str:
                found.append(item)
            elif kind is dict or kind is list:
                left.append(item)
    return found
