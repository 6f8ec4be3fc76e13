"""Effects leave here: the only sockets of a worker, and they lead to the gateway.

Each call carries the task's own identity, its tier, one trace for the whole task and an
idempotency key derived from task and ordinal, none of which the guest sees or chooses;
credentials or headers named in a request are ignored. `llm.*` goes to the model routes,
`tool.call` to `/mcp`. What happens to a call there (waiting, retries, limits, approval) is the
gateway's; here a refusal becomes an error reply with the gateway's own words.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from runtime import abi

if TYPE_CHECKING:
    from runtime.abi import Request

TIMEOUT_S: Final = 600.0
CONNECT_S: Final = 10.0
MAX_BODY: Final = abi.MAX_REPLY
MCP_VERSION: Final = "2026-07-28"
LANES: Final = {"T0": "1", "T1": "1", "T2": "2", "T3": "3"}
"""Tiers of tasks, as the gateway names those of calls: there, too, 1 goes first."""
PATHS: Final = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
}
CHAT_FIELDS: Final = {
    "model": "model",
    "tools": "tools",
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "format": "response_format",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls.

    Attributes:
        task: Keys and the trace derive from it.
        token: Bearer credential; stays in this file's objects, never in guest memory.
        tier: `T0` to `T3`, or "": a wish; policy decides.
        model: For `llm.chat` without one.
    """

    task: str
    token: str
    tier: str = ""
    model: str = "default"

    @property
    def trace(self) -> str:
        """Trace id of the task, the same on every machine it continues on."""
        return hashlib.blake2b(
            self.task.encode(), digest_size=16, person=b"tidegate-trace"
        ).hexdigest()

    def key(self, ordinal: int) -> str:
        """Idempotency key of an effect: equal whenever it is sent again."""
        text = f"{self.task}\0{ordinal}"
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"tidegate-effect").hexdigest()

    def headers(self, ordinal: int) -> dict[str, str]:
        """Headers of an effect."""
        out = {
            "authorization": f"Bearer {self.token}",
            "content-type": "application/json",
            "idempotency-key": self.key(ordinal),
            "traceparent": f"00-{self.trace}-{self.key(ordinal)[:16]}-01",
            # One task is one session: to the rules of loops, and to fairness.
            "session-id": self.task,
            # A held call would be answered 202 and fetched later; an agent rather learns why.
            "tidegate-hold": "never",
        }
        if self.tier:
            out["tidegate-tier"] = LANES[self.tier]
        return out


