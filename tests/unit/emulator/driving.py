"""Runs the emulator in process: a clock that jumps, and one ASGI exchange at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.clock import Timer
from gateway.emulator.app import Emulator, emulator
from gateway.emulator.config import Answers, EmulatorConfig, Pacing
from gateway.units import MICRO, Micros

START = 1_790_000_000 * MICRO
PLAIN = EmulatorConfig(pacing=Pacing(), answers=Answers(tool_probability=0.0))


class JumpClock:
    """Sleeping moves the time at once."""

    def __init__(self, now: Micros = START) -> None:
        self.time = now
        self.slept: list[float] = []

    def now(self) -> Micros:
        return self.time

    def wall(self) -> float:
        return self.time / MICRO

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += round(seconds * MICRO)

    def after(self, delay: Micros, callback: Callable[[], None]) -> Timer:
        raise AssertionError("the emulator arms no timers")

    alarm = after


@dataclass
class Got:
    """An answer."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    writes: int = 0
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def events(self) -> list[Any]:
        data = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line) for line in data]


class Driver:
    """An emulator and its clock."""

    def __init__(self, config: EmulatorConfig = PLAIN, **more: Any) -> None:
        self.clock = JumpClock()
        self.app: Emulator = emulator(config, self.clock, **more)

    def call(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        query: bytes = b"",
    ) -> Got:
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        pairs = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
        if path.startswith("/v1/messages") and headers is None:
            pairs = [(b"anthropic-version", b"2023-06-01")]
        got = Got()

        async def receive() -> dict[str, Any]:
            if got.complete:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                got.status = message["status"]
                got.headers = [(k.decode(), v.decode()) for k, v in message["headers"]]
            else:
                got.body += message["body"]
                got.writes += 1
                got.complete = not message["more_body"]

        scope = {
            "type": "http", "method": method, "path": path, "query_string": query,
            "headers": pairs,
        }  # fmt: skip
        # Nothing in here ever suspends: the clock jumps, and both ends answer at once.
        exchange = self.app(scope, receive, send)
        try:
            exchange.send(None)
        except StopIteration:
            return got
        raise AssertionError("the emulator waited for something that is not its clock")

    def chat(self, text: str = "hello", **more: Any) -> Got:
        headers = more.pop("headers", None)
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        return self.call("/v1/chat/completions", body, headers=headers)

    def messages(self, text: str = "hello", **more: Any) -> Got:
        headers = more.pop("headers", None)
        body = {
            "model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 100, **more
        }  # fmt: skip
        return self.call("/v1/messages", body, headers=headers)
