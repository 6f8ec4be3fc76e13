"""One gateway of a fleet, as far as loops go: what it shares, and the layer that judges."""

from __future__ import annotations

import asyncio
import contextlib
import random

import orjson

from gateway.admission.remote import FailMode
from gateway.call import (
    Bytes,
    Call,
    Dialect,
    End,
    Estimate,
    Family,
    Fields,
    Principal,
    Reply,
    Usage,
)
from gateway.clock import LoopClock
from gateway.errors import LoopDetected
from gateway.layers.guard_loops import LoopGuard
from gateway.layers.trip import Breakers
from gateway.resilience.breaker import BreakerRules
from gateway.resilience.loops import LoopRules
from gateway.sharing import Sharing
from gateway.snapshot import AgentRule, Snapshot
from gateway.units import Mode

ENFORCE = LoopRules(mode=Mode.ENFORCE)
AGENT = AgentRule(id="ada", tenant="t")
NEWS_S = 0.2
"""Until a member hears news: its connection has to stand."""


class Member:
    """A guard that belongs to a fleet, before a service that answers at once."""

    def __init__(self, url: str, prefix: str, name: str, rules: LoopRules) -> None:
        self.clock = LoopClock(precise=True)
        self.sharing = Sharing(
            url, clock=self.clock, rng=random.Random(1), gateway=name, prefix=prefix,
            mode=FailMode.LOCAL, cold=False, stamp=int, on_mode=lambda _mode: None,
        )  # fmt: skip
        self.rules = rules
        self.stages: list[tuple[str, str]] = []
        self.guard = LoopGuard(on_loop=lambda rule, stage: self.stages.append((rule, stage)))
        self.guard.fleet = self.sharing
        self.sharing.books.known = self.guard.books
        self.sharing.connect(Breakers(), BreakerRules, lambda: None, self.guard.reset)
        self.serve = self.guard(self.inner)
        self.answer = b"{}"

    async def inner(self, call: Call) -> Reply:
        assert call.estimate is not None
        call.usage = Usage(input=call.estimate.input, output=0)
        return Reply(status=200, headers=[], source=Bytes(self.answer))

    async def ask(
        self, body, *, who="ada", workflow="", session="", dialect=Dialect.CHAT, tokens=0
    ) -> str:
        """What the rules say of the call: "" (it passes), a warning, or the refusal's reason."""
        headers = [(b"baggage", f"workflow.id={workflow}".encode())] if workflow else []
        call = Call(
            id="c", dialect=dialect, family=Family.OPENAI, method="POST", path="/", target=b"/",
            headers=headers, snapshot=Snapshot(revision=1, digest="", loops=self.rules),
            received=self.clock.now(),
        )  # fmt: skip
        call.parsed = orjson.loads(orjson.dumps(body))
        call.fields = Fields(model="m", has_tools=True)
        call.principal = Principal(id=f"key:{who}", agent=who, tenant="t", rule=AGENT)
        call.session = session
        call.estimate = Estimate(input=tokens, output=0, money=0)
        try:
            reply = await self.serve(call)
        except LoopDetected as refused:
            return f"refused {refused.because}"
        for tap in reply.taps:
            tap(self.answer)
        await reply.close(End.COMPLETE)
        return "".join(
            f"warned {value.decode().partition(':')[0]}"
            for name, value in call.extra_headers
            if name == b"tidegate-warning"
        )


@contextlib.asynccontextmanager
async def member(url: str, prefix: str, name: str, rules: LoopRules = ENFORCE):
    """One that runs, and hears news, until the block ends."""
    made = Member(url, prefix, name, rules)
    running = asyncio.create_task(made.sharing.run())
    await asyncio.sleep(NEWS_S)
    try:
        yield made
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await made.sharing.store.close()
