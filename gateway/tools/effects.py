"""Tool calls that must not run twice: under way once, and answered from the record ever after.

A call has an effect key where its caller gave one (`Idempotency-Key`, or in `_meta`), or where
policy says that the same call of one session within a window is the same call. Such a call runs in
a task of its own: its caller may vanish, the answer is heard out and written down all the same, and
the caller that comes back (with another JSON-RPC id, perhaps over another connection) gets that
answer. While it runs, a repetition joins it.

What is on disk before the first byte is sent is what makes it safe: see `scheduler/effects.py`.
What nobody knows stays *in doubt*, and is told so, never tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from gateway.call import End, Kind, Reply, VerdictNote
from gateway.errors import (
    Draining,
    EffectUnderWay,
    GatewayError,
    KeyConflict,
    MalformedCall,
    StoreUnavailable,
    UpstreamFault,
)
from gateway.tools.approvals import wall
from gateway.tools.passage import whole_reply
from gateway.tools.reconcile import Word
from gateway.units import MICRO
from gateway.upstream import TransportFault
from scheduler.api import (
    Bounds,
    Full,
    IllegalTransition,
    NewEffect,
    NotCanonical,
    SchedulerError,
    StaleEpoch,
    Unknown,
    fingerprint,
)
from scheduler.api import effects as decisions

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gateway.call import Call, Service, ToolCall
    from gateway.clock import Clock
    from gateway.toolrules import EffectRules, ToolRule
    from gateway.tools.reconcile import Reconciling
    from gateway.units import Micros
    from scheduler.api import Effect, Effects

    Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]

HEADER = b"idempotency-key"
META = "tidegate/idempotency-key"
LONGEST_KEY = 255
REPLAYED = (b"tidegate-replayed", b"true")
MARGIN: Micros = 60 * MICRO
"""What a call may take beyond its deadlines before its effect counts as in doubt."""
LOOK: Micros = MICRO // 4
"""How often a call looks for the outcome of one that another process runs."""
MOST_KEPT = 64 * 1024 * 1024
"""Bytes of one answer held for callers that read it more slowly than it comes."""
UNDONE = frozenset({Kind.CALLER, Kind.QUOTA, Kind.RAMP, Kind.AUTH, Kind.PERIOD, Kind.MONEY})
"""Refusals by which a server says that it has done nothing."""


class Overtaken(Exception):
    """Another process reserved the key first; carries what the ledger said."""

    def __init__(self, judgment: decisions.Judgment) -> None:
        super().__init__("another process was first")
        self.judgment = judgment


class _Run:
    """One effect under way: its answer's bytes as they come, and its outcome.

    Attributes:
        digest: Of the call that it is.
        answer: JSON text of the result as its caller gets it; None while there is none.
        epoch: Of its reservation; 0 before.
        head: Resolved with status and headers, or with what ended it before.
        over: Resolved when the outcome is on record.
    """

    __slots__ = ("_chunks", "_size", "_woken", "answer", "digest", "ended", "epoch", "failure",
                 "head", "over", "task")  # fmt: skip

    def __init__(self, digest: str) -> None:
        loop = asyncio.get_running_loop()
        self.digest = digest
        self.answer: bytes | None = None
        self.epoch = 0
        self.head: asyncio.Future[Reply] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.failure: BaseException | None = None
        self.ended = False
        self.task: asyncio.Task[None] | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._woken = asyncio.Event()

    def feed(self, chunk: bytes) -> None:
        """A piece of the answer is here."""
        self._size += len(chunk)
        if self._size > MOST_KEPT:
            raise UpstreamFault("The answer is too large to be kept.", code="result_too_large")
        self._chunks.append(chunk)
        self._woken.set()

    def end(self, failure: BaseException | None = None) -> None:
        """No more comes; everybody is told."""
        self.failure = self.failure or failure
        self.ended = True
        self._woken.set()
        if not self.head.done():
            self.head.set_exception(self.failure or StoreUnavailable("The call has no answer."))
            self.head.exception()  # nobody may be there to ask
        if not self.over.done():
            self.over.set_result(None)

    async def piece(self, at: int) -> bytes | None:
        """The piece of that number; None at the end. Raises what broke the answer."""
        while at >= len(self._chunks):
            if self.ended:
                if self.failure is not None:
                    raise self.failure
                return None
            self._woken.clear()
            await self._woken.wait()
        return self._chunks[at]


class _Reading:
    """One caller's way through the answer of a run; the run goes on without it."""

    __slots__ = ("_at", "_run")

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._at = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer's bytes from its beginning."""
        while (piece := await self._run.piece(self._at)) is not None:
            self._at += 1
            yield piece

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        """See `Source`."""
        while (piece := await self._run.piece(self._at)) is not None:
            self._at += 1
            if not take(piece):
                return False
        return True

    async def close(self, *, reuse: bool) -> None:
        """The reader has gone."""


