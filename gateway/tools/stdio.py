"""Servers that speak over pipes: one process group each, its messages shared among callers.

Answers look like those of HTTP, so that whoever sends need not know which it was: a response that
comes first is a JSON body, notifications before it make a stream. A process that was started anew
is another session: a message for the one before is answered 404, and its sender begins again.

The law of a child: its arguments come from policy alone and meet no shell; it gets three variables
of ours and those that policy names; it is bounded in memory, files and time; what it prints besides
messages is counted and dropped; standard error goes to the log, line by line, bounded. It is never
restarted in a rush: decorrelated jitter between starts, `MOST_STARTS` a minute, then none for a
while. It ends by closing its input, then SIGTERM, then SIGKILL, to the whole group.
Source: `protocols.md` §5.8.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from gateway.bodies import read_answer
from gateway.clock import Expiry
from gateway.errors import BreakerOpen, UpstreamTimeout, UpstreamUnreachable
from gateway.units import MICRO
from gateway.upstream import TransportFault, pass_on
from gateway.wire import mcp, sse
from gateway.wire.mcp_bridge import inside, under_id, with_meta

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

    from gateway.call import HeaderList
    from gateway.clock import Clock
    from gateway.snapshot import Server
    from gateway.tools.remote import Ask, Remote
    from gateway.units import Micros, Rng
    from gateway.upstream import Incoming, Take

    Spawn = Callable[[Coroutine[Any, Any, None]], object]

SUBSCRIBE = "subscriptions/listen"
OURS = ("PATH", "HOME", "LANG")
"""Variables of ours that a command gets."""
MOST_STARTS = 5
MINUTE: Micros = 60 * MICRO
FIRST_PAUSE: Micros = MICRO // 5
LONGEST_PAUSE: Micros = 10 * MICRO
"""Starts in a minute, and bounds of the pause between two."""
MOST_WAITING = 1_000
"""Requests of one process under way; its pipe has no other back pressure."""
MOST_HELD = 1_000
"""Messages of one request that nobody has read yet; beyond it they are dropped."""
STDERR_LINE = 2_048
STDERR_KEPT = 50
"""Bytes of a line of standard error, and lines, that are kept for the log."""
STOPPING = ((signal.SIGTERM, 5 * MICRO), (signal.SIGKILL, 2 * MICRO))
"""What follows closing a child's input, and after how long."""
JSON: HeaderList = [(b"content-type", b"application/json")]
SSE: HeaderList = [(b"content-type", b"text/event-stream")]


@dataclass(slots=True)
class Waiting:
    """One request under way.

    Attributes:
        ident: The id under which it was asked, as JSON text.
        token: Its progress token, as JSON text; b"" where it has none.
        stands: It is a subscription: answered by notifications that name it, for as long as it is
            wanted.
        messages: What has come for it; None at the end: the process is gone.
    """

    ident: bytes
    token: bytes
    stands: bool = False
    messages: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    answered: bool = False


