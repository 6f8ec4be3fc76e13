"""Problems of a policy, each with its place: collected, never raised one by one.

A path is the way to a value: keys and list positions. Every path that was read has two spots, that
of its key and that of its value; a problem about a path that was not written stands at its nearest
written parent. Nothing here repeats a value by itself: callers decide what may be shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeAlias

from gateway.errors import PolicyProblem
from gateway.snapshot import Place

if TYPE_CHECKING:
    from collections.abc import Iterable

Path: TypeAlias = tuple[str | int, ...]

MAX_PROBLEMS = 200
"""Problems reported at once; a file of garbage must not fill a log."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a path was written: its key and its value."""

    key: Place
    value: Place


def dotted(path: Path) -> str:
    """The path as people and `RuleId` write it: `agents.lab.keys[0].id`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{clean(step)}" if text else clean(step)
    return text or "(file)"


def clean(text: str) -> str:
    """The text without control characters, at most 80 characters: keys come from files."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= 80 else shown[:77] + "..."


class Report:
    """Collects spots, problems and warnings of one loading.

    Attributes:
        failed: Paths of which something was said: what follows from it is not said again.
        invalid: Those of them whose value is of no use.
        dropped: Keys that were left out of an otherwise sound mapping.
        partial: Some values of the file were not read.
    """

    def __init__(self, root: str) -> None:
        self._root = Place(file=root, line=1, column=1)
        self.spots: dict[Path, Spot] = {}
        self.problems: list[PolicyProblem] = []
        self.warnings: list[PolicyProblem] = []
        self.failed: set[Path] = set()
        self.invalid: set[Path] = set()
        self.dropped: set[str] = set()
        self.partial = False

    def error(  # noqa: PLR0913 - what a mistake is, each once
        self,
        path: Path,
        what: str,
        *,
        allowed: str = "",
        near: tuple[str, Iterable[str]] | None = None,
        at_key: bool = False,
        of: tuple[Path, ...] | None = None,  # noqa: ARG002 - for those who know only a part
        unless: str | None = None,  # noqa: ARG002 - the same
    ) -> None:
        """One more mistake.

        Args:
            path: Where.
            what: Is wrong.
            allowed: What would be right.
            near: A name, and those among which it may have been meant.
            at_key: It is told at the key, not at the value.
            of: It is one whatever the rest of the file says: beside its own entry it depends on
                these entries, or sections, alone. None: on everything.
            unless: It is none if this name stands anywhere else.
        """
        self.failed.add(path)
        self.invalid.add(path)
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(self._made(path, what, allowed, near, at_key=at_key))

    def forget(self, path: Path) -> None:
        """Problems of exactly this path are taken back: a better one follows."""
        gone = dotted(path)
        self.problems = [problem for problem in self.problems if problem.path != gone]

    def warn(self, path: Path, what: str, *, allowed: str = "", at_key: bool = True) -> None:
        """One more oddity that does not stop anything."""
        if len(self.warnings) < MAX_PROBLEMS:
            self.warnings.append(self._made(path, what, allowed, None, at_key=at_key))

    def error_at(
        self, place: Place, path: Path, what: str, *, allowed: str = "", dropped: str | None = None
    ) -> None:
        """One more mistake, at a place that has no spot; `dropped` is the key that it cost."""
        self.failed.add(path)
        self.partial = True
        if dropped is None:
            self.invalid.add(path)
        else:
            self.dropped.add(dropped)
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(_problem(place, path, what, allowed, ""))

    def _made(
        self,
        path: Path,
        what: str,
        allowed: str,
        near: tuple[str, Iterable[str]] | None,
        *,
        at_key: bool,
    ) -> PolicyProblem:
        nearest = ""
        if near is not None:
            nearest = closest(near[0], near[1])
        return _problem(self._place(path, at_key=at_key), path, what, allowed, nearest)

    def _place(self, path: Path, *, at_key: bool) -> Place:
        spot = self.spots.get(path)
        if spot is not None:
            return spot.key if at_key else spot.value
        while path:
            path = path[:-1]
            if path in self.spots:
                return self.spots[path].key
        return self._root

    def places(self) -> dict[str, Place]:
        """Rule ids to the places of their keys."""
        return {dotted(path): spot.key for path, spot in self.spots.items() if path}


def _problem(place: Place, path: Path, what: str, allowed: str, nearest: str) -> PolicyProblem:
    return PolicyProblem(
        file=place.file,
        line=place.line,
        column=place.column,
        path=dotted(path),
        what=what,
        allowed=allowed,
        nearest=nearest,
    )


SYNONYMS = {
    "tokens_per_minute": "tpm",
    "requests_per_minute": "rpm",
    "input_tokens_per_minute": "itpm",
    "output_tokens_per_minute": "otpm",
    "tokens_per_day": "tpd",
    "requests_per_day": "rpd",
    "requests_per_second": "rps",
    "max_concurrency": "concurrency",
    "max_parallel_requests": "concurrency",
    "api_key": "keys",
    "url": "base_url",
    "api_base": "base_url",
    "fallback": "ladder",
    "fallbacks": "ladder",
    "timeout": "timeouts",
    "queue_deadline": "max_wait",
    "max_queue_wait": "max_wait",
    "priority": "number",
    "secret": "value",
    "token": "key",
    "users": "agents",
    "teams": "tenants",
    "budget": "budgets",
    "circuit_breaker": "breakers",
}
"""What other gateways call the same thing."""


def closest(name: str, options: Iterable[str]) -> str:
    """The option that was probably meant, or ""."""
    names = list(options)
    for other in get_close_matches(name.lower(), SYNONYMS, n=1, cutoff=0.85):
        if SYNONYMS[other] in names:
            return SYNONYMS[other]
    for swapped in names:  # letters in another order come closer than another letter
        if sorted(swapped) == sorted(name):
            return swapped
    found = get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else ""
