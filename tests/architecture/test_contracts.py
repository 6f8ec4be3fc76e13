"""The import contracts hold, and the purity that contracts alone cannot express."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, files, imports, name

PURE = {
    "__future__", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools",
    "graphlib", "hashlib", "heapq", "itertools", "math", "operator", "re", "struct", "types",
    "typing", "zlib",
}  # fmt: skip
WIRE = PURE | {"base64", "datetime", "email.utils"}
TRIGGERS = PURE | {"datetime"}
CANONICAL = PURE | {"json.encoder"}
ADDRESS = PURE | {"urllib.parse"}
VALUES = {
    "gateway.units", "gateway.errors", "gateway.call", "gateway.snapshot",
    "gateway.admission.profiles", "gateway.admission.core", "scheduler.units",
    "scheduler.errors", "scheduler.canonical", "runtime.errors",
}  # fmt: skip


ACTING = {
    "local.py", "fleet.py", "pipe.py", "shared.py", "script.py", "store.py", "places.py",
}  # fmt: skip
"""Files of admission that hold a clock, a loop, or a signature."""


def pure_files() -> list[Path]:
    listed = [
        *files("gateway/resilience"), *files("gateway/wire"),
        *[path for path in files("gateway/admission") if path.name not in ACTING],
    ]  # fmt: skip
    listed += [
        ROOT / "scheduler" / f"{part}.py"
        for part in (
            "task",
            "mlfq",
            "triggers",
            "merge",
            "dag",
            "saga",
            "effects",
            "approvals",
            "canonical",
        )
    ]
    listed += [ROOT / "runtime/instrument" / f"{part}.py" for part in ("decode", "checks")]
    return [path for path in listed if path.exists()]


@pytest.mark.slow
def test_a_start_does_not_pay_for_the_http_client_that_is_not_asked_for():
    code = "import sys, gateway.app; sys.exit('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.slow
def test_the_import_contracts_hold():
    program = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", pure_files(), ids=name)
def test_a_pure_module_imports_only_what_cannot_act(path):
    room = name(path)
    allowed = WIRE if room.startswith("gateway/wire") else PURE
    if room.endswith("triggers.py"):
        allowed = TRIGGERS
    if room.endswith("canonical.py"):
        allowed = CANONICAL
    if room.endswith("address.py"):
        allowed = ADDRESS
    package = ".".join(path.relative_to(ROOT).parts[:2])
    foreign = {
        module
        for module in imports(path)
        if module not in allowed
        and module not in VALUES
        and not module.startswith(package)
        and not module.startswith(("gateway.wire", "gateway.resilience", "gateway.admission"))
    }
    assert not foreign
