"""Who is held, when, and what its caller hears; and the mark before each attempt."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields

import pytest

from gateway.call import Bytes, Call, Dialect, End, Family, Fields, HeldCall, Kind, Reply
from gateway.errors import (
    BreakerOpen,
    MalformedCall,
    NeverFits,
    QueueFull,
    StoreConflict,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.layers.hold import Holding
from gateway.layers.mark import mark
from gateway.snapshot import Deployment, HoldRules, Provider, Snapshot, Tier
from gateway.units import MICRO, Mode
from scheduler.api import Held, State
from scheduler.stores.base import Hold
from tests.fixtures.held import NOW, new_hold
from tests.unit.layers.test_trip import the_clock

RUNG = Deployment(
    id="p/m", provider=Provider(name="p", dialects=frozenset({"openai"}), base_url="http://up")
)
OPEN = BreakerOpen("p/m is unavailable.", because="breakers", retry_after=7 * MICRO)
ASKED = {"prefer": "respond-async"}


def call(
    headers: dict[str, str] | None = None, *, hold: bool = False, stream: bool = False,
    dialect: Dialect = Dialect.CHAT, mode: Mode = Mode.ENFORCE, age: int = 0, kind: type = Call,
) -> Call:  # fmt: skip
    made = kind(
        id="c1", dialect=dialect, family=Family.OPENAI, method="POST", path="/", target=b"/",
        headers=[(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        snapshot=Snapshot(revision=1, digest="", holds=HoldRules(mode=mode)),
        received=the_clock().now() - age,
    )  # fmt: skip
    made.fields = Fields(model="m", stream=stream)
    made.tier = Tier(name="t", number=2, hold=hold)
    made.deployment = RUNG
    return made


def row() -> Held:
    new = new_hold()
    facts = {one.name: getattr(new, one.name) for one in fields(Hold)}
    return Held(**facts, seq=1, state=State.OPEN, epoch=0, attempt=0, sent_at=0, sent_to="",
                tries=0, not_before=0, status=0, code="", message="", finished=0, push_at=0,
                push_tries=0, push_state="", bytes=1)  # fmt: skip


class Kept(list):
    """What was kept, in a store that may refuse."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    async def __call__(self, one: Call, why: BreakerOpen) -> Held:
        if self.error is not None:
            raise self.error
        self.append((one, why))
        return row()


def run(
    outcome: Reply | BaseException, one, kept: Kept | None = None, *, broken: bool = True
) -> tuple[Reply | BaseException, Kept]:  # fmt: skip
    kept = Kept() if kept is None else kept

    async def inner(_call: Call) -> Reply:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def main() -> Reply | BaseException:
        layer = Holding(kept, the_clock(), lambda _call: broken)
        try:
            return await layer(inner)(one())
        except Exception as error:  # noqa: BLE001 - what came is what is looked at
            return error

    return asyncio.run(main()), kept


def refusing(kind: Kind | None, status: int) -> Reply:
    made = Reply(status=status, headers=[], source=Bytes(b""))
    made.kind = kind
    return made


