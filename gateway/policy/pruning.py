"""What can be said of a policy of which some entries are invalid: names that point to nothing.

An operator who mends a file shall see all mistakes at once, and a misspelled name is one whatever
else is wrong. Whether an entry is used, or can ever act, may depend on what is invalid: that is
judged only once every entry is valid. Pure.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gateway.policy.problems import Report

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from gateway.policy.problems import Path


def without(value: Any, path: Path) -> Any:  # noqa: ANN401 - a part of a file
    """The value without what stands at that path; without what should hold it where nothing does.

    Nothing is changed: what lies on the way is made anew.
    """
    step: Any = path[0]
    rest = path[1:]
    deeper = bool(rest) and _holds(value[step], rest[0])
    if isinstance(value, dict):
        left = {key: inner for key, inner in value.items() if key != step}
        return {**value, step: without(value[step], rest)} if deeper else left
    before, after = value[:step], value[step + 1 :]
    return (*before, without(value[step], rest), *after) if deeper else (*before, *after)


def pruned(raw: dict[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """The mapping without all of these; later entries of a list first, so that positions hold."""
    for path in sorted(paths, key=_place, reverse=True):
        if path and _holds(raw, path[0]):
            raw = without(raw, path)
    return raw


def _place(path: Path) -> list[str]:
    return [f"{step:06}" if isinstance(step, int) else step for step in path]


def _holds(value: Any, step: str | int) -> bool:  # noqa: ANN401 - a part of a file
    if isinstance(value, dict):
        return step in value
    return isinstance(value, tuple) and isinstance(step, int) and step < len(value)


class NamesOnly(Report):
    """Passes on to another report what names that exist nowhere in the file; the rest is dropped.

    Args:
        report: Takes the problems, and knows the places.
        known: Names of all entries, the invalid ones included.
    """

    def __init__(self, report: Report, *, known: Collection[str]) -> None:
        super().__init__("")
        self.spots = report.spots
        self._report = report
        self._known = known

    def error(
        self,
        path: Path,
        what: str,
        *,
        allowed: str = "",
        near: tuple[str, Iterable[str]] | None = None,
        at_key: bool = False,
    ) -> None:
        """One more mistake, if it is a name, and not the name of an entry that was left out."""
        if near is None or any(fnmatchcase(name, near[0]) for name in self._known):
            return
        self._report.error(path, what, allowed=allowed, near=near, at_key=at_key)

    def warn(self, path: Path, what: str, *, allowed: str = "", at_key: bool = True) -> None:
        """Dropped: oddities are told of policies that hold."""
