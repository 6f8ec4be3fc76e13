"""The scripted upstream (FORM.md §3): answers byte by byte and records what it was sent.

One listener per port. A request finds its script by the model it names, so that variants with
models of their own can be played side by side; what names no model belongs to the one script that
is played alone. Each request's record says when the gateway closed the connection while the answer
was running: the transport tells end of file at once, a write error would come too late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from tests.cases import items, rawjson
from tests.cases.client import Body, Headers, first, hang_up, parse_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_HEAD = 1 << 20
GAP = 0.01
"""Seconds between two writes: a write is not a packet, so cuts need time as well as TCP_NODELAY."""

_MODEL = re.compile(rb'"model"\s*:\s*"([^"]*)"')


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request as the upstream saw it.

    Attributes:
        port: 0 for the scripted upstream, 1 for the one on the next port.
        fresh: First request of its connection.
        at: Loop time of its last byte.
        counted: An answer matched; the rest got 404.
        writes: Items written of the answer's body.
        told_at: When the answer's first byte was about to leave: what it says of waiting counts
            from here. Later stamps are later than the gateway may have read it.
        answered_at: When the answer's last byte was handed over.
        closed_at: When the gateway closed the connection, if that was before the answer was over.
        broken_upload: The connection ended before the request did.
    """

    port: int
    fresh: bool
    at: float
    method: str
    target: str
    headers: Headers
    body: bytes
    counted: bool = False
    writes: int = 0
    told_at: float | None = None
    answered_at: float | None = None
    closed_at: float | None = None
    broken_upload: bool = False

    @property
    def rpc(self) -> Mapping[str, Any] | None:
        """The JSON-RPC request in the body, or None."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return None
        return value if isinstance(value, dict) and "method" in value else None


@dataclass(slots=True, kw_only=True, eq=False)
class Script:
    """What the upstream does while one variant is played, and what it saw.

    Attributes:
        model: Requests that name this model belong to the script.
        alone: Requests that name no scripted model belong to it as well.
        answers: Per port.
        names: Variables of the variant.
        trap: Connections to the trap port.
        sent: The body bytes of the answer that was begun last.
    """

    model: str
    alone: bool
    answers: tuple[tuple[Mapping[str, Any], ...], ...]
    names: items.Names
    seen: list[Seen] = field(default_factory=list)
    trap: int = 0
    used: dict[tuple[int, int], int] = field(default_factory=dict)
    sent: bytes = b""
    sessions: dict[str, int] = field(default_factory=dict)
    last_call_id: str = "null"
    running: set[asyncio.Task[None]] = field(default_factory=set)

    def counted(self, port: int = 0) -> list[Seen]:
        """The requests that an answer was found for."""
        return [seen for seen in self.seen if seen.counted and seen.port == port]

    def choose(self, seen: Seen) -> Mapping[str, Any] | None:
        """The first answer that fits and is not used up."""
        answers = self.answers[seen.port] if seen.port < len(self.answers) else ()
        for number, answer in enumerate(answers):
            last = number == len(answers) - 1
            times = answer.get("times", "forever" if last or "match" in answer else 1)
            key = (seen.port, number)
            used = self.used.get(key, 0)
            if (times == "forever" or used < int(times)) and self.fits(
                answer.get("match", {}), seen
            ):
                self.used[key] = used + 1
                return answer
        return None

    def fits(self, match: Mapping[str, Any], seen: Seen) -> bool:
        """The request is one that this `match` speaks of."""
        method = match.get("method", "POST")
        if method not in ("any", seen.method):
            return False
        texts = {
            word: [self.names.fill(text).encode() for text in listed(match.get(word, []))]
            for word in ("body_contains", "body_lacks")
        }
        if match.get("path_contains", "") not in seen.target:
            return False
        if not all(text in seen.body for text in texts["body_contains"]):
            return False
        if any(text in seen.body for text in texts["body_lacks"]):
            return False
        for name, value in match.get("header", {}).items():
            if self.names.fill(str(value)) not in [v for n, v in seen.headers if n == name]:
                return False
        if any(
            first(seen.headers, name) is not None for name in listed(match.get("header_absent", []))
        ):
            return False
        return self._fits_rpc(match, seen)

    def _fits_rpc(self, match: Mapping[str, Any], seen: Seen) -> bool:
        if "rpc" not in match and "tool" not in match:
            return True
        rpc = seen.rpc
        if rpc is None or match.get("rpc", "any") not in ("any", rpc["method"]):
            return False
        params = rpc.get("params")
        tool = params.get("name") if isinstance(params, dict) else None
        return "tool" not in match or tool == match["tool"]

    def answer_names(self, seen: Seen, fresh: int) -> items.Names:
        """The variables of one answer."""
        rpc = seen.rpc
        raw_id = (
            rawjson.member(seen.body.decode("utf-8", "replace"), "id") or "null" if rpc else "null"
        )
        session = first(seen.headers, "mcp-session-id") or ""
        if rpc and rpc["method"] == "tools/call":
            self.sessions[session] = self.sessions.get(session, 0) + 1
            self.last_call_id = raw_id
        return self.names.over(
            rpc_id=raw_id,
            last_call_id=self.last_call_id,
            calls_in_session=str(self.sessions.get(session, 0)),
            fresh=str(fresh),
        )


def listed(value: Any) -> list[Any]:
    """The value as a list; one value is a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]


