"""Hostile guests, instrumented by the real child: each ends as promised, none takes the host.

Needs the worker extra (wasmtime, icpp-binaryen); nothing is fetched.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("wasmtime")
pytest.importorskip("icpp_binaryen")

from runtime import abi, snapshot
from runtime.engine import Engine
from runtime.errors import ModuleRefused
from runtime.instrument import register
from runtime.instrument.cache import Cache
from runtime.sandbox import (
    Exited,
    Finished,
    HostFault,
    Preempted,
    Sandbox,
    Trapped,
    Waiting,
    load,
)
from runtime.slots import KILL_AFTER_US, Slots

pytestmark = pytest.mark.integration

LOCALS = " ".join(f"(local $l{n} i64)" for n in range(60))
USE = " ".join(
    f"local.get $l{n} local.get 0 i64.extend_i32_u i64.add local.set $l{n}" for n in range(60)
)
SUM = " ".join(f"local.get $l{n} i64.add" for n in range(60))
CHAIN = "\n".join(f"(func $c{n} call $c{n + 1} call $c{n + 1})" for n in range(34))
FILLS = "i32.const 0 i32.const 7 i32.const 65000000 memory.fill\n" * 300

HOSTILE = f"""
(module
  (import "agent" "host_call" (func $host (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1) (global $depth (mut i32) (i32.const 0))
  (data (i32.const 16) "{{\\"v\\":1,\\"op\\":\\"now\\"}}")
  (data (i32.const 64) "\\00\\00\\00\\00\\00\\00\\01\\00")
  (data (i32.const 96) "{{\\"v\\":1,\\"op\\":\\"memory.get\\",\\"args\\":{{\\"key\\":\\"k\\"}}}}")
  (func $endless (loop $l br $l))
  {CHAIN} (func $c34 nop)
  (func $grow (result i32) (local i32)
    (block $done (loop $l
      i32.const 16 memory.grow i32.const -1 i32.eq br_if $done br $l))
    memory.size)
  (func $bottomless (param i32) (result i32)
    local.get 0 i32.const 1 i32.add call $bottomless i32.const 1 i32.add)
  (func $deep (param i32) (result i64) {LOCALS}
    {USE}
    local.get 0 i32.eqz if (result i64)
      (loop $l global.get $depth i32.const 1 i32.add global.set $depth
        global.get $depth i32.const 200000 i32.lt_u br_if $l) i64.const 1
    else local.get 0 i32.const 1 i32.sub call $deep end
    {SUM})
  (func $flood (param i32) (loop $l
      i32.const 16 i32.const 18 i32.const 1024 i32.const 100 call $host drop
      local.get 0 i32.const 1 i32.sub local.tee 0 br_if $l))
  (func $ask (param i32 i32 i32 i32) (result i32)
    local.get 0 local.get 1 local.get 2 local.get 3 call $host)
  (func $fill i32.const 1000 memory.grow drop {FILLS})
  (func $quit (param i32) local.get 0 i32.eqz if i32.const 3 call $exit end
    local.get 0 i32.const 1 i32.sub call $quit i32.const 0 i32.load drop)
  (func $shout (result i32) (local i32 i32)
    (loop $l
      i32.const 1 i32.const 64 i32.const 1 i32.const 80 call $write local.tee 0
      i32.eqz if local.get 1 i32.const 1 i32.add local.tee 1 i32.const 2000 i32.lt_u br_if $l end)
    local.get 0)
  (func (export "run") (param i32 i32) (result i64)
    (block $a (block $b (block $c (block $d (block $e (block $f (block $g (block $h (block $i
      local.get 0 br_table $a $b $c $d $e $f $g $h $i)
      call $shout i64.extend_i32_u return)
      local.get 1 call $quit i64.const 0 return)
      call $fill i64.const 0 return)
      local.get 1 call $flood i64.const 0 return)
      local.get 1 call $deep return)
      i32.const 0 call $bottomless i64.extend_i32_u return)
      call $grow i64.extend_i32_u return)
      call $c0 i64.const 0 return)
    call $endless i64.const 0)
  (func (export "ask") (param i32 i32 i32 i32) (result i32)
    local.get 0 local.get 1 local.get 2 local.get 3 call $ask))
"""
ENDLESS, CHAINED, BOMB, BOTTOMLESS, DEEP, FLOOD, FILL, QUIT, SHOUT = range(9)
KEY = b"k" * 32


def instrumented(text: str, folder: Path, main: str = "run") -> bytes:
    """Only the child that may die of it; hostile modules would not pass the self-test."""
    folder.mkdir()
    (folder / "plain.wasm").write_bytes(Engine.assemble(text))
    options = register.Options(main=main)
    job = {**register.asdict(options), "plain_hash": "p"}
    (folder / "job.json").write_text(json.dumps(job))
    register._child("instrument", folder, options, lambda _stage: None)
    return (folder / "out.wasm").read_bytes()


@pytest.fixture(scope="module")
def engine():
    return Engine()


@pytest.fixture(scope="module")
def hostile(engine, tmp_path_factory):
    module = engine.compile(instrumented(HOSTILE, tmp_path_factory.mktemp("h") / "job"))
    return {
        main: load(engine, module, plain_hash="p", module_hash="m", main=main)
        for main in ("run", "ask")
    }


def new(program, *arguments: int) -> Sandbox:
    sandbox = Sandbox(program, abi.State(argv=["x"]), arguments=arguments)
    sandbox.prepare()
    return sandbox


def moved(program, sandbox: Sandbox) -> Sandbox:
    data = snapshot.encode(sandbox.capture(), KEY)
    records = sandbox.outbox
    sandbox.close()
    again = Sandbox(program, image=snapshot.restore([snapshot.decode(data, KEY)]))
    again.outbox = records
    return again


def to_end(program, sandbox: Sandbox, answers=()):
    """Run through forced yields, moving at each of the first ones."""
    replies, yields = list(answers), 0
    outcome = sandbox.run()
    while isinstance(outcome, Preempted | Waiting):
        if isinstance(outcome, Waiting):
            outcome = sandbox.run(replies.pop(0), at_ns=0)
            continue
        yields += 1
        if yields < 4:
            sandbox = moved(program, sandbox)
        outcome = sandbox.run()
    return outcome, yields, sandbox


@pytest.mark.parametrize("kind", [ENDLESS, CHAINED], ids=["loop", "2^34 calls"])
def test_what_never_ends_can_be_stopped_again_and_again(hostile, kind):
    sandbox = new(hostile["run"], kind, 0)
    for _ in range(5):
        timer = threading.Timer(0.02, sandbox.ask_to_yield)
        timer.start()
        assert sandbox.run() == Preempted()
        timer.join()
        sandbox = moved(hostile["run"], sandbox)
        sandbox.prepare()


def test_memory_ends_where_registration_said(hostile):
    outcome, *_ = to_end(hostile["run"], new(hostile["run"], BOMB, 0))
    assert outcome == Finished((1 + 16 * 63,)), "64 MiB are 1,024 pages; steps of 16 from 1"


def test_bottomless_recursion_is_a_stack_trap(hostile):
    outcome, *_ = to_end(hostile["run"], new(hostile["run"], BOTTOMLESS, 0))
    assert isinstance(outcome, Trapped)
    assert outcome.kind == "stack"


def test_the_deepest_frame_with_sixty_locals_can_be_stopped_and_moved(hostile):
    """As deep as the native stack allows: `__astk` never overflows before it."""
    deepest, step = 100, 512
    while step:
        outcome, *_ = to_end(hostile["run"], new(hostile["run"], DEEP, deepest + step))
        if isinstance(outcome, Finished):
            deepest += step
        else:
            step //= 2
    want, *_ = to_end(hostile["run"], new(hostile["run"], DEEP, deepest))
    sandbox = new(hostile["run"], DEEP, deepest)
    sandbox.ask_to_yield()
    assert sandbox.run() == Preempted(), "at the entry of the first frame"
    for _ in range(deepest + 40):
        sandbox.ask_to_yield()
        assert sandbox.run() == Preempted()
    assert sandbox.stack_high > 100 * deepest, "it was stopped at the bottom"
    outcome, *_ = to_end(hostile["run"], moved(hostile["run"], sandbox))
    assert outcome == want


def test_a_flood_of_host_calls_is_made_to_yield(hostile):
    outcome, yields, sandbox = to_end(hostile["run"], new(hostile["run"], FLOOD, 120_000))
    assert outcome == Finished((0,))
    assert yields == 1
    assert sandbox.state.clock_ns == 120_000_000, "each `now` is a microsecond, moved or not"


@pytest.mark.parametrize(
    ("at", "size", "out", "cap"),
    [
        (65_530, 18, 0, 10),
        (0xFFFF_FFF0, 18, 0, 10),
        (16, 0xFFFF_FFFF, 0, 10),
        (16, (1 << 20) + 1, 0, 10),
        (16, 18, 65_530, 10),
        (16, 18, 0xFFFF_FFFF, 1),
        (16, 18, 0, 0xFFFF_FFFF),
    ],
)
def test_windows_outside_memory_are_refused(hostile, at, size, out, cap):
    outcome = new(hostile["ask"], at, size, out, cap).run()
    assert outcome == Finished((0xFFFF_FFFF,))


def test_a_window_at_the_very_end_and_one_too_small(hostile):
    sandbox = new(hostile["ask"], 16, 18, 65_536 - 5, 5)
    (length,) = sandbox.run().values
    assert sandbox.memory()[-5:] == b'{"ok"'
    assert length == len(sandbox.state.inbox) > 5


def test_what_is_no_request_is_a_reply(hostile):
    sandbox = new(hostile["ask"], 0, 10, 2_000, 500)
    (length,) = sandbox.run().values
    assert json.loads(sandbox.memory()[2_000 : 2_000 + length])["error"]["code"] == "bad_request"


def test_a_reply_larger_than_the_window_waits_in_the_inbox_across_a_move(hostile):
    text = b'{"v":1,"op":"memory.get","args":{"key":"k"}}'
    sandbox = new(hostile["ask"], 96, len(text), 2_000, 8)
    assert isinstance(sandbox.run(), Waiting)
    sandbox = moved(hostile["ask"], sandbox)
    reply = abi.seal({"ok": "x" * 100}, 0, 5)
    assert sandbox.run(reply, at_ns=5) == Finished((len(reply),))
    assert sandbox.memory()[2_000:2_008] == reply[:8]
    assert sandbox.state.inbox == reply


def test_exit_inside_recursion_ends_at_once(hostile):
    outcome, *_ = to_end(hostile["run"], new(hostile["run"], QUIT, 300))
    assert outcome == Exited(3)


def test_a_hundred_megabytes_of_output_meet_the_bound(hostile):
    outcome, yields, sandbox = to_end(hostile["run"], new(hostile["run"], SHOUT, 0))
    assert outcome == Finished((51,)), "ENOSPC"
    assert sum(len(one.data) for one in sandbox.outbox) <= abi.MAX_OUTPUT
    assert yields > 1, "no slice commits it all"


def test_a_start_function_that_loops_is_stopped_like_any_other(engine, tmp_path):
    text = '(module (func $s (loop $l br $l)) (start $s) (func (export "run")))'
    module = engine.compile(instrumented(text, tmp_path / "job"))
    program = load(engine, module, plain_hash="p", module_hash="m", main="run")
    sandbox = new(program)
    sandbox.ask_to_yield()
    assert sandbox.run() == Preempted()
    assert moved(program, sandbox).step == 0


def test_a_start_function_that_calls_the_host_is_tested_and_told_apart(tmp_path):
    text = """(module (import "wasi_snapshot_preview1" "sched_yield" (func $y (result i32)))
      (memory 1) (global $n (mut i32) (i32.const 0))
      (func $s (loop $l call $y drop global.get $n i32.const 1 i32.add global.set $n
        global.get $n i32.const 300 i32.lt_u br_if $l))
      (start $s) (func (export "run") (result i32) global.get $n))"""
    made = register.register(Engine.assemble(text), Cache(tmp_path / "cache"))
    assert made.report["self_test"]["checks"] >= 300


def test_one_stop_is_one_stop(hostile):
    sandbox = new(hostile["run"], FLOOD, 50)
    sandbox.ask_to_yield()
    assert sandbox.run() == Preempted()
    assert sandbox.run() == Finished((0,)), "the flag was cleared by the yield"


def test_signaling_nans_in_globals_survive_a_move(engine, tmp_path):
    text = """(module (memory 1)
      (global $d (mut f64) (f64.const 0)) (global $f (mut f32) (f32.const 0))
      (func (export "run") (result i64)
        i64.const 0x7ff0deadbeef0001 f64.reinterpret_i64 global.set $d
        i32.const 0x7f80beef f32.reinterpret_i32 global.set $f
        (loop $l)
        global.get $d i64.reinterpret_f64
        global.get $f i32.reinterpret_f32 i64.extend_i32_u i64.xor))"""
    module = engine.compile(instrumented(text, tmp_path / "job"))
    program = load(engine, module, plain_hash="p", module_hash="m", main="run")
    sandbox = new(program)
    sandbox.ask_to_yield()
    assert sandbox.run() == Preempted()
    sandbox = moved(program, sandbox)
    assert sandbox.run() == Finished((0x7FF0_DEAD_BEEF_0001 ^ 0x7F80_BEEF,))


def test_a_long_reply_is_read_on_with_reply_rest(hostile):
    sandbox = new(hostile["ask"], 96, 44, 2_000, 8)
    assert isinstance(sandbox.run(), Waiting)
    reply = abi.seal({"ok": "x" * 100}, 0, 5)
    sandbox.run(reply, at_ns=5)
    rest = json.loads(
        abi.serve(b'{"v":1,"op":"reply.rest","args":{"offset":8}}', sandbox.state, sandbox.outbox)
    )
    assert base64.b64decode(rest["ok"]) == reply[8:]


class Work:
    """One job for the slots."""

    reply = None
    at_ns = None

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox


def on_slots(engine, sandboxes, *, quantum_s):
    todo, ended, lock = [Work(one) for one in sandboxes], [], threading.Lock()

    def claim():
        with lock:
            return todo.pop() if todo else None

    slots = Slots(engine, claim, lambda job, outcome, stats: ended.append((job, outcome, stats)),
                  count=2, quantum_s=quantum_s)  # fmt: skip
    slots.start()
    end = time.monotonic() + 240
    while len(ended) < len(sandboxes) and time.monotonic() < end:
        time.sleep(0.01)
    slots.stop()
    return ended


def test_code_that_reaches_no_check_is_killed_and_nobody_else(engine, hostile):
    """300 fills of 64 MiB in straight code: no check for seconds."""
    bad, good = new(hostile["run"], FILL, 0), new(hostile["run"], ENDLESS, 0)
    ended = {job.sandbox: (outcome, stats) for job, outcome, stats in
             on_slots(engine, [bad, good], quantum_s=0.05)}  # fmt: skip
    outcome, stats = ended[bad]
    assert isinstance(outcome, Trapped)
    assert outcome.kind == "unresponsive"
    assert stats.cpu_us >= KILL_AFTER_US
    assert ended[good][0] == Preempted()
    good.prepare()
    good.ask_to_yield()
    assert good.run() == Preempted(), "the other guest goes on"


def test_stopping_the_slots_files_every_guest(engine, hostile):
    guests = [new(hostile["run"], ENDLESS, 0) for _ in range(2)]
    todo, ended = [Work(one) for one in guests], []
    slots = Slots(engine, lambda: todo.pop() if todo else None,
                  lambda _job, end, _stats: ended.append(end), count=2, quantum_s=None)  # fmt: skip
    slots.start()
    assert all(slots.submit_tier0(Work(new(hostile["run"], ENDLESS, 0))) for _ in range(3))
    while todo:
        time.sleep(0.01)
    slots.stop()
    assert ended == [Preempted()] * 5, "those that waited for the tier-0 thread, too"


@pytest.mark.parametrize("urgent", [False, True], ids=["slot", "tier 0"])
def test_all_the_compute_there_is_ends_the_task_wherever_it_went_on(engine, hostile, urgent):
    ended = []
    whole = Sandbox(hostile["run"], abi.State(argv=["x"]), arguments=(ENDLESS, 0))
    whole.prepare()
    threading.Timer(0.1, whole.ask_to_yield).start()
    assert whole.run() == Preempted()
    data = snapshot.encode(whole.capture(), KEY)
    spent = whole.cpu_us
    again = Sandbox(
        hostile["run"], image=snapshot.restore([snapshot.decode(data, KEY)]),
        cpu_limit_us=spent + 60_000,
    )  # fmt: skip
    todo = [] if urgent else [Work(again)]
    slots = Slots(engine, lambda: todo.pop() if todo else None,
                  lambda _job, end, _stats: ended.append(end), count=1, quantum_s=None)  # fmt: skip
    slots.start()
    if urgent:
        assert slots.submit_tier0(Work(again))
    end = time.monotonic() + 240
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
    slots.stop()
    assert ended == [Trapped("limit", f"{(spent + 60_000) / 1e6:g} s of compute are spent")]


def test_callbacks_that_fail_in_four_threads_stay_where_they_belong(hostile):
    """wasmtime-py would lose some of these exceptions and raise others in the wrong thread."""
    seen: dict[int, list[str]] = {}

    class Broken(list):
        def __init__(self, name: int) -> None:
            self.name = name

        def append(self, _record) -> None:
            raise KeyError(self.name)

    def run(name: int) -> None:
        for _ in range(100):
            sandbox = new(hostile["run"], SHOUT, 0)
            sandbox.outbox = Broken(name)
            outcome = sandbox.run()
            assert isinstance(outcome, HostFault)
            seen.setdefault(name, []).append(outcome.message)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == {n: [f"KeyError: {n}"] * 100 for n in range(4)}


def test_only_the_engine_reaches_a_linker():
    """Every host function passes `trampoline`, so none can raise across the boundary."""
    room = Path(register.__file__).parents[1]
    found = {
        path.name
        for path in room.rglob("*.py")
        if any(word in path.read_text() for word in ("Linker(", "linker_define", "callback_t("))
    }
    assert found == {"engine.py"}


def test_a_child_that_dies_is_only_a_refusal(tmp_path):
    """The child dies; its last words are the refusal, and the next module is registered."""
    cache = Cache(tmp_path / "cache")
    with pytest.raises(ModuleRefused) as caught:
        register.register(b"\0asm\1\0\0\0\x0a\x02\x01\x00", cache)
    assert caught.value.code == "malformed"
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.json").write_text("{")
    with pytest.raises(ModuleRefused) as caught:
        register._child("instrument", folder, register.Options(), lambda _stage: None)
    assert caught.value.code == "instrumentation_failed"
    assert "JSONDecodeError" in caught.value.sentence


def test_an_endless_self_test_is_given_up(tmp_path):
    endless = Engine.assemble('(module (func (export "run") (loop $l br $l)))')
    with pytest.raises(ModuleRefused, match="did not end within 1 CPU s") as caught:
        register.register(endless, Cache(tmp_path / "cache"), register.Options(test_seconds=1))
    assert caught.value.code == "untestable"