class Child:
    """One running process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        generation: int,
        on_notice: Callable[[object], None] | None = None,
    ) -> None:
        """Listen. `on_notice` is called with the method of each notification."""
        self._on_notice = on_notice
        self.process = process
        self.generation = generation
        self.waiting: dict[int, Waiting] = {}
        self.noise = 0
        self.stderr: deque[str] = deque(maxlen=STDERR_KEPT)
        self._serial = 0

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.returncode is None

    def write(self, raw: bytes) -> None:
        """One message is on its way to the child; line ends inside are white space."""
        assert self.process.stdin is not None  # noqa: S101 - it was made with a pipe
        self.process.stdin.write(raw.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")

    def ask(self, raw: bytes, parsed: Mapping[str, Any]) -> tuple[int, Waiting]:
        """The request is on its way under a number of its own."""
        self._serial += 1
        number = self._serial
        token = b""
        params = parsed.get("params")
        meta = params.get("_meta") if isinstance(params, dict) else None
        if isinstance(meta, dict) and "progressToken" in meta:
            token = orjson.dumps(meta["progressToken"])
            raw = with_meta(raw, {"progressToken": b"%d" % number})
        stands = parsed["method"] == SUBSCRIBE
        waiting = self.waiting[number] = Waiting(mcp.id_of(parsed, raw), token, stands)
        self.write(under_id(raw, b"%d" % number))
        return number, waiting

    def heard(self, raw: bytes) -> None:
        """One line of the child reaches whom it is for."""
        try:
            parsed = read_answer(raw)
        except ValueError:
            self.noise += 1
            return
        if not isinstance(parsed, dict):
            self.noise += 1
        elif "method" not in parsed:
            self._response(parsed, raw)
        elif "id" in parsed:
            self._asked(parsed, raw)
        else:
            self._notification(parsed, raw)

    def _response(self, parsed: dict[str, Any], raw: bytes) -> None:
        number = parsed.get("id")
        waiting = self.waiting.pop(number, None) if isinstance(number, int) else None
        if waiting is not None:
            waiting.answered = True
            waiting.messages.put_nowait(under_id(raw, waiting.ident))

    def _asked(self, parsed: dict[str, Any], raw: bytes) -> None:
        """The child asks its client: we declared that nobody answers anything but a ping."""
        ident = orjson.Fragment(mcp.id_of(parsed, raw) or b"null")
        said: dict[str, Any] = {"jsonrpc": "2.0", "id": ident}
        if parsed["method"] == "ping":
            said["result"] = {}
        else:
            said["error"] = {"code": mcp.METHOD_NOT_FOUND, "message": "Not served by Tidegate"}
        self.write(orjson.dumps(said))

    def _notification(self, parsed: dict[str, Any], raw: bytes) -> None:
        """For the request whose progress it tells, the subscription it names, or the only one."""
        if self._on_notice is not None:
            self._on_notice(parsed["method"])
        params = parsed.get("params")
        if parsed["method"] == "notifications/progress" and isinstance(params, dict):
            number = params.get("progressToken")
            waiting = self.waiting.get(number) if isinstance(number, int) else None
            if waiting is not None and waiting.token and waiting.messages.qsize() < MOST_HELD:
                raw = inside(raw, "params", "progressToken", waiting.token)
                waiting.messages.put_nowait(raw)
            return
        meta = params.get("_meta") if isinstance(params, dict) else None
        named = meta.get(mcp.META_SUBSCRIPTION) if isinstance(meta, dict) else None
        if named is not None:
            one = self.waiting.get(named) if isinstance(named, int) else None
            chosen = [one] if one is not None and one.stands else []
        else:
            chosen = [one for one in self.waiting.values() if not one.stands]
        if len(chosen) == 1 and chosen[0].messages.qsize() < MOST_HELD:
            chosen[0].messages.put_nowait(raw)

    def drop(self, number: int) -> None:
        """Nobody waits for this answer any more; the child is told."""
        if self.waiting.pop(number, None) is not None and self.alive:
            params = {"requestId": number, "reason": "nobody waits any more"}
            note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            self.write(orjson.dumps(note))

    def gone(self) -> None:
        """It has ended: whoever waits is told."""
        for waiting in self.waiting.values():
            waiting.messages.put_nowait(None)
        self.waiting.clear()

    def signal(self, number: signal.Signals) -> None:
        """The whole group gets this signal."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class Piped:
    """An answer out of a pipe, in the shape of one over HTTP."""

    def __init__(self, status: int, headers: HeaderList, first: list[bytes]) -> None:
        self.status = status
        self.headers = headers
        self._first = first
        self.child: Child | None = None
        self.number = 0
        self.waiting: Waiting | None = None
        self._broken = ""
        self._said: AsyncIterator[bytes] | None = None

    @property
    def whole(self) -> bool:
        """Whether reading waits for nothing."""
        return self.waiting is None or (self.waiting.answered and self.status == 200)

    def at_once(self) -> bytes | None:
        """The one message of an answer that is refused or known; else it is asked for."""
        if self.waiting is not None or self._broken:
            return None
        body = b"".join(self._first)
        self._first = []
        return body

    async def chunks(self) -> AsyncIterator[bytes]:
        """The messages: one JSON body, or events."""
        for raw in self._first:
            yield raw
        waiting = self.waiting
        while waiting is not None and not self._broken:
            said = await waiting.messages.get()
            if said is None:
                raise TransportFault(self._broken or "cut", sent="all")
            yield sse.frame(said)
            if waiting.answered and waiting.messages.empty():
                return
        if self._broken:
            raise TransportFault(self._broken, sent="all")

    async def pass_to(self, take: Take) -> bool:
        """As `chunks`."""
        self._said = self._said or self.chunks()
        return await pass_on(self._said, take)

    def abort(self, kind: str) -> None:
        """Nobody reads further."""
        self._broken = kind
        if self.waiting is not None:
            self.waiting.messages.put_nowait(None)

    async def close(self, *, reuse: bool) -> None:  # noqa: ARG002 - there is no connection
        """The child does not work for nobody."""
        if self.child is not None and self.waiting is not None and not self.waiting.answered:
            self.child.drop(self.number)


