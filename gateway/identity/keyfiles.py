"""Keys and secrets this process makes for itself, in files that only their owner reads.

A file appears whole or not at all, with mode 0600 from its first byte, and whoever starts at the
same time reads the same one: it is written under another name and linked to its own, which fails if
that exists. Chance comes in as `token_bytes` (`secrets.token_bytes`).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from gateway.snapshot import hash_key, stored_key

if TYPE_CHECKING:
    from pathlib import Path

TokenBytes: TypeAlias = Callable[[int], bytes]
"""That many bytes nobody can guess."""

DEV_KEY_FILE = "dev-key"
SECRET_FILE = "secret"  # noqa: S105 - a file's name
MIN_SECRET = 32
"""Bytes of chance, or characters of a secret somebody else made."""

MAX_FILE = 4096


def make_key(token_bytes: TokenBytes, id: str = "dev") -> tuple[str, str]:  # noqa: A002 - the word of ApiKey
    """A new key `tg_<id>_<secret>` of 160 bits, and the form of it that policy stores.

    Raises:
        ValueError: The id could not be told from the secret, or would need quoting.
    """
    if not id or not id.isascii() or not id.replace("-", "").isalnum() or len(id) > 64:
        raise ValueError(f"key id {id!r}: letters, digits and hyphens are allowed, at most 64")
    key = f"tg_{id}_{token_bytes(20).hex()}"
    salt = token_bytes(16)
    return key, stored_key(salt, hash_key(salt, key))


def dev_key(state_dir: Path, token_bytes: TokenBytes) -> str:
    """The development key of this state folder, made at its first start.

    Raises:
        ValueError: The file holds something else; says which and what to do.
        OSError: The folder or file cannot be made or read.
    """
    path = state_dir / DEV_KEY_FILE
    text = _kept(path, lambda: make_key(token_bytes)[0])
    if not text.startswith("tg_") or len(text) < 20 or not text.isascii() or " " in text:
        raise ValueError(f"{path} holds no key; delete it and a new one is made")
    return text


def process_secret(state_dir: Path, secret_file: Path | None, token_bytes: TokenBytes) -> bytes:
    """The secret all signing keys derive from: of the file named, else made in the state folder.

    Raises:
        ValueError: The file is too short to be a secret.
        OSError: The named file is absent (a fleet must share one, so none is made there), or the
            folder cannot be written.
    """
    if secret_file is not None:
        path, text = secret_file, _read(secret_file, tighten=False)
    else:
        path = state_dir / SECRET_FILE
        text = _kept(path, lambda: token_bytes(MIN_SECRET).hex())
    if len(text) < MIN_SECRET:
        raise ValueError(f"{path} is too short for a secret: at least {MIN_SECRET} characters")
    return text.encode()


def derive(secret: bytes, purpose: str) -> bytes:
    """32 bytes for that purpose alone: HKDF-SHA256 (RFC 5869) with one block of output."""
    extracted = hmac.digest(b"tidegate", secret, "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


def _kept(path: Path, make: Callable[[], str]) -> str:
    """What the file holds, made first if there is none."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_once(path, make())
    return _read(path, tighten=True)


def _write_once(path: Path, text: str) -> None:
    """The file is there, with this text or that of whoever was faster."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path, *, tighten: bool) -> str:
    """The file's text without its line end; our own files lose rights of others, if any."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (os.O_NOFOLLOW if tighten else 0))
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} is not a file")
        if tighten and mode & 0o077:
            with contextlib.suppress(PermissionError):
                os.fchmod(handle, 0o600)
        content = os.read(handle, MAX_FILE)
    finally:
        os.close(handle)
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text") from None
