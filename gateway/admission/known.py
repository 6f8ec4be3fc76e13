"""What one process knows of its own calls at a shared pool. Values that change, no behavior."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.admission.values import Ask, Dimension
    from gateway.units import Micros


class Wait:
    """A call that wants in."""

    __slots__ = ("ask", "asked", "dims", "sent")

    def __init__(self, ask: Ask, dims: tuple[Dimension, ...], asked: Micros) -> None:
        self.ask = ask
        self.dims = dims
        self.asked = asked  # by the pool's clock, as far as we know it
        self.sent = False


class Held:
    """A call in flight."""

    __slots__ = ("ask", "dims", "here", "spoken")

    def __init__(
        self, ask: Ask, dims: tuple[Dimension, ...], spoken: tuple[Dimension, ...], *, here: bool
    ) -> None:
        self.ask = ask
        self.dims = dims
        self.spoken = spoken  # the pool's vectors for this call follow them
        self.here = here  # granted by our own stopgap, unknown to the store
