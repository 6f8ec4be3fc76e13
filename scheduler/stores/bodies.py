"""What people and tools said, as it lies in tables: sealed where the opener gave a seal.

Bodies of held calls, answers of effects, arguments of approvals. A sealed row of a held call has no
headers of its own: they lie inside, before the body. What was written before the store had a seal
stays readable. A text is bound to its place, so that none can be put in another's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

from scheduler.errors import StoreFault
from scheduler.stores.base import Message

if TYPE_CHECKING:
    import sqlite3

SEALED = b"\x01"
LENGTH = 4
"""Bytes that say how long the headers are."""


class Unreadable(StoreFault):
    """What was sealed cannot be opened: the secret was another one, or the file was changed."""


class Seal(Protocol):
    """Authenticated encryption under a key that the store never sees."""

    def wrap(self, plain: bytes, about: bytes) -> bytes:
        """The bytes, unreadable; `about` must be said again to open them."""
        ...

    def unwrap(self, sealed: bytes, about: bytes) -> bytes | None:
        """The bytes; None where key, bytes or `about` are not those of the sealing."""
        ...


class Texts:
    """Single texts to columns and back.

    A sealed one begins with a byte that no JSON text begins with.
    """

    __slots__ = ("_seal",)

    def __init__(self, seal: Seal | None) -> None:
        self._seal = seal

    def column(self, plain: bytes, about: str) -> bytes:
        """What is written; `about` names its place."""
        return plain if self._seal is None else SEALED + self._seal.wrap(plain, about.encode())

    def text(self, found: bytes, about: str) -> bytes | None:
        """The text; None where it was sealed under another secret, or for another place."""
        if not found.startswith(SEALED):
            return found
        return self._seal.unwrap(found[1:], about.encode()) if self._seal is not None else None


class Bodies:
    """Messages to columns and back."""

    __slots__ = ("_seal",)

    def __init__(self, seal: Seal | None) -> None:
        self._seal = seal

    def columns(self, message: Message, hold: str, part: str) -> dict[str, str | bytes | int]:
        """The row's columns."""
        pairs = [[n.decode("latin-1"), v.decode("latin-1")] for n, v in message.headers]
        headers, body = json.dumps(pairs), message.body
        if self._seal is not None:
            inside = headers.encode()
            whole = len(inside).to_bytes(LENGTH, "big") + inside + body
            headers, body = "", self._seal.wrap(whole, _about(hold, part))
        return {
            "id": hold, "part": part, "status": message.status, "headers": headers, "body": body,
        }  # fmt: skip

    def message(self, row: sqlite3.Row, hold: str, part: str) -> Message:
        """The message of a row.

        Raises:
            Unreadable: It was sealed under another secret, or changed.
        """
        headers, body = row["headers"], bytes(row["body"])
        if not headers:
            whole = self._seal.unwrap(body, _about(hold, part)) if self._seal is not None else None
            if whole is None:
                raise Unreadable(f"the {part} of {hold} was sealed under another secret")
            end = LENGTH + int.from_bytes(whole[:LENGTH], "big")
            headers, body = whole[LENGTH:end].decode(), whole[end:]
        pairs = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in json.loads(headers)]
        return Message(headers=pairs, body=body, status=row["status"])


def _about(hold: str, part: str) -> bytes:
    return f"{hold}/{part}".encode()
