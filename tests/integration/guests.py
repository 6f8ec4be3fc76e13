"""An interpreter for a test: from the user's cache, else downloaded and registered once.

Without a package index the test is skipped; with TIDEGATE_REQUIRE_GUESTS, as in CI, it fails.
"""

from __future__ import annotations

import os

import pytest

from loadtests import hops
from runtime.engine import Engine
from runtime.errors import GuestMissing
from runtime.guests.shelf import Guest


def interpreter(name: str, engine: Engine | None = None) -> Guest:
    """The guest of that name, ready to run."""
    try:
        return hops.guest(name, engine or Engine(), hops.cache())
    except GuestMissing as missing:
        if os.environ.get("TIDEGATE_REQUIRE_GUESTS"):
            pytest.fail(f"required here: {missing}")
        pytest.skip(str(missing))
