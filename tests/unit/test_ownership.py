"""Nobody else may own our packages; the sentence says who does and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.ownership import PACKAGES, intruder

HOME = Path("/site")


def ours(package):
    return HOME / package


def test_our_own_distribution_may_own_our_packages():
    owners = {package: ["tidegate"] for package in PACKAGES}
    assert intruder(owners, ours, home=HOME) is None


def test_an_editable_checkout_owns_nothing_and_is_fine():
    assert intruder({"yaml": ["PyYAML"]}, ours, home=HOME) is None


@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_package_of_the_same_name_is_named_with_the_cure(package):
    sentence = intruder({package: ["tidegate", "Evil-Scheduler"]}, ours, home=HOME)
    assert sentence is not None
    assert repr(package) in sentence
    assert "pip uninstall Evil-Scheduler" in sentence
    assert "tidegate again" in sentence


def test_a_folder_that_shadows_ours_is_named():
    def shadowed(package):
        return Path("/elsewhere") / package if package == "runtime" else HOME / package

    sentence = intruder({}, shadowed, home=HOME)
    assert sentence is not None
    assert "/elsewhere/runtime" in sentence
    assert "/site/runtime" in sentence


def test_a_missing_package_is_named():
    sentence = intruder(
        {}, lambda package: None if package == "scheduler" else HOME / package, home=HOME
    )
    assert sentence is not None
    assert "'scheduler' is missing" in sentence
