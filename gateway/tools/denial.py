"""A refusal as a result that the model reads, where policy or the client's era wants it so.

An error ends the client's turn in many programs; an `isError` result is text in the model's hands,
and it adapts. Only what the agent itself can react to is said so: a limit, a loop, a broken
contract, a missing consent, a key in use. A fault of the server or of ours stays an error.
Source: `protocols.md` §5.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.call import Dialect, Family
from gateway.errors import (
    ContractBreach,
    Forbidden,
    GatewayError,
    KeyConflict,
    LoopDetected,
    NeverFits,
    Saturated,
)
from gateway.toolrules import Denial
from gateway.tools.passage import whole_reply
from gateway.wire import refusals

if TYPE_CHECKING:
    from gateway.call import Call, Reply, ToolCall

SAID = (Saturated, LoopDetected, ContractBreach, Forbidden, KeyConflict, NeverFits)
META = "tidegate/denial"


def as_result(call: Call, tool: ToolCall, error: GatewayError) -> Reply | None:
    """The refusal as a result; None where it is to be an error."""
    if not isinstance(error, SAID):
        return None
    rule = tool.rule
    wanted = rule.denial if rule is not None else None
    if wanted is None:
        wanted = Denial.ERROR if tool.stateless else Denial.RESULT
    if wanted is Denial.ERROR:
        return None
    said = refusals.refusal(
        error, dialect=Dialect.MCP, family=Family.MCP, request_id=call.id, rpc_id=None
    )
    data = said.body["error"]["data"]
    result = {
        "content": [{"type": "text", "text": said.body["error"]["message"]}],
        "isError": True,
        "_meta": {META: {"code": said.body["error"]["code"], **data}},
    }
    if tool.stateless:
        result["resultType"] = "complete"
    body = b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (tool.message.id, orjson.dumps(result))
    more = [
        (name, value) for name, value in said.headers if name in (b"retry-after", b"retry-after-ms")
    ]
    return whole_reply(200, body, more)
