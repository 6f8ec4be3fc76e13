"""One answer on its way from a server to its caller: what each of its messages becomes.

An answer is one JSON object or a stream that ends with it. Messages pass as the bytes they came
as; only a named edit changes one: an id that had to be another upstream, a name that carries a
prefix here, a result that a gate replaces, members that the caller's revision demands. What a
server sends beyond its bound, under a foreign id or after its answer goes no further.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from gateway.bodies import read_answer
from gateway.call import Bytes, Dialect, Reply
from gateway.clock import Expiry
from gateway.errors import GatewayError, StreamCut, UpstreamMalformed
from gateway.opening import Relayed
from gateway.units import MICRO
from gateway.upstream import TransportFault, pass_on
from gateway.wire import mcp_stream, refusals, splice, sse
from gateway.wire.sse import Blocks

if TYPE_CHECKING:
    from gateway.call import HeaderList, ToolCall
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.units import Micros
    from gateway.upstream import Incoming, Take

Result: TypeAlias = Mapping[str, Any]
Adapt: TypeAlias = "Callable[[Result], dict[str, Any] | None]"
"""Given a result, what stands in its place for the caller; None lets it pass as it came."""
Other: TypeAlias = "Callable[[Result, bytes], bytes | None]"
"""Given a notification or a server's request and its bytes: the bytes to pass on, None for none."""

JSON_HEAD: tuple[bytes, bytes] = (b"content-type", b"application/json")
STREAM_HEAD: HeaderList = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
LAST_WORDS: Micros = MICRO // 4
"""How long the end of a stream is awaited behind its answer, so that the connection is kept."""


def passes(_message: Result, raw: bytes) -> bytes | None:
    """Notifications and requests of the server reach the caller as they came."""
    return raw


