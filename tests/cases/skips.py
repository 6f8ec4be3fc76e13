"""What cannot be played yet, by kind, each with its reason. Never by a variant's bytes or name.

A reason goes away when the part it names exists; nothing else may hide a failure here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cases.form import Variant

POLICIES = {
    "messages-over-chat": "version 1 does not translate between dialects",
}
"""Set-ups that need a part of later work."""


def reason(variant: Variant) -> str:
    """Why this variant cannot be played yet, or ""."""
    if variant.unit_only:
        return f"a unit test: {variant.unit_only}"
    if variant.policy in POLICIES:
        return POLICIES[variant.policy]
    return ""
