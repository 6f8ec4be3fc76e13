"""What was seen lately, folded into a state that can begin anew. Pure.

One process keeps it in a `memory.Memory`; the gateways of a fleet keep the events together and fold
them again (`loop_lists.py`), wherever they happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.units import Micros


class Lately:
    """What every such state has.

    Attributes:
        session: Hash of the name by which an operator resets it; 0 where none does.
        name: What the gateways of a fleet call it; 0 where nobody shares it.
        touched: Instant of its last call.
        turn: Rises whenever it begins anew.
        heard_at: Instant at which it last heard of the fleet.
    """

    __slots__ = ("heard_at", "name", "session", "touched", "turn")

    def __init__(self, *, session: int = 0, name: int = 0) -> None:
        self.session = session
        self.name = name
        self.touched: Micros = 0
        self.heard_at: Micros = 0
        self.turn = -1
        self.clear()

    def clear(self) -> None:
        """Nothing was seen so far; what comes back of the time before is void."""
        self.turn += 1
        self._forget()

    def _forget(self) -> None:
        """Nothing was seen, but it is no new beginning: the same is about to be folded again."""
        raise NotImplementedError
