"""An effect in doubt whose server can be asked: was it done?

Policy names a tool of the same server that only reads, which arguments of the call it is asked
with, and what in its answer means *done* and what *absent*. Anything else (an error, a word that
fits neither, `pending`) leaves the doubt. *Absent* counts only once the first request can no longer
be under way: an answer that overtakes it would let the effect happen twice. Neither limits nor
breakers stand between: the question is the gateway's own, and costs one read.
Source: `execution.md` §6.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson

from gateway.call import ToolCall
from gateway.contracts import conditions
from gateway.errors import EffectUnderWay, GatewayError
from gateway.tools.approvals import wall
from gateway.tools.schemas import withheld
from gateway.wire.mcp import Message
from gateway.wire.mcp_bridge import ENVELOPE
from scheduler.api import effects as decisions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gateway.call import Call
    from gateway.clock import Clock
    from gateway.contracts.conditions import Condition
    from gateway.toolrules import Reconcile
    from gateway.tools.exchange import Exchanges
    from scheduler.api import Bounds, Effect, Effects

    Asking = Callable[[Call, ToolCall, Reconcile], Awaitable[ToolCall | None]]
    """The question with its result; None where nothing could be asked."""
    Screening = Callable[[Call, ToolCall, Mapping[str, Any]], bytes | None]
    """JSON text to stand in a result's place, or None; raises what withholds it."""

META = "tidegate/reconciled"
"""Member of a result's `_meta`: which tool's word stands in place of an answer that was lost."""
IDENT = "tidegate-reconcile"


class Word(Enum):
    """What the server says of an effect."""

    DONE = "done"
    ABSENT = "absent"
    UNKNOWN = "unknown"


def word(rule: Reconcile, result: Mapping[str, Any] | None) -> Word:
    """What the answer means. Pure."""
    if result is None or result.get("isError"):
        return Word.UNKNOWN
    said = structured(result)
    if said is None:
        return Word.UNKNOWN
    done, absent = _all(rule.done, said), _all(rule.absent, said)
    if done is absent:  # neither, or both: the rule does not tell them apart
        return Word.UNKNOWN
    return Word.DONE if done else Word.ABSENT


def structured(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The structured content; else the object that its only text is."""
    value = result.get("structuredContent")
    if isinstance(value, dict):
        return value
    content = result.get("content")
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
        return None
    try:
        value = orjson.loads(content[0].get("text", ""))
    except (orjson.JSONDecodeError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def _all(wanted: tuple[Condition, ...], said: Mapping[str, Any]) -> bool:
    """Whether values stand at every path, and all of them fit."""
    return all(
        conditions.found(said, one.at) and conditions.breach(one, said) is None for one in wanted
    )


def answered(rule: Reconcile, result: Mapping[str, Any]) -> bytes:
    """The word as the answer of the call: JSON text of a result."""
    meta = result.get("_meta")
    said = {**(meta if isinstance(meta, dict) else {}), META: rule.tool}
    return orjson.dumps({"resultType": "complete", **result, "_meta": said})


class Reconciling:
    """Asks about effects in doubt, and puts what their servers say on record.

    Args:
        ask: See `Asking`.
        screen: What tools say is looked through, whoever asked for it.
        store: The record.
        clock: Tells whether the first request may still be under way.
    """

    __slots__ = ("_ask", "_clock", "_screen", "_store")

    def __init__(self, ask: Asking, screen: Screening, store: Effects, clock: Clock) -> None:
        self._ask = ask
        self._screen = screen
        self._store = store
        self._clock = clock

    async def settled(
        self, call: Call, tool: ToolCall, rule: Reconcile, effect: Effect, bounds: Bounds
    ) -> tuple[Word, bytes | None]:
        """The server's word, on record; with the answer where it is done.

        Raises:
            EffectUnderWay: Nothing was done so far, and the first request may be under way.
            SchedulerError: The record does not answer, or somebody else was first.
        """
        own = await self._ask(call, tool, rule)
        result = own.result if own is not None else None
        said = word(rule, result)
        now = wall(self._clock)
        store, key, epoch = self._store, effect.key, effect.epoch
        if said is Word.DONE and own is not None and result is not None:
            answer = self._answer(call, own, rule, result)
            await store.settle(key, epoch, answer, tokens=0, now=now, bounds=bounds)
            return said, answer
        if said is Word.ABSENT:
            if now < effect.deadline:
                raise EffectUnderWay(
                    f"{effect.tool} has not done this call so far, but its first request may be "
                    "under way; ask again later.",
                    because=rule.because,
                    retry_after=effect.deadline - now,
                )
            if effect.state is decisions.Mark.RESERVED:
                await store.doubt(key, epoch, "its outcome did not come in time")
            await store.resolve(key, done=False, note=f"{rule.tool} says so", now=now)
        return said, None

    def _answer(
        self, call: Call, own: ToolCall, rule: Reconcile, result: Mapping[str, Any]
    ) -> bytes:
        try:
            screened = self._screen(call, own, result)
        except GatewayError as error:  # it was done all the same
            return withheld(error)
        return answered(rule, orjson.loads(screened) if screened is not None else result)


def asking(exchanges: Exchanges) -> Asking:
    """Asks as the caller itself would, in its era and session."""

    async def ask(call: Call, tool: ToolCall, rule: Reconcile) -> ToolCall | None:
        arguments: dict[str, Any] = {}
        for name, at in rule.arguments:
            found = conditions.found(tool.arguments, at)
            if not found:
                return None  # nothing to ask by
            arguments[name] = found[0]
        first: Message = call.rpc.first
        params: dict[str, Any] = {"name": rule.tool, "arguments": arguments}
        meta = {key: value for key, value in first.meta.items() if key in ENVELOPE}
        if meta:
            params["_meta"] = meta
        parsed = {"jsonrpc": "2.0", "id": IDENT, "method": "tools/call", "params": params}
        message = Message(
            raw=orjson.dumps(parsed),
            parsed=parsed,
            method="tools/call",
            id=b'"%b"' % IDENT.encode(),
            era=first.era,
            version=first.version,
        )
        own = ToolCall(
            server=tool.server,
            message=message,
            tool=rule.tool,
            public=rule.tool,
            stateless=tool.stateless,
            conversation=tool.conversation,
        )
        await exchanges.aside(call, own)
        return own

    return ask
