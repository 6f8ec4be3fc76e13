"""What no linter sees: timers, sizes, docstrings of the law, machine paths."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

from tests.architecture.source import ROOMS, ROOT, files, name, tree

MOST_LINES = 600
REASONED = {
    "gateway/policy/models.py": "one table of what a file may say; pydantic has one seat",
    "gateway/simulate/meters.py": "the shapes of meters and the provider that meters with them",
    "gateway/emulator/chat.py": "one dialect of the emulator, request to last event",
    "runtime/instrument/register.py": "one pipeline, bytes to a cached program, step by step",
    "gateway/tokens.py": "vocabulary, cache and threads keep one promise: counting never fails",
    "gateway/telemetry/metrics.py": "one table: every family with its labels and its bound",
}


@pytest.mark.parametrize("path", files(), ids=name)
def test_a_file_states_its_law_first(path):
    module = tree(path)
    if not module.body:
        pytest.fail("an empty module: state what will live here, in a docstring")
    assert ast.get_docstring(module), "the module's docstring is the law of the file"


@pytest.mark.parametrize("path", files(), ids=name)
def test_only_the_clock_arms_timers(path):
    if path.name == "clock.py":
        return
    calls = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in {"call_later", "call_at"}
    ]
    assert not calls, f"{name(path)}: timers belong to clock.py, lines {calls}"


@pytest.mark.parametrize("path", files(), ids=name)
def test_no_module_rebinds_its_globals(path):
    lines = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]
    assert not lines


def test_no_file_outgrows_six_hundred_lines_without_a_reason():
    long = {
        name(path): count
        for path in files()
        if (count := len(path.read_text().splitlines())) > MOST_LINES and name(path) not in REASONED
    }
    assert not long


def test_every_decision_has_a_number_of_its_own_and_links_lead_somewhere():
    pages = sorted((ROOT / "docs" / "adr").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert [one for one in numbers if numbers.count(one) > 1] == []
    link = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
    assert [
        f"{name(page)}: {target}"
        for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
        for target in link.findall(page.read_text())
        if not (page.parent / target).exists()
    ] == []


def test_no_tracked_file_names_a_path_of_somebodys_machine():
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    pattern = re.compile(r"(?<![\w.])/(?:work|root|farm)/\w")
    found = [
        f"{entry}:{number}"
        for entry in tracked
        if entry.endswith((".py", ".md", ".yaml", ".toml", ".json", "Makefile"))
        and (ROOT / entry).exists()
        and entry != name(ROOT / "tests/architecture/test_source.py")
        for number, line in enumerate((ROOT / entry).read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_the_rooms_are_typed_packages():
    assert all((ROOT / room / "py.typed").exists() for room in ROOMS)
