"""The commands as an operator types them: one clear sentence, never a traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


def started(*arguments: str, **environ: str) -> str:
    """What `serve` prints until it is ready; it is stopped then."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve", "--port=0", "--admin-port=0", *arguments],
        stdout=subprocess.PIPE, text=True, env={**known, **environ},
    ) as gateway:  # fmt: skip
        assert gateway.stdout is not None
        lines = []
        try:
            for line in gateway.stdout:
                lines.append(line)
                if line.startswith("ready: "):
                    break
        finally:
            gateway.terminate()
            gateway.wait(30)
    return "".join(lines)


def test_a_policy_without_the_development_key_offers_none_to_paste(tmp_path: Path) -> None:
    text = started(
        "--policy", str(EXAMPLES / "shadow-rollout.yaml"),
        TIDEGATE_STATE_DIR=str(tmp_path), OPENAI_API_KEY_UPSTREAM="none", FLEET_KEY="none-either",
    )  # fmt: skip
    assert "export OPENAI_BASE_URL=" in text
    assert "ready: " in text
    assert "tg_" not in text


def test_a_development_key_that_the_environment_gives_is_used(tmp_path: Path) -> None:
    key = "tg_dev_00112233445566778899aabbccddeeff00112233"
    text = started(TIDEGATE_STATE_DIR=str(tmp_path), TIDEGATE_DEV_KEY=key)
    assert f"export OPENAI_API_KEY={key}\n" in text
    assert not (tmp_path / "dev-key").exists()
