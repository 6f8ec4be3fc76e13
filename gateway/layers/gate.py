"""Contract, record, loops, consent: what is certain about a tool call before anything is held.

In this order, each for its reason: a broken contract is refused whoever asks; what ran already is
answered from the record, and is no loop; a runaway stops before it asks humans; a human is asked
last, about a call that could run. Then the call goes on with the pools of its rules, and its result
passes back through the contract and into the record.

Only tools with a rule in policy are judged; the loop breaker and a caller's own idempotency key
hold for all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from gateway.call import Call, Estimate, Reply, Service, VerdictNote
from gateway.contracts import conditions
from gateway.contracts.screen import texts
from gateway.errors import Forbidden, GatewayError
from gateway.toolrules import ToolRule
from gateway.tools.denial import as_result
from gateway.tools.limits import Limits
from gateway.tools.schemas import INPUT_REQUIRED, withheld
from gateway.units import Mode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.call import ToolCall
    from gateway.toolrules import Approve
    from gateway.tools.definitions import Definition
    from gateway.tools.guards import Guards
    from gateway.tools.repeats import Made
    from scheduler.api import NewEffect

UNTRUSTED = (b"tidegate-content", b"untrusted")
"""What a tool returns is data, whatever it says; agents that look may fence it off."""
A_WORD = Estimate(input=0, output=1)
"""What a result is expected to cost: something, so that a spent limit of tokens holds the next call
back; how much, nobody knows before it came, and no size would be right for a limit that is small.
"""
NO_RULE = ToolRule(pattern="", contract=Mode.OFF)


class Gate:
    """The layer."""

    __slots__ = ("_guards", "_limits")

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self._limits = Limits()

    def __call__(self, inner: Service) -> Service:
        """The service behind its gate."""

        async def serve(call: Call) -> Reply:
            tool = call.tool
            assert tool is not None  # noqa: S101 - target ran
            if tool.method != "tools/call":
                return await inner(call)
            try:
                return await self._gated(call, tool, inner)
            except GatewayError as error:
                said = as_result(call, tool, error)
                if said is None:
                    raise
                note = VerdictNote("gate", "told as a result", error.because, call.received)
                call.notes.append(note)
                return said

        return serve

    async def _gated(self, call: Call, tool: ToolCall, inner: Service) -> Reply:
        guards, rule = self._guards, tool.rule
        definition = None
        if rule is not None:
            definition = await guards.contracts.look(call, tool, rule)
        effect = guards.ledger.effect(call, tool)
        if effect is not None:
            reply = await guards.ledger.known(call, tool, effect)
            if reply is not None:
                return reply
        if guards.repeats.fleet is not None:
            await guards.repeats.hear(call, tool)
        made = guards.repeats.look(call, tool)
        if rule is not None:
            await self._ruled(call, tool, rule)
        call.extra_headers.append(UNTRUSTED)
        tool.gates.append(partial(self._result, call, tool, definition, made, effect))
        if effect is None:
            return await inner(call)
        return await guards.ledger.run(call, tool, effect, inner)

    async def _ruled(self, call: Call, tool: ToolCall, rule: ToolRule) -> None:
        """What policy says of this tool and these arguments holds for the call."""
        principal = call.principal
        assert principal is not None  # noqa: S101 - identify ran
        tool.repeatable = rule.repeatable
        cases = [case for case in rule.cases if conditions.met(case.when, tool.arguments)]
        for case in cases:
            if case.deny:
                raise Forbidden(
                    f"Such calls of {tool.public[:64]} are not allowed (rule {case.because}).",
                    because=case.because,
                    code="arguments_not_allowed",
                    param="params.arguments",
                )
        limits = [*(one for case in cases for one in case.limits), *rule.limits]
        if limits:
            taking = self._limits.take(limits, principal, f"{tool.server.name}/{tool.tool}")
            tool.caller_pools = tuple(taking.of_caller)
            tool.waits = {**tool.waits, **taking.waits}
            call.estimate = A_WORD
            if taking.of_tool and call.deployment is not None:
                pools = (*taking.of_tool, *call.deployment.pools)
                call.deployment = replace(call.deployment, pools=pools)
        asked = [case.approve for case in cases if case.approve is not None]
        if rule.approve is not None:
            asked.append(rule.approve)
        for approve in asked:
            await self._consented(call, tool, approve)

    async def _consented(self, call: Call, tool: ToolCall, approve: Approve) -> None:
        consent = self._guards.consent
        approval = await consent.obtain(call, tool, approve)
        # Before the effect is reserved: consent that turns out to be spent leaves no intent behind.
        tool.sending.insert(0, lambda: consent.use(approval, call, approve))

    def _result(
        self,
        call: Call,
        tool: ToolCall,
        definition: Definition | None,
        made: Made | None,
        effect: NewEffect | None,
        result: Mapping[str, Any],
    ) -> bytes | None:
        """What the caller gets in the result's place; None where it gets the result."""
        guards, rule = self._guards, tool.rule or NO_RULE
        tool.result_tokens = tokens_of(tool.texts(texts))
        if made is not None:
            guards.repeats.returned(made, result, guards.clock.now())
        try:
            replaced = guards.contracts.result(call, tool, rule, definition, result)
        except GatewayError as error:
            if effect is not None:  # it ran all the same, and must not run again
                guards.ledger.answered(effect, withheld(error))
            raise
        if effect is not None and result.get("resultType") != INPUT_REQUIRED:
            guards.ledger.answered(effect, orjson.dumps(result) if replaced is None else replaced)
        return replaced


def tokens_of(said: list[str]) -> int:
    """About what a model will read of a result's texts: four characters a token."""
    return -(-sum(map(len, said)) // 4)


def commit(inner: Service) -> Service:
    """The layer nearest to the server: what must be on disk before an attempt is, then is."""

    async def serve(call: Call) -> Reply:
        tool = call.tool
        assert tool is not None  # noqa: S101 - target ran
        call.sent = False
        for step in tool.sending:
            await step()
        return await inner(call)

    return serve
