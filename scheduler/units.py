"""Units of this room. Arithmetic on them is integer arithmetic; no clock is read here.

Instants are microseconds on the epoch's axis, so that a deadline written before a restart means the
same after it. `now` always comes in as a parameter.
"""

from __future__ import annotations

from typing import TypeAlias

Micros: TypeAlias = int
"""Microseconds: an instant since the Unix epoch, or a span. Never negative unless stated."""

Tier: TypeAlias = int
"""1 (most urgent) to 3."""

MICRO = 1_000_000
"""Microseconds in a second."""
