"""The whole gateway in virtual time: real layers, pools and policy; only the upstream is fake.

`World.ask` is a client: it sends a call through the pipeline, reads the answer to its end and
closes it as the edge does, also when it is cancelled. `World.settled` says whether anything is
left.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.admission.estimate import Learned
from gateway.admission.local import LocalStore
from gateway.admission.places import Tickets
from gateway.admission.store import PoolView
from gateway.call import Call, Dialect, End, Family, Reply, Service
from gateway.clock import LoopClock
from gateway.errors import GatewayError
from gateway.identity import Identities
from gateway.layers.admit import Admission
from gateway.layers.count import CountTokens
from gateway.layers.dispatch import Credentials, Dispatch
from gateway.layers.estimate import Estimating
from gateway.layers.gate import Gate
from gateway.layers.identify import Recognizer
from gateway.layers.invoke import Invoke
from gateway.layers.models import Models
from gateway.layers.observe import Observing
from gateway.layers.retry import Retrying
from gateway.layers.settle import Settling, unpacked
from gateway.layers.target import Target
from gateway.layers.trip import Breakers
from gateway.machine import decoded
from gateway.pipeline import Parts, pipeline
from gateway.policy.compile import compile as compiled
from gateway.policy.load import load_texts
from gateway.resilience.budget import RetryBudget
from gateway.snapshot import Snapshot
from gateway.steering import OwnLimits, Steering
from gateway.telemetry.metrics import Metrics
from gateway.tokens import Counter
from gateway.tools.guards import guards
from gateway.tools.remote import Remote
from gateway.tools.wiring import Tools
from gateway.units import MICRO, Micros
from gateway.upstream import Transport
from gateway.wire.codec import CODECS
from tests.fixtures.fake_transport import Tokenizer, prompt

START: Micros = 1_796_000_000 * MICRO
"""Where every simulated clock begins: no run depends on the day it is made."""

PATHS = {Dialect.CHAT: "/v1/chat/completions", Dialect.MESSAGES: "/v1/messages"}

POLICY = """\
version: 1
providers:
  up:
    kind: openai
    base_url: http://provider.test
    keys: [{{id: main, value: uk}}]
    stream_options: true
    {provider}
pools:
  quota:
    provider: up
    limits: {limits}
    shape: {shape}
    accounting: {accounting}
    {pool}
models:
  m: {{provider: up, pool: quota}}
tiers:
  interactive: {{number: 1, max_wait: {wait}}}
  standard: {{number: 2, max_wait: {wait}}}
  batch: {{number: 3, max_wait: {wait}}}
fairness: agent
agents:
  load:
    keys: [{{pattern: "sim-*"}}]
    tier: standard
    tier_cap: interactive
    loopback_only: true
{more}
"""


def policy(
    *, limits: str = "{tpm: 60000}", shape: str = "window_60s", accounting: str = "realtime",
    pool: str = "", provider: str = "", wait: str = "120s", more: str = "",
) -> str:  # fmt: skip
    """A policy with one pool; `more` is appended."""
    return POLICY.format(
        limits=limits, shape=shape, accounting=accounting, pool=pool or "mode: enforce",
        provider=provider or "headers: openai", wait=wait, more=more,
    )  # fmt: skip


def snapshot(text: str, revision: int = 1) -> Snapshot:
    return compiled(load_texts({"sim.yaml": text.encode()}, env={}), revision=revision)


class NoStore:
    """A store that nothing here may ask: threads do not exist in virtual time."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked of the store")


@dataclass
class Told:
    """How a call ended, as its client and the log saw it."""

    user: str
    status: int = 0
    end: End | None = None
    error: GatewayError | None = None
    call: Call | None = None
    body: bytes = b""
    asked: float = 0.0
    answered: float = 0.0
    ended: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.end is End.COMPLETE

    @property
    def queued(self) -> float:
        assert self.call is not None
        return self.call.queue_us / MICRO


