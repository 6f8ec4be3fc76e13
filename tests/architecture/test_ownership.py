"""Our packages are ours, in this environment and against a planted intruder."""

from __future__ import annotations

import sys

import pytest

from gateway.ownership import check, owners


def test_this_environment_is_clean():
    assert check() is None


@pytest.mark.parametrize("where", ["RECORD", "top_level.txt"])
def test_a_planted_distribution_is_found(tmp_path, monkeypatch, where):
    folder = tmp_path / "evil_scheduler-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: evil-scheduler\nVersion: 1.0\n")
    (folder / "RECORD").write_text("")
    line = "scheduler/__init__.py,,\n" if where == "RECORD" else "scheduler\n"
    (folder / where).write_text(line)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert owners()["scheduler"] == ["evil-scheduler"]
    sentence = check()
    assert sentence is not None
    assert "evil-scheduler" in sentence
