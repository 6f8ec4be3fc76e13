"""Agents of three kinds in both dialects, for locust: `make load`.

    locust -f loadtests/locustfile.py,loadtests/shapes.py --headless --html report.html
    TIDEGATE_LOAD_KEY=tg_… locust -f … --headless --host https://gateway.staging --i-own-this-host

Without `--host` an emulator and a gateway in front of it are started for the run and stopped after
it. With one, agents call that gateway with the key in TIDEGATE_LOAD_KEY and ask for their tier by
header; a host that is not this machine is refused unless `--i-own-this-host` says that a surge will
not be somebody else's outage (docs/howto/load-test.md).

    Interactive   tier 1, Chat Completions, streamed: somebody waits
    Workflow      tier 2, Messages, plain and streamed in turn, with a growing history
    Background    tier 3, Responses and Chat Completions, plain: nobody waits
    SlowReader    tier 2, Chat Completions, streamed and read slowly; only in the shape `slow`
    ToolAgent     tier 2, MCP tools/call, in a session or stateless; elsewhere only with `--tools`

Beside locust's own figures the report has: FIRST TOKEN (from asking to the first event), QUEUE (the
gateway's `tidegate-queue-ms`), and LEDGER: refusals for quota in the emulator's own books. Answers
are checked: a refusal is a failure unless it is one of ours and says when to come back; then the
agent waits as told. Locust is for looking: its own CPU is far above the gateway's, so figures that
count come from the other programs here.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import random
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import gevent
from gevent import subprocess
from locust import FastHttpUser, between, events, task
from locust.stats import CSV_STATS_INTERVAL_SEC

from loadtests import blackfriday, emulated, measure
from loadtests.shapes import HERD_EVERY, SHAPES, until_next

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = os.environ.get("TIDEGATE_LOAD_KEY", "")
PROMPTS = blackfriday.Prompts(1)
LONGEST_HISTORY = 6
"""Turns after which a workflow begins anew."""

AT_ONCE = 2048
SLOW_PAUSE = 0.25
"""Bytes that a reader takes at once, and seconds that a slow one rests between."""

STATELESS, SESSIONS = "2026-07-28", "2025-11-25"
"""Versions of the protocol that tool agents speak."""

POLICY = """version: 1
providers:
  emulator:
    kind: other
    base_url: ${ORIGIN_URL}
    dialects: [openai, anthropic]
    headers: openai
    stream_options: true
    keys: [{id: main, value: "${ORIGIN_KEY}"}]
pools:
  quota:
    provider: emulator
    limits: {rpm: 10_000, tpm: 2M}
    shape: window_60s
    accounting: realtime
models:
  gpt-4o: {provider: emulator, pool: quota}
  claude-sonnet-4-6: {provider: emulator, pool: quota}
servers:
  echo:
    url: ${TOOLS_URL}
    limits: {rpm: 6_000, concurrency: 50}
tiers:
  interactive: {number: 1, max_wait: 170s}
  standard: {number: 2, max_wait: 170s}
  batch: {number: 3, max_wait: 170s}
fairness: agent
agents:
  load: {keys: [{pattern: "load-*"}], tier_cap: interactive, loopback_only: true}
