"""A real MCP server of others, `mcp-server-time`, behind HTTP: it speaks on pipes only.

Installed once into the cache of `agents.py`. The bridge knows nothing of tools: each message goes
to the server's pipe as it came, and the answer with its id comes back.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.acceptance.agents import NotInstalled, cache

SERVER = "mcp-server-time==2026.10.19"
LIMIT = 300.0


def install() -> Path:
    """The folder with the server.

    Raises:
        NotInstalled: No index, or it does not install.
    """
    target = cache() / "mcp_time"
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / SERVER).exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
            done = subprocess.run(
                [*command, SERVER], capture_output=True, text=True, check=False, timeout=LIMIT
            )
            if done.returncode:
                raise NotInstalled(f"{SERVER}: {done.stderr[-500:]}")
            (target / SERVER).touch()
    return target


class TimeServer:
    """The server on its pipes, one bridge in front.

    Attributes:
        port: Of the bridge.
        asked: Every tools/call it was given, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.asked: list[dict[str, Any]] = []
        self._turn = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"],
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        bridge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                answer = bridge.say(json.loads(self.rfile.read(size)))
                body = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(202 if answer is None else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.send_header("mcp-session-id", "the-only-one")
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self._empty(405)

            def do_DELETE(self) -> None:
                self._empty(200)

            def _empty(self, status: int) -> None:
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def say(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """The answer with the message's id; None for a notification."""
        with self._turn:
            if message.get("method") == "tools/call":
                self.asked.append(message)
            pipe_in, pipe_out = self._process.stdin, self._process.stdout
            assert pipe_in is not None
            assert pipe_out is not None
            pipe_in.write(json.dumps(message).encode() + b"\n")
            pipe_in.flush()
            if "id" not in message:
                return None
            while line := pipe_out.readline():
                answer = json.loads(line)
                if answer.get("id") == message["id"]:
                    return dict(answer)
            raise AssertionError("the server ended")

    def stop(self) -> None:
        """Both have ended."""
        self._http.shutdown()
        self._http.server_close()
        self._process.kill()
        self._process.wait()
        self._thread.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
