"""The contract gate: arguments on the way in, results on the way out, both refused with a reason.

Three things are asked of arguments: that no key stands twice at any depth (a gateway that judges
one and a server that obeys the other disagree about an amount), the server's own schema, and the
conditions of policy. Of results: the server's output schema, the conditions of policy, and the
screen. In shadow mode everything is looked at, noted, and passes.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import orjson

from gateway.call import VerdictNote
from gateway.contracts import conditions
from gateway.contracts.bounds import Unusable
from gateway.contracts.screen import Action, texts
from gateway.contracts.validators import Breach, Validators
from gateway.errors import ContractBreach, MalformedCall, UpstreamMalformed
from gateway.tools.definitions import AGAIN
from gateway.units import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.call import Call, ToolCall
    from gateway.contracts.screen import ScreenRule
    from gateway.errors import GatewayError
    from gateway.toolrules import ToolRule
    from gateway.tools.definitions import Definition, Definitions

UNTRUSTED = "tidegate/untrusted"
"""Member of a result's `_meta` where the screen marks what it found."""
_KEY_END = b'":'
_SPACED = re.compile(rb'"\s+:')
INPUT_REQUIRED = "input_required"


class Contracts:
    """Judges arguments and results.

    Attributes:
        on_verdict: Called with what was judged (arguments, result, screen) and the verdict
            (refused, shadowed, marked), for metrics.
    """

    __slots__ = ("_definitions", "_validators", "on_verdict")

    def __init__(
        self,
        definitions: Definitions,
        *,
        on_verdict: Callable[[str, str], None] | None = None,
    ) -> None:
        self._definitions = definitions
        self._validators = Validators()
        self.on_verdict = on_verdict

    async def look(self, call: Call, tool: ToolCall, rule: ToolRule) -> Definition | None:
        """The arguments keep the contract; what the server says of the tool.

        Raises:
            ContractBreach: They do not; the server has heard nothing of it.
        """
        unique(tool.message.raw, tool.message.parsed)
        if rule.contract is Mode.OFF:
            return None
        find, server = self._definitions.find, tool.server
        definition = await find(call, server, tool.tool)
        found = self._arguments(tool, rule, definition)
        if found is not None and definition is not None:
            # The tool may have changed since its list was read: nobody is refused by an old one.
            definition = await find(call, server, tool.tool, fresh=AGAIN)
            found = self._arguments(tool, rule, definition)
        if found is not None:
            breach, because = found
            self._breached(call, tool, rule, breach, because)
        return definition

    def _arguments(
        self, tool: ToolCall, rule: ToolRule, definition: Definition | None
    ) -> tuple[Breach, str] | None:
        """What is wrong with the arguments, and by which rule."""
        if definition is not None and definition.said.get("inputSchema") is not None:
            size = len(tool.message.raw)
            found = self._schema(definition, "inputSchema", tool.arguments, size, rule)
            if found is not None:
                return found, f"{rule.because}.contract"
        for index, condition in enumerate(rule.arguments):
            broken = conditions.breach(condition, tool.arguments)
            if broken is not None:
                return Breach(*broken), f"{rule.because}.arguments[{index}]"
        return None

    def _schema(
        self, definition: Definition, which: str, value: object, size: int, rule: ToolRule
    ) -> Breach | None:
        validator = definition.made.get(which)
        if validator is None:
            validator = definition.made[which] = self._validators.of(definition.said[which])
        if isinstance(validator, Unusable):
            if rule.pass_unusable:
                return None
            return Breach("", f"the server's schema cannot be obeyed: {validator}")
        return validator.breach(value, size=size)

    def _breached(
        self, call: Call, tool: ToolCall, rule: ToolRule, breach: Breach, because: str
    ) -> None:
        shadow = rule.contract is Mode.SHADOW
        self._tell(call, "arguments", because, shadow=shadow)
        if shadow:
            return
        where = f"{breach.path}: " if breach.path else ""
        raise ContractBreach(
            f"The arguments of {tool.public[:64]} were refused: {where}{breach.reason} "
            f"(rule {because}). The tool was not called.",
            because=because,
            param=f"params.arguments.{breach.path}" if breach.path else "params.arguments",
        )

    def _tell(self, call: Call, what: str, because: str, *, shadow: bool) -> None:
        verdict = "shadowed" if shadow else "refused"
        call.notes.append(VerdictNote("gate", f"{what} {verdict}", because, call.received))
        if self.on_verdict is not None:
            self.on_verdict(what, verdict)

    # --- results ---

    def result(
        self,
        call: Call,
        tool: ToolCall,
        rule: ToolRule,
        definition: Definition | None,
        result: Mapping[str, Any],
    ) -> bytes | None:
        """What stands in the result's place; None lets it pass as it came.

        Raises:
            UpstreamMalformed: The server breaks its contract, or the screen withholds the result.
        """
        if result.get("resultType") == INPUT_REQUIRED:
            return None
        if rule.contract is not Mode.OFF and not result.get("isError"):
            found = self._result(tool, rule, definition, result)
            if found is not None:
                breach, because = found
                shadow = rule.contract is Mode.SHADOW
                self._tell(call, "result", because, shadow=shadow)
                if not shadow:
                    where = f"{breach.path}: " if breach.path else ""
                    raise UpstreamMalformed(
                        f"The result of {tool.public[:64]} was withheld: {where}{breach.reason} "
                        f"(rule {because}). The tool did run.",
                        because=because,
                        code="result_breach",
                    )
        return self.screened(call, tool, result)

    def _result(
        self,
        tool: ToolCall,
        rule: ToolRule,
        definition: Definition | None,
        result: Mapping[str, Any],
    ) -> tuple[Breach, str] | None:
        value = result.get("structuredContent")
        if definition is not None and definition.said.get("outputSchema") is not None:
            if value is None:
                missing = Breach("structuredContent", "it is missing, and the tool promises it")
                return missing, f"{rule.because}.contract"
            found = self._schema(definition, "outputSchema", value, tool.result_bytes, rule)
            if found is not None:
                return found, f"{rule.because}.contract"
        for index, condition in enumerate(rule.results):
            broken = conditions.breach(condition, value if isinstance(value, dict) else {})
            if broken is not None:
                return Breach(*broken), f"{rule.because}.results[{index}]"
        return None

    def screened(self, call: Call, tool: ToolCall, result: Mapping[str, Any]) -> bytes | None:
        """The result with what was found in it marked; None where nothing was, or in shadow.

        Raises:
            UpstreamMalformed: It is withheld.
        """
        screen = call.snapshot.screen
        hits = screen.hits(tool.texts(texts)) if screen.looks else ()
        if not hits:
            return None
        shadow = screen.mode is Mode.SHADOW
        refusing = next((one for one in hits if one.action is Action.REFUSE), None)
        told = refusing or hits[0]
        verdict = "shadowed" if shadow else "refused" if refusing is not None else "marked"
        call.notes.append(VerdictNote("gate", f"screen {verdict}", told.because, call.received))
        if self.on_verdict is not None:
            self.on_verdict("screen", verdict)
        if shadow:
            return None
        if refusing is not None:
            raise UpstreamMalformed(
                f"The result of {tool.public[:64]} was withheld: it speaks to the model "
                f"(rule {refusing.because}). The tool did run.",
                because=refusing.because,
                code="result_screened",
            )
        return marked(result, hits)


