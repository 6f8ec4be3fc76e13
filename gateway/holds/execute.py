"""One held call is executed, and its row says how that ended.

Four outcomes exist. *Answered*: the reply is stored. *Refused for good*: the refusal is. *Not
served*, for certain: it goes back, keeps its age and is tried again before its deadline. *In
doubt*: a provider may have served it and nobody can know; that is said, and it is never sent again.
What makes the difference is `HeldCall.doubtful`, kept by the layer nearest to the transport.

A store that fails for a while is asked again: an answer that was paid for is not thrown away.
Source: `execution.md` §6, §15.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

from gateway.call import Call, End, HeldCall, Kind, Reply, Service
from gateway.errors import (
    BreakerOpen,
    BudgetSpent,
    CallerFault,
    GatewayError,
    StoreConflict,
    StoreUnavailable,
    UpstreamFault,
)
from gateway.holds import rows
from gateway.units import MICRO, Micros
from scheduler.api import Refusal, SchedulerError, StaleEpoch, StoreFault, pause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gateway.clock import Clock
    from gateway.holds.follow import Followers, Run
    from gateway.snapshot import Snapshot
    from scheduler.api import Held, Message, TaskStore

T = TypeVar("T")

RETURNED = frozenset({Kind.FAULT, Kind.CAPACITY, Kind.QUOTA, Kind.RAMP, Kind.PERIOD, Kind.MONEY})
"""Refusals that say "not now": the call goes back. Any other one is its answer."""
LONGEST_BACK: Micros = 60 * MICRO
SOON: Micros = 100_000
"""Pause of a call that met an open breaker: when it may go on, the loop knows; its age is kept."""
STORE_TRIES = 60
STORE_PAUSE_S = 1.0
LOST = "hold_lost"
"""Code of the refusal that says: the row is not in our hands any more."""


class Executing:
    """Executes claimed calls.

    Args:
        ended: Told of every row that became final.
        returned: Told of every row that went back.
        decode: A call's body as a mapping.

    Attributes:
        service: The pipeline of held calls; set by the composition root.
    """

    def __init__(  # noqa: PLR0913 - the composition root hands over each dependency once
        self,
        *,
        store: TaskStore,
        snapshot: Callable[[], Snapshot],
        clock: Clock,
        followers: Followers,
        decode: Callable[[Call], Mapping[str, Any]],
        ended: Callable[[Held], None],
        returned: Callable[[Held], None],
    ) -> None:
        self.service: Service | None = None
        self._store = store
        self._snapshot = snapshot
        self._clock = clock
        self._followers = followers
        self._decode = decode
        self._on_ended = ended
        self._on_returned = returned

    async def __call__(self, run: Run, request: Message) -> bool | None:
        """Whether a provider served it; None where this says nothing of the provider.

        Raises:
            SchedulerError: The store could not be told; the row stands as it was.
        """
        held = run.held
        assert self.service is not None  # noqa: S101 - set before anything is claimed
        try:
            call = rows.call_of(
                held, request, snapshot=self._snapshot(), now=self._clock.now(),
                decode=self._decode,
            )  # fmt: skip
        except CallerFault as error:
            await self._refuse(held, error)
            return None

        async def sending(to: str) -> None:
            await self._sending(held, to)

        call.sending = sending
        try:
            try:
                reply = await self.service(call)
            except GatewayError as error:
                return await self._raised(call, held, error)
            return await self._replied(run, reply)
        except asyncio.CancelledError:
            await self._interrupted(call, held)
            raise

    async def crashed(self, held: Held) -> None:
        """A defect of ours ended the execution: nobody knows how far it had come."""
        with contextlib.suppress(SchedulerError):
            await self._doubt(held, "internal_error", "The gateway failed inside.")

    async def _sending(self, held: Held, to: str) -> None:
        """The attempt is on disk."""
        try:
            await self._store.sending(held.id, held.epoch, to=to, now=self._clock.now())
        except StaleEpoch as error:
            raise StoreConflict("The hold was cancelled.", code=LOST) from error
        except SchedulerError as error:
            raise StoreUnavailable("The attempt could not be written down.") from error

    async def _raised(self, call: HeldCall, held: Held, error: GatewayError) -> bool | None:
        """No reply came."""
        if error.code == LOST:
            return None
        if call.doubtful:
            code = error.code if isinstance(error, UpstreamFault) else "hold_in_doubt"
            await self._doubt(held, code, error.message)
            return None
        if isinstance(error, CallerFault):
            await self._refuse(held, error)
            return None
        if isinstance(error, BreakerOpen):
            return await self._give_back(held, error.message, SOON, refused=False)
        wait = LONGEST_BACK if isinstance(error, BudgetSpent) else error.retry_after or MICRO
        refused = isinstance(error, UpstreamFault)
        return await self._give_back(held, error.message, wait, refused=refused)

    async def _replied(self, run: Run, reply: Reply) -> bool | None:
        """A head came: an answer to be stored, or word to come back."""
        held = run.held
        if reply.kind in RETURNED:
            await reply.close(End.FAILED)
            reason = f"{reply.kind.value} {reply.status} {reply.code}".rstrip()
            return await self._give_back(held, reason, reply.retry_after, refused=True)
        message, broken = await self._followers.read(run, reply)
        if broken is not None:
            await self._doubt(held, broken.code, broken.message)
            return None
        self._on_ended(await self._insist(
            lambda: self._store.complete(held.id, held.epoch, message, now=self._clock.now())
        ))  # fmt: skip
        return True if reply.kind is None else None

    async def _interrupted(self, call: HeldCall, held: Held) -> None:
        """The process stops, or the owner cancelled: the row says what is known."""
        with contextlib.suppress(SchedulerError):
            if call.doubtful:
                await self._doubt(held, "hold_in_doubt", "The gateway stopped before the answer.")
            else:
                await self._give_back(held, "the gateway stopped", None, refused=False)

    # --- the row ---------------------------------------------------------------------------------

    async def _give_back(
        self, held: Held, reason: str, retry_after: Micros | None, *, refused: bool
    ) -> bool:
        wait = pause(held.tries + 1) if refused else 0
        wait = max(wait, min(retry_after or 0, LONGEST_BACK))
        await self._insist(
            lambda: self._store.give_back(
                held.id, held.epoch, reason=reason, not_before=self._clock.now() + wait,
                refused=refused,
            )
        )  # fmt: skip
        self._on_returned(held)
        return False

    async def _refuse(self, held: Held, error: GatewayError) -> None:
        said = Refusal(status=type(error).status, code=error.code, message=error.message)
        self._on_ended(await self._insist(
            lambda: self._store.refuse(held.id, held.epoch, said, now=self._clock.now())
        ))  # fmt: skip

    async def _doubt(self, held: Held, code: str, message: str) -> None:
        text = f"{message} Whether the provider served the call is unknown; it is not sent again."
        said = Refusal(status=502, code=code, message=text)
        with contextlib.suppress(StaleEpoch):
            self._on_ended(await self._insist(
                lambda: self._store.doubt(held.id, held.epoch, said, now=self._clock.now())
            ))  # fmt: skip

    async def _insist(self, step: Callable[[], Awaitable[T]]) -> T:
        """What the store says, asked again for a minute while it fails."""
        for _ in range(STORE_TRIES - 1):
            try:
                return await step()
            except StoreFault:
                await self._clock.sleep(STORE_PAUSE_S)
        return await step()
