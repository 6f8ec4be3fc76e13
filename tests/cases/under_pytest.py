"""Fault cases as tests: what a session needs is played at once, each test reports one.

Some variants wait for seconds on purpose. Played one by one they would take many minutes; played
side by side in one run they take about as long as the longest. So a fixture plays everything that
was collected, and a test only looks up its own outcome."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.cases import form, setup, skips

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.cases.player import Outcome


def parameters(choose: Callable[[form.Variant], bool]) -> list[Any]:
    """One parameter per variant; those of `skips.py` are skipped with their reason."""
    made = []
    for variant in form.read_all():
        if variant.unit_only or not choose(variant):
            continue
        reason = skips.reason(variant)
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        made.append(pytest.param(variant, id=variant.name, marks=marks))
    return made


def collected(session: pytest.Session, module: str) -> list[form.Variant]:
    """The variants that tests of that module were collected for and that will run."""
    found = {}
    for item in session.items:
        if getattr(getattr(item, "module", None), "__name__", "") != module:
            continue
        variant = getattr(item, "callspec", None) and item.callspec.params.get("variant")
        if isinstance(variant, form.Variant) and item.get_closest_marker("skip") is None:
            found[variant.name] = variant
    return list(found.values())


def play(
    variants: Iterable[form.Variant], *, lanes: int = 1, jobs: int, beside: int = 1
) -> dict[str, Outcome]:
    """Play them in the set-ups they need; outcomes by name."""
    playing = setup.play_setups(variants, lanes=lanes, jobs=jobs, beside=beside)
    return {outcome.variant.name: outcome for outcome in asyncio.run(playing)}


def check(outcomes: dict[str, Outcome], variant: form.Variant) -> None:
    """Fail with every sentence about what did not hold."""
    outcome = outcomes[variant.name]
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    if outcome.problems:
        note = f" ({variant.note})" if variant.note else ""
        pytest.fail(f"{variant.name}{note}\n  " + "\n  ".join(outcome.problems), pytrace=False)
