"""The commands as an operator types them: one clear sentence, never a traceback."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "policies" / "examples"


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={**known, **environ},
    )  # fmt: skip


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence on standard error of a command that failed."""
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("tidegate: ")
    return done.stderr


def test_an_emulator_whose_port_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("emulate", "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said(done)


def test_a_state_folder_that_cannot_be_made_is_named_with_its_variable() -> None:
    done = run("serve", "--port", "0", "--admin-port", "0", TIDEGATE_STATE_DIR="/dev/null/tidegate")
    sentence = said(done)
    assert "/dev/null/tidegate" in sentence
    assert "TIDEGATE_STATE_DIR" in sentence


def test_an_address_of_another_machine_names_the_variable_of_the_host() -> None:
    done = run("serve", "--host", "192.0.2.1", "--port", "0", "--admin-port", "0")
    assert "TIDEGATE_HOST" in said(done)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_can_be_checked_where_its_secrets_are_not(example: Path) -> None:
    done = run("check", "--no-secrets", str(example))
    assert done.returncode == 0, done.stdout


def test_dev_starts_the_shipped_default_whatever_the_environment_names() -> None:
    done = run("dev", "--policy", "other.yaml")
    assert done.returncode == 2
    assert "unrecognized arguments" in done.stderr


def started(
    *arguments: str, then: Callable[[int], object] | None = None, **environ: str
) -> tuple[str, list[dict[str, Any]]]:
    """What `serve` prints until it is ready, and its log once it has been stopped.

    Args:
        arguments: Of the command line.
        then: Called with the data listener's port while it serves.
        environ: Variables.
    """
    known = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--port=0", "--admin-port=0", *arguments],
            stdout=subprocess.PIPE, stderr=log, text=True, env={**known, **environ},
        ) as gateway,
    ):  # fmt: skip
        assert gateway.stdout is not None
        lines: list[str] = []
        try:
            for line in gateway.stdout:
                lines.append(line)
                ready = re.match(r"ready: .* on port (\d+),", line)
                if ready is not None:
                    if then is not None:
                        then(int(ready[1]))
                    break
        finally:
            gateway.terminate()
            gateway.wait(30)
        log.seek(0)
        return "".join(lines), [json.loads(line) for line in log]


def test_a_policy_without_the_development_key_offers_none_to_paste(tmp_path: Path) -> None:
    text, _ = started(
        "--policy", str(EXAMPLES / "shadow-rollout.yaml"),
        TIDEGATE_STATE_DIR=str(tmp_path), OPENAI_API_KEY_UPSTREAM="none", FLEET_KEY="none-either",
    )  # fmt: skip
    assert "export OPENAI_BASE_URL=" in text
    assert "ready: " in text
    assert "tg_" not in text


def test_a_development_key_that_the_environment_gives_is_used(tmp_path: Path) -> None:
    key = "tg_dev_00112233445566778899aabbccddeeff00112233"
    text, _ = started(TIDEGATE_STATE_DIR=str(tmp_path), TIDEGATE_DEV_KEY=key)
    assert f"export OPENAI_API_KEY={key}\n" in text
    assert not (tmp_path / "dev-key").exists()


def test_a_websocket_that_is_refused_is_one_line_of_the_log(tmp_path: Path) -> None:
    def upgrade(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(
                b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\n"
                b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
                b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            assert client.recv(4096).startswith(b"HTTP/1.1 426 ")

    _, log = started(then=upgrade, TIDEGATE_STATE_DIR=str(tmp_path))
    assert [line["event"] for line in log] == ["refused_early", "stopping", "drained"]


def test_a_shared_store_whose_address_means_nothing_is_refused() -> None:
    done = run("serve", "--port", "0", "--admin-port", "0", TIDEGATE_REDIS_URL="http://nowhere")
    assert "TIDEGATE_REDIS_URL" in said(done)


def test_a_policy_that_requires_exact_counts_is_not_served_with_estimates(tmp_path: Path) -> None:
    default = EXAMPLES.parent / "default.yaml"
    policy = tmp_path / "policy.yaml"
    text = default.read_text()
    assert "\ntokenizer: preferred" in text
    policy.write_text(text.replace("\ntokenizer: preferred", "\ntokenizer: required"))
    done = run(
        "serve", "--port=0", "--admin-port=0", "--policy", str(policy),
        TIDEGATE_STATE_DIR=str(tmp_path / "state"), TIDEGATE_VOCABULARY_DIR=str(tmp_path / "none"),
        TIKTOKEN_CACHE_DIR="",
    )  # fmt: skip
    assert "tokenizer: required" in said(done)
    assert "ready" not in done.stdout


@pytest.mark.parametrize("words", [("agent", "--help"), ("guest", "list")])
def test_commands_of_the_sandbox_run_in_their_own_room(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "runtime" in done.stdout or "quickjs" in done.stdout


def test_an_agent_that_is_not_there_is_said_in_a_sentence() -> None:
    done = run("agent", "run", "no-such-agent.js")
    assert done.returncode == 2
    assert "no-such-agent.js" in done.stderr
    assert "Traceback" not in done.stderr