class Upstream:
    """The listeners and the scripts that are being played.

    Connections stay open between variants: a pooled connection dying idle is a fault of its own.
    """

    def __init__(self, *, ports: Iterable[int] = (0, 0), host: str = "127.0.0.1") -> None:
        self.host = host
        self.ports = list(ports)
        self.trap_port = 0
        self.scripts: list[Script] = []
        self.strangers: list[Seen] = []
        self.fresh = 0
        self._servers: list[asyncio.Server | None] = []
        self._trap: asyncio.Server | None = None
        self._links: set[_Link] = set()

    async def start(self) -> None:
        """Listen on all ports."""
        loop = asyncio.get_running_loop()
        for index, port in enumerate(self.ports):
            self._servers.append(await self._listen(index, port))
        self._trap = await loop.create_server(lambda: _Trap(self), self.host, 0)
        self.trap_port = self._trap.sockets[0].getsockname()[1]

    async def _listen(self, index: int, port: int) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Link(self, index), self.host, port, backlog=1024)
        self.ports[index] = server.sockets[0].getsockname()[1]
        return server

    async def stop(self) -> None:
        """Close everything."""
        for script in list(self.scripts):
            await self.remove(script)
        for server in [*self._servers, self._trap]:
            if server is not None:
                server.close()
        for link in list(self._links):
            link.end()
        self._servers.clear()

    async def refuse(self, index: int) -> None:
        """From now on nobody listens on that port, and its connections are gone."""
        server = self._servers[index]
        if server is not None:
            server.close()
            self._servers[index] = None
        for link in [link for link in self._links if link.port == index]:
            link.end()
        await asyncio.sleep(0)

    async def accept(self, index: int) -> None:
        """Listen on that port again."""
        if self._servers[index] is None:
            self._servers[index] = await self._listen(index, self.ports[index])

    def add(self, script: Script) -> None:
        """Play that script beside the present ones."""
        self.scripts.append(script)

    async def remove(self, script: Script) -> None:
        """End the script: answers that still run are broken off, idle connections stay."""
        if script in self.scripts:
            self.scripts.remove(script)
        for task in list(script.running):
            task.cancel()
        await asyncio.gather(*script.running, return_exceptions=True)

    def script_of(self, seen: Seen) -> Script | None:
        """Whose request this is: by the model named in the body, else the script played alone."""
        match = _MODEL.search(seen.body)
        model = match[1].decode("utf-8", "replace") if match else ""
        fitting = [
            script
            for script in self.scripts
            if model == script.model or model.startswith(f"{script.model}-")
        ]
        if fitting:
            return max(fitting, key=lambda script: len(script.model))
        return next((script for script in self.scripts if script.alone), None)


