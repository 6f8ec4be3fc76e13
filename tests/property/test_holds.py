"""Held calls over random histories: the store against a model of dictionaries, and the ramp's law.

The model knows nothing of SQL: a call has a state, an epoch and an age, and one table says what may
happen. Holders die at any moment, old holders go on acting, and callers cancel meanwhile; at every
step nothing may be sent twice without a word that it was refused, and nothing may be lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from scheduler.api import (
    FINAL,
    HoldsFull,
    IllegalTransition,
    KeyReused,
    Limits,
    Ramp,
    Refusal,
    SchedulerError,
    StaleEpoch,
    State,
)
from scheduler.holds import Event, move
from scheduler.stores.sqlite import MEMORY, SqliteStore
from scheduler.units import MICRO
from tests.fixtures.held import HOUR, NOW, new_hold, reply

LIMITS = Limits(max_calls=30, max_per_owner=8)
WHY = Refusal(status=502, code="x", message="x")
OWNERS = ("key:a", "key:b")


@dataclass
class Row:
    """A call as the model has it."""

    number: int
    owner: str
    tier: int
    deadline: int
    key: str
    state: State = State.OPEN
    epoch: int = 0
    not_before: int = 0
    sends: int = 0
    refusals: int = 0

    @property
    def id(self) -> str:
        return f"h{self.number:03d}"


class HeldCalls(RuleBasedStateMachine):
    """The store, its model, and the claims that holders still believe in."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = SqliteStore(MEMORY)
        self.rows: dict[str, Row] = {}
        self.claims: list[tuple[str, int]] = []
        self.now = NOW
        self.serial = 0

    def teardown(self) -> None:
        self.store._end()
        self.runner.close()

    def ask(self, step):
        return self.runner.run(step)

    def step(self, hold: str, epoch: int, event: Event, step) -> Row | None:
        """A fenced step: what the model allows must work, all else must fail and change nothing."""
        row = self.rows.get(hold)
        allowed = row is not None and row.epoch == epoch and row.state not in FINAL
        try:
            after = move(row.state, event) if allowed and row is not None else None
        except IllegalTransition:
            after = None
        try:
            self.ask(step)
        except SchedulerError:
            assert after is None, (row, event)
            return None
        assert after is not None, (row, event)
        assert row is not None
        row.state = after
        return row

    # --- what happens ----------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        assert self.store.own()

    @rule(span=st.integers(0, HOUR // 4))
    def time_passes(self, span: int) -> None:
        self.now += span

    @rule(
        owner=st.sampled_from(OWNERS), tier=st.integers(1, 3), span=st.integers(1, HOUR),
        key=st.sampled_from(("", "", "k1", "k2")), digest=st.sampled_from("de"),
    )  # fmt: skip
    def keep(self, owner: str, tier: int, span: int, key: str, digest: str) -> None:
        self.serial += 1
        row = Row(self.serial, owner, tier, self.now + span, f"{key}{digest}" if key else "")
        mine = [one for one in self.rows.values() if one.owner == owner]
        same = [one for one in self.rows.values() if key and one.key[:2] == key]
        new = new_hold(row.number, owner=owner, tier=tier, deadline=row.deadline,
                       dedupe=key, digest=digest)  # fmt: skip
        try:
            held = self.ask(self.store.keep(new, limits=LIMITS))
        except HoldsFull:
            assert not same
            live = [one for one in mine if one.state not in FINAL]
            assert len(self.rows) >= LIMITS.max_calls or len(live) >= LIMITS.max_per_owner
        except KeyReused:
            assert same[0].key[2:] != digest
        else:
            if same:
                assert held.id == same[0].id
            else:
                self.rows[row.id] = row

    @rule(limit=st.integers(1, 4))
    def claim(self, limit: int) -> None:
        ready = [one for one in self.rows.values() if one.state is State.OPEN
                 and one.not_before <= self.now < one.deadline]  # fmt: skip
        ready.sort(key=lambda one: (one.tier, one.number))
        found = self.ask(self.store.claim("m", limit=limit, now=self.now))
        assert [held.id for held, _ in found] == [one.id for one in ready[:limit]]
        for held, request in found:
            row = self.rows[held.id]
            row.state, row.epoch = State.CLAIMED, row.epoch + 1
            assert held.epoch == row.epoch
            assert request == new_hold().request
            self.claims.append((held.id, held.epoch))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def send(self, data) -> None:
        hold, epoch = data.draw(st.sampled_from(self.claims))
        step = self.store.sending(hold, epoch, to="p/m", now=self.now)
        row = self.step(hold, epoch, Event.SEND, step)
        if row is not None:
            if row.sends > row.refusals:  # one holder, one call: the last attempt was refused
                row.refusals = row.sends
            row.sends += 1

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), wait=st.integers(0, HOUR // 8))
    def give_back(self, data, wait: int) -> None:
        hold, epoch = data.draw(st.sampled_from(self.claims))
        step = self.store.give_back(
            hold, epoch, reason="503", not_before=self.now + wait, refused=True
        )
        row = self.step(hold, epoch, Event.GIVE_BACK, step)
        if row is not None:
            row.not_before, row.refusals = self.now + wait, row.sends

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), event=st.sampled_from((Event.COMPLETE, Event.REFUSE, Event.DOUBT)))
    def finish(self, data, event: Event) -> None:
        hold, epoch = data.draw(st.sampled_from(self.claims))
        step = {
            Event.COMPLETE: lambda: self.store.complete(hold, epoch, reply(), now=self.now),
            Event.REFUSE: lambda: self.store.refuse(hold, epoch, WHY, now=self.now),
            Event.DOUBT: lambda: self.store.doubt(hold, epoch, WHY, now=self.now),
        }[event]()
        self.step(hold, epoch, event, step)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def cancel(self, data, owner: str) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows.values(), key=lambda one: one.number)))
        may = row.owner == owner and row.state not in FINAL
        try:
            self.ask(self.store.cancel(row.id, owner, now=self.now))
        except SchedulerError:
            assert not may
        else:
            assert may
            row.state = State.CANCELLED

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def forget(self, data) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows.values(), key=lambda one: one.number)))
        try:
            self.ask(self.store.forget(row.id, row.owner))
        except IllegalTransition:
            assert row.state not in FINAL
        else:
            assert row.state in FINAL
            del self.rows[row.id]

    @rule()
    def expire(self) -> None:
        found = {held.id for held in self.ask(self.store.expire(now=self.now, limit=100))}
        due = {one.id for one in self.rows.values()
               if one.state is State.OPEN and one.deadline <= self.now}  # fmt: skip
        assert found == due
        for hold in found:
            self.rows[hold].state = State.EXPIRED

    @rule()
    def holder_dies(self) -> None:
        """Its claims stay in `self.claims`: a zombie may still act on them, in vain."""
        left = self.ask(self.store.recover(now=self.now))
        sending = {one.id for one in self.rows.values() if one.state is State.SENDING}
        claimed = [one for one in self.rows.values() if one.state is State.CLAIMED]
        assert {held.id for held in left.doubted} == sending
        assert left.opened == len(claimed)
        for row in claimed:
            row.state = State.OPEN
        for hold in sending:
            self.rows[hold].state = State.IN_DOUBT

    # --- what always holds -----------------------------------------------------------------------

    @invariant()
    def the_store_is_as_the_model_has_it(self) -> None:
        found = {
            held.id: (held.state, held.epoch, held.attempt)
            for owner in OWNERS
            for held in self.ask(self.store.listing(owner, after=0, limit=1000))
        }
        assert found == {one.id: (one.state, one.epoch, one.sends) for one in self.rows.values()}

    @invariant()
    def nothing_is_sent_again_that_was_not_refused(self) -> None:
        for row in self.rows.values():
            assert row.sends - row.refusals <= 1
            if row.state is State.OPEN:
                assert row.sends == row.refusals


