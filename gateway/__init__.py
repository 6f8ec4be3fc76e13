"""Tidegate's gateway: one reverse proxy through which a fleet's model and tool calls flow."""

__version__ = "0.1.0"
