"""Start-up check: nobody else owns our packages.

Our top-level packages have plain names. Installing a public distribution that ships one of them
overwrites or shadows ours silently, `pip check` stays content, and the first sign would be an
AttributeError in the middle of a call. So the process refuses to start, with one sentence.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

OURS = "tidegate"
PACKAGES = ("gateway", "scheduler", "runtime")


def intruder(
    owners: Mapping[str, Sequence[str]], found: Callable[[str], Path | None], *, home: Path
) -> str | None:
    """One sentence that names who else owns a package of ours; None when nobody does.

    Args:
        owners: Distributions by top-level package; an editable checkout may be absent.
        found: The folder Python would import a package from.
        home: The folder that holds our packages.
    """
    for package in PACKAGES:
        others = sorted({name for name in owners.get(package, ()) if name.lower() != OURS})
        if others:
            return (
                f"the Python package {package!r} is also installed by {', '.join(others)}: "
                f"run `pip uninstall {' '.join(others)}`, then install {OURS} again, "
                "or give it an environment of its own"
            )
        folder = found(package)
        if folder is None:
            return f"the Python package {package!r} is missing: install {OURS} again"
        if folder.parent != home:
            return (
                f"the Python package {package!r} would be imported from {folder}, "
                f"not from {home / package}: remove that folder from the path (PYTHONPATH, or the "
                "folder you start in)"
            )
    return None


def folder_of(package: str) -> Path | None:
    """Where Python would import a package from, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def owners() -> dict[str, list[str]]:
    """Installed distributions by the package of ours they claim to hold.

    Searches the texts; `packages_distributions()` parses every line of every RECORD, which takes
    longer than the rest of the start.
    """
    claims: dict[str, list[str]] = {package: [] for package in PACKAGES}
    for distribution in importlib.metadata.distributions():
        record = distribution.read_text("RECORD") or ""
        tops = (distribution.read_text("top_level.txt") or "").split()
        for package, names in claims.items():
            if package in tops or f"\n{package}/" in f"\n{record}":
                names.append(distribution.metadata["Name"])
    return claims


def check() -> str | None:
    """`intruder` for this process. Takes tens of milliseconds: once, at start."""
    return intruder(owners(), folder_of, home=Path(__file__).resolve().parent.parent)
