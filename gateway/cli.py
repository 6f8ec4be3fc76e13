"""The `tidegate` command. Each command imports only its own part, so that start stays short."""

from __future__ import annotations


def main() -> None:
    """Entry point."""
