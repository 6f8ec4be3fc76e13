"""Files found by the hash of what they were made from, each checked by a keyed hash when read.

Machine code is executable: deserializing a foreign file is arbitrary code execution. So the
folder is 0700 and ours, or nothing is read from it; every file ends in a BLAKE2b keyed with a
node-local key (0600), is read once, and *those* bytes are used after verification. A file that
does not verify is
removed and counted as absent: it is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
from typing import TYPE_CHECKING, Final

from runtime.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HASH: Final = 32
KEY_BYTES: Final = 32
MAX_FILE: Final = 256 << 20


class Cache:
    """Content under (kind, key).

    Args:
        folder: Made with mode 0700 when absent.

    Raises:
        SettingsError: The folder belongs to somebody else or is open to others.
    """

    __slots__ = ("_key", "folder", "rejected")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rejected = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
        except OSError as error:
            raise SettingsError(f"the cache {folder} cannot be made: {error.strerror}") from None
        if status.st_uid != os.getuid():
            raise SettingsError(
                f"the cache {folder} belongs to another user: refusing its contents"
            )
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SettingsError(f"the cache {folder} is open to others: chmod 700 it")
        self._key = self._node_key()

    def _node_key(self) -> bytes:
        path = self.folder / "node.key"
        with contextlib.suppress(FileExistsError):
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(made, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
        key = path.read_bytes()
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SettingsError(f"{path} can be read by others: remove the cache folder")
        if len(key) != KEY_BYTES:
            # Another process may be between creating and writing it; once more is enough.
            key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise SettingsError(f"{path} is damaged: remove it")
        return key

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / key

    def _tag(self, kind: str, key: str, content: bytes) -> bytes:
        mac = hashlib.blake2b(key=self._key, digest_size=HASH)
        mac.update(f"{kind}/{key}\0".encode())
        mac.update(content)
        return mac.digest()

    def get(self, kind: str, key: str) -> bytes | None:
        """The verified content, None when absent or damaged."""
        path = self._path(kind, key)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE)
        except OSError:
            return None
        content, tag = data[:-HASH], data[-HASH:]
        if len(data) > HASH and hmac.compare_digest(tag, self._tag(kind, key, content)):
            return content
        self.rejected += 1
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def put(self, kind: str, key: str, content: bytes) -> None:
        """Keep it; readers see the old file or the new one, never half of one."""
        path = self._path(kind, key)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        unfinished = path.with_name(f".{key}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            unfinished.write_bytes(content + self._tag(kind, key, content))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @contextlib.contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """One process at a time makes this; a process that dies gives its turn back."""
        (self.folder / "turns").mkdir(exist_ok=True, mode=0o700)
        with (self.folder / "turns" / key).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def entries(self, kind: str) -> list[str]:
        """Keys of a kind."""
        with contextlib.suppress(OSError):
            return sorted(one.name for one in (self.folder / kind).iterdir() if one.name[0] != ".")
        return []
