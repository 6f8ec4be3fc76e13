"""The self-test of registration: plain, undisturbed, and stopped at every check, must do the same.

The plain module answers effects inline; the instrumented one runs once without yields, and once
with a yield at every check for 20,000 checks and a move through bytes every 500. Requests,
output, ending and memory must be equal. An author's smoke input, or a stub that denies every
effect, drives them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from runtime.abi import Record, Request, State, error, seal
from runtime.clock import cpu_us, sleep
from runtime.errors import ModuleRefused
from runtime.sandbox import Exited, Loaded, Outcome, Preempted, Sandbox, Trapped, Waiting
from runtime.snapshot import decode, encode, restore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runtime.engine import Engine

TEST_CHECKS: Final = 20_000
TEST_MOVE: Final = 500
TEST_FEWEST: Final = 100
TEST_EFFECTS: Final = 200
TEST_SECONDS: Final = 10


@dataclass(slots=True)
class _Trace:
    """What a run did, for comparison."""

    requests: list[str] = field(default_factory=list)
    output: list[tuple[str, Any]] = field(default_factory=list)
    ending: Outcome | None = None
    memory: str = ""
    yields: int = 0
    moves: int = 0


def denied(request: Request) -> bytes:
    """The stub: every effect is denied, every sleep is over."""
    at = 1_000_000 * (request.ordinal + 1)
    if request.op == "sleep":
        return seal({"ok": None}, request.ordinal, at)
    if request.op == "batch":
        refused = [error("denied", "self-test") for _ in request.calls]
        return seal({"ok": refused}, request.ordinal, at)
    return seal(error("denied", "self-test"), request.ordinal, at)


@contextlib.contextmanager
def ticking(engine: Engine) -> Iterator[None]:
    """Guests of this engine can be killed meanwhile."""
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            engine.tick()
            sleep(0.025)

    thread = threading.Thread(target=tick, name="self-test-ticker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def self_test(  # noqa: PLR0913  (two programs and one input)
    plain: Loaded,
    stoppable: Loaded,
    *,
    argv: list[str],
    files: dict[str, bytes],
    arguments: tuple[int, ...] = (),
    reply: Callable[[Request], bytes] = denied,
    seconds: float = TEST_SECONDS,
    yields: int = TEST_CHECKS,
) -> dict[str, Any]:
    """Counts of the comparison; `untested` is true when too few checks were reached to mean much.

    Raises:
        ModuleRefused: `syntax`, `diverged` or `untestable`.
    """
    wanted = len(stoppable.program.signatures[stoppable.main].params)
    arguments = arguments or (0,) * wanted
    if len(arguments) != wanted:
        raise ModuleRefused("untestable", f"{stoppable.main} takes {wanted} arguments")

    def fresh() -> State:
        return State(argv=list(argv), files=dict(files), seed="5a" * 32)

    with ticking(plain.program.engine):
        reference = _plain(plain, fresh(), arguments, reply, seconds)
        _read(reference)
        quiet = _stopped(stoppable, fresh(), arguments, reply, yields=0)
        often = _stopped(stoppable, fresh(), arguments, reply, yields=yields)
    endings = [one.ending for one in (reference, quiet, often)]
    if Trapped("stack", "") in endings and len(set(endings)) > 1:
        # Frames that can be saved are larger, so the end of the stack is met earlier.
        raise ModuleRefused("untestable", "it calls deeper than the stack allows")
    for name, trace in (("without yields", quiet), ("with a yield at every check", often)):
        for what in ("requests", "output", "ending", "memory"):
            if getattr(trace, what) != getattr(reference, what):
                mine, theirs = getattr(trace, what), getattr(reference, what)
                raise ModuleRefused(
                    "diverged", f"{what} differ {name}: {mine!r:.120} against {theirs!r:.120}"
                )
    return {
        "checks": often.yields,
        "moves": often.moves,
        "effects": len(often.requests),
        "untested": often.yields < TEST_FEWEST,
        "ended": _words(reference.ending),
        "said": _last_words(reference),
    }


def _read(trace: _Trace) -> None:
    """Return when a script could be read: the interpreter did something else than complain."""
    only_said = {kind for kind, _ in trace.output} <= {"stderr"} and not trace.requests
    said = _last_words(trace)
    if only_said and "SyntaxError" in said and isinstance(trace.ending, Exited):
        raise ModuleRefused("syntax", said)


def _words(ending: Outcome | None) -> str:
    if isinstance(ending, Exited):
        return f"exited with {ending.code}" if ending.code >= 0 else "was not run to its end"
    return f"trapped ({ending.kind})" if isinstance(ending, Trapped) else "finished"


def _last_words(trace: _Trace) -> str:
    """What a run wrote to standard error, as one line."""
    raw = b"".join(data for kind, data in trace.output if kind == "stderr" and data)
    lines = [line.strip() for line in raw.decode(errors="replace").splitlines()]
    return "; ".join(line for line in lines if line)[:300]


def _plain(
    program: Loaded,
    state: State,
    arguments: tuple[int, ...],
    reply: Callable[[Request], bytes],
    seconds: float,
) -> _Trace:
    trace = _Trace()
    holder: list[Sandbox] = []

    def respond(request: Request) -> bytes:
        trace.requests.append(request.digest)
        answer = reply(request)
        holder[0].state.clock_ns = max(holder[0].state.clock_ns, json.loads(answer)["at"])
        if len(trace.requests) >= TEST_EFFECTS:
            raise _Enough
        return answer

    sandbox = Sandbox(program, state, arguments=arguments, responder=respond)
    holder.append(sandbox)
    sandbox.kill_cpu_us = cpu_us() + round(seconds * 1e6)
    outcome = sandbox.run()
    if len(trace.requests) >= TEST_EFFECTS:
        outcome = Exited(-1)
    elif isinstance(outcome, Trapped) and outcome.kind == "unresponsive":
        raise ModuleRefused(
            "untestable",
            f"it did not end within {seconds} CPU s; give a smaller smoke input",
        )
    return _finish(trace, sandbox, outcome)


class _Enough(Exception):
    """So many effects that the comparison stops."""


def _stopped(
    program: Loaded,
    state: State,
    arguments: tuple[int, ...],
    reply: Callable[[Request], bytes],
    *,
    yields: int,
) -> _Trace:
    trace = _Trace()
    sandbox = Sandbox(program, state, arguments=arguments)
    fuel = program.identity.variant == "fuel"
    answer: bytes | None = None
    while True:
        sandbox.prepare()
        stop = trace.yields < yields
        if fuel:
            sandbox.give_fuel(0 if stop else 1 << 62)
        elif stop:
            sandbox.ask_to_yield()
        sandbox.kill_cpu_us = cpu_us() + TEST_SECONDS * 2_000_000
        at = None if answer is None else json.loads(answer)["at"]
        outcome = sandbox.run(answer, at_ns=at)
        answer = None
        if isinstance(outcome, Waiting):
            trace.requests.append(outcome.request.digest)
            answer = reply(outcome.request)
            if len(trace.requests) >= TEST_EFFECTS:
                outcome = Exited(-1)
                break
        elif isinstance(outcome, Preempted):
            trace.yields += 1
            if trace.yields % TEST_MOVE == 0:
                sandbox = _moved(program, sandbox)
                trace.moves += 1
        else:
            break
    return _finish(trace, sandbox, outcome)


def _moved(program: Loaded, sandbox: Sandbox) -> Sandbox:
    """The guest in a fresh instance, from bytes."""
    key = bytes(32)
    data = encode(sandbox.capture(), key)
    records: list[Record] = sandbox.outbox
    sandbox.close()
    fresh = Sandbox(program, image=restore([decode(data, key)]))
    fresh.outbox = records
    return fresh


def _finish(trace: _Trace, sandbox: Sandbox, outcome: Outcome) -> _Trace:
    trace.output = [(one.kind, one.data) for one in sandbox.outbox]
    ended_by_us = outcome == Exited(-1)
    trace.ending = outcome
    if isinstance(outcome, Trapped):
        # The words of a trap name positions in the code, which instrumentation moves.
        trace.ending = Trapped(outcome.kind, "")
    if not ended_by_us:
        trace.memory = hashlib.blake2b(sandbox.memory(), digest_size=16).hexdigest()
    sandbox.close()
    return trace
