"""POST /v1/messages/count_tokens: relayed or answered here; never queued, never billed.

Claude Code asks once per turn, so it must not wait behind inference or take a slot. Its own limit
is the number of relays in flight: beyond it, or where the upstream has no such route, fails or is
slow, the gateway counts by itself. Counting never fails a caller.
"""

from __future__ import annotations

from asyncio import Future
from typing import TYPE_CHECKING, Any

import orjson

from gateway.admission.core import Admit, Ask, Outcome
from gateway.admission.profiles import reserve
from gateway.call import Bytes, Call, End, Estimate, Reply, Usage
from gateway.clock import Expiry
from gateway.errors import NoSuchRoute, UpstreamFault
from gateway.wire.codec import CODECS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.admission.core import PoolSpec
    from gateway.admission.store import PoolStore
    from gateway.call import Service
    from gateway.clock import Clock
    from gateway.snapshot import Deployment
    from gateway.tokens import Counter
    from gateway.units import Micros

MAX_RELAYS = 64
NOTHING = Estimate(input=0, output=0)
PATIENCE: Micros = 10_000_000
"""A relay that takes longer is answered here."""


class CountTokens:
    """The service.

    Attributes:
        relaying: Relays in flight.
    """

    __slots__ = ("_clock", "_counter", "_decode", "_dispatch", "_store", "relaying")

    def __init__(
        self,
        dispatch: Service,
        counter: Counter,
        decode: Callable[[Call], Mapping[str, Any]],
        clock: Clock,
        store: PoolStore,
    ) -> None:
        self._store = store
        self._clock = clock
        self._dispatch = dispatch
        self._counter = counter
        self._decode = decode
        self.relaying = 0

    async def __call__(self, call: Call) -> Reply:
        """The count, from the upstream where it knows the route, else ours."""
        deployment = self._deployment(call)
        call.deployment = deployment
        call.usage = Usage(input=0, output=0)
        relays = deployment.provider.count_tokens == "relay" and self.relaying < MAX_RELAYS
        if relays:
            reply = await self._relay(call)
            if reply is not None:
                return reply
        return await self._local(call, deployment)

    def _deployment(self, call: Call) -> Deployment:
        assert call.model is not None  # noqa: S101 - identify found it
        found = call.model.own(call.family.value)
        if found is not None:
            return found
        text = f"The model {call.model.name[:100]!r} is not served in this dialect."
        raise NoSuchRoute(text, code="model_not_found", param="model")

    async def _relay(self, call: Call) -> Reply | None:
        """The upstream's answer; None where it has none to give."""
        rid = f"{call.id}.count"
        held = self._take(call, rid)
        if held is None:
            return None
        self.relaying += 1
        try:
            with Expiry(self._clock, PATIENCE):
                reply = await self._dispatch(call)
        except (UpstreamFault, TimeoutError):
            self._give_back(held, rid)
            return None
        except BaseException:  # the client left, or a defect: nothing may stay in flight
            self._give_back(held, rid)
            raise
        finally:
            self.relaying -= 1
        reply.on_close(lambda _end: self._give_back(held, rid))
        if reply.status == 200:
            return reply
        await reply.close(End.FAILED)
        return None

    def _take(self, call: Call, rid: str) -> tuple[PoolSpec, ...] | None:
        """The counting endpoint's own pools, all at once; None where one would have to wait."""
        principal, tier, deployment = call.principal, call.tier, call.deployment
        assert principal is not None  # noqa: S101 - identify ran
        assert tier is not None  # noqa: S101 - identify ran
        assert deployment is not None  # noqa: S101 - chosen above
        specs = deployment.provider.count_tokens_pools
        for place, spec in enumerate(specs):
            ask = Ask(
                rid=rid,
                lane=tier.number,
                tenant=principal.tenant,
                weight=principal.rule.weight,
                deadline_in=0,
                cost=reserve(deployment.provider.accounting, NOTHING, spec),
            )
            verdict = self._store.acquire(spec, ask)
            if isinstance(verdict, Admit):
                continue
            if isinstance(verdict, Future):
                verdict.cancel()
            for taken in specs[:place]:
                self._store.cancel(taken.name, rid)
            return None
        return specs

    def _give_back(self, specs: tuple[PoolSpec, ...], rid: str) -> None:
        for spec in specs:
            self._store.settle(spec.name, rid, outcome=Outcome.SERVED, actual=None)

    async def _local(self, call: Call, deployment: Deployment) -> Reply:
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        parsed = call.parsed if call.parsed is not None else self._decode(call)
        tokens = await self._counter.local_count(
            CODECS[call.dialect].parts(parsed),
            encoding=deployment.encoding,
            tenant=principal.tenant,
            family=call.family,
        )
        raw = orjson.dumps({"input_tokens": tokens})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
        ]
        return Reply(status=200, headers=headers, source=Bytes(raw))
