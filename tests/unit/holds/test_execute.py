"""One held call is executed against a pipeline by script: each way it can end, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from gateway.call import Bytes, End, HeldCall, Kind, Reply
from gateway.clock import LoopClock
from gateway.errors import (
    BreakerOpen,
    BudgetSpent,
    DeadlinePassed,
    Draining,
    Forbidden,
    NeverFits,
    QueueFull,
    StoreConflict,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.holds.execute import Executing
from gateway.holds.follow import MAX_REPLY, Followers, Run
from gateway.layers.mark import mark
from gateway.machine import decoded
from gateway.snapshot import Deployment, Provider, Snapshot
from gateway.units import MICRO
from scheduler.api import Held, Limits, State, StoreFault
from tests.fixtures.fake_service import CUT, FakeSource
from tests.fixtures.held import NOW, memory_store, new_hold

RUNG = Deployment(
    id="p/m", provider=Provider(name="p", dialects=frozenset({"openai"}), base_url="http://up")
)
Script = Callable[[HeldCall], Awaitable[Reply]]


@dataclass
class Ended:
    """What is known after an execution."""

    served: bool | BaseException | None = None
    row: Held | None = None
    final: list[Held] = field(default_factory=list)
    returned: list[Held] = field(default_factory=list)
    run: Run | None = None
    body: bytes | None = None
    began: int = 0


class Quick(LoopClock):
    """A clock whose sleeps are short."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 1000)


def execute(
    script: Script, *, streams: bool = False, body: bytes | None = None,
    meanwhile: Callable[[object, Held, asyncio.Task], Awaitable[None]] | None = None,
    marked: bool = True,
) -> Ended:  # fmt: skip
    """The execution of one claimed call by a pipeline of two layers: the mark and the script.

    Unmarked, the script stands for a layer outside the mark.
    """
    said = Ended()

    async def main() -> None:
        with memory_store() as store:
            facts = {} if body is None else {"request": new_hold().request.__class__(
                headers=[], body=body)}  # fmt: skip
            await store.keep(new_hold(streams=streams, **facts), limits=Limits())
            [(held, request)] = await store.claim("m", limit=1, now=NOW)
            clock = Quick()
            followers = Followers(clock)
            executing = Executing(
                store=store, snapshot=lambda: Snapshot(revision=1, digest="d"), clock=clock,
                followers=followers, decode=decoded, ended=said.final.append,
                returned=said.returned.append,
            )  # fmt: skip

            async def service(call) -> Reply:
                call.deployment = RUNG
                return await (mark(script) if marked else script)(call)

            executing.service = service
            said.run = Run(held)
            said.began = clock.now()
            task = asyncio.ensure_future(executing(said.run, request))
            if meanwhile is not None:
                await meanwhile(store, held, task)
            try:
                said.served = await task
            except BaseException as error:  # noqa: BLE001 - what came is what is looked at
                said.served = error
            said.row = await store.find(held.id, held.owner)
            reply = await store.reply(held.id)
            said.body = None if reply is None else reply.body

    asyncio.run(main())
    return said


def replying(
    *steps, status: int = 200, kind: Kind | None = None, length: int | None = None,
    retry_after: int | None = None, finishing: bytes = b"", terminal: bool = False,
    sent: bool = True,
) -> Script:  # fmt: skip
    async def script(call: HeldCall) -> Reply:
        call.sent = sent
        headers = [(b"content-type", b"application/json")]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        made = Reply(status=status, headers=headers, source=FakeSource(list(steps)))
        made.kind = kind
        made.retry_after = retry_after
        made.terminal = terminal
        made.finishing.append(lambda end: finishing if end is End.COMPLETE else b"")
        return made

    return script


def raising(error: BaseException, *, sent: bool) -> Script:
    async def script(call: HeldCall) -> Reply:
        call.sent = sent
        raise error

    return script


def state(said: Ended) -> State:
    assert said.row is not None
    return said.row.state


# --- answered ------------------------------------------------------------------------------------


