"""What tests of single layers stand on: a call as the outer layers leave it, and fakes beneath."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator
from typing import Any

import orjson

from gateway.admission.core import Admit, Ask, PoolSpec, Verdict
from gateway.admission.store import Outcome, PoolView
from gateway.call import Bytes, Call, Dialect, Estimate, Family, HeaderList, Kind, Principal, Reply
from gateway.clock import LoopClock
from gateway.snapshot import AgentRule, Deployment, Model, Provider, Snapshot, Tier
from gateway.units import MICRO
from gateway.upstream import Take
from gateway.wire.codec import CODECS

PROVIDER = Provider(name="up", dialects=frozenset({"openai"}), base_url="http://up.test")
RULE = AgentRule(id="dev", tenant="acme", because="agents.dev")
PATHS = {
    Dialect.CHAT: "/v1/chat/completions",
    Dialect.EMBEDDINGS: "/v1/embeddings",
    Dialect.MESSAGES: "/v1/messages",
    Dialect.PASSTHROUGH: "/v1/files",
    Dialect.RESPONSES: "/v1/responses",
}


def the_clock() -> LoopClock:
    """One clock per loop: a second one would be anchored elsewhere."""
    loop: Any = asyncio.get_running_loop()
    if not hasattr(loop, "clock"):
        loop.clock = LoopClock()
    clock: LoopClock = loop.clock
    return clock


def deployment(name: str = "up/m", *, pools: tuple[PoolSpec, ...] = (), **more: Any) -> Deployment:
    return Deployment(id=name, provider=more.pop("provider", PROVIDER), pools=pools, **more)


def made(
    body: dict[str, Any] | None = None, *, dialect: Dialect = Dialect.CHAT,
    headers: HeaderList | None = None, rungs: tuple[Deployment, ...] = (), patience: int = 60,
    pools: tuple[PoolSpec, ...] = (), snapshot: Snapshot | None = None,
    estimate: Estimate | None = None,
) -> Call:  # fmt: skip
    """A call of a known principal, counted and with its deployment."""
    parsed = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **(body or {})}
    call = Call(
        id="c1", dialect=dialect, family=Family.OPENAI, method="POST", path=PATHS[dialect],
        target=PATHS[dialect].encode(), headers=list(headers or []),
        snapshot=snapshot or Snapshot(revision=1, digest="d"), received=the_clock().now(),
        body=orjson.dumps(parsed),
    )  # fmt: skip
    if dialect in CODECS:
        call.parsed = parsed
        call.fields = CODECS[dialect].fields(parsed)
    call.principal = Principal(id="key:dev", agent="dev", tenant="acme", rule=RULE, pools=pools)
    call.tier = Tier(name="standard", number=2)
    call.deadline = the_clock().now() + patience * MICRO
    rungs = rungs or (deployment(),)
    call.model = Model(name="m", deployments=rungs)
    call.deployment = rungs[0]
    call.estimate = estimate or Estimate(input=100, output=50)
    return call


def reply(
    status: int = 200, body: bytes = b"{}", *, kind: Kind | None = None,
    headers: HeaderList | None = None,
) -> Reply:  # fmt: skip
    answer = Reply(status=status, headers=list(headers or []), source=Bytes(body))
    answer.kind = kind
    return answer


def answering(*answers: Any) -> Any:
    """A service that gives these in turn, the last for ever; exceptions are raised."""
    left = list(answers)
    seen: list[Call] = []

    async def serve(call: Call) -> Reply:
        seen.append(call)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            return await answer(call)
        return answer

    serve.seen = seen  # type: ignore[attr-defined]
    return serve


async def read(answer: Reply) -> bytes:
    """The body as a client gets it, taps fed, edited where a layer edits."""
    out = []
    edit = getattr(answer, "edit", None)
    async for chunk in answer.source.chunks():
        for tap in answer.taps:
            tap(chunk)
        out.append(chunk if edit is None else edit.feed(chunk))
    if edit is not None:
        out.append(edit.rest())
    return b"".join(out)


class Pieces:
    """A source of pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.closed: list[bool] = []

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece

    async def pass_to(self, take: Take) -> bool:
        return all(take(piece) for piece in self.pieces)

    async def close(self, *, reuse: bool) -> None:
        self.closed.append(reuse)


class FakeStore:
    """A `PoolStore` that says what it is told to, and keeps the books of what was given back."""

    def __init__(self, **verdicts: Any) -> None:
        self.verdicts = verdicts
        self.asked: list[tuple[str, Ask]] = []
        self.ended: list[tuple[Any, ...]] = []
        self.waits: dict[str, Future[Verdict]] = {}

    def acquire(self, spec: PoolSpec, ask: Ask) -> Verdict | Future[Verdict]:
        self.asked.append((spec.name, ask))
        verdict = self.verdicts.get(spec.name)
        if verdict == "wait":
            self.waits[spec.name] = asyncio.get_running_loop().create_future()
            return self.waits[spec.name]
        if verdict is None:
            return Admit(rid=ask.rid, meter=(0,) * len(spec.dimensions), tag=7)
        return verdict(ask) if callable(verdict) else verdict

    def settle(
        self, pool: str, rid: str, *, outcome: Outcome, actual: Any, retry_after: int = 0
    ) -> None:
        self.ended.append(("settle", pool, rid, outcome, actual, retry_after))

    def cancel(self, pool: str, rid: str) -> None:
        self.ended.append(("cancel", pool, rid))

    def renew(self, pool: str, rid: str) -> None:
        self.ended.append(("renew", pool, rid))

    def signal(self, pool: str, foreign: tuple[int, ...]) -> None:
        self.ended.append(("signal", pool, foreign))

    def view(self, pool: str) -> PoolView | None:
        return None

    def pools(self) -> tuple[str, ...]:
        return ()

    async def close(self) -> None:
        return None
