"""Policy on a real disk: files, folders, secret files, mounts that swap, signals of change."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.clock import LoopClock
from gateway.errors import PolicyError
from gateway.policy.check import check
from gateway.policy.load import MAX_FILE, load, read_mapping
from gateway.policy.watch import Files, PolicyWatch
from tests.fixtures.waiting import until
from tests.unit.policy.sample import ENV, SMALL

pytestmark = pytest.mark.integration

DEBUG = SMALL + "logging: {level: debug}\n"


def refused(path: Path) -> str:
    with pytest.raises(PolicyError) as wrong:
        load(path, env=ENV)
    return str(wrong.value)


def test_a_folder_is_merged_in_name_order_without_what_is_hidden_or_of_another_kind(tmp_path):
    (tmp_path / "20-agents.yml").write_text('agents: {two: {keys: [{pattern: "soak-*"}]}}\n')
    (tmp_path / "10-base.yaml").write_text(SMALL)
    (tmp_path / ".swap.yaml").write_text("not: [yaml")
    (tmp_path / "notes.txt").write_text("not: [yaml")
    (tmp_path / "old.yaml").mkdir()
    policy = load(tmp_path, env=ENV)
    assert [Path(name).name for name in policy.files] == ["10-base.yaml", "20-agents.yml"]
    assert list(policy.rules.agents) == ["dev", "two"]
    assert check(tmp_path, ENV).counts == (("providers", 1), ("models", 1), ("agents", 2))


def test_what_cannot_be_read_is_told_by_name(tmp_path):
    assert "cannot be read: No such file" in refused(tmp_path / "none.yaml")
    assert "the folder holds no policy" in refused(tmp_path)
    (tmp_path / "big.yaml").write_bytes(b"#" * (MAX_FILE + 1))
    assert f"is larger than {MAX_FILE} bytes" in refused(tmp_path / "big.yaml")
    assert f"big.yaml:1:1: (file): cannot be read: is larger than {MAX_FILE}" in refused(tmp_path)


def test_a_pipe_does_not_hang_the_loader(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "is not a regular file" in refused(tmp_path / "pipe.yaml")
    os.mkfifo(tmp_path / "key")
    (tmp_path / "p.yaml").write_text(SMALL.replace("${UP_KEY}", f"${{file:{tmp_path}/key}}"))
    said = refused(tmp_path / "p.yaml")
    assert f"the secret file {tmp_path}"[:50] in said  # a long path is cut
    assert said.endswith("is not a regular file")


def test_a_folder_of_too_many_files_is_refused(tmp_path):
    for number in range(201):
        (tmp_path / f"{number}.yaml").touch()
    assert "more than 200 policy files" in refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "what"), [(b"", "is empty"), (b"\n", "is empty"), (b"\xff", "is not UTF-8")]
)
def test_a_secret_file_must_hold_a_text(tmp_path, content, what):
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "p.yaml").write_text(SMALL.replace("${UP_KEY}", f"${{file:{tmp_path}/key}}"))
    assert what in refused(tmp_path / "p.yaml")


def test_a_secret_file_ends_without_its_line_end(tmp_path):
    (tmp_path / "key").write_bytes(b"s3cret \r\n")
    (tmp_path / "p.yaml").write_text(SMALL.replace("${UP_KEY}", f"${{file:{tmp_path}/key}}"))
    policy = load(tmp_path / "p.yaml", env=ENV)
    assert policy.rules.providers["up"].keys[0].value.reveal() == "s3cret "


def test_a_mapping_that_is_no_policy_is_read_for_the_emulator(tmp_path):
    (tmp_path / "e.yaml").write_text("seed: 3\n")
    assert read_mapping(tmp_path / "e.yaml") == {"seed": 3}
    for wrong in ("- 1\n", "a: [\n"):
        (tmp_path / "e.yaml").write_text(wrong)
        with pytest.raises(ValueError, match=r"mapping|not YAML"):
            read_mapping(tmp_path / "e.yaml")


def watched(path: Path, steps) -> PolicyWatch:
    """Run the watch on a real loop beside these steps."""

    async def scene() -> PolicyWatch:
        watch = PolicyWatch(Files(path, env=ENV), clock=LoopClock())
        running = asyncio.ensure_future(watch.run())
        try:
            await steps(watch)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return watch

    return asyncio.run(scene())


def test_an_edited_file_is_in_force_and_a_bad_edit_is_not(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(SMALL)

    async def steps(watch):
        path.write_text(DEBUG)
        await until(lambda: watch.current.logs.level == "debug")
        path.write_text(DEBUG + "tiers: gold\n")
        await until(lambda: "tiers: a mapping is expected" in watch.status.last_error)
        assert watch.current.revision == 2
        path.unlink()
        await until(lambda: "No such file" in watch.status.last_error)
        assert watch.current.revision == 2
        path.write_text(SMALL)
        await until(lambda: watch.current.revision == 3)

    assert watched(path, steps).status.last_error == ""


def test_a_mount_that_swaps_its_link_is_seen(tmp_path):
    """As Kubernetes does: p.yaml -> ..data/p.yaml, ..data -> a folder that is replaced."""
    for name, text in (("v1", SMALL), ("v2", DEBUG)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.yaml").write_text(text)
        os.utime(tmp_path / name / "p.yaml", ns=(1, 1))
    (tmp_path / "..data").symlink_to("v1")
    folder = tmp_path / "mount"
    folder.mkdir()
    (folder / "p.yaml").symlink_to("../..data/p.yaml")

    async def steps(watch):
        (tmp_path / "..new").symlink_to("v2")
        (tmp_path / "..new").rename(tmp_path / "..data")
        await until(lambda: watch.current.logs.level == "debug")

    watched(folder, steps)


def test_a_new_file_in_the_folder_and_a_rotated_secret_file_are_seen(tmp_path):
    (tmp_path / "key").write_text("one\n")
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "a.yaml").write_text(SMALL.replace("${UP_KEY}", f"${{file:{tmp_path}/key}}"))

    async def steps(watch):
        (folder / "b.yaml").write_text("logging: {level: debug}\n")
        await until(lambda: watch.current.logs.level == "debug")
        (tmp_path / "key").write_text("two\n")
        await until(lambda: watch.current.revision == 3)
        secret = watch.current.providers["up"].credentials[0].secret
        assert secret.reveal() == "two"

    watched(folder, steps)
