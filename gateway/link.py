"""What a connection of ours offers the call that it carries, beyond ASGI.

Messages cost a coroutine each, and whether the client is still there can be learned from them only
by a task that waits. Where the server is our own, the call speaks to its exchange directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from gateway.call import HeaderList

LINK = "tidegate.link"
"""Name of the ASGI extension whose value is the exchange, a `Link`."""


class Link(Protocol):
    """What a connection offers beyond ASGI.

    Attributes:
        on_gone: Called once when the client leaves; whoever sets it resets it.
        disconnected: The client has left already.
        task: The task that answers it.
    """

    on_gone: Callable[[], None] | None
    disconnected: bool
    task: asyncio.Task[None] | None

    @property
    def paused(self) -> bool:
        """The client takes less than it is sent: `drain` before more."""
        ...

    def take(self) -> bytes | None:
        """The request's body, once, where all of it is here and its client too; else None."""
        ...

    async def drain(self) -> None:
        """The client has taken enough of what was sent, or is gone."""
        ...

    def begin(
        self, status: int, headers: HeaderList, length: int | None, *, hold: bool, close: bool
    ) -> None:
        """The head is sent, or held back (`hold`) because `finish` follows at once."""
        ...

    def push(self, data: bytes) -> bool:
        """A piece of the body is sent; False where the client should be let catch up: `drain`."""
        ...

    def finish(self, data: bytes) -> None:
        """The last piece of the body is sent, and what was held back."""
        ...

    def abort(self, hard: bool) -> None:  # noqa: FBT001 - implemented by a uvicorn protocol
        """Drop the connection, the answer unfinished; `hard` forgets unsent bytes too."""
        ...