class Passage:
    """The messages of one answer.

    Attributes:
        answered: The response has passed; whatever follows is dropped.
        failed: It was a JSON-RPC error: its code, else 0.
        on_notice: Called with the server and the method of each notification or request in it.
    """

    __slots__ = (
        "_adapt", "_own", "_rename_event", "_server", "_their", "_tool", "answered", "failed",
        "on_notice", "other", "resumable",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - what an answer becomes, each edit once
        self,
        server: Server,
        *,
        own: bytes,
        their: bytes,
        tool: ToolCall | None = None,
        adapt: Adapt | None = None,
        other: Other = passes,
        rename_event: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Prepare.

        Args:
            server: Who answers.
            own: The caller's id, as it came.
            their: The id under which the server was asked.
            tool: The governed call, if it is one.
            adapt: What the caller's revision or policy makes of a result.
            other: What becomes of notifications and of the server's own requests.
            rename_event: The caller's name of an upstream event id; None drops ids, because a
                caller that cannot resume must not try.
        """
        self._server = server
        self._own = own
        self._their = their
        self._tool = tool
        self._adapt = adapt
        self._rename_event = rename_event
        self.other = other
        self.on_notice: Callable[[str, object], None] | None = None
        self.answered = False
        self.failed = 0
        self.resumable = False

    def message(self, raw: bytes) -> bytes | None:
        """What the caller gets of this message; None where it gets nothing.

        Raises:
            UpstreamMalformed: It is no JSON-RPC message.
            GatewayError: A gate refuses the result.
        """
        try:
            parsed = read_answer(raw)
        except ValueError as error:
            raise self._malformed("it is not JSON") from error
        if not isinstance(parsed, dict):
            raise self._malformed("it is not a JSON-RPC message")
        if "method" in parsed:
            if self.on_notice is not None:
                self.on_notice(self._server.name, parsed["method"])
            return self.other(parsed, raw)
        if not self._is_ours(parsed, raw):
            return None
        said = self._response(parsed, raw)
        self.answered = True
        return said

    def _is_ours(self, parsed: Mapping[str, Any], raw: bytes) -> bool:
        """Whether the response is to our request; an error under a null id is to nothing else."""
        ident = parsed.get("id")
        if ident is None:
            return "error" in parsed
        if isinstance(ident, int) and not isinstance(ident, bool) and self._their != b"-0":
            return b"%d" % ident == self._their
        if isinstance(ident, str) and b"\\" not in self._their:
            return b'"%b"' % ident.encode("utf-8", "surrogatepass") == self._their
        member = splice.locate(raw, "id")
        return member is not None and raw[member.start : member.end] == self._their

    def _response(self, parsed: dict[str, Any], raw: bytes) -> bytes:
        tool = self._tool
        if "error" in parsed:
            error = parsed["error"]
            if not isinstance(error, dict) or not isinstance(error.get("code"), int):
                raise self._malformed("its error has no code")
            self.failed = error["code"]
            return self._under_own_id(parsed, raw)
        result = parsed.get("result")
        if not isinstance(result, dict):
            raise self._malformed("a response holds a result or an error")
        replaced: bytes | None = None
        if tool is not None:
            tool.returned(result, len(raw))
            for gate in tool.gates:
                said = gate(result)
                if said is not None:
                    replaced, result = said, orjson.loads(said)
        if self._adapt is not None:
            adapted = self._adapt(result)
            if adapted is not None:
                replaced = orjson.dumps(adapted)
        if replaced is not None:
            raw = splice.splice(raw, "result", replaced)
        return self._under_own_id(parsed, raw)

    def _under_own_id(self, parsed: Mapping[str, Any], raw: bytes) -> bytes:
        if "id" not in parsed:
            return splice.insert(raw, "id", self._own)
        if parsed["id"] is not None and self._own == self._their:
            return raw
        return splice.splice(raw, "id", self._own)

    def _malformed(self, why: str) -> UpstreamMalformed:
        return UpstreamMalformed(
            f"The tool server {self._server.name} sent a message that cannot be passed on: {why}."
        )

    # --- streams ---------------------------------------------------------------------------------

    def block(self, raw: bytes) -> bytes:
        """What the caller gets of this block of a stream; b"" for nothing."""
        event = mcp_stream.block(raw)
        ident = b""
        if event.id is not None:
            self.resumable = True
            if self._rename_event is not None:
                ident = self._rename_event(event.id)
        if not event.is_message:
            if event.id is not None and self._rename_event is None:
                return b""
            return mcp_stream.written(event, ident=ident or None)
        assert event.data is not None  # noqa: S101 - it is a message
        try:
            said = self.message(event.data)
        except GatewayError as error:
            self.answered = True
            self.failed = -1
            return self.refused(error)
        if said is None:
            return b""
        data = None if said is event.data else said
        return mcp_stream.written(event, ident=ident or None, data=data)

    def refused(self, error: GatewayError) -> bytes:
        """The error as the event that ends the stream."""
        name, body = refusals.in_band(
            error, dialect=Dialect.MCP, rpc_id=orjson.Fragment(self._own) if self._own else None
        )
        return sse.frame(orjson.dumps(body), name)


class Stream:
    """The source of an answer that comes as a stream.

    Attributes:
        on_answer: Called as soon as the answer itself has come.
    """

    __slots__ = ("_clock", "_passage", "_relayed", "_said", "_server", "on_answer")

    def __init__(
        self, server: Server, incoming: Incoming, passage: Passage, *, clock: Clock, total: Micros
    ) -> None:
        """Prepare. `total` is the longest that the stream may last."""
        self._server = server
        self._passage = passage
        self._clock = clock
        self._said: AsyncIterator[bytes] | None = None
        self.on_answer: Callable[[], None] | None = None
        self._relayed = Relayed(
            incoming,
            deque(),
            incoming.chunks().__aiter__(),
            clock=clock,
            idle=server.provider.timeouts.idle,
            until=clock.now() + total,
        )

    async def chunks(self) -> AsyncIterator[bytes]:
        """The caller's bytes, message by message.

        Raises:
            StreamCut: It ended without an answer, and nobody can resume it.
            UpstreamMalformed: A message is larger than policy allows.
            TransportFault: It broke, or a deadline passed.
        """
        passage, relayed = self._passage, self._relayed
        blocks = Blocks(self._server.max_result)
        async for chunk in relayed:
            relayed.touched(chunk)
            for raw in blocks.feed(chunk):
                if blocks.open:
                    raise UpstreamMalformed(
                        f"A message of the tool server {self._server.name} is larger than the "
                        f"{self._server.max_result} bytes that policy allows.",
                        because=f"{self._server.because}.max_result",
                    )
                said = passage.block(raw)
                if passage.answered and self.on_answer is not None:
                    self.on_answer()
                if said:
                    yield said
                if passage.answered:
                    await self._rest()
                    return
        if not passage.resumable:
            raise StreamCut(f"The tool server {self._server.name} ended without an answer.")

    async def pass_to(self, take: Take) -> bool:
        """As `chunks`: a message may need looking into, so each is awaited."""
        self._said = self._said or self.chunks()
        return await pass_on(self._said, take)

    async def _rest(self) -> None:
        """The end of the stream is read where it comes at once."""
        try:
            with Expiry(self._clock, LAST_WORDS):
                async for _ in self._relayed:
                    pass
        except (TimeoutError, TransportFault):
            return  # the answer is complete; how the server hung up is nothing

    async def close(self, *, reuse: bool) -> None:
        """The connection is back in its pool, or closed."""
        await self._relayed.close(reuse=reuse)


def whole_reply(status: int, body: bytes, more: HeaderList | None = None) -> Reply:
    """A reply of one JSON object."""
    headers = [JSON_HEAD, (b"content-length", b"%d" % len(body)), *(more or [])]
    return Reply(status=status, headers=headers, source=Bytes(body))


def stream_reply(source: Stream, more: HeaderList | None = None) -> Reply:
    """A reply of events."""
    return Reply(status=200, headers=[*STREAM_HEAD, *(more or [])], source=source)
