"""Statements by name, from the files beside this one."""

from __future__ import annotations

from importlib import resources


def statements(name: str) -> dict[str, str]:
    """The named statements of a file in `sql/`."""
    text = (resources.files("scheduler.stores") / "sql" / name).read_text()
    found: dict[str, str] = {}
    for part in text.split("-- name: ")[1:]:
        title, _, body = part.partition("\n")
        found[title.strip()] = body.strip()
    return found
