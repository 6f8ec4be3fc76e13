"""Reading our own source: what the architecture tests share."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("gateway", "scheduler", "runtime")


def files(*rooms: str) -> list[Path]:
    """Python files of these rooms."""
    return sorted(path for room in rooms or ROOMS for path in (ROOT / room).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(), filename=str(path))


def name(path: Path) -> str:
    """Path relative to the project's root."""
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Modules imported at run time, anywhere in the file; not those of `if TYPE_CHECKING:`."""
    found: set[str] = set()
    for node in _running(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def _running(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _running(other)
            continue
        yield child
        yield from _running(child)
