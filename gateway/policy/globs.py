"""Patterns of names: `*` is any text, `?` one character, all else itself. Pure.

The gateway matches with `fnmatchcase`; brackets are refused at loading, so both read a pattern
alike. These two questions decide whether a rule can match anything at all.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import product

MAX_STARS = 5
"""Beyond it `covers` says False: it would try 2^stars texts, for a pattern nobody writes."""

_FRESH = "\ufffc"
"""A character that no pattern holds."""


def is_pattern(text: str) -> bool:
    """Whether the text stands for more than one name."""
    return "*" in text or "?" in text


def matches(name: str, pattern: str) -> bool:
    """Whether the pattern accepts this concrete name."""
    return fnmatchcase(name, pattern)


def overlap(a: str, b: str) -> bool:
    """Whether some name is accepted by both patterns.

    Args:
        a: A pattern or plain name, up to some hundred characters: cost is len(a) * len(b).
        b: Likewise.
    Source: reachability in the product of both automata, a row at a time.
    """
    row = [False] * (len(b) + 1)
    row[0] = True
    for j, other in enumerate(b):
        row[j + 1] = row[j] and other == "*"
    for own in a:
        new = [row[0] and own == "*"] + [False] * len(b)
        for j, other in enumerate(b):
            if own == "*" or other == "*":
                # A star takes nothing, or takes what stands on the other side.
                new[j + 1] = row[j + 1] or new[j]
            else:
                new[j + 1] = row[j] and (own == other or "?" in (own, other))
        row = new
    return row[-1]


def covers(wide: str, narrow: str) -> bool:
    """Whether `wide` accepts every name that `narrow` accepts; in doubt False.

    Each star of `narrow` is tried empty and as a run longer than `wide`, made of a character that
    `wide` does not hold: such a run can only be taken by a star of `wide`, which takes any text.
    """
    if wide == narrow:
        return True
    pieces = narrow.replace("?", _FRESH).split("*")
    if len(pieces) - 1 > MAX_STARS:
        return False
    run = _FRESH * (len(wide) + 1)
    for fills in product(("", run), repeat=len(pieces) - 1):
        text = pieces[0] + "".join(
            fill + piece for fill, piece in zip(fills, pieces[1:], strict=True)
        )
        if not fnmatchcase(text, wide):
            return False
    return True
