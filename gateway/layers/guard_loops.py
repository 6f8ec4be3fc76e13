"""Repeated meaning is warned of, then refused.

`resilience/loops.py` is asked with what `wire/turns.py` reads, before anything is queued or spent:
a runaway must not wait in a line. A refusal cuts the call, never the session: it names the repeated
call and the way out, and a user turn passes whatever was before.

A conversation is found by the mark of one of its last turns, within its principal and session, so
that parallel agents which share a session, or a first message, never add up; what it costs is kept
by session, else by first message. A repeated request (an SDK's retry, a replayed idempotency key)
brings no new turn and so counts nothing. Where only the provider keeps the history
(`previous_response_id`), a conversation is found by that id, and its calls are read from the end of
the answers.

A workflow (`baggage`, or a claim) names a task, else its session does: what a task uses is kept
until the operator's reset or a day without a call. Within a workflow two agents are watched
together, by what each calls with: its tool calls, else what was last said to it. Weakness: a
client that says `store: false` and sends no history is not seen; runs without a session that begin
with the same words share the amounts, not the repetitions.
"""

from __future__ import annotations

import struct
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from gateway.bodies import canonical
from gateway.call import Dialect, VerdictNote
from gateway.ending import Ending
from gateway.errors import LoopDetected
from gateway.gathering import hear
from gateway.looking import Looking, label, matches, printable, sentence, within
from gateway.loop_books import Books, metered
from gateway.resilience import loops
from gateway.resilience.alternation import Alternation, Step
from gateway.resilience.books import Spending
from gateway.resilience.loops import (
    TASK_IDLE,
    LoopRules,
    Rule,
    Stretch,
    Verdict,
    harder,
)
from gateway.resilience.memory import Memory
from gateway.units import Mode
from gateway.wire import chained, turns

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gateway.call import Call, End, Reply, Service
    from gateway.chains import Chains, Known
    from gateway.clock import Clock
    from gateway.loop_lists import LoopLists
    from gateway.resilience.loops import Sketching, Turn
    from gateway.wire.turns import Said

OFF, RESPONSES = Mode.OFF, Dialect.RESPONSES

MOST_FOLDED = 32
"""Turns fingerprinted where nothing is remembered; older ones count as iterations only."""

MOST_WALKED = 4_096
"""Turns that are walked at all."""

LOOK_BACK = 4
"""Turns before the newest that are asked for a remembered conversation."""

WAY_OUT = (
    "This call was cut, the session goes on: use other arguments or another tool, answer with what "
    "is known, or ask the user. A new user message starts the count anew"
)

TASK = frozenset({Rule.TASK_TOKENS, Rule.TASK_MONEY})
TASK_SPENT = (
    "Nothing more is served for it, a new user message included, until an operator resets it "
    "(`tidegate loops reset`) or its budget is raised"
)

REFUSED, WARNED, SHADOWED = "refused", "warned", "shadowed"


class Fleet(Protocol):
    """What the gateways of a fleet know together."""

    @property
    def clock(self) -> Clock:
        """For how long a call waits to hear of it."""
        ...

    @property
    def books(self) -> Books:
        """What conversations and tasks use."""
        ...

    @property
    def lists(self) -> LoopLists:
        """What agents did lately."""
        ...

    @property
    def chains(self) -> Chains:
        """Stored Responses."""
        ...


