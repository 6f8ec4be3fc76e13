"""Faults of this room. Later work."""
