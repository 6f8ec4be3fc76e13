"""ToolCall: what a call asks of a tool server, passed on with its `Call`. `call.py` exports it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gateway.admission.core import PoolSpec
    from gateway.snapshot import Server, ToolRule
    from gateway.units import Micros, Tokens


class Incoming(Protocol):
    """A JSON-RPC message as its reader knows it; `wire.mcp.Message` is one."""

    @property
    def raw(self) -> bytes:
        """Its bytes as sent."""
        ...

    @property
    def method(self) -> str:
        """What it asks for."""
        ...

    @property
    def id(self) -> bytes:
        """The id's own JSON text; b"" where no answer is owed."""
        ...

    @property
    def version(self) -> str:
        """The revision that it names."""
        ...

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of a tool or prompt."""
        ...

    @property
    def parsed(self) -> Mapping[str, Any]:
        """Itself as decoded."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """Its parameters."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """What it says about itself."""
        ...


class Conversation(Protocol):
    """A session of the older era, as layers see it; `tools.sessions.Session` is one."""

    id: str


class ToolCall:
    """What a call asks of a tool server, and what came back.

    Attributes, with their writer:
        server (target): Whose tool it is.
        method, tool (target): "tools/call" and the tool's name at its server; for other methods
            the prompt's name or the resource's URI.
        public (target): The name by which the caller knows it; `tool` but in a federation.
        rule (target): The first of policy's rules that fits; None where policy says nothing.
        message (target): The request: raw bytes, id with its exact text, arguments as decoded.
        stateless (target): Its sender speaks 2026-07-28; else it holds a session.
        conversation (target): The sender's `tools.sessions.Session`; None in the stateless era.
        ours (exchange): The gateway itself asks, beside a call: no header of its caller's is its.
        rounds (target): A further round of a call to which the server asked for input.
        repeatable (gate): Running it twice does no harm, by policy's word: it may be tried again.
        outlives (target): Its sender leaving is no cancellation: the work runs on for a while.
        caller_pools (gate): The caller's own limits on this tool.
        waits (target, gate): Longest waits by pool, where policy says one.
        sending (gate): Awaited, in order, before each attempt is sent; raises what forbids it.
        gates (gate): Asked, in order, with each result (the `result` member, decoded) before the
            caller sees it. Returns None to let it pass, or JSON text to stand in its place; raises
            `GatewayError` to refuse it.
        result (invoke): The result as decoded, before the gates; None where there is none.
        result_bytes (invoke): Bytes of the response.
        result_tokens (gate): About what a model will read of the result.
    """

    __slots__ = (
        "_canonical", "_texts", "caller_pools", "conversation", "gates", "message", "method",
        "ours", "outlives", "public", "repeatable", "result", "result_bytes", "result_tokens",
        "rounds", "rule", "sending", "server", "stateless", "tool", "waits",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - each fact of the request once
        self,
        *,
        server: Server,
        message: Incoming,
        tool: str,
        public: str,
        rule: ToolRule | None = None,
        stateless: bool = True,
        conversation: Conversation | None = None,
    ) -> None:
        self.server = server
        self.message = message
        self.method = message.method
        self.tool = tool
        self.public = public
        self.rule = rule
        self.stateless = stateless
        self.conversation = conversation
        self.rounds = "requestState" in message.params or "inputResponses" in message.params
        self.ours = False
        self.repeatable = False
        self.outlives = not stateless
        self.caller_pools: tuple[PoolSpec, ...] = ()
        self.waits: Mapping[str, Micros] = {}
        self.sending: list[Callable[[], Awaitable[None]]] = []
        self.gates: list[Callable[[Mapping[str, Any]], bytes | None]] = []
        self.result: Mapping[str, Any] | None = None
        self.result_bytes = 0
        self.result_tokens: Tokens = 0
        self._canonical: str | None = None
        self._texts: list[str] | None = None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments as decoded; empty where there are none."""
        return self.message.arguments

    @property
    def session(self) -> str:
        """Id of the sender's session; "" in the stateless era."""
        return self.conversation.id if self.conversation is not None else ""

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the request says about itself."""
        return self.message.meta

    def canonical(self, encode: Callable[[object], str]) -> str:
        """The arguments in the one form that all spellings of them share; made once.

        Args:
            encode: Sorts keys at every depth and writes no white space.
        """
        if self._canonical is None:
            self._canonical = encode(self.arguments)
        return self._canonical

    def returned(self, result: Mapping[str, Any], size: int) -> None:
        """A result has come, in this attempt; `size` is that of its response in bytes."""
        self.result, self.result_bytes = result, size
        self._texts = None

    def texts(self, read: Callable[[object], list[str]]) -> list[str]:
        """The texts of the result; read once.

        Args:
            read: Finds all texts of a value.
        """
        if self._texts is None:
            self._texts = read(self.result)
        return self._texts
