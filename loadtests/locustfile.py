"""Agents of three tiers that speak the OpenAI dialect, for locust: `make load`.

    locust -f loadtests/locustfile.py,loadtests/shapes.py --headless --host URL

Without `--host` an emulator and a gateway in front of it are started for the run and stopped after
it. With one, agents call that gateway with the key in TIDEGATE_LOAD_KEY and ask for their tier by
header. Locust is for looking (its own CPU is far above the gateway's): figures that count come from
the other programs here. Answers are checked: a refusal is a failure unless it is one of ours and
says when to come back; then the agent waits as told.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import gevent
from gevent import subprocess
from locust import FastHttpUser, between, events, task

from loadtests import blackfriday, measure

KEY = os.environ.get("TIDEGATE_LOAD_KEY", "")
MODEL = os.environ.get("TIDEGATE_LOAD_MODEL", blackfriday.MODEL)
PROMPTS = blackfriday.Prompts(1)


STAND = (
    "import asyncio; from loadtests import blackfriday, emulated; "
    "asyncio.run(emulated.stand(blackfriday.EMULATOR, blackfriday.POLICY))"
)


class Ground:
    """The emulator and the gateway of a run, if nobody named one: a process of their own."""

    def __init__(self) -> None:
        self._process: Any = None

    def start(self) -> str:
        """The gateway's URL."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", STAND], cwd=measure.ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        url = self._process.stdout.readline().decode().strip()
        if not url:
            raise SystemExit("emulator and gateway did not start; see the messages above")
        return url

    def stop(self) -> None:
        """Both are gone: the process ends with its standard input."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait(30)
            self._process = None


GROUND = Ground()


@events.init.add_listener
def prepare(environment: Any, **_: Any) -> None:
    """Start what is missing."""
    if not environment.host:
        environment.host = GROUND.start()
        measure.say(f"a gateway of our own at {environment.host}")


@events.quitting.add_listener
def clear(**_: Any) -> None:
    """Stop what was started."""
    GROUND.stop()


class Agent(FastHttpUser):
    """One agent; the subclasses say which tier it is of."""

    abstract = True
    tier = 2
    wait_time = between(0.3, 1.5)
    connection_timeout = 10.0
    network_timeout = 200.0

    def on_start(self) -> None:
        """Every agent draws from a stream of its own."""
        self.draw = random.Random(id(self))
        name = f"{blackfriday.NAMES[self.tier]}-{self.draw.getrandbits(48):012x}-0123"
        self.key = KEY or name
        self.serial = 0

    def headers(self) -> dict[str, str]:
        """Credential and tier."""
        return {
            "authorization": f"Bearer {self.key}",
            "content-type": "application/json",
            "tidegate-tier": str(self.tier),
        }

    @task(3)
    def chat(self) -> None:
        """A plain answer or a stream, in turn."""
        self.serial += 1
        body = PROMPTS.body(self.draw, self.serial)
        if blackfriday.MODEL != MODEL:
            body = body.replace(blackfriday.MODEL.encode(), MODEL.encode(), 1)
        stream = b'"stream": true' in body
        name = f"tier {self.tier} {'stream' if stream else 'plain'}"
        with self.client.post(
            "/v1/chat/completions", data=body, headers=self.headers(), name=name,
            catch_response=True,
        ) as answer:  # fmt: skip
            if answer.status_code == 200:
                if stream and b"[DONE]" not in (answer.content or b""):
                    answer.failure("a stream without its end")
                return
            told = answer.headers.get("retry-after")
            if answer.status_code == 429 and told and answer.headers.get("tidegate-call-id"):
                answer.success()
                gevent.sleep(float(told))
            else:
                answer.failure(f"status {answer.status_code}")

    @task(1)
    def models(self) -> None:
        """What this key may use."""
        with self.client.get(
            "/v1/models", headers=self.headers(), name="models", catch_response=True
        ) as answer:
            if answer.status_code != 200:
                answer.failure(f"status {answer.status_code}")


class Interactive(Agent):
    """People wait for these."""

    weight = 1
    tier = 1


class Standard(Agent):
    """The bulk."""

    weight = 4
    tier = 2


class Batch(Agent):
    """Nobody waits for these."""

    weight = 5
    tier = 3
