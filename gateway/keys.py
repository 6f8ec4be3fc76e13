"""Secrets that are never printed, and callers' keys as they are stored. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class Secret:
    """A value that must never be printed. `reveal()` is the only way to it."""

    _value: str

    def reveal(self) -> str:
        """The value itself: for the one header that needs it."""
        return self._value

    def __repr__(self) -> str:
        """Never the value."""
        return "Secret(***)"

    def __str__(self) -> str:
        """Never the value."""
        return "***"


def hash_key(salt: bytes, key: str) -> bytes:
    """SHA-256 of salt and key: what is stored instead of a key.

    Keys are machine-made with at least 128 bits of chance, so a slow password hash would only cost
    time on every call.
    """
    return sha256(salt + key.encode("utf-8", "surrogatepass")).digest()


def stored_key(salt: bytes, digest: bytes) -> str:
    """The written form of a stored key, `sha256:<salt hex>:<digest hex>`."""
    return f"sha256:{salt.hex()}:{digest.hex()}"


def parse_stored_key(text: str) -> tuple[bytes, bytes]:
    """Salt and digest of that form.

    Raises:
        ValueError: It has another form; the text itself is not repeated, it could be a key.
    """
    scheme, _, rest = text.strip().partition(":")
    salt_hex, colon, digest_hex = rest.partition(":")
    try:
        salt, digest = bytes.fromhex(salt_hex), bytes.fromhex(digest_hex)
    except ValueError:
        salt, digest = b"", b""
    if scheme != "sha256" or not colon or not salt or len(digest) != 32:
        raise ValueError("a stored key has the form sha256:<salt in hex>:<64 hex digits>")
    return salt, digest