"""

STAND = (
    "import asyncio; from loadtests import blackfriday, emulated, locustfile; "
    "asyncio.run(emulated.stand(blackfriday.Load().emulator, locustfile.POLICY))"
)


def loopback(host: str) -> bool:
    """Whether that URL is this very machine."""
    name = urlsplit(host if "//" in host else f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Ground:
    """The emulator and the gateway of a run, if nobody named one: a process of their own."""

    def __init__(self) -> None:
        self._process: Any = None
        self.emulator = ""

    def start(self) -> str:
        """The gateway's URL."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", STAND], cwd=measure.ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        urls = self._process.stdout.readline().decode().split()
        if len(urls) != 2:
            raise SystemExit("emulator and gateway did not start; see the messages above")
        self.emulator = urls[1]
        return str(urls[0])

    def stop(self) -> None:
        """Both are gone: the process ends with its standard input."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(30)
            self._process = None


GROUND = Ground()


@events.init_command_line_parser.add_listener
def options(parser: Any) -> None:
    """What this file adds to locust's command line."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="surge", env_var="TIDEGATE_LOAD_SHAPE",
        help="how many agents call at which time",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=0, help="end the shape after so long (default: its own)"
    )
    parser.add_argument(
        "--i-own-this-host", action="store_true", default=False,
        help="the host is not this machine, and you may overload it",
    )  # fmt: skip
    parser.add_argument(
        "--tools", default="", metavar="PATH",
        help="mount of an MCP server at --host (/mcp/NAME) with a tool named `echo` that agents "
        "may call; without it nobody calls tools there",
    )  # fmt: skip
    parser.add_argument(
        "--ledger", default="", help="URL of the emulator behind --host, for its books"
    )


@events.init.add_listener
def prepare(environment: Any, **_: Any) -> None:
    """Refuse what may not be loaded, start what is missing."""
    said = environment.parsed_options
    if environment.host and not loopback(environment.host) and not said.i_own_this_host:
        print(
            f"{environment.host} is not this machine. Whoever loads a host must be allowed to "
            "break it: say --i-own-this-host if you are. Nothing was sent.",
            file=sys.stderr,
        )
        sys.stderr.flush()
        os._exit(2)
    if not environment.host:
        environment.host = GROUND.start()
        said.tools = said.tools or "/mcp/echo"
        measure.say(f"a gateway of our own at {environment.host}")


@events.test_stop.add_listener
def read_ledger(environment: Any, **_: Any) -> None:
    """The provider's refusals, as its own books say, stand in the report."""
    url = environment.parsed_options.ledger or GROUND.emulator
    if not url:
        return
    with urllib.request.urlopen(f"{url}/emulator/ledger", timeout=10) as answer:
        refused = json.load(answer)["refused"]
    count = sum(number for kind, number in refused.items() if kind in emulated.QUOTA_KINDS)
    entry = environment.stats.get("provider 429 for quota", "LEDGER")
    entry.num_requests += count
    entry.num_failures += count
    measure.say(f"provider 429 for quota, by the emulator's ledger: {count}")
    if environment.parsed_options.csv_prefix:
        # its files are written once a second, and what comes between the last time and the end is
        # in none of them
        gevent.sleep(CSV_STATS_INTERVAL_SEC + 0.5)


@events.quitting.add_listener
def clear(**_: Any) -> None:
    """Stop what was started."""
    GROUND.stop()


