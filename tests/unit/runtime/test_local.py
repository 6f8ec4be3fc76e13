"""A run without a store keeps memory and locks in its snapshot."""

from __future__ import annotations

import pytest

from runtime import abi, local, settings
from runtime.errors import SettingsError


def ask(kept: dict, op: str, **args) -> dict:
    return local.keep(kept, abi.request(op, args, 9))


def test_memory_has_versions():
    kept: dict = {}
    assert ask(kept, "memory.get", key="k") == {"ok": {"value": None, "version": 0}}
    assert ask(kept, "memory.put", key="k", value=[1]) == {"ok": {"version": 1}}
    refused = ask(kept, "memory.put", key="k", value=2, if_version=0)
    assert refused["error"]["code"] == "conflict"
    assert ask(kept, "memory.put", key="k", value=2, if_version=1) == {"ok": {"version": 2}}
    assert ask(kept, "memory.get", key="k") == {"ok": {"value": 2, "version": 2}}


def test_memory_is_bounded_and_a_refused_put_changes_nothing():
    kept: dict = {}
    ask(kept, "memory.put", key="k", value="small")
    big = ask(kept, "memory.put", key="k", value="x" * local.MAX_MEMORY)
    assert big["error"]["code"] == "too_large"
    assert ask(kept, "memory.get", key="k")["ok"]["value"] == "small"


def test_a_lock_is_held_once_and_released_by_its_token():
    kept: dict = {}
    token = ask(kept, "lock.acquire", name="l", ttl_ms=1)["ok"]["token"]
    assert ask(kept, "lock.acquire", name="l", ttl_ms=1)["error"]["code"] == "conflict"
    assert ask(kept, "lock.release", name="l", token=token + 1)["error"]["code"] == "conflict"
    assert ask(kept, "lock.release", name="l", token=token) == {"ok": None}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"TIDEGATE_GATEWAY": "gateway:80"}, "TIDEGATE_GATEWAY"),
        ({"TIDEGATE_GATEWAY": "file:///etc"}, "TIDEGATE_GATEWAY"),
        ({"TIDEGATE_SLOTS": "many"}, "TIDEGATE_SLOTS"),
        ({"TIDEGATE_SLOTS": "257"}, "TIDEGATE_SLOTS"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(variables, named):
    with pytest.raises(SettingsError, match=named):
        settings.from_environment({"HOME": "/h", **variables})


def test_folders_follow_the_users_own():
    found = settings.from_environment({"HOME": "/h", "XDG_CACHE_HOME": "/c"})
    assert str(found.cache_dir) == "/c/tidegate/runtime"
    assert str(found.state_dir) == "/h/.local/state/tidegate"


def test_a_bounded_child_gets_no_secret():
    child = settings.child_environment()
    assert not [name for name in child if "KEY" in name or "SECRET" in name or "TOKEN" in name]