def test_an_answer_is_stored_as_it_came_and_followers_saw_the_same_bytes():
    said = execute(replying(b"ab", b"cd", status=201, length=4))
    assert (said.served, state(said), said.body) == (True, State.DONE, b"abcd")
    assert said.row is not None
    assert (said.row.status, said.row.attempt, said.row.sent_to) == (201, 1, "p/m")
    assert said.run is not None
    assert said.run.chunks == [b"ab", b"cd"]
    assert [held.state for held in said.final] == [State.DONE]


@pytest.mark.parametrize("kind", [Kind.CALLER, Kind.AUTH])
def test_a_refusal_that_concerns_the_caller_is_its_answer(kind):
    said = execute(replying(b"{}", status=400, kind=kind))
    assert (said.served, state(said), said.body) == (None, State.DONE, b"{}")


def test_a_cut_after_the_terminal_mark_is_no_cut():
    assert state(execute(replying(b"all", CUT, terminal=True))) is State.DONE


# --- not served ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [Kind.FAULT, Kind.CAPACITY, Kind.QUOTA, Kind.RAMP, Kind.PERIOD, Kind.MONEY]
)
def test_a_refusal_that_says_not_now_sends_the_call_back(kind):
    said = execute(replying(b"{}", status=503, kind=kind, retry_after=9 * MICRO))
    assert (said.served, state(said), said.final) == (False, State.OPEN, [])
    assert said.row is not None
    assert said.row.tries == 1
    assert len(said.returned) == 1


@pytest.mark.parametrize(
    ("error", "tries"),
    [(BreakerOpen("open"), 0), (UpstreamUnreachable("x", code="connect_failed"), 1)],
)
def test_a_call_of_which_nothing_was_sent_goes_back(error, tries):
    said = execute(raising(error, sent=False))
    assert said.row is not None
    assert (said.served, state(said), said.row.tries) == (False, State.OPEN, tries)


# --- refused for good ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Forbidden("gone", code="identity_revoked"), NeverFits("large")])
def test_a_refusal_before_the_mark_ends_the_call_with_its_words(error):
    async def service(call: HeldCall) -> Reply:
        raise error

    said = execute(service, marked=False)
    assert state(said) is State.REFUSED
    assert said.row is not None
    assert (said.row.code, said.row.message) == (error.code, error.message)
    assert said.row.status == type(error).status


@pytest.mark.parametrize("error", [BreakerOpen("open"), DeadlinePassed("queue"), Draining("stop")])
def test_a_refusal_before_the_mark_that_says_not_now_sends_the_call_back(error):
    async def service(call: HeldCall) -> Reply:
        raise error

    said = execute(service, marked=False)
    assert (state(said), said.served) == (State.OPEN, False)


@pytest.mark.parametrize(
    ("error", "micros"),
    [
        (BreakerOpen("open", retry_after=30 * MICRO), 100_000),
        (DeadlinePassed("queue"), MICRO),
        (QueueFull("full", retry_after=3 * MICRO), 3 * MICRO),
        (QueueFull("full", retry_after=3_600 * MICRO), 60 * MICRO),
        (BudgetSpent("spent"), 60 * MICRO),
    ],
    ids=["breaker", "deadline", "queue", "long queue", "budget"],
)
def test_what_goes_back_stays_back_long_enough_not_to_spin(error, micros):
    async def service(call: HeldCall) -> Reply:
        raise error

    said = execute(service, marked=False)
    assert said.row is not None
    assert 0 <= said.row.not_before - said.began - micros < MICRO


def test_a_request_that_cannot_be_read_any_more_is_refused():
    said = execute(replying(b"{}"), body=b"not json")
    assert state(said) is State.REFUSED
    assert said.row is not None
    assert said.row.attempt == 0