@dataclass
class World:
    """A gateway. Make it inside the virtual loop."""

    snapshot: Snapshot
    transport: Transport
    clock: LoopClock
    seed: int = 1
    ended: list[tuple[Call, int, str, GatewayError | None]] = field(default_factory=list)
    swaps: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock, rng = self.clock, random.Random(self.seed)
        self.rng = rng
        self.metrics = Metrics()
        self.store = LocalStore(clock)
        self.counter = Counter(lambda _name: Tokenizer(), clock=clock, inline=True)
        self.breakers = Breakers(
            on_change=lambda scope, breaker: self.swaps.append((scope, breaker.state.value))
        )
        self.credentials = Credentials(clock, rng)
        estimating = Estimating(self.counter, Learned(), decode=decoded)
        self.admission = Admission(self.store, clock, tickets=Tickets(b"secret"))
        dispatch = Dispatch(
            self.transport, clock, self.credentials, decode=unpacked,
            on_head=Steering(self.store, clock, self.admission.producing).head,
        )  # fmt: skip
        tools = Tools(Remote(self.transport, clock), clock, key=b"k" * 32, rng=rng, environment={})
        tools.owned_by(asyncio.get_running_loop().create_task)
        self.tools = tools
        self.guards = guards(
            tools.exchanges, effects=NoStore(), approvals=NoStore(), clock=clock,
            spawn=lambda work: asyncio.get_running_loop().create_task(work),
            token=rng.randbytes,
        )  # fmt: skip
        tools.plane.on_tools = self.guards.definitions.learn
        self.budget = RetryBudget(self.snapshot.backoff, now=clock.now())
        self.parts = Parts(
            clock=clock,
            rng=rng,
            recognize=Recognizer(Identities(clock=clock, fetch=_no_keys), clock),
            estimating=estimating,
            admission=self.admission,
            breakers=self.breakers,
            retrying=Retrying(clock=clock, rng=rng, budget=self.budget, spares=self.credentials),
            settling=Settling(learn=estimating.learn),
            dispatch=dispatch,
            observing=Observing(
                clock=clock, metrics=self.metrics, own_limits=OwnLimits(self.store),
                on_end=lambda *end: self.ended.append(end),
            ),
            models=Models(),
            count_tokens=CountTokens(dispatch, self.counter, decoded, clock, self.store),
            target=Target(tools.members, tools.sessions),
            gate=Gate(self.guards),
            invoke=Invoke(tools.exchanges, clock),
            plane=tools.plane,
        )  # fmt: skip
        self.service: Service = pipeline(self.parts)
        self._serial = 0

    async def ready(self) -> World:
        await self.counter.preload(["o200k_base"])
        return self

    # --- a client --------------------------------------------------------------------------------

    def call(
        self, *, agent: str = "sim-1", tier: int = 2, tokens: int = 100, user: str = "",
        stream: bool = False, cap: int | None = None, output: int = 50,
        dialect: Dialect = Dialect.CHAT, headers: list[tuple[bytes, bytes]] | None = None,
        model: str = "m",
    ) -> Call:  # fmt: skip
        """A call as the edge would make it."""
        self._serial += 1
        parsed: dict[str, Any] = {
            "model": model, "user": user or f"u{self._serial}", "seed": output,
            "messages": [{"role": "user", "content": prompt(tokens)}],
        }  # fmt: skip
        if stream:
            parsed["stream"] = True
        if cap is not None:
            parsed["max_tokens"] = cap
        path = PATHS[dialect]
        call = Call(
            id=f"c{self._serial}",
            dialect=dialect,
            family=Family.OPENAI if dialect is Dialect.CHAT else Family.ANTHROPIC,
            method="POST",
            path=path,
            target=path.encode(),
            headers=[
                (b"authorization", f"Bearer {agent}".encode()),
                (b"tidegate-tier", b"%d" % tier),
                *(headers or []),
            ],
            snapshot=self.snapshot,
            received=self.clock.now(),
            body=orjson.dumps(parsed),
        )
        call.peer = "127.0.0.1"
        call.parsed = parsed
        call.fields = CODECS[dialect].fields(parsed)
        return call

    async def ask(self, **wish: Any) -> Told:
        """The answer, read to its end and closed; a cancellation is the client leaving."""
        return await self.run(self.call(**wish))

    async def run(self, call: Call) -> Told:
        loop = asyncio.get_running_loop()
        told = Told(user=orjson.loads(call.body)["user"], call=call, asked=loop.time())
        try:
            reply = await self.service(call)
        except GatewayError as error:
            told.error, told.status, told.ended = error, type(error).status, loop.time()
            return told
        told.status, told.answered = reply.status, loop.time()
        end = End.CLIENT_GONE
        try:
            end = await self._read(reply, told)
        finally:
            reply.finish(end)
            told.end, told.ended = end, loop.time()
            await asyncio.shield(loop.create_task(reply.close(end)))
        return told

    async def _read(self, reply: Reply, told: Told) -> End:
        parts: list[bytes] = []
        try:
            async for chunk in reply.source.chunks():
                for tap in reply.taps:
                    tap(chunk)
                parts.append(chunk)
        except GatewayError as error:
            told.error = error
            return End.CUT
        except Exception:  # noqa: BLE001 - a transport fault in the middle of a body
            return End.CUT
        parts += [finishing(End.COMPLETE) for finishing in reply.finishing]
        told.body = b"".join(parts)
        return End.COMPLETE

    # --- looking ---------------------------------------------------------------------------------

    def view(self, name: str = "pool:quota") -> PoolView:
        view = self.store.view(name)
        assert view is not None, self.store.pools()
        return view

    def nothing_left(self) -> None:
        """Fails unless every permit, place and expectation was given back."""
        for name in self.store.pools():
            view = self.view(name)
            assert view.in_flight == 0, (name, view)
            assert not any(lane.waiting for lane in view.lanes), (name, view)
            assert not any(lane.backlog for lane in view.lanes), (name, view)
        assert self.store.waiting() == 0
        assert self.admission.producing == {}
        assert self.clock.alarms_armed == 0

    def forgotten(self) -> None:
        """Fails unless the meters hold nothing any more."""
        for name in self.store.pools():
            for dimension in self.view(name).dimensions:
                assert (dimension.level, dimension.used) == (0, 0), (name, dimension)


async def _no_keys(_issuer: Any) -> bytes:
    raise AssertionError("no issuer is named here")


def sim_clock() -> LoopClock:
    """The clock of the running virtual loop, always beginning at `START`."""
    clock = LoopClock()
    clock._anchor = START
    clock.wall = lambda: clock.now() / MICRO  # type: ignore[method-assign]
    return clock