TestHeldCalls = HeldCalls.TestCase
TestHeldCalls.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

MOVES = st.lists(
    st.tuples(
        st.integers(0, 3 * MICRO), st.sampled_from(("start", "served", "refused", "ended"))
    ),
    max_size=300,
)  # fmt: skip


@settings(deadline=None)
@given(moves=MOVES, rate=st.integers(1, 50), widest=st.integers(1, 32))
def test_a_ramp_never_lets_more_through_than_its_width_its_bound_and_its_rate(moves, rate, widest):
    one, now, starts = Ramp(0), 0, []
    for span, move_ in moves:
        now += span
        if move_ == "start":
            room = one.room(now=now, rate=rate, widest=widest)
            one.started(room)
            starts += [now] * room
            assert one.running <= max(one.width, 1)
        elif one.running:
            {"served": lambda: one.served(widest=widest), "refused": one.refused,
             "ended": one.ended}[move_]()  # fmt: skip
        assert 1 <= one.width <= max(widest, 1)
        assert one.running >= 0
    for first, last in zip(starts, starts[2 * rate :], strict=False):
        assert last - first >= MICRO  # a full bucket and a second's worth


@settings(deadline=None)
@given(st.lists(st.sampled_from(("served", "ended")), min_size=1, max_size=200))
def test_a_ramp_that_is_never_refused_never_narrows(ends):
    one, width = Ramp(0), 1
    for number, end in enumerate(ends):
        one.room(now=number * MICRO, rate=1_000, widest=64)
        one.started()
        one.served(widest=64) if end == "served" else one.ended()
        assert one.width >= width
        width = one.width


def test_the_old_holder_of_a_call_that_was_opened_again_is_a_zombie():
    async def scenario() -> None:
        store = SqliteStore(MEMORY)
        try:
            await store.keep(new_hold(1), limits=LIMITS)
            [(old, _)] = await store.claim("m", limit=1, now=NOW)
            await store.recover(now=NOW)
            [(new, _)] = await store.claim("m", limit=1, now=NOW)
            await store.sending(new.id, new.epoch, to="p", now=NOW)
            try:
                await store.sending(old.id, old.epoch, to="p", now=NOW)
            except StaleEpoch:
                return
            raise AssertionError("a zombie has sent")
        finally:
            await store.close()

    asyncio.run(scenario())