class Agent(FastHttpUser):
    """One agent; the subclasses say which tier and dialect it is of."""

    abstract = True
    tier = 2
    wait_time = between(0.3, 1.5)
    connection_timeout = 10.0
    network_timeout = 200.0
    only_slow: ClassVar[bool] = False
    only_tools: ClassVar[bool] = False

    def on_start(self) -> None:
        """Every agent draws from a stream of its own."""
        self.draw = random.Random(id(self))
        self.key = KEY or f"load-{self.draw.getrandbits(48):012x}-0123"
        self.serial = 0
        self.begun = ""

    def wait(self) -> None:
        """As each kind pauses; a herd waits for its common instant."""
        if self.environment.parsed_options.shape == "herd":
            gevent.sleep(until_next(time.time(), HERD_EVERY))
        else:
            super().wait()

    def prompt(self) -> str:
        """Some text of a heavy-tailed length."""
        self.serial += 1
        body = json.loads(PROMPTS.body(self.draw, self.serial, stream=bool(self.serial % 2)))
        return str(body["messages"][0]["content"])

    def ask(
        self, path: str, body: dict[str, Any], *, end: bytes = b"",
        more: dict[str, str] | None = None, name: str = "",
    ) -> bytes:  # fmt: skip
        """Call, read to the end, check; the answer's bytes, b"" if it was no good one.

        Args:
            path: Of the dialect.
            body: The request.
            end: What a complete stream holds; b"" for a plain answer.
            more: Further headers.
            name: In the report, in place of the path and the kind of answer.
        """
        headers = {
            "authorization": f"Bearer {self.key}",
            "content-type": "application/json",
            "tidegate-tier": str(self.tier),
            "anthropic-version": "2023-06-01",
            **(more or {}),
        }
        kind = "stream" if end else "plain"
        name = f"tier {self.tier} {name or f'{path} {kind}'}"
        began = time.perf_counter()
        with self.client.post(
            path, data=json.dumps(body), headers=headers, name=name, catch_response=True,
            stream=bool(end),
        ) as answer:  # fmt: skip
            content = self.read(answer, name, began) if end else (answer.content or b"")
            queued = answer.headers.get("tidegate-queue-ms") if answer.headers else None
            if queued is not None:
                self.told("QUEUE", f"tier {self.tier}", float(queued))
            if answer.status_code in (200, 202):
                self.begun = answer.headers.get("mcp-session-id", "")
                if end and end not in content:
                    answer.failure("a stream without its end")
                    return b""
                answer.success()
                return content
            told = answer.headers.get("retry-after") if answer.headers else None
            if answer.status_code == 429 and told and answer.headers.get("tidegate-call-id"):
                answer.success()
                gevent.sleep(float(told))
            else:
                answer.failure(f"status {answer.status_code}")
            return b""

    def read(self, answer: Any, name: str, began: float) -> bytes:
        """A stream to its end; tells when its first data came."""
        if answer.status_code != 200 or answer.stream is None:
            return b""
        parts: list[bytes] = []
        seen = False
        while chunk := self.take(answer):
            parts.append(chunk)
            # Comments keep a waiting stream alive; they are no token.
            if not seen and b"data:" in b"".join(parts):
                seen = True
                self.told("FIRST TOKEN", name, (time.perf_counter() - began) * 1000)
        return b"".join(parts)

    def take(self, answer: Any) -> bytes:
        """What comes next of a stream; b"" at its end."""
        return bytes(answer.stream.read(AT_ONCE))

    def told(self, kind: str, name: str, millis: float) -> None:
        """A figure of ours stands in the report."""
        events.request.fire(
            request_type=kind, name=name, response_time=millis, response_length=0,
            exception=None, context={},
        )  # fmt: skip


class Interactive(Agent):
    """People wait for these."""

    weight = 1
    tier = 1

    @task
    def chat(self) -> None:
        """A streamed answer."""
        messages = [{"role": "user", "content": self.prompt()}]
        body = {"model": "gpt-4o", "max_tokens": 500, "stream": True, "messages": messages}
        self.ask("/v1/chat/completions", body, end=b"[DONE]")


class Workflow(Agent):
    """Steps of a workflow: each sends the whole history so far."""

    weight = 4
    tier = 2

    def on_start(self) -> None:
        """A history of its own."""
        super().on_start()
        self.history: list[dict[str, str]] = []

    @task
    def step(self) -> None:
        """Plain and streamed in turn."""
        if len(self.history) >= 2 * LONGEST_HISTORY:
            self.history.clear()
        self.history.append({"role": "user", "content": self.prompt()})
        stream = self.serial % 2 == 0
        body = {
            "model": "claude-sonnet-4-6", "max_tokens": 1_000, "stream": stream,
            "messages": self.history,
        }  # fmt: skip
        answer = self.ask("/v1/messages", body, end=b"message_stop" if stream else b"")
        if not answer:
            self.history.pop()
            return
        text = "So be it."
        if not stream:
            parts = json.loads(answer)["content"]
            text = "".join(part.get("text", "") for part in parts) or text
        self.history.append({"role": "assistant", "content": text})