def withheld(error: GatewayError) -> bytes:
    """What the record says of a call whose result its caller may not have."""
    text = {"type": "text", "text": error.message}
    return orjson.dumps({"content": [text], "isError": True, "resultType": "complete"})


def marked(result: Mapping[str, Any], hits: tuple[ScreenRule, ...]) -> bytes:
    """The result with a word beside it on what was found."""
    meta = result.get("_meta")
    said = {**(meta if isinstance(meta, dict) else {}), UNTRUSTED: [one.name for one in hits]}
    return orjson.dumps({**result, "_meta": said})


def unique(raw: bytes, parsed: object) -> None:
    """No key stands twice in one object, at any depth.

    Written anew by the encoder, the message has as many keys as were decoded: most are the very
    bytes sent. Where the sent one has no more of them, and no spelling that could hide one, none
    was dropped; else it is read once more.

    Args:
        raw: The message as sent.
        parsed: As decoded.

    Raises:
        MalformedCall: One does: what is judged here could differ from what the server reads.
    """
    try:
        again = orjson.dumps(parsed)
    except TypeError:
        again = b""  # integers that the encoder cannot write
    if again == raw:
        return
    hidden = b"\\u00" in raw or _SPACED.search(raw) is not None
    if again and not hidden and raw.count(_KEY_END) == again.count(_KEY_END):
        return
    try:
        json.loads(raw, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise MalformedCall("The message is not UTF-8.", param="params") from error


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise MalformedCall(
            f"The key {twice[:64]!r} stands twice in one object; gateway and server might differ.",
            param="params.arguments",
        )