class Outbound:
    """Sends effects to one gateway; use as an async context manager.

    Args:
        gateway: Base URL.
        concurrent: Calls at once; more wait here.
    """

    def __init__(self, gateway: str, *, concurrent: int = 256) -> None:
        self._gateway = gateway
        self._turn = asyncio.Semaphore(concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Outbound:
        """Open the connection pool."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, connect=CONNECT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Close it."""
        if self._session is not None:
            await self._session.close()

    async def send(self, request: Request, caller: Caller) -> dict[str, Any]:
        """The reply's body, `{"ok":…}` or `{"error":…}`; the other side cannot make it raise."""
        if request.op == "batch":
            async with asyncio.TaskGroup() as group:
                waits = [group.create_task(self.send(one, caller)) for one in request.calls]
            replies = [
                {**wait.result(), "n": one.ordinal}
                for wait, one in zip(waits, request.calls, strict=True)
            ]
            return {"ok": replies}
        if request.op == "llm.chat":
            return await self._chat(request, caller)
        if request.op == "llm.raw":
            return await self._raw(request, caller)
        if request.op == "tool.call":
            return await self._tool(request, caller)
        return abi.error("bad_request", f"{request.op} is not served by the gateway")

    async def _chat(self, request: Request, caller: Caller) -> dict[str, Any]:
        args = request.args
        body = {
            theirs: args[ours] for ours, theirs in CHAT_FIELDS.items() if args.get(ours) is not None
        }
        body.setdefault("model", caller.model)
        body["messages"] = args["messages"]
        status, answer = await self._post("/v1/chat/completions", body, request, caller)
        if status != 200:
            return refusal(status, answer)
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            return {
                "ok": {
                    "text": message.get("content") or "",
                    "tool_calls": message.get("tool_calls") or [],
                    "finish": choice.get("finish_reason"),
                    "usage": answer.get("usage"),
                    "model_served": answer.get("model"),
                }
            }
        except (KeyError, IndexError, TypeError, AttributeError):
            return abi.error("upstream", "the answer is not a chat completion", retryable=True)

    async def _raw(self, request: Request, caller: Caller) -> dict[str, Any]:
        path = PATHS.get(request.args["dialect"])
        if path is None:
            return abi.error("bad_request", f"dialect: one of {', '.join(PATHS)}")
        if request.args["body"].get("stream"):
            return abi.error("bad_request", "stream: not served; the reply arrives whole")
        status, answer = await self._post(path, request.args["body"], request, caller)
        if status <= 0:
            return refusal(status, answer)
        return {"ok": {"status": status, "body": answer}}

    async def _tool(self, request: Request, caller: Caller) -> dict[str, Any]:
        name = request.args["name"]
        meta = {
            "io.modelcontextprotocol/protocolVersion": MCP_VERSION,
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": {"name": "tidegate-agent", "version": "1"},
        }
        body = {
            "jsonrpc": "2.0",
            "id": request.ordinal,
            "method": "tools/call",
            "params": {"name": name, "arguments": request.args.get("args", {}), "_meta": meta},
        }
        headers = {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": MCP_VERSION,
            "mcp-method": "tools/call",
            "mcp-name": name.encode("ascii", "ignore").decode(),
        }
        status, answer = await self._post("/mcp", body, request, caller, headers)
        failed = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(failed, dict) and isinstance(failed.get("code"), int):
            code = "unknown_tool" if failed["code"] == -32602 else "denied"
            return abi.error(code, str(failed.get("message", "refused")), retryable=status == 429)
        result = answer.get("result") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(result, dict):
            return refusal(status, answer)
        return {
            "ok": {
                "content": flat(result.get("content")),
                "structured": result.get("structuredContent"),
                "is_error": bool(result.get("isError")),
            }
        }

    async def _post(
        self,
        path: str,
        body: object,
        request: Request,
        caller: Caller,
        more: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and decoded body; status 0 when nothing sensible came back, and why."""
        session = self._session
        if session is None:
            raise RuntimeError("open me first: async with")
        headers = {**caller.headers(request.ordinal), **(more or {})}
        try:
            async with (
                self._turn,
                session.post(self._gateway + path, data=abi.dumps(body), headers=headers) as reply,
            ):
                raw = await reply.content.read(MAX_BODY + 1)
                while not reply.content.at_eof() and len(raw) <= MAX_BODY:
                    raw += await reply.content.read(MAX_BODY + 1 - len(raw))
                if len(raw) > MAX_BODY:
                    return 0, f"the reply is larger than {MAX_BODY} bytes"
                return reply.status, decoded(raw, reply.content_type)
        except TimeoutError:
            return 0, "the gateway did not answer in time"
        except (aiohttp.ClientError, OSError) as error:
            return 0, f"the gateway is not reached: {error}"
        except ValueError:
            return 0, "the reply is not JSON"


def decoded(raw: bytes, kind: str) -> Any:  # noqa: ANN401  (JSON)
    """A JSON body, or the last JSON-RPC response of an event stream."""
    if kind != "text/event-stream":
        return json.loads(raw)
    found = None
    for block in raw.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = b"\n".join(
            line[5:].lstrip() for line in block.split(b"\n") if line.startswith(b"data:")
        )
        if data:
            row = json.loads(data)
            if isinstance(row, dict) and ("result" in row or "error" in row):
                found = row
    if found is None:
        raise ValueError("no response in the stream")
    return found


def flat(content: object) -> object:
    """Text of a tool's content when it is only text, else the content as it is."""
    if isinstance(content, list) and all(
        isinstance(one, dict) and one.get("type") == "text" for one in content
    ):
        return "\n".join(str(one.get("text", "")) for one in content)
    return content


CODES: Final = {
    400: "bad_request", 401: "denied", 403: "denied", 404: "bad_request", 408: "deadline",
    409: "conflict", 413: "too_large", 429: "budget", 504: "deadline",
}  # fmt: skip


def refusal(status: int, answer: object) -> dict[str, Any]:
    """An error reply from a refusal of the gateway, in its own words."""
    if status <= 0:
        return abi.error("upstream", str(answer), retryable=True)
    words = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(words, dict):
        words = words.get("message", words)
    code = CODES.get(status, "upstream")
    return abi.error(code, f"{status}: {words}", retryable=status in (408, 429) or status >= 500)
