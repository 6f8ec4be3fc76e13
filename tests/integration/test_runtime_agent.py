"""An agent in the foreground against a gateway that writes down what it is sent: no call twice.

Needs the worker extra; the JavaScript lines also the interpreter (see test_runtime_moves.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from aiohttp import web

pytest.importorskip("wasmtime")
pytest.importorskip("icpp_binaryen")

from tests.integration.guests import interpreter

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
CALLS = """
const a = agent.llm('one'), b = agent.tool('echo', { x: 1 });
let s = 0; for (let i = 0; i < 300000; i++) s = (s * 31 + i) % 1000003;
const both = agent.all([agent.later.llm('two'), agent.later.tool('none', {})], { settle: true });
agent.emit({ a, b, s, two: both[0].value, none: both[1].error.code, again: agent.get('k') });
"""
SLOW = "agent.put('k', 1); console.log(agent.llm('slow')); agent.emit(agent.llm('after'));"


class Gateway:
    """Answers chat completions and tools, on a thread of its own."""

    def __init__(self, delay: float = 0.0) -> None:
        self.seen: list[tuple[str, dict, dict]] = []
        self.delay = delay
        self.ready = threading.Event()
        self.arrived = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self.port = 0

    def __enter__(self) -> Gateway:
        self.thread.start()
        assert self.ready.wait(60)
        return self

    def __exit__(self, *_error: object) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)

    async def serve(self) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_post("/{path:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self.ready.set()
        await self.stop.wait()
        await runner.cleanup()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.path, headers, body))
        self.arrived.set()
        await asyncio.sleep(self.delay)
        if request.path == "/mcp":
            name = body["params"]["name"]
            if name != "echo":
                problem = {"code": -32602, "message": f"no tool {name}"}
                return web.json_response({"jsonrpc": "2.0", "id": body["id"], "error": problem})
            result = {
                "content": [{"type": "text", "text": json.dumps(body["params"]["arguments"])}]
            }
            return web.json_response({"jsonrpc": "2.0", "id": body["id"], "result": result})
        text = "re: " + body["messages"][-1]["content"]
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response({"model": body["model"], "choices": [choice], "usage": {}})

    @property
    def keys(self) -> list[str]:
        return [headers["idempotency-key"] for _, headers, _ in self.seen]


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    interpreter("quickjs")


def start(*arguments: str, folder: Path, port: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TIDEGATE_STATE_DIR": str(folder / "state"),
        "TIDEGATE_GATEWAY": f"http://127.0.0.1:{port}",
        "TIDEGATE_AGENT_KEY": "tg_secret_key",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "runtime", *arguments, "--json"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pending(pid: int, number: signal.Signals) -> bool:
    """Whether the process was sent that signal and has not taken it yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"^(?:Shd|Sig)Pnd:\s+(\w+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def end(process: subprocess.Popen[str]) -> list[dict]:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines()]


def script(folder: Path, text: str) -> str:
    path = folder / "agent.js"
    path.write_text(text)
    return str(path)


def test_calls_pass_the_gateway_with_identity_keys_and_one_trace(tmp_path):
    with Gateway() as gateway:
        rows = end(start("run", script(tmp_path, CALLS), "--tier", "T1", "--model", "m",
                         folder=tmp_path, port=gateway.port))  # fmt: skip
    (emitted,) = [row["data"] for row in rows if row.get("kind") == "emit"]
    assert emitted["a"] == "re: one"
    assert json.loads(emitted["b"]) == {"x": 1}
    assert (emitted["two"], emitted["none"]) == ("re: two", "unknown_tool")
    assert len(gateway.keys) == len(set(gateway.keys)) == 4
    traces = {headers["traceparent"].split("-")[1] for _, headers, _ in gateway.seen}
    assert len(traces) == 1
    for path, headers, body in gateway.seen:
        assert headers["authorization"] == "Bearer tg_secret_key"
        assert headers["tidegate-tier"] == "1"
        assert headers["session-id"] == rows[-1]["task"]
        assert body["model"] == "m" if path != "/mcp" else headers["mcp-name"] in ("echo", "none")


def test_the_credential_is_in_no_snapshot(tmp_path):
    with Gateway() as gateway:
        out = tmp_path / "a.tgsn"
        end(start("run", script(tmp_path, SLOW), "--suspend-after", "0", "--out", str(out),
                  folder=tmp_path, port=gateway.port))  # fmt: skip
    assert b"tg_secret_key" not in out.read_bytes()


