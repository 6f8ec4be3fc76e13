"""Which server a private store is, and how it is started."""

from __future__ import annotations

from pathlib import Path

from gateway import private_store


def test_a_server_on_the_path_comes_before_one_in_a_package(tmp_path, monkeypatch):
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert private_store.find() == server
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    found = private_store.find()
    assert found is None or "site-packages" in str(found)


def test_it_listens_on_its_socket_alone_writes_nothing_and_forgets_nothing():
    said = private_store.command(Path("/bin/server"), Path("/run/folder/store.sock"))
    options = dict(zip(said[4::2], said[5::2], strict=True))
    assert said[3] == "/bin/server"
    assert options["--port"] == "0"
    assert options["--unixsocket"] == "/run/folder/store.sock"
    assert options["--unixsocketperm"] == "700"
    assert (options["--save"], options["--appendonly"]) == ("", "no")
    assert options["--maxmemory-policy"] == "noeviction"
