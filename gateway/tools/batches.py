"""JSON-RPC batches of 2025-03-26: each message passes policy on its own and gets its own answer.

An array is no way around the rules of one message (OpenShell PR#2083), so each becomes a call of
its own, with its own line in the log. They run one after the other: who wants them at once can send
them at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from gateway.call import Bytes, Call, Dialect, End, Family, Reply
from gateway.errors import GatewayError
from gateway.tools.passage import whole_reply
from gateway.wire import mcp, mcp_stream, refusals
from gateway.wire.headers import is_event_stream
from gateway.wire.mcp import BATCHED, Posted
from gateway.wire.sse import Blocks

if TYPE_CHECKING:
    from gateway.call import Service
    from gateway.tools.sessions import Sessions
    from gateway.wire.mcp import Message


class Batches:
    """The service of batches.

    Args:
        single: Serves a call of one message.
        sessions: Know which revision was agreed on.
    """

    __slots__ = ("_sessions", "_single")

    def __init__(self, single: Service, sessions: Sessions) -> None:
        self._single = single
        self._sessions = sessions

    async def __call__(self, call: Call) -> Reply:
        """An array of answers; nothing where no message asked for one.

        Raises:
            ProtocolFault: The session speaks a revision without batches.
        """
        posted: Posted = call.rpc
        session = self._sessions.of(call)
        if session.version != BATCHED:
            raise mcp.fault(mcp.INVALID_REQUEST, f"Batches exist in revision {BATCHED} only")
        if any(message.method == "initialize" for message in posted.messages):
            raise mcp.fault(mcp.INVALID_REQUEST, "initialize stands alone")
        answers = []
        for number, message in enumerate(posted.messages):
            answer = await self._one(part_of(call, message, number))
            if message.is_request:
                answers.append(answer)
        if not answers:
            return Reply(status=202, headers=[], source=Bytes(b""))
        return whole_reply(200, b"[" + b",".join(answers) + b"]")

    async def _one(self, call: Call) -> bytes:
        """The answer of one message, as JSON text."""
        message: Message = call.rpc.first
        try:
            reply = await self._single(call)
        except GatewayError as error:
            return said(error, message)
        end = End.FAILED
        try:
            answer = await response_of(reply)
            end = End.COMPLETE
        except GatewayError as error:
            return said(error, message)
        finally:
            await reply.close(end)
        return answer


def part_of(call: Call, message: Message, number: int) -> Call:
    """A call of one message of a batch."""
    part = Call(
        id=f"{call.id}.{number}",
        dialect=call.dialect,
        family=call.family,
        method=call.method,
        path=call.path,
        target=call.target,
        headers=call.headers,
        snapshot=call.snapshot,
        received=call.received,
        body=message.raw,
        client=call.client,
    )
    part.peer = call.peer
    part.principal = call.principal
    part.rpc = Posted(messages=(message,))
    return part


async def response_of(reply: Reply) -> bytes:
    """The JSON-RPC response in a reply; b"" where it holds none."""
    stream = is_event_stream(reply.headers)
    blocks, parts = Blocks(), []
    async for chunk in reply.source.chunks():
        for tap in reply.taps:
            tap(chunk)
        if not stream:
            parts.append(chunk)
            continue
        for raw in blocks.feed(chunk):
            data = mcp_stream.block(raw).data
            if data:
                parts = [data]  # the last message of a stream is its response
    return b"".join(parts)


def said(error: GatewayError, message: Message) -> bytes:
    """The refusal of one message."""
    body = refusals.refusal(
        error,
        dialect=Dialect.MCP,
        family=Family.MCP,
        rpc_id=orjson.Fragment(message.id) if message.id else None,
    ).body
    return orjson.dumps(body)