class LoopGuard:
    """The layer, with what it remembers of conversations.

    Attributes:
        on_loop: Called with rule and stage (refused, warned, shadowed), for metrics.
        on_spoken: Called with each call in which a person spoke last: the tool plane begins anew.
        fleet: What others know; None: this process is alone.
    """

    __slots__ = (
        "_rules", "_spendings", "_stretches", "_tasks", "_workflows", "fleet", "on_loop",
        "on_spoken",
    )  # fmt: skip

    def __init__(self, *, on_loop: Callable[[str, str], None] | None = None) -> None:
        self._stretches: Memory[Stretch] = Memory()
        self._spendings: Memory[Spending] = Memory()
        self._tasks: Memory[Spending] = Memory(idle=TASK_IDLE)
        self._workflows: Memory[Alternation] = Memory()
        self._rules = LoopRules()
        self.on_loop = on_loop
        self.on_spoken: Callable[[Call], None] | None = None
        self.fleet: Fleet | None = None

    def __len__(self) -> int:
        """Conversations remembered."""
        return len(self._stretches)

    def books(self) -> Iterator[Spending]:
        """What conversations and tasks use, as far as this process knows."""
        yield from self._spendings
        yield from self._tasks

    def reset(self, session: str = "") -> int:
        """The operator's word: a session or workflow ("" means all) begins anew; how many.

        What is counted are conversations, or tasks where no conversation goes by that name.
        """
        chosen = hash(session) if session else None
        others = [
            memory.reset(chosen) for memory in (self._spendings, self._tasks, self._workflows)
        ]
        fleet = self.fleet
        if fleet is not None:
            for book in self.books():
                if chosen is None or book.session == chosen:
                    fleet.books.tell(book)
            for pair in self._workflows:
                if chosen is None or pair.session == chosen:
                    fleet.lists.clear(pair, self._rules)
            fleet.chains.ask_anew()
            for stretch in self._stretches:
                if stretch.name and (chosen is None or stretch.session == chosen):
                    fleet.chains.keep(stretch.name, b"")
        return self._stretches.reset(chosen) or max(others)

    def __call__(self, inner: Service) -> Service:
        """The service, guarded."""

        def serve(call: Call) -> Awaitable[Reply]:
            waiters = self._asked(call, self.fleet) if self.fleet is not None else ()
            if waiters:
                return self._refreshed(inner, call, waiters)
            # What was read of the body stays in `_look`: a call that waits keeps none of it alive.
            spendings, chain = self._look(call)
            if not spendings and chain is None:
                return inner(call)
            return self._watched(inner, call, spendings, chain)

        return serve

    def _asked(self, call: Call, fleet: Fleet) -> list[Future[None]]:
        """What the fleet is asked for this call, to be waited for."""
        rules, parsed = call.snapshot.loops, call.parsed
        if rules.mode is OFF or parsed is None or call.dialect not in turns.READERS:
            return []
        meters = rules.meters or rules.meters_tasks
        workflow = within(call)[1]
        waiters: list[Future[None]] = []
        if meters:
            looking = Looking(call, parsed, rules)
            books = self._task(looking, workflow), self._spending(looking)
            known = [book for book in books if book is not None]
            waiters += fleet.books.ask(known, call.received)
        if workflow:
            waiters += fleet.lists.ask(self._pair(call, workflow), rules, call.received)
        chain = self._asked_of_chain(call, parsed, fleet)
        if chain is not None and chain.waiter is not None and not chain.waiter.done():
            waiters.append(chain.waiter)
        return waiters

    def _asked_of_chain(self, call: Call, parsed: Mapping[str, Any], fleet: Fleet) -> Known | None:
        """What the fleet knows of the stretch that a call continues; None where we know it."""
        if call.dialect is not RESPONSES or not chained.remembered(parsed):
            return None
        if not parsed.get("previous_response_id") or not chained.outputs(parsed):
            return None
        chain = _Chain(Looking(call, parsed, call.snapshot.loops))
        if self._stretches.get(chain.previous, call.received) is not None:
            return None
        return fleet.chains.ask(chain.continues, call.received)

    async def _refreshed(
        self, inner: Service, call: Call, waiters: Sequence[Future[None]]
    ) -> Reply:
        """The reply to a call for which the fleet is asked."""
        assert self.fleet is not None  # noqa: S101 - it was asked
        await hear(waiters, self.fleet.clock)
        return await self._watched(inner, call, *self._look(call))

    async def _watched(
        self, inner: Service, call: Call, spendings: tuple[Spending, ...], chain: _Chain | None
    ) -> Reply:
        """The reply to a call that the rules will know more of once it is answered."""
        if spendings:
            books = self.fleet.books if self.fleet is not None else None
            reply = await metered(call, spendings, inner, books)
        else:
            reply = await inner(call)
        if chain is not None and reply.kind is None:
            self._follow(chain, reply)
        return reply

    def _look(self, call: Call) -> tuple[tuple[Spending, ...], _Chain | None]:
        """What must be known once the call is answered; the rules have spoken.

        Raises:
            LoopDetected: A rule in enforce mode refuses.
        """
        rules, parsed = call.snapshot.loops, call.parsed
        read = turns.READERS.get(call.dialect)
        if rules.mode is OFF or parsed is None or read is None:
            return (), None
        said = read(parsed)
        newest = next(said, None)
        if newest is None and self.on_spoken is not None:
            self.on_spoken(call)
        named, workflow = within(call)
        meters = rules.meters or rules.meters_tasks
        quiet = newest is None and not (meters or workflow)
        if quiet and call.dialect is not RESPONSES:
            return (), None  # a person spoke last
        looking = Looking(call, parsed, rules)
        chain: _Chain | None = None
        if newest is not None:
            verdict = self._repeated(looking, newest, said)
        else:
            chain, verdict = self._chained(looking)
        if workflow:
            verdict = harder(verdict, self._alternating(looking, newest, workflow, named.agent))
        spendings: tuple[Spending, ...] = ()
        if meters:
            spendings, judged = self._metering(looking, workflow)
            verdict = harder(verdict, judged)
        if verdict is not None:
            self._act(looking, verdict)
        return spendings, chain

    def _repeated(self, looking: Looking, newest: Said, older: Iterator[Said]) -> Verdict | None:
        """What the rules of repetition say; the conversation is remembered with its newest turn."""
        memory, now = self._stretches, looking.call.received
        key = looking.mark(newest)
        stretch = memory.get(key, now) if key else None
        turn = looking.turn(newest)
        looking.autonomous = True
        looking.repeating = newest.calls
        if stretch is None or self._is_another(looking, key, stretch, older):
            if stretch is None:
                stretch = self._folded(looking, key, turn, older)
            else:
                stretch.fold(turn, rules=looking.rules)
            stretch.length = looking.length
        if key:
            memory.put(key, stretch, now)
        return stretch.judge(turn, looking.rules)

    @staticmethod
    def _is_another(looking: Looking, key: int, known: Stretch, older: Iterator[Said]) -> bool:
        """Whether a turn whose mark is known is a new one all the same: its ids repeat."""
        if looking.length == known.length:
            return False  # the very same request once more
        before = next(older, None)
        return before is not None and looking.mark(before) == key

    def _folded(self, looking: Looking, key: int, newest: Turn, older: Iterator[Said]) -> Stretch:
        """The stretch up to the newest turn: continued where it is known, else from the history."""
        memory, now = self._stretches, looking.call.received
        pending: list[Said] = []
        for said in islice(older, LOOK_BACK):
            at = looking.mark(said) if key else 0
            known = memory.get(at, now) if at else None
            if known is not None:
                memory.pop(at)
                return self._continued(known, said, pending, newest, looking)
            pending.append(said)
        pending += islice(older, MOST_FOLDED - 1 - len(pending))
        stretch = Stretch(session=looking.session)
        stretch.iterations = sum(1 for _ in islice(older, MOST_WALKED))
        return self._continued(stretch, None, pending, newest, looking)

    @staticmethod
    def _continued(
        stretch: Stretch, last: Said | None, pending: list[Said], newest: Turn, looking: Looking
    ) -> Stretch:
        """The stretch with the pending turns (newest first) and the newest one folded in."""
        previous: Sketching | None = None
        if last is not None:
            before = last
            previous = lambda half: looking.turn(before).sketch(half)  # noqa: E731 - if asked for
        for said in reversed(pending):
            turn = looking.turn(said)
            stretch.fold(turn, previous=previous, rules=looking.rules)
            previous = turn.sketch
        stretch.fold(newest, previous=previous, rules=looking.rules)
        return stretch

    # --- histories that the provider keeps

    def _chained(self, looking: Looking) -> tuple[_Chain | None, Verdict | None]:
        """What the request continues, and what the rules say of it.

        No chain where no history but the request's own can matter.
        """
        call, parsed = looking.call, looking.parsed
        if call.dialect is not Dialect.RESPONSES or not chained.remembered(parsed):
            return None, None
        chain = _Chain(looking)
        outputs = chained.outputs(parsed)
        if not outputs:  # a person spoke: a new stretch, if tools may follow
            asks = call.fields is not None and call.fields.has_tools
            return (chain if asks else None), None
        known = self._stretches.get(chain.previous, call.received)
        if known is None and self.fleet is not None:
            known = chain.restored(self.fleet.chains.ask(chain.continues, call.received).stretch)
        if known is not None:  # a copy: it may be continued twice, by a retry or on purpose
            chain.stretch = known.copy()
        pending = loops.unpacked(chain.stretch.pending)
        turn = turns.answered_turn(pending, outputs)
        chain.stretch.fold(turn, rules=looking.rules)
        looking.autonomous = True
        ids = set(map(turns.hash64, outputs))
        looking.repeating = tuple(
            turns.ToolCall(id="", name=one.name, arguments=None) for one in pending if one.id in ids
        )
        return chain, chain.stretch.judge(turn, looking.rules)

    def _follow(self, chain: _Chain, reply: Reply) -> None:
        """Read the answer's end: the stretch goes on under its id, with the calls it asks for."""
        ending = Ending(reply.headers)
        reply.taps.append(ending)
        memory, fleet = self._stretches, self.fleet

        def closed(_end: End) -> None:
            name, calls = chained.asked(ending.response())
            if not name:
                return
            memory.pop(chain.previous)
            if fleet is not None and chain.continues:
                fleet.chains.keep(chain.continues, b"")
            if not calls:
                return  # a person speaks next
            exempt, stretch = partial(matches, chain.polling), chain.stretch
            stretch.pending = loops.packed(turns.pending_of(calls, canonical, exempt))
            memory.put(chain.key(name), stretch, chain.now)
            if fleet is not None:
                stretch.name = chain.name_of(name)
                fleet.chains.keep(stretch.name, chain.packed())

        reply.on_close(closed)

    # --- agents that answer each other

    def _alternating(
        self, looking: Looking, newest: Said | None, workflow: str, agent: str
    ) -> Verdict | None:
        """What is to be said of this call and those of the workflow's other agents."""
        call, rules = looking.call, looking.rules
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        pair = self._pair(call, workflow)
        who, what = turns.hash64(f"{principal.id}\0{agent}"), looking.fingerprint(newest)
        rounds = pair.step(who, what)
        if self.fleet is not None:
            self.fleet.lists.note(pair, Step(call.received, who, what), rules)
        return loops.repeated(Rule.PING_PONG, rounds, rules.ping_pong, -1)

    def _pair(self, call: Call, workflow: str) -> Alternation:
        """The calls of a workflow's agents."""
        principal, now = call.principal, call.received
        assert principal is not None  # noqa: S101 - identify ran
        key = hash((principal.tenant, workflow))
        pair = self._workflows.get(key, now)
        if pair is None:
            name = f"workflow\0{principal.tenant}\0{workflow}"
            pair = Alternation(
                session=hash(workflow), name=turns.hash64(name) if self.fleet is not None else 0
            )
        self._workflows.put(key, pair, now)
        return pair

    # --- amounts and deeds

    def _metering(
        self, looking: Looking, workflow: str
    ) -> tuple[tuple[Spending, ...], Verdict | None]:
        """The books that this call goes into, and what they say of it."""
        call, rules = looking.call, looking.rules
        found: list[Spending] = []
        verdict: Verdict | None = None
        task, spending = self._task(looking, workflow), self._spending(looking)
        if task is not None:
            verdict = task.judge_task(rules)
            found.append(task)
        if spending is not None:
            if looking.autonomous:
                verdict = harder(verdict, spending.judge(rules))
            elif turns.answered(call.dialect, looking.parsed):
                spending.clear()
                if self.fleet is not None:
                    self.fleet.books.tell(spending)
            found.append(spending)
        return tuple(found), verdict

    def _task(self, looking: Looking, workflow: str) -> Spending | None:
        """The book of the call's task; None where no rule asks for it."""
        if not looking.rules.meters_tasks:
            return None
        principal = looking.call.principal
        tenant = principal.tenant if principal is not None else ""
        key = hash((tenant, workflow)) if workflow else looking.key_of_amounts()
        named = ("task", tenant, workflow) if workflow else ()
        return self._book(self._tasks, key, looking, named)

    def _spending(self, looking: Looking) -> Spending | None:
        """The book of the call's conversation; None where no rule asks for it."""
        if not looking.rules.meters:
            return None
        return self._book(self._spendings, looking.key_of_amounts(), looking)

    def _book(
        self, memory: Memory[Spending], key: int, looking: Looking, task: tuple[str, ...] = ()
    ) -> Spending:
        """The book under that key, made if need be; `task` names it where no session does."""
        now = looking.call.received
        book = memory.get(key, now)
        if book is None:
            name = 0
            if self.fleet is not None:
                kind = "task" if memory is self._tasks else "stretch"
                name = turns.hash64("\0".join(task or (kind, *looking.name_of_amounts())))
            session = hash(task[-1]) if task else looking.session
            book = Spending(session=session, name=name, lasts=memory.idle)
        book.drain(now, looking.rules)
        memory.put(key, book, now)
        return book

    def _act(self, looking: Looking, verdict: Verdict) -> None:
        """Warn or refuse as the mode says.

        Raises:
            LoopDetected: A rule in enforce mode refuses.
        """
        call, rules = looking.call, looking.rules
        shadow = rules.mode is Mode.SHADOW
        if shadow and not verdict.refuse:
            return
        stage = SHADOWED if shadow else REFUSED if verdict.refuse else WARNED
        if self.on_loop is not None:
            self.on_loop(verdict.rule.value, stage)
        because = f"{rules.because}.{verdict.rule.value}"
        detail = f"{verdict.count} of {verdict.limit}"
        call.notes.append(VerdictNote("guard_loops", stage, because, call.received, detail))
        if shadow:
            return
        repeated = looking.repeated(verdict)
        if verdict.refuse:
            told = sentence(verdict, label(repeated, quoting=True))
            way_out = TASK_SPENT if verdict.rule in TASK else WAY_OUT
            raise LoopDetected(f"{told}. {way_out}", because=because)
        told = sentence(verdict, label(repeated, quoting=False))
        text = f"{because}: {told}; at {verdict.limit} it is refused"
        call.extra_headers.append((b"tidegate-warning", printable(text)))


