"""The development key and the process secret on a real disk."""

from __future__ import annotations

import secrets
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.identity import dev_key, process_secret
from gateway.identity.keyfiles import DEV_KEY_FILE, SECRET_FILE

pytestmark = pytest.mark.integration


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_is_made_once_in_a_folder_only_its_owner_reads(tmp_path):
    state = tmp_path / "deep" / "state"
    key = dev_key(state, secrets.token_bytes)
    assert key.startswith("tg_dev_")
    assert mode(state) == 0o700
    assert mode(state / DEV_KEY_FILE) == 0o600
    assert dev_key(state, secrets.token_bytes) == key
    assert [path.name for path in state.iterdir()] == [DEV_KEY_FILE]


def test_a_file_others_could_read_is_tightened(tmp_path):
    key = dev_key(tmp_path, secrets.token_bytes)
    (tmp_path / DEV_KEY_FILE).chmod(0o644)
    assert dev_key(tmp_path, secrets.token_bytes) == key
    assert mode(tmp_path / DEV_KEY_FILE) == 0o600


PROGRAM = """
import secrets, sys, pathlib
from gateway.identity import dev_key
print(dev_key(pathlib.Path(sys.argv[1]), secrets.token_bytes))
"""


def test_processes_that_start_together_read_one_key(tmp_path):
    def start(_):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "state")],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout

    with ThreadPoolExecutor(4) as pool:
        keys = set(pool.map(start, range(6)))
    assert len(keys) == 1
    assert [path.name for path in (tmp_path / "state").iterdir()] == [DEV_KEY_FILE]


@pytest.mark.parametrize("content", [b"", b"sk-something else", b"tg_dev_", b"\xff\xfe" * 40])
def test_a_file_that_holds_no_key_is_named_and_not_overwritten(tmp_path, content):
    path = tmp_path / DEV_KEY_FILE
    path.write_bytes(content)
    with pytest.raises(ValueError, match=DEV_KEY_FILE):
        dev_key(tmp_path, secrets.token_bytes)
    assert path.read_bytes() == content


def test_a_link_in_the_place_of_the_key_is_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("tg_dev_" + "0" * 40)
    (tmp_path / DEV_KEY_FILE).symlink_to(other)
    with pytest.raises(OSError, match=r".+"):
        dev_key(tmp_path, secrets.token_bytes)
    assert mode(other) != 0o600


def test_a_folder_in_the_place_of_the_key_is_an_error(tmp_path):
    (tmp_path / DEV_KEY_FILE).mkdir()
    with pytest.raises((ValueError, OSError), match=DEV_KEY_FILE):
        dev_key(tmp_path, secrets.token_bytes)


def test_the_secret_is_made_once_and_only_its_owner_reads_it(tmp_path):
    secret = process_secret(tmp_path, None, secrets.token_bytes)
    assert len(secret) == 64
    assert process_secret(tmp_path, None, secrets.token_bytes) == secret
    assert mode(tmp_path / SECRET_FILE) == 0o600


def test_a_named_secret_is_read_as_it_is_and_never_made(tmp_path):
    named = tmp_path / "mounted"
    named.write_text("m" * 40 + "\n")
    named.chmod(0o440)
    assert process_secret(tmp_path, named, secrets.token_bytes) == b"m" * 40
    assert mode(named) == 0o440
    with pytest.raises(FileNotFoundError):
        process_secret(tmp_path, tmp_path / "absent", secrets.token_bytes)
    assert not (tmp_path / SECRET_FILE).exists()


def test_a_named_secret_may_be_a_link_as_kubernetes_mounts_it(tmp_path):
    (tmp_path / "data").write_text("k" * 32)
    (tmp_path / "named").symlink_to(tmp_path / "data")
    assert process_secret(tmp_path, tmp_path / "named", secrets.token_bytes) == b"k" * 32


def test_a_short_secret_is_refused_without_repeating_it(tmp_path):
    named = tmp_path / "short"
    named.write_text("hunter2")
    with pytest.raises(ValueError, match="too short") as caught:
        process_secret(tmp_path, named, secrets.token_bytes)
    assert "hunter2" not in str(caught.value)
