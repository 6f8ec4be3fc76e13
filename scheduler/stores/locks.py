"""File locks of the operating system: they end with the process, however it ends.

A lock on a file is worth nothing where the file system does not keep it, so network file systems
are told apart here and refused by whoever opens a store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "fuse.sshfs", "fuse.s3fs")
)  # fmt: skip
"""File systems on which locks or `mmap` do not do what WAL needs."""


def opened(path: Path) -> int:
    """A descriptor of that file, made with mode 0600 if there is none. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def turn(handle: int | None) -> Iterator[None]:
    """The lock is held inside the block; None needs no lock. Blocks its thread until it is."""
    if handle is None:
        yield
        return
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


def seized(path: Path) -> int | None:
    """A descriptor whose lock is held until it is closed; None if another process has it."""
    handle = opened(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def file_system(path: Path) -> str:
    """The type of the file system that holds the path; "" where the system does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        point = fields[4].replace("\\040", " ") if len(fields) > 4 else ""
        inside = path == Path(point) or Path(point) in path.parents
        if inside and len(point) >= len(best):
            best, kind = point, right.split(" ")[0]
    return kind