def test_ctrl_c_waits_for_the_call_in_flight_and_the_rest_goes_on_elsewhere(tmp_path):
    out = tmp_path / "a.tgsn"
    with Gateway(delay=1.0) as gateway:
        first = start("run", script(tmp_path, SLOW), "--out", str(out),
                      folder=tmp_path, port=gateway.port)  # fmt: skip
        assert gateway.arrived.wait(120)
        first.send_signal(signal.SIGINT)
        before = end(first)
        assert "suspended" in before[-1]
        assert len(gateway.seen) == 1
        after = end(start("resume", str(out), folder=tmp_path, port=gateway.port))
    rows = before + after
    assert [row["n"] for row in rows if row.get("kind") == "call"] == [0, 1, 2]
    assert len(gateway.keys) == len(set(gateway.keys)) == 2
    assert before[-1]["trace"] == after[-1]["trace"]
    assert "".join(r["data"] for r in rows if r.get("kind") == "stdout") == "re: slow\n"


def test_a_second_ctrl_c_gives_up_and_the_call_is_sent_again_under_its_key(tmp_path):
    out = tmp_path / "a.tgsn"
    with Gateway(delay=20.0) as gateway:
        first = start("run", script(tmp_path, SLOW), "--out", str(out),
                      folder=tmp_path, port=gateway.port)  # fmt: skip
        assert gateway.arrived.wait(120)
        first.send_signal(signal.SIGINT)
        while pending(first.pid, signal.SIGINT):  # the kernel would make one of two
            time.sleep(0.01)
        first.send_signal(signal.SIGINT)
        assert "suspended" in end(first)[-1]
        gateway.delay = 0.0
        end(start("resume", str(out), folder=tmp_path, port=gateway.port))
    assert gateway.keys[0] == gateway.keys[1], "the gateway's ledger can tell"
    assert len(set(gateway.keys)) == 2


def test_a_sleep_goes_on_while_the_agent_is_a_file(tmp_path):
    out = tmp_path / "a.tgsn"
    text = "agent.sleep(7000); console.log('woke'); agent.emit(agent.now());"
    began = time.monotonic()
    rows = end(start("run", script(tmp_path, text), "--suspend-after", "2000", "--out", str(out),
                     folder=tmp_path, port=1))  # fmt: skip
    assert [sorted(row) for row in rows] == [["bytes", "suspended", "task", "trace"]]
    time.sleep(1.0)
    rows = end(start("resume", str(out), folder=tmp_path, port=1))
    assert [row["op"] for row in rows if row.get("kind") == "call"] == ["sleep"]
    assert rows[0]["seconds"] < 6.0, "some of it passed before"
    assert time.monotonic() - began >= 7.0, "and none of it was left out"


def test_many_ctrl_c_cost_no_snapshot(tmp_path):
    out = tmp_path / "a.tgsn"
    with Gateway(delay=20.0) as gateway:
        first = start("run", script(tmp_path, SLOW), "--out", str(out),
                      folder=tmp_path, port=gateway.port)  # fmt: skip
        assert gateway.arrived.wait(120)
        while first.poll() is None:
            first.send_signal(signal.SIGINT)
            time.sleep(0.002)
        assert "suspended" in end(first)[-1]
        gateway.delay = 0.0
        assert end(start("resume", str(out), folder=tmp_path, port=gateway.port))[-1]["ok"]


def test_an_agent_that_writes_on_after_its_output_is_spent_is_ended(tmp_path):
    text = "for (;;) console.log('x'.repeat(10000));"
    process = start("run", script(tmp_path, text), folder=tmp_path, port=1)
    out, _ = process.communicate(timeout=240)
    rows = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 1
    assert rows[-1]["ended"] == (
        "ended by a trap, limit: 16777216 bytes of output are spent, and it went on"
    )
    assert 16e6 < sum(len(row["data"]) for row in rows[:-1]) <= 16 << 20


def test_a_place_that_takes_no_snapshot_is_told_before_the_agent_runs(tmp_path):
    process = start("run", script(tmp_path, "console.log('ran')"), "--out", "/nowhere/a.tgsn",
                    folder=tmp_path, port=1)  # fmt: skip
    out, errors = process.communicate(timeout=240)
    assert (process.returncode, out) == (2, "")
    assert "choose another --out" in errors


def test_a_gateway_that_is_away_is_an_error_the_script_can_catch(tmp_path):
    text = "try { agent.llm('x'); } catch (e) { agent.emit([e.code, e.retryable]); }"
    rows = end(start("run", script(tmp_path, text), folder=tmp_path, port=1))
    assert ["upstream", True] in [row.get("data") for row in rows]


EXAMPLES = ROOT / "runtime/guests/examples"
TICKET = '{"id": 7, "topic": "tides", "text": "it broke", "customer": "c1"}'


@pytest.mark.parametrize("name", ["research.js", "triage.js", "triage.py"])
def test_the_examples_do_what_they_say(tmp_path, name):
    if name.endswith(".py"):
        interpreter("micropython")
    with Gateway() as gateway:
        rows = end(start("run", str(EXAMPLES / name), "--input", TICKET,
                         folder=tmp_path, port=gateway.port))  # fmt: skip
    assert rows[-1]["ok"]
    assert [row for row in rows if row.get("kind") == "emit"]
    assert len(gateway.keys) == len(set(gateway.keys)) >= 2