# --- in doubt ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (raising(UpstreamTimeout("x", code="first_byte_timeout"), sent=True), "first_byte_timeout"),
        (raising(UpstreamUnreachable("x", code="upstream_reset"), sent=True), "upstream_reset"),
        (replying(b"ab", CUT), "stream_cut"),
        (replying(b"ab", length=5), "stream_cut"),
        (replying(b"ab", finishing=b"event: error\n\n"), "stream_cut"),
        (replying(b"ab", UpstreamTimeout("x", code="idle_timeout")), "idle_timeout"),
        (replying(*[b"x" * (MAX_REPLY // 4)] * 5), "reply_too_large"),
    ],
    ids=["timeout", "reset", "cut", "short", "unmarked", "idle", "endless"],
)  # fmt: skip
def test_what_may_have_been_served_is_in_doubt_and_says_so(script, code):
    said = execute(script)
    assert (said.served, state(said)) == (None, State.IN_DOUBT)
    assert said.row is not None
    assert (said.row.code, said.row.status) == (code, 502)
    assert "not sent again" in said.row.message
    assert said.body is None


# --- lost, interrupted, a failing store ----------------------------------------------------------


def test_a_call_cancelled_before_it_was_sent_is_not_sent():
    sent: list[str] = []

    async def script(call: HeldCall) -> Reply:
        sent.append(call.id)
        return Reply(status=200, headers=[], source=Bytes(b""))

    async def cancel(store, held: Held, _task) -> None:
        await store.cancel(held.id, held.owner, now=NOW)

    said = execute(script, meanwhile=cancel)
    assert (said.served, state(said), sent) == (None, State.CANCELLED, [])


def test_an_execution_cut_off_behind_the_mark_is_in_doubt():
    reached = asyncio.Event()

    async def script(_call: HeldCall) -> Reply:
        reached.set()
        await asyncio.sleep(60)
        raise AssertionError

    async def stop(_store, _held, task: asyncio.Task) -> None:
        await reached.wait()
        task.cancel()

    said = execute(script, meanwhile=stop)
    assert isinstance(said.served, asyncio.CancelledError)
    assert state(said) is State.IN_DOUBT


def test_an_execution_cut_off_before_the_mark_goes_back():
    reached = asyncio.Event()

    async def waits(_call: HeldCall) -> Reply:
        reached.set()
        await asyncio.sleep(60)
        raise AssertionError

    async def stop(_store, _held, task: asyncio.Task) -> None:
        await reached.wait()
        task.cancel()

    said = execute(waits, meanwhile=stop, marked=False)
    assert isinstance(said.served, asyncio.CancelledError)
    assert state(said) is State.OPEN


def test_an_answer_is_kept_though_the_store_fails_for_a_while():
    fails = [3]

    async def flaky(store, _held, _task) -> None:
        complete = store.complete

        async def sometimes(*args, **facts):
            fails[0] -= 1
            if fails[0] >= 0:
                raise StoreFault("disk full")
            return await complete(*args, **facts)

        store.complete = sometimes

    said = execute(replying(b"paid for"), meanwhile=flaky)
    assert (state(said), said.body, fails[0]) == (State.DONE, b"paid for", -1)


def test_nothing_is_sent_where_the_mark_cannot_be_written():
    sent: list[str] = []

    async def script(call: HeldCall) -> Reply:
        sent.append(call.id)
        raise AssertionError

    async def broken(store, _held, _task) -> None:
        async def never(*_args, **_facts):
            raise StoreFault("disk full")

        store.sending = never

    said = execute(script, meanwhile=broken)
    assert (said.served, state(said), sent) == (False, State.OPEN, [])


def test_a_second_attempt_of_a_doubtful_call_keeps_the_doubt():
    async def twice(call: HeldCall) -> Reply:
        call.sent = True
        raise UpstreamTimeout("x", code="first_byte_timeout")

    async def service(call: HeldCall) -> Reply:
        call.deployment = RUNG
        with pytest.raises(UpstreamTimeout):
            await mark(twice)(call)
        with pytest.raises(StoreConflict):
            await mark(twice)(call)
        raise BreakerOpen("another rung is open")

    said = execute(service, marked=False)
    assert state(said) is State.IN_DOUBT