_OWNER = struct.Struct("<Q")


class _Chain:
    """What a request continues where only the provider keeps the history; nothing of its body.

    Attributes:
        stretch: The turns so far.
        previous: Key of the response that it continues.
        continues: What the gateways of a fleet call that; 0: it continues none.
        polling: Patterns of tools that may repeat.
        now: When the call came.
    """

    __slots__ = (
        "_owner", "_scope", "_tenant", "continues", "now", "polling", "previous", "stretch",
    )  # fmt: skip

    def __init__(self, looking: Looking) -> None:
        self._scope = looking.scope
        self.stretch = Stretch(session=looking.session)
        self._owner, self._tenant = looking.owner(), looking.tenant
        previous = looking.parsed.get("previous_response_id")
        self.previous = self.key(previous)
        self.continues = self.name_of(previous) if isinstance(previous, str) and previous else 0
        self.polling = looking.rules.polling_tools
        self.now = looking.call.received

    def key(self, response: object) -> int:
        """The name under which the conversation is remembered after this response."""
        return hash((self._scope, "response", response if isinstance(response, str) else ""))

    def name_of(self, response: str) -> int:
        """The same for all gateways of a fleet, and not yet told apart by session."""
        return chained.name_of(self._tenant, response)

    def packed(self) -> bytes:
        """The stretch for the fleet, and whose it is."""
        return _OWNER.pack(turns.hash64(self._owner)) + self.stretch.packed()

    def restored(self, raw: bytes) -> Stretch | None:
        """What was packed; None where that was nothing, or another's."""
        if raw[: _OWNER.size] != _OWNER.pack(turns.hash64(self._owner)):
            return None
        return Stretch.unpacked(raw[_OWNER.size :], session=self.stretch.session)