class Background(Agent):
    """Nobody waits for these."""

    weight = 5
    tier = 3

    @task(2)
    def respond(self) -> None:
        """The Responses API."""
        body = {"model": "gpt-4o", "max_output_tokens": 1_500, "input": self.prompt()}
        self.ask("/v1/responses", body)

    @task(2)
    def chat(self) -> None:
        """Chat Completions."""
        messages = [{"role": "user", "content": self.prompt()}]
        self.ask("/v1/chat/completions", {"model": "gpt-4o", "messages": messages})

    @task(1)
    def models(self) -> None:
        """What this key may use."""
        headers = {"authorization": f"Bearer {self.key}"}
        with self.client.get(
            "/v1/models", headers=headers, name="/v1/models", catch_response=True
        ) as answer:
            if answer.status_code != 200:
                answer.failure(f"status {answer.status_code}")


class SlowReader(Agent):
    """Reads its stream like somebody on a train."""

    weight = 6
    only_slow = True

    @task
    def chat(self) -> None:
        """A streamed answer, a little at a time."""
        messages = [{"role": "user", "content": self.prompt()}]
        body = {"model": "gpt-4o", "max_tokens": 800, "stream": True, "messages": messages}
        self.ask("/v1/chat/completions", body, end=b"[DONE]")

    def take(self, answer: Any) -> bytes:
        """A little, and a rest."""
        gevent.sleep(SLOW_PAUSE)
        return super().take(answer)


class ToolAgent(Agent):
    """Calls a tool between its thoughts: every other one in a session, every other one without."""

    weight = 3
    tier = 2
    only_tools = True
    numbers: ClassVar[Iterator[int]] = itertools.count()
    accepts: ClassVar[dict[str, str]] = {"accept": "application/json, text/event-stream"}

    def on_start(self) -> None:
        """Every other client is of the older era."""
        super().on_start()
        self.mount = self.environment.parsed_options.tools
        self.older = next(self.numbers) % 2 == 0
        self.session: dict[str, str] = {}

    @task
    def call(self) -> None:
        """One tool call; its answer is JSON, or an event where it had to wait."""
        arguments = {"text": f"{self.serial} {self.draw.random()}"}
        params: dict[str, Any] = {"name": "echo", "arguments": arguments}
        if self.older:
            if not self.session and not self.begin():
                return
            answer = self.rpc("tools/call", params, self.session, "session")
        else:
            params["_meta"] = {
                "io.modelcontextprotocol/protocolVersion": STATELESS,
                "io.modelcontextprotocol/clientCapabilities": {},
            }
            headers = {
                "mcp-protocol-version": STATELESS, "mcp-method": "tools/call", "mcp-name": "echo",
            }  # fmt: skip
            answer = self.rpc("tools/call", params, headers, "stateless")
        if answer and b'"result"' not in answer:
            self.session = {}
            events.request.fire(
                request_type="TOOL", name="tools/call without a result", response_time=0,
                response_length=len(answer), exception=RuntimeError(answer[:200]), context={},
            )  # fmt: skip

    def begin(self) -> bool:
        """The handshake of the older era; whether there is a session."""
        client = {"name": "locust", "version": "1"}
        params = {"protocolVersion": SESSIONS, "capabilities": {}, "clientInfo": client}
        self.rpc("initialize", params, {}, "session")
        name = self.begun
        if not name:
            return False
        self.session = {"mcp-session-id": name, "mcp-protocol-version": SESSIONS}
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        self.ask(self.mount, note, more=self.accepts | self.session, name="MCP initialized")
        return True

    def rpc(self, method: str, params: dict[str, Any], more: dict[str, str], era: str) -> bytes:
        """One request; the answer's bytes."""
        self.serial += 1
        body = {"jsonrpc": "2.0", "id": self.serial, "method": method, "params": params}
        return self.ask(self.mount, body, more=self.accepts | more, name=f"MCP {method} {era}")

    def on_stop(self) -> None:
        """A session ends with its agent."""
        if self.session:
            headers = {"authorization": f"Bearer {self.key}", **self.session}
            self.client.delete(self.mount, headers=headers, name="MCP delete session")