class Ledger:
    """Runs effects once.

    Args:
        store: The record.
        clock: For deadlines.
        spawn: Starts a task with an owner.

    Attributes:
        reconciling: Asks servers about effects in doubt; None: only people are asked.
        on_effect: Called with what became of a keyed call (run, replayed, joined, conflict,
            in_doubt, reconciled_done, reconciled_absent), for metrics.
        on_fault: Called with a sentence where the record could not be written after the fact.
    """

    __slots__ = (
        "_clock", "_draining", "_runs", "_spawn", "_store", "on_effect", "on_fault",
        "reconciling",
    )  # fmt: skip

    def __init__(self, store: Effects, clock: Clock, spawn: Spawn) -> None:
        self._store = store
        self._clock = clock
        self._spawn = spawn
        self._runs: dict[str, _Run] = {}
        self._draining = False
        self.reconciling: Reconciling | None = None
        self.on_effect: Callable[[str], None] | None = None
        self.on_fault: Callable[[str], None] | None = None

    def __len__(self) -> int:
        """Effects under way."""
        return len(self._runs)

    def effect(self, call: Call, tool: ToolCall) -> NewEffect | None:
        """What the call wants to do, if it has a key; None where it may simply run.

        Raises:
            MalformedCall: Its key is none.
        """
        rule, principal = tool.rule, call.principal
        assert principal is not None  # noqa: S101 - identify ran
        own = client_key(call, tool)
        window = rule.duplicates if rule is not None else 0
        if own is None and not window:
            return None
        name = f"{tool.server.name}/{tool.tool}"
        try:
            digest = fingerprint([name, dict(tool.arguments)])
        except NotCanonical as error:
            raise MalformedCall(f"The arguments cannot be compared: {error}.",
                                param="params.arguments") from error  # fmt: skip
        if own is not None:
            key = decisions.key_of(principal.id, "key", own)
        else:
            session = principal.session or tool.session or call.session
            key = decisions.key_of(principal.id, "window", session, name, digest)
        times = tool.server.provider.timeouts
        return NewEffect(
            key=key,
            owner=principal.id,
            agent=principal.agent,
            tenant=principal.tenant,
            tool=name,
            kind=kind_of(rule),
            digest=digest,
            call=call.id,
            keep=window if own is None else call.snapshot.effects.keep,
            patience=times.total + times.first_byte + MARGIN,
        )

    async def known(self, call: Call, tool: ToolCall, new: NewEffect) -> Reply | None:
        """The answer of a call that runs or ran already; None where it is new.

        Raises:
            KeyConflict: The key stands for another call, or its outcome is unknown.
        """
        run = self._runs.get(new.key)
        if run is None:
            try:
                found = await self._store.look(new.key)
            except SchedulerError as error:
                raise _away() from error
            run = self._runs.get(new.key)
            if run is None:
                return await self._from_record(call, tool, new, found)
        return await self._beside(call, tool, new, run)

    async def _beside(self, call: Call, tool: ToolCall, new: NewEffect, run: _Run) -> Reply | None:
        """The answer of a call under way here; None where its key is free again."""
        if run.digest != new.digest:
            raise self._conflict(call, new)
        return await self._joined(call, tool, new, run)

    async def _from_record(
        self, call: Call, tool: ToolCall, new: NewEffect, found: tuple[Effect, bytes | None] | None
    ) -> Reply | None:
        if found is None:
            return None
        judgment = decisions.judge(found[0], new, now=wall(self._clock))
        return await self._by(call, tool, new, judgment, found[1])

    async def _by(
        self,
        call: Call,
        tool: ToolCall,
        new: NewEffect,
        judgment: decisions.Judgment,
        answer: bytes | None,
    ) -> Reply | None:
        """The answer that a judgment means; None for Go."""
        match judgment:
            case decisions.Go():
                return None
            case decisions.Replay():
                return self._replayed(call, tool, judgment.effect, answer)
            case decisions.Conflict():
                raise self._conflict(call, new)
            case decisions.Doubt():
                return await self._in_doubt(call, tool, new, judgment.effect)
            case decisions.Join():
                return await self._elsewhere(call, tool, new)

    async def _in_doubt(
        self, call: Call, tool: ToolCall, new: NewEffect, effect: Effect
    ) -> Reply | None:
        """The answer that its server's word gives; None where it says that nothing was done.

        Raises:
            KeyConflict: Nobody can say.
            EffectUnderWay: It says so, and the first request may still be under way.
        """
        rule = tool.rule.reconcile if tool.rule is not None else None
        if rule is None or self.reconciling is None:
            raise self._doubt(call, new, effect)
        bounds = bounds_of(call.snapshot.effects)
        try:
            said, answer = await self.reconciling.settled(call, tool, rule, effect, bounds)
        except (StaleEpoch, Unknown, IllegalTransition):
            return await self.known(call, tool, new)  # somebody else was first
        except SchedulerError as error:
            raise _away() from error
        if said is Word.UNKNOWN:
            raise self._doubt(call, new, effect)
        self._note(call, f"reconciled_{said.value}", effect)
        return replay(call, tool, answer) if answer is not None else None

    async def _elsewhere(self, call: Call, tool: ToolCall, new: NewEffect) -> Reply | None:
        """The outcome of a call that another process runs, within this call's deadline."""
        while self._clock.now() < call.deadline:
            await self._clock.sleep(LOOK / MICRO)
            try:
                found = await self._store.look(new.key)
            except SchedulerError as error:
                raise _away() from error
            judgment = decisions.judge(found[0] if found else None, new, now=wall(self._clock))
            if not isinstance(judgment, decisions.Join):
                return await self._by(call, tool, new, judgment, found[1] if found else None)
        raise EffectUnderWay(
            f"The same call ({new.tool}) is under way elsewhere; ask again for its outcome.",
            because=call.snapshot.effects.because,
            retry_after=MICRO,
        )

    async def _joined(self, call: Call, tool: ToolCall, new: NewEffect, run: _Run) -> Reply | None:
        """The answer of a call under way here, under this caller's own id."""
        self._note(call, "joined", new)
        await asyncio.shield(run.over)
        if run.answer is not None:
            return replay(call, tool, run.answer)
        if run.epoch and isinstance(run.failure, BaseException):
            return await self.known(call, tool, new)  # the record says what is known
        if isinstance(run.failure, GatewayError):
            raise run.failure
        return await self.known(call, tool, new)

    def _replayed(self, call: Call, tool: ToolCall, effect: Effect, answer: bytes | None) -> Reply:
        self._note(call, "replayed", effect)
        if answer is None:
            raise KeyConflict(
                f"This call was done before (call {effect.call}), and its answer is not kept: "
                f"{effect.note}.",
                because=call.snapshot.effects.because,
                code="effect_done",
            )
        return replay(call, tool, answer)

    def _conflict(self, call: Call, new: NewEffect) -> KeyConflict:
        self._note(call, "conflict", new)
        return KeyConflict(
            "The idempotency key stands for another call: same key, other tool or arguments.",
            because=call.snapshot.effects.because,
        )

    def _doubt(self, call: Call, new: NewEffect, effect: Effect) -> KeyConflict:
        self._note(call, "in_doubt", new)
        return KeyConflict(
            f"This call was sent before (call {effect.call}) and its outcome is unknown "
            f"({effect.note or 'its outcome did not come in time'}). It is not repeated, because "
            f"{effect.tool} cannot be undone; an operator resolves it: tidegate effects.",
            because=call.snapshot.effects.because,
            code="effect_in_doubt",
            details={"effect": effect.key},
        )

    def _note(self, call: Call, what: str, effect: NewEffect | Effect) -> None:
        if self.on_effect is not None:
            self.on_effect(what)
        because = call.snapshot.effects.because
        call.notes.append(VerdictNote("gate", f"effect {what}", because, call.received, effect.key))

    # --- running

    async def run(self, call: Call, tool: ToolCall, new: NewEffect, inner: Service) -> Reply:
        """The reply of a new effect, which goes on without its caller.

        Raises:
            GatewayError: It could not be run; nothing is on record then, or a doubt.
        """
        # The same call may have begun while this one waited, for consent for instance.
        while (begun := self._runs.get(new.key)) is not None:
            reply = await self._beside(call, tool, new, begun)
            if reply is not None:
                return reply
        if self._draining:
            raise Draining("The process is stopping.", retry_after=MICRO)
        run = self._runs[new.key] = _Run(new.digest)
        tool.sending.append(lambda: self._reserve(call, new, run))
        run.task = self._spawn(self._execute(call, new, run, inner))
        try:
            head = await asyncio.shield(run.head)
        except Overtaken as error:
            reply = await self._by(call, tool, new, error.judgment, await self._answer(new.key))
            if reply is None:
                raise _away() from error
            return reply
        reply = Reply(status=head.status, headers=list(head.headers), source=_Reading(run))
        reply.kind, reply.code, reply.retry_after = head.kind, head.code, head.retry_after
        return reply

    async def _answer(self, key: str) -> bytes | None:
        found = await self._store.look(key)
        return found[1] if found is not None else None

    async def _reserve(self, call: Call, new: NewEffect, run: _Run) -> None:
        """The intent is on disk, before anything is sent."""
        now = wall(self._clock)
        try:
            if run.epoch:
                await self._store.extend(new.key, run.epoch, deadline=now + new.patience)
                return
            bounds = bounds_of(call.snapshot.effects)
            judgment = await self._store.reserve(new, now=now, bounds=bounds)
        except Full as error:
            raise StoreUnavailable(f"The record of effects is full: {error}.") from error
        except SchedulerError as error:
            raise _away() from error
        if not isinstance(judgment, decisions.Go):
            raise Overtaken(judgment)
        run.epoch = judgment.epoch
        self._note(call, "run", new)

    async def _execute(self, call: Call, new: NewEffect, run: _Run, inner: Service) -> None:
        """The call is run to its end, and its outcome is on record."""
        reply: Reply | None = None
        failure: BaseException | None = None
        try:
            reply = await inner(call)
            if _streams(reply):
                run.head.set_result(reply)
            await _drained(reply, run)
            await self._settle(call, new, run, reply)
            if not run.head.done():  # one JSON object: on record before its caller sees it
                run.head.set_result(reply)
        except asyncio.CancelledError:
            failure = Draining("The process is stopping.", retry_after=MICRO)
        except Exception as error:  # noqa: BLE001 - whoever waits is told; nothing is swallowed
            failure = error
        try:
            if reply is not None:
                await reply.close(End.COMPLETE if failure is None else End.CUT)
            if failure is not None:
                await self._failed(call, new, run)
        except SchedulerError as error:
            self._fault(f"the outcome of {new.tool} ({new.key}) is not on record: {error}")
        finally:
            del self._runs[new.key]
            run.end(failure)

    async def _settle(self, call: Call, new: NewEffect, run: _Run, reply: Reply) -> None:
        if not run.epoch:
            return
        if run.answer is not None:
            await self._record(call, new, run)
        elif reply.kind is None or reply.kind in UNDONE:
            await self._store.release(new.key, run.epoch)
        else:
            await self._store.doubt(new.key, run.epoch, f"its server failed ({reply.status})")

    async def _record(self, call: Call, new: NewEffect, run: _Run) -> None:
        assert run.answer is not None  # noqa: S101 - asked by the callers
        usage = call.usage
        try:
            await self._store.settle(
                new.key,
                run.epoch,
                run.answer,
                tokens=(usage.input or 0) + (usage.output or 0) if usage is not None else 0,
                now=wall(self._clock),
                bounds=bounds_of(call.snapshot.effects),
            )
        except SchedulerError as error:
            self._fault(f"the outcome of {new.tool} ({new.key}) is not on record: {error}")

    async def _failed(self, call: Call, new: NewEffect, run: _Run) -> None:
        """What is known all the same; free again where nothing was sent, else in doubt."""
        if not run.epoch:
            return
        if run.answer is not None:
            await self._record(call, new, run)
            return
        if call.sent:
            await self._store.doubt(new.key, run.epoch, "its server's answer did not arrive")
        else:
            await self._store.release(new.key, run.epoch)

    def _fault(self, text: str) -> None:
        if self.on_fault is not None:
            self.on_fault(text)

    def answered(self, new: NewEffect, result: bytes) -> None:
        """The result as its caller gets it; what the record will say."""
        run = self._runs.get(new.key)
        if run is not None:
            run.answer = result

    async def drain(self, limit: Micros) -> int:
        """No new effect starts; those under way end, or are left in doubt. How many were cut."""
        self._draining = True
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if tasks and limit:
            await asyncio.wait(tasks, timeout=limit / MICRO)
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        return len(left)


