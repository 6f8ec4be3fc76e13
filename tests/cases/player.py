"""Plays variants against running gateways and judges them.

A *lane* is one gateway (or fleet) with a scripted upstream of its own. Within a lane, variants
whose requests all name a model of their own and that ask nothing of the shared books are played
side by side; the others one after the other. Variants that compare speeds or watch memory are
played last and alone in the whole run, because another lane's load would be judged with them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tests.cases import accounts, items, judge, sse
from tests.cases.client import Abort, Exchange, Headers, Request, build, call, first
from tests.cases.upstream import Script, Upstream, playing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tests.cases.form import Variant

LIMIT = 30.0
"""Seconds until a client gives up where the case names no limit."""

LIMIT_ALL = 90.0
SETTLE = 4.0
"""Seconds in which counters and closed connections may still arrive after the last call."""

GRACE = 0.15
"""What must not happen gets this long to happen."""

AFTERMATH = 0.1
"""The gateway gets this long to notice that pooled connections have died."""

SDK_LONGEST_WAIT = 3.0
RETRYABLE = frozenset({408, 409, 429})

ALIVE = (
    b'{"id":"c1","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":4,'
    b'"total_tokens":13}}'
)


class Hooks(Protocol):
    """Commands of the operator (`hook: NAME`)."""

    async def run(self, name: str) -> tuple[int, str]:
        """Exit code and output of that hook."""
        ...


class NoHooks:
    """The player was given a URL only: nobody can act as the operator."""

    async def run(self, name: str) -> tuple[int, str]:
        """Always 127."""
        return 127, f"no hook {name}: the player does not control this gateway"


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """One gateway with its own scripted upstream.

    Attributes:
        policy: The set-up it runs.
        gateways: Addresses of its data listeners; more than one for a fleet.
        books: Its metrics and memory.
        log: Reads the log from a position, returns text and new position; None where it cannot.
        known: Counters after the last variant, while nothing was sent since; saves a wait, because
            the gateway renders its page at most once a second.
        ended: Why a gateway is not there any more, "" while all are.
    """

    policy: str
    gateways: tuple[tuple[str, int], ...]
    upstream: Upstream
    key: str
    books: accounts.Accounts
    hooks: Hooks = field(default_factory=NoHooks)
    log: Callable[[int], tuple[str, int]] | None = None
    known: dict[str, float] | None = None
    ended: Callable[[], str] = lambda: ""

    @property
    def authority(self) -> str:
        """Host and port of the first gateway."""
        return f"{self.gateways[0][0]}:{self.gateways[0][1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one variant: `problems` empty means passed, `skipped` holds a reason."""

    variant: Variant
    problems: tuple[str, ...] = ()
    skipped: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Played, and everything held."""
        return not self.skipped and not self.problems


# --- what may run beside what -------------------------------------------------------------------


def kills_idle_connections(variant: Variant) -> bool:
    """Its upstream ends connections that may be pooled: noise for any other variant."""
    answers = [answer for upstream in variant.upstreams for answer in upstream["answers"]]
    return any(answer.get("end") == "close" or "reuse" in answer for answer in answers)


def shareable(variant: Variant) -> bool:
    """Its requests find their script by model, and nothing it expects is shared with others."""
    expect = variant.expect
    if kills_idle_connections(variant) or variant.upstreams[1]["answers"]:
        return False  # a spare is asked for another model than the variant's own
    if any(judge.speaks_of(expect, word) for word in ("accounting", "log")):
        return False
    if any("hook" in one for one in variant.calls) or any(u["refuse"] for u in variant.upstreams):
        return False
    if judge.speaks_of(expect, "upstream") and "trap" in expect.get("upstream", {}):
        return False
    bodies = [str(one["request"].get("body", "")) for one in variant.calls if "request" in one]
    return all('"${model}' in body for body in bodies)


def solitary(variant: Variant) -> bool:
    """It compares speeds or watches memory, so nothing else may run in the whole player."""
    books = variant.expect.get("accounting", {})
    ratio = any("within_ratio_of" in one.get("expect", {}) for one in variant.calls)
    return ratio or bool(accounts.MEMORY & books.keys())


# --- one call -----------------------------------------------------------------------------------


class _Run:
    """One variant under way: its variables, its marks, its exchanges."""

    def __init__(self, variant: Variant, lane: Lane, names: items.Names) -> None:
        self.variant = variant
        self.lane = lane
        self.names = names
        self.exchanges: dict[str, list[Exchange]] = {}
        self.marks: dict[tuple[str, str], asyncio.Event] = {}
        self.started: dict[str, asyncio.Event] = {}

    def mark(self, name: str, event: str) -> asyncio.Event:
        """The moment when something first happens to a call."""
        return self.marks.setdefault((name, event), asyncio.Event())

    async def calls(self) -> None:
        """Make all calls, each at its time."""
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            previous = ""
            for one in self.variant.calls:
                self.started[one["name"]] = asyncio.Event()
                tasks.append(group.create_task(self._call(one, previous, list(tasks))))
                previous = one["name"]

    async def _call(
        self, one: Mapping[str, Any], previous: str, earlier: Sequence[asyncio.Task[None]]
    ) -> None:
        start = one.get("start")
        if start == "with_previous":
            await self.started[previous].wait()
        elif isinstance(start, dict):
            await self.mark(start["after"], start.get("event", "done")).wait()
        elif earlier:
            await asyncio.wait(earlier)
        await asyncio.sleep(float(one.get("delay", 0)))
        name = one["name"]
        self.started[name].set()
        if "wait" in one:
            await asyncio.sleep(float(one["wait"]))
        elif "hook" in one:
            code, output = await self.lane.hooks.run(one["hook"])
            self.exchanges[name] = [Exchange(code=code, output=output)]
        else:
            copies = [self._copy(one, number) for number in range(int(one.get("count", 1)))]
            self.exchanges[name] = list(await asyncio.gather(*copies))
            self._capture(one.get("capture", {}), self.exchanges[name][-1])
        for event in ("sent", "head", "body", "done"):
            self.mark(name, event).set()

    def _capture(self, wanted: Mapping[str, str], done: Exchange) -> None:
        for name, source in wanted.items():
            if source == "sse:id":
                ids = [event.id for event in sse.parse(done.body) if event.id]
                value = ids[-1] if ids else None
            else:
                value = first(done.headers, source.lower())
            if value is not None:
                self.names.set(name, value)

    async def _copy(self, one: Mapping[str, Any], number: int) -> Exchange:
        names = self.names.over(n=str(number))
        to = int(one["request"].get("to", 0))
        address = self.lane.gateways[to]
        abort = self._abort(one.get("abort"), names)
        sent_at = time.monotonic()
        repeats = int(one.get("sdk_retries", 0))
        for attempt in range(repeats + 1):
            extra: Headers = [("x-stainless-retry-count", str(attempt))] if repeats else []
            request = await asyncio.to_thread(_request, one["request"], names, self.lane, to, extra)
            done = await call(
                address,
                request,
                limit=float(one.get("limit", LIMIT)),
                abort=abort,
                linger=float(one.get("linger", 0)),
                mark=lambda event: self.mark(one["name"], event).set(),
            )
            done.attempts = attempt + 1
            if attempt == repeats or not _repeats(done):
                break
            await asyncio.sleep(_sdk_wait(done, attempt))
        done.sent_at = sent_at if repeats else done.sent_at
        return done

    def _abort(self, value: Mapping[str, Any] | None, names: items.Names) -> Abort | None:
        if value is None:
            return None
        text = value.get("text")
        return Abort(
            after=value.get("after"),
            events=value.get("events"),
            text=None if text is None else names.fill(text).encode(),
            rst=value.get("how") == "rst",
        )


def _request(
    wanted: Mapping[str, Any], names: items.Names, lane: Lane, to: int, extra: Headers
) -> Request:
    """The bytes of one request; runs in a thread, since bodies may be large or packed."""
    host, port = lane.gateways[to]
    if "raw" in wanted:
        raw = items.content(wanted["raw"], names.fill)
        return Request(method=wanted.get("method", "POST"), head=raw)
    headers: Headers = []
    dropped = {name.lower() for name in wanted.get("headers_drop", [])}
    for name, value in [*wanted.get("headers", []), *wanted.get("headers_add", [])]:
        with contextlib.suppress(items.UnknownVariable):  # a captured value that does not exist
            if name.lower() not in dropped:
                headers.append((name, names.fill(str(value))))
    body = items.content(wanted.get("body", []), names.fill)
    return build(
        wanted, headers + extra, body, target=names.fill(wanted["path"]), authority=f"{host}:{port}"
    )


def _repeats(done: Exchange) -> bool:
    """An SDK of the usual kind would send the call again."""
    if done.gave_up or done.left_at is not None:
        return False
    if done.status is None or not done.complete:
        return True
    if first(done.headers, "x-should-retry") == "false":
        return False
    return done.status in RETRYABLE or done.status >= 500


def _sdk_wait(done: Exchange, attempt: int) -> float:
    value = first(done.headers, "retry-after") or ""
    with contextlib.suppress(ValueError):
        if 0 <= float(value) <= SDK_LONGEST_WAIT:
            return float(value)
    return min(0.5 * 2.0**attempt, SDK_LONGEST_WAIT)


# --- one variant --------------------------------------------------------------------------------


def variables(variant: Variant, lane: Lane) -> items.Names:
    """The values that hold during the whole variant."""
    ports = lane.upstream.ports
    return items.Names(
        {
            "key": lane.key,
            "model": variant.model,
            "gateway": lane.authority,
            "upstream": f"{lane.upstream.host}:{ports[0]}",
            "upstream1": f"{lane.upstream.host}:{ports[1]}",
            "trap": f"{lane.upstream.host}:{lane.upstream.trap_port}",
            **items.times(items.now()),
        }
    )


async def _sample_memory(lane: Lane, peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], accounts.resident(lane.books.pids))
        await asyncio.sleep(0.02)


async def _baseline(lane: Lane, known: dict[str, float] | None) -> dict[str, float]:
    """Counters once the previous variant's calls are over.

    Raises:
        NoAccounts: They cannot be read.
    """
    if known is not None and known["in_flight"] == 0:
        return known
    end = time.monotonic() + SETTLE
    while True:
        values = await lane.books.fresh()
        if values["in_flight"] == 0 or time.monotonic() > end:
            return values
        await asyncio.sleep(0.05)


def _changes(
    before: Mapping[str, float], after: Mapping[str, float], peak: int
) -> dict[str, float]:
    changes = {
        name: value if name in accounts.GAUGES else value - before[name]
        for name, value in after.items()
    }
    changes["resident_bytes_peak"] = max(0.0, peak - before["resident_bytes"])
    return changes


async def play(variant: Variant, lane: Lane, *, alone: bool) -> Outcome:
    """Play one variant and judge it; never raises for what the gateway does.

    Args:
        variant: What to play.
        lane: Where. Its policy must be the variant's.
        alone: Requests that name no model belong to this variant.
    """
    began = time.monotonic()
    names = variables(variant, lane)
    script = Script(
        model=variant.model,
        alone=alone,
        answers=tuple(upstream["answers"] for upstream in variant.upstreams),
        names=names,
    )
    evidence = judge.Evidence(variant=variant, script=script, names=names)
    problems: list[str] = []
    refused = [number for number, upstream in enumerate(variant.upstreams) if upstream["refuse"]]
    try:
        async with playing(lane.upstream, script), asyncio.timeout(variant.limit_all or LIMIT_ALL):
            for number in refused:
                await lane.upstream.refuse(number)
            problems = await _played(variant, lane, evidence)
            if not problems and "alive_within" in variant.expect:
                problems = await _alive(variant, lane, float(variant.expect["alive_within"]))
    except TimeoutError:
        problems = [f"limit: the variant was not over after {variant.limit_all or LIMIT_ALL} s"]
    except items.UnknownVariable as error:
        problems = [f"variable ${{{error}}} has no value"]
    finally:
        for number in refused:
            await lane.upstream.accept(number)
        if kills_idle_connections(variant) or refused:
            await asyncio.sleep(AFTERMATH)
    return Outcome(variant=variant, problems=tuple(problems), seconds=time.monotonic() - began)


async def _played(variant: Variant, lane: Lane, evidence: judge.Evidence) -> list[str]:
    counted = judge.speaks_of(variant.expect, "accounting")
    known, lane.known = lane.known, None
    before: dict[str, float] = {}
    try:
        before = await _baseline(lane, known) if counted else {}
    except accounts.NoAccounts as error:  # the rest of the variant is judged all the same
        evidence.unreadable, counted = str(error), False
    position = lane.log(-1)[1] if lane.log else 0
    peak = [0]
    sampler = (
        asyncio.create_task(_sample_memory(lane, peak)) if counted and solitary(variant) else None
    )
    run = _Run(variant, lane, evidence.names)
    evidence.exchanges = run.exchanges
    try:
        await run.calls()
    finally:
        if sampler is not None:
            sampler.cancel()
    await asyncio.sleep(max(GRACE, float(variant.expect.get("settle", 0))))

    latest: list[dict[str, float] | None] = [None]

    async def look() -> list[str]:
        if counted:
            try:
                latest[0] = await lane.books.values()
                evidence.changes = _changes(before, latest[0], peak[0])
            except accounts.NoAccounts as error:
                evidence.changes, evidence.unreadable = None, str(error)
        if lane.log and "log" in variant.expect:
            evidence.log = lane.log(position)[0]
        return judge.judge_all(evidence)

    problems = await _settled(look, confirm=lane.books.stale + GRACE if counted else 0.0)
    if (
        not problems
        and "alive_within" not in variant.expect
        and not accounts.MEMORY & (variant.expect.get("accounting", {}).keys())
    ):
        lane.known = latest[0]
    return problems


async def _settled(look: Callable[[], Any], *, confirm: float) -> list[str]:
    """The problems once nothing changes for the better any more.

    Counters and connections may still be on their way; and what holds now may cease to hold, as
    when a call is charged a second time, so a good result is looked at once more.
    """
    end = time.monotonic() + SETTLE
    while True:
        problems: list[str] = await look()
        if not problems and confirm:
            await asyncio.sleep(confirm)
            problems = await look()
            confirm = 0.0
        if not problems or time.monotonic() > end or not any(_may_settle(p) for p in problems):
            return problems
        await asyncio.sleep(0.1)


def _may_settle(problem: str) -> bool:
    return "not readable" not in problem and any(
        word in problem for word in ("accounting", "upstream requests", "upstream closed within")
    )


async def _alive(variant: Variant, lane: Lane, limit: float) -> list[str]:
    """A plain call of another model succeeds in that time."""
    model = f"{variant.model}-alive"
    answer = {
        "headers": [["content-type", "application/json"]],
        "chunks": [ALIVE.decode()],
        "times": "forever",
    }
    script = Script(model=model, alone=False, answers=((answer,),), names=items.Names({}))
    body = b'{"model":"%b","messages":[{"role":"user","content":"hi"}]}' % model.encode()
    headers = [("content-type", "application/json"), ("authorization", f"Bearer {lane.key}")]
    request = build(
        {"method": "POST"}, headers, body, target="/v1/chat/completions", authority=lane.authority
    )
    async with playing(lane.upstream, script):
        done = await call(lane.gateways[0], request, limit=limit)
    if done.status == 200 and done.complete:
        return []
    return [
        f"alive: expected a plain call to succeed in {limit} s, seen {done.status} "
        f"{judge.why(done)}"
    ]


# --- many variants ------------------------------------------------------------------------------


async def play_all(
    variants: Iterable[Variant],
    lanes: Sequence[Lane],
    *,
    jobs: int = 8,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Play variants over lanes of one policy; `tell` hears each outcome as it comes."""
    outcomes: list[Outcome] = []

    def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)
        tell(outcome)

    todo = list(variants)
    shared = [variant for variant in todo if shareable(variant) and not solitary(variant)]
    apart = [variant for variant in todo if not shareable(variant) and not solitary(variant)]

    async def drain(queue: list[Variant], lane: Lane, *, alone: bool) -> None:
        while queue:
            keep(await play(queue.pop(0), lane, alone=alone))

    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            for _ in range(max(1, jobs // len(lanes))):
                group.create_task(drain(shared, lane, alone=False))
    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(drain(apart, lane, alone=True))
    for variant in todo:
        if solitary(variant):
            keep(await play(variant, lanes[0], alone=True))
    return outcomes
