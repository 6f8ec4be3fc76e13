"""What can be said of a policy of which some entries are invalid: names that point to nothing.

An operator who mends a file shall see all mistakes at once, and a misspelled name is one whatever
else is wrong. Whether an entry is used, or can ever act, may depend on what is invalid: that is
judged as far as the invalid ones cannot change it. Pure.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gateway.policy.problems import Report

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

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


def texts_in(value: Any) -> Iterator[str]:  # noqa: ANN401 - a part of a file
    """Every text that stands there as a value, or in a list, or as a key within an entry."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts_in(inner)
            if isinstance(inner, dict):
                yield from (
                    key for part in inner.values() if isinstance(part, dict) for key in part
                )
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


class Certain(Report):
    """Passes on to another report what is wrong whatever the invalid entries say; drops the rest.

    Args:
        report: Takes the problems, and knows the places.
        known: Names of all entries, the invalid ones included.
        invalid: Paths that were left out.
        texts: Every text that stands in the file as a value, or in one; None: they are not known.
    """

    def __init__(
        self,
        report: Report,
        *,
        known: Collection[str],
        invalid: Collection[Path],
        texts: Collection[str] | None,
    ) -> None:
        super().__init__("")
        self.spots = report.spots
        self._report = report
        self._known = known
        self._invalid = tuple(invalid)
        self._texts = texts

    def error(  # noqa: PLR0913 - as in Report
        self,
        path: Path,
        what: str,
        *,
        allowed: str = "",
        near: tuple[str, Iterable[str]] | None = None,
        at_key: bool = False,
        of: tuple[Path, ...] | None = None,
        unless: str | None = None,
    ) -> None:
        """One more mistake, if it is certain."""
        if near is not None:
            # The name of an entry that was left out is no misspelled one.
            certain = not any(fnmatchcase(name, near[0]) for name in self._known)
        elif unless is not None:
            certain = self._texts is not None and unless not in self._texts
        else:
            certain = of is not None and all(map(self._sound, (path[:2], *of)))
        if certain:
            self._report.error(path, what, allowed=allowed, near=near, at_key=at_key)

    def _sound(self, entry: Path) -> bool:
        """Nothing of that entry, and nothing that holds it, was left out."""
        size = len(entry)
        return not any(path[:size] == entry[: len(path)] for path in self._invalid)

    def warn(self, path: Path, what: str, *, allowed: str = "", at_key: bool = True) -> None:
        """Dropped: oddities are told of policies that hold."""