class _Trap(asyncio.Protocol):
    """A listener nobody may call."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        for script in self._upstream.scripts:
            script.trap += 1
        transport.close()


class _Link(asyncio.Protocol):
    """One connection from the gateway: request, answer, request, answer."""

    def __init__(self, upstream: Upstream, port: int) -> None:
        self._upstream = upstream
        self.port = port
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None
        self._count = 0
        self.reuse: tuple[Script, str] | None = None  # what a second request of that script meets
        self.gone_at: float | None = None

    # --- transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._upstream._links.add(self)
        self._task = asyncio.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._changed.set()

    def eof_received(self) -> bool:
        self._gone()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._gone()
        self._upstream._links.discard(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _gone(self) -> None:
        if self.gone_at is None:
            self.gone_at = time.monotonic()
        self._writable.set()
        self._changed.set()

    def end(self, *, rst: bool = False) -> None:
        """Close the connection from our side."""
        if self.transport is not None:
            hang_up(self.transport, rst=rst)

    # --- requests ---

    async def _serve(self) -> None:
        try:
            while self.gone_at is None:
                seen = await self._request()
                if seen is None:
                    break
                if not await self._respond(seen):
                    break
        finally:
            if self.transport is not None and not self.transport.is_closing():
                self.transport.close()

    async def _more(self) -> bool:
        self._changed.clear()
        await self._changed.wait()
        return self.gone_at is None

    async def _request(self) -> Seen | None:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD or not await self._more():
                return None
        line, headers = parse_head(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        method, _, rest = line.partition(" ")
        target = rest.rpartition(" ")[0]
        body = Body(headers, bodiless=False, response=False)
        if first(headers, "expect") and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        broken = False
        while True:
            data, self._buffer = bytes(self._buffer), bytearray()
            body.feed(data)
            if body.complete or body.malformed:
                break
            if not await self._more() and not self._buffer:
                broken = True
                break
        self._buffer[:0] = body.rest
        self._count += 1
        return Seen(
            port=self.port,
            fresh=self._count == 1,
            at=time.monotonic(),
            method=method,
            target=target,
            headers=headers,
            body=bytes(body.data),
            broken_upload=broken or bool(body.malformed),
        )

    async def _respond(self, seen: Seen) -> bool:
        script = self._upstream.script_of(seen)
        answer = script.choose(seen) if script else None
        (script.seen if script else self._upstream.strangers).append(seen)
        if script is None or answer is None:
            body = (
                b'{"error":{"message":"nothing is scripted for this request","type":"not_found"}}'
            )
            head = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n"
            await self._write(head % len(body) + body)
            seen.answered_at = time.monotonic()
            return True
        seen.counted = True
        if self.reuse is not None and self.reuse[0] is script:
            self.end(rst=self.reuse[1] == "reset")
            return False
        self.reuse = (script, answer["reuse"]) if "reuse" in answer else None
        self._upstream.fresh += 1
        names = script.answer_names(seen, self._upstream.fresh)
        task = asyncio.create_task(self._play(answer, seen, script, names.fill))
        script.running.add(task)
        watcher = asyncio.create_task(self._watch(task))
        try:
            await task
        except asyncio.CancelledError:
            return False
        finally:
            watcher.cancel()
            script.running.discard(task)
            if seen.answered_at is None and self.gone_at is not None:
                seen.closed_at = self.gone_at
        return seen.answered_at is not None and self.gone_at is None and not self._closing()

    def _closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    async def _watch(self, task: asyncio.Task[None]) -> None:
        while self.gone_at is None:
            await self._more()
        task.cancel()

    # --- answers ---

    async def _write(self, data: bytes) -> None:
        if data and self.transport is not None and self.gone_at is None:
            self.transport.write(data)
            await self._writable.wait()

    async def _play(
        self, answer: Mapping[str, Any], seen: Seen, script: Script, fill: items.Fill
    ) -> None:
        if "before_head" in answer:
            await self._before_head(answer["before_head"])
            return
        await asyncio.sleep(float(answer.get("delay", 0)))
        steps = items.steps(answer.get("chunks", []), fill)
        script.sent = b"".join(step.data for step in steps)
        framing = answer.get("framing", "length")
        seen.told_at = time.monotonic()
        if framing != "raw":
            await self._write(self._head(answer, steps, framing, fill))
        for number, step in enumerate(steps):
            wait = (
                step.wait if step.wait is not None else float(answer.get("gap", GAP)) * bool(number)
            )
            if wait:
                await asyncio.sleep(wait)
            if step.data:
                chunked = framing == "chunked"
                await self._write(
                    b"%x\r\n%b\r\n" % (len(step.data), step.data) if chunked else step.data
                )
                seen.writes += 1
        await self._finish(answer, seen, framing)

    async def _before_head(self, word: str) -> None:
        if word == "hold":
            await asyncio.Event().wait()
        self.end(rst=word == "reset")

    def _head(
        self, answer: Mapping[str, Any], steps: list[items.Step], framing: str, fill: items.Fill
    ) -> bytes:
        status = int(answer.get("status", 200))
        try:
            reason = answer.get("reason", HTTPStatus(status).phrase)
        except ValueError:
            reason = "Overloaded"
        lines = [f"HTTP/1.1 {status} {reason}"]
        lines += [f"{name}: {fill(str(value))}" for name, value in answer.get("headers", [])]
        if framing == "chunked":
            lines.append("transfer-encoding: chunked")
        elif framing == "close":
            lines.append("connection: close")
        elif status not in (204, 304):
            length = answer.get("claim_length", sum(len(step.data) for step in steps))
            lines.append(f"content-length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8")

    async def _finish(self, answer: Mapping[str, Any], seen: Seen, framing: str) -> None:
        end, delay = answer.get("end", "clean"), float(answer.get("end_delay", 0))
        if end == "hold":
            await asyncio.Event().wait()
        if end in ("clean", "close"):
            if end == "clean":
                await asyncio.sleep(delay)
            if framing == "chunked":
                await self._write(b"0\r\n\r\n")
            seen.answered_at = time.monotonic()
            if end == "close":
                await asyncio.sleep(delay)
                self.end()
            elif framing in ("close", "raw"):
                self.end()
            return
        await asyncio.sleep(delay)
        seen.answered_at = time.monotonic()
        self.end(rst=end == "reset")


@contextlib.asynccontextmanager
async def playing(upstream: Upstream, script: Script) -> Any:
    """The script is played within; its running answers end with it."""
    upstream.add(script)
    try:
        yield script
    finally:
        await upstream.remove(script)
