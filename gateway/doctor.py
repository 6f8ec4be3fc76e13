"""`tidegate doctor`: what this installation can and cannot do here, and how to mend it."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gateway import ownership, serving, settings
from gateway.policy.check import check
from gateway.tokens import Missing, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.settings import Settings

ENCODINGS = ("o200k_base", "cl100k_base")


def examine(chosen: Settings) -> int:
    """Print one line per finding; exit status 1 if anything is broken."""
    broken = False
    for good, line in findings(chosen):
        broken = broken or good is False
        sign = {True: "ok     ", False: "BROKEN ", None: "note   "}[good]
        sys.stdout.write(f"{sign}{line}\n")
    return 1 if broken else 0


def findings(chosen: Settings) -> Iterator[tuple[bool | None, str]]:
    """(True, works), (False, broken), (None, worth knowing)."""
    yield True, f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    stranger = ownership.check()
    yield stranger is None, stranger or "the packages gateway, scheduler, runtime are ours"
    vocabulary = Vocabulary(chosen.vocabulary_dir)
    for encoding in ENCODINGS:
        opened = vocabulary.open(encoding)
        if isinstance(opened, Missing):
            yield None, f"tokens are estimated: {opened.warning}"
        else:
            yield True, f"tokenizer {encoding} is exact"
    limit = serving.raise_file_limit()
    enough = limit >= 20_000
    text = f"{limit} open files allowed (a stream takes two)"
    yield True if enough else None, text
    writable = os.access(existing(chosen), os.W_OK)
    yield writable, f"state folder {chosen.state_dir} is {'' if writable else 'NOT '}writable"
    yield from optional()
    yield from policy_findings(chosen)


def existing(chosen: Settings) -> str:
    """The state folder, or the nearest parent that exists."""
    folder = chosen.state_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return str(folder)


def optional() -> Iterator[tuple[None, str]]:
    """Extras that are not installed."""
    extras = {"wasmtime": "worker (sandboxed agents)", "opentelemetry.sdk": "otel (spans)"}
    for module, what in extras.items():
        try:
            there = find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            yield None, f"extra not installed: {what}"


def policy_findings(chosen: Settings) -> Iterator[tuple[bool, str]]:
    """Whether the policy that `serve` would take is good."""
    path = chosen.policy or settings.default_policy()
    result = check(path, chosen.environment)
    yield result.ok, f"policy {path}: {'good' if result.ok else 'refused'}"
    if not result.ok:
        yield False, result.text()