@dataclass(slots=True)
class Kept:
    """What is known of a server's processes beyond the running one."""

    server: Server
    child: Child | None = None
    starting: asyncio.Future[None] | None = None
    generation: int = 0
    starts: deque[Micros] = field(default_factory=deque)
    pause: Micros = 0
    next_start: Micros = 0


class Pipes:
    """Starts the commands of policy and speaks with them.

    Args:
        environment: Of this process; a child gets `OURS` of it.
        spawn: How a task gets an owner; set before the first message.
        on_line: Called with server and line for each line of standard error.

    Attributes:
        on_notice: Called with server and method of each notification, whoever it is for.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Rng,
        environment: Mapping[str, str],
        *,
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._environment = environment
        self._kept: dict[str, Kept] = {}
        self.spawn: Spawn | None = None
        self.on_line = on_line
        self.on_notice: Callable[[str, object], None] | None = None

    def running(self) -> dict[str, int]:
        """Process ids by server."""
        return {
            name: kept.child.process.pid
            for name, kept in self._kept.items()
            if kept.child is not None and kept.child.alive
        }

    async def send(self, server: Server, ask: Ask) -> Incoming:
        """The answer's head: with its body where that came first.

        Raises:
            UpstreamFault: The command cannot be started, has ended, or is silent too long.
        """
        if ask.method != "POST":
            return Piped(405, [], [])
        kept = self._kept.setdefault(server.name, Kept(server))
        kept.server = server
        child = await self._child(kept)
        parsed = read_answer(ask.body)
        theirs = mcp.header_text(ask.headers, mcp.H_SESSION)
        if theirs and theirs != str(child.generation):
            return Piped(404, [], [])
        method = parsed.get("method")
        if "id" not in parsed or method is None:
            if method != "notifications/cancelled":  # `Piped.close` tells it by its own number
                child.write(ask.body)
            return Piped(202, [], [])
        if len(child.waiting) >= MOST_WAITING:
            raise BreakerOpen(
                f"{MOST_WAITING} calls of the tool server {server.name} are under way already.",
                retry_after=MICRO,
            )
        ask.sent = True
        limit = ask.first_byte or server.provider.timeouts.first_byte
        return await self._head(server, child, ask.body, parsed, limit)

    async def _head(
        self, server: Server, child: Child, body: bytes, parsed: dict[str, Any], limit: Micros
    ) -> Piped:
        number, waiting = child.ask(body, parsed)
        try:
            with Expiry(self._clock, limit):
                first = await waiting.messages.get()
        except TimeoutError as error:
            child.drop(number)
            text = f"The tool server {server.name} said nothing within {limit / MICRO:g} s."
            raise UpstreamTimeout(text, code="first_byte_timeout") from error
        except BaseException:
            child.drop(number)
            raise
        if first is None:
            raise UpstreamUnreachable(
                f"The command of the tool server {server.name} ended before it answered.",
                code="command_ended",
            )
        session = [(mcp.H_SESSION, b"%d" % child.generation)]
        if waiting.answered and waiting.messages.empty():
            more = session if parsed["method"] == "initialize" else []
            return Piped(200, JSON + more, [first])
        piped = Piped(200, list(SSE), [sse.frame(first)])
        piped.child, piped.number, piped.waiting = child, number, waiting
        return piped

    # --- processes -------------------------------------------------------------------------------

    async def _child(self, kept: Kept) -> Child:
        """The running process, started if there is none."""
        while kept.child is None or not kept.child.alive:
            if kept.starting is None:
                return await self._start(kept)
            await asyncio.wait((kept.starting,))
        return kept.child

    async def _start(self, kept: Kept) -> Child:
        starting = kept.starting = asyncio.get_running_loop().create_future()
        try:
            wait = self._patience(kept)
            if wait > MICRO:
                raise BreakerOpen(
                    f"The command of the tool server {kept.server.name} ends again and again; it "
                    f"is started anew in {-(-wait // MICRO)} s.",
                    because=kept.server.because,
                    retry_after=wait,
                )
            if wait > 0:
                await self._clock.sleep(wait / MICRO)
            child = kept.child = await self._spawned(kept)
            return child
        finally:
            kept.starting = None
            starting.set_result(None)

    def _patience(self, kept: Kept) -> Micros:
        """How long until the command may be started again."""
        now = self._clock.now()
        while kept.starts and kept.starts[0] <= now - MINUTE:
            kept.starts.popleft()
        if len(kept.starts) >= MOST_STARTS:
            return kept.starts[0] + MINUTE - now
        return max(0, kept.next_start - now)

    async def _spawned(self, kept: Kept) -> Child:
        server = kept.server
        env = {name: value for name in OURS if (value := self._environment.get(name))}
        env.update({name: value.reveal() for name, value in server.env})
        now = self._clock.now()
        kept.starts.append(now)
        least = FIRST_PAUSE
        most = max(least, kept.pause * 3)
        kept.pause = min(LONGEST_PAUSE, round(self._rng.uniform(least, most)))
        try:
            process = await asyncio.create_subprocess_exec(
                *server.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=env,
                cwd=server.cwd or None,
                start_new_session=True,
                limit=server.max_result,
            )
        except (OSError, ValueError) as error:
            kept.next_start = now + kept.pause
            why = error.strerror if isinstance(error, OSError) else "an unusable argument"
            raise UpstreamUnreachable(
                f"The command of the tool server {server.name} cannot be started: {why}.",
                because=f"{server.because}.command",
                code="connect_failed",
            ) from error
        kept.generation += 1
        child = Child(process, kept.generation, lambda method: self._noticed(server.name, method))
        self._bound(server, process.pid)
        assert self.spawn is not None  # noqa: S101 - set before the first message
        self.spawn(self._listen(kept, child))
        self.spawn(self._read_errors(server.name, child))
        return child

    def _noticed(self, server: str, method: object) -> None:
        if self.on_notice is not None:
            self.on_notice(server, method)

    def _bound(self, server: Server, pid: int) -> None:
        """The process may use no more than policy allows; its own children inherit it."""
        child = server.child
        limits = [
            (resource.RLIMIT_AS, child.memory),
            (resource.RLIMIT_NOFILE, child.open_files),
            (resource.RLIMIT_CORE, 0),
        ]
        if child.cpu:
            limits.append((resource.RLIMIT_CPU, -(-child.cpu // MICRO)))
        for what, most in limits:
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                resource.prlimit(pid, what, (most, most))

    async def _listen(self, kept: Kept, child: Child) -> None:
        """Every line of the child is heard, until it ends."""
        stdout = child.process.stdout
        assert stdout is not None  # noqa: S101 - it was made with a pipe
        try:
            while line := await stdout.readline():
                if line.strip():
                    child.heard(line.strip())
        except (ValueError, OSError):
            self._say(kept.server.name, "a line was longer than max_result; the command is ended")
            child.signal(signal.SIGKILL)
        status = await child.process.wait()
        child.gone()
        kept.next_start = self._clock.now() + kept.pause
        self._say(kept.server.name, f"the command ended with status {status}")

    async def _read_errors(self, server: str, child: Child) -> None:
        stderr = child.process.stderr
        assert stderr is not None  # noqa: S101 - it was made with a pipe
        while True:
            try:
                line = await stderr.readline()
            except ValueError:
                continue  # longer than the reader's bound: it was thrown away
            if not line:
                return
            text = line[:STDERR_LINE].decode("utf-8", "replace").rstrip()
            child.stderr.append(text)
            self._say(server, text)

    def _say(self, server: str, text: str) -> None:
        if self.on_line is not None:
            self.on_line(server, text)

    # --- ends ------------------------------------------------------------------------------------

    async def keep(self, servers: Mapping[str, Server]) -> None:
        """Commands that policy names no more, or names otherwise, are ended."""
        for name, kept in list(self._kept.items()):
            new = servers.get(name)
            if new is None or (new.command, new.env, new.cwd) != (
                kept.server.command, kept.server.env, kept.server.cwd,
            ):  # fmt: skip
                del self._kept[name]
                if kept.child is not None:
                    await self._end(kept.child)

    async def close(self) -> None:
        """Every command has ended."""
        children = [kept.child for kept in self._kept.values() if kept.child is not None]
        self._kept.clear()
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(self._end(child))

    async def _end(self, child: Child) -> None:
        """Its input is closed; what does not end then is made to."""
        if child.process.stdin is not None:
            child.process.stdin.close()
        for number, grace in STOPPING:
            with contextlib.suppress(TimeoutError), Expiry(self._clock, grace):
                await child.process.wait()
            if not child.alive:
                break
            child.signal(number)
        await child.process.wait()
        child.signal(signal.SIGKILL)  # whatever it left behind in its group


class Senders:
    """Sends over HTTP or into pipes, as the server is reached."""

    __slots__ = ("pipes", "remote")

    def __init__(self, remote: Remote, pipes: Pipes) -> None:
        self.remote = remote
        self.pipes = pipes

    def send(self, server: Server, ask: Ask) -> Coroutine[Any, Any, Incoming]:
        """The head of the answer; raises UpstreamFault."""
        return self.pipes.send(server, ask) if server.command else self.remote.send(server, ask)