async def _drained(reply: Reply, run: _Run) -> None:
    """Every byte of the reply went by its taps into the run; as `relay.py` does for clients."""
    end = End.COMPLETE
    try:
        async for chunk in reply.source.chunks():
            for tap in reply.taps:
                tap(chunk)
            run.feed(chunk)
    except TransportFault as fault:
        end = End.CUT
        raise UpstreamFault(f"The tool server's answer broke off ({fault.kind}).",
                            code="stream_cut") from fault  # fmt: skip
    except GatewayError:
        end = End.CUT
        raise
    finally:
        for finishing in reply.finishing:
            last = finishing(end)
            if last:
                run.feed(last)


def _streams(reply: Reply) -> bool:
    kind = next((value for name, value in reply.headers if name == b"content-type"), b"")
    return kind.startswith(b"text/event-stream")


def kind_of(rule: ToolRule | None) -> decisions.Class:
    """The class for the record: what can be asked about is there as irreversible as the rest."""
    if rule is None or not rule.repeatable:
        return decisions.Class.IRREVERSIBLE
    return decisions.Class(rule.effect)


def client_key(call: Call, tool: ToolCall) -> str | None:
    """The caller's own idempotency key; None where it gave none.

    Raises:
        MalformedCall: It is empty, too long or no plain text.
    """
    header = call.header(HEADER)
    said: Any = header.decode("latin-1") if header is not None else tool.meta.get(META)
    if said is None:
        return None
    if not isinstance(said, str) or not said.isprintable() or not 0 < len(said) <= LONGEST_KEY:
        raise MalformedCall(
            f"An idempotency key is printable text of 1 to {LONGEST_KEY} characters.",
            param=HEADER.decode(),
        )
    return said


def replay(call: Call, tool: ToolCall, result: bytes) -> Reply:
    """The recorded result as the answer to this request; nothing has served it now."""
    call.extra_headers.append(REPLAYED)
    call.deployment = None
    body = b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (tool.message.id, result)
    return whole_reply(200, body)


def bounds_of(rules: EffectRules) -> Bounds:
    """How much the record keeps."""
    return Bounds(rows=rules.max_kept, bytes=rules.max_bytes, result=rules.max_answer)


def _away() -> StoreUnavailable:
    return StoreUnavailable("The record of effects does not answer; nothing was called.")
