"""Bring uv.lock and requirements/ up to date, or with --check tell whether they are.

requirements/dev.txt and worker.txt are exported from uv.lock with hashes, for machines without uv.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXPORTS = {
    "requirements/dev.txt": ["--group", "dev", "--extra", "otel"],
    "requirements/worker.txt": ["--only-extra", "worker"],
    "requirements/source.txt": ["--group", "dev"],
}
SOURCE_ONLY = ("forbiddenfruit",)
"""Packages without wheels: kept apart, because everything else is installed from wheels only."""


def uv(*arguments: str) -> str:
    """Standard output of uv, which must succeed."""
    beside = shutil.which("uv", path=str(Path(sys.executable).parent))
    program = beside or shutil.which("uv") or "uv"
    done = subprocess.run(
        [program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"uv {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def export(name: str) -> str:
    """The requirements file as it should be."""
    arguments = EXPORTS[name]
    if arguments[0] == "--only-extra":
        full = uv("export", "--locked", "--no-dev", "--extra", arguments[1], *TAIL)
        base = uv("export", "--locked", "--no-dev", *TAIL)
        known = set(blocks(base))
        return "".join(block for block in blocks(full) if block not in known)
    full = blocks(uv("export", "--locked", *arguments, *TAIL))
    wanted = name.endswith("source.txt")
    return "".join(block for block in full if block.startswith(SOURCE_ONLY) is wanted)


TAIL = ["--no-emit-project", "--no-header", "--no-annotate", "--format", "requirements-txt"]


def blocks(text: str) -> list[str]:
    """Requirements with their hash lines, one string each."""
    out: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(" ") and out:
            out[-1] += line
        else:
            out.append(line)
    return out


def main() -> None:
    """Write or compare."""
    check = "--check" in sys.argv[1:]
    uv("lock", "--check") if check else uv("lock")
    stale = []
    for name in EXPORTS:
        wanted = export(name)
        path = ROOT / name
        if check:
            if not path.exists() or path.read_text() != wanted:
                stale.append(name)
        else:
            path.write_text(wanted)
    if stale:
        sys.exit(f"stale: {', '.join(stale)}; run `make lock`")


main()
