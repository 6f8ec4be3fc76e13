"""Bodies at rest: AES-256-GCM under a key derived from the process's one secret.

A prompt that waits for a provider lies on disk for hours, in a file that backups copy. The nonce is
random (96 bits, safe for 2^32 bodies per key). Who has the state folder with the secret in it has
both; `TIDEGATE_SECRET_FILE` keeps the secret elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

if TYPE_CHECKING:
    from collections.abc import Callable

NONCE = 12


class AesSeal:
    """`scheduler.api.Seal`.

    Args:
        key: 32 bytes, for this purpose alone.
        token_bytes: Random bytes of a length.
    """

    __slots__ = ("_cipher", "_token_bytes")

    def __init__(self, key: bytes, token_bytes: Callable[[int], bytes]) -> None:
        self._cipher = AESGCM(key)
        self._token_bytes = token_bytes

    def wrap(self, plain: bytes, about: bytes) -> bytes:
        """Nonce and ciphertext with its tag."""
        nonce = self._token_bytes(NONCE)
        return nonce + self._cipher.encrypt(nonce, plain, about)

    def unwrap(self, sealed: bytes, about: bytes) -> bytes | None:
        """The plain bytes; None where it is not what was sealed."""
        if len(sealed) < NONCE:
            return None
        try:
            return self._cipher.decrypt(sealed[:NONCE], sealed[NONCE:], about)
        except InvalidTag:
            return None