def test_an_open_breaker_becomes_202_for_one_that_asked():
    reply, kept = run(OPEN, lambda: call(ASKED))
    assert isinstance(reply, Reply)
    assert reply.status == 202
    headers = dict(reply.headers)
    assert headers[b"location"] == b"/v1/holds/h001"
    assert headers[b"retry-after"] == b"7"
    assert headers[b"preference-applied"] == b"respond-async"
    assert isinstance(reply.source, Bytes)
    body = json.loads(reply.source._body)
    assert (body["id"], body["state"], body["expires_at"]) == ("h001", "open", NOW // MICRO + 3_600)
    assert len(reply.source._body) == int(headers[b"content-length"])
    [(one, why)] = kept
    assert why is OPEN
    assert one.deployment is None
    assert [note.layer for note in one.notes] == ["hold"]


def test_a_tiers_policy_asks_for_all_of_its_calls():
    reply, _ = run(OPEN, lambda: call(hold=True))
    assert isinstance(reply, Reply)
    assert b"preference-applied" not in dict(reply.headers)


@pytest.mark.parametrize(
    "one",
    [
        lambda: call(),
        lambda: call({**ASKED, "tidegate-hold": "Never"}),
        lambda: call(ASKED, mode=Mode.OFF),
        lambda: call(ASKED, dialect=Dialect.PASSTHROUGH),
        lambda: call(ASKED, dialect=Dialect.COUNT_TOKENS),
        lambda: call(ASKED, stream=True, age=11_500_000),
    ],
    ids=["unasked", "opted out", "off", "unread", "counting", "stream opened by now"],
)
def test_everybody_else_hears_the_refusal(one):
    outcome, kept = run(OPEN, one)
    assert outcome is OPEN
    assert not kept


def test_a_young_stream_is_held_and_an_old_plain_call_too():
    for one in (lambda: call(ASKED, stream=True), lambda: call(ASKED, age=60 * MICRO)):
        assert run(OPEN, one)[1]


@pytest.mark.parametrize("error", [NeverFits("x"), QueueFull("x"), MalformedCall("x")])
def test_other_refusals_are_nobodys_reason_to_be_held(error):
    assert run(error, lambda: call(ASKED)) == (error, [])


@pytest.mark.parametrize("kind", [Kind.FAULT, Kind.CAPACITY])
def test_the_probe_of_a_sick_provider_is_held_like_those_behind_it(kind):
    answer = refusing(kind, 503)
    reply, kept = run(answer, lambda: call(ASKED))
    assert isinstance(reply, Reply)
    assert reply.status == 202
    assert answer.ended is End.FAILED
    assert "503" in kept[0][1].message


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        (refusing(Kind.FAULT, 500), False), (refusing(Kind.CALLER, 400), True),
        (refusing(Kind.AUTH, 401), True), (refusing(None, 200), True),
    ],
    ids=["closed breaker", "caller's fault", "credential", "answer"],
)  # fmt: skip
def test_an_answer_stays_an_answer(answer, broken):
    assert run(answer, lambda: call(ASKED), broken=broken) == (answer, [])
    assert answer.ended is None


def test_a_call_that_may_have_been_served_is_never_held():
    def one() -> Call:
        made = call(ASKED)
        made.sent = True
        return made

    error = UpstreamTimeout("x")
    assert run(error, one) == (error, [])
    unsent = UpstreamUnreachable("x", code="connect_failed")
    assert run(unsent, lambda: call(ASKED), broken=False)[0] is unsent
    assert run(unsent, lambda: call(ASKED))[1]


def test_no_202_is_said_when_the_call_could_not_be_written_down():
    full = BreakerOpen("no further call is held", because="holds.max_calls")
    outcome, _ = run(OPEN, lambda: call(ASKED), Kept(full))
    assert outcome is full


# --- the mark ------------------------------------------------------------------------------------


def marked(outcome, *, sent: bool = True, lost: BaseException | None = None, before=False):
    """How the attempt ended, what was done in which order, and whether a doubt is left."""
    did: list[str] = []

    async def main():
        one = call(kind=HeldCall)
        assert isinstance(one, HeldCall)
        one.doubtful = before
        one.sent = True  # of an attempt before this one

        async def sending(to: str) -> None:
            did.append(f"mark {to}")
            if lost is not None:
                raise lost

        async def inner(_call: Call) -> Reply:
            did.append("send")
            assert one.doubtful
            one.sent = sent
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        one.sending = sending
        try:
            found = await mark(inner)(one)
        except BaseException as error:  # noqa: BLE001 - what came is what is looked at
            found = error
        return found, did, one.doubtful

    return asyncio.run(main())


def test_the_mark_is_on_disk_before_anything_is_sent():
    answer = refusing(None, 200)
    assert marked(answer) == (answer, ["mark p/m", "send"], True)


def test_an_answer_that_refuses_leaves_no_doubt_and_one_that_serves_does_until_it_is_stored():
    assert marked(refusing(Kind.CAPACITY, 503))[2] is False
    assert marked(refusing(None, 200))[2] is True


def test_a_fault_leaves_a_doubt_only_where_something_was_sent():
    assert marked(UpstreamTimeout("x"), sent=True)[2] is True
    assert marked(UpstreamUnreachable("x"), sent=False)[2] is False
    assert marked(asyncio.CancelledError(), sent=False)[2] is True


def test_a_doubtful_call_is_not_attempted_again_whoever_asks():
    found, did, doubt = marked(refusing(None, 200), before=True)
    assert isinstance(found, StoreConflict)
    assert (did, doubt) == ([], True)


def test_a_call_that_is_lost_is_not_sent():
    lost = StoreConflict("cancelled", code="hold_lost")
    assert marked(refusing(None, 200), lost=lost) == (lost, ["mark p/m"], False)


def test_an_ordinary_call_is_never_marked():
    async def main() -> None:
        with pytest.raises(TypeError):
            await mark(lambda _call: None)(call())  # type: ignore[arg-type, return-value]

    asyncio.run(main())
